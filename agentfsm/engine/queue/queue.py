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

from agentfsm._concurrency import current_backend, make_waker, watch_first_suspend
from agentfsm.core.calls import parse_arguments
from agentfsm.core.errors import ArgumentsError, MisuseError, first_error
from agentfsm.core.messages import ErrorType, Outcome, ToolCall, ToolResult
from agentfsm.core.times import round_duration, round_timestamp
from agentfsm.core.value import Value
from agentfsm.engine.queue import render
from agentfsm.engine.queue.dispatch import Dispatcher, End, Host, Job, failed
from agentfsm.engine.queue.places import left_behind
from agentfsm.engine.queue.plan import NOTHING, Order, Placed, Plan, PlannedCall, access_of
from agentfsm.engine.tools.bulkhead import Bulkhead, Wake
from agentfsm.engine.tools.context import Paused
from agentfsm.engine.tools.registry import ToolRegistry
from agentfsm.engine.watch.outlet import Outlet
from agentfsm.engine.watch.stream import QueueStream, StreamEvent, ToolEvent, ToolEventType
from agentfsm.ports import Clock, SystemClock

# Calls in flight at once: a model seldom asks for more, and most services bear it.
LIMIT: Final = 20
# Seconds for a call whose tool sets none.
TIMEOUT_S: Final = 30.0

# Seconds beyond a call's own time after which it asks whether it waits in vain: others may take just as long.
PATIENCE_S: Final = 1.0
_NOBODY: Final[Wake] = lambda: None  # noqa: E731  what has never had to wait
Listen = Callable[[Any], object]
Watch = Callable[[StreamEvent], None]
Start = Callable[[Coroutine[Any, Any, None]], object]


@attrs.frozen(kw_only=True)
class QueueStatistics(Value):
    """The inside of a queue, at one moment."""

    running: int
    # Calls in flight.
    abandoned: int
    # Threads of plain functions that outlived their calls and still run.
    missed: int
    # Events that a listener failed to take.


@attrs.define(eq=False, repr=False)
class Running:
    """What is in flight."""

    calls: int = 0


def _at_least_one(_queue: object, _attribute: object, value: int) -> None:
    if value < 1:
        raise MisuseError(f"ToolQueue(limit={value}) could run nothing: give 1 or more calls in flight at once")


def _outlet_of(listen: Listen | Outlet | None) -> Outlet | None:
    return listen if listen is None or isinstance(listen, Outlet) else Outlet(listen)


def _dispatcher_of(queue: ToolQueue) -> Dispatcher:
    return Dispatcher(
        registry=queue.registry,
        host=queue.host,
        clock=queue.clock,
        owner=queue.owner,
        timeout_s=queue.timeout_s,
        retries_per_tool=queue.retries_per_tool,
        retries_per_run=queue.retries_per_run,
        retries=queue.retries,
        tell=queue.tell if queue.is_watched else None,
    )


