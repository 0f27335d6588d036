"""Subscriptions to changes of a store, within one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from threading import RLock
from typing import Final

import attrs

_log = logging.getLogger("agentfsm.stores")

# Topic for changes of a run whose agent is unknown; it reaches the subscribers of all agents.
ALL_AGENTS_TOPIC: Final = "agent:"


def run_topic(run_id: str) -> str:
    """Return the topic of a run: its journal grew, or its state changed."""
    return f"run:{run_id}"


def agent_topic(name: str) -> str:
    """Return the topic of an agent: a worker may be able to claim one of its runs. An empty name means all agents."""
    return f"{ALL_AGENTS_TOPIC}{name}"


@attrs.define(eq=False, repr=False)
class Subscriptions:
    """Thread-safe callbacks by topic. Senders first check whether there are any `topics`."""

    topics: dict[str, dict[object, Callable[[], None]]] = attrs.field(factory=dict, init=False)
    """Callbacks by topic and subscription; empty if there are no subscriptions."""

    _lock: RLock = attrs.field(factory=RLock, init=False)
    """Reentrant, because a garbage collection in a thread that holds the lock may end a subscription."""

    def subscribe(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` for each notification of the topic. Return an idempotent, thread-safe unsubscribe function."""
        subscription = object()
        with self._lock:
            self.topics.setdefault(topic, {})[subscription] = wake

        def end() -> None:
            with self._lock:
                wakes = self.topics.get(topic, {})
                wakes.pop(subscription, None)
                if not wakes:
                    self.topics.pop(topic, None)

        return end

    def notify(self, topics: Iterable[str]) -> None:
        """Call the subscribers of these topics, each once per topic, and log their exceptions."""
        with self._lock:
            wakes = [wake for topic in {*topics} for wake in self._find_callbacks(topic)]
        for wake in wakes:
            try:
                wake()
            except Exception:  # noqa: BLE001  the other subscribers must be called too
                _log.exception("a subscriber of the store raised")

    def _find_callbacks(self, topic: str) -> list[Callable[[], None]]:
        chosen = [each for each in self.topics if each.startswith(topic)] if topic == ALL_AGENTS_TOPIC else [topic]
        return [wake for each in chosen for wake in self.topics.get(each, {}).values()]
