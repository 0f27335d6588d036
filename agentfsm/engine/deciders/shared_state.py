"""The state that a run shares with its front end: the model cannot make it larger than a run may begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfsm.core.messages import ErrorType
from agentfsm.tools.front_end import find_excess
from agentfsm.tools.queue.dispatch import failed_outcome

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall
    from agentfsm.engine.execution.open_calls import OpenCalls
    from agentfsm.tools.queue.dispatch import CallOutcome
    from agentfsm.tools.schema.binding import BoundArguments
    from agentfsm.tools.tool import Tool


def check_start(calls: OpenCalls, call: ToolCall, tool: Tool[..., Any], _bound: BoundArguments) -> CallOutcome | None:
    """Refuse a change after which the state is too large. The state stays as it is."""
    excess = find_excess(calls.execution.journal.run, call, tool)
    return None if excess is None else failed_outcome(excess, ErrorType.TOOL)
