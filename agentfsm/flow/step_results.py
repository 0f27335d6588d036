"""Results of steps, which are data: JSON that is read back as the same value, or a failure that says why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from agentfsm.core.messages import ErrorType, Outcome
from agentfsm.tools.queue.result_json import encode_value
from agentfsm.tools.queue.result_text import describe_error, truncate_for_journal
from agentfsm.tools.run_context import ToolReturn

# Names of error types before the reason: that of pydantic's error, and those that it has around.
_PREFIXES: Final = ("PydanticSerializationError: Error serializing to JSON: ", "TypeError: ", "ValueError: ")
_CONTAINERS: Final[frozenset[type]] = frozenset({list, tuple, set, frozenset})


def write_step_result(value: object) -> str:
    """Return the JSON of a result.

    Raises:
        TypeError: if it has a value that JSON does not have, or an iterator.
        ValueError: if it has NaN, infinity or keys that are equal as text, contains itself, or is too large for the
            journal.
    """
    if _holds_iterator(value):
        raise TypeError("an iterator or an open file can be read only once: return a list, or a text")
    text = encode_value(value)
    if "NaN" in text or "Infinity" in text:  # perhaps within a text
        json.loads(text, parse_constant=_refuse_constant)
    if truncate_for_journal(text) is not text:
        raise ValueError(f"{len(text):,} characters are too many to be kept: store them elsewhere, and return where")
    return text


def build_unwritable_result(value: object, error: Exception) -> ToolReturn:
    """Return the failure of a step whose function has returned what cannot be written."""
    reason = describe_error(error)
    for prefix in _PREFIXES:
        reason = reason.removeprefix(prefix)
    kind = type(value).__name__
    text = (
        f"its function was called and has returned, so its effect has happened, but the result, of type {kind}, cannot "
        f"be written as JSON: {reason}"
    )
    return ToolReturn(outcome=Outcome.FAILED, content=text, error_type=ErrorType.TOOL)


def build_uncalled_result(text: str, error: Exception) -> ToolReturn:
    """Return the failure of a step whose function was not called, from the rest of the sentence and the error."""
    reason = describe_error(error).removeprefix("ArgumentsError: ").partition("\nParameters:")[0]
    return ToolReturn(
        outcome=Outcome.FAILED,
        content=f"its function was not called, since {text}{' '.join(reason.split()).removesuffix('.')}",
        error_type=ErrorType.ARGUMENTS,
    )


def _holds_iterator(value: object) -> bool:
    """Return whether a value is an iterator, or has one in a list, tuple, set or mapping at any depth."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if hasattr(kind, "__next__") or hasattr(kind, "__anext__"):
            return True
        if (kind in _CONTAINERS or kind is dict) and id(each) not in seen:
            seen.add(id(each))
            items: Any = each
            waiting += items.values() if isinstance(each, Mapping) else items
    return False


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number: return None or a text for it")
