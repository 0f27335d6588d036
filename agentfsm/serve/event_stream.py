"""Server-sent events of a run and its sub-agents: the journals, and the text that the model is writing.

The id of an event is the version vector: the version of each run's journal that the client has, as in
`RUN:12,CHILD:3`. A client that sends it back, as `Last-Event-ID` or as `after`, misses no event of a journal and
gets none twice, also from another process. Pieces of text have no id: they are sent if this process executes the run,
and dropped for a client that lags behind.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias
from urllib.parse import quote, unquote

import anyio
import attrs

from agentfsm.core.errors import MisuseError, RunNotFoundError, StoreError
from agentfsm.core.events import ToolsReturned, ToolStarted
from agentfsm.streaming.stream import CallDelta, TextDelta, ThinkingDelta

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agentfsm.engine.follow import JournalEvent
    from agentfsm.runs import Runs
    from agentfsm.streaming.stream import StreamEvent
    from agentfsm.web.http_guard import Message, Receive, Scope, Send

_log = logging.getLogger("agentfsm.serve")

# Seconds between two comments on a stream without events, so that proxies keep the connection.
HEARTBEAT_S: Final = 15.0
# Seconds between two looks for runs of sub-agents while calls are open.
CHILD_POLL_S: Final = 0.5
# Milliseconds after which a browser connects again.
RETRY_MS: Final = 1_000
# Pieces of text that are kept for a client that lags behind.
MAX_DELTAS: Final = 1_000
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


def format_position(versions: Mapping[str, int]) -> str:
    """Format a version vector."""
    return ",".join(f"{quote(run_id, safe='')}:{version}" for run_id, version in versions.items())


@attrs.define(eq=False, repr=False)
class DeltaHub:
    """Passes the text that models write to the streams of their runs, within this process."""

    _queues: dict[str, set[_DeltaQueue]] = attrs.field(factory=dict, init=False)
    """Queues of the streams, by the id of the root run."""

    def publish(self, root_id: str, event: StreamEvent) -> None:
        """Pass an event of a run, or of its sub-agents, to the streams that follow the run."""
        if isinstance(event, TextDelta | ThinkingDelta | CallDelta):
            for queue in self._queues.get(root_id, ()):
                queue.put(event)

    @contextmanager
    def subscribe(self, root_id: str) -> Iterator[_DeltaQueue]:
        """Yield a queue of the events of a run."""
        queue = _DeltaQueue()
        self._queues.setdefault(root_id, set()).add(queue)
        try:
            yield queue
        finally:
            self._queues[root_id].discard(queue)
            if not self._queues[root_id]:
                del self._queues[root_id]


@attrs.define(eq=False, repr=False)
class _DeltaQueue:
    """The newest events for one stream."""

    _events: deque[StreamEvent] = attrs.field(factory=lambda: deque(maxlen=MAX_DELTAS), init=False)
    _filled: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    def put(self, event: StreamEvent) -> None:
        self._events.append(event)
        self._filled.set()

    async def take(self) -> StreamEvent:
        """Wait for the next event."""
        while not self._events:
            self._filled = anyio.Event()
            await self._filled.wait()
        return self._events.popleft()


EndReason: TypeAlias = Literal["over", "deleted", "retry", "complete"]
"""Why a stream ends: the run is over; it was deleted; the store failed; or the encoder is complete."""


class StreamEncoder(Protocol):
    """The form of a stream: each method returns text for the client, perhaps none."""

    def begin(self) -> str:
        """Return the beginning of the stream."""
        ...

    def encode_event(self, item: JournalEvent, position: str) -> str:
        """Return an event of a journal, and the position of the stream after it."""
        ...

    def encode_delta(self, event: StreamEvent) -> str:
        """Return a piece of the text that a model is writing."""
        ...

    def end(self, reason: EndReason) -> str:
        """Return the end of the stream."""
        ...

    @property
    def is_complete(self) -> bool:
        """True if the stream ends after the last event, although the run is not over."""
        ...


class JournalEncoder:
    """Server-sent events of the gateway's own: each event of a journal as JSON, with the position as its id."""

    is_complete = False

    def begin(self) -> str:
        """Return the time after which a browser connects again."""
        return f"retry: {RETRY_MS}\n\n"

    def encode_event(self, item: JournalEvent, position: str) -> str:
        """Return an event."""
        return f"id: {position}\ndata: {_to_json(item.to_dict())}\n\n"

    def encode_delta(self, event: StreamEvent) -> str:
        """Return a piece of text, without an id."""
        return f"event: delta\ndata: {_to_json(event.to_dict())}\n\n"

    def end(self, reason: EndReason) -> str:
        """Return `end`, or `retry` if the client should connect again."""
        kind = "retry" if reason == "retry" else "end"
        return f"event: {kind}\ndata: {_to_json({} if reason == 'over' else {'reason': reason})}\n\n"


