"""Base class of the SQLite, PostgreSQL and Redis stores, whose work is done by one thread.

Calls become jobs for a `StoreWriter`, and the store's `StoreBackend` executes them. So a store works on asyncio and
trio with a blocking driver, commits in groups across runs, and renews the leases of an event loop that is busy for a
while.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
import attrs

from agentfsm._lib.concurrency import ThreadWaiter, current_native_loop, start_in_thread
from agentfsm.core import codec
from agentfsm.core.errors import AgentError, ClosedError, CorruptError, PartlyDoneError, StoreError, TooNewError
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import InboxItem, PostedItem, due_at
from agentfsm.core.machine import State
from agentfsm.core.run import Run, begin_run
from agentfsm.core.validation import SECONDS, ValueRule, is_number
from agentfsm.core.value import Value
from agentfsm.ports.followers import BATCH, FOLLOWER_LEASE_S, FOLLOWER_START, FollowerStart
from agentfsm.ports.store import (
    ALL_RUNS,
    DURABILITY,
    RUN_ORDER,
    Claim,
    Durability,
    Filter,
    Lease,
    RunOrder,
    RunSummary,
    Store,
)
from agentfsm.ports.stored import Feedback, FollowerStatus, QuotaUse, StoredRun, StoreRecord, UnreadRun
from agentfsm.stores.rules import (
    check_prune_time,
    check_record_key,
    check_record_list,
    check_run_id,
    encode_record,
    next_expiry,
    parse_record,
    record_conflict_error,
)
from agentfsm.stores.run_words import read_words
from agentfsm.stores.threaded.change_listener import ChangeListener
from agentfsm.stores.threaded.group_commit import GroupCommitWriter, StoreJob, StoreStatistics, TransactionBackend
from agentfsm.stores.threaded.lease_table import LeaseOwner

if TYPE_CHECKING:
    from agentfsm.core.events import Event
    from agentfsm.core.messages import JSON
    from agentfsm.ports.store import PendingWrite

T = TypeVar("T")
L = TypeVar("L", bound="StoreBackend")

_log = logging.getLogger("agentfsm.stores")

# Default duration of a lease, seconds: a busy machine renews it in time, and other workers can wait for it to expire.
LEASE_S: Final = 10.0
# Maximum duration of a lease, seconds.
MAX_LEASE_S: Final = 3600.0
LEASE_SECONDS: Final = ValueRule(
    fits=lambda value: is_number(value) and 0 < value <= MAX_LEASE_S,
    wanted=f"seconds above 0 and up to {MAX_LEASE_S:.0f}",
)
# Default of `ThreadedStore.blocked_s`, seconds: longer than most accidental blocking calls, shorter than a person waits
# for a run to continue.
BLOCKED_S: Final = 60.0
# The largest integer of a database. A model may report more tokens.
MAX_INT64: Final = 2**63 - 1

# Records, and their bytes together, that are decoded at once, in less than 0.5 ms: another thread costs 0.1 to 0.2 ms.
MAX_DECODED: Final = 16
MAX_DECODED_BYTES: Final = 8 * 1024
# Old runs that `prune` processes in one transaction, together with related runs. A batch takes tens of milliseconds, so
# other jobs and lease renewals can run between batches.
PRUNE_BATCH: Final = 500
# Expired records in one batch: PostgreSQL has room for some thousand locks.
RECORD_BATCH: Final = 100
# Seconds before the second attempt to change a record that another session is changing, doubled each time: about a
# commit.
RECORD_RETRY_S: Final = 0.005
MAX_RECORD_RETRY_S: Final = 0.1
# Changes that get their numbers in one transaction, and seconds between two such transactions in a row, so that other
# processes can use the store.
CHANGES_BATCH: Final = 1_000
NUMBERING_PAUSE_S: Final = 0.01
# Maximum characters of records in merged appends: some turns. So a job stays about as small as
# `group_commit.MAX_QUEUED_JOBS` assumes.
MAX_MERGED_CHARS: Final = 8_192


class RunColumns(NamedTuple):
    """The columns that a store keeps of a run besides its journal, and updates with each append."""

    state: str
    stop_reason: str | None
    waiting: bool
    """True if the run waits for an external input or decision."""

    wakes_at: float | None
    """Next deadline of the calls that the run waits for, seconds since 1970; None if there is none."""

    turn: int
    version: int
    tokens: int
    updated_at: float
    format: int
    """Format of the records that this agentfsm writes. The store keeps the newest one."""

    cost_usd: float | None
    """US dollars that the run has cost; None while it is not over, and if no price was known."""

    duration_s: float | None
    """Seconds that the run was executed; None while it is not over."""

    paused: bool
    """True if the run is paused until it is resumed. A pause resets the crashes counted against the run."""


def extract_columns(run: Run) -> RunColumns:
    """Return the columns that a store keeps of a run."""
    is_waiting = (run.state is State.ACT or run.paused is not None) and run.is_waiting  # no other state waits
    return RunColumns(
        str(run.state),
        None if run.stop_reason is None else str(run.stop_reason),
        is_waiting,
        next_expiry(run) if is_waiting else None,
        run.turn,
        run.version,
        min(run.usage.tokens, MAX_INT64),
        run.updated_at,
        FORMAT,
        run.usage.cost_usd if run.is_over else None,
        run.duration_s if run.is_over else None,
        run.paused is not None,
    )


@attrs.frozen(kw_only=True)
class AppendRequest(Value):
    """An append, serialised by the caller."""

    lease: Lease
    bodies: tuple[str, ...]
    """Serialised events."""

    columns: RunColumns
    """Columns of the run after the events."""

    taken: tuple[int, ...]
    """Numbers of the consumed inbox rows."""

    final: bool
    """If True, write only if no other inbox row is due."""

    words: tuple[str, ...] | None
    """Words of the run by which it is searched, if it is over; None before, as they have not changed."""

    @property
    def expected_version(self) -> int:
        """Version that the journal must have before the append."""
        return self.columns.version - len(self.bodies)


@attrs.frozen(kw_only=True)
class CreateRequest(Value):
    """A run to create, serialised by the caller."""

    header: Header
    bodies: tuple[str, ...]
    """Serialised first events of the journal."""

    columns: RunColumns
    """Columns of the run after the events."""

    words: tuple[str, ...]
    """Words of the run by which it is searched."""


@attrs.frozen(kw_only=True)
class InboxPost(Value):
    """A row for an inbox, serialised by the caller."""

    run_id: str
    key: str
    item: InboxItem
    text: str
    """The serialised item."""

    before: float | None
    """Time from which on the post is refused, seconds since 1970; None for no deadline."""

    due_at: float | None
    """Earliest time at which the item is consumed, seconds since 1970; None for at once."""


@attrs.frozen
class LeaseRequest(Value):
    """The owner that takes leases, and the durability of its appends."""

    owner: LeaseOwner
    durability: Durability


@attrs.frozen
class ReadableWork(Value):
    """The runs that a worker can execute, among those of its agent."""

    newest_format: int
    """Newest format of records that it reads."""

    releases: tuple[str, ...] | None
    """Releases that it has; None for all. It can execute every run without a release."""


# A record as stored: key, value as JSON, revision and expiry.
RecordRow = tuple[str, str | bytes, int, float | None]


class RecordBusyError(AgentError):
    """Another session is writing the record: the job is executed again. Callers never see this error."""


# The version of a run, and its records with their numbers: the header as 0, and the requested events.
JournalRecords = tuple[int, Sequence[tuple[int, bytes]]]


class StoreBackend(TransactionBackend, Protocol):
    """The operations that a store's thread executes inside a transaction of its backend."""

    def now(self) -> float:
        """As `Store.now`."""
        ...

    worker_name: str
    """Unique name of the store object, and prefix of the names of its event loops."""

    def create(self, request: CreateRequest, lease_request: LeaseRequest) -> tuple[Header, Lease]:
        """As `Store.create`."""
        ...

    def acquire_lease(self, run_id: str, lease_request: LeaseRequest, *, takeover: bool) -> Lease:
        """As `Store.lease`."""
        ...

    def claim(
        self, agent: str, limit: int, lease_request: LeaseRequest, *, suspects: bool, work: ReadableWork
    ) -> Claim:
        """As `Store.claim`."""
        ...

    def append(self, request: AppendRequest) -> bool:
        """Write events and remove inbox rows; refuse before the first write."""
        ...

    def release(self, lease: Lease) -> bool:
        """As `Store.release`."""
        ...

    def post(self, post: InboxPost) -> PostedItem:
        """As `Store.post`."""
        ...

    def inbox(self, run_id: str) -> Sequence[tuple[int, str, bytes]]:
        """Return number, key and item of the rows that are not consumed yet, oldest first."""
        ...

    def read(self, run_id: str, after: int) -> JournalRecords:
        """Return the header and the events after that version."""
        ...

    def runs(
        self, where: Filter, limit: int, order: RunOrder, after: tuple[float, str] | None
    ) -> tuple[RunSummary, ...]:
        """As `Store.runs`."""
        ...

    def delete(self, run_id: str) -> None:
        """As `Store.delete`."""
        ...

    def delete_session(self, session: str) -> int:
        """As `Store.delete_session`."""
        ...

    def prune(self, before: float, start: int, limit: int, *, unread: bool) -> tuple[int, int]:
        """Prune up to `limit` runs as `Store.prune` does. Return the number removed, and where to continue.

        Args:
            before: Seconds since 1970.
            start: End of the previous batch; 0 for the first batch.
            limit: Maximum number of old runs in the batch; runs related to them are removed in addition.
            unread: Whether to remove also runs that a follower has not read.

        Returns:
            The number of removed runs, and the next `start`; -1 at the end.
        """
        ...

    def count(self, where: Filter, limit: int) -> int:
        """As `Store.count`."""
        ...

    def take_quotas(self, uses: Sequence[QuotaUse], *, force: bool) -> float:
        """As `Store.take_quotas`."""
        ...

    def read_record(self, kind: str, key: str) -> RecordRow | None:
        """Return a record; None if there is none, or it has expired."""
        ...

    def write_record(self, kind: str, key: str, text: str, revision: int, expires_at: float | None) -> int | None:
        """Write a record. Return its new revision; None if the stored one is not `revision`.

        Raises:
            RecordBusyError: if it cannot be decided before the end of another transaction.
        """
        ...

    def list_records(self, kind: str, prefix: str, after: str, limit: int) -> Sequence[RecordRow]:
        """As `Store.list_records`."""
        ...

    def delete_record(self, kind: str, key: str, revision: int | None) -> bool | None:
        """Delete a record. Return whether it existed; None if its revision is not `revision`.

        Raises:
            RecordBusyError: if it cannot be decided before the end of another transaction.
        """
        ...

    def delete_expired_records(self, limit: int) -> int:
        """Delete up to `limit` expired records. Return their number."""
        ...

    def add_feedback(self, run_id: str, key: str, feedback: Feedback) -> None:
        """As `Store.add_feedback`."""
        ...

    def list_feedback(self, run_id: str) -> Sequence[Feedback]:
        """As `Store.list_feedback`."""
        ...

    def number_changes(self, limit: int) -> bool:
        """Give numbers to up to `limit` changes that have none yet. Return whether there may be more of them."""
        ...

    def add_follower(self, name: str, *, from_now: bool) -> None:
        """Create a follower, unless it exists: before the first change, or after the last one that has a number."""
        ...

    def has_unread(self, name: str, after: int) -> bool:
        """Return whether `take_unread` may find something; this only reads."""
        ...

    def take_unread(self, name: str, holder: str, after: int, lease_s: float, limit: int) -> Sequence[UnreadRun]:
        """As `Store.take_unread`, for the changes that have numbers."""
        ...

    def confirm_read(
        self, name: str, holder: str, position: int, versions: Mapping[str, int], *, release: bool
    ) -> None:
        """As `Store.confirm_read`."""
        ...

    def followers(self) -> Sequence[FollowerStatus]:
        """As `Store.followers`."""
        ...

    def drop_follower(self, name: str) -> bool:
        """As `Store.drop_follower`."""
        ...


