"""Where a server that is elsewhere may be: not in our own network, unless its user says so.

What a URL says is no matter; what counts is the address that is connected to. So a host is looked up here, each of its
addresses is looked at, and the connection goes to one of those that were: a name that means another address a moment
later, a redirect, or the endpoint that a server names for its tokens leads nowhere else.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final, TypeAlias, cast

import anyio
import attrs
import httpcore2
import httpx2

from agentfsm.core.errors import MisuseError
from agentfsm.mcp.errors import MCPServerError

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# NAT64: the last four bytes are an IPv4 address. That of a network's own, 64:ff9b:1::/48, is private as a whole.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# Azure's, which looks like anybody's; those of the other clouds are link-local or private.
_METADATA_ADDRESSES: Final = frozenset({ipaddress.ip_address("168.63.129.16")})
# At once, to one server.
_MAX_CONNECTIONS: Final = 20


def is_private(address: str) -> bool:
    """Whether an address is none of the public network's: private, loopback, link-local, multicast, reserved.

    An IPv4 address inside of an IPv6 one (mapped, 6to4, Teredo, NAT64) counts as itself.

    Raises:
        ValueError: when it is no address.
    """
    parsed = ipaddress.ip_address(address)
    return any(map(_is_address_private, _embedded_ipv4(parsed) or [parsed]))


def _embedded_ipv4(address: _Address) -> list[_Address]:
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(address.packed[-4:]))
    return [each for each in found if each is not None]


def _is_address_private(address: _Address) -> bool:
    return (
        not address.is_global
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
        or address in _METADATA_ADDRESSES
        or (isinstance(address, ipaddress.IPv6Address) and address.is_site_local)
    )


def is_local_host(host: str) -> bool:
    """Whether a URL's host says in so many words that it is this machine: `localhost`, or a loopback address."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_url(url: str, *, allow_private: bool) -> None:
    """Refuse a URL that nothing may be sent to.

    Plain HTTP is for this machine, and for a network of one's own: elsewhere anybody on the way reads tokens, and
    writes results.

    Raises:
        MisuseError: when it is none of HTTP, has no host, or is plain HTTP to another machine.
    """
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError) as error:
        raise MisuseError(
            f"{url!r} is no URL of an MCP server ({error}): write one like https://example.org/mcp"
        ) from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise MisuseError(f"{url!r} is no URL of an MCP server: write one like https://example.org/mcp")
    if parsed.scheme == "http" and not is_local_host(parsed.host) and not allow_private:
        raise MisuseError(
            f"{parsed.host} is asked by plain HTTP, which anybody on the way can read and change: use https://, or "
            "allow_private=True where it is in your own network"
        )


@attrs.define(eq=False, repr=False)
class _AddressCheckingBackend(httpcore2.AsyncNetworkBackend):
    """Connects to addresses that it has looked at."""

    local_host: str | None
    """The host of the server's own URL, where that is this machine."""

    _inner: httpcore2.AsyncNetworkBackend = attrs.field(
        factory=cast("type[httpcore2.AsyncNetworkBackend]", httpcore2.AnyIOBackend), init=False
    )

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  the interface's
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        addresses = await self._resolve_allowed(host, port)
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore2.ConnectError:
                continue  # the next one may answer; the last one's error is told
        return await self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def _resolve_allowed(self, host: str, port: int) -> list[str]:
        try:
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore2.ConnectError(f"{host} cannot be found: {error}") from error
        addresses = list(dict.fromkeys(str(place[4][0]) for place in found))
        wrong = _not_loopback if host == self.local_host else is_private
        if refused := [address for address in addresses if wrong(address)]:
            raise MCPServerError(
                f"{host} is at {refused[0]}, which is no public address, and nothing was sent there. "
                "If it is a server of yours, give it allow_private=True"
            )
        return addresses

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


def _not_loopback(address: str) -> bool:
    return not ipaddress.ip_address(address).is_loopback


class PublicAddressTransport(httpx2.AsyncHTTPTransport):
    """Sends requests to public addresses only, and to this machine where the server's own URL says so.

    A proxy from the environment is not used, since it would look the host up by itself.
    """

    def __init__(self, url: str) -> None:
        context = httpx2.create_ssl_context()
        super().__init__(verify=context)
        host = httpx2.URL(url).host
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=context,
            max_connections=_MAX_CONNECTIONS,
            network_backend=_AddressCheckingBackend(host if is_local_host(host) else None),
        )
