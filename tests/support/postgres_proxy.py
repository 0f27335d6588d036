"""A relay between a client and a PostgreSQL server, which cuts the connection at one message of many."""

from __future__ import annotations

import socket
import struct

import attrs

from tests.support.loopback import LoopbackServer

# The server's requests that the client answers, by the number that follows "R".
PASSWORD_WANTED = (3, 5, 10, 11)
# It is the client's turn, outside of a transaction.
IDLE = b"Z\x00\x00\x00\x05I"


@attrs.define(eq=False)
class Proxy(LoopbackServer):
    """Stands between stores and the server, and cuts a connection before a message arrives, or before its reply does.

    The client sends one message and waits for the reply, so messages can be counted and named.
    """

    address: tuple[str, int]
    cut: int | bytes | None = None
    # Which message: the number of the next ones (0 for the next), or what it begins with.
    after: bool = False
    # Whether the server gets it, and answers to nobody.
    seen: list[bytes] = attrs.field(factory=list)
    # What the clients have asked.
    cuts: int = 0
    for_good: bool = False
    # Whether nobody gets through any more after the next cut, until `is_down` is made false.
    is_down: bool = False
    spare: socket.socket | None = None
    # Another session of the server's: where there is one, each transaction goes to the one that the last did not.

    def serve(self, client):
        if self.is_down:
            return
        with socket.create_connection(self.address) as server:
            self._relay(client, server)

    def _relay(self, client, server):
        server.sendall(_read(client, 4, 0))
        while True:
            reply = self._reply(server)
            if self.spare is not None and reply.endswith(IDLE):
                server, self.spare = self.spare, server
            client.sendall(reply)
            request = _read(client, 5, 1)
            is_cut = request[:1] == b"Q" and self._is_cut(request[5:])
            if is_cut and not self.after:
                return
            server.sendall(request)
            if is_cut:
                self._reply(server)
                return

    def _is_cut(self, asked):
        self.seen.append(b" ".join(asked.split()))
        if isinstance(self.cut, int):
            self.cut -= 1
            hit = self.cut < 0
        else:
            hit = self.cut is not None and self.seen[-1].startswith(self.cut)
        if hit:
            self.cut = None
            self.cuts += 1
            self.is_down = self.for_good
        return hit

    def _reply(self, server):
        """Return what the server says until it is the client's turn."""
        said = b""
        while True:
            message = _read(server, 5, 1)
            said += message
            asks = message[:1] == b"R" and struct.unpack("!i", message[5:9])[0] in PASSWORD_WANTED
            if message[:1] == b"Z" or asks:
                return said


def _read(source, head, start):
    """Read one message: its length stands in the head, from `start` on, and counts itself."""
    data = _exactly(source, head)
    return data + _exactly(source, struct.unpack("!i", data[start : start + 4])[0] + start - head)


def _exactly(source, count):
    data = b""
    while len(data) < count:
        piece = source.recv(count - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data
