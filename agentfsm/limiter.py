"""A limiter: so many permits at once, so many starts a minute, first come, first served; on threads and event loops.

Tools, models and MCP servers use it. A slot that becomes free is reserved for the waiter that came first, so that a
later one cannot take it in between, and a run with many calls cannot keep all others out.
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

from agentfsm._concurrency import is_waker_dead, make_waker, monotonic_time, virtual_time
from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import COUNT
from agentfsm.core.value import Value

WakeCallback: TypeAlias = Callable[[], None]

MINUTE_S: Final = 60.0
# A waiter sleeps at least so long until it looks again: a shorter time may be lost in the digits of a clock.
MIN_WAIT_S: Final = 0.001
# A coroutine that waits looks at least so often whether an event loop was closed under a waiter before it.
MAX_WAIT_S: Final = 60.0

_new_number: Final = count().__next__
_NO_WAKE: Final[WakeCallback] = lambda: None  # noqa: E731  of a caller that does not wait


@attrs.define(eq=False, repr=False)
class Permit:
    """A slot that was taken."""

    cost: int
    """Estimated when it was taken; `Limiter.record_cost` corrects it."""

    started_at: float = math.inf
    """When its use began, by the limiter's clock, seconds; infinite as long as it has not. It counts for a rate from
    the moment in which it was taken until a minute after this one.
    """

    is_expired: bool = False
    """Whether that minute is over, and it counts for no rate any more."""


@attrs.frozen(kw_only=True)
class LimiterStatistics(Value):
    """The state of a limiter."""

    in_use: int
    """Permits that were not released yet."""

    waiting: int
    """Callers that wait."""

    recent: int
    """Permits whose use began in the last minute or has not begun yet; counted if a rate is limited, as is their cost.
    """

    recent_cost: int


@attrs.define(eq=False, repr=False)
class Limiter:
    """Limits how many hold a permit at once, and how many permits, or what cost, a minute may have.

    `async with limiter.hold():` is the usual way. A caller that must not wait in one place is known by a `wake` of its
    own: it asks `try_acquire(wake)`; if it gets no permit, it calls `notify_when_free(wake)` and asks again when it is
    woken, or after `next_check_s(wake)` seconds. If it gives up, woken or not, it calls `cancel_wait(wake)`.

    A rate counts from when the use of a permit begins: at once, unless the caller says otherwise (`start=False`).

    The limits hold in this process only. Registries that are given the same limiter for a tag share it:
    `ToolRegistry(tag_limits={"db": limiter})`.
    """

    concurrency: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Permits held at once, 1 or more. None: any number."""

    per_minute: int | None = attrs.field(default=None, validator=COUNT.or_none(), kw_only=True)
    """Permits whose use begins in any 60 seconds, 1 or more. None: any number."""

    cost_per_minute: int | None = attrs.field(default=None, validator=COUNT.or_none(), kw_only=True)
    """The cost of these, 1 or more, for example in tokens. One that costs more than that passes alone. None: any cost.
    """

    monotonic: Callable[[], float] = attrs.field(default=monotonic_time, kw_only=True)
    """The clock, seconds; by default the machine's, and virtual time in `agentfsm.testing.run_virtual`. A limiter that
    goes from one of the two to the other, or to the next virtual time, forgets the last minute: the times cannot be
    compared. So it holds no rate over threads of which some are in virtual time.
    """

    number: int = attrs.field(factory=_new_number, init=False)
    """Higher than those of all limiters that were made before it. Callers that need permits of several limiters take
    them in this order, so that they never wait for one another in a ring.
    """

    _in_use: int = attrs.field(default=0, init=False)
    """Reserved slots included."""

    _abandoned: int = attrs.field(default=0, init=False)
    """Of these, slots of threads whose calls were given up."""

    _waiting: dict[WakeCallback, int] = attrs.field(factory=dict, init=False)
    """The cost of each waiter, in the order of their arrival."""

    _reserved: dict[WakeCallback, Permit] = attrs.field(factory=dict, init=False)
    """Permits of waiters that were woken and have not come yet."""

    _unstarted: set[Permit] = attrs.field(factory=set, init=False)
    """Permits whose use has not begun, if a rate is limited; reserved ones included."""

    _recent: deque[Permit] = attrs.field(factory=deque, init=False)
    """Permits whose use began in the last minute, oldest first, if a rate is limited."""

    _recent_cost: int = attrs.field(default=0, init=False)
    """The cost of both."""

    _timeline: Callable[[], float] | None = attrs.field(default=None, init=False)
    """The virtual time in which the starts of the last minute were counted; None: real time."""

    _timekeeper: WakeCallback | None = attrs.field(default=None, init=False)
    """The first waiter, once it knows that it has to look at the time."""

    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @property
    def in_use(self) -> int:
        """How many permits are held."""
        return self._in_use - len(self._reserved)

    @property
    def waiting(self) -> int:
        """How many callers wait, those included that were woken and have not come yet."""
        return len(self._waiting) + len(self._reserved)

    @property
    def is_stuck(self) -> bool:
        """Whether a thread whose call was given up holds every slot, so that it is unknown when one becomes free."""
        return self.concurrency is not None and self._abandoned >= self.concurrency

    def try_acquire(self, wake: WakeCallback, cost: int = 0, *, start: bool = True) -> Permit | None:
        """Take the slot that is reserved for this `wake`, or a free one.

        Args:
            wake: Identifies the caller.
            cost: What it will cost, about; a waiter gives it to `notify_when_free`.
            start: Whether its use begins now. If not, `start` must follow when it does, or `cancel` if it never will.

        Returns:
            The permit, which `release` must give back; None if there is none yet, and nothing was changed.
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
        """Note that the use of a permit begins now, which was taken with `start=False`."""
        with self._lock:
            self._start(permit)

    def cancel(self, permit: Permit) -> None:
        """Give back a permit whose use has not begun and never will: it counts for no rate."""
        with self._lock:
            self._discard(permit)
        self.release()

    def release(self) -> None:
        """Give a permit back, and wake the waiter that came first.

        Raises:
            MisuseError: if none is held; it was given back twice.
        """
        with self._lock:
            if self._in_use <= len(self._reserved):
                raise MisuseError("a permit of a limiter was given back twice: call release() once for each permit")
            self._in_use -= 1
            woken = self._reserve()
        _call(woken)

    def record_cost(self, permit: Permit, cost: int) -> None:
        """Replace the estimated cost of a permit by what it did cost."""
        with self._lock:
            if self.cost_per_minute is not None and not permit.is_expired:
                self._recent_cost += cost - permit.cost
                permit.cost = cost

    def mark_abandoned(self) -> None:
        """Note that a permit's call was given up, while its thread still holds the permit until `release_abandoned`."""
        with self._lock:
            self._abandoned += 1

    def release_abandoned(self) -> None:
        """Give back a permit that was marked as abandoned: its thread has ended."""
        with self._lock:
            self._abandoned -= 1
        self.release()

    def notify_when_free(self, wake: WakeCallback, cost: int = 0) -> None:
        """Wait in line: `wake` is called when the caller should look again, at once or later, from any thread.

        A slot that is reserved for it stays so until `try_acquire(wake)` or `cancel_wait(wake)`, one of which must
        follow. To ask again before that changes nothing.

        Args:
            wake: Must neither block nor raise, as those that `agentfsm._concurrency.make_waker` makes.
            cost: As for `try_acquire`.
        """
        with self._lock:
            if wake not in self._reserved:
                self._waiting.setdefault(wake, cost)
            woken = self._reserve()
        _call(woken)

    def cancel_wait(self, wake: WakeCallback) -> None:
        """Leave the line, if the caller is in it; a slot that is reserved for it goes to the next."""
        with self._lock:
            self._leave(wake)
            woken = self._reserve()
        _call(woken)

    def next_check_s(self, wake: WakeCallback) -> float:
        """Return after how many seconds a waiter should look again even if it is not woken; infinite for never.

        A rate makes the first in line wait for time to pass, and nothing else will wake it then. While a permit that
        counts for the rate has not begun to be used, that is the shortest time that can be.
        """
        with self._lock:
            first = next(iter(self._waiting), None)
            return max(MIN_WAIT_S, self._required_wait_s(self._waiting[wake])) if first == wake else math.inf

    async def acquire(self, cost: int = 0, *, max_wait_s: float = math.inf) -> Permit | None:
        """Wait for a permit, in any event loop. A caller that is cancelled leaves the line and loses nothing of others.

        Args:
            cost: What it will cost, about.
            max_wait_s: Seconds to wait at most.

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
                    caller.woken = anyio.Event()  # before the look: what changes after it is heard
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
        """Hold a permit for the length of a block: wait for it, in any event loop, and give it back at the end."""
        await self.acquire(cost)
        try:
            yield
        finally:
            self.release()

    def statistics(self) -> LimiterStatistics:
        """Return its state now."""
        with self._lock:
            self._drop_expired(self._read_clock())
            return LimiterStatistics(
                in_use=self.in_use,
                waiting=self.waiting,
                recent=len(self._recent) + len(self._unstarted),
                recent_cost=self._recent_cost,
            )

    # Under the lock.

    def _reserve(self) -> list[WakeCallback]:
        """Reserve what is free for the waiters that came first; return which to wake, outside the lock.

        Waiters whose event loop was closed leave the line, since they will never come.
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
                self._timekeeper = wake  # from now on it looks at the time
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
        """Return the time; starts that were counted in another virtual time, or in none, are over."""
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
        """Make it look again; called in its event loop."""
        if self.woken is not None:
            self.woken.set()


def _call(woken: Iterable[WakeCallback]) -> None:
    for wake in woken:
        wake()
