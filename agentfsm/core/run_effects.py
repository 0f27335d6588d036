"""The effects of a run, from its journal: those done, undone, unknown, or left without their compensation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from agentfsm.core.messages import ErrorType, Outcome, ToolResult
from agentfsm.core.plan_kinds import PlanKind
from agentfsm.core.plans import PLAN_TOOL, find_step_number
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.core.run import Run

# Error types of calls whose tool was running.
_TOOL_ERROR_TYPES = (ErrorType.TOOL, ErrorType.TIMEOUT, ErrorType.UNAVAILABLE, ErrorType.RATE_LIMITED)


@attrs.frozen(kw_only=True)
class RunEffects(Value):
    """Names of the tools whose calls may have had an effect, each as often as it was called."""

    done: tuple[str, ...] = ()
    """Calls that succeeded, in their order; those of compensations are not among them."""

    undone: tuple[str, ...] = ()
    """Those of them whose compensation succeeded."""

    left: tuple[str, ...] = ()
    """Those of them that have a compensation, which has not succeeded although the run compensates."""

    unknown: tuple[str, ...] = ()
    """Calls that failed, were cut off or lost while their tool was running, so that their effect may have happened."""

    def describe(self) -> str:
        """Return the effects as one line, such as "done: charge, ship; undone: charge"; empty without any."""
        parts = [
            f"{field.name}: {format_names(names)}"
            for field in attrs.fields(RunEffects)
            if (names := getattr(self, field.name))
        ]
        return "; ".join(parts)


def list_effects(run: Run) -> RunEffects:
    """Return the effects of a run as far as its journal has them. Finished calls of read-only tools count as done."""
    steps = () if run.plan is None else run.plan.closed
    closed = [each for each in run.messages[run.own_start :] if isinstance(each, ToolResult)]
    ended = [*closed, *[entry.result for entry in (*steps, *run.open) if entry.result is not None]]
    ended = [each for each in ended if each.tool != PLAN_TOOL]
    undoes = _find_undone_steps(run)
    forward = [each for each in ended if find_step_number(each.call_id) not in undoes]
    succeeded = {find_step_number(each.call_id) for each in ended if each.outcome is Outcome.DONE}
    undone = {undoes[number] for number in undoes if number in succeeded}
    compensated = (
        {}
        if run.plan is None or run.plan.forward is None
        else {
            step.id: step.tool
            for step in run.plan.forward.steps
            if step.compensation is not None and step.id in succeeded
        }
    )
    is_compensating = run.plan is not None and run.plan.kind is PlanKind.COMPENSATION
    running = [entry.call.name for entry in run.open if entry.result is None and entry.may_have_acted]
    return RunEffects(
        done=tuple([each.tool for each in forward if each.outcome is Outcome.DONE]),
        undone=tuple([name for number, name in compensated.items() if number in undone]),
        left=tuple([name for number, name in compensated.items() if is_compensating and number not in undone]),
        unknown=(*[each.tool for each in ended if may_have_happened(each)], *running),
    )


def _find_undone_steps(run: Run) -> dict[int | None, int]:
    """Return the ids of steps that compensations undo, by the ids of these."""
    if run.plan is None or run.plan.kind is not PlanKind.COMPENSATION or run.plan.plan is None:
        return {}
    return {step.id: step.undoes for step in run.plan.plan.steps}


def may_have_happened(result: ToolResult) -> bool:
    """Return whether the effect of a call is unknown; False for one that may simply be repeated."""
    broke = result.error_type in _TOOL_ERROR_TYPES and not result.retryable and result.child is None
    return broke or result.outcome is Outcome.UNKNOWN


def format_names(names: Iterable[str]) -> str:
    """Return each name once, with its count."""
    return ", ".join([name if times == 1 else f"{name} ({times} times)" for name, times in Counter(names).items()])
