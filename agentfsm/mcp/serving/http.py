"""A server over HTTP: who may reach it, what a request may be, and how it ends."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias

import anyio
import attrs
import uvicorn
from anyio.abc import TaskStatus
from mcp.server.transport_security import TransportSecuritySettings

from agentfsm.core.errors import MisuseError, first_error
from agentfsm.mcp.errors import MCPServerError

TOKEN_VARIABLE: Final = "AGENTFSM_MCP_TOKEN"  # noqa: S105  the name of a variable
# Where the one endpoint is.
PATH: Final = "/mcp"
# Bytes of a request: arguments of a tool are seldom more than some kilobytes.
BODY_BYTES: Final = 4 * 1024 * 1024
# Open at once; a client that is one too many is told to come later (503).
MAX_CONNECTIONS: Final = 1_000
# Sessions of clients of the handshake era, which have one each.
MAX_SESSIONS: Final = 1_000
# Seconds that requests under way have at the end.
GRACE_S: Final = 3.0
# Characters: what is shorter can be tried out.
MIN_TOKEN_CHARS: Final = 16
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


def token_of(given: str | None) -> str | None:
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


def security_of(host: str, hosts: Iterable[str]) -> TransportSecuritySettings:
    """Return by which names the server may be called, in `Host`, and from which pages, in `Origin`.

    A page in a browser that calls it by a name of its own (DNS rebinding), or from elsewhere, is refused.

    Args:
        host: The address it listens on.
        hosts: Further names, with a port where that is not to be any.

    Raises:
        MisuseError: when it listens on all addresses and nobody says by which names it is called.
    """
    named = list(hosts)
    if host in ("0.0.0.0", "::", "") and not named:  # noqa: S104  it is compared
        raise MisuseError(
            f"{host!r} is every address of this machine, so nobody knows by which names the server is called: say "
            "them in hosts=, for example hosts=['mcp.example.org']"
        )
    own = f"[{host}]" if ":" in host and not host.startswith("[") else host
    names = dict.fromkeys((*_LOOPBACK, own, *named))
    allowed = [each for name in names for each in ((name,) if _has_port(name) else (name, f"{name}:*"))]
    return TransportSecuritySettings(
        allowed_hosts=allowed,
        allowed_origins=[f"{scheme}://{each}" for scheme in ("http", "https") for each in allowed],
    )


def _has_port(name: str) -> bool:
    return ":" in name.rpartition("]")[2]


@attrs.define(eq=False, repr=False)
class Guarded:
    """An app behind a bearer token. The token goes no further: no tool and no other server ever sees it."""

    app: App
    token: str | None
    # None: everybody may in.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
        brought = [value for name, value in scope["headers"] if name == b"authorization"]
        if self.token is not None and not _is_right(brought, self.token):
            return await _refuse(send, brought=bool(brought))
        return await self.app({**scope, "headers": headers}, receive, send)


def _is_right(brought: list[bytes], token: str) -> bool:
    """Whether one token was brought, and the right one; it takes as long for each wrong one."""
    if len(brought) != 1:
        return False
    scheme, _, value = brought[0].partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), token.encode())


async def _refuse(send: Send, *, brought: bool) -> None:
    challenge = b'Bearer realm="mcp"' + (b', error="invalid_token"' if brought else b"")
    text = b"Unauthorized: this server needs its bearer token, as `Authorization: Bearer TOKEN`"
    headers = [(b"www-authenticate", challenge), (b"content-type", b"text/plain"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(text)).encode()))
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that is bound.

    Raises:
        MCPServerError: when the address is taken, or none of this machine.
    """
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        raise MCPServerError(
            f"the server cannot listen on {host}:{port} ({error.strerror or error}): give another port, or 0 for any"
        ) from error


def url_of(host: str, bound: socket.socket) -> str:
    """Return where clients find the server."""
    own = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{own}:{bound.getsockname()[1]}{PATH}"


async def serve(
    app: App, bound: socket.socket, url: str, task_status: TaskStatus[str], ending: Callable[[], object]
) -> None:
    """Serve until a signal comes or this is cancelled; either way requests under way have some seconds to end.

    Args:
        app: What answers.
        bound: Where it listens.
        url: Told when it does.
        task_status: Who is told.
        ending: Called when it begins to end.

    Raises:
        MCPServerError: when the app does not start.
    """
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(GRACE_S),
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
    )
    server = _Server(config, lambda: task_status.started(url), ending)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_end_when_cancelled, server)
            with anyio.CancelScope(shield=True):
                await server.serve(sockets=[bound])
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:  # of one error
        raise first_error(group) from None


async def _end_when_cancelled(server: uvicorn.Server) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        server.should_exit = True


class _Server(uvicorn.Server):
    """Tells when it is there, and when it begins to end."""

    def __init__(self, config: uvicorn.Config, told: Callable[[], object], ending: Callable[[], object]) -> None:
        super().__init__(config)
        self._told, self._ending = told, ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and tell so."""
        try:
            await super().startup(sockets)
        except SystemExit as error:  # which is how it says that the app did not start
            raise MCPServerError("the server did not start: see the log for what its app says") from error
        self._told()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, and tell so before."""
        self._ending()
        await super().shutdown(sockets)
