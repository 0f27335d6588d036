"""The page of this machine to which a browser returns from a login."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import anyio
import h11
from anyio.abc import Listener, SocketStream

# Seconds for a browser to send its request, and the maximum of its head in bytes.
RECEIVE_TIMEOUT_S: Final = 10.0
_MAX_HEAD_BYTES: Final = 16_384


async def listen_at(port: int) -> Listener[SocketStream]:
    """Listen at a port of this machine only; 0: any free one."""
    [listener] = (await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)).listeners
    return listener


async def receive_target(stream: SocketStream) -> str | None:
    """Return the path and the query of a request; None if it is not one, or asks with another method than GET."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await stream.receive())
    except (h11.RemoteProtocolError, anyio.EndOfStream, anyio.BrokenResourceError):
        return None
    return event.target.decode("ascii") if isinstance(event, h11.Request) and event.method == b"GET" else None


def format_page(status: int, text: str) -> bytes:
    """Return a page of plain text, whose address goes to no other server."""
    connection: Any = h11.Connection(h11.SERVER)
    headers = [
        ("content-type", "text/plain; charset=utf-8"),
        ("content-length", str(len(text.encode()))),
        ("connection", "close"),
        ("cache-control", "no-store"),
        ("referrer-policy", "no-referrer"),
    ]
    parts = (h11.Response(status_code=status, headers=headers), h11.Data(data=text.encode()), h11.EndOfMessage())
    return b"".join(connection.send(part) or b"" for part in parts)


def parse_query(url: str) -> dict[str, str]:
    """Return the parameters of a URL; of several with one name, the first."""
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
