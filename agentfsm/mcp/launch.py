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
from mcp.shared._httpx_utils import create_mcp_http_client

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
    last_words: str = attrs.field(default="", init=False)

    @property
    def shown(self) -> str:
        """The command line, as a shell would take it; the values of variables are left out."""
        return " ".join([*(f"{name}=..." for name in self.env), shlex.join([self.command, *self.args])])

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        """Start the process; it is told to end, and made to, when this is left."""
        parameters = StdioServerParameters(command=self.command, args=list(self.args), env=dict(self.env), cwd=self.cwd)
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
    last_words: str = attrs.field(default="", init=False)
    # A server far away leaves none.

    @property
    def shown(self) -> str:
        """The URL, without the name and the password that it may hold."""
        return str(httpx2.URL(self.url).copy_with(userinfo=b""))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        """Make a client; the first request goes out with the handshake."""
        async with (
            create_mcp_http_client(dict(self.headers), auth=self.auth) as client,
            streamable_http_client(self.url, http_client=client) as streams,
        ):
            yield streams
