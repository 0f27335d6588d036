"""A run: a frozen value that an event turns into the next one.

`run.effect` says what has to happen next, `run.apply(event)` what the run is after it happened. Both are pure, so a
run can be tested, folded from its journal, forked and replayed without an event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic

import attrs
from typing_extensions import TypeVar  # typing has none with a default before Python 3.13

from agentfsm.core import events as e
from agentfsm.core.effects import AskModel, Effect, Pending, PendingKind, ReadInbox, Reflect, RunTools, Wait
from agentfsm.core.errors import MisuseError, RunError
from agentfsm.core.fingerprint import Fingerprint
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import START, State, next_state
from agentfsm.core.messages import (
    JSON,
    AssistantMessage,
    Message,
    Outcome,
    Part,
    SystemMessage,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
)
from agentfsm.core.settings import Settings
from agentfsm.core.verdict import Action, Verdict
from agentfsm.core.view import Shown, Span, plain_layout, view

if TYPE_CHECKING:
    from collections.abc import Iterable

# What an answer is: text, unless the agent has an output_type.
A_co = TypeVar("A_co", default=str, covariant=True)

# The format of journals that this code writes; raised with every change that an older reader would misunderstand.
FORMAT: Final = 3


def _copy(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return dict(metadata)


@attrs.frozen(kw_only=True, slots=False)
class Header:
    """Entry 0 of a journal: what a run was begun with. It never changes. Not slotted, as `OpenCall`."""

    id: str
    # Unique in the store.
    prompt: tuple[Part, ...]
    created_at: float
    # Seconds since 1970.
    session: str | None = None
    # The conversation that the run belongs to.
    after: str | None = None
    # The id of the run whose history this one goes on from.
    history: tuple[Message, ...] = ()
    # Messages to go on from that no store has.
    agent: str = ""
    agent_version: str = ""
    fingerprint: Fingerprint = Fingerprint()
    # What the agent was.
    target: str = ""
    # Where the command line finds the agent again: "module:attribute".
    user: str | None = None
    roles: tuple[str, ...] = ()
    parent: str | None = None
    # The id of the run whose tool this one is; its own id is that and the call's.
    depth: int = 0
    # How many runs are above it.
    forked_from: str | None = None
    # The id of the run whose first events are this one's, too.
    forked_at: int = 0
    # How many.
    settings: Settings | None = None
    # How the model is asked in this run, over what the agent says.
    metadata: dict[str, Any] = attrs.field(factory=dict, converter=_copy)
    # JSON values; a copy of what the caller gave.
    format: int = FORMAT
    # The version of the format that the journal is written in.


class Phase(StrEnum):
    """How far an open call is."""

    INTENDED = "intended"
    ASKED = "asked"
    APPROVED = "approved"
    RUNNING = "running"
    LOST = "lost"
    PAUSED = "paused"
    FINISHED = "finished"


_ERRORS: Final = frozenset({Outcome.FAILED, Outcome.TIMED_OUT})
UNDECIDED: Final = frozenset({Phase.ASKED, Phase.LOST, Phase.PAUSED})


@attrs.frozen(kw_only=True)
class Inquiry:
    """What the tool of an open call has asked people, and what it was told."""

    rounds: int = 0
    # How many times it has asked.
    state: str = "null"
    # What it gets back, as JSON text; the newest counts.
    answers: Mapping[str, Any] = attrs.field(factory=dict)
    # By the question's key, of all rounds: the answer, or None where it was declined.


@attrs.frozen(kw_only=True, slots=False)
class OpenCall:
    """A call of the turn that is not closed yet. Not slotted: many fields are written a third faster into a dict."""

    call: ToolCall
    phase: Phase = Phase.INTENDED
    attempts: int = 0
    # How many times it was started.
    expires_at: float | None = None
    description: str = ""
    # What it will do, for the person who approves it.
    digest: str = ""
    # Of the tool and the arguments that the person is asked about.
    waits: tuple[Pending, ...] = ()
    # What it waits for, in the phase PAUSED.
    inquiry: Inquiry | None = None
    # None where its tool has asked nothing.
    result: ToolResult | None = None
    # Present in the phase FINISHED only.


@attrs.frozen(kw_only=True)
class CallRecord:
    """A closed call, for audit."""

    turn: int
    call_id: str
    name: str
    arguments: dict[str, JSON]
    outcome: Outcome
    duration_s: float


@attrs.frozen(kw_only=True)
class Fault:
    """Something that failed on the way."""

    turn: int
    source: str
    # "model", or the name of the tool.
    message: str


@attrs.frozen(kw_only=True, slots=False)
class Run(Generic[A_co]):
    """Where a run stands after `version` events. Not slotted: `apply` copies its dict, a tenth of what evolve costs."""

    header: Header
    prior: tuple[Message, ...] = attrs.field(default=(), repr=False)
    # The messages of the run that `header.after` names; never stored, read again by reference.
    version: int = 0
    # How many events were applied.
    state: State = START
    turn: int = 0
    # Model replies so far.
    messages: tuple[Message, ...] = attrs.field(default=(), repr=False)
    # The whole history, in order; every call has its result.
    turns_before: int = 0
    # The highest turn number among the call ids of the history that the run goes on from; its own count on from there.
    window: int = 0
    # From here on the model is shown all messages as they are; 0 for all that there are.
    layout: tuple[Shown, ...] = attrs.field(default=(), repr=False)
    # What it is shown of those before.
    head: tuple[Message, ...] = attrs.field(default=(), repr=False)
    # The same as messages, made once: they stay the same objects until the next compaction.
    compacted: int = 0
    # The version that the newest compaction has made...
    compactions: int = 0
    # ...and how many there were in a row with it.
    reply: AssistantMessage | None = None
    # The assistant message whose calls are open.
    open: tuple[OpenCall, ...] = ()
    # The calls of `reply`, in call order.
    usage: Usage = Usage()
    unpriced: tuple[str, ...] = ()
    # The models that answered and whose price was not known, each once.
    duration_s: float = 0.0
    # Active seconds.
    called: int = 0
    # Calls of tools that have a result, whatever it is, and those of the agents behind them; not what was skipped.
    consecutive_errors: int = 0
    # Error turns in a row.
    faults: tuple[Fault, ...] = ()
    # Model calls that failed.
    loops: int = 0
    # Loop findings so far.
    disabled: tuple[str, ...] = ()
    # Tools withdrawn because of loops.
    refusals: int = 0
    # Drafts that were refused, since input came.
    verdict: Verdict | None = None
    # What a judge said of what REFLECT looks at now.
    corrections: int = 0
    # How many times a judge had something done again, since input came.
    is_last: bool = False
    # Whether the next reply is the last, asked for without tools.
    asks: str = ""
    # What a person is asked, where the run waits for input.
    paused: Pending | None = None
    # Why the run rests between two steps; None while it does not.
    fingerprint: Fingerprint | None = None
    # Of the agent that drives it; None where that is still what the header says.
    offered: tuple[str, ...] | None = None
    # The tools chosen among many since input came; None where no choice was made.
    has_cut: bool = False
    # Whether any result is longer than what the model is shown of it.
    retries: Mapping[str, int] = attrs.field(factory=dict)
    # How many times calls were tried again, by tool.
    stop_reason: StopReason | None = None
    stop_message: str = ""
    updated_at: float = 0.0
    # Seconds since 1970 of the newest event.
    decoder: Callable[[str], A_co] | None = attrs.field(default=None, eq=False, repr=False)
    # Makes `output` of the answer's text; the agent's, and not a part of the run.

    def apply(self, event: e.Event) -> Run[A_co]:
        """Return the run after the event.

        Raises:
            IllegalTransitionError: when the state does not take it; this run is untouched.
            MisuseError: when it names a call that is not open.
        """
        state = next_state(self.state, event)
        fields = self.__dict__.copy()
        fields.update(_FOLD[type(event)](self, event))
        fields["state"] = state
        fields["version"] = self.version + 1
        fields["duration_s"] = self.duration_s + event.took_s
        fields["updated_at"] = event.at
        after: Run[A_co] = object.__new__(type(self))
        object.__setattr__(after, "__dict__", fields)
        return after

    def fold(self, events: Iterable[e.Event]) -> Run[A_co]:
        """Apply events in order."""
        run = self
        for event in events:
            run = run.apply(event)
        return run

    @property
    def effect(self) -> Effect | None:
        """What has to happen next; None when the run is over."""
        if self.paused is not None or self.asks:
            return Wait(pending=self.pending)
        return _EFFECT[self.state](self)

    @property
    def pending(self) -> tuple[Pending, ...]:
        """What the run waits for from outside: the end of a pause, and decisions in call order."""
        waits = tuple(item for entry in self.open if entry.phase in UNDECIDED for item in _pending(self, entry))
        if self.asks:
            waits = (Pending(kind=PendingKind.INPUT, run_id=self.id, description=self.asks),)
        return waits if self.paused is None else (self.paused, *waits)

    def __repr__(self) -> str:
        facts = [f"{self.state.upper()}, turn {self.turn}"]
        if self.stop_reason is not None:
            facts.append(str(self.stop_reason))
        if self.pending:
            facts.append(f"waits for {', '.join(map(_wish, self.pending))}")
        return f"<Run {self.id} {', '.join(facts)}>"

    @property
    def is_over(self) -> bool:
        """Whether the run is in DONE or ERROR."""
        return self.stop_reason is not None

    @property
    def is_waiting(self) -> bool:
        """Whether only something from outside can move the run on."""
        return isinstance(self.effect, Wait)

    @property
    def output(self) -> A_co:
        """The answer: text, or what the agent's `output_type` makes of it.

        Raises:
            RunError: on a run that did not end in DONE.
        """
        text: Any = self.answer
        answer: A_co = text if self.decoder is None else self.decoder(text)
        return answer

    @property
    def answer(self) -> str:
        """The answer as the model wrote it; JSON where the agent has an `output_type`.

        Raises:
            RunError: on a run that did not end in DONE.
        """
        if self.state is State.DONE:
            return self._last_text()
        raise RunError(_no_output(self), self)

    @property
    def partial(self) -> str | None:
        """The last words of a run that was stopped and asked for what it had; None where there are none."""
        return (self._last_text() or None) if self.is_last and self.state is State.ERROR else None

    @property
    def id(self) -> str:
        """The run's id, unique in its store."""
        return self.header.id

    @property
    def session(self) -> str | None:
        """The conversation that the run belongs to."""
        return self.header.session

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the caller attached at the start; read-only."""
        return MappingProxyType(self.header.metadata)

    @property
    def created_at(self) -> float:
        """Seconds since 1970."""
        return self.header.created_at

    @property
    def shown(self) -> tuple[Message, ...]:
        """The messages that the model is shown: all, or what a compaction has left of them and those since."""
        return self.head + self.messages[self.window :]

    @property
    def cuts(self) -> int:
        """How many compactions there were since anything else happened."""
        return self.compactions if self.compacted == self.version else 0

    @property
    def first(self) -> int:
        """Where the run's own messages start; those before are of what it goes on from."""
        return len(self.prior) + len(self.header.history)

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """The run's own closed calls, in order."""
        return tuple(_records(self))

    @property
    def errors(self) -> tuple[Fault, ...]:
        """What failed on the way, by turn: model calls and tools."""
        tools = (Fault(turn=turn, source=r.tool, message=r.content) for turn, r in _failures(self))
        return tuple(sorted((*self.faults, *tools), key=lambda fault: fault.turn))

    def entry(self, call_id: str) -> OpenCall:
        """Return the open call of that id.

        Raises:
            MisuseError: when there is none.
        """
        return self.open[self._index(call_id)]

    def _index(self, call_id: str) -> int:
        place = place_in(call_id)
        if place < len(self.open) and self.open[place].call.id == call_id:
            return place
        for index, entry in enumerate(self.open):  # an id that was not made here
            if entry.call.id == call_id:
                return index
        ids = ", ".join(entry.call.id for entry in self.open) or "none"
        raise MisuseError(f"run {self.id} has no open call {call_id!r}; open calls: {ids}")

    def _last_text(self) -> str:
        last = self.messages[-1] if self.messages else None
        return last.text if isinstance(last, AssistantMessage) else ""


