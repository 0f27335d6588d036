"""Child runs with the steps of a flow: the agents of those that repeat a step, and the inputs of all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.agents.agent import Agent
from agentfsm.core.errors import ModelError
from agentfsm.core.limits import Limits
from agentfsm.core.messages import ErrorType, Outcome
from agentfsm.core.validation import COUNT
from agentfsm.flow.flow_plan import has_reserved_key
from agentfsm.flow.steps import Names, Step, pick
from agentfsm.ports.model import Emit, Model, Reply, Request
from agentfsm.tools.run_context import ToolReturn

if TYPE_CHECKING:
    from agentfsm.core.usage import Usage
    from agentfsm.ports.policies import PlanMaker


class NoModel(Model):
    """Stands where an agent has its model."""

    name = "none"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:  # noqa: ARG002  it answers nothing
        """Refuse the request."""
        raise ModelError("a flow has no model: its steps are given, and its agents are steps")

    def cost_usd(self, usage: Usage) -> float | None:  # noqa: ARG002  a flow requests nothing itself
        """Return 0, so that a limit of costs is that of the steps."""
        return 0.0


_UNUSABLE_INPUTS: Final = ToolReturn(
    outcome=Outcome.FAILED,
    content="the inputs cannot have the keys '$step' and '$text', which stand for results of steps",
    error_type=ErrorType.ARGUMENTS,
)
# Seconds for all repetitions together: an hour, for a thousand items of some seconds, several at once.
REPEATED_TIMEOUT_S: Final = 3_600.0
# Tokens and calls of a child run whose own limits do not count, since those of the flow above it do.
_ABOVE_FLOW: Final = 10**12


def build_repeating_agent(
    name: str, planner: PlanMaker, steps: list[Step], *, times: int, parallel: int, timeout_s: float
) -> Agent[Any]:
    """Return the agent of a child run that carries out steps several times.

    Args:
        name: Name of the agent.
        planner: Plans the repetitions.
        steps: The steps that its plans may have.
        times: Maximum of repetitions, 1 or more.
        parallel: Maximum of steps at once, 1 or more.
        timeout_s: Seconds for all of them, above 0.
    """
    COUNT.check("step", "parallel", parallel)
    retries = [times * step.retry for step in steps]
    default = Limits()
    limits = attrs.evolve(
        default,
        tokens=_ABOVE_FLOW,
        tool_calls=_ABOVE_FLOW,
        seconds=timeout_s,
        parallel=parallel,
        retries_per_tool=max(default.retries_per_tool, *retries),
        retries_per_run=max(default.retries_per_run, sum(retries)),
    )
    return Agent(NoModel(), name=name, tools=[step.tool for step in steps], planner=planner, limits=limits)


def check_inputs(arguments: Mapping[str, Any]) -> ToolReturn | None:
    """Return the result of a step whose arguments cannot be the inputs of a child run; None if they can."""
    return _UNUSABLE_INPUTS if has_reserved_key(arguments) else None


def write_inputs(names: Names) -> Callable[[Mapping[str, Any]], str]:
    """Return a function of the arguments of a step that returns those with these names as inputs of a child run."""
    return lambda arguments: json.dumps(pick(arguments, names), ensure_ascii=False)
