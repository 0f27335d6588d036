"""Server process: start it, exchange messages over its standard input and output, and end it.

The SDK's functions start and end the process. Messages are read here, since the SDK does not limit their size. A line
that is not a message is skipped, and the beginning of the first such line is kept for error texts. An answer that
violates the protocol becomes an error of its request, which would otherwise wait for ever.
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

# Bytes kept of the end of a process's standard error.
STDERR_TAIL_BYTES: Final = 2_000
# Characters kept of the first line on its standard output that is not a message.
INVALID_OUTPUT_CHARS: Final = 200
# Seconds to send pending messages before the server's input is closed; and to read its standard error after its end.
FLUSH_TIMEOUT_S: Final = 0.5
# Seconds that processes which a server has left behind have between the request to end and the kill.
KILL_TIMEOUT_S: Final = 2.0

_CLOSED: Final = (anyio.ClosedResourceError, anyio.BrokenResourceError)


@attrs.define(eq=False, repr=False)
class ProcessExit:
    """Known details on the end of a process."""

    exit_code: int | None = None
    stderr_tail: bytes = b""
    """End of its standard error."""

    invalid_output: str = ""
    """Beginning of the first line on its standard output that is not a message."""

    is_too_long: bool = False
    """Whether it sent a message above the maximum size."""

    def __str__(self) -> str:
        code = self.exit_code
        details = [
            f"it sent a message of more than {MESSAGE_BYTES >> 20} MiB" if self.is_too_long else "",
            f"it ended with exit code {code}" if code is not None and code >= 0 else "",
            f"it was killed by signal {-code}" if code is not None and code < 0 else "",
            f"it wrote to its standard output, which is for messages only: {self.invalid_output!r}"
            if self.invalid_output
            else "",
            f"its standard error ends with: {text}"
            if (text := self.stderr_tail.decode("utf-8", "replace").strip())
            else "",
        ]
        return "; ".join(filter(None, details))


@asynccontextmanager
async def open_process(parameters: StdioServerParameters, process_exit: ProcessExit) -> AsyncIterator[Any]:
    """Start a process. At the end of the block it is asked to end, and killed with its children if it does not.

    Raises:
        OSError: when it cannot be started.
        ValueError: when the command or its environment has an invalid character.
    """
    process = await _create_platform_compatible_process(
        await _get_executable_command(parameters.command),
        parameters.args,
        env=get_default_environment() | (parameters.env or {}),
        errlog=cast("Any", subprocess.PIPE),  # a file could grow without limit
        cwd=parameters.cwd,
    )
    # There must be no checkpoint from here to the task group: a cancellation would leave the process behind.
    incoming, read_end = anyio.create_memory_object_stream[SessionMessage](0)
    write_end, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    streams = _ProcessStreams(process, process_exit, incoming, read_end, write_end, outgoing)
    async with anyio.create_task_group() as tasks:
        for work in (streams.read_stdout, streams.write_stdin, streams.read_stderr):
            tasks.start_soon(streams.run_task, work)
        try:
            yield read_end, write_end
        finally:
            with anyio.CancelScope(shield=True):  # each wait in it is bounded
                await streams.stop()


@attrs.define(eq=False, repr=False)
class _ProcessStreams:
    """Streams between a process and a session."""

    process: ServerProcess
    process_exit: ProcessExit
    incoming: MemoryObjectSendStream[SessionMessage]
    read_end: MemoryObjectReceiveStream[SessionMessage]
    write_end: MemoryObjectSendStream[SessionMessage]
    outgoing: MemoryObjectReceiveStream[SessionMessage]
    writer_done: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    stderr_done: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    has_closed_output: bool = attrs.field(default=False, init=False)
    """Whether the server closed its output before it was asked to end."""

    scopes: list[anyio.CancelScope] = attrs.field(factory=list, init=False)

    async def run_task(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task until `stop` cancels it: a server could not end by itself if its output were not read."""
        with anyio.CancelScope(shield=True) as scope:
            self.scopes.append(scope)
            await task()

    async def read_stdout(self) -> None:
        """Forward each message to the session. After its end, discard all output, so that the server can end."""
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
        """Send the outgoing messages. A server that does not accept input any more ends the connection."""
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
        """Keep the end of the server's standard error."""
        errors = cast("ByteReceiveStream", cast("Any", self.process).stderr)
        while (chunk := await _receive_chunk(errors)) is not None:
            self.process_exit.stderr_tail = (self.process_exit.stderr_tail + chunk)[-STDERR_TAIL_BYTES:]
        self.stderr_done.set()

    async def stop(self) -> None:
        """Close the streams, then end the process."""
        lowest_reported = 0 if self.has_closed_output else 1  # exit code 0 is expected after a request to end
        self.read_end.close()
        self.write_end.close()
        with anyio.move_on_after(FLUSH_TIMEOUT_S):
            await self.writer_done.wait()
        has_ended = self.process.returncode is not None
        await _stop_server_process(self.process)
        if os.name == "posix":  # processes that the server has left behind, as a shell or a package runner may
            await terminate_posix_process_tree(cast("Any", self.process), KILL_TIMEOUT_S)
        code = self.process.returncode
        if has_ended or (code is not None and code >= lowest_reported):  # a negative code: killed here
            self.process_exit.exit_code = code
        with anyio.move_on_after(FLUSH_TIMEOUT_S):
            await self.stderr_done.wait()
        self.incoming.close()
        self.outgoing.close()
        for scope in self.scopes:
            scope.cancel()


async def _receive_chunk(stream: ByteReceiveStream) -> bytes | None:
    """Return the next bytes; None at the end of the stream or after an error."""
    try:
        return await stream.receive()
    except (anyio.EndOfStream, *_CLOSED, OSError):
        return None


def _repair_surrogates(line: bytes) -> Any:
    """Parse a message whose only fault is unpaired surrogates, which some languages emit; else return None."""
    try:
        return jsonrpc_message_adapter.validate_json(
            replace_surrogates(json.dumps(json.loads(line), ensure_ascii=False)), by_name=False
        )
    except (ValueError, RecursionError):
        return None


def _build_parse_error(line: bytes) -> JSONRPCError | None:
    """Build an error that replaces an invalid answer, so that its request does not wait for ever; else return None."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or "method" in answer or type(answer.get("id")) not in {int, str}:
        return None
    error = ErrorData(code=PARSE_ERROR, message="the answer is not a message of the protocol")
    return JSONRPCError(jsonrpc="2.0", id=answer["id"], error=error)
