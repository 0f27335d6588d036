"""A store whose work is done by one thread: the common base of the SQLite, PostgreSQL and Redis stores.

Calls become jobs for a `StoreWriter`; the store's own `StoreBackend` does the work of a job. So a store works on
asyncio and trio alike with the plain driver of its database, commits in groups across runs, and renews the leases of an
event loop that is busy for a while.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import anyio
import attrs

from agentfsm._concurrency import ThreadWaiter, current_native_loop, start_in_thread
from agentfsm.core import codec
from agentfsm.core.errors import AgentError, ClosedError, CorruptError, TooNewError
from agentfsm.core.header import Header
from agentfsm.core.inbox import InboxItem, PostedItem, due_at
from agentfsm.core.machine import State
from agentfsm.core.run import Run, begin_run
from agentfsm.core.validation import SECONDS, ValueRule, is_number
from agentfsm.core.value import Value
from agentfsm.ports.store import (
    ALL_RUNS,
    DURABILITY,
    Claim,
    Durability,
    Filter,
    Lease,
    RunSummary,
    Store,
    StoredRun,
)
from agentfsm.stores.rules import check_prune_time, check_run_id, next_expiry
from agentfsm.stores.threaded.change_listener import ChangeListener
from agentfsm.stores.threaded.group_commit import GroupCommitWriter, StoreJob, StoreStatistics, TransactionBackend
from agentfsm.stores.threaded.lease_table import LeaseOwner

if TYPE_CHECKING:
    from agentfsm.core.events import Event
    from agentfsm.ports.store import PendingWrite

T = TypeVar("T")
L = TypeVar("L", bound="StoreBackend")

_log = logging.getLogger("agentfsm.stores")

# Long enough that a busy machine does not lose a lease by chance, short enough to wait for a worker that vanished.
LEASE_S: Final = 10.0
# Seconds: an hour without a word is no worker any more.
MAX_LEASE_S: Final = 3600.0
LEASE_SECONDS: Final = ValueRule(
    fits=lambda value: is_number(value) and 0 < value <= MAX_LEASE_S,
    wanted=f"seconds above 0 and up to {MAX_LEASE_S:.0f}",
)
# Seconds: longer than any call that a careful author makes by mistake, shorter than a person waits for a run to move.
BLOCKED_S: Final = 60.0
# The largest integer of a database; a model may claim to have used more tokens than that.
MAX_INT64: Final = 2**63 - 1

# Old runs that a prune takes up in one transaction, with all that hang together with them: so that it goes on between
# the other jobs and renewals, and takes tens of milliseconds each time.
PRUNE_BATCH: Final = 500
# Characters of records in appends that are joined: some turns. So a job stays about as small as
# `group_commit.MAX_QUEUED_JOBS` assumes.
MAX_MERGED_CHARS: Final = 8_192


class RunColumns(NamedTuple):
    """The columns that a store keeps of a run besides its journal, and updates with each append."""

    state: str
    stop_reason: str | None
    waiting: bool
    """Whether the run waits for an external input or decision."""

    wakes_at: float | None
    """Next deadline of the calls that the run waits for, seconds since 1970; None if there is none."""

    turn: int
    version: int
    tokens: int
    updated_at: float
    paused: bool
    """Whether the run is paused until it is resumed. A pause resets the crashes counted against the run."""


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
        run.paused is not None,
    )


@attrs.frozen(kw_only=True)
class AppendRequest(Value):
    """An append, serialised by the caller."""

    lease: Lease
    bodies: tuple[str, ...]
    """The events, as text."""

    columns: RunColumns
    """Of the run after them."""

    taken: tuple[int, ...]
    final: bool

    @property
    def expected_version(self) -> int:
        """The version that the journal must be at."""
        return self.columns.version - len(self.bodies)


@attrs.frozen(kw_only=True)
class CreateRequest(Value):
    """A run to create, serialised by the caller."""

    header: Header
    bodies: tuple[str, ...]
    """The events that its journal begins with, as text."""

    columns: RunColumns
    """Of the run after them."""


@attrs.frozen(kw_only=True)
class InboxPost(Value):
    """A row for an inbox, serialised by the caller."""

    run_id: str
    key: str
    item: InboxItem
    text: str
    """The item, as text."""

    before: float | None
    due_at: float | None
    """Earliest time at which the item is consumed, seconds since 1970; None for at once."""


@attrs.frozen
class LeaseRequest(Value):
    """The owner that takes leases, and the durability of its appends."""

    owner: LeaseOwner
    durability: Durability


# A run's version, and its records by number: the header as 0, and the events that were asked for.
JournalRecords = tuple[int, Sequence[tuple[int, bytes]]]


class StoreBackend(TransactionBackend, Protocol):
    """The operations that a store's thread executes inside a transaction of its backend."""

    def now(self) -> float:
        """As `Store.now`."""
        ...

    worker_name: str
    """The name of the store object, unique; its event loops have names of their own behind it."""

    def create(self, request: CreateRequest, lease_request: LeaseRequest) -> tuple[Header, Lease]:
        """As `Store.create`."""
        ...

    def acquire_lease(self, run_id: str, lease_request: LeaseRequest, *, takeover: bool) -> Lease:
        """As `Store.lease`."""
        ...

    def claim(self, agent: str, limit: int, lease_request: LeaseRequest, *, suspects: bool) -> Claim:
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

    def runs(self, where: Filter, limit: int) -> tuple[RunSummary, ...]:
        """As `Store.runs`."""
        ...

    def delete(self, run_id: str) -> None:
        """As `Store.delete`."""
        ...

    def delete_session(self, session: str) -> int:
        """As `Store.delete_session`."""
        ...

    def prune(self, before: float, start: int, limit: int) -> tuple[int, int]:
        """Prune up to `limit` runs as `Store.prune` does. Return the number removed, and where to continue.

        Args:
            before: Seconds since 1970.
            start: Where the last portion has ended; 0 for the first.
            limit: Runs that the portion takes up; what hangs together with one goes whole.

        Returns:
            How many runs were removed, and the next `start`: -1 at the end.
        """
        ...


