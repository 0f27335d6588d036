"""A recorded world: what the world outside had answered to a run, and what another program asks of it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core.value import Value
from agentfsm.journal.recorded_run import list_closed_calls
from agentfsm.ports.memory_items import Recall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentfsm.core import events as e
    from agentfsm.core.inbox import Input
    from agentfsm.core.messages import ToolCall, ToolResult
    from agentfsm.core.run import Run
    from agentfsm.core.window_layers import WindowDemand
    from agentfsm.journal.recorded_run import RecordedCall, RecordedRun
    from agentfsm.ports.memory_items import RunMemory


@attrs.frozen(kw_only=True)
class SeenCall(Value):
    """A call that reached the recorded world."""

    agent: str
    """Name of the agent that made it."""

    call: ToolCall
    """The call."""

    acts: bool
    """Whether its tool may act."""

    is_recorded: bool
    """Whether the record has the call."""

    is_live: bool = False
    """Whether it was made: it only reads."""


@attrs.define(eq=False, repr=False, kw_only=True)
class Evidence:
    """The record of a run and of the agents below, and what a run of another program has asked of it."""

    record: RecordedRun | None
    """The record; None for a world of results only."""

    results: dict[tuple[str, str], list[RecordedCall]] = attrs.field(init=False, factory=lambda: defaultdict(list))
    """All calls of the record that have an answer, by tool and arguments."""

    acting: set[str] = attrs.field(init=False, factory=set)
    """Names of tools that have acted in the record."""

    taken: set[int] = attrs.field(init=False, factory=set)
    """Calls of the record that were taken, by `id`."""

    seen: dict[tuple[str, str], SeenCall] = attrs.field(init=False, factory=dict)
    """Calls that reached the recorded world, by run and call."""

    unrecalled: int = 0
    """Number of searches of the memory that the record does not have."""

    def __attrs_post_init__(self) -> None:
        if self.record is not None:
            self.add(self.record.iter_calls())

    def add(self, calls: Iterable[RecordedCall]) -> None:
        """Add calls to those that are answered."""
        for each in calls:
            if each.has_acted:
                self.acting.add(each.call.name)
            if not each.is_refused:
                self.results[each.call.name, each.call.canonical].append(each)


@attrs.define(eq=False, repr=False, kw_only=True)
class RecordedWorld:
    """The world outside of one run, from a record."""

    evidence: Evidence
    record: RecordedRun | None
    """The recorded run that this one repeats; None if the record has no such run."""

    reads_live: bool = False
    """Whether calls that the record does not have are made if their tool only reads."""

    _matches: dict[tuple[str, str], RecordedCall | None] = attrs.field(factory=dict, init=False)
    """Recorded calls by the runs and the ids of the calls that they answer."""

    _inputs: list[tuple[int, Input]] = attrs.field(
        default=attrs.Factory(lambda world: [] if world.record is None else [*world.record.inputs], takes_self=True),
        init=False,
    )

    @property
    def unread_inputs(self) -> int:
        """Number of recorded inputs that have not arrived."""
        return len(self._inputs)

    def enter(self, run_id: str, call_id: str) -> RecordedWorld:
        """Return the world of the run of an agent that a call of a run calls."""
        match = self._matches.get((run_id, call_id))
        below = None if match is None else match.below
        return RecordedWorld(evidence=self.evidence, record=below, reads_live=self.reads_live)

    def cut_off(self, memory: RunMemory | None) -> dict[str, Any]:
        """Return the fields of a variant of an agent that changes, asks and tells nothing outside of its runs.

        Only such a variant may be executed in this world, since an agent keeps its line of deciders.

        Args:
            memory: The memory of the agent.
        """
        found = () if self.record is None else self.record.recalled
        recorded = None if memory is None else _RecordedMemory(memory, found, self.evidence)
        return {"spend": (), "answer_cache": None, "watch": (), "memory": recorded}

    def take(self, run: Run, call: ToolCall, *, only_once: bool) -> RecordedCall | None:
        """Return the recorded call that answers a call; None if there is none.

        Args:
            run: The run that makes the call.
            call: The call.
            only_once: Whether a recorded call is taken once; else the last one is taken again.
        """
        if not self._matches:  # calls that the run has made before this execution, or has taken over by a fork
            for each in list_closed_calls(run):
                self._matches[run.id, each.id] = self._find(each, only_once=True)
        if (run.id, call.id) not in self._matches:
            self._matches[run.id, call.id] = self._find(call, only_once=only_once)
        return self._matches[run.id, call.id]

    def _find(self, call: ToolCall, *, only_once: bool) -> RecordedCall | None:
        everywhere = self.evidence.results.get((call.name, call.canonical), [])
        own = () if self.record is None else self.record.calls
        for pool in ([each for each in everywhere if each in own], everywhere):
            new = [each for each in pool if id(each) not in self.evidence.taken]
            if new or (pool and not only_once):
                found = (new or pool[-1:])[0]
                self.evidence.taken.add(id(found))
                return found
        return None

    def find_stand_in(self, name: str) -> ToolResult | None:
        """Return the result of another call of a tool that may act, the last one in the record; None if it has none."""
        own = () if self.record is None else self.record.calls
        return next((each.result for each in reversed(own) if each.call.name == name and each.is_answered), None)

    def skip_inputs(self, at: int) -> None:
        """Leave out the inputs that the run has already, because it begins with so many turns of the record."""
        self._inputs = [each for each in self._inputs if each[0] > at]

    def has_input(self, run: Run) -> bool:
        """Return whether an input had arrived by this turn of the recorded run that was not taken yet."""
        return any(turn <= run.turn for turn, _each in self._inputs)

    def take_inputs(self, run: Run) -> tuple[Input, ...]:
        """Return the inputs that had arrived by this turn of the recorded run, each once."""
        due = tuple([each for turn, each in self._inputs if turn <= run.turn])
        self._inputs = [each for each in self._inputs if each[0] > run.turn]
        return due


@attrs.frozen
class _RecordedMemory(Value):
    """A memory that finds what the recorded run has found, and reads nothing else."""

    memory: RunMemory
    recalled: tuple[e.Recalled, ...]
    evidence: Evidence

    def wants(self, run: Run) -> bool:
        return self.memory.wants(run)

    async def recall_for(self, run: Run, query: str, demand: WindowDemand) -> Recall:  # noqa: ARG002  the record has its own
        found = next((each for each in self.recalled if query.startswith(each.query)), None)
        if found is None:
            self.evidence.unrecalled += 1
            return Recall()
        return Recall(items=found.items, fault=found.fault, left_out=found.left_out, profile=found.profile)
