"""Draw the plans of a run, or the steps of a flow, with the status of each step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from agentfsm.cli.render.flowchart import Flowchart, FlowchartNode
from agentfsm.core.events import Planned
from agentfsm.core.plans import JOINS, Plan, PlanStep
from agentfsm.flow import StepStatus
from agentfsm.flow.flow_plan import read_step_status

if TYPE_CHECKING:
    from agentfsm.core.calls import OpenCall
    from agentfsm.core.events import Event
    from agentfsm.core.run import Run

# Backgrounds on which black text is readable.
_FILLS: Final = {
    StepStatus.PENDING: "",
    StepStatus.RUNNING: "#cfe3ff",
    StepStatus.WAITING: "#ffe9b8",
    StepStatus.SUCCESS: "#cdeccf",
    StepStatus.SKIPPED: "#e6e6e6",
    StepStatus.FAILED: "#ffd1cf",
    StepStatus.NOT_RUN: "#e6e6e6",
}


def draw_plans(run: Run[Any], events: Iterable[Event]) -> Flowchart:
    """Draw the steps of all plans of a run, each with its status.

    Args:
        run: The run after the events.
        events: Its journal from the first event.
    """
    plans = [Plan.from_json(json.loads(event.call.arguments)) for event in events if isinstance(event, Planned)]
    if run.plan is not None and run.plan.plan is not None:
        plans[-1] = run.plan.plan  # a person may have edited it
    closed = () if run.plan is None else run.plan.closed
    calls = {entry.call.id: entry for entry in (*closed, *run.open)}
    nodes: list[FlowchartNode] = []
    arrows: list[tuple[int, int, tuple[str, ...]]] = []
    for number, plan in enumerate(plans, 1):
        is_past = run.is_over or number < len(plans)
        places = {step.id: len(nodes) + place for place, step in enumerate(plan.steps)}
        for step in plan.steps:
            join = () if step.join == JOINS[0] else (step.join,)
            arrows += [(places[each], places[step.id], join) for each in step.after if each in places]
            nodes.append(_draw_step(step, calls.get(f"p{number}.{step.id}"), is_past=is_past))
    return Flowchart(nodes=tuple(nodes), arrows=tuple(arrows))


def _draw_step(step: PlanStep, entry: OpenCall | None, *, is_past: bool) -> FlowchartNode:
    unstarted = StepStatus.NOT_RUN if is_past else StepStatus.PENDING
    status = unstarted if entry is None else read_step_status(entry)
    title = step.tool or step.question or step.goal
    return FlowchartNode(lines=(title, status.replace("_", " ")), fill=_FILLS[status])
