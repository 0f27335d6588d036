"""Traits of a tool: how much it does to the world, and whether a function or an agent runs behind it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NoReturn

from agentfsm.core.errors import MisuseError


class ToolKind(StrEnum):
    """What runs behind a tool."""

    DIRECT = "direct"
    AGENT = "agent"


class Level(StrEnum):
    """What a tool does to the world, from the least: `Level.READ < Level.WRITE < Level.ADMIN`."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise MisuseError(f"there is no level {value!r}: the levels are {', '.join(cls)}")

    # As strings they would compare by the alphabet, where admin is the least.

    def __lt__(self, other: str) -> bool:
        return _RANK[self] < _RANK[Level(other)]

    def __le__(self, other: str) -> bool:
        return _RANK[self] <= _RANK[Level(other)]

    def __gt__(self, other: str) -> bool:
        return _RANK[self] > _RANK[Level(other)]

    def __ge__(self, other: str) -> bool:
        return _RANK[self] >= _RANK[Level(other)]


_RANK: Final = {level: rank for rank, level in enumerate(Level)}
