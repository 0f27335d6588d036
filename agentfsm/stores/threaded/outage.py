"""Track outages of a server, since leases may end only because their owners could not renew them.

The first worker that reaches the server again must not take the runs of live workers that reconnect a moment later.
"""

from __future__ import annotations

import time

import attrs


@attrs.define(eq=False, repr=False)
class Outage:
    """The last outage that one store has observed."""

    lease_s: float
    """Seconds after its end for which the outage still counts: by then, live owners have renewed their leases."""

    _last_answer_at: float | None = attrs.field(default=None, init=False)
    """Time of the server's last answer, monotonic seconds, as all times here; None before the first answer."""

    _is_ongoing: bool = attrs.field(default=False, init=False)
    """True if the server is away."""

    _began_at: float = attrs.field(default=0.0, init=False)
    """Time of the last answer before the outage."""

    _counts_until: float = attrs.field(default=0.0, init=False)

    def begin(self) -> None:
        """Record that the server is away. Ignored if the store has never reached it, since it then holds no leases."""
        if self._is_ongoing or self._last_answer_at is None:
            return
        self._is_ongoing = True
        if time.monotonic() >= self._counts_until:  # else the last outage continues after a short pause
            self._began_at = self._last_answer_at

    def end(self) -> None:
        """Record that the server has answered."""
        self._last_answer_at = time.monotonic()
        if self._is_ongoing:
            self._is_ongoing, self._counts_until = False, self._last_answer_at + self.lease_s

    @property
    def grace_s(self) -> float:
        """Leases that ended within this many seconds before now count as held; 0 if there was no outage."""
        now = time.monotonic()
        return now - self._began_at if self._is_ongoing or now < self._counts_until else 0.0
