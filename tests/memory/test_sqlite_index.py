"""The index in a SQLite file."""

import os
import sqlite3
import stat

import pytest

from agentfsm import CorruptError, MisuseError, StoreError
from agentfsm.memory import SQLiteIndex
from agentfsm.ports.memory_items import Namespace
from agentfsm.stores import SQLiteStore
from agentfsm.stores.sqlite.file import connect_sqlite3
from agentfsm.testing.memory_conformance import ANN, MemoryIndexConformance, build_item
from tests.support.sqlite_indexes import SQLiteIndexes


class TestSQLiteIndex(SQLiteIndexes, MemoryIndexConformance):
    """The index passes the kit."""


def read_all(folder):
    return b"".join(path.read_bytes() for path in folder.iterdir())


@pytest.mark.parametrize("whole", [False, True])
async def test_forgetting_leaves_no_byte(tmp_path, whole):
    """No file contains the text, its words or the name of its owner after it was forgotten."""
    index = SQLiteIndex(tmp_path / "memory.db")
    kept = [build_item(f"kept{n}", f"kept words {n}", namespace=index_of(n)) for n in range(200)]
    await index.add([*kept[:100], build_item("x", "Xylophone zzyzx 猩猩红", data={"k": "qwertz"}), *kept[100:]])
    forget = (
        index.forget_namespace(ANN, at=500.0, by="", reason="")
        if whole
        else index.forget(["x"], at=500.0, by="", reason="")
    )
    assert await forget == 1
    for word in ("ylophone", "zzyzx", "猩猩", "qwertz", *(["acme"] if whole else [])):
        assert word.encode() not in read_all(tmp_path), word
    assert b"kept words" in read_all(tmp_path)
    await index.aclose()


def index_of(number):
    return Namespace(tenant="shared", user=str(number % 3))


async def test_a_temporary_file_is_removed(tmp_path, monkeypatch):
    """An index without a path has a file of its own, which goes when it is closed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    index = SQLiteIndex()
    await index.add([build_item("a", "text")])
    assert [*tmp_path.rglob("*.db")]
    await index.aclose()
    assert not [*tmp_path.iterdir()]


class NoFTS5:
    """A connection to a SQLite that was built without FTS5."""

    def __init__(self, inner):
        self.inner = inner

    def execute(self, sql, parameters=(), /):
        if "fts5" in sql:
            raise sqlite3.OperationalError("no such module: fts5")
        return self.inner.execute(sql, parameters)

    def close(self):
        self.inner.close()


async def test_a_sqlite_without_fts5_is_refused(tmp_path):
    """The error says what is missing, and where the memory can be kept instead."""
    index = SQLiteIndex(tmp_path / "memory.db", connect=lambda path: NoFTS5(connect_sqlite3(path)))
    with pytest.raises(MisuseError, match=r"has no FTS5.*PostgreSQL"):
        await index.add([build_item("a", "text")])
    await index.aclose()


async def test_a_new_file_is_private(tmp_path):
    """Only the owner of the file may read it."""
    index = SQLiteIndex(tmp_path / "memory.db")
    await index.add([build_item("a", "text")])
    assert stat.S_IMODE(os.stat(index.path).st_mode) == 0o600  # noqa: PTH116  pathlib is refused in async code
    await index.aclose()


async def test_a_file_of_something_else_is_refused(tmp_path):
    """A journal, another database and a text are refused, and stay as they are."""
    path = tmp_path / "runs.db"
    store = SQLiteStore(path)
    assert not await store.followers()
    await store.aclose()
    before = path.read_bytes()
    index = SQLiteIndex(path)
    with pytest.raises((StoreError, CorruptError, MisuseError)):
        await index.add([build_item("a", "text")])
    await index.aclose()
    assert path.read_bytes() == before
