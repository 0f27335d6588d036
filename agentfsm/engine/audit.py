"""The audit of what a store holds: of one run with the agents below it, or of all runs that a filter takes."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from math import inf, nextafter
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.audit_records import AuditRecord, build_audit
from agentfsm.core.errors import RunNotFoundError
from agentfsm.engine.drive.family import child_id
from agentfsm.ports import Filter, RunSummary, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

# Runs that are listed at once.
PAGE: Final = 100
# More calls of agents than any run makes.
MANY: Final = 1_000_000


async def audit_of(store: Store, run_id: str) -> tuple[AuditRecord, ...]:
    """Return the calls of a run in order, and right behind each that an agent served the calls of that agent's run.

    Raises:
        RunNotFoundError: when the store holds no such run.
    """
    stored = await store.read(run_id)
    below = {line.id for line in await store.runs(Filter(parent=run_id), limit=MANY)}
    records: list[AuditRecord] = []
    for record in build_audit(stored.header, stored.events):
        records.append(record)
        if (child := child_id(run_id, record.call_id)) in below:
            records += await audit_of(store, child)
    return tuple(records)


@attrs.define(eq=False, repr=False)
class Audit(AsyncIterator[AuditRecord]):
    """The calls of many runs, newest run first, those of a run in order, each once; read a page of runs at a time.

    A run of an agent below another is one of its own here. What a fork has inherited is told with the run that it is
    from. What is begun after the first page was read may be missing. It may be left at any time.
    """

    _store: Store
    _where: Filter
    _since: float = -inf
    # Seconds since 1970: runs that were over before are not read.
    _records: deque[AuditRecord] = attrs.field(factory=deque, init=False)
    _lines: deque[RunSummary] = attrs.field(factory=deque, init=False)
    _told: set[str] = attrs.field(factory=set, init=False)
    # Runs of the last moment that was listed: the next page begins with that moment again.
    _size: int = attrs.field(default=PAGE, init=False)
    _is_whole: bool = attrs.field(default=False, init=False)
    # Whether all runs were listed.

    async def __anext__(self) -> AuditRecord:
        while not self._records:
            while not self._lines:
                if self._is_whole:
                    raise StopAsyncIteration
                await self._turn_page()
            self._records.extend(await self._own(self._lines.popleft()))
        return self._records.popleft()

    async def _own(self, line: RunSummary) -> Sequence[AuditRecord]:
        if line.stop_reason is not None and line.updated_at < self._since:
            return ()
        try:
            stored = await self._store.read(line.id)
        except RunNotFoundError:  # removed since it was listed
            return ()
        return [record for record in build_audit(stored.header, stored.events) if not record.inherited]

    async def _turn_page(self) -> None:
        page = await self._store.runs(self._where, limit=self._size)
        news = [line for line in page if line.id not in self._told]
        self._is_whole = len(page) < self._size
        if not news:
            self._size *= 4  # more runs of one moment than a page holds
            return
        self._size = PAGE
        last = page[-1].created_at
        self._told = {line.id for line in page if line.created_at == last}
        self._where = attrs.evolve(self._where, before=nextafter(last, inf))
        self._lines.extend(news)