@attrs.define(eq=False, repr=False)
class _AppendBuffer:
    """An append that following appends of the same lease may extend."""

    lease: Lease
    run: Run
    """The run after the events."""

    bodies: list[str | codec.LongRecord]
    taken: list[int]
    final: bool
    chars: int = attrs.field(init=False)
    """Total length of the bodies, characters."""

    def __attrs_post_init__(self) -> None:
        self.chars = sum(map(len, self.bodies))

    def try_merge(self, other: _AppendBuffer) -> bool:
        """Merge a following append of the same lease into this one. Return whether this was possible."""
        follows = other.run.version - len(other.bodies) == self.run.version  # else the backend refuses it alone
        if self.final or other.final or not follows or self.chars + other.chars > MAX_MERGED_CHARS:
            return False
        self.run = other.run
        self.bodies += other.bodies
        self.taken += other.taken
        self.chars += other.chars
        return True

    def build_request(self) -> AppendRequest:
        """Build the request for the backend, in the store's thread."""
        return AppendRequest(
            lease=self.lease,
            bodies=tuple([each if isinstance(each, str) else each.encode() for each in self.bodies]),
            columns=extract_columns(self.run),
            taken=tuple(self.taken),
            final=self.final,
            words=read_words(self.run) if self.run.is_over else None,
        )


