"""The SQLite index of a memory, for the conformance kits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentfsm.memory import SQLiteIndex


class SQLiteIndexes:
    """The fixtures of a kit: an index, and another object on the same file."""

    @pytest.fixture
    async def index(self, tmp_path: Path) -> AsyncIterator[SQLiteIndex]:
        """Open an index in a new file."""
        index = SQLiteIndex(tmp_path / "memory.db")
        yield index
        await index.aclose()

    @pytest.fixture
    async def other(self, index: SQLiteIndex) -> AsyncIterator[SQLiteIndex]:
        """Open its file a second time."""
        other = SQLiteIndex(index.path)
        yield other
        await other.aclose()
