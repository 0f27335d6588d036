"""A run: a frozen value. Applying an event returns the next value.

`run.effect` is the next thing to do, and `run.apply(event)` is the run after it was done. Both are pure, so a run can
be tested, folded from its journal, forked and replayed without an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic

import attrs
from typing_extensions import TypeVar  # typing has none with a default before Python 3.13

from agentfsm.core import events as e
from agentfsm.core.calls import (
    ERROR_OUTCOMES,
    UNDECIDED_PHASES,
    CallRecord,
    FailureRecord,
    OpenCall,
    Phase,
    find_last_turn,
    parse_arguments,
    parse_turn,
)
from agentfsm.core.effects import AskModel, Effect, ReadInbox, Reflect, RunTools, Wait
from agentfsm.core.errors import AgentError
from agentfsm.core.events import GuardVerdict
from agentfsm.core.header import Header
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, HostedContent, Message, ToolCall, ToolResult, join_hosted
from agentfsm.core.pending import Pending, PendingKind
from agentfsm.core.plans import ENGINE_TOOLS
from agentfsm.core.reducers import apply_event
from agentfsm.core.run_fields import FORGOTTEN_AFTER_S, RunFields

if TYPE_CHECKING:
    from collections.abc import Iterable

# Type of the answer: str, unless the agent has an output_type.
A_co = TypeVar("A_co", default=str, covariant=True)


@attrs.frozen(kw_only=True, slots=False)
class Run(RunFields, Generic[A_co]):
    """A run after `version` events: its fields, its next effect, and the transition to the next value."""

    decoder: Callable[[str], A_co] | None = attrs.field(default=None, eq=False, repr=False)
    """Function of the agent that converts the answer's text to `output`; None: `output` is the text. Not journalled."""

    def apply(self, event: e.Event) -> Run[A_co]:
        """Return the run after the event.

        Raises:
            IllegalTransitionError: if the state does not accept it; this run is unchanged.
            MisuseError: if it names a call that is not open.
        """
        return self.fold((event,))

    def fold(self, events: Iterable[e.Event]) -> Run[A_co]:
        """Apply events in order; for many at once, this is much less work than `apply` for each.

        Raises:
            IllegalTransitionError, MisuseError: as `apply`; this run is unchanged.
        """
        # With attrs.evolve a turn on SQLite (`benchmarks journal:100`) takes 29 % more instructions, 16 % more time.
        after: Run[A_co] = object.__new__(type(self))
        object.__setattr__(after, "__dict__", self.__dict__.copy())
        for event in events:
            apply_event(after, event)
        return after

    @property
    def effect(self) -> Effect | None:
        """The next thing that the engine has to do; None when the run is over."""
        if self.paused is not None or self.asks:
            return Wait(pending=self.pending)
        return _EFFECTS[self.state](self)

    @property
    def pending(self) -> tuple[Pending, ...]:
        """Things that the run waits for from outside: the end of a pause, and decisions in call order."""
        waits = tuple(
            item for entry in self.open if entry.phase in UNDECIDED_PHASES for item in _call_pending(self, entry)
        )
        if self.asks:
            waits = (Pending(kind=PendingKind.INPUT, run_id=self.id, description=self.asks),)
        if self.background:
            waits += tuple([item for each in self.open_background for item in each.pending])
        return waits if self.paused is None else (self.paused, *waits)

    def __repr__(self) -> str:
        parts = [f"{self.state.upper()}, turn {self.turn}"]
        if self.stop_reason is not None:
            parts.append(str(self.stop_reason))
        if self.pending:
            parts.append(f"waits for {', '.join(map(_format_pending, self.pending))}")
        return f"<Run {self.id} {', '.join(parts)}>"

    @property
    def is_over(self) -> bool:
        """Whether the run is in DONE or ERROR."""
        return self.stop_reason is not None

    @property
    def is_waiting(self) -> bool:
        """Whether the run can continue only after something comes from outside."""
        return isinstance(self.effect, Wait)

    @property
    def awaits_tasks(self) -> bool:
        """Whether the run waits for nothing but tasks at servers, so that it continues without a decision."""
        return self.is_waiting and all(item.kind is PendingKind.TASK for item in self.pending)

    @property
    def output(self) -> A_co:
        """The answer: text, or a value of the agent's `output_type`.

        Raises:
            RunError: on a run that did not end in DONE.
        """
        text: Any = self.answer
        answer: A_co = text if self.decoder is None else self.decoder(text)
        return answer

    @property
    def answer(self) -> str:
        """The answer as the model wrote it; JSON if the agent has an `output_type`.

        Raises:
            RunError: on a run that did not end in DONE.
        """
        if self.state is State.DONE:
            last = self.messages[-1] if self.messages else None
            return last.text if isinstance(last, AssistantMessage) else ""
        raise RunError(_explain_no_output(self), self)

    @property
    def partial(self) -> str | None:
        """The last text of the model in a run that ended in ERROR; None if it wrote none, and in all other runs.

        The text is not validated: it may be a remark beside calls, or an answer that was refused. With
        `Agent(last_answer=True)` the model is asked for its best answer when a limit stops the run; then it is that.
        """
        if self.state is not State.ERROR:
            return None
        said = (message.text for message in reversed(_own_messages(self)) if isinstance(message, AssistantMessage))
        return next((text for text in said if text.strip()), None)

    @property
    def hosted(self) -> HostedContent:
        """Outcome of the provider's own tools in this run: calls, citations, files and images, in order.

        The positions of a citation are those in its own message.
        """
        replies = [message for message in _own_messages(self) if isinstance(message, AssistantMessage)]
        return join_hosted([reply.hosted for reply in (*replies, self.reply) if reply is not None and reply.hosted])

    @property
    def session(self) -> str | None:
        """Id of the session that the run belongs to; None if it belongs to none."""
        return self.header.session

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata that the caller attached at the start; read-only."""
        return MappingProxyType(self.header.metadata)

    @property
    def created_at(self) -> float:
        """Time at which the run was created, seconds since 1970."""
        return self.header.created_at

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """Closed calls of this run, in order."""
        return tuple(_call_records(self))

    @property
    def errors(self) -> tuple[FailureRecord, ...]:
        """Failed model requests and tool calls, by turn."""
        tools = (FailureRecord(turn=turn, source=r.tool, message=r.content) for turn, r in _failed_results(self))
        return tuple(sorted((*self.model_failures, *tools), key=lambda fault: fault.turn))


def begin_run(header: Header, prior_run: Run[Any] | None = None) -> Run:
    """Return the run that the header describes, at version 0.

    Args:
        header: Entry 0 of its journal.
        prior_run: The run that it continues, if `header.after` names one. A compaction of its messages stays in force,
            because it was paid for.
    """
    run, history = _new_run(header), header.history
    if prior_run is not None:
        has_waited = prior_run.waited_turn >= 0
        run = attrs.evolve(
            run,
            prior=prior_run.messages,
            turns_before=max(prior_run.turns_before, find_last_turn(prior_run.messages[prior_run.own_start :])),
            has_cut=prior_run.has_cut,
            has_fenced=prior_run.has_fenced,
            cutoff=prior_run.cutoff,
            segments=prior_run.segments,
            compacted_messages=prior_run.compacted_messages,
            kept_notes=prior_run.kept_notes,
            labels=prior_run.labels,
            counted=prior_run.counted,
            acted=prior_run.acted,
            approvals={key: by for key, by in prior_run.approvals.items() if parse_turn(key)},
            earlier_steps=prior_run.closed_steps,
            given=prior_run.given,
            waited_turn=0 if header.created_at - prior_run.updated_at > FORGOTTEN_AFTER_S or has_waited else -1,
        )
    if header.labels:
        inherited = {source.label: source for source in header.labels}
        run = attrs.evolve(run, labels={**inherited, **run.labels})
    if not history:
        return run
    has_cut = any(isinstance(message, ToolResult) and message.cut is not None for message in history)
    turns = max(run.turns_before, find_last_turn(history))
    return attrs.evolve(run, turns_before=turns, has_cut=run.has_cut or has_cut, given=len(history))


_INITIAL_FIELDS: Final = dict(vars(Run(header=Header(id="", prompt=(), created_at=0.0))))


def _new_run(header: Header) -> Run:
    """Build a run at version 0 from a dict, as in `apply`: setting the fields one by one costs seven times as much."""
    run: Run = object.__new__(Run)
    fields = {**_INITIAL_FIELDS, "header": header, "updated_at": header.created_at}
    object.__setattr__(run, "__dict__", fields)
    return run


class RunError(AgentError):
    """The run did not end in DONE, so it has no output.

    Attributes:
        run: The run in its current state.
    """

    def __init__(self, message: str, run: Run[Any]) -> None:
        super().__init__(message, run)
        self.run = run

    def __str__(self) -> str:
        return str(self.args[0])


def _explain_no_output(run: Run[Any]) -> str:
    where = f"run {run.id} has no output: it is in {run.state.upper()}"
    if run.state is State.ERROR:
        return f"{where}, stopped by {run.stop_reason} ({run.stop_message})"
    if run.is_waiting:
        return f"{where} and waits for: {', '.join(map(_format_pending, run.pending))}; decide, then resume it"
    return f"{where}, not over yet; call agent.finish(run) or agent.resume({run.id!r})"


def _format_pending(item: Pending) -> str:
    if item.call_id:
        return f"{item.kind} of {item.tool} ({item.call_id})"
    if item.kind is PendingKind.INPUT:
        return f"an answer to: {item.description}"
    return "the end of a pause after crashes" if item.kind is PendingKind.CRASH else "the end of a pause"


# The next effect, by state.


def _act_effect(run: Run[Any]) -> Effect:
    """Run the calls before the first undecided one; if there are none, wait for the decision; else end the turn."""
    ready: list[ToolCall] = []
    for entry in run.open:
        if entry.phase in UNDECIDED_PHASES:
            if run.reply is None:  # the steps of a plan do not depend on their order
                continue
            return RunTools(calls=tuple(ready)) if ready else Wait(pending=run.pending)
        if entry.phase is not Phase.FINISHED:
            ready.append(entry.call)
    if ready or run.reply is not None:
        return RunTools(calls=tuple(ready))
    waits = any(entry.phase in UNDECIDED_PHASES for entry in run.open)  # steps of a plan
    return Wait(pending=run.pending) if waits else RunTools(calls=())


def _reflect_effect(run: Run[Any]) -> Effect:
    last = run.messages[-1]
    if isinstance(last, AssistantMessage):
        if run.background and not last.paused and _only_people_help(run):
            return Wait(pending=run.pending)
        return _REFLECT_ON_PAUSE if last.paused else Reflect(draft=last.text, verdict=run.verdict)
    return _REFLECT_ON_RESULTS if run.verdict is None else Reflect(draft=None, verdict=run.verdict)


def _only_people_help(run: Run[Any]) -> bool:
    """Return whether the end of the run waits for background runs, and all of these wait for something from outside."""
    left = run.open_background
    return bool(left) and all(each.pending for each in left) and not run.untold_background


_READ_INBOX: Final = ReadInbox()
# The same in every turn.
_REFLECT_ON_RESULTS: Final = Reflect(draft=None)
_REFLECT_ON_PAUSE: Final = Reflect(draft=None, is_paused=True)


_EFFECTS: Mapping[State, Callable[[Run[Any]], Effect | None]] = {
    State.OBSERVE: lambda _run: _READ_INBOX,
    State.THINK: lambda run: AskModel(
        turn=run.turn + 1,
        messages=run.shown if run.cutoff or run.kept_notes or run.profile is not None else run.messages,
    ),
    State.ACT: _act_effect,
    State.REFLECT: _reflect_effect,
    State.DONE: lambda _run: None,
    State.ERROR: lambda _run: None,
}


def _call_pending(run: Run[Any], entry: OpenCall) -> tuple[Pending, ...]:
    if entry.phase is Phase.PAUSED:
        return entry.pending
    is_approval, guarded = entry.phase is Phase.AWAITING_APPROVAL, entry.guarded
    asks = is_approval and guarded is not None and guarded.verdict is GuardVerdict.ASK
    own = Pending(
        kind=PendingKind.APPROVAL if is_approval else PendingKind.OUTCOME,
        run_id=run.id,
        call_id=entry.call.id,
        tool=entry.call.name,
        arguments=parse_arguments(entry.call),
        description=entry.description,
        reason=guarded.reason if asks and guarded is not None else "",
        expires_at=entry.expires_at,
        digest=entry.digest,
        error=entry.error,
    )
    return (own,)


# Views of the history.


def _own_messages(run: Run[Any]) -> tuple[Message, ...]:
    return run.messages[run.own_start :]


def _call_records(run: Run[Any]) -> Iterable[CallRecord]:
    for entry in () if run.plan is None else run.plan.closed:
        if entry.result is not None and entry.call.name not in ENGINE_TOOLS:
            yield CallRecord(
                turn=0,
                call_id=entry.call.id,
                name=entry.call.name,
                arguments=parse_arguments(entry.call),
                outcome=entry.result.outcome,
                duration_s=entry.result.duration_s,
            )
    calls = {call.id: call for m in _own_messages(run) if isinstance(m, AssistantMessage) for call in m.calls}
    for result in _own_messages(run):
        if isinstance(result, ToolResult):
            yield CallRecord(
                turn=parse_turn(result.call_id) - run.turns_before,
                call_id=result.call_id,
                name=result.tool,
                arguments=parse_arguments(calls[result.call_id]),
                outcome=result.outcome,
                duration_s=result.duration_s,
            )


def _failed_results(run: Run[Any]) -> Iterable[tuple[int, ToolResult]]:
    for entry in () if run.plan is None else run.plan.closed:
        if entry.result is not None and entry.result.outcome in ERROR_OUTCOMES:
            yield 0, entry.result
    for message in _own_messages(run):
        if isinstance(message, ToolResult) and message.outcome in ERROR_OUTCOMES:
            yield parse_turn(message.call_id) - run.turns_before, message
