"""Typed, numbered events of an execution, and the streams that deliver them.

They are finer than the journal's events (each piece of text), and nothing depends on their delivery. They are
short-lived, so the classes have no slots: filling slots takes twice as long as filling a dict.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeAlias, TypeVar

import anyio
import attrs

from agentfsm.core.errors import ClosedError, MisuseError, ensure_printable
from agentfsm.core.events import Event
from agentfsm.core.labels import ToolKind
from agentfsm.core.machine import State
from agentfsm.core.messages import JSON, ToolResult
from agentfsm.core.run import A_co, Run
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value
from agentfsm.streaming.detached_task import DetachedTask, cut_off

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Iterator
    from types import TracebackType

T = TypeVar("T")

_log = logging.getLogger("agentfsm.stream")

# Buffered events from which on neighbouring deltas are merged for a slow reader: some seconds of a fast model.
MERGE_THRESHOLD: Final = 256


class _StreamEventBase(Value):
    """Base of all stream events."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values: `type`, `seq`, `run_id`, `turn`, and its own fields that are not None."""
        event: Any = self
        kind = event.type if isinstance(event, ToolEvent | AgentEvent) else _EVENT_NAMES[type(event)]
        fields = {"type": str(kind), "seq": event.seq, "run_id": event.run_id, "turn": event.turn}
        return fields | attrs.asdict(event, filter=lambda field, value: field.name not in fields and value is not None)


@attrs.frozen(kw_only=True, slots=False)
class StateChanged(_StreamEventBase):
    """The run changed its state by a transition of the state machine."""

    seq: int = 0
    """Number of the event in its stream, from 1 without gaps. Set on delivery, as for all events of this module."""

    run_id: str
    """Id of the run that changed."""

    turn: int
    """Completed turns of the run, 0 or more."""

    state: State
    """State of the run after the transition."""

    event: Event
    """Journal event that caused the transition, as the journal has it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values; the journal event is in the form of the journal, as in a `JournalEvent`."""
        fields = {"type": _EVENT_NAMES[StateChanged], "seq": self.seq, "run_id": self.run_id, "turn": self.turn}
        return {**fields, "state": self.state, "event": self.event.to_dict()}


@attrs.frozen(kw_only=True, slots=False)
class TextDelta(_StreamEventBase):
    """A piece of the answer's text."""

    seq: int = 0
    """Number of the event in its stream, from 1; 0 before delivery."""

    run_id: str
    """Id of the run that is answering."""

    turn: int
    """Number of the turn that the reply belongs to, from 1."""

    attempt: int
    """Number of the model request for this turn, from 1. Text of a higher attempt replaces the text of the lower ones.
    """

    text: str
    """The next piece of the text."""


@attrs.frozen(kw_only=True, slots=False)
class ThinkingDelta(_StreamEventBase):
    """A piece of the model's reasoning before it answers, if the provider exposes it."""

    seq: int = 0
    """Number of the event in its stream, from 1; 0 before delivery."""

    run_id: str
    """Id of the run that is thinking."""

    turn: int
    """Number of the turn that the reply belongs to, from 1."""

    attempt: int
    """Number of the model request for this turn, from 1. Text of a higher attempt replaces the text of the lower ones.
    """

    text: str
    """The next piece of the reasoning."""


_Delta = TypeVar("_Delta", TextDelta, ThinkingDelta)


def build_delta_factory(kind: type[_Delta], run_id: str, turn: int, attempt: int) -> Callable[[str], _Delta]:
    """Return a function that makes a delta of each piece of a text.

    It copies all fields but the text from a template, since a reply has one delta per token. Constructing each delta
    would cost 8 % of the instructions of a turn on SQLite with a reply of 100 tokens (callgrind; `benchmarks chunk`).
    """
    fields = kind(run_id=run_id, turn=turn, attempt=attempt, text="").__dict__
    new = object.__new__

    def delta(text: str) -> _Delta:
        event = new(kind)
        own = event.__dict__
        own |= fields
        own["text"] = text
        return event

    return delta


