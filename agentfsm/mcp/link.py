"""A connection to one server: opened when it is first needed, owned by one task, opened again when it has died.

All of this runs in the thread of `home`; the methods without a leading underscore are called from anywhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Self, TypeVar, cast

import anyio
import attrs
from anyio.abc import TaskStatus
from mcp import Client
from mcp.client._transport import TransportStreams
from mcp.client.session import ElicitationFnT, IncomingMessage

from agentfsm.mcp import home
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.launch import Launch

T = TypeVar("T")

START_S: Final = 30.0
# Seconds until a server has answered the handshake: a package runner may have to fetch it first.


@attrs.define(eq=False, repr=False, kw_only=True)
class Link:
    """The connection to a server, as callers see it: there whenever it is asked for something."""

    name: str
    launch: Launch
    start_s: float = START_S
    heard: Callable[[IncomingMessage], None] = lambda _message: None
    # What the server says unasked: that its lists have changed.
    elicit: ElicitationFnT | None = None
    # Answers what a server of the handshake era asks in mid-call.
    starts: int = attrs.field(default=0, init=False)
    # Connections so far.
    _client: Client | None = attrs.field(default=None, init=False)
    _scope: anyio.CancelScope | None = attrs.field(default=None, init=False)
    _opening: anyio.Lock | None = attrs.field(default=None, init=False)
    # Made where it is used: it belongs to one event loop.
    _ended: anyio.Event | None = attrs.field(default=None, init=False)

    async def ask(self, question: Callable[[Client], Awaitable[T]]) -> T:
        """Put something to the server, and wait for it; cancelling the caller takes it back.

        Raises:
            MCPServerError: when there is no connection and none can be made; nothing was asked then.
            MCPError: what the server, or the SDK, says of the request.
        """
        return await home.visit(self._ask, question)

    async def aclose(self) -> None:
        """Close the connection, and wait until its process is gone; the next `ask` opens another."""
        await home.visit(self._close)

    async def _ask(self, question: Callable[[Client], Awaitable[T]]) -> T:
        return await question(await self._open())

    def _one_at_a_time(self) -> anyio.Lock:
        if self._opening is None:
            self._opening = anyio.Lock()
        return self._opening

    async def _open(self) -> Client:
        async with self._one_at_a_time():
            if self._client is None:
                self._client = await home.tasks().start(self._own)
            return self._client

    async def _close(self) -> None:
        async with self._one_at_a_time():
            if self._scope is not None and self._ended is not None:
                self._scope.cancel()
                await self._ended.wait()

    async def _own(self, *, task_status: TaskStatus[Client]) -> None:
        """Hold the connection from its beginning to its end, whoever uses it meanwhile."""
        self._ended = ended = anyio.Event()
        self.starts += 1
        has_started = False
        try:
            with anyio.CancelScope() as self._scope:
                with anyio.fail_after(self.start_s) as patience:
                    async with self._connected(self._scope) as client:
                        patience.deadline = float("inf")
                        has_started = True
                        task_status.started(client)
                        await anyio.sleep_forever()
        except Exception as error:
            if not has_started:
                raise MCPServerError(self._why(error)) from error
        finally:
            self._client = self._scope = None
            ended.set()

    @asynccontextmanager
    async def _connected(self, scope: anyio.CancelScope) -> AsyncIterator[Client]:
        noticing = _noticing(self.launch.open(), scope.cancel)
        client = Client(noticing, message_handler=self._hear, elicitation_callback=self.elicit, cache=None)
        async with client:
            # Results are checked by `outputs`, within bounds; and a tool that was not listed is not listed for that.
            cast("Any", client.session).validate_tool_result = _unchecked
            yield client

    async def _hear(self, message: IncomingMessage) -> None:
        self.heard(message)

    def _why(self, error: Exception) -> str:
        words = self.launch.last_words
        said = f"; its last words: {words}" if words else ""
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):  # of a task group of the SDK's
            cause = cause.exceptions[0]
        return (
            f"the MCP server {self.name!r} could not be started: {type(cause).__name__}: {cause}{said}. "
            f"It was started by: {self.launch.shown}"
        )


async def _unchecked(_name: str, _result: object) -> None:
    """Take a result as it is."""


@asynccontextmanager
async def _noticing(transport: Any, ended: Callable[[], object]) -> AsyncIterator[TransportStreams]:
    """Open a transport, and tell when the other side has ended it."""
    async with transport as (read, write):
        yield cast("Any", _Noticed(read, ended)), write


@attrs.define(eq=False, repr=False)
class _Noticed:
    """What is read from a server, whose end is noticed."""

    _stream: Any
    _ended: Callable[[], object]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> _Noticed:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._ended()
            raise

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> bool | None:
        ended: bool | None = await self._stream.__aexit__(*error)
        return ended
