"""Passes the text that models write to the event streams of this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm._lib.concurrency import make_waker
from agentfsm.agents.deltas import Piece, pass_deltas
from agentfsm.core.events import Answered, AttemptFailed
from agentfsm.streaming.stream import StateChanged, TextDelta, ThinkingDelta

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentfsm.agents.deltas import DeltaRelay
    from agentfsm.streaming.stream import Listener, StreamEvent

# Pieces of text that are kept for a client that lags behind.
MAX_DELTAS: Final = 1_000
# Characters of the answers in progress that are kept for new streams, all runs together: about 4 million tokens.
MAX_DRAFT_CHARS: Final = 16 * 2**20


@attrs.define(eq=False)
class _Draft:
    """The beginning of a text or of the thinking that a model is writing, and the rest as far as it has come."""

    first: TextDelta | ThinkingDelta
    texts: list[str]
    chars: int


@attrs.define(eq=False, repr=False)
class Drafts:
    """The texts that models are writing, for streams that begin in the middle of one.

    They are whole from their beginning, or not kept: the oldest are dropped if there are too many characters.
    """

    _drafts: dict[str, dict[tuple[str, type], _Draft]] = attrs.field(factory=dict, init=False)
    """By the id of the root run; then by run and kind."""

    _chars: int = attrs.field(default=0, init=False)

    def add(self, root_id: str, piece: Piece) -> None:
        """Add a piece. That of another turn or attempt begins a new text."""
        event = piece.event
        if not isinstance(event, TextDelta | ThinkingDelta):
            return
        known = self._drafts.get(root_id, {}).get((event.run_id, type(event)))
        is_same = known is not None and (known.first.turn, known.first.attempt) == (event.turn, event.attempt)
        if known is not None and is_same and piece.offset == known.chars:
            known.texts.append(event.text)
            known.chars += len(event.text)
        elif piece.offset == 0 and not is_same:
            if known is not None:
                self.drop(root_id, event.run_id)
            drafts = self._drafts.setdefault(root_id, {})
            drafts[event.run_id, type(event)] = _Draft(event, [event.text], len(event.text))
        else:  # the beginning, or a piece in between, has not arrived
            self.drop(root_id, event.run_id)
            return
        self._chars += len(event.text)
        while self._chars > MAX_DRAFT_CHARS:
            self.drop(next(iter(self._drafts)))

    def get(self, root_id: str, run_id: str) -> Iterator[Piece]:
        """Yield what the model of a run has written of its answer, and of its thinking, each as one piece."""
        for (owner, _kind), draft in self._drafts.get(root_id, {}).items():
            if owner == run_id:
                draft.texts = ["".join(draft.texts)]
                yield Piece(attrs.evolve(draft.first, text=draft.texts[0]), 0)

    def drop(self, root_id: str, run_id: str | None = None) -> None:
        """Drop the texts of a run, or of all runs below a root."""
        drafts = self._drafts.get(root_id, {})
        for key in [key for key in drafts if run_id in {None, key[0]}]:
            self._chars -= drafts.pop(key).chars
        if not drafts:
            self._drafts.pop(root_id, None)


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

    _drafts: Drafts = attrs.field(factory=Drafts, init=False)
    """The answers in progress."""

    _executed: set[str] = attrs.field(factory=set, init=False)
    """Ids of the root runs that this process executes now."""

    @contextmanager
    def listen(self, root_id: str) -> Iterator[Listener]:
        """Yield a listener for one execution of a run, which passes on what its models write."""
        pass_on = pass_deltas(root_id, self._publish)

        def listen(event: StreamEvent) -> None:
            if isinstance(event, StateChanged):
                if isinstance(event.event, Answered | AttemptFailed):
                    self._drafts.drop(root_id, event.run_id)
            else:
                pass_on(event)

        self._executed.add(root_id)
        try:
            yield listen
        finally:
            self._executed.discard(root_id)
            self._drafts.drop(root_id)

    def _publish(self, root_id: str, piece: Piece) -> None:
        self._put(root_id, piece)
        if self.relay is not None:
            self.relay.publish(root_id, piece)

    @contextmanager
    def subscribe(self, root_id: str) -> Iterator[DeltaQueue]:
        """Yield a queue of the pieces of a run and its sub-agents, empty until it follows one of them."""
        queue = DeltaQueue(root_id, self._drafts)
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
                if root_id not in self._executed:  # what its models write further does not arrive here
                    self._drafts.drop(root_id)

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
        self._drafts.add(root_id, piece)
        for queue in self._queues.get(root_id, ()):
            queue.put(piece)


@attrs.define(eq=False, repr=False)
class DeltaQueue:
    """The newest pieces for one stream, of the runs that it follows."""

    _root_id: str
    _drafts: Drafts
    _run_ids: set[str] = attrs.field(factory=set, init=False)
    _pieces: deque[Piece] = attrs.field(factory=lambda: deque(maxlen=MAX_DELTAS), init=False)
    _filled: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    def follow(self, run_id: str) -> None:
        """Add what the model of a run is writing now, and from now on its pieces."""
        self._run_ids.add(run_id)
        for piece in self._drafts.get(self._root_id, run_id):
            self.put(piece)

    def put(self, piece: Piece) -> None:
        """Add a piece of a run that is followed, in place of the oldest if there are too many."""
        if piece.event.run_id not in self._run_ids:
            return
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
