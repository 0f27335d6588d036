"""A relay between a client and a server, which cuts the connection where a test wants it cut."""

from __future__ import annotations

import socket
from typing import Literal

import attrs

from tests.support.loopback import LoopbackServer, connected, pieces

Side = Literal["question", "answer"]


@attrs.define(eq=False)
class CuttingProxy(LoopbackServer):
    """Relays connections on a port of its own."""

    port: int
    # Of the server, on 127.0.0.1.
    cuts: int = attrs.field(default=0, init=False)
    # Made so far.
    is_down: bool = attrs.field(default=False, init=False)
    # Whether nobody gets through.
    _next: tuple[Side, int] | None = attrs.field(default=None, init=False)
    _for_good: bool = attrs.field(default=False, init=False)

    def cut(self, side: Side, keep: int = 0, *, for_good: bool = False) -> None:
        """Cut the connection over which the next question, or the next answer, goes.

        Args:
            side: "question": the server does not hear of it. "answer": it does, but the client hears nothing.
            keep: Bytes of it that get through.
            for_good: Whether nobody gets through after that, until `is_down` is made false.
        """
        self._next, self._for_good = (side, keep), for_good

    def serve(self, client: socket.socket) -> None:
        """Relay one connection."""
        if self.is_down:
            return
        with connected(client, self.port) as server:
            for source, data in pieces(client, server):
                target, side = (server, "question") if source is client else (client, "answer")
                if self._next is not None and self._next[0] == side:
                    keep = self._next[1]
                    if keep < len(data):
                        self._next, self.cuts, self.is_down = None, self.cuts + 1, self._for_good
                        target.sendall(data[:keep])
                        return
                    self._next = side, keep - len(data)
                if not data:
                    return
                target.sendall(data)
