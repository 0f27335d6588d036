"""Journals in PostgreSQL, for workers on many machines, on asyncio and trio alike.

One thread owns the one connection and commits in groups (`writer`); the server is reached and understood by
`postgres_link`, and `postgres_sql` has the tables and the statements.

The appends of a group are written by one statement, which takes those that may be written and says which they were. All
are expected to be: where one was not, the transaction is rolled back, and the group is done again with that one by
itself, to find out why. So 1,000 appends cost two round trips, and each still has its own outcome.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm._concurrency import boot_clock
from agentfsm.core.codec import encode_header
from agentfsm.core.errors import AgentError, ConflictError, LeaseHeldError, MisuseError, RunNotFoundError
from agentfsm.core.inbox import Cancel, PostedItem
from agentfsm.core.run import Header
from agentfsm.core.value import Value
from agentfsm.ports import Claim, Durability, Filter, Lease, RunSummary, lease_lost_error
from agentfsm.stores import postgres_sql as sql
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
from agentfsm.stores.listener import Listener
from agentfsm.stores.owner import Owner, by_process
from agentfsm.stores.postgres_link import NOW, Address, Link, announcements, digest_of
from agentfsm.stores.signals import Signals, run_topic
from agentfsm.stores.threaded import (
    LEASE_S,
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
    from collections.abc import Iterator

# Events that one statement copies at most.
RECORDS: Final = 1_000
# The part of a lease that is left when the next transaction renews it: a renewal comes after each third of it.
RENEWED: Final = 0.7
# Seconds for which appends to a run are announced after somebody has said that it is watched.
WATCHED_S: Final = 30.0
_RUN: Final = run_topic("")
# Characters of records in one statement, about: a server keeps several copies of it while it works.
STATEMENT_CHARS: Final = 4_000_000

# Appends by run id; those of one run follow on each other.
Chains: TypeAlias = Mapping[str, Sequence[Entry]]
# A lease to be let go of: run id, token, owner, the newest inbox number that the owner has looked at, when it last
# looked for timers, the seconds for which the run is to rest, and the inbox number up to which that holds.
Leaving: TypeAlias = tuple[str, int, str, int, float, float, int]


# Of runs, by id, token and owner: the newest inbox number not taken yet, and whether the run is to end.
News: TypeAlias = Mapping[tuple[str, int, str], tuple[int | None, bool]]


class _NotAll(Exception):  # noqa: N818  not an error of anybody: it has the group done again
    """Some of the appends of a statement were not written."""


@attrs.frozen
class _Row(Value):
    """What the statements need to know of a run, in the order of `sql.FIND`."""

    number: int
    token: int
    crashes: int
    alone: int
    owner: str | None
    version: int
    state: str
    stop_reason: str | None
    newest: int | None
    # The newest inbox number not taken yet.
    cancelled: bool


@attrs.define(eq=False, repr=False, kw_only=True)
class _PostgresLedger(Link):
    """The tables. It belongs to the writer's thread."""

    holdings: Holdings
    _chains: dict[str, list[Entry]] = attrs.field(factory=dict, init=False)
    # Appends that the next statement writes, by run; those of one run follow on each other.
    _chars: int = attrs.field(default=0, init=False)
    # In them.
    _alone: set[int] = attrs.field(factory=set, init=False)
    # The ids of entries that were not written with others.
    _leaving: list[Leaving] = attrs.field(factory=list, init=False)
    # Leases that the transaction has still to let go of.
    _has_written: bool = attrs.field(default=False, init=False)
    _is_tidy: bool = attrs.field(default=False, init=False)

    @contextmanager
    def transaction(
        self, *, write: bool, durability: Durability = "full", runs: Collection[str] = ()
    ) -> Iterator[None]:
        """Run the block in one transaction, committed at its end or rolled back.

        Where it is about several runs they are locked first, in the order that all workers keep. Two that lock them as
        they come to them could wait for one another, until the server sees that, after a second.
        """
        try:
            with self.holdings.transaction(), self.block(write=write, durability=durability):
                if write:
                    self._renew(self.holdings.renewable(), at_least_s=RENEWED * self.lease_s)
                if write and len(runs) > 1:
                    self.lead(sql.LOCK_ALL, list(runs))
                yield
                if write:
                    self._flush()
        finally:
            self._leaving.clear()
            self._chains.clear()
            self._chars = 0
        self._alone.clear()
        self._has_written = self._has_written or write

    def wait_out(self, error: Exception) -> bool:
        """Wait a little where the error will pass; return whether the same jobs shall be done again."""
        return isinstance(error, _NotAll) or self.waits(error)

    def _renew(self, owners: Sequence[LoopOwner], *, at_least_s: float) -> None:
        """Renew the leases of event loops, where they hold for fewer seconds, with the next statement."""
        now = boot_clock()
        due = [owner for owner in owners if owner.until - now < at_least_s]
        if due:
            self.lead(sql.RENEW, self.lease_s, [owner.name for owner in due])
        for owner in due:
            self._set_until(owner, now)

    def _set_until(self, owner: LoopOwner, now: float) -> None:
        """Let the leases of an event loop hold from now on; where they have ended, see first which are lost."""
        leases = self.holdings.leases_of(owner) if owner.until <= now else []
        if leases:
            self._look_at(leases)
        self.after_commit(partial(setattr, owner, "until", now + self.lease_s))

    def _look_at(self, leases: Sequence[Lease]) -> None:
        news = self._news([lease.run_id for lease in leases])
        for lease in leases:
            self._tell_all(lease, news)

    def now(self) -> float:
        """Seconds since 1970 by the server's clock."""
        (now,) = self._ask(f"SELECT {NOW}")
        return float(now)

    # Runs and their leases.

    def create(self, opening: Opening, taker: Taker) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        self.check_durability(taker.durability)
        self._flush()
        header = opening.header
        is_alone = header.session is None and header.after is None
        row = None if is_alone else self._find(header.id)  # most are new: what they go on from is asked after that
        if row is None:
            header = self._in_session(header)
            if (lease := self._insert(header, opening, taker)) is not None:
                return header, lease
            row = self._row(header.id)
        stored = self._header(header.id, row.number)
        check_same_prompt(stored, header)
        return stored, self.take(header.id, taker)

    def _in_session(self, header: Header) -> Header:
        last: Any = None
        if header.session is not None:
            asked = f"{sql.LOCK_SESSION}; {sql.LAST_OF_SESSION}"
            last = self.execute(asked, (header.session, header.session)).fetchone()
        if last is None and header.after is not None and self.execute(sql.NEEDED, (header.after,)).fetchone() is None:
            raise without_history(header)
        return checked_session(header, last)

    def _insert(self, header: Header, opening: Opening, taker: Taker) -> Lease | None:
        """Insert a run, ours to drive, if its id is new."""
        names = (header.id, header.session, header.after, header.parent, header.agent, header.user)
        *facts, _paused = opening.facts
        values = (*names, prompt_of(header), header.created_at, *facts, taker.owner.name, encode_header(header))
        if (inserted := self.execute(sql.INSERT, values).fetchone()) is None:
            return None
        number, token = inserted
        for start in range(0, len(opening.bodies), RECORDS):
            records = list(enumerate(opening.bodies[start : start + RECORDS], start + 1))
            self.execute(sql.INSERT_EVENTS, (number, *_columns(records)))
        return self._held(Lease(run_id=header.id, token=token, version=opening.facts.version), taker)

    def take(self, run_id: str, taker: Taker, *, takeover: bool = False) -> Lease:
        """Take the lease of a run that exists."""
        self.check_durability(taker.durability)
        self._flush()
        row = self._row(run_id)
        if not takeover and row.owner is not None and not self.holdings.is_dropped(run_id, row.owner):
            if row.owner in self._living():
                raise LeaseHeldError(f"run {run_id!r} {DRIVEN}")
            gone, living, _company = self._ask(sql.OUTLOOK, self._outlook("", limit=0))
            self._free_runs_of_the_dead(gone, living)
            row = self._row(run_id)
        (token,) = self._ask(sql.TAKE, (taker.owner.name, row.number))
        lease = _lease(run_id, token, row.version, row.crashes, row.alone, row.newest, row.cancelled)
        lease.abandoned |= row.owner is not None
        return self._held(lease, taker)

    def claim(self, agent: str, limit: int, taker: Taker, *, suspects: bool) -> Claim:
        """Take the leases of runs that a worker can move on now."""
        self.check_durability(taker.durability)
        self._flush()
        gone, living, company = self._ask(sql.OUTLOOK, self._outlook(agent, limit=1))
        if self._free_runs_of_the_dead(gone, living):
            gone, living, company = self._ask(sql.OUTLOOK, self._outlook(agent, limit=1))
        if suspects:
            least, limit = company or 0, min(limit, half_of(company or 0))
        else:
            least = 0
        rows = self.execute(sql.CLAIM, (agent, suspects, least, limit, taker.owner.name)).fetchall()
        leases = [self._held(_lease(*row), taker) for row in rows]
        return Claim(leases=tuple(leases), has_suspects=company is not None)

    def _outlook(self, agent: str, *, limit: int) -> tuple[Any, ...]:
        """Return the values of `sql.OUTLOOK`."""
        return (self.outage.seconds, agent, True, 0, limit)

    def _held(self, lease: Lease, taker: Taker) -> Lease:
        """Hold a lease that was taken, and renew its owner's leases if that was not done lately."""
        lease.term, lease.durability = taker.owner, taker.durability
        if (before := self.holdings.lease_of(lease.run_id)) is not None:
            self.after_commit(partial(self.holdings.lose, before))
        self.holdings.add(lease, taker.owner)
        now = boot_clock()
        if taker.owner.until - now < self.lease_s / 2:
            self.execute(sql.RENEW, (self.lease_s, [taker.owner.name]))
            self._set_until(taker.owner, now)
        return lease

    def _free_runs_of_the_dead(self, gone: Sequence[str], living: Sequence[str]) -> bool:
        """Free the runs of owners that died, all of them at once: one of them may be what they died of.

        Args:
            gone: Owners whose leases have ended.
            living: Other owners; of some it may be seen that they are dead.

        Returns:
            Whether there were any.
        """
        dead = [*gone, *[name for name in living if not self.holdings.is_ours(name) and Owner.parse(name).is_dead]]
        for names in by_process(dead):
            (company,) = self._ask(sql.COMPANY, (names, names))
            self.execute(sql.FREE, (company, int(company <= 1), names))
        return bool(dead)

    def _is_driven(self, run_id: str, owner: str | None, living: frozenset[str]) -> bool:
        """Whether somebody who may be alive holds the lease. Of our own leases we know; others' end with their time."""
        return owner in living and not self.holdings.is_dropped(run_id, owner)

    def _living(self) -> frozenset[str]:
        """Return the owners whose leases have not ended, and of whom it cannot be seen that they are dead."""
        names = [name for (name,) in self.execute(sql.LIVING, (self.outage.seconds,)).fetchall()]
        return frozenset(name for name in names if self.holdings.is_ours(name) or not Owner.parse(name).is_dead)

    def release(self, lease: Lease) -> bool:
        """Give the lease back."""
        self.holdings.give_back(lease)
        self._leaving.append(
            (
                lease.run_id,
                lease.token,
                owner_of(lease).name,
                lease.inbox_read,
                lease.timers_read_at,
                lease.backoff_s,
                lease.backoff_inbox_head,
            )
        )
        return True

    # The journal.

    def append(self, entry: Entry) -> bool:
        """Have events written and inbox rows struck with the next statement; all but refusals are found out there."""
        self.holdings.check(entry.lease)
        if id(entry) in self._alone:
            return self._append_alone(entry)
        chain = self._chains.get(entry.lease.run_id)
        if self._chars > STATEMENT_CHARS or (chain and not _follows(chain[-1], entry)):
            self._flush()
        self._chains.setdefault(entry.lease.run_id, []).append(entry)
        self._chars += sum(map(len, entry.bodies))
        return True

    def _append_alone(self, entry: Entry) -> bool:
        self._flush()
        run_id = entry.lease.run_id
        row = self._mine(entry.lease)
        if row.version != entry.before:
            raise ConflictError(f"run {run_id!r} is at version {row.version}, not {entry.before}; load it again")
        chains = {run_id: [entry]}
        if self._held_up(chains):
            return False
        self._write(chains)
        return True

    def _mine(self, lease: Lease) -> _Row:
        """Return the row of a run that we drive, locked, and tell the lease what is new.

        Raises:
            LeaseLostError: when we do not drive it any more.
        """
        row = self._find(lease.run_id)
        if row is None or (row.owner, row.token) != (owner_of(lease).name, lease.token):
            self.after_commit(partial(self.holdings.lose, lease))
            raise lease_lost_error(lease)
        self._tell(lease, row.newest, cancelled=row.cancelled)
        return row

    def _flush(self) -> None:
        """Write the appends that wait for it, then let go of the leases that were given back."""
        chains, self._chains, self._chars = self._chains, {}, 0
        if chains:
            missing = self._held_up(chains) or chains.keys() - self._write(chains)
            if missing:
                self._alone.update(id(entry) for run_id in missing for entry in chains[run_id])
                raise _NotAll
        leaving, self._leaving = self._leaving, []
        if leaving:
            ids = [run_id for run_id, *_rest in leaving]
            self.execute(sql.LET_GO, (ids, *_columns(leaving), self.channel))

    def _held_up(self, chains: Chains) -> set[str]:
        """Return the ids of the runs that shall end, and whose inbox holds more that is due."""
        taken = {
            run_id: {number for entry in chain for number in entry.taken}
            for run_id, chain in chains.items()
            if chain[-1].final
        }
        rows = self.execute(sql.DUE_NUMBERS, (list(taken), list(taken))).fetchall() if taken else []
        return {run_id for run_id, number in rows if number not in taken[run_id]}

    def _write(self, chains: Chains) -> set[str]:
        """Write appends, by one statement; return the ids of the runs whose appends were written."""
        heads = [
            (run_id, chain[0].lease.token, owner_of(chain[0].lease).name, chain[0].before, *chain[-1].facts)
            for run_id, chain in chains.items()
        ]
        entries = [(run_id, entry) for run_id, chain in chains.items() for entry in chain]
        records = [
            (run_id, version, body)
            for run_id, entry in entries
            for version, body in enumerate(entry.bodies, entry.before + 1)
        ]
        values = [*_columns(heads), *_columns(records), self.channel]
        if struck := [(run_id, number) for run_id, entry in entries for number in entry.taken]:
            rows = self.execute(sql.STRIKE + sql.APPEND, [*_columns(struck), *values]).fetchall()
        else:
            rows = self.execute(sql.APPEND, values).fetchall()
        for run_id, newest, cancelled, _told in rows:
            self._tell(chains[run_id][0].lease, newest, cancelled=cancelled)
        return {run_id for run_id, *_news in rows}

    def read(self, run_id: str, after: int) -> Records:
        """Return the run's version, and the records: the header as 0, and those after that version."""
        row = self._row(run_id, sql.FIND)
        records = self.execute(sql.EVENTS, (row.number, max(after, 0))).fetchall()
        return row.version, [(version, body.encode()) for version, body in records]

    def _header(self, run_id: str, number: int) -> Header:
        body = self.execute(sql.HEADER, (number,)).fetchone()
        return read_header(run_id, body and body[0].encode())

    # The inbox.

    def post(self, post: Post) -> PostedItem:
        """Insert an item; the first of a key wins."""
        self._flush()
        run_id, item = post.run_id, post.item
        row = self._row(run_id)
        now, number, waiting, *winner = self._ask(sql.BEFORE_POST, (row.number, row.number, row.number, post.key))
        if winner[0] is not None:
            return checked_winner(run_id, posted(run_id, winner[0], post.key, winner[1].encode()), item)
        check_not_over(run_id, row.state, row.stop_reason)
        check_in_time(run_id, post.before, now)
        check_room(run_id, item, waiting)
        is_cancel = isinstance(item, Cancel)
        self.execute(sql.POST, (row.number, number, post.key, post.text, is_cancel, post.due_at))
        self.execute(sql.POSTED, (post.due_at, row.number, self.channel))
        self.after_commit(partial(self.holdings.tell, run_id, number, cancelled=is_cancel))
        return PostedItem(number=number, key=post.key, item=item)

    def inbox(self, run_id: str) -> list[tuple[int, str, bytes]]:
        """Return the rows that are not taken yet, oldest first."""
        rows = self.execute(sql.OPEN, (self._row(run_id, sql.FIND).number,)).fetchall()
        return [(number, key, item.encode()) for number, key, item in rows]

    def _tell(self, lease: Lease, newest: int | None, *, cancelled: bool) -> None:
        if newest is not None and newest > lease.inbox_head:
            self.after_commit(partial(self.holdings.tell, lease.run_id, newest, cancelled=cancelled))

    # Lists.

    def runs(self, where: Filter, limit: int) -> tuple[RunSummary, ...]:
        """Return the newest runs that the filter takes, newest first."""
        wanted = {name: value for name, value in attrs.asdict(where).items() if value is not None}
        tests = ["created_at < %s" if name == "before" else f'"{name}" = %s' for name in wanted]
        clause = f"WHERE {' AND '.join(tests)}" if tests else ""
        values = [str(value) if isinstance(value, str) else value for value in wanted.values()]  # psycopg names enums
        rows = self.execute(f"{sql.LIST} {clause} {sql.NEWEST_FIRST}", (*values, limit)).fetchall()
        living = self._living()
        return tuple(self._summary(living, *row) for row in rows)

    def _summary(self, living: frozenset[str], *row: Any) -> RunSummary:
        *facts, owner = row
        values: dict[str, Any] = dict(zip(LISTED, facts, strict=True))
        return summary_from(values, driven=self._is_driven(values["id"], owner, living))

    def watch(self, run_ids: Sequence[str], seconds: float, signals: Signals) -> None:
        """Have appends to these runs announced for a while; what came before that is looked for once."""
        self.execute(sql.WATCH, (seconds, list(run_ids)))
        self.after_commit(partial(signals.send, [run_topic(run_id) for run_id in run_ids]))

    # The end of runs.

    def delete(self, run_id: str) -> None:
        """Remove a run that nobody drives, and the runs below it."""
        self._flush()
        self._row(run_id)
        self._remove_idle([run_id])

    def delete_session(self, session: str) -> int:
        """Remove all runs of a session, and the runs below them."""
        self._flush()
        ids = [
            run_id for (run_id,) in self.execute(f"{sql.LOCK_SESSION}; {sql.OF_SESSION}", (session, session)).fetchall()
        ]
        self._remove_idle(ids)
        return len(ids)

    def prune(self, before: float, start: int, limit: int) -> tuple[int, int]:
        """Remove a portion of what is over and old, and nothing still needs."""
        self._flush()
        portion = self._numbers(sql.OLD, before, start, limit)
        if not portion:
            return 0, -1
        old = self._removable(portion, before)
        if old:
            self.execute(sql.LOCK_REMOVED, (old,))
            still = self._removable(old, before)  # before they were locked something may have come to need them
            old = sorted({*old} & {*still})
            self._remove(old)
        return len(old), portion[-1]

    def _removable(self, numbers: list[int], before: float) -> list[int]:
        """Return the numbers of what is over and old among these runs and their kin, and nothing still needs."""
        kin = self.execute(sql.KIN, (numbers, before)).fetchall()
        fresh = [run_id for run_id, _number, is_old in kin if not is_old]
        kept = {run_id for (run_id,) in self.execute(sql.KEPT, (fresh,)).fetchall()} if fresh else set()
        return [number for run_id, number, _is_old in kin if run_id not in kept]

    def _remove_idle(self, ids: list[str]) -> None:
        """Remove runs and those below them, if nobody drives any of them and nothing that stays goes on from them."""
        numbers = self._numbers(sql.BELOW, ids)
        owners = {run_id: owner for _number, run_id, owner in self.execute(sql.LOCK_REMOVED, (numbers,)).fetchall()}
        if (follower := self.execute(sql.FOLLOWER, (list(owners), list(owners))).fetchone()) is not None:
            raise followed(*follower)
        living = self._living()
        for run_id, owner in owners.items():
            if self._is_driven(run_id, owner, living):
                raise LeaseHeldError(f"run {run_id!r} is being driven; cancel it before you delete it")
        self._remove(numbers)

    def _remove(self, numbers: list[int]) -> None:
        self.execute(sql.REMOVE, (numbers, numbers, numbers))

    # Upkeep.

    def beat(self) -> None:
        """Renew the leases that are held, let go of those that were dropped, learn of news and losses."""
        with self.transaction(write=True, durability="normal"):
            held = list(self.holdings)
            ids, owners = [run_id for run_id, _each in held], [owner.name for owner in self.holdings.owners()]
            dropped = [(run_id, each.token, each.owner.name) for run_id, each in held if each.lease() is None]
            self._drop([*dropped, *self.execute(sql.STRAY, (owners, ids)).fetchall()])
            news = self._news(ids)
            for run_id, each in held:
                lease = each.lease()
                if lease is not None:
                    self._tell_all(lease, news)
                elif (run_id, each.token, each.owner.name) not in news:
                    self.holdings.drop(run_id)

    def _drop(self, leases: Sequence[tuple[str, int, str]]) -> None:
        """Let go of leases of which nobody knows any more, but of none whose row somebody else has locked.

        They are in no hurry, and to wait for one would cost those that are held.

        Args:
            leases: Run id, token and owner of each.
        """
        if leases:
            ids = [run_id for run_id, *_rest in leases]
            leaving = [(*lease, 0, 0.0, 0.0, 0) for lease in leases]
            self.execute(sql.LET_GO_UNLOCKED, (ids, *_columns(leaving), ids, self.channel))

    def _news(self, run_ids: Sequence[str]) -> News:
        """Return what is new of runs."""
        rows = self.execute(sql.RENEWED, (run_ids,)).fetchall()
        return {(run_id, token, owner): (newest, cancelled) for run_id, token, owner, newest, cancelled in rows}

    def _tell_all(self, lease: Lease, news: News) -> None:
        """Tell a lease what is new, or that it is lost."""
        row = news.get((lease.run_id, lease.token, owner_of(lease).name))
        if row is None:
            self.after_commit(partial(self.holdings.lose, lease))
        else:
            self._tell(lease, row[0], cancelled=row[1])

    def tidy(self) -> None:
        """Forget workers that ended long ago, once."""
        if not self._is_tidy:
            with self.transaction(write=True, durability="normal"):
                self.execute(sql.FORGET)
            self._is_tidy = True

    def close(self) -> None:
        """Let go of the leases, and close the connection."""
        try:
            if self._has_written:
                with self.transaction(write=True, durability="normal"):
                    self._drop([(run_id, held.token, held.owner.name) for run_id, held in self.holdings])
                    self.execute("DELETE FROM workers WHERE starts_with(name, %s)", (self.worker,))
        finally:
            self._has_written = False
            for owner in self.holdings.owners():
                owner.until = 0.0
            self.holdings.clear()
            self.shut()

    def _row(self, run_id: str, how: str = sql.LOCK) -> _Row:
        row = self._find(run_id, how)
        if row is None:
            raise RunNotFoundError(f"{self.address} holds no run {run_id!r}; `agentfsm runs` lists those that it holds")
        return row

    def _find(self, run_id: str, how: str = sql.LOCK) -> _Row | None:
        row = self.execute(how, (run_id,)).fetchone()
        return None if row is None else _Row(*row)

    def _numbers(self, statement: str, *values: object) -> list[int]:
        return [number for (number,) in self.execute(statement, values).fetchall()]

    def _ask(self, statement: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return the one row of a statement that always has one."""
        row = self.execute(statement, parameters).fetchone()
        assert row is not None  # noqa: S101  see above
        return row


def _lease(run_id: str, *facts: Any) -> Lease:
    """Return the lease of a run from its token, version, crashes, those alone, newest inbox number and cancellation."""
    token, version, crashes, alone, newest, cancelled = facts
    return Lease(
        run_id=run_id,
        token=token,
        version=version,
        crashes=alone if crashes else 0,
        abandoned=crashes > 0,
        inbox_head=newest or 0,
        cancelled=cancelled,
    )


def _follows(entry: Entry, other: Entry) -> bool:
    """Whether one append of a run may be written together with the next."""
    return not entry.final and entry.lease is other.lease and entry.facts.version == other.before


def _columns(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return rows as columns, which is how a statement takes any number of them."""
    return [list(column) for column in zip(*rows, strict=True)]


def _topic_of(announcement: str, topics: Iterable[str]) -> str | None:
    return next((topic for topic in topics if digest_of(topic) == announcement), None)


def _check_schema(_store: object, _attribute: object, value: object) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", value):
        raise MisuseError(f"PostgresStore(schema={value!r}): give a name of lower case letters, digits and underscores")


@attrs.define(eq=False, repr=False)
class PostgresStore(ThreadedStore[_PostgresLedger]):
    """Keeps journals in a PostgreSQL database that any number of workers on any machines may share.

    A lease lasts `lease_s` seconds and is renewed by the store's thread, as long as the event loop of its owner does
    not stand still for more than `blocked_s` seconds. When an owner is killed its runs may be taken at once by another
    process of its machine that can see that it is dead, else when the lease ends. All times are the server's.

    A connection that is lost (a restart, a failover) is made again, and callers notice only the time that it takes, up
    to `patience_s`. One whose server is silent for 20 seconds counts as lost. A commit whose reply was lost is looked
    up, so what is told of it is true. PgBouncer may stand in between and pool by transaction.

    With durability "full" a commit waits as the server is set to, and for its disk at least; with a server that does
    not wait for its disk (fsync = off) no run is driven so. With "normal" it waits for nothing: a crash of the server
    may lose what was acknowledged in the second before. The store looks at fsync each time that it connects.

    Args:
        url: As libpq takes it: `postgresql://user:password@host:5432/database`. It is never shown.
        schema: Where the tables are: made at first use, which takes the right to create in the database; who may not do
            that needs an empty schema of this name.
        lease_s: Seconds, up to 3,600: how long a worker that vanished keeps others waiting.
        blocked_s: Seconds above 0: how long an event loop that stands still keeps its runs.
        patience_s: Seconds that a server which was reached before may be away until callers are told.
    """

    url: str = attrs.field(repr=False)
    schema: str = attrs.field(default="agentfsm", kw_only=True, validator=_check_schema)
    lease_s: float = attrs.field(default=LEASE_S, kw_only=True, validator=check_lease_s)
    patience_s: float = attrs.field(default=PATIENCE_S, kw_only=True, validator=check_patience_s)
    _address: Address = attrs.field(
        default=attrs.Factory(lambda self: Address.of(self.url), takes_self=True),
        init=False,
        repr=False,
    )

    def _hear(self, writer: LedgerWriter[_PostgresLedger], topic: str) -> None:
        if writer.listener is None:
            writer.listener = Listener(
                signals=writer.signals,
                announcements=partial(announcements, self._address, writer.desk.channel),
                read=_topic_of,
                refresh=partial(self._watch, writer),
                refresh_s=WATCHED_S / 3,
            )
        writer.listener.start()
        self._watch(writer, [topic])

    def _watch(self, writer: LedgerWriter[_PostgresLedger], topics: Iterable[str]) -> None:
        """Have the server announce appends to the runs that are watched: to announce all would slow all writers."""
        run_ids = [topic.removeprefix(_RUN) for topic in topics if topic.startswith(_RUN)]
        if run_ids:
            with suppress(AgentError):  # the store is closed, or its server away: whoever watches polls as well
                writer.submit(Job(lambda ledger: ledger.watch(run_ids, WATCHED_S, writer.signals), durability="normal"))

    def _ledger(self) -> _PostgresLedger:
        worker = str(Owner.here())
        return _PostgresLedger(
            address=self._address,
            schema=self.schema,
            tables=sql.TABLES,
            worker=worker,
            lease_s=self.lease_s,
            patience_s=self.patience_s,
            holdings=Holdings(self.lease_s, self.blocked_s, worker),
        )
