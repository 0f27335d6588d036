"""Deliver events to a user's plain callback, which may raise, be slow or hang without effect on the run.

The callback runs in its own thread. Events that it cannot keep up with are dropped and counted. Async code that needs
every event reads the stream instead, which never drops any.
"""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import anyio
import attrs

from agentfsm._lib.concurrency import make_waker
from agentfsm.core.errors import MisuseError
from agentfsm.streaming.log import LOGGER

# Maximum of events that wait for the callback: enough for a run, and small beside the run itself.
MAX_BUFFERED_EVENTS: Final = 1_000
# Number of events at which the thread stops collecting them.
_URGENT_EVENTS: Final = MAX_BUFFERED_EVENTS // 4
# Seconds that the end of a run waits for the callback: a hanging callback delays it only briefly.
DRAIN_TIMEOUT_S: Final = 1.0
# Seconds until an idle thread ends: longer than the pauses of a model, so that few events start a thread.
IDLE_TIMEOUT_S: Final = 5.0

_ASYNC_CALLBACK_MESSAGE: Final = (
    "A listener is a plain function, called in a thread of its own; this one is async, and nothing would await it. "
    "Read the stream instead: `async with agent.stream(...) as events: async for event in events: ...`."
)


def is_async_callable(callback: Callable[..., object]) -> bool:
    """Return whether calling a function, or an object with `__call__`, returns something to await or to iterate."""
    functions = (callback, type(callback).__call__)
    return any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in functions)


def _check_callback(_outlet: object, _field: object, callback: Callable[[Any], object]) -> None:
    if not callable(callback):
        raise MisuseError(f"A listener is a function that takes an event; {callback!r} cannot be called.")
    if is_async_callable(callback):
        raise MisuseError(_ASYNC_CALLBACK_MESSAGE)


@attrs.frozen(eq=False)
class _DrainWaiter:
    """A task that waits in `drain`."""

    target: int
    """Number of events that the callback must have processed."""

    wake: Callable[[], None]


