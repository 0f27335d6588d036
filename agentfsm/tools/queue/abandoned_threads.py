"""Registry of threads that outlived their calls.

A plain function cannot be interrupted: when its call times out, its thread runs on and may still have effects. Until it
ends, calls that must not overlap it are held back, also in later steps and when a cancelled run is resumed in this
process. Therefore the threads are registered by owner, for the whole process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import attrs

from agentfsm._lib.concurrency import make_waker
from agentfsm.tools.queue.call_order import Access

_LOCK = threading.Lock()
_ABANDONED: dict[object, list[CallThread]] = {}


@attrs.define(eq=False, repr=False)
class CallThread:
    """A thread that runs a call, and the resources that it uses."""

    name: str
    """Name of the tool."""

    access: Access
    """Resources that the call uses."""

    has_ended: bool = attrs.field(default=False, init=False)
    _owner: object = attrs.field(default=None, init=False)
    _callbacks: list[Callable[[], object]] = attrs.field(factory=list, init=False)

    def mark_abandoned(self, owner: object) -> None:
        """Register the thread as abandoned: the call is over, but its thread still runs."""
        with _LOCK:
            if not self.has_ended:
                self._owner = owner
                _ABANDONED.setdefault(owner, []).append(self)

    def mark_ended(self) -> None:
        """Record that the thread has ended; called from the thread itself."""
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
        """Call `wake` from the thread when it ends; at once if it has ended."""
        with _LOCK:
            if not self.has_ended:
                self._callbacks.append(wake)
                return
        wake()

    async def wait_ended(self) -> None:
        """Wait until the thread has ended; usable on any event loop."""
        ended = anyio.Event()
        self.on_end(make_waker(ended.set))
        await ended.wait()


def find_abandoned(owner: object) -> tuple[CallThread, ...]:
    """Return the threads of this owner that still run."""
    return tuple(_ABANDONED.get(owner, ())) if _ABANDONED else ()
