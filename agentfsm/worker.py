"""A worker: drives whatever can be moved on, for as long as it lives.

Any number of workers may share a store. Each run is driven by one of them at a time, since a lease is; when a worker
dies, its runs are due again as soon as its leases end.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm._concurrency import make_waker
from agentfsm._runnable_agent import RunnableAgent
from agentfsm.core.errors import AgentError, StoreError, first_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentfsm.core.run import Run
    from agentfsm.ports.store import Lease

_log = logging.getLogger("agentfsm.worker")

# Seconds that a run rests which could not be driven, doubled each time.
BACKOFF_S: Final = 1.0
# The longest rest: somebody may have mended what was wrong.
MAX_BACKOFF_S: Final = 300.0
# Runs whose rest is remembered, so that the next is longer.
MAX_BACKOFF_RUNS: Final = 10_000


@attrs.define(eq=False, repr=False, kw_only=True)
class Worker:
    """Drives the runs of one agent; `Agent.worker` is `work` of one of these."""

    agent: RunnableAgent
    execute: Callable[..., Awaitable[Run[Any]]]
    """`Driver.drive`."""

    deps: Any
    parallel: int
    poll_s: float
    _busy: set[str] = attrs.field(factory=set, init=False)
    _suspects: set[str] = attrs.field(factory=set, init=False)
    """Those of them that may be what their owners died of: nothing else is begun before each has finished a turn."""

    _has_suspects: bool = attrs.field(default=False, init=False)
    """Whether there are more of these: then nothing else is begun before this worker is free for them."""

    _backoffs: dict[str, tuple[float, bool]] = attrs.field(factory=dict, init=False)
    """By run that did not move: how long it rests, seconds, and whether that is for a failure."""

    _changed: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    """Set when a drive has ended, or something in the store has changed."""

    @property
    def failed_count(self) -> int:
        """How many runs could not be driven, and are given up for now."""
        return sum(has_failed for _, has_failed in self._backoffs.values())

    def wake(self) -> None:
        """Look at once for what is due: something was put into the store."""
        self._changed.set()

    async def run(self, *, until_idle: bool) -> None:
        """Drive what is due, until cancelled; or until nothing is."""
        try:
            await self._run(until_idle=until_idle)
        except BaseExceptionGroup as group:  # somebody at the keyboard: trio wraps it
            raise first_error(group) from None

    async def _run(self, *, until_idle: bool) -> None:
        unsubscribe = self.agent.store.subscribe(f"agent:{self.agent.name}", make_waker(self.wake))
        try:
            async with anyio.create_task_group() as drives:
                while True:
                    self._changed = anyio.Event()
                    leases = await self._claim()
                    for lease in leases or ():
                        self._busy.add(lease.run_id)
                        drives.start_soon(self._execute_safely, lease)
                    is_idle = leases is not None and not self._busy and not self._has_suspects
                    if until_idle and is_idle:
                        return
                    if leases is None or self._busy or not self._has_suspects:
                        with anyio.move_on_after(self.poll_s):
                            await self._changed.wait()
        finally:
            unsubscribe()

    async def _claim(self) -> Sequence[Lease] | None:
        """Take leases of runs, as many as there is room for; None where the store cannot be asked."""
        if self._suspects or len(self._busy) >= self.parallel:
            return ()
        alone = self._has_suspects and not self._busy
        room = self.parallel - len(self._busy)
        claim_of = partial(self.agent.store.claim, self.agent.name, durability=self.agent.driver.durability)
        try:
            if self._has_suspects and self._busy:
                self._has_suspects = (await claim_of(limit=0)).has_suspects  # another worker may have had them
                if self._has_suspects:
                    return ()
            claim = await claim_of(limit=room, suspects=alone)
        except StoreError as error:  # it may be back soon, and nothing is lost while it is not
            _log.warning("the store cannot be asked for runs, and is asked again: %s", error)
            return None
        if alone and claim.leases:
            ids = ", ".join(lease.run_id for lease in claim.leases)
            _log.warning("workers died of one of these runs, which are now driven apart from all others: %s", ids)
            self._suspects.update(lease.run_id for lease in claim.leases)
        self._has_suspects = claim.has_suspects and not alone
        return claim.leases

    async def _execute_safely(self, lease: Lease) -> None:
        """Drive one run; whatever goes wrong with it, the worker lives on for the others."""
        run_id, has_failed = lease.run_id, False
        rest_s, _ = self._backoffs.pop(run_id, (0.0, False))
        rest_s = min(max(BACKOFF_S, rest_s * 2), MAX_BACKOFF_S)
        lease.backoff_s = rest_s * random.uniform(1.0, 1.5)  # noqa: S311  spreads
        lease.backoff_inbox_head = lease.inbox_head
        try:
            await self._execute(lease)
        except AgentError as error:
            has_failed = True
            _log.warning("run %s was not driven: %s", run_id, error)
        except Exception:  # noqa: BLE001  a fault in what the user brought along must not stop the other runs
            has_failed = True
            _log.exception("run %s was not driven", run_id)
        finally:
            self._busy.discard(run_id)
            self._suspects.discard(run_id)
            if lease.backoff_s:
                self._backoffs[run_id] = rest_s, has_failed
                if len(self._backoffs) > MAX_BACKOFF_RUNS:
                    del self._backoffs[next(iter(self._backoffs))]
            self._changed.set()

    async def _execute(self, lease: Lease) -> None:
        try:
            run = await self.agent.load(lease.run_id)
            deps = await self._resolve_deps(run)
            turn = run.turn

            def see(run: Run) -> None:
                lease.backoff_s = 0.0  # it moves
                if run.turn > turn and lease.run_id in self._suspects:
                    self._suspects.discard(lease.run_id)
                    self._changed.set()

            await self.execute(run, deps, lease=lease, on_run=see)
        except BaseException:
            self.agent.store.release(lease)
            raise

    async def _resolve_deps(self, run: Run) -> Any:
        made = self.deps(run) if callable(self.deps) else self.deps
        return await made if isinstance(made, Awaitable) else made