def begin(header: Header, before: Run[Any] | None = None) -> Run:
    """Return the run that the header describes, at version 0.

    Args:
        header: Entry 0 of its journal.
        before: The run that it goes on from, where `header.after` names one. What a compaction has left of that one's
            messages is what the model is shown of them from here on: they were paid for to become short.
    """
    run, history = _fresh(header), header.history
    if before is not None:
        run = attrs.evolve(
            run,
            prior=before.messages,
            turns_before=max(before.turns_before, turns_of(before.messages[before.first :])),
            has_cut=before.has_cut,
            window=before.window,
            layout=before.layout,
            head=before.head,
        )
    if not history:
        return run
    has_cut = any(isinstance(message, ToolResult) and message.cut is not None for message in history)
    turns = max(run.turns_before, turns_of(history))
    return attrs.evolve(run, turns_before=turns, has_cut=run.has_cut or has_cut)


_BLANK: Final = dict(vars(Run(header=Header(id="", prompt=(), created_at=0.0))))


def _fresh(header: Header) -> Run:
    """Return a new run. Made as `apply` makes one, from a dict: 35 fields written one by one cost seven times that."""
    run: Run = object.__new__(Run)
    fields = {**_BLANK, "header": header, "updated_at": header.created_at}
    object.__setattr__(run, "__dict__", fields)
    return run


