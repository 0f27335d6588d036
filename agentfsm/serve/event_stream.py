"""Server-sent events of a run and its sub-agents: the journals, and the text that the model is writing.

The id of an event is the version vector: the version of each run's journal that the client has, as in
`RUN:12,CHILD:3`. A client that sends it back, as `Last-Event-ID` or as `after`, misses no event of a journal and
gets none twice, also from another process. Pieces of text have no id: they are sent if this process executes the run,
or another one passes them through Redis, and dropped for a client that lags behind. A client that comes in the middle
of an answer gets what this process has of it as the first piece.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from enum import StrEnum
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import quote, unquote

import anyio
import attrs

from agentfsm._lib.fairness import StepThrottle
from agentfsm.core.errors import MisuseError, RunNotFoundError, StoreError
from agentfsm.core.events import ToolsReturned, ToolStarted
from agentfsm.journal.follow import is_blocked
from agentfsm.serve.delta_hub import DeltaHub, DeltaQueue
from agentfsm.serve.journal_feeds import CHILD_POLL_S, MAX_BATCH, FeedEvent, JournalFeed, JournalFeeds, to_json
from agentfsm.serve.run_documents import locate_run

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agentfsm._lib.web.http_guard import Message, Receive, Scope, Send
    from agentfsm.agents.deltas import Delta
    from agentfsm.agents.runs import Runs
    from agentfsm.core.run import Run
    from agentfsm.serve.access import Caller

_log = logging.getLogger("agentfsm.serve")

# Seconds between two comments on a stream without events, so that proxies keep the connection.
HEARTBEAT_S: Final = 15.0
# Milliseconds after which a browser connects again.
RETRY_MS: Final = 1_000
# Seconds for the end of a stream to be sent. A client that reads nothing loses its connection without it.
END_TIMEOUT_S: Final = 2.0
# Digits of a version, at most.
MAX_DIGITS: Final = 12
# Runs of a version vector.
MAX_RUNS: Final = 1_000

Versions = dict[str, int]


def parse_position(text: str, run_id: str) -> Versions:
    """Parse a version vector; a plain number is the version of the run itself.

    Raises:
        MisuseError: when the text is neither.
    """
    if _is_version(text):
        return {run_id: int(text)}
    pairs = [part.rpartition(":") for part in text.split(",")] if text else []
    versions = {unquote(name): int(number) for name, _, number in pairs if name.isprintable() and _is_version(number)}
    if len(versions) == len(pairs) <= MAX_RUNS and all(name.isprintable() for name in versions):
        return versions
    raise MisuseError(f"{text[:80]!r} is not a position of this stream: send the id of the last event, or a version")


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


@lru_cache(maxsize=MAX_RUNS)
def _quote_id(run_id: str) -> str:
    return quote(run_id, safe="")


def format_position(versions: Mapping[str, int]) -> str:
    """Format a version vector."""
    return ",".join(f"{_quote_id(run_id)}:{version}" for run_id, version in versions.items())


class Ending(StrEnum):
    """Reason why a stream ends before its run."""

    RETRY = "retry"
    """The store failed."""

    DELETED = "deleted"
    """The run was deleted."""

    SHUTDOWN = "shutdown"
    """The server stops, and the next one continues the run."""

    REVOKED = "revoked"
    """The key of the client is not valid any more, or has other rights."""


class StreamEncoder(Protocol):
    """Writes the events of a run as server-sent events of one protocol. Each method returns text, perhaps none."""

    ends_at_wait: bool
    """Whether the stream ends when the run waits for something from outside, and not only when it is over."""

    folds: bool
    """Whether the encoder needs the run after each event; else it gets None."""

    def encode_start(self, run: Run | None, /) -> str:
        """Begin the stream.

        Args:
            run: The run at the version that the client has.
        """
        ...

    def encode_event(self, item: FeedEvent, run: Run | None, position: str, /) -> str:
        """Write an event of a journal.

        Args:
            item: The event.
            run: The run after the event: the run of the stream, or that of a sub-agent.
            position: Position of the stream after the event.
        """
        ...

    def encode_delta(self, event: Delta, offset: int, /) -> str:
        """Write a piece of text, which comes at any time before the event of the journal that has the whole.

        Args:
            event: The piece.
            offset: Its position in the text of the reply. Pieces before it may be missing.
        """
        ...

    def encode_end(self, run: Run | None, position: str, /) -> str:
        """End the stream.

        Args:
            run: The run, which is over or waits.
            position: Position of the stream.
        """
        ...

    def encode_cut(self, ending: Ending, /) -> str:
        """End the stream before its run."""
        ...


@attrs.frozen(eq=False)
class JournalEncoder:
    """Writes journal events as they are: the protocol of `/v1/runs/{run_id}/events`."""

    caller: Caller
    """Reader of the stream."""

    ends_at_wait = False
    folds = False

    def encode_start(self, _run: Run | None) -> str:
        """Return the time after which a client connects again."""
        return f"retry: {RETRY_MS}\n\n"

    def encode_event(self, item: FeedEvent, _run: Run | None, position: str) -> str:
        """Write an event with its position as the id."""
        return f"id: {position}\ndata: {item.to_json(self.caller)}\n\n"

    def encode_delta(self, event: Delta, offset: int) -> str:
        """Write a piece of text, without an id."""
        return _write_delta(event, offset)

    def encode_end(self, _run: Run | None, _position: str) -> str:
        """Write the end of the run."""
        return "event: end\ndata: {}\n\n"

    def encode_cut(self, ending: Ending) -> str:
        """Write whether the client should connect again; a server that stops says nothing, and clients try again."""
        if ending is Ending.SHUTDOWN:
            return ""
        kind = "end" if ending is Ending.DELETED else "retry"
        return f'event: {kind}\ndata: {{"reason": "{ending}"}}\n\n'


@lru_cache(maxsize=256)
def _write_delta(event: Delta, offset: int) -> str:
    """Write a piece of text, once for all streams."""
    return f"event: delta\ndata: {to_json({**event.to_dict(), 'offset': offset})}\n\n"


@attrs.define(eq=False, repr=False, kw_only=True)
class RunEventStream:
    """ASGI app that answers one request with the events of a run, until the run is over or the client leaves."""

    runs: Runs
    run_id: str
    root_id: str
    """Id of the root run, under which the hub has the text of the models."""

    versions: Versions
    """Versions that the client has, by run."""

    encoder: StreamEncoder
    """Form of the events."""

    feeds: JournalFeeds
    hub: DeltaHub
    scopes: set[anyio.CancelScope]
    """Scopes of the active streams, which the shutdown of the server cancels."""

    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Headers of the response, beside those of every stream."""

    _ending: Ending = attrs.field(default=Ending.SHUTDOWN, init=False)
    """Reason of the cancellation of `_scope`."""

    _scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope, init=False)
    _send: Send = attrs.field(init=False)
    _lock: anyio.Lock = attrs.field(factory=partial(anyio.Lock, fast_acquire=True), init=False)
    _deltas: DeltaQueue = attrs.field(init=False)
    _followed: set[str] = attrs.field(factory=set, init=False)
    _folded: dict[str, Run] = attrs.field(factory=dict, init=False)
    """Runs at the versions that were sent, if the encoder needs them."""

    async def check(self) -> None:
        """Check that the runs have the versions that the client says it has.

        Raises:
            MisuseError: when a run has no such version, or does not belong to this run.
        """
        for run_id, version in self.versions.items():
            if not await self._is_part(run_id):
                raise MisuseError(
                    f"run {run_id!r} is not part of run {self.run_id!r}: send the id of an event as it is"
                )
            if version and not (await self.runs.store.read(run_id, version - 1)).events:
                raise MisuseError(f"run {run_id!r} has no version {version} yet: send the id of the last event")

    async def _is_part(self, run_id: str) -> bool:
        """Return whether a run is that of the stream, or of a sub-agent below it. One that does not exist is not."""
        try:
            header = await self.runs.header(run_id)
            while header.id != self.run_id and header.parent is not None:
                header = await self.runs.header(header.parent)
        except RunNotFoundError:
            return False
        return header.id == self.run_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream."""
        await StepThrottle.enter()  # after a restart all clients connect at once
        self._send = send
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # a proxy must not collect events
            (b"location", locate_run(scope, self.run_id).encode()),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with self._scope, self.hub.subscribe(self.root_id) as self._deltas:
            self.scopes.add(self._scope)
            try:
                await self._stream(receive)
            finally:
                self.scopes.discard(self._scope)
        with anyio.move_on_after(END_TIMEOUT_S, shield=True):
            text = self.encoder.encode_cut(self._ending) if self._scope.cancelled_caught else ""
            await send({"type": "http.response.body", "body": text.encode(), "more_body": False})

    def end(self, ending: Ending) -> None:
        """End the stream before its run."""
        self._ending = ending
        self._scope.cancel()

    async def _stream(self, receive: Receive) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._leave_with_client, receive, tasks)
            try:
                await self._write(self.encoder.encode_start(await self._fold(self.run_id)))
                tasks.start_soon(self._keep_alive)
                tasks.start_soon(self._send_deltas)
                await self._follow(self.run_id)
                async with self._lock:  # no piece of text follows
                    run = self._folded.get(self.run_id)
                    await self._send_text(self.encoder.encode_end(run, format_position(self.versions)))
                    tasks.cancel_scope.cancel()
            except StoreError as error:  # the client connects again, and continues where this stream ends
                _log.warning("the stream of run %s ends: %s", self.run_id, error)
                ending = Ending.DELETED if isinstance(error, RunNotFoundError) else Ending.RETRY
                await self._write(self.encoder.encode_cut(ending))
            tasks.cancel_scope.cancel()

    async def _leave_with_client(self, receive: Receive, tasks: TaskGroup) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

    async def _keep_alive(self) -> None:
        while True:
            await anyio.sleep(HEARTBEAT_S)
            await self._write(": waiting\n\n")

    async def _send_deltas(self) -> None:
        throttle, queue = StepThrottle.current(), self._deltas
        while True:
            await queue.wait()
            if not throttle.try_acquire():  # all streams have the piece at the same moment
                await throttle.acquire()
            async with self._lock:  # an encoder sees everything in the order in which it is sent
                await self._send_text("".join([self.encoder.encode_delta(*each) for each in queue.take()]))

    async def _follow(self, run_id: str) -> None:
        """Send the events of a run and, at the same time, those of its sub-agents, until all are over.

        If the stream ends when the run waits, the events of sub-agents are sent up to then.
        """
        self._followed.add(run_id)
        self._deltas.follow(run_id)
        activity = _Activity()
        is_blocked = run_id == self.run_id and await self._is_blocked()
        size = 1 if self.encoder.ends_at_wait else MAX_BATCH  # a stream that ends at a wait sends nothing behind it
        with self.feeds.open(await self.runs.header(run_id)) as feed:
            async with anyio.create_task_group() as children:
                if not is_blocked:
                    children.start_soon(self._follow_children, feed, activity, children)
                    async with aclosing(feed.follow(self.versions.get(run_id, 0), size)) as batches:
                        async for batch in batches:
                            for item in batch:
                                activity.note(item)
                            await self._send_events(batch)
                            if is_blocked := run_id == self.run_id and await self._is_blocked():
                                break
                activity.end()
                if is_blocked:
                    async with self._lock:  # so that no event is half sent
                        children.cancel_scope.cancel()
        if is_blocked:
            await self._send_rest_of_children(run_id)

    async def _is_blocked(self) -> bool:
        """Return whether the stream ends because its run waits, and nothing that ends the wait has arrived."""
        run = self._folded.get(self.run_id)
        if not self.encoder.ends_at_wait or run is None or not run.is_waiting:
            return False
        if (await self.runs.store.read(run.id, run.version)).events:
            return False
        return await is_blocked(self.runs.store, run)

    async def _send_rest_of_children(self, run_id: str) -> None:
        """Send the events of sub-agents that were not sent yet, of a run that waits."""
        for child in await self.runs.children(run_id):
            version = self.versions.get(child.id, 0)
            await self._fold(child.id)
            for number, event in enumerate((await self.runs.store.read(child.id, version)).events, version + 1):
                await self._send_events([FeedEvent(run_id=child.id, version=number, event=event)])
            await self._send_rest_of_children(child.id)

    async def _follow_children(self, feed: JournalFeed, activity: _Activity, tasks: TaskGroup) -> None:
        """Follow the runs of sub-agents as they begin: while calls are open, and once more at the end."""
        while True:
            is_over = activity.is_over
            for child in await feed.list_children(self.versions.get(feed.header.id, 0)):
                if child.id not in self._followed:
                    self._followed.add(child.id)
                    await self._fold(child.id)
                    tasks.start_soon(self._follow, child.id)
            if is_over:
                return
            await activity.wait()

    async def _fold(self, run_id: str) -> Run | None:
        """Load a run at the version that the client has, if the encoder needs it."""
        if self.encoder.folds and run_id not in self._folded:
            self._folded[run_id] = await self.runs.load(run_id, at=self.versions.get(run_id, 0))
        return self._folded.get(run_id)

    async def _send_events(self, batch: Sequence[FeedEvent]) -> None:
        """Send events of one run as one chunk."""
        async with self._lock:
            texts = []
            for item in batch:
                run = self._folded.get(item.run_id)
                if run is not None:
                    run = self._folded[item.run_id] = run.apply(item.event)
                self.versions[item.run_id] = item.version
                texts.append(self.encoder.encode_event(item, run, format_position(self.versions)))
            await self._send_text("".join(texts))

    async def _write(self, text: str) -> None:
        """Send a text that does not depend on what else is sent."""
        async with self._lock:
            await self._send_text(text)

    async def _send_text(self, text: str) -> None:
        if text:
            message: Message = {"type": "http.response.body", "body": text.encode(), "more_body": True}
            await self._send(message)


@attrs.define(eq=False, repr=False)
class _Activity:
    """Times at which a run may have begun another: while its calls are open."""

    is_over: bool = False
    _has_calls: bool = False
    _changed: anyio.Event = attrs.field(factory=anyio.Event)

    def note(self, item: FeedEvent) -> None:
        """Note an event of the run."""
        if isinstance(item.event, ToolStarted | ToolsReturned):
            self._has_calls = isinstance(item.event, ToolStarted)
            self._changed.set()

    def end(self) -> None:
        """Note the end of the run."""
        self.is_over = True
        self._changed.set()

    async def wait(self) -> None:
        """Wait until it is time to look for runs of sub-agents again."""
        with anyio.move_on_after(CHILD_POLL_S if self._has_calls else None):
            await self._changed.wait()
        if not self.is_over:
            self._changed = anyio.Event()
