"""Tasks that belong to no task group: the executions of streams.

A stream may be left in another task than the one that entered it, because an async generator around it is closed by
the task that finalises it. A cancel scope that the reader's task had entered would then cancel that task for good. So
an execution has a task of its own, in the event loop and the context of the reader, whose end is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar, copy_context
from importlib import import_module
from typing import Any, Final

import anyio
import attrs
from anyio.lowlevel import current_token

from agentfsm._lib.concurrency import try_call_soon
from agentfsm.core.errors import first_error

# Name of the tasks in a debugger.
TASK_NAME: Final = "agentfsm.stream"

# Scopes of the detached tasks that the current code is a part of: it must not wait for the end of these tasks.
_enclosing: Final[ContextVar[tuple[anyio.CancelScope, ...]]] = ContextVar("enclosing", default=())


@attrs.define(eq=False, repr=False)
class DetachedTask:
    """A task of the event loop in which this object is made. It ends by itself, by `cut_off`, or with the loop."""

    _function: Callable[[], Awaitable[object]]
    _on_end: Callable[[BaseException | None, bool], None]
    """Called at the end of the task, with the error of the function, and whether the function was cut off."""

    owner: object
    """Object whose closing ends the task; see `cut_off_owned`."""

    is_over: bool = attrs.field(default=False, init=False)
    """Whether the task has ended, with its clean-up."""

    _scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope, init=False)
    """Cancel scope of the task, which no other task enters."""

    _loop: Any = attrs.field(factory=lambda: current_token().native_token, init=False)
    """The event loop: asyncio's, or trio's token."""

    _over: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _task: asyncio.Task[None] | None = attrs.field(default=None, init=False)

    def start(self) -> None:
        """Start the task, with a copy of the current context variables."""
        if self._loop not in _running:
            for loop in list(_running):
                if getattr(loop, "is_closed", bool)():  # it was closed under its tasks, which do not end any more
                    _running.pop(loop, None)
        _running.setdefault(self._loop, set()).add(self)
        outer = _enclosing.set((*_enclosing.get(), self._scope))
        try:
            if self._is_asyncio:
                self._task = asyncio.create_task(self._run(), name=TASK_NAME)
                self._task.add_done_callback(self._see_end)
            else:
                lowlevel = import_module("trio").lowlevel
                lowlevel.disable_ki_protection(DetachedTask._execute)  # Ctrl-C interrupts code that blocks the loop
                lowlevel.spawn_system_task(self._run, name=TASK_NAME, context=copy_context())
        except BaseException:
            self._forget()
            raise
        finally:
            _enclosing.reset(outer)

    @property
    def _is_asyncio(self) -> bool:
        return hasattr(self._loop, "create_task")

    async def _execute(self) -> None:
        with self._scope:
            await self._function()

    async def _run(self) -> None:
        error: BaseException | None = None
        was_cut_off = False
        try:
            await self._execute()
            was_cut_off = self._scope.cancelled_caught
        except BaseException as raised:
            error = raised
            if isinstance(raised, BaseExceptionGroup) and not isinstance(raised, Exception):
                error = first_error(raised)
            is_closed = isinstance(error, GeneratorExit)  # after the end of the event loop
            if is_closed or isinstance(error, anyio.get_cancelled_exc_class()):  # by the end of the loop or other code
                error, was_cut_off = None, True
            # Ctrl-C ends the event loop of asyncio at once. A system task of trio must not raise anything.
            if self._is_asyncio and not isinstance(raised, Exception):
                raise
        finally:
            self._end(error, was_cut_off=was_cut_off)

    def _see_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # else asyncio logs that it was not read
        if not self.is_over:  # it was cancelled by other code before its first step
            self._end(None, was_cut_off=True)

    def _end(self, error: BaseException | None, *, was_cut_off: bool) -> None:
        self._forget()
        self.is_over = True
        self._on_end(error, was_cut_off)
        self._over.set()

    def _forget(self) -> None:
        tasks = _running.get(self._loop)
        if tasks is not None:
            tasks.discard(self)
            if not tasks:
                _running.pop(self._loop, None)

    def cancel_soon(self) -> None:
        """Request the end of the task, from any thread and from the garbage collector. Does not wait."""
        try_call_soon(self._loop, self._scope.cancel)


# Tasks that are not over, by event loop; asyncio itself has only weak references to its tasks.
_running: Final[dict[object, set[DetachedTask]]] = {}


async def cut_off(tasks: Iterable[DetachedTask]) -> None:
    """Cancel tasks and wait for their ends, shielded from cancellation.

    The wait is as long as the clean-up of the tasks takes, which bounds itself. A task of another event loop, and one
    that the caller is a part of, are cancelled without a wait.

    Raises:
        BaseException: that interrupted the wait, such as asyncio's own cancellation, at the end of the wait.
    """
    try:
        loop = current_token().native_token
    except anyio.NoEventLoopError:  # a coroutine or generator that is closed after the end of its event loop
        loop = None
    awaited = []
    for task in tasks:
        if task.is_over:
            continue
        if task._loop is not loop:  # noqa: SLF001  of this module
            task.cancel_soon()
            continue
        task._scope.cancel()  # noqa: SLF001
        if task._scope not in _enclosing.get():  # noqa: SLF001
            awaited.append(task)
    interruption: BaseException | None = None
    for task in awaited:
        while not task.is_over:
            try:
                with anyio.CancelScope(shield=True):
                    await task._over.wait()  # noqa: SLF001
            except GeneratorExit:  # the caller was closed and cannot wait
                raise
            except BaseException as error:  # noqa: BLE001  raised below
                interruption = error
    if interruption is not None:
        raise interruption


async def cut_off_owned(owner: object) -> None:
    """Cut off the tasks that use `owner`, in all event loops, except those that the caller is a part of."""
    tasks = [task for running in list(_running.values()) for task in list(running) if task.owner is owner]
    await cut_off([task for task in tasks if task._scope not in _enclosing.get()])  # noqa: SLF001
