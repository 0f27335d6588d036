"""Parse the wait that a service requests, for the model adapters and the tool queue."""

from __future__ import annotations

import math
from contextlib import suppress


def parse_retry_after(text: str, now_s: float) -> float | None:
    """Read the value of a Retry-After header.

    Args:
        text: Seconds, or a date. A date without a zone is in UTC; Python would take it for local time.
        now_s: Seconds since 1970.

    Returns:
        Seconds to wait, 0 or more; None if the text is neither.

    Source: RFC 9110, 10.2.3 and 5.6.7.
    """
    if (seconds := parse_wait_s(text)) is not None:
        return seconds
    with suppress(ValueError, OverflowError):
        return parse_wait_s(_parse_date_s(text) - now_s)
    return None


def _parse_date_s(text: str) -> float:
    """Return the seconds since 1970 of a date."""
    from datetime import UTC  # noqa: PLC0415  rarely used, and takes 5 ms to import
    from email.utils import parsedate_to_datetime  # noqa: PLC0415

    date = parsedate_to_datetime(text)
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def parse_wait_s(number: float | str) -> float | None:
    """Return seconds to wait, 0 or more; None if the value is not a finite number."""
    with suppress(ValueError, OverflowError):
        seconds = float(number)
        return max(seconds, 0.0) if math.isfinite(seconds) else None
    return None
