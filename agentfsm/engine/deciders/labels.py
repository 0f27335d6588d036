"""Labels: where data comes from, who may read it, and between which marks the model reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core import events as e
from agentfsm.core.labels import EFFECT_LABELS, Label, join_labels
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import AssistantMessage, ErrorType, Outcome, ToolCall, ToolResult
from agentfsm.core.text_safety import build_fence_mark
from agentfsm.engine.execution.run_end import fail
from agentfsm.ports.guards import list_hosted_labels
from agentfsm.tools.builtin import READ_RESULT

if TYPE_CHECKING:
    from agentfsm.core.effects import Reflect
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.open_calls import EndedCall
    from agentfsm.engine.execution.outcome import StepOutcome
    from agentfsm.engine.model_calls.received import ReceivedReply
    from agentfsm.ports.guards import GuardDecision
    from agentfsm.tools.tool import Tool


# Labels of what is read


def label_hosted(execution: Execution, received: ReceivedReply) -> None:
    """Add the labels that the agent declares for the provider's own tools to what they brought into a reply."""
    if (hosted := received.hosted) is None:
        return
    names, guards = {call.tool.partition(".")[0] for call in hosted.calls}, execution.config.guards
    tools = [tool for tool in execution.config.registry.hosted if tool.name in names or not names]
    if tools:
        labels = join_labels(*[list_hosted_labels(tool, guards) for tool in tools])
        received.hosted = attrs.evolve(hosted, labels=labels)


def list_call_labels(execution: Execution, tool: Tool[..., Any], call: ToolCall) -> tuple[Label, ...]:
    """Return the labels of a call that was tried: those of its tool, and `untrusted` if a guard distrusts that."""
    labels = tool.list_labels(call)
    is_distrusted = any(guard.distrusts(tool.traits) for guard in execution.config.guards)
    return join_labels(labels, (Label.UNTRUSTED,)) if is_distrusted else labels


def add_reported(_execution: Execution, ended: EndedCall) -> None:
    """Add the labels that the function of a call has reported to its result."""
    if ended.ledger is not None and ended.ledger.labels:
        ended.result = attrs.evolve(ended.result, labels=join_labels(ended.result.labels, ended.ledger.labels))


# Who may read it


def _find_refusal(execution: Execution, labels: Iterable[Label]) -> GuardDecision | None:
    """Return the refusal of a guard if the run must not read data with these labels, else None."""
    header = execution.journal.run.header
    refusals = (guard.check_data(labels, header) for guard in execution.config.guards)
    return next((each for each in refusals if each is not None), None)


def check_inputs(execution: Execution, observed: e.Observed | None) -> StepOutcome | None:
    """Return the end of a run whose history, or the inputs that it takes, have data that it must not read."""
    if observed is None:
        refusal = _find_refusal(execution, execution.journal.run.labels)
    else:
        labels = join_labels(*[item.all_labels for item in observed.inputs])
        refusal = _find_refusal(execution, labels) if labels else None
    if refusal is None:
        return None
    message = f"the input or the history has data that the run must not read: {refusal.reason}"
    return fail(execution, StopReason.GUARD, message, *(() if observed is None else (observed,)))


def has_read_data(message: AssistantMessage) -> bool:
    """Return whether the provider's own tools brought labelled data into an answer, which is then reviewed."""
    return message.hosted is not None and bool(message.hosted.labels)


async def review_draft(execution: Execution, _effect: Reflect) -> StepOutcome | None:
    """Return the end of a run whose draft may hold data that it must not read."""
    if (refusal := _find_refusal(execution, execution.journal.run.labels)) is None:
        return None
    message = f"the answer may hold data that the run must not read: {refusal.reason}"
    return fail(execution, StopReason.GUARD, message)


def withhold_forbidden(execution: Execution, ended: EndedCall) -> None:
    """Withhold the content of a result that the run must not read, and record why."""
    result = ended.result
    if not result.labels or (refusal := _find_refusal(execution, result.labels)) is None:
        return
    ended.result = _withhold(result, refusal)
    guarded = execution.journal.run.open_call(result.call_id).guarded
    ended.facts.append(
        e.Guarded(
            call_id=result.call_id,
            verdict=refusal.verdict,
            rule=refusal.rule,
            reason=refusal.reason,
            labels=refusal.labels,
            counts=guarded is not None and guarded.counts,
        )
    )


def withhold_from_child(execution: Execution, result: ToolResult) -> ToolResult:
    """Return the result of a background run, without its content if the run must not read it."""
    refusal = _find_refusal(execution, result.labels) if result.labels else None
    return result if refusal is None else _withhold(result, refusal)


def _withhold(result: ToolResult, refusal: GuardDecision) -> ToolResult:
    return attrs.evolve(
        result,
        outcome=Outcome.FAILED,
        content=f"The call was made, but its result is withheld: {refusal.reason}.",
        error_type=ErrorType.NOT_PERMITTED,
        retryable=False,
        shown_chars=None,
        parts=(),
        labels=tuple([label for label in result.labels if label in EFFECT_LABELS]),
    )


# How the model reads it


def fence_result(execution: Execution, ended: EndedCall) -> None:
    """Add the marks between which the model reads a result, if a guard wants that.

    A page of an earlier result has no labels of its own, but may be of one that has them.
    """
    run, result = execution.journal.run, ended.result
    labels = (Label.UNTRUSTED,) if result.tool == READ_RESULT and run.has_fenced else result.labels
    ended.result = _fence(execution, result, labels)


def fence_child(execution: Execution, result: ToolResult) -> ToolResult:
    """Return the result of a background run, with the marks between which the model reads it, if a guard wants that."""
    return _fence(execution, result, result.labels)


def _fence(execution: Execution, result: ToolResult, labels: tuple[Label, ...]) -> ToolResult:
    run = execution.journal.run
    if labels and any(guard.fences(labels) for guard in execution.config.guards):
        return attrs.evolve(result, fence=build_fence_mark(run.header.nonce or run.id))
    return result
