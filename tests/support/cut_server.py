"""Servers over standard input and output that are killed in the middle of a call, and what they had done by then."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import attrs
from mcp.types import JSONRPCRequest, JSONRPCResponse

from agentfsm.mcp.connection.transports import StdioTransport

# Starts the command, whose process id is in the file then.
_NOTED = 'echo $$ > "$0"; exec "$@"'

Cut = Literal["before", "after"]


@attrs.define(eq=False, repr=False, kw_only=True)
class CutTransport(StdioTransport):
    """A command that is killed in its first call: before it reads the call, or when its answer has left it."""

    pid_file: Path
    cut: Cut
    is_cut: bool = False

    @classmethod
    def to(cls, command: list[str], pid_file: Path, cut: Cut, **options: Any) -> CutTransport:
        """Return the transport to a command."""
        return cls(command="sh", args=["-c", _NOTED, str(pid_file), *command], pid_file=pid_file, cut=cut, **options)

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        os.kill(int(self.pid_file.read_text()), number)

    @asynccontextmanager
    async def open(self, on_lost: Callable[[], object]) -> AsyncIterator[Any]:
        """Start the command, and watch its messages."""
        async with StdioTransport.open(self, on_lost) as (read, write):
            call = _Call()
            yield _Answers(read, self, call), _Requests(write, self, call)


@attrs.define
class _Call:
    """The call in which the server is killed."""

    id: object = None


@attrs.define(eq=False)
class _Stream:
    inner: Any
    transport: CutTransport
    call: _Call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def __aenter__(self) -> Any:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> Any:
        return await self.inner.__aexit__(*error)


class _Requests(_Stream):
    async def send(self, item: Any) -> None:
        message, transport = item.message, self.transport
        is_it = not transport.is_cut and isinstance(message, JSONRPCRequest) and message.method == "tools/call"
        if is_it:
            self.call.id, transport.is_cut = message.id, True
            if transport.cut == "before":
                transport.signal(signal.SIGSTOP)
        await self.inner.send(item)
        if is_it and transport.cut == "before":
            transport.signal(signal.SIGKILL)


class _Answers(_Stream):
    def __aiter__(self) -> _Answers:
        return self

    async def __anext__(self) -> Any:
        while True:
            item = await self.inner.__anext__()
            message = getattr(item, "message", None)
            if not (isinstance(message, JSONRPCResponse) and message.id == self.call.id and self.call.id is not None):
                return item
            self.call.id = None
            if self.transport.cut == "before":
                return item
            self.transport.signal(signal.SIGKILL)  # and the answer is lost
