"""Reducers: one function for each event, which returns the changed fields of a run beside state, version and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import (
    ERROR_OUTCOMES,
    UNDECIDED_PHASES,
    BackgroundRun,
    FailureRecord,
    Inquiry,
    OpenCall,
    Phase,
    stricter_policy,
)
from agentfsm.core.errors import MisuseError
from agentfsm.core.events import Action, PlanKind
from agentfsm.core.history import History, Span, default_segments, render_segments
from agentfsm.core.inbox import InputKind
from agentfsm.core.labels import NOT_SAID, Label, LabelSource, ToolKind, find_owner, join_labels
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import next_state
from agentfsm.core.messages import AssistantMessage, Outcome, SystemMessage, TextPart, ToolCall, ToolResult, UserMessage
from agentfsm.core.notes import NOTE_TOOL, Note, describe_hidden_effects, update_notes
from agentfsm.core.pending import Pending, PendingKind
from agentfsm.core.plans import ENGINE_TOOLS, PlanProgress, accepted_plan, build_results_note, rename_tools
from agentfsm.core.recalled_items import build_profile_note, build_recall_note
from agentfsm.core.run_fields import FENCE_MESSAGE, FORGOTTEN_AFTER_S, RunFields, find_open_call_index
from agentfsm.core.usage import AgentCost, TierChoice

Changes = dict[str, Any]
# Events that change only an open call.
OpenCallEvent: TypeAlias = (
    e.Guarded
    | e.ToolStarted
    | e.ToolCutOff
    | e.ToolLost
    | e.ToolPaused
    | e.InputGiven
    | e.ApprovalAsked
    | e.ApprovalGiven
)


def apply_event(run: RunFields, event: e.Event) -> None:
    """Apply an event to a run in place. Use it only for a value that has not been shared.

    Raises:
        IllegalTransitionError: if the state does not accept it.
        MisuseError: if it names a call that is not open.
    """
    fields = run.__dict__
    state = next_state(run.state, event)
    fields.update(REDUCERS[type(event)](run, event))
    fields["state"] = state
    fields["version"] += 1
    fields["duration_s"] += event.took_s
    if event.at - run.updated_at > FORGOTTEN_AFTER_S and (run.turn or run.waited_turn >= 0):
        fields["waited_turn"] = run.turn  # after the event: a reply that took that long is a wait as well
    fields["updated_at"] = event.at


def _reduce_observed(run: RunFields, event: e.Observed) -> Changes:
    history = run.messages or _initial_history(run)
    if not event.inputs:
        return _tell_results(run, history) if run.background else {"messages": history}
    changes: Changes = {"offered": None, "asks": "", "refusals": 0, "corrections": 0}
    if run.background:
        changes |= _tell_results(run, history)
        history = changes["messages"]
    changes["messages"] = history.with_appended(*[item.message for item in event.inputs])
    if any(item.kind is InputKind.USER for item in event.inputs):
        changes["is_recalled"] = False
    if run.plan is not None:
        changes["plan"] = attrs.evolve(run.plan, is_stale=True, objection="")
    said = [
        part.text
        for item in event.inputs
        if item.kind is InputKind.USER and NOT_SAID.isdisjoint(item.labels)
        for part in item.parts
        if isinstance(part, TextPart)
    ]
    if said:
        changes["said"] = (*run.said, *said)
    for item in event.inputs:
        if labels := item.all_labels:
            known = changes.get("labels", run.labels)
            changes["labels"] = _add_labels(run, labels, name=item.kind, known=known)
    return changes


def _tell_results(run: RunFields, history: History) -> Changes:
    """Return the changes by which the model reads the results of background runs that have ended, once."""
    if not (news := run.untold_background):
        return {"messages": history}
    is_marked = not run.has_fenced and any(each.result is not None and each.result.fence for each in news)
    told = {each.call.id: attrs.evolve(each, is_told=True) for each in news}
    return {
        "messages": history.with_appended(*[each.note for each in news], *([FENCE_MESSAGE] if is_marked else [])),
        "background": {**run.background, **told},
        "has_fenced": run.has_fenced or is_marked,
    }


def _add_labels(
    run: RunFields,
    labels: tuple[Label, ...],
    *,
    name: str,
    call_id: str = "",
    known: Mapping[Label, LabelSource] | None = None,
) -> Mapping[Label, LabelSource]:
    """Return the labels of the run with those of an event. A label that the run has keeps its first source."""
    before = run.labels if known is None else known
    version = run.version + 1
    new = {
        label: LabelSource(
            label=label,
            run_id=run.id,
            version=version,
            call_id=call_id,
            name=name,
            owner=find_owner(label, run.header.user),
        )
        for label in labels
        if label not in before
    }
    return {**before, **new} if new else before


def _initial_history(run: RunFields) -> History:
    """Return the history at version 0: the history that the run continues, and the prompt."""
    return run.prior.with_appended(*run.header.history, UserMessage(parts=run.header.prompt))


def _count_reply(run: RunFields, event: e.ToolsChosen | e.AnswerGiven | e.AnswerDrafted) -> Changes:
    """Return the changes that every reply makes: the turn, the usage and the models without a price."""
    unpriced, tier = run.unpriced, event.tier
    if event.usage.unpriced:
        name = event.model or (run.fingerprint or run.header.fingerprint).model
        if tier is not None and tier.spent:
            unpriced = _add_unpriced(unpriced, tier, name)
        elif name not in unpriced:
            unpriced = (*unpriced, name)
    changes: Changes = {"turn": run.turn + 1, "usage": run.usage + event.usage, "unpriced": unpriced}
    if tier is not None:
        changes["tier"] = tier.name
    native, hosted = event.message.native, event.message.hosted
    is_bound = native is not None and native.prefix != "" and not isinstance(run.messages[-1], AssistantMessage)
    if is_bound and (note := run.closing_note):  # a paused reply goes on without a note
        changes["kept_notes"] = {**run.kept_notes, len(run.messages): SystemMessage(text=note)}
    if hosted is not None and hosted.labels:
        name = hosted.calls[0].tool if hosted.calls else "reply"
        changes["labels"] = _add_labels(run, hosted.labels, name=name)
    return changes


def _add_unpriced(known: tuple[str, ...], tier: TierChoice, name: str) -> tuple[str, ...]:
    """Return the models without a price, with those of a reply that several models were asked for."""
    found = [part.model for part in tier.spent if part.usage.unpriced] or [name]
    return tuple(dict.fromkeys((*known, *found)))


def _reduce_tools_chosen(run: RunFields, event: e.ToolsChosen) -> Changes:
    entries = tuple([OpenCall(call=call) for call in event.message.calls])
    return {**_count_reply(run, event), "reply": event.message, "open": entries}


def _reduce_answer_drafted(run: RunFields, event: e.AnswerDrafted) -> Changes:
    changes = _add_answer(run, event)
    return {**changes, "draft_claims": event.claims, "draft_end": len(changes["messages"])}


def _add_answer(run: RunFields, event: e.AnswerGiven | e.AnswerDrafted) -> Changes:
    changes = _count_reply(run, event)
    source = event.answered_from
    changes |= {"messages": run.messages.with_appended(event.message), "consecutive_errors": 0, "answered_from": source}
    if source is not None and source.labels:
        changes["labels"] = _add_labels(run, source.labels, name=f"the answer of run {source.run_id}")
    return changes


def _reduce_answer_given(run: RunFields, event: e.AnswerGiven) -> Changes:
    return {**_add_answer(run, event), "stop_reason": StopReason.COMPLETED}


def _reduce_model_faltered(run: RunFields, event: e.ModelFaltered) -> Changes:
    fault = FailureRecord(turn=run.turn + 1, source="model", message=event.error)
    return {
        "turn": run.turn + 1,
        "usage": run.usage + event.usage,
        "model_failures": (*run.model_failures, fault),
        "consecutive_errors": run.consecutive_errors + 1,
    }


def _reduce_attempt_failed(run: RunFields, event: e.AttemptFailed) -> Changes:
    return {"usage": run.usage + event.usage}


def _reduce_compacted(run: RunFields, event: e.Compacted) -> Changes:
    layout = event.head if event.head is not None else default_segments(event.start, _find_task(run, event.start))
    is_cut = any(isinstance(entry, Span) and entry.chars is not None for entry in layout)
    effects = describe_hidden_effects(run.acted, run.messages, (layout, event.start))
    return {
        "cutoff": event.start,
        "segments": layout,
        "compacted_messages": render_segments(layout, run.messages, effects),
        "kept_notes": {},
        "compacted_version": run.version + 1,
        "compactions": run.recent_compactions + 1,
        "has_cut": run.has_cut or is_cut,
        "usage": run.usage + event.usage,
    }


def _find_task(run: RunFields, start: int) -> int | None:
    """Return the index of the task, the first user message of this run; None if it is not before `start`."""
    places = range(run.own_start, min(start, len(run.messages)))
    return next((place for place in places if isinstance(run.messages[place], UserMessage)), None)


# Phases of a call that accept each of these events.
_ALLOWED_PHASES: Final[Mapping[type[e.Event], frozenset[Phase]]] = {
    e.Guarded: frozenset(Phase) - {Phase.FINISHED},
    e.ToolStarted: frozenset({Phase.INTENDED, Phase.APPROVED, Phase.RUNNING, Phase.PAUSED}),
    e.ToolCutOff: frozenset({Phase.RUNNING}),
    e.ToolFinished: frozenset(Phase) - {Phase.FINISHED},
    e.ToolLost: frozenset(Phase) - {Phase.OUTCOME_UNKNOWN, Phase.FINISHED},
    e.ToolPaused: frozenset({Phase.INTENDED, Phase.APPROVED, Phase.RUNNING, Phase.PAUSED}),
    e.InputGiven: frozenset({Phase.PAUSED, Phase.RUNNING}),
    e.ApprovalAsked: frozenset({Phase.INTENDED, Phase.AWAITING_APPROVAL}),
    e.ApprovalGiven: frozenset({Phase.INTENDED, Phase.AWAITING_APPROVAL, Phase.OUTCOME_UNKNOWN}),
}


def _locate_call(run: RunFields, event: e.Event, call_id: str) -> tuple[list[OpenCall], int]:
    """Return the open calls as a list, and the index of the event's call; raise if its phase refuses the event."""
    entries = list(run.open)
    index = find_open_call_index(run, call_id)
    phase, allowed = entries[index].phase, _ALLOWED_PHASES[type(event)]
    # A call that waits for its tool begins when it has it again.
    if phase not in allowed and not (entries[index].lacks_tool and Phase.INTENDED in allowed):
        raise MisuseError(f"{type(event).__name__} does not fit the call {call_id} of run {run.id}: it is {phase}")
    return entries, index


