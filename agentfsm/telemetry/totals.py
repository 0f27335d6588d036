"""Running totals of the runs in a store: what they cost and how they did, by hour, kept as records beside them.

A follower adds up each event of each journal once. Costs and measurements are those of `iter_costs` and `measure_run`,
as integers, so that the sums do not depend on the order in which runs are counted.

Exactly once, whenever a process dies or two of them count: work is done in numbered batches, one after the other.

1. Read the record `state`, and finish its batch: add the batch to each cell of the totals that has not got its number
   yet, then confirm to the store the versions of the runs in it. Both may be repeated.
2. Only then ask the store for unread runs: it names for each the version up to which it was read.
3. Measure them, and replace `state` by the next batch, if nobody else has done so since step 1. This write decides:
   it contains the sums and the versions. Then go to 1.

So a batch is complete before the next is decided on, and the versions in step 2 are those after all batches. A process
that was overtaken fails in step 3, or meets cells that have the number already. The lease of the follower only saves
work. A run that is executed is counted before its release; how far is kept in records (`open`) until it is over.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import anyio
import attrs

from agentfsm._lib.newest import Newest
from agentfsm.core.errors import (
    AgentError,
    ConflictError,
    CorruptError,
    MisuseError,
    RunNotFoundError,
    TooNewError,
    first_error,
)
from agentfsm.core.events import Accepted, AnswerGiven, Failed
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value
from agentfsm.journal.cache_losses import list_cache_losses
from agentfsm.journal.load import read_previous_header, read_root_agent
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.followers import BATCH, FOLLOWER_LEASE_S
from agentfsm.ports.store import Filter, Store
from agentfsm.telemetry import measurements as m

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.ports.stored import Feedback, StoredRun, StoreRecord

Level: TypeAlias = Literal[
    "hour",
    "day",
    "month",
    "all",
    "steps_hour",
    "calls_hour",
    "cost_hour",
    "cost_day",
    "user_hour",
    "user_day",
    "user_month",
    "user_year",
]
"""Cells of totals: measurements without tenants and callers, and in one cell for each agent over all time (its
counters, of production alone); those that alerts ask for, in hours by steps of 5 minutes, without releases, the calls
of tools apart; costs without users; and costs with users, in days, months and years without releases.
"""

Cell: TypeAlias = dict[str, dict[str, int]]
"""Sums of one cell: by series (a JSON array of its metric and labels), then by field."""

KIND: Final = "totals"
# Levels that have the same sums, from the shortest time on; and those that are each added up from the one before.
MEASURED: Final[tuple[Level, ...]] = ("hour", "day", "month")
STEPS: Final[tuple[Level, ...]] = ("steps_hour",)
CALLS: Final[tuple[Level, ...]] = ("calls_hour",)
COSTS: Final[tuple[Level, ...]] = ("cost_hour", "cost_day")
USER_COSTS: Final[tuple[Level, ...]] = ("user_hour", "user_day", "user_month", "user_year")
# Levels that say how many events they have, so that a rebuild knows which hours have lost some.
SHORTEST: Final = frozenset({"hour", "steps_hour", "cost_hour", "user_hour"})
_CHAINS: Final[tuple[tuple[Level, ...], ...]] = ((*MEASURED, "all"), STEPS, CALLS, COSTS, USER_COSTS)
HOUR_S: Final = 3_600
DAY_S: Final = 86_400
# Part of an hour that measurements are kept apart for, seconds: the interval of alerts.
SLOT_S: Final = 300
SLOTS: Final = HOUR_S // SLOT_S
# Sums are whole numbers of billionths of the unit of a metric, so that their order has no influence.
UNIT: Final = 1_000_000_000
# Ratio of two neighbouring bounds of a distribution: a percentile is off by 5 % at most.
RATIO: Final = 1.1
# Seconds between two looks for changes, and between two looks for events of runs that are executed. A run is counted
# there once it is as old, so no event is older than twice this time when it is counted.
POLL_S: Final = 5.0
ACTIVE_S: Final = 150.0
# Events of a batch, which has to fit into a record.
_MAX_EVENTS: Final = 2_000
# Records with the versions of open runs: 20,000 runs fit into each.
_SHARDS: Final = 64
# Records that some levels have for an hour, day, month or year: 5,000 series of agents, or 9,000 cells of users, fit
# into each. Fewer are faster to read, and more to write.
_PARTS: Final[Mapping[Level, int]] = {
    "steps_hour": 4,
    "calls_hour": 4,
    "user_hour": 32,
    "user_day": 128,
    "user_month": 512,
    "user_year": 512,
}
# Time after which the next hour, day, month or year has begun, and not the one after it, seconds.
_LENGTHS: Final = {"hour": HOUR_S, "day": DAY_S, "month": 32 * DAY_S, "year": 366 * DAY_S}
# Records of a page of cells.
_MIN_PAGE: Final = 10
_MAX_PAGE: Final = 1_000
# Cells that are kept in memory, and that are written at once.
_MAX_CACHED: Final = 3_000
_WRITERS: Final = 50
EVENTS: Final = "events"
# Series of a cell over all time; further ones of a metric are added to one whose labels beside the agent are "(other)".
MAX_SERIES: Final = 2_000
OTHER: Final = "(other)"
# Field of a series of a cell over all time: when it began, seconds since 1970; 0 if with the totals.
BORN: Final = "born"
USAGE: Final = "usage"
LOST: Final = "lost"
_COST_SERIES: Final = (USAGE, LOST)
# Metrics of the alerts beside the calls of tools.
_STEP_METRICS: Final = frozenset(
    each.name for each in (m.RUNS, m.RUN_TURNS, m.RUN_DURATION, m.RUN_TOKENS, m.COST, m.RATINGS, m.OTHER_MODELS)
)
_FINAL: Final = (AnswerGiven, Accepted, Failed)

_log = logging.getLogger("agentfsm.telemetry")


class Subject(NamedTuple):
    """What a cell is about."""

    at: int
    """Beginning of the hour or the day, seconds since 1970."""

    agent: str
    root: str
    """Agent of the run that began the work: for a sub-agent that of its caller, else the same."""

    tenant: str
    release: str
    purpose: str
    """Purpose of the run, such as "eval"; empty for production."""

    user: str = ""


@attrs.frozen(kw_only=True)
class TotalsStatus(Value):
    """How far the totals of a store are."""

    generation: str
    """Name of the totals; another one after each rebuild."""

    is_whole: bool
    """Whether all runs that there were at the beginning have been counted."""

    uncounted: int
    """Number of runs that were released since they were counted, whether or not they have new events."""

    unreadable: int
    """Number of runs whose journals could not be read; what they have is missing."""

    pruned_before: float
    """Time before which runs were removed, seconds since 1970: totals of these hours are kept. 0 if none were."""


def can_keep_totals(store: Store) -> bool:
    """Return whether a store has the followers and records that totals need."""
    inherited = (Store.add_follower, Store.write_record)
    return not any(getattr(type(store), each.__name__, None) is each for each in inherited)


async def read_status(store: Store) -> TotalsStatus | None:
    """Return how far the totals of a store are; None if it keeps none, or their follower was dropped."""
    if not can_keep_totals(store) or (root := await store.read_record(KIND, "root")) is None:
        return None
    described = _as_object(root.value)
    generation: str = described["generation"]
    state = await store.read_record(KIND, f"{generation}|state")
    lag = {each.name: each.lag for each in await store.followers()}.get(name_follower(generation))
    if lag is None:
        return None
    written = {} if state is None else _as_object(state.value)
    unreadable = await store.read_record(KIND, _name_unreadable(generation))
    return TotalsStatus(
        generation=generation,
        is_whole=written.get("whole", False),
        uncounted=lag,
        unreadable=0 if unreadable is None else len(_as_object(unreadable.value)["runs"]),
        pruned_before=described["pruned_before"],
    )


class CellTable(NamedTuple):
    """The cells of a record as columns, with a row for each series of a cell: as they are stored, but for the texts."""

    at: int
    """Beginning of the time, seconds since 1970."""

    agents: list[str]
    roots: list[str]
    tenants: list[str]
    releases: list[str]
    purposes: list[str]
    users: list[str]
    series: list[str]
    fields: dict[str, list[int]]
    """Values by the name of the field; 0 for a row without it."""

    @classmethod
    def read(cls, value: object) -> CellTable:
        """Return the table of a record."""
        stored = _as_object(value)
        texts, fields = stored.get("texts", ()), stored.get("fields", {})
        columns = [[texts[index] for index in column] for column in stored.get("columns", [()] * 7)]
        agents, roots, tenants, releases, purposes, users, series = columns
        return cls(stored.get("at", 0), agents, roots, tenants, releases, purposes, users, series, fields)

    def to_cells(self) -> dict[Subject, Cell]:
        """Return the cells."""
        cells: dict[Subject, Cell] = {}
        subjects = zip(self.agents, self.roots, self.tenants, self.releases, self.purposes, self.users, strict=True)
        for row, (names, series) in enumerate(zip(subjects, self.series, strict=True)):
            fields = {name: column[row] for name, column in self.fields.items() if column[row]}
            cells.setdefault(Subject(self.at, *names), {})[series] = fields
        return cells


def _pack_cells(cells: Mapping[Subject, Cell]) -> dict[str, Any]:
    """Return what a record has of a table."""
    rows = [(of, series, fields) for of, cell in cells.items() for series, fields in cell.items()]
    texts = dict[str, int]()
    columns: list[list[int]] = [[] for _ in range(7)]
    for of, series, _ in rows:
        for column, text in zip(columns, (*of[1:], series), strict=True):
            column.append(texts.setdefault(text, len(texts)))
    names = dict.fromkeys(name for _, _, fields in rows for name in fields)
    values = {name: [fields.get(name, 0) for _, _, fields in rows] for name in names}
    return {"at": next(iter(cells)).at, "texts": [*texts], "columns": columns, "fields": values}


@attrs.define(eq=False)
class RecordIterator(AsyncIterator["StoreRecord"]):
    """Iterator over records of cells, level by level, oldest first. It is safe to break out of the loop at any time."""

    store: Store
    spans: list[tuple[str, float, float]]
    """Levels that are read one after the other: the beginning of the keys, and the first and the end of the times."""

    _records: deque[StoreRecord] = attrs.field(factory=deque, init=False)
    _after: str = attrs.field(default="", init=False)
    _limit: int = attrs.field(default=_MIN_PAGE, init=False)
    """Records of the next page: few at first, for those who want the first cell, or the hours of a day."""

    async def __anext__(self) -> StoreRecord:
        while not self._records:
            if not self.spans:
                raise StopAsyncIteration
            prefix, since, until = self.spans[0]
            after = self._after or f"{prefix}{max(0, int(since)):012d}|"
            page = await self.store.list_records(KIND, prefix=prefix, after=after, limit=self._limit)
            self._after = page[-1].key if len(page) == self._limit else ""
            self._limit = min(4 * self._limit, _MAX_PAGE)
            for record in page:
                if int(record.key[len(prefix) :].partition("|")[0]) >= until:
                    self._after = ""
                    break
                self._records.append(record)
            if not self._after:
                self.spans, self._limit = self.spans[1:], _MIN_PAGE
        return self._records.popleft()


def iter_level(store: Store, generation: str, level: Level, since: float = 0.0) -> RecordIterator:
    """Return the records of a level that begin at a time or later."""
    return RecordIterator(store, [(f"{generation}|{level}|", since, math.inf)])


def iter_span(store: Store, generation: str, levels: Sequence[Level], since: float) -> RecordIterator:
    """Return the records from an hour on, each event once: hours until a day, month or year begins, and so on.

    Args:
        store: The store.
        generation: Name of the totals.
        levels: Levels with the same sums, from the shortest time on.
        since: Beginning of an hour, seconds since 1970; 0 for all.
    """
    spans: list[tuple[str, float, float]] = []
    for level, longer in zip_longest(levels, levels[1:]):
        until = math.inf
        if longer is not None and (until := _find_begin(longer, since)) < since:
            until = _find_begin(longer, until + _LENGTHS[longer.rpartition("_")[2]])
        spans.append((f"{generation}|{level}|", since, until))
        since = until
    return RecordIterator(store, [each for each in spans if each[1] < each[2]])


async def find_first(
    store: Store, generation: str, levels: Sequence[Level], fits: Callable[[Subject], bool]
) -> float | None:
    """Return the beginning of the first hour with a cell that fits; None if there is none."""
    first: float | None = None
    for level in reversed(levels):  # each time in the one before
        async for record in iter_level(store, generation, level, first or 0.0):
            if (found := next((of for of in read_cells(record.value) if fits(of)), None)) is not None:
                first = found.at
                break
        else:
            return None
    return first


def _find_begin(level: Level, at: float) -> int:
    """Return the beginning of the hour, day, month or year of a level that a time is in."""
    name = level.rpartition("_")[2]
    if name == "all":
        return 0
    if name in {"hour", "day"}:
        return int(at) // _LENGTHS[name] * _LENGTHS[name]
    day = datetime.fromtimestamp(at, UTC)
    return int(datetime(day.year, day.month if name == "month" else 1, 1, tzinfo=UTC).timestamp())


def place_cell(level: Level, subject: Subject, cell: Cell) -> tuple[str, Subject, Cell]:
    """Return the part of a cell with users that a level has: the end of the key of its record, the subject and sums."""
    at = _find_begin(level, subject.at)
    if level == "all":
        of = Subject(0, subject.agent, "", "", "", "")
        group: tuple[object, ...] = of
    elif level in MEASURED:
        of = subject._replace(at=at, root="", tenant="", user="")
        group = of
    elif level in (*STEPS, *CALLS):
        of = Subject(at, subject.agent, "", "", "", subject.purpose)
        group = of[1:]
    else:
        of = subject._replace(at=at, user="") if level in COSTS else subject._replace(at=at)
        of = of._replace(release="") if level in USER_COSTS[1:] else of
        group = (of.tenant, of.user)
    kept = {
        series: _join_slots(fields) if level in _CHAINS[0] else fields
        for series, fields in cell.items()
        if _has_series(level, read_series(series)[0])
    }
    if level in (*STEPS, *CALLS):
        kept = {
            series: {name: value for name, value in fields.items() if value and name[0] in "ns"}
            for series, fields in kept.items()
        }
    if level == "all":  # the metrics of production, without the distributions that percentiles are found in
        kept = {
            series: {name: value for name, value in fields.items() if name[0] != "b"}
            for series, fields in kept.items()
            if not subject.purpose and read_series(series)[0] != EVENTS
        }
    digest = sha256(json.dumps(group).encode()).hexdigest()[:24]
    if level in _PARTS:
        digest = f"{int(digest, 16) % _PARTS[level]:04d}"
    return f"{level}|{at:012d}|{digest}", of, kept


def _has_series(level: Level, name: str) -> bool:
    """Return whether a level has the series with this name."""
    if name == EVENTS:
        return level in SHORTEST
    if level in (*STEPS, *CALLS):
        return name in _STEP_METRICS if level in STEPS else name == m.TOOL_CALLS.name
    return (name in _COST_SERIES) != (level in _CHAINS[0])


def read_cells(value: object) -> dict[Subject, Cell]:
    """Return the cells of a record."""
    if "cells" in (stored := _as_object(value)):
        return {Subject(*of): sums for of, sums in stored["cells"]}
    return CellTable.read(stored).to_cells()


def write_cells(level: str, cells: Mapping[Subject, Cell]) -> dict[str, Any]:
    """Return what a record of a level has of cells."""
    if level in _CHAINS[0]:
        return {"cells": [[list(of), sums] for of, sums in cells.items()]}
    return _pack_cells(cells)


def add_cell(cells: dict[Subject, Cell], of: Subject, cell: Cell) -> None:
    """Add the sums of a cell to those that a subject has."""
    sums = cells.setdefault(of, {})
    for series, fields in cell.items():
        add_fields(sums.setdefault(series, {}), fields)


def measure_cells(
    stored: StoredRun,
    *,
    after: int = 0,
    root: str = "",
    previous: Header | None = None,
    feedback: Iterable[Feedback] = (),
) -> dict[Subject, Cell]:
    """Return what the events of a run after a version add to the totals, and feedback that is new, by hour.

    The parts of a journal add up to the whole: `after=0` up to version 5 and `after=5` give the same as `after=0`.
    """
    header, cells = stored.header, dict[Subject, Cell]()

    def add(at: float, series: Iterable[str], fields: Mapping[str, int]) -> None:
        hour = int(at) // HOUR_S * HOUR_S
        names = (header.agent, root or header.agent, header.tenant or "", header.release)
        sums = cells.setdefault(Subject(hour, *names, header.purpose, header.user or ""), {})
        add_fields(sums.setdefault(json.dumps([*series], ensure_ascii=False), {}), fields)

    for event in stored.events[max(after, header.forked_at) :]:
        add(event.at, [EVENTS], {"n": 1})
    measured = m.measure_run(header, stored.events, after=after, previous=previous)
    for each in (*measured, *[m.measure_feedback(header, one) for one in feedback]):
        slot = int(each.at) % HOUR_S // SLOT_S
        fields = {f"n{slot}": 1, f"s{slot}": round(each.value * UNIT)}
        metric = m.METRICS[each.metric]
        if metric.kind == "histogram":
            fields[f"le{bisect_left(metric.buckets, each.value)}"] = 1
            if metric.name.endswith("_seconds"):
                fields[f"b{math.ceil(math.log(max(each.value, 1 / UNIT), RATIO))}"] = 1
        add(each.at, [each.metric, *each.labels], fields)
    seen = set[tuple[str, str]]()
    for version, at, purpose, model, usage in m.iter_costs(stored):
        keys = {"runs": "", "runs_of_model": model, "runs_of_purpose": purpose, "runs_of_day": str(int(at) // DAY_S)}
        new = {name: 1 for name, of in keys.items() if (name, of) not in seen}
        seen.update(keys.items())
        if version > after:
            counts = attrs.asdict(usage, filter=lambda field, _: field.name != "cost_usd")
            money = {} if usage.cost_usd is None else {"priced": 1, "cost": round(usage.cost_usd * UNIT)}
            fields = counts | money | new
            add(at, [USAGE, model, purpose], {name: int(each) for name, each in fields.items() if each})
    own = stored.events[header.forked_at :]
    known = len([*list_cache_losses(own[: max(0, after - header.forked_at)])])
    for loss in [*list_cache_losses(own)][known:]:
        add(loss.at, [LOST, loss.reported], {"n": loss.tokens})
    return cells


@lru_cache(maxsize=10_000)
def read_series(text: str) -> tuple[str, ...]:
    """Return the name and the labels of a series of a cell."""
    return tuple(json.loads(text))


def build_usage(sums: Mapping[str, int]) -> Usage:
    """Return the usage that a series of costs is the sum of."""
    given: dict[str, Any] = {field: sums.get(field, 0) for field in attrs.fields_dict(Usage)}
    given |= {name: bool(given[name]) for name in ("estimated", "unpriced")}
    given["cost_usd"] = sums.get("cost", 0) / UNIT if sums.get("priced") else None
    return Usage(**given)


def add_fields(sums: dict[str, int], fields: Mapping[str, int]) -> None:
    """Add fields of a series to others."""
    for name, value in fields.items():
        sums[name] = sums.get(name, 0) + value


@attrs.define(eq=False)
class _Batch:
    number: int
    position: int = 0
    versions: dict[str, int] = attrs.field(factory=dict)
    cells: dict[Subject, Cell] = attrs.field(factory=dict)
    open: dict[str, int] = attrs.field(factory=dict)
    """Versions of runs that are not over, by id and time of creation; 0 for one that is over now."""

    rated: dict[str, int] = attrs.field(factory=dict)
    """Number of ratings of runs that have new ones, by id and time of creation."""

    at: float = 0.0
    """Time of its decision if the totals were whole, seconds since 1970: new series begin then."""

    is_whole: bool = False
    unreadable: dict[str, int] = attrs.field(factory=dict)
    """Runs whose journals could not be read, by id: 1; 0 for one that can be read now, or was deleted."""

    events: int = 0
    """Number of events in it. Only in memory."""

    def empty(self) -> _Batch:
        """Return a batch that adds nothing to any record."""
        return attrs.evolve(self, cells={}, open={}, rated={}, unreadable={}, events=0)

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "position": self.position,
            "versions": self.versions,
            "cells": [[list(subject), cell] for subject, cell in self.cells.items()],
            "open": self.open,
            "rated": self.rated,
            "at": self.at,
            "whole": self.is_whole,
            "not_read": self.unreadable,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> _Batch:
        return cls(
            number=value["number"],
            position=value["position"],
            versions=value["versions"],
            cells={Subject(*subject): cell for subject, cell in value["cells"]},
            open=value["open"],
            rated=value["rated"],
            at=value["at"],
            is_whole=value["whole"],
            unreadable=value.get("not_read", {}),
        )


@attrs.define(eq=False)
class Totals:
    """Keeps the totals of a store. Any number of processes may do so at once."""

    store: Store
    """The store. It must have followers and records."""

    generation: str = ""
    """Name of the totals. Default: those that the store has, which are created by the first process."""

    _is_given: bool = attrs.field(default=attrs.Factory(lambda own: own.generation != "", takes_self=True), init=False)
    _lock: anyio.Lock = attrs.field(factory=anyio.Lock, init=False)
    """Held by the task that counts."""

    _holder: str = attrs.field(factory=lambda: secrets.token_hex(8), init=False)
    _state: StoreRecord | None = attrs.field(default=None, init=False)
    _batch: _Batch | None = attrs.field(default=None, init=False)
    """The batch of `_state`, which is in all cells; None if that is not known."""

    _confirmed: int = attrs.field(default=0, init=False)
    """Position in the store that this process has confirmed."""

    _records: Newest[str, StoreRecord] = attrs.field(factory=lambda: Newest(_MAX_CACHED), init=False)
    """Newest known revisions of records."""

    async def follow(self) -> None:
        """Count what changes in the store, until cancelled. A store without records or followers has no totals."""
        if not can_keep_totals(self.store):
            return
        counted_at = -math.inf
        try:
            while True:
                try:
                    await self._open()
                    while await self.count_changes():
                        pass
                    if anyio.current_time() >= counted_at + ACTIVE_S:
                        counted_at = anyio.current_time()
                        await self.count_active()
                except ConflictError:
                    pass  # another process counts
                except MisuseError as error:  # somebody has dropped the follower
                    _log.warning("no totals are kept until `agentfsm totals rebuild`: %s", error)
                    await anyio.sleep(ACTIVE_S)
                except Exception as error:  # noqa: BLE001  totals are no reason to stop the server
                    is_known = isinstance(error, AgentError)
                    _log.warning("the totals are counted later: %s", error, exc_info=None if is_known else error)
                await anyio.sleep(POLL_S)
        finally:
            await self._release()

    async def catch_up(self, *, with_active: bool = True) -> None:
        """Count all that has changed, unless another process does so.

        Args:
            with_active: Whether to count the events of runs that are executed, too.
        """
        await self._open()
        with suppress(ConflictError):
            while await self.count_changes():
                pass
            if with_active:
                await self.count_active(min_age_s=0.0)
        await self._release()

    async def _open(self) -> None:
        """Go on with the totals that the store has: a rebuild makes others."""
        if not self._is_given and (found := await _find_generation(self.store)) != self.generation:
            async with self._lock:
                self.generation, self._state, self._batch = found, None, None

    async def count_changes(self) -> bool:
        """Count a batch of runs that have changed. Return whether there were any.

        Raises:
            ConflictError: if another process counts at the same time.
            MisuseError: if the follower was dropped.
        """
        async with self._lock:
            return await self._count_changes()

    async def _count_changes(self) -> bool:
        name, batch = name_follower(self.generation), await self.read_batch()
        unread = await self.store.take_unread(name, holder=self._holder, lease_s=FOLLOWER_LEASE_S, limit=BATCH)
        if unread and batch.position > self._confirmed:  # that of a process which may have died before it did
            await self._confirm(batch)
            unread = await self.store.take_unread(name, holder=self._holder, lease_s=FOLLOWER_LEASE_S, limit=BATCH)
        if not unread:
            if not batch.is_whole and not any(each.lag for each in await self.store.followers() if each.name == name):
                await self._decide(attrs.evolve(batch.empty(), number=batch.number + 1, is_whole=True))
            elif batch.cells and batch.position == self._confirmed:  # so that others need not look whether it is in all
                await self._decide(batch.empty())
            return False
        made = _Batch(number=batch.number + 1, is_whole=batch.is_whole)
        unreadable = (await self._read_object(_name_unreadable(self.generation))).get("runs", {})
        for each in unread:
            version, has_more = await self._measure(made, each.run_id, each.after)
            if each.run_id in unreadable:
                made.unreadable.setdefault(each.run_id, 0)
            made.versions[each.key] = version
            if has_more:  # the rest comes again
                break
            made.position = each.change
            if made.events >= _MAX_EVENTS:
                break
        made.position = made.position or batch.position
        await self._decide(made)
        await self._confirm(await self.read_batch())
        return True

    async def count_active(self, min_age_s: float = ACTIVE_S) -> None:
        """Count the new events of runs that are executed now and are as old as that.

        Raises:
            ConflictError: if another process counts at the same time.
        """
        now = await self.store.now()
        where = Filter(active_at=now, before=now - min_age_s)
        active = [each async for each in RunIterator(self.store, where) if each.driven]
        while active:
            async with self._lock:
                batch = await self.read_batch()
                made = attrs.evolve(batch.empty(), number=batch.number + 1)
                while active and made.events < _MAX_EVENTS:
                    _, has_more = await self._measure(made, active[-1].id, 0)
                    if has_more:
                        break
                    active.pop()
                if made.cells:
                    await self._decide(made)
                    await self.read_batch()

    async def _measure(self, batch: _Batch, run_id: str, after: int) -> tuple[int, bool]:
        """Add the events of a run after a version. Return the version up to which, and whether there are more."""
        try:
            stored = await self.store.read(run_id)
            header = stored.header
            key = f"{run_id}@{header.created_at!r}"
            known = (await self._read_object(_name_shard(self.generation, key))).get("runs", {})
            after = max(after, known.get(key, 0))
            end = after + _MAX_EVENTS
            events = stored.events[:end]
            feedback = await self.store.list_feedback(run_id)
            rated = batch.rated.get(key, 0)
            if feedback:
                counted = (await self._read_object(_name_rated(self.generation, key))).get("runs", {})
                rated = max(rated, counted.get(key, 0))
                feedback = feedback[rated:]
            if len(events) == after and not feedback:
                return after, False
            before = None if after else await read_previous_header(self.store, header)
            root = await read_root_agent(self.store, header)
        except RunNotFoundError:  # deleted meanwhile
            return after, False
        except (CorruptError, TooNewError) as error:
            return self._leave_out(batch, run_id, error, after)
        try:
            cells = measure_cells(
                attrs.evolve(stored, events=events), after=after, root=root, previous=before, feedback=feedback
            )
        except Exception as error:  # noqa: BLE001  one journal is no reason to stop counting the others
            return self._leave_out(batch, run_id, error, after)
        for subject, cell in cells.items():
            add_cell(batch.cells, subject, cell)
        batch.events += len(events) - after + len(feedback)
        if feedback:
            batch.rated[key] = rated + len(feedback)
        if events and not isinstance(events[-1], _FINAL):
            batch.open[key] = len(events)
        elif key in known:
            batch.open[key] = 0
        return len(events), len(stored.events) > end

    def _leave_out(self, batch: _Batch, run_id: str, error: Exception, version: int) -> tuple[int, bool]:
        _log.warning("run %s is left out of the totals: %s", run_id, error)
        batch.unreadable[run_id] = 1
        return version, False

    async def _decide(self, batch: _Batch) -> None:
        """Make a batch the next one, unless another process was faster."""
        revision = 0 if self._state is None else self._state.revision
        self._batch = None
        batch.at = await self.store.now() if batch.is_whole else 0.0
        try:
            self._state = await self.store.write_record(
                KIND, f"{self.generation}|state", batch.to_json(), revision=revision
            )
        except BaseException:
            self._state = None
            raise

    async def read_batch(self) -> _Batch:
        """Return the newest batch, when it is in all cells."""
        if self._batch is not None:
            return self._batch
        if self._state is None:
            self._confirmed = 0
            self._records.clear()
            self._state = await self.store.read_record(KIND, f"{self.generation}|state")
        batch = _Batch(number=0) if self._state is None else _Batch.from_json(_as_object(self._state.value))
        parts: dict[str, dict[Subject, Cell]] = {}
        for levels in _CHAINS:
            cells = batch.cells
            for level in levels:  # each the sum of the one before
                sums: dict[Subject, Cell] = {}
                for subject, cell in cells.items():
                    name, of, kept = place_cell(level, subject, cell)
                    if kept:
                        add_cell(sums, of, kept)
                        parts.setdefault(f"{self.generation}|{name}", {})[of] = sums[of]
                cells = sums
        others: dict[str, dict[str, int]] = {}
        for key, version in batch.open.items():
            others.setdefault(_name_shard(self.generation, key), {})[key] = version
        others |= {_name_rated(self.generation, key): {key: count} for key, count in batch.rated.items()}
        if batch.unreadable:
            others[_name_unreadable(self.generation)] = batch.unreadable
        limiter = anyio.CapacityLimiter(_WRITERS)
        try:
            async with anyio.create_task_group() as tasks:
                for key in (*parts, *others):
                    tasks.start_soon(self._apply, key, batch, parts.get(key, {}), others.get(key, {}), limiter)
        except ExceptionGroup as group:
            raise first_error(group) from None
        self._batch = batch
        return batch

    async def _apply(
        self, key: str, batch: _Batch, part: dict[Subject, Cell], runs: dict[str, int], limiter: anyio.CapacityLimiter
    ) -> None:
        """Add a part of a batch to a record, unless it is in it."""
        async with limiter:
            while True:
                value = await self._read_object(key)
                if value.get("number", 0) >= batch.number:
                    return
                new: dict[str, Any] = {"number": batch.number}
                if runs:
                    merged = value.get("runs", {}) | runs
                    new["runs"] = {run: version for run, version in merged.items() if version}
                else:
                    cells = read_cells(value)
                    for of, cell in part.items():  # a record in memory stays as it is in the store
                        cells[of] = {series: dict(fields) for series, fields in cells.get(of, {}).items()}
                        if key.startswith(f"{self.generation}|all|"):
                            _add_counters(cells[of], cell, batch.at)
                        else:
                            add_cell(cells, of, cell)
                    new |= write_cells(key.split("|")[1], cells)
                known = self._records.pop(key, None)
                try:
                    found = await self.store.write_record(
                        KIND, key, new, revision=0 if known is None else known.revision
                    )
                except ConflictError:
                    continue
                self._records[found.key] = found
                return

    async def _read_object(self, key: str) -> dict[str, Any]:
        """Return the value of a record, from memory if this process has written or read it; empty if there is none."""
        if key not in self._records:
            if (found := await self.store.read_record(KIND, key)) is None:
                return {}
            self._records[found.key] = found
        return _as_object(self._records[key].value)

    async def _confirm(self, batch: _Batch) -> None:
        await self.store.confirm_read(
            name_follower(self.generation), holder=self._holder, position=batch.position, versions=batch.versions
        )
        self._confirmed = batch.position

    async def _release(self) -> None:
        """Let another process count at once."""
        with anyio.CancelScope(shield=True), suppress(AgentError):  # else the lease ends by itself
            name = name_follower(self.generation)
            await self.store.confirm_read(name, holder=self._holder, position=0, versions={}, release=True)


def _join_slots(fields: Mapping[str, int]) -> dict[str, int]:
    """Return sums and numbers of an hour without the steps in it."""
    joined: dict[str, int] = {}
    for name, value in fields.items():
        joined_name = name[0] if name[0] in "ns" and name[1:].isdigit() else name
        joined[joined_name] = joined.get(joined_name, 0) + value
    return joined


def _add_counters(sums: Cell, cell: Cell, at: float) -> None:
    """Add sums to those over all time. Series that are not there yet begin at a time."""
    for series, fields in cell.items():
        name = series
        if series not in sums and len(sums) >= MAX_SERIES:
            metric, agent, *labels = read_series(series)
            name = json.dumps([metric, agent, *[OTHER] * len(labels)], ensure_ascii=False)
        add_fields(sums.setdefault(name, {BORN: int(at)}), fields)


def _as_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorruptError("a record of the totals is not an object: `agentfsm totals rebuild` makes them anew")
    return value


def name_follower(generation: str) -> str:
    """Return the name of the follower that counts the runs for the totals with this name."""
    return f"totals-{generation}"


def _name_shard(generation: str, key: str) -> str:
    return f"{generation}|open|{sha256(key.encode()).digest()[0] % _SHARDS:02d}"


def _name_rated(generation: str, key: str) -> str:
    return f"{generation}|rated|{sha256(key.encode()).hexdigest()[:24]}"


def _name_unreadable(generation: str) -> str:
    return f"{generation}|unreadable"


async def _find_generation(store: Store) -> str:
    """Return the name of the totals of a store, which are begun if there are none."""
    while (root := await store.read_record(KIND, "root")) is None:
        generation = secrets.token_hex(4)
        await store.add_follower(name_follower(generation))
        try:
            await store.write_record(KIND, "root", {"generation": generation, "pruned_before": 0.0}, revision=0)
        except ConflictError:  # another process has begun them
            await store.drop_follower(name_follower(generation))
    found: str = _as_object(root.value)["generation"]
    return found


async def catch_up_totals(store: Store) -> None:
    """Count what has changed in a store, if it has totals and no other process does so."""
    if await read_status(store) is not None:
        await Totals(store).catch_up()


async def mark_pruned(store: Store, before: float) -> None:
    """Mark the totals of the hours before a time, whose runs were removed: journals cannot show them any more."""
    while can_keep_totals(store) and (root := await store.read_record(KIND, "root")) is not None:
        value = _as_object(root.value)
        with suppress(ConflictError):
            new = value | {"pruned_before": max(before, value["pruned_before"])}
            await store.write_record(KIND, "root", new, revision=root.revision)
            return


async def rebuild_totals(store: Store) -> TotalsStatus:
    """Make the totals of a store anew from its journals, beside the old ones, and put them in their place.

    Cells of which the journals have fewer events than were counted are kept, and marked: their runs were removed. Until
    the end all read the old totals. A rebuild that was interrupted is continued by the next one.

    Raises:
        ConflictError: if another process rebuilds them at the same time.
        MisuseError: if the store has no followers or records.
    """
    if not can_keep_totals(store):
        raise MisuseError(f"{type(store).__name__} keeps no totals: it has no followers, or no records")
    old = await _find_generation(store)
    root = await store.read_record(KIND, "root")
    assert root is not None  # `_find_generation` has found it  # noqa: S101
    value = _as_object(root.value)
    if not (new := value.get("building", "")):
        new = secrets.token_hex(4)
        root = await store.write_record(KIND, "root", value | {"building": new}, revision=root.revision)
    await store.add_follower(name_follower(new))
    totals, pruned_before = Totals(store, new), value["pruned_before"]
    while not (await totals.read_batch()).is_whole:
        await totals.catch_up()
        await anyio.sleep(0.1)  # an interrupted rebuild may hold the follower for a minute
    for levels in _CHAINS:
        restored = set[tuple[Level, int]]()
        prefix, after = f"{old}|{levels[0]}|", ""
        while page := await store.list_records(KIND, prefix=prefix, after=after):
            after = page[-1].key
            await totals.catch_up()  # so the new totals have all events of the page that are still in the store
            for record in page:
                kept, name = read_cells(record.value), record.key.removeprefix(f"{old}|")
                found = await store.read_record(KIND, f"{new}|{name}")
                made = {} if found is None else read_cells(found.value)
                lost = {of: cell for of, cell in kept.items() if _count_events(cell) > _count_events(made.get(of, {}))}
                if lost:
                    await _write_cells(store, f"{new}|{name}", made | lost, found)
                    at = next(iter(lost)).at
                    restored.update([(longer, _find_begin(longer, at)) for longer in levels[1:]])
                    pruned_before = max(pruned_before, at + HOUR_S)
        await totals.catch_up()
        for level, at in restored:  # sums of the hours, which nobody else changes meanwhile
            sums: dict[str, dict[Subject, Cell]] = {}
            async for record in iter_level(store, new, levels[0], at):
                hours = read_cells(record.value)
                if _find_begin(level, next(iter(hours)).at) > at:
                    break
                for subject, cell in hours.items():
                    name, of, part = place_cell(level, subject, cell)
                    if part and level == "all":
                        _add_counters(sums.setdefault(f"{new}|{name}", {}).setdefault(of, {}), part, 0.0)
                    elif part:
                        add_cell(sums.setdefault(f"{new}|{name}", {}), of, part)
            for key, cells in sums.items():
                await _write_cells(store, key, cells, await store.read_record(KIND, key))
    await store.write_record(
        KIND, "root", {"generation": new, "pruned_before": float(pruned_before)}, revision=root.revision
    )
    for each in await store.followers():
        if each.name.startswith(name_follower("")) and each.name != name_follower(new):
            await store.drop_follower(each.name)
    after = ""
    while page := await store.list_records(KIND, after=after):
        after = page[-1].key
        for record in page:
            if record.key != "root" and not record.key.startswith(f"{new}|"):
                await store.delete_record(KIND, record.key)
    status = await read_status(store)
    assert status is not None  # it was written above  # noqa: S101
    return status


async def _write_cells(store: Store, key: str, cells: Mapping[Subject, Cell], found: StoreRecord | None) -> None:
    """Replace the cells of a record, and leave its number."""
    value = {} if found is None else _as_object(found.value)
    new = value | write_cells(key.split("|")[1], cells)
    await store.write_record(KIND, key, new, revision=0 if found is None else found.revision)


def _count_events(cell: Cell) -> int:
    """Return a number of what is in a cell, which grows with each event and each rating."""
    return sum(value for fields in cell.values() for name, value in fields.items() if name.startswith("n"))
