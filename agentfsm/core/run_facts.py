"""The effects of a run (done, undone, unknown, or not compensated) and its usage by purpose, from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import format_names, may_have_happened
from agentfsm.core.events import PlanKind
from agentfsm.core.labels import Label, join_labels
from agentfsm.core.messages import MessageOrigin, Outcome, ToolResult, UserMessage
from agentfsm.core.plans import PLAN_TOOL, PlanProgress, PlanStep, find_step_number, is_skipped
from agentfsm.core.usage import Purpose, Spending, Usage
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.core.run import Run


@attrs.frozen(kw_only=True)
class RunEffects(Value):
    """Names of the tools whose calls may have had an effect, each as often as it was called."""

    done: tuple[str, ...] = ()
    """Calls that succeeded, in their order; those of compensations are not among them."""

    undone: tuple[str, ...] = ()
    """Those of them whose compensation succeeded."""

    left: tuple[str, ...] = ()
    """Those of them that have a compensation, which has not succeeded although a step has failed."""

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


def list_results(run: Run) -> list[ToolResult]:
    """Return the results of the calls of a run and of the steps of its plans, without those of plans themselves.

    For a call that has begun a background run which has ended, it is the result of that run.
    """
    entries = (*(() if run.plan is None else run.plan.closed), *run.open)
    found = (*run.messages[run.own_start :], *[entry.result for entry in entries])
    results = [each for each in found if isinstance(each, ToolResult) and each.tool != PLAN_TOOL]
    later = {call_id: each.result for call_id, each in run.background.items()}
    return [later.get(each.call_id) or each for each in results] if later else results


def list_step_results(run: Run) -> list[ToolResult]:
    """Return the results of the steps of a run's plans."""
    return [] if run.plan is None else [entry.result for entry in run.plan.steps if entry.result is not None]


def list_newest_results(run: Run) -> list[ToolResult]:
    """Return the results of the newest turn, in order; after steps of a plan, those of the plan."""
    newest = run.messages[-1]
    if run.plan is not None and isinstance(newest, UserMessage) and newest.origin is MessageOrigin.PLAN:
        return [each for each in list_step_results(run) if each.call_id.startswith(f"p{run.plan.number}.")]
    found: list[ToolResult] = []
    for message in reversed(run.messages):
        if not isinstance(message, ToolResult):
            break
        found.append(message)
    return found[::-1]


def list_brought_labels(run: Run, known: Iterable[Label]) -> tuple[Label, ...]:
    """Return the labels of the data that a run has brought in: those of its results, and all that are not known.

    Args:
        run: The run.
        known: Labels that its caller has already.
    """
    return join_labels(*[each.labels for each in list_results(run)], run.labels.keys() - set(known))


def list_effects(run: Run) -> RunEffects:
    """Return the effects of a run as far as its journal has them. Finished calls of read-only tools count as done."""
    plan, results = run.plan or PlanProgress(), list_results(run)
    is_compensating = plan.kind is PlanKind.COMPENSATION
    undoes = {step.id: step.undoes for step in plan.plan.steps} if is_compensating and plan.plan is not None else {}
    succeeded = {find_step_number(each.call_id) for each in results if each.outcome is Outcome.DONE}
    undone = {number for undo, number in undoes.items() if undo in succeeded}
    steps = () if plan.forward is None else plan.forward.steps
    compensated = [step for step in steps if step.compensation is not None and step.id in succeeded]
    is_failing = is_compensating or _has_failed(steps, results)
    running = [entry.call.name for entry in run.open if entry.result is None and entry.may_have_acted]
    return RunEffects(
        done=tuple(
            [
                each.tool
                for each in results
                if each.outcome is Outcome.DONE and find_step_number(each.call_id) not in undoes
            ]
        ),
        undone=tuple([step.tool for step in compensated if step.id in undone]),
        left=tuple([step.tool for step in compensated if is_failing and step.id not in undone]),
        unknown=(*[each.tool for each in results if may_have_happened(each)], *running),
    )


def _has_failed(steps: Sequence[PlanStep], results: Iterable[ToolResult]) -> bool:
    """Return whether a step has failed for which no join "any" stands in, so that compensations are due."""
    failed = {
        find_step_number(each.call_id) for each in results if each.outcome is not Outcome.DONE and not is_skipped(each)
    }
    return any(
        step.id in failed and all(each.join != "any" or each.id in failed for each in steps if step.id in each.after)
        for step in steps
    )


# Purpose of requests in journals of format 3 and older, which do not record it. All other events are turns.
_DEFAULT_PURPOSES: Final[Mapping[type[e.Event], Purpose]] = MappingProxyType(
    {e.Compacted: Purpose.SUMMARY, e.ToolsOffered: Purpose.TOOL_SELECTION, e.Judged: Purpose.JUDGE}
)
_NOTHING: Final = Usage()


def usage_by_purpose(events: Iterable[e.Event]) -> dict[Purpose, Usage]:
    """Return what a run has spent for each purpose: `usage_by_purpose(await agent.history(run_id))`.

    The sum is `run.usage`. Purposes for which nothing was spent are left out. What the runs of sub-agents have spent is
    under `Purpose.AGENT`; their own journals have the details.

    Args:
        events: Events of the journal, from the first on.
    """
    spent: dict[Purpose, Usage] = {}
    for event in events:
        for part in list_spending(event):
            if part.usage != _NOTHING:
                spent[part.purpose] = spent.get(part.purpose, _NOTHING) + part.usage
    return {purpose: spent[purpose] for purpose in Purpose if purpose in spent}


def list_spending(event: e.Event) -> tuple[Spending, ...]:
    """Return the parts of the usage that an event records, by purpose and model; their sum is added to `run.usage`.

    The model is empty for the agent's own. The usage of the run of a sub-agent is one part, under `Purpose.AGENT`.
    """
    if isinstance(event, e.ToolFinished | e.ChildReported):
        if event.result is None:
            return ()
        child = event.result.child
        below = () if child is None else (Spending(purpose=Purpose.AGENT, usage=child.usage),)
        return (*below, *event.result.spent)
    usage: Usage | None = getattr(event, "usage", None)
    if usage is None:
        return ()
    tier = getattr(event, "tier", None)
    others: tuple[Spending, ...] = () if tier is None else tier.spent
    for part in others:
        usage = usage.without(part.usage)
    purpose = getattr(event, "purpose", None) or _DEFAULT_PURPOSES.get(type(event), Purpose.TURN)
    return (*others, Spending(purpose=purpose, usage=usage, model=getattr(event, "model", "")))
