"""A relay between a client and a server, which cuts the connection where a test wants it cut."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from typing import Literal, Self

import attrs

Side = Literal["question", "answer"]
CHUNK = 65_536


@attrs.define(eq=False)
class CuttingProxy:
    """Relays connections on a port of its own; as a context manager it is there until the end of the block."""

    port: int
    # Of the server, on 127.0.0.1.
    cuts: int = attrs.field(default=0, init=False)
    # Made so far.
    is_down: bool = attrs.field(default=False, init=False)
    # Whether nobody gets through.
    _next: tuple[Side, int] | None = attrs.field(default=None, init=False)
    _for_good: bool = attrs.field(default=False, init=False)
    _listener: socket.socket = attrs.field(factory=lambda: socket.create_server(("127.0.0.1", 0)), init=False)

    @property
    def own_port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    def cut(self, side: Side, keep: int = 0, *, for_good: bool = False) -> None:
        """Cut the connection over which the next question, or the next answer, goes.

        Args:
            side: "question": the server does not hear of it. "answer": it does, but the client hears nothing.
            keep: Bytes of it that get through.
            for_good: Whether nobody gets through after that, until `is_down` is made false.
        """
        self._next, self._for_good = (side, keep), for_good

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
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        if self.is_down:
            return client.close()
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as server:
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(CHUNK)
                    target, side = (server, "question") if source is client else (client, "answer")
                    if self._next is not None and self._next[0] == side:
                        keep = self._next[1]
                        if keep < len(data):
                            self._next, self.cuts, self.is_down = None, self.cuts + 1, self._for_good
                            target.sendall(data[:keep])
                            return None
                        self._next = side, keep - len(data)
                    if not data:
                        return None
                    target.sendall(data)
