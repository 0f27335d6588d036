"""A server that is a process: it is started, spoken to over its standard input and output, and ended.

How a process is started and ended is the SDK's; what is read here is bounded, which there it is not. A line that is
no message is passed over, and its beginning kept for whoever asks why nothing works. The answer to a request that
does not fit the protocol becomes an error of that request, since nobody else would answer it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, cast

import anyio
import attrs
from anyio.abc import ByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import StdioServerParameters
from mcp.client.stdio import (
    _create_platform_compatible_process,
    _get_executable_command,
    _stop_server_process,
    get_default_environment,
)
from mcp.os.posix.utilities import terminate_posix_process_tree
from mcp.os.win32.utilities import ServerProcess
from mcp.shared.message import SessionMessage
from mcp.types import PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from agentfsm.core.messages import replace_surrogates
from agentfsm.mcp.connection.bounded import MESSAGE_BYTES, is_of_use

# Bytes of what a server that died wrote to its standard error.
LAST_WORDS_BYTES: Final = 2_000
# Characters of the first line on its standard output that is no message.
RUBBISH_CHARS: Final = 200
# Seconds for what was to be sent, before the input of the server is closed; and for its last words, after its end.
FLUSH_S: Final = 0.5
# Seconds for what a server has started and left behind, from being told to end to being made to.
KILL_S: Final = 2.0

_CLOSED: Final = (anyio.ClosedResourceError, anyio.BrokenResourceError)


@attrs.define(eq=False, repr=False)
class ProcessExit:
    """What is known of how a process has ended."""

    exit_code: int | None = None
    errors: bytes = b""
    # The end of what it wrote to its standard error.
    rubbish: str = ""
    # The beginning of the first line on its standard output that is no message.
    is_too_long: bool = False
    # Whether a message of it was longer than any that is taken in.

    def __str__(self) -> str:
        said = [
            f"a message of it has more than {MESSAGE_BYTES >> 20} MiB" if self.is_too_long else "",
            "" if self.exit_code is None else _ended_with(self.exit_code),
            f"it wrote to its standard output, where only messages belong: {self.rubbish!r}" if self.rubbish else "",
            f"its last words: {words}" if (words := self.errors.decode("utf-8", "replace").strip()) else "",
        ]
        return "; ".join(filter(None, said))


def _ended_with(exit_code: int) -> str:
    return f"it ended with exit code {exit_code}" if exit_code >= 0 else f"it was killed by signal {-exit_code}"


@asynccontextmanager
async def started(parameters: StdioServerParameters, epitaph: ProcessExit) -> AsyncIterator[Any]:
    """Start a process; when this is left, it is told to end, and made to, with all that it has started.

    Raises:
        OSError: when it cannot be started.
        ValueError: when the command or its environment holds what none can.
    """
    process = await _create_platform_compatible_process(
        await _get_executable_command(parameters.command),
        parameters.args,
        env=get_default_environment() | (parameters.env or {}),
        errlog=cast("Any", subprocess.PIPE),  # a file would take any number of bytes
        cwd=parameters.cwd,
    )
    # Nothing may wait from here to the task group: a cancellation would leave the process behind.
    heard, read_end = anyio.create_memory_object_stream[SessionMessage](0)
    write_end, to_say = anyio.create_memory_object_stream[SessionMessage](0)
    talk = _Talk(process, epitaph, heard, read_end, write_end, to_say)
    async with anyio.create_task_group() as tasks:
        for work in (talk.read, talk.write, talk.listen):
            tasks.start_soon(talk.keep, work)
        try:
            yield read_end, write_end
        finally:
            with anyio.CancelScope(shield=True):  # each wait in it is bounded
                await talk.stop()


@attrs.define(eq=False, repr=False)
class _Talk:
    """What goes to and fro between a process and a session."""

    process: ServerProcess
    epitaph: ProcessExit
    heard: MemoryObjectSendStream[SessionMessage]
    read_end: MemoryObjectReceiveStream[SessionMessage]
    write_end: MemoryObjectSendStream[SessionMessage]
    to_say: MemoryObjectReceiveStream[SessionMessage]
    has_written: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    has_listened: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    has_hung_up: bool = attrs.field(default=False, init=False)
    # Whether the server has closed its output before it was told to end.
    scopes: list[anyio.CancelScope] = attrs.field(factory=list, init=False)

    async def keep(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work to the end of the talk: a server whose output nobody reads would not come to its own end."""
        with anyio.CancelScope(shield=True) as scope:
            self.scopes.append(scope)
            await work()

    async def read(self) -> None:
        """Hand over each message; throw away what comes when nobody listens any more, so that the server can end."""
        output = cast("ByteReceiveStream", self.process.stdout)
        with self.heard, suppress(*_CLOSED):  # the session is over
            await self._hand_over(output)
            self.has_hung_up = True
        while await _received(output) is not None:
            pass

    async def _hand_over(self, output: ByteReceiveStream) -> None:
        parts: list[bytes] = []
        size = 0
        while (chunk := await _received(output)) is not None:
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                await self._tell(b"".join([*parts, line]))
                parts, size = [], 0
            parts.append(rest)
            size += len(rest)
            if size > MESSAGE_BYTES:
                self.epitaph.is_too_long = True
                return
        await self._tell(b"".join(parts))

    async def _tell(self, line: bytes) -> None:
        if (message := self._message(line)) is not None and is_of_use(message):
            await self.heard.send(SessionMessage(message))

    def _message(self, line: bytes) -> Any:
        if not line.strip():
            return None
        try:
            return jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            message = _mended(line) or _failed_answer(line)
        if message is None and not self.epitaph.rubbish:
            self.epitaph.rubbish = line[: 4 * RUBBISH_CHARS].decode("utf-8", "replace")[:RUBBISH_CHARS].strip()
        return message

    async def write(self) -> None:
        """Send what is to be said; a server that takes nothing any more ends the connection."""
        put = cast("Any", self.process.stdin).send
        try:
            async with self.to_say:
                async for each in self.to_say:
                    text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await put(f"{text}\n".encode("utf-8", "replace"))
        except (*_CLOSED, OSError):
            self.heard.close()
        finally:
            self.has_written.set()

    async def listen(self) -> None:
        """Keep the end of what the server writes to its standard error."""
        errors = cast("ByteReceiveStream", cast("Any", self.process).stderr)
        while (chunk := await _received(errors)) is not None:
            self.epitaph.errors = (self.epitaph.errors + chunk)[-LAST_WORDS_BYTES:]
        self.has_listened.set()

    async def stop(self) -> None:
        """End the talk, then the process."""
        least = 0 if self.has_hung_up else 1  # else it ends as it is told to, with exit code 0
        self.read_end.close()
        self.write_end.close()
        with anyio.move_on_after(FLUSH_S):
            await self.has_written.wait()
        has_ended = self.process.returncode is not None
        await _stop_server_process(self.process)
        await _stop_others(self.process)
        code = self.process.returncode
        if has_ended or (code is not None and code >= least):  # or it was killed here
            self.epitaph.exit_code = code
        with anyio.move_on_after(FLUSH_S):
            await self.has_listened.wait()
        self.heard.close()
        self.to_say.close()
        for scope in self.scopes:
            scope.cancel()


async def _stop_others(process: ServerProcess) -> None:
    """End what a server that is gone has started and left behind, as a shell or a package runner may."""
    if os.name == "posix":
        await terminate_posix_process_tree(cast("Any", process), KILL_S)


async def _received(stream: ByteReceiveStream) -> bytes | None:
    """Return what comes next; None at the end, whichever way that comes."""
    try:
        return await stream.receive()
    except (anyio.EndOfStream, *_CLOSED, OSError):
        return None


def _mended(line: bytes) -> Any:
    """Return a message in which only halves of surrogate pairs are wrong, which some languages let through."""
    try:
        return jsonrpc_message_adapter.validate_json(
            replace_surrogates(json.dumps(json.loads(line), ensure_ascii=False)), by_name=False
        )
    except (ValueError, RecursionError):
        return None


def _failed_answer(line: bytes) -> JSONRPCError | None:
    """Return an error in place of an answer that is none, so that whoever waits for it need not wait any longer."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or "method" in answer or type(answer.get("id")) not in {int, str}:
        return None
    said = ErrorData(code=PARSE_ERROR, message="the answer is no message of the protocol")
    return JSONRPCError(jsonrpc="2.0", id=answer["id"], error=said)
