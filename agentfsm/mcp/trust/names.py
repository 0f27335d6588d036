"""Names and texts of servers and their tools: unique, valid for every provider, without hidden characters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import mcp.types as m

from agentfsm.core.errors import MisuseError
from agentfsm.core.header import short_hash
from agentfsm.core.text_safety import find_hidden
from agentfsm.tools.tool import NAME_CHARS

# Between the names of a server and its tool. The first separator in a full name ends the server's name.
SEPARATOR: Final = "__"
# Maximum length of a server's name: half of that of a tool.
SERVER_CHARS: Final = 32
# Characters of the hash in a name that had to be changed: 40 bits. If two names still collide, both are refused.
_HASH_CHARS: Final = 10

_SERVER_PATTERN: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]|_(?![_]|$))*")
_TOOL_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]+")
# A server's own name that looks like a changed one is changed as well, so that the two cannot collide.
_HASHED_PATTERN: Final = re.compile(rf".*-[0-9a-f]{{{_HASH_CHARS}}}")


def is_server_name(name: object) -> bool:
    """Return whether a name is valid for a server; see `check_server_name`."""
    return isinstance(name, str) and len(name) <= SERVER_CHARS and _SERVER_PATTERN.fullmatch(name) is not None


def check_server_name(name: str) -> None:
    """Check that a server's name can prefix the names of its tools.

    Raises:
        MisuseError: when it is not 1 to 32 ASCII letters, digits, "-" and single "_", with none of these at its ends.
    """
    if not is_server_name(name):
        raise MisuseError(
            f"invalid name {str(name)[:NAME_CHARS]!r} for an MCP server: it prefixes the names of its tools, so use 1 "
            f"to {SERVER_CHARS} ASCII letters, digits, '-' or single '_' inside, for example name='files'"
        )


def derive_server_name(text: str) -> str:
    """Derive the default name of a server from its command or host."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:SERVER_CHARS].rstrip("-") or "server"


def tool_name(server: str, own: str) -> str:
    """Return the full name of a server's tool: `server__tool`, changed if a provider would refuse it.

    Args:
        server: The server's name, which `check_server_name` accepted.
        own: The tool's name on the server; any text.
    """
    name = f"{server}{SEPARATOR}{own}"
    if _TOOL_PATTERN.fullmatch(own) and len(name) <= NAME_CHARS and not _HASHED_PATTERN.fullmatch(own):
        return name
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", name)[: NAME_CHARS - _HASH_CHARS - 1]
    return f"{readable}-{short_hash(own, _HASH_CHARS)}"


# Characters with which a name could forge lines in the text that a person reads.
_LINE_BREAKS: Final = frozenset("\t\n\r")


def find_hidden_flaw(listed: m.Tool) -> str | None:
    """Return where a tool's texts have a hidden character, or its name or title a line break; None if nowhere."""
    titles = [listed.title, listed.annotations.title if listed.annotations else None]
    short: list[tuple[str, str | None]] = [("name", listed.name), *(("title", title) for title in titles)]
    for place, text in short:
        if text and not _LINE_BREAKS.isdisjoint(text):
            return f"its {place} has more than one line"
    places: list[tuple[str, Any]] = [
        *short,
        ("description", listed.description),
        ("input schema", listed.input_schema),
        ("output schema", listed.output_schema),
    ]
    for place, value in places:
        for text in iter_texts(value):
            if (found := find_hidden(text)) is not None:
                return f"its {place} holds the hidden character {found}"
    return None


def iter_texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, at any depth, including the keys of objects."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, Mapping):
            yield from (str(key) for key in inner)
            waiting += inner.values()
        elif isinstance(inner, list):
            waiting += inner
