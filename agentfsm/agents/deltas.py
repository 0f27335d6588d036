"""Pass the text that models write to the event streams of a run, in this process and others.

The journal has the whole text later, so pieces may be lost: nothing waits for them, and no run fails because of them.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import attrs

from agentfsm.stores.loading import open_broadcast
from agentfsm.streaming.stream import CallDelta, Listener, StreamEvent, TextDelta, ThinkingDelta

if TYPE_CHECKING:
    from agentfsm.stores.redis.broadcast import RedisBroadcast

_log = logging.getLogger("agentfsm.deltas")

Delta: TypeAlias = TextDelta | ThinkingDelta | CallDelta


class Piece(NamedTuple):
    """A piece of the text, the thinking or a call that a model writes."""

    event: Delta

    offset: int
    """Characters of the same text of the reply before it; 0 for a piece of a call."""


Publish: TypeAlias = Callable[[str, Piece], None]
"""Takes the id of a root run, and a piece that its model or that of a sub-agent writes."""


def pass_deltas(root_id: str, publish: Publish) -> Listener:
    """Return a listener for one execution of a run, which publishes each piece that a model writes."""
    written: dict[tuple[str, type], tuple[tuple[int, int], int]] = {}  # by run and kind: turn and attempt, characters

    def listen(event: StreamEvent) -> None:
        if not isinstance(event, TextDelta | ThinkingDelta | CallDelta):
            return
        offset = 0
        if not isinstance(event, CallDelta):
            key, reply = (event.run_id, type(event)), (event.turn, event.attempt)
            known, chars = written.get(key, (reply, 0))
            offset = chars if known == reply else 0
            written[key] = reply, offset + len(event.text)
        publish(root_id, Piece(event, offset))

    return listen


@attrs.define(eq=False, repr=False)
class DeltaRelay:
    """Passes pieces to the other processes that use the same Redis; see `RedisBroadcast` for possible losses.

    Raises:
        MisuseError: when the URL is not that of a Redis.
    """

    url: str = attrs.field(repr=False)
    """URL of the Redis, as for a store."""

    _id: str = attrs.field(factory=lambda: secrets.token_hex(8), init=False)
    """Marks the messages of this relay, which it does not receive itself."""

    _broadcast: RedisBroadcast = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._broadcast = open_broadcast(self.url, self._encode)

    def publish(self, root_id: str, piece: Piece) -> None:
        """Hand over a piece, without waiting."""
        self._broadcast.send(f"deltas:{root_id}", piece)

    def subscribe(self, root_id: str, receive: Callable[[Sequence[Piece]], None]) -> Callable[[], None]:
        """Call `receive` with the pieces of a run from other processes, in a thread. Return a function to end this."""

        def decode(message: bytes) -> None:
            try:
                pieces = self._decode(message)
            except (ValueError, TypeError, KeyError) as error:
                _log.warning("a message of run %s was ignored, since it has no text of a model: %r", root_id, error)
            else:
                receive(pieces)

        return self._broadcast.listen(f"deltas:{root_id}", decode)

    def _encode(self, pieces: Sequence[Piece]) -> bytes:
        return json.dumps(
            {"by": self._id, "pieces": [(piece.event.to_dict(), piece.offset) for piece in pieces]}
        ).encode()

    def _decode(self, message: bytes) -> list[Piece]:
        found = json.loads(message)
        return [] if found["by"] == self._id else [_read_piece(*pair) for pair in found["pieces"]]


_REPLY: Final[Mapping[str, type]] = {"run_id": str, "turn": int, "attempt": int}
_KINDS: Final[Mapping[str, tuple[type[Delta], Mapping[str, type]]]] = {
    "text_delta": (TextDelta, {**_REPLY, "text": str}),
    "thinking_delta": (ThinkingDelta, {**_REPLY, "text": str}),
    "call_delta": (CallDelta, {**_REPLY, "index": int, "call_id": str, "name": str, "arguments": str}),
}


def _read_piece(given: Mapping[str, Any], offset: int) -> Piece:
    """Return a piece.

    Raises:
        ValueError, TypeError, KeyError: when it is not one.
    """
    kind, types = _KINDS[given["type"]]
    fields = {name: given[name] for name in types}
    if not all(isinstance(fields[name], types[name]) for name in types) or not isinstance(offset, int):
        raise ValueError(f"{kind.__name__} has a wrong field")
    return Piece(kind(**fields), offset)
