"""Journals in a SQLite file: the store that needs nothing but a path, on asyncio and trio alike.

One thread owns the one connection and commits in groups (`writer`); the file is opened and guarded by `sqlite_file`.
Here are the tables and the statements.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm._concurrency import boot_clock, start_in_thread
from agentfsm.core.codec import encode_header
from agentfsm.core.errors import (
    AgentError,
    ConflictError,
    CorruptError,
    LeaseHeldError,
    MisuseError,
    RunNotFoundError,
)
from agentfsm.core.inbox import Cancel, PostedItem
from agentfsm.core.run import Header
from agentfsm.core.value import Value
from agentfsm.ports import Claim, Clock, Durability, Filter, Lease, RunSummary, SystemClock, lease_lost_error
from agentfsm.stores.common import (
    DRIVEN,
    LISTED,
    PATIENCE_S,
    check_in_time,
    check_not_over,
    check_patience_s,
    check_room,
    check_same_prompt,
    checked_session,
    checked_winner,
    followed,
    half_of,
    prompt_of,
    summary_from,
    without_history,
)
from agentfsm.stores.holdings import Holdings, LoopOwner, owner_of
from agentfsm.stores.outage import Outage
from agentfsm.stores.owner import Owner, by_process
from agentfsm.stores.packs import PACK, ends_of_packs, pack, unpack
from agentfsm.stores.sqlite_file import Connect, DatabaseFile, Schema, connect_sqlite3
from agentfsm.stores.threaded import (
    LEASE_S,
    MAX_LEASE_S,
    Entry,
    LedgerWriter,
    Opening,
    Post,
    Records,
    Taker,
    ThreadedStore,
    check_lease_s,
    posted,
    read_header,
)
from agentfsm.stores.writer import Job

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

# Events written by one statement at most: it has three variables each, and SQLite may stop at 999.
RECORDS: Final = 100

_INDEXES_OF_2: Final = (
    "CREATE INDEX runs_by_after ON runs (after) WHERE after IS NOT NULL",
    "CREATE INDEX runs_by_parent ON runs (parent) WHERE parent IS NOT NULL",
)
# No index holds a column that changes with each append, so that an append writes to none.
_INDEXES_OF_4: Final = (
    "CREATE INDEX runs_ready ON runs (agent, suspect, ready_at) WHERE ready_at IS NOT NULL",
    "CREATE INDEX runs_by_owner ON runs (owner) WHERE owner IS NOT NULL",
)
# The event loops that drive runs; the leases of one are renewed by its row.
_WORKERS: Final = """
CREATE TABLE workers (
    name  TEXT PRIMARY KEY,
    until REAL NOT NULL  -- the end of its leases, seconds of the boot clock of its machine
) WITHOUT ROWID
"""
# When a worker may claim the run, if nobody drives it; NULL for never. The parameters are named: `seen` and `seen_at`
# are what its last owner has looked at, `now` is the time, and `rest` the earliest time; of rows of the inbox that are
# newer than `newest` it does not hold.
_READY: Final = """
CASE WHEN state NOT IN ('done', 'error') AND parent IS NULL THEN (
    SELECT min(at) FROM (
        SELECT max(CASE WHEN waiting THEN wakes_at ELSE :now END, :rest) AS at
        UNION ALL
        SELECT max(coalesce(due_at, :now), CASE WHEN number > :newest THEN 0 ELSE :rest END) FROM inbox
        WHERE run = runs.number AND NOT taken AND (number > max(seen, :seen) OR due_at > max(seen_at, :seen_at))))
