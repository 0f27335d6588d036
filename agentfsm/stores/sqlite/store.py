"""Store journals in a SQLite file: it needs only a path, and works on asyncio and trio.

One thread owns the connection and commits in groups (`threaded.group_commit`). `sqlite.file` opens and guards the file.
This module defines the tables and the statements.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm._lib.concurrency import boot_clock, start_in_thread
from agentfsm.core.codec import encode_header
from agentfsm.core.errors import (
    AgentError,
    ConflictError,
    CorruptError,
    LeaseHeldError,
    MisuseError,
    RunNotFoundError,
)
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import Cancel, PostedItem
from agentfsm.core.validation import NOT_NEGATIVE
from agentfsm.core.value import Value
from agentfsm.ports.store import (
    DURABILITY,
    ORDER_FIELDS,
    Claim,
    Clock,
    Durability,
    Filter,
    Lease,
    RunOrder,
    RunSummary,
    SystemClock,
    lease_lost_error,
)
from agentfsm.ports.stored import QUOTA_WINDOW_S, Feedback, FollowerStatus, QuotaUse, UnreadRun
from agentfsm.stores.rules import (
    EXPIRED_PER_WRITE,
    FINAL_STATES,
    LEASE_HELD_ADVICE,
    LIST_INDEXES,
    PATIENCE_S,
    SEARCH_INDEXES,
    SUMMARY_COLUMNS,
    UNRECORDED_FORMAT,
    ListSyntax,
    build_condition,
    build_list,
    caller_open_error,
    check_deadline,
    check_format,
    check_inbox_capacity,
    check_not_over,
    check_quotas,
    check_same_prompt,
    continue_session,
    end_of_prefix,
    follower_lost_error,
    missing_follower_error,
    missing_predecessor_error,
    parse_summary,
    preview_prompt,
    resolve_duplicate_post,
    successor_exists_error,
    suspect_group_size,
)
from agentfsm.stores.run_words import read_query
from agentfsm.stores.sqlite.file import (
    Connect,
    DatabaseFile,
    SQLiteConnection,
    SQLiteSchema,
    connect_sqlite3,
    raw_transaction,
)
from agentfsm.stores.threaded.group_commit import StoreJob
from agentfsm.stores.threaded.lease_table import LeaseOwner, LeaseTable, lease_owner
from agentfsm.stores.threaded.outage import Outage
from agentfsm.stores.threaded.owner import OwnerIdentity, group_by_process
from agentfsm.stores.threaded.store import (
    LEASE_S,
    LEASE_SECONDS,
    MAX_LEASE_S,
    AppendRequest,
    CreateRequest,
    InboxPost,
    JournalRecords,
    LeaseRequest,
    ReadableWork,
    RecordRow,
    StoreWriter,
    ThreadedStore,
    decode_post,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

# Events in a chunk: about 12 turns. Twice as many would save a sixth of the space, but leave twice as many outside.
CHUNK_EVENTS: Final = 64
# Maximum bytes of a chunk. Larger events stay uncompressed: other jobs wait while the store's thread compresses.
MAX_CHUNK_BYTES: Final = 1_000_000


def find_chunk_ends(first: int, newest: int) -> range:
    """Return the versions at which chunks end, among those from `first`, 1 or more, to `newest`."""
    return range(-(-first // CHUNK_EVENTS) * CHUNK_EVENTS, newest + 1, CHUNK_EVENTS)


def compress_chunk(bodies: Sequence[bytes]) -> bytes | None:
    """Return the events as one chunk, oldest first; None if they are too large or not `CHUNK_EVENTS` lines."""
    lines = b"\n".join(bodies)
    if lines.count(b"\n") != CHUNK_EVENTS - 1 or len(lines) > MAX_CHUNK_BYTES:
        return None
    return zlib.compress(lines)


def decompress_chunk(run_id: str, newest: int, body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the events of a chunk with their versions, oldest first.

    Raises:
        CorruptError: if the chunk is damaged.
    """
    try:
        lines = zlib.decompress(body).split(b"\n")
    except zlib.error as error:
        raise CorruptError(
            f"run {run_id!r}, the versions up to {newest}, cannot be read ({error}): restore a backup, or delete the "
            "run",
        ) from None
    yield from enumerate(lines, newest - len(lines) + 1)


# Maximum events in one statement: each takes three variables, and SQLite may allow only 999.
MAX_EVENTS_PER_INSERT: Final = 100

_INDEXES_V2: Final = (
    "CREATE INDEX runs_by_after ON runs (after) WHERE after IS NOT NULL",
    "CREATE INDEX runs_by_parent ON runs (parent) WHERE parent IS NOT NULL",
)
# No index contains a column that changes with each append, so that an append updates no index.
_INDEXES_V4: Final = (
    "CREATE INDEX runs_ready ON runs (agent, suspect, ready_at) WHERE ready_at IS NOT NULL",
    "CREATE INDEX runs_by_owner ON runs (owner) WHERE owner IS NOT NULL",
)
# The event loops that execute runs. One row renews all leases of a loop.
_CREATE_WORKERS: Final = """
CREATE TABLE workers (
    name  TEXT PRIMARY KEY,
    until REAL NOT NULL  -- end of its leases, seconds of its machine's boot clock
) WITHOUT ROWID
"""
# Time from which a worker may claim a run without owner; NULL for never. Parameters: `seen` is the newest inbox number
# that its last owner has read, `seen_at` the time when that owner last checked timers, `now` the current time, and
# `rest` the earliest time of a claim, which inbox rows newer than `newest` ignore.
_READY_AT_SQL: Final = """
CASE WHEN state NOT IN ('done', 'error') AND parent IS NULL THEN (
    SELECT min(at) FROM (
        SELECT max(CASE WHEN waiting THEN wakes_at ELSE :now END, :rest) AS at
        UNION ALL
        SELECT max(coalesce(due_at, :now), CASE WHEN number > :newest THEN 0 ELSE :rest END) FROM posts
        WHERE run = runs.number AND NOT taken AND (number > max(seen, :seen) OR due_at > max(seen_at, :seen_at))))
END
"""

# The same for the runs of an older file: there, no owner has recorded its reads.
_READY_AT_UPGRADE_SQL: Final = (
    _READY_AT_SQL.replace("FROM posts", "FROM inbox")
    .replace(":now", "updated_at")
    .replace(":newest", "0")
    .replace(":rest", "0")
    .replace(":seen_at", "0")
    .replace(":seen", "0")
)

