"""Connection to one server: opened on first use, owned by one task, and opened again after it was lost.

It lives in the connection thread. The public methods may be called from any event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Self, TypeVar, cast

import anyio
import attrs
import mcp.types as m
from anyio.abc import TaskGroup, TaskStatus
from mcp import Client, MCPError
from mcp.client import ClientExtension, Transport
from mcp.client.session import ElicitationFnT, IncomingMessage

from agentfsm.core.errors import ClosedError
from agentfsm.mcp.connection import connection_thread, request_errors, tool_changes
from agentfsm.mcp.connection.http_client import is_relevant
from agentfsm.mcp.connection.lenient_parsing import LenientClient
from agentfsm.mcp.connection.request_errors import RequestError, RequestFault, WireStatus
from agentfsm.mcp.connection.transports import ServerTransport
from agentfsm.mcp.errors import LoginRequiredError, MCPServerError, ServerCircuitOpenError
from agentfsm.tools.breaker import Breaker, BreakerState, Ticket

T = TypeVar("T")

# Seconds until the server has to answer the handshake: a package runner may have to download it first.
START_TIMEOUT_S: Final = 30.0
# Seconds to wait for the stream of changes: tools that are listed after it has opened miss no change.
LISTEN_TIMEOUT_S: Final = 5.0
# Messages that the server has not read yet; beyond this number its requests are ignored.
MAX_UNSENT_MESSAGES: Final = 100

for _name in ("mcp", "client"):  # the SDK's loggers
    # Our errors have the same information. Without logging configuration, a server could flood the terminal.
    logging.getLogger(_name).addHandler(logging.NullHandler())


@attrs.define(eq=False, repr=False)
class _OpenConnection:
    """Connection from its opening to its end."""

    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    """Set when everything is closed."""

    client: Client | None = None
    """Client of the SDK. None until the handshake is done."""

    is_over: bool = False
    """Whether the connection cannot be used any more."""

    is_lost: bool = False
    """Whether the connection is over because the server ended it."""

    def end(self) -> None:
        """Close the connection."""
        self.is_over = True
        self.scope.cancel()

    def mark_lost(self) -> None:
        """Close the connection because the server ended it or cannot be used any more."""
        self.is_lost = self.is_lost or not self.is_over
        self.end()


@attrs.define(eq=False, repr=False)
class _ThreadState:
    """State in the connection thread; a forked process has its own."""

    thread: connection_thread.ConnectionThread
    open_lock: anyio.Lock = attrs.field(factory=anyio.Lock)
    connection: _OpenConnection | None = None
    active_requests: int = 0
    """Number of requests in progress."""

    is_closing: bool = False
    """Whether the end of the last active request closes the connection."""


@attrs.define(eq=False, repr=False, kw_only=True)
class ServerConnection:
    """Connection to a server that opens on demand."""

    name: str
    transport: ServerTransport
    start_s: float = START_TIMEOUT_S
    on_message: Callable[[IncomingMessage], None] = lambda _message: None
    """Receives the server's notifications: changed tools only if the server declared that it reports them. It also
    receives a notification of changed tools when one may have been missed.
    """

    elicit: ElicitationFnT | None = None
    """Answers the questions that a handshake-era server asks during a call."""

    extensions: Sequence[ClientExtension] = ()
    """Extensions of the protocol that servers may use."""

    breaker: Breaker = attrs.field(factory=Breaker)
    """Circuit breaker of the whole server, besides those of its tools. It also limits restarts of a crashing server."""

    now: Callable[[], float] = time.monotonic
    """Clock of the breaker, in seconds."""

    start_count: int = attrs.field(default=0, init=False)
    """Number of connections so far."""

    _thread_state: _ThreadState | None = attrs.field(default=None, init=False)

    async def request(
        self,
        operation: Callable[[Client], Awaitable[T]],
        *,
        patience_s: float = float("inf"),
        proves_health: bool = True,
    ) -> T:
        """Make a request and return its result. Cancelling the caller cancels the request.

        Args:
            operation: Function that makes the request; it runs in the connection thread, on asyncio.
            patience_s: Seconds after which the cancellation of the caller counts as a failure of the server.
            proves_health: Whether success shows that the server is healthy; listing the tools does not.

        Raises:
            ServerCircuitOpenError: when the server has failed so often that it gets no requests for a while.
            MCPServerError: when no connection could be opened; nothing was sent then.
            RequestError: when the server or the SDK reports an error of the request; it is an `MCPError`.
        """
        ticket = self.breaker.admit(self.now())
        if not isinstance(ticket, Ticket):
            raise ServerCircuitOpenError(self.name, ticket)
        began = self.now()
        try:
            answer = await connection_thread.run(self._request_in_thread, operation)
        except (MCPServerError, TimeoutError):
            await self._record_failure(ticket)
            raise
        except RequestError as error:
            if error.is_passing:
                await self._record_failure(ticket)
            else:
                self.breaker.record_success(ticket)
            raise
        except BaseException:
            if self.now() - began >= patience_s:
                await self._record_failure(ticket)
            else:
                self.breaker.discard(ticket)
            raise
        if proves_health:
            self.breaker.record_success(ticket)
        else:
            self.breaker.discard(ticket)
        return answer

    async def aclose(self) -> None:
        """Close the connection, and wait until its process has ended. The next `request` opens another.

        If other requests are in progress, such as those of another agent with the same server, the connection is closed
        after the last of them, and this method does not wait.
        """
        if self._thread_state is not None:
            with suppress(ClosedError):  # the exit of the interpreter has closed it
                await connection_thread.run(self._close)

    async def _record_failure(self, ticket: Ticket) -> None:
        """Count a failure. If it opens the breaker, close the connection, so that the next request opens a new one."""
        self.breaker.record_failure(ticket, self.now())
        if self.breaker.state is BreakerState.OPEN:
            with anyio.CancelScope(shield=True):  # it does not wait
                await connection_thread.run(self._drop)

    def _get_thread_state(self) -> _ThreadState:
        """Return the state for the current connection thread."""
        if self._thread_state is None or self._thread_state.thread is not connection_thread.get_connection_thread():
            self._thread_state = _ThreadState(connection_thread.get_connection_thread())
        return self._thread_state

    async def _request_in_thread(self, operation: Callable[[Client], Awaitable[T]]) -> T:
        here = self._get_thread_state()
        here.active_requests += 1
        request_errors.WIRE_STATUS.set(seen := WireStatus())
        try:
            async with here.open_lock:
                if here.connection is not None and here.connection.is_over:
                    await here.connection.ended.wait()
                connection = here.connection or await here.thread.task_group.start(self._hold_open, here)
            return await self._run_operation(connection, operation, seen)
        finally:
            here.active_requests -= 1
            if here.is_closing and not here.active_requests:
                here.is_closing = False
                if here.connection is not None:
                    here.connection.end()

    async def _run_operation(
        self, connection: _OpenConnection, operation: Callable[[Client], Awaitable[T]], wire_status: WireStatus
    ) -> T:
        try:
            return await operation(cast("Client", connection.client))
        except MCPError as error:
            end = None
            if connection.is_over:
                await connection.ended.wait()  # a process that does not end is killed after a few seconds
                end = request_errors.shorten(self.transport.exit_report) or "the connection was closed"
                wire_status.error = wire_status.error or self.transport.error
            failed = request_errors.classify_error(error, wire_status, end)
            if failed.fault is RequestFault.SESSION or wire_status.is_session_lost:
                connection.end()
            raise failed from error

    async def _close(self) -> None:
        here = self._get_thread_state()
        here.is_closing = here.active_requests > 0
        if not here.is_closing and here.connection is not None:
            here.connection.end()
            await here.connection.ended.wait()

    async def _drop(self) -> None:
        if (connection := self._get_thread_state().connection) is not None and connection.client is not None:
            connection.end()

    async def _hold_open(self, here: _ThreadState, *, task_status: TaskStatus[_OpenConnection]) -> None:
        """Open the connection, and keep it open until it is closed or lost."""
        here.connection = connection = _OpenConnection()
        self.start_count += 1
        request_errors.WIRE_STATUS.set(seen := WireStatus())
        error: Exception | None = None
        has_started = False
        try:
            with connection.scope, anyio.fail_after(self.start_s) as patience:
                async with self._connect(connection) as client, anyio.create_task_group() as tasks:
                    connection.client = client
                    await self._listen(client, tasks)
                    patience.deadline = float("inf")
                    has_started = True
                    task_status.started(connection)
                    await anyio.sleep_forever()
        except Exception as caught:  # noqa: BLE001  the requests report it
            error = caught
        finally:
            connection.is_over = True
            here.connection = None
            connection.ended.set()
        if not has_started:
            raise self._build_start_error(error, seen, is_lost=connection.is_lost) from error

    @asynccontextmanager
    async def _connect(self, connection: _OpenConnection) -> AsyncIterator[Client]:
        async def hear(message: IncomingMessage) -> None:
            is_declared = connection.client is not None and tool_changes.announces_changes(connection.client)
            if is_declared or not isinstance(message, m.ToolListChangedNotification):
                self.on_message(message)

        observed = _observe_transport(self.transport.open(connection.mark_lost), connection.mark_lost)
        async with LenientClient(
            observed,
            start_s=self.start_s,
            message_handler=hear,
            elicitation_callback=self.elicit,
            extensions=self.extensions,
        ) as client:
            yield client

    async def _listen(self, client: Client, tasks: TaskGroup) -> None:
        if self.start_count > 1:
            self._report_gap()  # changes since the previous connection were not reported
        is_open = anyio.Event()
        tasks.start_soon(tool_changes.follow, client, is_open, self._report_gap)
        with anyio.move_on_after(LISTEN_TIMEOUT_S):
            await is_open.wait()

    def _report_gap(self) -> None:
        self.on_message(m.ToolListChangedNotification())

    def _build_start_error(self, error: Exception | None, wire_status: WireStatus, *, is_lost: bool) -> MCPServerError:
        """Build the error of a failed start: the reason, the report of the process, and advice."""
        if isinstance(wire_status.error, LoginRequiredError):
            return LoginRequiredError(wire_status.error.reason, wire_status.error.advice, server=self.name)
        while isinstance(error, ExceptionGroup):  # of task groups
            error = error.exceptions[0]
        reason, is_passing = self._explain_start_failure(error, wire_status, is_lost=is_lost)
        why = f"the MCP server {self.name!r} cannot be used: {reason}"
        report = f"; {text}" if (text := self.transport.exit_report) else ""
        return MCPServerError(f"{why}{report}. Next, {self.transport.advice}", why=why, is_passing=is_passing)

    def _explain_start_failure(
        self, error: Exception | None, wire_status: WireStatus, *, is_lost: bool
    ) -> tuple[str, bool]:
        if (
            not isinstance(error, MCPError)
            and wire_status.status is not None
            and wire_status.status >= request_errors.FIRST_ERROR
        ):
            error = request_errors.build_status_error(wire_status.status)
        elif is_lost and wire_status.error is None:
            return "it closed the connection before answering", True
        match error:
            case None:
                return "the connection was closed while it was being opened", True
            case TimeoutError():
                return f"it did not answer within {self.start_s:g} s", True
            case MCPError():
                fault = request_errors.classify_error(error, wire_status)
                return f"it refused the handshake: {fault.detail}", fault.is_passing
            case _:
                return request_errors.describe_error(wire_status.error or error), not isinstance(
                    error, OSError | ValueError
                )


@asynccontextmanager
async def _observe_transport(transport: Transport, on_end: Callable[[], object]) -> AsyncIterator[Any]:
    """Open a transport, and call `on_end` when the other side has ended it."""
    async with transport as (read, write):
        sender = _CountingSendStream(write)
        yield _FilteringReceiveStream(read, sender, on_end), sender


@attrs.define(eq=False, repr=False)
class _StreamProxy:
    """Proxy of a stream of the SDK."""

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
class _CountingSendStream(_StreamProxy):
    """Send stream that counts the messages that the server has not read yet."""

    waiting: int = attrs.field(default=0, init=False)

    async def send(self, message: object) -> None:
        """Send a message after the earlier ones."""
        self.waiting += 1
        try:
            await self._stream.send(message)
        finally:
            self.waiting -= 1


@attrs.define(eq=False, repr=False)
class _FilteringReceiveStream(_StreamProxy):
    """Receive stream that reports its end and skips useless messages.

    These are notifications that are not used, and requests of a server that does not read our answers, which would
    pile up.
    """

    _send_stream: _CountingSendStream
    _on_end: Callable[[], object]

    def __aiter__(self) -> _FilteringReceiveStream:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                received = await self._stream.__anext__()
            except StopAsyncIteration:
                self._on_end()
                raise
            message = getattr(received, "message", None)
            if is_relevant(message) and not (
                isinstance(message, m.JSONRPCRequest) and self._send_stream.waiting >= MAX_UNSENT_MESSAGES
            ):
                return received
