"""Sessions of the handshake revision: how many are open, how many one client has, and which makes room for another.

The SDK opens a session for each `initialize`, keeps it until it has been idle for long, and beyond its `max_sessions`
refuses everybody. Here the session that is least missed ends, and its client, if there is one, gets the 404 upon which
it opens another. Clients of the later revision have no sessions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import anyio
import attrs

from agentfsm.mcp.serving.guard import App, Message, Receive, Scope, Send
from agentfsm.mcp.serving.places import client_of, crowded_out

# Sessions at once, of some 40 KB each.
SESSIONS: Final = 1_000
# Sessions of one client.
SESSIONS_OF_ONE: Final = SESSIONS // 2
# Seconds after which the SDK ends a session without a request in flight; an open stream of a client counts as one.
SESSION_IDLE_S: Final = 30 * 60.0
_HEADER: Final = b"mcp-session-id"
_BAD: Final = 400
_GONE: Final = 404


@attrs.define(eq=False, kw_only=True)
class _Session:
    opened: Scope
    # Of the request that opened it.
    id: bytes = b""
    # Empty until the answer to that request brings it.
    requests: int = 0
    # In flight.
    used: bool = False
    # Whether another request has followed.
    idle_since: float = 0.0
    # By the clock of the event loop.

    @property
    def holder(self) -> str:
        """The client."""
        client = self.opened.get("client")
        return client_of(client[0]) if client else ""

    @property
    def idle(self) -> tuple[float, ...] | None:
        """None while a request is in flight; otherwise its rank, in which those that were never used come first."""
        return None if self.requests else (self.used, self.idle_since)


@attrs.define(eq=False, repr=False)
class Sessions:
    """An app whose sessions are bounded, in all and for each client."""

    app: App
    _open: dict[bytes, _Session] = attrs.field(factory=dict, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        asked = _id_in(scope["headers"]) if scope["type"] == "http" else b""
        session = self._open.get(asked) if asked else _Session(opened=dict(scope))
        if session is None or scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def heard(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._hear(session, scope["method"], message)
            await send(message)

        session.used = bool(asked)
        session.requests += 1
        try:
            await self.app(scope, receive, heard)
        finally:
            session.requests -= 1
            session.idle_since = anyio.current_time()
        if session.id and not asked:
            await self._make_room(session)

    def _hear(self, session: _Session, method: str, answer: Message) -> None:
        """Take note of a session that this answer opens or ends."""
        status = answer["status"]
        if session.id:
            if status == _GONE or (method == "DELETE" and status < _BAD):
                self._open.pop(session.id, None)
        elif status < _BAD and (given := _id_in(answer.get("headers", ()))):
            session.id = given
            self._open[given] = session

    async def _make_room(self, newest: _Session) -> None:
        """End a session in the name of its client if the newest is one too many."""
        now = anyio.current_time()
        for each in [each for each in self._open.values() if each.idle and now - each.idle_since > SESSION_IDLE_S]:
            del self._open[each.id]  # the SDK has ended it
        leaving = crowded_out(self._open.values(), newest, most=SESSIONS, share=SESSIONS_OF_ONE)
        if leaving is not None:
            del self._open[leaving.id]
            await self.app({**leaving.opened, "method": "DELETE", "headers": [(_HEADER, leaving.id)]}, _nothing, _drop)


def _id_in(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return next((value for name, value in headers if name.lower() == _HEADER), b"")


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _drop(_message: Message) -> None:
    pass
