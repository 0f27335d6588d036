"""Validate the entries of an answer one by one, so that an invalid entry does not affect the others.

The SDK accepts an answer as a whole or not at all: one invalid tool would hide all others, and one block of an unknown
kind would discard the result of a call whose effect has happened. So invalid entries are removed from an answer before
the SDK parses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final

import attrs
from mcp.types import methods
from pydantic import ValidationError

from agentfsm.core.value import Value
from agentfsm.mcp.connection.request_errors import shorten

# Key of the list in an answer, by method.
LIST_KEYS: Final = {
    "prompts/get": "messages",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "tools/call": "content",
    "tools/list": "tools",
}
# Other fields that an answer needs, in any revision.
_RESULT_FRAME: Final = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
# Name of an entry that has no name.
UNNAMED: Final = "(no name)"


@attrs.frozen
class InvalidEntry(Value):
    """Entry of a list that cannot be used."""

    name: str
    """Name that the server gives the entry."""

    why: str
    """Reason why the entry cannot be used."""


# Receives the invalid entries of a list. An answer is checked in the context of its request.
INVALID_ENTRIES: Final[ContextVar[list[InvalidEntry]]] = ContextVar("UNFIT")


def drop_invalid_entries(method: str, version: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without the invalid entries of its list. A note replaces an invalid block of content.

    Args:
        method: The method of the request.
        version: The negotiated revision of the protocol.
        answer: The answer as received.
    """
    key = LIST_KEYS.get(method)
    pieces = None if key is None else answer.get(key)
    if key is None or not isinstance(pieces, list) or _find_error(method, version, pieces) is None:
        return answer  # if it should be a list and is not, the SDK raises an error
    found = [(piece, _find_error(method, version, [piece])) for piece in pieces]
    if (noted := _REPLACEMENTS.get(method)) is not None:
        return answer | {key: [piece if flaw is None else noted(piece) for piece, flaw in found]}
    INVALID_ENTRIES.get([]).extend(
        InvalidEntry(_read_text(piece, "name") or UNNAMED, flaw) for piece, flaw in found if flaw is not None
    )
    return answer | {key: [piece for piece, flaw in found if flaw is None]}


def _find_error(method: str, version: str, pieces: Sequence[Any]) -> str | None:
    """Return where and why entries violate the protocol, or None."""
    try:
        methods.parse_server_result(method, version, {**_RESULT_FRAME, LIST_KEYS[method]: pieces})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"][2:]))  # after the list's name and the index
        return shorten(f"it does not fit the protocol: {': '.join(filter(None, (place, first['msg'])))}")
    return None


def _replace_block(block: Any) -> dict[str, str]:
    return {"type": "text", "text": describe_unknown_block(_read_text(block, "type"))}


def _replace_message_content(message: Any) -> Any:
    return {**message, "content": _replace_block(message.get("content"))} if isinstance(message, dict) else message


# Functions that replace an invalid entry by a note, for lists that are incomplete without it.
_REPLACEMENTS: Final = {"prompts/get": _replace_message_content, "tools/call": _replace_block}


def describe_unknown_block(kind: str) -> str:
    """Return the note that replaces a block of content of an unknown type."""
    return f"[a block of the unknown type {shorten(kind)!r}: not shown]"


def _read_text(piece: Any, key: str) -> str:
    word = piece.get(key) if isinstance(piece, dict) else None
    return word if isinstance(word, str) else ""
