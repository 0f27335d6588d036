"""A relay between a client and a server that spoils answers: cuts them, falls silent, or says something else."""

from __future__ import annotations

import select
import socket
import struct
import threading
from contextlib import suppress
from typing import Final, Literal, Self

import attrs

CHUNK: Final = 65_536
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
class SpoilingProxy:
    """Relays connections on a port of its own; as a context manager it is there until the end of the block."""

    port: int
    # Of the server, on 127.0.0.1.
    plan: list[Spoil] = attrs.field(factory=list)
    # What becomes of the next answers, in order; those behind them get through.
    spoilt: int = attrs.field(default=0, init=False)
    # Answers so far.
    _closing: threading.Event = attrs.field(factory=threading.Event, init=False)
    _listener: socket.socket = attrs.field(factory=lambda: socket.create_server(("127.0.0.1", 0)), init=False)

    @property
    def base_url(self) -> str:
        """What a client takes as its base_url."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _address = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as server:
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            spoil, passed, is_answering = None, 0, True
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(CHUNK)
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
