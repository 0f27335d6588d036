"""Load runs from their journals: events folded into a run, with the runs that it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from anyio.lowlevel import checkpoint

from agentfsm.core.errors import MisuseError, RunNotFoundError
from agentfsm.core.inbox import Cancel, Decision, Input, PostedItem
from agentfsm.core.pending import Pending, PendingKind
from agentfsm.core.run import Run, begin_run
from agentfsm.ports.store import Store

if TYPE_CHECKING:
    from agentfsm.core.events import Event
    from agentfsm.core.header import Header
    from agentfsm.ports.stored import StoredRun

# Ended runs, by id.
EndedRuns: TypeAlias = Mapping[str, Run[Any]]
NO_RUNS: Final[EndedRuns] = {}
# Events folded without yielding to the event loop: 2 to 4 ms.
FOLD_BATCH: Final = 1_000
# Version to read after if only the header is needed.
_AFTER_ALL: Final = 2**31


async def load_run(store: Store, run_id: str, at: int | None = None, ended_runs: EndedRuns = NO_RUNS) -> Run:
    """Load a run from its journal.

    Args:
        store: The store of the run.
        run_id: The id of the run.
        at: The version to stop at; None for the latest.
        ended_runs: Runs already loaded, as in `load_predecessor`.
    """
    stored = await store.read(run_id)
    events = stored.events if at is None else first_events(stored, at)
    return await fold_events(begin_run(stored.header, await load_predecessor(store, stored.header, ended_runs)), events)


async def fold_events(run: Run, events: Sequence[Event]) -> Run:
    """Fold events into a run in batches, yielding to the event loop in between, also for a very long run."""
    for start in range(0, len(events), FOLD_BATCH):
        if start:
            await checkpoint()
        run = run.fold(events[start : start + FOLD_BATCH])
    return run


def first_events(stored: StoredRun, at: int) -> Sequence[Event]:
    """Return the first events of a journal, which make version `at`.

    Raises:
        MisuseError: if the journal has no such version.
    """
    newest = len(stored.events)
    if not isinstance(at, int) or not 0 <= at <= newest:
        raise MisuseError(f"run {stored.header.id!r} has no version {at!r}: its versions are 0 to {newest}")
    return stored.events[:at]


async def read_header(store: Store, run_id: str) -> Header:
    """Return a run's header, without its events."""
    return (await store.read(run_id, after=_AFTER_ALL)).header


async def read_previous_header(store: Store, header: Header) -> Header | None:
    """Return the header of the run that a run continues; None if there is none, or it was removed."""
    if header.after is None:
        return None
    try:
        return await read_header(store, header.after)
    except RunNotFoundError:
        return None


async def read_root_agent(store: Store, header: Header) -> str:
    """Return the name of the agent whose run began the work of a run, as far up as its callers are in the store."""
    while header.parent is not None:
        try:
            header = await read_header(store, header.parent)
        except RunNotFoundError:
            break
    return header.agent


async def load_predecessor(store: Store, header: Header, ended_runs: EndedRuns = NO_RUNS) -> Run | None:
    """Return the run that another continues, with its own predecessors folded in; None if there is none.

    Args:
        store: The store of the runs.
        header: The header of the run that continues.
        ended_runs: Runs already loaded, so that a conversation need not be read from its beginning each time.
    """
    chain: list[StoredRun] = []
    run: Run | None = None
    while header.after is not None and (run := await _check_cached(store, ended_runs.get(header.after))) is None:
        chain.append(await store.read(header.after))
        header = chain[-1].header
    for stored in reversed(chain):
        run = await fold_events(begin_run(stored.header, run), stored.events)
    return run


async def _check_cached(store: Store, known: Run | None) -> Run | None:
    """Return the cached run, unless its id was reused for another run."""
    is_same = known is not None and await read_header(store, known.id) == known.header
    return known if is_same else None


async def is_wait_over(store: Store, item: Pending, now: float) -> bool:
    """Return whether an inbox row ends the wait for this item, or its time is up, `now` by the store's clock."""
    if item.expires_at is not None and now >= item.expires_at:
        return True
    try:
        # Read the inbox first: rows consumed by then are in the journal.
        if any(_ends_wait(row, item) for row in await store.inbox(item.run_id)):
            return True
        return item not in (await load_run(store, item.run_id)).pending  # another worker has continued it
    except RunNotFoundError:  # deleted: the parent run's call reports it
        return True


def _ends_wait(row: PostedItem, item: Pending) -> bool:
    """Return whether a row ends the wait."""
    if isinstance(row.item, Decision):
        return row.item.call_id == item.call_id
    return isinstance(row.item, Cancel) or (isinstance(row.item, Input) and item.kind is PendingKind.INPUT)
