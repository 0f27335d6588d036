"""The one thread in which all connections to servers live, with an event loop of its own.

A connection outlives the driving call that opened it, and may be closed by another task, in another event loop, on
asyncio or trio. So it belongs to none of them: it lives here, in a task of its own, and callers come over for each
request. A program that blocks its own event loop loses no connection either.
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
    """The thread, as others see it."""

    portal: BlockingPortal
    task_group: TaskGroup
    """For what runs there for as long as the thread does, or until it ends itself."""

    thread: threading.Thread
    is_closed: bool = False
    """Whether the interpreter is ending: nothing is begun any more."""


_instance: ConnectionThread | None = None


def get_connection_thread() -> ConnectionThread:
    """Return the thread, started at the first call; another one in a process that was forked off.

    Raises:
        ClosedError: when the interpreter is ending.
    """
    global _instance  # noqa: PLW0603  one for the process, as its children and sockets are the process's
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
    return ClosedError("the interpreter is ending, and the connections to MCP servers are closed: ask them before that")


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
    except BaseException as error:  # whoever waits for the thread must not wait for ever
        if not opened.done():
            opened.set_exception(error)
        elif not (ended and isinstance(error, RuntimeError)):
            raise
        # Else all is closed, and asyncio wanted one more thread, to part with those that look up hosts. An interpreter
        # that is ending gives none, from Python 3.12 on.


async def run(function: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
    """Run a coroutine function in the thread, and wait for it; cancelling the caller cancels it there.

    Raises:
        ClosedError: when the interpreter is ending.
    """
    home = get_connection_thread()
    try:
        return await home.portal.call_async(function, *args)
    except (CancelledError, RuntimeError):
        if home.is_closed:
            raise _closed_error() from None
        raise


@atexit.register
def _shut_down() -> None:
    """End all connections in order: their processes are told to stop, and are waited for."""
    home = _instance
    if home is None:
        return
    home.is_closed = True
    with suppress(RuntimeError):  # it has ended by itself
        home.portal.start_task_soon(home.portal.stop, True)
    home.thread.join()


def _reset_after_fork() -> None:
    """Leave the thread to the parent, after a fork."""
    global _instance, _lock
    _instance, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