def _evolve_call(run: RunFields, event: OpenCallEvent, **changes: Any) -> Changes:
    entries, index = _locate_call(run, event, event.call_id)
    entries[index] = attrs.evolve(entries[index], **changes)
    return {"open": tuple(entries)}


def _reduce_tools_offered(run: RunFields, event: e.ToolsOffered) -> Changes:
    return {"offered": event.tools, "usage": run.usage + event.usage}


def _reduce_reminded(run: RunFields, event: e.Reminded) -> Changes:
    return {"reminder": event.text, "reminded_turn": run.turn}


def _reduce_recalled(run: RunFields, event: e.Recalled) -> Changes:
    changes: Changes = {"is_recalled": True, "usage": run.usage + event.usage}
    if event.items:
        changes["messages"] = run.messages.with_appended(build_recall_note(event.items))
    if event.profile is not None:
        note = build_profile_note(event.profile) if event.profile else None
        changes["profile"] = run.profile if note == run.profile else note
    if read := (*(event.profile or ()), *event.items):
        labels = join_labels((Label.USER_DATA,), *[item.labels for item in read])
        changes["labels"] = _add_labels(run, labels, name="memory")
    return changes


def _reduce_planned(run: RunFields, event: e.Planned) -> Changes:
    before = run.plan or PlanProgress()
    replans = 0 if before.is_stale else before.replans + 1
    is_approved = before.is_approved and not before.is_stale
    plan = attrs.evolve(
        before,
        number=before.number + 1,
        plan=None,
        replans=replans,
        is_approved=is_approved,
        is_stale=False,
        objection="",
        approved_tools=before.approved_tools if is_approved else {},
        kind=event.kind,
        maker=event.maker,
    )
    return {"plan": plan, "open": (OpenCall(call=event.call),), "usage": run.usage + event.usage}


