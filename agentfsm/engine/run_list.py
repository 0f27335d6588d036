"""Iterate over the runs in a store, page by page, each run once."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from math import inf, nextafter
from typing import Final

import attrs

from agentfsm.ports.store import Filter, RunSummary, Store

# Runs per page.
PAGE_SIZE: Final = 100


@attrs.define(eq=False, repr=False)
class RunIterator(AsyncIterator[RunSummary]):
    """Iterator over the runs that match a filter, newest first.

    Runs that begin after the first page was read may be missing. It is safe to break out of the loop at any time.
    """

    _store: Store
    _where: Filter
    page_size: int = PAGE_SIZE
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
        while not self._summaries:
            if self._is_exhausted:
                raise StopAsyncIteration
            await self._fetch_page()
        return self._summaries.popleft()

    async def _fetch_page(self) -> None:
        page = await self._store.runs(self._where, limit=self._limit)
        unlisted = [summary for summary in page if summary.id not in self._listed_ids]
        self._is_exhausted = len(page) < self._limit
        if not unlisted:
            self._limit *= 4  # more runs share one time than a page holds
            return
        self._limit = self.page_size
        last = page[-1].created_at
        self._listed_ids = {summary.id for summary in page if summary.created_at == last}
        self._where = attrs.evolve(self._where, before=nextafter(last, inf))
        self._summaries.extend(unlisted)
