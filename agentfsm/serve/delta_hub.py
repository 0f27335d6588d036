"""Passes the text that models write to the event streams of this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm._lib.concurrency import make_waker

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentfsm.agents.deltas import DeltaRelay, Piece

# Pieces of text that are kept for a client that lags behind.
MAX_DELTAS: Final = 1_000


@attrs.define(eq=False, repr=False)
class DeltaHub:
    """Passes pieces of text from the executions of this process, and from other processes, to the streams."""

    relay: DeltaRelay | None = None
    """Exchanges pieces with other processes. None: there are only those of this process."""

    _queues: dict[str, set[DeltaQueue]] = attrs.field(factory=dict, init=False)
    """Queues of the streams, by the id of the root run."""

    _unsubscribers: dict[str, Callable[[], None]] = attrs.field(factory=dict, init=False)
    """Functions that end the subscriptions to the relay, by the id of the root run."""

    _relayed: deque[tuple[str, Sequence[Piece]]] = attrs.field(factory=lambda: deque(maxlen=MAX_DELTAS), init=False)
    """Pieces that the thread of the relay has received, by the id of the root run."""

    def publish(self, root_id: str, piece: Piece) -> None:
        """Pass on a piece of a run that this process executes, or of its sub-agents."""
        self._put(root_id, piece)
        if self.relay is not None:
            self.relay.publish(root_id, piece)

    @contextmanager
    def subscribe(self, root_id: str) -> Iterator[DeltaQueue]:
        """Yield a queue of the pieces of a run and its sub-agents."""
        queue = DeltaQueue()
        if root_id not in self._queues:
            self._queues[root_id] = set()
            self._subscribe_to_relay(root_id)
        self._queues[root_id].add(queue)
        try:
            yield queue
        finally:
            self._queues[root_id].discard(queue)
            if not self._queues[root_id]:
                del self._queues[root_id]
                if (unsubscribe := self._unsubscribers.pop(root_id, None)) is not None:
                    unsubscribe()

    def _subscribe_to_relay(self, root_id: str) -> None:
        if self.relay is None:
            return
        wake = make_waker(self._take_relayed)

        def receive(pieces: Sequence[Piece]) -> None:  # in the thread of the relay
            self._relayed.append((root_id, pieces))
            wake()

        self._unsubscribers[root_id] = self.relay.subscribe(root_id, receive)

    def _take_relayed(self) -> None:
        while self._relayed:
            root_id, pieces = self._relayed.popleft()
            for piece in pieces:
                self._put(root_id, piece)

    def _put(self, root_id: str, piece: Piece) -> None:
        for queue in self._queues.get(root_id, ()):
            queue.put(piece)


@attrs.define(eq=False, repr=False)
class DeltaQueue:
    """The newest pieces for one stream."""

    _pieces: deque[Piece] = attrs.field(factory=lambda: deque(maxlen=MAX_DELTAS), init=False)
    _filled: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    def put(self, piece: Piece) -> None:
        """Add a piece, in place of the oldest if there are too many."""
        self._pieces.append(piece)
        self._filled.set()

    async def wait(self) -> None:
        """Wait until there is a piece."""
        while not self._pieces:
            self._filled = anyio.Event()
            await self._filled.wait()

    def take(self) -> Sequence[Piece]:
        """Return all pieces that are there."""
        pieces = tuple(self._pieces)
        self._pieces.clear()
        return pieces
