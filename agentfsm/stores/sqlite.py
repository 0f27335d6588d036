"""Journals in a SQLite file: the store that needs nothing but a path, on asyncio and trio alike.

One thread owns the one connection and commits in groups (`writer`); the file is opened and guarded by `sqlite_file`.
Here are the tables, the statements, and the `Store` that turns calls into jobs for the thread.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs

from agentfsm.core import codec
from agentfsm.core.errors import (
    AgentError,
    ClosedError,
    ConflictError,
    CorruptError,
    LeaseHeldError,
    LeaseLostError,
    MisuseError,
    RunNotFoundError,
    StoreError,
)
from agentfsm.core.inbox import Cancel, InboxItem, Posted
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.run import Header, Run
from agentfsm.ports import Lease, Store, Stored, Summary
from agentfsm.stores.common import checked_session, prompt_of, told_winner
from agentfsm.stores.owner import Owner, boot_clock
from agentfsm.stores.sqlite_file import Connect, DatabaseFile, Durability, Schema, connect_sqlite3
from agentfsm.stores.writer import Job, Statistics, Writer
from agentfsm.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentfsm.core.events import Event
    from agentfsm.ports import Commit

T = TypeVar("T")

_log = logging.getLogger("agentfsm.stores")

LEASE_S: Final = 10.0
# Long enough that a busy machine does not lose a lease by chance, short enough to wait for a worker that vanished.
LONGEST_LEASE_S: Final = 3600.0
# One that seems to last longer was written by another clock: a machine without a boot id was restarted since.
RECORDS: Final = 100
# Events written by one statement at most: it has three variables each, and SQLite may stop at 999.
LARGEST: Final = 2**63 - 1
# The largest integer in SQLite; a model may claim to have used more tokens than that.
FINAL: Final = frozenset({State.DONE, State.ERROR})

SCHEMA: Final = Schema(
    version=1,
    tables=frozenset({"runs", "events", "inbox"}),
    statements=(
        # What a list shows, and who drives the run. `number` stands for the id in the other tables.
        """
        CREATE TABLE runs (
            number      INTEGER PRIMARY KEY,
            id          TEXT NOT NULL UNIQUE,
            session     TEXT,
            agent       TEXT NOT NULL,
            prompt      TEXT NOT NULL,     -- its beginning, for people
            created_at  REAL NOT NULL,     -- seconds since 1970
            updated_at  REAL NOT NULL,
            state       TEXT NOT NULL,
            stop_reason TEXT,
            waiting     INTEGER NOT NULL,  -- whether a person has to decide
            turn        INTEGER NOT NULL,
            version     INTEGER NOT NULL,  -- events in the journal
            tokens      INTEGER NOT NULL,
            token       INTEGER NOT NULL,  -- the fencing token: grows with each owner
            owner       TEXT,              -- who drives the run; NULL for nobody
            until       REAL               -- the end of the lease, seconds of the owner's boot clock
        )
        """,
        "CREATE INDEX runs_by_time ON runs (created_at)",
        "CREATE INDEX runs_by_session ON runs (session) WHERE session IS NOT NULL",
        # The journal; entry 0 is the header. Not WITHOUT ROWID: records of some hundred bytes then lie densely, in the
        # order in which they came (25 % smaller), and a commit of 300 runs touches a handful of pages instead of 300.
        """
        CREATE TABLE events (
            run     INTEGER NOT NULL,
            version INTEGER NOT NULL,
            body    TEXT NOT NULL,
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
            taken  INTEGER NOT NULL,
            PRIMARY KEY (run, number),
            UNIQUE (run, key)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX inbox_open ON inbox (run, number) WHERE NOT taken",
    ),
)