# Followers find a run by `change`, which a release, a pause and an end set to NULL, and which a follower numbers: so a
# store without followers pays nothing, and numbers have the order of their commits.
_FOLLOWERS_V5: Final = (
    "CREATE INDEX runs_by_change ON runs (change)",
    # One row with the last number that was given. A number is never given twice: a follower may still confirm that of a
    # removed run.
    "CREATE TABLE changes (last INTEGER NOT NULL)",
    "INSERT INTO changes VALUES (0)",
    """
    CREATE TABLE followers (
        name     TEXT PRIMARY KEY,
        position INTEGER NOT NULL,  -- number of the last change up to which all was read
        holder   TEXT NOT NULL,     -- who works on its deliveries
        until    REAL NOT NULL      -- time until which others wait for the holder
    ) WITHOUT ROWID
    """,
    # The version that a follower has read of a run. SQLite may reuse the number of a removed run, but not that of a
    # row here, so late confirmations for a removed run concern no other.
    """
    CREATE TABLE reads (
        number   INTEGER PRIMARY KEY AUTOINCREMENT,
        run      INTEGER NOT NULL,
        follower TEXT NOT NULL,
        version  INTEGER NOT NULL,
        UNIQUE (run, follower)
    )
    """,
)
# Runs of a tenant, and what was taken from quotas in each second of the last minute.
_TENANTS_V6: Final = (
    "CREATE INDEX runs_by_tenant ON runs (tenant, created_at) WHERE tenant IS NOT NULL",
    """
    CREATE TABLE quotas (
        name   TEXT NOT NULL,
        second INTEGER NOT NULL,  -- since 1970
        amount INTEGER NOT NULL,
        PRIMARY KEY (name, second)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX quotas_by_second ON quotas (second)",
)
# For limits of the runs of a user, and of a tenant, that are not over.
_UNFINISHED_V603: Final = ("CREATE INDEX runs_unfinished ON runs (tenant, user) WHERE stop_reason IS NULL",)
_LISTS_V604: Final = tuple([f"CREATE INDEX {name} ON {columns}" for name, columns in LIST_INDEXES.items()])
_SEARCH_V606: Final = tuple([f"CREATE INDEX {name} ON {columns}" for name, columns in SEARCH_INDEXES.items()])
# The number of a row is the revision of a record: SQLite never gives one twice.
_RECORDS_V601: Final = (
    """
    CREATE TABLE records (
        revision   INTEGER PRIMARY KEY AUTOINCREMENT,
        kind       TEXT NOT NULL,
        key        TEXT NOT NULL,
        value      TEXT NOT NULL,  -- JSON
        expires_at REAL,           -- time from which on it is absent; NULL for never
        UNIQUE (kind, key)
    )
    """,
    "CREATE INDEX records_by_expiry ON records (expires_at) WHERE expires_at IS NOT NULL",
)
_CREATE_FEEDBACK: Final = """
CREATE TABLE feedback (
    run     INTEGER NOT NULL,
    number  INTEGER NOT NULL,
    key     TEXT NOT NULL,
    at      REAL NOT NULL,
    rating  INTEGER NOT NULL,
    comment TEXT NOT NULL,
    author  TEXT NOT NULL,
    PRIMARY KEY (run, number),
    UNIQUE (run, key)
) WITHOUT ROWID
"""

# The words of a run, by which it is searched. The tokenizer `ascii` splits them at the spaces and leaves them as they
# are. An older agentfsm that deletes a run deletes them, too.
_WORD_TABLES: Final = (
    "CREATE VIRTUAL TABLE IF NOT EXISTS run_words USING fts5 (words, tokenize='ascii', detail=none)",
    """
    CREATE TRIGGER IF NOT EXISTS words_removed AFTER DELETE ON runs
    BEGIN DELETE FROM run_words WHERE rowid = old.number; END
    """,
)

SCHEMA: Final = SQLiteSchema(
    version=606,
    # A file of version 2 has no chunks, and needs no change to get some.
    tables=frozenset(
        {"runs", "events", "posts", "workers", "changes", "followers", "reads", "feedback", "quotas", "records"}
    ),
    statements=(
        # The columns of a list, and the owner of each run. The other tables refer to a run by `number`.
        """
        CREATE TABLE runs (
            number      INTEGER PRIMARY KEY,
            id          TEXT NOT NULL UNIQUE,
            session     TEXT,
            after       TEXT,              -- id of the run that this one continues
            parent      TEXT,              -- id of the run that called this one as a tool
            agent       TEXT NOT NULL,
            user        TEXT,
            prompt      TEXT NOT NULL,     -- its first characters, for lists
            created_at  REAL NOT NULL,     -- seconds since 1970, as all times here
            updated_at  REAL NOT NULL,
            state       TEXT NOT NULL,
            stop_reason TEXT,
            waiting     INTEGER NOT NULL,  -- whether it waits for an external input or decision
            wakes_at    REAL,              -- next deadline of the calls that it waits for
            turn        INTEGER NOT NULL,
            version     INTEGER NOT NULL,  -- events in the journal
            tokens      INTEGER NOT NULL,
            token       INTEGER NOT NULL,  -- fencing token: grows with each owner
            crashes     INTEGER NOT NULL,  -- owners that died since it last finished a turn; a pause leaves 1
            alone       INTEGER NOT NULL,  -- of these, owners with no other run; valid if crashes > 0
            company     INTEGER NOT NULL,  -- number of runs of the last of these owners, including this one
            suspect     INTEGER NOT NULL,  -- whether it is claimed separately; valid if ready_at is set
            owner       TEXT,              -- event loop that executes the run; NULL for none
            ready_at    REAL,              -- time from which a worker may claim it; NULL for never, or while owned
            seen        INTEGER NOT NULL,  -- newest inbox number that an owner has read
            seen_at     REAL NOT NULL,     -- time when an owner last checked timers
            change      INTEGER,           -- number of its last change, for followers; NULL for none yet
            rating      INTEGER,           -- that of the newest feedback; NULL for none
            tenant      TEXT,
            format      INTEGER NOT NULL,  -- newest format of its records; only workers that read it claim the run
            release     TEXT NOT NULL DEFAULT '', -- only workers that have it claim the run; empty for none
            purpose     TEXT NOT NULL DEFAULT '', -- "eval", ...; empty for production
            cost_usd    REAL,              -- NULL while it is not over, and for unknown
            duration_s  REAL               -- likewise
        )
        """,
        _CREATE_WORKERS,
        "CREATE INDEX runs_by_session ON runs (session) WHERE session IS NOT NULL",
        *_INDEXES_V2,
        *_INDEXES_V4,
        *_FOLLOWERS_V5,
        *_TENANTS_V6,
        _CREATE_FEEDBACK,
        *_RECORDS_V601,
        *_UNFINISHED_V603,
        *_LISTS_V604,
        *_SEARCH_V606,
        # The journal; entry 0 is the header. With row ids, records of some hundred bytes are stored densely, in the
        # order of their appends (25 % smaller), and a commit of 300 runs changes a handful of pages instead of 300.
        """
        CREATE TABLE events (
            run     INTEGER NOT NULL,
            version INTEGER NOT NULL,
            body    TEXT NOT NULL,     -- or a BLOB: a chunk that ends with this version, see `event_chunks`
            UNIQUE (run, version)
        )
        """,
        # All posts, including consumed ones, so that each key stays taken.
        """
        CREATE TABLE posts (
            run    INTEGER NOT NULL,
            number INTEGER NOT NULL,
            key    TEXT NOT NULL,
            item   TEXT NOT NULL,
            cancel INTEGER NOT NULL,  -- whether the item cancels the run
            due_at REAL,              -- earliest time at which it is consumed; NULL for at once
            taken  INTEGER NOT NULL,  -- whether it was consumed
            PRIMARY KEY (run, number),
            UNIQUE (run, key)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX inbox_open ON posts (run, number) WHERE NOT taken",
    ),
    upgrades={
        1: (
            *[f"ALTER TABLE runs ADD COLUMN {column} TEXT" for column in ("after", "parent", "user")],
            "ALTER TABLE runs ADD COLUMN wakes_at REAL",
            *[f"ALTER TABLE runs ADD COLUMN {column} NOT NULL DEFAULT 0" for column in ("crashes", "seen", "seen_at")],
            "ALTER TABLE inbox ADD COLUMN due_at REAL",
            """
            UPDATE runs SET (after, parent, user) = (
                SELECT json_extract(body, '$.after'), json_extract(body, '$.parent'), json_extract(body, '$.user')
                FROM events WHERE run = runs.number AND version = 0 AND json_valid(body))
            """,
            *_INDEXES_V2,
        ),
        3: (
            "DROP INDEX IF EXISTS runs_open",
            _CREATE_WORKERS,
            "INSERT INTO workers SELECT owner, max(until) FROM runs WHERE owner IS NOT NULL GROUP BY owner",
            "ALTER TABLE runs DROP COLUMN until",
            *[f"ALTER TABLE runs ADD COLUMN {name} NOT NULL DEFAULT 0" for name in ("alone", "company", "suspect")],
            "ALTER TABLE runs ADD COLUMN ready_at REAL",
            f"UPDATE runs SET ready_at = {_READY_AT_UPGRADE_SQL} WHERE owner IS NULL",  # noqa: S608  of our own names
            *_INDEXES_V4,
        ),
        4: (
            *[f"ALTER TABLE runs ADD COLUMN {name} INTEGER" for name in ("change", "rating")],
            *_FOLLOWERS_V5,
            _CREATE_FEEDBACK,
        ),
        # An agentfsm that has the file open with older tables does not notice the upgrade, and would make changes that
        # followers miss. Each of its writes reads the inbox, and fails from now on. Only the index scans a table.
        5: (
            "ALTER TABLE inbox RENAME TO posts",
            f"ALTER TABLE runs ADD COLUMN format INTEGER NOT NULL DEFAULT {UNRECORDED_FORMAT}",
            "ALTER TABLE runs ADD COLUMN tenant TEXT",
            *_TENANTS_V6,
        ),
        600: _RECORDS_V601,
        601: ("ALTER TABLE runs ADD COLUMN release TEXT NOT NULL DEFAULT ''",),
        602: _UNFINISHED_V603,
        603: _LISTS_V604,
        604: ("ALTER TABLE runs ADD COLUMN purpose TEXT NOT NULL DEFAULT ''",),
        605: (
            "DROP INDEX runs_by_time",
            *[f"ALTER TABLE runs ADD COLUMN {name} REAL" for name in ORDER_FIELDS.values()],
            *_SEARCH_V606,
        ),
    },
)

