"""A relay between a client and a server that spoils answers: cuts them, falls silent, or says something else."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Final, Literal

import attrs

from tests.support.loopback import LoopbackServer, connected, pieces

# SO_LINGER for zero seconds: closing breaks the connection in place of ending it.
RESET: Final = struct.pack("ii", 1, 0)


@attrs.frozen
class Spoil:
    """What becomes of one answer."""

    how: Literal["end", "reset", "silence", "quiet"]
    # The connection is closed in order; or it is broken; or nothing comes any more, and it stays open; or the body ends
    # behind an event, as if that were all.
    after: int = 0
    # Bytes of the answer that get through, its headers included.
    instead: bytes = b""
    # What is said in place of the answer, before that.


@attrs.define(eq=False)
class SpoilingProxy(LoopbackServer):
    """Relays connections on a port of its own."""

    port: int
    # Of the server, on 127.0.0.1.
    plan: list[Spoil] = attrs.field(factory=list)
    # What becomes of the next answers, in order; those behind them get through.
    spoilt: int = attrs.field(default=0, init=False)
    # Answers so far.
    _closing: threading.Event = attrs.field(factory=threading.Event, init=False)

    @property
    def base_url(self) -> str:
        """What a client takes as its base_url."""
        return f"http://127.0.0.1:{self.own_port}/v1"

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        super().__exit__(*exc)

    def serve(self, client: socket.socket) -> None:
        """Relay one connection."""
        spoil, passed, is_answering = None, 0, True
        with connected(client, self.port) as server:
            for source, data in pieces(client, server):
                if not data:
                    return
                if source is client:
                    if is_answering:  # so this begins the next question
                        spoil, passed, is_answering = self.plan.pop(0) if self.plan else None, 0, False
                    server.sendall(data)
                    continue
                is_answering = True
                if spoil is not None and (spoil.instead or passed + len(data) > spoil.after):
                    client.sendall(spoil.instead or _cut(data[: spoil.after - passed], spoil))
                    self._end(client, spoil)
                    return
                passed += len(data)
                client.sendall(data)

    def _end(self, client: socket.socket, spoil: Spoil) -> None:
        self.spoilt += 1
        if spoil.how == "silence":
            self._closing.wait()
        if spoil.how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def _cut(data: bytes, spoil: Spoil) -> bytes:
    if spoil.how != "quiet":
        return data
    # Behind the last event there is the end of its chunk, and then comes the chunk that ends the body.
    return data[: data.rfind(b"\n\n\r\n") + 4] + b"0\r\n\r\n"