# Texts are read as bytes: a record that is damaged is then ours to report, and not SQLite's.
_RUN: Final = """
SELECT number, token, owner, until, version, state, stop_reason,
       (SELECT max(number) FROM inbox WHERE run = runs.number AND NOT taken)
FROM runs WHERE id = ?
"""
_INSERT_RUN: Final = """
INSERT INTO runs (id, session, agent, prompt, created_at, updated_at, state, waiting, turn, version, tokens, token)
VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0)
"""
_LAST_OF_SESSION: Final = "SELECT id, state FROM runs WHERE session = ? ORDER BY number DESC LIMIT 1"
_TAKE: Final = "UPDATE runs SET token = ?, owner = ?, until = ? WHERE number = ?"
_RENEW: Final = "UPDATE runs SET until = ? WHERE number = ?"
_LET_GO: Final = "UPDATE runs SET owner = NULL, until = NULL WHERE id = ? AND token = ? AND owner = ?"
_ADVANCE: Final = """
UPDATE runs
SET state = ?, stop_reason = ?, waiting = ?, turn = ?, version = ?, tokens = ?, updated_at = ?, until = ?
WHERE number = ?
"""
_INSERT_EVENTS: Final = "INSERT INTO events (run, version, body) VALUES "
_HEADER: Final = "SELECT CAST(body AS BLOB) FROM events WHERE run = ? AND version = 0"
_EVENTS: Final = "SELECT version, CAST(body AS BLOB) FROM events WHERE run = ? AND version > ? ORDER BY version"
_OPEN: Final = "SELECT number, key, CAST(item AS BLOB) FROM inbox WHERE run = ? AND NOT taken ORDER BY number"
_OPEN_NUMBERS: Final = "SELECT number FROM inbox WHERE run = ? AND NOT taken LIMIT ?"
_IS_CANCELLED: Final = "SELECT EXISTS (SELECT 1 FROM inbox WHERE run = ? AND NOT taken AND cancel)"
_STRIKE: Final = "UPDATE inbox SET taken = 1 WHERE run = ? AND number = ?"
_BY_KEY: Final = "SELECT number, CAST(item AS BLOB) FROM inbox WHERE run = ? AND key = ?"
_NEXT_NUMBER: Final = "SELECT coalesce(max(number), 0) + 1 FROM inbox WHERE run = ?"
_POST: Final = "INSERT INTO inbox (run, number, key, item, cancel, taken) VALUES (?, ?, ?, ?, ?, 0)"
_LIST: Final = """
SELECT id, agent, session, state, stop_reason, waiting, turn, version, tokens, created_at, updated_at, prompt,
       owner, until
FROM runs
"""
_NEWEST_FIRST: Final = " ORDER BY created_at DESC, number DESC LIMIT ?"


@attrs.frozen
class _Row:
    """What the statements need to know of a run, in the order of `_RUN`."""

    number: int
    token: int
    owner: str | None
    until: float | None
    version: int
    state: str
    stop_reason: str | None
    newest: int | None
    # The newest inbox number not taken yet.


@attrs.frozen(kw_only=True)
class _Entry:
    """An append, made ready by the caller."""

    lease: Lease
    version: int
    # After the events.
    bodies: tuple[str, ...]
    taken: tuple[int, ...]
    final: bool
    facts: tuple[object, ...]
    # What the list shows, in the order of `_ADVANCE`.


@attrs.define(eq=False)
class _Held:
    """A lease of ours."""

    lease: weakref.ref[Lease]
    # Weak, so that an owner whose coroutine was thrown away holds nothing.
    token: int
    failed: str = ""
    # Why an append of it was not written, by no word of ours; then no later one is either, so that there is no gap.


