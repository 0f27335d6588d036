"""What a watcher sees: typed, numbered events while a run is driven, and the stream that hands them out.

These are not the journal's facts: they are finer (each piece of text), and nothing depends on their being seen.
None of them stays, so they have no slots, which take twice as long to fill as a dict.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeAlias, TypeVar

import anyio
import attrs

from agentfsm.core.errors import MisuseError, first_error
from agentfsm.core.machine import State
from agentfsm.core.messages import JSON, ToolResult
from agentfsm.core.run import A_co, Run
from agentfsm.core.tool_traits import ToolKind
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Iterator
    from types import TracebackType

T = TypeVar("T")

# Events that wait for a slow reader before neighbouring deltas are merged: some seconds of a fast model.
MERGE_THRESHOLD: Final = 256


class _StreamEventBase(Value):
    """The base of all events of a stream."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values: `type`, `seq`, `run_id`, `turn`, and its own fields that are not None."""
        told: Any = self
        kind = told.type if isinstance(told, ToolEvent | AgentEvent) else _EVENT_NAMES[type(told)]
        fields = {"type": str(kind), "seq": told.seq, "run_id": told.run_id, "turn": told.turn}
        return fields | attrs.asdict(told, filter=lambda field, value: field.name not in fields and value is not None)


@attrs.frozen(kw_only=True, slots=False)
class StateChanged(_StreamEventBase):
    """The run moved along an arrow of the table."""

    seq: int = 0
    """The event's number in the stream, from 1 without gaps; set when it is handed out, as in all events here."""

    run_id: str
    turn: int
    state: State
    event: str
    """The name of the journal's event that moved it."""


@attrs.frozen(kw_only=True, slots=False)
class TextDelta(_StreamEventBase):
    """A piece of the answer's text."""

    seq: int = 0
    run_id: str
    turn: int
    attempt: int
    """From 1; a higher one replaces the text of the lower ones, since the model is asked anew."""

    text: str


@attrs.frozen(kw_only=True, slots=False)
class ThinkingDelta(_StreamEventBase):
    """A piece of what the model thinks before it answers, where its provider shows that."""

    seq: int = 0
    run_id: str
    turn: int
    attempt: int
    """As of a TextDelta."""

    text: str


_Delta = TypeVar("_Delta", TextDelta, ThinkingDelta)


def build_delta_factory(kind: type[_Delta], run_id: str, turn: int, attempt: int) -> Callable[[str], _Delta]:
    """Return what makes a delta of each piece of a text.

    Each copies the fields of the first but for the text, since there is one for each token of a reply. Made anew, they
    cost 8 % of the instructions of a turn on SQLite whose reply has 100 tokens (callgrind; `benchmarks chunk`).
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
    """A piece of a tool call."""

    seq: int = 0
    run_id: str
    turn: int
    attempt: int
    index: int
    """Which call of the reply, from 0."""

    call_id: str
    name: str
    """The tool's name with the first piece, then empty."""

    arguments: str
    """The next piece of the arguments' JSON text."""


class ToolEventType(StrEnum):
    """What happened to a tool call."""

    QUEUED = "tool_queued"
    STARTED = "tool_started"
    PROGRESS = "tool_progress"
    COMPLETED = "tool_completed"
    ERROR = "tool_error"
    PAUSED = "tool_paused"
    DRAINED = "queue_drained"


class AgentEventType(StrEnum):
    """What happened to an agent that is a tool."""

    STARTED = "agent_started"
    PROGRESS = "agent_progress"
    COMPLETED = "agent_completed"
    PAUSED = "agent_paused"


