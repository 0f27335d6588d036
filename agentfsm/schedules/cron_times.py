"""The times of a cron expression in a time zone. cronsim parses and evaluates it as Debian's cron does."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from itertools import islice
from typing import Final
from zoneinfo import ZoneInfo, available_timezones

import attrs

from agentfsm._lib.plugins import require_extra
from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import shorten_repr
from agentfsm.core.value import Value

with require_extra("agentfsm.schedules", "schedule", "cronsim"):
    from cronsim import CronSim, CronSimError

CRON_FORM: Final = (
    "give five fields: minute, hour, day of the month, month and day of the week, such as '0 3 * * *' for 3 a.m. every "
    "day, '*/15 * * * *' or '0 9 * * MON-FRI'"
)
_CRON_FIELDS: Final = 5
# Seconds of the first span in which the newest times are searched, and the growth of the next ones: an hour has at most
# 60 times, and a span that is eight times as long has about eight times as many.
_FIRST_SPAN_S: Final = 3_600.0
_SPAN_GROWTH: Final = 8


@attrs.frozen
class CronTimes(Value):
    """The times of a cron expression in a time zone, as whole minutes.

    A time that the clocks skip in spring is moved to the first minute after the gap, and one that they repeat in autumn
    comes once, the first time. If minute or hour begins with a star, the expression means an interval, which takes part
    in the change: no time in the gap, and each time in the repeated hour.
    """

    cron: str
    """The expression."""

    zone: ZoneInfo
    """The time zone."""

    @classmethod
    @lru_cache(maxsize=1_000)
    def parse(cls, cron: str, tz: str) -> CronTimes:
        """Parse an expression and the name of a zone. The last 1,000 results are kept.

        Raises:
            MisuseError: if one of them is invalid, or the expression has no time within 50 years.
        """
        times = cls(_check_cron(cron), _find_zone(tz))
        if next(times.iterate(0.0), None) is None:
            raise MisuseError(f"cron={cron!r} has no time within 50 years: {CRON_FORM}")
        return times

    def iterate(self, after: float) -> Iterator[float]:
        """Yield the times after a moment, seconds since 1970, in order."""
        for moment in CronSim(self.cron, self.localise(after)):
            at = moment.timestamp()
            if at > after:  # cronsim repeats times that fall into the gap, and forgets which hour of two it is in
                after = at
                yield at

    def list_newest(self, after: float, until: float, limit: int) -> list[float]:
        """Return the newest times after a moment and up to another, at most `limit`, oldest first."""
        span_s, found = _FIRST_SPAN_S, list[float]()
        while len(found) < limit and until > after:
            start = max(after, until - span_s)
            found = [*self._iterate_until(start, until)]
            if start == after:
                break
            span_s *= _SPAN_GROWTH
        return found[-limit:]

    def list_between(self, start: float, end: float, limit: int) -> list[float]:
        """Return the times from a moment on and before another, at most `limit`, oldest first."""
        return [*islice(self._iterate_until(math.ceil(start) - 1, math.ceil(end) - 1), limit)]

    def _iterate_until(self, after: float, until: float) -> Iterator[float]:
        for at in self.iterate(after):
            if at > until:
                return
            yield at

    def localise(self, at: float) -> datetime:
        """Return a moment as a date in the zone."""
        return datetime.fromtimestamp(at, self.zone)


def _check_cron(cron: object) -> str:
    """Return a valid expression.

    Raises:
        MisuseError: if it is invalid.
    """
    if not isinstance(cron, str) or len(cron.split()) != _CRON_FIELDS:
        raise MisuseError(f"cron={shorten_repr(cron)}: {CRON_FORM}")
    try:
        CronSim(cron, datetime.fromtimestamp(0.0).astimezone())
    except CronSimError as error:
        raise MisuseError(f"cron={shorten_repr(cron)}: {str(error).lower()}; {CRON_FORM}") from None
    return cron


def _find_zone(tz: object) -> ZoneInfo:
    """Return the zone with a name.

    Raises:
        MisuseError: if there is none.
    """
    try:
        return ZoneInfo(tz)  # type: ignore[arg-type]  # whatever the caller gives
    except (KeyError, ValueError, TypeError, AttributeError, OSError):
        near = difflib.get_close_matches(str(tz)[:100], available_timezones(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "give a name such as 'Europe/Vienna' or 'UTC'"
        raise MisuseError(f"tz={shorten_repr(tz)} is no time zone of the IANA database: {hint}") from None
