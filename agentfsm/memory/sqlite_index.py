"""Memory items in a SQLite file, with full-text search by SQLite's FTS5."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import attrs

from agentfsm._lib.concurrency import start_in_thread
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.validation import NOT_NEGATIVE
from agentfsm.memory.item_rows import (
    COLUMNS,
    NOTES,
    NOTES_ON_WORDS,
    OWNER_CHARS,
    PREFIXED_COLUMNS,
    SESSION,
    TICK_S,
    ListSyntax,
    find_notes,
    hash_text,
    name_owner,
    other_model_error,
    read_row,
    write_filter,
    write_notes,
    write_row,
)
from agentfsm.memory.text_terms import TERMS_VERSION, write_terms
from agentfsm.memory.threaded_index import ThreadedIndex
from agentfsm.memory.vector_file import SCHEMA as VECTOR_SCHEMA
from agentfsm.memory.vector_file import SUFFIX, VectorFile, VectorKey, connect_apsw, load_apsw
from agentfsm.ports.memory_items import (
    DeletionProof,
    ItemFilter,
    ItemMatch,
    MemoryItem,
    Namespace,
)
from agentfsm.stores.sqlite.file import Connect, DatabaseFile, SQLiteSchema, connect_sqlite3
from agentfsm.stores.threaded.group_commit import GroupCommitWriter
from agentfsm.stores.threaded.lease_table import LeaseTable
from agentfsm.stores.threaded.outage import Outage

# Ranked items read at first for each one wanted, and the factor by which more are read if too few fit the filter.
OVERFETCH: Final = 1.25
FURTHER: Final = 8
# Seconds that a call waits for another process's transaction.
PATIENCE_S: Final = 30.0
# Items with a term that are counted; beyond, their number is estimated.
COUNTED_ITEMS: Final = 500
# Items that a rebuild of the text index reads at once.
REBUILT_ITEMS: Final = 1_000
_INDEX_OF_PROFILES: Final = "CREATE INDEX IF NOT EXISTS items_importance ON items (owner, kind, importance)"
# The terms are words already: the tokenizer `ascii` splits them at the spaces and leaves them as they are.
_TEXT_TABLES: Final = (
    """CREATE VIRTUAL TABLE items_text USING fts5 (
        terms, owner, content='items', content_rowid='number', tokenize='ascii'
    )""",
    "INSERT INTO items_text (items_text, rank) VALUES ('rank', 'bm25(1.0, 0.0)')",
    "CREATE VIRTUAL TABLE items_words USING fts5vocab (items_text, col)",
    "CREATE TABLE text_terms (version INTEGER NOT NULL) STRICT",
)
_INDEX_OF_FOLLOWERS: Final = "CREATE INDEX items_followed ON items (follows) WHERE follows <> ''"
SCHEMA: Final = SQLiteSchema(
    version=200,
    tables=frozenset(
        {
            "items",
            "items_words",
            "text_terms",
            "items_text",
            "deletions",
            "forgotten_items",
            "forgotten_owners",
            "released_items",
            "stale_vectors",
            "vector_model",
        }
    ),
    statements=(
        """CREATE TABLE items (
            number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, user TEXT NOT NULL,
            kind TEXT NOT NULL, slot TEXT NOT NULL, replaces TEXT NOT NULL, follows TEXT NOT NULL,
            imported_id TEXT NOT NULL, source_run TEXT, source_version INTEGER,
            session TEXT NOT NULL, place INTEGER NOT NULL, level INTEGER NOT NULL, valid_from REAL NOT NULL,
            valid_to REAL NOT NULL, recorded_at REAL NOT NULL, held INTEGER NOT NULL, labels TEXT NOT NULL,
            importance REAL NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL,
            terms TEXT NOT NULL, owner TEXT NOT NULL
        ) STRICT""",
        "CREATE INDEX items_place ON items (owner, session, place)",
        "CREATE INDEX items_slot ON items (owner, slot, valid_from) WHERE slot <> ''",
        "CREATE INDEX items_replaced ON items (replaces) WHERE replaces <> ''",
        "CREATE INDEX items_source ON items (source_run) WHERE source_run IS NOT NULL",
        _INDEX_OF_FOLLOWERS,
        _INDEX_OF_PROFILES,
        *_TEXT_TABLES,
        f"INSERT INTO text_terms VALUES ({TERMS_VERSION})",  # noqa: S608
        """CREATE TABLE deletions (
            number INTEGER PRIMARY KEY, at REAL NOT NULL, by TEXT NOT NULL, reason TEXT NOT NULL, items INTEGER NOT NULL
        ) STRICT""",
        "CREATE TABLE forgotten_items (id TEXT PRIMARY KEY) STRICT, WITHOUT ROWID",
        "CREATE TABLE forgotten_owners (owner TEXT PRIMARY KEY, until REAL NOT NULL) STRICT, WITHOUT ROWID",
        "CREATE TABLE released_items (id TEXT PRIMARY KEY, at REAL NOT NULL, by TEXT NOT NULL) STRICT, WITHOUT ROWID",
        # One row once the memory has an embedder. `vectors` is the id of the set in the file of the vectors.
        "CREATE TABLE vector_model (model TEXT NOT NULL, dims INTEGER NOT NULL, vectors TEXT NOT NULL) STRICT",
        # Items without a vector, and deleted items whose vector is still in the other file: no transaction spans both.
        "CREATE TABLE stale_vectors (number INTEGER PRIMARY KEY) STRICT",
    ),
    upgrades={
        100: (
            "DROP TABLE items_text",
            "ALTER TABLE items DROP COLUMN pairs",
            "ALTER TABLE items DROP COLUMN day",
            "ALTER TABLE items ADD COLUMN terms TEXT NOT NULL DEFAULT ''",
            "ALTER TABLE items ADD COLUMN follows TEXT NOT NULL DEFAULT ''",
            "ALTER TABLE items ADD COLUMN imported_id TEXT NOT NULL DEFAULT ''",
            _INDEX_OF_FOLLOWERS,
            _INDEX_OF_PROFILES,
            *_TEXT_TABLES,
            "INSERT INTO text_terms VALUES (0)",  # the next transaction of the index writes them
        )
    },
)

_INSERT: Final = f"INSERT INTO items ({COLUMNS}, terms, owner) VALUES (NULL, {', '.join('?' * 23)})"  # noqa: S608
_INSERT_TEXT: Final = "INSERT INTO items_text (rowid, terms, owner) VALUES (?, ?, ?)"
_DELETE_TEXT: Final = (
    "INSERT INTO items_text (items_text, rowid, terms, owner) "
    "SELECT 'delete', number, terms, owner FROM items WHERE number = ?"
)
_LISTS: Final = ListSyntax(
    contains="{column} IN (SELECT value FROM json_each(:{name}))",
    overlaps="EXISTS (SELECT 1 FROM json_each(i.labels) l WHERE l.value IN (SELECT value FROM json_each(:{name})))",
)


@attrs.define(eq=False, repr=False, kw_only=True)
class _ItemFile(DatabaseFile):
    """The operations on the tables. Only the index's thread uses it."""

    vectors: VectorFile
    """The file of the vectors, which is opened at the first use of vectors."""

    leases: LeaseTable = attrs.field(factory=lambda: LeaseTable(1.0, 1.0, ""))
    """No leases: items have no owners among the workers."""

    _model: tuple[str, int] = attrs.field(default=("", 0), init=False)
    """Model and dimensions of the embedder."""

    def renew_leases(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Close the files; the next transaction opens them again."""
        self.close_file()
        self.vectors.close_file()

    def translate_error(self, error: Exception) -> AgentError:
        """Return the AgentError for an error, with advice if this SQLite cannot search text."""
        if "no such module: fts5" in str(error):
            return MisuseError(
                f"{self.path}: this SQLite has no FTS5, which searches text: use a Python whose sqlite3 has it, or "
                'keep the memory in PostgreSQL: Memory("postgresql://...")'
            )
        return super().translate_error(error)

    def maintain(self) -> None:
        """Move the pages of the logs into the files."""
        super().maintain()
        self.vectors.maintain()

    def add(self, items: Sequence[MemoryItem]) -> list[MemoryItem]:
        """Insert the items that are new. Those that are or follow from a forgotten one are forgotten, too."""
        added: list[MemoryItem] = []
        for item in items:
            if self._was_forgotten(item):
                self._note_forgotten([item.id], [name_owner(item.namespace)], with_words=True)
            elif self.execute("SELECT 1 FROM items WHERE id = ?", (item.id,)).fetchone() is None:
                added.append(self._insert(item))
        return added

    def _was_forgotten(self, item: MemoryItem) -> bool:
        sql = "SELECT 1 FROM forgotten_items WHERE id IN (SELECT value FROM json_each(?))"
        if self.execute(sql, (json.dumps(find_notes(item)),)).fetchone() is not None:
            return True
        owner = name_owner(item.namespace)
        until = self.execute("SELECT until FROM forgotten_owners WHERE owner = ?", (owner,)).fetchone()
        return until is not None and bool(item.recorded_at <= until[0])

    def _insert(self, item: MemoryItem) -> MemoryItem:
        owner = name_owner(item.namespace)
        if item.place == 0:
            newest = "SELECT max(place) FROM items WHERE owner = ? AND session = ?"
            (place,) = self.execute(newest, (owner, item.session)).fetchone()
            item = attrs.evolve(item, place=int(place or 0) + 1)
        if item.held and self.execute("SELECT 1 FROM released_items WHERE id = ?", (item.id,)).fetchone() is not None:
            item = attrs.evolve(item, held=False)
        terms = write_terms(item.text, item.valid_from)
        self.execute(_INSERT, (*write_row(item), terms, owner))
        (number,) = self.execute("SELECT last_insert_rowid()").fetchone()
        self.execute(_INSERT_TEXT, (number, terms, owner))
        self.execute("INSERT INTO stale_vectors SELECT ? WHERE EXISTS (SELECT 1 FROM vector_model)", (number,))
        return item

    def has_old_terms(self) -> bool:
        """Return whether another version wrote the terms."""
        return bool(self.execute("SELECT version <> ? FROM text_terms", (TERMS_VERSION,)).fetchone()[0])

    def rebuild_text(self) -> int:
        """Write the terms of all items again, and build the text index from them."""
        (count,) = self.execute("SELECT count(*) FROM items").fetchone()
        newest = "SELECT number, text, valid_from FROM items WHERE number > ? ORDER BY number LIMIT ?"
        after = 0
        while rows := self.execute(newest, (after, REBUILT_ITEMS)).fetchall():
            for number, text, valid_from in rows:
                self.execute("UPDATE items SET terms = ? WHERE number = ?", (write_terms(text, valid_from), number))
            after = rows[-1][0]
        self.execute("INSERT INTO items_text (items_text) VALUES ('rebuild')")
        self.execute("UPDATE text_terms SET version = ?", (TERMS_VERSION,))
        return int(count)

    def count_terms(self, terms: Collection[str], owners: Collection[Namespace]) -> tuple[int, dict[str, int]]:
        """Count the items of the owners. The count of a common term is estimated from its first items."""
        names = json.dumps([name_owner(each) for each in owners])
        sql = "SELECT count(*) FROM items WHERE owner IN (SELECT value FROM json_each(?))"
        (total,) = self.execute(sql, (names,)).fetchone()
        (newest,) = self.execute("SELECT max(number) FROM items").fetchone()
        sql = "SELECT count(*), max(rowid) FROM (SELECT rowid FROM items_text WHERE items_text MATCH ? LIMIT ?)"
        counts: dict[str, int] = {}
        for term in terms:
            found, last = self.execute(sql, (_write_match([term], owners), COUNTED_ITEMS)).fetchone()
            counts[term] = found if found < COUNTED_ITEMS else min(total, found * newest // last)
        return total, counts

    def list_words(self, beginning: str, lengths: range, owners: Collection[Namespace]) -> list[str]:  # noqa: ARG002
        """Return words of all items of the file."""
        sql = """SELECT term FROM items_words
            WHERE term >= ? AND term < ? AND col = 'terms' AND length(term) BETWEEN ? AND ?"""
        values = (beginning, chr(ord(beginning) + 1), lengths[0], lengths[-1])
        return [term for (term,) in self.execute(sql, values).fetchall()]

    def search_terms(self, weights: Mapping[str, float], where: ItemFilter, limit: int) -> list[ItemMatch]:
        """Return the best matches that fit the filter."""
        match = _write_match(weights, where.namespaces)
        sql = "SELECT rowid, -rank FROM items_text WHERE items_text MATCH ? ORDER BY rank LIMIT ?"
        return self._rank_fitting(lambda count: self.execute(sql, (match, count)).fetchall(), where, limit)

    def _rank_fitting(
        self, rank: Callable[[int], Sequence[tuple[int, float]]], where: ItemFilter, limit: int
    ) -> list[ItemMatch]:
        """Return the first items of a ranking that fit the filter. More are read until enough of them do.

        Args:
            rank: Returns the numbers of the best items of the owners, at most as many as given, with their scores.
            where: The filter.
            limit: Number of items.
        """
        condition, values = _write_filter(where)
        sql = (
            f"SELECT n.key, i.id, {SESSION}, i.place, i.terms FROM json_each(:numbers) n "  # noqa: S608
            f"JOIN items i ON i.number = n.value WHERE {condition}"
        )
        count = int(limit * OVERFETCH)
        while True:
            ranked = rank(count)
            numbers = json.dumps([number for number, _ in ranked])
            rows = sorted(self.execute(sql, {**values, "numbers": numbers}).fetchall())[:limit]
            if len(rows) == limit or len(ranked) < count:
                return [
                    ItemMatch(item_id, session, place, ranked[key][1], terms)
                    for key, item_id, session, place, terms in rows
                ]
            count *= FURTHER

    def find_neighbours(self, matches: Sequence[ItemMatch], distance: int, where: ItemFilter) -> list[ItemMatch]:
        """Return the items near others."""
        condition, values = _write_filter(where)
        ranges = json.dumps([*_merge_ranges(matches, distance)])
        sql = (
            f"SELECT i.id, {SESSION}, i.place, 0.0, i.terms FROM json_each(:ranges) p "  # noqa: S608
            "JOIN items i ON i.owner = p.value ->> 0 AND i.session = p.value ->> 1 "
            f"AND i.place BETWEEN p.value ->> 2 AND p.value ->> 3 WHERE {condition}"
        )
        return [ItemMatch(*row) for row in self.execute(sql, {**values, "ranges": ranges}).fetchall()]

    def get(self, ids: Collection[str]) -> list[MemoryItem]:
        """Return the items with these ids."""
        sql = f"SELECT {COLUMNS} FROM items WHERE id IN (SELECT value FROM json_each(?))"  # noqa: S608
        return [read_row(row) for row in self.execute(sql, (json.dumps([*ids]),)).fetchall()]

    def read(self, where: ItemFilter, after: str, limit: int) -> list[MemoryItem]:
        """Return items in the order of their ids."""
        condition, values = _write_filter(where)
        sql = f"SELECT {PREFIXED_COLUMNS} FROM items i WHERE i.id > :after AND {condition} ORDER BY i.id LIMIT :limit"  # noqa: S608
        rows = self.execute(sql, {**values, "after": after, "limit": limit}).fetchall()
        return [read_row(row) for row in rows]

    def newest_time(self) -> float:
        """Return the time of the newest record; minus infinity if there is none."""
        (newest,) = self.execute("SELECT max(recorded_at) FROM items").fetchone()
        (until,) = self.execute("SELECT max(until) FROM forgotten_owners").fetchone()
        return max(-math.inf if newest is None else newest, -math.inf if until is None else until + TICK_S)

    def find_forgotten(self, ids: Collection[str]) -> list[str]:
        """Return those of the ids whose items were forgotten."""
        sql = "SELECT id FROM forgotten_items WHERE id IN (SELECT value FROM json_each(?))"
        return [found for (found,) in self.execute(sql, (json.dumps([*ids]),)).fetchall()]

    def forget(self, ids: Collection[str], proof: Callable[[int], DeletionProof], *, with_words: bool = False) -> int:
        """Delete items, and note their ids."""
        self._check_reach()
        sql = "SELECT id, owner FROM items WHERE id IN (SELECT value FROM json_each(?))"
        owners = dict(self.execute(sql, (json.dumps([*ids]),)).fetchall())
        self._note_forgotten(ids, [owners.get(each, "") for each in ids], with_words=with_words)
        count = self._delete("id IN (SELECT value FROM json_each(:ids))", {"ids": json.dumps([*ids])})
        self._record_deletion(proof(count))
        return count

    def _note_forgotten(self, ids: Collection[str], owners: Collection[str], *, with_words: bool) -> None:
        notes = json.dumps(write_notes(zip(ids, owners, strict=True), NOTES_ON_WORDS if with_words else NOTES))
        self.execute("INSERT OR IGNORE INTO forgotten_items SELECT value FROM json_each(?)", (notes,))

    def forget_sources(self, run_ids: Collection[str], proof: Callable[[int], DeletionProof]) -> int:
        """Delete the items that come from these runs, with what corrects or ends them, and note their ids."""
        sql = (
            "WITH RECURSIVE found(id) AS (SELECT id FROM items WHERE source_run IN (SELECT value FROM json_each(?)) "
            "UNION SELECT i.id FROM found JOIN items i ON i.replaces = found.id AND i.replaces <> '' "
            "OR i.follows = found.id AND i.follows <> '' AND i.valid_to < 9e999) SELECT id FROM found"
        )
        return self.forget([each for (each,) in self.execute(sql, (json.dumps([*run_ids]),)).fetchall()], proof)

    def list_sources(self, after: str, limit: int) -> list[str]:
        """Return ids of runs from which items come, in order."""
        sql = "SELECT DISTINCT source_run FROM items WHERE source_run > ? ORDER BY source_run LIMIT ?"
        return [each for (each,) in self.execute(sql, (after, limit)).fetchall()]

    def list_owners(self) -> list[Namespace]:
        """Return the owners of items, in order."""
        found = self.execute('SELECT DISTINCT tenant, "user" FROM items ORDER BY tenant, "user"').fetchall()
        return [Namespace(tenant=tenant, user=user) for tenant, user in found]

    def forget_owner(self, namespace: Namespace, proof: Callable[[int], DeletionProof]) -> int:
        """Delete all items of an owner, and note the hash of its name."""
        self._check_reach()
        owner = name_owner(namespace)
        ids = [each for (each,) in self.execute("SELECT id FROM items WHERE owner = ?", (owner,)).fetchall()]
        self._note_forgotten(ids, [owner] * len(ids), with_words=True)
        count = self._delete("owner = :owner", {"owner": owner})
        deletion = proof(count)
        self.execute(
            "INSERT INTO forgotten_owners VALUES (?, ?) ON CONFLICT (owner) DO UPDATE SET until = max(until, ?)",
            (owner, deletion.at, deletion.at),
        )
        self._record_deletion(deletion)
        return count

    def release(self, ids: Collection[str], at: float, by: str) -> int:
        """Let held items be found."""
        held = "SELECT id FROM items WHERE held AND id IN (SELECT value FROM json_each(?))"
        found = [each for (each,) in self.execute(held, (json.dumps([*ids]),)).fetchall()]
        for each in found:
            self.execute("INSERT OR IGNORE INTO released_items VALUES (?, ?, ?)", (each, at, by))
            self.execute("UPDATE items SET held = 0 WHERE id = ?", (each,))
        return len(found)

    def drop_derived(self) -> int:
        """Delete the items with a source."""
        return self._delete("source_run IS NOT NULL", {})

    def _delete(self, condition: str, values: Mapping[str, Any]) -> int:
        """Delete items and their words. Merging the parts of the text index removes the words for good."""
        numbers = self.execute(f"SELECT number FROM items WHERE {condition}", values).fetchall()  # noqa: S608
        has_vectors = self.read_model() is not None
        for (number,) in numbers:
            if has_vectors:
                self.execute("INSERT OR IGNORE INTO stale_vectors VALUES (?)", (number,))
            self.execute(_DELETE_TEXT, (number,))
            self.execute("DELETE FROM items WHERE number = ?", (number,))
        if numbers:
            self.execute("INSERT INTO items_text (items_text) VALUES ('optimize')")
        return len(numbers)

    def _record_deletion(self, proof: DeletionProof) -> None:
        self.execute("INSERT INTO deletions VALUES (NULL, ?, ?, ?, ?)", (proof.at, proof.by, proof.reason, proof.items))

    def list_deletions(self) -> list[DeletionProof]:
        """Return the records of deletions, oldest first."""
        rows = self.execute("SELECT at, by, reason, items FROM deletions ORDER BY number").fetchall()
        return [DeletionProof(at=at, by=by, reason=reason, items=items) for at, by, reason, items in rows]

    # Vectors.

    def read_model(self) -> tuple[str, int] | None:
        """Return the model and the dimensions of the vectors; None if there are none."""
        row = self.execute("SELECT model, dims FROM vector_model").fetchone()
        return None if row is None else (row[0], row[1])

    def _check_reach(self) -> None:
        """Refuse to forget items whose vectors could not be deleted.

        Raises:
            ImportError: if there are vectors, and what opens their file is not installed.
        """
        if self.read_model() is not None:
            load_apsw()

    def _check_model(self) -> None:
        found = self.read_model()
        if found != self._model:
            raise other_model_error(found or ("", 0), self._model)

    def use_vectors(self, model: str, dims: int) -> None:
        """Note the model. Begin anew for another one, or if the file of the vectors is not the one it was."""
        load_apsw()
        self._model = model, dims
        if self.read_model() == self._model:
            (set_id,) = self.execute("SELECT vectors FROM vector_model").fetchone()
            if self.vectors.read_set_id() == set_id:
                return
        set_id = token_hex(16)
        self.execute("DELETE FROM vector_model")
        self.execute("INSERT INTO vector_model VALUES (?, ?, ?)", (model, dims, set_id))
        self.execute("INSERT OR IGNORE INTO stale_vectors SELECT number FROM items")
        self.vectors.begin_set(set_id)  # if this is not committed here, the next call begins anew

    def drop_vectors(self) -> None:
        """Delete all vectors."""
        if self.read_model() is not None:
            self.execute("DELETE FROM vector_model")
            self.execute("DELETE FROM stale_vectors")
            self.vectors.begin_set("")

    def drop_unused_vectors(self) -> None:
        """Delete the vectors of deleted items."""
        sql = "SELECT number FROM stale_vectors WHERE number NOT IN (SELECT number FROM items)"
        if numbers := [number for (number,) in self.execute(sql).fetchall()]:
            self.vectors.delete(numbers)
            self._note_embedded(numbers)

    def _note_embedded(self, numbers: Collection[int]) -> None:
        sql = "DELETE FROM stale_vectors WHERE number IN (SELECT value FROM json_each(?))"
        self.execute(sql, (json.dumps([*numbers]),))

    def read_unembedded(self, limit: int) -> list[MemoryItem]:
        """Return items without a vector, oldest first."""
        sql = f"""SELECT {PREFIXED_COLUMNS} FROM stale_vectors s JOIN items i ON i.number = s.number
            ORDER BY s.number LIMIT ?"""  # noqa: S608
        return [read_row(row) for row in self.execute(sql, (limit,)).fetchall()]

    def _read_keys(self, ids: Collection[str]) -> dict[str, VectorKey]:
        """Return the keys of the items that have no vector, by id."""
        sql = """SELECT i.id, i.owner, i.number, i.text FROM stale_vectors s JOIN items i ON i.number = s.number
            WHERE i.id IN (SELECT value FROM json_each(?))"""
        rows = self.execute(sql, (json.dumps([*ids]),)).fetchall()
        return {item_id: VectorKey(owner, number, hash_text(text)) for item_id, owner, number, text in rows}

    def copy_vectors(self, ids: Collection[str]) -> set[str]:
        """Give items the vectors of others with the same text; return the ids of those that have one now."""
        self._check_model()
        keys = self._read_keys(ids)
        numbers = self.vectors.copy(keys.values())
        self._note_embedded(numbers)
        return {each for each in ids if each not in keys or keys[each].number in numbers}

    def add_vectors(self, vectors: Mapping[str, Sequence[float]]) -> None:
        """Keep vectors of items."""
        self._check_model()
        keys = self._read_keys(vectors)
        self.vectors.write((key, vectors[each]) for each, key in keys.items())
        self._note_embedded([key.number for key in keys.values()])

    def search_vector(self, vector: Sequence[float], where: ItemFilter, limit: int) -> list[ItemMatch]:
        """Return the nearest items that fit the filter."""
        self._check_model()
        owners = [name_owner(each) for each in where.namespaces]
        return self._rank_fitting(lambda count: self.vectors.find_nearest(owners, vector, count), where, limit)


def _merge_ranges(matches: Sequence[ItemMatch], distance: int) -> Iterator[tuple[str, str, int, int]]:
    """Yield owner, session, first and last place of the surroundings of matches; none of them overlap."""
    session, first, last = "", 0, 0
    for match in sorted({(match.session, match.place) for match in matches if match.session}):
        if match[0] != session or match[1] - distance > last:
            if session:
                yield session[:OWNER_CHARS], session[OWNER_CHARS:], first, last
            session, first = match[0], match[1] - distance
        last = match[1] + distance
    if session:
        yield session[:OWNER_CHARS], session[OWNER_CHARS:], first, last


def _as_path(path: str | os.PathLike[str]) -> str:
    return os.fspath(path)


@attrs.define(eq=False, repr=False)
class SQLiteIndex(ThreadedIndex[_ItemFile]):
    """An index in a SQLite file, which several processes of one machine may share.

    With an embedder, the vectors are in a second file, whose name ends in `.vectors`; it needs the extra `vec`.

    A new file is readable only for its owner (mode 0600).
    """

    path: str = attrs.field(default="", converter=_as_path)
    """Path of the file, which is created at first use. Empty: a temporary file, which is removed when the index is
    closed or the process ends.
    """

    connect: Connect = attrs.field(default=connect_sqlite3, kw_only=True)
    """Function that opens the file, given its absolute path. Default `sqlite3.connect`; tests inject faults with it."""

    patience_s: float = attrs.field(default=PATIENCE_S, kw_only=True, validator=NOT_NEGATIVE)
    """Seconds that a call waits for another process's transaction before it fails, 0 or more."""

    _folder: Callable[[], object] | None = attrs.field(default=None, init=False)
    """Removes the folder of a temporary file; None for a file that was named."""

    def __attrs_post_init__(self) -> None:
        if not self.path:
            folder = tempfile.mkdtemp(prefix="agentfsm-memory-")
            self._folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self.path = str(Path(folder) / "memory.db")
        self._writer = GroupCommitWriter(self._create_file())

    async def aclose(self) -> None:
        """Close the file and end the thread."""
        await super().aclose()
        if self._folder is not None:
            self._folder()

    async def _remove_remains(self) -> None:
        """Delete the vectors, and rewrite the files without free pages and their logs, where content would remain."""
        await self.drop_unused_vectors()
        await start_in_thread(self._vacuum).wait()

    def _vacuum(self) -> None:
        file = self._create_file()
        try:
            with file.transaction(write=False):
                has_vectors = file.read_model() is not None
            file.vacuum()
        except AgentError:
            raise
        except Exception as error:
            raise file.translate_error(error) from error
        finally:
            file.close_file()
        if has_vectors:
            file.vectors.compact()

    def _create_file(self) -> _ItemFile:
        path, outage = str(Path(self.path).absolute()), Outage(1.0)
        vectors = VectorFile(
            path=path + SUFFIX,
            schema=VECTOR_SCHEMA,
            connect=connect_apsw,
            patience_s=self.patience_s,
            outage=outage,
            library="apsw",
        )
        return _ItemFile(
            path=path,
            schema=SCHEMA,
            connect=self.connect,
            patience_s=self.patience_s,
            outage=outage,
            vectors=vectors,
        )


def _write_filter(where: ItemFilter) -> tuple[str, dict[str, Any]]:
    """Return the condition on the item `i`, and its values, with lists as JSON."""
    condition, values = write_filter(where, _LISTS)
    return condition, {name: json.dumps(each) if isinstance(each, list) else each for name, each in values.items()}


def _write_match(terms: Collection[str], owners: Collection[Namespace]) -> str:
    """Return a query of FTS5 for the items of the owners that have any of the terms."""
    names = " OR ".join(f'"{name_owner(each)}"' for each in owners)
    words = " OR ".join(f'"{term[:-1]}" *' if term[-1] == "*" else f'"{term}"' for term in terms)
    return f"owner : ({names}) AND terms : ({words})"