@attrs.frozen(kw_only=True, slots=False)
class CallDelta(_StreamEventBase):
    """A piece of a tool call that the model is writing."""

    seq: int = 0
    """Number of the event in its stream, from 1; 0 before delivery."""

    run_id: str
    """Id of the run whose model requests the call."""

    turn: int
    """Number of the turn that the reply belongs to, from 1."""

    attempt: int
    """Number of the model request for this turn, from 1. Calls of a higher attempt replace the calls of the lower ones.
    """

    index: int
    """Position of the call in the reply, from 0."""

    call_id: str
    """Id of the call."""

    name: str
    """Name of the tool in the first piece of the call, then empty."""

    arguments: str
    """The next piece of the JSON text of the arguments."""


class ToolEventType(StrEnum):
    """Type of a `ToolEvent`: the stage that a tool call, or the queue, has reached."""

    QUEUED = "tool_queued"
    STARTED = "tool_started"
    PROGRESS = "tool_progress"
    COMPLETED = "tool_completed"
    ERROR = "tool_error"
    PAUSED = "tool_paused"
    DRAINED = "queue_drained"


class AgentEventType(StrEnum):
    """Type of an `AgentEvent`: the stage that a subagent call has reached."""

    STARTED = "agent_started"
    PROGRESS = "agent_progress"
    COMPLETED = "agent_completed"
    PAUSED = "agent_paused"


@attrs.frozen(kw_only=True, slots=False)
class ToolEvent(_StreamEventBase):
    """A tool call changed its stage or reported progress, or the queue is empty."""

    seq: int = 0
    """Number of the event in its stream, from 1; 0 before delivery."""

    type: ToolEventType
    """Type of the event, which decides the fields that are set."""

    run_id: str = ""
    """Id of the run that the call belongs to; empty if the queue serves no run."""

    turn: int = 0
    """Number of the turn that the call belongs to, from 1; 0 if the queue serves no run."""

    call_id: str = ""
    """Id of the call; empty for queue_drained."""

    tool: str = ""
    """Name of the tool; empty for queue_drained."""

    kind: ToolKind | None = None
    """Kind of the tool, direct or agent; None for an unknown tool and for queue_drained."""

    arguments: Mapping[str, JSON] = attrs.field(factory=dict)
    """Arguments of the call, including edits by a person. Empty for tool_progress, queue_drained, and if the model did
    not write a JSON object.
    """

    position: int | None = None
    """tool_queued: position in call order, from 0."""

    estimate_s: float | None = None
    """tool_queued: usual seconds of a call, if the tool declares them."""

    duration_s: float | None = None
    """tool_completed, tool_error: seconds that the call took."""

    success: bool | None = None
    """tool_completed, tool_error: whether the call succeeded."""

    message: str = ""
    """tool_error: the error text. tool_progress: the message of the tool."""

    result: str | None = None
    """tool_completed, tool_error: the text of the result. None if the call has no result, because it was cut off or
    dropped with the reply that requested it.
    """

    @property
    def is_end(self) -> bool:
        """Whether the call has ended with a result, or is paused."""
        return self.result is not None or self.type is ToolEventType.PAUSED


@attrs.frozen(kw_only=True, slots=False)
class AgentEvent(_StreamEventBase):
    """A subagent call changed its stage. Each agent_started is followed by one agent_completed or agent_paused.

    A paused agent waits for a decision in its run. It starts again, under the same id, after the decision.
    """

    seq: int = 0
    """Number of the event in its stream, from 1; 0 before delivery."""

    type: AgentEventType
    """Type of the event, which decides the fields that are set."""

    run_id: str
    """Id of the parent run, which called the agent."""

    call_id: str
    """Id of the call in the parent run."""

    agent: str
    """Name of the called agent."""

    child_id: str
    """Id of the agent's own run."""

    turn: int
    """Number of the agent's current turn, from 1; 0 before its first turn."""

    limit: int
    """Maximum of turns of the agent (`Limits.turns`)."""

    duration_s: float | None = None
    """agent_completed, agent_paused: seconds since agent_started."""

    success: bool | None = None
    """agent_completed: whether the agent's run ended in state DONE."""