def turns_of(messages: Iterable[Message]) -> int:
    """Return the highest turn number among the call ids of a history; 0 where there is none."""
    calls = (call for m in messages if isinstance(m, AssistantMessage) for call in m.calls)
    return max((_turn_in(call.id) for call in calls), default=0)


def _turn_in(call_id: str) -> int:
    return _number(call_id[1:].partition(".")[0]) if call_id[:1] == "t" else 0


def place_in(call_id: str) -> int:
    """Return a call's place in its reply, as its id tells it."""
    return _number(call_id.rpartition(".")[2])


def _number(text: str) -> int:
    """Return the number that a part of an id is; 0 where it is none, as in ids that were not made here."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0  # noqa: PLR2004


def arguments_of(call: ToolCall) -> dict[str, JSON]:
    """Return the call's arguments as a dict."""
    arguments: dict[str, JSON] = json.loads(call.arguments)
    return arguments


def _no_output(run: Run[Any]) -> str:
    where = f"run {run.id} has no output: it is in {run.state.upper()}"
    if run.state is State.ERROR:
        return f"{where}, stopped by {run.stop_reason} ({run.stop_message})"
    if run.is_waiting:
        return f"{where} and waits for: {', '.join(map(_wish, run.pending))}; decide, then resume it"
    return f"{where}, not over yet: go on with agent.finish(run) or agent.resume({run.id!r})"


