"""Names of servers and their tools: unique, and valid for every provider."""

from __future__ import annotations

import re
from typing import Final

from agentfsm.core.errors import MisuseError
from agentfsm.core.fingerprint import short_hash
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
