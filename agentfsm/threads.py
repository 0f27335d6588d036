"""Worker threads that never hold the process at exit, and the one way back from a thread into an event loop.

anyio's own worker threads are joined at exit, so a tool that hangs would hang the process; these are daemons. They are
used by the tool queue for plain functions and by the stores for drivers that block.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import anyio
from anyio.lowlevel import current_token

T = TypeVar("T")

IDLE_THREADS = 16
# Idle threads kept for reuse: starting one costs 50 us, keeping one costs its stack.


def waker(function: Callable[[], object]) -> Callable[[], None]:
    """Return a callable that, from any thread, makes the current event loop call `function` soon.

    It never blocks, and does nothing once the loop is closed. anyio's own way back waits for the loop, which a thread
    that renews leases must not do; the loops' own ways do not wait, and differ in name only.
    """
    native: Any = current_token().native_token
    call_soon = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon

    def wake() -> None:
        try:
            call_soon(function)
        except RuntimeError:  # asyncio: the loop is closed; trio.RunFinishedError is one too
            return

    return wake


class Outcome(Generic[T]):
    """A value or an error that a thread hands to a coroutine."""

    __slots__ = ("_error", "_event", "_value", "_wake", "ended")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._wake = waker(self._event.set)
        self._value: T
        self._error: BaseException | None = None
        self.ended = False
        # Whether the thread has handed over.

    def set(self, value: T) -> None:
        """Hand over the value, from the thread."""
        self._value = value
        self.ended = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Hand over an error, from the thread."""
        self._error = error
        self.ended = True
        self._wake()

    async def finish(self) -> None:
        """Wait until the thread has handed over, whatever it was."""
        await self._event.wait()

    async def wait(self) -> T:
        """Return the value or raise the error; a cancelled wait leaves the thread to itself."""
        await self.finish()
        if self._error is not None:
            raise self._error
        return self._value


class _Worker:
    """A daemon thread that runs one job at a time."""

    __slots__ = ("jobs",)

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="agentfsm-tool", daemon=True).start()

    def _work(self) -> None:
        while job := self.jobs.get():
            job()
            del job  # a finished job must not keep its arguments alive
            if len(_idle) >= IDLE_THREADS:
                return
            _idle.append(self)


_idle: list[_Worker] = []


def in_thread(function: Callable[[], T], done: Callable[[], object] = lambda: None) -> Outcome[T]:
    """Start a plain function in a daemon thread, with a copy of the current context variables.

    Args:
        function: What to run.
        done: Called in the thread when the function has ended, also when nobody waits any more.
    """
    outcome: Outcome[T] = Outcome()
    context = contextvars.copy_context()

    def job() -> None:
        try:
            value = context.run(function)
        except BaseException as error:  # noqa: BLE001  it is raised again where the outcome is awaited
            done()
            outcome.fail(error)
        else:
            done()
            outcome.set(value)

    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.jobs.put(job)
    return outcome
