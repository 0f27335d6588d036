"""The history of a run: an immutable sequence of messages that can be extended without a copy.

A history and its extensions share one list, and each has its own length. Only if two different extensions are made from
the same history, as after a fork, the second extension copies the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import overload

from agentfsm.core.messages import Message


class History(Sequence[Message]):
    """Messages, oldest first. Equality, hash, slices and repr are those of a tuple."""

    __slots__ = ("_items", "_size")

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        # Shared with the extensions; append-only.
        self._items: list[Message] = list(messages)
        # Number of messages of this history.
        self._size = len(self._items)

    def with_appended(self, *messages: Message) -> History:
        """Return a history that has these messages at its end."""
        items, size = self._items, self._size
        end = size + len(messages)
        if not size:
            items = list(messages)
        elif len(items) == size:
            # One atomic step: if two threads do this at once, the messages of one follow those of the other.
            items += messages
        if items[size:end] != list(messages):
            items = [*items[:size], *messages]
        after = object.__new__(History)
        after._items, after._size = items, end
        return after

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Message]:
        return islice(self._items, self._size)

    def __reversed__(self) -> Iterator[Message]:
        return map(self._items.__getitem__, range(self._size - 1, -1, -1))

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...

    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        if type(index) is slice:
            places = range(self._size)[index]
            if places.step == 1:
                return tuple(self._items[places.start : places.stop])
            return tuple([self._items[place] for place in places])
        return self._items[range(self._size)[index]]

    def __add__(self, other: Sequence[Message]) -> tuple[Message, ...]:
        return (*self, *other) if isinstance(other, tuple | History) else NotImplemented

    def __radd__(self, other: Sequence[Message]) -> tuple[Message, ...]:
        return (*other, *self) if isinstance(other, tuple) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if isinstance(other, History):
            if self._items is other._items:
                return self._size == other._size
            return self._size == other._size and tuple(self) == tuple(other)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[type[History], tuple[tuple[Message, ...]]]:
        return History, (tuple(self),)


def as_history(messages: Iterable[Message]) -> History:
    """Convert messages to a history. A history is returned unchanged."""
    return messages if isinstance(messages, History) else History(messages)
