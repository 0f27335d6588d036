"""The tool execution queue: calls overlap where the plan lets them, results come in call order, failures stay apart.

Neighbouring calls of concurrency-safe tools run together. A call of any other tool waits for all before it, runs
alone, and holds all behind it; locks refine that (see `plan`). Whatever a tool does, its call gets exactly one result
(see `dispatch`). Source: document C, after the queue of Claude Code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, Final

import anyio
import attrs
from anyio.lowlevel import checkpoint_if_cancelled

from agentfsm._concurrency import make_waker, watch_first_suspend
from agentfsm.core.calls import parse_arguments
from agentfsm.core.errors import ArgumentsError, first_error
from agentfsm.core.json_text import round_duration, round_timestamp
from agentfsm.core.messages import ErrorType, Outcome, ToolCall, ToolResult
from agentfsm.core.validation import COUNT
from agentfsm.core.value import Value
from agentfsm.limiter import Limiter, WakeCallback
from agentfsm.ports.store import Clock, SystemClock
from agentfsm.streaming.callbacks import CallbackDispatcher
from agentfsm.streaming.stream import QueueStream, StreamEvent, ToolEvent, ToolEventType
from agentfsm.tools.queue import result_text
from agentfsm.tools.queue.abandoned_threads import find_abandoned
from agentfsm.tools.queue.dispatch import CallOutcome, QueueHost, ToolDispatcher, ToolJob, failed_outcome
from agentfsm.tools.queue.plan import NO_ACCESS, DependencyTracker, Plan, PlannedCall, ScheduledCall, resolve_access
from agentfsm.tools.registry import ToolRegistry
from agentfsm.tools.run_context import CallPaused

# Calls in flight at once: a model seldom asks for more, and most services bear it.
DEFAULT_LIMIT: Final = 20
# Seconds for a call whose tool sets none.
DEFAULT_TIMEOUT_S: Final = 30.0

# Seconds beyond a call's own time after which it asks whether it waits in vain: others may take just as long.
PARK_GRACE_S: Final = 1.0
_NO_WAKE: Final[WakeCallback] = lambda: None  # noqa: E731  what has never had to wait
EventCallback = Callable[[Any], object]
EventHook = Callable[[StreamEvent], None]
StartTask = Callable[[Coroutine[Any, Any, None]], object]


@attrs.frozen(kw_only=True)
class QueueStatistics(Value):
    """The inside of a queue, at one moment."""

    running: int
    """Calls in flight."""

    abandoned: int
    """Threads of plain functions that outlived their calls and still run."""

    missed: int
    """Events that a listener failed to take."""


@attrs.define(eq=False, repr=False)
class InFlight:
    """What is in flight."""

    calls: int = 0


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
    """Runs the calls of a reply. Serves an agent, or by itself: `await ToolQueue(registry).execute_all(calls)`."""

    registry: ToolRegistry = attrs.field(kw_only=False)
    limit: int = attrs.field(default=DEFAULT_LIMIT, validator=COUNT)
    """Calls in flight at once, 1 or more; 1 runs them one by one."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    listen: CallbackDispatcher | None = attrs.field(default=None, converter=_to_callback_dispatcher)
    """A plain function that is told of each event, in a thread of its own: it may be slow, hang or raise."""

    clock: Clock = attrs.field(factory=SystemClock)
    owner: object = attrs.field(factory=object)
    """Whose calls these are: a thread that outlives its call blocks later ones of the same owner only. A run's id."""

    host: QueueHost = attrs.field(factory=QueueHost)
    on_event: EventHook | None = None
    """As `listen`, but called at once: it must neither wait nor fail."""

    retries_per_tool: int = 2
    retries_per_run: int = 3
    """Attempts after the first, in the life of this queue: see `Limits`."""

    retries: dict[str, int] = attrs.field(factory=dict)
    """Those made already, by tool; counted on here."""

    in_flight: InFlight = attrs.field(factory=InFlight, repr=False)
    """What is in flight; a queue shares it with its streams."""

    _dispatcher: ToolDispatcher = attrs.field(init=False, default=attrs.Factory(_build_dispatcher, takes_self=True))

    def statistics(self) -> QueueStatistics:
        """Return what runs now."""
        missed = 0 if self.listen is None else self.listen.missed
        return QueueStatistics(running=self.in_flight.calls, abandoned=len(find_abandoned(self.owner)), missed=missed)

    @property
    def is_watched(self) -> bool:
        """Whether anybody is told of events."""
        return self.on_event is not None or self.listen is not None

    def plan(self, calls: Sequence[ToolCall]) -> Plan:
        """Tell how the calls would run: batches, waits, locks and reasons. Runs nothing; `execute_all` follows it."""
        order = DependencyTracker(self.registry.prerequisite_tools)
        placed = [(job, _add_to_tracker(order, job)) for job in map(self.build_job, range(len(calls)), calls)]
        return Plan(calls=tuple(_build_planned_call(job, place, calls) for job, place in placed), limit=self.limit)

    async def execute_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls and return their results, in call order.

        When it is cancelled, calls in flight are cancelled and no other starts; results handed to the host before
        that stand. A call that waits for what is outside of the run has no result yet, nor have those behind it.
        """
        if len(calls) == 1 and not self.is_watched:
            job = self.build_job(0, calls[0])
            if not job.limiters:  # nothing to plan, to wait for or to tell
                result = await self.run_job(job)
                return [] if result is None else [result]
        session = Scheduler(self)
        for call in calls:
            session.add(call)
        await session.run()
        return session.results

    def stream(self, calls: Sequence[ToolCall]) -> QueueStream:
        """Run the calls while somebody watches: `async with queue.stream(calls) as s: async for event in s: ...`.

        Their results are in `s.results` when the events have ended.
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
        """Hand an event to those who watch."""
        if self.on_event is not None:
            self.on_event(event)
        if self.listen is not None:
            self.listen.put(event)

    def build_job(self, index: int, call: ToolCall) -> ToolJob:
        """Look at a call: which tool, and what it touches."""
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
        """Tell that no call is left, and let the listener hear of it before the caller goes on."""
        self.emit(ToolEvent(type=ToolEventType.DRAINED))
        if self.listen is not None:
            await self.listen.drain()

    async def run_job(self, job: ToolJob) -> ToolResult | None:
        """Run one call; None where it waits for what is outside of the run."""
        clock = self.clock
        since, job.started_at = clock.monotonic(), clock.now()
        told = _CallEvents(self, job) if self.is_watched else None
        if told is not None:
            job.on_started = told.emit_started
        self.in_flight.calls += 1
        try:
            end = await self._run_call(job)
            if end is None:
                if told is not None:
                    told.emit_paused()
                return None
        except BaseException:
            duration_s = clock.monotonic() - since
            if told is not None:
                told.emit_cut_off(duration_s)
            self.host.on_cut_off(job, duration_s)
            raise
        finally:
            self.in_flight.calls -= 1
        result = self._build_result(job, end, clock.monotonic() - since)
        self.host.on_result(result)
        if told is not None:
            told.emit_ended(result)
        return result

    async def _run_call(self, job: ToolJob) -> CallOutcome | None:
        """Run one call, and return how it ended; None where it waits."""
        try:
            return await self._dispatcher.run_call(job)
        except CallPaused as pause:
            return await self.host.on_pause(job, pause)

    def _build_result(self, job: ToolJob, end: CallOutcome, duration_s: float) -> ToolResult:
        tool, content = (
            job.tool,
            end.text if len(end.text) <= result_text.CHUNK_CHARS else result_text.truncate_for_journal(end.text),
        )
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
        )

    def refuse(self, job: ToolJob, end: CallOutcome) -> ToolResult:
        """Return the result of a call that was never begun."""
        job.started_at = self.clock.now()
        result = self._build_result(job, end, 0.0)
        self.host.on_result(result)
        if self.is_watched:
            _CallEvents(self, job).emit_ended(result)
        return result


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
    """When it asks whether it waits in vain; seconds of the event loop."""

    retry_at: float
    """When it asks again for a permit that a rate has kept from it; infinite if only a release can help."""


