"""The messages between an editor and `agentfsm acp`: one JSON object a line, over two streams.

The transport of the official package does not answer what it cannot parse, ends at JSON that is no object, keeps lines
of any length, and waits for ever for an editor that does not read any more.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import anyio
import attrs

_PARSE_ERROR: Final = -32700
_INVALID_REQUEST: Final = -32600


@attrs.define(eq=False, repr=False)
class EditorTransport:
    """Reads and writes the messages, as the official package asks for it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    max_bytes: int
    """Maximum size of a message of the editor."""

    _lock: anyio.Lock = attrs.field(factory=anyio.Lock, init=False)
    _writing: anyio.CancelScope | None = attrs.field(default=None, init=False)
    """Scope of a message that waits until the editor reads."""

    _is_closed: bool = attrs.field(default=False, init=False)

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None once the editor has closed one of the streams."""
        while not self._is_closed and (line := await self._read_line()) is not None:
            if not line.strip():
                continue
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                await self._refuse(None, _PARSE_ERROR, f"the line is not JSON: {str(error)[:200]}")
                continue
            if flaw := _find_flaw(message):
                given = message.get("id") if isinstance(message, dict) else None
                await self._refuse(given if isinstance(given, str | int) else None, _INVALID_REQUEST, flaw)
                continue
            if not isinstance(message.get("error", {}), dict):  # of a response, whose request would wait for ever
                message["error"] = {"code": _INVALID_REQUEST, "message": "the error of the editor has no known form"}
            return message  # type: ignore[no-any-return]
        return None

    async def send(self, message: dict[str, Any]) -> None:
        """Write a message. If the editor does not take messages any more, `receive` returns None."""
        async with self._lock:
            if self._is_closed:
                return
            if self.writer.is_closing():
                self._end()
                return
            self.writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            with anyio.CancelScope() as self._writing:
                try:
                    await self.writer.drain()
                except OSError:
                    self._end()
            self._writing = None

    async def close(self) -> None:
        """End: messages that the editor did not read are dropped."""
        self._end()

    def _end(self) -> None:
        self._is_closed = True
        self.reader.feed_eof()
        if self._writing is not None:
            self._writing.cancel()

    async def _read_line(self) -> bytes | None:
        """Return the next line; None at the end of the stream. One that is too long is empty, and is refused."""
        size, line = 0, b""
        while True:
            try:
                piece = await self.reader.readuntil(b"\n")
            except asyncio.LimitOverrunError as error:
                piece, is_whole = await self.reader.readexactly(error.consumed), False
            except asyncio.IncompleteReadError as error:
                if not error.partial and not size:
                    return None
                piece, is_whole = error.partial, True
            except OSError:  # the editor was killed
                return None
            else:
                is_whole = True
            size += len(piece)
            line = line + piece if size <= self.max_bytes else b""
            if is_whole:
                break
        if size > self.max_bytes:
            await self._refuse(None, _PARSE_ERROR, f"a message has {self.max_bytes:,} bytes at most, not {size:,}")
        return line

    async def _refuse(self, request_id: str | int | None, code: int, text: str) -> None:
        await self.send({"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": text}})


def _find_flaw(message: Any) -> str:
    """Return why something is no message; empty if it is one."""
    if not isinstance(message, dict):
        return "a message is a JSON object"
    if not isinstance(message.get("id"), str | int | None):
        return "the id of a message is a text or a whole number"
    if not isinstance(message.get("method", ""), str):
        return "the method of a message is a text"
    return ""
