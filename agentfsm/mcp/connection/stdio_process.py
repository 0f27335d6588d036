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
from agentfsm.mcp.connection.http_client import MESSAGE_BYTES, is_relevant

# Bytes of what a server that died wrote to its standard error.
STDERR_TAIL_BYTES: Final = 2_000
# Characters of the first line on its standard output that is no message.
INVALID_OUTPUT_CHARS: Final = 200
# Seconds for what was to be sent, before the input of the server is closed; and for its last words, after its end.
FLUSH_TIMEOUT_S: Final = 0.5
# Seconds for what a server has started and left behind, from being told to end to being made to.
KILL_TIMEOUT_S: Final = 2.0

_CLOSED: Final = (anyio.ClosedResourceError, anyio.BrokenResourceError)


@attrs.define(eq=False, repr=False)
class ProcessExit:
    """What is known of how a process has ended."""

    exit_code: int | None = None
    stderr_tail: bytes = b""
    """The end of what it wrote to its standard error."""

    invalid_output: str = ""
    """The beginning of the first line on its standard output that is no message."""

    is_too_long: bool = False
    """Whether a message of it was longer than any that is taken in."""

    def __str__(self) -> str:
        said = [
            f"a message of it has more than {MESSAGE_BYTES >> 20} MiB" if self.is_too_long else "",
            "" if self.exit_code is None else _describe_exit_code(self.exit_code),
            f"it wrote to its standard output, where only messages belong: {self.invalid_output!r}"
            if self.invalid_output
            else "",
            f"its last words: {words}" if (words := self.stderr_tail.decode("utf-8", "replace").strip()) else "",
        ]
        return "; ".join(filter(None, said))


def _describe_exit_code(exit_code: int) -> str:
    return f"it ended with exit code {exit_code}" if exit_code >= 0 else f"it was killed by signal {-exit_code}"


@asynccontextmanager
async def open_process(parameters: StdioServerParameters, process_exit: ProcessExit) -> AsyncIterator[Any]:
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
    talk = _ProcessStreams(process, process_exit, heard, read_end, write_end, to_say)
    async with anyio.create_task_group() as tasks:
        for work in (talk.read_stdout, talk.write_stdin, talk.read_stderr):
            tasks.start_soon(talk.run_task, work)
        try:
            yield read_end, write_end
        finally:
            with anyio.CancelScope(shield=True):  # each wait in it is bounded
                await talk.stop()


@attrs.define(eq=False, repr=False)
class _ProcessStreams:
    """What goes to and fro between a process and a session."""

    process: ServerProcess
    process_exit: ProcessExit
    incoming: MemoryObjectSendStream[SessionMessage]
    read_end: MemoryObjectReceiveStream[SessionMessage]
    write_end: MemoryObjectSendStream[SessionMessage]
    outgoing: MemoryObjectReceiveStream[SessionMessage]
    writer_done: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    stderr_done: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    has_closed_output: bool = attrs.field(default=False, init=False)
    """Whether the server has closed its output before it was told to end."""

    scopes: list[anyio.CancelScope] = attrs.field(factory=list, init=False)

    async def run_task(self, task: Callable[[], Awaitable[None]]) -> None:
        """Work to the end of the talk: a server whose output nobody reads would not come to its own end."""
        with anyio.CancelScope(shield=True) as scope:
            self.scopes.append(scope)
            await task()

    async def read_stdout(self) -> None:
        """Hand over each message; throw away what comes when nobody listens any more, so that the server can end."""
        output = cast("ByteReceiveStream", self.process.stdout)
        with self.incoming, suppress(*_CLOSED):  # the session is over
            await self._forward_lines(output)
            self.has_closed_output = True
        while await _receive_chunk(output) is not None:
            pass

    async def _forward_lines(self, output: ByteReceiveStream) -> None:
        parts: list[bytes] = []
        size = 0
        while (chunk := await _receive_chunk(output)) is not None:
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                await self._forward_line(b"".join([*parts, line]))
                parts, size = [], 0
            parts.append(rest)
            size += len(rest)
            if size > MESSAGE_BYTES:
                self.process_exit.is_too_long = True
                return
        await self._forward_line(b"".join(parts))

    async def _forward_line(self, line: bytes) -> None:
        if (message := self._parse_line(line)) is not None and is_relevant(message):
            await self.incoming.send(SessionMessage(message))

    def _parse_line(self, line: bytes) -> Any:
        if not line.strip():
            return None
        try:
            return jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            message = _repair_surrogates(line) or _build_parse_error(line)
        if message is None and not self.process_exit.invalid_output:
            self.process_exit.invalid_output = (
                line[: 4 * INVALID_OUTPUT_CHARS].decode("utf-8", "replace")[:INVALID_OUTPUT_CHARS].strip()
            )
        return message

    async def write_stdin(self) -> None:
        """Send what is to be said; a server that takes nothing any more ends the connection."""
        put = cast("Any", self.process.stdin).send
        try:
            async with self.outgoing:
                async for each in self.outgoing:
                    text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await put(f"{text}\n".encode("utf-8", "replace"))
        except (*_CLOSED, OSError):
            self.incoming.close()
        finally:
            self.writer_done.set()

    async def read_stderr(self) -> None:
        """Keep the end of what the server writes to its standard error."""
        errors = cast("ByteReceiveStream", cast("Any", self.process).stderr)
        while (chunk := await _receive_chunk(errors)) is not None:
            self.process_exit.stderr_tail = (self.process_exit.stderr_tail + chunk)[-STDERR_TAIL_BYTES:]
        self.stderr_done.set()

    async def stop(self) -> None:
        """End the talk, then the process."""
        least = 0 if self.has_closed_output else 1  # else it ends as it is told to, with exit code 0
        self.read_end.close()
        self.write_end.close()
        with anyio.move_on_after(FLUSH_TIMEOUT_S):
            await self.writer_done.wait()
        has_ended = self.process.returncode is not None
        await _stop_server_process(self.process)
        await _stop_descendants(self.process)
        code = self.process.returncode
        if has_ended or (code is not None and code >= least):  # or it was killed here
            self.process_exit.exit_code = code
        with anyio.move_on_after(FLUSH_TIMEOUT_S):
            await self.stderr_done.wait()
        self.incoming.close()
        self.outgoing.close()
        for scope in self.scopes:
            scope.cancel()


async def _stop_descendants(process: ServerProcess) -> None:
    """End what a server that is gone has started and left behind, as a shell or a package runner may."""
    if os.name == "posix":
        await terminate_posix_process_tree(cast("Any", process), KILL_TIMEOUT_S)


async def _receive_chunk(stream: ByteReceiveStream) -> bytes | None:
    """Return what comes next; None at the end, whichever way that comes."""
    try:
        return await stream.receive()
    except (anyio.EndOfStream, *_CLOSED, OSError):
        return None


def _repair_surrogates(line: bytes) -> Any:
    """Return a message in which only halves of surrogate pairs are wrong, which some languages let through."""
    try:
        return jsonrpc_message_adapter.validate_json(
            replace_surrogates(json.dumps(json.loads(line), ensure_ascii=False)), by_name=False
        )
    except (ValueError, RecursionError):
        return None


def _build_parse_error(line: bytes) -> JSONRPCError | None:
    """Return an error in place of an answer that is none, so that whoever waits for it need not wait any longer."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or "method" in answer or type(answer.get("id")) not in {int, str}:
        return None
    said = ErrorData(code=PARSE_ERROR, message="the answer is no message of the protocol")
    return JSONRPCError(jsonrpc="2.0", id=answer["id"], error=said)
