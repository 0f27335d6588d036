"""What clients who listen are told of: that a list has changed, that a run has moved."""

from __future__ import annotations

from collections.abc import Callable

import anyio.lowlevel
import attrs
from mcp.server.subscriptions import ResourcesListChanged, ResourceUpdated, ServerEvent, ToolsListChanged


@attrs.define(eq=False, repr=False)
class EventBus:
    """Hands events to the streams of those who listen (the SDK's `SubscriptionBus`); never waits for them."""

    _listeners: dict[object, Callable[[ServerEvent], None]] = attrs.field(factory=dict, init=False)

    def subscribe(self, listener: Callable[[ServerEvent], None]) -> Callable[[], None]:
        """Add a stream; returns what takes it away."""
        token = object()
        self._listeners[token] = listener

        def leave() -> None:
            self._listeners.pop(token, None)

        return leave

    async def publish(self, event: ServerEvent) -> None:
        """Hand an event on, as the SDK asks for it."""
        self._dispatch(event)
        await anyio.lowlevel.checkpoint()

    def notify_resource_updated(self, uri: str) -> None:
        """Tell that a resource has changed."""
        self._dispatch(ResourceUpdated(uri=uri))

    def notify_resources_changed(self) -> None:
        """Tell that there is another resource."""
        self._dispatch(ResourcesListChanged())

    def notify_tools_changed(self) -> None:
        """Tell that there are other tools."""
        self._dispatch(ToolsListChanged())

    def _dispatch(self, event: ServerEvent) -> None:
        for listener in tuple(self._listeners.values()):
            listener(event)
