"""A chat completions server in a process of its own: as fast as it can, so that the client is what is measured.

`http://127.0.0.1:PORT/history-50/v1` answers only requests with 50 results of calls in them, and a stream from
`/chunks-240/v1` has 240 texts. Each text is one HTTP chunk, as providers send them, and all are written at once.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.contender import ANSWER, words

REQUEST = re.compile(rb"POST /(history|chunks)-(\d+)/v1/chat/completions ")
LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
RESULT = re.compile(rb'"role": ?"tool"')
STREAM = re.compile(rb'"stream": ?true')
USAGE = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
HEAD = {"id": "c1", "created": 1, "model": "m"}


def response(status: str, kind: str, body: bytes) -> bytes:
    """Return a response with its length in its head."""
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def whole() -> bytes:
    """Return the answer that is not streamed."""
    choice = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
    body = {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}
    return response("200 OK", "application/json", json.dumps(body).encode())


def streamed(chunks: int) -> bytes:
    """Return the answer that is."""

    def event(delta: dict[str, str], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [choice]})

    bill = json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
    texts = [event({"role": "assistant", "content": ""}), *(event({"content": word}) for word in words(chunks))]
    parts = [f"data: {text}\n\n".encode() for text in (*texts, event({}, "stop"), bill, "[DONE]")]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join([b"%x\r\n%s\r\n" % (len(part), part) for part in parts]) + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection, kept open from request to request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        """Answer a request when it is whole; a client sends no second one before."""
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if found and length and len(body) >= int(length[1]):
            self._data = b""
            self._transport.write(answer(head, body))


def answer(head: bytes, body: bytes) -> bytes:
    """Return the response to a request."""
    asked = REQUEST.match(head)
    if asked is None:
        return response("404 Not Found", "text/plain", head.partition(b"\r\n")[0])
    kind, count = asked[1], int(asked[2])
    if kind == b"history" and len(RESULT.findall(body)) < count:
        return response("400 Bad Request", "text/plain", b"the request lacks a part of its history")
    if kind == b"history":
        return WHOLE
    if not STREAM.search(body):
        return response("400 Bad Request", "text/plain", b"the request does not ask for a stream")
    return STREAMED.get(count) or STREAMED.setdefault(count, streamed(count))


WHOLE = whole()
STREAMED: dict[int, bytes] = {}


@contextmanager
def served() -> Iterator[str]:
    """Give the address of a server; it ends with the block, or with this process."""
    command = [sys.executable, "-m", "benchmarks.server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        # Leaving closes its standard input, which it takes for the end.


async def main() -> None:
    """Serve until the end of the standard input."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