def _wish(item: Pending) -> str:
    if item.call_id:
        return f"{item.kind} of {item.tool} ({item.call_id})"
    return "the end of a pause" if item.kind is PendingKind.PAUSE else f"an answer to: {item.description}"


# What has to happen next, by state.


def _act(run: Run[Any]) -> Effect:
    """Calls before the first undecided one run; where none is left, a person has to decide; else the turn ends."""
    ready: list[ToolCall] = []
    for entry in run.open:
        if entry.phase in UNDECIDED:
            return RunTools(calls=tuple(ready)) if ready else Wait(pending=run.pending)
        if entry.phase is not Phase.FINISHED:
            ready.append(entry.call)
    return RunTools(calls=tuple(ready))


def _reflect(run: Run[Any]) -> Effect:
    last = run.messages[-1]
    if isinstance(last, AssistantMessage):
        return Reflect(draft=last.text, verdict=run.verdict)
    return _REFLECT_ON_RESULTS if run.verdict is None else Reflect(draft=None, verdict=run.verdict)


_READ_INBOX: Final = ReadInbox()
# The same in every turn.
_REFLECT_ON_RESULTS: Final = Reflect(draft=None)


_EFFECT: Mapping[State, Callable[[Run[Any]], Effect | None]] = {
    State.OBSERVE: lambda _run: _READ_INBOX,
    State.THINK: lambda run: AskModel(turn=run.turn + 1, messages=run.shown if run.window else run.messages),
    State.ACT: _act,
    State.REFLECT: _reflect,
    State.DONE: lambda _run: None,
    State.ERROR: lambda _run: None,
}


def _pending(run: Run[Any], entry: OpenCall) -> tuple[Pending, ...]:
    if entry.phase is Phase.PAUSED:
        return entry.waits
    own = Pending(
        kind=PendingKind.APPROVAL if entry.phase is Phase.ASKED else PendingKind.OUTCOME,
        run_id=run.id,
        call_id=entry.call.id,
        tool=entry.call.name,
        arguments=arguments_of(entry.call),
        description=entry.description,
        expires_at=entry.expires_at,
        digest=entry.digest,
    )
    return (own,)


# What each event changes, beside state, version and time.

Changes = dict[str, Any]


def _observed(run: Run[Any], event: e.Observed) -> Changes:
    history = run.messages or _opening(run)
    if not event.inputs:
        return {"messages": history}
    messages = (*history, *[item.message for item in event.inputs])
    return {"messages": messages, "offered": None, "asks": "", "refusals": 0, "corrections": 0}


