"""Vectors of memory items in a SQLite file of their own, searched by sqlite-vec.

sqlite-vec is an extension, which many builds of Python's `sqlite3` cannot load. So the file is opened with apsw, which
has a SQLite library of its own. Two libraries in one process must not open the same file, since closing it in one drops
the locks of the other (Source: sqlite.org/howtocorrupt.html, 2.2.1). Therefore the vectors are not in the file of the
items.

The file can be lost: it is derived from the items, which are then embedded again.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, NamedTuple

import attrs

from agentfsm._lib.plugins import require_extra
from agentfsm.core.errors import AgentError
from agentfsm.stores.sqlite.file import DatabaseFile, Parameters, SQLiteConnection, SQLiteCursor, SQLiteSchema

# End of the name of the file, after that of the items.
SUFFIX: Final = ".vectors"
# Bytes of a page, so that a vector of up to 4,000 dimensions stands whole in the tree. The default of 4,096 would put
# those of more than 960 dimensions on pages of their own.
PAGE_BYTES: Final = 16_384
# KiB of pages that a connection keeps: 100,000 vectors of 384 dimensions.
CACHE_KIB: Final = 65_536
# Largest number of a vector, which is kept in a byte for each dimension.
_MAX_INT8: Final = 127
SCHEMA: Final = SQLiteSchema(
    version=100,
    tables=frozenset({"vectors", "vector_set"}),
    statements=(
        """CREATE TABLE vectors (
            owner TEXT NOT NULL, number INTEGER NOT NULL, hash BLOB NOT NULL, vector BLOB NOT NULL,
            PRIMARY KEY (owner, number)
        ) STRICT, WITHOUT ROWID""",
        "CREATE INDEX vectors_number ON vectors (number)",
        "CREATE INDEX vectors_hash ON vectors (hash)",
        "CREATE TABLE vector_set (id TEXT NOT NULL) STRICT",
    ),
    upgrades={},
)


class VectorKey(NamedTuple):
    """An item as the file knows it."""

    owner: str
    """Word for the owner of the item."""

    number: int
    """Number of the item in its file, which is never given again."""

    hash: bytes
    """Hash of the item's text: items with the same text have the same vector."""


@attrs.define(eq=False)
class _Rows(SQLiteCursor):
    """The rows of a statement, read to the end, so that its errors are those of `execute`."""

    _rows: list[Any]

    def fetchone(self) -> Any:
        return self._rows.pop(0) if self._rows else None

    def fetchall(self) -> list[Any]:
        return self._rows


@attrs.frozen
class _APSWConnection(SQLiteConnection):
    """A connection of apsw with the interface of one of sqlite3."""

    _db: Any
    _error: type[Exception]

    def execute(self, sql: str, parameters: Parameters = (), /) -> _Rows:
        try:
            return _Rows(self._db.execute(sql, parameters).fetchall())
        except self._error as error:
            error.sqlite_errorcode = error.extendedresult  # type: ignore[attr-defined]  # apsw's and sqlite3's names
            raise

    def close(self) -> None:
        self._db.close()


def load_apsw() -> tuple[Any, str]:
    """Return the module apsw, and the path of sqlite-vec's library.

    Raises:
        ImportError: if they are not installed; the message names the extra.
    """
    with require_extra("Memory(embedder=...) with a SQLite index", "vec", "apsw", "sqlite_vec"):
        return import_module("apsw"), import_module("sqlite_vec").loadable_path()


def connect_apsw(path: str) -> SQLiteConnection:
    """Open an absolute path or a `file:` URI with apsw and sqlite-vec, in autocommit mode."""
    apsw, library = load_apsw()
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI
    db = apsw.Connection(path, flags=flags)
    try:
        db.enable_load_extension(True)
        db.load_extension(library)
        db.enable_load_extension(False)
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # of a new file
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    except BaseException:
        db.close()
        raise
    return _APSWConnection(db, apsw.Error)


@attrs.define(eq=False, repr=False, kw_only=True)
class VectorFile(DatabaseFile):
    """The vectors of the items of one file. Only the thread of the items uses it.

    A vector is kept as a byte for each dimension, in shares of its largest number. Its direction, which is all that is
    compared, moves by 0.13 degrees times the ratio of that number to their root mean square, usually half a degree.
    """

    @contextmanager
    def _begin_use(self, *, write: bool) -> Iterator[None]:
        """Run the block in a transaction; errors name this file."""
        try:
            with self.transaction(write=write):
                yield
        except AgentError:
            raise
        except Exception as error:
            raise self.translate_error(error) from error

    def read_set_id(self) -> str:
        """Return the id of the set of vectors; empty if the file is new."""
        with self._begin_use(write=False):
            row = self.execute("SELECT id FROM vector_set").fetchone()
            return "" if row is None else str(row[0])

    def begin_set(self, set_id: str) -> None:
        """Delete all vectors, and begin a set."""
        with self._begin_use(write=True):
            self.execute("DELETE FROM vectors")
            self.execute("DELETE FROM vector_set")
            self.execute("INSERT INTO vector_set VALUES (?)", (set_id,))

    def write(self, vectors: Iterable[tuple[VectorKey, Sequence[float]]]) -> None:
        """Keep vectors of items."""
        with self._begin_use(write=True):
            for key, vector in vectors:
                self.execute("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?, ?)", (*key, quantise(vector)))

    def copy(self, keys: Iterable[VectorKey]) -> set[int]:
        """Give items the vector of another one with the same text. Return the numbers of those that have got one."""
        with self._begin_use(write=True):
            return {key.number for key in keys if self._copy_one(key)}

    def _copy_one(self, key: VectorKey) -> bool:
        row = self.execute("SELECT vector FROM vectors WHERE hash = ? LIMIT 1", (key.hash,)).fetchone()
        if row is not None:
            self.execute("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?, ?)", (*key, row[0]))
        return row is not None

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete the vectors of items."""
        with self._begin_use(write=True):
            numbers_sql = "SELECT value FROM json_each(?)"
            self.execute(f"DELETE FROM vectors WHERE number IN ({numbers_sql})", (json.dumps([*numbers]),))  # noqa: S608

    def find_nearest(self, owners: Sequence[str], vector: Sequence[float], count: int) -> list[tuple[int, float]]:
        """Return the numbers of the owners' items whose vectors are most similar, with their cosines, best first."""
        sql = """SELECT number, vec_distance_cosine(vec_int8(vector), vec_int8(:wanted)) AS distance FROM vectors
            WHERE owner IN (SELECT value FROM json_each(:owners)) ORDER BY distance, number LIMIT :count"""
        values = {"wanted": quantise(vector), "owners": json.dumps([*owners]), "count": count}
        with self._begin_use(write=False):
            rows = self.execute(sql, values).fetchall()
        return [(number, max(0.0, 1 - distance)) for number, distance in rows if distance is not None]

    def compact(self) -> None:
        """Rewrite the file without free pages, and empty its log."""
        try:
            with self._begin_use(write=False):
                pass  # opens the file
            self.vacuum()
        except AgentError:
            raise
        except Exception as error:
            raise self.translate_error(error) from error
        finally:
            self.close_file()


def quantise(vector: Sequence[float]) -> bytes:
    """Return a vector as a signed byte for each dimension, in shares of its largest number."""
    most = max(map(abs, vector), default=0.0)
    return array("b", [round(each * _MAX_INT8 / most) if most else 0 for each in vector]).tobytes()
