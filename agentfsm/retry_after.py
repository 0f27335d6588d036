"""What a service asks to wait, as HTTP writes it; read by the model adapters and the tool queue alike."""

from __future__ import annotations

import math
from contextlib import suppress
from importlib import import_module


def seconds_of(text: str, now_s: float) -> float | None:
    """Read the value of a Retry-After header.

    Args:
        text: Seconds, or a date; one that names no zone is in UTC, and not in the local time that Python takes it for.
        now_s: Seconds since 1970.

    Returns:
        Seconds to wait, 0 or more; None where it says nothing that can be read.

    Source: RFC 9110, 10.2.3 and 5.6.7.
    """
    if (seconds := finite_s(text)) is not None:
        return seconds
    with suppress(ValueError, OverflowError):
        return finite_s(_date_s(text) - now_s)
    return None


def _date_s(text: str) -> float:
    """Return the seconds from 1970 to a date; `email`, which reads it, is loaded for the first one: it takes 5 ms."""
    date = import_module("email.utils").parsedate_to_datetime(text)
    return float((date if date.tzinfo else date.replace(tzinfo=import_module("datetime").UTC)).timestamp())


def finite_s(number: float | str) -> float | None:
    """Return seconds to wait, 0 or more; None where that is no finite number."""
    with suppress(ValueError, OverflowError):
        seconds = float(number)
        return max(seconds, 0.0) if math.isfinite(seconds) else None
    return None
