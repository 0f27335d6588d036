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
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
import attrs
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal

T = TypeVar("T")
Given = TypeVarTuple("Given")

_lock = threading.Lock()


@attrs.define(eq=False, repr=False)
class _Home:
    """The thread, as others see it."""

    portal: BlockingPortal
    tasks: TaskGroup
    thread: threading.Thread


_home: _Home | None = None


def _started() -> _Home:
    """Return the thread, started at the first call."""
    global _home  # noqa: PLW0603  one for the process, as its children and sockets are the process's
    with _lock:
        if _home is None:
            opened: Future[tuple[BlockingPortal, TaskGroup]] = Future()
            thread = threading.Thread(target=_live, args=(opened,), name="agentfsm-mcp", daemon=True)
            thread.start()
            _home = _Home(*opened.result(), thread)
        return _home


def _live(opened: Future[tuple[BlockingPortal, TaskGroup]]) -> None:
    async def main() -> None:
        async with BlockingPortal() as portal, anyio.create_task_group() as tasks:
            opened.set_result((portal, tasks))
            await portal.sleep_until_stopped()
            tasks.cancel_scope.cancel()

    anyio.run(main)


async def visit(function: Callable[[Unpack[Given]], Awaitable[T]], *given: *Given) -> T:
    """Run a coroutine function in the thread, and wait for it; cancelling the caller cancels it there."""
    return await _started().portal.call_async(function, *given)


def tasks() -> TaskGroup:
    """Return the task group of the thread, for what runs there."""
    return _started().tasks


@atexit.register
def _close() -> None:
    """End all connections in order: their processes are told to stop, and are waited for."""
    if _home is None:
        return
    with suppress(RuntimeError):
        _home.portal.call(_home.portal.stop)
    _home.thread.join()


def _forget() -> None:
    """Leave the thread to the parent, after a fork."""
    global _home, _lock
    _home, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
