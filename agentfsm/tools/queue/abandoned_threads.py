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
from agentfsm.tools.queue.plan import Access

_LOCK = threading.Lock()
_ABANDONED: dict[object, list[CallThread]] = {}


@attrs.define(eq=False, repr=False)
class CallThread:
    """What a thread holds while it runs."""

    name: str
    """The tool."""

    access: Access
    """What the call touches."""

    has_ended: bool = attrs.field(default=False, init=False)
    _owner: object = attrs.field(default=None, init=False)
    _callbacks: list[Callable[[], object]] = attrs.field(factory=list, init=False)

    def mark_abandoned(self, owner: object) -> None:
        """Say that the call is over and its thread is not."""
        with _LOCK:
            if not self.has_ended:
                self._owner = owner
                _ABANDONED.setdefault(owner, []).append(self)

    def mark_ended(self) -> None:
        """Say that the thread has ended; called there."""
        with _LOCK:
            self.has_ended = True
            waiting, self._callbacks = self._callbacks, []
            if (places := _ABANDONED.get(self._owner)) is not None and self in places:
                places.remove(self)
                if not places:
                    del _ABANDONED[self._owner]
        for wake in waiting:
            wake()

    def on_end(self, wake: Callable[[], object]) -> None:
        """Call `wake` when the thread has ended, from there; at once if it has."""
        with _LOCK:
            if not self.has_ended:
                self._callbacks.append(wake)
                return
        wake()

    async def wait_ended(self) -> None:
        """Wait until the thread has ended; on any event loop."""
        ended = anyio.Event()
        self.on_end(make_waker(ended.set))
        await ended.wait()


def find_abandoned(owner: object) -> tuple[CallThread, ...]:
    """Return the places that threads of this owner still hold."""
    return tuple(_ABANDONED.get(owner, ())) if _ABANDONED else ()