class _AppendJob(StoreJob[bool, L]):
    """A queued append. Until the thread begins with it, following appends of its lease are merged into it.

    So the appends of a turn, which come within microseconds of each other, are checked once and written by one
    statement, in 24 us of the thread's time instead of 62. They share an outcome, as they would anyway: after a failed
    append, the later ones are refused.
    """

    __slots__ = ("_buffer", "_buffer_lock", "ends_run")

    def __init__(self, buffer: _AppendBuffer) -> None:
        lease = buffer.lease
        super().__init__(
            self._begin,
            run_id=lease.run_id,
            on_failure=lambda backend, error: backend.leases.mark_failed(lease, error),
            durability=lease.durability,
            retry_if_locked=True,
        )
        # If the run is over, its release need not wake workers.
        self.ends_run = buffer.run.is_over
        # None once the thread has begun with the job.
        self._buffer: _AppendBuffer | None = buffer
        self._buffer_lock = threading.Lock()

    def try_merge(self, buffer: _AppendBuffer) -> bool:
        """Merge a following append into this one. Return whether this was possible."""
        with self._buffer_lock:
            return self._buffer is not None and self._buffer.try_merge(buffer)

    def finish(self) -> list[ThreadWaiter]:
        """Publish the outcome. Return the waiters to notify."""
        self._seal()
        return super().finish()

    def _begin(self, backend: L) -> bool:
        buffer = self._seal()
        assert buffer is not None  # noqa: S101  a retry executes the request below
        request = buffer.build_request()
        self._work = lambda backend: backend.append(request)
        return backend.append(request)

    def _seal(self) -> _AppendBuffer | None:
        with self._buffer_lock:
            buffer, self._buffer = self._buffer, None
        return buffer


