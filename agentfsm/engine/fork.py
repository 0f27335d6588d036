"""Fork a run: create a new run whose journal begins with the first events of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import BackgroundRun, OpenCall, Phase, build_idempotency_key, replace_arguments
from agentfsm.core.errors import MisuseError
from agentfsm.core.inbox import Input, InputKind
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, ErrorType, Outcome, TextPart
from agentfsm.core.plans import ENGINE_TOOLS, PLAN_TOOL
from agentfsm.core.run import Run, begin_run
from agentfsm.engine.deciders.guards import needs_approval_by_guard
from agentfsm.engine.execution.tool_access import WITHHELD_CHARS, may_act
from agentfsm.engine.execution.unattended import build_background_result
from agentfsm.tools.queue.result_text import build_decided_result, withheld_text
from agentfsm.tools.run_context import ToolReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentfsm.core.events import Event
    from agentfsm.core.header import Header
    from agentfsm.tools.registry import ToolRegistry


def build_fork_events(
    header: Header,
    before: Run | None,
    events: Sequence[Event],
    edit: Mapping[int, Event],
    registry: ToolRegistry,
) -> tuple[Event, ...]:
    """Return the events that a fork begins with.

    Calls keep their idempotency keys, unless an edit has changed them. A call that is open at the fork may since have
    had its effect in the forked run: unless its tool is read-only, a person has to settle its outcome.

    Args:
        header: Header of the fork.
        before: The run that the fork continues, if any.
        events: The first events of the forked run.
        edit: Replacements of these events by version; event 1 is the first.
        registry: The tools of the agent of the fork.

    Raises:
        MisuseError: if the edited events are not a valid journal (IllegalTransitionError), or the run is over.
    """
    if not isinstance(edit, Mapping):
        raise MisuseError(f"edit is a dict of events by their versions, not {type(edit).__name__}: give {{5: event}}")
    unknown = [version for version in edit if version not in range(1, len(events) + 1)]
    if unknown:
        raise MisuseError(f"the fork begins with the versions 1 to {len(events)}: there is no {unknown[0]!r} to edit")
    prefix, run = list(events), begin_run(header, before)
    for version, event in sorted(edit.items()):
        run = run.fold(prefix[run.version : version - 1])
        prefix[version - 1] = _rekey_changed_calls(run, event, events[version - 1])
    _check_edits(events, prefix)
    run = run.fold(prefix[run.version :])
    if edit:
        _check_decided_calls(begin_run(header, before).fold(events), run)
    if run.is_over:
        raise MisuseError(f"at version {run.version} the run is over ({run.stop_reason}): fork it at an earlier one")
    _check_approved_plan(run, prefix)
    at = run.updated_at
    first: list[Event] = [e.Resumed(at=at)] if run.paused is not None else []
    if run.state is State.OBSERVE and run.messages and isinstance(run.messages[-1], AssistantMessage):
        note = Input(kind=InputKind.REFLECTION, parts=(TextPart(text=_LOOK_AGAIN_NOTE),))
        first.append(e.Observed(at=at, inputs=(note,)))
    own = [fact for entry in run.open for fact in _build_open_call_events(run, entry, registry)]
    lost = [_report_background_run(each) for each in run.open_background]
    return (*prefix, *first, *[attrs.evolve(fact, at=at) for fact in (*own, *lost)])


def _rekey_changed_calls(run: Run, event: Event, original: Event) -> Event:
    """Return an edited event with keys of the fork for the calls that it changes, since these have another effect.

    Args:
        run: The fork before the event.
        event: The edited event.
        original: The event of the forked run that it replaces.
    """
    if isinstance(event, e.ToolsChosen):
        kept = original.message.calls if isinstance(original, e.ToolsChosen) else ()
        calls = [
            each if each in kept else attrs.evolve(each, key=build_idempotency_key(run.header, each))
            for each in event.message.calls
        ]
        return attrs.evolve(event, message=attrs.evolve(event.message, calls=tuple(calls)))
    if isinstance(event, e.ApprovalGiven | e.ApprovalAsked) and event.arguments is not None and event != original:
        call = replace_arguments(run.header, run.open_call(event.call_id).call, event.arguments)
        return attrs.evolve(event, key=call.key)
    return event


def _check_edits(events: Sequence[Event], prefix: Sequence[Event]) -> None:
    """Check that no edit makes or changes what a guard or a person has decided.

    No edit accepts a plan, or changes one that was accepted, since whether it needs a review is not asked then; none
    changes a call that a person has approved; and none adds, removes or changes a decision of a guard.

    Raises:
        MisuseError: if one does.
    """
    plans: set[str] = set()
    calls: dict[str, int] = {}
    for version, (original, event) in enumerate(zip(events, prefix, strict=True), 1):
        if event != original and isinstance(original, e.Guarded) | isinstance(event, e.Guarded):
            raise MisuseError(
                f"version {version} is the decision of a guard, which cannot be edited: fork the run at version "
                f"{version - 1}, where the guards of this agent decide"
            )
        if isinstance(event, e.Planned) and event != original:
            plans.add(event.call.id)
        if isinstance(event, e.ToolsChosen) and event != original:
            kept = original.message.calls if isinstance(original, e.ToolsChosen) else ()
            calls |= {call.id: version for call in event.message.calls if call not in kept}
        if isinstance(event, e.ToolFinished) and event.result.tool == PLAN_TOOL:
            call_id = event.result.call_id
            if event != original or call_id in plans:
                raise MisuseError(
                    f"version {version} would accept a plan that was not reviewed: fork with the edited plan as the "
                    f"last event, the `Planned` of {call_id}"
                )
        if isinstance(event, e.ApprovalGiven) and event.call_id in calls:
            raise MisuseError(
                f"version {calls[event.call_id]} would change the call {event.call_id}, which was approved as it was "
                f"at version {version}: fork before that, so that the changed call is asked about"
            )


def _check_decided_calls(original: Run, run: Run) -> None:
    """Check that no edit changes an open call after a guard has decided on it.

    Raises:
        MisuseError: if one does.
    """
    decided = {entry.call.id: (entry.call.name, entry.call.arguments) for entry in original.open}
    for entry in run.open:
        call = entry.call
        is_decided = entry.guarded is not None and entry.phase is not Phase.FINISHED
        if is_decided and decided.get(call.id) != (call.name, call.arguments):
            raise MisuseError(
                f"an edit changes the call {call.id}, on which a guard has decided as it was: fork the run at the "
                "version before that decision, where the guards of this agent decide on the edited call"
            )


def _report_background_run(each: BackgroundRun) -> e.ChildReported:
    """Return the end of a background run, which belongs to the forked run, with all that it waits for."""
    text = (
        f"{each.call.name} works for the run that was forked, so it is not known here what it did. Check before you "
        "repeat anything."
    )
    end = ToolReturn(outcome=Outcome.UNKNOWN, content=text)
    return e.ChildReported(call_id=each.call.id, result=build_background_result(each, end))


def _check_approved_plan(run: Run, prefix: Sequence[Event]) -> None:
    """Check that the fork does not carry out steps of a plan that a person has approved for the forked run.

    Raises:
        MisuseError: if it would.
    """
    progress = run.plan
    if progress is None or not progress.guards_calls:
        return
    waits = any(entry.call.name == PLAN_TOOL and entry.phase is Phase.APPROVED for entry in run.open)
    if waits or progress.is_stuck:
        given = [
            version
            for version, event in enumerate(prefix, 1)
            if isinstance(event, e.ApprovalGiven) and event.call_id.startswith("p") and "." not in event.call_id
        ]
        raise MisuseError(
            f"at version {run.version} a plan is carried out that a person has approved for the forked run only: fork "
            f"it at version {given[-1] - 1}, where the plan waits, or after its steps"
        )


# Added if a fork begins after an answer that did not count: some providers refuse a request that ends with an answer.
_LOOK_AGAIN_NOTE = "Something had come in that this answer did not take up, and it is gone. Look at your answer again."


def _build_open_call_events(run: Run, entry: OpenCall, registry: ToolRegistry) -> Sequence[Event]:
    """Return the event to record for a call that is open where the fork begins."""
    call, tool, is_paused = entry.call, registry.get(entry.call.name), entry.phase is Phase.PAUSED
    is_own = call.name in ENGINE_TOOLS  # which have no effect
    if entry.phase in (Phase.FINISHED, Phase.OUTCOME_UNKNOWN) or call.malformed is not None or call.invented or is_own:
        return ()
    if run.header.withhold and tool is not None and not entry.attempts:  # nothing has happened to it at this version
        if may_act(tool):
            text = withheld_text(call.name, call.arguments[:WITHHELD_CHARS])
            withheld = build_decided_result(entry, Outcome.SKIPPED, text)
            return (e.ToolFinished(result=attrs.evolve(withheld, error_type=ErrorType.WITHHELD)),)
        if entry.phase is Phase.INTENDED:
            return ()
    if tool is not None and tool.waits_for is not None:
        pending = tuple([attrs.evolve(each, run_id=run.id) for each in entry.pending])
        return (e.ToolPaused(call_id=call.id, pending=pending),) if is_paused else ()
    asks, is_asked = needs_approval_by_guard(entry), entry.phase is Phase.AWAITING_APPROVAL
    if tool is not None and tool.read_only and (not asks or is_asked):
        # Waits of a child run belong to the forked run: the fork asks again from the start.
        started = e.ToolStarted(call_id=call.id, repeatable=True, read_only=True)
        taken_back = e.ToolCutOff(call_id=call.id, started_at=entry.started_at, duration_s=0.0, undone=True)
        return (started, taken_back) if is_paused else ()
    return (e.ToolLost(call_id=call.id),)