def _opening(run: Run[Any]) -> tuple[Message, ...]:
    """Return the history at version 0: what the run goes on from, and the prompt."""
    return (*run.prior, *run.header.history, UserMessage(parts=run.header.prompt))


def _tools_chosen(run: Run[Any], event: e.ToolsChosen) -> Changes:
    return {
        "turn": run.turn + 1,
        "usage": run.usage + event.usage,
        "unpriced": _unpriced(run, event) if event.usage.unpriced else run.unpriced,
        "reply": event.message,
        "open": tuple([OpenCall(call=call) for call in event.message.calls]),
    }


def _unpriced(run: Run[Any], event: e.ToolsChosen | e.AnswerGiven | e.AnswerDrafted) -> tuple[str, ...]:
    name = event.model or (run.fingerprint or run.header.fingerprint).model
    return run.unpriced if name in run.unpriced else (*run.unpriced, name)


def _answered(run: Run[Any], event: e.AnswerGiven | e.AnswerDrafted) -> Changes:
    return {
        "turn": run.turn + 1,
        "usage": run.usage + event.usage,
        "unpriced": _unpriced(run, event) if event.usage.unpriced else run.unpriced,
        "messages": (*run.messages, event.message),
        "consecutive_errors": 0,
    }


def _answer_given(run: Run[Any], event: e.AnswerGiven) -> Changes:
    return {**_answered(run, event), "stop_reason": StopReason.COMPLETED}


def _model_faltered(run: Run[Any], event: e.ModelFaltered) -> Changes:
    fault = Fault(turn=run.turn + 1, source="model", message=event.error)
    return {
        "turn": run.turn + 1,
        "usage": run.usage + event.usage,
        "faults": (*run.faults, fault),
        "consecutive_errors": run.consecutive_errors + 1,
    }


def _compacted(run: Run[Any], event: e.Compacted) -> Changes:
    layout = event.head if event.head is not None else plain_layout(event.start, _task_before(run, event.start))
    is_cut = any(isinstance(entry, Span) and entry.chars is not None for entry in layout)
    return {
        "window": event.start,
        "layout": layout,
        "head": view(layout, run.messages),
        "compacted": run.version + 1,
        "compactions": run.cuts + 1,
        "has_cut": run.has_cut or is_cut,
        "usage": run.usage + event.usage,
    }


def _task_before(run: Run[Any], start: int) -> int | None:
    """Return where the task is, the first that the user said in this run; None where it is not before `start`."""
    places = range(run.first, min(start, len(run.messages)))
    return next((place for place in places if isinstance(run.messages[place], UserMessage)), None)


# The phases in which each of these events may come to a call.
_COMES_IN: Final[Mapping[type[e.Event], frozenset[Phase]]] = {
    e.ToolStarted: frozenset({Phase.INTENDED, Phase.APPROVED, Phase.RUNNING, Phase.PAUSED}),
    e.ToolFinished: frozenset(Phase) - {Phase.FINISHED},
    e.ToolLost: frozenset(Phase) - {Phase.LOST, Phase.FINISHED},
    e.ToolPaused: frozenset({Phase.INTENDED, Phase.APPROVED, Phase.RUNNING, Phase.PAUSED}),
    e.InputGiven: frozenset({Phase.PAUSED}),
    e.ApprovalAsked: frozenset({Phase.INTENDED, Phase.ASKED}),
    e.ApprovalGiven: frozenset({Phase.ASKED, Phase.LOST}),
}


def _entry_for(run: Run[Any], event: e.Event, call_id: str) -> tuple[list[OpenCall], int]:
    """Return the open calls as a list, and where the call of the event is, if it may come to it in its phase."""
    entries = list(run.open)
    index = run._index(call_id)  # noqa: SLF001  the fold is the run's own inside
    if entries[index].phase not in _COMES_IN[type(event)]:
        phase = entries[index].phase
        raise MisuseError(f"{type(event).__name__} does not fit the call {call_id} of run {run.id}: it is {phase}")
    return entries, index


def _evolved(run: Run[Any], event: e.Event, call_id: str, **changes: Any) -> Changes:
    entries, index = _entry_for(run, event, call_id)
    entries[index] = attrs.evolve(entries[index], **changes)
    return {"open": tuple(entries)}


def _tools_offered(run: Run[Any], event: e.ToolsOffered) -> Changes:
    return {"offered": event.tools, "usage": run.usage + event.usage}


