"""Values as short plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from agentfsm.tools.tool import Tool

# Characters of an argument in a list of calls: a path or a question fits, a document does not.
VALUE_CHARS: Final = 60
# Characters of a call with its arguments.
CALL_CHARS: Final = 160
# Characters of what went wrong.
NOTE_CHARS: Final = 300


def format_value(value: object) -> str:
    """Return a value as short JSON on one line; of a long text its length too."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= VALUE_CHARS:
        return text
    return f"{text[:VALUE_CHARS]}... ({len(text):,} characters)"


def format_arguments(arguments: Mapping[str, object]) -> str:
    """Return arguments as they stand in a call, each of them short."""
    return ", ".join(f"{name}={format_value(value)}" for name, value in arguments.items())


def format_duration(value: float) -> str:
    """Return a duration: 0.004 s, 2.1 s, 75 s."""
    return f"{value:.3f} s" if value < 1 else f"{value:.1f} s" if value < 60 else f"{value:,.0f} s"  # noqa: PLR2004


# What a tool declares of how its calls are treated.
DECLARATIONS: Final = ("read_only", "idempotent", "concurrency_safe", "requires_approval", "poll")


def list_declarations(tool: Tool[..., Any]) -> tuple[str, ...]:
    """Return what a tool declares of itself, by name."""
    return tuple(name for name in DECLARATIONS if getattr(tool, name))


def format_count(number: int, noun: str) -> str:
    """Return how many there are of what one says in the singular: 1 run, 2 runs."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_time(at: float) -> str:
    """Return a time since 1970 as date and time of this place."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
