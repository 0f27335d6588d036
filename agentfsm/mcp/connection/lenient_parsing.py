"""What a server answers, held to the protocol piece by piece: what does not fit costs the rest nothing.

The SDK takes an answer as a whole or not at all: one tool with a flaw takes all others with it, and one block of a kind
that it does not know takes the result of a call whose effect has happened. So what does not fit is taken out of an
answer before the SDK looks at it.
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

# By what was asked: where in the answer the list of pieces is.
LIST_KEYS: Final = {
    "prompts/get": "messages",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "tools/call": "content",
    "tools/list": "tools",
}
# What an answer has to have beside its pieces, of any revision.
_RESULT_FRAME: Final = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
# Stands for a piece that does not say what it is.
UNNAMED: Final = "(no name)"


@attrs.frozen
class InvalidEntry(Value):
    """An entry of a list that cannot be used."""

    name: str
    """As the server calls it."""

    why: str


# Takes what of a list does not fit. Whatever is asked, its answer is sifted in the context of who asked.
INVALID_ENTRIES: Final[ContextVar[list[InvalidEntry]]] = ContextVar("UNFIT")


def drop_invalid_entries(method: str, version: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without the entries of a list that do not fit; blocks of content that do not are named.

    Args:
        method: What was asked.
        version: The revision of the protocol that was agreed on.
        answer: As it came.
    """
    key = LIST_KEYS.get(method)
    pieces = None if key is None else answer.get(key)
    if key is None or not isinstance(pieces, list) or _find_error(method, version, pieces) is None:
        return answer  # where it is no list, the SDK says so
    found = [(piece, _find_error(method, version, [piece])) for piece in pieces]
    if (noted := _REPLACEMENTS.get(method)) is not None:
        return answer | {key: [piece if flaw is None else noted(piece) for piece, flaw in found]}
    INVALID_ENTRIES.get([]).extend(
        InvalidEntry(_read_text(piece, "name") or UNNAMED, flaw) for piece, flaw in found if flaw is not None
    )
    return answer | {key: [piece for piece, flaw in found if flaw is None]}


def _find_error(method: str, version: str, pieces: Sequence[Any]) -> str | None:
    """Say where pieces do not fit the protocol, and why; None where they do."""
    try:
        methods.parse_server_result(method, version, {**_RESULT_FRAME, LIST_KEYS[method]: pieces})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"][2:]))  # behind the list's name, and the place in it
        return shorten(f"it does not fit the protocol: {': '.join(filter(None, (place, first['msg'])))}")
    return None


def _replace_block(block: Any) -> dict[str, str]:
    return {"type": "text", "text": describe_unknown_block(_read_text(block, "type"))}


def _replace_message_content(message: Any) -> Any:
    return {**message, "content": _replace_block(message.get("content"))} if isinstance(message, dict) else message


# How a piece is told of that is not left out, since what it is part of would not be the same without it.
_REPLACEMENTS: Final = {"prompts/get": _replace_message_content, "tools/call": _replace_block}


def describe_unknown_block(kind: str) -> str:
    """Return what stands for a block of content that is of no known form."""
    return f"[a block of the kind {shorten(kind)!r}: not shown, since nothing is known of such a one]"


def _read_text(piece: Any, key: str) -> str:
    word = piece.get(key) if isinstance(piece, dict) else None
    return word if isinstance(word, str) else ""
