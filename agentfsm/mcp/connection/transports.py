"""How a server is reached: a command that is started, or a URL; and how that is shown to people."""

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

from agentfsm.mcp.connection import stdio_process
from agentfsm.mcp.connection.http_client import MESSAGE_BYTES, build_http_client
from agentfsm.mcp.connection.private_addresses import PublicAddressTransport, check_url
from agentfsm.mcp.connection.request_errors import MessageTooLongError
from agentfsm.mcp.connection.sandbox import Sandbox
from agentfsm.mcp.connection.stdio_process import ProcessExit


class ServerTransport(Protocol):
    """How a server is reached."""

    @property
    def display_text(self) -> str:
        """What is started, or where the server is, exactly, as a person is shown it; without secrets."""
        ...

    @property
    def exit_report(self) -> str:
        """How the newest connection has ended, as far as it is known: exit code, log, rubbish; or nothing."""
        ...

    @property
    def error(self) -> Exception | None:
        """What has ended the newest connection, where that is known to be more than a server that is gone."""
        ...

    @property
    def advice(self) -> str:
        """What to try when no connection can be made, as the end of a sentence."""
        ...

    def open(self, on_lost: Callable[[], object]) -> Transport:
        """Return what opens the two streams of a connection.

        Args:
            on_lost: Called when it is seen, elsewhere than in the streams, that the connection is of no use any more.
        """
        ...


@attrs.define(eq=False, repr=False, kw_only=True)
class StdioTransport:
    """A command, started as a process of its own that is spoken to over its standard input and output."""

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = attrs.field(factory=dict)
    """What it is told beside HOME, LOGNAME, PATH, SHELL, TERM and USER; it gets nothing else of our environment."""

    cwd: Path | str | None = None
    sandbox: Sandbox | None = None
    """What it is started in."""

    _process_exit: ProcessExit = attrs.field(factory=ProcessExit, init=False)

    @property
    def display_text(self) -> str:
        """The command line, as a shell would take it; the values of variables are left out."""
        return " ".join([*(f"{name}=..." for name in self.env), shlex.join([self.command, *self.args])])

    @property
    def exit_report(self) -> str:
        """How the newest process has ended."""
        return str(self._process_exit)

    @property
    def error(self) -> Exception | None:
        """What has ended the newest process, where it was ended for a message that is too long."""
        return MessageTooLongError(self.exit_report) if self._process_exit.is_too_long else None

    @property
    def advice(self) -> str:
        """What to try when it does not start."""
        return f"run it by hand to see what it says, or give its full path: {self.display_text}"

    @asynccontextmanager
    async def open(self, on_lost: Callable[[], object]) -> AsyncIterator[Any]:  # noqa: ARG002  it ends the streams
        """Start the process; it is told to end, and made to, when this is left."""
        self._process_exit = epitaph = ProcessExit()
        command, args = self.command, list(self.args)
        if self.sandbox is not None:
            command, args = self.sandbox.wrap_command(command, args, self.env, self.cwd)
        parameters = StdioServerParameters(command=command, args=args, env=dict(self.env), cwd=self.cwd)
        async with stdio_process.open_process(parameters, epitaph) as streams:
            yield streams


@attrs.define(eq=False, repr=False, kw_only=True)
class RemoteTransport:
    """A URL."""

    url: str
    headers: Mapping[str, str] = attrs.field(factory=dict)
    auth: httpx2.Auth | None = None
    allow_private: bool = False
    """Whether it may be in a private network, by plain HTTP too, and through a proxy of the environment's."""

    def __attrs_post_init__(self) -> None:
        check_url(self.url, allow_private=self.allow_private)

    @property
    def display_text(self) -> str:
        """The URL, without the name and the password that it may hold."""
        return str(httpx2.URL(self.url).copy_with(userinfo=b""))

    @property
    def exit_report(self) -> str:
        """Nothing: a server far away leaves none."""
        return ""

    @property
    def error(self) -> Exception | None:
        """Nothing: each request knows its own."""
        return None

    def build_client(self, on_failure: Callable[[], object] = lambda: None) -> httpx2.AsyncClient:
        """Make a client that sends headers and tokens to this server only: it follows no redirect by itself."""
        transport = None if self.allow_private else PublicAddressTransport(self.url)
        return build_http_client(self.headers, self.auth, on_failure, transport)


@attrs.define(eq=False, repr=False, kw_only=True)
class StreamableHTTPTransport(RemoteTransport):
    """A URL that speaks streamable HTTP."""

    @property
    def advice(self) -> str:
        """What to try when it does not answer."""
        return (
            f"see whether {self.display_text} is the server's address, whether it runs, and whether it needs a token "
            'in headers=; a server of the older kind, HTTP+SSE, is given by MCPServer.sse, or by "type": "sse"'
        )

    @asynccontextmanager
    async def open(self, on_lost: Callable[[], object]) -> AsyncIterator[Any]:  # noqa: ARG002  each request fails alone
        """Make a client; the first request goes out with the handshake."""
        async with (
            self.build_client() as client,
            streamable_http_client(self.url, http_client=client, max_sse_event_size=MESSAGE_BYTES) as streams,
        ):
            yield streams


@attrs.define(eq=False, repr=False, kw_only=True)
class SSETransport(RemoteTransport):
    """A URL that speaks HTTP+SSE, as servers did before streamable HTTP: one stream of events, requests beside it."""

    @property
    def advice(self) -> str:
        """What to try when it does not answer."""
        return (
            f"see whether {self.display_text} is where the server's stream of events is; a server of today's kind, "
            'streamable HTTP, is given by MCPServer.http, or by "type": "http"'
        )

    @asynccontextmanager
    async def open(self, on_lost: Callable[[], object]) -> AsyncIterator[Any]:
        """Open the stream of events. A request that fails ends the connection: its answer would never come."""

        def client(**_options: Any) -> httpx2.AsyncClient:
            return self.build_client(on_lost)

        async with sse_client(self.url, httpx_client_factory=cast("Any", client)) as streams:
            yield streams
