"""Servers and proxies of tests that listen on the loopback address: a thread for each connection."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

import attrs

CHUNK = 65_536


@attrs.define(eq=False)
class LoopbackServer:
    """Listens on a port of its own; as a context manager it is there until the end of the block."""

    _listener: socket.socket = attrs.field(factory=lambda: socket.create_server(("127.0.0.1", 0)), init=False)

    @property
    def own_port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    def serve(self, client: socket.socket) -> None:
        """Serve one connection, in a thread of its own; a broken connection ends it, and it is closed afterwards."""
        raise NotImplementedError

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
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            self.serve(client)


@contextmanager
def connected(client: socket.socket, port: int) -> Iterator[socket.socket]:
    """Connect to the server at a port, for a proxy that passes each piece on at once."""
    with socket.create_connection(("127.0.0.1", port)) as server:
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield server


def pieces(client: socket.socket, server: socket.socket) -> Iterator[tuple[socket.socket, bytes]]:
    """Yield what comes from either side, with the side; no bytes are its end. It goes on until it is left."""
    while True:
        for source in select.select([client, server], [], [])[0]:
            yield source, source.recv(CHUNK)