END
"""

# The same for runs of an older file, which no owner of today has looked at.
_READY_ONCE: Final = (
    _READY.replace(":now", "updated_at")
    .replace(":newest", "0")
    .replace(":rest", "0")
    .replace(":seen_at", "0")
    .replace(":seen", "0")
)

SCHEMA: Final = Schema(
    version=4,
    # A file of version 2 has no packs, and needs no change to get some.
    tables=frozenset({"runs", "events", "inbox", "workers"}),
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
            created_at  REAL NOT NULL,     -- seconds since 1970, as all times here
            updated_at  REAL NOT NULL,
            state       TEXT NOT NULL,
            stop_reason TEXT,
            waiting     INTEGER NOT NULL,  -- whether only something from outside can move it on
            wakes_at    REAL,              -- when what it waits for is decided by time
            turn        INTEGER NOT NULL,
            version     INTEGER NOT NULL,  -- events in the journal
            tokens      INTEGER NOT NULL,
            token       INTEGER NOT NULL,  -- the fencing token: grows with each owner
            crashes     INTEGER NOT NULL,  -- owners that died, since it finished a turn or was paused
            alone       INTEGER NOT NULL,  -- those of them that drove no other run; counts while crashes does
            company     INTEGER NOT NULL,  -- runs that the last of them drove, this one included
            suspect     INTEGER NOT NULL,  -- whether it is claimed apart from others; counts while ready_at does
            owner       TEXT,              -- the worker that drives the run; NULL for nobody
            ready_at    REAL,              -- since or from when a worker may claim it; NULL for never, or driven
            seen        INTEGER NOT NULL,  -- the newest inbox number that an owner has looked at
            seen_at     REAL NOT NULL      -- when one last looked for timers
        )
        """,
        _WORKERS,
        "CREATE INDEX runs_by_time ON runs (created_at)",
        "CREATE INDEX runs_by_session ON runs (session) WHERE session IS NOT NULL",
        *_INDEXES_OF_2,
        *_INDEXES_OF_4,
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
        3: (
            "DROP INDEX IF EXISTS runs_open",
            _WORKERS,
            "INSERT INTO workers SELECT owner, max(until) FROM runs WHERE owner IS NOT NULL GROUP BY owner",
            "ALTER TABLE runs DROP COLUMN until",
            *[f"ALTER TABLE runs ADD COLUMN {name} NOT NULL DEFAULT 0" for name in ("alone", "company", "suspect")],
            "ALTER TABLE runs ADD COLUMN ready_at REAL",
            f"UPDATE runs SET ready_at = {_READY_ONCE} WHERE owner IS NULL",  # noqa: S608  of our own names
            *_INDEXES_OF_4,
        ),
    },
)

# Texts are read as bytes: a record that is damaged is then ours to report, and not SQLite's.
_RUN: Final = """
SELECT number, token, crashes, alone, version, owner, state, stop_reason,
       (SELECT max(number) FROM inbox WHERE run = runs.number AND NOT taken)
FROM runs WHERE id = ?
"""
_INSERT_RUN: Final = """
INSERT INTO runs (id, session, after, parent, agent, user, prompt, created_at,
                  state, stop_reason, waiting, wakes_at, turn, version, tokens, updated_at,
                  token, owner, crashes, alone, company, suspect, seen, seen_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, 0)
"""
_LAST_OF_SESSION: Final = "SELECT id, state FROM runs WHERE session = ? ORDER BY number DESC LIMIT 1"
_TAKE: Final = "UPDATE runs SET token = ?, owner = ?, ready_at = NULL WHERE number = ?"
_CLAIM: Final = """
SELECT id, company FROM runs
WHERE agent = ? AND suspect = ? AND ready_at <= ? AND company >= ? ORDER BY ready_at, number LIMIT ?
"""
_RENEW: Final = "INSERT INTO workers VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET until = excluded.until"
# All owners, of runs or not; the index has an entry for each run, and only the first of each name is looked at.
_OWNERS: Final = """
WITH RECURSIVE owners (name) AS (
    SELECT min(owner) FROM runs WHERE owner IS NOT NULL
    UNION ALL SELECT (SELECT min(owner) FROM runs WHERE owner > name) FROM owners WHERE name IS NOT NULL)
SELECT name, until FROM owners LEFT JOIN workers USING (name) WHERE name IS NOT NULL
UNION SELECT name, until FROM workers
"""
# Runs of agents that are called belong to the runs of their callers.
_COMPANY: Final = "SELECT count(*) FROM runs WHERE owner = ? AND parent IS NULL"
_FREE: Final = f"""
UPDATE runs
SET owner = NULL, ready_at = {_READY}, suspect = crashes >= 1, company = :company,
    alone = alone * (crashes > 0) + (:company <= 1), crashes = crashes + 1
WHERE owner = :owner
"""  # noqa: S608  of our own names, as all below
_FORGET: Final = "DELETE FROM workers WHERE name = ?"
_LET_GO: Final = f"""
UPDATE runs
SET owner = NULL, ready_at = {_READY}, suspect = crashes > 1, seen = max(seen, :seen), seen_at = max(seen_at, :seen_at)
WHERE id = :id AND token = :token AND owner = :owner
"""  # noqa: S608
# A turn that was finished clears the crashes, as a pause does: the values on the right are those before the update.
_ADVANCE: Final = """
UPDATE runs
SET state = ?, stop_reason = ?, waiting = ?, wakes_at = ?, turn = ?, version = ?, tokens = ?, updated_at = ?,
    crashes = crashes * (turn = ? AND NOT ?)
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
_WAITING: Final = "SELECT count(*) FROM inbox WHERE run = ? AND NOT taken"
_DUE_NUMBERS: Final = """
SELECT number FROM inbox WHERE run = ? AND NOT taken AND (due_at IS NULL OR due_at <= ?) LIMIT ?
"""
_IS_CANCELLED: Final = "SELECT EXISTS (SELECT 1 FROM inbox WHERE run = ? AND NOT taken AND cancel)"
_STRIKE: Final = "UPDATE inbox SET taken = 1 WHERE run = ? AND number = ?"
_BY_KEY: Final = "SELECT number, CAST(item AS BLOB) FROM inbox WHERE run = ? AND key = ?"
_NEXT_NUMBER: Final = "SELECT coalesce(max(number), 0) + 1 FROM inbox WHERE run = ?"
_POST: Final = "INSERT INTO inbox (run, number, key, item, cancel, due_at, taken) VALUES (?, ?, ?, ?, ?, ?, 0)"
_POSTED: Final = """
UPDATE runs SET ready_at = min(coalesce(ready_at, ?), ?) WHERE number = ? AND owner IS NULL AND parent IS NULL
"""
_LIST: Final = f"SELECT {', '.join(LISTED)}, owner FROM runs"  # noqa: S608
_NEWEST_FIRST: Final = "ORDER BY created_at DESC, number DESC LIMIT ?"
_OWNED: Final = "SELECT id, owner FROM runs WHERE owner IS NOT NULL"
_BELOW: Final = """
WITH RECURSIVE below (number, id) AS (
    SELECT number, id FROM runs WHERE id = ?
    UNION SELECT runs.number, runs.id FROM runs JOIN below ON runs.parent = below.id)
