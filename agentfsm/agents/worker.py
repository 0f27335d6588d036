"""Worker: executes the runs of an agent that are ready, until it is drained or cancelled.

Any number of workers may share a store. The lease of a run ensures that one worker executes it at a time. When a worker
dies, its runs are ready again as soon as its leases expire.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import attrs

from agentfsm._lib.concurrency import make_waker
from agentfsm._lib.newest import Newest
from agentfsm.agents.runnable_agent import RunnableAgent
from agentfsm.core.errors import (
    AgentError,
    ConflictError,
    IncompatibleProgramError,
    MisuseError,
    RunNotFoundError,
    StoreError,
    TooNewError,
    first_error,
)
from agentfsm.core.header import FORMAT
from agentfsm.engine.execution.drain import Drain
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.ports.store import Filter
from agentfsm.stores.rules import next_expiry
from agentfsm.tools.queue.result_text import describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from anyio.abc import TaskGroup, TaskStatus

    from agentfsm.core.run import Run
    from agentfsm.ports.store import Lease

_log = logging.getLogger("agentfsm.worker")

# Seconds before a run that made no progress is tried again, doubled each time.
BACKOFF_S: Final = 1.0
# The longest delay in seconds, after which the cause may have been fixed.
MAX_BACKOFF_S: Final = 300.0
# Seconds that a run rests that a program has refused, or for a step of which it has no tool. No other rest is as long,
# so that workers recognise these runs, and take those up early that they have not tried.
REFUSED_REST_S: Final = 1_800.0
# Minimum of seconds between two looks for such runs, and the maximum of runs that a look examines.
REFUSED_LOOK_S: Final = 5.0
REFUSED_EXAMINED: Final = 1_000
# Seconds for which a worker relies on others that start the runs whose time has come: they may have been killed.
STAND_BY_S: Final = 30.0
# A rest is extended by up to this factor, so that runs are not retried all at once.
REST_SPREAD: Final = 1.5
# Maximum of runs that a line of the log names.
MAX_NAMED_RUNS: Final = 20
# Maximum of runs whose delay is remembered, so that the next delay is longer.
MAX_BACKOFF_RUNS: Final = 10_000


class RunStarter(Protocol):
    """Protocol of what starts runs at their times, which a worker asks before it looks for runs."""

    @property
    def wait_s(self) -> float:
        """Seconds until it has to be asked again, 0 or more."""
        ...

    async def create(self) -> None:
        """Create the runs that are due. Errors are logged, and do not stop the worker."""
        ...


@attrs.define(eq=False, repr=False, kw_only=True)
class Worker:
    """Executes the runs of one agent; implements `Agent.worker`."""

    agent: RunnableAgent
    execute: Callable[[Run[Any], ExecutionOptions], Awaitable[Run[Any]]]
    """`Driver.run_until_blocked` of the agent."""

    deps: Any
    """Dependencies of every run, or a function, plain or async, that takes the run and returns them."""

    parallel: int
    """Maximum number of runs executed at once."""

    poll_s: float
    """Seconds between two polls of the store."""

    drain_s: float = 0.0
    """Seconds that model requests and calls in flight have to end when the worker stops, 0 or more. Default 0: a
    cancellation cuts them off.
    """

    releases: Collection[str] = attrs.field(
        default=attrs.Factory(lambda own: (own.agent.version,) if own.agent.version else (), takes_self=True)
    )
    """Releases that this worker has; by default the version of its agent. It leaves the runs of others to other
    workers, and executes those without a release.
    """

    starter: RunStarter | None = None
    """Starts the runs whose time has come, such as those of schedules; None: this worker starts none."""

    _busy: set[str] = attrs.field(factory=set, init=False)
    """Ids of the runs in execution."""

    _suspects: set[str] = attrs.field(factory=set, init=False)
    """Ids of the busy runs that may have crashed their workers. No other run is begun before each finishes a turn."""

    _has_suspects: bool = attrs.field(default=False, init=False)
    """Whether the store has more suspects. If so, no other run is begun, so that this worker becomes free for them."""

    _backoffs: Newest[str, tuple[float, str, float]] = attrs.field(factory=lambda: Newest(MAX_BACKOFF_RUNS), init=False)
    """By id of a run that made no progress: the delay in seconds, the error of the execution or "", and the time of
    the event loop until which this worker leaves it.
    """

    _next_look: float = attrs.field(default=0.0, init=False)
    """Time of the event loop from which on this worker looks for runs that others have refused."""

    _stands_by: bool = attrs.field(default=False, init=False)
    """Whether other workers start the runs whose time has come."""

    _start_by: float = attrs.field(default=0.0, init=False)
    """Time of the event loop from which on this worker starts them all the same."""

    _has_reported_newer: bool = attrs.field(default=False, init=False)
    """Whether it was logged that runs are left to a newer agentfsm."""

    _reported_releases: set[str] = attrs.field(factory=set, init=False)
    """Releases of which it was logged that their runs are left to other workers."""

    _drains: dict[str, Drain] = attrs.field(factory=dict, init=False)
    """Drains of the runs in execution, by run id."""

    _executions: anyio.CancelScope | None = attrs.field(default=None, init=False)
    """Scope around all executions; None before `run`."""

    _has_stopped: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    """Set when no further run is claimed."""

    _ends_idle: bool = attrs.field(default=False, init=False)
    """Whether the worker ends once no run is ready."""

    is_draining: bool = attrs.field(default=False, init=False)
    """Whether the worker claims no further run, and ends each of its runs as soon as none of its effects is in flight.
    """

    is_cut_off: bool = attrs.field(default=False, init=False)
    """Whether the drain was ended before its time."""

    cut_off: list[str] = attrs.field(factory=list, init=False)
    """Ids of the runs whose effects in flight were cut off at the end of the drain."""

    _changed: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    """Set when there may be a run to claim: the store has new work, or an execution has ended that kept others away."""

    @property
    def failed_count(self) -> int:
        """Number of runs whose last execution failed."""
        return sum(bool(error) for _, error, _ in self._backoffs.values())

    def find_failure(self, run_id: str) -> str:
        """Return the error of the last execution of a run here; empty if it has not failed, or goes on."""
        return self._backoffs.get(run_id, (0.0, "", 0.0))[1]

    def wake(self) -> None:
        """Poll the store now."""
        self._changed.set()

    def drain(self) -> None:
        """Claim no further run, and release each run once none of its model requests and calls is in flight.

        `run` then returns, after `drain_s` at the latest.
        """
        if self.is_draining:
            return
        self.is_draining = True
        if self._executions is not None:
            self._executions.deadline = anyio.current_time() + self.drain_s
        for each in tuple(self._drains.values()):
            each.begin()
        self.wake()

    def end_drain(self) -> None:
        """Cut off the effects in flight now."""
        self.is_cut_off = True
        if self._executions is not None:
            self._executions.cancel()

    def report_cut_off(self) -> None:
        """Log the runs whose effects in flight were cut off at the end of the drain, in one line."""
        if self.cut_off:
            _log.warning(
                "the drain is over, and runs were cut off within a step (%d): %s; any worker continues them, and a "
                "call whose outcome is unknown follows its on_unknown",
                len(self.cut_off),
                ", ".join(sorted(self.cut_off)[:MAX_NAMED_RUNS]) + (", ..." if self.cut_off[MAX_NAMED_RUNS:] else ""),
            )

    async def run(self, *, until_idle: bool) -> None:
        """Execute the runs that are ready, until drained, cancelled or, with `until_idle`, until no run is ready.

        With `drain_s` above 0, a cancellation drains the worker first. `end_drain` shortens that.
        """
        self._ends_idle = until_idle
        try:
            await self._run(until_idle=until_idle)
        except BaseExceptionGroup as group:  # trio wraps a KeyboardInterrupt
            raise first_error(group) from None
        finally:
            self.report_cut_off()

    async def _run(self, *, until_idle: bool) -> None:
        unsubscribe = self.agent.store.subscribe(f"agent:{self.agent.name}", make_waker(self.wake))
        try:
            async with anyio.create_task_group() as tasks:
                executions = await tasks.start(self._hold_executions)
                try:
                    await self._execute_ready(executions, until_idle=until_idle)
                except BaseException:
                    self.drain()
                    raise
                finally:
                    unsubscribe()  # before the drain: the store is to wake others
                    self._has_stopped.set()
        finally:
            unsubscribe()

    async def _hold_executions(self, *, task_status: TaskStatus[TaskGroup]) -> None:
        """Hold the task group of the executions. A cancellation of the worker does not reach them during a drain."""
        with anyio.CancelScope(shield=self.drain_s > 0) as self._executions:
            async with anyio.create_task_group() as executions:
                task_status.started(executions)
                await self._has_stopped.wait()

    async def _execute_ready(self, executions: TaskGroup, *, until_idle: bool) -> None:
        while not self.is_draining:
            self._changed = anyio.Event()
            await self._start_due()
            leases = await self._claim()
            self._begin(executions, leases or ())
            if leases is not None and not self.is_draining:
                self._begin(executions, await self._claim_refused())
            is_idle = leases is not None and not self._busy and not self._has_suspects
            if self.is_draining or (until_idle and is_idle):
                return
            if leases is None or self._busy or not self._has_suspects:
                starter = None if self._stands_by else self.starter
                with anyio.move_on_after(min(self.poll_s, math.inf if starter is None else starter.wait_s)):
                    await self._changed.wait()

    async def _start_due(self) -> None:
        """Start the runs whose time has come, unless other workers do."""
        now = anyio.current_time()
        if self.starter is not None and not (self._stands_by and now < self._start_by):
            self._start_by = now + STAND_BY_S
            await self.starter.create()

    def _begin(self, executions: TaskGroup, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self._busy.add(lease.run_id)
            executions.start_soon(self.execute_safely, lease)

    async def _claim(self) -> Sequence[Lease] | None:
        """Take the leases of ready runs, up to `parallel` runs in all. Return None if the store fails."""
        if self._suspects or len(self._busy) >= self.parallel:
            self._stands_by = False  # it does not hear when the others are as busy
            return ()
        alone = self._has_suspects and not self._busy
        room = self.parallel - len(self._busy)
        claim_runs = partial(
            self.agent.store.claim,
            self.agent.name,
            durability=self.agent.driver.durability,
            releases=self.releases,
        )
        try:
            if self._has_suspects and self._busy:
                self._has_suspects = (await claim_runs(limit=0)).has_suspects  # another worker may have taken them
                if self._has_suspects:
                    return ()
            claim = await claim_runs(limit=room, suspects=alone)
        except StoreError as error:  # it may recover; the journals are safe meanwhile
            self._stands_by = False
            _log.warning("the store failed to return runs, and is polled again: %s", error)
            return None
        if claim.has_newer:
            self.report_newer()
        if claim.other_release:
            self.report_release(claim.other_release)
        if alone and claim.leases:
            ids = ", ".join(lease.run_id for lease in claim.leases)
            _log.warning("one of these runs may have crashed its workers; they are executed apart from others: %s", ids)
            self._suspects.update(lease.run_id for lease in claim.leases)
        self._has_suspects, self._stands_by = claim.has_suspects and not alone, claim.stands_by
        return claim.leases

    async def _claim_refused(self) -> Sequence[Lease]:
        """Take the leases of runs that rest because a program has refused them, and which this one may continue."""
        begun, room = anyio.current_time(), self.parallel - len(self._busy)
        if room <= 0 or begun < self._next_look or self._has_suspects or self._suspects:
            return ()
        self._next_look = begun + max(self.poll_s, REFUSED_LOOK_S)
        store, tried = self.agent.store, 0
        leases: list[Lease] = []
        try:
            now = await store.now()
            where = Filter(agent=self.agent.name, ready_by=now + REST_SPREAD * REFUSED_REST_S, purpose="")
            for each in await store.runs(where, limit=REFUSED_EXAMINED):
                _, _, until = self._backoffs.get(each.id, (0.0, "", 0.0))
                is_resting = each.ready_at is not None and each.ready_at - now > REST_SPREAD * MAX_BACKOFF_S
                is_ours = each.release in {"", *self.releases} and not each.is_too_new
                if begun < until or not (is_resting and is_ours) or each.crashes > 1:
                    continue
                if each.waiting and next_expiry(await self.agent.load(each.id)) == each.ready_at:  # a deadline
                    self._put_backoff(each.id, 0.0, until=begun + MAX_BACKOFF_S)
                else:
                    with suppress(ConflictError, RunNotFoundError, TooNewError):  # another worker was faster
                        leases.append(await store.lease(each.id, durability=self.agent.driver.durability))
                tried += 1
                if tried == room:
                    break
        except StoreError as error:  # the next look comes
            _log.warning("the store failed to return the runs that were refused: %s", error)
        return leases

    def _put_backoff(self, run_id: str, rest_s: float, *, error: str = "", until: float) -> None:
        """Remember a run without progress, so that the next delay is longer."""
        self._backoffs[run_id] = rest_s, error, until

    def report_newer(self) -> None:
        """Log that runs are left to workers of a newer agentfsm, once."""
        if not self._has_reported_newer:
            self._has_reported_newer = True
            _log.warning(
                "runs of agent %r are ready whose records a newer agentfsm has written, and this worker reads up to "
                "format %d: it leaves them to workers of that version; `agentfsm runs --stranded` shows those that "
                "none of them takes",
                self.agent.name,
                FORMAT,
            )

    def report_release(self, release: str) -> None:
        """Log that the runs of a release are left to workers that have it, once for each release."""
        if release not in self._reported_releases:
            self._reported_releases.add(release)
            _log.warning(
                "runs of agent %r are ready that were begun with release %r, and this worker has %s: it leaves them to "
                "workers that have that release; `agentfsm runs --stranded` shows those that none of them takes",
                self.agent.name,
                release,
                ", ".join(map(repr, self.releases)) or "no release (its agent has no version)",
            )

    async def execute_safely(self, lease: Lease) -> Run[Any] | None:
        """Execute one run, and return it; None after an error, which is logged and does not stop other runs."""
        run_id, failure = lease.run_id, ""
        rest_s, _, _ = self._backoffs.pop(run_id, (0.0, "", 0.0))
        rest_s = min(max(BACKOFF_S, rest_s * 2), MAX_BACKOFF_S)
        spread = random.uniform(1.0, REST_SPREAD)  # noqa: S311  so that runs are not retried all at once
        lease.backoff_s = rest_s * spread
        if self._executions is not None:  # else the runs are handed to this worker, which does not look for them
            lease.refusal_backoff_s = REFUSED_REST_S * spread
        lease.backoff_inbox_head = lease.inbox_head
        try:
            if self.drain_s <= 0:
                return await self._execute(lease)
            with anyio.CancelScope() as scope:
                return await self._execute_with_drain(lease, Drain(scope))
        except AgentError as error:
            failure = describe_error(error)
            _log.warning("run %s was not executed: %s", run_id, error)
        except Exception as error:  # noqa: BLE001  an error in the user's code must not stop the other runs
            failure = describe_error(error)
            _log.exception("run %s was not executed", run_id)
        finally:
            kept_others_away = len(self._busy) >= self.parallel or bool(self._suspects) or self._has_suspects
            self._busy.discard(run_id)
            self._suspects.discard(run_id)
            if lease.backoff_s:
                until = anyio.current_time() + rest_s * spread
                self._put_backoff(run_id, rest_s, error=failure, until=until)
            if kept_others_away or self._ends_idle:  # else the last claim left nothing, and the store tells what is new
                self._changed.set()
        return None

    async def _execute_with_drain(self, lease: Lease, drain: Drain) -> Run[Any]:
        self._drains[lease.run_id] = drain
        if self.is_draining:
            drain.begin()
        try:
            return await self._execute(lease, drain)
        except BaseException:
            if self.is_cut_off or (self._executions is not None and self._executions.cancel_called):
                self.cut_off.append(lease.run_id)
            raise
        finally:
            if self._drains.get(lease.run_id) is drain:  # a run that was released may have begun again already
                del self._drains[lease.run_id]

    async def _execute(self, lease: Lease, drain: Drain | None = None) -> Run[Any]:
        try:
            run = await self.agent.load(lease.run_id)
            release = run.header.release
            if release and release not in self.releases:
                has = ", ".join(map(repr, self.releases)) or "no release"
                raise MisuseError(  # noqa: TRY301  the lease is released as after any error
                    f"it belongs to release {release!r}, and this worker has {has}: separate their queues"
                )
            deps = self.deps(run) if callable(self.deps) else self.deps
            if isinstance(deps, Awaitable):
                deps = await deps
            turn, known = run.turn, run
            if _lacks_tool(run):
                lease.backoff_s = lease.refusal_backoff_s or lease.backoff_s

            def on_run(run: Run) -> None:
                nonlocal known
                if _has_moved_on(known, run):
                    lease.backoff_s = lease.refusal_backoff_s if _lacks_tool(run) else 0.0
                known = run
                if run.turn > turn and lease.run_id in self._suspects:
                    self._suspects.discard(lease.run_id)
                    self._changed.set()

            return await self.execute(run, ExecutionOptions(deps=deps, lease=lease, on_run=on_run, drain=drain))
        except BaseException as error:
            if isinstance(error, IncompatibleProgramError):
                lease.backoff_s = lease.refusal_backoff_s or lease.backoff_s
            self.agent.store.release(lease)
            raise


def _lacks_tool(run: Run[Any]) -> bool:
    """Return whether a run waits for a program with the tool of a step, and for no deadline that comes earlier."""
    if not run.is_waiting or not any(item.lacks_tool for item in run.pending):
        return False
    rest_ends = run.updated_at + REST_SPREAD * REFUSED_REST_S
    return all(item.expires_at is None or item.expires_at > rest_ends for item in run.pending)


def _has_moved_on(before: Run[Any], run: Run[Any]) -> bool:
    """Return whether a run has made progress; an attempt at a request that failed is none."""
    return (
        run.state is not before.state
        or run.turn != before.turn
        or run.messages is not before.messages
        or run.open is not before.open
        or run.paused is not before.paused
        or run.background is not before.background
    )
