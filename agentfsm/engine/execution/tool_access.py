"""Access of a run to tools: whether a tool is available now, and permitted with these arguments."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core.labels import join_labels
from agentfsm.core.machine import State
from agentfsm.core.messages import ErrorType, Outcome
from agentfsm.tools.builtin import FIND_TOOLS, asks_only, find_builtin
from agentfsm.tools.queue import result_text
from agentfsm.tools.queue.dispatch import CallOutcome, failed_outcome
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.schema.binding import Arguments, BoundArguments
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.execution import Execution

# Maximum of characters of the arguments in the result of a withheld call: the call itself has all of them.
WITHHELD_CHARS: Final = 1_000


def find_engine_tool(execution: Execution, name: str) -> Tool[..., Any] | None:
    """Return the built-in tool of that name, or the output tool."""
    if (tool := find_builtin(execution.journal.run, name)) is not None:
        return tool
    spec = execution.config.output_spec  # a call of the output tool that reaches this point is premature
    return None if spec is None or spec.tool is None or spec.tool.name != name else spec.tool


def check_available(execution: Execution, tool: Tool[..., Any]) -> CallOutcome | None:
    """Return the refusal if no call of a tool can run, whatever its arguments, or None."""
    run, permissions = execution.journal.run, execution.config.permissions
    if tool.name in run.disabled:
        return CallOutcome(Outcome.SKIPPED, result_text.withdrawn_text(tool.name), ErrorType.WITHDRAWN)
    if not is_enabled(tool, execution):
        return CallOutcome(Outcome.SKIPPED, result_text.absent_text(tool.name), ErrorType.WITHDRAWN)
    if permissions is None or permissions.may_offer(tool, run.header.roles) or _needs_no_rule(execution, tool):
        return None
    reason = (
        permissions.refusal_reason(tool, run.header.roles, Arguments()) or f"{tool.name} is not permitted in this run"
    )
    return failed_outcome(result_text.not_permitted_text(reason), ErrorType.NOT_PERMITTED)


def check_permitted(execution: Execution, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:
    """Return the refusal of a call whose arguments no permission allows, or which this run withholds, or None."""
    header, permissions = execution.journal.run.header, execution.config.permissions
    if (permissions is None and not header.withhold) or _needs_no_rule(execution, tool):
        return None
    if permissions is not None:
        reason = permissions.refusal_reason(tool, header.roles, tool.to_namespace(bound))
        if reason is not None:
            return failed_outcome(result_text.not_permitted_text(reason), ErrorType.NOT_PERMITTED)
    if header.withhold and execution.options.world is None and may_act(tool):
        arguments = json.dumps(vars(tool.to_namespace(bound)), ensure_ascii=False, default=str)
        text = result_text.withheld_text(tool.name, arguments[:WITHHELD_CHARS])
        return CallOutcome(Outcome.SKIPPED, text, ErrorType.WITHHELD)
    return None


def may_act(tool: Tool[..., Any]) -> bool:
    """Return whether a call of a tool may change something itself.

    An agent changes nothing by itself: a run that withholds calls passes that on to the runs of its agents. A question
    to a person changes nothing either.
    """
    return not (tool.read_only or tool.inner_agent is not None or asks_only(tool))


def _needs_no_rule(execution: Execution, tool: Tool[..., Any]) -> bool:
    """Return whether this is the built-in `find_tools`, which finds only permitted tools, or a tool of the engine."""
    if tool.name in execution.config.engine_tools:
        return True
    return tool.name == FIND_TOOLS and FIND_TOOLS not in execution.config.registry


def build_context(execution: Execution, **call: Any) -> RunContext[Any]:
    """Build the tool context of the run, with the fields of a call."""
    return build_run_context(execution.journal.run, execution.options.deps, **call)


def build_run_context(run: Run[Any], deps: object, **call: Any) -> RunContext[Any]:
    """Build the context of a run that is not executed yet, or outside of its calls, or with the fields of a call."""
    return RunContext(
        deps=deps,
        run_id=run.id,
        turn=current_turn(run),
        user=run.header.user,
        tenant=run.header.tenant,
        roles=run.header.roles,
        clearance=run.header.clearance,
        labels=join_labels(run.labels),
        metadata=run.metadata,
        run=run,
        **call,
    )


def current_turn(run: Run) -> int:
    """Return the turn that a call running now belongs to; while the reply streams, it is not in the journal yet."""
    return run.turn + 1 if run.state is State.THINK else run.turn


def is_enabled(tool: Tool[..., Any], execution: Execution) -> bool:
    """Return whether a tool is available now; False if its condition fails."""
    if isinstance(tool.enabled, bool):
        return tool.enabled
    try:
        return bool(tool.enabled(build_context(execution)))
    except Exception as error:
        execution.journal.log.warning("tool_enabled_failed", tool=tool.name, exc_info=error)
        return False