@attrs.define(eq=False, repr=False, kw_only=True)
class RunEventStream:
    """ASGI app that answers one request with the events of a run, until the run is over or the client leaves."""

    runs: Runs
    run_id: str
    root_id: str
    """Id of the root run, under which the hub has the text of the models."""

    versions: Versions
    """Versions that the client has, by run."""

    hub: DeltaHub
    scopes: set[anyio.CancelScope]
    """Scopes of the active streams, which the shutdown of the server cancels."""

    encoder: StreamEncoder = attrs.field(factory=JournalEncoder)
    """Form of the stream."""

    _send: Send = attrs.field(init=False)
    _tasks: TaskGroup = attrs.field(init=False)
    _lock: anyio.Lock = attrs.field(factory=anyio.Lock, init=False)
    _followed: set[str] = attrs.field(factory=set, init=False)

    async def check(self) -> None:
        """Check that the runs have the versions that the client says it has.

        Raises:
            MisuseError: when a run has no such version, or does not belong to this run.
        """
        for run_id, version in self.versions.items():
            stored = await self.runs.store.read(run_id, max(0, version - 1))
            header = stored.header
            while header.id != self.run_id and header.parent is not None:
                header = await self.runs.header(header.parent)
            if header.id != self.run_id:
                raise MisuseError(
                    f"run {run_id!r} is not part of run {self.run_id!r}: send the id of an event as it is"
                )
            if version and not stored.events:
                raise MisuseError(f"run {run_id!r} has no version {version} yet: send the id of the last event")

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Stream."""
        self._send = send
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # a proxy must not collect events
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write(self.encoder.begin())
        with anyio.CancelScope() as scope:
            self.scopes.add(scope)
            try:
                await self._stream(receive)
            finally:
                self.scopes.discard(scope)
        with anyio.CancelScope(shield=True):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, receive: Receive) -> None:
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._leave_with_client, receive, tasks)
            tasks.start_soon(self._keep_alive)
            tasks.start_soon(self._send_deltas)
            try:
                await self._follow(self.run_id)
                await self._write(self.encoder.end("over"))
            except StoreError as error:  # the client connects again, and continues where this stream ends
                _log.warning("the stream of run %s ends: %s", self.run_id, error)
                await self._write(self.encoder.end("deleted" if isinstance(error, RunNotFoundError) else "retry"))
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
        with self.hub.subscribe(self.root_id) as queue:
            while True:
                event = await queue.take()
                if event.run_id in self._followed:
                    await self._write(self.encoder.encode_delta(event))

    async def _follow(self, run_id: str) -> None:
        """Send the events of a run and, at the same time, those of its sub-agents, until all are over."""
        self._followed.add(run_id)
        activity = _Activity()
        async with anyio.create_task_group() as children:
            children.start_soon(self._follow_children, run_id, activity, children)
            async for item in self.runs.events(run_id, after=self.versions.get(run_id, 0)):
                activity.note(item)
                await self._send_event(item)
            activity.end()

    async def _follow_children(self, run_id: str, activity: _Activity, tasks: TaskGroup) -> None:
        """Follow the runs of sub-agents as they begin: while calls are open, and once more at the end."""
        while True:
            is_over = activity.is_over
            for child in await self.runs.children(run_id):
                if child.id not in self._followed:
                    self._followed.add(child.id)
                    tasks.start_soon(self._follow, child.id)
            if is_over:
                return
            await activity.wait()

    async def _send_event(self, item: JournalEvent) -> None:
        async with self._lock:
            self.versions[item.run_id] = item.version
            await self._send_text(self.encoder.encode_event(item, format_position(self.versions)))
            if self.encoder.is_complete:
                await self._send_text(self.encoder.end("complete"))
                self._tasks.cancel_scope.cancel()

    async def _write(self, text: str) -> None:
        async with self._lock:
            await self._send_text(text)

    async def _send_text(self, text: str) -> None:
        if not text:
            return
        message: Message = {"type": "http.response.body", "body": text.encode(), "more_body": True}
        await self._send(message)


@attrs.define(eq=False, repr=False)
class _Activity:
    """Times at which a run may have begun another: while its calls are open."""

    is_over: bool = False
    _has_calls: bool = False
    _changed: anyio.Event = attrs.field(factory=anyio.Event)

    def note(self, item: JournalEvent) -> None:
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


def _to_json(value: Any) -> str:
    """Return JSON on one line. A lone surrogate, which UTF-8 cannot encode, is escaped as all of non-ASCII is."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