# Texts are read as bytes, so that this package reports damaged records, and not SQLite.
_SELECT_RUN: Final = """
SELECT number, token, crashes, alone, version, format, owner, state, stop_reason, waiting,
       (SELECT max(number) FROM posts WHERE run = runs.number AND NOT taken)
FROM runs WHERE id = ?
"""
_INSERT_RUN: Final = """
INSERT INTO runs (id, session, after, parent, agent, user, tenant, release, purpose, prompt, created_at,
                  state, stop_reason, waiting, wakes_at, turn, version, tokens, updated_at, format, cost_usd,
                  duration_s, token, owner, crashes, alone, company, suspect, seen, seen_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, 0)
"""
_SELECT_SESSION_TAIL: Final = "SELECT id, state FROM runs WHERE session = ? ORDER BY number DESC LIMIT 1"
_SET_OWNER: Final = "UPDATE runs SET token = ?, owner = ?, ready_at = NULL WHERE number = ?"
# The releases of a worker are a JSON list, or NULL for all.
_HAS_RELEASE: Final = "(:releases IS NULL OR release = '' OR release IN (SELECT value FROM json_each(:releases)))"
_SELECT_CLAIMABLE: Final = f"""
SELECT id, company FROM runs
WHERE agent = :agent AND suspect = :suspect AND ready_at <= :now AND company >= :company AND format <= :format
    AND purpose = '' AND {_HAS_RELEASE}
ORDER BY ready_at, number LIMIT :limit
"""  # noqa: S608  of our own names, as all below
# Executed only if a claim finds too few runs, so the index has few other entries before the first that is too new.
_HAS_NEWER: Final = """
SELECT EXISTS (SELECT 1 FROM runs WHERE agent = :agent AND suspect = :suspect AND ready_at <= :now AND format > :format)
"""
# Likewise.
_FIND_OTHER_RELEASE: Final = f"""
SELECT release FROM runs WHERE agent = :agent AND suspect = :suspect AND ready_at <= :now AND NOT {_HAS_RELEASE} LIMIT 1
"""  # noqa: S608
_UPSERT_OWNER: Final = (
    "INSERT INTO workers (name, until) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET until = excluded.until"
)
# All owners, with or without runs. The index has an entry for each run; the query reads only the first of each name.
_SELECT_OWNERS: Final = """
WITH RECURSIVE owners (name) AS (
    SELECT min(owner) FROM runs WHERE owner IS NOT NULL
    UNION ALL SELECT (SELECT min(owner) FROM runs WHERE owner > name) FROM owners WHERE name IS NOT NULL)
SELECT name, until FROM owners LEFT JOIN workers USING (name) WHERE name IS NOT NULL
UNION SELECT name, until FROM workers
"""
# The runs of subagents count as part of their callers' runs.
_COUNT_OWNED_RUNS: Final = "SELECT count(*) FROM runs WHERE owner = ? AND parent IS NULL"
_FREE_RUNS: Final = f"""
UPDATE runs
SET owner = NULL, change = NULL, ready_at = {_READY_AT_SQL}, suspect = crashes >= 1, company = :company,
    alone = alone * (crashes > 0) + (:company <= 1), crashes = crashes + 1
WHERE owner = :owner
"""  # noqa: S608  of our own names, as all below
_DELETE_WORKER: Final = "DELETE FROM workers WHERE name = ?"
_RELEASE_RUN: Final = f"""
UPDATE runs
SET owner = NULL, change = NULL, ready_at = {_READY_AT_SQL}, suspect = crashes > 1,
    seen = max(seen, :seen), seen_at = max(seen_at, :seen_at)
WHERE id = :id AND token = :token AND owner = :owner
"""  # noqa: S608
# A finished turn resets the crashes. A pause resets those that count against the run, and leaves one, because open
# calls may have begun. The expressions use the values before the update.
_UPDATE_RUN: Final = """
UPDATE runs
SET state = ?, wakes_at = ?, turn = ?, version = ?, tokens = ?, updated_at = ?, format = max(format, ?),
    crashes = CASE WHEN turn <> ? THEN 0 WHEN ? THEN min(crashes, 1) ELSE crashes END, alone = alone * (NOT ?)
WHERE number = ?
"""
# SQLite writes the indexes of each column that is set, even to the same value: so these are set only if they change.
_SET_WAITING: Final = "UPDATE runs SET waiting = ? WHERE number = ?"
_SET_END: Final = "UPDATE runs SET waiting = ?, stop_reason = ?, cost_usd = ?, duration_s = ? WHERE number = ?"
_RAISE_FORMAT: Final = "UPDATE runs SET format = ? WHERE number = ?"
_MARK_CHANGED: Final = "UPDATE runs SET change = NULL WHERE number = ?"
_SET_RATING: Final = "UPDATE runs SET rating = ?, change = NULL WHERE number = ?"
_SELECT_QUOTA: Final = "SELECT second, amount FROM quotas WHERE name = ?"
_TAKE_QUOTA: Final = """
INSERT INTO quotas VALUES (?, ?, ?) ON CONFLICT (name, second) DO UPDATE SET amount = amount + excluded.amount
"""
_IS_VALID_RECORD: Final = "kind = :kind AND (expires_at IS NULL OR expires_at > :now)"
_SELECT_RECORD: Final = f"""
SELECT key, CAST(value AS BLOB), revision, expires_at FROM records WHERE key = :key AND {_IS_VALID_RECORD}
"""  # noqa: S608
_SELECT_REVISION: Final = f"SELECT revision FROM records WHERE key = :key AND {_IS_VALID_RECORD}"  # noqa: S608
_WRITE_RECORD: Final = "INSERT OR REPLACE INTO records (kind, key, value, expires_at) VALUES (?, ?, ?, ?)"
_SELECT_RECORDS: Final = f"""
SELECT key, CAST(value AS BLOB), revision, expires_at FROM records
WHERE {_IS_VALID_RECORD} AND key >= :prefix AND key > :after AND key < :end ORDER BY key LIMIT :limit
"""  # noqa: S608
_SELECT_EXPIRED_RECORDS: Final = "SELECT revision FROM records WHERE expires_at <= ? LIMIT ?"
_FIND_FEEDBACK: Final = "SELECT 1 FROM feedback WHERE run = ? AND key = ?"
_INSERT_FEEDBACK: Final = """
INSERT INTO feedback (run, number, key, at, rating, comment, author)
VALUES (:run, (SELECT coalesce(max(number), 0) + 1 FROM feedback WHERE run = :run), :key, :at, :rating, :comment, :by)
"""
_SELECT_FEEDBACK: Final = "SELECT rating, comment, author, at FROM feedback WHERE run = ? ORDER BY number"
_INSERT_EVENTS: Final = "INSERT INTO events (run, version, body) VALUES "
_SELECT_HEADER: Final = "SELECT CAST(body AS BLOB) FROM events WHERE run = ? AND version = 0"
_SELECT_EVENTS: Final = """
SELECT version, CAST(body AS BLOB), typeof(body) = 'blob' FROM events WHERE run = ? AND version > ? ORDER BY version
"""
_SELECT_BODIES: Final = """
SELECT CAST(body AS BLOB) FROM events WHERE run = ? AND version BETWEEN ? AND ? ORDER BY version
"""
_DELETE_EVENTS: Final = "DELETE FROM events WHERE run = ? AND version BETWEEN ? AND ?"
_SELECT_INBOX: Final = "SELECT number, key, CAST(item AS BLOB) FROM posts WHERE run = ? AND NOT taken ORDER BY number"
_COUNT_INBOX: Final = "SELECT count(*) FROM posts WHERE run = ? AND NOT taken"
_SELECT_DUE_POSTS: Final = """
SELECT number FROM posts WHERE run = ? AND NOT taken AND (due_at IS NULL OR due_at <= ?) LIMIT ?
"""
_IS_CANCELLED: Final = "SELECT EXISTS (SELECT 1 FROM posts WHERE run = ? AND NOT taken AND cancel)"
_MARK_TAKEN: Final = "UPDATE posts SET taken = 1 WHERE run = ? AND number = ?"
_SELECT_POST: Final = "SELECT number, CAST(item AS BLOB) FROM posts WHERE run = ? AND key = ?"
_SELECT_NEXT_NUMBER: Final = "SELECT coalesce(max(number), 0) + 1 FROM posts WHERE run = ?"
_INSERT_POST: Final = "INSERT INTO posts (run, number, key, item, cancel, due_at, taken) VALUES (?, ?, ?, ?, ?, ?, 0)"
_MARK_CLAIMABLE: Final = """
UPDATE runs SET ready_at = min(coalesce(ready_at, ?), ?) WHERE number = ? AND owner IS NULL AND parent IS NULL
"""
_SELECT_SUMMARIES: Final = f"SELECT {', '.join(SUMMARY_COLUMNS)}, owner FROM runs"  # noqa: S608
_COUNT_RUNS: Final = "SELECT count(*) FROM (SELECT 1 FROM runs {clause} LIMIT ?)"
_HAS_FTS5: Final = "SELECT EXISTS (SELECT 1 FROM pragma_module_list WHERE name = 'fts5')"
_HAS_WORDS: Final = "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'run_words')"
_SET_WORDS: Final = "INSERT OR REPLACE INTO run_words (rowid, words) VALUES (?, ?)"
_COUNT_MATCHES: Final = "SELECT count(*) FROM (SELECT 1 FROM run_words WHERE run_words MATCH ? LIMIT ?)"
# Rewrites the index, in which the words of removed runs are only marked: 0.4 s for 100,000 runs.
_REWRITE_WORDS: Final = "INSERT INTO run_words (run_words) VALUES ('optimize')"
# Runs up to which those with the words of a search are looked up one by one. If there are more, the list is read in its
# order, and each run is looked up among them.
_FEW_MATCHES: Final = 1_000
_MATCH: Final = "number IN (SELECT rowid FROM run_words WHERE run_words MATCH ?)"


