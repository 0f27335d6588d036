"""Journal of a run under execution: its lease, ordered appends, and waiting for durability.

An append returns at once and may overlap the model call; `flush` waits until all appends are durable. Callers flush
before they cause an effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

import anyio
import attrs

from agentfsm._lib.concurrency import boot_clock, make_waker
from agentfsm.core import events as e
from agentfsm.core.errors import ConflictError, LeaseLostError, StoreError
from agentfsm.core.inbox import Pause, due_at
from agentfsm.core.json_text import round_duration, round_timestamp
from agentfsm.core.machine import State
from agentfsm.core.run import Run
from agentfsm.core.trace_context import run_context
from agentfsm.journal.load import NO_RUNS, EndedRuns, load_run
from agentfsm.ports.store import Clock, Durability, Lease, PendingWrite, Store, lease_lost_error
from agentfsm.streaming.log import RUN_ENDED, WARNED_EVENTS, LogLine, RunLogger, describe_events
from agentfsm.streaming.stream import Listener, StateChanged

if TYPE_CHECKING:
    from agentfsm.core.events import Event
    from agentfsm.core.header import Header
    from agentfsm.core.inbox import PostedItem
    from agentfsm.streaming.watch import Outlet

# The slots of frozen events, which take half the instructions of `object.__setattr__`.
_set_at, _set_took_s = vars(e.Event)["at"].__set__, vars(e.Event)["took_s"].__set__

# Seconds that a cancelled execution may take to finish its writes.
CLOSE_TIMEOUT_S: Final = 5.0


@attrs.define(eq=False, repr=False, kw_only=True)
class Journal:
    """One run under one lease, from the beginning of an execution to its end."""

    store: Store
    lease: Lease
    run: Run[Any]
    clock: Clock
    on_event: Listener | None = None
    on_run: Callable[[Run], None] | None = None
    """Called with each new state of the run; None if not needed."""

    watch: tuple[Outlet, ...] = ()
    """Watchers, which receive each commit."""

    log: RunLogger
    pause_before: frozenset[State] = frozenset()
    """States before which the run pauses."""

    cancel_scope: anyio.CancelScope | None = None
    """Scope around the execution; cancelled if the run is to be cancelled, or another worker takes it over."""

    _untaken_rows: frozenset[int] = frozenset()
    """Numbers of the inbox rows that were read but not taken."""

    has_pause_request: bool = False
    """Whether one of these rows requests a pause."""

    defers_changes: bool = False
    """Whether state changes reach `on_event` only by `emit_changes`, so that the events that caused them come first."""

    _deferred_changes: list[StateChanged] = attrs.field(factory=list)
    """State changes not yet passed to `on_event`."""

    _is_released: bool = False
    _last_write: PendingWrite | None = None
    _last_line: LogLine | None = None
    """Line of the log about the end of the run, which is written once the end is durable."""

    _last_event_s: float = 0.0
    """Reading of the clock at the latest event, without the time for which it was stopped."""

    _open_questions: int = 0
    """Number of questions that an attending person is being asked."""

    _stopped_at_s: float | None = None
    """Reading of the clock when the active time was stopped, while it is."""

    _time_left_s: float = math.inf
    """Seconds that the execution had left then."""

    _stopped_s: float = 0.0
    """Seconds for which the active time was stopped before."""

    _clock_offset_s: float = 0.0
    """Offset from the monotonic clock to Unix time; computed once, so that times do not jump within an execution."""

    @classmethod
    async def open(
        cls,
        store: Store,
        run: Run | str,
        clock: Clock,
        on_event: Listener | None = None,
        on_run: Callable[[Run], None] | None = None,
        *,
        lease: Lease | None = None,
        takeover: bool = False,
        must_be_new: bool = False,
        durability: Durability = "full",
        pause_before: frozenset[State] = frozenset(),
        ended_runs: EndedRuns = NO_RUNS,
        watch: tuple[Outlet, ...] = (),
    ) -> Self:
        """Take the lease of a run.

        Args:
            store: The store of the run.
            run: A run, or the id of a stored run, which is loaded. A run at version 0 is created unless its id exists;
                a later one must be at the newest version.
            clock: Clock for the times in the journal.
            on_event: Called with each change of state.
            on_run: Called with each new state of the run.
            lease: Lease of this run at this version, if the caller holds it already.
            takeover: Whether to take the lease even if another owner holds it.
            must_be_new: Whether the stored run must still be at version 0 if `run` is.
            durability: Durability of the appends.
            pause_before: States before which the run pauses until it is resumed.
            ended_runs: As in `load_predecessor`.
            watch: Watchers, which receive each commit.

        Raises:
            ConflictError: if the run has moved on, or another worker executes it.
        """
        if lease is None or isinstance(run, str):
            lease, run = await _acquire_lease(
                store, run, durability, ended_runs, must_be_new=must_be_new, takeover=takeover
            )
        header = run.header
        is_traced = header.traceparent or (watch and any(outlet.tracer is not None for outlet in watch))
        journal = cls(
            store=store,
            lease=lease,
            run=run,
            clock=clock,
            on_event=on_event,
            on_run=on_run,
            watch=watch,
            log=RunLogger(run.id, header.agent, run_context(header).trace_id if is_traced else ""),
            pause_before=pause_before,
        )
        journal._last_event_s = clock.monotonic()
        journal._clock_offset_s = clock.now() - journal._last_event_s
        lease.wake = make_waker(journal._interrupt)
        return journal

    def _interrupt(self) -> None:
        if self.cancel_scope is not None:
            self.cancel_scope.cancel()

    @property
    def active_s(self) -> float:
        """Active seconds of the run up to now."""
        now = self.clock.monotonic() if self._stopped_at_s is None else self._stopped_at_s
        return self.run.duration_s + now - self._stopped_s - self._last_event_s

    @contextmanager
    def stop_active_time(self) -> Iterator[None]:
        """Stop the run's active time and the deadline of its execution while a person is asked. Blocks may overlap."""
        scope = self.cancel_scope
        if not self._open_questions:
            self._stopped_at_s = self.clock.monotonic()
            if scope is not None:
                self._time_left_s, scope.deadline = scope.deadline - anyio.current_time(), math.inf
        self._open_questions += 1
        try:
            yield
        finally:
            self._open_questions -= 1
            if not self._open_questions and self._stopped_at_s is not None:
                self._stopped_s += self.clock.monotonic() - self._stopped_at_s
                self._stopped_at_s = None
                if scope is not None:
                    scope.deadline = anyio.current_time() + self._time_left_s

    def _stamp(self, events: Sequence[Event]) -> None:
        """Set the time of events that are not shared yet; copying them would cost three times their construction."""
        now = self.clock.monotonic()
        active = (now if self._stopped_at_s is None else self._stopped_at_s) - self._stopped_s
        took_s, self._last_event_s = round_duration(active - self._last_event_s), active
        at = round_timestamp(self._clock_offset_s + now)
        for event in events:
            _set_at(event, at)
            _set_took_s(event, took_s)
            took_s = 0.0

    def commit(self, *events: Event, taken: Sequence[int] = ()) -> None:
        """Stamp, apply and append events in one transaction. Returns before they are durable.

        Raises:
            IllegalTransitionError: if an event does not fit; nothing is written then.
        """
        self._stamp(events)
        run = self.run.fold(events)
        if self.pause_before and run.state is not self.run.state and run.state in self.pause_before:
            rest = e.Paused(at=run.updated_at, message=f"before {run.state.upper()}")
            events, run = (*events, rest), run.apply(rest)  # in the same append: no crash comes in between
        self._last_write = self.store.append(self.lease, run, events, taken=taken)
        self._advance(run, events, taken)

    async def try_commit_final(self, *events: Event, taken: Sequence[int] = ()) -> bool:
        """Append the last events of a run, unless new items are in its inbox: then return False."""
        mark = self._last_event_s
        self._stamp(events)
        run = self.run.fold(events)
        self._last_write = self.store.append(self.lease, run, events, taken=taken, final=True)
        if not await _await_outcome(self._last_write, run):
            self._last_event_s = mark
            return False
        self._advance(run, events, taken)
        return True

    def _advance(self, run: Run, events: Sequence[Event], taken: Sequence[int]) -> None:
        before, self.run = self.run, run
        if taken:
            self._untaken_rows = self._untaken_rows.difference(taken)
        for outlet in self.watch:
            outlet.put(before, run, events)
        if self.log.is_info_enabled or type(events[-1]) in WARNED_EVENTS:
            for line in describe_events(run, events):
                if line.event == RUN_ENDED:
                    self._last_line = line
                else:
                    self.log.write(line)
        if self.on_run is not None:
            self.on_run(run)
        if self.on_event is not None:
            self._deferred_changes += _iter_state_changes(before, events)
            if not self.defers_changes:
                self.emit_changes()

    def emit_changes(self) -> None:
        """Pass the deferred state changes to `on_event`, and stop deferring."""
        self.defers_changes = False
        changes, self._deferred_changes = self._deferred_changes, []
        for change in changes:
            if self.on_event is not None:
                self.on_event(change)

    async def flush(self) -> None:
        """Wait until all appends are durable.

        Raises:
            LeaseLostError: if another worker owns the run.
        """
        if self._last_write is not None:
            await self._last_write.wait()
        if self.lease.lost:
            raise lease_lost_error(self.lease)
        if self._last_line is not None:
            self.log.write(self._last_line)
            self._last_line = None

    def check_lease(self) -> None:
        """Check right before an effect that the lease still holds, without asking the store.

        The process may have been suspended for longer than its lease, between a durable append and the effect after it.

        Raises:
            LeaseLostError: if another worker may hold the lease now.
        """
        if self.lease.lost:
            raise lease_lost_error(self.lease)
        if boot_clock() >= self.lease.valid_until:
            raise LeaseLostError(
                f"run {self.run.id!r}: the process was suspended until its lease had expired, so the call that was "
                "about to start was not made: load the run to see whether another worker continues it, or resume it",
            )

    async def read_inbox(self, *, force: bool = False) -> tuple[PostedItem, ...]:
        """Return the inbox rows that are due. Unless `force`, read the store only if it may have some.

        The store reports new rows with appends and renewals, so that the report may be seconds late.

        Raises:
            LeaseLostError: if another worker owns the run. This one could not remove the rows, and would apply them
                again and again.
        """
        if not force and not self.has_unread_inbox and not self._untaken_rows:
            return ()
        newest = self.lease.inbox_head
        rows = await self.store.inbox(self.run.id)
        if self.lease.lost:
            await self.flush()
        self.lease.inbox_read = max([newest, self.lease.inbox_read, *[row.number for row in rows]])
        self._untaken_rows = frozenset([row.number for row in rows])
        self.has_pause_request = any(isinstance(row.item, Pause) for row in rows)
        if all(due_at(row.item) is None for row in rows):
            return rows
        now = self.lease.timers_read_at = await self.store.now()
        return tuple([row for row in rows if (due_at(row.item) or 0.0) <= now])

    async def look_at_inbox(self) -> None:
        """Notice new rows now, instead of with the next append or renewal."""
        numbers = [row.number for row in await self.store.inbox(self.run.id)]
        self.lease.inbox_head = max([self.lease.inbox_head, *numbers])

    def list_orphaned_calls(self) -> frozenset[str]:
        """Return the ids of the calls left open by a crashed worker. Call this before the first step."""
        return frozenset([entry.call.id for entry in self.run.open]) if self.lease.abandoned else frozenset()

    @property
    def has_unread_inbox(self) -> bool:
        """Whether the store has reported inbox rows that were not read here."""
        return self.lease.inbox_head > self.lease.inbox_read

    def release(self) -> PendingWrite:
        """Release the lease after the pending appends, without waiting for either."""
        self.lease.wake = None
        self._is_released = True
        return self.store.release(self.lease)

    async def close(self) -> bool:
        """Release the lease, if not done yet, and wait for it and the appends: shielded, with a time limit.

        After an execution has ended, the next one may take the lease at once. If the event loop no longer runs, this
        does not wait: the store completes its writes itself.

        Returns:
            Whether the wait was completed. If so, check for requests that came too late for the lease holder.
        """
        if self._is_released:
            return False
        released = self.release()
        commits = [released] if self._last_write is None else [self._last_write, released]
        if all(each.is_done for each in commits):
            await self._await_writes(commits)
            return True
        try:
            shield = create_shield()
        except anyio.NoEventLoopError:
            return False
        with shield as scope:
            await self._await_writes(commits)
        if scope.cancelled_caught:
            self.log.error("journal_not_written", seconds=CLOSE_TIMEOUT_S)
        return not scope.cancelled_caught

    async def _await_writes(self, commits: Sequence[PendingWrite]) -> None:
        for commit in commits:
            try:
                await commit.wait()
            except LeaseLostError:
                self.log.warning("lease_lost")  # another worker goes on with the run
            except StoreError as error:
                self.log.error("journal_not_written", error=type(error).__name__)  # noqa: TRY400  a fact, no trace


