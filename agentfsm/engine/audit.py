"""Audit of tool calls: of one run with its child runs, or of all runs that match a filter."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from math import inf
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.audit_records import AuditRecord, build_audit
from agentfsm.core.errors import RunNotFoundError
from agentfsm.core.run_ids import child_run_id
from agentfsm.engine.run_list import RunIterator
from agentfsm.ports.store import Filter, RunSummary, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

# Larger than the number of agent calls of any run.
MAX_CHILD_RUNS: Final = 1_000_000


async def audit_run_tree(store: Store, run_id: str) -> tuple[AuditRecord, ...]:
    """Return the calls of a run in order, each agent call followed directly by the calls of its child run.

    Raises:
        RunNotFoundError: if the store has no such run.
    """
    stored = await store.read(run_id)
    below = {line.id for line in await store.runs(Filter(parent=run_id), limit=MAX_CHILD_RUNS)}
    records: list[AuditRecord] = []
    for record in build_audit(stored.header, stored.events):
        records.append(record)
        if (child := child_run_id(run_id, record.call_id)) in below:
            records += await audit_run_tree(store, child)
    return tuple(records)


@attrs.define(eq=False, repr=False)
class AuditTrail(AsyncIterator[AuditRecord]):
    """Iterator over the calls of many runs, newest run first, in call order within a run; each call once.

    Child runs count as runs of their own. Calls that a fork inherited are listed with the forked run only. Runs that
    begin after the first page was read may be missing. It is safe to break out of the loop at any time.
    """

    _store: Store
    _runs: RunIterator
    _since: float = -inf
    """Unix time in seconds; runs that were over before it are not read."""

    _records: deque[AuditRecord] = attrs.field(factory=deque, init=False)

    async def __anext__(self) -> AuditRecord:
        while not self._records:
            self._records.extend(await self._read_records(await anext(self._runs)))
        return self._records.popleft()

    async def _read_records(self, line: RunSummary) -> Sequence[AuditRecord]:
        if line.stop_reason is not None and line.updated_at < self._since:
            return ()
        try:
            stored = await self._store.read(line.id)
        except RunNotFoundError:  # removed after it was listed
            return ()
        return [record for record in build_audit(stored.header, stored.events) if not record.inherited]