@attrs.define(eq=False, repr=False)
class Scheduler:
    """Calls on their way: each starts as soon as what it waits for has ended and there is room for it.

    Calls may be added while others run. As many workers as may run at once take the next call each: cheaper than a
    task for every call. The others start when the first one has to wait, so calls that never wait cost no task at all:
    ten of them would take 12 % more instructions of a turn on SQLite if the workers started with the batch.
    """

    queue: ToolQueue
    start_task: StartTask | None = None
    """Starts a worker beside the caller; None: the calls run one by one."""

    _tracker: DependencyTracker = attrs.field(
        init=False,
        default=attrs.Factory(
            lambda scheduler: DependencyTracker(scheduler.queue.registry.prerequisite_tools), takes_self=True
        ),
    )
    _jobs: list[ToolJob] = attrs.field(factory=list)
    _scheduled: list[ScheduledCall] = attrs.field(factory=list)
    _ready: list[int] = attrs.field(factory=list)
    """The indexes of calls that may start, as a heap: the earliest first."""

    _parked: dict[int, ParkedCall] = attrs.field(factory=dict)
    """Those that have to wait for room in a limiter, in the order of their coming."""

    _unparked: dict[int, ParkedCall] = attrs.field(factory=dict)
    """Those of them for which there is room now, until they are taken."""

    _workers: int = 0
    _starting_workers: int = 0
    """Workers that have not begun yet: for each, one of the ready calls is spoken for."""

    _results: dict[int, ToolResult] = attrs.field(factory=dict)
    _wakeup: anyio.Event | None = None
    """Set for whoever drains when nothing is in flight any more, or a limiter has room."""

    @property
    def results(self) -> list[ToolResult]:
        """The results so far, in call order."""
        return [self._results[index] for index in sorted(self._results)]

    @property
    def is_sequential(self) -> bool:
        """Whether each call waits for the one before it, so that none can overlap another."""
        return not self._scheduled or self._scheduled[-1].batch == len(self._scheduled) - 1

    def add(self, call: ToolCall) -> None:
        """Take in the next call of the reply."""
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
        """Run the calls until none is left that could start, and tell that the queue is empty."""
        if len(self._jobs) == 1 or self.queue.limit == 1 or self.is_sequential:
            await self.drain()
        else:
            try:
                async with anyio.create_task_group() as tasks:
                    self.start_task = tasks.create_task
                    await self.drain()
            except BaseExceptionGroup as group:  # what the host raised, or what no tool may raise
                raise first_error(group) from None
            finally:
                self.start_task = None
        if self.queue.is_watched:
            await self.queue.emit_drained()

    async def drain(self) -> None:
        """Run calls until none is left that could start."""
        attends = self.start_task is not None and any(job.limiters for job in self._jobs)
        try:
            while self._ready or self._workers or self._parked:
                if attends:  # so that somebody is there when a limiter has room
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
        """Wait until nothing is in flight, a limiter has a permit, or a call has waited long for one."""
        self._wakeup = anyio.Event()
        deadline = min((min(parked.check_at, parked.retry_at) for parked in self._parked.values()), default=math.inf)
        with anyio.CancelScope(deadline=deadline) as scope:
            await self._wakeup.wait()
        self._wakeup = None
        if scope.cancelled_caught:
            self._check_parked()

    def _check_parked(self) -> None:
        """Retry the calls that a rate held up; answer those that wait for threads which may never end."""
        now = anyio.current_time()
        for index, parked in list(self._parked.items()):
            if now >= parked.retry_at:
                self._unpark(index)
                continue
            if now < parked.check_at:
                continue
            if not parked.limiter.is_stuck:
                parked.check_at = now + self._park_timeout_s(index)
                parked.limiter.notify_when_free(parked.wake)  # nobody else may see that an event loop was closed
                continue
            del self._parked[index]
            parked.limiter.cancel_wait(parked.wake)
            job = self._jobs[index]
            self._release_limiters(job)
            end = failed_outcome(result_text.blocked_text(job.call.name), ErrorType.BLOCKED, retryable=True)
            self._finish(index, self.queue.refuse(job, end))

    def _park_timeout_s(self, index: int) -> float:
        """Seconds after which a call asks whether it waits in vain."""
        tool = self._jobs[index].tool
        return PARK_GRACE_S + ((tool.timeout_s if tool is not None else None) or self.queue.timeout_s)

    async def _run_worker(self) -> None:
        """Run ready calls, one after the other; whoever starts this counts it as a worker."""
        self._starting_workers -= 1
        try:
            while self._ready:
                index = heappop(self._ready)
                await checkpoint_if_cancelled()  # tools that never wait give no other chance to stop
                if not self._acquire_limiters(index):
                    continue
                if self._wanted_workers > 0:
                    await watch_first_suspend(self._run_job(index), self.start_workers)
                else:
                    await self._run_job(index)
        finally:
            self._workers -= 1
            if not self._workers:
                self._wake()

    @property
    def _wanted_workers(self) -> int:
        """How many workers more the ready calls could do with."""
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

    async def _run_job(self, index: int) -> None:
        job, result = self._jobs[index], None
        try:
            result = await self.queue.run_job(job)
        finally:
            self._release_limiters(job)
        if result is not None:
            self._finish(index, result)

    def _finish(self, index: int, result: ToolResult) -> None:
        self._results[index] = result
        for group in self._scheduled[index].groups:
            group.finish_one()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()

    # Limiters: how many calls of a tool, or of a tag, the whole process may have in flight, or start in a minute.

    def _acquire_limiters(self, index: int) -> bool:
        """Take a permit of each limiter of the call, in their order; if one has none, park the call until it has.

        Permits that were taken are kept meanwhile: since all calls take them in the same order, none waits in a ring.
        """
        job, called = self._jobs[index], self._unparked.pop(index, None)
        wake = _NO_WAKE if called is None else called.wake
        while len(job.permits) < len(job.limiters):
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
        self._wake()  # the task that waits has to know until when

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
            else:  # its thread goes on, and so does what it does to the service
                limiter.mark_abandoned()
                job.abandoned_thread.on_end(limiter.release_abandoned)
        job.permits.clear()


