"""Resource subscriptions of clients of the handshake revision; clients of 2026-07-28 listen on a stream."""

from __future__ import annotations

from typing import Final

import anyio
import attrs
import mcp.types as m
from anyio.abc import TaskGroup
from mcp import MCPError
from mcp.server.connection import Connection
from mcp.server.subscriptions import ResourceUpdated, ServerEvent

from agentfsm.mcp.server.event_bus import EventBus
from agentfsm.mcp.server.input_requests import RequestContext

# Maximum of subscriptions of one connection, which limits the memory for a client.
MAX_URIS: Final = 1_000
# Maximum length of a URI in characters.
MAX_URI_CHARS: Final = 2_000
# Key of the subscriber in the state of a connection.
_STATE_KEY: Final = "agentfsm.subscriber"


@attrs.define(eq=False, repr=False)
class Subscriber:
    """Connection with its subscribed resources and its pending updates."""

    connection: Connection
    uris: set[str] = attrs.field(factory=set, init=False)
    _changed_uris: dict[str, None] = attrs.field(factory=dict, init=False)
    """Pending updates in order, each URI once, so that a slow client does not delay the others."""

    _wakeup: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope, init=False)

    def on_event(self, event: ServerEvent) -> None:
        """Record an update of a subscribed resource; never waits."""
        if isinstance(event, ResourceUpdated) and event.uri in self.uris:
            self._changed_uris[event.uri] = None
            self._wakeup.set()

    async def send_updates(self) -> None:
        """Send updates to the client while the connection lasts."""
        with self._scope:
            while True:
                await self._wakeup.wait()
                self._wakeup = anyio.Event()
                while self._changed_uris:
                    uri = next(iter(self._changed_uris))
                    del self._changed_uris[uri]
                    await self.connection.send_resource_updated(uri)

    def stop(self) -> None:
        """Stop sending updates."""
        self._scope.cancel()


def subscribe(ctx: RequestContext, uri: str, bus: EventBus, tasks: TaskGroup) -> None:
    """Subscribe a client to a resource until it unsubscribes or disconnects.

    Args:
        ctx: Context of its request.
        uri: URI of the resource.
        bus: Event bus that reports changes.
        tasks: Task group that sends the updates.

    Raises:
        MCPError: when the client has too many subscriptions.
    """
    connection = _get_connection(ctx)
    own: Subscriber | None = connection.state.get(_STATE_KEY)
    if own is None:
        own = connection.state[_STATE_KEY] = Subscriber(connection)
        connection.exit_stack.callback(bus.subscribe(own.on_event))
        connection.exit_stack.callback(own.stop)
        tasks.start_soon(own.send_updates)
    if len(own.uris) >= MAX_URIS and uri not in own.uris:
        raise MCPError(m.INVALID_PARAMS, f"this client has subscribed to {MAX_URIS:,} resources: unsubscribe from some")
    own.uris.add(uri)


def unsubscribe(ctx: RequestContext, uri: str) -> None:
    """End a client's subscription to a resource."""
    own: Subscriber | None = _get_connection(ctx).state.get(_STATE_KEY)
    if own is not None:
        own.uris.discard(uri)


def _get_connection(ctx: RequestContext) -> Connection:
    return ctx.session._connection  # noqa: SLF001  a handler has no other access to state that outlives its request