@attrs.define(eq=False, kw_only=True)
class _Ledger(DatabaseFile):
    """The tables, and the leases that this store holds. It belongs to the writer's thread."""

    lease_s: float
    clock: Callable[[], float]
    _owner: str = attrs.field(factory=lambda: str(Owner.here()), init=False)
    _held: dict[str, _Held] = attrs.field(factory=dict, init=False)
    # By run id.

    # Runs and their leases.

    def create(self, header: Header) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        header = codec.decode_header(codec.encode_header(header))  # as it will be read again
        row = self._find(header.id)
        if row is None:
            header = self._in_session(header)
            row = self._insert(header)
        else:
            stored = self._header(header.id, row.number)
            if stored.prompt != header.prompt:
                raise ConflictError(f"run {header.id!r} exists with another prompt; choose another id")
            header = stored
        return header, self._take(header.id, row)

    def _in_session(self, header: Header) -> Header:
        """Name the session's last run; those before it are over, or it would not have begun."""
        if header.session is None:
            return header
        return checked_session(header, self.execute(_LAST_OF_SESSION, (header.session,)).fetchall())

    def _insert(self, header: Header) -> _Row:
        body = codec.encode_header(header)
        at = header.created_at
        facts = (header.id, header.session, header.agent, prompt_of(header), at, at, str(State.OBSERVE))
        self.execute(_INSERT_RUN, facts)
        row = self._row(header.id)
        self._write_events(row.number, 0, (body,))
        return row

    def take(self, run_id: str) -> Lease:
        """Take the lease of a run that exists."""
        return self._take(run_id, self._row(run_id))

    def _take(self, run_id: str, row: _Row) -> Lease:
        if self._is_driven(run_id, row.owner, row.until):
            raise LeaseHeldError(f"run {run_id!r} is being driven by another worker; wait for it, or resume it")
        lease = Lease(
            run_id=run_id,
            token=row.token + 1,
            version=row.version,
            newest=row.newest or 0,
            cancelled=self._is_cancelled(row.number),
        )
        self.execute(_TAKE, (lease.token, self._owner, self._until(), row.number))
        self._held[run_id] = _Held(weakref.ref(lease), lease.token)
        return lease

    def _is_driven(self, run_id: str, owner: str | None, until: float | None) -> bool:
        """Whether somebody who may be alive holds the lease. Of our own leases we know; others' end with their time."""
        if owner is None or until is None:
            return False
        if owner == self._owner:
            held = self._held.get(run_id)
            return held is not None and held.lease() is not None
        other = Owner.parse(owner)
        left_s = until - self.clock()
        return other.is_of_this_boot and 0 < left_s <= LONGEST_LEASE_S and not other.is_dead

    def release(self, lease: Lease) -> bool:
        """Give the lease back."""
        held = self._held.get(lease.run_id)
        if held is not None and held.lease() is lease:
            del self._held[lease.run_id]
        self.execute(_LET_GO, (lease.run_id, lease.token, self._owner))
        return True

    def delete(self, run_id: str) -> None:
        """Remove a run that nobody drives."""
        row = self._row(run_id)
        if self._is_driven(run_id, row.owner, row.until):
            raise LeaseHeldError(f"run {run_id!r} is being driven; cancel it before you delete it")
        self.execute("DELETE FROM inbox WHERE run = ?", (row.number,))
        self.execute("DELETE FROM events WHERE run = ?", (row.number,))
        self.execute("DELETE FROM runs WHERE number = ?", (row.number,))

    # The journal.

    def append(self, entry: _Entry) -> bool:
        """Write events and strike inbox rows; refusals come before the first write."""
        lease = entry.lease
        row = self._mine(lease)
        before = entry.version - len(entry.bodies)
        if row.version != before:
            raise ConflictError(f"run {lease.run_id!r} is at version {row.version}, not {before}; load it again")
        if entry.final and self._holds_more(row.number, entry.taken):
            return False
        for number in entry.taken:
            self.execute(_STRIKE, (row.number, number))
        self._write_events(row.number, before + 1, entry.bodies)
        self.execute(_ADVANCE, (*entry.facts, self._until(), row.number))
        return True

    def _mine(self, lease: Lease) -> _Row:
        """Return the row of a run that we drive, and tell the lease what is new.

        Raises:
            LeaseLostError: when we do not drive it any more.
            StoreError: when an earlier append of the lease was not written.
        """
        held = self._held.get(lease.run_id)
        row = self._find(lease.run_id)
        if held is None or held.lease() is not lease:
            raise LeaseLostError(f"run {lease.run_id!r}: this lease was given back or lost; take it again")
        if row is None or (row.owner, row.token) != (self._owner, lease.token):
            self.after_commit(partial(self._lose, lease))
            raise LeaseLostError(f"run {lease.run_id!r} was taken over by another worker")
        if held.failed:
            raise StoreError(f"run {lease.run_id!r}: an earlier append was not written, nor is this one: {held.failed}")
        self._look_for_news(lease, row)
        return row

    def spoil(self, lease: Lease, error: AgentError) -> None:
        """Let no later append of the lease be written after one that was not."""
        held = self._held.get(lease.run_id)
        if held is not None and held.lease() is lease:
            held.failed = held.failed or str(error)

    def _write_events(self, run: int, version: int, bodies: Sequence[str]) -> None:
        for start in range(0, len(bodies), RECORDS):
            chunk = bodies[start : start + RECORDS]
            rows = [value for index, body in enumerate(chunk) for value in (run, version + start + index, body)]
            self.execute(_insert_events(len(chunk)), rows)

    def read(self, run_id: str, after: int) -> tuple[int, list[tuple[int, bytes]]]:
        """Return the run's version, and the records: the header as 0, and those after that version."""
        row = self._row(run_id)
        header = [(0, body) for (body,) in self.execute(_HEADER, (row.number,)).fetchall()]
        return row.version, header + self.execute(_EVENTS, (row.number, max(after, 0))).fetchall()

    def _header(self, run_id: str, number: int) -> Header:
        body = self.execute(_HEADER, (number,)).fetchone()
        return _decoded(codec.decode_header, body and body[0], f"run {run_id!r}, the header")

    # The inbox.

    def post(self, run_id: str, key: str, item: InboxItem, text: str) -> Posted:
        """Insert an item; the first of a key wins."""
        row = self._row(run_id)
        if (found := self.execute(_BY_KEY, (row.number, key)).fetchone()) is not None:
            return told_winner(run_id, _posted(run_id, found[0], key, found[1]), item)
        if row.state in FINAL:
            raise ConflictError(f"run {run_id!r} is over ({row.stop_reason}): it takes no more input")
        number = self.execute(_NEXT_NUMBER, (row.number,)).fetchone()[0]
        is_cancel = isinstance(item, Cancel)
        self.execute(_POST, (row.number, number, key, text, int(is_cancel)))
        held = self._held.get(run_id)
        if held is not None and (lease := held.lease()) is not None:
            self.after_commit(partial(_tell, lease, number, cancelled=is_cancel))
        return Posted(number=number, key=key, item=item)

    def inbox(self, run_id: str) -> list[tuple[int, str, bytes]]:
        """Return the rows that are not taken yet, oldest first."""
        return self.execute(_OPEN, (self._row(run_id).number,)).fetchall()

    def _holds_more(self, run: int, taken: Sequence[int]) -> bool:
        """Whether the inbox holds anything else; one row more than were taken is enough to know."""
        rows = self.execute(_OPEN_NUMBERS, (run, len(taken) + 1)).fetchall()
        return not {number for (number,) in rows} <= set(taken)

    def _is_cancelled(self, run: int) -> bool:
        return bool(self.execute(_IS_CANCELLED, (run,)).fetchone()[0])

    def _look_for_news(self, lease: Lease, row: _Row) -> None:
        if row.newest is not None and row.newest > lease.newest:
            self.after_commit(partial(_tell, lease, row.newest, cancelled=self._is_cancelled(row.number)))

    # The list.

    def runs(self, limit: int, session: str | None) -> tuple[Summary, ...]:
        """Return the newest runs, newest first."""
        where, values = ("", ()) if session is None else ("WHERE session = ?", (session,))
        rows = self.execute(f"{_LIST} {where} {_NEWEST_FIRST}", (*values, max(limit, 0))).fetchall()
        return tuple(self._summary(*row) for row in rows)

    def _summary(self, *row: Any) -> Summary:
        *facts, owner, until = row
        values = dict(zip(_LISTED, facts, strict=True))
        try:
            values["state"] = State(values["state"])
            values["stop_reason"] = values["stop_reason"] and StopReason(values["stop_reason"])
        except ValueError as error:
            raise CorruptError(f"run {values['id']!r}: {error}; restore a backup, or upgrade agentfsm") from None
        values["waiting"] = bool(values["waiting"])
        return Summary(**values, driven=self._is_driven(values["id"], owner, until))

    # Upkeep.

    @property
    def holds(self) -> int:
        """How many leases are held."""
        return len(self._held)

    @property
    def beat_s(self) -> float:
        """Seconds between two renewals: a lease outlives two that came to nothing."""
        return self.lease_s / 3

    def beat(self) -> None:
        """Renew the leases that are held, let go of those that were dropped, learn of news and losses."""
        with self.transaction(write=True):
            for run_id, held in list(self._held.items()):
                lease = held.lease()
                if lease is None:
                    self._let_go(run_id, held)
                else:
                    self._renew(lease)

    def _renew(self, lease: Lease) -> None:
        row = self._find(lease.run_id)
        if row is None or (row.owner, row.token) != (self._owner, lease.token):
            self.after_commit(partial(self._lose, lease))
            return
        self.execute(_RENEW, (self._until(), row.number))
        self._look_for_news(lease, row)

    def _let_go(self, run_id: str, held: _Held) -> None:
        self.execute(_LET_GO, (run_id, held.token, self._owner))
        del self._held[run_id]

    def _lose(self, lease: Lease) -> None:
        self._held.pop(lease.run_id, None)
        if not lease.lost:
            lease.lost = True
            _wake(lease)

    def close(self) -> None:
        """Let go of the leases, and close the file."""
        try:
            if self._held:
                with self.transaction(write=True):
                    for run_id, held in list(self._held.items()):
                        self._let_go(run_id, held)
        finally:
            self._held.clear()
            super().close()

    def _until(self) -> float:
        return self.clock() + self.lease_s

    def _row(self, run_id: str) -> _Row:
        row = self._find(run_id)
        if row is None:
            raise RunNotFoundError(f"{self.path} holds no run {run_id!r}; `agentfsm runs` lists those that it holds")
        return row

    def _find(self, run_id: str) -> _Row | None:
        row = self.execute(_RUN, (run_id,)).fetchone()
        return None if row is None else _Row(*row)


