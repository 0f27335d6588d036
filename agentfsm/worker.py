"""A worker: drives whatever can be moved on, for as long as it lives.

Any number of workers may share a store. Each run is driven by one of them at a time, since a lease is; when a worker
dies, its runs are due again as soon as its leases end.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm.core.errors import AgentError, LeaseHeldError, StoreError, first_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentfsm.agent import Agent
    from agentfsm.core.run import Run

_log = logging.getLogger("agentfsm.worker")

# Seconds that a run rests which could not be driven, doubled each time.
REST_S: Final = 1.0
# The longest rest: somebody may have mended what was wrong.
MAX_REST_S: Final = 300.0
# Runs of which that is remembered; the oldest are forgotten, and tried again early.
RESTING: Final = 10_000


@attrs.define(eq=False, repr=False, kw_only=True)
class Worker:
    """Drives the runs of one agent; `Agent.worker` is `work` of one of these."""

    agent: Agent[Any]
    drive: Callable[[str, Any], Awaitable[Run[Any]]]
    # Drives a run by its id, with the dependencies.
    deps: Any
    parallel: int
    poll_s: float
    _busy: set[str] = attrs.field(factory=set, init=False)
    _resting: dict[str, tuple[float, float, bool]] = attrs.field(factory=dict, init=False)
    # By run: when it is tried again (monotonic seconds), how long it rests, and whether that is for a failure.
    _freed: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    # Set when a drive has ended.

    @property
    def failed(self) -> int:
        """How many runs could not be driven, and are given up for now."""
        return sum(has_failed for _, _, has_failed in self._resting.values())

    def look(self) -> None:
        """Look at once for what is due: something was put into the store."""
        self._freed.set()

    async def work(self, *, until_idle: bool) -> None:
        """Drive what is due, until cancelled; or until nothing is."""
        try:
            await self._work(until_idle=until_idle)
        except BaseExceptionGroup as group:  # somebody at the keyboard: trio wraps it
            raise first_error(group) from None

    async def _work(self, *, until_idle: bool) -> None:
        async with anyio.create_task_group() as drives:
            while True:
                self._freed = anyio.Event()
                chosen = await self._due()
                for run_id in chosen or ():
                    self._busy.add(run_id)
                    drives.start_soon(self._serve, run_id)
                if until_idle and chosen is not None and not self._busy:
                    return
                if not chosen or len(self._busy) >= self.parallel:
                    with anyio.move_on_after(self.poll_s):
                        await self._freed.wait()

    async def _due(self) -> list[str] | None:
        """Return runs to drive, as many as there is room for; None where the store cannot be asked."""
        room, now = self.parallel - len(self._busy), self.agent.clock.monotonic()
        if room <= 0:
            return []
        resting = {run_id for run_id, (until, *_) in self._resting.items() if until > now}
        try:
            due = await self.agent.store.due(self.agent.name, limit=room + len(resting) + len(self._busy))
        except StoreError as error:  # it may be back soon, and nothing is lost while it is not
            _log.warning("the store cannot be asked what is due, and is asked again: %s", error)
            return None
        return [run_id for run_id in due if run_id not in resting | self._busy][:room]

    async def _serve(self, run_id: str) -> None:
        """Drive one run; whatever goes wrong with it, the worker lives on for the others."""
        moved = has_failed = False
        try:
            before = await self.agent.load(run_id)
            after = await self.drive(run_id, await self._deps_of(before))
            moved = after.version > before.version
        except LeaseHeldError:
            moved = True  # somebody else was first
        except AgentError as error:
            has_failed = True
            _log.warning("run %s was not driven: %s", run_id, error)
        except Exception:  # noqa: BLE001  a fault in what the user brought along must not stop the other runs
            has_failed = True
            _log.exception("run %s was not driven", run_id)
        finally:
            self._busy.discard(run_id)
            self._rest(run_id, moved=moved, has_failed=has_failed)
            self._freed.set()

    async def _deps_of(self, run: Run) -> Any:
        made = self.deps(run) if callable(self.deps) else self.deps
        return await made if isinstance(made, Awaitable) else made

    def _rest(self, run_id: str, *, moved: bool, has_failed: bool) -> None:
        """Let a run that did not move rest for a while, longer each time."""
        _, last_s, _ = self._resting.pop(run_id, (0.0, 0.0, False))
        if moved:
            return
        rest_s = min(max(REST_S, last_s * 2), MAX_REST_S) * random.uniform(1.0, 1.5)  # noqa: S311  spreads
        self._resting[run_id] = self.agent.clock.monotonic() + rest_s, rest_s, has_failed
        if len(self._resting) > RESTING:
            del self._resting[next(iter(self._resting))]