def _write_match(text: str) -> str:
    """Return the query of FTS5 for runs with all words of a text."""
    words = read_query(text)
    return " ".join([f'"{word.removesuffix("*")}"{"*" if word[-1] == "*" else ""}' for word in words])


_SYNTAX: Final = ListSyntax(f"+{_MATCH}", _write_match, plus="+")
_SYNTAX_OF_FEW: Final = ListSyntax(_MATCH, _write_match, plus="+")
_SELECT_OWNED: Final = "SELECT id, owner FROM runs WHERE owner IS NOT NULL"
_SELECT_DESCENDANTS: Final = """
WITH RECURSIVE below (number, id) AS (
    SELECT number, id FROM runs WHERE id = ?
    UNION SELECT runs.number, runs.id FROM runs JOIN below ON runs.parent = below.id)
SELECT runs.number, runs.id, runs.owner FROM runs JOIN below USING (number)
"""
_SELECT_OPEN_CALLER: Final = """
SELECT caller.id FROM runs JOIN runs AS caller ON caller.id = runs.parent
WHERE runs.id = ? AND caller.state NOT IN ('done', 'error')
"""
_SELECT_SUCCESSORS: Final = "SELECT id FROM runs WHERE after = ? ORDER BY number"
_SELECT_SESSION_RUNS: Final = "SELECT id FROM runs WHERE session = ? ORDER BY number"
# `read` is the number up to which all followers have read; NULL if that does not matter.
_IS_PRUNABLE: Final = """
state IN ('done', 'error') AND updated_at < :before AND (:read IS NULL OR change IS NOT NULL AND change <= :read)
"""
_SELECT_PRUNE_BATCH: Final = (
    f"SELECT number FROM runs WHERE number > :start AND {_IS_PRUNABLE} ORDER BY number LIMIT :limit"  # noqa: S608
)
# `kin` has the runs that can be removed only together with old runs: successors, callers, subagents and other runs of
# the session. `kept` has those of them that must stay, and the runs that these need, including predecessors. Sessions
# are steps of their own, so that a long session is visited once.
_SELECT_REMOVABLE: Final = f"""
WITH RECURSIVE
    step (way) AS (VALUES (0), (1), (2), (3)),
    kin (run, session) AS (
        SELECT id, NULL FROM runs WHERE number > :start AND number <= :last AND {_IS_PRUNABLE}
        UNION SELECT CASE way WHEN 0 THEN runs.id WHEN 1 THEN runs.parent END, CASE way WHEN 2 THEN runs.session END
        FROM kin CROSS JOIN runs CROSS JOIN step
        WHERE runs.id = kin.run OR runs.after = kin.run OR runs.parent = kin.run OR runs.session = kin.session),
    kept (run, session) AS (
        SELECT id, NULL FROM kin CROSS JOIN runs WHERE id = kin.run AND NOT ({_IS_PRUNABLE})
        UNION SELECT CASE way WHEN 0 THEN runs.id WHEN 1 THEN runs.parent WHEN 3 THEN runs.after END,
            CASE way WHEN 2 THEN runs.session END
        FROM kept CROSS JOIN runs CROSS JOIN step
        WHERE runs.id = kept.run OR runs.parent = kept.run OR runs.session = kept.session)
SELECT number FROM kin CROSS JOIN runs WHERE id = kin.run AND id NOT IN (SELECT run FROM kept WHERE run IS NOT NULL)
"""  # noqa: S608
# A change without a number counts once the run has no owner, or is over.
_HAS_NO_NUMBER: Final = "change IS NULL AND (owner IS NULL OR state IN ('done', 'error'))"
_SELECT_LAST_CHANGE: Final = "SELECT last FROM changes"
_ADVANCE_CHANGES: Final = "UPDATE changes SET last = last + ?"
_SELECT_UNNUMBERED: Final = f"SELECT number FROM runs WHERE {_HAS_NO_NUMBER} ORDER BY number LIMIT ?"  # noqa: S608
_SET_CHANGE: Final = "UPDATE runs SET change = ? WHERE number = ?"
_INSERT_FOLLOWER: Final = """
INSERT INTO followers (name, position, holder, until) VALUES (?, ?, '', 0) ON CONFLICT (name) DO NOTHING
"""
_HAS_UNREAD: Final = f"""
SELECT EXISTS (SELECT 1 FROM runs WHERE change > max(position, ?)) OR EXISTS (SELECT 1 FROM runs WHERE {_HAS_NO_NUMBER})
FROM followers WHERE name = ?
"""  # noqa: S608
_HOLD_FOLLOWER: Final = "UPDATE followers SET holder = ?, until = ? WHERE name = ?"
_SELECT_FOLLOWER: Final = "SELECT position, holder, until FROM followers WHERE name = ?"
_SELECT_CHANGED: Final = "SELECT number, id, change FROM runs WHERE change > ? ORDER BY change LIMIT ?"
_INSERT_READ: Final = "INSERT INTO reads (run, follower, version) VALUES (?, ?, 0) ON CONFLICT DO NOTHING"
_SELECT_READ: Final = "SELECT number, version FROM reads WHERE run = ? AND follower = ?"
_ADVANCE_FOLLOWER: Final = "UPDATE followers SET position = max(position, ?) WHERE name = ?"
_UPDATE_READ: Final = "UPDATE reads SET version = max(version, ?) WHERE number = ? AND follower = ?"
_SELECT_FOLLOWERS: Final = f"""
SELECT name, position, until,
    (SELECT count(*) FROM runs WHERE change > position) + (SELECT count(*) FROM runs WHERE {_HAS_NO_NUMBER}),
    (SELECT min(updated_at) FROM runs WHERE change > position OR {_HAS_NO_NUMBER})
FROM followers ORDER BY name
"""  # noqa: S608


@attrs.frozen
class _SQLiteRow(Value):
    """The columns of a run that decide about operations, in the order of `_SELECT_RUN`."""

    number: int
    token: int
    crashes: int
    solo_crashes: int
    version: int
    format: int
    owner: str | None
    state: str
    stop_reason: str | None
    waiting: int
    """Whether it waits for an external input or decision, 0 or 1."""

    newest: int | None
    """Newest inbox number that is not consumed yet."""


