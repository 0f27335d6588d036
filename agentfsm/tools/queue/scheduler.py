"""The tool execution queue: runs calls concurrently where the plan allows it, and returns results in call order.

Neighbouring calls of concurrency-safe tools run together. A call of any other tool waits for all before it, runs alone,
and blocks all behind it; locks refine that (see `plan`). Whatever a tool does, its call gets exactly one result (see
`dispatch`). Source: document C, after the queue of Claude Code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, Final, Protocol

import anyio
import attrs
from anyio.lowlevel import checkpoint_if_cancelled

from agentfsm._lib.concurrency import drive, make_waker, start_in_thread
from agentfsm._lib.fairness import StepThrottle
from agentfsm._lib.limiter import Limiter, WakeCallback
from agentfsm.core.calls import parse_arguments
from agentfsm.core.errors import ArgumentsError, first_error
from agentfsm.core.json_text import round_duration, round_timestamp
from agentfsm.core.labels import join_labels
from agentfsm.core.messages import CHUNK_CHARS, ErrorType, Outcome, ToolCall, ToolResult
from agentfsm.core.validation import COUNT
from agentfsm.core.value import Value
from agentfsm.ports.store import Clock, SystemClock
from agentfsm.streaming.callbacks import CallbackDispatcher
from agentfsm.streaming.stream import QueueStream, StreamEvent, ToolEvent, ToolEventType
from agentfsm.tools.queue import result_text
from agentfsm.tools.queue.call_order import (
    NO_ACCESS,
    CallOrder,
    DependencyTracker,
    PlannedCall,
    ScheduledCall,
    resolve_access,
)
from agentfsm.tools.queue.dispatch import (
    AdmittedCall,
    CallOutcome,
    QueueHost,
    ToolDispatcher,
    ToolJob,
    failed_outcome,
    find_abandoned,
)
from agentfsm.tools.registry import ToolRegistry
from agentfsm.tools.run_context import CallPaused

# Default maximum of concurrent calls: models seldom request more, and most services can handle it.
DEFAULT_LIMIT: Final = 20
# Default seconds for a call whose tool sets no timeout.
DEFAULT_TIMEOUT_S: Final = 30.0

# Seconds that a call waits for a limiter, beyond its own timeout, before it checks whether the limiter is stuck: other
# calls may take just as long.
PARK_GRACE_S: Final = 1.0
_NO_WAKE: Final[WakeCallback] = lambda: None  # noqa: E731  of a call that has never waited
EventCallback = Callable[[Any], object]
EventHook = Callable[[StreamEvent], None]
StartTask = Callable[[Coroutine[Any, Any, None]], object]


@attrs.frozen(kw_only=True)
class QueueStatistics(Value):
    """State of a queue at one moment."""

    running: int
    """Number of running calls."""

    abandoned: int
    """Number of threads of plain functions that outlived their calls and still run."""

    missed: int
    """Number of events that the listener did not receive, or failed on."""


@attrs.define(eq=False, repr=False)
class InFlight:
    """Counter of running calls, shared by a queue and its streams."""

    calls: int = 0
    """Number of running calls."""


class CallDrain(Protocol):
    """Counts the calls of a run that are in flight."""

    async def enter(self) -> None:
        """Count a call that begins, or wait to be cancelled, if no call may begin any more."""

    def leave(self) -> None:
        """Count a call that has ended."""


def _to_callback_dispatcher(listen: EventCallback | CallbackDispatcher | None) -> CallbackDispatcher | None:
    return listen if listen is None or isinstance(listen, CallbackDispatcher) else CallbackDispatcher(listen)


def _build_dispatcher(queue: ToolQueue) -> ToolDispatcher:
    return ToolDispatcher(
        registry=queue.registry,
        host=queue.host,
        clock=queue.clock,
        owner=queue.owner,
        timeout_s=queue.timeout_s,
        retries_per_tool=queue.retries_per_tool,
        retries_per_run=queue.retries_per_run,
        retries=queue.retries,
        on_event=queue.emit if queue.is_watched else None,
    )


@attrs.define(eq=False, repr=False, kw_only=True, on_setattr=attrs.setters.NO_OP)
class ToolQueue:
    """Runs the calls of a reply. Used by an agent, or stand-alone: `await ToolQueue(registry).execute_all(calls)`."""

    registry: ToolRegistry = attrs.field(kw_only=False)
    """The tools that can be called."""

    limit: int = attrs.field(default=DEFAULT_LIMIT, validator=COUNT)
    """Maximum of concurrent calls, 1 or more; 1 runs them one by one. Default 20."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds for a call whose tool sets no timeout, retries included. Default 30."""

    listen: CallbackDispatcher | None = attrs.field(default=None, converter=_to_callback_dispatcher)
    """Plain function that is called with each event, in its own thread: it may be slow, hang or raise. None: no
    listener.
    """

    clock: Clock = attrs.field(factory=SystemClock)
    """Clock for timestamps, deadlines and durations. Default: the system clock."""

    owner: object = attrs.field(factory=object)
    """Owner of the calls, usually a run id. A thread that outlives its call blocks only later calls of the same owner.
    """

    host: QueueHost = attrs.field(factory=QueueHost)
    """Connection to the run: permissions, approvals and recording of results. Default: a stand-alone host, which allows
    all.
    """

    on_event: EventHook | None = None
    """Function that is called with each event synchronously: it must not wait or fail. None: no hook."""

    retries_per_tool: int = 2
    """Maximum of retries per tool in the life of this queue, 0 or more; see `Limits`."""

    retries_per_run: int = 3
    """Maximum of retries of all tools in the life of this queue, 0 or more; see `Limits`."""

    retries: dict[str, int] = attrs.field(factory=dict)
    """Number of retries so far, by tool name; updated by the queue."""

    in_flight: InFlight = attrs.field(factory=InFlight, repr=False)
    """Counter of running calls; a queue shares it with its streams."""

    drain: CallDrain | None = None
    """Counts the calls in flight, and holds further ones back while the process stops; None if nothing does."""

    _dispatcher: ToolDispatcher = attrs.field(init=False, default=attrs.Factory(_build_dispatcher, takes_self=True))

    def statistics(self) -> QueueStatistics:
        """Return the current counts of running calls, abandoned threads and missed events."""
        missed = 0 if self.listen is None else self.listen.missed
        return QueueStatistics(running=self.in_flight.calls, abandoned=len(find_abandoned(self.owner)), missed=missed)

    @property
    def is_watched(self) -> bool:
        """Whether an event hook or a listener is set."""
        return self.on_event is not None or self.listen is not None

    def plan(self, calls: Sequence[ToolCall]) -> CallOrder:
        """Plan the calls: batches, waits, locks and reasons. Runs nothing; `execute_all` does the same."""
        order = DependencyTracker(self.registry.prerequisite_tools)
        placed = [(job, _add_to_tracker(order, job)) for job in map(self.build_job, range(len(calls)), calls)]
        return CallOrder(calls=tuple(_build_planned_call(job, place, calls) for job, place in placed), limit=self.limit)

    async def execute_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls and return their results, in call order.

        Cancellation cancels the running calls and starts no others; results already passed to the host remain. A call
        that waits for external input has no result yet, nor have the calls behind it.
        """
        if len(calls) == 1 and not self.is_watched:
            job = self.build_job(0, calls[0])
            if not job.limiters:  # nothing to plan, wait for or report
                result = await self.run_job(job)
                return [] if result is None else [result]
        session = Scheduler(self)
        for call in calls:
            session.add(call)
        await session.run()
        return session.results

    def stream(self, calls: Sequence[ToolCall]) -> QueueStream:
        """Run the calls as a stream of events: `async with queue.stream(calls) as s: async for event in s: ...`.

        `s.results` has the results when the events have ended.
        """
        return QueueStream(lambda put: attrs.evolve(self, on_event=self._combine_hooks(put)).execute_all(calls))

    def _combine_hooks(self, put: EventHook) -> EventHook:
        watch = self.on_event
        if watch is None:
            return put

        def both(event: StreamEvent) -> None:
            watch(event)
            put(event)

        return both

    def emit(self, event: StreamEvent) -> None:
        """Pass an event to the hook and the listener."""
        if self.on_event is not None:
            self.on_event(event)
        if self.listen is not None:
            self.listen.put(event)

    def build_job(self, index: int, call: ToolCall) -> ToolJob:
        """Look up the tool of a call and the resources that it uses."""
        tool = None if call.invented else self.host.find_tool(self.registry, call.name)
        if tool is None or call.malformed is not None:
            return ToolJob(index, call, tool, NO_ACCESS)
        job = ToolJob(index, call, tool, NO_ACCESS, self.registry.limiters_for(tool))
        try:
            job.access = resolve_access(tool, lambda: tool.to_namespace(job.bind(tool)))
        except ArgumentsError:
            job.access = NO_ACCESS
        return job

    async def emit_drained(self) -> None:
        """Report that no call is left, and wait for the listener to receive it."""
        self.emit(ToolEvent(type=ToolEventType.DRAINED))
        if self.listen is not None:
            await self.listen.drain()

    async def run_job(self, job: ToolJob) -> ToolResult | None:
        """Run one call. Return None if it waits for external input, or a person has to find out its outcome."""
        clock = self.clock
        since, job.started_at = clock.monotonic(), clock.now()
        events = _CallEvents(self, job) if self.is_watched else None
        if events is not None:
            job.on_started = events.emit_started
        self.in_flight.calls += 1
        drain, is_counted = self.drain, False
        end: AdmittedCall | CallOutcome | None
        try:
            if drain is not None:
                await drain.enter()
                is_counted = job.tool is None or job.tool.inner_agent is None
                if not is_counted:  # the steps of its run are counted
                    drain.leave()
            try:
                end = await self._dispatcher.admit(job)
                end = await end.run() if isinstance(end, AdmittedCall) else await self.host.on_refused(job, end)
            except CallPaused as pause:
                end = await self.host.on_pause(job, pause)
            if end is None:
                if events is not None:
                    events.emit_paused()
                return None
            if end.text[CHUNK_CHARS:]:  # without a call, which each result would pay for
                # The call is over: neither its timeout nor a cancelled execution may take its result away.
                with anyio.CancelScope(shield=True):
                    cleaned = start_in_thread(partial(result_text.clean_long_text, end.text))
                    end = end._replace(text=await cleaned.wait())
        except BaseException:
            duration_s = clock.monotonic() - since
            if events is not None:
                events.emit_cut_off(duration_s)
            self.host.on_cut_off(job, duration_s)
            raise
        finally:
            self.in_flight.calls -= 1
            if drain is not None and is_counted:
                drain.leave()
        result = self._build_result(job, end, clock.monotonic() - since)
        shown = result if events is None else self.host.build_shown(result)
        self.host.on_result(result)
        if events is not None:
            events.emit_ended(shown)
        return result

    def _build_result(self, job: ToolJob, end: CallOutcome, duration_s: float) -> ToolResult:
        tool, content = job.tool, end.text
        labels = () if tool is None or not job.attempts else self.host.list_labels(tool, job.call)
        return ToolResult(
            call_id=job.call.id,
            tool=job.call.name,
            outcome=end.outcome,
            content=content,
            index=self.host.position_in_reply(job.call, job.index),
            started_at=round_timestamp(job.started_at),
            duration_s=round_duration(duration_s),
            attempts=job.attempts,
            error_type=end.error_type,
            retryable=end.retryable,
            shown_chars=None if tool is None else result_text.count_shown_chars(content, tool, self.host.count_tokens),
            child=end.child,
            parts=end.parts,
            labels=join_labels(labels, end.labels) if end.labels else labels,
            sandbox=end.sandbox,
        )


def _add_to_tracker(order: DependencyTracker, job: ToolJob) -> ScheduledCall:
    return order.add(job.call.name, job.access, () if job.tool is None else job.tool.after)


def _build_planned_call(job: ToolJob, place: ScheduledCall, calls: Sequence[ToolCall]) -> PlannedCall:
    return PlannedCall(
        index=job.index,
        call_id=job.call.id,
        tool=job.call.name,
        kind=job.kind,
        batch=place.batch,
        waits=tuple(calls[i].id for i in sorted({i for group in place.waits for i in group.calls if i < job.index})),
        locks=job.access.keys,
        shared=job.access.shared,
        reason=job.access.reason,
        estimate_s=job.estimate_s,
    )


@attrs.define(eq=False, repr=False)
class ParkedCall:
    """A call that waits for a permit of a limiter."""

    limiter: Limiter
    wake: WakeCallback
    check_at: float
    """Event loop time at which the call checks whether the limiter is stuck, seconds."""

    retry_at: float
    """Event loop time at which the call retries for a permit withheld by a rate limit, seconds; infinite if only a
    release can help.
    """


@attrs.define(eq=False, repr=False)
class Scheduler:
    """Schedules calls: each starts as soon as its predecessors have ended and the concurrency limit permits.

    Calls may be added while others run. Up to `limit` workers each take the next ready call, which is cheaper than a
    task per call. Further workers start when the first one has to wait, so calls that never wait cost no task: starting
    all workers with the batch would take 12 % more instructions of a turn on SQLite for ten such calls.
    """

    queue: ToolQueue
    start_task: StartTask | None = None
    """Starts a worker beside the caller. None: the calls run one by one."""

    grows: bool = False
    """Whether calls are added while others run."""

    _tracker: DependencyTracker = attrs.field(
        init=False,
        default=attrs.Factory(
            lambda scheduler: DependencyTracker(scheduler.queue.registry.prerequisite_tools), takes_self=True
        ),
    )
    _jobs: list[ToolJob] = attrs.field(factory=list)
    _scheduled: list[ScheduledCall] = attrs.field(factory=list)
    _ready: list[int] = attrs.field(factory=list)
    """Indexes of calls that may start, as a heap: the earliest first."""

    _parked: dict[int, ParkedCall] = attrs.field(factory=dict)
    """Calls that wait for a limiter, by index, in the order of their arrival."""

    _unparked: dict[int, ParkedCall] = attrs.field(factory=dict)
    """Calls whose limiter has a permit now, by index, until a worker takes them."""

    _workers: int = 0
    _starting_workers: int = 0
    """Workers that have not begun yet. Each has claimed one of the ready calls."""

    _results: dict[int, ToolResult] = attrs.field(factory=dict)
    _wakeup: anyio.Event | None = None
    """Wakes the task in `drain` when no call is running any more, or a limiter has a permit."""

    @property
    def results(self) -> list[ToolResult]:
        """Results so far, in call order."""
        return [self._results[index] for index in sorted(self._results)]

    @property
    def is_sequential(self) -> bool:
        """Whether each call waits for the one before it, so that none can overlap another."""
        return not self._scheduled or self._scheduled[-1].batch == len(self._scheduled) - 1

    def add(self, call: ToolCall) -> None:
        """Add the next call of the reply."""
        job = self.queue.build_job(len(self._jobs), call)
        self._jobs.append(job)
        placed = _add_to_tracker(self._tracker, job)
        self._scheduled.append(placed)
        if self.queue.is_watched:
            _CallEvents(self.queue, job).emit_queued()
        if not placed.waits:
            heappush(self._ready, job.index)
        for group in placed.waits:
            group.on_done.append(partial(self._release_dependent, placed))

    def _release_dependent(self, placed: ScheduledCall) -> None:
        placed.remaining -= 1
        if not placed.remaining:
            heappush(self._ready, placed.index)

    async def run(self) -> None:
        """Run the calls until none is left that could start, then report that the queue is empty."""
        if self.queue.limit == 1 or (not self.grows and (len(self._jobs) == 1 or self.is_sequential)):
            await self.drain()
        else:
            try:
                async with anyio.create_task_group() as tasks:
                    self.start_task = tasks.create_task
                    await self.drain()
            except BaseExceptionGroup as group:  # raised by the host, or not allowed for tools
                raise first_error(group) from None
            finally:
                self.start_task = None
        if self.queue.is_watched:
            await self.queue.emit_drained()

    async def drain(self) -> None:
        """Run calls until none is left that could start."""
        attends = self.start_task is not None and (self.grows or any(job.limiters for job in self._jobs))
        try:
            while self._ready or self._workers or self._parked:
                if attends:  # so that one task is free to react to a limiter
                    self.start_workers()
                    await self._wait()
                elif self._wanted_workers > 0:
                    self._count_worker()
                    await self._run_worker()
                else:
                    await self._wait()
        finally:
            for index, parked in (*self._parked.items(), *self._unparked.items()):
                parked.limiter.cancel_wait(parked.wake)
                self._release_limiters(self._jobs[index])
                self.queue.host.on_limit_wait_cut_off(self._jobs[index])

    async def _wait(self) -> None:
        """Wait until no call is running, a limiter has a permit, or a call has waited long for one."""
        self._wakeup = anyio.Event()
        deadline = min((min(parked.check_at, parked.retry_at) for parked in self._parked.values()), default=math.inf)
        with anyio.CancelScope(deadline=deadline) as scope:
            await self._wakeup.wait()
        self._wakeup = None
        if scope.cancelled_caught:
            self._check_parked()

    def _check_parked(self) -> None:
        """Retry calls held up by a rate limit, and refuse calls that wait for threads which may never end."""
        now = anyio.current_time()
        for index, parked in list(self._parked.items()):
            if now >= parked.retry_at:
                self._unpark(index)
                continue
            if now < parked.check_at:
                continue
            if not parked.limiter.is_stuck:
                parked.check_at = now + self._park_timeout_s(index)
                parked.limiter.notify_when_free(parked.wake)  # other waiters may not notice a closed event loop
                continue
            job = self._jobs[index]
            job.refusal = failed_outcome(result_text.blocked_text(job.call.name), ErrorType.BLOCKED, retryable=True)
            parked.limiter.cancel_wait(parked.wake)
            self._unpark(index)

    def _park_timeout_s(self, index: int) -> float:
        """Return the seconds after which a waiting call checks whether its limiter is stuck."""
        tool = self._jobs[index].tool
        return PARK_GRACE_S + ((tool.timeout_s if tool is not None else None) or self.queue.timeout_s)

    async def _run_worker(self) -> None:
        """Run ready calls, one after the other. The caller has counted this worker."""
        self._starting_workers -= 1
        throttle = StepThrottle.current()
        try:
            while self._ready:
                if not throttle.try_acquire():  # calls that never wait leave others their turn
                    await throttle.acquire()
                    if not self._ready:  # another worker has it
                        break
                index = heappop(self._ready)
                # A queue that was cut off has given all places back: none of its calls may wait for one any more.
                await checkpoint_if_cancelled()
                job = self._jobs[index]
                if job.limiters and not self._acquire_limiters(index):
                    continue
                running = self.queue.run_job(job)
                try:
                    if self._wanted_workers > 0:
                        result = await drive(running, self.start_workers)
                    else:
                        result = await running
                finally:
                    if job.permits:
                        self._release_limiters(job)
                if result is not None:
                    self._results[index] = result
                    for group in self._scheduled[index].groups:
                        group.finish_one()
        finally:
            self._workers -= 1
            if not self._workers:
                self._wake()

    @property
    def _wanted_workers(self) -> int:
        """Number of additional workers that the ready calls need."""
        return min(self.queue.limit - self._workers, len(self._ready) - self._starting_workers)

    def start_workers(self) -> None:
        """Start workers for ready calls."""
        if self.start_task is not None:
            for _ in range(self._wanted_workers):
                self._count_worker()
                self.start_task(self._run_worker())

    def _count_worker(self) -> None:
        self._workers += 1
        self._starting_workers += 1

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()

    # Limiters: maximum of calls of a tool or a tag that the whole process may run at once, or start per minute.

    def _acquire_limiters(self, index: int) -> bool:
        """Take a permit of each limiter of the call, in order; if one has none, park the call until it has.

        Permits already taken are kept meanwhile. All calls take them in the same order, so that there is no deadlock.
        """
        job, called = self._jobs[index], self._unparked.pop(index, None)
        wake = _NO_WAKE if called is None else called.wake
        while len(job.permits) < len(job.limiters) and job.refusal is None:
            limiter = job.limiters[len(job.permits)]
            permit = limiter.try_acquire(wake, start=False)
            if permit is None:
                self._park(index, limiter, wake)
                return False
            job.permits.append(permit)
        return True

    def _park(self, index: int, limiter: Limiter, wake: WakeCallback) -> None:
        wake = make_waker(partial(self._unpark, index)) if wake is _NO_WAKE else wake
        limiter.notify_when_free(wake)  # a waker calls back in a later round of the event loop
        now = anyio.current_time()
        self._parked[index] = ParkedCall(
            limiter, wake, now + self._park_timeout_s(index), now + limiter.next_check_s(wake)
        )
        self._wake()  # the waiting task has to compute its deadline anew

    def _unpark(self, index: int) -> None:
        if index in self._parked:
            self._unparked[index] = self._parked.pop(index)
            heappush(self._ready, index)
            self._wake()

    def _release_limiters(self, job: ToolJob) -> None:
        for limiter, permit in zip(job.limiters, job.permits, strict=False):
            if not job.attempts:
                limiter.cancel(permit)
            elif job.abandoned_thread is None:
                limiter.release()
            else:  # its thread still runs and uses the service
                limiter.mark_abandoned()
                job.abandoned_thread.on_end(limiter.release_abandoned)
        job.permits.clear()


@attrs.define(eq=False, repr=False)
class _CallEvents:
    """Emits the events of one call: each start has exactly one end."""

    queue: ToolQueue
    job: ToolJob
    is_open: bool = False

    def emit_queued(self) -> None:
        """Report the position of the call among the others."""
        position = self.queue.host.position_in_reply(self.job.call, self.job.index)
        self._emit(ToolEventType.QUEUED, position=position, estimate_s=self.job.estimate_s)

    def emit_started(self) -> None:
        """Report that the tool starts."""
        self.is_open = True
        self._emit(ToolEventType.STARTED)

    def emit_ended(self, result: ToolResult) -> None:
        """Report the result."""
        self.is_open = False
        said, took_s = result.content, result.duration_s
        if result.outcome is Outcome.DONE:
            self._emit(ToolEventType.COMPLETED, duration_s=took_s, success=True, result=said)
        else:
            self._emit(ToolEventType.ERROR, duration_s=took_s, success=False, message=said, result=said)

    def emit_paused(self) -> None:
        """Report that the call waits for external input."""
        self.is_open = False
        self._emit(ToolEventType.PAUSED)

    def emit_cut_off(self, duration_s: float) -> None:
        """Report that a call that had begun was cut off with all others."""
        if self.is_open:
            self.is_open = False
            self._emit(ToolEventType.ERROR, duration_s=duration_s, success=False, message="cut off")

    def _emit(self, kind: ToolEventType, **details: Any) -> None:
        call, behind = self.job.call, self.job.kind
        try:
            arguments = parse_arguments(call)
        except (ValueError, RecursionError):  # possible only in a stand-alone queue
            arguments = {}
        self.queue.emit(
            ToolEvent(type=kind, call_id=call.id, tool=call.name, kind=behind, arguments=arguments, **details)
        )
