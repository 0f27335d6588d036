"""Distribute changes of lists and of runs, and announce them to clients of the handshake revision.

Clients of 2026-07-28 listen on a stream. The others hear of changes of the lists of tools and resources, and of updates
of the resources they have subscribed to.
"""

from __future__ import annotations

from typing import Final

import anyio
import attrs
import mcp.types as m
from anyio.abc import TaskGroup
from mcp import MCPError
from mcp.server.connection import Connection
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
)
from mcp.types.version import MODERN_PROTOCOL_VERSIONS

from agentfsm.mcp.sdk_parts import find_part
from agentfsm.mcp.server.input_requests import RequestContext

# Maximum of subscriptions of one connection, which limits the memory for a client.
MAX_URIS: Final = 1_000
# Maximum length of a URI in characters.
MAX_URI_CHARS: Final = 2_000
# Key of the client in the state of its connection.
_STATE_KEY: Final = "agentfsm.client"


class EventBus(InMemorySubscriptionBus):
    """The SDK's bus, which the engine's synchronous callbacks can use too. No listener of a server waits or raises."""

    def announce(self, event: ServerEvent) -> None:
        """Distribute an event to all listeners."""
        for listener in tuple(self._listeners.values()):
            listener(event)


@attrs.define(eq=False, repr=False)
class HandshakeClient:
    """Connection of a client with its subscribed resources and the changes it has not heard of yet."""

    connection: Connection
    uris: set[str] = attrs.field(factory=set, init=False)
    _pending: dict[ServerEvent, None] = attrs.field(factory=dict, init=False)
    """Pending changes in order, each once, so that a slow client does not delay the others."""

    _wakeup: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope, init=False)

    def on_event(self, event: ServerEvent) -> None:
        """Record a change that the client should hear of; never waits."""
        if not isinstance(event, ResourceUpdated) or event.uri in self.uris:
            self._pending[event] = None
            self._wakeup.set()

    async def send_changes(self) -> None:
        """Send changes to the client while the connection lasts."""
        with self._scope:
            while True:
                await self._wakeup.wait()
                self._wakeup = anyio.Event()
                while self._pending:
                    event = next(iter(self._pending))
                    del self._pending[event]
                    await self._send(event)

    async def _send(self, event: ServerEvent) -> None:
        if isinstance(event, ResourceUpdated):
            await self.connection.send_resource_updated(event.uri)
        elif isinstance(event, ToolsListChanged):
            await self.connection.send_tool_list_changed()
        elif isinstance(event, ResourcesListChanged):
            await self.connection.send_resource_list_changed()

    def stop(self) -> None:
        """Stop sending changes."""
        self._scope.cancel()


def attach(ctx: RequestContext, bus: EventBus, tasks: TaskGroup) -> None:
    """Announce changes to a client from now on, until it disconnects.

    Args:
        ctx: Context of the notification that ends its handshake.
        bus: Event bus that reports changes.
        tasks: Task group that sends the changes.
    """
    connection = _get_connection(ctx)
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS or _STATE_KEY in connection.state:
        return
    client = connection.state[_STATE_KEY] = HandshakeClient(connection)
    connection.exit_stack.callback(bus.subscribe(client.on_event))
    connection.exit_stack.callback(client.stop)
    tasks.start_soon(client.send_changes)


def subscribe(ctx: RequestContext, uri: str) -> None:
    """Subscribe a client to a resource until it unsubscribes or disconnects.

    Raises:
        MCPError: when the client has too many subscriptions, or has not finished its handshake.
    """
    client: HandshakeClient | None = _get_connection(ctx).state.get(_STATE_KEY)
    if client is None:
        raise MCPError(m.INVALID_REQUEST, "send notifications/initialized before resources/subscribe")
    if len(client.uris) >= MAX_URIS and uri not in client.uris:
        raise MCPError(m.INVALID_PARAMS, f"this client has subscribed to {MAX_URIS:,} resources: unsubscribe from some")
    client.uris.add(uri)


def unsubscribe(ctx: RequestContext, uri: str) -> None:
    """End a client's subscription to a resource."""
    client: HandshakeClient | None = _get_connection(ctx).state.get(_STATE_KEY)
    if client is not None:
        client.uris.discard(uri)


def _get_connection(ctx: RequestContext) -> Connection:
    connection: Connection = find_part(ctx.session, "_connection")  # no other state outlives the request of a handler
    return connection
