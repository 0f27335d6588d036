"""Distribute events to listening clients: changes of lists, and of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcp.server.subscriptions import InMemorySubscriptionBus

if TYPE_CHECKING:
    from mcp.server.subscriptions import ServerEvent


class EventBus(InMemorySubscriptionBus):
    """The SDK's bus, which the engine's synchronous callbacks can use too. No listener of a server waits or raises."""

    def announce(self, event: ServerEvent) -> None:
        """Distribute an event to all listeners."""
        for listener in tuple(self._listeners.values()):
            listener(event)
