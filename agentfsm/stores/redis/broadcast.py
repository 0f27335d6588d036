"""Broadcast messages between processes through Redis's PUBLISH: fast, and lost if no process listens."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import attrs

from agentfsm.stores.redis.server import (
    DEFAULT_PREFIX,
    RedisConnection,
    build_connection,
    format_address,
    iter_messages,
    publish_heard,
)

_log = logging.getLogger("agentfsm.stores")

# Items that wait for the server: seconds of text of a busy process.
MAX_WAITING: Final = 10_000
# Seconds between two requests of a sender. A person does not notice it, and the items in between share a request.
PAUSE_S: Final = 0.02
# Seconds for which items are kept for a listener that is about to come: the time from the start of a run to its stream.
HOLD_S: Final = 0.3
# Seconds after which a new listener is subscribed at the latest.
CHECK_S: Final = 0.05
# Seconds between two attempts to reach a server that is away.
RETRY_S: Final = 1.0
# The operations, for the log.
PUBLISH: Final = "PUBLISH"
SUBSCRIBE: Final = "SUBSCRIBE"
# Seconds until an idle sender ends: longer than the pauses of a model.
IDLE_S: Final = 5.0


def _start_thread(run: Callable[[], None], name: str) -> bool:
    """Start a thread that does not delay the exit of the process. Return False if it cannot be started."""
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:  # the system has no more threads, or the interpreter is shutting down
        return False
    return True


class _Waiting(NamedTuple):
    """An item that was not sent yet."""

    channel: str
    item: Any
    since: float
    """Time at which it was handed over, monotonic seconds."""


def _check_url(_broadcast: object, _attribute: object, url: str) -> None:
    build_connection(url)


@attrs.define(eq=False, repr=False)
class RedisBroadcast:
    """Sends items to the listeners of a topic in all processes, and receives those of others.

    Nothing here fails or waits for the server: while it is slow or away, the oldest items are dropped. A thread sends
    and another one receives, each while it is needed. An item whose topic has no listener is kept for a moment, and
    dropped without being sent.
    """

    url: str = attrs.field(validator=_check_url)
    """Address of the server, with user and password."""

    encode: Callable[[Sequence[Any]], bytes]
    """Encodes the items that one message has. The sending thread calls it."""

    prefix: str = DEFAULT_PREFIX
    """Prefix of the names of the channels."""

    _waiting: deque[_Waiting] = attrs.field(factory=lambda: deque(maxlen=MAX_WAITING), init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)
    """Condition whose lock guards the threads and the listeners."""

    _has_sender: bool = attrs.field(default=False, init=False)
    _has_receiver: bool = attrs.field(default=False, init=False)
    _listeners: dict[str, tuple[Callable[[bytes], None], ...]] = attrs.field(factory=dict, init=False)
    """Listeners by the name of the channel."""

    _failing: set[str] = attrs.field(factory=set, init=False)
    """Operations that fail at present, of which the log has the first failure."""

    def send(self, topic: str, item: object) -> None:
        """Hand over an item; from any thread, without waiting."""
        with self._changed:
            self._waiting.append(_Waiting(f"{self.prefix}{topic}", item, time.monotonic()))
            self._changed.notify()
            if not self._has_sender:
                self._has_sender = _start_thread(self._run_sender, "agentfsm-broadcast")

    def listen(self, topic: str, receive: Callable[[bytes], None]) -> Callable[[], None]:
        """Call `receive` with each message of a topic, in a thread of its own. Return a function that ends this."""
        channel = f"{self.prefix}{topic}"
        with self._changed:
            self._listeners[channel] = (*self._listeners.get(channel, ()), receive)
            if not self._has_receiver:
                self._has_receiver = _start_thread(self._run_receiver, "agentfsm-broadcasts")

        def end() -> None:
            with self._changed:
                left = [each for each in self._listeners.get(channel, ()) if each is not receive]
                self._listeners[channel] = tuple(left)
                if not left:
                    del self._listeners[channel]

        return end

    # Threads.

    def _run_sender(self) -> None:
        connection = build_connection(self.url)
        while waiting := self._take_waiting():
            try:
                connection.connect()  # unless it is
                self._publish(connection, waiting)
            except Exception as error:  # noqa: BLE001  the server is away, or refuses; the items are lost
                self._note_failure(PUBLISH, error)
                connection.disconnect()
                time.sleep(RETRY_S)
                self._waiting.clear()  # late messages are of no use
            else:
                self._note_success(PUBLISH)
                time.sleep(PAUSE_S)
        connection.disconnect()

    def _take_waiting(self) -> list[_Waiting]:
        """Wait for items, and return all of them. An empty result ends the thread."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, IDLE_S):
                self._has_sender = False
            waiting = list(self._waiting)
            self._waiting.clear()
            return waiting

    def _publish(self, connection: RedisConnection, waiting: Sequence[_Waiting]) -> None:
        """Publish the items of topics with a listener, and keep the others for a moment."""
        by_channel: dict[str, list[Any]] = {}
        for each in waiting:
            by_channel.setdefault(each.channel, []).append(each.item)
        heard = publish_heard(connection, by_channel, self.encode)
        oldest = time.monotonic() - HOLD_S
        kept = [each for each in waiting if each.channel not in heard and each.since >= oldest]
        with self._changed:
            self._waiting.extendleft(reversed(kept))

    def _run_receiver(self) -> None:
        while not self._stop_if_unused():
            try:
                for channel, message in iter_messages(self.url, self._listeners.copy, CHECK_S):
                    self._note_success(SUBSCRIBE)
                    for receive in self._listeners.get(channel, ()):
                        receive(message)
                    if not self._listeners:
                        break
            except Exception as error:  # noqa: BLE001  the server is away, or refuses; the messages are lost
                self._note_failure(SUBSCRIBE, error)
                time.sleep(RETRY_S)

    def _stop_if_unused(self) -> bool:
        with self._changed:
            self._has_receiver = bool(self._listeners)
            return not self._has_receiver

    def _note_failure(self, operation: str, error: Exception) -> None:
        if operation not in self._failing:
            self._failing.add(operation)
            address = format_address(self.url)
            _log.warning("%s: %s fails, so messages are lost until it works again: %s", address, operation, error)

    def _note_success(self, operation: str) -> None:
        self._failing.discard(operation)
