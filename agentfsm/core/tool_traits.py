"""Traits of a tool: its level of access, whether it runs a function or an agent, and which rules are about it."""

from __future__ import annotations

from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, NoReturn

from agentfsm.core.errors import MisuseError


class ToolKind(StrEnum):
    """Kind of a tool: DIRECT runs a function, AGENT runs another agent."""

    DIRECT = "direct"
    AGENT = "agent"


class Level(StrEnum):
    """Level of access that a tool needs, in order: `Level.READ < Level.WRITE < Level.ADMIN`."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise MisuseError(f"unknown level {value!r}; valid levels: {', '.join(cls)}")

    # Strings would compare alphabetically, with admin as the lowest.

    def __lt__(self, other: str) -> bool:
        return _RANK[self] < _RANK[Level(other)]

    def __le__(self, other: str) -> bool:
        return _RANK[self] <= _RANK[Level(other)]

    def __gt__(self, other: str) -> bool:
        return _RANK[self] > _RANK[Level(other)]

    def __ge__(self, other: str) -> bool:
        return _RANK[self] >= _RANK[Level(other)]


_RANK: Final = {level: rank for rank, level in enumerate(Level)}


def matches_tool(glob: str, name: str) -> bool:
    """Return whether a rule about the name or glob is about the tool: "drop_*" is about `Drop_table`, too.

    Case does not count, in either of them, since servers and people write names in any.
    """
    return fnmatchcase(name.casefold(), glob.casefold())
