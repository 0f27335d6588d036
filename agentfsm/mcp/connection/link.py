"""A connection to one server: opened when it is first needed, owned by one task, opened again when it has died.

All of this runs in the thread of `home`; the methods without a leading underscore are called from anywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Self, TypeVar, cast

import anyio
import attrs
import mcp.types as m
from anyio.abc import TaskGroup, TaskStatus
from mcp import Client, MCPError
from mcp.client import Transport
from mcp.client.session import ElicitationFnT, IncomingMessage

from agentfsm.core.errors import ClosedError
from agentfsm.mcp.connection import changes, home, trouble
from agentfsm.mcp.connection.bounded import is_of_use
from agentfsm.mcp.connection.client import SiftingClient
from agentfsm.mcp.connection.launch import Launch
from agentfsm.mcp.connection.trouble import Fault, RequestError, Seen
from agentfsm.mcp.errors import MCPServerError, RestingError
from agentfsm.tools.breaker import Breaker, BreakerState, Ticket

T = TypeVar("T")

# Seconds until a server has answered the handshake: a package runner may have to fetch it first.
START_S: Final = 30.0
# Seconds for the stream of changes to open: what is listed only then has missed none.
LISTEN_S: Final = 5.0
# Messages that a server has not taken: one that leaves so many is not listened to when it asks something.
MAX_UNTAKEN: Final = 100

for _name in ("mcp", "client"):  # what the SDK calls its loggers
    # What it tells there is told in errors, too; where nobody has set up logging, a server could fill the terminal.
    logging.getLogger(_name).addHandler(logging.NullHandler())


@attrs.define(eq=False, repr=False)
class _Connection:
    """One life of the connection."""

    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    # Set when nothing of it is left.
    client: Client | None = None
    # None until the handshake is done.
    is_over: bool = False
    # Whether it is of no use any more.
    is_lost: bool = False
    # Whether that is so because the server has ended it.

    def over(self) -> None:
        """End it."""
        self.is_over = True
        self.scope.cancel()

    def lost(self) -> None:
        """End it, since the other side has done so, or is of no use any more."""
        self.is_lost = self.is_lost or not self.is_over
        self.over()


@attrs.define(eq=False, repr=False)
class _Here:
    """What the link has in the thread: another process, forked off, has another."""

    home: home.Home
    opening: anyio.Lock = attrs.field(factory=anyio.Lock)
    connection: _Connection | None = None
    asking: int = 0
    # Requests under way.
    is_closing: bool = False
    # Whether the last of them closes the connection.


@attrs.define(eq=False, repr=False, kw_only=True)
class Link:
    """The connection to a server, as callers see it: there whenever it is asked for something."""

    name: str
    launch: Launch
    start_s: float = START_S
    heard: Callable[[IncomingMessage], None] = lambda _message: None
    # What the server says unasked: that its tools have changed, where it has declared that it would say so. It is also
    # called where that may have been missed.
    elicit: ElicitationFnT | None = None
    # Answers what a server of the handshake era asks in mid-call.
    breaker: Breaker = attrs.field(factory=Breaker)
    # Of the server as a whole, beside those of its tools: it also bounds how often a server that dies is started.
    now: Callable[[], float] = time.monotonic
    # The clock of the breaker, in seconds.
    starts: int = attrs.field(default=0, init=False)
    # Connections so far.
    _here: _Here | None = attrs.field(default=None, init=False)

    async def ask(
        self,
        question: Callable[[Client], Awaitable[T]],
        *,
        patience_s: float = float("inf"),
        proves: bool = True,
    ) -> T:
        """Put something to the server, and wait for it; cancelling the caller takes it back.

        Args:
            question: What is asked; it runs in another thread, in an event loop of asyncio.
            patience_s: Seconds after which a caller who is cancelled has waited in vain, and not lost interest.
            proves: Whether an answer shows that the server is well; one that can list its tools may not be.

        Raises:
            RestingError: when the server has failed so often that it is not asked now.
            MCPServerError: when there is no connection and none can be made; nothing was asked then.
            RequestError: what the server, or the SDK, says of the request; it is an `MCPError`.
        """
        ticket = self.breaker.admit(self.now())
        if not isinstance(ticket, Ticket):
            raise RestingError(self.name, ticket)
        began = self.now()
        try:
            answer = await home.visit(self._ask, question)
        except (MCPServerError, TimeoutError):
            await self._failed(ticket)
            raise
        except RequestError as error:
            if error.is_passing:
                await self._failed(ticket)
            else:
                self.breaker.record_success(ticket)
            raise
        except BaseException:
            if self.now() - began >= patience_s:
                await self._failed(ticket)
            else:
                self.breaker.discard(ticket)
            raise
        if proves:
            self.breaker.record_success(ticket)
        else:
            self.breaker.discard(ticket)
        return answer

    async def aclose(self) -> None:
        """Close the connection, and wait until its process is gone; the next `ask` opens another.

        While somebody else's request is under way, as that of another agent with the same server, the connection stays
        for it, and is closed when that has ended.
        """
        if self._here is not None:
            with suppress(ClosedError):  # the end of the interpreter has closed it
                await home.visit(self._close)

    async def _failed(self, ticket: Ticket) -> None:
        """Count a failure; the one that opens the breaker ends the connection, so that the next one is a new one."""
        self.breaker.record_failure(ticket, self.now())
        if self.breaker.state is BreakerState.OPEN:
            with anyio.CancelScope(shield=True):  # it takes no time
                await home.visit(self._drop)

    def _place(self) -> _Here:
        """Return what the link has in the thread in which this is called."""
        if self._here is None or self._here.home is not home.current():
            self._here = _Here(home.current())
        return self._here

    async def _ask(self, question: Callable[[Client], Awaitable[T]]) -> T:
        here = self._place()
        here.asking += 1
        trouble.SEEN.set(seen := Seen())
        try:
            connection = await self._open(here)
            return await self._answer(connection, question, seen)
        finally:
            here.asking -= 1
            if here.is_closing and not here.asking:
                here.is_closing = False
                if here.connection is not None:
                    here.connection.over()

    async def _answer(self, connection: _Connection, question: Callable[[Client], Awaitable[T]], seen: Seen) -> T:
        try:
            return await question(cast("Client", connection.client))
        except MCPError as error:
            end = await self._end_of(connection)
            if end is not None and seen.error is None:
                seen.error = self.launch.error
            failed = trouble.explained(error, seen, end)
            if failed.fault is Fault.SESSION or seen.is_forgotten:
                connection.over()
            raise failed from error

    async def _end_of(self, connection: _Connection) -> str | None:
        """Say how a connection has ended; None where it has not."""
        if not connection.is_over:
            return None
        await connection.ended.wait()  # a process that ends is waited for by a few seconds at most
        return trouble.brief(self.launch.last_words) or "the connection was closed"

    async def _open(self, here: _Here) -> _Connection:
        async with here.opening:
            if here.connection is not None and here.connection.is_over:
                await here.connection.ended.wait()
            if here.connection is None:
                opened: _Connection = await here.home.tasks.start(self._own, here)
                return opened
            return here.connection

    async def _close(self) -> None:
        here = self._place()
        here.is_closing = here.asking > 0
        if not here.is_closing and here.connection is not None:
            here.connection.over()
            await here.connection.ended.wait()

    async def _drop(self) -> None:
        if (connection := self._place().connection) is not None and connection.client is not None:
            connection.over()

    async def _own(self, here: _Here, *, task_status: TaskStatus[_Connection]) -> None:
        """Hold the connection from its beginning to its end, whoever uses it meanwhile."""
        here.connection = connection = _Connection()
        self.starts += 1
        trouble.SEEN.set(seen := Seen())
        error: Exception | None = None
        has_started = False
        try:
            with connection.scope, anyio.fail_after(self.start_s) as patience:
                async with self._connected(connection) as client, anyio.create_task_group() as tasks:
                    connection.client = client
                    await self._listen(client, tasks)
                    patience.deadline = float("inf")
                    has_started = True
                    task_status.started(connection)
                    await anyio.sleep_forever()
        except Exception as caught:  # noqa: BLE001  whatever ends a connection, its requests tell of it
            error = caught
        finally:
            connection.is_over = True
            here.connection = None
            connection.ended.set()
        if not has_started:
            raise self._unstarted(error, seen, is_lost=connection.is_lost) from error

    @asynccontextmanager
    async def _connected(self, connection: _Connection) -> AsyncIterator[Client]:
        async def hear(message: IncomingMessage) -> None:
            is_told = connection.client is not None and changes.are_told(connection.client)
            if is_told or not isinstance(message, m.ToolListChangedNotification):
                self.heard(message)

        noticing = _noticing(self.launch.open(connection.lost), connection.lost)
        async with SiftingClient(
            noticing, start_s=self.start_s, message_handler=hear, elicitation_callback=self.elicit
        ) as client:
            yield client

    async def _listen(self, client: Client, tasks: TaskGroup) -> None:
        if self.starts > 1:
            self._missed()  # nobody has told what happened since the connection before
        is_open = anyio.Event()
        tasks.start_soon(changes.follow, client, is_open, self._missed)
        with anyio.move_on_after(LISTEN_S):
            await is_open.wait()

    def _missed(self) -> None:
        self.heard(m.ToolListChangedNotification())

    def _unstarted(self, error: Exception | None, seen: Seen, *, is_lost: bool) -> MCPServerError:
        """Say why there is no connection, what the server has left, and what to try."""
        what, is_passing = self._why(_first(error), seen, is_lost=is_lost)
        why = f"the MCP server {self.name!r} cannot be used: {what}"
        left = f"; {words}" if (words := self.launch.last_words) else ""
        return MCPServerError(f"{why}{left}. Next, {self.launch.advice}", why=why, is_passing=is_passing)

    def _why(self, error: Exception | None, seen: Seen, *, is_lost: bool) -> tuple[str, bool]:
        if not isinstance(error, MCPError) and seen.status is not None and seen.status >= trouble.ERROR:
            error = trouble.of_status(seen.status)
        elif is_lost and seen.error is None:
            return "it ended the connection before it had answered", True
        match error:
            case None:
                return "it was closed while it was being opened", True
            case TimeoutError():
                return f"it did not answer within {self.start_s:g} s", True
            case MCPError():
                fault = trouble.explained(error, seen)
                return f"it did not take the handshake: {fault.said}", fault.is_passing
            case _:
                return trouble.words(seen.error or error), not isinstance(error, OSError | ValueError)


def _first(error: Exception | None) -> Exception | None:
    """Return the first error of groups in groups, which task groups make of one that passes through them."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def _noticing(transport: Transport, ended: Callable[[], object]) -> AsyncIterator[Any]:
    """Open a transport, and tell when the other side has ended it."""
    async with transport as (read, write):
        said = _Said(write)
        yield _Heard(read, said, ended), said


@attrs.define(eq=False, repr=False)
class _Stream:
    """A stream of the SDK's."""

    _stream: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> bool | None:
        ended: bool | None = await self._stream.__aexit__(*error)
        return ended


@attrs.define(eq=False, repr=False)
class _Said(_Stream):
    """What is said to a server: how much of that it has not taken yet is known."""

    waiting: int = attrs.field(default=0, init=False)

    async def send(self, message: object) -> None:
        """Say something, when what was said before was taken."""
        self.waiting += 1
        try:
            await self._stream.send(message)
        finally:
            self.waiting -= 1


@attrs.define(eq=False, repr=False)
class _Heard(_Stream):
    """What is read from a server: its end is noticed, and what is of no use is passed over.

    That is what nobody listens to, and what a server asks that does not take our answers: they would pile up.
    """

    _said: _Said
    _ended: Callable[[], object]

    def __aiter__(self) -> _Heard:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                heard = await self._stream.__anext__()
            except StopAsyncIteration:
                self._ended()
                raise
            message = getattr(heard, "message", None)
            if is_of_use(message) and not (isinstance(message, m.JSONRPCRequest) and self._said.waiting >= MAX_UNTAKEN):
                return heard
