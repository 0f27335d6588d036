"""Limit the sessions of the handshake revision, in total and for each client.

The SDK opens a session for each `initialize`, keeps it until it has been idle for long, and beyond its `max_sessions`
refuses all clients. Here the least used session is closed instead. Its client, if it still exists, gets a 404 and opens
another. Clients of the later revision have no sessions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import anyio
import attrs
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken

from agentfsm._lib.web.eviction import choose_evicted, derive_client_key
from agentfsm._lib.web.http_guard import App, Message, Receive, Scope, Send

# Sessions at once, of some 40 KB each.
MAX_SESSIONS: Final = 1_000
# Seconds after which the SDK ends a session without a request in flight; an open stream of a client counts as one.
SESSION_IDLE_TIMEOUT_S: Final = 30 * 60.0
_HEADER: Final = b"mcp-session-id"
_FIRST_ERROR: Final = 400
_NOT_FOUND: Final = 404


def claim_request(scope: Scope, owner: str) -> Scope:
    """Return the ASGI scope of a request of an owner, who counts as one client whatever its address.

    A session that the request opens exists for requests of the same owner only: the SDK answers others with 404.

    Args:
        scope: The scope.
        owner: A text without spaces that stands for the credential.
    """
    token = AccessToken(token="", client_id=owner, scopes=[])
    return {**scope, "user": AuthenticatedUser(token), "client": (owner, 0)}


@attrs.define(eq=False, kw_only=True)
class _HTTPSession:
    opening_scope: Scope
    """ASGI scope of the request that opened the session."""

    id: bytes = b""
    """Session id. Empty until the answer to that request contains it."""

    active_requests: int = 0
    """Number of requests in flight."""

    is_reused: bool = False
    """Whether another request has followed."""

    idle_since: float = 0.0
    """End of the newest request in seconds, by the clock of the event loop."""

    @property
    def client_key(self) -> str:
        """Key of the client; "" if it has no address."""
        client = self.opening_scope.get("client")
        return derive_client_key(client[0]) if client else ""

    @property
    def idle_rank(self) -> tuple[float, ...] | None:
        """None while a request is in flight; otherwise its rank, where sessions with one request come first."""
        return None if self.active_requests else (self.is_reused, self.idle_since)


@attrs.define(eq=False, repr=False)
class SessionLimiter:
    """ASGI app that limits the sessions of another, in total and for each client."""

    app: App
    max_per_client: int
    """Sessions of one client at once."""

    _open: dict[bytes, _HTTPSession] = attrs.field(factory=dict, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        asked = _read_session_id(scope["headers"]) if scope["type"] == "http" else b""
        session = self._open.get(asked) if asked else _HTTPSession(opening_scope=dict(scope))
        if session is None or scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_and_track(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._track_session(session, scope["method"], message)
            await send(message)

        session.is_reused = bool(asked)
        session.active_requests += 1
        try:
            await self.app(scope, receive, send_and_track)
        finally:
            session.active_requests -= 1
            session.idle_since = anyio.current_time()
        if session.id and not asked:
            await self._make_room(session)

    def _track_session(self, session: _HTTPSession, method: str, answer: Message) -> None:
        """Record a session that this answer opens or ends."""
        status = answer["status"]
        if session.id:
            if status == _NOT_FOUND or (method == "DELETE" and status < _FIRST_ERROR):
                self._open.pop(session.id, None)
        elif status < _FIRST_ERROR and (given := _read_session_id(answer.get("headers", ()))):
            session.id = given
            self._open[given] = session

    async def _make_room(self, newest: _HTTPSession) -> None:
        """End a session, with a request as from its client, if the newest exceeds a limit."""
        now = anyio.current_time()
        for each in [
            each for each in self._open.values() if each.idle_rank and now - each.idle_since > SESSION_IDLE_TIMEOUT_S
        ]:
            del self._open[each.id]  # the SDK has ended it
        leaving = choose_evicted(
            self._open.values(), newest, max_total=MAX_SESSIONS, max_per_client=self.max_per_client
        )
        if leaving is not None:
            del self._open[leaving.id]
            await self.app(
                {**leaving.opening_scope, "method": "DELETE", "headers": [(_HEADER, leaving.id)]},
                _receive_empty,
                _discard,
            )


def _read_session_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return next((value for name, value in headers if name.lower() == _HEADER), b"")


async def _receive_empty() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _discard(_message: Message) -> None:
    pass
