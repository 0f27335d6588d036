"""Journals in a SQLite file: the store that needs nothing but a path, on asyncio and trio alike.

One thread owns the one connection and commits in groups (`writer`); the file is opened and guarded by `sqlite_file`.
Here are the tables and the statements.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.codec import encode_header
from agentfsm.core.errors import (
    ConflictError,
    CorruptError,
    LeaseHeldError,
    MisuseError,
    RunNotFoundError,
)
from agentfsm.core.inbox import Cancel, Posted
from agentfsm.core.run import Header
from agentfsm.core.value import Value
from agentfsm.ports import Clock, Durability, Filter, Lease, Summary, SystemClock, lost
from agentfsm.stores.common import (
    LISTED,
    check_in_time,
    check_not_over,
    check_same_prompt,
    checked_session,
    checked_winner,
    followed,
    prompt_of,
    summary_from,
    without_history,
)
from agentfsm.stores.holdings import Holdings
from agentfsm.stores.owner import Owner, boot_clock
from agentfsm.stores.packs import PACK, ends_of_packs, pack, unpack
from agentfsm.stores.sqlite_file import Connect, DatabaseFile, Schema, connect_sqlite3
from agentfsm.stores.threaded import (
    LEASE_S,
    MAX_LEASE_S,
    Entry,
    Opening,
    Post,
    Records,
    ThreadedStore,
    check_lease_s,
    posted,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

# Bits of the number from which tokens count on: a run is not deleted and made again often enough to meet the same.
TOKEN_BITS: Final = 40
# Events written by one statement at most: it has three variables each, and SQLite may stop at 999.
RECORDS: Final = 100

_INDEXES_OF_2: Final = (
    "CREATE INDEX runs_by_after ON runs (after) WHERE after IS NOT NULL",
    "CREATE INDEX runs_by_parent ON runs (parent) WHERE parent IS NOT NULL",
    "CREATE INDEX runs_open ON runs (agent, updated_at) WHERE state NOT IN ('done', 'error')",
)

SCHEMA: Final = Schema(
    version=3,
    # A file of version 2 has no packs, and needs no change to get some.
    tables=frozenset({"runs", "events", "inbox"}),
    statements=(
        # What a list shows, and who drives the run. `number` stands for the id in the other tables.
        """
        CREATE TABLE runs (
            number      INTEGER PRIMARY KEY,
            id          TEXT NOT NULL UNIQUE,
            session     TEXT,
            after       TEXT,              -- the run that this one goes on from
            parent      TEXT,              -- the run whose tool it is
            agent       TEXT NOT NULL,
            user        TEXT,
            prompt      TEXT NOT NULL,     -- its beginning, for people
            created_at  REAL NOT NULL,     -- seconds since 1970, as all times but `until`
            updated_at  REAL NOT NULL,
            state       TEXT NOT NULL,
            stop_reason TEXT,
            waiting     INTEGER NOT NULL,  -- whether only something from outside can move it on
            wakes_at    REAL,              -- when what it waits for is decided by time
            turn        INTEGER NOT NULL,
            version     INTEGER NOT NULL,  -- events in the journal
            tokens      INTEGER NOT NULL,
            token       INTEGER NOT NULL,  -- the fencing token: grows with each owner
            crashes     INTEGER NOT NULL,  -- owners that never gave it back, since it finished a turn
            owner       TEXT,              -- who drives the run; NULL for nobody
            until       REAL,              -- the end of the lease, seconds of the owner's boot clock
            seen        INTEGER NOT NULL,  -- the newest inbox number that an owner has looked at
            seen_at     REAL NOT NULL      -- when one last looked for timers
        )
        """,
        "CREATE INDEX runs_by_time ON runs (created_at)",
        "CREATE INDEX runs_by_session ON runs (session) WHERE session IS NOT NULL",
        *_INDEXES_OF_2,
        # The journal; entry 0 is the header. Not WITHOUT ROWID: records of some hundred bytes then lie densely, in the
        # order in which they came (25 % smaller), and a commit of 300 runs touches a handful of pages instead of 300.
        """
        CREATE TABLE events (
            run     INTEGER NOT NULL,
            version INTEGER NOT NULL,
            body    TEXT NOT NULL,     -- or a BLOB: a pack that ends with this version, see `packs`
            UNIQUE (run, version)
        )
        """,
        # Every post there ever was, so that a key stays taken.
        """
        CREATE TABLE inbox (
            run    INTEGER NOT NULL,
            number INTEGER NOT NULL,
            key    TEXT NOT NULL,
            item   TEXT NOT NULL,
            cancel INTEGER NOT NULL,  -- whether the item asks for the end of the run
            due_at REAL,              -- when it is taken in at the earliest; NULL for at once
            taken  INTEGER NOT NULL,
            PRIMARY KEY (run, number),
            UNIQUE (run, key)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX inbox_open ON inbox (run, number) WHERE NOT taken",
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
            *_INDEXES_OF_2,
        ),
    },
)

