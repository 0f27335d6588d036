"""The journal of a run that is being driven: its lease, ordered appends, and the wait for the disk.

An append returns at once and may overlap the model call; `flush` waits until all of them are durable. Whoever is about
to cause an effect flushes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self

import anyio
import attrs

from agentfsm.core.errors import ConflictError, LeaseLostError, MisuseError, StoreError
from agentfsm.core.run import Run, begin
from agentfsm.engine.log import Facts
from agentfsm.engine.stream import Listener, StateChanged
from agentfsm.ports import Clock, Commit, Lease, Store
from agentfsm.threads import waker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentfsm.core.events import Event
    from agentfsm.core.inbox import Posted
    from agentfsm.core.messages import Message
    from agentfsm.ports import Stored

_put = object.__setattr__

SETTLE_S: Final = 5.0
# Seconds that a driving call which is cut off may take to write what is under way.


async def load(store: Store, run_id: str, at: int | None = None) -> Run:
    """Fold a run from its journal.

    Args:
        store: Where it lives.
        run_id: Its id.
        at: The version to stop at; None for the newest.
    """
    stored = await store.read(run_id)
    if at is not None and not 0 <= at <= len(stored.events):
        raise MisuseError(f"run {run_id!r} has the versions 0 to {len(stored.events)}, and no version {at}")
    run = begin(stored.header, await prior_of(store, stored.header.after))
    return run.fold(stored.events if at is None else stored.events[:at])


async def prior_of(store: Store, run_id: str | None) -> tuple[Message, ...]:
    """Return the messages of the run that another goes on from, with all that it went on from itself."""
    chain: list[Stored] = []
    while run_id is not None:
        chain.append(await store.read(run_id))
        run_id = chain[-1].header.after
    messages: tuple[Message, ...] = ()
    for stored in reversed(chain):
        messages = begin(stored.header, messages).fold(stored.events).messages
    return messages


@attrs.define(eq=False, kw_only=True)
class Journal:
    """One run under one lease, from the beginning of a driving call to its end."""

    store: Store
    lease: Lease
    run: Run
    clock: Clock
    listen: Listener | None = None
    see: Callable[[Run], None] | None = None
    # Told of each new state of the run.
    log: Facts
    struck: int = 0
    # The newest inbox number up to which everything was taken in.
    scope: anyio.CancelScope | None = None
    # Around the driving call; cancelled when somebody asks for the run's end, or takes it over.
    _last: Commit | None = None
    _mark: float = 0.0
    # The clock's reading at the newest event.
    _epoch: float = 0.0
    # What makes a reading of the clock a date; taken once, so that dates do not jump within a driving call.

    @classmethod
    async def open(
        cls,
        store: Store,
        run: Run | str,
        clock: Clock,
        listen: Listener | None = None,
        see: Callable[[Run], None] | None = None,
        *,
        exact: bool = False,
    ) -> Self:
        """Take the lease of a run.

        Args:
            store: Where it lives.
            run: A run at version 0 is created, unless its id is known; a later one must be the newest; of an id the
                newest is loaded.
            clock: For the times in the journal.
            listen: Told of each change of state.
            see: Given each new value of the run.
            exact: Whether a run at version 0 must be new, too.

        Raises:
            ConflictError: when the run has moved on, or somebody else drives it.
        """
        lease, run = await _opened(store, run, exact=exact)
        log = Facts(run.id, run.header.agent)
        journal = cls(store=store, lease=lease, run=run, clock=clock, listen=listen, see=see, log=log)
        journal._mark = clock.monotonic()
        journal._epoch = clock.now() - journal._mark
        lease.wake = waker(journal._interrupt)
        return journal

    def _interrupt(self) -> None:
        if self.scope is not None:
            self.scope.cancel()

    @property
    def used_s(self) -> float:
        """Active seconds of the run, up to this moment."""
        return self.run.duration_s + self.clock.monotonic() - self._mark

    def _stamp(self, events: Sequence[Event]) -> None:
        """Write the time into events that nobody else has seen yet: a copy would cost three times their making."""
        now = self.clock.monotonic()
        took_s, self._mark = now - self._mark, now
        at = self._epoch + now
        for event in events:
            _put(event, "at", at)
            _put(event, "took_s", took_s)
            took_s = 0.0

    def commit(self, *events: Event, taken: Sequence[int] = ()) -> None:
        """Stamp events, apply them and append them, in one transaction; returns before they are durable.

        Raises:
            IllegalTransitionError: when one does not fit; nothing is written.
        """
        self._stamp(events)
        run = self.run.fold(events)
        self._last = self.store.append(self.lease, run, events, taken=taken)
        self._advance(run, events)

    async def conclude(self, *events: Event, taken: Sequence[int] = ()) -> bool:
        """Append the last events of a run, unless something has arrived in its inbox: then return False."""
        mark = self._mark
        self._stamp(events)
        run = self.run.fold(events)
        self._last = self.store.append(self.lease, run, events, taken=taken, final=True)
        if not await _outcome(self._last, run):
            self._mark = mark
            return False
        self._advance(run, events)
        return True

    def _advance(self, run: Run, events: Sequence[Event]) -> None:
        before, self.run = self.run, run
        if self.see is not None:
            self.see(run)
        if self.listen is not None:
            for change in _changes(before, events):
                self.listen(change)

    async def flush(self) -> None:
        """Wait until everything appended is durable.

        Raises:
            LeaseLostError: when another worker owns the run.
        """
        if self._last is not None:
            await self._last.wait()
        if self.lease.lost:
            raise LeaseLostError(f"run {self.run.id!r} was taken over by another worker")

    async def rows(self) -> tuple[Posted, ...]:
        """Return what waits in the inbox; asks the store only when it has told of something new."""
        return await self.store.inbox(self.run.id) if self.lease.newest > self.struck else ()

    def close(self) -> None:
        """Give the lease back; it goes behind the appends that are under way."""
        self.lease.wake = None
        self.store.release(self.lease)

    async def settle(self) -> None:
        """Wait for what is under way, when the driving call is cut off: shielded from cancellation, bounded in time."""
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + SETTLE_S) as scope:
            try:
                if self._last is not None:
                    await self._last.wait()
            except StoreError as error:
                self.log.error("journal_not_written", error=type(error).__name__)  # noqa: TRY400  a fact, no trace
        if scope.cancelled_caught:
            self.log.error("journal_not_written", seconds=SETTLE_S)


async def _outcome(commit: Commit, run: Run) -> bool:
    """Wait for the outcome of the last append, shielded: once it is on its way, the run must know what became of it."""
    if commit.is_settled:
        return await commit.wait()
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + SETTLE_S):
        return await commit.wait()
    raise StoreError(f"the store did not write the end of run {run.id!r} within {SETTLE_S:g} s; resume it")


def _changes(run: Run, events: Sequence[Event]) -> Iterator[StateChanged]:
    for event in events:
        before, run = run, run.apply(event)
        if run.state is not before.state:
            yield StateChanged(run_id=run.id, turn=run.turn, state=run.state, event=type(event).__name__)


async def _opened(store: Store, run: Run | str, *, exact: bool) -> tuple[Lease, Run]:
    if isinstance(run, str):
        lease = await store.lease(run)
        return lease, await _under(store, lease)
    if run.version == 0:
        header, lease = await store.create(run.header)
        if lease.version == 0 and header == run.header:
            return lease, run
        if lease.version == 0 or not exact:
            return lease, await _under(store, lease)
    else:
        lease = await store.lease(run.id)
    if lease.version == run.version:
        return lease, run
    store.release(lease)
    raise ConflictError(
        f"this is run {run.id!r} at version {run.version}, and its journal is at {lease.version}: "
        f"go on from agent.load({run.id!r})",
    )


async def _under(store: Store, lease: Lease) -> Run:
    """Load a run whose lease is held; where that fails, the lease is given back."""
    try:
        return await load(store, lease.run_id)
    except BaseException:
        store.release(lease)
        raise
