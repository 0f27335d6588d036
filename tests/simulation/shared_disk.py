"""What all processes of a world share, and how each of them reaches it: late, or not at all, or without hearing so.

`Disk` is a memory store with leases that end when their owner dies or falls silent; then all its runs come free at
once, and the deaths are counted as in the real stores. A `Handle` is one process's way to it: what it is asked for is
done in order, as a store's thread does it, and the dice may delay it, refuse it, do it and lose the reply, hold it up
until the lease is gone, or end the process in the middle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
from seeded import at_once

from agentfsm import AgentError, LeaseLostError, StoreError
from agentfsm._lib.concurrency import boot_clock
from agentfsm.core.calls import Phase
from agentfsm.core.events import ToolFinished, ToolStarted
from agentfsm.core.inbox import Cancel, InboxItem, PostedItem
from agentfsm.core.run_ids import child_run_id
from agentfsm.ports import ALL_RUNS, Claim, Durability, Filter, Lease, LeaseTerm, RunSummary, Store, StoredRun
from agentfsm.stores import MemoryStore
from agentfsm.stores.rules import suspect_group_size

if TYPE_CHECKING:
    from world import World

    from agentfsm import Run
    from agentfsm.core.events import Event
    from agentfsm.core.header import Header
    from agentfsm.ports import PendingWrite

# Shorter than in real stores, so that more leases end in a short life.
LEASE_S: Final = 3.0
# Until an owner that writes nothing hears what was posted.
BEAT_S: Final = LEASE_S / 3
# For which the leases of an event loop that stands still are renewed.
BLOCKED_S: Final = 2.0


class HandleTerm(LeaseTerm):
    """How long the leases of a process hold: virtual seconds from now on, as the boot clock would have it."""

    def __init__(self, handle: Handle) -> None:
        """Follow a handle."""
        self.handle = handle

    @property
    def until(self) -> float:
        """Seconds by the boot clock."""
        return boot_clock() + self.handle.lapses_at - self.handle.disk.clock.now()


@attrs.define(eq=False)
class Tenure:
    """Who has the lease of a run."""

    handle: Handle
    lease: Lease
    forgotten_at: float | None = None
    # When the reply that brought it was lost.

    def tell(self, record: Any) -> None:
        """Tell the owner what the inbox holds."""
        self.lease.inbox_head = max([self.lease.inbox_head, *record.inbox])
        if not self.lease.cancelled and any(isinstance(row.item, Cancel) for row in record.inbox.values()):
            self.lease.cancelled = True
            if self.lease.wake is not None:
                self.lease.wake()


@attrs.frozen
class Accepted:
    """A post that was accepted."""

    run_id: str
    at: float
    row: PostedItem


@attrs.define(eq=False)
class Deaths:
    """What the disk knows of the owners of a run that died."""

    crashes: int = 0
    # Since it finished a turn or was paused.
    alone: int = 0
    # Those that drove no other run.
    company: int = 0
    # Runs that the last of them drove.


@attrs.define(eq=False)
class Disk(MemoryStore):
    """A memory store whose leases end, and whose owners hear of posts with their next append or renewal."""

    tenures: dict[str, Tenure] = attrs.field(factory=dict, init=False)
    deaths: dict[str, Deaths] = attrs.field(factory=dict, init=False)
    alone: Counter[str] = attrs.field(factory=Counter, init=False)
    # How many owners of a run died ever that drove no other one.
    left: dict[str, str] = attrs.field(factory=dict, init=False)
    # Open runs of agents without a request to end, whose caller or call has ended, with the version at which it ended.
    accepted: list[Accepted] = attrs.field(factory=list, init=False)

    def taken(self, handle: Handle, run_id: str, take: Callable[[], Any], *, takeover: bool = False) -> Any:
        """Take a lease by calling `take`; one that has ended does not stand in its way, nor any in a takeover's."""
        self.free_runs_of_the_dead(handle)
        tenure = self.tenures.get(run_id)
        if tenure is not None and (takeover or (tenure.handle is handle and tenure.forgotten_at is not None)):
            self._records[run_id].lease_ref = None
            del self.tenures[run_id]
        value = take()
        self._held(handle, _lease_of(value))
        return value

    def claimed(self, handle: Handle, agent: str, limit: int, durability: Durability, *, suspects: bool) -> Claim:
        """Take the leases of runs that a worker can move on, as real stores do."""
        self.free_runs_of_the_dead(handle)
        now = self.clock.now()
        ready = sorted(
            (record.ready_at, run_id)
            for run_id, record in self._records.items()
            if record.run.header.agent == agent and record.ready_at is not None and record.ready_at <= now
        )
        under_suspicion = [run_id for _, run_id in ready if self._deaths_of(run_id).crashes > 1]
        if suspects:
            company = self._deaths_of(under_suspicion[0]).company if under_suspicion else 0
            found = [run_id for run_id in under_suspicion if self._deaths_of(run_id).company >= company]
            limit = min(limit, suspect_group_size(company))
        else:
            found = [run_id for _, run_id in ready if run_id not in under_suspicion]
        leases = [at_once(self.lease(run_id, durability=durability)) for run_id in found[:limit]]
        for lease in leases:
            self._held(handle, lease)
        return Claim(leases=tuple(leases), has_suspects=bool(under_suspicion))

    def _held(self, handle: Handle, lease: Lease) -> None:
        deaths = self._deaths_of(lease.run_id)
        lease.term = handle.term
        lease.crashes = deaths.alone if deaths.crashes else 0
        lease.abandoned = deaths.crashes > 0
        self.tenures[lease.run_id] = Tenure(handle, lease)
        handle.leases[lease.run_id] = lease

    def _deaths_of(self, run_id: str) -> Deaths:
        return self.deaths.setdefault(run_id, Deaths())

    def free_runs_of_the_dead(self, asking: Handle) -> None:
        """Free the runs of processes that died or fell silent, all of one process at once."""
        now = self.clock.now()
        for handle in list({id(each.handle): each.handle for each in self.tenures.values()}.values()):
            if handle is not asking and (handle.is_seen_dead or now >= handle.lapses_at):
                runs = [run_id for run_id, each in self.tenures.items() if each.handle is handle]
                company = sum(self._records[run_id].run.header.parent is None for run_id in runs)
                for run_id in runs:
                    deaths = self._deaths_of(run_id)
                    deaths.alone = (deaths.alone if deaths.crashes else 0) + (company <= 1)
                    deaths.crashes, deaths.company = deaths.crashes + 1, company
                    self.alone[run_id] += company <= 1
                self._free(runs)

    def free_forgotten(self, handle: Handle) -> None:
        """Free the runs of a process that it does not know it has."""
        self._free([run_id for run_id, each in self.tenures.items() if each.handle is handle and each.forgotten_at])

    def _free(self, run_ids: Iterable[str]) -> None:
        for run_id in run_ids:
            del self.tenures[run_id]
            self._free_run(self._records[run_id])

    def write(self, lease: Lease, run: Run, events: Sequence[Event], taken: Sequence[int], *, final: bool) -> bool:
        """Append, and tell the owner what is new."""
        record = self._records[lease.run_id]
        turn = record.run.turn
        written = at_once(self.append(lease, run, events, taken=taken, final=final).wait())
        if run.turn != turn or run.paused is not None:
            self._deaths_of(lease.run_id).crashes = 0
        if written and (run.is_over or any(isinstance(event, ToolFinished) for event in events)):
            self._list_left(run)
        if (tenure := self.tenures.get(lease.run_id)) is not None and tenure.lease is lease:
            tenure.tell(record)
        return written

    def _list_left(self, run: Run) -> None:
        """Note the open runs of agents whose calls have their results, and for which no end was requested."""
        unfinished = {child_run_id(run.id, entry.call.id) for entry in run.open if entry.phase is not Phase.FINISHED}
        told = {each.run_id for each in self.accepted if isinstance(each.row.item, Cancel)}
        for run_id, record in self._records.items():
            below = record.run
            if below.header.parent == run.id and not below.is_over and run_id not in unfinished | told:
                self.left.setdefault(run_id, f"version {run.version} of {run.id}")

    def give_back(self, lease: Lease) -> bool:
        """Release."""
        tenure = self.tenures.get(lease.run_id)
        if tenure is not None and tenure.lease is lease:
            del self.tenures[lease.run_id]
        return at_once(self.release(lease).wait())

    def put(self, run_id: str, key: str, item: InboxItem, before: float | None) -> PostedItem:
        """Post; who drives the run does not hear of it yet."""
        record = self._record(run_id)
        holder, record.lease_ref = record.lease_ref, None
        try:
            row = at_once(self.post(run_id, key, item, before=before))
        finally:
            record.lease_ref = holder
            if run_id in self.tenures:
                record.ready_at = None
        if not any(each.row is row for each in self.accepted):
            self.accepted.append(Accepted(run_id, self.clock.now(), row))
        return row

    def forget(self, run_ids: Collection[str]) -> None:
        """Forget what was known of runs that were deleted."""
        self.accepted = [each for each in self.accepted if each.run_id not in run_ids]
        for run_id in run_ids:
            self.deaths.pop(run_id, None)
            self.alone.pop(run_id, None)

    def renewed(self, run_id: str) -> None:
        """Tell who drives the run what its inbox holds, as a renewal does."""
        tenure, record = self.tenures.get(run_id), self._records.get(run_id)
        if tenure is not None and record is not None and tenure.handle.is_heard:
            tenure.tell(record)


