"""Who may reach a server over HTTP: by which names it is called, from which pages, and with which token."""

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
# Characters: what is shorter can be tried out.
MIN_TOKEN_CHARS: Final = 16
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_MAX_PORT: Final = 65_535
# `Host` as RFC 9110 has it, 7.2, of what DNS and addresses allow: a name or an IPv6 address in brackets, then a port.
_HOST: Final = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>[1-9][0-9]{0,4}))?", re.ASCII)

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
# A host, and its port or None where it has none. As an allowed host, None stands for every port.
AllowedHost: TypeAlias = tuple[str, int | None]


def resolve_token(given: str | None) -> str | None:
    """Return the token that clients have to bring: what is given, else that of the environment, else None.

    Raises:
        MisuseError: when it can be guessed, or no client could send it.
    """
    token = given if given is not None else os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and (len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable()):
        raise MisuseError(
            f"a bearer token has {MIN_TOKEN_CHARS} or more printable ASCII characters: make one with "
            '`python -c "import secrets; print(secrets.token_urlsafe(32))"`'
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bracket_ipv6(host: str) -> str:
    """Return an address as it stands in a URL."""
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
    """Return the names by which a server may be called, in `Host` and in `Origin`.

    A page in a browser that calls it by a name of its own (DNS rebinding), or from elsewhere, is refused.

    Args:
        host: The address it listens on.
        more: Further names, with a port where that is not to be any.

    Raises:
        MisuseError: when it listens on all addresses and no name is given, or a name is no host.
    """
    named = list(more)
    if host in ("0.0.0.0", "::", "") and not named:  # noqa: S104  it is compared
        raise MisuseError(
            f"{host!r} is every address of this machine, so nobody knows by which names the server is called: say "
            "them in hosts=, for example hosts=['mcp.example.org']"
        )
    allowed = {text: parse_host(text) for text in (*_LOOPBACK, bracket_ipv6(host), *named)}
    if wrong := [text for text, parsed in allowed.items() if parsed is None and text in named]:
        raise MisuseError(f"{wrong[0]!r} is no HOST or HOST:PORT: write for example 'mcp.example.org' or '[::1]:8000'")
    return frozenset(parsed for parsed in allowed.values() if parsed is not None)


@attrs.define(eq=False, repr=False)
class HTTPGuard:
    """An app behind its names and a bearer token. The token goes no further: no tool and no other server sees it."""

    app: App
    hosts: frozenset[AllowedHost]
    """By which it may be called."""

    token: str | None
    """None: no token is asked for."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if not self._has_allowed_host(_header_values(scope, b"host")):
            return await _send_refusal(
                send, 421, "Misdirected Request: `Host` has to be a name by which this server is called"
            )
        if not self._has_allowed_origin(_header_values(scope, b"origin")):
            return await _send_refusal(send, 403, "Forbidden: pages of this `Origin` may not call this server")
        brought = _header_values(scope, b"authorization")
        if self.token is not None and not _is_token_valid(brought, self.token):
            return await _send_challenge(send, brought=bool(brought))
        headers = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
        return await self.app({**scope, "headers": headers}, receive, send)

    def _has_allowed_host(self, values: list[bytes]) -> bool:
        return len(values) == 1 and self._is_allowed(values[0].decode("latin-1"))

    def _has_allowed_origin(self, values: list[bytes]) -> bool:
        """Whether no page calls, or one that the server may be called by; `null` is the origin of a page that hides."""
        if not values:
            return True
        scheme, _, host = values[0].decode("latin-1").partition("://")
        return len(values) == 1 and scheme in ("http", "https") and self._is_allowed(host)

    def _is_allowed(self, text: str) -> bool:
        host = parse_host(text)
        return host is not None and (host in self.hosts or (host[0], None) in self.hosts)


def _header_values(scope: Scope, header: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == header]


def _is_token_valid(brought: list[bytes], token: str) -> bool:
    """Whether one token was brought, and the right one; it takes as long for each wrong one."""
    if len(brought) != 1:
        return False
    scheme, _, value = brought[0].partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), token.encode())


async def _send_challenge(send: Send, *, brought: bool) -> None:
    challenge = b'Bearer realm="mcp"' + (b', error="invalid_token"' if brought else b"")
    text = "Unauthorized: this server needs its bearer token, as `Authorization: Bearer TOKEN`"
    await _send_refusal(send, 401, text, (b"www-authenticate", challenge))


async def _send_refusal(send: Send, status: int, text: str, *more: tuple[bytes, bytes]) -> None:
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(text)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *more]})
    await send({"type": "http.response.body", "body": text.encode()})