@attrs.define(eq=False, repr=False)
class _AppendBuffer:
    """An append that may still grow."""

    lease: Lease
    run: Run
    """After the events."""

    bodies: list[str]
    taken: list[int]
    final: bool
    chars: int = attrs.field(init=False)
    """Of the bodies."""

    def __attrs_post_init__(self) -> None:
        self.chars = sum(map(len, self.bodies))

    def try_merge(self, other: _AppendBuffer) -> bool:
        """Merge a following append of the same lease into this one. Return whether this was possible."""
        follows = other.run.version - len(other.bodies) == self.run.version  # else it will be refused, and alone
        if self.final or other.final or not follows or self.chars + other.chars > MAX_MERGED_CHARS:
            return False
        self.run = other.run
        self.bodies += other.bodies
        self.taken += other.taken
        self.chars += other.chars
        return True

    def build_request(self) -> AppendRequest:
        """Return what a backend writes."""
        return AppendRequest(
            lease=self.lease,
            bodies=tuple(self.bodies),
            columns=extract_columns(self.run),
            taken=tuple(self.taken),
            final=self.final,
        )


class _AppendJob(StoreJob[bool, L]):
    """An append on its way. Until the thread begins with it, the next append of its lease may join it.

    So the appends of a turn, which come within microseconds of each other, are checked once and written by one
    statement: 24 us of the thread's time, and not 62. They have one outcome, as they would have had anyway, since none
    is written after one that was not.
    """

    __slots__ = ("_buffer", "_buffer_lock", "ends_run")

    def __init__(self, buffer: _AppendBuffer) -> None:
        lease = buffer.lease
        super().__init__(
            self._begin,
            run_id=lease.run_id,
            on_failure=lambda ledger, error: ledger.leases.mark_failed(lease, error),
            durability=lease.durability,
            retry_if_locked=True,
        )
        self.ends_run = buffer.run.is_over
        # So that no worker is woken when the lease is given back.
        self._buffer: _AppendBuffer | None = buffer
        # None from when the thread has begun with it.
        self._buffer_lock = threading.Lock()
        # Guards that moment.

    def try_merge(self, buffer: _AppendBuffer) -> bool:
        """Whether an append that follows on this one has joined it."""
        with self._buffer_lock:
            return self._buffer is not None and self._buffer.try_merge(buffer)

    def finish(self) -> list[ThreadWaiter]:
        """Let its outcome be known; return the bells of those who wait for it."""
        self._seal()
        return super().finish()

    def _begin(self, ledger: L) -> bool:
        draft = self._seal()
        assert draft is not None  # noqa: S101  it is begun once; what is tried again is what was made of it
        entry = draft.build_request()
        self._work = lambda ledger: ledger.append(entry)
        return ledger.append(entry)

    def _seal(self) -> _AppendBuffer | None:
        with self._buffer_lock:
            draft, self._buffer = self._buffer, None
        return draft


