"""The circuit breaker of a tool: when its service is down, calls fail at once instead of waiting for it in vain.

It belongs to the tool and so to all runs of the process. Closed, it lets every call go and counts failures in a row;
open, it lets none go; after a while it is half open and lets one go, the probe, whose end decides.

A call may end long after the breaker has moved on: twenty calls that hung through an outage time out when it is over.
So each call is let go with a ticket, which stands for the period of the breaker that let it go, and the result of a
call counts only while that period lasts.
"""

from __future__ import annotations

import math
import threading
from enum import StrEnum
from typing import Final

import attrs

# In a row: fewer would take two unlucky calls for an outage, more would have each run wait through its time-outs.
FAILURE_THRESHOLD: Final = 5
# Seconds: about what a service needs to restart, and a rate limit of the usual kind to pass.
OPEN_S: Final = 60.0


class BreakerState(StrEnum):
    """Whether calls may go."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@attrs.define(eq=False, repr=False)
class Ticket:
    """A period of a breaker; what a call that was let go in it brings back with its result."""

    state: BreakerState
    failures: int = 0
    """In a row, so far."""


@attrs.define(eq=False, repr=False)
class Breaker:
    """Closed, open, half open; from any thread.

    Times are monotonic seconds. A time that is further than `OPEN_S` from those seen before, to either side, counts as
    later: the virtual clock of a test, say, knows nothing of the real one before it.
    """

    _period: Ticket = attrs.field(factory=lambda: Ticket(BreakerState.CLOSED), init=False)
    """Read once without the lock it says all that a call needs to go."""

    _since: float = attrs.field(default=0.0, init=False)
    """When it opened, or when the newest probe went; before all time when a probe may go at once."""

    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @property
    def state(self) -> BreakerState:
        """Whether calls may go; open also when the time for a probe has come and no call has."""
        return self._period.state

    def admit(self, now: float) -> Ticket | float:
        """Let a call go, or say how long to wait.

        Every ticket must come back, in `record_success`, `record_failure` or `discard`. A probe that has not come back
        after `OPEN_S` no longer holds up other calls: another one goes beside it, and the first result decides.

        Args:
            now: Monotonic seconds.

        Returns:
            The ticket of the call, or the seconds, above 0 and at most `OPEN_S`, until a call may go at the latest.
        """
        ticket = self._period
        if ticket.state is BreakerState.CLOSED:
            return ticket
        with self._lock:
            ticket = self._period
            if ticket.state is BreakerState.CLOSED:
                return ticket
            if abs(passed := now - self._since) < OPEN_S:
                return min(OPEN_S - passed, OPEN_S)
            if ticket.state is BreakerState.OPEN:
                self._period = Ticket(BreakerState.HALF_OPEN)
            self._since = now
            return self._period

    def record_success(self, ticket: Ticket) -> None:
        """Note that the service answered, were it with an error that is no passing one."""
        if ticket.state is BreakerState.CLOSED and not ticket.failures:
            return
        with self._lock:
            ticket.failures = 0
            if ticket is self._period and ticket.state is BreakerState.HALF_OPEN:
                self._period = Ticket(BreakerState.CLOSED)

    def record_failure(self, ticket: Ticket, now: float) -> None:
        """Note a passing failure or a time-out.

        Args:
            ticket: Of the call.
            now: Monotonic seconds.
        """
        with self._lock:
            if ticket is not self._period:
                return
            ticket.failures += 1
            if ticket.failures >= FAILURE_THRESHOLD or ticket.state is BreakerState.HALF_OPEN:
                self._period, self._since = Ticket(BreakerState.OPEN), now

    def discard(self, ticket: Ticket) -> None:
        """Note that the call ended and says nothing of the service: it was cancelled, or refused its arguments."""
        with self._lock:
            if ticket is self._period:
                self._since = -math.inf
