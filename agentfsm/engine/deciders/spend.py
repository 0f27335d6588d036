"""Spending limits over all runs of a window: the requests and calls of a run are reserved and counted in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfsm.core.messages import ErrorType, Outcome
from agentfsm.tools.queue.dispatch import CallOutcome

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall
    from agentfsm.core.usage import Usage
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.open_calls import CallLedger, EndedCall
    from agentfsm.tools.tool import Tool


def count_usage(execution: Execution, usage: Usage) -> None:
    """Count a usage for which nothing was reserved, such as that of a memory."""
    if execution.budget.spend is not None:
        execution.budget.spend.add(usage)


async def reserve(execution: Execution, ledger: CallLedger, call: ToolCall, tool: Tool[..., Any]) -> CallOutcome | None:
    """Reserve the declared cost of a call in the spending limits of the run; return the refusal if there is no room."""
    spend = execution.budget.spend
    if spend is None or ledger.reserved_usd is None:
        return None
    reserved = await spend.reserve_call(ledger.reserved_usd)
    if not isinstance(reserved, str):
        ledger.reserved_spend = reserved
        return None
    execution.journal.log.warning("call_too_expensive", call=call.id, tool=tool.name, why=reserved)
    text = f"not run: {reserved}. Use a cheaper way, or answer with what you have and say what is missing."
    return CallOutcome(Outcome.SKIPPED, text, ErrorType.BUDGET)


def count(execution: Execution, ended: EndedCall) -> None:
    """Count the reported cost of a call for which nothing was reserved."""
    spend, ledger = execution.budget.spend, ended.ledger
    if spend is not None and ledger is not None and ledger.spent is not None and ledger.reserved_spend is None:
        spend.add(ledger.spent)


def release(execution: Execution, ledger: CallLedger, usage: Usage | None) -> None:
    """Replace the reservation of a call by its actual cost; None: it may have been made."""
    spend = execution.budget.spend
    if spend is not None and ledger.reserved_spend is not None:
        spend.settle_call(ledger.reserved_spend, usage)
        ledger.reserved_spend = None


# The end of an execution


async def flush(execution: Execution) -> None:
    """Write the changes that wait for a later one."""
    if execution.budget.spend is not None:
        await execution.budget.spend.flush()


def describe_wait(execution: Execution) -> str:
    """Return what a request waited for when it was cut off, as a clause; empty if it waited for nothing."""
    spend = execution.budget.spend
    if spend is None or spend.awaited is None:
        return ""
    return f" while a request waited for room in the spending limit of {spend.awaited.describe()}"
