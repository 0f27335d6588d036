"""Follow a run by its journal, independent of the process that executes it.

A follower waits for a notification of the store and also polls, since a store may not be notified of writes by other
processes.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm._lib.concurrency import make_waker
from agentfsm._lib.fairness import StepThrottle
from agentfsm.core.errors import MisuseError, RunNotFoundError
from agentfsm.core.events import Event
from agentfsm.core.machine import TABLE
from agentfsm.core.value import Value
from agentfsm.journal.load import EndedRuns, is_wait_over, load_run
from agentfsm.journal.run_status import read_status
from agentfsm.ports.store import Store

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run

_log = logging.getLogger("agentfsm")

# Seconds without an event after which `wait` looks whether a process executes the run.
STANDSTILL_S: Final = 60.0
# Seconds between two polls while the store's notifications work, or while nothing happens.
POLL_S: Final = 1.0
# Seconds until the next poll after one that found events without a notification. Each empty poll doubles it.
QUICK_POLL_S: Final = 0.1

# Event types that end a run: those that lead to a state without further transitions.
FINAL_EVENTS: Final = frozenset(kind for row in TABLE.values() for kind, state in row.items() if not TABLE[state])


@attrs.frozen(kw_only=True)
class JournalEvent(Value):
    """An event of a run's journal, and its position there."""

    run_id: str
    """Id of the run."""

    version: int
    """Version of the run after the event, from 1: `agent.load(run_id, at=version)` returns that run."""

    event: Event
    """The event itself."""

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values: `run_id`, `version`, and under `event` its form in the journal."""
        return {"run_id": self.run_id, "version": self.version, "event": self.event.to_dict()}


class _WakeSignal:
    """Signal set by the store from any thread. Separate from the tail, which the subscription must not keep alive."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = anyio.Event()

    def set(self) -> None:
        self.event.set()


@attrs.define(eq=False, repr=False)
class JournalTail:
    """The end of a journal: returns appended events as they arrive."""

    store: Store
    run_id: str
    version: int
    """Version of the latest event returned."""

    header: Header | None = None
    """Header of the run, set by the first poll. It detects that the id was reused for another run."""

    poll_s: float = attrs.field(factory=lambda: POLL_S, init=False)
    """Seconds until the next poll."""

    _wake_signal: _WakeSignal = attrs.field(factory=_WakeSignal, init=False)
    _subscription: weakref.finalize[..., JournalTail] | None = attrs.field(default=None, init=False)
    """Subscription at the store; ends with `close` or when this object is collected."""

    async def poll(self) -> Sequence[Event]:
        """Return the events after the latest one, possibly none.

        Raises:
            RunNotFoundError: if the run does not exist, or was deleted.
        """
        stored = await self.store.read(self.run_id, self.version)
        if self.header is None:
            self.header = stored.header
        elif stored.header != self.header:
            raise RunNotFoundError(
                f"run {self.run_id!r} was deleted while it was followed, and its id is another run's now: follow it "
                "anew to see that one"
            )
        self.version += len(stored.events)
        return stored.events

    async def wait(self) -> Sequence[Event]:
        """Return the events after the latest one, as soon as there are any. A cancelled wait loses no events.

        Raises:
            RunNotFoundError: if the run does not exist, or was deleted.
        """
        if self._subscription is None:
            self.subscribe()
            self._wake_signal.set()  # what was appended before is not announced
        while True:
            with anyio.move_on_after(self.poll_s):
                await self._wake_signal.event.wait()
            was_woken = self._wake_signal.event.is_set()
            self._wake_signal.event = anyio.Event()  # before the poll: a later append sets this event
            try:
                events = await self.poll()
            except BaseException:
                self._wake_signal.set()  # the next wait polls at once
                raise
            if events:
                self.poll_s = POLL_S if was_woken else QUICK_POLL_S
                return events
            self.poll_s = min(POLL_S, 2 * self.poll_s)

    def subscribe(self) -> None:
        """Hear of appends from now on. If the journal is read after that, `wait` need not begin with a read."""
        self._subscription = weakref.finalize(
            self, self.store.subscribe(f"run:{self.run_id}", make_waker(self._wake_signal.set))
        )
        self._subscription.atexit = False

    def close(self) -> None:
        """End the subscription."""
        if self._subscription is not None:
            self._subscription()
            self._subscription = None


@attrs.define(eq=False, repr=False)
class JournalFollower(AsyncIterator[JournalEvent]):
    """Iterator over the events of a run after a version, until the run is over. `Agent.events` returns it."""

    store: Store
    run_id: str
    after: int
    on_read: Callable[[], Awaitable[object]] | None = None
    """Callback for events that were read, before they are returned; None for none."""

    _tail: JournalTail | None = attrs.field(default=None, init=False)
    """Tail of the journal, created when the first event is requested."""

    _ready: deque[JournalEvent] = attrs.field(factory=deque, init=False)
    _is_over: bool = attrs.field(default=False, init=False)
    """Whether the latest event has ended the run."""

    async def __anext__(self) -> JournalEvent:
        try:
            await StepThrottle.enter()  # events that are there already come without a wait
            while not self._ready and not self._is_over:
                await self._fetch()
        except BaseException:
            self._close()
            raise
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def _fetch(self) -> None:
        if self._tail is not None:
            return await self._enqueue(self._tail, await self._tail.wait())
        # Start one event earlier: that proves that the version exists, and shows whether the run is already over.
        tail = JournalTail(self.store, self.run_id, max(0, self.after - 1))
        events = await tail.poll()
        if self.after and not events:
            raise MisuseError(f"run {self.run_id!r} has no version {self.after} yet: give after= a version that it has")
        self._tail = tail
        return await self._enqueue(tail, events)

    async def _enqueue(self, tail: JournalTail, events: Sequence[Event]) -> None:
        if self.on_read is not None:
            await self.on_read()
        first = tail.version - len(events) + 1
        placed = [JournalEvent(run_id=self.run_id, version=n, event=each) for n, each in enumerate(events, first)]
        self._ready += [each for each in placed if each.version > self.after]
        if events and type(events[-1]) in FINAL_EVENTS:
            self._is_over = True
            self._close()

    def _close(self) -> None:
        if self._tail is not None:
            self._tail.close()


async def wait_until_blocked(store: Store, run_id: str, ended_runs: EndedRuns) -> Run:
    """Return a run once it is over, or waits for an input that has not arrived.

    Args:
        store: The store of the run.
        run_id: The id of the run.
        ended_runs: Runs already loaded, as in `load_predecessor`.

    Raises:
        RunNotFoundError: if the run does not exist, or was deleted.
    """
    tail = JournalTail(store, run_id, 0)
    tail.subscribe()
    is_told = False
    try:
        run = await load_run(store, run_id, ended_runs=ended_runs)
        tail.version, tail.header = run.version, run.header
        while not run.is_over and not await is_blocked(store, run):
            with anyio.move_on_after(math.inf if is_told else STANDSTILL_S) as scope:
                run = run.fold(await tail.wait())
            if scope.cancelled_caught and (why := (await read_status(store, run))[1]):
                _log.warning("run %s is waited for and stands still: %s", run_id, why)
                is_told = True
    finally:
        tail.close()
    return run


async def is_blocked(store: Store, run: Run) -> bool:
    """Return whether a run waits for an input that has not arrived. If it has, the run's worker continues.

    So it does with a run that waits for tasks only.
    """
    return run.is_waiting and not run.awaits_tasks and not await is_wait_over(store, run.pending[0], await store.now())
