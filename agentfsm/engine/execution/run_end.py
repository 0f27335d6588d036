"""The events that end a run: at a limit, after its last answer, or for any other failure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import OpenCall, Phase
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import Outcome
from agentfsm.core.reducers import build_interrupted_result
from agentfsm.core.run_facts import RunEffects, list_effects
from agentfsm.engine.execution.cost import bill_settled_call
from agentfsm.engine.execution.known_calls import list_due
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.tools.queue.result_text import build_decided_result

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.journal import Journal
    from agentfsm.tools.registry import ToolRegistry

_LAST_ANSWER_PROMPT: Final = (
    "This run has to stop ({reason}). This is your last reply, and no tool can be called: give the best answer that "
    "you can with what you have, and say what is missing."
)
_UNSTARTED: Final = frozenset({Phase.INTENDED, Phase.APPROVED})
_DOUBTFUL_TEXT: Final = (
    "no result: the run was stopped ({reason}). Whether the call had begun when an earlier worker died is not known; "
    "nothing was changed by it."
)


def stop_at_limit(
    execution: Execution, reason: StopReason, message: str, *before: e.Event, note: str = ""
) -> StepOutcome:
    """Return the end of a run at a limit, or the request for its last answer if it has one and a turn is left.

    Args:
        execution: The execution of the run.
        reason: The limit.
        message: The number reached, for people.
        *before: Events that are committed before the end.
        note: Text for the model before the request for its last answer.
    """
    journal = execution.journal
    if not execution.config.last_answer or journal.run.fold(before).turn >= execution.config.limits.turns:
        return fail(execution, reason, message, *before)
    text = f"{note}\n{_LAST_ANSWER_PROMPT.format(reason=reason)}".lstrip()
    reached = e.LimitReached(reason=reason, message=message, note=text)
    return StepOutcome((*before, *_find_doubtful_ends(execution, reason, before), reached))


def end_after_last_answer(execution: Execution, reached: e.LimitReached, outcome: str, *before: e.Event) -> StepOutcome:
    """Return the end of a run whose last answer was requested; `outcome` describes whether it came."""
    return fail(execution, reached.reason, f"{reached.message}; {outcome}", *before)


def fail(execution: Execution, reason: StopReason, message: str, *before: e.Event) -> StepOutcome:
    """Return the end of a run in ERROR, after the events that come before it."""
    doubtful, findings = _find_doubtful_ends(execution, reason, before), list_due(execution)
    return build_failure(execution.journal, doubtful, reason, message, *before, findings=findings)


def build_failure(
    journal: Journal,
    doubtful: Iterable[e.Event],
    reason: StopReason,
    message: str,
    *before: e.Event,
    findings: tuple[str, ...] = (),
) -> StepOutcome:
    """Return the end of a run in ERROR.

    Args:
        journal: Journal of the run.
        doubtful: Ends of calls that an earlier worker may have begun, from `build_doubtful_ends`.
        reason: Reason of the end.
        message: Description of the end, for people.
        *before: Events that are committed before the end.
        findings: Violations of rules that were found, each as a clause.
    """
    before = (*before, *doubtful)
    effects = list_effects(journal.run.fold(before))
    if journal.run.plan is None or not journal.run.plan.maker or reason is StopReason.STEP_FAILED:
        effects = RunEffects(unknown=effects.unknown if journal.run.open else ())  # the rest is no news
    text = effects.describe()
    failed = e.Failed(reason=reason, message=f"{message}; {text}" if text else message, findings=findings)
    return StepOutcome((*before, failed))


def _find_doubtful_ends(execution: Execution, reason: StopReason, before: Iterable[e.Event]) -> list[e.Event]:
    orphaned, tools = execution.orphaned_calls, execution.config.registry
    return build_doubtful_ends(execution.journal.run, orphaned, tools, reason, before)


def build_doubtful_ends(
    run: Run, orphaned_calls: frozenset[str], tools: ToolRegistry, reason: StopReason, before: Iterable[e.Event]
) -> list[e.Event]:
    """Return the ends of calls that a crashed worker may have begun, and of those that cost money and were cut off.

    Args:
        run: The run, which is about to end.
        orphaned_calls: Ids of the calls that were open when an earlier worker crashed.
        tools: Tools of the run's agent, as far as they are known.
        reason: Reason of the end.
        before: Events that are committed before these: a call that ends with one of them is left out.
    """
    ended = {event.result.call_id for event in before if isinstance(event, e.ToolFinished)}
    left = [entry for entry in run.open if entry.phase is not Phase.FINISHED and entry.call.id not in ended]
    doubtful = [
        e.ToolFinished(result=build_decided_result(entry, Outcome.CANCELLED, _DOUBTFUL_TEXT.format(reason=reason)))
        for entry in left
        if entry.call.id in orphaned_calls and _may_have_started(entry, tools)
    ]
    paid = [
        e.ToolFinished(result=attrs.evolve(build_interrupted_result(entry, reason), spent=spent))
        for entry in left
        if (spent := bill_settled_call(tools.get(entry.call.name), entry))
    ]
    return [*doubtful, *paid]


def _may_have_started(entry: OpenCall, tools: ToolRegistry) -> bool:
    """Return whether a crashed worker may have begun a call whose start is not in the journal."""
    tool = tools.get(entry.call.name)
    is_known = tool is not None and not tool.read_only  # otherwise its start would be in the journal
    return entry.phase in _UNSTARTED and not (entry.attempts or is_known)