@attrs.define(eq=False, repr=False, kw_only=True, on_setattr=attrs.setters.NO_OP)
class ToolQueue:
    """Runs the calls of a reply. Serves an agent, or by itself: `await ToolQueue(registry).execute_all(calls)`."""

    registry: ToolRegistry = attrs.field(kw_only=False)
    limit: int = attrs.field(default=LIMIT, validator=_at_least_one)
    # Calls in flight at once, 1 or more; 1 runs them one by one.
    timeout_s: float = TIMEOUT_S
    listen: Outlet | None = attrs.field(default=None, converter=_outlet_of)
    # A plain function that is told of each event, in a thread of its own: it may be slow, hang or raise.
    clock: Clock = attrs.field(factory=SystemClock)
    owner: object = attrs.field(factory=object)
    # Whose calls these are: a thread that outlives its call blocks later ones of the same owner only. A run's id.
    host: Host = attrs.field(factory=Host)
    watch: Watch | None = None
    # As `listen`, for whoever neither waits nor fails: called at once.
    retries_per_tool: int = 2
    retries_per_run: int = 3
    # Attempts after the first, in the life of this queue: see `Limits`.
    retries: dict[str, int] = attrs.field(factory=dict)
    # Those made already, by tool; counted on here.
    running: Running = attrs.field(factory=Running, repr=False)
    # What is in flight; a queue shares it with its streams.
    _dispatcher: Dispatcher = attrs.field(init=False, default=attrs.Factory(_dispatcher_of, takes_self=True))

    def statistics(self) -> QueueStatistics:
        """Return what runs now."""
        missed = 0 if self.listen is None else self.listen.missed
        return QueueStatistics(running=self.running.calls, abandoned=len(left_behind(self.owner)), missed=missed)

    @property
    def is_watched(self) -> bool:
        """Whether anybody is told of events."""
        return self.watch is not None or self.listen is not None

    def plan(self, calls: Sequence[ToolCall]) -> Plan:
        """Tell how the calls would run: batches, waits, locks and reasons. Runs nothing; `execute_all` follows it."""
        order = Order(self.registry.awaited)
        placed = [(job, _place(order, job)) for job in map(self.job, range(len(calls)), calls)]
        return Plan(calls=tuple(_planned(job, place, calls) for job, place in placed), limit=self.limit)

    async def execute_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls and return their results, in call order.

        When it is cancelled, calls in flight are cancelled and no other starts; results handed to the host before
        that stand. A call that waits for what is outside of the run has no result yet, nor have those behind it.
        """
        if len(calls) == 1 and not self.is_watched:
            job = self.job(0, calls[0])
            if not job.bulkheads:  # nothing to plan, to wait for or to tell
                result = await self.run_one(job)
                return [] if result is None else [result]
        session = Session(self)
        for call in calls:
            session.add(call)
        await session.run()
        return session.results

    def stream(self, calls: Sequence[ToolCall]) -> QueueStream:
        """Run the calls while somebody watches: `async with queue.stream(calls) as s: async for event in s: ...`.

        Their results are in `s.results` when the events have ended.
        """
        return QueueStream(lambda put: attrs.evolve(self, watch=self._and_also(put)).execute_all(calls))

    def _and_also(self, put: Watch) -> Watch:
        watch = self.watch
        if watch is None:
            return put

        def both(event: StreamEvent) -> None:
            watch(event)
            put(event)

        return both

    def tell(self, event: StreamEvent) -> None:
        """Hand an event to those who watch."""
        if self.watch is not None:
            self.watch(event)
        if self.listen is not None:
            self.listen.put(event)

    def job(self, index: int, call: ToolCall) -> Job:
        """Look at a call: which tool, and what it touches."""
        tool = None if call.invented else self.host.find(self.registry, call.name)
        if tool is None or call.malformed is not None:
            return Job(index, call, tool, NOTHING)
        job = Job(index, call, tool, NOTHING, self.registry.bulkheads(tool))
        try:
            job.access = access_of(tool, lambda: tool.arguments(job.bind(tool)))
        except ArgumentsError:
            job.access = NOTHING
        return job

    async def tell_drained(self) -> None:
        """Tell that no call is left, and let the listener hear of it before the caller goes on."""
        self.tell(ToolEvent(type=ToolEventType.DRAINED))
        if self.listen is not None:
            await self.listen.drain()

    async def run_one(self, job: Job) -> ToolResult | None:
        """Run one call; None where it waits for what is outside of the run."""
        clock = self.clock
        since, job.started_at = clock.monotonic(), clock.now()
        told = _Told(self, job) if self.is_watched else None
        if told is not None:
            job.started = told.started
        self.running.calls += 1
        try:
            end = await self._end_of(job)
            if end is None:
                if told is not None:
                    told.paused()
                return None
        except BaseException:
            duration_s = clock.monotonic() - since
            if told is not None:
                told.cut_off(duration_s)
            self.host.cut_off(job, duration_s)
            raise
        finally:
            self.running.calls -= 1
        result = self._result(job, end, clock.monotonic() - since)
        self.host.finished(result)
        if told is not None:
            told.ended(result)
        return result

    async def _end_of(self, job: Job) -> End | None:
        """Run one call, and return how it ended; None where it waits."""
        try:
            return await self._dispatcher.end_of(job)
        except Paused as pause:
            return await self.host.paused(job, pause)

    def _result(self, job: Job, end: End, duration_s: float) -> ToolResult:
        tool, content = job.tool, end.text if len(end.text) <= render.PIECE_CHARS else render.kept(end.text)
        return ToolResult(
            call_id=job.call.id,
            tool=job.call.name,
            outcome=end.outcome,
            content=content,
            index=self.host.position(job.call, job.index),
            started_at=round_timestamp(job.started_at),
            duration_s=round_duration(duration_s),
            attempts=job.tries,
            error_type=end.error_type,
            retryable=end.retryable,
            shown_chars=None if tool is None else render.shown_chars(content, tool, self.host.count),
            child=end.child,
            parts=end.parts,
        )

    def refuse(self, job: Job, end: End) -> ToolResult:
        """Return the result of a call that was never begun."""
        job.started_at = self.clock.now()
        result = self._result(job, end, 0.0)
        self.host.finished(result)
        if self.is_watched:
            _Told(self, job).ended(result)
        return result


def _place(order: Order, job: Job) -> Placed:
    return order.place(job.call.name, job.access, () if job.tool is None else job.tool.after)


def _planned(job: Job, place: Placed, calls: Sequence[ToolCall]) -> PlannedCall:
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
class Parked:
    """A call that waits for room in a bulkhead."""

    bulkhead: Bulkhead
    wake: Wake
    until: float
    # When it asks whether it waits in vain; seconds of the event loop.


@attrs.define(eq=False, repr=False)
class Session:
    """Calls on their way: each starts as soon as what it waits for has ended and there is room for it.

    Calls may be added while others run. As many workers as may run at once take the next call each: cheaper than a
    task for every call. The others start when the first one has to wait, so calls that never wait cost no task at all.
    """

    queue: ToolQueue
    start: Start | None = None
    # Starts a worker beside the caller; None: the calls run one by one.
    _order: Order = attrs.field(
        init=False, default=attrs.Factory(lambda session: Order(session.queue.registry.awaited), takes_self=True)
    )
    _jobs: list[Job] = attrs.field(factory=list)
    _placed: list[Placed] = attrs.field(factory=list)
    _ready: list[int] = attrs.field(factory=list)
    # The indexes of calls that may start, as a heap: the earliest first.
    _parked: dict[int, Parked] = attrs.field(factory=dict)
    # Those that have to wait for room in a bulkhead, in the order of their coming.
    _called: dict[int, Parked] = attrs.field(factory=dict)
    # Those of them for which there is room now, until they are taken.
    _workers: int = 0
    _coming: int = 0
    # Workers that have not begun yet: for each, one of the ready calls is spoken for.
    _results: dict[int, ToolResult] = attrs.field(factory=dict)
    _news: anyio.Event | None = None
    # Set for whoever drains when nothing is in flight any more, or a bulkhead has room.

    @property
    def results(self) -> list[ToolResult]:
        """The results so far, in call order."""
        return [self._results[index] for index in sorted(self._results)]

    @property
    def is_chain(self) -> bool:
        """Whether each call waits for the one before it, so that none can overlap another."""
        return not self._placed or self._placed[-1].batch == len(self._placed) - 1

    def add(self, call: ToolCall) -> None:
        """Take in the next call of the reply."""
        job = self.queue.job(len(self._jobs), call)
        self._jobs.append(job)
        placed = _place(self._order, job)
        self._placed.append(placed)
        if self.queue.is_watched:
            _Told(self.queue, job).queued()
        if not placed.waits:
            heappush(self._ready, job.index)
        for group in placed.waits:
            group.waiting.append(partial(self._released, placed))

    def _released(self, placed: Placed) -> None:
        placed.left -= 1
        if not placed.left:
            heappush(self._ready, placed.index)

    async def run(self) -> None:
        """Run the calls until none is left that could start, and tell that the queue is empty."""
        if len(self._jobs) == 1 or self.queue.limit == 1 or self.is_chain:
            await self.drain()
        else:
            try:
                async with anyio.create_task_group() as tasks:
                    self.start = tasks.create_task
                    await self.drain()
            except BaseExceptionGroup as group:  # what the host raised, or what no tool may raise
                raise first_error(group) from None
            finally:
                self.start = None
        if self.queue.is_watched:
            await self.queue.tell_drained()

    async def drain(self) -> None:
        """Run calls until none is left that could start."""
        attends = self.start is not None and any(job.bulkheads for job in self._jobs)
        try:
            while self._ready or self._workers or self._parked:
                if attends:  # so that somebody is there when a bulkhead has room
                    self.spread()
                    await self._wait()
                elif self._wanted > 0:
                    self._count_worker()
                    await self._work()
                else:
                    await self._wait()
        finally:
            for index, parked in (*self._parked.items(), *self._called.items()):
                parked.bulkhead.off(parked.wake)
                self._leave(self._jobs[index])

    async def _wait(self) -> None:
        """Wait until nothing is in flight, or there is room in a bulkhead, or somebody has waited long for that."""
        loop = current_backend()
        self._news = loop.create_event()
        with loop.create_cancel_scope() as scope:
            scope.deadline = min((parked.until for parked in self._parked.values()), default=math.inf)
            await self._news.wait()
        self._news = None
        if scope.cancelled_caught:
            self._look()

    def _look(self) -> None:
        """Answer the parked calls that wait for threads which may never end; all others have their turn."""
        now = anyio.current_time()
        for index, parked in list(self._parked.items()):
            if now < parked.until:
                continue
            if not parked.bulkhead.is_stuck:
                parked.until = now + self._patience_s(index)
                continue
            del self._parked[index]
            parked.bulkhead.off(parked.wake)
            job = self._jobs[index]
            self._leave(job)
            end = failed(render.blocked_text(job.call.name), ErrorType.BLOCKED, retryable=True)
            self._end(index, self.queue.refuse(job, end))

    def _patience_s(self, index: int) -> float:
        """Seconds after which a call asks whether it waits in vain."""
        tool = self._jobs[index].tool
        return PATIENCE_S + ((tool.timeout_s if tool is not None else None) or self.queue.timeout_s)

    async def _work(self) -> None:
        """Run ready calls, one after the other; whoever starts this counts it as a worker."""
        self._coming -= 1
        loop = current_backend()
        try:
            while self._ready:
                index = heappop(self._ready)
                await loop.checkpoint_if_cancelled()  # tools that never wait give no other chance to stop
                if not self._enter(index):
                    continue
                if self._wanted > 0:
                    await watch_first_suspend(self._run(index), self.spread)
                else:
                    await self._run(index)
        finally:
            self._workers -= 1
            if not self._workers:
                self._wake()

    @property
    def _wanted(self) -> int:
        """How many workers more the ready calls could do with."""
        return min(self.queue.limit - self._workers, len(self._ready) - self._coming)

    def spread(self) -> None:
        """Start workers for ready calls."""
        if self.start is not None:
            for _ in range(self._wanted):
                self._count_worker()
                self.start(self._work())

    def _count_worker(self) -> None:
        self._workers += 1
        self._coming += 1

    async def _run(self, index: int) -> None:
        job, result = self._jobs[index], None
        try:
            result = await self.queue.run_one(job)
        finally:
            self._leave(job)
        if result is not None:
            self._end(index, result)

    def _end(self, index: int, result: ToolResult) -> None:
        self._results[index] = result
        for group in self._placed[index].joined:
            group.end_one()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()

    # Bulkheads: how many calls of a tool, or of a tag, the whole process may have in flight.

    def _enter(self, index: int) -> bool:
        """Take a place in each bulkhead of the call, in their order; where one has no room, park the call until it has.

        Places that were taken are kept meanwhile: since all take them in the same order, nobody waits in a ring.
        """
        job, called = self._jobs[index], self._called.pop(index, None)
        wake = _NOBODY if called is None else called.wake
        while job.entered < len(job.bulkheads):
            bulkhead = job.bulkheads[job.entered]
            if not bulkhead.try_enter(wake):
                self._park(index, bulkhead, wake)
                return False
            job.entered += 1
        return True

    def _park(self, index: int, bulkhead: Bulkhead, wake: Wake) -> None:
        wake = make_waker(partial(self._unpark, index)) if wake is _NOBODY else wake
        until = anyio.current_time() + self._patience_s(index)
        self._parked[index] = Parked(bulkhead, wake, until)
        self._wake()  # whoever attends has to know until when
        bulkhead.on_room(wake)

    def _unpark(self, index: int) -> None:
        if index in self._parked:
            self._called[index] = self._parked.pop(index)
            heappush(self._ready, index)
            self._wake()

    def _leave(self, job: Job) -> None:
        for bulkhead in job.bulkheads[: job.entered]:
            if job.place is None:
                bulkhead.leave()
            else:  # its thread goes on, and so does what it does to the service
                bulkhead.abandon()
                job.place.when_free(bulkhead.back)
        job.entered = 0


@attrs.define(eq=False, repr=False)
class _Told:
    """What those who watch are told of one call: each start has exactly one end."""

    queue: ToolQueue
    job: Job
    is_open: bool = False

    def queued(self) -> None:
        """Tell that it has its place among the others."""
        position = self.queue.host.position(self.job.call, self.job.index)
        self._tell(ToolEventType.QUEUED, position=position, estimate_s=self.job.estimate_s)

    def started(self) -> None:
        """Tell that the tool begins."""
        self.is_open = True
        self._tell(ToolEventType.STARTED)

    def ended(self, result: ToolResult) -> None:
        """Tell the result."""
        self.is_open = False
        said, took_s = result.content, result.duration_s
        if result.outcome is Outcome.DONE:
            self._tell(ToolEventType.COMPLETED, duration_s=took_s, success=True, result=said)
        else:
            self._tell(ToolEventType.ERROR, duration_s=took_s, success=False, message=said, result=said)

    def paused(self) -> None:
        """Tell that the call goes on when what it waits for is there."""
        self.is_open = False
        self._tell(ToolEventType.PAUSED)

    def cut_off(self, duration_s: float) -> None:
        """Tell that a call that had begun was cut off together with all others."""
        if self.is_open:
            self.is_open = False
            self._tell(ToolEventType.ERROR, duration_s=duration_s, success=False, message="cut off")

    def _tell(self, kind: ToolEventType, **details: Any) -> None:
        call, behind = self.job.call, self.job.kind
        try:
            arguments = parse_arguments(call)
        except (ValueError, RecursionError):  # of a queue that serves by itself
            arguments = {}
        self.queue.tell(
            ToolEvent(type=kind, call_id=call.id, tool=call.name, kind=behind, arguments=arguments, **details)
        )
