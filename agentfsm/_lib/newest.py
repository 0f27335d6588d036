"""A dict that keeps its newest entries."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(OrderedDict[K, V], Generic[K, V]):
    """A dict of at most `most` entries: one more removes that which was set longest ago.

    A key that is set again becomes the newest. Reads do not change the order. Threads may set entries at once.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
