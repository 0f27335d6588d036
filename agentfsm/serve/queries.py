"""Read the parameters in the query of a request, and the header `traceparent`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.core.errors import MisuseError
from agentfsm.core.machine import State
from agentfsm.core.trace_context import is_traceparent

if TYPE_CHECKING:
    from starlette.datastructures import QueryParams
    from starlette.requests import Request


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


def read_state(text: str) -> State:
    """Return a state.

    Raises:
        MisuseError: when it is anything else.
    """
    if text not in set(State):
        raise MisuseError(f"state={text[:20]!r}: give one of {', '.join(State)}")
    return State(text)


def read_traceparent(request: Request) -> str:
    """Return the header `traceparent`; empty if it is missing or invalid, which begins a new trace, as W3C says."""
    text: str = request.headers.get("traceparent", "")
    return text if is_traceparent(text) else ""
