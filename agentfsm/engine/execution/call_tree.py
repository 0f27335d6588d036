"""The calls of a run and of the runs around it, for rules over time: above it, below it, and those it continues.

A run that this process executes is read as it is now. All others are loaded from their journals once, when the first
call of an execution is decided on: runs above one that is resumed by itself, and runs of sub-agents that have ended. Of
runs that other processes execute meanwhile, what they do after that is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import attrs

from agentfsm.core.call_facts import iterate_closed_calls
from agentfsm.core.errors import RunNotFoundError
from agentfsm.core.labels import ToolKind
from agentfsm.core.run_ids import child_run_id
from agentfsm.journal.load import load_run, read_header
from agentfsm.ports.call_history import CallHistory, CallRecorder
from agentfsm.ports.store import Filter

if TYPE_CHECKING:
    from agentfsm.core.events import GuardVerdict
    from agentfsm.core.run import Run
    from agentfsm.ports.store import Store

# Limit of a query for the runs of sub-agents: more than any run has.
_MAX_CHILDREN: Final = 1_000_000


class RunSource(Protocol):
    """The source of a run's latest state, such as a journal."""

    @property
    def run(self) -> Run:
        """Latest state of the run."""
        ...


@attrs.define(eq=False, repr=False)
class CallTree:
    """The calls of a run at the root and of all runs below it, as far as this process knows them."""

    recorder: CallRecorder = attrs.field(factory=CallRecorder)
    sources: dict[str, RunSource] = attrs.field(factory=dict)
    """Runs that this process executes, by id."""

    _loaded: set[str] = attrs.field(factory=set)
    """Ids of the runs below which all runs are known."""

    def view(
        self, run: Run, call_id: str = "", *, now: float, decided: Iterable[tuple[str, GuardVerdict]] = ()
    ) -> CallHistory:
        """Return the history before a call of a run, or before its end, as `CallRecorder.view`."""
        for key, source in [*self.sources.items()]:
            self.recorder.note(source.run)
            if source.run.is_over:
                del self.sources[key]
        return self.recorder.view(run, call_id, now=now, decided=decided)

    async def add(self, store: Store, source: RunSource, above: Sequence[RunSource]) -> None:
        """Add a run that is executed here, with the runs around it.

        Args:
            store: Store of the runs.
            source: The run.
            above: The runs above it that are executed here, the nearest first.
        """
        known = self.sources.get(source.run.id)
        self.sources[source.run.id] = source
        if known is source:
            return
        for each in above:
            self.sources.setdefault(each.run.id, each)
        top: Run = (above[-1] if above else source).run
        while top.header.parent is not None:
            try:
                top = await load_run(store, top.header.parent)
            except RunNotFoundError:
                break
            self.recorder.note(top)
            await self._load_below(store, top)
        for each in [*self.sources.values()]:
            await self._load_below(store, each.run)

    async def _load_below(self, store: Store, run: Run) -> None:
        """Note all runs below one that are not executed here."""
        if run.id in self._loaded:
            return
        self._loaded.add(run.id)
        for parent, call_ids in await _list_callers(store, run):
            for row in await store.runs(Filter(parent=parent), limit=_MAX_CHILDREN):
                is_known = row.id in self.sources or row.id in self._loaded
                if is_known or (call_ids is not None and row.id not in call_ids):
                    continue
                below = await load_run(store, row.id)
                self.recorder.note(below)
                await self._load_below(store, below)


async def _list_callers(store: Store, run: Run) -> list[tuple[str, set[str] | None]]:
    """Return the ids under which a run may have called agents: its own, and those of runs that it continues or copies.

    With the id of a run that was forked come the ids of the runs below it that the fork knows.
    """
    called = [fact for fact in iterate_closed_calls(run) if fact.is_agent]
    is_calling = any(entry.kind is ToolKind.AGENT for entry in run.open) or run.plan is not None or run.background
    found: list[tuple[str, set[str] | None]] = []
    if is_calling or called:
        found.append((run.id, None))
    header = run.header
    while called and (earlier := header.forked_from or header.after) is not None:
        ids = {str(child_run_id(earlier, fact.call_id)) for fact in called} if header.forked_from else None
        found.append((earlier, ids))
        try:
            header = await read_header(store, earlier)
        except RunNotFoundError:
            break
    return found
