"""A chat completions server in a process of its own: as fast as it can, so that the client is what is measured.

`http://127.0.0.1:PORT/history-50/v1` answers only requests with 50 results of calls in them, and a stream from
`/chunks-240/v1` has 240 texts. Each text is one HTTP chunk, as providers send them, and all are written at once.

Two more tell the time, in nanoseconds of `time.perf_counter_ns()`, which on Linux is one clock for all processes: the
answer of `/arrived-10/v1` is when the first byte of the request arrived, and each text of `/sent-20/v1` is when it was
written, 2 ms after the one before.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.contender import ANSWER, words

REQUEST = re.compile(rb"POST /(history|chunks|arrived|sent)-(\d+)/v1/chat/completions ")
LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
RESULT = re.compile(rb'"role": ?"tool"')
STREAM = re.compile(rb'"stream": ?true')
USAGE = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
PAUSE_S = 0.002
HEAD = {"id": "c1", "created": 1, "model": "m"}


def response(status: str, kind: str, body: bytes) -> bytes:
    """Return a response with its length in its head."""
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def whole(text: str) -> bytes:
    """Return an answer that is not streamed."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    body = {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}
    return response("200 OK", "application/json", json.dumps(body).encode())


def event(delta: dict[str, str], finish: str | None = None) -> bytes:
    """Return one event of a stream, as a chunk of HTTP."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return chunk(json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [choice]}))


def chunk(data: str) -> bytes:
    """Return the data of an event as a chunk of HTTP."""
    part = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(part), part)


def streamed(chunks: int) -> bytes:
    """Return the answer that is streamed."""
    return b"".join([BEGIN, *(event({"content": word}) for word in words(chunks)), END])


BEGIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + event(
    {"role": "assistant", "content": ""}
)
BILL = json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
END = event({}, "stop") + chunk(BILL) + chunk("[DONE]") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection, kept open from request to request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._data = b""
        self._arrived = 0

    def data_received(self, data: bytes) -> None:
        """Answer a request when it is whole; a client sends no second one before."""
        if not self._data:
            self._arrived = time.perf_counter_ns()
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if found and length and len(body) >= int(length[1]):
            self._data = b""
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        asked = REQUEST.match(head)
        kind, count = (asked[1], int(asked[2])) if asked else (b"", 0)
        if not kind:
            self._transport.write(response("404 Not Found", "text/plain", head.partition(b"\r\n")[0]))
        elif kind in {b"history", b"arrived"} and len(RESULT.findall(body)) < count:
            self._transport.write(REFUSED(b"the request lacks a part of its history"))
        elif kind in {b"chunks", b"sent"} and not STREAM.search(body):
            self._transport.write(REFUSED(b"the request does not ask for a stream"))
        elif kind == b"history":
            self._transport.write(WHOLE)
        elif kind == b"chunks":
            self._transport.write(STREAMED.get(count) or STREAMED.setdefault(count, streamed(count)))
        elif kind == b"arrived":
            self._transport.write(whole(str(self._arrived)))
        else:
            self._transport.write(BEGIN)
            asyncio.get_running_loop().call_later(PAUSE_S, self._send, count)

    def _send(self, count: int) -> None:
        """Write the time, and again, so many times."""
        if count == 0:
            self._transport.write(END)
            return
        self._transport.write(event({"content": f"{time.perf_counter_ns()} "}))
        asyncio.get_running_loop().call_later(PAUSE_S, self._send, count - 1)


REFUSED = partial(response, "400 Bad Request", "text/plain")
WHOLE = whole(ANSWER)
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
