"""Connect to a server by a command that is started or by a URL, and format that for people."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import attrs
import httpx2
from mcp import StdioServerParameters
from mcp.client import Transport
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from agentfsm._lib.public_network import PublicAddressTransport, check_url
from agentfsm.core.errors import MisuseError
from agentfsm.logins.oauth_settings import OAuth
from agentfsm.mcp.connection import stdio_process
from agentfsm.mcp.connection.http_client import MESSAGE_BYTES, build_http_client
from agentfsm.mcp.connection.request_errors import MessageTooLongError
from agentfsm.mcp.connection.server_sandbox import ServerSandbox
from agentfsm.mcp.connection.stdio_process import ProcessExit
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.oauth.server_authorization import ServerAuthorization


class ServerTransport(Protocol):
    """Method of connecting to a server."""

    @property
    def display_text(self) -> str:
        """The exact command or address to show to people, without secrets."""
        ...

    @property
    def exit_report(self) -> str:
        """Known details on the end of the newest connection: exit code, log, invalid output; or ""."""
        ...

    @property
    def error(self) -> Exception | None:
        """Error that ended the newest connection, if it is more specific than a lost server."""
        ...

    @property
    def advice(self) -> str:
        """Advice for a failed connection, as the end of a sentence."""
        ...

    def open(self, on_lost: Callable[[], object]) -> Transport:
        """Return a context manager that opens the two streams of a connection.

        Args:
            on_lost: Called when a failure outside of the streams makes the connection unusable.
        """
        ...


@attrs.define(eq=False, repr=False, kw_only=True)
class StdioTransport:
    """Process that is started by a command and communicates over its standard input and output."""

    command: str
    """Program to start: a name on the PATH, or a path."""

    args: Sequence[str] = ()
    """Arguments of the command."""

    env: Mapping[str, str] = attrs.field(factory=dict)
    """Environment variables of the process. From our environment it gets only HOME, LOGNAME, PATH, SHELL, TERM and
    USER.
    """

    cwd: Path | str | None = None
    """Working directory of the process. None: ours, or /tmp in a sandbox."""

    sandbox: ServerSandbox | None = None
    """Sandbox of the process. None: it runs with our rights."""

    _process_exit: ProcessExit = attrs.field(factory=ProcessExit, init=False)

    @property
    def display_text(self) -> str:
        """The command line in shell syntax; the values of variables are left out."""
        return " ".join([*(f"{name}=..." for name in self.env), shlex.join([self.command, *self.args])])

    @property
    def exit_report(self) -> str:
        """Details on the end of the newest process."""
        return str(self._process_exit)

    @property
    def error(self) -> Exception | None:
        """MessageTooLongError if the newest process was ended because of an overlong message, else None."""
        return MessageTooLongError(self.exit_report) if self._process_exit.is_too_long else None

    @property
    def advice(self) -> str:
        """Advice for a process that does not start."""
        return f"run it by hand to see its output, or give its full path: {self.display_text}"

    @asynccontextmanager
    async def open(self, on_lost: Callable[[], object]) -> AsyncIterator[Any]:  # noqa: ARG002  it ends the streams
        """Start the process. On exit it is asked to end, and killed if it does not."""
        self._process_exit = process_exit = ProcessExit()
        command, args = self.command, list(self.args)
        if self.sandbox is not None:
            command, args = self.sandbox.wrap_command(command, args, self.env, self.cwd)
        parameters = StdioServerParameters(command=command, args=args, env=dict(self.env), cwd=self.cwd)
        async with stdio_process.open_process(parameters, process_exit) as streams:
            yield streams


@attrs.define(eq=False, repr=False, kw_only=True)
class RemoteTransport:
    """URL of a server, with the options common to both HTTP transports."""

    url: str
    """Endpoint of the server."""

    headers: Mapping[str, str] = attrs.field(factory=dict)
    """HTTP headers that are sent with each request to this server."""

    auth: httpx2.Auth | OAuth | None = None
    """Settings of OAuth, or an authentication of your own for the HTTP client. None: only `headers`."""

    allow_private: bool = False
    """Whether the server may have a private address; this also allows plain HTTP and the environment's proxies."""

    authorization: ServerAuthorization | None = attrs.field(default=None, init=False)
    """Authorization of the requests by OAuth. None: `auth` has no settings of it."""

    def __attrs_post_init__(self) -> None:
        check_url(self.url, allow_private=self.allow_private, role="an MCP server")
        if isinstance(self.auth, OAuth):
            if self.auth.authorization_url is not None or self.auth.redirect_url is not None:
                raise MisuseError(
                    "authorization_url, token_url, revocation_url and redirect_url are for login=, the logins of "
                    "users: leave them out of auth="
                )
            self.authorization = ServerAuthorization(self.url, self.auth, self.allow_private)

    @property
    def display_text(self) -> str:
        """The URL, without the name and the password that it may hold."""
        return str(httpx2.URL(self.url).copy_with(userinfo=b""))

    @property
    def exit_report(self) -> str:
        """Always "": a remote server leaves no report."""
        return ""

    @property
    def error(self) -> Exception | None:
        """Always None: each request raises its own error."""
        return None

    def build_client(self, on_failure: Callable[[], object] = lambda: None) -> httpx2.AsyncClient:
        """Create a client that sends headers and tokens to this server only: it does not follow redirects."""
        auth = self.authorization if isinstance(self.auth, OAuth) else self.auth
        return build_http_client(self.headers, auth, on_failure, self.build_network_transport())

    def build_network_transport(self) -> httpx2.AsyncBaseTransport | None:
        """Create the transport that connects to permitted addresses only. None: all are permitted."""
        return None if self.allow_private else PublicAddressTransport(self.url, error=MCPServerError)


@attrs.define(eq=False, repr=False, kw_only=True)
class StreamableHTTPTransport(RemoteTransport):
    """URL of a server with the streamable HTTP transport."""

    @property
    def advice(self) -> str:
        """Advice for a server that does not answer."""
        return (
            f"check that {self.display_text} is the server's URL, that it runs, and whether it needs a token in "
            'headers=, or a login: auth="oauth"; for a server with the older HTTP+SSE transport, use MCPServer.sse, or '
            '"type": "sse"'
        )

    @asynccontextmanager
    async def open(self, on_lost: Callable[[], object]) -> AsyncIterator[Any]:  # noqa: ARG002  each request fails alone
        """Create a client; the handshake sends the first request."""
        async with (
            self.build_client() as client,
            streamable_http_client(self.url, http_client=client, max_sse_event_size=MESSAGE_BYTES) as streams,
        ):
            yield streams


@attrs.define(eq=False, repr=False, kw_only=True)
class SSETransport(RemoteTransport):
    """URL of a server with the older HTTP+SSE transport: one stream of events, and separate requests."""

    @property
    def advice(self) -> str:
        """Advice for a server that does not answer."""
        return (
            f"check that {self.display_text} is the URL of the server's event stream; for a server with streamable "
            'HTTP, use MCPServer.http, or "type": "http"'
        )

    @asynccontextmanager
    async def open(self, on_lost: Callable[[], object]) -> AsyncIterator[Any]:
        """Open the stream of events. A failed request ends the connection, since its answer would never arrive."""

        def client(**_options: Any) -> httpx2.AsyncClient:
            return self.build_client(on_lost)

        async with sse_client(self.url, httpx_client_factory=cast("Any", client)) as streams:
            yield streams
