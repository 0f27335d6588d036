"""Memory items in a PostgreSQL database, with an index of their terms."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from secrets import token_hex
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
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
    name_owner,
    other_model_error,
    read_row,
    write_filter,
    write_notes,
    write_row,
)
from agentfsm.memory.text_terms import TERMS_VERSION, write_terms
from agentfsm.memory.threaded_index import ThreadedIndex
from agentfsm.ports.memory_items import DeletionProof, ItemFilter, ItemMatch, MemoryItem, Namespace
from agentfsm.ports.store import Durability
from agentfsm.stores.postgres.connection import PostgresAddress, PostgresConnection, PostgresTables, RowCursor
from agentfsm.stores.postgres.store import SCHEMA_NAME
from agentfsm.stores.rules import PATIENCE_S
from agentfsm.stores.threaded.group_commit import GroupCommitWriter
from agentfsm.stores.threaded.lease_table import LeaseTable

# Largest position of a word that PostgreSQL keeps. Words behind it are found, but not as part of a phrase.
MAX_POSITION: Final = 16_383
# Seconds that the row of a process in `workers` counts; it marks commits only.
WORKER_S: Final = 60.0
# Newest items of an owner whose words may correct a misspelled one.
SPELLED_ITEMS: Final = 5_000
# Items in one statement.
GROUP_ITEMS: Final = 500

_PLACEHOLDER: Final = re.compile(r"(?<!:):([a-z_]+)")
_LISTS: Final = ListSyntax(
    contains="{column} = ANY(:{name})",
    overlaps="EXISTS (SELECT 1 FROM jsonb_array_elements_text(i.labels::jsonb) l WHERE l = ANY(:{name}))",
)

TABLES: Final = PostgresTables(
    version=200,
    names=frozenset(
        {
            "layout",
            "workers",
            "items",
            "deletions",
            "forgotten_items",
            "forgotten_owners",
            "released_items",
            "unembedded",
            "vector_model",
            "text_terms",
        }
    ),
    statements="""
        CREATE TABLE layout (version integer NOT NULL);
        CREATE TABLE workers (name text PRIMARY KEY, until float8 NOT NULL, mark bigint NOT NULL);
        CREATE TABLE items (
            number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text COLLATE "C" NOT NULL UNIQUE,
            tenant text NOT NULL, "user" text NOT NULL, kind text NOT NULL, slot text NOT NULL,
            replaces text COLLATE "C" NOT NULL, follows text COLLATE "C" NOT NULL, imported_id text NOT NULL,
            source_run text, source_version bigint, session text NOT NULL, place bigint NOT NULL,
            level smallint NOT NULL, valid_from float8 NOT NULL, valid_to float8 NOT NULL, recorded_at float8 NOT NULL,
            held boolean NOT NULL, labels text NOT NULL, importance float8 NOT NULL, text text NOT NULL,
            data text NOT NULL, words tsvector NOT NULL, owner text NOT NULL, terms text NOT NULL
        );
        CREATE INDEX items_place ON items (owner, session, place);
        CREATE INDEX items_slot ON items (owner, slot, valid_from) WHERE slot <> '';
        CREATE INDEX items_replaced ON items (replaces) WHERE replaces <> '';
        CREATE INDEX items_followed ON items (follows) WHERE follows <> '';
        CREATE INDEX items_source ON items (source_run) WHERE source_run IS NOT NULL;
        CREATE INDEX items_importance ON items (owner, kind, importance);
        CREATE INDEX items_recorded ON items (recorded_at);
        CREATE INDEX items_words ON items USING gin (words);
        CREATE TABLE deletions (
            number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at float8 NOT NULL, by text NOT NULL,
            reason text NOT NULL, items bigint NOT NULL
        );
        CREATE TABLE forgotten_items (id text PRIMARY KEY);
        CREATE TABLE forgotten_owners (owner text PRIMARY KEY, until float8 NOT NULL);
        CREATE TABLE released_items (id text PRIMARY KEY, at float8 NOT NULL, by text NOT NULL);
        CREATE TABLE vector_model (model text NOT NULL, dims integer NOT NULL);
        CREATE TABLE unembedded (number bigint PRIMARY KEY REFERENCES items ON DELETE CASCADE);
        CREATE TABLE text_terms (version integer NOT NULL);
        INSERT INTO text_terms VALUES (0);
    """,
    upgrades={
        100: """
            ALTER TABLE items ADD COLUMN terms text NOT NULL DEFAULT '';
            ALTER TABLE items ADD COLUMN follows text COLLATE "C" NOT NULL DEFAULT '';
            ALTER TABLE items ADD COLUMN imported_id text NOT NULL DEFAULT '';
            CREATE TABLE text_terms (version integer NOT NULL);
            INSERT INTO text_terms VALUES (0);
        """  # the next transaction of the index writes the terms
    },
    late_indexes={
        "items_importance": "items (owner, kind, importance)",
        "items_followed": "items (follows) WHERE follows <> ''",
    },
)

# Dimensions up to which pgvector builds an index. Longer vectors are compared one by one.
MAX_INDEXED_DIMS: Final = 2_000
# Vectors that one search reads at most, to find enough that fit the filter. pgvector's default is 20,000.
MAX_SCANNED: Final = 1_000_000
# pgvector may be in any schema of the database.
_USE_EXTENSION: Final = """
SELECT set_config('search_path', current_setting('search_path') || ', ' || quote_ident(nspname), true)
FROM pg_extension JOIN pg_namespace ON pg_namespace.oid = extnamespace WHERE extname = 'vector'
"""

# Items with the same text have the same vector.
_TEXT_HASH: Final = "substring(sha256(convert_to(i.text, 'UTF8')) FOR 16)"

_ROW: Final = f"({', '.join(['%s'] * 21)}, %s::tsvector, %s, %s)"
_INSERT: Final = f"INSERT INTO items ({COLUMNS.removeprefix('number, ')}, words, owner, terms) VALUES "  # noqa: S608
# Items with rare terms come first. The exact ranking follows outside of the database, the same for all indexes.
_SEARCH: Final = """
WITH weighed AS MATERIALIZED (
    SELECT term::tsquery, weight FROM unnest(:terms::text[], :weights::float8[]) AS given (term, weight)
), hits AS MATERIALIZED (
    SELECT i.id, {session} AS session, i.place, i.number, i.words, i.terms FROM items i
    WHERE i.words @@ :wanted::tsquery AND {condition}
)
SELECT id, session, place, (
    SELECT sum(weight * (1 + ts_rank('{{1, 1, 1, 1}}', words, term))) FROM weighed WHERE words @@ term
) / (1 + 0.2 * ln(1 + length(words))) AS score, terms FROM hits ORDER BY score DESC, number LIMIT :limit
"""


@attrs.define(eq=False, repr=False, kw_only=True)
class _ItemDatabase(PostgresConnection):
    """The operations on the tables. Only the index's thread uses it."""

    leases: LeaseTable
    """No leases: items have no owners among the workers."""

    _has_written: bool = attrs.field(default=False, init=False)

    _model: tuple[str, int] = attrs.field(default=("", 0), init=False)
    """Model and dimensions of the embedder."""

    @contextmanager
    def transaction(
        self,
        *,
        write: bool,
        durability: Durability = "full",
        runs: Collection[str] = (),  # noqa: ARG002  items are of no run
    ) -> Iterator[None]:
        """Run the block in one transaction. Those that write follow one another, so that places are given once."""
        with self.open_transaction(write=write, durability=durability):
            if write:
                self.prepend("SELECT pg_advisory_xact_lock(hashtextextended(%s, 7))", self.schema)
                self._has_written = True
            yield

    def wait_to_retry(self, error: Exception) -> bool:
        """Wait a little if the error is transient. Return whether to execute the same jobs again."""
        return self.back_off(error)

    def renew_leases(self) -> None:
        """Do nothing."""

    def maintain(self) -> None:
        """Do nothing: the server maintains its tables."""

    def close(self) -> None:
        """Remove the row of this worker, and close the connection."""
        try:
            if self._has_written:
                with self.transaction(write=True, durability="normal"):
                    self.execute("DELETE FROM workers WHERE name = %s OR until < %s", (self.worker_name, 0.0))
        finally:
            self._has_written = False
            self.disconnect()

    def query(self, sql: str, values: Mapping[str, Any]) -> RowCursor:
        """Run a statement with `:name` for its values."""
        names: list[str] = []

        def replace(found: re.Match[str]) -> str:
            names.append(found[1])
            return "%s"

        return self.execute(_PLACEHOLDER.sub(replace, sql), [values[name] for name in names])

    def _select(self, sql: str, **values: Any) -> list[tuple[Any, ...]]:
        return self.query(sql, values).fetchall()

    def add(self, items: Sequence[MemoryItem]) -> list[MemoryItem]:
        """Insert the items that are new. Those that are or follow from a forgotten one are forgotten, too."""
        ids = [item.id for item in items]
        owners = [name_owner(item.namespace) for item in items]
        seen = {each for (each,) in self._select("SELECT id FROM items WHERE id = ANY(:ids)", ids=ids)}
        notes = [note for item in items for note in find_notes(item)]
        forgotten = {each for (each,) in self._select("SELECT id FROM forgotten_items WHERE id = ANY(:ids)", ids=notes)}
        until = dict(
            self._select("SELECT owner, until FROM forgotten_owners WHERE owner = ANY(:owners)", owners=owners)
        )
        released = {each for (each,) in self._select("SELECT id FROM released_items WHERE id = ANY(:ids)", ids=ids)}
        newest = """SELECT owner, session, max(place) FROM items JOIN unnest(:owners::text[], :sessions::text[])
            AS wanted (owner, session) USING (owner, session) GROUP BY owner, session"""
        sessions = [item.session for item in items]
        places = {(owner, each): place for owner, each, place in self._select(newest, owners=owners, sessions=sessions)}
        added: list[MemoryItem] = []
        for item, owner in zip(items, owners, strict=True):
            if not forgotten.isdisjoint(find_notes(item)) or item.recorded_at <= until.get(owner, -math.inf):
                forgotten |= {*write_notes([(item.id, owner)], NOTES_ON_WORDS)}
                continue
            if item.id in seen:
                continue
            seen.add(item.id)
            group = owner, item.session
            new = attrs.evolve(
                item, place=item.place or places.get(group, 0) + 1, held=item.held and item.id not in released
            )
            places[group] = max(places.get(group, 0), new.place)
            added.append(new)
        if left_out := [item for item in items if item.id in forgotten]:
            self._note_forgotten([(each.id, name_owner(each.namespace)) for each in left_out], with_words=True)
        for start in range(0, len(added), GROUP_ITEMS):
            self._insert(added[start : start + GROUP_ITEMS])
        if added and self._read_model() is not None:
            self._select(
                "INSERT INTO unembedded SELECT number FROM items WHERE id = ANY(:ids) RETURNING 1",
                ids=[item.id for item in added],
            )
        return added

    def _insert(self, items: Sequence[MemoryItem]) -> None:
        values: list[Any] = []
        for item in items:
            owner = name_owner(item.namespace)
            terms = write_terms(item.text, item.valid_from)
            values += [*write_row(item), _write_vector_of(terms, owner), owner, terms]
        self.execute(f"{_INSERT} {', '.join([_ROW] * len(items))}", values)

    def has_old_terms(self) -> bool:
        """Return whether another version wrote the terms."""
        return self._select("SELECT version FROM text_terms") != [(TERMS_VERSION,)]

    def rebuild_text(self) -> int:
        """Write the terms of all items again."""
        newest = "SELECT number, text, valid_from, owner FROM items WHERE number > :after ORDER BY number LIMIT :limit"
        after = count = 0
        while rows := self._select(newest, after=after, limit=GROUP_ITEMS):
            for number, text, valid_from, owner in rows:
                terms = write_terms(text, valid_from)
                values = (_write_vector_of(terms, owner), terms, number)
                self.execute("UPDATE items SET words = %s::tsvector, terms = %s WHERE number = %s", values)
            after, count = rows[-1][0], count + len(rows)
        self.execute("UPDATE text_terms SET version = %s", (TERMS_VERSION,))
        return count

    def count_terms(self, terms: Collection[str], owners: Collection[Namespace]) -> tuple[int, dict[str, int]]:
        """Count the items of the owners."""
        names = [name_owner(each) for each in owners]
        ((total,),) = self._select("SELECT count(*) FROM items WHERE owner = ANY(:owners)", owners=names)
        counts = self._select(
            "SELECT term, (SELECT count(*) FROM items WHERE words @@ (:owned::tsquery && query::tsquery)) "
            "FROM unnest(:terms::text[], :queries::text[]) AS given (term, query)",
            owned=" | ".join(names),
            terms=[*terms],
            queries=[_write_query(term) for term in terms],
        )
        return total, dict(counts)

    def list_words(self, beginning: str, lengths: range, owners: Collection[Namespace]) -> list[str]:
        """Return words of the newest items of the owners."""
        numbers = "SELECT number FROM items WHERE owner = ANY(:owners) ORDER BY number DESC LIMIT :limit"
        sql = (
            f"SELECT DISTINCT word FROM ({numbers}) newest JOIN items USING (number), "  # noqa: S608
            "unnest(tsvector_to_array(words)) word "
            "WHERE starts_with(word, :beginning) AND length(word) BETWEEN :least AND :most"
        )
        owned = [name_owner(each) for each in owners]
        values = {"beginning": beginning, "least": lengths[0], "most": lengths[-1], "limit": SPELLED_ITEMS}
        return [word for (word,) in self._select(sql, owners=owned, **values)]

    def search_terms(self, weights: Mapping[str, float], where: ItemFilter, limit: int) -> list[ItemMatch]:
        """Return the best matches. The filter is a part of the query, so it does not shorten the result."""
        condition, values = write_filter(where, _LISTS)
        queries = [_write_query(term) for term in weights]
        rows = self._select(
            _SEARCH.format(session=SESSION, condition=condition),
            **values,
            terms=queries,
            weights=[*weights.values()],
            wanted=f"({' | '.join(values['owners'])}) & ({' | '.join(f'({each})' for each in queries)})",
            limit=limit,
        )
        return [ItemMatch(*row) for row in rows]

    def find_neighbours(self, matches: Sequence[ItemMatch], distance: int, where: ItemFilter) -> list[ItemMatch]:
        """Return the items near others."""
        condition, values = write_filter(where, _LISTS)
        near = [match for match in matches if match.session]
        sql = (
            f"SELECT DISTINCT ON (i.number) i.id, {SESSION}, i.place, 0.0::float8, i.terms "  # noqa: S608
            "FROM unnest(:near_owners::text[], :near_sessions::text[], :near_places::bigint[]) "
            "AS p (owner, session, place) "
            "JOIN items i ON i.owner = p.owner AND i.session = p.session "
            f"AND i.place BETWEEN p.place - :distance AND p.place + :distance WHERE {condition}"
        )
        rows = self._select(
            sql,
            **values,
            near_owners=[match.session[:OWNER_CHARS] for match in near],
            near_sessions=[match.session[OWNER_CHARS:] for match in near],
            near_places=[match.place for match in near],
            distance=distance,
        )
        return [ItemMatch(*row) for row in rows]

    def get(self, ids: Collection[str]) -> list[MemoryItem]:
        """Return the items with these ids."""
        rows = self._select(f"SELECT {COLUMNS} FROM items WHERE id = ANY(:ids)", ids=[*ids])  # noqa: S608
        return [read_row(row) for row in rows]

    def read(self, where: ItemFilter, after: str, limit: int) -> list[MemoryItem]:
        """Return items in the order of their ids."""
        condition, values = write_filter(where, _LISTS)
        sql = f"SELECT {PREFIXED_COLUMNS} FROM items i WHERE i.id > :after AND {condition} ORDER BY i.id LIMIT :limit"  # noqa: S608
        return [read_row(row) for row in self._select(sql, **values, after=after, limit=limit)]

    def newest_time(self) -> float:
        """Return the time of the newest record; minus infinity if there is none."""
        ((newest, until),) = self._select(
            "SELECT (SELECT max(recorded_at) FROM items), (SELECT max(until) FROM forgotten_owners)"
        )
        return max(-math.inf if newest is None else newest, -math.inf if until is None else until + TICK_S)

    def find_forgotten(self, ids: Collection[str]) -> list[str]:
        """Return those of the ids whose items were forgotten."""
        return [found for (found,) in self._select("SELECT id FROM forgotten_items WHERE id = ANY(:ids)", ids=[*ids])]

    def forget(self, ids: Collection[str], proof: Callable[[int], DeletionProof], *, with_words: bool = False) -> int:
        """Delete items, and note their ids."""
        owners = dict(self._select("SELECT id, owner FROM items WHERE id = ANY(:ids)", ids=[*ids]))
        self._note_forgotten([(each, owners.get(each, "")) for each in ids], with_words=with_words)
        count = self._delete("id = ANY(:ids)", ids=[*ids])
        self._record_deletion(proof(count))
        return count

    def _note_forgotten(self, items: Collection[tuple[str, str]], *, with_words: bool) -> None:
        notes = write_notes(items, NOTES_ON_WORDS if with_words else NOTES)
        self._select(
            "INSERT INTO forgotten_items SELECT unnest(:notes::text[]) ON CONFLICT DO NOTHING RETURNING 1", notes=notes
        )

    def forget_sources(self, run_ids: Collection[str], proof: Callable[[int], DeletionProof]) -> int:
        """Delete the items that come from these runs, with what corrects or ends them, and note their ids."""
        sql = (
            "WITH RECURSIVE found(id) AS (SELECT id FROM items WHERE source_run = ANY(:runs) "
            "UNION SELECT i.id FROM found JOIN items i ON i.replaces = found.id AND i.replaces <> '' "
            "OR i.follows = found.id AND i.follows <> '' AND i.valid_to < 'infinity') SELECT id FROM found"
        )
        found = self._select(sql, runs=[*run_ids])
        return self.forget([each for (each,) in found], proof)

    def list_sources(self, after: str, limit: int) -> list[str]:
        """Return ids of runs from which items come, in order."""
        sql = "SELECT DISTINCT source_run FROM items WHERE source_run > :after ORDER BY source_run LIMIT :limit"
        return [each for (each,) in self._select(sql, after=after, limit=limit)]

    def list_owners(self) -> list[Namespace]:
        """Return the owners of items, in order."""
        sql = 'SELECT DISTINCT tenant COLLATE "C", "user" COLLATE "C" FROM items ORDER BY 1, 2'
        return [Namespace(tenant=tenant, user=user) for tenant, user in self._select(sql)]

    def forget_owner(self, namespace: Namespace, proof: Callable[[int], DeletionProof]) -> int:
        """Delete all items of an owner, and note the hash of its name."""
        owner = name_owner(namespace)
        ids = self._select("SELECT id FROM items WHERE owner = :owner", owner=owner)
        self._note_forgotten([(each, owner) for (each,) in ids], with_words=True)
        count = self._delete("owner = :owner", owner=owner)
        deletion = proof(count)
        self.execute(
            "INSERT INTO forgotten_owners VALUES (%s, %s) ON CONFLICT (owner) "
            "DO UPDATE SET until = greatest(forgotten_owners.until, excluded.until)",
            (owner, deletion.at),
        )
        self._record_deletion(deletion)
        return count

    def release(self, ids: Collection[str], at: float, by: str) -> int:
        """Let held items be found."""
        found = self._select("UPDATE items SET held = false WHERE held AND id = ANY(:ids) RETURNING id", ids=[*ids])
        for (each,) in found:
            self.execute("INSERT INTO released_items VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", (each, at, by))
        return len(found)

    def drop_derived(self) -> int:
        """Delete the items with a source. Their vectors are kept for those that are derived again."""
        return len(self._select("DELETE FROM items WHERE source_run IS NOT NULL RETURNING 1"))

    def _delete(self, condition: str, **values: Any) -> int:
        rows = self._select(f"DELETE FROM items WHERE {condition} RETURNING number", **values)  # noqa: S608
        if rows:
            self.drop_unused_vectors()
        return len(rows)

    def _record_deletion(self, proof: DeletionProof) -> None:
        self.execute(
            "INSERT INTO deletions (at, by, reason, items) VALUES (%s, %s, %s, %s)",
            (proof.at, proof.by, proof.reason, proof.items),
        )

    # Vectors.

    def _read_model(self) -> tuple[str, int] | None:
        """Return the model and the dimensions of the vectors; None if there are none."""
        rows = self._select("SELECT model, dims FROM vector_model")
        return (rows[0][0], rows[0][1]) if rows else None

    def _check_model(self) -> None:
        if (found := self._read_model()) != self._model:
            raise other_model_error(found or ("", 0), self._model)

    def use_vectors(self, model: str, dims: int) -> None:
        """Create the table of the vectors, unless it is there and for this model."""
        if not self._select(_USE_EXTENSION):
            if not self._select("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"):
                raise MisuseError(
                    f"{self.address} has no pgvector, which keeps vectors: install it on the server (Debian: "
                    "postgresql-NN-pgvector), or use the memory without an embedder"
                )
            self.execute("CREATE EXTENSION vector SCHEMA public")
            self._select(_USE_EXTENSION)
        self._model = model, dims
        if self._read_model() == self._model:
            return
        self.drop_vectors()
        self.execute("INSERT INTO vector_model VALUES (%s, %s)", (model, dims))
        self.execute(
            "CREATE TABLE item_vectors (number bigint PRIMARY KEY, hash bytea NOT NULL, "
            f"vector vector({dims:d}) NOT NULL)"
        )
        self.execute("CREATE INDEX item_vectors_hash ON item_vectors (hash)")
        if dims <= MAX_INDEXED_DIMS:
            self.execute("CREATE INDEX item_vectors_near ON item_vectors USING hnsw (vector vector_cosine_ops)")
        self.execute("INSERT INTO unembedded SELECT number FROM items")

    def drop_vectors(self) -> None:
        """Drop the table of the vectors."""
        self.execute("DROP TABLE IF EXISTS item_vectors")
        self.execute("DELETE FROM vector_model")
        self.execute("DELETE FROM unembedded")

    def drop_unused_vectors(self) -> None:
        """Delete the vectors of deleted items."""
        if self._read_model() is not None:
            self.execute(
                "DELETE FROM item_vectors v WHERE NOT EXISTS (SELECT 1 FROM items i WHERE i.number = v.number)"
            )

    def read_unembedded(self, limit: int) -> list[MemoryItem]:
        """Return items without a vector, oldest first."""
        sql = f"SELECT {PREFIXED_COLUMNS} FROM unembedded u JOIN items i USING (number) ORDER BY number LIMIT :limit"  # noqa: S608
        return [read_row(row) for row in self._select(sql, limit=limit)]

    def copy_vectors(self, ids: Collection[str]) -> set[str]:
        """Give items the vectors of others with the same text; return the ids of those that have one now."""
        self._check_model()
        self._select(
            f"""WITH copied AS (
                INSERT INTO item_vectors SELECT DISTINCT ON (i.number) i.number, v.hash, v.vector
                FROM unembedded u JOIN items i USING (number) JOIN item_vectors v ON v.hash = {_TEXT_HASH}
                WHERE i.id = ANY(:ids) ON CONFLICT DO NOTHING RETURNING number
            ) DELETE FROM unembedded WHERE number IN (SELECT number FROM copied) RETURNING 1""",  # noqa: S608
            ids=[*ids],
        )
        waiting = "SELECT i.id FROM unembedded u JOIN items i USING (number) WHERE i.id = ANY(:ids)"
        return {*ids} - {each for (each,) in self._select(waiting, ids=[*ids])}

    def add_vectors(self, vectors: Mapping[str, Sequence[float]]) -> None:
        """Insert vectors of items."""
        self._check_model()
        self._select(_USE_EXTENSION)
        self._select(
            f"""WITH added AS (
                INSERT INTO item_vectors SELECT i.number, {_TEXT_HASH}, given.vector::vector
                FROM unnest(:ids::text[], :vectors::text[]) AS given (id, vector) JOIN items i ON i.id = given.id
                ON CONFLICT DO NOTHING RETURNING number
            ) DELETE FROM unembedded WHERE number IN (SELECT number FROM added) RETURNING 1""",  # noqa: S608
            ids=[*vectors],
            vectors=[_write_vector(each) for each in vectors.values()],
        )

    def search_vector(self, vector: Sequence[float], where: ItemFilter, limit: int) -> list[ItemMatch]:
        """Return the nearest items. The scan of pgvector's index goes on until enough of them fit the filter."""
        self._check_model()
        condition, values = write_filter(where, _LISTS)
        self._select(_USE_EXTENSION)
        self._select(
            "SELECT set_config('hnsw.iterative_scan', 'strict_order', true), "
            "set_config('hnsw.max_scan_tuples', :most, true), set_config('hnsw.ef_search', :limit, true)",
            most=str(MAX_SCANNED),
            limit=str(min(1_000, limit)),
        )
        sql = (
            f"SELECT i.id, {SESSION}, i.place, greatest(0, 1 - (v.vector <=> :vector::vector)) "  # noqa: S608
            "FROM item_vectors v JOIN items i ON i.number = v.number "
            f"WHERE {condition} ORDER BY v.vector <=> :vector::vector LIMIT :limit"
        )
        rows = self._select(sql, **values, vector=_write_vector(vector), limit=limit)
        return [ItemMatch(*row) for row in rows]

    def list_deletions(self) -> list[DeletionProof]:
        """Return the records of deletions, oldest first."""
        rows = self._select("SELECT at, by, reason, items FROM deletions ORDER BY number")
        return [DeletionProof(at=at, by=by, reason=reason, items=items) for at, by, reason, items in rows]


