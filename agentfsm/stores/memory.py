"""Store runs in memory, for tests and for runs that need not outlive the process."""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections import Counter, OrderedDict
from threading import RLock
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm._lib.concurrency import is_waker_dead
from agentfsm.core.errors import ConflictError, LeaseHeldError, LeaseLostError, RunNotFoundError, StoreError
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import Cancel, InboxItem, PostedItem, due_at
from agentfsm.core.run import Run, begin_run
from agentfsm.core.value import Value
from agentfsm.ports.followers import BATCH, FOLLOWER_LEASE_S, FOLLOWER_START, FollowerStart
from agentfsm.ports.store import (
    ALL_RUNS,
    DURABILITY,
    RUN_ORDER,
    Claim,
    Clock,
    Durability,
    Filter,
    Lease,
    RunOrder,
    RunSummary,
    Store,
    SystemClock,
)
from agentfsm.ports.stored import (
    QUOTA_WINDOW_S,
    Feedback,
    FollowerStatus,
    QuotaUse,
    StoredRun,
    StoreRecord,
    UnreadRun,
)
from agentfsm.stores.rules import (
    EXPIRED_PER_WRITE,
    LEASE_HELD_ADVICE,
    build_summary,
    caller_open_error,
    check_deadline,
    check_inbox_capacity,
    check_not_over,
    check_prune_time,
    check_quotas,
    check_record_key,
    check_record_list,
    check_run_id,
    check_same_prompt,
    continue_session,
    encode_record,
    follower_lost_error,
    missing_follower_error,
    missing_predecessor_error,
    next_expiry,
    parse_record,
    record_conflict_error,
    resolve_duplicate_post,
    sort_summaries,
    store_closed_error,
    successor_exists_error,
)
from agentfsm.stores.run_words import has_words, read_query, read_words
from agentfsm.stores.subscriptions import Subscriptions, agent_topic, run_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from agentfsm.core.events import Event
    from agentfsm.core.messages import JSON
    from agentfsm.ports.store import PendingWrite

# Number of finished runs to keep: enough to inspect in a test or a shell, too few to fill the memory of a service.
MAX_FINISHED_RUNS: Final = 1_000


