"""Validate the entries of an answer one by one, so that an invalid entry does not affect the others.

The SDK accepts an answer as a whole or not at all: one invalid tool would hide all others, and one block of an unknown
kind would discard the result of a call whose effect has happened. So invalid entries are removed from an answer before
the SDK parses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any, Final, cast

import attrs
from mcp import Client, MCPError
from mcp.client.session import ClientSession
from mcp.types import methods
from pydantic import ValidationError

from agentfsm.core.value import Value
from agentfsm.mcp.connection.request_errors import WIRE_STATUS, WireStatus, shorten
from agentfsm.mcp.sdk_parts import find_part

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


# Share of the start timeout for the first request, which distinguishes servers of the current protocol from older ones.
# Many older servers do not answer unknown requests, so the rest is for their handshake. For 30 s it is the SDK's 10 s.
DISCOVERY_SHARE: Final = 1 / 3


class LenientClient(Client):
    """Client that drops invalid entries from answers, and bounds the wait for the first answer by the start timeout.

    The SDK always waits 10 s for it. It would take a slower server for an older one, and send it requests that it may
    not know; and with a shorter start timeout, an older server that never answers it could not be used.
    """

    def __init__(self, transport: Any, *, start_s: float, **options: Any) -> None:
        """Create a client.

        Args:
            transport: Transport that opens the streams.
            start_s: Seconds that the handshake may take.
            options: Options of `Client`.
        """
        find_part(Client, "_build_session")  # which is replaced below
        super().__init__(transport, cache=None, **options)
        self._discovery_timeout_s = start_s * DISCOVERY_SHARE

    async def _build_session(self, exit_stack: AsyncExitStack) -> ClientSession:
        session = await super()._build_session(exit_stack)
        dispatcher = find_part(session, "_dispatcher")  # the session validates its answers
        send_raw_request = find_part(dispatcher, "send_raw_request")

        async def send_and_filter(
            method: str, params: Any = None, options: Mapping[str, Any] | None = None, **more: Any
        ) -> dict[str, Any]:
            is_first = method == "server/discover"
            if is_first:
                options = {**(options or {}), "timeout": self._discovery_timeout_s}
            try:
                answer = await send_raw_request(method, params, options, **more)
            except MCPError:
                if is_first and (outage := WIRE_STATUS.get(WireStatus()).error) is not None:
                    raise outage from None  # the SDK takes any `MCPError` here as a sign of an older server
                raise
            return drop_invalid_entries(method, session.protocol_version or "", answer)

        dispatcher.send_raw_request = send_and_filter
        # `OutputCheck` validates results with bounded work; the SDK would also list the tools to find a schema.
        find_part(session, "validate_tool_result")
        cast("Any", session).validate_tool_result = _accept_result
        return session


async def _accept_result(_name: str, _result: object) -> None:
    """Accept a result without a check."""