class StoreWriter(GroupCommitWriter[L]):
    """The store's thread in one process, the newest append of each lease, and the owners of leases."""

    def __init__(self, backend: L) -> None:
        super().__init__(backend)
        self.appends: WeakKeyDictionary[Lease, _AppendJob[L]] = WeakKeyDictionary()
        # Owners by event loop.
        self._owners: WeakKeyDictionary[object, LeaseOwner] = WeakKeyDictionary()
        self._numbers = count(1)
        # Receives the notifications of a server; None before the first subscription, and for stores without a server.
        self.listener: ChangeListener | None = None

    def current_owner(self) -> LeaseOwner:
        """Return the lease owner for the running event loop."""
        loop = current_native_loop()
        owner = self._owners.get(loop)
        if owner is None:
            name = f"{self.backend.worker_name}.{next(self._numbers)}"
            owner = self._owners[loop] = LeaseOwner(until=0.0, name=name)
        return owner


@attrs.define(eq=False, repr=False)
class ThreadedStore(Store, Generic[L]):
    """A store that executes all operations in its own thread.

    It can be used from any event loop and thread, from several at once too. The thread starts at the first use of the
    store, ends after 5 idle seconds without leases, and never delays the exit of the process. So calling `aclose` is
    recommended, but not required.

    An event loop owns the leases that were taken in it. If a loop does not run for a second, the store logs the stack
    of the code that blocks it. After `blocked_s` seconds the store stops renewing its leases, and other workers take
    over its runs.
    """

    blocked_s: float = attrs.field(default=BLOCKED_S, kw_only=True, validator=SECONDS)
    """Seconds that an event loop may be blocked before other workers may take over its runs, above 0."""

    _writers: dict[int, StoreWriter[L]] = attrs.field(factory=dict, init=False)
    """Writers by process id: a forked child has no thread of its parent, and must not use or close its connection."""

    @abstractmethod
    def _create_backend(self) -> L:
        """Create the backend for the store's thread in this process."""

    async def now(self) -> float:
        """Return seconds since 1970 by the store's clock."""
        return await self._run_job(lambda backend: backend.now(), writes=False)

    async def create(
        self,
        header: Header,
        *,
        events: Sequence[Event] = (),
        durability: Durability = "full",
    ) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        header = codec.decode_header(codec.encode_header(header))  # as later reads return it
        bodies = tuple([codec.encode_event(event, header) for event in events])
        run = begin_run(header).fold(events)
        request = CreateRequest(header=header, bodies=bodies, columns=extract_columns(run), words=read_words(run))
        lease_request = self._build_lease_request("create", durability)

        def create(backend: L) -> tuple[Header, list[Lease]]:
            stored, lease = backend.create(request, lease_request)
            return stored, [lease]

        stored, (lease,) = await self._acquire_leases(header.id, create, durability)
        lease.agent = stored.agent
        return stored, lease

    async def lease(self, run_id: str, *, durability: Durability = "full", takeover: bool = False) -> Lease:
        """Take the lease of an existing run."""
        lease_request = self._build_lease_request("lease", durability)

        def take(backend: L) -> tuple[None, list[Lease]]:
            return None, [backend.acquire_lease(run_id, lease_request, takeover=takeover)]

        _, (lease,) = await self._acquire_leases(run_id, take, durability)
        return lease

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
        """Take the leases of runs of that agent that are ready."""
        work = ReadableWork(newest_format, None if releases is None else tuple(releases))
        lease_request = self._build_lease_request("claim", durability)

        def claim(backend: L) -> tuple[Claim, tuple[Lease, ...]]:
            claimed = backend.claim(agent, max(limit, 0), lease_request, suspects=suspects, work=work)
            return claimed, claimed.leases

        claimed, _ = await self._acquire_leases("", claim, durability)
        for lease in claimed.leases:
            lease.agent = agent
        return claimed

    def _build_lease_request(self, method: str, durability: Durability) -> LeaseRequest:
        DURABILITY.check(method, "durability", durability)
        return LeaseRequest(self._writer.current_owner(), durability)

    async def _acquire_leases(
        self, run_id: str, work: Callable[[L], tuple[T, Sequence[Lease]]], durability: Durability
    ) -> tuple[T, Sequence[Lease]]:
        """Execute a job that takes leases. If the caller is cancelled meanwhile, release them."""
        taken: list[Lease] = []

        def take(backend: L) -> tuple[T, Sequence[Lease]]:
            result = work(backend)
            taken[:] = result[1]
            return result

        try:
            return await self._run_job(take, run_id=run_id, durability=durability)
        except AgentError:
            raise  # refused or failed: no lease was taken
        except BaseException:
            with suppress(AgentError):
                self._writer.submit(
                    StoreJob(lambda backend: [backend.release(lease) for lease in taken], notify_agent="")
                )
            raise

    def append(
        self,
        lease: Lease,
        run: Run,
        events: Sequence[Event],
        *,
        taken: Sequence[int] = (),
        final: bool = False,
    ) -> PendingWrite:
        """Write events and remove inbox rows. Return before the append is durable.

        The events are encoded in the caller's thread, so that the caller gets the error of an event that cannot be
        encoded. The interpreter lock would serialise the work anyway. Only the text of a long result is encoded in the
        store's thread, in pieces between which the caller's event loop runs.

        Raises:
            MisuseError: if an event cannot be encoded.
            ClosedError: after `aclose`.
            StoreError: if 100,000 jobs wait already, or the thread cannot be started.
        """
        bodies = [codec.begin_encoding(event, run.header) for event in events]
        buffer = _AppendBuffer(lease, run, bodies, list(taken), final)
        writer = self._writer
        newest = writer.appends.get(lease)
        if newest is not None and newest.try_merge(buffer):
            return newest
        job = _AppendJob[L](buffer)
        lease.agent = run.header.agent
        writer.submit(job)
        writer.appends[lease] = job
        return job

    def release(self, lease: Lease) -> PendingWrite:
        """Release the lease after the pending appends. If this cannot be written, the lease expires."""

        def on_failure(backend: L, error: AgentError) -> None:
            _log.warning("run %s: its lease could not be released and ends by itself: %s", lease.run_id, error)
            backend.leases.abandon(lease)

        writer = self._writer
        newest = writer.appends.pop(lease, None)
        job = StoreJob[bool, L](
            lambda backend: backend.release(lease),
            run_id=lease.run_id,
            on_failure=on_failure,
            durability="normal",
            retry_if_locked=True,
            notify_agent=None if newest is not None and newest.ends_run else lease.agent,
        )
        try:
            writer.submit(job)
        except ClosedError:  # closing the store has released the lease
            return StoreJob[bool, L].done(value=True)
        return job

    async def post(self, run_id: str, key: str, item: InboxItem, *, before: float | None = None) -> PostedItem:
        """Put an item into the inbox, durably; the first post of a key wins."""
        text = codec.encode_item(item)
        post = InboxPost(run_id=run_id, key=key, item=item, text=text, before=before, due_at=due_at(item))
        return await self._run_job(lambda backend: backend.post(post), run_id=run_id, notify_agent="")

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Return the rows that are not consumed yet, oldest first."""
        rows = await self._run_job(lambda backend: backend.inbox(run_id), run_id=run_id, writes=False)
        return await start_in_thread(lambda: tuple(decode_post(run_id, *row) for row in rows)).wait() if rows else ()

    async def read(self, run_id: str, after: int = 0) -> StoredRun:
        """Return the header and the events after that version; a long journal is decoded in another thread."""
        version, records = await self._run_job(lambda backend: backend.read(run_id, after), run_id=run_id, writes=False)
        if (
            len(records) <= MAX_DECODED
            and sum([len(body) for _, body in records if isinstance(body, bytes)]) <= MAX_DECODED_BYTES
        ):
            return _decode_journal(run_id, after, version, records)
        return await start_in_thread(lambda: _decode_journal(run_id, after, version, records)).wait()

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
        return await self._run_job(lambda backend: backend.runs(where, max(limit, 0), order, after), writes=False)

    async def delete(self, run_id: str) -> None:
        """Remove a run that is not being executed, with its inbox and the runs of its subagents."""
        check_run_id(run_id)
        await self._run_job(lambda backend: backend.delete(run_id))

    async def delete_session(self, session: str) -> int:
        """Remove all runs of a session. Return the number of runs in the session."""
        return await self._run_job(lambda backend: backend.delete_session(session))

    async def prune(self, before: float, *, unread: bool = False) -> int:
        """Remove the runs that are over and have not changed since that moment. Return the number of runs.

        This works in batches, each in its own transaction: runs removed before an error stay removed.

        Args:
            before: Seconds since 1970.
            unread: Whether to remove also runs that a follower has not read.

        Raises:
            MisuseError: if `before` is not a valid time; nothing is removed.
            PartlyDoneError: if a later batch failed; the message has the number of runs that are removed.
        """
        check_prune_time(before)
        removed = start = 0

        def prune_batch(backend: L) -> tuple[int, int]:
            return backend.prune(before, start, PRUNE_BATCH, unread=unread)

        try:
            while start >= 0:
                began = time.monotonic()
                count, start = await self._run_job(prune_batch)
                removed += count
                await anyio.sleep(time.monotonic() - began if count else 0)  # let other processes use the file
            while await self._run_job(lambda backend: backend.delete_expired_records(RECORD_BATCH)) == RECORD_BATCH:
                await anyio.lowlevel.checkpoint()
        except StoreError as error:
            if not removed:
                raise
            raise PartlyDoneError(
                f"{removed} runs were removed, and others may be left: {error}; prune again"
            ) from error
        return removed

    async def count(self, where: Filter = ALL_RUNS, *, limit: int = 1_000) -> int:
        """Return the number of runs that match the filter, up to `limit`."""
        return await self._run_job(lambda backend: backend.count(where, max(limit, 0)), writes=False)

    async def take_quotas(self, uses: Sequence[QuotaUse], *, force: bool = False) -> float:
        """Take amounts from quotas that all processes share: all of them, or none."""
        return await self._run_job(lambda backend: backend.take_quotas(uses, force=force), durability="normal")

    # Records.

    async def read_record(self, kind: str, key: str) -> StoreRecord | None:
        """Return a record; None if there is none, or it has expired."""
        check_record_key("read_record", kind, key)
        row = await self._run_job(lambda backend: backend.read_record(kind, key), writes=False)
        return await start_in_thread(lambda: parse_record(kind, *row)).wait() if row is not None else None

    async def write_record(
        self, kind: str, key: str, value: JSON, *, revision: int, expires_at: float | None = None
    ) -> StoreRecord:
        """Write a record if its revision is still the given one, durably."""
        check_record_key("write_record", kind, key, revision)
        text = encode_record(value, expires_at)
        written = await self._run_record_job(
            lambda backend: backend.write_record(kind, key, text, revision, expires_at)
        )
        if written is None:
            raise record_conflict_error(kind, key, revision)
        return parse_record(kind, key, text, written, expires_at)

    async def list_records(
        self, kind: str, *, prefix: str = "", after: str = "", limit: int = 1_000
    ) -> tuple[StoreRecord, ...]:
        """Return the records of a kind that have not expired, in the order of their keys."""
        check_record_list(kind, prefix, after, limit)
        rows = await self._run_job(lambda backend: backend.list_records(kind, prefix, after, limit), writes=False)
        return await start_in_thread(lambda: tuple(parse_record(kind, *row) for row in rows)).wait() if rows else ()

    async def delete_record(self, kind: str, key: str, *, revision: int | None = None) -> bool:
        """Delete a record, durably. Return whether it existed."""
        check_record_key("delete_record", kind, key, revision or 0)
        is_found = await self._run_record_job(lambda backend: backend.delete_record(kind, key, revision))
        if is_found is None:
            raise record_conflict_error(kind, key, revision or 0)
        return is_found

    async def _run_record_job(self, work: Callable[[L], T]) -> T:
        """Execute a job that changes a record. While another session changes it, try again."""
        pause_s = RECORD_RETRY_S
        while True:
            with suppress(RecordBusyError):
                return await self._run_job(work)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RECORD_RETRY_S)

    # Feedback.

    async def add_feedback(self, run_id: str, key: str, feedback: Feedback) -> None:
        """Record feedback on a run, durably."""
        check_run_id(run_id)
        await self._run_job(lambda backend: backend.add_feedback(run_id, key, feedback))

    async def list_feedback(self, run_id: str) -> tuple[Feedback, ...]:
        """Return the feedback on a run, oldest first."""
        check_run_id(run_id)
        return tuple(await self._run_job(lambda backend: backend.list_feedback(run_id), writes=False))

    # Followers.

    async def add_follower(self, name: str, *, start: FollowerStart = "beginning") -> None:
        """Create a follower, unless it exists."""
        FOLLOWER_START.check("add_follower", "start", start)
        if start == "now" and name not in {each.name for each in await self.followers()}:
            has_more = True
            while has_more:
                has_more = await self._run_job(
                    lambda backend: backend.number_changes(CHANGES_BATCH), durability="normal"
                )
                await anyio.sleep(NUMBERING_PAUSE_S if has_more else 0)
        await self._run_job(lambda backend: backend.add_follower(name, from_now=start == "now"))

    async def take_unread(
        self, name: str, *, holder: str, after: int = 0, lease_s: float = FOLLOWER_LEASE_S, limit: int = BATCH
    ) -> tuple[UnreadRun, ...]:
        """Return runs that changed after the follower's position, and hold the follower. Without any, only read."""

        def take(backend: L) -> Sequence[UnreadRun]:
            backend.number_changes(CHANGES_BATCH)
            return backend.take_unread(name, holder, after, lease_s, limit)

        if not await self._run_job(lambda backend: backend.has_unread(name, after), writes=False):
            return ()
        return tuple(await self._run_job(take, durability="normal"))

    async def confirm_read(
        self, name: str, *, holder: str, position: int, versions: Mapping[str, int], release: bool = False
    ) -> None:
        """Record that the follower has read all changes up to a number. After a power cut some may come again."""
        await self._run_job(
            lambda backend: backend.confirm_read(name, holder, position, versions, release=release), durability="normal"
        )

    async def followers(self) -> tuple[FollowerStatus, ...]:
        """Return the followers and how far they are behind, by name."""
        return tuple(await self._run_job(lambda backend: backend.followers(), writes=False))

    async def drop_follower(self, name: str) -> bool:
        """Remove a follower. Return whether it existed."""
        return await self._run_job(lambda backend: backend.drop_follower(name))

    def subscribe(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after commits that may concern the topic, including commits of other processes."""
        writer = self._writer
        end = writer.subscriptions.subscribe(topic, wake)
        self._start_watching(writer, topic)
        return end

    def _start_watching(self, writer: StoreWriter[L], topic: str) -> None:
        """Start watching for changes by other processes; called for each new subscription."""

    async def aclose(self) -> None:
        """Execute the queued jobs, release all leases, close the connection and end the thread."""
        await self._writer.close()

    def statistics(self) -> StoreStatistics:
        """Return the statistics of the store's thread in this process."""
        return self._writer.statistics()

    async def _run_job(
        self,
        work: Callable[[L], T],
        *,
        run_id: str = "",
        writes: bool = True,
        durability: Durability = "full",
        notify_agent: str | None = None,
    ) -> T:
        check_run_id(run_id)
        job = StoreJob[T, L](work, run_id=run_id, writes=writes, durability=durability, notify_agent=notify_agent)
        self._writer.submit(job)
        return await job.wait()

    @property
    def _writer(self) -> StoreWriter[L]:
        pid = os.getpid()
        return self._writers.get(pid) or self._writers.setdefault(pid, StoreWriter(self._create_backend()))


def decode_record(decode: Callable[[str], T], body: object, name: str) -> T:
    """Decode a record.

    Raises:
        CorruptError: if it is missing or damaged; the message contains `name`.
        TooNewError: if a newer agentfsm has written it.
    """
    try:
        return decode(body.decode() if isinstance(body, bytes) else "")
    except (CorruptError, UnicodeDecodeError) as error:
        why = "it is missing" if body is None else str(error)
        raise CorruptError(f"{name}, cannot be read ({why}): restore a backup, or delete the run") from None
    except TooNewError as error:
        raise TooNewError(f"{name}: {error}") from None


def read_header(run_id: str, body: object) -> Header:
    """Decode the header of a run."""
    return decode_record(codec.decode_header, body, f"run {run_id!r}, the header")


def decode_post(run_id: str, number: int, key: str, item: bytes) -> PostedItem:
    """Decode a row of an inbox."""
    value = decode_record(codec.decode_item, item, f"run {run_id!r}, inbox row {number}")
    return PostedItem(number=number, key=key, item=value)


def _decode_journal(run_id: str, after: int, version: int, records: Sequence[tuple[int, bytes]]) -> StoredRun:
    """Decode a journal, and check that all versions are there."""
    bodies: dict[int, Any] = dict(records)
    header = read_header(run_id, bodies.get(0))
    events = [
        decode_record(
            lambda text: codec.decode_event(text, header), bodies.get(number), f"run {run_id!r}, version {number}"
        )
        for number in range(max(after, 0) + 1, version + 1)
    ]
    return StoredRun(header=header, events=tuple(events))
