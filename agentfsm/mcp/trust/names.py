"""What servers and their tools are called here: names that every provider takes, and no two of which are the same."""

from __future__ import annotations

import re
from typing import Final

from agentfsm.core.errors import MisuseError
from agentfsm.core.fingerprint import short_hash
from agentfsm.tools.tool import NAME_CHARS

# Between the names of a server and of its tool; the first one in a name ends the server's.
SEPARATOR: Final = "__"
# Characters of a server's name, half of what a tool's may have.
SERVER_CHARS: Final = 32
# Characters of the hash in a name that had to be changed: 40 bits, and two that fall together all the same are both
# refused.
_HASH_CHARS: Final = 10

_SERVER_PATTERN: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]|_(?![_]|$))*")
_TOOL_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]+")
# A name of the server's own that looks like one that was changed is changed as well, so that neither takes the other's.
_HASHED_PATTERN: Final = re.compile(rf".*-[0-9a-f]{{{_HASH_CHARS}}}")


def check_server_name(name: str) -> None:
    """Refuse a name for a server that tools cannot carry in theirs.

    Raises:
        MisuseError: when it is not 1 to 32 ASCII letters, digits, "-" and single "_", with none of these at its ends.
    """
    if not isinstance(name, str) or len(name) > SERVER_CHARS or not _SERVER_PATTERN.fullmatch(name):
        raise MisuseError(
            f"an MCP server cannot be called {str(name)[:NAME_CHARS]!r}: its tools carry its name in front, so use 1 "
            f"to {SERVER_CHARS} ASCII letters, digits, '-' or single '_' inside, for example name='files'"
        )


def derive_server_name(text: str) -> str:
    """Return a name for a server that was given none, out of its command or host."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:SERVER_CHARS].rstrip("-") or "server"


def tool_name(server: str, own: str) -> str:
    """Return what a server's tool is called here: `server__tool`; a name that no provider takes is changed.

    Args:
        server: The server's name, which `check_server_name` took.
        own: The tool's own, from anywhere.
    """
    name = f"{server}{SEPARATOR}{own}"
    if _TOOL_PATTERN.fullmatch(own) and len(name) <= NAME_CHARS and not _HASHED_PATTERN.fullmatch(own):
        return name
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", name)[: NAME_CHARS - _HASH_CHARS - 1]
    return f"{readable}-{short_hash(own, _HASH_CHARS)}"
