"""Circuit breaker of a tool: while its service is down, calls fail at once instead of waiting for a timeout.

A breaker belongs to a tool and is shared by all runs of the process. Closed, it admits every call and counts
consecutive failures. Open, it admits none. After `OPEN_S` it is half open and admits one call, the probe, whose result
decides.

A call may end long after the breaker has changed its state: twenty calls that hung through an outage time out when it
is over. So each admitted call gets a ticket for the current period, and its result counts only during that period.
"""

from __future__ import annotations

import math
import threading
from enum import StrEnum
from typing import Final

import attrs

# Consecutive failures that open the breaker. Fewer would take two unlucky calls for an outage; more would make each
# run wait through its timeouts.
FAILURE_THRESHOLD: Final = 5
# Seconds that the breaker stays open: about the time a service needs to restart, and a usual rate limit to pass.
OPEN_S: Final = 60.0


class BreakerState(StrEnum):
    """State of a breaker, which decides whether calls are admitted."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@attrs.define(eq=False, repr=False)
class Ticket:
    """A period of a breaker. An admitted call returns the ticket with its result."""

    state: BreakerState
    failures: int = 0
    """Consecutive failures so far."""


@attrs.define(eq=False, repr=False)
class Breaker:
    """Thread-safe circuit breaker: closed, open or half open.

    Times are monotonic seconds. A time that differs by more than `OPEN_S` from earlier ones, in either direction,
    counts as later: for example, the virtual clock of a test is unrelated to the real clock before it.
    """

    _period: Ticket = attrs.field(factory=lambda: Ticket(BreakerState.CLOSED), init=False)
    """Current period. It can be read without the lock, as one read gives all that is needed to admit a call."""

    _since: float = attrs.field(default=0.0, init=False)
    """Time of the opening or of the latest probe; minus infinity if a probe may go at once."""

    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @property
    def state(self) -> BreakerState:
        """Current state; still open if the time for a probe has come but no call has."""
        return self._period.state

    def admit(self, now: float) -> Ticket | float:
        """Admit a call, or return the seconds to wait.

        Every ticket must be returned by `record_success`, `record_failure` or `discard`. A probe not returned within
        `OPEN_S` no longer blocks other calls: a second probe is admitted, and the first result decides.

        Args:
            now: Monotonic seconds.

        Returns:
            The ticket of the call, or the maximum of seconds until a call is admitted, above 0 and at most `OPEN_S`.
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
        """Record that the service answered, even if with a permanent error."""
        if ticket.state is BreakerState.CLOSED and not ticket.failures:
            return
        with self._lock:
            ticket.failures = 0
            if ticket is self._period and ticket.state is BreakerState.HALF_OPEN:
                self._period = Ticket(BreakerState.CLOSED)

    def record_failure(self, ticket: Ticket, now: float) -> None:
        """Record a transient failure or a timeout.

        Args:
            ticket: The ticket of the call.
            now: Monotonic seconds.
        """
        with self._lock:
            if ticket is not self._period:
                return
            ticket.failures += 1
            if ticket.failures >= FAILURE_THRESHOLD or ticket.state is BreakerState.HALF_OPEN:
                self._period, self._since = Ticket(BreakerState.OPEN), now

    def discard(self, ticket: Ticket) -> None:
        """Return the ticket of a call that shows nothing about the service: cancelled, or its arguments refused."""
        with self._lock:
            if ticket is self._period:
                self._since = -math.inf
