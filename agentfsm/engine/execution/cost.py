"""Cost of a run with its child runs and of a session, and that of calls as `@tool(cost_usd=)` declares it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core.calls import OpenCall
from agentfsm.core.errors import ArgumentsError
from agentfsm.core.messages import Outcome, ToolResult
from agentfsm.core.run import begin_run
from agentfsm.core.usage import AgentCost, Purpose, SessionCost, Spending, Usage
from agentfsm.core.validation import NOT_NEGATIVE
from agentfsm.ports.store import Filter
from agentfsm.tools import callback_errors

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.ports.model import Model
    from agentfsm.ports.store import Store
    from agentfsm.tools.schema.binding import Arguments
    from agentfsm.tools.tool import Tool


@attrs.define(eq=False, repr=False)
class SideSpending:
    """Usage of the side requests that one event records, with their purpose and their models."""

    purpose: Purpose
    own_model: str
    """Name of the agent's own model."""

    usage: Usage = Usage()
    """Usage so far, failed requests included."""

    models: list[str] = attrs.field(factory=list)
    """Names of the models that were asked, each once."""

    @property
    def recorded_purpose(self) -> Purpose | None:
        """The purpose; None if no request was sent."""
        return self.purpose if self.models else None

    @property
    def model(self) -> str:
        """Names of the models that were asked, separated by commas; empty for the agent's own alone."""
        return "" if self.models == [self.own_model] else ", ".join(self.models)

    def add(self, model: str, usage: Usage) -> None:
        """Add the usage of a request."""
        self.usage += usage
        if model not in self.models:
            self.models.append(model)


def calculate_run_cost(run: Run, model: Model | None = None) -> AgentCost:
    """Return the cost of a run, including its child runs.

    Args:
        run: The run.
        model: Model that prices usage without a price in the journal, if it is the run's model.
    """
    entries = run.open if run.plan is None else (*run.plan.closed, *run.open)
    later = [each.result for each in run.background.values()] if run.background else []
    messages = (*run.messages[run.own_start :], *[entry.result for entry in entries], *later)
    children = tuple([m.child for m in messages if isinstance(m, ToolResult) and m.child is not None])
    own = _subtract_children(run.usage, children)
    name = (run.fingerprint or run.header.fingerprint).model
    usd = _own_usd(own, model if model is not None and model.name == name else None)
    unpriced = (run.unpriced or (name,)) if usd is None else ()
    return AgentCost(
        agent=run.header.agent,
        run_id=run.id,
        usage=run.usage,
        usd=_sum_or_unknown([usd, *[child.usd for child in children]]),
        unpriced=_unique([*unpriced, *[name for child in children for name in child.unpriced]]),
        turns=run.turn,
        tool_calls=tuple(record.name for record in run.calls if record.outcome is not Outcome.SKIPPED),
        duration_s=run.duration_s,
        children=children,
    )


async def calculate_session_cost(store: Store, session: str, model: Model) -> SessionCost:
    """Return the cost of a session's runs, each read once: every run but the first continues the one before.

    Raises:
        StoreError: if a journal cannot be read.
    """
    costs: list[AgentCost] = []
    newest = await store.runs(Filter(session=session), limit=1)
    run_id = newest[0].id if newest else None
    while run_id is not None:
        stored = await store.read(run_id)
        if stored.header.session != session:
            break  # its first run continues another conversation
        costs.append(calculate_run_cost(begin_run(stored.header).fold(stored.events), model))
        run_id = stored.header.after
    costs.reverse()
    return SessionCost(
        session=session,
        usage=sum([cost.usage for cost in costs], Usage()),
        usd=_sum_or_unknown([cost.usd for cost in costs]),
        unpriced=_unique([name for cost in costs for name in cost.unpriced]),
        runs=tuple(costs),
    )


def _own_usd(own: Usage, model: Model | None) -> float | None:
    """Return the cost of a run's own replies; None if unknown."""
    if not own.tokens:
        return own.cost_usd or 0.0
    if own.cost_usd is None:
        return None if model is None else model.cost_usd(own)
    return None if own.unpriced else own.cost_usd


def _sum_or_unknown(amounts: Iterable[float | None]) -> float | None:
    """Add amounts; an unknown one makes the sum unknown."""
    total = 0.0
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _subtract_children(usage: Usage, children: Iterable[AgentCost]) -> Usage:
    """Return a usage without that of the child runs in it.

    A missing price of a child run is attributed to the child.
    """
    parts = [child.usage for child in children]
    cost = usage.cost_usd
    below = sum(part.cost_usd or 0.0 for part in parts)
    return Usage(
        input_tokens=usage.input_tokens - sum(part.input_tokens for part in parts),
        output_tokens=usage.output_tokens - sum(part.output_tokens for part in parts),
        cached_tokens=usage.cached_tokens - sum(part.cached_tokens for part in parts),
        cache_write_tokens=usage.cache_write_tokens - sum(part.cache_write_tokens for part in parts),
        cache_write_1h_tokens=usage.cache_write_1h_tokens - sum(part.cache_write_1h_tokens for part in parts),
        reasoning_tokens=usage.reasoning_tokens - sum(part.reasoning_tokens for part in parts),
        cost_usd=None if cost is None else cost - below,
        unpriced=usage.unpriced and not any(part.unpriced for part in parts),
    )


def calculate_call_cost(tool: Tool[..., Any], arguments: Arguments) -> float | None:
    """Return the US dollars of a call with these arguments; None if the tool's function fails."""
    if not callable(tool.cost_usd):
        return tool.cost_usd or 0.0
    try:
        usd = tool.cost_usd(arguments)
        NOT_NEGATIVE.check(f"tool {tool.name!r}", "cost_usd", usd)
    except Exception as error:  # noqa: BLE001  a call of unknown cost is not made
        callback_errors.log_callback_error("cost_usd", tool.name, "the call is not made", error)
        return None
    return float(usd)


def bill_tool(usage: Usage) -> tuple[Spending, ...]:
    """Return the spending of a call for its tool."""
    return (Spending(purpose=Purpose.TOOL, usage=usage),)


def bill_settled_call(tool: Tool[..., Any] | None, entry: OpenCall) -> tuple[Spending, ...]:
    """Return the declared cost of a call that had started and was cut off: it was settled since, or its run ends."""
    if tool is None or tool.cost_usd is None or not entry.attempts:
        return ()
    try:
        usd = calculate_call_cost(tool, tool.to_namespace(tool.bind(entry.call.arguments)))
    except ArgumentsError:  # the tool has changed since
        return ()
    return () if usd is None else bill_tool(Usage(cost_usd=usd))
