"""The journal of a run that is being driven: its lease, ordered appends, and the wait for the disk.

An append returns at once and may overlap the model call; `flush` waits until all of them are durable. Whoever is about
to cause an effect flushes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self

import anyio
import attrs

from agentfsm.core.errors import ConflictError, LeaseLostError, StoreError
from agentfsm.core.run import Run, begin
from agentfsm.engine.log import Facts
from agentfsm.engine.stream import Listener, StateChanged
from agentfsm.ports import Clock, Commit, Lease, Store
from agentfsm.threads import waker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentfsm.core.events import Event, Stamp
    from agentfsm.core.inbox import Posted
    from agentfsm.core.messages import Message
    from agentfsm.ports import Stored

CLOSE_S: Final = 5.0
# Seconds that the end of a driving call may take to write what is under way and to give the lease back.


async def load(store: Store, run_id: str, at: int | None = None) -> Run:
    """Fold a run from its journal.

    Args:
        store: Where it lives.
        run_id: Its id.
        at: The version to stop at; None for the newest.
    """
    stored = await store.read(run_id)
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
    seen: int = 0
    # The newest inbox number that was looked at.
    scope: anyio.CancelScope | None = None
    # Around the driving call; cancelled when somebody asks for the run's end, or takes it over.
    _last: Commit | None = None
    _mark: float = 0.0

    @classmethod
    async def open(
        cls,
        store: Store,
        run: Run | str,
        clock: Clock,
        listen: Listener | None = None,
        see: Callable[[Run], None] | None = None,
    ) -> Self:
        """Take the lease of a run.

        Args:
            store: Where it lives.
            run: A run at version 0 is created, unless its id is known; a later one must be the newest; of an id the
                newest is loaded.
            clock: For the times in the journal.
            listen: Told of each change of state.
            see: Given each new value of the run.

        Raises:
            ConflictError: when the run has moved on, or somebody else drives it.
        """
        lease, run = await _opened(store, run)
        log = Facts(run.id, run.header.agent)
        journal = cls(store=store, lease=lease, run=run, clock=clock, listen=listen, see=see, log=log)
        journal._mark = clock.monotonic()
        lease.wake = waker(journal._interrupt)
        return journal

    def _interrupt(self) -> None:
        if self.scope is not None:
            self.scope.cancel()

    def stamp(self) -> Stamp:
        """Return the time for an event: now, and the active seconds since the event before."""
        now = self.clock.monotonic()
        took_s, self._mark = now - self._mark, now
        return {"at": round(self.clock.now(), 3), "took_s": took_s}

    def commit(self, *events: Event, taken: Sequence[int] = ()) -> None:
        """Apply events and append them, in one transaction; returns before they are durable.

        Raises:
            IllegalTransitionError: when one does not fit; nothing is written.
        """
        run = self.run
        for event in events:
            run = run.apply(event)
        self._last = self.store.append(self.lease, run, events, taken=taken)
        if self.see is None and self.listen is None:
            self.run = run
        else:
            self._advance(run, events)

    async def conclude(self, *events: Event, taken: Sequence[int] = ()) -> bool:
        """Append the last events of a run, unless something has arrived in its inbox: then return False."""
        run = self.run.fold(events)
        self._last = self.store.append(self.lease, run, events, taken=taken, final=True)
        with anyio.CancelScope(shield=True):  # once it is on its way, the run must know what became of it
            written = await self._last.wait()
        if not written:
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
        if self.lease.newest <= self.seen:
            return ()
        rows = await self.store.inbox(self.run.id)
        self.seen = max((row.number for row in rows), default=self.lease.newest)
        return rows

    async def close(self) -> None:
        """Write what is under way and give the lease back; shielded from cancellation, and bounded in time."""
        self.lease.wake = None
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_S) as scope:
            try:
                if self._last is not None:
                    await self._last.wait()
            except StoreError as error:
                self.log.error("journal_not_written", error=type(error).__name__)  # noqa: TRY400  a fact, no trace
            await self.store.release(self.lease)
        if scope.cancelled_caught:
            self.log.error("journal_not_closed", seconds=CLOSE_S)


def _changes(run: Run, events: Sequence[Event]) -> Iterator[StateChanged]:
    for event in events:
        before, run = run, run.apply(event)
        if run.state is not before.state:
            yield StateChanged(run_id=run.id, turn=run.turn, state=run.state, event=type(event).__name__)


async def _opened(store: Store, run: Run | str) -> tuple[Lease, Run]:
    if isinstance(run, str):
        lease = await store.lease(run)
        return lease, await _under(store, lease)
    if run.version == 0:
        header, lease = await store.create(run.header)
        return lease, run if lease.version == 0 and header == run.header else await _under(store, lease)
    lease = await store.lease(run.id)
    if lease.version == run.version:
        return lease, run
    await store.release(lease)
    raise ConflictError(
        f"this is run {run.id!r} at version {run.version}, and its journal is at {lease.version}: "
        f"go on from agent.load({run.id!r})",
    )


async def _under(store: Store, lease: Lease) -> Run:
    """Load a run whose lease is held; where that fails, the lease is given back."""
    try:
        return await load(store, lease.run_id)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await store.release(lease)
        raise