def _tool_started(run: Run[Any], event: e.ToolStarted) -> Changes:
    attempts = run.entry(event.call_id).attempts + 1
    return _evolved(
        run,
        event,
        event.call_id,
        phase=Phase.RUNNING,
        attempts=attempts,
        waits=(),
    )


def _tool_finished(run: Run[Any], event: e.ToolFinished) -> Changes:
    entries, index = _entry_for(run, event, event.result.call_id)
    was = entries[index]
    result = event.result
    entries[index] = OpenCall(call=was.call, phase=Phase.FINISHED, attempts=was.attempts, result=result)
    changes: Changes = {"open": tuple(entries)}
    if result.attempts > 1:
        changes["retries"] = {**run.retries, result.tool: run.retries.get(result.tool, 0) + result.attempts - 1}
    if result.cut is not None:
        changes["has_cut"] = True
    if result.outcome is not Outcome.SKIPPED:
        changes["called"] = run.called + 1
    if result.child is not None:
        changes["usage"] = run.usage + result.child.usage
        changes["called"] = run.called + 1 + result.child.calls
    return changes


def _tool_lost(run: Run[Any], event: e.ToolLost) -> Changes:
    return _evolved(run, event, event.call_id, phase=Phase.LOST, expires_at=None, digest="", waits=())


def _tool_paused(run: Run[Any], event: e.ToolPaused) -> Changes:
    changes: Changes = {"phase": Phase.PAUSED, "waits": event.pending}
    if event.state is not None:
        before = run.entry(event.call_id).inquiry or Inquiry()
        changes["inquiry"] = attrs.evolve(before, rounds=before.rounds + 1, state=event.state)
    return _evolved(run, event, event.call_id, **changes)


def _input_given(run: Run[Any], event: e.InputGiven) -> Changes:
    before = run.entry(event.call_id).inquiry or Inquiry()
    inquiry = attrs.evolve(before, answers={**before.answers, **event.answers})
    return _evolved(run, event, event.call_id, phase=Phase.APPROVED, waits=(), inquiry=inquiry)


def _approval_asked(run: Run[Any], event: e.ApprovalAsked) -> Changes:
    return _evolved(
        run,
        event,
        event.call_id,
        phase=Phase.ASKED,
        expires_at=event.expires_at,
        description=event.description,
        digest=event.digest,
    )


def _approval_given(run: Run[Any], event: e.ApprovalGiven) -> Changes:
    changes = _evolved(run, event, event.call_id, phase=Phase.APPROVED, expires_at=None)
    return changes if event.arguments is None else _edited(run, changes["open"], event.call_id, event.arguments)


def _edited(run: Run[Any], entries: tuple[OpenCall, ...], call_id: str, arguments: str) -> Changes:
    """Put a person's arguments in the place of the model's, in the open call and in the message that asked for it."""
    calls = tuple(
        attrs.evolve(entry.call, arguments=arguments) if entry.call.id == call_id else entry.call for entry in entries
    )
    return {
        "open": tuple(attrs.evolve(entry, call=call) for entry, call in zip(entries, calls, strict=True)),
        "reply": None if run.reply is None else attrs.evolve(run.reply, calls=calls),
    }


def _tools_returned(run: Run[Any], _event: e.ToolsReturned) -> Changes:
    results = [entry.result for entry in run.open if entry.result is not None]
    if len(results) != len(run.open):
        raise MisuseError(f"run {run.id}: the turn cannot end while calls are open")
    return {**_closed(run, results), "consecutive_errors": _errors_after(run, results)}


def _errors_after(run: Run[Any], results: list[ToolResult]) -> int:
    """Count an error turn where all calls failed; one success resets; a refused or withdrawn call is neither."""
    outcomes = {result.outcome for result in results}
    return 0 if Outcome.DONE in outcomes else run.consecutive_errors + (outcomes <= _ERRORS)


def _continued(run: Run[Any], event: e.Continued) -> Changes:
    changes: Changes = {}
    if event.note:
        changes["messages"] = (*run.messages, SystemMessage(text=event.note))
    if event.loop:
        changes["loops"] = run.loops + 1
    if event.disabled:
        changes["disabled"] = tuple(dict.fromkeys((*run.disabled, *event.disabled)))
    if event.refused:
        changes["refusals"] = run.refusals + 1
    if event.is_last:
        changes["is_last"] = True
    if event.asks:
        changes["asks"] = event.asks
    if run.verdict is not None:
        changes["verdict"] = None
        changes["corrections"] = run.corrections + (run.verdict.action in _CORRECTIONS)
    return changes


