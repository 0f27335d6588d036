"""A bulkhead: at most so many calls of a tool, or of a tag, are in flight at once, over all runs of the process.

A place that becomes free is kept for the caller that has waited longest. A later one cannot slip in between its waking
and its coming, or a run with many calls would keep all others out.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import attrs

from agentfsm._concurrency import ThreadWaiter, notify_all
from agentfsm.core.errors import MisuseError

WakeCallback: TypeAlias = Callable[[], None]


def _check_limit(_bulkhead: object, _field: object, limit: int) -> None:
    if limit < 1:
        raise MisuseError(f"A limit of {limit} would let no call go: give 1 or more, or none at all.")


@attrs.define(eq=False, repr=False)
class Bulkhead:
    """So many places; from any thread and event loop.

    A caller that may have to wait is known by a `wake` of its own: it asks `try_acquire(wake)`, and if that says no,
    calls `notify_when_free(wake)` and asks again when woken. If it gives up, woken or not, it calls
    `cancel_wait(wake)`.
    """

    limit: int = attrs.field(validator=_check_limit)
    # Calls in flight at once, 1 or more.
    _in_use: int = attrs.field(default=0, init=False)
    _abandoned: int = attrs.field(default=0, init=False)
    # Of these, places of threads whose calls were given up.
    _waiting: dict[WakeCallback, None] = attrs.field(factory=dict, init=False)
    # In the order of their coming. While somebody waits here, every place is in use or kept.
    _reserved: set[WakeCallback] = attrs.field(factory=set, init=False)
    # A place is kept for each of them.
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @property
    def in_use(self) -> int:
        """How many calls are in flight."""
        return self._in_use

    @property
    def waiting(self) -> int:
        """How many wait, those included that were woken and have not come yet."""
        return len(self._waiting) + len(self._reserved)

    def try_acquire(self, wake: WakeCallback) -> bool:
        """Take the place kept for this `wake`, or one that is free and kept for nobody.

        Returns:
            Whether a place was taken, which `leave` must give back; if not, nothing was changed.
        """
        with self._lock:
            if wake in self._reserved:
                self._reserved.remove(wake)
            elif not self._has_room:
                return False
            self._in_use += 1
            return True

    def release(self) -> None:
        """Give a place back, and wake who has waited longest.

        Raises:
            MisuseError: when no place is taken; it was given back twice.
        """
        with self._lock:
            if not self._in_use:
                raise MisuseError("a place of a bulkhead was given back twice: call leave() once for each try_enter()")
            self._in_use -= 1
            woken = self._reserve_next()
        woken()

    def mark_abandoned(self) -> None:
        """Record that the call of a place was given up while its thread holds the place, until `release_abandoned`."""
        with self._lock:
            self._abandoned += 1

    def release_abandoned(self) -> None:
        """Give back a place that was abandoned: its thread has ended."""
        with self._lock:
            self._abandoned -= 1
        self.release()

    @property
    def is_stuck(self) -> bool:
        """Whether every place is held by a thread whose call was given up, so that nobody knows when one comes back."""
        return self._abandoned >= self.limit

    def notify_when_free(self, wake: WakeCallback) -> None:
        """Have `wake` called once, when there is a place for it: at once, or later from any thread.

        The place is kept until `try_acquire(wake)` or `cancel_wait(wake)`, one of which must follow. Asking again
        before that changes nothing.

        Args:
            wake: Must neither block nor raise, like what `agentfsm._concurrency.make_waker` returns.
        """
        with self._lock:
            if wake not in self._reserved:
                self._waiting.setdefault(wake)
            woken = self._reserve_next()
        woken()

    def cancel_wait(self, wake: WakeCallback) -> None:
        """Take back `notify_when_free(wake)`, if it is pending; a place kept for it goes to the next."""
        with self._lock:
            self._waiting.pop(wake, None)
            self._reserved.discard(wake)
            woken = self._reserve_next()
        woken()

    @property
    def _has_room(self) -> bool:
        return self._in_use + len(self._reserved) < self.limit

    def _reserve_next(self) -> WakeCallback:
        """Keep a place that is free for who has waited longest; to be called outside the lock."""
        if not (self._waiting and self._has_room):
            return _do_nothing
        wake = next(iter(self._waiting))
        del self._waiting[wake]
        self._reserved.add(wake)
        return wake


@asynccontextmanager
async def hold_slot(bulkhead: Bulkhead) -> AsyncIterator[None]:
    """Wait for a place, in any event loop, and give it back at the end of the block."""
    bell = ThreadWaiter()
    wake = partial(notify_all, [bell])
    if not bulkhead.try_acquire(wake):
        bulkhead.notify_when_free(wake)
        try:
            await bell.event.wait()
        except BaseException:
            bulkhead.cancel_wait(wake)
            raise
        bulkhead.try_acquire(wake)  # the place is kept for it
    try:
        yield
    finally:
        bulkhead.release()


def _do_nothing() -> None:
    """Nobody waits, or there is no room."""
