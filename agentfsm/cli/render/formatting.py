"""Format values as short plain text."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core.shortening import shorten
from agentfsm.core.text_safety import ELLIPSIS

if TYPE_CHECKING:
    from agentfsm.tools.tool import Tool

# Characters of one argument of a call: enough for a path or a question.
VALUE_CHARS: Final = 60
# Characters of a call with its arguments.
CALL_CHARS: Final = 160
# Characters of an error message, a description or another note.
NOTE_CHARS: Final = 300


def format_value(value: object) -> str:
    """Return a value as JSON on one line. A long one is cut and followed by its length."""
    return shorten(json.dumps(value, ensure_ascii=False, default=str), VALUE_CHARS, with_length=True)


def format_arguments(arguments: Mapping[str, object]) -> str:
    """Return arguments in the form of a call, each cut by `format_value`."""
    return ", ".join(f"{name}={format_value(value)}" for name, value in arguments.items())


def format_duration(value: float) -> str:
    """Return a duration in seconds: 0.004 s, 2.1 s, 75 s."""
    return f"{value:.3f} s" if value < 1 else f"{value:.1f} s" if value < 60 else f"{value:,.0f} s"


# Declarations of a tool that decide how its calls are executed.
DECLARATIONS: Final = ("read_only", "idempotent", "concurrency_safe", "requires_approval", "poll")


def list_declarations(tool: Tool[..., Any]) -> tuple[str, ...]:
    """Return the names of the declarations that a tool makes."""
    return tuple(name for name in DECLARATIONS if getattr(tool, name))


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, which is given in the singular: 1 run, 2 runs."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_time(at: float) -> str:
    """Return a time, given in seconds since 1970, as local date and time."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _fits(text: str, columns: int) -> bool:
    """Whether a text fits a number of terminal columns. Wide characters, such as Chinese ones, take two."""
    return len(text) <= columns and count_columns(text) <= columns


def count_columns(text: str) -> int:
    """Return the number of terminal columns of a text."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def fit_columns(text: str, columns: int) -> str:
    """Return the text, cut with an ellipsis if it is longer than a number of terminal columns."""
    if _fits(text, columns):
        return text
    cut = text[: max(columns - len(ELLIPSIS), 0)]
    while cut and not _fits(cut, columns - len(ELLIPSIS)):
        cut = cut[:-1]
    return (cut + ELLIPSIS)[:columns]


def fit_with_length(text: str, columns: int) -> str:
    """Return the text, cut if it is longer than a number of terminal columns, with the number of characters cut."""
    if _fits(text, columns):
        return text
    note = f" ({len(text):,} more characters)"  # room for the longest number
    kept = fit_columns(text, columns - len(note)).removesuffix(ELLIPSIS)
    return f"{kept}{ELLIPSIS} ({len(text) - len(kept):,} more characters)"