_LISTED: Final = (
    "id",
    "agent",
    "session",
    "state",
    "stop_reason",
    "waiting",
    "turn",
    "version",
    "tokens",
    "created_at",
    "updated_at",
    "prompt",
)
# The fields of a summary, in the order of `_LIST`.


@cache
def _insert_events(count: int) -> str:
    return _INSERT_EVENTS + ", ".join(["(?, ?, ?)"] * count)


def _facts(run: Run) -> tuple[object, ...]:
    """Return what the list shows of a run, in the order of `_ADVANCE`, as the plain types that SQLite takes fastest."""
    reason = None if run.stop_reason is None else str(run.stop_reason)
    waiting = int(run.state is State.ACT and run.is_waiting)  # in no other state does a run wait
    tokens = min(run.usage.tokens, LARGEST)
    return str(run.state), reason, waiting, run.turn, run.version, tokens, run.updated_at


def _tell(lease: Lease, newest: int, *, cancelled: bool) -> None:
    """Tell a lease what its run's inbox holds."""
    lease.newest = max(lease.newest, newest)
    if cancelled and not lease.cancelled:
        lease.cancelled = True
        _wake(lease)


def _wake(lease: Lease) -> None:
    try:
        if lease.wake is not None:
            lease.wake()
    except Exception:  # noqa: BLE001  whatever it is, the thread lives on for the others
        _log.exception("run %s: the wake of its lease failed", lease.run_id)