# Texts are read as bytes: a record that is damaged is then ours to report, and not SQLite's.
_RUN: Final = """
SELECT number, token, crashes, version, owner, until, state, stop_reason,
       (SELECT max(number) FROM inbox WHERE run = runs.number AND NOT taken)
FROM runs WHERE id = ?
"""
_INSERT_RUN: Final = """
INSERT INTO runs (id, session, after, parent, agent, user, prompt, created_at,
                  state, stop_reason, waiting, wakes_at, turn, version, tokens, updated_at,
                  token, owner, until, crashes, seen, seen_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0)
"""
_LAST_OF_SESSION: Final = "SELECT id, state FROM runs WHERE session = ? ORDER BY number DESC LIMIT 1"
_TAKE: Final = "UPDATE runs SET token = ?, crashes = ?, owner = ?, until = ? WHERE number = ?"
_RENEW: Final = "UPDATE runs SET until = ? WHERE number = ?"
_LET_GO: Final = """
UPDATE runs SET owner = NULL, until = NULL, seen = max(seen, ?), seen_at = max(seen_at, ?)
WHERE id = ? AND token = ? AND owner = ?
"""
# A turn that was finished clears the crashes: the values on the right are those before the update.
_ADVANCE: Final = """
UPDATE runs
SET state = ?, stop_reason = ?, waiting = ?, wakes_at = ?, turn = ?, version = ?, tokens = ?, updated_at = ?,
    until = ?, crashes = crashes * (turn = ?)
WHERE number = ?
"""
_INSERT_EVENTS: Final = "INSERT INTO events (run, version, body) VALUES "
_HEADER: Final = "SELECT CAST(body AS BLOB) FROM events WHERE run = ? AND version = 0"
_EVENTS: Final = """
SELECT version, CAST(body AS BLOB), typeof(body) = 'blob' FROM events WHERE run = ? AND version > ? ORDER BY version
"""
_UNPACKED: Final = """
SELECT CAST(body AS BLOB) FROM events WHERE run = ? AND version BETWEEN ? AND ? ORDER BY version
"""
_DROP: Final = "DELETE FROM events WHERE run = ? AND version BETWEEN ? AND ?"
_OPEN: Final = "SELECT number, key, CAST(item AS BLOB) FROM inbox WHERE run = ? AND NOT taken ORDER BY number"
_DUE_NUMBERS: Final = """
SELECT number FROM inbox WHERE run = ? AND NOT taken AND (due_at IS NULL OR due_at <= ?) LIMIT ?
"""
_IS_CANCELLED: Final = "SELECT EXISTS (SELECT 1 FROM inbox WHERE run = ? AND NOT taken AND cancel)"
_STRIKE: Final = "UPDATE inbox SET taken = 1 WHERE run = ? AND number = ?"
_BY_KEY: Final = "SELECT number, CAST(item AS BLOB) FROM inbox WHERE run = ? AND key = ?"
_NEXT_NUMBER: Final = "SELECT coalesce(max(number), 0) + 1 FROM inbox WHERE run = ?"
_POST: Final = "INSERT INTO inbox (run, number, key, item, cancel, due_at, taken) VALUES (?, ?, ?, ?, ?, ?, 0)"
_LIST: Final = f"SELECT {', '.join(LISTED)}, owner, until FROM runs"  # noqa: S608  of our own names
_NEWEST_FIRST: Final = "ORDER BY created_at DESC, number DESC LIMIT ?"
_IN_REACH: Final = """
SELECT id, owner, until FROM runs
WHERE agent = ? AND state NOT IN ('done', 'error') AND parent IS NULL
  AND (NOT waiting OR wakes_at <= ? OR EXISTS (
      SELECT 1 FROM inbox
      WHERE run = runs.number AND NOT taken
        AND ((due_at IS NULL AND number > seen) OR (due_at <= ? AND (number > seen OR due_at > seen_at)))))
ORDER BY updated_at, number
"""
_BELOW: Final = """
WITH RECURSIVE below (number, id) AS (
    SELECT number, id FROM runs WHERE id = ?
    UNION SELECT runs.number, runs.id FROM runs JOIN below ON runs.parent = below.id)
SELECT runs.number, runs.id, runs.owner, runs.until FROM runs JOIN below USING (number)
"""
_FOLLOWERS: Final = "SELECT id FROM runs WHERE after = ? ORDER BY number"
_OF_SESSION: Final = "SELECT id FROM runs WHERE session = ? ORDER BY number"
_OLD: Final = "state IN ('done', 'error') AND updated_at < :before"
_PORTION: Final = f"SELECT number FROM runs WHERE number > :start AND {_OLD} ORDER BY number LIMIT :limit"  # noqa: S608
# All that can go only together with old runs: what goes on from them, their callers, the agents below, their sessions.
# Of these, what may not go yet, and all that this needs: what it goes on from, too. Each step leads to runs and to
# sessions, so that a long session is gone through once.
_REMOVABLE: Final = f"""
WITH RECURSIVE
    step (way) AS (VALUES (0), (1), (2), (3)),
    kin (run, session) AS (
        SELECT id, NULL FROM runs WHERE number > :start AND number <= :last AND {_OLD}
        UNION SELECT CASE way WHEN 0 THEN runs.id WHEN 1 THEN runs.parent END, CASE way WHEN 2 THEN runs.session END
        FROM kin CROSS JOIN runs CROSS JOIN step
        WHERE runs.id = kin.run OR runs.after = kin.run OR runs.parent = kin.run OR runs.session = kin.session),
    kept (run, session) AS (
        SELECT id, NULL FROM kin CROSS JOIN runs WHERE id = kin.run AND NOT ({_OLD})
        UNION SELECT CASE way WHEN 0 THEN runs.id WHEN 1 THEN runs.parent WHEN 3 THEN runs.after END,
            CASE way WHEN 2 THEN runs.session END
        FROM kept CROSS JOIN runs CROSS JOIN step
        WHERE runs.id = kept.run OR runs.parent = kept.run OR runs.session = kept.session)
SELECT number FROM kin CROSS JOIN runs WHERE id = kin.run AND id NOT IN (SELECT run FROM kept WHERE run IS NOT NULL)
"""  # noqa: S608


