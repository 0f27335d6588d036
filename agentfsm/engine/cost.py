"""What a run cost, and the agents below it with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentfsm.core.messages import AgentCost, Outcome, ToolResult, Usage

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.ports import Model


def cost_of(run: Run, model: Model | None) -> AgentCost:
    """Return what a run of a model cost, with the agents that it called; None where the model is not at hand."""
    messages = (*run.messages[run.first :], *[entry.result for entry in run.open])
    children = tuple([m.child for m in messages if isinstance(m, ToolResult) and m.child is not None])
    own = _without(run.usage, children)
    usd: float | None = 0.0
    if own.tokens:
        usd = model.cost_usd(own) if own.cost_usd is None and model is not None else own.cost_usd
    return AgentCost(
        agent=run.header.agent,
        run_id=run.id,
        usage=run.usage,
        usd=_sum(usd, *[child.usd for child in children]),
        turns=run.turn,
        tool_calls=tuple(record.name for record in run.calls if record.outcome is not Outcome.SKIPPED),
        duration_s=run.duration_s,
        children=children,
    )


def _sum(*amounts: float | None) -> float | None:
    """Add amounts; one that is unknown makes the sum unknown."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def _without(usage: Usage, children: Iterable[AgentCost]) -> Usage:
    parts = [child.usage for child in children]
    cost = usage.cost_usd
    return Usage(
        input_tokens=usage.input_tokens - sum(part.input_tokens for part in parts),
        output_tokens=usage.output_tokens - sum(part.output_tokens for part in parts),
        cached_tokens=usage.cached_tokens - sum(part.cached_tokens for part in parts),
        cost_usd=None if cost is None else cost - sum(part.cost_usd or 0.0 for part in parts),
    )
