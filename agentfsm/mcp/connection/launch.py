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

from agentfsm.mcp.connection import stdio
from agentfsm.mcp.connection.bounded import MESSAGE_BYTES, client_of
from agentfsm.mcp.connection.stdio import ProcessExit
from agentfsm.mcp.connection.trouble import TooLongError
from agentfsm.mcp.trust.private import PublicTransport, check_url
from agentfsm.mcp.trust.sandbox import Sandbox


class Launch(Protocol):
    """How a server is reached."""

    @property
    def shown(self) -> str:
        """What is started, or where the server is, exactly, as a person is shown it; without secrets."""
        ...

    @property
    def last_words(self) -> str:
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

    def open(self, over: Callable[[], object]) -> Transport:
        """Return what opens the two streams of a connection.

        Args:
            over: Called when it is seen, elsewhere than in the streams, that the connection is of no use any more.
        """
        ...


@attrs.define(eq=False, repr=False, kw_only=True)
class Stdio:
    """A command, started as a process of its own that is spoken to over its standard input and output."""

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = attrs.field(factory=dict)
    # What it is told beside HOME, LOGNAME, PATH, SHELL, TERM and USER; it gets nothing else of our environment.
    cwd: Path | str | None = None
    sandbox: Sandbox | None = None
    # What it is started in.
    _epitaph: ProcessExit = attrs.field(factory=ProcessExit, init=False)

    @property
    def shown(self) -> str:
        """The command line, as a shell would take it; the values of variables are left out."""
        return " ".join([*(f"{name}=..." for name in self.env), shlex.join([self.command, *self.args])])

    @property
    def last_words(self) -> str:
        """How the newest process has ended."""
        return str(self._epitaph)

    @property
    def error(self) -> Exception | None:
        """What has ended the newest process, where it was ended for a message that is too long."""
        return TooLongError(self.last_words) if self._epitaph.is_too_long else None

    @property
    def advice(self) -> str:
        """What to try when it does not start."""
        return f"run it by hand to see what it says, or give its full path: {self.shown}"

    @asynccontextmanager
    async def open(self, over: Callable[[], object]) -> AsyncIterator[Any]:  # noqa: ARG002  it ends the streams
        """Start the process; it is told to end, and made to, when this is left."""
        self._epitaph = epitaph = ProcessExit()
        command, args = self.command, list(self.args)
        if self.sandbox is not None:
            command, args = self.sandbox.wrapped(command, args, self.env, self.cwd)
        parameters = StdioServerParameters(command=command, args=args, env=dict(self.env), cwd=self.cwd)
        async with stdio.started(parameters, epitaph) as streams:
            yield streams


@attrs.define(eq=False, repr=False, kw_only=True)
class Remote:
    """A URL."""

    url: str
    headers: Mapping[str, str] = attrs.field(factory=dict)
    auth: httpx2.Auth | None = None
    allow_private: bool = False
    # Whether it may be in a private network, by plain HTTP too, and through a proxy of the environment's.

    def __attrs_post_init__(self) -> None:
        check_url(self.url, allow_private=self.allow_private)

    @property
    def shown(self) -> str:
        """The URL, without the name and the password that it may hold."""
        return str(httpx2.URL(self.url).copy_with(userinfo=b""))

    @property
    def last_words(self) -> str:
        """Nothing: a server far away leaves none."""
        return ""

    @property
    def error(self) -> Exception | None:
        """Nothing: each request knows its own."""
        return None

    def client(self, failed: Callable[[], object] = lambda: None) -> httpx2.AsyncClient:
        """Make a client that sends headers and tokens to this server only: it follows no redirect by itself."""
        transport = None if self.allow_private else PublicTransport(self.url)
        return client_of(self.headers, self.auth, failed, transport)


@attrs.define(eq=False, repr=False, kw_only=True)
class Http(Remote):
    """A URL that speaks streamable HTTP."""

    @property
    def advice(self) -> str:
        """What to try when it does not answer."""
        return (
            f"see whether {self.shown} is the server's address, whether it runs, and whether it needs a token in "
            'headers=; a server of the older kind, HTTP+SSE, is given by MCPServer.sse, or by "type": "sse"'
        )

    @asynccontextmanager
    async def open(self, over: Callable[[], object]) -> AsyncIterator[Any]:  # noqa: ARG002  each request fails alone
        """Make a client; the first request goes out with the handshake."""
        async with (
            self.client() as client,
            streamable_http_client(self.url, http_client=client, max_sse_event_size=MESSAGE_BYTES) as streams,
        ):
            yield streams


@attrs.define(eq=False, repr=False, kw_only=True)
class Sse(Remote):
    """A URL that speaks HTTP+SSE, as servers did before streamable HTTP: one stream of events, requests beside it."""

    @property
    def advice(self) -> str:
        """What to try when it does not answer."""
        return (
            f"see whether {self.shown} is where the server's stream of events is; a server of today's kind, streamable "
            'HTTP, is given by MCPServer.http, or by "type": "http"'
        )

    @asynccontextmanager
    async def open(self, over: Callable[[], object]) -> AsyncIterator[Any]:
        """Open the stream of events. A request that fails ends the connection: its answer would never come."""

        def client(**_options: Any) -> httpx2.AsyncClient:
            return self.client(over)

        async with sse_client(self.url, httpx_client_factory=cast("Any", client)) as streams:
            yield streams