@attrs.frozen
class _Row(Value):
    """What the statements need to know of a run, in the order of `_RUN`."""

    number: int
    token: int
    crashes: int
    version: int
    owner: str | None
    until: float | None
    state: str
    stop_reason: str | None
    newest: int | None
    # The newest inbox number not taken yet.


@attrs.define(eq=False, repr=False, kw_only=True)
class _SQLiteLedger(DatabaseFile):
    """The tables. It belongs to the writer's thread."""

    lease_s: float
    clock: Clock
    boot_clock: Callable[[], float]
    holdings: Holdings = attrs.field(
        default=attrs.Factory(lambda self: Holdings(self.lease_s), takes_self=True), init=False
    )
    _owner: str = attrs.field(factory=lambda: str(Owner.here()), init=False)

    @contextmanager
    def transaction(
        self, *, write: bool, durability: Durability = "full", runs: Collection[str] = ()
    ) -> Iterator[None]:
        """Run the block in one transaction; where that is rolled back, leases are held as before."""
        block = DatabaseFile.transaction(self, write=write, durability=durability, runs=runs)
        with self.holdings.transaction(), block:
            yield

    def now(self) -> float:
        """Seconds since 1970."""
        return self.clock.now()

    # Runs and their leases.

    def create(self, opening: Opening, durability: Durability) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        header = opening.header
        row = self._find(header.id)
        if row is None:
            header = self._in_session(header)
            return header, self._insert(header, opening, durability)
        stored = self._header(header.id, row.number)
        check_same_prompt(stored, header)
        return stored, self._take(header.id, row, durability)

    def _in_session(self, header: Header) -> Header:
        last = None if header.session is None else self.execute(_LAST_OF_SESSION, (header.session,)).fetchone()
        if last is None and header.after is not None and self._find(header.after) is None:
            raise without_history(header)
        return checked_session(header, last)

    def _insert(self, header: Header, opening: Opening, durability: Durability) -> Lease:
        """Insert a run, ours to drive."""
        body, prompt = encode_header(header), prompt_of(header)
        names = (header.id, header.session, header.after, header.parent, header.agent, header.user)
        # Tokens count on from a number by chance: a late word of a deleted run's owner is none to its successor.
        token = secrets.randbits(TOKEN_BITS)
        values = (*names, prompt, header.created_at, *opening.facts, token, self._owner, self._until())
        self.execute(_INSERT_RUN, values)
        (number,) = self.execute("SELECT last_insert_rowid()").fetchone()
        self._write_events(number, 0, (body, *opening.bodies))
        lease = Lease(run_id=header.id, token=token, version=opening.facts.version, durability=durability)
        self.holdings.add(lease)
        return lease

    def take(self, run_id: str, durability: Durability) -> Lease:
        """Take the lease of a run that exists."""
        return self._take(run_id, self._row(run_id), durability)

    def _take(self, run_id: str, row: _Row, durability: Durability) -> Lease:
        if self._is_driven(run_id, row.owner, row.until):
            raise LeaseHeldError(f"run {run_id!r} is being driven by another worker; wait for it, or resume it")
        lease = Lease(
            run_id=run_id,
            token=row.token + 1,
            version=row.version,
            durability=durability,
            crashes=row.crashes + (row.owner not in (None, self._owner)),
            newest=row.newest or 0,
            cancelled=self._is_cancelled(row.number),
        )
        self.execute(_TAKE, (lease.token, lease.crashes, self._owner, self._until(), row.number))
        self.holdings.add(lease)
        return lease

    def _is_driven(self, run_id: str, owner: str | None, until: float | None) -> bool:
        """Whether somebody who may be alive holds the lease. Of our own leases we know; others' end with their time."""
        if owner is None or until is None:
            return False
        if owner == self._owner:
            return self.holdings.is_held(run_id)
        other = Owner.parse(owner)
        left_s = until - self.boot_clock()
        return other.is_of_this_boot and 0 < left_s <= MAX_LEASE_S and not other.is_dead

    def release(self, lease: Lease) -> bool:
        """Give the lease back."""
        self.holdings.give_back(lease)
        self._let_go(lease.run_id, lease.token, lease.seen, lease.seen_at)
        return True

    def _let_go(self, run_id: str, token: int, seen: int = 0, seen_at: float = 0.0) -> None:
        self.execute(_LET_GO, (seen, seen_at, run_id, token, self._owner))

    # The journal.

    def append(self, entry: Entry) -> bool:
        """Write events and strike inbox rows; refusals come before the first write."""
        lease = entry.lease
        self.holdings.check(lease)
        row = self._mine(lease)
        if row is None:
            raise lost(lease)
        if row.version != entry.before:
            raise ConflictError(f"run {lease.run_id!r} is at version {row.version}, not {entry.before}; load it again")
        if entry.final and self._holds_more(row.number, entry.taken):
            return False
        for number in entry.taken:
            self.execute(_STRIKE, (row.number, number))
        self._write_events(row.number, entry.before + 1, entry.bodies)
        self.execute(_ADVANCE, (*entry.facts, self._until(), entry.facts.turn, row.number))
        return True

    def _mine(self, lease: Lease) -> _Row | None:
        """Return the row of a run that we drive, None when we do not any more; tell the lease that, or what is new."""
        row = self._find(lease.run_id)
        if row is None or (row.owner, row.token) != (self._owner, lease.token):
            self.after_commit(partial(self.holdings.lose, lease))
            return None
        if row.newest is not None and row.newest > lease.newest:
            cancelled = self._is_cancelled(row.number)
            self.after_commit(partial(self.holdings.tell, lease.run_id, row.newest, cancelled=cancelled))
        return row

    def _write_events(self, run: int, version: int, bodies: Sequence[str]) -> None:
        for start in range(0, len(bodies), RECORDS):
            chunk = bodies[start : start + RECORDS]
            rows = [value for index, body in enumerate(chunk) for value in (run, version + start + index, body)]
            self.execute(_insert_events(len(chunk)), rows)
        for last in ends_of_packs(max(version, 1), version + len(bodies) - 1):
            self._pack(run, last)

    def _pack(self, run: int, last: int) -> None:
        """Put the newest events of a long journal into one row."""
        rows = (run, last - PACK + 1, last)
        body = pack([body for (body,) in self.execute(_UNPACKED, rows).fetchall()])
        if body is not None:
            self.execute(_DROP, rows)
            self.execute(_insert_events(1), (run, last, body))

    def read(self, run_id: str, after: int) -> Records:
        """Return the run's version, and the records: the header as 0, and those after that version."""
        row = self._row(run_id)
        records = [(0, body) for (body,) in self.execute(_HEADER, (row.number,)).fetchall()]
        for version, body, is_pack in self.execute(_EVENTS, (row.number, max(after, 0))).fetchall():
            records += unpack(run_id, version, body) if is_pack else [(version, body)]
        return row.version, records

    def _header(self, run_id: str, number: int) -> Header:
        body = self.execute(_HEADER, (number,)).fetchone()
        return read_header(run_id, body and body[0])

    # The inbox.

    def post(self, post: Post) -> Posted:
        """Insert an item; the first of a key wins."""
        run_id, item = post.run_id, post.item
        row = self._row(run_id)
        if (found := self.execute(_BY_KEY, (row.number, post.key)).fetchone()) is not None:
            return checked_winner(run_id, posted(run_id, found[0], post.key, found[1]), item)
        check_not_over(run_id, row.state, row.stop_reason)
        check_in_time(run_id, post.before, self.now())
        number = self.execute(_NEXT_NUMBER, (row.number,)).fetchone()[0]
        is_cancel = isinstance(item, Cancel)
        self.execute(_POST, (row.number, number, post.key, post.text, int(is_cancel), post.due_at))
        self.after_commit(partial(self.holdings.tell, run_id, number, cancelled=is_cancel))
        return Posted(number=number, key=post.key, item=item)

    def inbox(self, run_id: str) -> list[tuple[int, str, bytes]]:
        """Return the rows that are not taken yet, oldest first."""
        return self.execute(_OPEN, (self._row(run_id).number,)).fetchall()

    def _holds_more(self, run: int, taken: Sequence[int]) -> bool:
        """Whether the inbox holds anything else; one row more than were taken is enough to know."""
        rows = self.execute(_DUE_NUMBERS, (run, self.now(), len(taken) + 1)).fetchall()
        return not {number for (number,) in rows} <= set(taken)

    def _is_cancelled(self, run: int) -> bool:
        return bool(self.execute(_IS_CANCELLED, (run,)).fetchone()[0])

    # Lists.

    def runs(self, where: Filter, limit: int) -> tuple[Summary, ...]:
        """Return the newest runs that the filter takes, newest first."""
        wanted = {name: value for name, value in attrs.asdict(where).items() if value is not None}
        tests = [f"{'created_at <' if name == 'before' else f'{name} ='} ?" for name in wanted]
        clause = f"WHERE {' AND '.join(tests)}" if tests else ""
        rows = self.execute(f"{_LIST} {clause} {_NEWEST_FIRST}", (*wanted.values(), limit)).fetchall()
        return tuple(self._summary(*row) for row in rows)

    def _summary(self, *row: Any) -> Summary:
        *facts, owner, until = row
        values: dict[str, Any] = dict(zip(LISTED, facts, strict=True))
        return summary_from(values, driven=self._is_driven(values["id"], owner, until))

    def due(self, agent: str, limit: int) -> tuple[str, ...]:
        """Return the ids of runs that a worker can move on now."""
        now = self.now()
        rows = self.execute(_IN_REACH, (agent, now, now)).fetchall()
        return tuple([run_id for run_id, *lease in rows if not self._is_driven(run_id, *lease)][:limit])

    # The end of runs.

    def delete(self, run_id: str) -> None:
        """Remove a run that nobody drives, and the runs below it."""
        self._row(run_id)
        self._remove(self._removable([run_id]))

    def delete_session(self, session: str) -> int:
        """Remove all runs of a session, and the runs below them."""
        ids = [run_id for (run_id,) in self.execute(_OF_SESSION, (session,)).fetchall()]
        self._remove(self._removable(ids))
        return len(ids)

    def prune(self, before: float, start: int, limit: int) -> tuple[int, int]:
        """Remove a portion of what is over and old, and nothing still needs."""
        portion = self.execute(_PORTION, {"before": before, "start": start, "limit": limit}).fetchall()
        if not portion:
            return 0, -1
        (last,) = portion[-1]
        removable = self.execute(_REMOVABLE, {"before": before, "start": start, "last": last}).fetchall()
        old = [number for (number,) in removable]
        self._remove(old)
        return len(old), last

    def _removable(self, ids: Iterable[str]) -> list[int]:
        """Return the numbers of runs and those below them, if nobody drives one of them or goes on from one."""
        rows = [row for run_id in ids for row in self.execute(_BELOW, (run_id,)).fetchall()]
        found = {run_id for _number, run_id, *_lease in rows}
        for _number, run_id, *lease in rows:
            if self._is_driven(run_id, *lease):
                raise LeaseHeldError(f"run {run_id!r} is being driven; cancel it before you delete it")
            for (follower,) in self.execute(_FOLLOWERS, (run_id,)).fetchall():
                if follower not in found:
                    raise followed(run_id, follower)
        return [number for number, *_ in rows]

    def _remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.execute("DELETE FROM inbox WHERE run = ?", (number,))
            self.execute("DELETE FROM events WHERE run = ?", (number,))
            self.execute("DELETE FROM runs WHERE number = ?", (number,))

    # Upkeep.

    def beat(self) -> None:
        """Renew the leases that are held, let go of those that were dropped, learn of news and losses."""
        with self.transaction(write=True, durability="normal"):
            for run_id, held in self.holdings:
                lease = held.lease()
                if lease is None:
                    self._let_go(run_id, held.token)
                    self.holdings.drop(run_id)
                elif (row := self._mine(lease)) is not None:
                    self.execute(_RENEW, (self._until(), row.number))

    def close(self) -> None:
        """Let go of the leases, and close the file."""
        try:
            if self.holdings:
                with self.transaction(write=True, durability="normal"):
                    for run_id, held in self.holdings:
                        self._let_go(run_id, held.token)
        finally:
            self.holdings.clear()
            self.shut()

    def _until(self) -> float:
        return self.boot_clock() + self.lease_s

    def _row(self, run_id: str) -> _Row:
        row = self._find(run_id)
        if row is None:
            raise RunNotFoundError(f"{self.path} holds no run {run_id!r}; `agentfsm runs` lists those that it holds")
        return row

    def _find(self, run_id: str) -> _Row | None:
        row = self.execute(_RUN, (run_id,)).fetchone()
        if row is None:
            return None
        if {*map(type, row[:4])} != {int}:  # SQLite keeps what it finds, whatever the column's type
            raise CorruptError(f"run {run_id!r}: its row is damaged: restore a backup")
        return _Row(*row)


