"""The proxy between a sandbox and the hosts that its function may connect to.

The function's network has no other host, so a connection can only lead to the proxy. Its listening socket is opened
inside that network and handed out. The proxy accepts connections there, and opens others in the network of the agent.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import anyio
import anyio.abc

from agentfsm._lib.public_network import is_address, is_private, matches_host

# Bytes of a request's head.
_MAX_HEAD_BYTES: Final = 16 << 10
# Connections at once.
_MAX_CONNECTIONS: Final = 20
_CONNECT_S: Final = 10.0
_CLOSED: Final = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
_HEAD_END: Final = b"\r\n\r\n"
# Headers of a request that are for the proxy, or that would keep its connection open for a request to another host.
# `Host` is that of the URL, since a server of many names answers for the one that it has.
_OWN_HEADERS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"host", b"upgrade", b"http2-settings"}
)
# Characters that some servers read as the end of a header, and others do not.
_LINE_BREAKS: Final = (b"\r", b"\n", b"\0")


class _RefusedError(Exception):
    """A request that the proxy refuses: a status and a text."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


@asynccontextmanager
async def open_proxy(hosts: Sequence[str]) -> AsyncGenerator[socket.socket]:
    """Run a proxy to these hosts. Yield the socket over which the sandbox hands out its listening socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        async with await anyio.abc.UNIXSocketStream.from_socket(ours) as channel, anyio.create_task_group() as group:
            group.start_soon(_serve, channel, hosts)
            yield theirs
            group.cancel_scope.cancel()


async def _serve(channel: anyio.abc.UNIXSocketStream, hosts: Sequence[str]) -> None:
    try:
        _, (fd,) = await channel.receive_fds(1, 1)
    except (*_CLOSED, ValueError):  # the sandbox was not set up
        return
    room = anyio.CapacityLimiter(_MAX_CONNECTIONS)

    async def serve_one(client: anyio.abc.SocketStream) -> None:
        async with client, room:
            try:
                await _serve_client(client, hosts)
            except (*_CLOSED, OSError):  # either side has closed its connection
                return

    async with await anyio.abc.SocketListener.from_socket(fd) as listener:
        await listener.serve(serve_one)


async def _serve_client(client: anyio.abc.SocketStream, hosts: Sequence[str]) -> None:
    try:
        head, rest = await _read_head(client)
        host, port, forwarded = _parse_request(head)
        server = await _connect(host, port, hosts)
    except _RefusedError as error:
        body = f"{error}\n".encode("utf-8", "replace")
        status = f"HTTP/1.1 {error.status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}"
        await client.send(f"{status}\r\nConnection: close\r\n\r\n".encode() + body)
        return
    async with server:
        if not forwarded:
            await client.send(b"HTTP/1.1 200 Connection established" + _HEAD_END)
        if forwarded or rest:  # a client of CONNECT need not wait for the answer
            await server.send(forwarded + rest)
        async with anyio.create_task_group() as group:
            group.start_soon(_relay, client, server)
            group.start_soon(_relay, server, client)


async def _relay(source: anyio.abc.SocketStream, target: anyio.abc.SocketStream) -> None:
    try:
        async for chunk in source:
            await target.send(chunk)
        await target.send_eof()
    except (*_CLOSED, OSError):  # both connections end with the other direction
        await source.aclose()
        await target.aclose()


async def _read_head(client: anyio.abc.SocketStream) -> tuple[bytes, bytes]:
    received = b""
    while _HEAD_END not in received:
        if len(received) > _MAX_HEAD_BYTES:
            raise _RefusedError("431 Request Header Fields Too Large", "the head of the request is too long")
        received += await client.receive()
    head, _, rest = received.partition(_HEAD_END)
    return head, rest


def _parse_request(head: bytes) -> tuple[str, int, bytes]:
    """Return the host and the port of a request, and the bytes to forward: none of a CONNECT.

    Raises:
        _RefusedError: if it is not a request to a proxy.
    """
    line, *headers = head.split(b"\r\n")
    if any(each in header for header in (line, *headers) for each in _LINE_BREAKS):
        raise _RefusedError("400 Bad Request", "a line of the head has a line break or a zero byte in it")
    try:
        method, target, version = line.decode("ascii").split(" ")
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise _RefusedError("400 Bad Request", "this is a proxy: send CONNECT, or the whole URL") from error
    if method == "CONNECT":
        return host, port or 443, b""
    if parts.scheme != "http" or not host:
        raise _RefusedError("400 Bad Request", "this is a proxy: send CONNECT, or the whole URL")
    path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    kept = [each for each in headers if each.partition(b":")[0].strip().lower() not in _OWN_HEADERS]
    own = f"Host: {parts.netloc.rpartition('@')[2]}"
    lines = [f"{method} {path} {version}".encode("ascii"), own.encode("ascii"), *kept, b"Connection: close"]
    return host, port or 80, b"\r\n".join(lines) + _HEAD_END


async def _connect(host: str, port: int, hosts: Sequence[str]) -> anyio.abc.SocketStream:
    """Open a connection to a host of the list.

    Raises:
        _RefusedError: if it is not in the list, has an address that is not public, or cannot be reached.
    """
    if not any(matches_host(pattern, host, port) for pattern in hosts):
        raise _RefusedError("403 Forbidden", f"{host}:{port} is not among the hosts of the sandbox")
    addresses = [host] if is_address(host) else await _resolve(host, port)
    for address in addresses:
        try:
            with anyio.fail_after(_CONNECT_S):
                return await anyio.connect_tcp(address, port)
        except (OSError, TimeoutError):
            continue  # the next address may answer
    raise _RefusedError("502 Bad Gateway", f"no connection to {host}:{port}")


async def _resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name. A private one is refused: it has to be in the list itself."""
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _RefusedError("502 Bad Gateway", f"{host} cannot be resolved") from error
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    if refused := next((address for address in addresses if is_private(address)), None):
        raise _RefusedError("403 Forbidden", f"{host} has the address {refused}, which is not public")
    return addresses