def _decoded(decode: Callable[[str], T], body: object, what: str) -> T:
    """Decode a record; say which one it is when it cannot be read."""
    try:
        return decode(body.decode() if isinstance(body, bytes) else "")
    except (CorruptError, UnicodeDecodeError) as error:
        why = "it is missing" if body is None else str(error)
        raise CorruptError(f"{what}, cannot be read ({why}): restore a backup, or delete the run") from None


def _stored(run_id: str, after: int, version: int, records: list[tuple[int, bytes]]) -> Stored:
    """Decode a journal, in which no version may be missing."""
    bodies = dict(records)
    header = _decoded(codec.decode_header, bodies.get(0), f"run {run_id!r}, the header")
    events = [
        _decoded(codec.decode_event, bodies.get(number), f"run {run_id!r}, version {number}")
        for number in range(max(after, 0) + 1, version + 1)
    ]
    return Stored(header=header, events=tuple(events))


def _posted(run_id: str, number: int, key: str, item: bytes) -> Posted:
    decoded = _decoded(codec.decode_item, item, f"run {run_id!r}, inbox row {number}")
    return Posted(number=number, key=key, item=decoded)


def _file_path(path: str | os.PathLike[str]) -> str:
    """Make the path absolute, so that it means the same file after a change of folder."""
    text = os.fspath(path)
    if not isinstance(text, str) or text in ("", ":memory:"):
        raise MisuseError(f"SQLiteStore({text!r}): give the path of a file; to keep runs in memory use MemoryStore()")
    return str(Path(text).absolute())


