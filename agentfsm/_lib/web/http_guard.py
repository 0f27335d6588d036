"""Restrict HTTP access to a server: allowed host names, allowed origins of pages, and a bearer token."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError

TOKEN_VARIABLE: Final = "AGENTFSM_MCP_TOKEN"  # noqa: S105  the name of a variable
# Minimum length of a token in characters: a shorter one could be guessed.
MIN_TOKEN_CHARS: Final = 16
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_MAX_PORT: Final = 65_535
# `Host` as in RFC 9110, 7.2, with the characters of DNS and addresses: a name or an IPv6 address in brackets, a port.
_HOST: Final = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>[1-9][0-9]{0,4}))?", re.ASCII)

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
# A host, and its port or None. As an allowed host, None stands for every port.
AllowedHost: TypeAlias = tuple[str, int | None]


def resolve_token(given: str | None) -> str | None:
    """Return the token that clients have to send: the given one, else that of the environment, else None.

    Raises:
        MisuseError: when it is too short, or not printable ASCII.
    """
    token = given if given is not None else os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and (len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable()):
        raise MisuseError(
            f"a bearer token must have {MIN_TOKEN_CHARS} or more printable ASCII characters: create one with "
            '`python -c "import secrets; print(secrets.token_urlsafe(32))"`'
        )
    return token


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bracket_ipv6(host: str) -> str:
    """Return an address as written in a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def parse_host(text: str) -> AllowedHost | None:
    """Parse `HOST` or `HOST:PORT` strictly; None if it is anything else, such as `user@host` or a port of 0.

    The name is in lower case, as it is compared. It is not resolved or normalised in any other way.
    """
    found = _HOST.fullmatch(text.lower()) if text.isascii() else None
    if found is None:
        return None
    port = None if found["port"] is None else int(found["port"])
    return None if port is not None and port > _MAX_PORT else (found["name"], port)


def build_allowed_hosts(host: str, more: Iterable[str]) -> frozenset[AllowedHost]:
    """Return the hosts that requests may name in `Host` and in `Origin`.

    This refuses browser pages of other sites, also with a DNS name of their own for this machine (DNS rebinding).

    Args:
        host: The address that the server listens on.
        more: Further host names; any port is allowed if a name has none.

    Raises:
        MisuseError: when the server listens on all addresses and no name is given, or a name is invalid.
    """
    named = list(more)
    if host in ("0.0.0.0", "::", "") and not named:  # noqa: S104  it is compared
        raise MisuseError(
            f"{host!r} stands for every address of this machine, so the host names of the server are unknown: list "
            "them in hosts=, for example hosts=['mcp.example.org']"
        )
    allowed = {text: parse_host(text) for text in (*_LOOPBACK, bracket_ipv6(host), *named)}
    if wrong := [text for text, parsed in allowed.items() if parsed is None and text in named]:
        raise MisuseError(f"{wrong[0]!r} is not a HOST or HOST:PORT: use for example 'mcp.example.org' or '[::1]:8000'")
    return frozenset(parsed for parsed in allowed.values() if parsed is not None)


@attrs.define(eq=False, repr=False)
class HTTPGuard:
    """ASGI app that checks host, origin and token. It removes the token that it checks: no tool sees it."""

    app: App
    hosts: frozenset[AllowedHost]
    """Hosts that requests may name."""

    token: str | None
    """Bearer token. None: clients need no token."""

    origins: frozenset[str] = frozenset()
    """Origins of pages of other hosts that may call the server, such as "https://app.example.org"."""

    open_paths: frozenset[str] = frozenset()
    """Paths that are served under every host name, such as a health check, which an orchestrator asks by address."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or (scope["method"] == "GET" and scope["path"] in self.open_paths):
            return await self.app(scope, receive, send)
        hosts = _header_values(scope, b"host")
        if len(hosts) != 1 or not self._is_allowed(hosts[0].decode("latin-1")):
            return await _send_refusal(
                send, 421, "Misdirected Request: `Host` must be a host name that this server allows"
            )
        if not self._has_allowed_origin(_header_values(scope, b"origin")):
            return await _send_refusal(send, 403, "Forbidden: pages of this `Origin` may not call this server")
        sent = _header_values(scope, b"authorization")
        if self.token is not None and not _is_token_valid(sent, self.token):
            challenge = b'Bearer realm="mcp"' + (b', error="invalid_token"' if sent else b"")
            text = "Unauthorized: this server needs its bearer token, as `Authorization: Bearer TOKEN`"
            return await _send_refusal(send, 401, text, (b"www-authenticate", challenge))
        if self.token is not None:
            headers = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
            scope = {**scope, "headers": headers}
        return await self.app(scope, receive, send)

    def _has_allowed_origin(self, values: list[bytes]) -> bool:
        """Return whether there is no origin, or an allowed one. `null`, the origin of a sandboxed page, is refused."""
        if not values:
            return True
        if len(values) == 1 and values[0].decode("latin-1") in self.origins:
            return True
        scheme, _, host = values[0].decode("latin-1").partition("://")
        return len(values) == 1 and scheme in ("http", "https") and self._is_allowed(host)

    def _is_allowed(self, text: str) -> bool:
        host = parse_host(text)
        return host is not None and (host in self.hosts or (host[0], None) in self.hosts)


def _header_values(scope: Scope, header: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == header]


def _is_token_valid(sent: list[bytes], token: str) -> bool:
    """Return whether exactly the right token was sent, comparing in constant time."""
    if len(sent) != 1:
        return False
    scheme, _, value = sent[0].partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), token.encode())


async def _send_refusal(send: Send, status: int, text: str, *more: tuple[bytes, bytes]) -> None:
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(text)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *more]})
    await send({"type": "http.response.body", "body": text.encode()})
