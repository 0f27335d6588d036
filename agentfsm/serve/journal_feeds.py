"""The journals that event streams follow, each read once for all streams of this process, and its events encoded once.

A thousand clients that follow one run would otherwise be a thousand readers of the store for each turn.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm._lib.concurrency import SharedWork
from agentfsm._lib.fairness import StepThrottle
from agentfsm.journal.follow import FINAL_EVENTS, JournalEvent, JournalTail
from agentfsm.serve.run_documents import strip_native

if TYPE_CHECKING:
    from agentfsm.agents.runs import Runs
    from agentfsm.core.events import Event
    from agentfsm.core.header import Header
    from agentfsm.ports.store import RunSummary
    from agentfsm.serve.access import Caller

# Newest events of a run that are kept for its streams. A stream that lags behind reads the store by itself.
MAX_KEPT: Final = 1_024
# Events that a stream sends at a time, at most: as one chunk, between which others have their turn.
MAX_BATCH: Final = 32
# Seconds between two looks for runs of sub-agents while calls are open.
CHILD_POLL_S: Final = 0.5

# `json.dumps` with these options would build an encoder for each event.
_encode_json: Final = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode


def to_json(value: Any) -> str:
    """Return JSON on one line. A lone surrogate, which UTF-8 cannot encode, is escaped as all of non-ASCII is."""
    return _encode_json(value)


@attrs.frozen(kw_only=True)
class FeedEvent(JournalEvent):
    """An event that several streams send, whose JSON is made once."""

    _texts: dict[bool, str] = attrs.field(factory=dict, init=False, eq=False, repr=False)
    """JSON for administrators (True), and for others."""

    def to_json(self, caller: Caller) -> str:
        """Return the event as JSON on one line, as the caller may see it."""
        is_admin = caller.allows("admin")
        if (text := self._texts.get(is_admin)) is None:
            document = self.to_dict()
            strip_native(document["event"], caller)
            text = self._texts[is_admin] = to_json(document)
        return text


@attrs.define(eq=False, repr=False)
class JournalFeed:
    """The newest events of one run, for all streams that follow it.

    A stream that finds nothing new waits for the store, for all of them.
    """

    runs: Runs
    header: Header
    streams: int = attrs.field(default=0, init=False)
    """Number of streams that follow the run."""

    _tail: JournalTail | None = attrs.field(default=None, init=False)
    """End of the journal; None until the first stream has read it."""

    _kept: list[FeedEvent] = attrs.field(factory=list, init=False)
    """The newest events up to the version of `_tail`, `MAX_KEPT` or up to twice as many."""

    _wait: SharedWork = attrs.field(factory=SharedWork, init=False)
    _search: SharedWork = attrs.field(factory=SharedWork, init=False)
    _children: tuple[int, float, Sequence[RunSummary]] = attrs.field(default=(-1, 0.0, ()), init=False)
    """Runs of sub-agents as they were read, the version of the run that was known before, and the time of the loop."""

    async def follow(self, version: int, size: int) -> AsyncGenerator[Sequence[FeedEvent], None]:
        """Yield the events after a version as they are written, up to `size` at a time, until the run is over.

        Raises:
            RunNotFoundError: when the run was deleted.
        """
        missed: deque[FeedEvent] = deque()
        tail, throttle = await self._open_tail(version), StepThrottle.current()
        while True:
            if not throttle.try_acquire():  # all streams have the events at the same moment
                await throttle.acquire()
            if (first := version - tail.version + len(self._kept)) >= 0:
                missed.clear()
                batch: Sequence[FeedEvent] = self._kept[first : first + size]
            else:  # what it lacks is not kept any more
                if not missed:
                    older = JournalTail(self.runs.store, self.header.id, version, self.header)
                    missed += self._place(version, await older.poll())
                batch = [missed.popleft() for _ in range(min(size, len(missed)))]
            if batch:
                yield batch
                version = batch[-1].version
            if tail.version <= version:
                if self._kept and type(self._kept[-1].event) in FINAL_EVENTS:
                    return
                await self._wait.do_until(partial(self._is_past, version), partial(self._read_on, tail))

    async def _open_tail(self, version: int) -> JournalTail:
        """Return the end of the journal, read from a version on if no stream has done that."""
        if self._tail is None:
            before = max(0, version - 1)  # also the event that the client has: it may be the last one
            tail = JournalTail(self.runs.store, self.header.id, before, self.header)
            events = await tail.poll()
            if self._tail is None:  # still
                self._tail = tail
                self._keep(before, events)
        return self._tail

    def _is_past(self, version: int) -> bool:
        return self._tail is not None and self._tail.version > version

    async def _read_on(self, tail: JournalTail) -> None:
        known = tail.version
        self._keep(known, await tail.wait())

    def _keep(self, version: int, events: Sequence[Event]) -> None:
        self._kept += self._place(version, events)
        if len(self._kept) > 2 * MAX_KEPT:
            del self._kept[:-MAX_KEPT]

    def _place(self, version: int, events: Sequence[Event]) -> list[FeedEvent]:
        """Return the events after a version with their positions."""
        run_id = self.header.id
        return [FeedEvent(run_id=run_id, version=n, event=each) for n, each in enumerate(events, version + 1)]

    async def list_children(self, version: int) -> Sequence[RunSummary]:
        """Return the runs of sub-agents that a run has called up to a version, as read a moment ago or now."""
        now = anyio.current_time()

        def is_known() -> bool:
            known, at, _ = self._children
            return known >= version and now - at <= CHILD_POLL_S / 2

        async def search() -> None:
            begun = anyio.current_time()
            self._children = version, begun, await self.runs.children(self.header.id)

        await self._search.do_until(is_known, search)
        return self._children[2]

    def close(self) -> None:
        """End the subscription at the store."""
        if self._tail is not None:
            self._tail.close()


@attrs.define(eq=False, repr=False)
class JournalFeeds:
    """The feeds of the runs that streams of this process follow."""

    runs: Runs
    _feeds: dict[tuple[str, str], JournalFeed] = attrs.field(factory=dict, init=False)
    """Feeds by the id and the nonce of the run, so that a deleted run is not taken for another one with its id."""

    @contextmanager
    def open(self, header: Header) -> Iterator[JournalFeed]:
        """Yield the feed of a run."""
        key = (header.id, header.nonce)
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = JournalFeed(self.runs, header)
        feed.streams += 1
        try:
            yield feed
        finally:
            feed.streams -= 1
            if not feed.streams:
                del self._feeds[key]
                feed.close()
