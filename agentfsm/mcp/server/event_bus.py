"""Distribute events to listening clients: changes of lists, and of runs."""

from __future__ import annotations

from collections.abc import Callable

import anyio.lowlevel
import attrs
from mcp.server.subscriptions import ResourcesListChanged, ResourceUpdated, ServerEvent, ToolsListChanged


@attrs.define(eq=False, repr=False)
class EventBus:
    """Distributor of events to the streams of listening clients, an SDK `SubscriptionBus`. It never waits for them."""

    _listeners: dict[object, Callable[[ServerEvent], None]] = attrs.field(factory=dict, init=False)

    def subscribe(self, listener: Callable[[ServerEvent], None]) -> Callable[[], None]:
        """Add a listener. Returns the function that removes it."""
        token = object()
        self._listeners[token] = listener

        def leave() -> None:
            self._listeners.pop(token, None)

        return leave

    async def publish(self, event: ServerEvent) -> None:
        """Distribute an event; called by the SDK."""
        self._dispatch(event)
        await anyio.lowlevel.checkpoint()

    def notify_resource_updated(self, uri: str) -> None:
        """Report that a resource has changed."""
        self._dispatch(ResourceUpdated(uri=uri))

    def notify_resources_changed(self) -> None:
        """Report that the list of resources has changed."""
        self._dispatch(ResourcesListChanged())

    def notify_tools_changed(self) -> None:
        """Report that the list of tools has changed."""
        self._dispatch(ToolsListChanged())

    def _dispatch(self, event: ServerEvent) -> None:
        for listener in tuple(self._listeners.values()):
            listener(event)