class StoreWriter(GroupCommitWriter[L]):
    """The thread of one process, the newest append that it was given of each lease, and the owners of leases."""

    def __init__(self, backend: L) -> None:
        super().__init__(backend)
        self.appends: WeakKeyDictionary[Lease, _AppendJob[L]] = WeakKeyDictionary()
        self._owners: WeakKeyDictionary[object, LeaseOwner] = WeakKeyDictionary()
        # By the event loop.
        self._numbers = count(1)
        self.listener: ChangeListener | None = None
        # To a server's announcements; None before the first subscription, and where there are none.

    def current_owner(self) -> LeaseOwner:
        """Return the owner that the running event loop is."""
        loop = current_native_loop()
        owner = self._owners.get(loop)
        if owner is None:
            name = f"{self.backend.worker_name}.{next(self._numbers)}"
            owner = self._owners[loop] = LeaseOwner(until=0.0, name=name)
        return owner


@attrs.define(eq=False, repr=False)
class ThreadedStore(Store, Generic[L]):
    """A store that hands all work to a thread of its own.

    Usable from any event loop and thread, several at a time too. The thread starts when the store is first used, ends
    after 5 idle seconds in which no run is driven, and never holds the process at exit. So `aclose` is good manners,
    not a duty.

    An event loop owns the leases that were taken in it. One that does not run for a second is logged, with the stack of
    what blocks it. After `blocked_s` seconds its leases are no longer renewed, and others take over its runs.
    """

    blocked_s: float = attrs.field(default=BLOCKED_S, kw_only=True, validator=SECONDS)
    """Seconds for which an event loop may stand still until its runs are given to others, above 0."""

    _writers: dict[int, StoreWriter[L]] = attrs.field(factory=dict, init=False)
    """By process id: a forked child has no thread of its parent's, and must not touch its connection, even to close it.
    """

    @abstractmethod
    def _create_backend(self) -> L:
        """Return a new backend, for the thread of this process."""

    async def now(self) -> float:
        """Seconds since 1970 by the store's clock."""
        return await self._run_job(lambda ledger: ledger.now(), writes=False)

    async def create(
        self,
        header: Header,
        *,
        events: Sequence[Event] = (),
        durability: Durability = "full",
    ) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        header = codec.decode_header(codec.encode_header(header))  # as it will be read again
        bodies = tuple([codec.encode_event(event, header) for event in events])
        opening = CreateRequest(header=header, bodies=bodies, columns=extract_columns(begin_run(header).fold(events)))
        taker = self._build_lease_request("create", durability)

        def create(ledger: L) -> tuple[Header, list[Lease]]:
            stored, lease = ledger.create(opening, taker)
            return stored, [lease]

        stored, (lease,) = await self._acquire_leases(header.id, create, durability)
        lease.agent = stored.agent
        return stored, lease

    async def lease(self, run_id: str, *, durability: Durability = "full", takeover: bool = False) -> Lease:
        """Take the lease of a run that exists."""
        taker = self._build_lease_request("lease", durability)

        def take(ledger: L) -> tuple[None, list[Lease]]:
            return None, [ledger.acquire_lease(run_id, taker, takeover=takeover)]

        _, (lease,) = await self._acquire_leases(run_id, take, durability)
        return lease

    async def claim(self, agent: str, *, limit: int, durability: Durability = "full", suspects: bool = False) -> Claim:
        """Take the leases of runs of that agent that a worker can move on now."""
        taker = self._build_lease_request("claim", durability)

        def claim(ledger: L) -> tuple[Claim, tuple[Lease, ...]]:
            claimed = ledger.claim(agent, max(limit, 0), taker, suspects=suspects)
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
        """Do what takes leases; where the wait for it is cancelled they are given back, since nobody will use them."""
        taken: list[Lease] = []

        def take(ledger: L) -> tuple[T, Sequence[Lease]]:
            result = work(ledger)
            taken[:] = result[1]
            return result

        try:
            return await self._run_job(take, run_id=run_id, durability=durability)
        except AgentError:
            raise  # refused or failed: nothing was taken
        except BaseException:
            with suppress(AgentError):
                self._writer.submit(
                    StoreJob(lambda ledger: [ledger.release(lease) for lease in taken], notify_agent="")
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
        """Write events and strike inbox rows; returns before it is durable.

        The events are encoded here and not in the thread: an event that cannot be is the caller's mistake, and shall
        be raised there; and the interpreter does one thing at a time anyway.

        Raises:
            MisuseError: when an event cannot be encoded.
            ClosedError: after `aclose`.
            StoreError: when 100,000 jobs wait already, or no thread can be started.
        """
        bodies = [codec.encode_event(event, run.header) for event in events]
        draft = _AppendBuffer(lease, run, bodies, list(taken), final)
        writer = self._writer
        newest = writer.appends.get(lease)
        if newest is not None and newest.try_merge(draft):
            return newest
        job = _AppendJob[L](draft)
        lease.agent = run.header.agent
        writer.submit(job)
        writer.appends[lease] = job
        return job

    def release(self, lease: Lease) -> PendingWrite:
        """Give the lease back, after the appends before. Where that cannot be written, the lease ends by itself."""

        def spoilt(ledger: L, error: AgentError) -> None:
            _log.warning("run %s: its lease ends by itself: %s", lease.run_id, error)
            ledger.leases.abandon(lease)

        writer = self._writer
        newest = writer.appends.pop(lease, None)
        job = StoreJob[bool, L](
            lambda ledger: ledger.release(lease),
            run_id=lease.run_id,
            on_failure=spoilt,
            durability="normal",
            retry_if_locked=True,
            notify_agent=None if newest is not None and newest.ends_run else lease.agent,
        )
        try:
            writer.submit(job)
        except ClosedError:  # closing the store has given it back
            return StoreJob[bool, L].done(value=True)
        return job

    async def post(self, run_id: str, key: str, item: InboxItem, *, before: float | None = None) -> PostedItem:
        """Put an item into the inbox, durably; the first post of a key wins."""
        text = codec.encode_item(item)
        post = InboxPost(run_id=run_id, key=key, item=item, text=text, before=before, due_at=due_at(item))
        return await self._run_job(lambda ledger: ledger.post(post), run_id=run_id, notify_agent="")

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Return the rows that are not taken yet, oldest first."""
        rows = await self._run_job(lambda ledger: ledger.inbox(run_id), run_id=run_id, writes=False)
        return await start_in_thread(lambda: tuple(decode_post(run_id, *row) for row in rows)).wait() if rows else ()

    async def read(self, run_id: str, after: int = 0) -> StoredRun:
        """Return the header and the events after that version; they are decoded off the event loop."""
        version, records = await self._run_job(lambda ledger: ledger.read(run_id, after), run_id=run_id, writes=False)
        return await start_in_thread(lambda: _decode_journal(run_id, after, version, records)).wait()

    async def runs(self, where: Filter = ALL_RUNS, *, limit: int = 100) -> tuple[RunSummary, ...]:
        """Return the newest runs that the filter takes, newest first."""
        return await self._run_job(lambda ledger: ledger.runs(where, max(limit, 0)), writes=False)

    async def delete(self, run_id: str) -> None:
        """Remove a run that nobody drives, with its inbox and the runs of agents below it."""
        check_run_id(run_id)
        await self._run_job(lambda ledger: ledger.delete(run_id))

    async def delete_session(self, session: str) -> int:
        """Remove all runs of a session; return how many they were."""
        return await self._run_job(lambda ledger: ledger.delete_session(session))

    async def prune(self, before: float) -> int:
        """Remove what is over and has not changed since that moment; return how many runs that were.

        It goes in portions, each in a transaction of its own: what was removed before an error stays removed.

        Args:
            before: Seconds since 1970.

        Raises:
            MisuseError: when it is no such number; nothing is removed.
        """
        check_prune_time(before)
        removed = start = 0

        def portion(ledger: L) -> tuple[int, int]:
            return ledger.prune(before, start, PRUNE_BATCH)

        while start >= 0:
            began = time.monotonic()
            count, start = await self._run_job(portion)
            removed += count
            await anyio.sleep(time.monotonic() - began if count else 0)  # other processes want the file as well
        return removed

    def subscribe(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after commits that may have changed something under the topic, by other processes too."""
        writer = self._writer
        end = writer.subscriptions.subscribe(topic, wake)
        self._start_watching(writer, topic)
        return end

    def _start_watching(self, writer: StoreWriter[L], topic: str) -> None:
        """See to it that changes by other processes are noticed, now that something is subscribed to."""

    async def aclose(self) -> None:
        """Write what is queued, give all leases back, let go of the database and end the thread."""
        await self._writer.close()

    def statistics(self) -> StoreStatistics:
        """Return what the thread has done so far in this process."""
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


def decode_record(decode: Callable[[str], T], body: object, what: str) -> T:
    """Decode a record; say which one it is when it cannot be read."""
    try:
        return decode(body.decode() if isinstance(body, bytes) else "")
    except (CorruptError, UnicodeDecodeError) as error:
        why = "it is missing" if body is None else str(error)
        raise CorruptError(f"{what}, cannot be read ({why}): restore a backup, or delete the run") from None
    except TooNewError as error:
        raise TooNewError(f"{what}: {error}") from None


def read_header(run_id: str, body: object) -> Header:
    """Decode the header of a run."""
    return decode_record(codec.decode_header, body, f"run {run_id!r}, the header")


def decode_post(run_id: str, number: int, key: str, item: bytes) -> PostedItem:
    """Decode a row of an inbox."""
    value = decode_record(codec.decode_item, item, f"run {run_id!r}, inbox row {number}")
    return PostedItem(number=number, key=key, item=value)


def _decode_journal(run_id: str, after: int, version: int, records: Sequence[tuple[int, bytes]]) -> StoredRun:
    """Decode a journal, in which no version may be missing."""
    bodies: dict[int, Any] = dict(records)
    header = read_header(run_id, bodies.get(0))
    events = [
        decode_record(
            lambda text: codec.decode_event(text, header), bodies.get(number), f"run {run_id!r}, version {number}"
        )
        for number in range(max(after, 0) + 1, version + 1)
    ]
    return StoredRun(header=header, events=tuple(events))
