"""A planner and a judge for an agent, each with a model of its own. Source: document F, 3.

Both functions return an agent, so that all they do is in the journal of its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from agentfsm.agents.agent import Agent
from agentfsm.agents.extras import resolve_model
from agentfsm.core.errors import MisuseError, ModelRetry
from agentfsm.core.validation import FUNCTION
from agentfsm.planning import Planner
from agentfsm.reflection import Reflector

if TYPE_CHECKING:
    from agentfsm.core.run import A_co
    from agentfsm.ports.model import Model

from agentfsm.patterns.routing import AGENT


def plan_and_execute(agent: Agent[A_co], *, planner: Model | str | None = None, **options: Any) -> Agent[A_co]:
    """Return the agent with a planner: one model plans, and the agent's own carries the plan out and answers.

    Calls whose arguments are in the plan need no model. The agent's model works on goals, and answers from the results.

    Args:
        agent: The executor.
        planner: Model that plans, and that answers the questions of plans; usually a larger one. None: the agent's own.
        **options: Further fields of `Planner`. Default `mode="hybrid"`.

    Raises:
        MisuseError: if a field has a wrong value, or the executor is not an agent.
    """
    AGENT.check("plan_and_execute", "agent", agent)
    model = None if planner is None else resolve_model(planner)
    return agent.with_(planner=Planner(model=model, **{"mode": "hybrid", **options}))


def reflect_until(
    agent: Agent[A_co],
    *,
    reflector: Model | str | None = None,
    checks: Sequence[Callable[[Any], str | None]] = (),
    **options: Any,
) -> Agent[A_co]:
    """Return the agent with a judge: an answer counts once it passes all checks, and a model's review.

    If the agent has a planner, its plan is part of the review, and a verdict against it leads to a new plan.

    Args:
        agent: The agent whose answers are reviewed.
        reflector: Model that reviews; usually another one, which makes other errors. None: the agent's own.
        checks: Functions of the answer that return what is wrong with it, or None. No model is asked if one objects.
        **options: Further fields of `Reflector`, such as its rubric.

    Raises:
        MisuseError: if a field has a wrong value, a check is not a function, or the first argument is not an agent.
    """
    AGENT.check("reflect_until", "agent", agent)
    if isinstance(checks, str) or not isinstance(checks, Sequence):
        raise MisuseError(f"reflect_until(checks={checks!r}): give a list of functions, also for a single one")
    for check in checks:
        FUNCTION.check("reflect_until", "checks", check)
    model = None if reflector is None else resolve_model(reflector)
    validators = (*agent.output_validators, *[partial(_apply_check, check) for check in checks])
    return agent.with_(reflector=Reflector(model=model, **options), output_validators=validators)


def _apply_check(check: Callable[[Any], str | None], answer: Any) -> Any:
    """Refuse the answer if the check objects, as an output validator does."""
    if (flaw := check(answer)) is not None:
        raise ModelRetry(flaw)
    return answer