def _check_lease(_store: object, _attribute: object, value: float) -> None:
    if not 0 < value <= LONGEST_LEASE_S:
        raise MisuseError(f"SQLiteStore(lease_s={value!r}): give seconds above 0 and up to {LONGEST_LEASE_S:.0f}")


def _check_durability(_store: object, _attribute: object, value: str) -> None:
    if value not in ("full", "normal"):
        raise MisuseError(f"SQLiteStore(durability={value!r}): give 'full' or 'normal'")


@attrs.define(eq=False)
class SQLiteStore(Store):
    """Keeps journals in a SQLite file that several processes of one machine may share.

    Usable from any event loop and thread, several at a time too. A thread of its own does the work; it starts when the
    store is first used, ends after 5 idle seconds in which no run is driven, and never holds the process at exit. So
    `aclose` is good manners, not a duty. A forked child may use it if the file was not open at the time of the fork.

    A lease lasts `lease_s` seconds and is renewed by the thread, so a blocked event loop loses none. When an owner is
    killed its runs may be taken at once by another process of the machine that can see that it is dead, else when the
    lease ends.

    Args:
        path: Of the file, made at first use; its folder has to exist.
        durability: See the field.
        connect: Opens the file instead of `sqlite3.connect`, for tests that inject faults.
        lease_s: Seconds, up to 3,600: how long a worker that vanished keeps others waiting.
    """

    path: str = attrs.field(converter=_file_path)
    durability: Durability = attrs.field(default="full", kw_only=True, validator=_check_durability)
    # "full": what was acknowledged survives a power cut. Each commit waits for the disk, 0.04 ms to 4 ms as it is quiet
    # or busy, shared by all runs that commit together. "normal": survives a killed process, not always a power cut,
    # which may take the newest commits (it never tears one); a commit then costs 0.01 ms.
    connect: Connect = attrs.field(default=connect_sqlite3, kw_only=True)
    lease_s: float = attrs.field(default=LEASE_S, kw_only=True, validator=_check_lease)
    _clock: Callable[[], float] = attrs.field(default=boot_clock, init=False)
    # A test sets it before the first use, and need not wait for leases to end.
    _writers: dict[int, Writer[_Ledger]] = attrs.field(factory=dict, init=False)
    # By process id: a forked child has no thread of its parent's, and must not touch its connection, even to close it.

    async def create(self, header: Header) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        return await self._taking(lambda ledger: ledger.create(header))

    async def lease(self, run_id: str) -> Lease:
        """Take the lease of a run that exists."""
        _, lease = await self._taking(lambda ledger: (run_id, ledger.take(run_id)))
        return lease

    async def _taking(self, work: Callable[[_Ledger], tuple[T, Lease]]) -> tuple[T, Lease]:
        """Do what takes a lease; where the wait for it is cancelled, nobody will know of it, so it is given back."""
        taken: list[Lease] = []

        def take(ledger: _Ledger) -> tuple[T, Lease]:
            result = work(ledger)
            taken[:] = result[1:]
            return result

        try:
            return await self._do(take)
        except AgentError:
            raise  # refused or failed: nothing was taken
        except BaseException:
            with suppress(ClosedError):
                self._writer.submit(Job(lambda ledger: [ledger.release(lease) for lease in taken]))
            raise

    def append(
        self,
        lease: Lease,
        run: Run,
        events: Sequence[Event],
        *,
        taken: Sequence[int] = (),
        final: bool = False,
    ) -> Commit:
        """Write events and strike inbox rows; returns before it is durable.

        The events are encoded here and not in the thread: an event that cannot be is the caller's mistake, and shall
        be raised there; and the interpreter does one thing at a time anyway.

        Raises:
            MisuseError: when an event cannot be encoded.
            ClosedError: after `aclose`.
            StoreError: when 100,000 jobs wait already.
        """
        entry = _Entry(
            lease=lease,
            version=run.version,
            bodies=tuple([codec.encode_event(event) for event in events]),
            taken=tuple(taken),
            final=final,
            facts=_facts(run),
        )
        job = Job[bool, _Ledger](
            lambda ledger: ledger.append(entry),
            spoilt=lambda ledger, error: ledger.spoil(lease, error),
        )
        self._writer.submit(job)
        return job

    def release(self, lease: Lease) -> Commit:
        """Give the lease back, after the appends before. Where that cannot be written, the lease ends by itself."""
        job = Job[bool, _Ledger](
            lambda ledger: ledger.release(lease),
            spoilt=lambda _ledger, error: _log.warning("run %s: its lease ends by itself: %s", lease.run_id, error),
        )
        try:
            self._writer.submit(job)
        except ClosedError:  # closing the store has given it back
            return Job[bool, _Ledger].done(value=True)
        return job

    async def post(self, run_id: str, key: str, item: InboxItem) -> Posted:
        """Put an item into the inbox, durably; the first post of a key wins."""
        text = codec.encode_item(item)
        return await self._do(lambda ledger: ledger.post(run_id, key, item, text))

    async def inbox(self, run_id: str) -> tuple[Posted, ...]:
        """Return the rows that are not taken yet, oldest first."""
        rows = await self._do(lambda ledger: ledger.inbox(run_id), writes=False)
        return await in_thread(lambda: tuple(_posted(run_id, *row) for row in rows)).wait()

    async def read(self, run_id: str, after: int = 0) -> Stored:
        """Return the header and the events after that version; they are decoded off the event loop."""
        version, records = await self._do(lambda ledger: ledger.read(run_id, after), writes=False)
        return await in_thread(lambda: _stored(run_id, after, version, records)).wait()

    async def runs(self, *, limit: int = 100, session: str | None = None) -> tuple[Summary, ...]:
        """Return the newest runs, newest first."""
        return await self._do(lambda ledger: ledger.runs(limit, session), writes=False)

    async def delete(self, run_id: str) -> None:
        """Remove a run that nobody drives, with its inbox."""
        await self._do(lambda ledger: ledger.delete(run_id))

    async def aclose(self) -> None:
        """Write what is queued, give all leases back, close the file and end the thread."""
        await self._writer.close()

    def statistics(self) -> Statistics:
        """Return what the thread has done so far in this process."""
        return self._writer.statistics()

    async def _do(self, work: Callable[[_Ledger], T], *, writes: bool = True) -> T:
        job = Job[T, _Ledger](work, writes=writes)
        self._writer.submit(job)
        return await job.wait()

    @property
    def _writer(self) -> Writer[_Ledger]:
        pid = os.getpid()
        return self._writers.get(pid) or self._writers.setdefault(pid, self._new_writer())

    def _new_writer(self) -> Writer[_Ledger]:
        return Writer(
            _Ledger(
                path=self.path,
                schema=SCHEMA,
                connect=self.connect,
                durability=self.durability,
                lease_s=self.lease_s,
                clock=self._clock,
            ),
        )