def _reduce_plan_dropped(run: RunFields, event: e.PlanDropped) -> Changes:
    plan = attrs.evolve(run.plan or PlanProgress(), plan=None, is_stale=False, objection="")
    note = SystemMessage(text=f"[Plan] {event.reason}")
    return {"plan": plan, "messages": run.messages.with_appended(note), "usage": run.usage + event.usage}


def _reduce_steps_ready(run: RunFields, event: e.StepsReady) -> Changes:
    entries = tuple([OpenCall(call=call) for call in event.calls])
    return {"open": run.open + entries, "usage": run.usage + event.usage, "reminded_turn": -1}  # results may change it


def _reduce_guarded(run: RunFields, event: e.Guarded) -> Changes:
    before = run.open_call(event.call_id)
    changes = _evolve_call(run, event, guarded=event)
    if event.counts and not (before.guarded is not None and before.guarded.counts):
        changes["counted"] = add_counts(run.counted, {before.call.name: 1})
    return changes


def add_counts(counts: Mapping[str, int], more: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sums of two counts by name."""
    return {**counts, **{name: counts.get(name, 0) + count for name, count in more.items()}}


def _reduce_tool_started(run: RunFields, event: e.ToolStarted) -> Changes:
    entry = run.open_call(event.call_id)
    read_only, kind = event.read_only, event.kind
    policy = event.on_unknown or ("rerun" if event.repeatable else "ask")
    is_decided = not entry.on_unknown  # a person has decided on it since, or it never started
    if entry.attempts:  # the first start may have had an effect, whatever its tool is now
        read_only, kind = entry.read_only and read_only, entry.kind
        policy = stricter_policy(entry.on_unknown or policy, policy)
    changes = _evolve_call(
        run,
        event,
        call=attrs.evolve(entry.call, key=event.key) if event.key else entry.call,
        phase=Phase.RUNNING,
        attempts=entry.attempts + event.attempts,
        started_at=event.since or event.at,
        duration_s=0.0,
        read_only=read_only,
        kind=kind,
        on_unknown=policy,
        parameters=event.parameters if is_decided else entry.parameters,
        pending=(),
        lacks_tool=False,
    )
    if not (read_only or entry.attempts or entry.call.name in ENGINE_TOOLS):
        changes["acted"] = (*run.acted, event.call_id)
    if event.labels:
        changes["labels"] = _add_labels(run, event.labels, name=entry.call.name, call_id=event.call_id)
    return changes


def _reduce_tool_cut_off(run: RunFields, event: e.ToolCutOff) -> Changes:
    if not event.undone:
        return _evolve_call(run, event, started_at=event.started_at, duration_s=event.duration_s)
    was = run.open_call(event.call_id)
    attempts = was.attempts - 1
    if attempts:  # an earlier attempt has run
        return _evolve_call(run, event, attempts=attempts)
    phase = Phase.APPROVED if was.approved or was.inquiry is not None else Phase.INTENDED
    return _evolve_call(run, event, phase=phase, attempts=0, started_at=0.0, on_unknown="", kind=ToolKind.DIRECT)


def _reduce_tool_finished(run: RunFields, event: e.ToolFinished) -> Changes:
    entries, index = _locate_call(run, event, event.result.call_id)
    was = entries[index]
    result = event.result
    entries[index] = OpenCall(call=was.call, phase=Phase.FINISHED, attempts=was.attempts, result=result)
    changes: Changes = {"open": tuple(entries)}
    if result.attempts > 1 and was.phase not in UNDECIDED_PHASES:  # a decision is not an attempt
        changes["retries"] = {**run.retries, result.tool: run.retries.get(result.tool, 0) + result.attempts - 1}
    if result.cut is not None:
        changes["has_cut"] = True
    if result.outcome is not Outcome.SKIPPED and result.tool not in ENGINE_TOOLS:
        changes["tool_call_count"] = run.tool_call_count + 1
    if result.child is not None:
        changes |= _count_child(run, result.child)
        changes["tool_call_count"] += 1
    for spending in result.spent:
        changes["usage"] = changes.get("usage", run.usage) + spending.usage
    if result.labels:
        changes["labels"] = _add_labels(run, result.labels, name=result.tool, call_id=result.call_id)
    if was.guarded is not None and was.guarded.counts and not result.attempts:
        changes["counted"] = add_counts(changes.get("counted", run.counted), {was.call.name: -1})
    if run.reply is None and run.plan is not None and (plan := accepted_plan(entries[index])) is not None:
        forward = run.plan.forward if run.plan.kind is PlanKind.COMPENSATION else plan
        changes["plan"] = attrs.evolve(run.plan, plan=plan, forward=forward)
    return changes


def _count_child(run: RunFields, child: AgentCost) -> Changes:
    """Return what the work of a child run adds to the figures of the run."""
    changes: Changes = {"usage": run.usage + child.usage, "tool_call_count": run.tool_call_count + child.calls}
    if child.counted:
        changes["counted"] = add_counts(run.counted, Counter(child.counted))
    return changes


def _reduce_child_reported(run: RunFields, event: e.ChildReported) -> Changes:
    before, result = run.background.get(event.call_id), event.result
    if before is None and result is None and not event.pending:
        before = BackgroundRun(call=run.open_call(event.call_id).call)
    if before is None or before.result is not None:
        raise MisuseError(f"ChildReported does not fit run {run.id}: call {event.call_id} has no open background run")
    after = attrs.evolve(before, pending=event.pending, result=result)
    changes: Changes = {"background": {**run.background, event.call_id: after}}
    if result is None:
        return changes
    if result.child is not None:
        changes |= _count_child(run, result.child)
    if result.labels:
        changes["labels"] = _add_labels(run, result.labels, name=result.tool, call_id=result.call_id)
    if result.cut is not None:
        changes["has_cut"] = True
    return changes


def _reduce_tool_lost(run: RunFields, event: e.ToolLost) -> Changes:
    losses = run.open_call(event.call_id).losses + 1
    return _evolve_call(
        run,
        event,
        phase=Phase.OUTCOME_UNKNOWN,
        losses=losses,
        expires_at=None,
        digest="",
        error=event.reason,
        pending=(),
        lacks_tool=event.lacks_tool,
    )


def _reduce_tool_paused(run: RunFields, event: e.ToolPaused) -> Changes:
    changes: Changes = {"phase": Phase.PAUSED, "pending": event.pending, "lacks_tool": False}
    if event.state is not None:
        item, before = event.pending[0], run.open_call(event.call_id).inquiry or Inquiry()
        is_task = item.kind is PendingKind.TASK
        has_task = before.has_task or (is_task and item.run_id == run.id)  # that of a forked run is not the fork's
        rounds = before.rounds + (not is_task)
        changes["inquiry"] = attrs.evolve(before, rounds=rounds, state=event.state, has_task=has_task)
    return _evolve_call(run, event, **changes)


def _reduce_input_given(run: RunFields, event: e.InputGiven) -> Changes:
    entry = run.open_call(event.call_id)
    before = entry.inquiry or Inquiry()
    answers = {**before.answers, **event.answers}
    if entry.phase is not Phase.RUNNING:
        inquiry = attrs.evolve(before, answers=answers)
        return _evolve_call(run, event, phase=Phase.APPROVED, pending=(), inquiry=inquiry)
    if event.state is None:
        raise MisuseError(f"InputGiven without a state does not fit the running call {entry.call.id} of run {run.id}")
    inquiry = attrs.evolve(before, rounds=before.rounds + 1, state=event.state, answers=answers)
    return _evolve_call(run, event, inquiry=inquiry)


def _reduce_approval_asked(run: RunFields, event: e.ApprovalAsked) -> Changes:
    changes = _evolve_call(
        run,
        event,
        call=_edit_call(run, event),
        phase=Phase.AWAITING_APPROVAL,
        lacks_tool=False,
        expires_at=event.expires_at,
        description=event.description,
        digest=event.digest,
        error=event.error,
    )
    if event.tools and run.plan is not None:
        changes["plan"] = attrs.evolve(run.plan, approved_tools=event.tools)
    if event.arguments is not None and run.reply is not None:
        changes["reply"] = attrs.evolve(run.reply, calls=tuple([entry.call for entry in changes["open"]]))
    return changes


def _edit_call(run: RunFields, event: e.ApprovalAsked | e.ApprovalGiven) -> ToolCall:
    """Return the call of an event, with the arguments by which a person replaced the model's, if any."""
    entries, index = _locate_call(run, event, event.call_id)
    call = entries[index].call
    if event.arguments is None:
        return call
    return attrs.evolve(call, arguments=event.arguments, key=event.key or call.key)


def _reduce_approval_given(run: RunFields, event: e.ApprovalGiven) -> Changes:
    own = run.open_call(event.call_id)
    if own.phase is Phase.INTENDED and not event.allowance:
        raise MisuseError(f"ApprovalGiven does not fit the call {own.call.id} of run {run.id}: no person was asked")
    changes = _evolve_call(
        run,
        event,
        call=_edit_call(run, event),
        phase=Phase.APPROVED,
        expires_at=None,
        error="",
        lacks_tool=False,
        on_unknown="",  # a person has decided on the starts before
        approved=event.digest or own.digest,
    )
    changes["approvals"] = {**run.approvals, event.call_id: event.by}
    if run.plan is not None and event.call_id == f"p{run.plan.number}":
        changes["plan"] = attrs.evolve(run.plan, is_approved=True)
    elif event.arguments is not None and run.reply is not None:
        # The person's arguments also replace the model's in the message that asked for the call.
        changes["reply"] = attrs.evolve(run.reply, calls=tuple([entry.call for entry in changes["open"]]))
    return changes


def _reduce_tools_returned(run: RunFields, _event: e.ToolsReturned) -> Changes:
    results = [entry.result for entry in run.open if entry.result is not None]
    if len(results) != len(run.open):
        raise MisuseError(f"run {run.id}: the turn cannot end while calls are open")
    return {**_close_turn(run, results), "consecutive_errors": _count_error_turns(run, results)}


def _count_error_turns(run: RunFields, results: list[ToolResult]) -> int:
    """Return the error turns in a row: a turn counts if all its calls failed, and one success resets the number.

    The steps of a plan do not count.
    """
    if run.reply is None:
        return run.consecutive_errors
    outcomes = {result.outcome for result in results}
    return 0 if Outcome.DONE in outcomes else run.consecutive_errors + (outcomes <= ERROR_OUTCOMES)


def _reduce_continued(run: RunFields, event: e.Continued) -> Changes:
    changes: Changes = {}
    if event.note:
        changes["messages"] = run.messages.with_appended(SystemMessage(text=event.note))
    if event.loop:
        changes["loops"] = run.loops + 1
    if event.disabled:
        changes["disabled"] = tuple(dict.fromkeys((*run.disabled, *event.disabled)))
    if event.refused:
        changes["refusals"] = run.refusals + 1
    if event.is_last:
        changes["limit_reached"] = e.LimitReached(
            reason=StopReason.LOOP_DETECTED, message=_LOOP_MESSAGE, note=event.note
        )
    if event.asks:
        changes["asks"] = event.asks
    if run.verdict is not None:
        is_corrected = run.verdict.action in _CORRECTIVE_ACTIONS
        changes["verdict"] = None
        changes["corrections"] = run.corrections + is_corrected
        if is_corrected and run.plan is not None and run.plan.plan is not None and not run.plan.is_stale:
            changes["plan"] = attrs.evolve(run.plan, objection=event.note)
    return changes


_CORRECTIVE_ACTIONS: Final = frozenset({Action.RETRY_STEP, Action.REPLAN})
# Stop message for loops in journals of format 3 and older, which do not record one.
_LOOP_MESSAGE: Final = "loop detected: the model repeated itself after every warning"


def _reduce_judged(run: RunFields, event: e.Judged) -> Changes:
    return {"verdict": event.verdict, "usage": run.usage + event.usage}


def _reduce_accepted(_run: RunFields, event: e.Accepted) -> Changes:
    return {"stop_reason": StopReason.COMPLETED, "findings": event.findings}


def _reduce_paused(run: RunFields, event: e.Paused) -> Changes:
    words = [f"paused by {event.by}" if event.by else "paused", *([event.message] if event.message else [])]
    before, text = run.paused, ": ".join(words)
    if before is not None and before.kind is PendingKind.CRASH:  # the reason is needed until the run is resumed
        return {"paused": attrs.evolve(before, description=f"{before.description}; {text}")}
    return {"paused": Pending(kind=event.kind, run_id=run.id, description=text)}


def _reduce_resumed(run: RunFields, event: e.Resumed) -> Changes:
    changes: Changes = {"paused": None, "fingerprint": event.fingerprint or run.fingerprint}
    if not event.renamed:
        return changes
    names = event.renamed
    entries = tuple([_rename_call(entry, names) for entry in run.open])
    changes["open"] = entries
    if run.reply is not None:
        changes["reply"] = attrs.evolve(run.reply, calls=tuple([entry.call for entry in entries]))
    if run.plan is not None:
        changes["plan"] = rename_tools(run.plan, names, entries)
    if run.background:
        changes["background"] = {key: _rename_background(each, names) for key, each in run.background.items()}
    return changes


def _rename_background(each: BackgroundRun, names: Mapping[str, str]) -> BackgroundRun:
    return attrs.evolve(each, call=attrs.evolve(each.call, name=names.get(each.call.name, each.call.name)))


def _rename_call(entry: OpenCall, names: Mapping[str, str]) -> OpenCall:
    if entry.attempts or entry.result is not None or entry.call.name not in names:
        return entry
    return attrs.evolve(entry, call=attrs.evolve(entry.call, name=names[entry.call.name]))


def _reduce_limit_reached(run: RunFields, event: e.LimitReached) -> Changes:
    changes = _stop_run(run, event)
    messages = changes.get("messages", run.messages).with_appended(SystemMessage(text=event.note))
    return {**changes, "messages": messages, "verdict": None, "limit_reached": event}


def _reduce_failed(run: RunFields, event: e.Failed) -> Changes:
    return {
        **_stop_run(run, event),
        "stop_reason": event.reason,
        "stop_message": event.message,
        "findings": event.findings,
    }


def _stop_run(run: RunFields, event: e.LimitReached | e.Failed) -> Changes:
    """Return the changes that close every open call and end the waits of the run."""
    results = [entry.result or build_interrupted_result(entry, event.reason) for entry in run.open]
    return {**_close_turn(run, results), "paused": None, "asks": ""}


def _close_turn(run: RunFields, results: list[ToolResult]) -> Changes:
    """Return the changes that move the open turn into the history: the assistant's message and all its results.

    Calls of a plan move to its record, and the model reads their results in a note. The first time that a result stands
    between marks, a note explains them.
    """
    notes: Changes = {}
    marks: tuple[SystemMessage, ...] = ()
    for result in results:  # without a call, since nearly no turn has notes
        if result.fence and not run.has_fenced:
            marks, notes["has_fenced"] = (FENCE_MESSAGE,), True
        if result.tool == NOTE_TOOL:
            notes["notes"] = _take_notes(run, results)
    if run.reply is None and run.open and run.plan is not None:
        closed = [
            attrs.evolve(entry, phase=Phase.FINISHED, result=result)
            for entry, result in zip(run.open, results, strict=True)
        ]
        plan = attrs.evolve(run.plan, closed=(*run.plan.closed, *closed))
        messages = run.messages.with_appended(build_results_note(closed), *marks)
        return {"messages": messages, "plan": plan, "open": (), **notes}
    if run.reply is None:
        return {} if run.messages else {"messages": _initial_history(run)}
    return {"messages": run.messages.with_appended(run.reply, *results, *marks), "reply": None, "open": (), **notes}


def _take_notes(run: RunFields, results: list[ToolResult]) -> Mapping[str, Note]:
    pairs = zip(run.open, results, strict=True)
    noted = [entry.call for entry, result in pairs if result.tool == NOTE_TOOL and result.outcome is Outcome.DONE]
    return update_notes(run.notes, noted)


def build_interrupted_result(entry: OpenCall, reason: StopReason) -> ToolResult:
    """Return the result of a call that the end of the run closes."""
    return entry.build_result(*_interrupted_outcome(entry, reason))


def _interrupted_outcome(entry: OpenCall, reason: StopReason) -> tuple[Outcome, str]:
    """Return the outcome and the text of the result for a call that the end of the run closes."""
    stopped = f"the run was stopped ({reason})"
    was_running = entry.phase is Phase.RUNNING or (entry.phase is Phase.OUTCOME_UNKNOWN and not entry.lacks_tool)
    if not entry.attempts and entry.phase is Phase.PAUSED:
        return Outcome.CANCELLED, f"no answer: {stopped} while the call waited"
    if not entry.attempts and not was_running:
        return Outcome.SKIPPED, f"no result: {stopped} before the call started"
    how = f"cut off: {stopped}" if was_running else f"no result: {stopped} while the call waited for input"
    if entry.read_only:
        return Outcome.CANCELLED, f"{how}. It only reads, so nothing was changed."
    # Also for an idempotent tool, because a new call of it would have another key.
    return Outcome.UNKNOWN, f"{how} and the effect may have happened; check before repeating"


REDUCERS: Final[Mapping[type[e.Event], Callable[[RunFields, Any], Changes]]] = MappingProxyType(
    {
        e.Observed: _reduce_observed,
        e.ToolsChosen: _reduce_tools_chosen,
        e.AnswerGiven: _reduce_answer_given,
        e.AnswerDrafted: _reduce_answer_drafted,
        e.ModelFaltered: _reduce_model_faltered,
        e.AttemptFailed: _reduce_attempt_failed,
        e.Compacted: _reduce_compacted,
        e.ToolsOffered: _reduce_tools_offered,
        e.Reminded: _reduce_reminded,
        e.Planned: _reduce_planned,
        e.Recalled: _reduce_recalled,
        e.PlanDropped: _reduce_plan_dropped,
        e.StepsReady: _reduce_steps_ready,
        e.Guarded: _reduce_guarded,
        e.ToolStarted: _reduce_tool_started,
        e.ToolCutOff: _reduce_tool_cut_off,
        e.ToolFinished: _reduce_tool_finished,
        e.ToolLost: _reduce_tool_lost,
        e.ToolPaused: _reduce_tool_paused,
        e.InputGiven: _reduce_input_given,
        e.ApprovalAsked: _reduce_approval_asked,
        e.ApprovalGiven: _reduce_approval_given,
        e.ToolsReturned: _reduce_tools_returned,
        e.ChildReported: _reduce_child_reported,
        e.Judged: _reduce_judged,
        e.Continued: _reduce_continued,
        e.Accepted: _reduce_accepted,
        e.Paused: _reduce_paused,
        e.Resumed: _reduce_resumed,
        e.LimitReached: _reduce_limit_reached,
        e.Failed: _reduce_failed,
    },
)
