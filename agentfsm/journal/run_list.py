"""List the runs in a store, page by page, each run once, and find those that no worker takes."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from math import inf, nextafter
from typing import Final, Literal, TypeAlias

import attrs

from agentfsm._lib.fairness import StepThrottle
from agentfsm.core.machine import State
from agentfsm.core.value import Value
from agentfsm.ports.store import ORDER_FIELDS, Filter, RunOrder, RunSummary, Store

# Runs per page.
PAGE_SIZE: Final = 100


@attrs.define(eq=False, repr=False)
class RunIterator(AsyncIterator[RunSummary]):
    """Iterator over the runs that match a filter, by default newest first.

    Runs that begin after the first page was read may be missing. It is safe to break out of the loop at any time.
    """

    _store: Store
    _where: Filter
    page_size: int = PAGE_SIZE
    order: RunOrder = "newest"
    after: tuple[float, str] | None = None
    """Value of the order, and id, of the last run on the page, of an order other than the newest."""

    _summaries: deque[RunSummary] = attrs.field(factory=deque, init=False)
    _listed_ids: set[str] = attrs.field(factory=set, init=False)
    """Ids of the listed runs with the latest creation time on the page. Other runs may share that time, so the next
    page begins with it again.
    """

    _limit: int = attrs.field(default=attrs.Factory(lambda runs: runs.page_size, takes_self=True), init=False)
    """Maximum of runs on the next page."""

    _is_exhausted: bool = attrs.field(default=False, init=False)
    """Whether all runs were listed."""

    async def __anext__(self) -> RunSummary:
        await StepThrottle.enter()  # runs of a page come without a wait
        while not self._summaries:
            if self._is_exhausted:
                raise StopAsyncIteration
            if self.order != "newest":
                await self._read_next_page(self.order)
                continue
            page = await self._store.runs(self._where, limit=self._limit)
            unlisted = [summary for summary in page if summary.id not in self._listed_ids]
            self._is_exhausted = len(page) < self._limit
            if not unlisted:
                self._limit *= 4  # more runs share one time than a page holds
                continue
            self._limit = self.page_size
            last = page[-1].created_at
            self._listed_ids = {summary.id for summary in page if summary.created_at == last}
            self._where = attrs.evolve(self._where, before=nextafter(last, inf))
            self._summaries.extend(unlisted)
        return self._summaries.popleft()

    async def _read_next_page(self, order: RunOrder) -> None:
        page = await self._store.runs(self._where, limit=self._limit, order=order, after=self.after)
        self._is_exhausted = len(page) < self._limit
        if page:
            self.after = (getattr(page[-1], ORDER_FIELDS[order]), page[-1].id)
        self._summaries.extend(page)


# Seconds that a run is ready until it counts as stranded: 60 polls of a worker of the store, several leases.
STRANDED_S: Final = 60.0
# Runs of a page, since most of them are left out.
_PAGE: Final = 1_000

# Seconds of the longest rest of a run between two attempts to execute it; more than a worker chooses.
_LONGEST_REST_S: Final = 3_600.0

StrandedReason: TypeAlias = Literal["format", "release", "worker_died", "refused", "no_worker"]


@attrs.frozen(kw_only=True)
class StrandedRun(Value):
    """A run that is ready, and that no worker takes."""

    run: RunSummary
    """The run."""

    reason: StrandedReason
    """The reason: "format" (only a newer agentfsm reads its records), "release" (it belongs to a release of a
    roll-out), "worker_died" (its worker has died, and no other has looked for runs of the agent since), "refused" (the
    workers that took it refused or failed to execute it, and it rests before the next attempt) or "no_worker" (no
    worker executes a run of the agent).
    """

    since: float
    """Time since which the run is ready, seconds since 1970 by the store's clock; for "worker_died" and "refused", that
    of its newest event.
    """

    def __str__(self) -> str:
        run = self.run
        match self.reason:
            case "format":
                return (
                    f"its records have format {run.format}: start workers of the newer agentfsm that has written them"
                )
            case "release":
                return f"no worker has release {run.release!r} of agent {run.agent!r}: start one, or cancel the run"
            case "worker_died":
                return f"its worker has died, and no other looks for runs of agent {run.agent!r}: start one"
            case "refused":
                return (
                    f"workers of agent {run.agent!r} refuse it or fail to execute it, as their log says, and it rests "
                    "before the next attempt: start one whose program can continue it, or resume it by hand"
                )
            case "no_worker":
                return f"no worker executes runs of agent {run.agent!r}: start one"


async def find_stranded(
    store: Store, where: Filter, *, after_s: float = STRANDED_S, examined: int | None = None
) -> list[StrandedRun]:
    """Return the runs that are ready and that no worker takes, newest first.

    Args:
        store: The store.
        where: Filter of the runs; its `active_at` is not used.
        after_s: Seconds that a run must have been ready.
        examined: Maximum number of ready runs that are looked at, the newest first; None for all.
    """
    now = await store.now()
    by = now - after_s
    owned = RunIterator(store, Filter(agent=where.agent, active_at=0.0, purpose=""), _PAGE)
    executed = {(each.agent, each.release, each.format) async for each in owned if each.driven and each.parent is None}
    found: list[StrandedRun] = []
    count = 0
    async for run in RunIterator(store, attrs.evolve(where, active_at=now + _LONGEST_REST_S), _PAGE):
        if count == examined:
            break
        count += 1
        if run.driven or run.parent is not None or run.state in {State.DONE, State.ERROR}:
            continue
        since = run.ready_at
        has_died = since is None and run.worker is not None and not run.waiting
        is_resting = since is not None and since > now and not run.waiting
        if has_died or is_resting:
            since = run.updated_at
        if since is None or since > by:
            continue
        if not is_resting and any(
            agent == run.agent and run.release in {"", release} and newest_format >= run.format
            for agent, release, newest_format in executed
        ):
            continue
        reason: StrandedReason = "worker_died" if has_died else "refused" if is_resting else "no_worker"
        if run.is_too_new:
            reason = "format"
        elif run.release:
            reason = "release"
        found.append(StrandedRun(run=run, reason=reason, since=since))
    return found
