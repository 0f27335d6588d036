"""Connect to servers at public addresses only, unless the user allows private ones.

The address that is connected to counts, not the URL. So a host is resolved here, each of its addresses is checked, and
the connection goes to a checked address. A DNS name that changes its address a moment later, a redirect, or a token
endpoint that a server names cannot lead to a private network.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, TypeAlias, cast
from urllib.parse import urlsplit

import anyio
import attrs
import httpcore2
import httpx2

from agentfsm.core.errors import MisuseError

if TYPE_CHECKING:
    import ssl

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# NAT64: the last four bytes are an IPv4 address. The local-use prefix 64:ff9b:1::/48 counts as private as a whole.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# Azure's metadata address, which looks public; those of the other clouds are link-local or private.
_METADATA_ADDRESSES: Final = frozenset({ipaddress.ip_address("168.63.129.16")})
# Maximum of simultaneous connections to one server.
_MAX_CONNECTIONS: Final = 20
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# Allowed hosts that an error names.
_MAX_NAMED: Final = 10
# A host in a URL: a name, of any script, or an address.
_PLAIN_HOST: Final = re.compile(r"[\w.:-]+")
# Endings of names that no public host has.
_INTERNAL_DOMAINS: Final = (
    *(".internal", ".local", ".localdomain", ".lan", ".intranet", ".corp", ".home", ".home.arpa", ".private"),
    *(".svc", ".test", ".invalid", ".onion"),
)
# Ports of an entry of a list of hosts that names none.
_HTTP_PORTS: Final = (80, 443)
_HOST: Final = re.compile(
    r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(:[0-9]{1,5})?|\[[0-9a-fA-F:.]+\](:[0-9]{1,5})?"
)


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


def is_address(host: str) -> bool:
    """Return whether a host is an IP address, in its usual notation."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_public_host(host: str) -> bool:
    """Return whether a host may be public: a name with a dot, or a public address. Names are not resolved.

    Each notation is read that some client reads as an address, such as 0x7f.1, and characters that one maps to ASCII.
    """
    name = unicodedata.normalize("NFKC", host).replace("\u3002", ".").strip("[]").rstrip(".").lower()
    if is_local_host(name) or _PLAIN_HOST.fullmatch(name) is None:
        return False
    try:
        address = socket.inet_ntoa(socket.inet_aton(name))
    except OSError:
        address = name
    if is_address(address):
        return not is_private(address)
    return "." in name and not name.endswith(_INTERNAL_DOMAINS)


def to_hosts(given: Iterable[str], role: str) -> tuple[str, ...]:
    """Return the entries of a list of allowed hosts: "api.example.org", "*.example.org", "10.0.0.5:8080".

    Args:
        given: The entries.
        role: The owner of the list, for errors, such as "a sandbox".

    Raises:
        MisuseError: if it is not a sequence of hosts.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise MisuseError(f"hosts= of {role} must be a sequence of hosts, not {given!r}: write ({given!r},)")
    hosts = tuple(given)
    for host in hosts:
        if not isinstance(host, str) or not _HOST.fullmatch(host):
            raise MisuseError(
                f"hosts= of {role} has {host!r}, which is not a host: write a name such as 'api.example.org', "
                "'*.example.org' for all names below it, or one with a port, 'example.org:8443'"
            )
    return tuple([host.lower() for host in hosts])


def matches_host(pattern: str, host: str, port: int) -> bool:
    """Return whether an entry of a list of allowed hosts allows connections to this port of a host."""
    parts = urlsplit(f"//{pattern}")
    name, host = (parts.hostname or "").rstrip("."), host.lower().rstrip(".")
    if port not in ((parts.port,) if parts.port else _HTTP_PORTS):
        return False
    if not name.startswith("*."):
        return host == name
    return host.endswith(name[1:]) and not is_address(host)


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

    check_addresses: Callable[[str, int, Sequence[str]], None]
    """Raises an error if a host and port must not be connected to, because of one of the addresses of the host."""

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
        try:
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(f"{host} cannot be resolved: {error}") from error
        addresses = list(dict.fromkeys(str(place[4][0]) for place in found))
        self.check_addresses(host, port, addresses)
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore2.ConnectError:
                continue  # the next address may answer; the error of the last one is raised
        return await self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


def _not_loopback(address: str) -> bool:
    return not ipaddress.ip_address(address).is_loopback


@cache
def ssl_context() -> ssl.SSLContext:
    """Return the certificates to trust. They are read once: that takes longer than most requests."""
    return httpx2.create_ssl_context()


class PublicAddressTransport(httpx2.AsyncHTTPTransport):
    """Transport that sends requests to public addresses only, or to this machine if the server's URL names it.

    A proxy from the environment is not used, since it would resolve the host itself.
    """

    def __init__(self, url: str, *, error: type[Exception]) -> None:
        context = ssl_context()
        super().__init__(verify=context)
        host = httpx2.URL(url).host
        local_host = host if is_local_host(host) else None

        def check_addresses(host: str, _port: int, addresses: Sequence[str]) -> None:
            wrong = _not_loopback if host == local_host else is_private
            if refused := next(filter(wrong, addresses), None):
                raise error(
                    f"{host} has the address {refused}, which is not public, so nothing was sent. "
                    "If the server is your own, set allow_private=True"
                )

        self._pool = _open_pool(context, check_addresses)


class AllowedHostsTransport(httpx2.AsyncHTTPTransport):
    """Transport that sends requests to the hosts of a list only, and to public addresses of theirs.

    Each request is checked, so also each one that follows a redirect. A private address is allowed if the list has the
    address itself, and this machine if the list has `localhost`. The entry "*" stands for all hosts.
    """

    def __init__(self, hosts: Sequence[str], *, error: type[Exception]) -> None:
        context = ssl_context()
        super().__init__(verify=context)
        self._hosts = hosts
        self._error = error
        self._pool = _open_pool(context, self._check_addresses)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, unless its URL is refused."""
        url = request.url
        if url.scheme not in _DEFAULT_PORTS or not url.raw_host:
            raise self._error(f"{url.scheme or 'no scheme'}: requests are sent to http:// and https:// URLs only")
        if url.userinfo:
            raise self._error(f"the URL of {url.host} has a user name or a password, which is not sent: leave it out")
        host, port = url.raw_host.decode("ascii"), url.port or _DEFAULT_PORTS[url.scheme]
        if "*" not in self._hosts and not self._lists(host, port):
            allowed = ", ".join(self._hosts[:_MAX_NAMED]) + (", ..." if len(self._hosts) > _MAX_NAMED else "")
            raise self._error(f"{host}:{port} is not among the allowed hosts ({allowed}), so nothing was sent")
        return await super().handle_async_request(request)

    def _lists(self, host: str, port: int) -> bool:
        return any(matches_host(entry, host, port) for entry in self._hosts if entry != "*")

    def _check_addresses(self, host: str, port: int, addresses: Sequence[str]) -> None:
        wrong = is_private
        if self._lists(host, port):
            if is_address(host):
                return
            wrong = _not_loopback if is_local_host(host) else is_private
        if refused := next(filter(wrong, addresses), None):
            raise self._error(f"{host} has the address {refused}, which is not allowed, so nothing was sent")


def _open_pool(
    context: ssl.SSLContext, check_addresses: Callable[[str, int, Sequence[str]], None]
) -> httpcore2.AsyncConnectionPool:
    return httpcore2.AsyncConnectionPool(
        ssl_context=context,
        max_connections=_MAX_CONNECTIONS,
        network_backend=_AddressCheckingBackend(check_addresses),
    )