@cache
def _insert_events(count: int) -> str:
    return _INSERT_EVENTS + ", ".join(["(?, ?, ?)"] * count)


def _file_path(path: str | os.PathLike[str]) -> str:
    """Make the path absolute, so that it means the same file after a change of folder."""
    text = os.fspath(path)
    if not isinstance(text, str) or text in ("", ":memory:"):
        raise MisuseError(f"SQLiteStore({text!r}): give the path of a file; to keep runs in memory use MemoryStore()")
    return str(Path(text).absolute())


@attrs.define(eq=False, repr=False)
class SQLiteStore(ThreadedStore[_SQLiteLedger]):
    """Keeps journals in a SQLite file that several processes of one machine may share.

    A forked child may use it if the file was not open at the time of the fork.

    A lease lasts `lease_s` seconds and is renewed by the store's thread, so a blocked event loop loses none. When an
    owner is killed its runs may be taken at once by another process of the machine that can see that it is dead, else
    when the lease ends.

    Args:
        path: Of the file, made at first use; its folder has to exist.
        connect: Opens the file instead of `sqlite3.connect`, for tests that inject faults.
        lease_s: Seconds, up to 3,600: how long a worker that vanished keeps others waiting.
        clock: Tells the date; a test may give its own.
    """

    path: str = attrs.field(converter=_file_path)
    connect: Connect = attrs.field(default=connect_sqlite3, kw_only=True)
    lease_s: float = attrs.field(default=LEASE_S, kw_only=True, validator=check_lease_s)
    clock: Clock = attrs.field(factory=SystemClock, kw_only=True)
    _clock: Callable[[], float] = attrs.field(default=boot_clock, init=False)
    # A test sets it before the first use, and need not wait for leases to end.

    def _ledger(self) -> _SQLiteLedger:
        return _SQLiteLedger(
            path=self.path,
            schema=SCHEMA,
            connect=self.connect,
            lease_s=self.lease_s,
            clock=self.clock,
            boot_clock=self._clock,
        )
