"""Worker threads that do not delay the exit of the process, and calls from a thread into an event loop.

anyio's worker threads are joined at exit, so a hanging tool would hang the process; these threads are daemons. The tool
queue uses them for plain functions, and the stores for blocking drivers.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from functools import cache, partial
from operator import call
from queue import SimpleQueue
from types import coroutine
from typing import Any, Generic, TypeAlias, TypeVar

import anyio
from anyio.lowlevel import current_token
from sniffio import current_async_library_cvar

T = TypeVar("T")
# Method of an event loop that schedules a function; equal for the same loop.
CallSoon: TypeAlias = Callable[[Callable[[], object]], object]

# Clock of code in virtual time (`agentfsm.testing.run_virtual`); None in real time.
virtual_time: contextvars.ContextVar[Callable[[], float] | None] = contextvars.ContextVar("virtual_time", default=None)

# Idle threads kept for reuse: starting one costs 50 us, keeping one costs its stack.
MAX_IDLE_THREADS = 16


def threadsafe_scheduler() -> Callable[[Callable[[], object]], None]:
    """Return a callable that schedules a function in the current event loop, from any thread.

    It never blocks, and does nothing once the loop is closed. anyio's own function waits for the loop, which a thread
    that renews leases must not do; the native methods of the loops do not wait, and differ in name only.
    """
    return partial(_schedule, _native_scheduler())


def _native_scheduler(asyncio_method: str = "call_soon_threadsafe") -> CallSoon:
    native: Any = current_token().native_token
    scheduler: CallSoon = getattr(native, asyncio_method, None) or native.run_sync_soon
    return scheduler


def current_native_loop() -> object:
    """Return the running event loop: asyncio's loop, or trio's token."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return current_token().native_token


def make_scope(deadline: float = math.inf) -> anyio.CancelScope:
    """Return `anyio.CancelScope(deadline=deadline)`, at 40 % of its cost on asyncio.

    It takes 15,000 instructions, a hundredth of a turn, because the class of the backend is initialised twice there: by
    its factory, and again as the result of `__new__`.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    # Trio runs without a task of asyncio, also as a guest of its loop.
    return anyio.CancelScope(deadline=deadline) if task is None else _find_scope_class()(deadline=deadline)


@cache
def _find_scope_class() -> type[anyio.CancelScope]:
    """Return the class of asyncio's cancel scopes."""
    return type(anyio.CancelScope())


def try_call_soon(native: Any, function: Callable[[], object]) -> bool:
    """Schedule a function in an event loop, from any thread. Return whether the loop is open."""
    return _try_schedule(getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon, function)


def _schedule(scheduler: CallSoon, function: Callable[[], object]) -> None:
    _try_schedule(scheduler, function)


def _try_schedule(scheduler: CallSoon, function: Callable[[], object]) -> bool:
    try:
        scheduler(function)
    except RuntimeError:  # asyncio: the loop is closed; trio.RunFinishedError is a subclass
        return False
    return True


def monotonic_time() -> float:
    """Return the seconds of Python's monotonic clock, or of virtual time."""
    clock = virtual_time.get()
    return time.monotonic() if clock is None else clock()


