"""Thread with its own event loop, in which all connections to servers live.

A connection outlives the execution that opened it, and may be closed by another task, in another event loop, on
asyncio or trio. So each connection has a task in this thread, to which callers submit their requests. A program that
blocks its own event loop does not lose its connections either.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
import attrs
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal

from agentfsm.core.errors import ClosedError

T = TypeVar("T")
Args = TypeVarTuple("Args")

_lock = threading.Lock()


@attrs.define(eq=False, repr=False)
class ConnectionThread:
    """Handle of the connection thread."""

    portal: BlockingPortal
    task_group: TaskGroup
    """Task group for tasks that may last as long as the thread."""

    thread: threading.Thread
    is_closed: bool = False
    """Whether the interpreter is exiting, so that no request is started."""


_instance: ConnectionThread | None = None


def get_connection_thread() -> ConnectionThread:
    """Return the thread, which the first call starts. A forked process starts its own.

    Raises:
        ClosedError: when the interpreter is exiting.
    """
    global _instance  # noqa: PLW0603  one for each process, which owns the subprocesses and sockets
    with _lock:
        if _instance is None:
            opened: Future[tuple[BlockingPortal, TaskGroup]] = Future()
            thread = threading.Thread(target=_run_event_loop, args=(opened,), name="agentfsm-mcp", daemon=True)
            thread.start()
            _instance = ConnectionThread(*opened.result(), thread)
        if _instance.is_closed:
            raise _closed_error()
        return _instance


def _closed_error() -> ClosedError:
    return ClosedError(
        "the connections to MCP servers are closed, because the interpreter is exiting: use them earlier"
    )


def _run_event_loop(opened: Future[tuple[BlockingPortal, TaskGroup]]) -> None:
    ended = False

    async def main() -> None:
        nonlocal ended
        async with BlockingPortal() as portal, anyio.create_task_group() as tasks:
            opened.set_result((portal, tasks))
            await portal.sleep_until_stopped()
            tasks.cancel_scope.cancel()
        ended = True

    try:
        anyio.run(main)
    except BaseException as error:  # the caller that waits for `opened` must not wait for ever
        if not opened.done():
            opened.set_exception(error)
        elif not (ended and isinstance(error, RuntimeError)):
            raise
        # Otherwise all is closed, and asyncio failed to start a thread in which it shuts down its default executor.
        # From Python 3.12 on, an exiting interpreter starts no threads.


async def run(function: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
    """Run a coroutine function in the thread, and wait for it. Cancelling the caller cancels the function.

    Raises:
        ClosedError: when the interpreter is exiting.
    """
    thread = get_connection_thread()
    try:
        return await thread.portal.call_async(function, *args)
    except (CancelledError, RuntimeError):
        if thread.is_closed:
            raise _closed_error() from None
        raise


@atexit.register
def _shut_down() -> None:
    """Close all connections: ask their processes to stop, and wait for them."""
    instance = _instance
    if instance is None:
        return
    instance.is_closed = True
    with suppress(RuntimeError):  # the thread has ended already
        instance.portal.start_task_soon(instance.portal.stop, True)
    instance.thread.join()


def _reset_after_fork() -> None:
    """Forget the parent's thread after a fork."""
    global _instance, _lock
    _instance, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