@attrs.define(eq=False, repr=False)
class PostgresIndex(ThreadedIndex[_ItemDatabase]):
    """An index in a PostgreSQL database, which processes on any machines may share."""

    url: str = attrs.field(repr=False)
    """Address of the database, in libpq's form `postgresql://user:password@host:5432/database`. It is never shown."""

    schema: str = attrs.field(default="agentfsm_memory", kw_only=True, validator=SCHEMA_NAME)
    """Name of the schema of the tables, created at first use. Default "agentfsm_memory"."""

    patience_s: float = attrs.field(default=PATIENCE_S, kw_only=True, validator=NOT_NEGATIVE)
    """Seconds that calls wait for a server that was reached before and is away, 0 or more; then they fail."""

    def __attrs_post_init__(self) -> None:
        self._writer = GroupCommitWriter(
            _ItemDatabase(
                address=PostgresAddress.parse(self.url),
                schema=self.schema,
                tables=TABLES,
                worker_name=token_hex(16),
                lease_s=WORKER_S,
                patience_s=self.patience_s,
                leases=LeaseTable(1.0, 1.0, ""),
            )
        )


def _write_vector(vector: Sequence[float]) -> str:
    return f"[{','.join(map(repr, map(float, vector)))}]"


def _write_vector_of(terms: str, owner: str) -> str:
    """Return terms and the owner as a tsvector, in which quotes keep the server's rules for letters away."""
    placed = [f"'{term}':{min(place, MAX_POSITION)}" for place, term in enumerate(terms.split(" "), 1) if term]
    return " ".join([*placed, owner])


def _write_query(term: str) -> str:
    """Return a term of a query as a tsquery."""
    return " <-> ".join(f"'{each.removesuffix('*')}'{':*' if each[-1] == '*' else ''}" for each in term.split(" "))