@attrs.define(eq=False)
class Job:
    """Something asked of the disk; also the commit of an append."""

    work: Callable[[], Any]
    delay_s: float = 0.0
    fault: str = ""
    # "before" it is done, or "after"; "stall": the process stands still between that and the word of it.
    lease: Lease | None = None
    # Of an append: no later one is written after one that was not.
    undone: Callable[[], object] = lambda: None
    # Called when nobody will hear that it was done, or it was not.
    is_done: bool = False
    value: Any = None
    error: AgentError | None = None
    _done: anyio.Event | None = None

    async def wait(self) -> Any:
        """Return the value, or raise the error."""
        if not self.is_done:
            self._done = self._done or anyio.Event()
            await self._done.wait()
        if self.error is not None:
            raise self.error
        return self.value

    def settle(self, value: Any = None, error: AgentError | None = None) -> None:
        """Tell the outcome."""
        self.value, self.error, self.is_done = value, error, True
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
    lapsed_at: float | None = None
    # When its leases end or have ended, seconds since 1970; None while they are renewed all the time.
    term: LeaseTerm = attrs.field(init=False, default=attrs.Factory(HandleTerm, takes_self=True))
    leases: dict[str, Lease] = attrs.field(init=False, factory=dict)
    # As its process knows, by run.
    strike: Callable[[], object] = attrs.field(default=lambda: None)
    # Lets fate strike its process.
    end: Callable[[], object] = attrs.field(default=lambda: None)
    # Ends its process.
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

    @property
    def lapses_at(self) -> float:
        """When its leases end, as far as it is known, seconds since 1970."""
        return self.disk.clock.now() + LEASE_S if self.lapsed_at is None else self.lapsed_at

    def die(self) -> None:
        """Cut it off for ever; what waits in line is lost, but for the first jobs, which the disk had begun."""
        self.world.look_at_results(self)
        for job in list(self._line)[: self.world.dice.choice((0, 0, 1, 2))]:
            with suppress(AgentError):
                job.work()
        self.died_at, self.is_seen_dead = self.disk.clock.now(), self.world.chance(0.5)
        self.lapsed_at = min(self.lapses_at, self.died_at + LEASE_S)
        for job in self._line:
            job.settle(error=StoreError("the process is dead"))
        self._line.clear()
        self._awake.set()

    async def stall(self, seconds: float, renewed_s: float = 0.0) -> None:
        """Let nothing through for a while, so that leases end.

        Args:
            seconds: How long.
            renewed_s: For which the leases are renewed all the same: the store's thread runs, and the loop does not.
        """
        if not self.is_heard:
            return
        self.stalled_at, self._awake = self.disk.clock.now(), anyio.Event()
        self.lapsed_at = self.stalled_at + renewed_s + LEASE_S
        await anyio.sleep(seconds)
        self.stalled_at = None
        self._awake.set()
        self.world.later(self.world.dice.choice((0.0, 0.25)), self._renew)

    def _renew(self) -> None:
        """Learn which leases are lost; the others hold again."""
        if not self.is_heard:
            return
        for run_id, lease in list(self.leases.items()):
            tenure = self.disk.tenures.get(run_id)
            if tenure is None or tenure.lease is not lease:
                del self.leases[run_id]
                _lose(lease)
        self.disk.free_forgotten(self)
        self.lapsed_at = None

    # Jobs

    def _submit(self, job: Job, what: str) -> Job:
        if self.died_at is not None:
            job.settle(error=StoreError("the process is dead"))
            return job
        delay_s, fault = self.world.trip(what)
        job.delay_s, job.fault = delay_s, fault or job.fault
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
                _lose(job.lease)
            return job.settle(error=error)
        except AgentError as error:
            return job.settle(error=error)
        if job.fault == "after":
            job.value = value
            return self._spoil(job, "the connection was lost")
        if job.fault == "stall":
            return self.world.tasks.start_soon(self._stall_and_settle, job, value)
        return job.settle(value)

    async def _stall_and_settle(self, job: Job, value: Any) -> None:
        self.world.note(self.owner, lambda: "stalls before it begins what it has just said")
        await self.stall(self.world.dice.choice((3.5, 5.0)))
        job.settle(value, None if self.died_at is None else StoreError("the process is dead"))

    def _spoil(self, job: Job, why: str) -> None:
        if job.lease is not None:
            self._spoilt.add(job.lease.token)
        job.undone()
        job.settle(job.value, StoreError(why))

    async def _do(self, what: str, work: Callable[[], Any]) -> Any:
        return await self._submit(Job(work), what).wait()

    async def _take(self, take: Callable[[], Any]) -> Any:
        job = Job(take)

        def forget() -> None:
            for lease in _leases_of(job.value):
                self._forget(lease)

        def give_back() -> None:
            for lease in _leases_of(job.value):
                self.disk.give_back(lease)

        job.undone = forget
        try:
            return await self._submit(job, "take").wait()
        except AgentError:
            raise
        except BaseException:  # the wait was cancelled: nobody will know of the leases, so they are given back
            self._submit(Job(give_back, undone=forget), "release")
            raise

    def _forget(self, lease: Lease) -> None:
        """Nobody holds the lease, and the disk does not know: the next renewal of the process lets go of it."""
        tenure = self.disk.tenures.get(lease.run_id)
        if tenure is not None and tenure.lease is lease:
            tenure.forgotten_at = self.disk.clock.now()
            self.world.later(BEAT_S, lambda: self.is_heard and self.disk.free_forgotten(self))

    # The port

    async def now(self) -> float:
        """Ask the disk's clock."""
        return await self._do("now", self.disk.clock.now)

    async def create(
        self, header: Header, *, events: Sequence[Event] = (), durability: Durability = "full"
    ) -> tuple[Header, Lease]:
        """Create and lease."""
        disk = self.disk
        create = lambda: at_once(disk.create(header, events=events, durability=durability))  # noqa: E731  as below
        return await self._take(lambda: disk.taken(self, header.id, create))

    async def lease(self, run_id: str, *, durability: Durability = "full", takeover: bool = False) -> Lease:
        """Lease."""
        lease = lambda: at_once(self.disk.lease(run_id, durability=durability))  # noqa: E731  as below
        return await self._take(lambda: self.disk.taken(self, run_id, lease, takeover=takeover))

    async def claim(
        self,
        agent: str,
        *,
        limit: int,
        durability: Durability = "full",
        suspects: bool = False,
        releases: Collection[str] | None = None,
    ) -> Claim:
        """Claim. No run of a simulation has a release."""
        return await self._take(lambda: self.disk.claimed(self, agent, limit, durability, suspects=suspects))

    def append(
        self,
        lease: Lease,
        run: Run,
        events: Sequence[Event],
        *,
        taken: Sequence[int] = (),
        final: bool = False,
    ) -> PendingWrite:
        """Append, some time."""
        self.world.note(self.owner, lambda: f"appends {[type(event).__name__ for event in events]} to {run.id}")
        self.world.tempt_fate(self, 0.1)
        self.told |= {(run.id, event.result.call_id) for event in events if isinstance(event, ToolFinished)}
        work = lambda: self.disk.write(lease, run, events, taken, final=final)  # noqa: E731  it reads best in place
        begins = any(isinstance(event, ToolStarted) for event in events)
        fault = "stall" if begins and self.world.stalls_at(self) else ""
        return self._submit(Job(work, lease=lease, fault=fault), "append")

    def release(self, lease: Lease) -> PendingWrite:
        """Release, some time."""
        job = Job(lambda: self.disk.give_back(lease), undone=lambda: self._forget(lease))
        return self._submit(job, "release")

    async def post(self, run_id: str, key: str, item: InboxItem, *, before: float | None = None) -> PostedItem:
        """Post; who drives the run hears of it a little later."""
        row = await self._do("post", lambda: self.disk.put(run_id, key, item, before))
        self.world.later(self.world.dice.choice((0.0, BEAT_S, BEAT_S)), lambda: self.disk.renewed(run_id))
        return row

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Read the inbox."""
        return await self._do("read", lambda: at_once(self.disk.inbox(run_id)))

    async def read(self, run_id: str, after: int = 0) -> StoredRun:
        """Read the journal."""
        return await self._do("read", lambda: at_once(self.disk.read(run_id, after)))

    async def runs(self, where: Filter = ALL_RUNS, **options: Any) -> tuple[RunSummary, ...]:
        """List."""
        return await self._do("read", lambda: at_once(self.disk.runs(where, **options)))

    async def delete(self, run_id: str) -> None:
        """Nobody deletes here."""
        raise NotImplementedError

    async def delete_session(self, session: str) -> int:
        """Nobody deletes here."""
        raise NotImplementedError

    async def prune(self, before: float, *, unread: bool = False) -> int:
        """Nobody deletes here."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Nothing is open."""


def _lose(lease: Lease) -> None:
    if not lease.lost:
        lease.lost = True
        if lease.wake is not None:
            lease.wake()


def _lease_of(taken: Any) -> Lease:
    return taken[1] if isinstance(taken, tuple) else taken


def _leases_of(taken: Any) -> Sequence[Lease]:
    """Return what was taken; nothing where it was not done."""
    if isinstance(taken, Claim):
        return taken.leases
    return () if taken is None else (_lease_of(taken),)
