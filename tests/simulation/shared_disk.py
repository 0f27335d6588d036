"""What all processes of a world share, and how each of them reaches it: late, or not at all, or without hearing so.

`Disk` is a memory store with leases that end when their owner dies or falls silent. A `Handle` is one process's way to
it: what it is asked for is done in order, as a store's thread does it, and the dice may delay it, refuse it, do it and
lose the reply, hold it up until the lease is gone, or end the process in the middle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
from seeded import at_once

from agentfsm.core.errors import AgentError, LeaseLostError, StoreError
from agentfsm.core.events import ToolFinished
from agentfsm.core.inbox import Cancel, InboxItem, Posted
from agentfsm.ports import ALL, Durability, Filter, Lease, Store, Stored, Summary
from agentfsm.stores import MemoryStore

if TYPE_CHECKING:
    from world import World

    from agentfsm.core.events import Event
    from agentfsm.core.run import Header, Run
    from agentfsm.ports import Commit

# Shorter than in real stores, so that more leases end in a short life.
LEASE_S: Final = 3.0
# Until an owner that writes nothing hears what was posted.
BEAT_S: Final = LEASE_S / 3


@attrs.define(eq=False)
class Tenure:
    """Who has the lease of a run."""

    handle: Handle
    lease: Lease
    forgotten_at: float | None = None
    # When the reply that brought it was lost.

    def has_ended(self, now: float) -> bool:
        """Whether it ran out, since nobody has renewed it, or its owner is seen to be dead."""
        if self.handle.died_at is not None and self.handle.is_seen_dead:
            return True
        silent = [at for at in (self.handle.died_at, self.handle.stalled_at, self.forgotten_at) if at is not None]
        return bool(silent) and now >= min(silent) + LEASE_S

    def tell(self, record: Any) -> None:
        """Tell the owner what the inbox holds."""
        self.lease.newest = max([self.lease.newest, *record.inbox])
        if not self.lease.cancelled and any(isinstance(row.item, Cancel) for row in record.inbox.values()):
            self.lease.cancelled = True
            if self.lease.wake is not None:
                self.lease.wake()


@attrs.frozen
class Accepted:
    """A post that was accepted."""

    run_id: str
    at: float
    row: Posted


@attrs.define(eq=False)
class Disk(MemoryStore):
    """A memory store whose leases end, and whose owners hear of posts with their next append or renewal."""

    tenures: dict[str, Tenure] = attrs.field(factory=dict, init=False)
    crashes: Counter[str] = attrs.field(factory=Counter, init=False)
    # Owners that never gave the lease back since the run last finished a turn.
    accepted: list[Accepted] = attrs.field(factory=list, init=False)

    def taken(self, handle: Handle, run_id: str, take: Callable[[], Any]) -> Any:
        """Take a lease by calling `take`; one that has ended does not stand in its way."""
        tenure = self.tenures.get(run_id)
        if tenure is not None and self.is_free(tenure, handle):
            self._records[run_id].holder = None
            del self.tenures[run_id]
            self.crashes[run_id] += tenure.handle is not handle
        value = take()
        lease = _lease_of(value)
        lease.crashes = self.crashes[run_id]
        self.tenures[run_id] = Tenure(handle, lease)
        return value

    def is_free(self, tenure: Tenure, handle: Handle | None = None) -> bool:
        """Whether a run may be taken from whoever has it."""
        is_own = tenure.handle is handle and tenure.forgotten_at is not None
        return is_own or tenure.has_ended(self.clock.now())

    def write(self, lease: Lease, run: Run, events: Sequence[Event], taken: Sequence[int], *, final: bool) -> bool:
        """Append, and tell the owner what is new."""
        record = self._records[lease.run_id]
        turn = record.run.turn
        written = at_once(self.append(lease, run, events, taken=taken, final=final).wait())
        if run.turn != turn:
            self.crashes[lease.run_id] = 0
        if (tenure := self.tenures.get(lease.run_id)) is not None and tenure.lease is lease:
            tenure.tell(record)
        return written

    def give_back(self, lease: Lease) -> bool:
        """Release."""
        tenure = self.tenures.get(lease.run_id)
        if tenure is not None and tenure.lease is lease:
            del self.tenures[lease.run_id]
        return at_once(self.release(lease).wait())

    def put(self, run_id: str, key: str, item: InboxItem, before: float | None) -> Posted:
        """Post; who drives the run does not hear of it yet."""
        record = self._record(run_id)
        holder, record.holder = record.holder, None
        try:
            row = at_once(self.post(run_id, key, item, before=before))
        finally:
            record.holder = holder
        if not any(each.row is row for each in self.accepted):
            self.accepted.append(Accepted(run_id, self.clock.now(), row))
        return row

    def renewed(self, run_id: str) -> None:
        """Tell who drives the run what its inbox holds, as a renewal does."""
        tenure, record = self.tenures.get(run_id), self._records.get(run_id)
        if tenure is not None and record is not None and tenure.handle.is_heard:
            tenure.tell(record)

    def _is_in_reach(self, record: Any) -> bool:
        tenure = self.tenures.get(record.run.id)
        holder = record.holder
        if tenure is not None and self.is_free(tenure):
            record.holder = None
        try:
            return MemoryStore._is_in_reach(self, record)
        finally:
            record.holder = holder


@attrs.define(eq=False)
class Job:
    """Something asked of the disk; also the commit of an append."""

    work: Callable[[], Any]
    delay_s: float = 0.0
    fault: str = ""
    # "before" it is done, or "after".
    lease: Lease | None = None
    # Of an append: no later one is written after one that was not.
    undone: Callable[[], object] = lambda: None
    # Called when nobody will hear that it was done, or it was not.
    is_settled: bool = False
    value: Any = None
    error: AgentError | None = None
    _done: anyio.Event | None = None

    async def wait(self) -> Any:
        """Return the value, or raise the error."""
        if not self.is_settled:
            self._done = self._done or anyio.Event()
            await self._done.wait()
        if self.error is not None:
            raise self.error
        return self.value

    def settle(self, value: Any = None, error: AgentError | None = None) -> None:
        """Tell the outcome."""
        self.value, self.error, self.is_settled = value, error, True
        if self._done is not None:
            self._done.set()


@attrs.define(eq=False)
class Handle(Store):
    """One process's way to the disk."""

    world: World
    disk: Disk
    owner: str
    died_at: float | None = None
    is_seen_dead: bool = False
    # Whether others see at once that it is dead, as on one machine.
    stalled_at: float | None = None
    strike: Callable[[], object] = attrs.field(default=lambda: None)
    # Lets fate strike its process.
    told: set[tuple[str, str]] = attrs.field(factory=set)
    # Run and call of every result that was handed in.
    _awake: anyio.Event = attrs.field(factory=anyio.Event)
    # Set when it is not stalled any more.
    _line: deque[Job] = attrs.field(factory=deque)
    _served: bool = False
    _spoilt: set[int] = attrs.field(factory=set)
    # Tokens of leases an append of which was not written.

    @property
    def is_heard(self) -> bool:
        """Whether renewals come through."""
        return self.died_at is None and self.stalled_at is None

    def die(self) -> None:
        """Cut it off for ever; what waits in line is lost, but for the first jobs, which the disk had begun."""
        self.world.look_at_results(self)
        for job in list(self._line)[: self.world.dice.choice((0, 0, 1, 2))]:
            with suppress(AgentError):
                job.work()
        self.died_at, self.is_seen_dead = self.disk.clock.now(), self.world.chance(0.5)
        for job in self._line:
            job.settle(error=StoreError("the process is dead"))
        self._line.clear()
        self._awake.set()

    async def stall(self, seconds: float) -> None:
        """Let nothing through for a while: no renewal either, so that leases end."""
        if not self.is_heard:
            return
        self.stalled_at, self._awake = self.disk.clock.now(), anyio.Event()
        await anyio.sleep(seconds)
        self.stalled_at = None
        self._awake.set()

    # Jobs

    def _submit(self, job: Job, what: str) -> Job:
        if self.died_at is not None:
            job.settle(error=StoreError("the process is dead"))
            return job
        job.delay_s, job.fault = self.world.trip(what)
        if self._line or job.delay_s or self.stalled_at is not None:
            self._line.append(job)
            if not self._served:
                self._served = True
                self.world.tasks.start_soon(self._serve)
        else:
            self._perform(job)
        return job

    async def _serve(self) -> None:
        while self._line:
            job = self._line[0]
            if job.delay_s:
                await anyio.sleep(job.delay_s)
            if self.stalled_at is not None:
                await self._awake.wait()
            if self._line and self._line[0] is job:  # else the process has died
                self._perform(self._line.popleft())
        self._served = False

    def _perform(self, job: Job) -> None:
        token = None if job.lease is None else job.lease.token
        if token in self._spoilt:
            return job.settle(error=StoreError("an earlier append was not written, nor is this one"))
        if job.fault == "before":
            return self._spoil(job, "the disk is full")
        try:
            value = job.work()
        except LeaseLostError as error:
            if job.lease is not None:
                job.lease.lost = True
                if job.lease.wake is not None:
                    job.lease.wake()
            return job.settle(error=error)
        except AgentError as error:
            return job.settle(error=error)
        if job.fault == "after":
            job.value = value
            return self._spoil(job, "the connection was lost")
        return job.settle(value)

    def _spoil(self, job: Job, why: str) -> None:
        if job.lease is not None:
            self._spoilt.add(job.lease.token)
        job.undone()
        job.settle(job.value, StoreError(why))

    async def _do(self, what: str, work: Callable[[], Any]) -> Any:
        return await self._submit(Job(work), what).wait()

    async def _take(self, run_id: str, take: Callable[[], Any]) -> Any:
        job = Job(lambda: self.disk.taken(self, run_id, take))
        forget = job.undone = lambda: job.value is not None and self._forget(_lease_of(job.value))
        try:
            return await self._submit(job, "take").wait()
        except AgentError:
            raise
        except BaseException:  # the wait was cancelled: nobody will know of the lease, so it is given back
            give_back = lambda: job.value is None or self.disk.give_back(_lease_of(job.value))  # noqa: E731  as below
            self._submit(Job(give_back, undone=forget), "release")
            raise

    def _forget(self, lease: Lease) -> None:
        """Nobody holds the lease, and the disk does not know: it ends by itself."""
        tenure = self.disk.tenures.get(lease.run_id)
        if tenure is not None and tenure.lease is lease:
            tenure.forgotten_at = self.disk.clock.now()

    # The port

    async def now(self) -> float:
        """Ask the disk's clock."""
        return await self._do("now", self.disk.clock.now)

    async def create(
        self, header: Header, *, events: Sequence[Event] = (), durability: Durability = "full"
    ) -> tuple[Header, Lease]:
        """Create and lease."""
        create = self.disk.create
        return await self._take(header.id, lambda: at_once(create(header, events=events, durability=durability)))

    async def lease(self, run_id: str, *, durability: Durability = "full") -> Lease:
        """Lease."""
        return await self._take(run_id, lambda: at_once(self.disk.lease(run_id, durability=durability)))

    def append(
        self,
        lease: Lease,
        run: Run,
        events: Sequence[Event],
        *,
        taken: Sequence[int] = (),
        final: bool = False,
    ) -> Commit:
        """Append, some time."""
        self.world.note(self.owner, lambda: f"appends {[type(event).__name__ for event in events]} to {run.id}")
        self.world.tempt_fate(self, 0.1)
        self.told |= {(run.id, event.result.call_id) for event in events if isinstance(event, ToolFinished)}
        work = lambda: self.disk.write(lease, run, events, taken, final=final)  # noqa: E731  it reads best in place
        return self._submit(Job(work, lease=lease), "append")

    def release(self, lease: Lease) -> Commit:
        """Release, some time."""
        job = Job(lambda: self.disk.give_back(lease), undone=lambda: self._forget(lease))
        return self._submit(job, "release")

    async def post(self, run_id: str, key: str, item: InboxItem, *, before: float | None = None) -> Posted:
        """Post; who drives the run hears of it a little later."""
        row = await self._do("post", lambda: self.disk.put(run_id, key, item, before))
        self.world.later(self.world.dice.choice((0.0, BEAT_S, BEAT_S)), lambda: self.disk.renewed(run_id))
        return row

    async def inbox(self, run_id: str) -> tuple[Posted, ...]:
        """Read the inbox."""
        return await self._do("read", lambda: at_once(self.disk.inbox(run_id)))

    async def read(self, run_id: str, after: int = 0) -> Stored:
        """Read the journal."""
        return await self._do("read", lambda: at_once(self.disk.read(run_id, after)))

    async def runs(self, where: Filter = ALL, *, limit: int = 100) -> tuple[Summary, ...]:
        """List."""
        return await self._do("read", lambda: at_once(self.disk.runs(where, limit=limit)))

    async def due(self, agent: str, *, limit: int = 100) -> tuple[str, ...]:
        """List what is due."""
        return await self._do("read", lambda: at_once(self.disk.due(agent, limit=limit)))

    async def delete(self, run_id: str) -> None:
        """Nobody deletes here."""
        raise NotImplementedError

    async def delete_session(self, session: str) -> int:
        """Nobody deletes here."""
        raise NotImplementedError

    async def prune(self, before: float) -> int:
        """Nobody deletes here."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Nothing is open."""


def _lease_of(taken: Any) -> Lease:
    return taken[1] if isinstance(taken, tuple) else taken
