"""Costs of calls: reserved in the budget before a call starts, and billed with its result, those of an agent too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core.events import ChildReported
from agentfsm.core.messages import ErrorType, Outcome
from agentfsm.core.usage import Spending, Usage
from agentfsm.engine.execution.budget import NO_USAGE
from agentfsm.engine.execution.child_runs import add_child_cost
from agentfsm.engine.execution.cost import bill_tool, calculate_call_cost
from agentfsm.tools.queue.dispatch import CallOutcome, failed_outcome

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.open_calls import CallLedger, EndedCall, OpenCalls
    from agentfsm.tools.schema.binding import BoundArguments
    from agentfsm.tools.tool import Tool


def reserve(calls: OpenCalls, call: ToolCall, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:
    """Reserve the declared cost of a call in the budget; return the refusal if there is no room."""
    if tool.cost_usd is None:
        return None
    execution, budget = calls.execution, calls.execution.budget
    usd = calculate_call_cost(tool, tool.to_namespace(bound))
    if usd is None:
        return failed_outcome("not run: the cost of this call could not be determined.", ErrorType.BLOCKED)
    if not budget.try_reserve_cost(usd):
        execution.journal.log.warning("call_too_expensive", call=call.id, tool=tool.name, usd=usd)
        return CallOutcome(Outcome.SKIPPED, budget.format_cost_refusal(tool.name, usd), ErrorType.BUDGET)
    calls.open_ledger(call.id).reserved_usd = usd
    return None


def release(execution: Execution, ledger: CallLedger, usage: Usage | None) -> None:
    """Replace the reserved cost of a call by its actual cost."""
    if ledger.reserved_usd is not None:
        execution.budget.settle_cost(ledger.reserved_usd, usage or NO_USAGE)
        ledger.reserved_usd = None


def add_child(execution: Execution, ended: EndedCall) -> None:
    """Add the spending of the child run of a call to its result, unless the run goes on in the background."""
    if execution.budget.children and not any(isinstance(fact, ChildReported) for fact in ended.facts):
        ended.result = add_child_cost(execution, ended.result)


def bill(_execution: Execution, ended: EndedCall) -> None:
    """Add to a result what the call has cost: as reported, else as declared if the tool was called."""
    ledger, result = ended.ledger, ended.result
    if ledger is None:
        return
    if ledger.spent is None and result.attempts and ledger.reserved_usd is not None:
        ledger.spent = Usage(cost_usd=ledger.reserved_usd)
    if ledger.spent is not None:
        result = attrs.evolve(result, spent=bill_tool(ledger.spent))
    if ledger.asked is not None and ledger.asked.models:
        asked = ledger.asked
        requests = Spending(purpose=asked.purpose, usage=asked.usage, model=asked.model)
        result = attrs.evolve(result, spent=(*result.spent, requests))
    ended.result = result