@attrs.frozen(kw_only=True, slots=False)
class UsageReported(_StreamEventBase):
    """The usage of a model call that made a turn."""

    seq: int = 0
    """Number of the event in its stream, from 1; 0 before delivery."""

    run_id: str
    """Id of the run."""

    turn: int
    """Number of the turn, from 1."""

    usage: Usage
    """Usage of this model call."""

    total: Usage
    """Usage of the run so far, including this call."""


@attrs.frozen(kw_only=True, slots=False)
class BudgetWarning(_StreamEventBase):
    """The run has used the share `Limits.warn_at` of a limit. Reported once per limit in each execution."""

    seq: int = 0
    """Number of the event in its stream, from 1; 0 before delivery."""

    run_id: str
    """Id of the run."""

    turn: int
    """Completed turns of the run, 0 or more."""

    limit: str
    """Name of the limit: "turns", "tokens", "usd", "seconds" or "tool_calls"."""

    used: float
    """Amount used, in the unit of the limit."""

    of: float
    """The limit itself, in the same unit."""


@attrs.frozen(kw_only=True, slots=False)
class RunEnded(_StreamEventBase):
    """The execution has ended: the run is over or waits. The last event of a stream."""

    seq: int = 0
    """Number of the event in its stream, from 1; 0 before delivery."""

    run_id: str
    """Id of the run."""

    turn: int
    """Completed turns of the run, 0 or more."""

    run: Run[Any]
    """The run as it is at the end of the execution."""

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values: the `state` and `stop_reason` of the run, and its `pending` inputs."""
        fields = {"type": _EVENT_NAMES[RunEnded], "seq": self.seq, "run_id": self.run_id, "turn": self.turn}
        pending = json.loads(json.dumps([attrs.asdict(item) for item in self.run.pending]))
        return {**fields, "state": self.run.state, "stop_reason": self.run.stop_reason, "pending": pending}


StreamEvent: TypeAlias = (
    StateChanged
    | TextDelta
    | ThinkingDelta
    | CallDelta
    | ToolEvent
    | AgentEvent
    | UsageReported
    | BudgetWarning
    | RunEnded
)
"""Any event of a stream."""

Listener: TypeAlias = Callable[[StreamEvent], None]


class _Channel(Generic[T]):
    """Events on their way from an execution to the reader of its stream.

    The execution refers to the channel and not to the stream, so that a stream without a reader is collected.
    """

    def __init__(self, source: str, value: Any) -> None:
        self.source = source  # for messages
        self.value = value  # the newest state of the run, or the results of the queue
        self.events: deque[T] = deque()
        self.wakeup: anyio.Event | None = None  # set while the reader waits
        self.is_finished = False
        self.was_cut_off = False
        self.has_reader = True
        self._merge_at = MERGE_THRESHOLD  # length of the buffer at which deltas are merged
        self._error: BaseException | None = None

    def put(self, event: T) -> None:
        self.events.append(event)
        if len(self.events) >= self._merge_at:
            self.events = deque(_merge_deltas(self.events))
            self._merge_at = max(
                MERGE_THRESHOLD, 2 * len(self.events)
            )  # events that cannot be merged are not retried each time
        if self.wakeup is not None:
            self.wakeup.set()
            self.wakeup = None

    def set_value(self, value: Any) -> None:
        self.value = value

    def finish(self, error: BaseException | None, was_cut_off: bool) -> None:
        self._error, self.was_cut_off, self.is_finished = error, was_cut_off, True
        if not self.has_reader:
            self.log_error()
        if self.wakeup is not None:
            self.wakeup.set()

    def raise_error(self, *, only_interrupts: bool = False) -> None:
        """Raise the error of the execution, once."""
        error = self._error
        if error is not None and not (only_interrupts and isinstance(error, Exception)):
            self._error = None
            raise error

    def log_error(self) -> None:
        """Log the error of the execution if it was not raised to the reader."""
        error, self._error = self._error, None
        if error is not None:
            _log.error(
                "the stream of %s was left before its error was read", self.source, exc_info=ensure_printable(error)
            )


class EventStream(Generic[T]):
    """Stream of events of an execution; base of `RunStream` and `QueueStream`.

    The execution has a task of its own in the event loop and the context of the reader, but no part in its task groups
    and cancel scopes. So a stream may be left in any task: an async generator around it may be closed by another task,
    or by the event loop after a `break`.

    Attributes:
        usage_hint: Example of the correct use, quoted in error messages.
    """

    usage_hint: ClassVar[str]

    def __init__(self, channel: _Channel[T], producer: Callable[[], Awaitable[object]], owner: object = None) -> None:
        """Prepare the stream.

        Args:
            channel: Channel of the events.
            producer: Execution that puts events into the channel, called when the block is entered. It must not refer
                to the stream.
            owner: Object whose closing cuts off the execution.
        """
        self._channel = channel
        self._producer = producer
        self._owner = owner
        self._seq = 0
        self._task: DetachedTask | None = None  # set when the block is entered
        self._is_left = False

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise MisuseError(f"a stream can be entered only once: make another, {self.usage_hint}")
        self._task = DetachedTask(self._producer, self._channel.finish, self._owner)
        self._task.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_left = True
        await self.aclose()
        self._channel.raise_error(only_interrupts=kind is not None)
        self._channel.log_error()

    async def aclose(self) -> None:
        """Cut off the execution, if it is not over, and wait until its lease is released. Leaving the block does it.

        May be called in any task and more than once. The wait is shielded from cancellation. Inside of the execution
        itself, and in another event loop, this does not wait.
        """
        if self._task is not None:
            await cut_off([self._task])

    def __del__(self) -> None:
        # A block that was never left: the reader's coroutine or generator was collected, and its clean-up did not run.
        task: DetachedTask | None = getattr(self, "_task", None)
        if task is None:
            return
        self._channel.has_reader = False
        self._channel.log_error()
        if not task.is_over:
            task.cancel_soon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        channel = self._channel
        while not channel.events:
            if channel.is_finished:
                channel.raise_error()
                if channel.was_cut_off and not self._is_left:
                    raise ClosedError(
                        f"the stream of {channel.source} was closed while it was read, and the execution was cut off: "
                        "`agent.resume(run_id)` continues a run"
                    )
                raise StopAsyncIteration
            if self._task is None:
                raise MisuseError(f"a stream must be entered before it is read: {self.usage_hint}")
            if channel.wakeup is None:
                channel.wakeup = anyio.Event()
            await channel.wakeup.wait()
        self._seq += 1
        event = channel.events.popleft()
        event.__dict__["seq"] = self._seq  # not shared before delivery, so no copy is needed
        return event


# Executes a run and reports its events and each new state of the run.
ExecuteRun: TypeAlias = "Callable[[Listener, Callable[[Run[Any]], None]], Awaitable[Run[A_co]]]"


class RunStream(EventStream[StreamEvent], Generic[A_co]):
    """Events of one execution: `async with agent.stream("...") as s: async for event in s: ...`.

    No event is dropped: if the reader is slow, neighbouring deltas are merged. Leaving the block early cuts off the
    execution, whichever task leaves it; `resume` continues the run. An error of the execution is raised at the end of
    the events, or when the block is left; if the block is left by another exception, it is logged. Reading a stream
    that another task has closed (`aclose`, or that of the agent) raises `ClosedError`.
    """

    usage_hint = "async with agent.stream(...) as s: async for event in s: ..."

    def __init__(self, execute: ExecuteRun[A_co], run: Run[A_co], owner: object = None) -> None:
        """Prepare the stream of a run; `execute` is called when the block is entered.

        Args:
            execute: Function that executes the run. It must not refer to the stream.
            run: The run.
            owner: Object whose closing cuts off the execution: the store.
        """
        channel: _Channel[StreamEvent] = _Channel(f"run {run.id!r}", run)

        async def produce() -> None:
            ended = channel.value = await execute(channel.put, channel.set_value)
            channel.put(RunEnded(run_id=ended.id, turn=ended.turn, run=ended))

        super().__init__(channel, produce, owner)

    @property
    def run(self) -> Run[A_co]:
        """The latest state of the run; before the first event, the run passed in."""
        run: Run[A_co] = self._channel.value  # the agent's own run, so it has the agent's answer type
        return run

    @property
    def partial(self) -> Any:
        """Partial answer of an agent with an `output_type`, from the events delivered so far; unvalidated JSON.

        None before any of it has arrived. Each access parses all the text so far, so reading it after each delta takes
        time quadratic in the length of the answer.
        """
        return None


class TypedStream(RunStream[A_co]):
    """Stream of an agent with an `output_type`. It keeps the deltas of the latest reply for `partial`."""

    def __init__(
        self,
        execute: ExecuteRun[A_co],
        run: Run[A_co],
        parse_partial: Callable[[Sequence[TextDelta | CallDelta]], Any],
        owner: object = None,
    ) -> None:
        """Prepare the stream; `parse_partial` builds the partial answer from the deltas of a reply."""
        super().__init__(execute, run, owner)
        self._parse_partial = parse_partial
        self._draft_deltas: list[TextDelta | CallDelta] = []

    @property
    def partial(self) -> Any:
        """Partial answer so far; see `RunStream.partial`."""
        return self._parse_partial(self._draft_deltas)

    async def __anext__(self) -> StreamEvent:
        event = await super().__anext__()
        if isinstance(event, TextDelta | CallDelta) and event.run_id == self.run.id:
            newest = self._draft_deltas[-1] if self._draft_deltas else event
            if (newest.turn, newest.attempt) != (event.turn, event.attempt):
                self._draft_deltas.clear()
            self._draft_deltas.append(event)
        return event


class QueueStream(EventStream[StreamEvent]):
    """Events of calls in a stand-alone queue: `async with queue.stream(calls) as s: async for event in s: ...`.

    Leaving the block early cancels the running calls.
    """

    usage_hint = "async with queue.stream(calls) as s: async for event in s: ..."

    def __init__(self, execute: Callable[[Listener], Awaitable[list[ToolResult]]]) -> None:
        """Prepare the stream; `execute` is called when the block is entered."""
        channel: _Channel[StreamEvent] = _Channel("a queue", [])

        async def produce() -> None:
            channel.value = await execute(channel.put)

        super().__init__(channel, produce)

    @property
    def results(self) -> list[ToolResult]:
        """Results in call order, set when the events have ended."""
        results: list[ToolResult] = self._channel.value
        return results


# Fields that are concatenated when deltas are merged.
_TEXT_FIELDS: Final = {TextDelta: ("text",), ThinkingDelta: ("text",), CallDelta: ("name", "arguments")}


def _merge_deltas(events: Iterable[Any]) -> Iterator[Any]:
    """Yield the events, merging neighbouring deltas of the same text."""
    for _, group in groupby(events, _merge_key):
        deltas = list(group)
        if len(deltas) == 1:
            yield deltas[0]
        else:
            joined = {
                name: "".join([getattr(delta, name) for delta in deltas]) for name in _TEXT_FIELDS[type(deltas[0])]
            }
            yield attrs.evolve(deltas[0], **joined)


def _merge_key(event: Any) -> object:
    """Return a key that is equal for deltas that may be merged, and unique for other events."""
    if type(event) in _TEXT_FIELDS:
        return type(event), event.run_id, event.turn, event.attempt, getattr(event, "call_id", None)
    return id(event)


_EVENT_NAMES: Final[dict[type, str]] = {
    StateChanged: "state_changed",
    TextDelta: "text_delta",
    ThinkingDelta: "thinking_delta",
    CallDelta: "call_delta",
    UsageReported: "usage",
    BudgetWarning: "budget_warning",
    RunEnded: "run_ended",
}
