"""Places of new runs under limits of runs at once and of queues, over all processes of a store.

Between the check of a limit and the run in the store, other starts see neither. So the starts in progress are in a
record of the store, which is written by compare-and-set: of two processes that find one place, one gets it.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm._lib.concurrency import SharedWork
from agentfsm.core.errors import ConflictError, RunNotFoundError, StoreError
from agentfsm.core.header import short_hash
from agentfsm.core.value import Value
from agentfsm.ports.store import Filter, Store

if TYPE_CHECKING:
    from agentfsm.agents.runs import Runs
    from agentfsm.core.messages import JSON
    from agentfsm.ports.stored import StoreRecord

# Kind and key of the record.
RECORD_KIND: Final = "serve-starts"
RECORD_KEY: Final = "all"
# Seconds after which a start counts as over that no process has ended: longer than stores try to write.
START_S: Final = 60.0
# Starts in progress at once: more would not fit into a record.
MAX_STARTS: Final = 3_000
# Seconds that the record may take to be written after a start has failed.
_LEAVE_TIMEOUT_S: Final = 5.0
# Seconds, at most, before the first attempt to write a record again that another process has written; twice as many
# before each further one, up to 32 times as many.
_BACKOFF_S: Final = 0.002
# Seconds for which a queue is not counted again that has room for all starts since.
BOUND_S: Final = 1.0
_NAME_CHARS: Final = 16


@attrs.frozen(kw_only=True)
class PlaceLimit(Value):
    """A limit under which a run takes a place."""

    name: str
    """Name of the limit, which is reported when there is no place."""

    scope: str
    """Text that is the same for all runs that share the places."""

    where: Filter
    """Matches the runs in the store that have a place; of a queue, if they wait for a worker."""

    is_queue: bool = False
    """Whether only runs that wait for a worker have a place."""

    limit: int | None
    """Number of places. None: any number."""


@attrs.define(eq=False, kw_only=True)
class _Start:
    run_id: str
    limits: Sequence[PlaceLimit]
    is_decided: bool = False
    refused_by: PlaceLimit | None = None


@attrs.define(eq=False, repr=False)
class StartPlaces:
    """Gives places to runs that are being started.

    A store without records is asked as well, but its processes do not know each other's starts.
    """

    runs: Runs

    _waiting: list[_Start] = attrs.field(factory=list, init=False)
    """Starts of this process that are decided with the next write of the record, together."""

    _over: set[str] = attrs.field(factory=set, init=False)
    """Ids of starts of this process that are over, and that the record may still have."""

    _record: StoreRecord | None = attrs.field(default=None, init=False)
    """The record as it was last read or written; None if it has to be read, or there is none."""

    _own: dict[str, Any] = attrs.field(factory=dict, init=False)
    """Stands for the record, if the store keeps none."""

    _bounds: dict[str, tuple[int, int, float]] = attrs.field(factory=dict, init=False)
    """Upper bounds of the runs that wait, by queue; see `_Room`."""

    _decisions: SharedWork = attrs.field(factory=SharedWork, init=False)

    @asynccontextmanager
    async def take(self, run_id: str, limits: Sequence[PlaceLimit]) -> AsyncIterator[PlaceLimit | None]:
        """Take a place under each limit, for the time in which the block starts a run.

        Yields the limit that refuses it, or None. Once the run is in the store, it has its places by itself.

        Args:
            run_id: Id of the run.
            limits: The limits, in the order in which they are looked at.
        """
        start = _Start(run_id=run_id, limits=limits)
        self._waiting.append(start)
        is_started = False
        try:
            await self._decisions.do_until(lambda: start.is_decided, self._decide_waiting)
            yield start.refused_by
            is_started = start.refused_by is None
        finally:
            if start in self._waiting:
                self._waiting.remove(start)
            self._over.add(run_id)
            if not is_started and start.refused_by is None:
                with anyio.move_on_after(_LEAVE_TIMEOUT_S, shield=True), suppress(StoreError):
                    await self._decisions.do_until(lambda: run_id not in self._over, self._decide_waiting)

    async def _decide_waiting(self) -> None:
        """Decide about all starts that wait, with one write of the record."""
        batch, self._waiting = self._waiting, []
        try:
            await self._decide(batch)
        except BaseException:
            self._waiting += [each for each in batch if not each.is_decided]
            raise

    async def _decide(self, batch: Sequence[_Start]) -> None:
        store, attempt = self.runs.store, 0
        is_shared = type(store).write_record is not Store.write_record
        while True:
            is_fresh = attempt > 0 or self._record is None
            if is_fresh:
                self._record = await store.read_record(RECORD_KIND, RECORD_KEY) if is_shared else None
            over = set(self._over)  # before the time is read: their runs were ready by then
            now = await store.now()
            before: Any = self._own if self._record is None else self._record.value
            in_progress = before.get("in_progress", {}).items()
            starts = {key: each for key, each in in_progress if each["until"] > now and key not in over}
            room = _Room(
                runs=self.runs, now=now, starts=starts, admitted=before.get("admitted", 0), bounds=self._bounds
            )
            refusals = {start.run_id: limit for start in batch if (limit := await room.admit(start)) is not None}
            if refusals and not is_fresh:  # the places may be free again
                self._record = None
                continue
            value: dict[str, JSON] = {"admitted": room.admitted, "in_progress": starts}
            try:
                if not is_shared:
                    self._own = value
                elif value != before and (starts or before):
                    revision = 0 if self._record is None else self._record.revision
                    self._record = await store.write_record(RECORD_KIND, RECORD_KEY, value, revision=revision)
                break
            except ConflictError:  # another process was faster
                attempt += 1
                await anyio.sleep(random.random() * _BACKOFF_S * 2 ** min(attempt, 5))  # noqa: S311
            except BaseException:
                self._record = None
                raise
        self._over -= over
        for start in batch:
            start.is_decided, start.refused_by = True, refusals.get(start.run_id)


@attrs.define(eq=False, kw_only=True)
class _Room:
    """The places at one moment: those of runs in the store, and those of the starts in progress."""

    runs: Runs
    now: float
    starts: dict[str, Any]
    """The starts in progress by run, to which the admitted ones are added."""

    admitted: int
    """Number of starts that any process has ever admitted."""

    bounds: dict[str, tuple[int, int, float]]
    """Upper bound of the places taken under a queue, the number of admitted starts then, and the time."""

    _found: dict[str, int | set[str]] = attrs.field(factory=dict, init=False)
    """Number of runs in the store by scope; their ids, once the number has not been enough."""

    async def admit(self, start: _Start) -> PlaceLimit | None:
        """Give a start its places, or return the limit that has none."""
        scopes = [short_hash(each.scope, _NAME_CHARS) for each in start.limits]
        for each, scope in zip(start.limits, scopes, strict=True):
            if len(self.starts) >= MAX_STARTS or not await self._has_place(each, scope):
                return each
        self.starts[start.run_id] = {"until": self.now + START_S, "in": scopes}
        self.admitted += 1
        return None

    async def _has_place(self, limit: PlaceLimit, scope: str) -> bool:
        """Return whether a limit has a place.

        At first the starts in progress and the runs in the store are added up, although some starts may have their run
        there by now. If that is too many, the ids are compared.
        """
        if limit.limit is None:
            return True
        if limit.is_queue and scope in self.bounds:
            bound, admitted, at = self.bounds[scope]
            since = self.admitted - admitted
            if since >= 0 and 0 <= self.now - at < BOUND_S and bound + since < limit.limit:
                return True
        store = self.runs.store
        if scope not in self._found:
            self._found[scope] = await store.count(_at(limit, self.now), limit=limit.limit)
        held = {key for key, each in self.starts.items() if scope in each["in"]}
        found = self._found[scope]
        if isinstance(found, int) and found + len(held) >= limit.limit:
            for key in held:
                if await self._has_begun(key):
                    del self.starts[key]
            held &= self.starts.keys()
            self._found.clear()  # other limits may not have counted the runs whose starts are gone now
            where = _at(limit, await store.now())  # runs that were ready before are ready by then
            found = self._found[scope] = {row.id for row in await store.runs(where, limit=limit.limit)}
        taken = found + len(held) if isinstance(found, int) else len(found | held)
        if limit.is_queue:
            self.bounds[scope] = taken, self.admitted, self.now
        return taken < limit.limit

    async def _has_begun(self, run_id: str) -> bool:
        """Return whether a worker has executed the run. Until then its start may not have released it to them."""
        try:
            header = await self.runs.header(run_id)
            return bool((await self.runs.store.read(run_id, header.forked_at)).events)
        except RunNotFoundError:
            return False


def _at(limit: PlaceLimit, now: float) -> Filter:
    return attrs.evolve(limit.where, ready_by=now) if limit.is_queue else limit.where
