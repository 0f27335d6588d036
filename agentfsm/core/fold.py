"""What each event changes in a run, beside its state, version and time: one function for each, and their table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import ERRORS, UNDECIDED, Fault, Inquiry, OpenCall, Phase, place_in
from agentfsm.core.effects import Pending
from agentfsm.core.errors import MisuseError
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import next_state
from agentfsm.core.messages import Outcome, SystemMessage, ToolResult, UserMessage
from agentfsm.core.verdict import Action
from agentfsm.core.view import Span, plain_layout, view

if TYPE_CHECKING:
    from agentfsm.core.history import History
    from agentfsm.core.run import Run

Changes = dict[str, Any]
# What changes an open call, and no more.
OfCall: TypeAlias = (
    e.ToolStarted | e.ToolCutOff | e.ToolLost | e.ToolPaused | e.InputGiven | e.ApprovalAsked | e.ApprovalGiven
)


def apply(run: Run[Any], event: e.Event) -> None:
    """Apply an event to a run in place. Use it only for a value that has not been shared.

    Raises:
        IllegalTransitionError: when the state does not take it.
        MisuseError: when it names a call that is not open.
    """
    fields = run.__dict__
    state = next_state(run.state, event)
    fields.update(FOLD[type(event)](run, event))
    fields["state"] = state
    fields["version"] += 1
    fields["duration_s"] += event.took_s
    fields["updated_at"] = event.at


def _observed(run: Run[Any], event: e.Observed) -> Changes:
    history = run.messages or _opening(run)
    if not event.inputs:
        return {"messages": history}
    messages = history.then(*[item.message for item in event.inputs])
    return {"messages": messages, "offered": None, "asks": "", "refusals": 0, "corrections": 0}


def _opening(run: Run[Any]) -> History:
    """Return the history at version 0: what the run goes on from, and the prompt."""
    return run.prior.then(*run.header.history, UserMessage(parts=run.header.prompt))


def _replied(run: Run[Any], event: e.ToolsChosen | e.AnswerGiven | e.AnswerDrafted) -> Changes:
    """Return what every reply changes: it is a turn, and it costs."""
    unpriced = run.unpriced
    if event.usage.unpriced:
        name = event.model or (run.fingerprint or run.header.fingerprint).model
        unpriced = unpriced if name in unpriced else (*unpriced, name)
    return {"turn": run.turn + 1, "usage": run.usage + event.usage, "unpriced": unpriced}


def _tools_chosen(run: Run[Any], event: e.ToolsChosen) -> Changes:
    entries = tuple([OpenCall(call=call) for call in event.message.calls])
    return {**_replied(run, event), "reply": event.message, "open": entries}


def _answered(run: Run[Any], event: e.AnswerGiven | e.AnswerDrafted) -> Changes:
    return {**_replied(run, event), "messages": run.messages.then(event.message), "consecutive_errors": 0}


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
    e.ToolCutOff: frozenset({Phase.RUNNING}),
    e.ToolFinished: frozenset(Phase) - {Phase.FINISHED},
    e.ToolLost: frozenset(Phase) - {Phase.LOST, Phase.FINISHED},
    e.ToolPaused: frozenset({Phase.INTENDED, Phase.APPROVED, Phase.RUNNING, Phase.PAUSED}),
    e.InputGiven: frozenset({Phase.PAUSED}),
    e.ApprovalAsked: frozenset({Phase.INTENDED, Phase.ASKED}),
    e.ApprovalGiven: frozenset({Phase.ASKED, Phase.LOST}),
}


def index_of(run: Run[Any], call_id: str) -> int:
    """Return where among the open calls the one of that id is.

    Raises:
        MisuseError: when it is not among them.
    """
    place = place_in(call_id)
    if place < len(run.open) and run.open[place].call.id == call_id:
        return place
    for index, entry in enumerate(run.open):  # an id that was not made here
        if entry.call.id == call_id:
            return index
    ids = ", ".join(entry.call.id for entry in run.open) or "none"
    raise MisuseError(f"run {run.id} has no open call {call_id!r}; open calls: {ids}")


def _entry_for(run: Run[Any], event: e.Event, call_id: str) -> tuple[list[OpenCall], int]:
    """Return the open calls as a list, and where the call of the event is, if it may come to it in its phase."""
    entries = list(run.open)
    index = index_of(run, call_id)
    if entries[index].phase not in _COMES_IN[type(event)]:
        phase = entries[index].phase
        raise MisuseError(f"{type(event).__name__} does not fit the call {call_id} of run {run.id}: it is {phase}")
    return entries, index


def _evolved(run: Run[Any], event: OfCall, **changes: Any) -> Changes:
    entries, index = _entry_for(run, event, event.call_id)
    entries[index] = attrs.evolve(entries[index], **changes)
    return {"open": tuple(entries)}


def _tools_offered(run: Run[Any], event: e.ToolsOffered) -> Changes:
    return {"offered": event.tools, "usage": run.usage + event.usage}


def _tool_started(run: Run[Any], event: e.ToolStarted) -> Changes:
    return _evolved(
        run,
        event,
        phase=Phase.RUNNING,
        attempts=run.entry(event.call_id).attempts + event.attempts,
        started_at=event.since or event.at,
        duration_s=0.0,
        read_only=event.read_only,
        waits=(),
    )


def _tool_cut_off(run: Run[Any], event: e.ToolCutOff) -> Changes:
    if not event.undone:
        return _evolved(run, event, started_at=event.started_at, duration_s=event.duration_s)
    attempts = run.entry(event.call_id).attempts - 1
    if attempts:  # an earlier one has run
        return _evolved(run, event, attempts=attempts)
    return _evolved(run, event, phase=Phase.APPROVED, attempts=0, started_at=0.0)


def _tool_finished(run: Run[Any], event: e.ToolFinished) -> Changes:
    entries, index = _entry_for(run, event, event.result.call_id)
    was = entries[index]
    result = event.result
    entries[index] = OpenCall(call=was.call, phase=Phase.FINISHED, attempts=was.attempts, result=result)
    changes: Changes = {"open": tuple(entries)}
    if result.attempts > 1 and was.phase not in UNDECIDED:  # a decision is no attempt
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
    losses = run.entry(event.call_id).losses + 1
    return _evolved(run, event, phase=Phase.LOST, losses=losses, expires_at=None, digest="", waits=())


def _tool_paused(run: Run[Any], event: e.ToolPaused) -> Changes:
    changes: Changes = {"phase": Phase.PAUSED, "waits": event.pending}
    if event.state is not None:
        before = run.entry(event.call_id).inquiry or Inquiry()
        changes["inquiry"] = attrs.evolve(before, rounds=before.rounds + 1, state=event.state)
    return _evolved(run, event, **changes)


def _input_given(run: Run[Any], event: e.InputGiven) -> Changes:
    before = run.entry(event.call_id).inquiry or Inquiry()
    inquiry = attrs.evolve(before, answers={**before.answers, **event.answers})
    return _evolved(run, event, phase=Phase.APPROVED, waits=(), inquiry=inquiry)


def _approval_asked(run: Run[Any], event: e.ApprovalAsked) -> Changes:
    return _evolved(
        run,
        event,
        phase=Phase.ASKED,
        expires_at=event.expires_at,
        description=event.description,
        digest=event.digest,
    )


def _approval_given(run: Run[Any], event: e.ApprovalGiven) -> Changes:
    if event.arguments is None:
        return _evolved(run, event, phase=Phase.APPROVED, expires_at=None)
    # A person's arguments stand in the place of the model's, also in the message that asked for the call.
    own = run.entry(event.call_id).call
    call = attrs.evolve(own, arguments=event.arguments, key=event.key or own.key)
    changes = _evolved(run, event, phase=Phase.APPROVED, expires_at=None, call=call)
    calls = tuple([entry.call for entry in changes["open"]])
    return {**changes, "reply": None if run.reply is None else attrs.evolve(run.reply, calls=calls)}


def _tools_returned(run: Run[Any], _event: e.ToolsReturned) -> Changes:
    results = [entry.result for entry in run.open if entry.result is not None]
    if len(results) != len(run.open):
        raise MisuseError(f"run {run.id}: the turn cannot end while calls are open")
    return {**_closed(run, results), "consecutive_errors": _errors_after(run, results)}


def _errors_after(run: Run[Any], results: list[ToolResult]) -> int:
    """Count an error turn where all calls failed; one success resets; a refused or withdrawn call is neither."""
    outcomes = {result.outcome for result in results}
    return 0 if Outcome.DONE in outcomes else run.consecutive_errors + (outcomes <= ERRORS)


def _continued(run: Run[Any], event: e.Continued) -> Changes:
    changes: Changes = {}
    if event.note:
        changes["messages"] = run.messages.then(SystemMessage(text=event.note))
    if event.loop:
        changes["loops"] = run.loops + 1
    if event.disabled:
        changes["disabled"] = tuple(dict.fromkeys((*run.disabled, *event.disabled)))
    if event.refused:
        changes["refusals"] = run.refusals + 1
    if event.is_last:
        changes["reached"] = e.LimitReached(reason=StopReason.LOOP_DETECTED, message=_CIRCLES, note=event.note)
    if event.asks:
        changes["asks"] = event.asks
    if run.verdict is not None:
        changes["verdict"] = None
        changes["corrections"] = run.corrections + (run.verdict.action in _CORRECTIONS)
    return changes


_CORRECTIONS: Final = frozenset({Action.RETRY_STEP, Action.REPLAN})
# What journals of format 3 and older do not say of a run that was stopped for a loop.
_CIRCLES: Final = "the run went round in circles after every warning"


def _judged(run: Run[Any], event: e.Judged) -> Changes:
    return {"verdict": event.verdict, "usage": run.usage + event.usage}


def _accepted(_run: Run[Any], _event: e.Accepted) -> Changes:
    return {"stop_reason": StopReason.COMPLETED}


def _paused(run: Run[Any], event: e.Paused) -> Changes:
    words = [f"paused by {event.by}" if event.by else "paused", *([event.message] if event.message else [])]
    return {"paused": Pending(kind=event.kind, run_id=run.id, description=": ".join(words))}


def _resumed(run: Run[Any], event: e.Resumed) -> Changes:
    return {"paused": None, "fingerprint": event.fingerprint or run.fingerprint}


def _limit_reached(run: Run[Any], event: e.LimitReached) -> Changes:
    changes = _stopped(run, event)
    messages = changes.get("messages", run.messages).then(SystemMessage(text=event.note))
    return {**changes, "messages": messages, "verdict": None, "reached": event}


def _failed(run: Run[Any], event: e.Failed) -> Changes:
    return {**_stopped(run, event), "stop_reason": event.reason, "stop_message": event.message}


def _stopped(run: Run[Any], event: e.LimitReached | e.Failed) -> Changes:
    """Close every open call, and end what the run waits for."""
    results = [entry.result or entry.closed(*_closing(entry, event.reason)) for entry in run.open]
    return {**_closed(run, results), "paused": None, "asks": ""}


def _closed(run: Run[Any], results: list[ToolResult]) -> Changes:
    """Move the open turn into the history: the assistant's message together with all its results."""
    if run.reply is None:
        return {} if run.messages else {"messages": _opening(run)}
    return {"messages": run.messages.then(run.reply, *results), "reply": None, "open": ()}


