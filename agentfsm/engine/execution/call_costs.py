"""Cost of tool calls, as `@tool(cost_usd=)` declares it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfsm.core.calls import OpenCall
from agentfsm.core.errors import ArgumentsError
from agentfsm.core.usage import Purpose, Spending, Usage
from agentfsm.core.validation import NOT_NEGATIVE
from agentfsm.tools import callback_errors

if TYPE_CHECKING:
    from agentfsm.tools.schema.binding import Arguments
    from agentfsm.tools.tool import Tool


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