@attrs.frozen(kw_only=True, slots=False)
class ToolEvent(_StreamEventBase):
    """Something happened to a tool call."""

    seq: int = 0
    type: ToolEventType
    run_id: str = ""
    turn: int = 0
    call_id: str = ""
    """Empty for queue_drained, as `tool`."""

    tool: str = ""
    kind: ToolKind | None = None
    """Whether an agent is behind it; None for a tool that does not exist, and for queue_drained."""

    arguments: Mapping[str, JSON] = attrs.field(factory=dict)
    """Of the call, as it runs: those that a person has put in place of the model's. Empty for tool_progress,
    queue_drained, and where the model wrote no JSON object.
    """

    position: int | None = None
    """Tool_queued: the place in call order, from 0."""

    estimate_s: float | None = None
    """Tool_queued: seconds that it usually takes, where the tool says so."""

    duration_s: float | None = None
    """Tool_completed and tool_error."""

    success: bool | None = None
    """Tool_completed and tool_error."""

    message: str = ""
    """Tool_error: what went wrong. tool_progress: what the tool says."""

    result: str | None = None
    """Tool_completed and tool_error: the text of the call's result. None where it has none: the call was cut off, or
    dropped with the reply that asked for it.
    """

    @property
    def is_end(self) -> bool:
        """Whether the call has ended with a result, or waits."""
        return self.result is not None or self.type is ToolEventType.PAUSED


@attrs.frozen(kw_only=True, slots=False)
class AgentEvent(_StreamEventBase):
    """Something happened to an agent that is a tool. Each agent_started has one agent_completed or agent_paused.

    An agent that is paused waits for a decision in its run; it is started again, under the same id, when that is there.
    """

    seq: int = 0
    type: AgentEventType
    run_id: str
    """The run whose tool it is."""

    call_id: str
    agent: str
    child_id: str
    """The agent's own run."""

    turn: int
    limit: int
    """Agent_progress: the turn that it is in, from 1, of so many."""

    duration_s: float | None = None
    """Agent_completed and agent_paused."""

    success: bool | None = None
    """Agent_completed."""


@attrs.frozen(kw_only=True, slots=False)
class UsageReported(_StreamEventBase):
    """A model call was paid for."""

    seq: int = 0
    run_id: str
    turn: int
    usage: Usage
    """Of this call."""

    total: Usage
    """Of the run so far."""


@attrs.frozen(kw_only=True, slots=False)
class BudgetWarning(_StreamEventBase):
    """The run has used the share `Limits.warn_at` of a limit; told once for each in a driving call."""

    seq: int = 0
    run_id: str
    turn: int
    limit: str
    """Its name in `Limits`: "turns", "tokens", "usd", "seconds" or "tool_calls"."""

    used: float
    """So many..."""

    of: float
    """...of so many."""