SELECT runs.number, runs.id, runs.owner FROM runs JOIN below USING (number)
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
    alone: int
    version: int
    owner: str | None
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
    holdings: Holdings
    worker: str
    _newest_token: int = attrs.field(default=0, init=False)
    # That a new run was given here.

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

    def create(self, opening: Opening, taker: Taker) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        header = opening.header
        row = self._find(header.id)
        if row is None:
            header = self._in_session(header)
            return header, self._insert(header, opening, taker)
        stored = self._header(header.id, row.number)
        check_same_prompt(stored, header)
        return stored, self.take(header.id, taker)

    def _in_session(self, header: Header) -> Header:
        last = None if header.session is None else self.execute(_LAST_OF_SESSION, (header.session,)).fetchone()
        if last is None and header.after is not None and self._find(header.after) is None:
            raise without_history(header)
        return checked_session(header, last)

    def _insert(self, header: Header, opening: Opening, taker: Taker) -> Lease:
        """Insert a run, ours to drive."""
        body, prompt = encode_header(header), prompt_of(header)
        names = (header.id, header.session, header.after, header.parent, header.agent, header.user)
        # Tokens count on from the time: those of a later run with the same id are larger, and no late word of a deleted
        # run's owner is one of its successor's.
        token = self._newest_token = max(self._newest_token + 1, time.time_ns() // 1000)
        *facts, _paused = opening.facts
        self.execute(_INSERT_RUN, (*names, prompt, header.created_at, *facts, token, taker.owner.name))
        (number,) = self.execute("SELECT last_insert_rowid()").fetchone()
        self._write_events(number, 0, (body, *opening.bodies))
        return self._held(Lease(run_id=header.id, token=token, version=opening.facts.version), taker)

    def take(self, run_id: str, taker: Taker, *, takeover: bool = False) -> Lease:
        """Take the lease of a run that exists."""
        row = self._row(run_id)
        if not takeover and row.owner is not None and not self.holdings.is_dropped(run_id, row.owner):
            if self._is_driven(run_id, row.owner):
                raise LeaseHeldError(f"run {run_id!r} {DRIVEN}")
            self._free_runs_of_the_dead()
            row = self._row(run_id)
        return self._take(run_id, row, taker)

    def claim(self, agent: str, limit: int, taker: Taker, *, suspects: bool) -> Claim:
        """Take the leases of runs that a worker can move on now."""
        self._free_runs_of_the_dead()
        now = self.now()
        first = self.execute(_CLAIM, (agent, True, now, 0, 1)).fetchone()
        if suspects and first is not None:
            company = first[1]
            found = self.execute(_CLAIM, (agent, True, now, company, min(limit, half_of(company)))).fetchall()
        else:
            found = [] if suspects else self.execute(_CLAIM, (agent, False, now, 0, limit)).fetchall()
        leases = tuple([self._take(run_id, self._row(run_id), taker) for run_id, _company in found])
        return Claim(leases=leases, has_suspects=first is not None)

    def _take(self, run_id: str, row: _Row, taker: Taker) -> Lease:
        lease = Lease(
            run_id=run_id,
            token=row.token + 1,
            version=row.version,
            crashes=row.alone if row.crashes else 0,
            abandoned=row.crashes > 0 or row.owner is not None,
            inbox_head=row.newest or 0,
            cancelled=self._is_cancelled(row.number),
        )
        self.execute(_TAKE, (lease.token, taker.owner.name, row.number))
        return self._held(lease, taker)

    def _held(self, lease: Lease, taker: Taker) -> Lease:
        """Hold a lease that was taken, and renew its owner's leases if that was not done lately."""
        lease.term, lease.durability = taker.owner, taker.durability
        if (before := self.holdings.lease_of(lease.run_id)) is not None:
            self.after_commit(partial(self.holdings.lose, before))
        self.holdings.add(lease, taker.owner)
        self._renew(taker.owner, at_least_s=self.lease_s / 2)
        return lease

    def _renew(self, owner: LoopOwner, at_least_s: float = math.inf) -> None:
        """Renew the leases of an owner, unless they hold for so many seconds."""
        now = self.boot_clock()
        if owner.until - now < at_least_s:
            until = now + self.lease_s
            for lease in self.holdings.leases_of(owner) if owner.until <= now else ():
                self._mine(lease)
            self.execute(_RENEW, (owner.name, until))
            self.after_commit(partial(setattr, owner, "until", until))

    def may_claim(self, agent: str) -> bool:
        """Whether a claim may find something."""
        now = self.now()
        found = [self.execute(_CLAIM, (agent, suspect, now, 0, 1)).fetchone() for suspect in (False, True)]
        return found != [None, None] or bool(self._dead())

    def _dead(self) -> list[str]:
        """Return the owners of runs that are dead."""
        return [name for name, until in self.execute(_OWNERS).fetchall() if not self._lives(name, until)]

    def _free_runs_of_the_dead(self) -> None:
        """Free the runs of owners that died, all of them at once: one of them may be what they died of.

        Owners of ours that run are renewed first: the machine may have slept through the end of their leases.
        """
        for owner in self.holdings.renewable():
            self._renew(owner, at_least_s=self.lease_s / 2)
        dead = self._dead()
        for names in by_process(dead):
            company = sum([self.execute(_COMPANY, (name,)).fetchone()[0] for name in names])
            now = self.now()
            for name in names:
                free = {"owner": name, "company": company, "now": now}
                values = {**free, "rest": 0.0, "newest": 0, "seen": 0, "seen_at": 0.0}
                self.execute(_FREE, values)
                self.execute(_FORGET, (name,))

    def _is_driven(self, run_id: str, owner: str | None) -> bool:
        """Whether somebody who may be alive holds the lease. Of our own leases we know; others' end with their time."""
        if owner is None or self.holdings.is_dropped(run_id, owner):
            return False
        (until,) = self.execute("SELECT max(until) FROM workers WHERE name = ?", (owner,)).fetchone()
        return self._lives(owner, until)

    def _lives(self, owner: str, until: float | None) -> bool:
        """Whether an owner may be alive: its time is not up, and it cannot be seen that it is dead."""
        other = Owner.parse(owner)
        left_s = -math.inf if until is None else until - self.boot_clock()
        is_seen_dead = not self.holdings.is_ours(owner) and other.is_dead
        return other.is_of_this_boot and -self.outage.seconds < left_s <= MAX_LEASE_S and not is_seen_dead

    def release(self, lease: Lease) -> bool:
        """Give the lease back."""
        self.holdings.give_back(lease)
        self._let_go(lease.run_id, lease.token, owner_of(lease), lease)
        return True

    def _let_go(self, run_id: str, token: int, owner: LoopOwner, lease: Lease | None = None) -> None:
        """Let go of a lease; what its owner has looked at is known from the lease, where that is not lost."""
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
        self.execute(_LET_GO, values)

    # The journal.

    def append(self, entry: Entry) -> bool:
        """Write events and strike inbox rows; refusals come before the first write."""
        lease = entry.lease
        self.holdings.check(lease)
        row = self._mine(lease)
        if row is None:
            raise lease_lost_error(lease)
        if row.version != entry.before:
            raise ConflictError(f"run {lease.run_id!r} is at version {row.version}, not {entry.before}; load it again")
        if entry.final and self._holds_more(row.number, entry.taken):
            return False
        for number in entry.taken:
            self.execute(_STRIKE, (row.number, number))
        self._write_events(row.number, entry.before + 1, entry.bodies)
        self._renew(owner_of(lease), at_least_s=self.lease_s / 2)
        *facts, paused = entry.facts
        self.execute(_ADVANCE, (*facts, entry.facts.turn, paused, row.number))
        return True

    def _mine(self, lease: Lease) -> _Row | None:
        """Return the row of a run that we drive, None when we do not any more; tell the lease that, or what is new."""
        row = self._find(lease.run_id)
        if row is None or (row.owner, row.token) != (owner_of(lease).name, lease.token):
            self.after_commit(partial(self.holdings.lose, lease))
            return None
        if row.newest is not None and row.newest > lease.inbox_head:
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

    def post(self, post: Post) -> PostedItem:
        """Insert an item; the first of a key wins."""
        run_id, item = post.run_id, post.item
        row = self._row(run_id)
        if (found := self.execute(_BY_KEY, (row.number, post.key)).fetchone()) is not None:
            return checked_winner(run_id, posted(run_id, found[0], post.key, found[1]), item)
        check_not_over(run_id, row.state, row.stop_reason)
        check_in_time(run_id, post.before, self.now())
        check_room(run_id, item, self.execute(_WAITING, (row.number,)).fetchone()[0])
        number = self.execute(_NEXT_NUMBER, (row.number,)).fetchone()[0]
        is_cancel = isinstance(item, Cancel)
        self.execute(_POST, (row.number, number, post.key, post.text, int(is_cancel), post.due_at))
        ready_at = self.now() if post.due_at is None else post.due_at
        self.execute(_POSTED, (ready_at, ready_at, row.number))
        self.after_commit(partial(self.holdings.tell, run_id, number, cancelled=is_cancel))
        return PostedItem(number=number, key=post.key, item=item)

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

    def runs(self, where: Filter, limit: int) -> tuple[RunSummary, ...]:
        """Return the newest runs that the filter takes, newest first."""
        wanted = {name: value for name, value in attrs.asdict(where).items() if value is not None}
        tests = [f"{'created_at <' if name == 'before' else f'{name} ='} ?" for name in wanted]
        clause = f"WHERE {' AND '.join(tests)}" if tests else ""
        rows = self.execute(f"{_LIST} {clause} {_NEWEST_FIRST}", (*wanted.values(), limit)).fetchall()
        return tuple(self._summary(*row) for row in rows)

    def _summary(self, *row: Any) -> RunSummary:
        *facts, owner = row
        values: dict[str, Any] = dict(zip(LISTED, facts, strict=True))
        return summary_from(values, driven=self._is_driven(values["id"], owner))

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
        found = {run_id for _number, run_id, _owner in rows}
        for _number, run_id, owner in rows:
            if self._is_driven(run_id, owner):
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
        """Renew the leases of the event loops that run, let go of those that were dropped, learn of news and losses."""
        with self.transaction(write=True, durability="normal"):
            for owner in self.holdings.renewable():
                self._renew(owner)
            for run_id, held in self.holdings:
                lease = held.lease()
                if lease is None:
                    self._let_go(run_id, held.token, held.owner)
                    self.holdings.drop(run_id)
                else:
                    self._mine(lease)

    def compact(self) -> None:
        """Make the file as small as its content, where no run is driven."""
        with self.transaction(write=False):
            leases = self.execute(_OWNED).fetchall()
        if driven := [run_id for run_id, *lease in leases if self._is_driven(run_id, *lease)]:
            raise LeaseHeldError(
                f"run {driven[0]!r} is being driven, and would wait while {self.path} is compacted: stop the workers "
                "first"
            )
        self.vacuum()

    def close(self) -> None:
        """Let go of the leases, and close the file."""
        try:
            if self.holdings:
                with self.transaction(write=True, durability="normal"):
                    for run_id, held in self.holdings:
                        self._let_go(run_id, held.token, held.owner)
                    for owner in self.holdings.owners():
                        self.execute(_FORGET, (owner.name,))
                        owner.until = 0.0
        finally:
            self.holdings.clear()
            self.shut()

    def _row(self, run_id: str) -> _Row:
        row = self._find(run_id)
        if row is None:
            raise RunNotFoundError(f"{self.path} holds no run {run_id!r}; `agentfsm runs` lists those that it holds")
        return row

    def _find(self, run_id: str) -> _Row | None:
        row = self.execute(_RUN, (run_id,)).fetchone()
        if row is None:
            return None
        if {*map(type, row[:5])} != {int}:  # SQLite keeps what it finds, whatever the column's type
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

    A forked child may use it if the file was not open at the time of the fork. Only its owner may read a file that the
    store makes (mode 0600, as of its log); one that exists keeps its mode.

    A lease lasts `lease_s` seconds and is renewed by the store's thread, as long as the event loop of its owner does
    not stand still for more than `blocked_s` seconds. When an owner is killed its runs may be taken at once by another
    process of the machine that can see that it is dead, else when the lease ends.

    Args:
        path: Of the file, made at first use; its folder has to exist.
        connect: Opens the file instead of `sqlite3.connect`, for tests that inject faults.
        lease_s: Seconds, up to 3,600: how long a worker that vanished keeps others waiting.
        blocked_s: Seconds above 0: how long an event loop that stands still keeps its runs.
        patience_s: Seconds, 0 or more, that a call waits for another connection's transaction before it fails. What a
            run that is being driven has to write is tried again for ten minutes.
        clock: Tells the date; a test may give its own.
    """

    path: str = attrs.field(converter=_file_path)
    connect: Connect = attrs.field(default=connect_sqlite3, kw_only=True)
    lease_s: float = attrs.field(default=LEASE_S, kw_only=True, validator=check_lease_s)
    patience_s: float = attrs.field(default=PATIENCE_S, kw_only=True, validator=check_patience_s)
    clock: Clock = attrs.field(factory=SystemClock, kw_only=True)
    _clock: Callable[[], float] = attrs.field(default=boot_clock, init=False)
    # A test sets it before the first use, and need not wait for leases to end.

    async def claim(self, agent: str, *, limit: int, durability: Durability = "full", suspects: bool = False) -> Claim:
        """Take the leases of runs that a worker can move on now; where there are none the file is only read."""
        if not await self._do(lambda ledger: ledger.may_claim(agent), writes=False):
            return Claim()
        return await super().claim(agent, limit=limit, durability=durability, suspects=suspects)

    def _hear(self, writer: LedgerWriter[_SQLiteLedger], topic: str) -> None:  # noqa: ARG002  the file tells of all
        with suppress(AgentError):  # it is closed
            writer.submit(Job(lambda _ledger: None, writes=False))  # its thread looks at the file from now on

    async def compact(self) -> int:
        """Give the room of removed runs back to the disk; return by how many bytes file and log have become smaller.

        A removed run is overwritten in the file, but the file keeps its size, and its log (-wal) may keep the content
        until it is written over. This writes the file anew and empties the log. Other processes may have the file open:
        they read meanwhile, and wait to write. It takes about a second for 100 MB, and as much free space as the file
        has. Where it is cancelled it goes on by itself.

        Raises:
            LeaseHeldError: when a run is being driven.
            StoreError: when the file is locked for longer than `patience_s`, another process keeps the log busy, or the
                disk is full; the file is as it was, or compacted.
        """
        return await start_in_thread(self._compact).wait()

    def _compact(self) -> int:
        ledger, before = self._ledger(), self._bytes()
        try:
            ledger.compact()
        except AgentError:
            raise
        except Exception as error:
            raise ledger.explain(error) from error
        finally:
            ledger.shut()
        return before - self._bytes()

    def _bytes(self) -> int:
        return sum(file.stat().st_size for name in ("", "-wal") if (file := Path(f"{self.path}{name}")).exists())

    def _ledger(self) -> _SQLiteLedger:
        worker = str(Owner.here())
        return _SQLiteLedger(
            worker=worker,
            path=self.path,
            schema=SCHEMA,
            connect=self.connect,
            patience_s=self.patience_s,
            outage=Outage(self.lease_s),
            lease_s=self.lease_s,
            clock=self.clock,
            boot_clock=self._clock,
            holdings=Holdings(self.lease_s, self.blocked_s, worker),
        )