def create_shield() -> anyio.CancelScope:
    """Return a scope in which a cancelled execution finishes its writes."""
    return anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT_S)


async def _await_outcome(commit: PendingWrite, run: Run) -> bool:
    """Wait for the outcome of the last append: once it was submitted, the run must learn its outcome.

    The store decides how long to wait for an unreachable server. A cancelled execution waits slightly longer.
    """
    try:
        return await commit.wait()
    except anyio.get_cancelled_exc_class():
        if (
            anyio.current_effective_deadline() != -math.inf
        ):  # asyncio's own cancellation, outside of anyio's scopes: it comes once
            raise
    with create_shield():
        return await commit.wait()
    raise StoreError(f"the store did not write the end of run {run.id!r} within {CLOSE_TIMEOUT_S:g} s; resume it")


def _iter_state_changes(run: Run, events: Sequence[Event]) -> Iterator[StateChanged]:
    for event in events:
        before, run = run, run.apply(event)
        if run.state is not before.state:
            yield StateChanged(run_id=run.id, turn=run.turn, state=run.state, event=event)


async def _acquire_lease(
    store: Store, run: Run | str, durability: Durability, ended_runs: EndedRuns, *, must_be_new: bool, takeover: bool
) -> tuple[Lease, Run]:
    if isinstance(run, str):
        lease = await store.lease(run, durability=durability, takeover=takeover)
        return lease, await _load_leased(store, lease, ended_runs)
    if run.version == 0:
        header, lease = await store.create(run.header, durability=durability)
        if header.parent != run.header.parent:  # the same prompt does not make it the same run
            store.release(lease)
            raise id_taken_error(header)
        if lease.version == 0 and (header is run.header or header == run.header):
            return lease, run
        if lease.version == 0 or not must_be_new:
            return lease, await _load_leased(store, lease, ended_runs)
    else:
        lease = await store.lease(run.id, durability=durability)
    if lease.version == run.version:
        return lease, run
    await store.release(lease).wait()
    raise ConflictError(
        f"this is run {run.id!r} at version {run.version}, and its journal is at {lease.version}: "
        f"go on from agent.load({run.id!r})",
    )


def id_taken_error(header: Header) -> ConflictError:
    """Build the error for a start under an id that belongs to a run with another parent, or without one."""
    kind = f"is a child run of {header.parent!r}" if header.parent is not None else "is not a child run"
    return ConflictError(f"run {header.id!r} exists and {kind}, so it cannot be continued here; choose another id")


async def _load_leased(store: Store, lease: Lease, ended_runs: EndedRuns) -> Run:
    """Load a run whose lease is held; release the lease if that fails."""
    try:
        return await load_run(store, lease.run_id, ended_runs=ended_runs)
    except BaseException:
        store.release(lease)
        raise
