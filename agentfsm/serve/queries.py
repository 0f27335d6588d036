"""Read the parameters in the query of a request, and the header `traceparent`."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, TypeVar

from agentfsm.core.errors import MisuseError
from agentfsm.core.trace_context import is_traceparent

if TYPE_CHECKING:
    from starlette.datastructures import QueryParams
    from starlette.requests import Request


Choice = TypeVar("Choice", bound=str)


def read_text(query: QueryParams, name: str) -> str | None:
    """Return a text of printable characters; None if it is not given.

    Raises:
        MisuseError: when it is anything else.
    """
    text = query.get(name)
    if text is not None and not text.isprintable():
        raise MisuseError(f"{name}: give printable characters only")
    return text


def read_number(query: QueryParams, name: str, default: int, high: int) -> int:
    """Return a whole number from 0 to `high`.

    Raises:
        MisuseError: when it is anything else.
    """
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(high)) and int(text) <= high):
        raise MisuseError(f"{name}={text[:20]!r}: give a whole number up to {high}")
    return int(text)


def read_amount(query: QueryParams, name: str) -> float | None:
    """Return a number of 0 or more, such as a time in seconds since 1970; None if it is not given.

    Raises:
        MisuseError: when it is anything else.
    """
    text = query.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < inf:
        raise MisuseError(f"{name}={text[:20]!r}: give a number of 0 or more")
    return value


def read_choice(query: QueryParams, name: str, choices: Iterable[Choice]) -> Choice | None:
    """Return the one of the choices that is given; None if it is not given.

    Raises:
        MisuseError: when it is anything else.
    """
    if (text := query.get(name)) is None:
        return None
    found = next((each for each in choices if each == text), None)
    if found is None:
        raise MisuseError(f"{name}={text[:20]!r}: give one of {', '.join(choices)}")
    return found


def read_traceparent(request: Request) -> str:
    """Return the header `traceparent`; empty if it is missing or invalid, which begins a new trace, as W3C says."""
    text: str = request.headers.get("traceparent", "")
    return text if is_traceparent(text) else ""