@attrs.define(eq=False, repr=False)
class _CallEvents:
    """What those who watch are told of one call: each start has exactly one end."""

    queue: ToolQueue
    job: ToolJob
    is_open: bool = False

    def emit_queued(self) -> None:
        """Tell that it has its place among the others."""
        position = self.queue.host.position_in_reply(self.job.call, self.job.index)
        self._emit(ToolEventType.QUEUED, position=position, estimate_s=self.job.estimate_s)

    def emit_started(self) -> None:
        """Tell that the tool begins."""
        self.is_open = True
        self._emit(ToolEventType.STARTED)

    def emit_ended(self, result: ToolResult) -> None:
        """Tell the result."""
        self.is_open = False
        said, took_s = result.content, result.duration_s
        if result.outcome is Outcome.DONE:
            self._emit(ToolEventType.COMPLETED, duration_s=took_s, success=True, result=said)
        else:
            self._emit(ToolEventType.ERROR, duration_s=took_s, success=False, message=said, result=said)

    def emit_paused(self) -> None:
        """Tell that the call goes on when what it waits for is there."""
        self.is_open = False
        self._emit(ToolEventType.PAUSED)

    def emit_cut_off(self, duration_s: float) -> None:
        """Tell that a call that had begun was cut off together with all others."""
        if self.is_open:
            self.is_open = False
            self._emit(ToolEventType.ERROR, duration_s=duration_s, success=False, message="cut off")

    def _emit(self, kind: ToolEventType, **details: Any) -> None:
        call, behind = self.job.call, self.job.kind
        try:
            arguments = parse_arguments(call)
        except (ValueError, RecursionError):  # of a queue that serves by itself
            arguments = {}
        self.queue.emit(
            ToolEvent(type=kind, call_id=call.id, tool=call.name, kind=behind, arguments=arguments, **details)
        )
