"""A thread that receives change notifications from a database server while there are subscriptions."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import attrs

from agentfsm.stores.subscriptions import Subscriptions

_log = logging.getLogger("agentfsm.stores")

# Seconds between two checks whether there are still subscriptions.
CHECK_INTERVAL_S: Final = 0.5
# Seconds between two attempts to reach a server that is away; subscribers poll meanwhile.
RECONNECT_DELAY_S: Final = 1.0

# Yields the server's notifications, and an empty string once it listens and after each `CHECK_INTERVAL_S` without a
# notification.
NotificationSource = Callable[[], Iterator[str]]


class PushNotificationMixin:
    """The part of a backend whose server announces changes, so that the store's thread need not poll."""

    @property
    def poll_interval_s(self) -> float:
        """Seconds between two polls: infinity, since the server is not polled."""
        return math.inf

    def has_changed(self) -> bool:
        """Return False, since the listener receives changes instead."""
        return False


@attrs.define(eq=False, repr=False, kw_only=True)
class ChangeListener:
    """Notifies subscribers of the changes that a server announces. Its thread ends after the last subscription."""

    subscriptions: Subscriptions
    notifications: NotificationSource
    """Iterates over notifications. It connects at its first item, and raises if the connection fails."""

    match_topic: Callable[[str, Iterable[str]], str | None]
    """Returns the topic that a notification is about, or None."""

    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _thread: threading.Thread | None = attrs.field(default=None, init=False)

    def start(self) -> None:
        """Start the thread unless it runs already. If no thread can be started, subscribers only poll."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="agentfsm-listener", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:
                    self._thread = None
                    _log.warning("changes by other processes are noticed late: no thread can be started: %s", error)

    def _run(self) -> None:
        while not self._stop_if_unused():
            try:
                self._listen()
            except Exception as error:  # noqa: BLE001  subscribers poll meanwhile, and the server may be back soon
                _log.info("changes by other processes are noticed late until the server is back: %s", type(error))
                time.sleep(RECONNECT_DELAY_S)

    def _stop_if_unused(self) -> bool:
        with self._lock:
            if self.subscriptions.topics:
                return False
            self._thread = None
            return True

    def _listen(self) -> None:
        is_new = True
        for announcement in self.notifications():
            topics = list(self.subscriptions.topics)
            if not topics:
                return
            if is_new:  # earlier notifications were missed
                self.subscriptions.notify(topics)
                is_new = False
            topic = self.match_topic(announcement, topics) if announcement else None
            if topic is not None:
                self.subscriptions.notify([topic])
