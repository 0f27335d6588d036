"""A server whose answers hardly end: each is a beginning and then the same bytes, until the client hangs up."""

from __future__ import annotations

import socket
from collections import Counter

import attrs

from tests.support.loopback import LoopbackServer


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
class EndlessServer(LoopbackServer):
    """Answers by the first part of a request's path."""

    answers: dict[str, Endless]
    # By the first part of the path.
    sent: Counter[str] = attrs.field(factory=Counter, init=False)
    # Bytes of bodies that the client's side took, by the first part of the path.

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.own_port}"

    def serve(self, client: socket.socket) -> None:
        """Answer one request."""
        with client.makefile("rb") as said:
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