def _closing(entry: OpenCall, reason: StopReason) -> tuple[Outcome, str]:
    """Return how a call ends that the end of the run closes, and what is said of it."""
    stopped = f"the run was stopped ({reason})"
    is_at_work = entry.phase is Phase.RUNNING or entry.phase is Phase.LOST
    if not entry.attempts and entry.phase is Phase.PAUSED:
        return Outcome.CANCELLED, f"no answer: {stopped} while the call waited"
    if not entry.attempts and not is_at_work:
        return Outcome.SKIPPED, f"no result: {stopped} before it came to that"
    how = f"cut off: {stopped}" if is_at_work else f"no result: {stopped} when the call had asked for something"
    if entry.read_only:
        return Outcome.CANCELLED, f"{how}. It only reads, so nothing was changed."
    # Whatever the tool is: a new call of it would have a key of its own.
    return Outcome.UNKNOWN, f"{how} and the effect may have happened; check before repeating"


FOLD: Final[Mapping[type[e.Event], Callable[[Run[Any], Any], Changes]]] = MappingProxyType(
    {
        e.Observed: _observed,
        e.ToolsChosen: _tools_chosen,
        e.AnswerGiven: _answer_given,
        e.AnswerDrafted: _answered,
        e.ModelFaltered: _model_faltered,
        e.Compacted: _compacted,
        e.ToolsOffered: _tools_offered,
        e.ToolStarted: _tool_started,
        e.ToolCutOff: _tool_cut_off,
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
        e.LimitReached: _limit_reached,
        e.Failed: _failed,
    },
)
