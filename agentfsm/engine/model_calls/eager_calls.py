"""Calls that start while the model still streams: the read-only ones at the head of the reply.

A call is complete when the next one begins, or the model says why it stopped; nothing is parsed before that. What
starts here changes nothing in the world, so a reply that fails is simply dropped with it: nothing was journalled. All
other calls wait until the reply is whole and in the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import attrs
from anyio.abc import TaskGroup

from agentfsm.core.errors import first_error
from agentfsm.core.value import Value
from agentfsm.ports.model import CallChunk, Chunk, FinishChunk, FinishReason, ProposedCall, TextChunk, ThinkingChunk
from agentfsm.tools.queue.scheduler import Scheduler, ToolQueue

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall

# Reasons to stop that say that the last call is complete.
COMPLETE_REASONS = frozenset({FinishReason.STOP, FinishReason.TOOL_CALLS})


@attrs.define(eq=False, repr=False)
class _WorkerGroup:
    """Starts workers that can be cancelled together, apart from the model that still streams beside them."""

    tasks: TaskGroup
    _is_cancelled: bool = False
    _handles: list[anyio.TaskHandle[None]] = attrs.field(factory=list)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._handles.append(self.tasks.create_task(work))
        if self._is_cancelled:
            self._handles[-1].cancel()

    def cancel(self) -> None:
        self._is_cancelled = True
        for handle in self._handles:
            handle.cancel()


@attrs.define(eq=False, repr=False)
class _CallDraft:
    """A call as it streams in."""

    name: str = ""
    pieces: list[str] = attrs.field(factory=list)


@attrs.frozen
class EagerAttempt(Value):
    """What serves the calls of one attempt at the model: what a dropped one still does must reach no other."""

    queue: ToolQueue
    """Its host holds results back until the reply is in the journal."""

    release: Callable[[], None]
    """Lets the results go that were held back."""

    discard: Callable[[], None]
    """Forgets them."""

    try_start_call: Callable[[], bool]
    """Takes a place among the calls that the run may make; False where there is none."""


@attrs.define(eq=False, repr=False)
class EagerCalls:
    """What a streamed reply has started. One for each THINK; each attempt at the model begins anew."""

    make_attempt: Callable[[], EagerAttempt]
    """Makes what each attempt at the model needs."""

    build_call: Callable[[int, ProposedCall], ToolCall]
    """Makes a call of what the model wrote, by its place in the reply, as it is done when that is whole."""

    _attempt: EagerAttempt | None = None
    _workers: _WorkerGroup | None = None
    _scheduler: Scheduler | None = None
    _tasks: TaskGroup = attrs.field(factory=anyio.create_task_group, init=False)
    _drafts: dict[int, _CallDraft] = attrs.field(factory=dict)
    _started: list[ToolCall] = attrs.field(factory=list)
    _can_start: bool = False
    """Whether the next call may still start: all before it have."""

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        self.discard()
        try:
            return await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            first = first_error(group)
            if first is error:
                return False  # the body's own: it goes on as it is
            raise first from first.__cause__

    def begin_attempt(self) -> None:
        """Begin with a new attempt at the model: what an earlier one started is cancelled and forgotten."""
        self.discard()
        self._attempt, self._workers = self.make_attempt(), _WorkerGroup(self._tasks)
        self._scheduler = Scheduler(self._attempt.queue, self._workers.start)
        self._drafts, self._started, self._can_start = {}, [], True

    def discard(self) -> None:
        """Cancel what runs, and forget what has ended."""
        if self._attempt is not None:
            self._attempt.discard()
        if self._workers is not None:
            self._workers.cancel()
        self._workers = self._scheduler = None
        self._can_start = False

    def feed(self, chunk: Chunk) -> None:
        """Take the next piece of the reply."""
        if not self._can_start or isinstance(chunk, TextChunk | ThinkingChunk):
            return
        if isinstance(chunk, FinishChunk):
            if chunk.reason in COMPLETE_REASONS:
                self._start_newest()
            self._can_start = False
            return
        self._feed_call(chunk)

    def _feed_call(self, chunk: CallChunk) -> None:
        newest = len(self._drafts) - 1
        if chunk.index > newest:
            self._start_newest()
        if chunk.index not in (newest, newest + 1) or chunk.index < 0:
            self.discard()  # out of order: what was taken for complete may not have been
            return
        draft = self._drafts.setdefault(chunk.index, _CallDraft())
        draft.name += chunk.name
        draft.pieces.append(chunk.arguments)

    def _start_newest(self) -> None:
        """Start the newest call, if all before it were started and it may."""
        if not self._can_start or len(self._drafts) != len(self._started) + 1:
            return
        if self._attempt is None or self._scheduler is None:  # what is open has both
            return
        draft, queue = self._drafts[len(self._started)], self._attempt.queue
        tool = queue.host.find_tool(queue.registry, draft.name)
        if tool is None or not tool.may_start_early or queue.registry.limiters_for(tool):
            self._can_start = False
            return
        call = self.build_call(
            len(self._started), ProposedCall(id="", name=draft.name, arguments="".join(draft.pieces))
        )
        if call.malformed is not None or call.repaired is not None or not self._attempt.try_start_call():
            self._can_start = False
            return
        self._started.append(call)
        self._scheduler.add(call)
        self._scheduler.start_workers()

    def keep_matching(self, calls: Sequence[ToolCall]) -> bool:
        """Compare what was started with the whole reply, and drop all where they differ; return whether any is left."""
        self._can_start = False
        shapes = [_call_identity(call) for call in calls[: len(self._started)]]
        if shapes != [_call_identity(call) for call in self._started]:
            self.discard()
        return bool(self._started) and self._scheduler is not None

    async def finish(self) -> None:
        """Let the results go, and wait until all that was started has ended."""
        if self._scheduler is not None and self._attempt is not None:
            self._attempt.release()
            await self._scheduler.drain()


def _call_identity(call: ToolCall) -> tuple[str, str, str]:
    return call.id, call.name, call.arguments
