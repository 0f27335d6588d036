"""Permissions: which calls the roles of a run allow, and which a run withholds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfsm.engine.execution.tool_access import check_permitted

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall
    from agentfsm.engine.execution.open_calls import OpenCalls
    from agentfsm.tools.queue.dispatch import CallOutcome
    from agentfsm.tools.schema.binding import BoundArguments
    from agentfsm.tools.tool import Tool


def check_start(calls: OpenCalls, _call: ToolCall, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:
    """Refuse a call that is not permitted or that this run withholds."""
    return check_permitted(calls.execution, tool, bound)
