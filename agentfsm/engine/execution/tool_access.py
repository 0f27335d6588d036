"""What a run may use: whether a tool is there now, and may be called by it with these arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfsm.core.machine import State
from agentfsm.core.messages import ErrorType, Outcome
from agentfsm.engine.execution.execution import Execution
from agentfsm.tools.builtin import FIND_TOOLS, find_builtin
from agentfsm.tools.queue import result_text
from agentfsm.tools.queue.dispatch import CallOutcome, failed_outcome
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.schema.binding import Arguments, BoundArguments
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from agentfsm.core.run import Run


def find_engine_tool(execution: Execution, name: str) -> Tool[..., Any] | None:
    """Return the tool of that name that the engine brings along, or the one that gives the answer."""
    if (tool := find_builtin(execution.journal.run, name)) is not None:
        return tool
    spec = execution.config.output_spec  # a call of its tool that comes here came too early
    return None if spec is None or spec.tool is None or spec.tool.name != name else spec.tool


def check_available(execution: Execution, tool: Tool[..., Any]) -> CallOutcome | None:
    """Say why no call of a tool can run, whatever its arguments: withdrawn, not there now, or never permitted."""
    run, permissions = execution.journal.run, execution.config.permissions
    if tool.name in run.disabled:
        return CallOutcome(Outcome.SKIPPED, result_text.withdrawn_text(tool.name), ErrorType.WITHDRAWN)
    if not is_enabled(tool, execution):
        return CallOutcome(Outcome.SKIPPED, result_text.absent_text(tool.name), ErrorType.WITHDRAWN)
    if permissions is None or permissions.may_offer(tool, run.header.roles) or _is_builtin_search(execution, tool):
        return None
    reason = (
        permissions.refusal_reason(tool, run.header.roles, Arguments()) or f"{tool.name} is not permitted in this run"
    )
    return failed_outcome(result_text.not_permitted_text(reason), ErrorType.NOT_PERMITTED)


def check_permitted(execution: Execution, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:
    """Say that nobody could let a call with these arguments run."""
    if (permissions := execution.config.permissions) is None or _is_builtin_search(execution, tool):
        return None
    reason = permissions.refusal_reason(tool, execution.journal.run.header.roles, tool.to_namespace(bound))
    return None if reason is None else failed_outcome(result_text.not_permitted_text(reason), ErrorType.NOT_PERMITTED)


def _is_builtin_search(execution: Execution, tool: Tool[..., Any]) -> bool:
    """Whether it is the engine's own `find_tools`: no rule has to name it, since it tells only of permitted tools."""
    return tool.name == FIND_TOOLS and FIND_TOOLS not in execution.config.registry


def build_context(execution: Execution) -> RunContext[Any]:
    """Return what a tool may know of the run, apart from any call."""
    run = execution.journal.run
    return RunContext(
        deps=execution.deps,
        run_id=run.id,
        turn=current_turn(run),
        user=run.header.user,
        roles=run.header.roles,
        metadata=run.metadata,
    )


def current_turn(run: Run) -> int:
    """Return the turn that a call which runs now belongs to; while the reply streams it is not in the journal yet."""
    return run.turn + 1 if run.state is State.THINK else run.turn


def is_enabled(tool: Tool[..., Any], execution: Execution) -> bool:
    """Whether a tool is there now; one that cannot say so is not."""
    if isinstance(tool.enabled, bool):
        return tool.enabled
    try:
        return bool(tool.enabled(build_context(execution)))
    except Exception as error:
        execution.journal.log.warning("tool_enabled_failed", tool=tool.name, exc_info=error)
        return False
