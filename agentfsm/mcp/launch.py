"""How a server is reached: a command that is started, or a URL; and how that is shown to people."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final, Protocol, TextIO

import attrs
import httpx2
from mcp import StdioServerParameters
from mcp.client._transport import TransportStreams
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import MCP_DEFAULT_SSE_READ_TIMEOUT, MCP_DEFAULT_TIMEOUT

from agentfsm.mcp.private import PublicTransport, check_url
from agentfsm.mcp.sandbox import Sandbox

LAST_WORDS_CHARS: Final = 2_000
# Of what a server that died wrote to its standard error.


class Launch(Protocol):
    """How a server is reached."""

    @property
    def shown(self) -> str:
        """What is started, or where the server is, exactly, as a person is shown it; without secrets."""
        ...

    @property
    def last_words(self) -> str:
        """What the server said before its newest connection ended, if anything."""
        ...

    def open(self) -> AbstractAsyncContextManager[TransportStreams]:
        """Return what opens the two streams of a connection."""
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
    last_words: str = attrs.field(default="", init=False)

    @property
    def shown(self) -> str:
        """The command line, as a shell would take it; the values of variables are left out."""
        return " ".join([*(f"{name}=..." for name in self.env), shlex.join([self.command, *self.args])])

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        """Start the process; it is told to end, and made to, when this is left."""
        command, args = self.command, list(self.args)
        if self.sandbox is not None:
            command, args = self.sandbox.wrapped(command, args, self.env, self.cwd)
        parameters = StdioServerParameters(command=command, args=args, env=dict(self.env), cwd=self.cwd)
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            try:
                async with stdio_client(parameters, errlog=errors) as streams:
                    yield streams
            finally:
                self.last_words = _end_of(errors)


def _end_of(file: TextIO) -> str:
    file.seek(0, 2)
    file.seek(max(0, file.tell() - LAST_WORDS_CHARS))
    return file.read().strip()


@attrs.define(eq=False, repr=False, kw_only=True)
class Http:
    """A URL that speaks streamable HTTP."""

    url: str
    headers: Mapping[str, str] = attrs.field(factory=dict)
    auth: httpx2.Auth | None = None
    allow_private: bool = False
    # Whether it may be in a private network, by plain HTTP too, and through a proxy of the environment's.
    last_words: str = attrs.field(default="", init=False)
    # A server far away leaves none.

    def __attrs_post_init__(self) -> None:
        check_url(self.url, allow_private=self.allow_private)

    @property
    def shown(self) -> str:
        """The URL, without the name and the password that it may hold."""
        return str(httpx2.URL(self.url).copy_with(userinfo=b""))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        """Make a client; the first request goes out with the handshake."""
        async with self._client() as client, streamable_http_client(self.url, http_client=client) as streams:
            yield streams

    def _client(self) -> httpx2.AsyncClient:
        """Make a client that sends headers and tokens to this server only: it follows no redirect by itself."""
        return httpx2.AsyncClient(
            headers=dict(self.headers),
            auth=self.auth,
            timeout=httpx2.Timeout(MCP_DEFAULT_TIMEOUT, read=MCP_DEFAULT_SSE_READ_TIMEOUT),
            transport=None if self.allow_private else PublicTransport(self.url),
        )