@attrs.define(eq=False, repr=False)
class CallbackDispatcher:
    """Delivers events to a callback, in order, without waiting for it."""

    callback: Callable[[Any], object] = attrs.field(validator=_check_callback)
    """Plain function that is called with each event."""

    thread_name: str = "agentfsm-listener"
    """Name of the thread that calls it."""

    on_error: Callable[[BaseException], None] | None = None
    """Function that logs each exception of the callback. None: the first of each type is logged."""

    batch_s: float = 0.0
    """Seconds for which the thread collects events before it calls the callback with each of them, so that it does not
    take turns with the event loop for every event. Default 0: it is called at once.
    """

    _buffer: deque[Any] = attrs.field(factory=deque, init=False)
    _accepted: int = attrs.field(default=0, init=False)
    """Number of events put into the buffer so far."""

    _delivered: int = attrs.field(default=0, init=False)
    """Number of events that the callback has processed."""

    _dropped: int = attrs.field(default=0, init=False)
    _errors: int = attrs.field(default=0, init=False)
    _logged_types: set[type] = attrs.field(factory=set, init=False)
    """Exception types already logged: a broken callback raises the same one for every event."""

    _drain_waiters: list[_DrainWaiter] = attrs.field(factory=list, init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)
    """Condition whose lock guards all fields, but for `_delivered` and the end of the buffer that is read, which belong
    to the thread; it is not held while the callback runs.
    """

    _has_thread: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        _DISPATCHERS.add(self)

    @property
    def missed(self) -> int:
        """Number of events that were dropped, or for which the callback raised."""
        return self._dropped + self._errors

    @property
    def is_behind(self) -> bool:
        """Whether the callback has not processed all events."""
        return self._delivered < self._accepted

    @property
    def dropped(self) -> int:
        """Number of events that were dropped."""
        return self._dropped

    @property
    def failed(self) -> int:
        """Number of events for which the callback raised."""
        return self._errors

    def put(self, event: object) -> int:
        """Put an event into the buffer; from any thread, without waiting.

        The event is dropped if `MAX_BUFFERED_EVENTS` others wait.

        Returns:
            0; if the event was dropped, the number of events dropped so far.
        """
        with self._changed:
            if not self._has_thread:
                self._has_thread = _start_daemon(threading.Thread(target=self._run_thread, name=self.thread_name))
            if not self._has_thread or len(self._buffer) >= MAX_BUFFERED_EVENTS:
                self._dropped += 1
                return self._dropped
            self._buffer.append(event)
            self._accepted += 1
            if not self.batch_s or len(self._buffer) in {1, _URGENT_EVENTS}:
                self._changed.notify()
            return 0

    async def drain(self) -> None:
        """Wait until the callback has processed all earlier events, at most `DRAIN_TIMEOUT_S` seconds of real time.

        The event loop's clock is not used, since it may be virtual. On cancellation, the events stay in the buffer.
        """
        with self._changed:
            if self._delivered == self._accepted:
                return
            over = anyio.Event()
            drain = self._add_drain_waiter(make_waker(over.set))
        timer = threading.Timer(DRAIN_TIMEOUT_S, drain.wake)
        try:
            if _start_daemon(timer):
                await over.wait()
        finally:
            timer.cancel()
            with self._changed:
                self._drain_waiters.remove(drain)

    def drain_in_thread(self, timeout_s: float) -> int:
        """Block until the callback has processed all earlier events; return the number that is left when time is up."""
        over = threading.Event()
        with self._changed:
            if self._delivered == self._accepted:
                return 0
            drain = self._add_drain_waiter(over.set)
        over.wait(timeout_s)
        with self._changed:
            self._drain_waiters.remove(drain)
            return max(0, drain.target - self._delivered)

    def _add_drain_waiter(self, wake: Callable[[], None]) -> _DrainWaiter:
        drain = _DrainWaiter(self._accepted, wake)
        self._drain_waiters.append(drain)
        self._changed.notify()
        return drain

    def _run_thread(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._buffer, IDLE_TIMEOUT_S):
                    self._has_thread = False
                    return
                if self.batch_s:
                    self._changed.wait_for(self._is_urgent, self.batch_s)
                collected = len(self._buffer)
            for _ in range(collected):  # without the lock, for which `put` would have to wait
                event = self._buffer.popleft()
                self._deliver(event)
                del event  # an idle thread must not keep it alive
                self._delivered += 1
                if self._drain_waiters:
                    self._wake_drained()
            self._wake_drained()  # those that came between the last two lines

    def _wake_drained(self) -> None:
        with self._changed:
            over = [drain for drain in self._drain_waiters if drain.target <= self._delivered]
        for drain in over:
            drain.wake()

    def _is_urgent(self) -> bool:
        return bool(self._drain_waiters) or len(self._buffer) >= _URGENT_EVENTS

    def _deliver(self, event: object) -> None:
        try:
            answer = self.callback(event)
            if answer is not None and inspect.iscoroutine(answer):
                answer.close()
                raise MisuseError(_ASYNC_CALLBACK_MESSAGE)  # noqa: TRY301  handled like exceptions of the callback
        except BaseException as error:  # noqa: BLE001  the thread goes on, also after sys.exit() in the callback
            self._errors += 1
            with suppress(Exception):  # the application's log handlers may raise
                (self.on_error or self._log_first_of_type)(error)

    def _log_first_of_type(self, error: BaseException) -> None:
        if type(error) not in self._logged_types:
            self._logged_types.add(type(error))
            LOGGER.error("a listener raised; further errors of this type are counted and not logged", exc_info=error)

    def _reset_after_fork(self) -> None:
        """Reset the state in the child of a fork: the thread and the lock's holder exist only in the parent."""
        self._changed = threading.Condition()
        self._buffer.clear()
        self._accepted = self._delivered
        self._has_thread = False


_DISPATCHERS: Final[weakref.WeakSet[CallbackDispatcher]] = weakref.WeakSet()


def _start_daemon(thread: threading.Thread) -> bool:
    """Start a thread that does not delay the exit of the process. Return False if it cannot be started."""
    thread.daemon = True
    try:
        thread.start()
    except RuntimeError:  # the system has no more threads, or the interpreter is shutting down
        return False
    return True


def _reset_all_after_fork() -> None:
    for dispatcher in _DISPATCHERS:
        dispatcher._reset_after_fork()  # noqa: SLF001  of this module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all_after_fork)
