"""What a service asks to wait, as HTTP writes it; read by the model adapters and the tool queue alike."""

from __future__ import annotations

import math
from contextlib import suppress


def parse_retry_after(text: str, now_s: float) -> float | None:
    """Read the value of a Retry-After header.

    Args:
        text: Seconds, or a date; one that names no zone is in UTC, and not in the local time that Python takes it for.
        now_s: Seconds since 1970.

    Returns:
        Seconds to wait, 0 or more; None where it says nothing that can be read.

    Source: RFC 9110, 10.2.3 and 5.6.7.
    """
    if (seconds := parse_wait_s(text)) is not None:
        return seconds
    with suppress(ValueError, OverflowError):
        return parse_wait_s(_parse_date_s(text) - now_s)
    return None


def _parse_date_s(text: str) -> float:
    """Return the seconds from 1970 to a date."""
    from datetime import UTC  # noqa: PLC0415  few programs ever need them: they take 5 ms
    from email.utils import parsedate_to_datetime  # noqa: PLC0415

    date = parsedate_to_datetime(text)
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def parse_wait_s(number: float | str) -> float | None:
    """Return seconds to wait, 0 or more; None where that is no finite number."""
    with suppress(ValueError, OverflowError):
        seconds = float(number)
        return max(seconds, 0.0) if math.isfinite(seconds) else None
    return None
