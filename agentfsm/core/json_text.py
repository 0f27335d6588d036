"""Plain JSON text with bounded depth, and times rounded for it."""

from __future__ import annotations

import json
from typing import Final

# How deep readers go differs, also from Python to Python; strict ones take no more.
MAX_JSON_DEPTH: Final = 200

# Without a look at the depth.
dump_compact: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encode_json(value: object) -> str:
    """Write a value as JSON text.

    Raises:
        TypeError, ValueError, RecursionError: when it is no plain JSON, or nested deeper than `MAX_JSON_DEPTH`.
    """
    text = dump_compact(value)
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _is_too_deep(value):
        raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH}")
    return text


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        held = [each for each in level if isinstance(each, dict | list | tuple)]
        level = [item for each in held for item in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


# Full-precision floats would add about 10 % to the journal.


def round_timestamp(seconds: float) -> float:
    """Return a date, in seconds since 1970, in whole milliseconds."""
    return int(seconds * 1e3 + 0.5) / 1e3


def round_duration(seconds: float) -> float:
    """Return a duration, in seconds, in whole microseconds."""
    return int(seconds * 1e6 + 0.5) / 1e6
