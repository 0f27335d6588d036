"""Connections to the served endpoint: how long a request may take to arrive, and how many connections a client has.

uvicorn bounds neither. A client that sends half a request keeps its connection for ever, and beyond its
`limit_concurrency` uvicorn refuses all clients. Here the connection that has waited longest for a request makes room.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentfsm.web.eviction import choose_evicted, derive_client_key

# Connections at once. A process usually has 1,024 descriptors; up to three backlogs are accepted before the first
# connection that makes room is closed, and the store needs some.
MAX_CONNECTIONS: Final = 512
# Connections that are accepted in one round of the event loop.
BACKLOG: Final = 128
# Seconds for a whole request to arrive, head and body, counted from the connection or the last answer.
RECEIVE_TIMEOUT_S: Final = 30.0
# Seconds that a connection stays open after an answer if no other request begins.
KEEP_ALIVE_S: Final = 5


def limit_connections(max_per_client: int) -> type[LimitedConnection]:
    """Return the class of connections of which one client may hold so many at once."""
    return type("LimitedConnection", (LimitedConnection,), {"max_per_client": max_per_client})


class LimitedConnection(H11Protocol):
    """A connection that times out while it waits for a request, and holds one of a bounded number of places.

    While a request is answered, however long that takes, the connection is in use: it neither times out nor makes room.
    """

    max_per_client = MAX_CONNECTIONS // 2
    """Connections of one client at once."""

    client_key: str = ""
    _timer: asyncio.TimerHandle | None = None
    """None while a request is answered."""

    @property
    def idle_rank(self) -> tuple[float, ...] | None:
        """None while a request is answered; otherwise the time of the event loop at which the connection times out."""
        return None if self._timer is None else (self._timer.when(),)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Take a place, for which an idle connection may be closed. If there is none, refuse requests with 503."""
        super().connection_made(transport)
        self.client_key = derive_client_key(self.client[0]) if self.client else ""
        self._update_timer()
        places = [each for each in self.connections if isinstance(each, LimitedConnection)]
        leaving = choose_evicted(places, self, max_total=MAX_CONNECTIONS, max_per_client=self.max_per_client)
        if leaving is self:
            self.app = service_unavailable
        elif leaving is not None:
            self.connections.discard(leaving)  # now, since the transport takes one more round of the event loop
            leaving.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._stop_timer()

    def _update_timer(self) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(RECEIVE_TIMEOUT_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