_CORRECTIONS: Final = frozenset({Action.RETRY_STEP, Action.REPLAN})


def _judged(run: Run[Any], event: e.Judged) -> Changes:
    return {"verdict": event.verdict, "usage": run.usage + event.usage}


def _accepted(_run: Run[Any], _event: e.Accepted) -> Changes:
    return {"stop_reason": StopReason.COMPLETED}


def _paused(run: Run[Any], event: e.Paused) -> Changes:
    words = [f"paused by {event.by}" if event.by else "paused", *([event.message] if event.message else [])]
    return {"paused": Pending(kind=PendingKind.PAUSE, run_id=run.id, description=": ".join(words))}


def _resumed(run: Run[Any], event: e.Resumed) -> Changes:
    return {"paused": None, "fingerprint": event.fingerprint or run.fingerprint}


def _failed(run: Run[Any], event: e.Failed) -> Changes:
    results = [entry.result or _closing(entry, index, event) for index, entry in enumerate(run.open)]
    return {
        **_closed(run, results),
        "paused": None,
        "asks": "",
        "stop_reason": event.reason,
        "stop_message": event.message,
    }


def _closed(run: Run[Any], results: list[ToolResult]) -> Changes:
    """Move the open turn into the history: the assistant's message together with all its results."""
    if run.reply is None:
        return {} if run.messages else {"messages": _opening(run)}
    return {"messages": (*run.messages, run.reply, *results), "reply": None, "open": ()}


def _closing(entry: OpenCall, index: int, event: e.Failed) -> ToolResult:
    """Return the result of a call that the end of the run closes."""
    if entry.phase is Phase.INTENDED or entry.phase is Phase.ASKED or entry.phase is Phase.APPROVED:
        outcome, text = Outcome.SKIPPED, f"no result: the run was stopped ({event.reason}) before it came to that"
    elif entry.phase is Phase.PAUSED and not entry.attempts:
        outcome, text = Outcome.CANCELLED, f"no answer: the run was stopped ({event.reason}) while the call waited"
    else:  # whatever the tool is: a new call of it would have a key of its own
        outcome = Outcome.UNKNOWN
        text = f"cut off: the run was stopped ({event.reason}) and the effect may have happened; check before repeating"
    return ToolResult(call_id=entry.call.id, tool=entry.call.name, outcome=outcome, content=text, index=index)


_FOLD: Mapping[type[e.Event], Callable[[Run[Any], Any], Changes]] = MappingProxyType(
    {
        e.Observed: _observed,
        e.ToolsChosen: _tools_chosen,
        e.AnswerGiven: _answer_given,
        e.AnswerDrafted: _answered,
        e.ModelFaltered: _model_faltered,
        e.Compacted: _compacted,
        e.ToolsOffered: _tools_offered,
        e.ToolStarted: _tool_started,
        e.ToolFinished: _tool_finished,
        e.ToolLost: _tool_lost,
        e.ToolPaused: _tool_paused,
        e.InputGiven: _input_given,
        e.ApprovalAsked: _approval_asked,
        e.ApprovalGiven: _approval_given,
        e.ToolsReturned: _tools_returned,
        e.Judged: _judged,
        e.Continued: _continued,
        e.Accepted: _accepted,
        e.Paused: _paused,
        e.Resumed: _resumed,
        e.Failed: _failed,
    },
)


# What is read off the history.


def _own(run: Run[Any]) -> tuple[Message, ...]:
    return run.messages[run.first :]


def _records(run: Run[Any]) -> Iterable[CallRecord]:
    calls = {call.id: call for m in _own(run) if isinstance(m, AssistantMessage) for call in m.calls}
    for result in _own(run):
        if isinstance(result, ToolResult):
            yield CallRecord(
                turn=_turn_in(result.call_id) - run.turns_before,
                call_id=result.call_id,
                name=result.tool,
                arguments=arguments_of(calls[result.call_id]),
                outcome=result.outcome,
                duration_s=result.duration_s,
            )


def _failures(run: Run[Any]) -> Iterable[tuple[int, ToolResult]]:
    for message in _own(run):
        if isinstance(message, ToolResult) and message.outcome in _ERRORS:
            yield _turn_in(message.call_id) - run.turns_before, message