@attrs.frozen
class _CompletedWrite(Value):
    """The outcome of an append to memory, which is always known at once."""

    error: StoreError | None = None
    accepted: bool = True
    is_done: bool = True

    async def wait(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.accepted


WRITE_ACCEPTED: Final = _CompletedWrite()
_WRITE_REFUSED: Final = _CompletedWrite(accepted=False)


@attrs.define(eq=False, repr=False)
class _MemoryRecord:
    run: Run
    events: list[Event] = attrs.field(factory=list)
    inbox: dict[int, PostedItem] = attrs.field(factory=dict)
    """Posts that are not consumed yet, by number."""

    posts_by_key: dict[str, PostedItem] = attrs.field(factory=dict)
    """All posts of the run, including consumed ones, by key."""

    feedback: dict[str, Feedback] = attrs.field(factory=dict)
    """Feedback on the run by key, oldest first."""

    token: int = 0
    seen: int = 0
    """Number of the newest inbox row that an owner has read."""

    seen_at: float = 0.0
    """Time when an owner last checked timers, seconds since 1970."""

    ready_at: float | None = None
    """Time from which a worker may claim the run, seconds since 1970; None for never, or while it is executed."""

    key: str = ""
    """Key of the run for followers, which a later run with the same id does not get; empty without a change."""

    change: int = 0
    """Number of the run's last change for followers; 0 for none."""

    read_versions: dict[str, int] = attrs.field(factory=dict)
    """Version that each follower has read, by its name."""

    lease_ref: weakref.ref[Lease] | None = None
    """The current lease; weak, so that an owner whose coroutine was discarded holds nothing."""

    @property
    def summary(self) -> RunSummary:
        """The run as a row of a list."""
        rating = next(reversed(self.feedback.values())).rating if self.feedback else None
        return build_summary(self.run, driven=self.lease is not None, ready_at=self.ready_at, rating=rating)

    @property
    def lease(self) -> Lease | None:
        """The current lease; None if the run has no owner."""
        return self.lease_ref() if self.lease_ref is not None else None

    def is_unread(self, row: PostedItem) -> bool:
        """Return whether no owner has read the row since it was posted or became due."""
        at = due_at(row.item)
        return row.number > self.seen or (at is not None and at > self.seen_at)


@attrs.frozen
class _MemoryValue(Value):
    """A `StoreRecord` whose value is JSON text, so that no caller can change it."""

    text: str
    revision: int
    expires_at: float | None


@attrs.define(eq=False, repr=False)
class _MemoryFollower:
    position: int
    """Number of the last change up to which all was read."""

    holder: str = ""
    until: float = 0.0
    """Time until which the holder has the follower, seconds since 1970."""


def _iter_required(runs: Mapping[str, Run], kept: Collection[str]) -> Iterator[str | None]:
    """Yield the runs that kept runs need: predecessors, callers, subagents' runs and other runs of the session."""
    sessions = {runs[run_id].session for run_id in kept} - {None}
    for run_id, run in runs.items():
        if run_id in kept:
            yield run.header.after
            yield run.header.parent
        elif run.header.parent in kept or run.session in sessions:
            yield run_id


@attrs.define(eq=False, repr=False)
class MemoryStore(Store):
    """A store that keeps journals in the memory of this process.

    It keeps the newest 1,000 finished runs, those that a kept run goes on from, and those that a follower has not read.
    """

    clock: Clock = attrs.field(factory=SystemClock, kw_only=True)
    """Source of the current time; tests replace it."""

    _records: dict[str, _MemoryRecord] = attrs.field(factory=dict, init=False)
    _finished: OrderedDict[str, None] = attrs.field(factory=OrderedDict, init=False)
    _successor_counts: Counter[str] = attrs.field(factory=Counter, init=False)
    """Number of stored runs that continue a run, by its id."""

    _sessions: dict[str, list[str]] = attrs.field(factory=dict, init=False)
    """Ids of the runs of each session, oldest first."""

    _numbers: itertools.count[int] = attrs.field(factory=lambda: itertools.count(1), init=False)
    """Numbers of inbox rows, and of the entries in `_ready`."""

    _ready: dict[str, list[tuple[float, int, str]]] = attrs.field(factory=dict, init=False)
    """Heap of claimable runs for each agent: `ready_at`, a number and the id. Outdated entries are skipped."""

    _tokens: itertools.count[int] = attrs.field(factory=lambda: itertools.count(1), init=False)
    """Fencing tokens, unique in the store, so that a lease of a deleted run is not valid for a new run with its id."""

    _unnumbered: dict[str, None] = attrs.field(factory=dict, init=False)
    """Ids of the runs that have changed since their last number. Only followers number them."""

    _changes: dict[int, str] = attrs.field(factory=dict, init=False)
    """Ids of the runs that have changed, by the number of their last change, oldest first."""

    _quotas: dict[str, dict[int, int]] = attrs.field(factory=dict, init=False)
    """Amounts that were taken from quotas, by name and second."""

    _store_records: dict[str, dict[str, _MemoryValue]] = attrs.field(factory=dict, init=False)
    """Records beside the runs, by kind and key."""

    _expiring: list[tuple[float, str, str]] = attrs.field(factory=list, init=False)
    """Heap of the records that expire, at most one entry of each: time, kind and key."""

    _noted_expiries: set[tuple[str, str]] = attrs.field(factory=set, init=False)
    """Kind and key of the entries in `_expiring`."""

    _records_by_key: dict[str, _MemoryRecord] = attrs.field(factory=dict, init=False)
    _followers: dict[str, _MemoryFollower] = attrs.field(factory=dict, init=False)
    _subscriptions: Subscriptions = attrs.field(factory=Subscriptions, init=False)
    _lock: RLock = attrs.field(factory=RLock, init=False)
    """Lock for event loops in several threads. Reentrant, because a garbage collection in a thread that holds it may
    release a lease.
    """

    _is_closed: bool = attrs.field(default=False, init=False)

    async def now(self) -> float:
        """Return seconds since 1970 by `clock`."""
        self._check_open()
        return self.clock.now()

    async def create(
        self,
        header: Header,
        *,
        events: Sequence[Event] = (),
        durability: Durability = "full",
    ) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        DURABILITY.check("create", "durability", durability)
        with self._lock:
            self._check_open()
            record = self._records.get(header.id)
            if record is None:
                header = self._resolve_predecessor(header)
                record = self._records[header.id] = _MemoryRecord(begin_run(header).fold(events), list(events))
                if header.after is not None:
                    self._successor_counts[header.after] += 1
                if header.session is not None:
                    self._sessions.setdefault(header.session, []).append(header.id)
                if record.run.is_over:
                    self._unnumbered[header.id] = None
                    self._retire(header.id)
            else:
                check_same_prompt(record.run.header, header)
            lease = self._grant_lease(record, durability)
        if self._subscriptions.topics:
            self._notify(record.run)
        return record.run.header, lease

    def _resolve_predecessor(self, header: Header) -> Header:
        ids = [] if header.session is None else self._sessions.get(header.session, [])
        last = (ids[-1], self._records[ids[-1]].run.state) if ids else None
        if last is None and header.after is not None and header.after not in self._records:
            raise missing_predecessor_error(header)
        return continue_session(header, last)

    async def lease(self, run_id: str, *, durability: Durability = "full", takeover: bool = False) -> Lease:
        """Take the lease of an existing run."""
        DURABILITY.check("lease", "durability", durability)
        with self._lock:
            return self._grant_lease(self._record(run_id), durability, takeover=takeover)

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
        """Take the leases of runs of that agent that are ready. A store in memory has no suspects."""
        DURABILITY.check("claim", "durability", durability)
        leases: list[Lease] = []
        with self._lock:
            self._check_open()
            waiting = self._ready.get(agent, [])
            if newest_format < FORMAT:  # all runs in memory are of this version
                return Claim(has_newer=limit > 0 and not suspects and self._has_ready(waiting))
            left: list[tuple[float, int, str]] = []
            others: list[tuple[float, int, str]] = []  # that are not production
            while not suspects and waiting and len(leases) < limit and waiting[0][0] <= self.clock.now():
                at, _number, run_id = entry = heapq.heappop(waiting)
                record = self._records.get(run_id)
                if record is None or record.ready_at != at:
                    continue
                if record.run.header.purpose:
                    others.append(entry)
                elif releases is None or record.run.header.release in {"", *releases}:
                    leases.append(self._grant_lease(record, durability))
                else:
                    left.append(entry)
            for entry in (*left, *others):
                heapq.heappush(waiting, entry)
            other = self._records[left[0][2]].run.header.release if left and len(leases) < limit else ""
        return Claim(leases=tuple(leases), other_release=other)

    def _has_ready(self, waiting: Sequence[tuple[float, int, str]]) -> bool:
        now = self.clock.now()
        return any(
            at <= now and getattr(self._records.get(run_id), "ready_at", None) == at for at, _, run_id in waiting
        )

    def _grant_lease(self, record: _MemoryRecord, durability: Durability, *, takeover: bool = False) -> Lease:
        if (held := record.lease) is not None:
            if not takeover and not is_waker_dead(held.wake):
                raise LeaseHeldError(f"run {record.run.id!r} {LEASE_HELD_ADVICE}")
            held.lost = True
            if held.wake is not None:
                held.wake()
        record.token = next(self._tokens)
        lease = Lease(
            run_id=record.run.id,
            token=record.token,
            version=record.run.version,
            durability=durability,
            inbox_head=max(record.inbox, default=0),
            cancelled=any(isinstance(row.item, Cancel) for row in record.inbox.values()),
        )
        record.lease_ref = weakref.ref(lease, lambda _: self._free_run(record))
        record.ready_at = None
        return lease

    def _free_run(self, record: _MemoryRecord, backoff_s: float = 0.0, backoff_inbox_head: int = 0) -> None:
        """Let workers claim a run without owner as soon as it is ready, see `Lease.backoff_s`."""
        with self._lock:
            record.lease_ref = None
            if self._records.get(record.run.id) is record:
                self._unnumbered[record.run.id] = None
            if record.run.stop_reason is None and record.run.header.parent is None:
                now = self.clock.now()
                rest = now + backoff_s if backoff_s else 0.0
                at = next_expiry(record.run) if record.run.is_waiting else now
                news = [row for row in record.inbox.values() if record.is_unread(row)]
                times = [
                    max(due_at(row.item) or now, rest if row.number <= backoff_inbox_head else 0.0) for row in news
                ]
                self._enqueue_ready(record, min([*times, *([] if at is None else [max(at, rest)])], default=None))

    def _enqueue_ready(self, record: _MemoryRecord, at: float | None) -> None:
        record.ready_at = at
        if at is not None:
            entry = (at, next(self._numbers), record.run.id)
            heapq.heappush(self._ready.setdefault(record.run.header.agent, []), entry)

    def append(
        self,
        lease: Lease,
        run: Run,
        events: Sequence[Event],
        *,
        taken: Sequence[int] = (),
        final: bool = False,
    ) -> PendingWrite:
        """Write events and remove inbox rows. Errors are raised by `wait`, as in the other stores.

        Raises:
            ClosedError: after `aclose`.
        """
        with self._lock:
            self._check_open()
            record = self._records.get(lease.run_id)
            before = run.version - len(events)
            if record is None or record.lease is not lease:
                return _CompletedWrite(
                    LeaseLostError(f"run {lease.run_id!r}: its lease was given back or taken over: load it to see")
                )
            if record.run.version != before:
                return _CompletedWrite(
                    ConflictError(f"run {run.id!r} is at version {record.run.version}, not {before}")
                )
            if final and {row.number for row in record.inbox.values() if self._is_due(row)} - set(taken):
                return _WRITE_REFUSED
            for number in taken:
                record.inbox.pop(number, None)
            record.events.extend(events)
            record.run = run
            if run.paused is not None:
                self._unnumbered[lease.run_id] = None
            if run.is_over:
                self._unnumbered[lease.run_id] = None
                self._retire(lease.run_id)
        if self._subscriptions.topics:
            self._notify(run)
        return WRITE_ACCEPTED

    def _retire(self, run_id: str) -> None:
        self._finished[run_id] = None
        if len(self._finished) > MAX_FINISHED_RUNS:
            self._evict()

    def _evict(self) -> None:
        """Drop the oldest finished runs while there are too many, up to the first that a follower has not read."""
        unread = self._find_unread()
        while len(self._finished) > MAX_FINISHED_RUNS:
            free = (each for each in self._finished if each not in self._successor_counts)
            oldest = next(free, None)
            if oldest is None or oldest == next(reversed(self._finished)):
                return
            while oldest is not None:
                if oldest in unread:
                    return
                oldest = self._forget(oldest)

    def _forget(self, run_id: str) -> str | None:
        """Drop a run. Return its `after` run if that is over and no other run continues it."""
        record = self._records.pop(run_id)
        header, after = record.run.header, record.run.header.after
        self._unnumbered.pop(run_id, None)
        self._changes.pop(record.change, None)
        self._records_by_key.pop(record.key, None)
        self._finished.pop(run_id, None)
        if header.session is not None:
            self._sessions[header.session].remove(run_id)
            if not self._sessions[header.session]:
                del self._sessions[header.session]
        if after is None:
            return None
        self._successor_counts[after] -= 1
        if self._successor_counts[after]:
            return None
        del self._successor_counts[after]
        return after if after in self._finished else None

    def release(self, lease: Lease) -> PendingWrite:
        """Release the lease."""
        with self._lock:
            record = self._records.get(lease.run_id)
            if record is not None and record.lease is lease:
                record.seen, record.seen_at = (
                    max(record.seen, lease.inbox_read),
                    max(record.seen_at, lease.timers_read_at),
                )
                record.lease_ref = None
                self._unnumbered[lease.run_id] = None
                if record.run.stop_reason is None:
                    self._free_run(record, lease.backoff_s, lease.backoff_inbox_head)
        if record is not None and self._subscriptions.topics:
            self._notify(record.run, include_agent=not record.run.is_over)
        return WRITE_ACCEPTED

    async def post(self, run_id: str, key: str, item: InboxItem, *, before: float | None = None) -> PostedItem:
        """Put an item into the inbox; the first post of a key wins."""
        with self._lock:
            record = self._record(run_id)
            if (winner := record.posts_by_key.get(key)) is not None:
                return resolve_duplicate_post(run_id, winner, item)
            check_not_over(run_id, record.run.state, record.run.stop_reason)
            check_deadline(run_id, before, self.clock.now())
            check_inbox_capacity(run_id, item, len(record.inbox))
            row = PostedItem(number=next(self._numbers), key=key, item=item)
            record.posts_by_key[key] = record.inbox[row.number] = row
            if (lease := record.lease) is not None:
                lease.inbox_head = row.number
                lease.cancelled = lease.cancelled or isinstance(item, Cancel)
                if isinstance(item, Cancel) and lease.wake is not None:
                    lease.wake()
            elif record.run.header.parent is None:
                at = due_at(item) or self.clock.now()
                self._enqueue_ready(record, at if record.ready_at is None else min(at, record.ready_at))
        if self._subscriptions.topics:
            self._notify(record.run, include_agent=True)
        return row

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Return the rows that are not consumed yet, oldest first."""
        with self._lock:
            return tuple(self._record(run_id).inbox.values())

    async def read(self, run_id: str, after: int = 0) -> StoredRun:
        """Return the header and the events after that version."""
        with self._lock:
            record = self._record(run_id)
            return StoredRun(header=record.run.header, events=tuple(record.events[max(after, 0) :]))

    async def runs(
        self,
        where: Filter = ALL_RUNS,
        *,
        limit: int = 100,
        order: RunOrder = "newest",
        after: tuple[float, str] | None = None,
    ) -> tuple[RunSummary, ...]:
        """Return the first runs that match the filter, by default the newest."""
        RUN_ORDER.check("runs", "order", order)
        with self._lock:
            self._check_open()
            query = None if where.text is None else read_query(where.text)
            lines = [
                record.summary
                for record in reversed(self._records.values())
                if query is None or has_words(read_words(record.run), query)
            ]
        taken = [line for line in lines if where.matches(line)]
        return tuple(sort_summaries(taken, order, after)[: max(limit, 0)])

    def _is_due(self, row: PostedItem) -> bool:
        at = due_at(row.item)
        return at is None or at <= self.clock.now()

    async def delete(self, run_id: str) -> None:
        """Remove a run that is not being executed, and the runs of its subagents."""
        with self._lock:
            self._record(run_id)
            self._remove(self._find_removable([run_id]))

    async def delete_session(self, session: str) -> int:
        """Remove all runs of a session, and the runs of their subagents. Return the number of runs in the session."""
        with self._lock:
            self._check_open()
            ids = list(self._sessions.get(session, ()))
            self._remove(self._find_removable(ids))
            return len(ids)

    async def prune(self, before: float, *, unread: bool = False) -> int:
        """Remove the old finished runs that no kept run and no follower needs."""
        check_prune_time(before)
        with self._lock:
            self._check_open()
            runs = {run_id: record.run for run_id, record in self._records.items()}
            kept = {run_id for run_id, run in runs.items() if not run.is_over or run.updated_at >= before}
            kept |= set() if unread else self._find_unread()
            while more := runs.keys() & set(_iter_required(runs, kept)) - kept:
                kept |= more
            self._remove(runs.keys() - kept)
            self._delete_expired_records(len(self._expiring))
            return len(runs) - len(kept)

    def _find_removable(self, ids: Iterable[str]) -> list[str]:
        """Return these runs and those of their subagents, after checking that all of them can be removed."""
        found = list(ids)
        for run_id in found:  # the list grows during the iteration
            found += [each for each, record in self._records.items() if record.run.header.parent == run_id]
        for run_id, record in self._records.items():
            if run_id in found and record.lease is not None:
                raise LeaseHeldError(f"run {run_id!r} is being driven; cancel it before you delete it")
            if run_id not in found and (after := record.run.header.after) in found:
                raise successor_exists_error(str(after), run_id)
            caller = self._records.get(record.run.header.parent or "")
            if run_id in found and caller is not None and caller.run.id not in found and not caller.run.is_over:
                raise caller_open_error(run_id, caller.run.id)
        return found

    def _remove(self, ids: Iterable[str]) -> None:
        for run_id in ids:
            self._forget(run_id)

    async def take_quotas(self, uses: Sequence[QuotaUse], *, force: bool = False) -> float:
        """Take amounts from quotas: all of them, or none."""
        with self._lock:
            self._check_open()
            now = self.clock.now()
            if not force and (wait_s := check_quotas(uses, self._quotas, now)):
                return wait_s
            for name in [name for name, used in self._quotas.items() if max(used) <= now - QUOTA_WINDOW_S]:
                del self._quotas[name]
            for use in uses:
                used = self._quotas.setdefault(use.name, {})
                used[int(now)] = used.get(int(now), 0) + use.amount
                for second in [second for second in used if second <= now - QUOTA_WINDOW_S]:
                    del used[second]
            return 0.0

    # Records.

    async def read_record(self, kind: str, key: str) -> StoreRecord | None:
        """Return a record; None if there is none, or it has expired."""
        check_record_key("read_record", kind, key)
        with self._lock:
            self._check_open()
            return self._find_record(kind, key)

    async def write_record(
        self, kind: str, key: str, value: JSON, *, revision: int, expires_at: float | None = None
    ) -> StoreRecord:
        """Write a record if its revision is still the given one."""
        check_record_key("write_record", kind, key, revision)
        text = encode_record(value, expires_at)
        with self._lock:
            self._check_open()
            found = self._find_record(kind, key)
            if revision != (found.revision if found is not None else 0):
                raise record_conflict_error(kind, key, revision)
            stored = _MemoryValue(text, next(self._numbers), expires_at)
            self._store_records.setdefault(kind, {})[key] = stored
            if expires_at is not None:
                self._note_expiry(expires_at, kind, key)
                self._delete_expired_records(EXPIRED_PER_WRITE)
        return parse_record(kind, key, text, stored.revision, stored.expires_at)

    async def list_records(
        self, kind: str, *, prefix: str = "", after: str = "", limit: int = 1_000
    ) -> tuple[StoreRecord, ...]:
        """Return the records of a kind that have not expired, in the order of their keys."""
        check_record_list(kind, prefix, after, limit)
        with self._lock:
            self._check_open()
            keys = sorted(key for key in self._store_records.get(kind, ()) if key.startswith(prefix) and key > after)
            found = (self._find_record(kind, key) for key in keys)
            return tuple(itertools.islice((record for record in found if record is not None), limit))

    async def delete_record(self, kind: str, key: str, *, revision: int | None = None) -> bool:
        """Delete a record. Return whether it existed."""
        check_record_key("delete_record", kind, key, revision or 0)
        with self._lock:
            self._check_open()
            if (found := self._find_record(kind, key)) is None:
                return False
            if revision is not None and revision != found.revision:
                raise record_conflict_error(kind, key, revision)
            del self._store_records[kind][key]
            return True

    def _find_record(self, kind: str, key: str) -> StoreRecord | None:
        stored = self._store_records.get(kind, {}).get(key)
        if stored is None or (stored.expires_at is not None and stored.expires_at <= self.clock.now()):
            return None
        return parse_record(kind, key, stored.text, stored.revision, stored.expires_at)

    def _note_expiry(self, expires_at: float, kind: str, key: str) -> None:
        if (kind, key) not in self._noted_expiries:
            self._noted_expiries.add((kind, key))
            heapq.heappush(self._expiring, (expires_at, kind, key))

    def _delete_expired_records(self, limit: int) -> None:
        """Delete up to `limit` records that have expired, and note the time of those that were prolonged."""
        while limit > 0 and self._expiring and self._expiring[0][0] <= self.clock.now():
            _expires_at, kind, key = heapq.heappop(self._expiring)
            self._noted_expiries.remove((kind, key))
            limit -= 1
            if (record := self._find_record(kind, key)) is None:
                self._store_records[kind].pop(key, None)
            elif record.expires_at is not None:
                self._note_expiry(record.expires_at, kind, key)

    # Feedback.

    async def add_feedback(self, run_id: str, key: str, feedback: Feedback) -> None:
        """Record feedback on a run."""
        with self._lock:
            record = self._record(run_id)
            if key not in record.feedback:
                record.feedback[key] = feedback
                if record.lease is None or record.run.is_over:
                    self._unnumbered[run_id] = None

    async def list_feedback(self, run_id: str) -> tuple[Feedback, ...]:
        """Return the feedback on a run, oldest first."""
        with self._lock:
            return tuple(self._record(run_id).feedback.values())

    # Followers.

    def _number_changes(self) -> None:
        """Give a number to each run that was released, paused or ended since it got its last one."""
        for run_id in self._unnumbered:
            record = self._records[run_id]
            self._changes.pop(record.change, None)
            record.change = next(self._numbers)
            self._changes[record.change] = run_id
            record.key = record.key or str(record.change)
            self._records_by_key[record.key] = record
        self._unnumbered.clear()

    def _find_unread(self) -> set[str]:
        """Return the ids of the runs that a follower has not read."""
        if not self._followers:
            return set()
        self._number_changes()
        return set(self._iter_changes(min([follower.position for follower in self._followers.values()])))

    def _iter_changes(self, after: int) -> Iterator[str]:
        """Yield the ids of the runs with a numbered change after that number, newest first."""
        for change in reversed(self._changes):
            if change <= after:
                return
            yield self._changes[change]

    async def add_follower(self, name: str, *, start: FollowerStart = "beginning") -> None:
        """Create a follower, unless it exists."""
        FOLLOWER_START.check("add_follower", "start", start)
        with self._lock:
            self._check_open()
            self._number_changes()
            newest = next(reversed(self._changes), 0)
            self._followers.setdefault(name, _MemoryFollower(newest if start == "now" else 0))

    async def take_unread(
        self, name: str, *, holder: str, after: int = 0, lease_s: float = FOLLOWER_LEASE_S, limit: int = BATCH
    ) -> tuple[UnreadRun, ...]:
        """Return runs that changed after the follower's position, and hold the follower."""
        with self._lock:
            self._check_open()
            if (follower := self._followers.get(name)) is None:
                raise missing_follower_error(name)
            now = self.clock.now()
            if follower.holder != holder and follower.until > now:
                return ()
            follower.holder, follower.until = holder, now + lease_s
            self._number_changes()
            records = [self._records[each] for each in self._iter_changes(max(after, follower.position))]
            return tuple(
                UnreadRun(
                    key=record.key,
                    run_id=record.run.id,
                    change=record.change,
                    after=record.read_versions.get(name, 0),
                )
                for record in records[::-1][:limit]
            )

    async def confirm_read(
        self, name: str, *, holder: str, position: int, versions: Mapping[str, int], release: bool = False
    ) -> None:
        """Record that the follower has read all changes up to a number."""
        with self._lock:
            self._check_open()
            follower = self._followers.get(name)
            if follower is None or follower.holder != holder:
                raise follower_lost_error(name)
            follower.position = max(follower.position, position)
            follower.until = 0.0 if release else follower.until
            for key in versions.keys() & self._records_by_key.keys():
                read = self._records_by_key[key].read_versions
                read[name] = max(read.get(name, 0), versions[key])
            self._evict()

    async def followers(self) -> tuple[FollowerStatus, ...]:
        """Return the followers and how far they are behind, by name."""
        with self._lock:
            self._check_open()
            self._number_changes()
            now = self.clock.now()
            return tuple(
                FollowerStatus(
                    name=name,
                    position=follower.position,
                    lag=len(unread := [*self._iter_changes(follower.position)]),
                    waiting_since=min([self._records[each].run.updated_at for each in unread], default=None),
                    held=follower.until > now,
                )
                for name, follower in sorted(self._followers.items())
            )

    async def drop_follower(self, name: str) -> bool:
        """Remove a follower. Return whether it existed."""
        with self._lock:
            self._check_open()
            for record in self._records.values():
                record.read_versions.pop(name, None)
            is_found = self._followers.pop(name, None) is not None
            self._evict()
            return is_found

    def subscribe(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after changes that may concern the topic."""
        return self._subscriptions.subscribe(topic, wake)

    def _notify(self, run: Run, *, include_agent: bool = False) -> None:
        """Wake the subscribers of the run, and of its agent if a worker may claim the run now."""
        self._subscriptions.notify([run_topic(run.id), *([agent_topic(run.header.agent)] if include_agent else ())])

    async def aclose(self) -> None:
        """Close the store. Like the other stores, it then refuses every call with a ClosedError."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise store_closed_error()

    def _record(self, run_id: str) -> _MemoryRecord:
        check_run_id(run_id)
        self._check_open()
        try:
            return self._records[run_id]
        except KeyError:
            raise RunNotFoundError(
                f"no run {run_id!r} in memory; a MemoryStore loses its runs when the process ends"
            ) from None