@attrs.define(eq=False, repr=False, kw_only=True)
class _SQLiteBackend(DatabaseFile):
    """The store's operations on the tables. Only the store's thread uses it."""

    lease_s: float
    clock: Clock
    boot_clock: Callable[[], float]
    leases: LeaseTable
    worker_name: str
    _newest_token: int = attrs.field(default=0, init=False)
    """Largest token that this object gave to a new run."""

    _searches_text: bool = attrs.field(default=False, init=False)
    """Whether the open file has the words of runs, and SQLite can search them."""

    _has_removed: bool = attrs.field(default=False, init=False)
    """Whether the transaction has to take the words of removed runs out of the index."""

    _left_words: bool = attrs.field(default=True, init=False)
    """Whether words of removed runs may be in the index: of batches before, or of a process that was killed."""

    def _prepare(self, db: SQLiteConnection) -> None:
        """Check the file, create or upgrade its tables, and the index of words, if SQLite has full-text search."""
        super()._prepare(db)
        self._find_words(db)
        if not self._searches_text and db.execute(_HAS_FTS5).fetchone() == (1,):
            with raw_transaction(db, "BEGIN IMMEDIATE"):
                for statement in _WORD_TABLES:
                    db.execute(statement)
            self._searches_text = True

    def _check_tables(self, db: SQLiteConnection) -> None:
        """Check that a file that is only read has the tables of this version."""
        super()._check_tables(db)
        self._find_words(db)

    def _find_words(self, db: SQLiteConnection) -> None:
        self._searches_text = all(db.execute(each).fetchone() == (1,) for each in (_HAS_FTS5, _HAS_WORDS))

    @contextmanager
    def transaction(
        self, *, write: bool, durability: Durability = "full", runs: Collection[str] = ()
    ) -> Iterator[None]:
        """Run the block in one transaction. A rollback also restores the table of leases."""
        block = DatabaseFile.transaction(self, write=write, durability=durability, runs=runs)
        self._has_removed = False
        with self.leases.transaction(), block:
            yield
            if self._has_removed and self._searches_text:
                self.execute(_REWRITE_WORDS)
                self.after_commit(partial(setattr, self, "_left_words", False))

    def now(self) -> float:
        """Seconds since 1970."""
        return self.clock.now()

    # Runs and their leases.

    def create(self, request: CreateRequest, lease_request: LeaseRequest) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        header = request.header
        row = self._find_row(header.id)
        if row is None:
            header = self._resolve_predecessor(header)
            return header, self._insert_run(header, request, lease_request)
        stored = self._header(header.id, row.number)
        check_same_prompt(stored, header)
        return stored, self.acquire_lease(header.id, lease_request)

    def _resolve_predecessor(self, header: Header) -> Header:
        last = None if header.session is None else self.execute(_SELECT_SESSION_TAIL, (header.session,)).fetchone()
        if last is None and header.after is not None and self._find_row(header.after) is None:
            raise missing_predecessor_error(header)
        return continue_session(header, last)

    def _insert_run(self, header: Header, request: CreateRequest, lease_request: LeaseRequest) -> Lease:
        """Insert a run, and take its lease."""
        body, prompt = encode_header(header), preview_prompt(header)
        names = (header.id, header.session, header.after, header.parent, header.agent, header.user, header.tenant)
        # Tokens start at the current time, so that a later run with the same id gets larger ones: late requests of a
        # deleted run's owner are then refused.
        token = self._newest_token = max(self._newest_token + 1, time.time_ns() // 1000)
        *facts, _paused = request.columns
        about = (header.release, header.purpose, prompt, header.created_at)
        self.execute(_INSERT_RUN, (*names, *about, *facts, token, lease_request.owner.name))
        (number,) = self.execute("SELECT last_insert_rowid()").fetchone()
        self._write_events(number, 0, (body, *request.bodies))
        self._write_words(number, request.words)
        return self._register_lease(
            Lease(run_id=header.id, token=token, version=request.columns.version), lease_request
        )

    def acquire_lease(self, run_id: str, lease_request: LeaseRequest, *, takeover: bool = False) -> Lease:
        """Take the lease of an existing run."""
        row = self._get_row(run_id)
        check_format(run_id, row.format)
        if not takeover and row.owner is not None and not self.leases.is_dropped(run_id, row.owner):
            if self._is_driven(run_id, row.owner):
                raise LeaseHeldError(f"run {run_id!r} {LEASE_HELD_ADVICE}")
            self._free_abandoned_runs()
            row = self._get_row(run_id)
        return self._assign_lease(run_id, row, lease_request)

    def claim(
        self, agent: str, limit: int, lease_request: LeaseRequest, *, suspects: bool, work: ReadableWork
    ) -> Claim:
        """Take the leases of runs that are ready."""
        self._free_abandoned_runs()
        wanted = self._build_claim_values(agent, work)
        first = self.execute(_SELECT_CLAIMABLE, wanted | {"suspect": True, "company": 0, "limit": 1}).fetchone()
        wanted |= {"suspect": suspects, "company": 0, "limit": limit}
        found: list[tuple[str, int]] = []
        if suspects and first is not None:
            limit = min(limit, suspect_group_size(first[1]))
            wanted |= {"company": first[1], "limit": limit}
        if not suspects or first is not None:
            found = self.execute(_SELECT_CLAIMABLE, wanted).fetchall()
        leases = tuple([self._assign_lease(run_id, self._get_row(run_id), lease_request) for run_id, _company in found])
        left = self._find_left_runs(wanted) if len(leases) < limit else {}
        return Claim(leases=leases, has_suspects=first is not None, **left)

    def _build_claim_values(self, agent: str, work: ReadableWork) -> dict[str, Any]:
        releases = None if work.releases is None else json.dumps(work.releases)
        return {"agent": agent, "now": self.now(), "format": work.newest_format, "releases": releases}

    def _find_left_runs(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a claim says of the ready runs that this worker cannot execute."""
        has_newer = bool(self.execute(_HAS_NEWER, wanted).fetchone()[0])
        other = self.execute(_FIND_OTHER_RELEASE, wanted).fetchone() if wanted["releases"] is not None else None
        return {"has_newer": has_newer, "other_release": other[0] if other else ""}

    def _assign_lease(self, run_id: str, row: _SQLiteRow, lease_request: LeaseRequest) -> Lease:
        lease = Lease(
            run_id=run_id,
            token=row.token + 1,
            version=row.version,
            crashes=row.solo_crashes if row.crashes else 0,
            abandoned=row.crashes > 0 or row.owner is not None,
            is_suspect=row.crashes > 1,
            inbox_head=row.newest or 0,
            cancelled=self._is_cancelled(row.number),
        )
        self.execute(_SET_OWNER, (lease.token, lease_request.owner.name, row.number))
        return self._register_lease(lease, lease_request)

    def _register_lease(self, lease: Lease, lease_request: LeaseRequest) -> Lease:
        """Register a new lease, and renew its owner's leases if they expire in less than half of `lease_s`."""
        lease.term, lease.durability = lease_request.owner, lease_request.durability
        if (before := self.leases.find_lease(lease.run_id)) is not None:
            self.after_commit(partial(self.leases.mark_lost, before))
        self.leases.add(lease, lease_request.owner)
        self._renew(lease_request.owner, at_least_s=self.lease_s / 2)
        return lease

    def _renew(self, owner: LeaseOwner, at_least_s: float = math.inf) -> None:
        """Renew the leases of an owner, unless they are valid for `at_least_s` more seconds."""
        now = self.boot_clock()
        if owner.until - now < at_least_s:
            until = now + self.lease_s
            for lease in self.leases.find_leases(owner) if owner.until <= now else ():
                self._sync_lease(lease)
            self.execute(_UPSERT_OWNER, (owner.name, until))
            self.after_commit(partial(setattr, owner, "until", until))

    def preview_claim(self, agent: str, limit: int, work: ReadableWork) -> Claim | None:
        """Return the claim if it finds no runs, without writing; None if it may find some."""
        wanted = self._build_claim_values(agent, work) | {"company": 0, "limit": 1}
        for suspects in (True, False):
            wanted["suspect"] = suspects
            if self.execute(_SELECT_CLAIMABLE, wanted).fetchone() is not None:
                return None
        if self._find_dead_owners():
            return None
        return Claim(**self._find_left_runs(wanted)) if limit > 0 else Claim()

    def _find_dead_owners(self) -> list[str]:
        """Return the owners that are dead."""
        return [name for name, until in self.execute(_SELECT_OWNERS).fetchall() if not self._is_alive(name, until)]

    def _free_abandoned_runs(self) -> None:
        """Free the runs of owners that died, all at once, because one of them may have caused the death.

        Live owners of this store are renewed first: the machine may have slept through the end of their leases.
        """
        for owner in self.leases.renewable_owners():
            self._renew(owner, at_least_s=self.lease_s / 2)
        dead = self._find_dead_owners()
        for names in group_by_process(dead):
            company = sum([self.execute(_COUNT_OWNED_RUNS, (name,)).fetchone()[0] for name in names])
            now = self.now()
            for name in names:
                free = {"owner": name, "company": company, "now": now}
                values = {**free, "rest": 0.0, "newest": 0, "seen": 0, "seen_at": 0.0}
                self.execute(_FREE_RUNS, values)
                self.execute(_DELETE_WORKER, (name,))

    def _is_driven(self, run_id: str, owner: str | None) -> bool:
        """Return whether an owner that may be alive holds the lease. This store's leases are known; others expire."""
        if owner is None or self.leases.is_dropped(run_id, owner):
            return False
        (until,) = self.execute("SELECT max(until) FROM workers WHERE name = ?", (owner,)).fetchone()
        return self._is_alive(owner, until)

    def _is_alive(self, owner: str, until: float | None) -> bool:
        """Return whether an owner may be alive: its leases are valid, and its process is not known to be dead."""
        other = OwnerIdentity.parse(owner)
        left_s = -math.inf if until is None else until - self.boot_clock()
        is_seen_dead = not self.leases.is_ours(owner) and other.is_dead
        return other.is_current_boot and -self.outage.grace_s < left_s <= MAX_LEASE_S and not is_seen_dead

    def release(self, lease: Lease) -> bool:
        """Release the lease."""
        self.leases.release(lease)
        self._release_run(lease.run_id, lease.token, lease_owner(lease), lease)
        return True

    def _release_run(self, run_id: str, token: int, owner: LeaseOwner, lease: Lease | None = None) -> None:
        """Release a lease, and store the reads of its owner if the lease object still exists."""
        now = self.now()
        values: dict[str, Any] = {"id": run_id, "token": token, "owner": owner.name, "now": now}
        values |= {"rest": 0.0, "newest": 0}
        values |= (
            {"seen": 0, "seen_at": 0.0}
            if lease is None
            else {"seen": lease.inbox_read, "seen_at": lease.timers_read_at}
        )
        if lease is not None and lease.backoff_s:
            values |= {"rest": now + lease.backoff_s, "newest": lease.backoff_inbox_head}
        self.execute(_RELEASE_RUN, values)

    # The journal.

    def append(self, request: AppendRequest) -> bool:
        """Write events and remove inbox rows; refuse before the first write."""
        lease = request.lease
        self.leases.check(lease)
        row = self._sync_lease(lease)
        if row is None:
            raise lease_lost_error(lease)
        if row.version != request.expected_version:
            raise ConflictError(
                f"run {lease.run_id!r} is at version {row.version}, not {request.expected_version}; load it again"
            )
        if request.final:  # if other rows of the inbox are due, one row more than were consumed shows it
            due = self.execute(_SELECT_DUE_POSTS, (row.number, self.now(), len(request.taken) + 1)).fetchall()
            if not {number for (number,) in due} <= set(request.taken):
                return False
        for number in request.taken:
            self.execute(_MARK_TAKEN, (row.number, number))
        self._write_events(row.number, request.expected_version + 1, request.bodies)
        self._renew(lease_owner(lease), at_least_s=self.lease_s / 2)
        state, stop_reason, waiting, *facts, cost_usd, duration_s, paused = request.columns
        self.execute(_UPDATE_RUN, (state, *facts, request.columns.turn, paused, paused, row.number))
        if stop_reason is not None:
            self.execute(_SET_END, (waiting, stop_reason, cost_usd, duration_s, row.number))
            self._write_words(row.number, request.words or ())
        elif waiting != row.waiting:
            self.execute(_SET_WAITING, (waiting, row.number))
        if paused or request.columns.state in FINAL_STATES:
            self.execute(_MARK_CHANGED, (row.number,))
        return True

    def _sync_lease(self, lease: Lease) -> _SQLiteRow | None:
        """Return the row of a leased run, or None if the lease is lost. Update the lease accordingly."""
        row = self._find_row(lease.run_id)
        if row is None or (row.owner, row.token) != (lease_owner(lease).name, lease.token):
            self.after_commit(partial(self.leases.mark_lost, lease))
            return None
        if row.newest is not None and row.newest > lease.inbox_head:
            cancelled = self._is_cancelled(row.number)
            self.after_commit(partial(self.leases.notify_inbox, lease.run_id, row.newest, cancelled=cancelled))
        return row

    def _write_events(self, run: int, version: int, bodies: Sequence[str]) -> None:
        for start in range(0, len(bodies), MAX_EVENTS_PER_INSERT):
            chunk = bodies[start : start + MAX_EVENTS_PER_INSERT]
            rows = [value for index, body in enumerate(chunk) for value in (run, version + start + index, body)]
            self.execute(_insert_events_sql(len(chunk)), rows)
        for last in find_chunk_ends(max(version, 1), version + len(bodies) - 1):
            self._write_chunk(run, last)

    def _write_words(self, run: int, words: Sequence[str]) -> None:
        if self._searches_text:
            self.execute(_SET_WORDS, (run, " ".join(words)))

    def _write_chunk(self, run: int, last: int) -> None:
        """Replace the events up to version `last` by one row with a chunk."""
        rows = (run, last - CHUNK_EVENTS + 1, last)
        body = compress_chunk([body for (body,) in self.execute(_SELECT_BODIES, rows).fetchall()])
        if body is not None:
            self.execute(_DELETE_EVENTS, rows)
            self.execute(_insert_events_sql(1), (run, last, body))

    def read(self, run_id: str, after: int) -> JournalRecords:
        """Return the run's version, the header as record 0, and the events after `after`."""
        row = self._get_row(run_id)
        records = [(0, body) for (body,) in self.execute(_SELECT_HEADER, (row.number,)).fetchall()]
        for version, body, is_chunk in self.execute(_SELECT_EVENTS, (row.number, max(after, 0))).fetchall():
            records += decompress_chunk(run_id, version, body) if is_chunk else [(version, body)]
        return row.version, records

    def _header(self, run_id: str, number: int) -> Header:
        body = self.execute(_SELECT_HEADER, (number,)).fetchone()
        return read_header(run_id, body and body[0])

    # The inbox.

    def post(self, post: InboxPost) -> PostedItem:
        """Insert an item; the first post of a key wins."""
        run_id, item = post.run_id, post.item
        row = self._get_row(run_id)
        if (found := self.execute(_SELECT_POST, (row.number, post.key)).fetchone()) is not None:
            return resolve_duplicate_post(run_id, decode_post(run_id, found[0], post.key, found[1]), item)
        check_not_over(run_id, row.state, row.stop_reason)
        check_deadline(run_id, post.before, self.now())
        check_inbox_capacity(run_id, item, self.execute(_COUNT_INBOX, (row.number,)).fetchone()[0])
        number = self.execute(_SELECT_NEXT_NUMBER, (row.number,)).fetchone()[0]
        is_cancel = isinstance(item, Cancel)
        self.execute(_INSERT_POST, (row.number, number, post.key, post.text, int(is_cancel), post.due_at))
        if row.format < FORMAT:
            self.execute(_RAISE_FORMAT, (FORMAT, row.number))
        ready_at = self.now() if post.due_at is None else post.due_at
        self.execute(_MARK_CLAIMABLE, (ready_at, ready_at, row.number))
        self.after_commit(partial(self.leases.notify_inbox, run_id, number, cancelled=is_cancel))
        return PostedItem(number=number, key=post.key, item=item)

    def inbox(self, run_id: str) -> list[tuple[int, str, bytes]]:
        """Return the rows that are not consumed yet, oldest first."""
        return self.execute(_SELECT_INBOX, (self._get_row(run_id).number,)).fetchall()

    def _is_cancelled(self, run: int) -> bool:
        return bool(self.execute(_IS_CANCELLED, (run,)).fetchone()[0])

    # Lists.

    def runs(
        self, where: Filter, limit: int, order: RunOrder, after: tuple[float, str] | None
    ) -> tuple[RunSummary, ...]:
        """Return the first runs that match the filter."""
        clause, values = build_list(where, self._choose_syntax(where), order, after)
        rows = self.execute(f"{_SELECT_SUMMARIES} {clause} LIMIT ?", (*values, limit)).fetchall()
        return tuple(self._parse_summary(*row) for row in rows)

    def count(self, where: Filter, limit: int) -> int:
        """Return the number of runs that match the filter, up to `limit`."""
        clause, values = build_condition(where, self._choose_syntax(where), is_list=False)
        (count,) = self.execute(_COUNT_RUNS.replace("{clause}", clause), (*values, limit)).fetchone()
        return int(count)

    def _choose_syntax(self, where: Filter) -> ListSyntax:
        """Return the syntax by which a text is searched.

        Raises:
            MisuseError: if there is one, and it cannot be searched here.
        """
        query = _write_match(where.text or "")
        if where.text is not None and not self._searches_text:
            raise MisuseError(
                f"{self.path}: this SQLite has no FTS5, which searches text, or the file is read-only and has no words "
                "yet: use a Python whose sqlite3 has it, or list runs by the other filters"
            )
        if not query:
            return _SYNTAX
        (count,) = self.execute(_COUNT_MATCHES, (query, _FEW_MATCHES + 1)).fetchone()
        return _SYNTAX if count > _FEW_MATCHES else _SYNTAX_OF_FEW

    def _parse_summary(self, *row: Any) -> RunSummary:
        *facts, owner = row
        values: dict[str, Any] = dict(zip(SUMMARY_COLUMNS, facts, strict=True))
        return parse_summary(values, driven=self._is_driven(values["id"], owner), worker=owner)

    # Deletion.

    def delete(self, run_id: str) -> None:
        """Remove a run that is not being executed, and the runs of its subagents."""
        self._get_row(run_id)
        self._remove(self._find_removable([run_id]))
        self._has_removed = True

    def delete_session(self, session: str) -> int:
        """Remove all runs of a session, and the runs of their subagents. Return the number of runs in the session."""
        ids = [run_id for (run_id,) in self.execute(_SELECT_SESSION_RUNS, (session,)).fetchall()]
        self._remove(self._find_removable(ids))
        self._has_removed = True
        return len(ids)

    def prune(self, before: float, start: int, limit: int, *, unread: bool) -> tuple[int, int]:
        """Remove a batch of old finished runs that no kept run and no follower needs."""
        (read,) = self.execute("SELECT min(position) FROM followers").fetchone()
        values = {"before": before, "start": start, "read": None if unread else read}
        portion = self.execute(_SELECT_PRUNE_BATCH, {**values, "limit": limit}).fetchall()
        if not portion:
            self._has_removed |= self._left_words  # once for all batches, also those of a call that was interrupted
            return 0, -1
        (last,) = portion[-1]
        removable = self.execute(_SELECT_REMOVABLE, {**values, "last": last}).fetchall()
        old = [number for (number,) in removable]
        self._remove(old)
        self._left_words |= bool(old)
        return len(old), last

    def _find_removable(self, ids: Iterable[str]) -> list[int]:
        """Return the numbers of these runs and of their subagents', after checking that all of them can be removed."""
        rows = [row for run_id in ids for row in self.execute(_SELECT_DESCENDANTS, (run_id,)).fetchall()]
        found = {run_id for _number, run_id, _owner in rows}
        for _number, run_id, owner in rows:
            if self._is_driven(run_id, owner):
                raise LeaseHeldError(f"run {run_id!r} is being driven; cancel it before you delete it")
            for (follower,) in self.execute(_SELECT_SUCCESSORS, (run_id,)).fetchall():
                if follower not in found:
                    raise successor_exists_error(run_id, follower)
            for (caller,) in self.execute(_SELECT_OPEN_CALLER, (run_id,)).fetchall():
                if caller not in found:
                    raise caller_open_error(run_id, caller)
        return [number for number, *_ in rows]

    def _remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.execute("DELETE FROM posts WHERE run = ?", (number,))
            self.execute("DELETE FROM events WHERE run = ?", (number,))
            self.execute("DELETE FROM reads WHERE run = ?", (number,))
            self.execute("DELETE FROM feedback WHERE run = ?", (number,))
            self.execute("DELETE FROM runs WHERE number = ?", (number,))

    # Quotas.

    def take_quotas(self, uses: Sequence[QuotaUse], *, force: bool) -> float:
        """Take amounts from quotas that all processes share: all of them, or none."""
        now = self.now()
        self.execute("DELETE FROM quotas WHERE second <= ?", (now - QUOTA_WINDOW_S,))
        used = {use.name: dict(self.execute(_SELECT_QUOTA, (use.name,)).fetchall()) for use in uses}
        wait_s = 0.0 if force else check_quotas(uses, used, now)
        for use in () if wait_s else uses:
            self.execute(_TAKE_QUOTA, (use.name, int(now), use.amount))
        return wait_s

    # Records.

    def read_record(self, kind: str, key: str) -> RecordRow | None:
        """Return a record; None if there is none, or it has expired."""
        found = self.execute(_SELECT_RECORD, {"kind": kind, "key": key, "now": self.now()}).fetchone()
        return None if found is None else (*found,)

    def write_record(self, kind: str, key: str, text: str, revision: int, expires_at: float | None) -> int | None:
        """Write a record. Return its new revision; None if the stored one is not `revision`."""
        if self._read_revision(kind, key) != revision:
            return None
        if expires_at is not None:
            self.delete_expired_records(EXPIRED_PER_WRITE)
        self.execute(_WRITE_RECORD, (kind, key, text, expires_at))
        (written,) = self.execute("SELECT last_insert_rowid()").fetchone()
        return int(written)

    def list_records(self, kind: str, prefix: str, after: str, limit: int) -> list[RecordRow]:
        """Return the records of a kind that have not expired, in the order of their keys."""
        bounds = {"prefix": prefix, "after": after, "end": end_of_prefix(prefix), "limit": limit}
        return self.execute(_SELECT_RECORDS, {"kind": kind, "now": self.now(), **bounds}).fetchall()

    def delete_record(self, kind: str, key: str, revision: int | None) -> bool | None:
        """Delete a record. Return whether it existed; None if its revision is not `revision`."""
        found = self._read_revision(kind, key)
        if found and revision not in (None, found):
            return None
        self.execute("DELETE FROM records WHERE revision = ?", (found,))
        return found > 0

    def _read_revision(self, kind: str, key: str) -> int:
        """Return the revision of a record; 0 if there is none, or it has expired."""
        found = self.execute(_SELECT_REVISION, {"kind": kind, "key": key, "now": self.now()}).fetchone()
        return 0 if found is None else int(found[0])

    def delete_expired_records(self, limit: int) -> int:
        """Delete up to `limit` expired records. Return their number."""
        expired = self.execute(_SELECT_EXPIRED_RECORDS, (self.now(), limit)).fetchall()
        for row in expired:
            self.execute("DELETE FROM records WHERE revision = ?", row)
        return len(expired)

    # Feedback.

    def add_feedback(self, run_id: str, key: str, feedback: Feedback) -> None:
        """Record feedback on a run."""
        number = self._get_row(run_id).number
        if self.execute(_FIND_FEEDBACK, (number, key)).fetchone() is None:
            self.execute(_INSERT_FEEDBACK, {"run": number, "key": key, **attrs.asdict(feedback)})
            self.execute(_SET_RATING, (feedback.rating, number))

    def list_feedback(self, run_id: str) -> list[Feedback]:
        """Return the feedback on a run, oldest first."""
        rows = self.execute(_SELECT_FEEDBACK, (self._get_row(run_id).number,)).fetchall()
        return [Feedback(rating=rating, comment=comment, by=by, at=at) for rating, comment, by, at in rows]

    # Followers.

    def number_changes(self, limit: int) -> bool:
        """Give numbers to changes that have none. The file is locked, so they have the order of their commits."""
        numbers = self.execute(_SELECT_UNNUMBERED, (limit,)).fetchall()
        (last,) = self.execute(_SELECT_LAST_CHANGE).fetchone()
        for change, (number,) in enumerate(numbers, last + 1):
            self.execute(_SET_CHANGE, (change, number))
        self.execute(_ADVANCE_CHANGES, (len(numbers),))
        return len(numbers) == limit

    def add_follower(self, name: str, *, from_now: bool) -> None:
        """Create a follower, unless it exists."""
        (last,) = self.execute(_SELECT_LAST_CHANGE).fetchone()
        self.execute(_INSERT_FOLLOWER, (name, last if from_now else 0))

    def has_unread(self, name: str, after: int) -> bool:
        """Return whether there may be something for a follower. If it does not exist, `take_unread` says so."""
        return bool(self.execute(_HAS_UNREAD, (after, name)).fetchone() != (0,))

    def take_unread(self, name: str, holder: str, after: int, lease_s: float, limit: int) -> list[UnreadRun]:
        """Return runs that changed after the follower's position, and hold the follower."""
        if (found := self.execute(_SELECT_FOLLOWER, (name,)).fetchone()) is None:
            raise missing_follower_error(name)
        position, held_by, until = found
        now = self.now()
        if held_by != holder and until > now:
            return []
        self.execute(_HOLD_FOLLOWER, (holder, now + lease_s, name))
        rows = self.execute(_SELECT_CHANGED, (max(position, after), limit)).fetchall()
        unread: list[UnreadRun] = []
        for run, run_id, change in rows:
            self.execute(_INSERT_READ, (run, name))
            key, version = self.execute(_SELECT_READ, (run, name)).fetchone()
            unread.append(UnreadRun(key=str(key), run_id=run_id, change=change, after=version))
        return unread

    def confirm_read(
        self, name: str, holder: str, position: int, versions: Mapping[str, int], *, release: bool
    ) -> None:
        """Record that the follower has read all changes up to a number."""
        found = self.execute(_SELECT_FOLLOWER, (name,)).fetchone()
        if found is None or found[1] != holder:
            raise follower_lost_error(name)
        self.execute(_ADVANCE_FOLLOWER, (position, name))
        for key, version in versions.items():
            self.execute(_UPDATE_READ, (version, int(key), name))
        if release:
            self.execute(_HOLD_FOLLOWER, ("", 0.0, name))

    def followers(self) -> list[FollowerStatus]:
        """Return the followers and how far they are behind, by name."""
        now = self.now()
        return [
            FollowerStatus(name=name, position=position, lag=lag, waiting_since=since, held=until > now)
            for name, position, until, lag, since in self.execute(_SELECT_FOLLOWERS).fetchall()
        ]

    def drop_follower(self, name: str) -> bool:
        """Remove a follower. Return whether it existed."""
        self.execute("DELETE FROM reads WHERE follower = ?", (name,))
        is_found = self.execute("SELECT 1 FROM followers WHERE name = ?", (name,)).fetchone() is not None
        self.execute("DELETE FROM followers WHERE name = ?", (name,))
        return is_found

    # Maintenance.

    def renew_leases(self) -> None:
        """Renew the leases of live event loops, release dropped ones, and detect new posts and lost leases."""
        with self.transaction(write=True, durability="normal"):
            for owner in self.leases.renewable_owners():
                self._renew(owner)
            for run_id, held in self.leases:
                lease = held.lease_ref()
                if lease is None:
                    self._release_run(run_id, held.token, held.owner)
                    self.leases.remove(run_id)
                else:
                    self._sync_lease(lease)

    def compact(self) -> None:
        """Shrink the file to its content, if no run is being executed."""
        with self.transaction(write=False):
            leases = self.execute(_SELECT_OWNED).fetchall()
        if driven := [run_id for run_id, *lease in leases if self._is_driven(run_id, *lease)]:
            raise LeaseHeldError(
                f"run {driven[0]!r} is being driven, and would wait while {self.path} is compacted: stop the workers "
                "first"
            )
        self.vacuum()

    def close(self) -> None:
        """Release the leases, and close the file."""
        try:
            if self.leases:
                with self.transaction(write=True, durability="normal"):
                    for run_id, held in self.leases:
                        self._release_run(run_id, held.token, held.owner)
                    for owner in self.leases.owners():
                        self.execute(_DELETE_WORKER, (owner.name,))
                        owner.until = 0.0
        finally:
            self.leases.clear()
            self.close_file()

    def _get_row(self, run_id: str) -> _SQLiteRow:
        row = self._find_row(run_id)
        if row is None:
            raise RunNotFoundError(f"{self.path} holds no run {run_id!r}; `agentfsm runs` lists its runs")
        return row

    def _find_row(self, run_id: str) -> _SQLiteRow | None:
        row = self.execute(_SELECT_RUN, (run_id,)).fetchone()
        if row is None:
            return None
        if {*map(type, row[:6])} != {int}:  # SQLite does not enforce the types of columns
            raise CorruptError(f"run {run_id!r}: its row is damaged: restore a backup")
        return _SQLiteRow(*row)


@cache
def _insert_events_sql(count: int) -> str:
    return _INSERT_EVENTS + ", ".join(["(?, ?, ?)"] * count)


def _absolute_path(path: str | os.PathLike[str]) -> str:
    """Return the path as absolute, so that it means the same file after a change of the working directory.

    Raises:
        MisuseError: if it is not the path of a file.
    """
    if not isinstance(path, str | os.PathLike):
        raise MisuseError(f"SQLiteStore(path={path!r}): give the path of a file, for example 'runs.db'")
    text = os.fspath(path)
    if not isinstance(text, str) or text in ("", ":memory:"):
        raise MisuseError(f"SQLiteStore({text!r}): give the path of a file; to keep runs in memory use MemoryStore()")
    return str(Path(text).absolute())


@attrs.define(eq=False, repr=False)
class SQLiteStore(ThreadedStore[_SQLiteBackend]):
    """A store that keeps journals in a SQLite file, which several processes of one machine may share.

    A forked child may use it if the file was not open at the time of the fork. A new file and its log are readable only
    for their owner (mode 0600); an existing file keeps its mode. A file that cannot be written can be read.

    A lease lasts `lease_s` seconds. The store's thread renews it, unless the event loop of its owner is blocked for
    more than `blocked_s` seconds. If the owner is killed, another process of the machine takes its runs at once if it
    can see that the owner is dead, else when the lease expires.
    """

    path: str = attrs.field(converter=_absolute_path)
    """Path of the file, made absolute. The file is created at first use; its folder must exist."""

    connect: Connect = attrs.field(default=connect_sqlite3, kw_only=True)
    """Function that opens the file, given its absolute path, or a `file:` URI if the file is read-only. Default
    `sqlite3.connect`; tests replace it to inject faults.
    """

    lease_s: float = attrs.field(default=LEASE_S, kw_only=True, validator=LEASE_SECONDS)
    """Seconds after which other workers take over the runs of a worker that vanished, up to 3,600."""

    patience_s: float = attrs.field(default=PATIENCE_S, kw_only=True, validator=NOT_NEGATIVE)
    """Seconds that a call waits for another connection's transaction before it fails, 0 or more. The appends of a run
    that is being executed are retried for ten minutes.
    """

    clock: Clock = attrs.field(factory=SystemClock, kw_only=True)
    """Source of the current time; tests replace it."""

    _clock: Callable[[], float] = attrs.field(default=boot_clock, init=False)
    """Clock of the leases. Tests replace it before the first use, so that they need not wait for leases to expire."""

    async def claim(
        self,
        agent: str,
        *,
        limit: int,
        durability: Durability = "full",
        suspects: bool = False,
        newest_format: int = FORMAT,
        releases: Collection[str] | None = None,
    ) -> Claim:
        """Take the leases of runs that are ready. If there are none, the file is only read."""
        DURABILITY.check("claim", "durability", durability)
        work = ReadableWork(newest_format, None if releases is None else tuple(releases))
        nothing = await self._run_job(lambda backend: backend.preview_claim(agent, limit, work), writes=False)
        if nothing is not None:
            return nothing
        return await super().claim(
            agent,
            limit=limit,
            durability=durability,
            suspects=suspects,
            newest_format=newest_format,
            releases=releases,
        )

    def _start_watching(self, writer: StoreWriter[_SQLiteBackend], topic: str) -> None:  # noqa: ARG002  a file has one counter for all changes
        with suppress(AgentError):  # the store is closed
            writer.submit(StoreJob(lambda _backend: None, writes=False))  # starts the thread, which then polls the file

    async def compact(self) -> int:
        """Shrink the file by the space of removed runs. Return by how many bytes the file and its log became smaller.

        A removed run is overwritten in the file, but the file keeps its size, and its log (-wal) may keep the content
        until it is overwritten. This method rewrites the file and empties the log. Other processes may have the file
        open: they can read meanwhile, but writes wait. It takes about a second for 100 MB, and as much free space as
        the file has now. A cancelled call continues in the background.

        Raises:
            LeaseHeldError: if a run is being executed.
            StoreError: if the file is locked for longer than `patience_s`, another process keeps the log busy, or the
                disk is full; the file is then unchanged, or compacted.
        """
        return await start_in_thread(self._compact).wait()

    def _compact(self) -> int:
        backend, before = self._create_backend(), self._measure_bytes()
        try:
            backend.compact()
        except AgentError:
            raise
        except Exception as error:
            raise backend.translate_error(error) from error
        finally:
            backend.close_file()
        return before - self._measure_bytes()

    def _measure_bytes(self) -> int:
        return sum(file.stat().st_size for name in ("", "-wal") if (file := Path(f"{self.path}{name}")).exists())

    def _create_backend(self) -> _SQLiteBackend:
        worker = str(OwnerIdentity.generate())
        return _SQLiteBackend(
            worker_name=worker,
            path=self.path,
            schema=SCHEMA,
            connect=self.connect,
            patience_s=self.patience_s,
            outage=Outage(self.lease_s),
            lease_s=self.lease_s,
            clock=self.clock,
            boot_clock=self._clock,
            leases=LeaseTable(self.lease_s, self.blocked_s, worker),
        )