def boot_clock() -> float:
    """Return the seconds since the machine was started, sleep included; the monotonic clock if not on Linux."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def next_tick_scheduler() -> CallSoon:
    """Return a callable that schedules a function in the next round of the current event loop.

    It may be called in the loop's own thread only, and makes no system call.
    """
    return _native_scheduler("call_soon")


def make_waker(function: Callable[[], object]) -> Callable[[], None]:
    """Return a callable that schedules `function` in the current event loop, from any thread."""
    return partial(_schedule, _native_scheduler(), function)


def is_waker_dead(wake: Callable[[], None] | None) -> bool:
    """Return whether a callable was created by `make_waker` in an event loop that is closed now."""
    if not isinstance(wake, partial) or wake.func is not _schedule:
        return False
    scheduler = wake.args[0]
    is_closed = getattr(getattr(scheduler, "__self__", None), "is_closed", None)  # asyncio only; makes no system call
    return not _try_schedule(scheduler, lambda: None) if is_closed is None else is_closed()


class ThreadWaiter:
    """Event of one event loop that `notify_all` sets from any thread."""

    __slots__ = ("event", "scheduler")

    def __init__(self) -> None:
        """Create the event in the current event loop."""
        self.event = anyio.Event()
        self.scheduler = _native_scheduler()


def notify_all(waiters: Iterable[ThreadWaiter]) -> None:
    """Set the events of all waiters, with one call into each event loop.

    Each call is a system call, after which the thread waits for the interpreter lock, up to 5 ms in a busy process.
    """
    events: dict[CallSoon, list[anyio.Event]] = {}
    for waiter in waiters:
        events.setdefault(waiter.scheduler, []).append(waiter.event)
    for scheduler, of_loop in events.items():
        _schedule(scheduler, partial(_set_events, of_loop))


def _set_events(events: Iterable[anyio.Event]) -> None:
    for event in events:
        event.set()


class ThreadFuture(Generic[T]):
    """Result of a thread, a value or an error, for a coroutine."""

    __slots__ = ("_error", "_value", "_waiter")

    def __init__(self) -> None:
        self._waiter = ThreadWaiter()
        self._value: T
        self._error: BaseException | None = None

    def set_result(self, value: T) -> None:
        """Set the value, from the thread."""
        self._value = value
        notify_all([self._waiter])

    def set_exception(self, error: BaseException) -> None:
        """Set the error, from the thread."""
        self._error = error
        notify_all([self._waiter])

    async def wait(self) -> T:
        """Return the value or raise the error. Cancelling the wait does not stop the thread."""
        await self._waiter.event.wait()
        if self._error is not None:
            raise self._error
        return self._value


class _DaemonThread:
    """A daemon thread that runs one job at a time."""

    __slots__ = ("jobs",)

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="agentfsm-tool", daemon=True).start()

    def _run(self) -> None:
        while job := self.jobs.get():
            job()
            del job  # a finished job must not keep its arguments alive
            if len(_idle_threads) >= MAX_IDLE_THREADS:
                return
            _idle_threads.append(self)


_idle_threads: list[_DaemonThread] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle_threads.clear)  # the threads exist only in the parent


def start_in_thread(
    function: Callable[[], T],
    on_done: Callable[[], object] = lambda: None,
    *,
    context: contextvars.Context | None = None,
) -> ThreadFuture[T]:
    """Start a plain function in a daemon thread, with a copy of the current context variables.

    Args:
        function: The function.
        on_done: Called in the thread when the function has ended, even if its result is no longer awaited.
        context: Context variables for the function, changed by this call; None: a copy of the current ones.
    """
    handover: ThreadFuture[T] = ThreadFuture()
    context = context or contextvars.copy_context()
    context.run(current_async_library_cvar.set, None)  # no event loop runs in the thread

    def job() -> None:
        nonlocal function
        try:
            value = context.run(function)
        except BaseException as error:  # noqa: BLE001  `wait` raises it
            del function
            on_done()
            handover.set_exception(error)
        else:
            del function  # who awaits the result may go on before this thread, and drop what the function belongs to
            on_done()
            handover.set_result(value)

    try:
        worker = _idle_threads.pop()
    except IndexError:
        worker = _DaemonThread()
    worker.jobs.put(job)
    return handover


def is_foreign_cancellation(cancellation: BaseException) -> bool:
    """Return whether a cancellation is not the current task's own.

    On asyncio, awaiting a cancelled future raises the same exception as the cancellation of the awaiting task. That is
    a failure of the awaited object, and must not end the task. It does not happen on trio.
    """
    if not isinstance(cancellation, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


class SharedWork:
    """Work that several tasks need and one of them does: when it stops, all others look whether theirs is done.

    With a lock they would get their turn one after the other, each in a round of the event loop of its own.
    """

    __slots__ = ("_stopped",)

    def __init__(self) -> None:
        self._stopped: anyio.Event | None = None

    async def do_until(self, is_done: Callable[[], bool], work: Callable[[], Awaitable[object]]) -> None:
        """Return once the work is done. The first task to call this does the work, and the others wait for it.

        If the working task is cancelled, one of the waiting tasks does the work.

        Raises:
            Exception: that of the work, to the task that did it.
        """
        while not is_done():
            if self._stopped is not None:
                await self._stopped.wait()
                continue
            stopped = self._stopped = anyio.Event()
            try:
                await work()
            finally:
                self._stopped = None
                stopped.set()


@coroutine
def drive(
    awaitable: Awaitable[T],
    on_first_suspend: Callable[[], None] | None = None,
    *,
    context: contextvars.Context | None = None,
) -> Generator[Any, Any, T]:
    """Await an object, in a context of its own if one is given: changes of context variables then do not leak out.

    A task would do the same at ten times the cost. Cancellations and values from the event loop pass through.

    Args:
        awaitable: The object.
        on_first_suspend: Called when the awaitable first suspends; not called if it ends without suspending.
        context: The context, usually a copy of the current one. None: the current one.
    """
    run: Callable[..., Any] = call if context is None else context.run
    steps: Any = awaitable.__await__()
    throw: BaseException | None = None
    value: Any = None
    while True:
        try:
            wish = run(steps.send, value) if throw is None else run(steps.throw, throw)
        except StopIteration as end:
            result: T = end.value
            return result
        if on_first_suspend is not None:
            on_first_suspend()
            on_first_suspend = None
        try:
            throw, value = None, (yield wish)
        except BaseException as error:  # noqa: BLE001  raised inside the awaitable
            throw = error
