"""Carry the questions of a server from the connection thread to the task that makes the call, and the answers back.

The person who attends a run is asked in the event loop of the run, since the answer is committed to its journal there.
The server's question arrives in the connection thread, while that task waits for the result of the call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar

import anyio
import attrs

from agentfsm._lib.concurrency import ThreadFuture, threadsafe_scheduler
from agentfsm.core.errors import first_error
from agentfsm.tools.run_context import InputRequired

T = TypeVar("T")
# Asks the attending person the questions of a call. Returns the answers by key, or None if the person gave none.
AskPerson: TypeAlias = Callable[[InputRequired], Awaitable[Mapping[str, Any] | None]]


class CallEndedError(Exception):
    """The call of a question has ended, so that its answer cannot be used."""


@attrs.define(eq=False, repr=False)
class _RelayedQuestion:
    """A question on its way. It is made in the connection thread."""

    asked: InputRequired
    reply: ThreadFuture[Mapping[str, Any] | None] = attrs.field(factory=ThreadFuture)
    is_withdrawn: bool = False
    """Whether the server does not wait for the answer any more."""

    scope: anyio.CancelScope | None = None
    """Scope in the task of the call in which the person is asked; None before that."""

    def withdraw(self) -> None:
        """Stop asking; called in the event loop of the call."""
        self.is_withdrawn = True
        if self.scope is not None:
            self.scope.cancel()


@attrs.define(eq=False, repr=False)
class QuestionRelay:
    """Relay of one call. It is made in the event loop of the call."""

    ask_person: AskPerson
    _schedule: Callable[[Callable[[], object]], None] = attrs.field(factory=threadsafe_scheduler, init=False)
    _queue: list[_RelayedQuestion] = attrs.field(factory=list, init=False)
    _arrived: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _is_closed: bool = attrs.field(default=False, init=False)

    async def run(self, request: Awaitable[T]) -> T:
        """Await a request in the event loop of the call, and ask the questions that arrive meanwhile.

        Raises:
            Exception: the error of the request; or that of the journal, which ends the request.
        """
        error: Exception | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._serve)
                try:
                    return await request
                except Exception as caught:  # noqa: BLE001  it is raised again, without the group around it
                    error = caught
                finally:
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        assert error is not None  # otherwise the request has returned  # noqa: S101
        raise error

    async def ask(self, asked: InputRequired) -> Mapping[str, Any] | None:
        """Ask from the connection thread. Return the answers by key, or None if the person gave none.

        Raises:
            CallEndedError: when the call has ended.
        """
        question = _RelayedQuestion(asked)
        self._schedule(partial(self._receive, question))
        try:
            return await question.reply.wait()
        finally:
            self._schedule(question.withdraw)

    def _receive(self, question: _RelayedQuestion) -> None:
        if self._is_closed:
            question.reply.set_exception(CallEndedError())
            return
        self._queue.append(question)
        self._arrived.set()

    async def _serve(self) -> None:
        try:
            while True:
                await self._arrived.wait()
                self._arrived = anyio.Event()
                while self._queue:
                    await self._answer(self._queue[0])
                    self._queue.pop(0)
        finally:
            self._is_closed = True
            for question in self._queue:
                question.reply.set_exception(CallEndedError())

    async def _answer(self, question: _RelayedQuestion) -> None:
        with anyio.CancelScope() as question.scope:
            if not question.is_withdrawn:
                question.reply.set_result(await self.ask_person(question.asked))
