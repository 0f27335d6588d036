"""The engine's own tools for plans: one accepts a plan, one answers a question of a plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import ArgumentsError, MisuseError
from agentfsm.core.messages import JSON
from agentfsm.core.plans import PLAN_TOOL, QUESTION_TOOL, Plan, PlanStep, has_references
from agentfsm.ports.guards import find_order_flaws
from agentfsm.ports.planned_calls import plan_calls
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.tool import Tool, make_tool

if TYPE_CHECKING:
    from agentfsm.ports.guards import CallGuard
    from agentfsm.ports.policies import PlanMaker
    from agentfsm.tools.registry import ToolRegistry
    from agentfsm.tools.schema.binding import Arguments

# The errors of a plan are found by `Plan.from_json`, all at once.
_PLAN_SCHEMA: Final[Mapping[str, JSON]] = {
    "type": "object",
    "properties": {"analysis": {"type": "string"}, "steps": {"type": "array", "items": {"type": "object"}}},
    "required": ["steps"],
}


def build_plan_tools(
    planner: PlanMaker, registry: ToolRegistry, guards: Sequence[CallGuard] = ()
) -> Mapping[str, Tool[..., Any]]:
    """Return the engine's tools for plans, by name."""

    def validate(arguments: Arguments) -> str | None:
        try:
            plan = Plan.from_json(vars(arguments))
        except MisuseError as error:
            return str(error)
        if planner.fixed:  # it comes from a program, and is carried out as it is in the journal
            return None
        finished = range(1, plan.steps[0].id)  # an edited plan may refer to steps of the one before
        flaws = [*plan.find_flaws(finished, max_steps=planner.max_steps), *find_mode_flaws(plan, planner)]
        return "; ".join([*flaws, *find_tool_flaws(plan, registry), *find_rule_flaws(plan, registry, guards)]) or None

    def needs_review(arguments: Arguments) -> bool:
        return planner.review(Plan.from_json(vars(arguments))) if callable(planner.review) else planner.review

    accept = make_tool(
        _accept_plan,
        name="plan",
        description="Carry out a plan.",
        parameters=_PLAN_SCHEMA,
        read_only=True,
        requires_approval=planner.review if isinstance(planner.review, bool) else needs_review,
        approval_expires_s=planner.review_expires_s,
        validate=validate,
        describe=lambda arguments: "\n".join(step.describe() for step in Plan.from_json(vars(arguments)).steps),
    )
    answer = make_tool(_answer_question, name="question", read_only=True)
    return {
        PLAN_TOOL: attrs.evolve(accept, name=PLAN_TOOL),
        QUESTION_TOOL: attrs.evolve(answer, name=QUESTION_TOOL),
    }


def find_mode_flaws(plan: Plan, planner: PlanMaker) -> Sequence[str]:
    """Return the flaws of steps that the mode of the planner excludes, or that only a flow may plan."""
    goals = [step.id for step in plan.steps if step.goal and planner.mode != "hybrid"]
    undone = [step.id for step in plan.steps if step.compensation is not None or step.undoes]
    return [
        *[f"step {each}: plan the calls of tools, not goals" for each in goals],
        *[f"step {each}: leave out 'compensation' and 'undoes', which are for flows" for each in undone],
    ]


def find_tool_flaws(
    plan: Plan, registry: ToolRegistry, is_available: Callable[[Tool[..., Any]], bool] = lambda _tool: True
) -> Sequence[str]:
    """Return the flaws of the steps' tools and arguments."""
    flaws: list[str] = []
    for step in plan.steps:
        for name in filter(None, (step.tool, *step.tools)):
            tool = registry.get(name)
            if tool is None or not is_available(tool):
                names = ", ".join(each.name for each in registry if is_available(each)) or "none"
                flaws.append(f"step {step.id}: there is no tool {name!r}; the tools are: {names}")
            elif step.tool and (flaw := _find_argument_flaw(step, tool)) is not None:
                flaws.append(f"step {step.id}: {flaw}")
    return flaws


def find_rule_flaws(plan: Plan, registry: ToolRegistry, guards: Sequence[CallGuard]) -> list[str]:
    """Return the rules that the steps break in whatever order they are carried out."""
    return find_order_flaws(guards, plan_calls(plan.steps, agents=registry.agent_tools)) if guards else []


def _find_argument_flaw(step: PlanStep, tool: Tool[..., Any]) -> str | None:
    """Return the flaw of a step's arguments. With references, only their names can be checked before they are bound."""
    if not has_references(dict(step.arguments)):
        try:
            tool.bind_and_check(json.dumps(step.arguments))
        except ArgumentsError as error:
            return str(error)
        return None
    shape: Any = tool.parameters
    missing = [name for name in shape.get("required", ()) if name not in step.arguments]
    unknown = [name for name in step.arguments if name not in shape.get("properties", {})]
    if missing:
        return f"{tool.name} needs the argument {missing[0]!r}"
    return f"{tool.name} has no argument {unknown[0]!r}" if unknown and not shape.get("additionalProperties") else None


async def _accept_plan(steps: list[Any], analysis: str = "") -> str:  # noqa: ARG001  the arguments are the plan
    return "accepted"


async def _answer_question(ctx: RunContext[Any], question: str, results: dict[str, Any]) -> str:
    """Answer a question of a plan from the results of its steps."""
    if ctx.ask_model is None:
        raise MisuseError("a question of a plan can only be answered in a run")
    return await ctx.ask_model(question, results)
