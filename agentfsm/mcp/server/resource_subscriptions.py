"""Clients of the handshake revision who want to hear of resources; those of 2026-07-28 listen on a stream."""

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

# That one connection may subscribe to: what is kept of a client is bounded.
MAX_URIS: Final = 1_000
# Characters of one of them: as long as addresses get.
MAX_URI_CHARS: Final = 2_000
# Where a connection keeps its own.
_STATE_KEY: Final = "agentfsm.subscriber"


@attrs.define(eq=False, repr=False)
class Subscriber:
    """A connection, the resources it wants to hear of, and what it has not been told yet."""

    connection: Connection
    uris: set[str] = attrs.field(factory=set, init=False)
    _changed_uris: dict[str, None] = attrs.field(factory=dict, init=False)
    """What has changed, in that order: each once, however often, so that a slow client holds up nobody."""

    _wakeup: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope, init=False)

    def on_event(self, event: ServerEvent) -> None:
        """Take note of an event, if it is of interest; never waits."""
        if isinstance(event, ResourceUpdated) and event.uri in self.uris:
            self._changed_uris[event.uri] = None
            self._wakeup.set()

    async def send_updates(self) -> None:
        """Tell the client what changes, as long as the connection lasts."""
        with self._scope:
            while True:
                await self._wakeup.wait()
                self._wakeup = anyio.Event()
                while self._changed_uris:
                    uri = next(iter(self._changed_uris))
                    del self._changed_uris[uri]
                    await self.connection.send_resource_updated(uri)

    def stop(self) -> None:
        """Tell no more."""
        self._scope.cancel()


def subscribe(ctx: RequestContext, uri: str, bus: EventBus, tasks: TaskGroup) -> None:
    """Tell a client of a resource from now on, until it unsubscribes or goes.

    Args:
        ctx: Of its request.
        uri: The resource.
        bus: Where changes are heard of.
        tasks: Where the client is told.

    Raises:
        MCPError: when it has subscribed to too many.
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
    """Tell a client no more of a resource."""
    own: Subscriber | None = _get_connection(ctx).state.get(_STATE_KEY)
    if own is not None:
        own.uris.discard(uri)


def _get_connection(ctx: RequestContext) -> Connection:
    return ctx.session._connection  # noqa: SLF001  a handler has no other way to what outlives its request