@attrs.frozen(kw_only=True, slots=False)
class RunEnded(_StreamEventBase):
    """The driving call is at its end: the run is over or waits. The last event of a stream."""

    seq: int = 0
    run_id: str
    turn: int
    run: Run[Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values: of the run its `state` and `stop_reason`, and what it waits for."""
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
Listener: TypeAlias = Callable[[StreamEvent], None]


class EventStream(Generic[T]):
    """Events of something under way, handed out as they come: the part that `RunStream` and `QueueStream` share.

    Attributes:
        usage: How it is watched, for who does so otherwise.
    """

    usage_hint: ClassVar[str]

    def __init__(self, producer: Callable[[], Awaitable[object]]) -> None:
        """Prepare the feed; `producer` is called when the block is entered."""
        self._producer = producer
        self._is_entered = False
        self._events: deque[T] = deque()
        self._merge_at = MERGE_THRESHOLD  # how many of them are merged
        self._seq = 0
        self._wakeup: anyio.Event | None = None  # there is one while the reader waits
        self._is_finished = False
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise MisuseError(f"a stream is entered once, and this one was: make another, {self.usage_hint}")
        self._is_entered = True
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        self._tasks.cancel_scope.cancel()
        is_own = error is not None and not isinstance(error, anyio.get_cancelled_exc_class())
        try:
            # The reader's own, the end of a generator that reads among them: it is not for the task group to wrap it.
            suppressed = await self._tasks.__aexit__(*((None, None, None) if is_own else (kind, error, trace)))
        except BaseExceptionGroup as group:  # somebody at the keyboard: trio wraps it
            raise first_error(group) from None
        if kind is None:
            self._raise_error()
        return suppressed and not is_own

    async def _run(self) -> None:
        try:
            await self._producer()
        except Exception as error:  # noqa: BLE001  it is raised to the reader, not in the task
            self._error = error
        finally:
            self._is_finished = True
            if self._wakeup is not None:
                self._wakeup.set()

    def _put(self, event: T) -> None:
        self._events.append(event)
        if len(self._events) >= self._merge_at:
            self._events = deque(_merge_deltas(self._events))
            self._merge_at = max(
                MERGE_THRESHOLD, 2 * len(self._events)
            )  # so that what cannot be merged is not tried each time
        if self._wakeup is not None:
            self._wakeup.set()
            self._wakeup = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._events:
            if self._is_finished:
                self._raise_error()
                raise StopAsyncIteration
            if not self._is_entered:
                raise MisuseError(f"a stream is watched in a block, and nothing runs before it: {self.usage_hint}")
            if self._wakeup is None:
                self._wakeup = anyio.Event()
            await self._wakeup.wait()
        self._seq += 1
        event = self._events.popleft()
        event.__dict__["seq"] = self._seq  # ours alone until it is handed out: no need for a copy
        return event

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


# Drives a run while it tells what happens, and each new state of the run.
ExecuteRun: TypeAlias = "Callable[[Listener, Callable[[Run[Any]], None]], Awaitable[Run[A_co]]]"


class RunStream(EventStream[StreamEvent], Generic[A_co]):
    """Events of one driving call: `async with agent.stream("...") as s: async for event in s: ...`.

    Nothing is dropped: when the reader is slow, neighbouring deltas are merged. Leaving the block early cancels the
    driving call, which leaves a run that `resume` continues. An error of the driving call is raised where the events
    end, or where the block is left.

    Attributes:
        run: The newest state of the run; at first, as it was given.
    """

    usage_hint = "async with agent.stream(...) as s: async for event in s: ..."

    def __init__(self, execute: ExecuteRun[A_co], run: Run[A_co]) -> None:
        """Prepare the stream of a run; `execute` is called when the block is entered."""
        super().__init__(self._produce)
        self.run: Run[A_co] = run
        self._execute = execute

    @property
    def partial(self) -> Any:
        """The answer of an agent with an `output_type`, as far as the events handed out tell; JSON values, unvalidated.

        None before there is anything of it. It is made when it is asked for, of all that was written: asked after each
        delta, that is a square of the answer's length.
        """
        return None

    async def _produce(self) -> None:
        self.run = await self._execute(self._put, self._on_run)
        self._put(RunEnded(run_id=self.run.id, turn=self.run.turn, run=self.run))

    def _on_run(self, run: Run[Any]) -> None:  # the agent's own, and so of its type
        self.run = run


class TypedStream(RunStream[A_co]):
    """A stream of an agent whose answers have a form: it keeps what is written of the newest reply."""

    def __init__(
        self,
        execute: ExecuteRun[A_co],
        run: Run[A_co],
        parse_partial: Callable[[Sequence[TextDelta | CallDelta]], Any],
    ) -> None:
        """Prepare the stream; `parse_partial` makes as much of an answer as the deltas of a reply tell."""
        super().__init__(execute, run)
        self._parse_partial = parse_partial
        self._draft_deltas: list[TextDelta | CallDelta] = []

    @property
    def partial(self) -> Any:
        """As of a `RunStream`."""
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
    """Events of calls that run by themselves: `async with queue.stream(calls) as s: async for event in s: ...`.

    Leaving the block early cancels what runs.

    Attributes:
        results: The results in call order, when the events have ended.
    """

    usage_hint = "async with queue.stream(calls) as s: async for event in s: ..."

    def __init__(self, execute: Callable[[Listener], Awaitable[list[ToolResult]]]) -> None:
        """Prepare the stream; `execute` is called when the block is entered."""
        super().__init__(self._produce)
        self.results: list[ToolResult] = []
        self._execute = execute

    async def _produce(self) -> None:
        self.results = await self._execute(self._put)


# What of a delta is joined to that of its neighbours.
_TEXT_FIELDS: Final = {TextDelta: ("text",), ThinkingDelta: ("text",), CallDelta: ("name", "arguments")}


def _merge_deltas(events: Iterable[Any]) -> Iterator[Any]:
    """Yield the events, with one delta for neighbouring ones that belong together."""
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
    """Return what deltas that belong together have in common, and no two other events have."""
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
