"""Plain JSON text with bounded depth, and times rounded for it."""

from __future__ import annotations

import json
from typing import Final

# Maximum nesting that strict parsers accept. Other limits differ between parsers and versions of Python.
MAX_JSON_DEPTH: Final = 200

# Does not check the depth.
dump_compact: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encode_json(value: object) -> str:
    """Return a value as JSON text.

    Raises:
        TypeError, ValueError, RecursionError: if it is not plain JSON, or nested deeper than `MAX_JSON_DEPTH`.
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
    """Round seconds since 1970 to milliseconds."""
    return int(seconds * 1e3 + 0.5) / 1e3


def round_duration(seconds: float) -> float:
    """Round a duration in seconds to microseconds."""
    return int(seconds * 1e6 + 0.5) / 1e6
