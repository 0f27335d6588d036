"""Start calls while the model still streams: the read-only calls at the beginning of the reply.

A call is complete when the model says so (`CallChunk.is_complete`), when the next one begins, or when the model states
why it stopped; nothing is parsed before that. Early calls have no side effects, so if the reply fails, they are dropped
with it and nothing is journalled. All other calls wait until the reply is complete and in the journal.
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
from agentfsm.ports.model import Chunk, FinishChunk, FinishReason, ProposedCall, TextChunk, ThinkingChunk
from agentfsm.tools.queue.scheduler import Scheduler, ToolQueue

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall
    from agentfsm.tools.tool import Tool

# Finish reasons that imply that the last call is complete.
COMPLETE_REASONS = frozenset({FinishReason.STOP, FinishReason.TOOL_CALLS})


@attrs.define(eq=False, repr=False)
class _WorkerGroup:
    """Starts workers that can be cancelled together, without cancelling the model that still streams beside them."""

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
    """A partially streamed call."""

    name: str = ""
    pieces: list[str] = attrs.field(factory=list)
    is_complete: bool = False
    """Whether the model has said that no piece follows."""


@attrs.frozen
class EagerAttempt(Value):
    """The queue and callbacks of one attempt at the model. Calls of a dropped attempt must not affect another one."""

    queue: ToolQueue
    """Queue whose host holds results back until the reply is in the journal."""

    release: Callable[[], None]
    """Commits the results that were held back."""

    discard: Callable[[], None]
    """Discards the results that were held back."""

    try_start_call: Callable[[], bool]
    """Reserves one of the run's remaining calls; returns False if none is left."""


@attrs.define(eq=False, repr=False)
class EagerCalls:
    """The calls that a streamed reply has started. Created for each THINK; each attempt at the model starts anew."""

    make_attempt: Callable[[], EagerAttempt]
    """Creates the queue and callbacks for an attempt at the model."""

    build_call: Callable[[int, ProposedCall], ToolCall]
    """Builds a call from its position in the reply and the proposed call, as is done for a complete reply."""

    may_start: Callable[[Tool[..., Any]], bool]
    """Returns whether calls of a tool may start before the reply is complete."""

    _attempt: EagerAttempt | None = None
    _workers: _WorkerGroup | None = None
    _scheduler: Scheduler | None = None
    _tasks: TaskGroup = attrs.field(factory=anyio.create_task_group, init=False)
    _drafts: dict[int, _CallDraft] = attrs.field(factory=dict)
    _started: list[ToolCall] = attrs.field(factory=list)
    _can_start: bool = False
    """Whether the next call may start early, because all before it have."""

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
                return False  # raised by the body: propagate it unchanged
            raise first from first.__cause__

    def begin_attempt(self) -> None:
        """Begin a new attempt at the model: cancel and forget the calls of the earlier one."""
        self.discard()
        self._attempt, self._workers = self.make_attempt(), _WorkerGroup(self._tasks)
        self._scheduler = Scheduler(self._attempt.queue, self._workers.start)
        self._drafts, self._started, self._can_start = {}, [], True

    def discard(self) -> None:
        """Cancel running calls and discard ended ones."""
        if self._attempt is not None:
            self._attempt.discard()
        if self._workers is not None:
            self._workers.cancel()
        self._workers = self._scheduler = None
        self._can_start = False

    def feed(self, chunk: Chunk) -> None:
        """Process the next chunk of the reply."""
        if not self._can_start or isinstance(chunk, TextChunk | ThinkingChunk):
            return
        if isinstance(chunk, FinishChunk):
            if chunk.reason in COMPLETE_REASONS:
                self._start_newest()
            self._can_start = False
            return
        newest = len(self._drafts) - 1
        if chunk.index > newest:
            self._start_newest()
        if chunk.index not in (newest, newest + 1) or chunk.index < 0:
            self.discard()  # out of order: a started call may have been incomplete
            return
        draft = self._drafts.setdefault(chunk.index, _CallDraft())
        if draft.is_complete and (chunk.name or chunk.arguments):
            self.discard()  # the call was not complete: it may have been started
            return
        draft.name += chunk.name
        draft.pieces.append(chunk.arguments)
        if chunk.is_complete:
            draft.is_complete = True
            self._start_newest()

    def _start_newest(self) -> None:
        """Start the latest call, if it may start early and all before it were started."""
        if not self._can_start or len(self._drafts) != len(self._started) + 1:
            return
        if self._attempt is None or self._scheduler is None:  # an open call implies both
            return
        draft, queue = self._drafts[len(self._started)], self._attempt.queue
        tool = queue.host.find_tool(queue.registry, draft.name)
        if tool is None or not self.may_start(tool) or queue.registry.limiters_for(tool):
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
        """Compare the started calls with the complete reply; discard all if they differ. Return whether any remain."""
        self._can_start = False
        shapes = [_call_identity(call) for call in calls[: len(self._started)]]
        if shapes != [_call_identity(call) for call in self._started]:
            self.discard()
        return bool(self._started) and self._scheduler is not None

    async def finish(self) -> None:
        """Commit the results, and wait until all started calls have ended."""
        if self._scheduler is not None and self._attempt is not None:
            self._attempt.release()
            await self._scheduler.drain()


def _call_identity(call: ToolCall) -> tuple[str, str, str]:
    return call.id, call.name, call.arguments
