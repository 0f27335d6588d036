"""Worker threads that never hold the process at exit, and the one way back from a thread into an event loop.

anyio's own worker threads are joined at exit, so a tool that hangs would hang the process; these are daemons. They are
used by the tool queue for plain functions and by the stores for drivers that block.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from functools import partial
from operator import call
from queue import SimpleQueue
from types import coroutine
from typing import Any, Generic, TypeAlias, TypeVar

import anyio
from anyio.lowlevel import current_token
from sniffio import current_async_library_cvar

T = TypeVar("T")
# An event loop's own way to be told of a function that it shall call; equal for the same loop.
CallSoon: TypeAlias = Callable[[Callable[[], object]], object]

# The clock of what runs in virtual time (`agentfsm.testing.run_virtual`); None where time passes by itself.
virtual_time: contextvars.ContextVar[Callable[[], float] | None] = contextvars.ContextVar("virtual_time", default=None)

# Idle threads kept for reuse: starting one costs 50 us, keeping one costs its stack.
MAX_IDLE_THREADS = 16


def threadsafe_scheduler() -> Callable[[Callable[[], object]], None]:
    """Return a callable that, from any thread, makes the current event loop call a function soon.

    It never blocks, and does nothing once the loop is closed. anyio's own way back waits for the loop, which a thread
    that renews leases must not do; the loops' own ways do not wait, and differ in name only.
    """
    return partial(_schedule, _native_scheduler())


def _native_scheduler(asyncio_method: str = "call_soon_threadsafe") -> CallSoon:
    native: Any = current_token().native_token
    entrance: CallSoon = getattr(native, asyncio_method, None) or native.run_sync_soon
    return entrance


def current_native_loop() -> object:
    """Return the event loop that runs: asyncio's own, or trio's token for it."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return current_token().native_token


def try_call_soon(native: Any, function: Callable[[], object]) -> bool:
    """Make an event loop call a function soon, from any thread; return whether it is still open."""
    return _try_schedule(getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon, function)


def _try_schedule(scheduler: CallSoon, function: Callable[[], object]) -> bool:
    try:
        scheduler(function)
    except RuntimeError:  # asyncio: the loop is closed; trio.RunFinishedError is one too
        return False
    return True


def monotonic_time() -> float:
    """Seconds since some moment, by Python's monotonic clock; in virtual time by that."""
    clock = virtual_time.get()
    return time.monotonic() if clock is None else clock()


def boot_clock() -> float:
    """Seconds since the machine was started, sleep included; elsewhere than on Linux, Python's monotonic clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def next_tick_scheduler() -> CallSoon:
    """Return a callable that makes the current event loop call a function in its next round.

    It is for the loop's own thread, where it costs no system call.
    """
    return _native_scheduler("call_soon")


def _schedule(scheduler: CallSoon, function: Callable[[], object]) -> None:
    try:
        scheduler(function)
    except RuntimeError:  # asyncio: the loop is closed; trio.RunFinishedError is one too
        return


def make_waker(function: Callable[[], object]) -> Callable[[], None]:
    """Return a callable that, from any thread, makes the current event loop call `function` soon."""
    return partial(_schedule, _native_scheduler(), function)


def is_waker_dead(wake: Callable[[], None] | None) -> bool:
    """Whether this is of `make_waker`, and its event loop was closed."""
    if not isinstance(wake, partial) or wake.func is not _schedule:
        return False
    scheduler = wake.args[0]
    is_closed = getattr(getattr(scheduler, "__self__", None), "is_closed", None)  # of asyncio; costs no system call
    return not _try_schedule(scheduler, lambda: None) if is_closed is None else is_closed()


class ThreadWaiter:
    """An event of one event loop that `notify_all` sets from any thread, to wake the coroutine that waits for it."""

    __slots__ = ("event", "scheduler")

    def __init__(self) -> None:
        """Hang it up in the current event loop."""
        self.event = anyio.Event()
        self.scheduler = _native_scheduler()


def notify_all(waiters: Iterable[ThreadWaiter]) -> None:
    """Wake all who wait for these, by one call into each loop.

    Such a call is a system call, and to come back from it a thread waits for the interpreter, up to 5 ms in a busy
    process.
    """
    events: dict[CallSoon, list[anyio.Event]] = {}
    for bell in waiters:
        events.setdefault(bell.scheduler, []).append(bell.event)
    for entrance, of_loop in events.items():
        _schedule(entrance, partial(_set_events, of_loop))


def _set_events(events: Iterable[anyio.Event]) -> None:
    for event in events:
        event.set()


class ThreadFuture(Generic[T]):
    """A value or an error that a thread hands to a coroutine."""

    __slots__ = ("_error", "_value", "_waiter")

    def __init__(self) -> None:
        self._waiter = ThreadWaiter()
        self._value: T
        self._error: BaseException | None = None

    def set_result(self, value: T) -> None:
        """Hand over the value, from the thread."""
        self._value = value
        notify_all([self._waiter])

    def set_exception(self, error: BaseException) -> None:
        """Hand over an error, from the thread."""
        self._error = error
        notify_all([self._waiter])

    async def wait(self) -> T:
        """Return the value or raise the error; a cancelled wait leaves the thread to itself."""
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
    os.register_at_fork(after_in_child=_idle_threads.clear)  # the threads stayed with the parent


def start_in_thread(function: Callable[[], T], on_done: Callable[[], object] = lambda: None) -> ThreadFuture[T]:
    """Start a plain function in a daemon thread, with a copy of the current context variables.

    Args:
        function: What to run.
        on_done: Called in the thread when the function has ended, even if its result is no longer awaited.
    """
    handover: ThreadFuture[T] = ThreadFuture()
    context = contextvars.copy_context()
    context.run(current_async_library_cvar.set, None)  # no event loop runs there, so `run_sync` and the like may

    def job() -> None:
        try:
            value = context.run(function)
        except BaseException as error:  # noqa: BLE001  it is raised again where the handover is awaited
            on_done()
            handover.set_exception(error)
        else:
            on_done()
            handover.set_result(value)

    try:
        worker = _idle_threads.pop()
    except IndexError:
        worker = _DaemonThread()
    worker.jobs.put(job)
    return handover


def is_foreign_cancellation(cancellation: BaseException) -> bool:
    """Whether a cancellation is not the current task's own.

    On asyncio, awaiting a cancelled future raises the very exception that the cancellation of the awaiting task would
    raise. It is the failure of what was awaited, and must not end the task. trio knows no such thing.
    """
    if not isinstance(cancellation, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def in_copied_context(awaitable: Awaitable[T], on_first_suspend: Callable[[], None] | None = None) -> Awaitable[T]:
    """Await something in a copy of the current context: what it sets in context variables does not leak out.

    A task would do the same at ten times the cost. Cancellation and whatever the event loop sends pass through.

    Args:
        awaitable: What to await.
        on_first_suspend: Called when it waits for the first time; never for what ends without waiting.
    """
    return _drive_coroutine(awaitable, contextvars.copy_context().run, on_first_suspend)


def watch_first_suspend(awaitable: Awaitable[T], on_first_suspend: Callable[[], None]) -> Awaitable[T]:
    """Await something, and call `on_first_suspend` when it waits for the first time, if it does."""
    return _drive_coroutine(awaitable, call, on_first_suspend)


@coroutine
def _drive_coroutine(
    awaitable: Awaitable[T],
    run: Callable[..., Any],
    on_first_suspend: Callable[[], None] | None,
) -> Generator[Any, Any, T]:
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
        except BaseException as error:  # noqa: BLE001  it belongs to what is awaited
            throw = error
