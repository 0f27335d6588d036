"""The places of threads that outlived their calls.

A plain function cannot be cut off: when its call times out, its thread runs on, and its effect may still come. Until
it ends it keeps the place that its call had, so that nothing that may not overlap it starts: also in a later step, and
also when the run was cancelled and is resumed in this process. Hence they are kept by owner, for the whole process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import attrs

from agentfsm._concurrency import make_waker
from agentfsm.engine.queue.plan import Access

_LOCK = threading.Lock()
_LEFT: dict[object, list[Place]] = {}


@attrs.define(eq=False, repr=False)
class Place:
    """What a thread holds while it runs."""

    name: str
    # The tool.
    access: Access
    # What the call touches.
    is_free: bool = attrs.field(default=False, init=False)
    _owner: object = attrs.field(default=None, init=False)
    _waiting: list[Callable[[], object]] = attrs.field(factory=list, init=False)

    def keep_for(self, owner: object) -> None:
        """Say that the call is over and its thread is not."""
        with _LOCK:
            if not self.is_free:
                self._owner = owner
                _LEFT.setdefault(owner, []).append(self)

    def give_up(self) -> None:
        """Say that the thread has ended; called there."""
        with _LOCK:
            self.is_free = True
            waiting, self._waiting = self._waiting, []
            if (places := _LEFT.get(self._owner)) is not None and self in places:
                places.remove(self)
                if not places:
                    del _LEFT[self._owner]
        for wake in waiting:
            wake()

    def when_free(self, wake: Callable[[], object]) -> None:
        """Call `wake` when the thread has ended, from there; at once if it has."""
        with _LOCK:
            if not self.is_free:
                self._waiting.append(wake)
                return
        wake()

    async def given_up(self) -> None:
        """Wait until the thread has ended; on any event loop."""
        ended = anyio.Event()
        self.when_free(make_waker(ended.set))
        await ended.wait()


def left_behind(owner: object) -> tuple[Place, ...]:
    """Return the places that threads of this owner still hold."""
    return tuple(_LEFT.get(owner, ())) if _LEFT else ()
