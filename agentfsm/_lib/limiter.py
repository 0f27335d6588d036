"""Limit concurrency and rate, first come, first served, across threads and event loops.

Tools, models and MCP servers use the limiter. A slot that becomes free is reserved for the first waiter, so that a
later caller cannot take it first, and a run with many calls cannot keep all others waiting.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import chain, count
from typing import Final, TypeAlias

import anyio
import attrs

from agentfsm._lib.concurrency import is_waker_dead, make_waker, monotonic_time, virtual_time
from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import COUNT
from agentfsm.core.value import Value

WakeCallback: TypeAlias = Callable[[], None]

MINUTE_S: Final = 60.0
# Minimum sleep of a waiter between two checks, seconds. The precision of a clock may be too low for a shorter time.
MIN_WAIT_S: Final = 0.001
# Maximum sleep of a waiter between two checks whether the event loop of an earlier waiter was closed, seconds.
MAX_WAIT_S: Final = 60.0

_new_number: Final = count().__next__
_NO_WAKE: Final[WakeCallback] = lambda: None  # noqa: E731  for a caller that does not wait


@attrs.define(eq=False, repr=False)
class Permit:
    """A slot that a caller holds."""

    cost: int
    """Estimated cost of the use; `Limiter.record_cost` corrects it."""

    started_at: float = math.inf
    """Start of the use, seconds by the limiter's clock; infinite before the start. The permit counts towards the rate
    from its acquisition until a minute after the start.
    """

    is_expired: bool = False
    """True if that minute has passed, so that the permit does not count towards the rate any more."""


@attrs.frozen(kw_only=True)
class LimiterStatistics(Value):
    """The state of a limiter."""

    in_use: int
    """Number of permits that were not released yet."""

    waiting: int
    """Number of callers that wait."""

    recent: int
    """Number of permits whose use began in the last minute or has not begun yet; 0 if no rate is limited."""

    recent_cost: int
    """Total cost of these permits."""


@attrs.define(eq=False, repr=False)
class Limiter:
    """A limit of the permits that are held at once, and of the permits or their cost per minute.

    Use `async with limiter.hold():` in most cases. A caller that cannot block identifies itself by a `wake` callback:
    it calls `try_acquire(wake)`, and if that returns None, `notify_when_free(wake)`, then tries again when it is woken
    or after `next_check_s(wake)` seconds. To give up, it calls `cancel_wait(wake)`.

    The minute of a rate begins with the use of a permit: at its acquisition, unless the caller passes `start=False`.

    The limits hold in this process only. Registries that are given the same limiter for a tag share it:
    `ToolRegistry(tag_limits={"db": limiter})`.
    """

    concurrency: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Maximum number of permits held at once, 1 or more. None: no limit."""

    per_minute: int | None = attrs.field(default=None, validator=COUNT.or_none(), kw_only=True)
    """Maximum number of permits whose use begins within any 60 seconds, 1 or more. None: no limit."""

    cost_per_minute: int | None = attrs.field(default=None, validator=COUNT.or_none(), kw_only=True)
    """Maximum cost of these permits, 1 or more, for example in tokens. A permit that costs more is granted if it is the
    only permit in the minute. None: no limit.
    """

    monotonic: Callable[[], float] = attrs.field(default=monotonic_time, kw_only=True)
    """Clock, seconds. Default: the clock of the machine, and virtual time in `agentfsm.testing.run_virtual`. When the
    limiter is used in another virtual time, or in none, it forgets the last minute, because the times are not
    comparable. So it does not limit the rate across threads if some of them are in virtual time.
    """

    number: int = attrs.field(factory=_new_number, init=False)
    """Creation order of the limiters. Callers that need permits of several limiters acquire them in this order, which
    prevents deadlocks.
    """

    _in_use: int = attrs.field(default=0, init=False)
    """Number of permits that are held or reserved."""

    _abandoned: int = attrs.field(default=0, init=False)
    """Number of these whose calls were abandoned while their threads still run."""

    _waiting: dict[WakeCallback, int] = attrs.field(factory=dict, init=False)
    """The cost of each waiter, in the order of their arrival."""

    _reserved: dict[WakeCallback, Permit] = attrs.field(factory=dict, init=False)
    """Permits of waiters that were woken and have not acquired them yet."""

    _unstarted: set[Permit] = attrs.field(factory=set, init=False)
    """Permits whose use has not begun, including reserved ones, if a rate is limited."""

    _recent: deque[Permit] = attrs.field(factory=deque, init=False)
    """Permits whose use began in the last minute, oldest first, if a rate is limited."""

    _recent_cost: int = attrs.field(default=0, init=False)
    """Total cost of `_unstarted` and `_recent`."""

    _timeline: Callable[[], float] | None = attrs.field(default=None, init=False)
    """The virtual time of the starts in `_recent`; None for real time."""

    _timekeeper: WakeCallback | None = attrs.field(default=None, init=False)
    """The first waiter, once it was woken to sleep for a given time."""

    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @property
    def in_use(self) -> int:
        """Number of permits that are held."""
        return self._in_use - len(self._reserved)

    @property
    def waiting(self) -> int:
        """Number of callers that wait, including those that were woken and have not acquired their permits yet."""
        return len(self._waiting) + len(self._reserved)

    @property
    def is_stuck(self) -> bool:
        """True if threads of abandoned calls hold all slots, so that it is unknown when one becomes free."""
        return self.concurrency is not None and self._abandoned >= self.concurrency

    def try_acquire(self, wake: WakeCallback, cost: int = 0, *, start: bool = True) -> Permit | None:
        """Take the slot that is reserved for this `wake`, or a free one, without waiting.

        Args:
            wake: Identifies the caller.
            cost: Estimated cost of the use; a waiter passes it to `notify_when_free`.
            start: Whether the use begins now. If False, call `start` when it begins, or `cancel` if it never will.

        Returns:
            The permit, which `release` must give back; None if there is none yet.
        """
        with self._lock:
            permit, woken = self._reserved.pop(wake, None), list[WakeCallback]()
            if permit is None:
                woken = self._reserve()
                permit = self._reserved.pop(wake, None)
                if permit is None and not self._waiting and self._required_wait_s(cost) <= 0:
                    permit = self._take(cost)
            if permit is not None and start:
                self._start(permit)
        _call(woken)
        return permit

    def start(self, permit: Permit) -> None:
        """Record that the use of a permit begins now, if it was taken with `start=False`."""
        with self._lock:
            self._start(permit)

    def cancel(self, permit: Permit) -> None:
        """Give back a permit whose use will never begin. It does not count towards the rate."""
        with self._lock:
            self._discard(permit)
        self.release()

    def release(self) -> None:
        """Give a permit back, and wake the first waiter.

        Raises:
            MisuseError: if no permit is held, because one was given back twice.
        """
        with self._lock:
            if self._in_use <= len(self._reserved):
                raise MisuseError("a permit of a limiter was given back twice: call release() once for each permit")
            self._in_use -= 1
            woken = self._reserve()
        _call(woken)

    def record_cost(self, permit: Permit, cost: int) -> None:
        """Replace the estimated cost of a permit by the actual cost."""
        with self._lock:
            if self.cost_per_minute is not None and not permit.is_expired:
                self._recent_cost += cost - permit.cost
                permit.cost = cost

    def mark_abandoned(self) -> None:
        """Record that a call was abandoned, while its thread holds the permit until `release_abandoned`."""
        with self._lock:
            self._abandoned += 1

    def release_abandoned(self) -> None:
        """Give back a permit that was marked as abandoned, when its thread has ended."""
        with self._lock:
            self._abandoned -= 1
        self.release()

    def notify_when_free(self, wake: WakeCallback, cost: int = 0) -> None:
        """Join the queue: `wake` is called when the caller should try again, at once or later, from any thread.

        A slot reserved for the caller stays reserved until `try_acquire(wake)` or `cancel_wait(wake)`, one of which
        must follow. A repeated call has no effect.

        Args:
            wake: Callback that neither blocks nor raises, for example from `agentfsm._lib.concurrency.make_waker`.
            cost: As for `try_acquire`.
        """
        with self._lock:
            if wake not in self._reserved:
                self._waiting.setdefault(wake, cost)
            woken = self._reserve()
        _call(woken)

    def cancel_wait(self, wake: WakeCallback) -> None:
        """Leave the queue, if the caller is in it. A slot reserved for the caller goes to the next waiter."""
        with self._lock:
            self._leave(wake)
            woken = self._reserve()
        _call(woken)

    def next_check_s(self, wake: WakeCallback) -> float:
        """Return the seconds after which a waiter should try again even if it is not woken; infinite for never.

        If a rate delays the first waiter, only time helps, and no event will wake it. The result is a lower bound while
        the use of a counted permit has not begun.
        """
        with self._lock:
            first = next(iter(self._waiting), None)
            return max(MIN_WAIT_S, self._required_wait_s(self._waiting[wake])) if first == wake else math.inf

    async def acquire(self, cost: int = 0, *, max_wait_s: float = math.inf) -> Permit | None:
        """Wait for a permit, in any event loop. A cancelled caller leaves the queue.

        Args:
            cost: Estimated cost of the use.
            max_wait_s: Maximum wait, seconds.

        Returns:
            The permit, which `release` must give back; None if there was none in that time.
        """
        if (permit := self.try_acquire(_NO_WAKE, cost)) is not None:
            return permit
        caller = _Caller()
        wake = make_waker(caller.wake)
        try:
            with anyio.move_on_after(max_wait_s):
                while True:
                    caller.woken = anyio.Event()  # before the check, so that no later change is missed
                    self.notify_when_free(wake, cost)
                    if (permit := self.try_acquire(wake)) is not None:
                        return permit
                    with anyio.move_on_after(min(self.next_check_s(wake), MAX_WAIT_S)):
                        await caller.woken.wait()
        finally:
            if permit is None:
                self.cancel_wait(wake)
        return None

    @asynccontextmanager
    async def hold(self, cost: int = 0) -> AsyncIterator[None]:
        """Wait for a permit, in any event loop, hold it during the block, and give it back at the end."""
        await self.acquire(cost)
        try:
            yield
        finally:
            self.release()

    def statistics(self) -> LimiterStatistics:
        """Return the current state of the limiter."""
        with self._lock:
            self._drop_expired(self._read_clock())
            return LimiterStatistics(
                in_use=self.in_use,
                waiting=self.waiting,
                recent=len(self._recent) + len(self._unstarted),
                recent_cost=self._recent_cost,
            )

    # The methods below run under the lock.

    def _reserve(self) -> list[WakeCallback]:
        """Reserve free slots for the first waiters. Return the callbacks to call after the lock is released.

        Waiters whose event loop was closed leave the queue, since they will never return.
        """
        woken: list[WakeCallback] = []
        for wake in [each for each in self._reserved if is_waker_dead(each)]:
            self._leave(wake)
        while self._waiting:
            wake, cost = next(iter(self._waiting.items()))
            wait_s = self._required_wait_s(cost)
            if wait_s == math.inf or (wait_s > 0 and wake == self._timekeeper):
                break
            if is_waker_dead(wake):
                self._leave(wake)
                continue
            if wait_s <= 0:
                self._leave(wake)
                self._reserved[wake] = self._take(cost)
            else:
                self._timekeeper = wake  # it sleeps for the time until its turn
            woken.append(wake)
        return woken

    def _leave(self, wake: WakeCallback) -> None:
        self._waiting.pop(wake, None)
        if wake == self._timekeeper:
            self._timekeeper = None
        if (permit := self._reserved.pop(wake, None)) is not None:
            self._in_use -= 1
            self._discard(permit)

    def _take(self, cost: int) -> Permit:
        permit = Permit(cost)
        self._in_use += 1
        if self._limits_rate:
            self._unstarted.add(permit)
            self._recent_cost += cost
        return permit

    def _start(self, permit: Permit) -> None:
        if permit in self._unstarted:
            self._unstarted.remove(permit)
            permit.started_at = self._read_clock()
            self._recent.append(permit)

    def _discard(self, permit: Permit) -> None:
        if permit in self._unstarted:
            self._unstarted.remove(permit)
            self._recent_cost -= permit.cost

    @property
    def _limits_rate(self) -> bool:
        return self.per_minute is not None or self.cost_per_minute is not None

    def _required_wait_s(self, cost: int) -> float:
        """Return the seconds until a permit can be taken: 0 for now, infinite for until one is released."""
        if self.concurrency is not None and self._in_use >= self.concurrency:
            return math.inf
        if not self._limits_rate:
            return 0.0
        now = self._read_clock()
        self._drop_expired(now)
        taken = len(self._recent) + len(self._unstarted)
        surplus = 0 if self.per_minute is None else taken + 1 - self.per_minute
        excess = 0 if self.cost_per_minute is None else self._recent_cost + cost - self.cost_per_minute
        wait_s = 0.0
        for permit in chain(self._recent, self._unstarted):
            if surplus <= 0 and excess <= 0:
                break
            surplus, excess = surplus - 1, excess - permit.cost
            wait_s = min(permit.started_at, now) + MINUTE_S - now
        return wait_s

    def _read_clock(self) -> float:
        """Return the time. Forget the starts that were counted in another virtual time, or in none."""
        timeline = virtual_time.get()
        if timeline is not self._timeline:
            self._timeline = timeline
            self._drop_expired(math.inf)
        return self.monotonic()

    def _drop_expired(self, now: float) -> None:
        while self._recent and self._recent[0].started_at <= now - MINUTE_S:
            permit = self._recent.popleft()
            permit.is_expired = True
            self._recent_cost -= permit.cost


@attrs.define(eq=False, repr=False)
class _Caller:
    """A coroutine that waits for a permit."""

    woken: anyio.Event | None = None

    def wake(self) -> None:
        """Wake the coroutine; called in its event loop."""
        if self.woken is not None:
            self.woken.set()


def _call(woken: Iterable[WakeCallback]) -> None:
    for wake in woken:
        wake()
