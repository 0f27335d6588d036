"""Connect to servers at public addresses only, unless the user allows private ones.

The address that is connected to counts, not the URL. So a host is resolved here, each of its addresses is checked, and
the connection goes to a checked address. A DNS name that changes its address a moment later, a redirect, or a token
endpoint that a server names cannot lead to a private network.
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

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# NAT64: the last four bytes are an IPv4 address. The local-use prefix 64:ff9b:1::/48 counts as private as a whole.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# Azure's metadata address, which looks public; those of the other clouds are link-local or private.
_METADATA_ADDRESSES: Final = frozenset({ipaddress.ip_address("168.63.129.16")})
# Maximum of simultaneous connections to one server.
_MAX_CONNECTIONS: Final = 20


def is_private(address: str) -> bool:
    """Return whether an address is not public: private, loopback, link-local, multicast or reserved.

    For an IPv6 address that embeds an IPv4 address (mapped, 6to4, Teredo, NAT64), the IPv4 address is checked.

    Raises:
        ValueError: when the text is not an address.
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
    """Return whether a URL's host explicitly names this machine: `localhost`, or a loopback address."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_url(url: str, *, allow_private: bool, role: str) -> None:
    """Check that requests may be sent to a URL of a `role`, for example "an MCP server".

    Plain HTTP is allowed to this machine and, with `allow_private`, to the user's own network. Elsewhere others on the
    network could read tokens and change results.

    Raises:
        MisuseError: when it is not an HTTP URL, has no host, or is plain HTTP to another machine.
    """
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError) as error:
        raise MisuseError(f"{url!r} is not a URL of {role} ({error}): use one such as https://example.org") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise MisuseError(f"{url!r} is not a URL of {role}: use one such as https://example.org")
    if parsed.scheme == "http" and not is_local_host(parsed.host) and not allow_private:
        raise MisuseError(
            f"plain HTTP to {parsed.host} can be read and changed by others on the network: use https://, or set "
            "allow_private=True if the server is in your own network"
        )


@attrs.define(eq=False, repr=False)
class _AddressCheckingBackend(httpcore2.AsyncNetworkBackend):
    """Network backend that connects only to addresses that it has checked."""

    local_host: str | None
    """Host of the server's URL if it names this machine, else None. It has to resolve to loopback addresses."""

    error: type[Exception]
    """Class of the error when an address is refused."""

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
                continue  # the next address may answer; the error of the last one is raised
        return await self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def _resolve_allowed(self, host: str, port: int) -> list[str]:
        try:
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore2.ConnectError(f"{host} cannot be resolved: {error}") from error
        addresses = list(dict.fromkeys(str(place[4][0]) for place in found))
        wrong = _not_loopback if host == self.local_host else is_private
        if refused := [address for address in addresses if wrong(address)]:
            raise self.error(
                f"{host} has the address {refused[0]}, which is not public, so nothing was sent. "
                "If the server is your own, set allow_private=True"
            )
        return addresses

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


def _not_loopback(address: str) -> bool:
    return not ipaddress.ip_address(address).is_loopback


class PublicAddressTransport(httpx2.AsyncHTTPTransport):
    """Transport that sends requests to public addresses only, or to this machine if the server's URL names it.

    A proxy from the environment is not used, since it would resolve the host itself.
    """

    def __init__(self, url: str, *, error: type[Exception]) -> None:
        context = httpx2.create_ssl_context()
        super().__init__(verify=context)
        host = httpx2.URL(url).host
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=context,
            max_connections=_MAX_CONNECTIONS,
            network_backend=_AddressCheckingBackend(host if is_local_host(host) else None, error),
        )
