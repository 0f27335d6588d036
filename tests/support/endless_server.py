"""A server whose answers hardly end: each is a beginning and then the same bytes, until the client hangs up."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from contextlib import suppress
from typing import Self

import attrs


@attrs.frozen
class Endless:
    """One answer."""

    head: bytes = b""
    # How the body begins.
    piece: bytes = b""
    # How it goes on, again and again.
    times: int = 8_192
    # How often, if the client takes it all: nothing is endless where a test fails.
    headers: bytes = b""
    # Lines, each with its end.
    status: bytes = b"200 OK"


@attrs.define(eq=False)
class EndlessServer:
    """Answers by the first part of a request's path; as a context manager it is there until the end of the block."""

    answers: dict[str, Endless]
    # By the first part of the path.
    sent: Counter[str] = attrs.field(factory=Counter, init=False)
    # Bytes of bodies that the client's side took, by the first part of the path.
    _listener: socket.socket = attrs.field(factory=lambda: socket.create_server(("127.0.0.1", 0)), init=False)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _address = self._listener.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, suppress(OSError), client.makefile("rb") as said:
            name = said.readline().split(b"/")[1].decode()
            length = 0
            while line := said.readline().strip():
                field, _, value = line.lower().partition(b":")
                length = int(value) if field == b"content-length" else length
            said.read(length)
            answer = self.answers[name]
            client.sendall(
                b"HTTP/1.1 %b\r\n%bconnection: close\r\n\r\n" % (answer.status, answer.headers) + answer.head
            )
            for _ in range(answer.times):
                client.sendall(answer.piece)
                self.sent[name] += len(answer.piece)
