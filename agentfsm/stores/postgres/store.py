"""Store journals in PostgreSQL, for workers on many machines, on asyncio and trio.

One thread owns the connection and commits in groups (`threaded.group_commit`). `postgres.connection` connects to the
server and classifies its errors; `postgres.sql` has the tables and the statements.

One statement writes all appends of a group that are allowed, and returns which were written. If an append is missing,
the transaction is rolled back, and the group is executed again with that append in a statement of its own, which finds
the reason. So 1,000 appends cost two round trips, and each still has its own outcome.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm._lib.concurrency import boot_clock
from agentfsm.core.codec import encode_header
from agentfsm.core.errors import AgentError, ConflictError, LeaseHeldError, RunNotFoundError
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import Cancel, PostedItem
from agentfsm.core.validation import NOT_NEGATIVE, ValueRule
from agentfsm.core.value import Value
from agentfsm.ports.store import Claim, Durability, Filter, Lease, RunOrder, RunSummary, lease_lost_error
from agentfsm.ports.stored import Feedback, FollowerStatus, QuotaUse, UnreadRun
from agentfsm.stores.postgres import sql
from agentfsm.stores.postgres.connection import NOW, PostgresAddress, PostgresConnection, hash_topic
from agentfsm.stores.rules import (
    EXPIRED_PER_WRITE,
    LEASE_HELD_ADVICE,
    PATIENCE_S,
    SUMMARY_COLUMNS,
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
from agentfsm.stores.subscriptions import ALL_AGENTS_TOPIC, agent_topic, run_topic
from agentfsm.stores.threaded.group_commit import StoreJob
from agentfsm.stores.threaded.lease_table import LeaseOwner, LeaseTable, lease_owner
from agentfsm.stores.threaded.owner import OwnerIdentity, group_by_process
from agentfsm.stores.threaded.store import (
    LEASE_S,
    LEASE_SECONDS,
    AppendRequest,
    CreateRequest,
    InboxPost,
    JournalRecords,
    LeaseRequest,
    ReadableWork,
    RecordBusyError,
    RecordRow,
    StoreWriter,
    ThreadedStore,
    decode_post,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


def _write_query(text: str) -> str:
    """Return the tsquery for runs with all words of a text."""
    words = read_query(text)
    return " & ".join([f"'{word.removesuffix('*')}'{':*' if word[-1] == '*' else ''}" for word in words])


_SYNTAX: Final = ListSyntax("number IN (SELECT run FROM run_words WHERE words @@ ?::tsquery)", _write_query)
# Maximum events in one statement.
MAX_EVENTS_PER_INSERT: Final = 1_000
# A transaction renews leases whose remaining part is below this. Scheduled renewals come after a third of a lease.
RENEW_FRACTION: Final = 0.7
# Seconds for which the server announces the appends of a run after a subscriber has requested it.
WATCH_DURATION_S: Final = 30.0
_RUN_TOPIC_PREFIX: Final = run_topic("")
# Approximate maximum of characters of records in one statement: a server keeps several copies of it.
MAX_STATEMENT_CHARS: Final = 4_000_000

# Appends by run id; the appends of one run have consecutive versions.
AppendChains: TypeAlias = Mapping[str, Sequence[AppendRequest]]
# A lease to release: run id, token, owner, newest inbox number that the owner has read, time when it last checked
# timers, seconds of backoff, and inbox number up to which the backoff applies.
LeaseRelease: TypeAlias = tuple[str, int, str, int, float, float, int]
# Newest unconsumed inbox number and whether a cancellation is requested, by id, token and owner of the run.
InboxUpdates: TypeAlias = Mapping[tuple[str, int, str], tuple[int | None, bool]]


class _PartialAppend(Exception):  # noqa: N818  it makes the group execute again
    """Some of the appends of a statement were not written."""


@attrs.frozen
class _PostgresRow(Value):
    """The columns of a run that decide about operations, in the order of `sql.SELECT_RUN`."""

    number: int
    token: int
    crashes: int
    solo_crashes: int
    owner: str | None
    version: int
    format: int
    state: str
    stop_reason: str | None
    newest: int | None
    """Newest inbox number that is not consumed yet."""

    cancelled: bool


@attrs.define(eq=False, repr=False, kw_only=True)
class _PostgresBackend(PostgresConnection):
    """The store's operations on the tables. Only the store's thread uses it."""

    leases: LeaseTable
    _pending_appends: dict[str, list[AppendRequest]] = attrs.field(factory=dict, init=False)
    """Appends that the next statement writes, by run, with consecutive versions."""

    _pending_chars: int = attrs.field(default=0, init=False)
    """Total length of their records, characters."""

    _isolated_ids: set[int] = attrs.field(factory=set, init=False)
    """`id()` of the requests that could not be written with others."""

    _pending_releases: list[LeaseRelease] = attrs.field(factory=list, init=False)
    """Leases that the transaction will release."""

    _watched_at: float = attrs.field(default=0.0, init=False)
    """Time when the server was last asked to announce appends, monotonic seconds."""

    _has_written: bool = attrs.field(default=False, init=False)
    _is_maintained: bool = attrs.field(default=False, init=False)

    @contextmanager
    def transaction(
        self, *, write: bool, durability: Durability = "full", runs: Collection[str] = ()
    ) -> Iterator[None]:
        """Run the block in one transaction, committed at its end or rolled back.

        Several runs are locked first, in an order that all workers share. Else two transactions could deadlock, until
        the server detects this after a second.
        """
        try:
            with self.leases.transaction(), self.open_transaction(write=write, durability=durability):
                if write:
                    self._renew(self.leases.renewable_owners(), at_least_s=RENEW_FRACTION * self.lease_s)
                if write and len(runs) > 1:
                    self.prepend(sql.LOCK_RUNS, list(runs))
                yield
                if write:
                    self._flush()
        finally:
            self._pending_releases.clear()
            self._pending_appends.clear()
            self._pending_chars = 0
        self._isolated_ids.clear()
        self._has_written = self._has_written or write

    def wait_to_retry(self, error: Exception) -> bool:
        """Wait a little if the error is transient. Return whether to execute the same jobs again."""
        return isinstance(error, _PartialAppend) or self.back_off(error)

    def _renew(self, owners: Sequence[LeaseOwner], *, at_least_s: float) -> None:
        """Renew leases that are valid for less than `at_least_s` seconds, together with the next statement."""
        now = boot_clock()
        due = [owner for owner in owners if owner.until - now < at_least_s]
        if due:
            self.prepend(sql.UPSERT_OWNERS, self.lease_s, [owner.name for owner in due])
        for owner in due:
            self._extend_leases(owner, now)

    def _extend_leases(self, owner: LeaseOwner, now: float) -> None:
        """Extend the leases of an event loop from now on. If they have expired, first check which are lost."""
        leases = self.leases.find_leases(owner) if owner.until <= now else []
        if leases:
            self._sync_leases(leases)
        self.after_commit(partial(setattr, owner, "until", now + self.lease_s))

    def _sync_leases(self, leases: Sequence[Lease]) -> None:
        news = self._read_inbox_updates([lease.run_id for lease in leases])
        for lease in leases:
            self._apply_update(lease, news)

    def now(self) -> float:
        """Return seconds since 1970 by the server's clock."""
        (now,) = self._select_one(f"SELECT {NOW}")
        return float(now)

    # Runs and their leases.

    def create(self, request: CreateRequest, lease_request: LeaseRequest) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        self.check_durability(lease_request.durability)
        self._flush()
        header = request.header
        is_alone = header.session is None and header.after is None
        row = None if is_alone else self._find_row(header.id)  # most runs are new: predecessors are checked afterwards
        if row is None:
            header = self._resolve_predecessor(header)
            if (lease := self._insert_run(header, request, lease_request)) is not None:
                return header, lease
            row = self._get_row(header.id)
        stored = self._header(header.id, row.number)
        check_same_prompt(stored, header)
        return stored, self.acquire_lease(header.id, lease_request)

    def _resolve_predecessor(self, header: Header) -> Header:
        last: Any = None
        if header.session is not None:
            statement = f"{sql.LOCK_SESSION}; {sql.SELECT_SESSION_TAIL}"
            last = self.execute(statement, (header.session, header.session)).fetchone()
        if (
            last is None
            and header.after is not None
            and self.execute(sql.LOCK_PREDECESSOR, (header.after,)).fetchone() is None
        ):
            raise missing_predecessor_error(header)
        return continue_session(header, last)

    def _insert_run(self, header: Header, request: CreateRequest, lease_request: LeaseRequest) -> Lease | None:
        """Insert a run and take its lease; return None if its id exists."""
        names = (header.id, header.session, header.after, header.parent, header.agent, header.user, header.tenant)
        *facts, _paused = request.columns
        values = (
            *names,
            header.release,
            header.purpose,
            preview_prompt(header),
            header.created_at,
            *facts,
            lease_request.owner.name,
            encode_header(header),
            list(request.words),
        )
        if (inserted := self.execute(sql.INSERT_RUN, values).fetchone()) is None:
            return None
        number, token = inserted
        for start in range(0, len(request.bodies), MAX_EVENTS_PER_INSERT):
            records = list(enumerate(request.bodies[start : start + MAX_EVENTS_PER_INSERT], start + 1))
            self.execute(sql.INSERT_EVENTS, (number, *_transpose(records)))
        return self._register_lease(
            Lease(run_id=header.id, token=token, version=request.columns.version), lease_request
        )

    def acquire_lease(self, run_id: str, lease_request: LeaseRequest, *, takeover: bool = False) -> Lease:
        """Take the lease of an existing run."""
        self.check_durability(lease_request.durability)
        self._flush()
        row = self._get_row(run_id)
        check_format(run_id, row.format)
        if not takeover and row.owner is not None and not self.leases.is_dropped(run_id, row.owner):
            if row.owner in self._find_living_owners():
                raise LeaseHeldError(f"run {run_id!r} {LEASE_HELD_ADVICE}")
            status = self._owner_status_values("", ReadableWork(0, None), limit=0)
            gone, living, _company = self._select_one(sql.SELECT_OWNER_STATUS, status)
            self._free_abandoned_runs(gone, living)
            row = self._get_row(run_id)
        (token,) = self._select_one(sql.SET_OWNER, (lease_request.owner.name, row.number))
        lease = _build_lease(run_id, token, row.version, row.crashes, row.solo_crashes, row.newest, row.cancelled)
        lease.abandoned |= row.owner is not None
        return self._register_lease(lease, lease_request)

    def claim(
        self, agent: str, limit: int, lease_request: LeaseRequest, *, suspects: bool, work: ReadableWork
    ) -> Claim:
        """Take the leases of runs that are ready."""
        self.check_durability(lease_request.durability)
        self._flush()
        status = self._owner_status_values(agent, work, limit=1)
        gone, living, company = self._select_one(sql.SELECT_OWNER_STATUS, status)
        if self._free_abandoned_runs(gone, living):
            gone, living, company = self._select_one(sql.SELECT_OWNER_STATUS, status)
        if suspects:
            least, limit = company or 0, min(limit, suspect_group_size(company or 0))
        else:
            least = 0
        releases = None if work.releases is None else list(work.releases)
        # A worker with suspects begins no other runs, and one without a subscription cannot be woken.
        topic = agent_topic(agent)
        may_sleep = company is None and not suspects and topic in self._topics
        sleeper = (agent, self.worker_name, work.newest_format, releases, limit if may_sleep else 0)
        values = (agent, suspects, least, work.newest_format, releases, limit, lease_request.owner.name)
        left = (limit, agent, suspects, work.newest_format, releases, limit, agent, suspects, releases)
        rows = self.execute(sql.CLAIM_RUNS, (*values, *sleeper, *left)).fetchall()
        leases = [
            self._register_lease(_build_lease(*row), lease_request)
            for _has_newer, _other_release, _listens, _others, *row, _ready_at, _number in rows
            if row[0] is not None
        ]
        has_newer, other_release, listens, others = rows[0][:4]
        if listens:
            self.polled_topics.discard(topic)
        elif topic in self._topics:
            self.polled_topics.add(topic)
        self.listen(has_missed=not others)  # else one of the others was woken
        return Claim(
            leases=tuple(leases),
            has_suspects=company is not None,
            has_newer=bool(has_newer),
            other_release=other_release or "",
            stands_by=not listens and bool(others),
        )

    def _owner_status_values(self, agent: str, work: ReadableWork, *, limit: int) -> tuple[Any, ...]:
        """Return the values of `sql.SELECT_OWNER_STATUS`."""
        releases = None if work.releases is None else list(work.releases)
        return (self.outage.grace_s, agent, True, 0, work.newest_format, releases, limit)

    def _register_lease(self, lease: Lease, lease_request: LeaseRequest) -> Lease:
        """Register a new lease, and renew its owner's leases if they expire in less than half of `lease_s`."""
        lease.term, lease.durability = lease_request.owner, lease_request.durability
        if (before := self.leases.find_lease(lease.run_id)) is not None:
            self.after_commit(partial(self.leases.mark_lost, before))
        self.leases.add(lease, lease_request.owner)
        now = boot_clock()
        if lease_request.owner.until - now < self.lease_s / 2:
            self.execute(sql.UPSERT_OWNERS, (self.lease_s, [lease_request.owner.name]))
            self._extend_leases(lease_request.owner, now)
        return lease

    def _free_abandoned_runs(self, gone: Sequence[str], living: Sequence[str]) -> bool:
        """Free the runs of owners that died, all at once, because one of them may have caused the death.

        Args:
            gone: Owners whose leases have expired.
            living: Other owners, some of which may be known to be dead.

        Returns:
            Whether there were dead owners.
        """
        dead = [
            *gone,
            *[name for name in living if not self.leases.is_ours(name) and OwnerIdentity.parse(name).is_dead],
        ]
        for names in group_by_process(dead):
            (company,) = self._select_one(sql.COUNT_OWNED_RUNS, (names, names))
            self.execute(sql.FREE_RUNS, (company, int(company <= 1), names))
        return bool(dead)

    def _is_driven(self, run_id: str, owner: str | None, living: frozenset[str]) -> bool:
        """Return whether an owner that may be alive holds the lease. This store's leases are known; others expire."""
        return owner in living and not self.leases.is_dropped(run_id, owner)

    def _find_living_owners(self) -> frozenset[str]:
        """Return the owners whose leases have not expired, without those that are known to be dead."""
        names = [name for (name,) in self.execute(sql.SELECT_LIVING_OWNERS, (self.outage.grace_s,)).fetchall()]
        return frozenset(name for name in names if self.leases.is_ours(name) or not OwnerIdentity.parse(name).is_dead)

    def release(self, lease: Lease) -> bool:
        """Release the lease with the next flush."""
        self.leases.release(lease)
        self._pending_releases.append(
            (
                lease.run_id,
                lease.token,
                lease_owner(lease).name,
                lease.inbox_read,
                lease.timers_read_at,
                lease.backoff_s,
                lease.backoff_inbox_head,
            )
        )
        return True

    # The journal.

    def append(self, request: AppendRequest) -> bool:
        """Queue events and consumed inbox rows for the next statement, which detects conflicts and lost leases."""
        self.leases.check(request.lease)
        if id(request) in self._isolated_ids:
            return self._append_isolated(request)
        chain = self._pending_appends.get(request.lease.run_id)
        if self._pending_chars > MAX_STATEMENT_CHARS or (chain and not _can_chain(chain[-1], request)):
            self._flush()
        self._pending_appends.setdefault(request.lease.run_id, []).append(request)
        self._pending_chars += sum(map(len, request.bodies))
        return True

    def _append_isolated(self, request: AppendRequest) -> bool:
        self._flush()
        run_id = request.lease.run_id
        row = self._sync_lease(request.lease)
        if row.version != request.expected_version:
            raise ConflictError(
                f"run {run_id!r} is at version {row.version}, not {request.expected_version}; load it again"
            )
        chains = {run_id: [request]}
        if self._find_blocked_ends(chains):
            return False
        self._write_appends(chains)
        return True

    def _sync_lease(self, lease: Lease) -> _PostgresRow:
        """Lock the row of a leased run and return it. Update the lease with the state of the inbox.

        Raises:
            LeaseLostError: if the lease is lost.
        """
        row = self._find_row(lease.run_id)
        if row is None or (row.owner, row.token) != (lease_owner(lease).name, lease.token):
            self.after_commit(partial(self.leases.mark_lost, lease))
            raise lease_lost_error(lease)
        self._notify_inbox(lease, row.newest, cancelled=row.cancelled)
        return row

    def _flush(self) -> None:
        """Write the pending appends, then perform the pending releases."""
        chains, self._pending_appends, self._pending_chars = self._pending_appends, {}, 0
        if chains:
            missing = self._find_blocked_ends(chains) or chains.keys() - self._write_appends(chains)
            if missing:
                self._isolated_ids.update(id(request) for run_id in missing for request in chains[run_id])
                raise _PartialAppend
        releases, self._pending_releases = self._pending_releases, []
        if releases:
            ids = [run_id for run_id, *_rest in releases]
            self._wake_sleepers(self.execute(sql.RELEASE_RUNS, (ids, *_transpose(releases))).fetchall())

    def _wake_sleepers(self, ready: Iterable[tuple[Any, ...]]) -> None:
        """Wake a worker for each run. If one may crash its worker, wake all, because only idle ones take such runs.

        Args:
            ready: Agent, release, format, number of runs and whether some are suspects, of the runs that became ready.
        """
        for agent, release, newest_format, count, has_suspects in ready:
            topic = hash_topic(agent_topic(agent))
            wanted = (agent, release, release, newest_format, self.worker_name, 0 if has_suspects else count)
            self.execute(sql.WAKE_SLEEPERS, (*wanted, topic, self.worker_name, self.channel, topic))

    def forget_sleeper(self, agent: str) -> None:
        """Have other sessions wake this store object no more for runs of an agent."""
        topic = agent_topic(agent)
        self.polled_topics.discard(topic)
        self.execute(sql.FORGET_SLEEPER, (self.worker_name, agent, self.channel, hash_topic(topic)))

    def _find_blocked_ends(self, chains: AppendChains) -> set[str]:
        """Return the ids of the runs with a final append whose inbox has other rows that are due."""
        taken = {
            run_id: {number for request in chain for number in request.taken}
            for run_id, chain in chains.items()
            if chain[-1].final
        }
        rows = self.execute(sql.SELECT_DUE_POSTS, (list(taken), list(taken))).fetchall() if taken else []
        return {run_id for run_id, number in rows if number not in taken[run_id]}

    def _write_appends(self, chains: AppendChains) -> set[str]:
        """Write appends by one statement. Return the ids of the runs whose appends were written."""
        heads = [
            (
                run_id,
                chain[0].lease.token,
                lease_owner(chain[0].lease).name,
                chain[0].expected_version,
                *chain[-1].columns,
            )
            for run_id, chain in chains.items()
        ]
        requests = [(run_id, request) for run_id, chain in chains.items() for request in chain]
        records = [
            (run_id, version, body)
            for run_id, request in requests
            for version, body in enumerate(request.bodies, request.expected_version + 1)
        ]
        values: list[Any] = [*_transpose(heads), *_transpose(records)]
        statement = sql.APPEND_EVENTS
        if ended := [(run_id, " ".join(request.words)) for run_id, request in requests if request.words is not None]:
            statement, values = sql.APPEND_ENDS, [*values, *_transpose(ended)]
        values.append(self.channel)
        if taken := [(run_id, number) for run_id, request in requests for number in request.taken]:
            statement, values = sql.MARK_TAKEN + statement, [*_transpose(taken), *values]
        rows = self.execute(statement, values).fetchall()
        for run_id, newest, cancelled, _notified in rows:
            self._notify_inbox(chains[run_id][0].lease, newest, cancelled=cancelled)
        return {run_id for run_id, *_news in rows}

    def read(self, run_id: str, after: int) -> JournalRecords:
        """Return the run's version, the header as record 0, and the events after `after`."""
        row = self._get_row(run_id, sql.SELECT_RUN)
        records = self.execute(sql.SELECT_EVENTS, (row.number, max(after, 0))).fetchall()
        return row.version, [(version, body.encode()) for version, body in records]

    def _header(self, run_id: str, number: int) -> Header:
        body = self.execute(sql.SELECT_HEADER, (number,)).fetchone()
        return read_header(run_id, body and body[0].encode())

    # The inbox.

    def post(self, post: InboxPost) -> PostedItem:
        """Insert an item; the first post of a key wins."""
        self._flush()
        run_id, item = post.run_id, post.item
        row = self._get_row(run_id)
        now, number, waiting, *winner = self._select_one(
            sql.SELECT_BEFORE_POST, (row.number, row.number, row.number, post.key)
        )
        if winner[0] is not None:
            return resolve_duplicate_post(run_id, decode_post(run_id, winner[0], post.key, winner[1].encode()), item)
        check_not_over(run_id, row.state, row.stop_reason)
        check_deadline(run_id, post.before, now)
        check_inbox_capacity(run_id, item, waiting)
        is_cancel = isinstance(item, Cancel)
        self.execute(sql.INSERT_POST, (row.number, number, post.key, post.text, is_cancel, post.due_at))
        self._wake_sleepers(self.execute(sql.MARK_CLAIMABLE, (post.due_at, row.number)).fetchall())
        if row.format < FORMAT:
            self.execute(sql.RAISE_FORMAT, (FORMAT, row.number))
        self.after_commit(partial(self.leases.notify_inbox, run_id, number, cancelled=is_cancel))
        return PostedItem(number=number, key=post.key, item=item)

    def inbox(self, run_id: str) -> list[tuple[int, str, bytes]]:
        """Return the rows that are not consumed yet, oldest first."""
        rows = self.execute(sql.SELECT_INBOX, (self._get_row(run_id, sql.SELECT_RUN).number,)).fetchall()
        return [(number, key, item.encode()) for number, key, item in rows]

    def _notify_inbox(self, lease: Lease, inbox_head: int | None, *, cancelled: bool) -> None:
        if inbox_head is not None and inbox_head > lease.inbox_head:
            self.after_commit(partial(self.leases.notify_inbox, lease.run_id, inbox_head, cancelled=cancelled))

    # Lists.

    def runs(
        self, where: Filter, limit: int, order: RunOrder, after: tuple[float, str] | None
    ) -> tuple[RunSummary, ...]:
        """Return the first runs that match the filter."""
        clause, values = build_list(where, _SYNTAX, order, after)
        clause = clause.replace("?", "%s")
        rows = self.execute(f"{sql.SELECT_SUMMARIES} {clause} LIMIT %s", (*values, limit)).fetchall()
        living = self._find_living_owners()
        return tuple(self._parse_summary(living, *row) for row in rows)

    def count(self, where: Filter, limit: int) -> int:
        """Return the number of runs that match the filter, up to `limit`."""
        clause, values = build_condition(where, _SYNTAX, is_list=False)
        clause = clause.replace("?", "%s")
        (count,) = self._select_one(sql.COUNT_RUNS.replace("{clause}", clause), (*values, limit))
        return int(count)

    def _parse_summary(self, living: frozenset[str], *row: Any) -> RunSummary:
        *facts, owner = row
        values: dict[str, Any] = dict(zip(SUMMARY_COLUMNS, facts, strict=True))
        return parse_summary(values, driven=self._is_driven(values["id"], owner, living), worker=owner)

    def watch(self, topics: Iterable[str]) -> None:
        """Have the server announce appends to the runs of these topics for a while.

        Subscribers are notified once, of earlier changes. Announcing all appends would slow all writers.
        """
        run_ids = [topic.removeprefix(_RUN_TOPIC_PREFIX) for topic in topics if topic.startswith(_RUN_TOPIC_PREFIX)]
        if run_ids and self.subscriptions is not None:
            self.execute(sql.WATCH_RUNS, (WATCH_DURATION_S, run_ids))
            self.after_commit(partial(self.subscriptions.notify, [run_topic(run_id) for run_id in run_ids]))

    def has_changed(self) -> bool:
        """Keep the server announcing what is subscribed to. Return False, since it announces changes."""
        super().has_changed()
        now = time.monotonic()
        if self.fileno() >= 0 and now >= self._watched_at + WATCH_DURATION_S / 3:
            self._watched_at = now
            with self.transaction(write=True, durability="normal"):
                self.watch(self._topics)
        return False

    @property
    def _topics(self) -> list[str]:
        return [] if self.subscriptions is None else list(self.subscriptions.topics)

    # Deletion.

    def delete(self, run_id: str) -> None:
        """Remove a run that is not being executed, and the runs of its subagents."""
        self._flush()
        self._get_row(run_id)
        self._remove_idle([run_id])

    def delete_session(self, session: str) -> int:
        """Remove all runs of a session, and the runs of their subagents. Return the number of runs in the session."""
        self._flush()
        ids = [
            run_id
            for (run_id,) in self.execute(
                f"{sql.LOCK_SESSION}; {sql.SELECT_SESSION_RUNS}", (session, session)
            ).fetchall()
        ]
        self._remove_idle(ids)
        return len(ids)

    def prune(self, before: float, start: int, limit: int, *, unread: bool) -> tuple[int, int]:
        """Remove a batch of old finished runs that no kept run and no follower needs."""
        self._flush()
        (slowest,) = self._select_one(sql.SELECT_SLOWEST_POSITION)
        position = math.inf if unread or slowest is None else float(slowest)
        portion = self._select_numbers(sql.SELECT_PRUNE_BATCH, position, before, start, limit)
        if not portion:
            return 0, -1
        old = self._find_removable(portion, position, before)
        if old:
            self.execute(sql.LOCK_REMOVABLE, (old,))
            still = self._find_removable(old, position, before)  # a new run may need them since the first check
            old = sorted({*old} & {*still})
            self._remove(old)
        return len(old), portion[-1]

    def _find_removable(self, numbers: list[int], position: float, before: float) -> list[int]:
        """Return the numbers of the old finished runs among these and related runs that no kept run needs."""
        kin = self.execute(sql.SELECT_RELATED, (numbers, position, before)).fetchall()
        fresh = [run_id for run_id, _number, is_old in kin if not is_old]
        kept = {run_id for (run_id,) in self.execute(sql.SELECT_RETAINED, (fresh,)).fetchall()} if fresh else set()
        return [number for run_id, number, _is_old in kin if run_id not in kept]

    def _remove_idle(self, ids: list[str]) -> None:
        """Remove runs and those of their subagents, after checking that all of them can be removed."""
        numbers = self._select_numbers(sql.SELECT_DESCENDANTS, ids)
        owners = {run_id: owner for _number, run_id, owner in self.execute(sql.LOCK_REMOVABLE, (numbers,)).fetchall()}
        if (follower := self.execute(sql.SELECT_SUCCESSOR, (list(owners), list(owners))).fetchone()) is not None:
            raise successor_exists_error(*follower)
        living = self._find_living_owners()
        for run_id, owner in owners.items():
            if self._is_driven(run_id, owner, living):
                raise LeaseHeldError(f"run {run_id!r} is being driven; cancel it before you delete it")
        if (caller := self.execute(sql.SELECT_OPEN_CALLER, (list(owners), list(owners))).fetchone()) is not None:
            raise caller_open_error(*caller)
        self._remove(numbers)

    def _remove(self, numbers: list[int]) -> None:
        self.execute(sql.DELETE_RUNS, (numbers,) * 5)

    # Quotas.

    def take_quotas(self, uses: Sequence[QuotaUse], *, force: bool) -> float:
        """Take amounts from quotas that all processes share: all of them, or none."""
        self.execute(sql.REMOVE_OLD_QUOTAS)
        used: dict[str, dict[int, int]] = {}
        rows = self.execute(sql.SELECT_QUOTAS, ([use.name for use in uses],)).fetchall()
        for _now, name, second, amount in rows:
            used.setdefault(name, {})[second] = int(amount)
        wait_s = 0.0 if force else check_quotas(uses, used, rows[0][0] if rows else 0.0)
        if not wait_s:
            self.execute(sql.TAKE_QUOTA, (self.worker_name, [use.name for use in uses], [use.amount for use in uses]))
        return wait_s

    # Records.

    def read_record(self, kind: str, key: str) -> RecordRow | None:
        """Return a record; None if there is none, or it has expired."""
        found = self.execute(sql.SELECT_RECORD, (kind, key)).fetchone()
        return None if found is None else (*found,)

    def write_record(self, kind: str, key: str, text: str, revision: int, expires_at: float | None) -> int | None:
        """Write a record. Return its new revision; None if the stored one is not `revision`."""
        self._lock_record(kind, key)
        values = (kind, key, text, expires_at) if revision == 0 else (text, expires_at, kind, key, revision)
        written = self.execute(sql.UPDATE_RECORD if revision else sql.INSERT_RECORD, values).fetchone()
        if written is not None and expires_at is not None:
            self.delete_expired_records(EXPIRED_PER_WRITE)
        return None if written is None else int(written[0])

    def list_records(self, kind: str, prefix: str, after: str, limit: int) -> list[RecordRow]:
        """Return the records of a kind that have not expired, in the order of their keys."""
        return [*self.execute(sql.SELECT_RECORDS, (kind, prefix, after, end_of_prefix(prefix), limit)).fetchall()]

    def delete_record(self, kind: str, key: str, revision: int | None) -> bool | None:
        """Delete a record. Return whether it existed; None if its revision is not `revision`."""
        self._lock_record(kind, key)
        found = self.read_record(kind, key)
        if found is not None and revision not in (None, found[2]):
            return None
        if found is not None:
            self.execute(sql.DELETE_RECORD, (kind, key))
        return found is not None

    def _lock_record(self, kind: str, key: str) -> None:
        """Keep other sessions from changing a record until the commit.

        Raises:
            RecordBusyError: if another session has locked it.
        """
        self._flush()
        if self._select_one(sql.LOCK_RECORD, (kind, key)) == (False,):
            raise RecordBusyError

    def delete_expired_records(self, limit: int) -> int:
        """Delete up to `limit` expired records. Return their number."""
        self._flush()
        (count,) = self._select_one(sql.DELETE_EXPIRED_RECORDS, (limit,))
        return int(count)

    # Feedback.

    def add_feedback(self, run_id: str, key: str, feedback: Feedback) -> None:
        """Record feedback on a run."""
        self._flush()
        number = self._get_row(run_id).number
        values = (feedback.at, feedback.rating, feedback.comment, feedback.by)
        self.execute(sql.INSERT_FEEDBACK, (number, number, key, *values))

    def list_feedback(self, run_id: str) -> list[Feedback]:
        """Return the feedback on a run, oldest first."""
        rows = self.execute(sql.SELECT_FEEDBACK, (self._get_row(run_id, sql.SELECT_RUN).number,)).fetchall()
        return [Feedback(rating=rating, comment=comment, by=by, at=at) for rating, comment, by, at in rows]

    # Followers.

    def number_changes(self, limit: int) -> bool:
        """Give numbers to changes that have none, unless another session does so, until its commit."""
        self._flush()
        if self._select_one(sql.HAS_UNNUMBERED) == (False,):
            return False
        if self._select_one(sql.LOCK_CHANGES) == (False,):
            return True
        (count,) = self._select_one(sql.NUMBER_CHANGES, (limit,))
        return bool(count == limit)

    def add_follower(self, name: str, *, from_now: bool) -> None:
        """Create a follower, unless it exists."""
        self._flush()
        self.execute(sql.INSERT_FOLLOWER, (name, from_now))

    def has_unread(self, name: str, after: int) -> bool:
        """Return whether there may be something for a follower. If it does not exist, `take_unread` says so."""
        return self.execute(sql.HAS_UNREAD, (after, name)).fetchone() != (False,)

    def take_unread(self, name: str, holder: str, after: int, lease_s: float, limit: int) -> list[UnreadRun]:
        """Return runs that changed after the follower's position, and hold the follower."""
        self._flush()
        if (found := self.execute(sql.LOCK_FOLLOWER, (name,)).fetchone()) is None:
            raise missing_follower_error(name)
        position, held_by, is_held = found
        if is_held and held_by != holder:
            return []
        self.execute(sql.HOLD_FOLLOWER, (holder, lease_s, name))
        rows = self.execute(sql.SELECT_UNREAD, (name, max(position, after), limit)).fetchall()
        return [UnreadRun(key=str(key), run_id=run_id, change=change, after=read) for key, run_id, change, read in rows]

    def confirm_read(
        self, name: str, holder: str, position: int, versions: Mapping[str, int], *, release: bool
    ) -> None:
        """Record that the follower has read all changes up to a number."""
        self._flush()
        found = self.execute(sql.LOCK_FOLLOWER, (name,)).fetchone()
        if found is None or found[1] != holder:
            raise follower_lost_error(name)
        self.execute(sql.ADVANCE_FOLLOWER, (position, name))
        if versions:
            keys = [int(key) for key in versions]
            self.execute(sql.UPSERT_READS, (keys, name, keys, list(versions.values())))
        if release:
            self.execute(sql.HOLD_FOLLOWER, ("", 0, name))

    def followers(self) -> list[FollowerStatus]:
        """Return the followers and how far they are behind, by name."""
        return [
            FollowerStatus(name=name, position=position, lag=lag, waiting_since=since, held=is_held)
            for name, position, is_held, lag, since in self.execute(sql.SELECT_FOLLOWERS).fetchall()
        ]

    def drop_follower(self, name: str) -> bool:
        """Remove a follower. Return whether it existed."""
        self._flush()
        return self.execute(sql.DROP_FOLLOWER, (name, name)).fetchone() is not None

    # Maintenance.

    def renew_leases(self) -> None:
        """Renew the leases of live event loops, release dropped ones, and detect new posts and lost leases."""
        with self.transaction(write=True, durability="normal"):
            held = list(self.leases)
            ids, owners = [run_id for run_id, _each in held], [owner.name for owner in self.leases.owners()]
            dropped = [(run_id, each.token, each.owner.name) for run_id, each in held if each.lease_ref() is None]
            self._release_leases([*dropped, *self.execute(sql.SELECT_STRAY_LEASES, (owners, ids)).fetchall()])
            news = self._read_inbox_updates(ids)
            for run_id, each in held:
                lease = each.lease_ref()
                if lease is not None:
                    self._apply_update(lease, news)
                elif (run_id, each.token, each.owner.name) not in news:
                    self.leases.remove(run_id)

    def _release_leases(self, leases: Sequence[tuple[str, int, str]]) -> None:
        """Release leases that are not used any more, except those whose rows another session has locked.

        They can be released later; waiting for a lock would delay the renewal of the other leases.

        Args:
            leases: Run id, token and owner of each.
        """
        if leases:
            ids = [run_id for run_id, *_rest in leases]
            releases = [(*lease, 0, 0.0, 0.0, 0) for lease in leases]
            ready = self.execute(sql.RELEASE_UNLOCKED_RUNS, (ids, *_transpose(releases), ids)).fetchall()
            self._wake_sleepers(ready)

    def _read_inbox_updates(self, run_ids: Sequence[str]) -> InboxUpdates:
        """Return the current inbox state of runs."""
        rows = self.execute(sql.SELECT_INBOX_UPDATES, (run_ids,)).fetchall()
        return {(run_id, token, owner): (newest, cancelled) for run_id, token, owner, newest, cancelled in rows}

    def _apply_update(self, lease: Lease, updates: InboxUpdates) -> None:
        """Update a lease with the state of the inbox, or mark it as lost."""
        row = updates.get((lease.run_id, lease.token, lease_owner(lease).name))
        if row is None:
            self.after_commit(partial(self.leases.mark_lost, lease))
        else:
            self._notify_inbox(lease, row[0], cancelled=row[1])

    def maintain(self) -> None:
        """Remove the rows of workers that ended long ago, once per backend."""
        if not self._is_maintained:
            with self.transaction(write=True, durability="normal"):
                self.execute(sql.DELETE_ENDED_WORKERS)
            self._is_maintained = True

    def close(self) -> None:
        """Release the leases, and close the connection."""
        try:
            if self._has_written:
                with self.transaction(write=True, durability="normal"):
                    self._release_leases([(run_id, held.token, held.owner.name) for run_id, held in self.leases])
                    self.execute(sql.FORGET_SLEEPERS, (self.worker_name,))
                    self.execute("DELETE FROM workers WHERE starts_with(name, %s)", (self.worker_name,))
        finally:
            self._has_written = False
            for owner in self.leases.owners():
                owner.until = 0.0
            self.leases.clear()
            self.disconnect()

    def _get_row(self, run_id: str, how: str = sql.LOCK_RUN) -> _PostgresRow:
        row = self._find_row(run_id, how)
        if row is None:
            raise RunNotFoundError(f"{self.address} holds no run {run_id!r}; `agentfsm runs` lists its runs")
        return row

    def _find_row(self, run_id: str, how: str = sql.LOCK_RUN) -> _PostgresRow | None:
        row = self.execute(how, (run_id,)).fetchone()
        return None if row is None else _PostgresRow(*row)

    def _select_numbers(self, statement: str, *values: object) -> list[int]:
        return [number for (number,) in self.execute(statement, values).fetchall()]

    def _select_one(self, statement: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return the row of a statement that always returns one row."""
        row = self.execute(statement, parameters).fetchone()
        assert row is not None  # noqa: S101  see the docstring
        return row


def _build_lease(run_id: str, *facts: Any) -> Lease:
    """Build a lease from token, version, crashes, crashes without other runs, newest inbox number and cancellation."""
    token, version, crashes, alone, newest, cancelled = facts
    return Lease(
        run_id=run_id,
        token=token,
        version=version,
        crashes=alone if crashes else 0,
        abandoned=crashes > 0,
        is_suspect=crashes > 1,
        inbox_head=newest or 0,
        cancelled=cancelled,
    )


def _can_chain(request: AppendRequest, other: AppendRequest) -> bool:
    """Return whether an append of a run can be written together with the next one."""
    return not request.final and request.lease is other.lease and request.columns.version == other.expected_version


def _transpose(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return rows as columns: a statement takes any number of rows as arrays."""
    return [list(column) for column in zip(*rows, strict=True)]


SCHEMA_NAME: Final = ValueRule(
    fits=lambda value: isinstance(value, str) and re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", value) is not None,
    wanted="a name of lower case letters, digits and underscores",
)


@attrs.define(eq=False, repr=False)
class PostgresStore(ThreadedStore[_PostgresBackend]):
    """A store that keeps journals in a PostgreSQL database, which any number of workers on any machines may share.

    A lease lasts `lease_s` seconds. The store's thread renews it, unless the event loop of its owner is blocked for
    more than `blocked_s` seconds. If the owner is killed, another process of its machine takes its runs at once if it
    can see that the owner is dead, else when the lease expires. All times are the server's.

    After a lost connection (a restart, a failover) the store connects again, and calls only take longer, up to
    `patience_s`. A connection whose server is silent for 20 seconds counts as lost. If the reply to a commit is lost,
    the store looks up whether it was committed. A standby is refused. With the addresses of all servers in the URL
    (`host1,host2`) the store takes the one that accepts writes. PgBouncer may stand in between and pool by transaction;
    new runs may then not be announced, so that workers find them at their next poll.

    A store has one connection. A run that is submitted wakes one of the workers that wait: few of them listen, and the
    others poll. If the one that was woken has died, the next poll of another finds the run.

    With durability "full", a commit waits as the server is configured, and at least for its disk. If the
    server does not wait for its disk (fsync = off, checked at each connection), runs with "full" are refused. With
    "normal", a commit does not wait: a crash of the server may lose the writes acknowledged in the second before.
    """

    url: str = attrs.field(repr=False)
    """Address of the database, in libpq's form `postgresql://user:password@host:5432/database`. It is never shown."""

    schema: str = attrs.field(default="agentfsm", kw_only=True, validator=SCHEMA_NAME)
    """Name of the schema of the tables, created at first use, which requires the right to create schemas in the
    database. A user without it needs an empty schema of this name. Default "agentfsm".
    """

    lease_s: float = attrs.field(default=LEASE_S, kw_only=True, validator=LEASE_SECONDS)
    """Seconds after which other workers take over the runs of a worker that vanished, up to 3,600."""

    patience_s: float = attrs.field(default=PATIENCE_S, kw_only=True, validator=NOT_NEGATIVE)
    """Seconds that calls wait for a server that was reached before and is away, 0 or more; then they fail."""

    _address: PostgresAddress = attrs.field(
        default=attrs.Factory(lambda self: PostgresAddress.parse(self.url), takes_self=True),
        init=False,
        repr=False,
    )

    def subscribe(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after commits that may concern the topic, including commits of other processes."""
        writer = self._writer
        end = super().subscribe(topic, wake)

        def unsubscribe() -> None:
            was_subscribed = topic in writer.subscriptions.topics
            end()
            if was_subscribed and topic.startswith(ALL_AGENTS_TOPIC) and topic not in writer.subscriptions.topics:
                agent = topic.removeprefix(ALL_AGENTS_TOPIC)
                with suppress(AgentError):  # its row ends with the store
                    writer.submit(StoreJob(lambda backend: backend.forget_sleeper(agent), durability="normal"))

        return unsubscribe

    def _start_watching(self, writer: StoreWriter[_PostgresBackend], topic: str) -> None:
        writer.backend.subscriptions, writer.announcements = writer.subscriptions, writer.backend
        with suppress(AgentError):  # the store is closed, or its server away: subscribers also poll
            writer.submit(
                StoreJob(
                    lambda backend: backend.watch([topic]),
                    writes=topic.startswith(_RUN_TOPIC_PREFIX),
                    durability="normal",
                )
            )

    def _create_backend(self) -> _PostgresBackend:
        worker = str(OwnerIdentity.generate())
        return _PostgresBackend(
            address=self._address,
            schema=self.schema,
            tables=sql.TABLES,
            worker_name=worker,
            lease_s=self.lease_s,
            patience_s=self.patience_s,
            leases=LeaseTable(self.lease_s, self.blocked_s, worker),
        )
