"""The recorded world: calls are answered from the journal of an earlier run, so that nothing outside is touched.

An execution with a recorded world calls no tool that may act. A call that the record has, with the same arguments, gets
the recorded result, at any depth: the n-th equal call the n-th one. No person is asked: approvals and answers of people
are part of the results. Another call that may act is withheld, and another one that only reads is outside of the
evidence, unless it may run live.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.messages import ErrorType
from agentfsm.engine.deciders.guards import needs_approval_by_guard
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.execution.recorded_world import SeenCall
from agentfsm.engine.execution.tool_access import WITHHELD_CHARS, may_act
from agentfsm.tools.builtin import FIND_TOOLS, READ_RESULT, is_own
from agentfsm.tools.queue.dispatch import CallOutcome, failed_outcome
from agentfsm.tools.queue.result_text import not_recorded_text, withheld_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentfsm.core.effects import Reflect
    from agentfsm.core.messages import ToolCall, ToolResult
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.open_calls import OpenCalls
    from agentfsm.tools.schema.binding import BoundArguments
    from agentfsm.tools.tool import Tool


def list_tools(config: EngineConfig) -> frozenset[str]:
    """Return the names of all tools: which call is answered by which recorded one depends on their order."""
    return frozenset(config.registry.names)


async def start_unasked(calls: OpenCalls, ready: Sequence[ToolCall]) -> Sequence[ToolCall]:
    """Return the calls that have no result yet. They start without a question to a person."""
    run = calls.execution.journal.run
    waiting = {entry.call.id for entry in run.open if entry.phase is not Phase.FINISHED}
    calls.unfinished = len(waiting)
    for entry in run.open:
        if entry.attempts:
            calls.open_ledger(entry.call.id).has_started = True
    return [call for call in ready if call.id in waiting]


def bring_inputs(execution: Execution, observed: e.Observed | None) -> StepOutcome | None:
    """Bring the inputs that had arrived by this turn of the recorded run."""
    world = execution.options.world
    assert world is not None  # the line has this only then  # noqa: S101
    given = world.take_inputs(execution.journal.run) if observed is None else ()
    return StepOutcome((e.Observed(inputs=given),)) if given else None


async def await_inputs(execution: Execution, _effect: Reflect) -> e.Continued | None:
    """Go on after an answer that an input of the record has forestalled."""
    world = execution.options.world
    assert world is not None  # as above  # noqa: S101
    return e.Continued() if world.has_input(execution.journal.run) else None


def answer_call(calls: OpenCalls, call: ToolCall, tool: Tool[..., Any], _bound: BoundArguments) -> CallOutcome | None:
    """Answer a call from the record. None for one that is made, and for that of an agent, whose own calls are answered.

    The call of an agent is answered itself if its run is not in the record, or there are results only.
    """
    world, run = calls.execution.options.world, calls.execution.journal.run
    assert world is not None  # the line has this only then  # noqa: S101
    if _is_of_program(calls.execution.config, tool):
        return None
    evidence, is_agent = world.evidence, tool.inner_agent is not None
    acts = (not tool.read_only if is_agent else may_act(tool)) or tool.name in evidence.acting
    found = world.take(run, call, only_once=acts or is_agent)
    has_answer = found is not None and found.is_answered
    has_run = found is None or found.below is not None or not has_answer
    if is_agent and has_run and evidence.record is not None:
        return None
    asks = tool.is_interactive or tool.login is not None or needs_approval_by_guard(calls.find_entry(call))
    is_live = world.reads_live and not (has_answer or acts or asks or is_agent)
    if not is_agent:
        evidence.seen[run.id, call.id] = SeenCall(
            agent=run.header.agent, call=call, acts=acts, is_recorded=found is not None, is_live=is_live
        )
    if is_live:
        return None
    if found is not None and found.result is not None and has_answer:
        return _as_outcome(found.result)
    arguments = call.arguments[:WITHHELD_CHARS]
    if not acts:
        return failed_outcome(not_recorded_text(call.name, arguments), ErrorType.WITHHELD)
    # A flow would end at the first step without a result, and show none of those after it.
    if run.reply is None and (stand_in := world.find_stand_in(call.name)) is not None:
        return _as_outcome(stand_in)
    return failed_outcome(withheld_text(call.name, arguments), ErrorType.WITHHELD)


def list_program_tools(config: EngineConfig) -> set[str]:
    """Return the names of tools that belong to the program under trial, and not to the world outside."""
    own = {tool.name for tool in config.registry if _is_of_program(config, tool)}
    return own | ({FIND_TOOLS, READ_RESULT} - set(config.registry.names))


def _is_of_program(config: EngineConfig, tool: Tool[..., Any]) -> bool:
    """Return whether a tool belongs to the program under trial, and not to the world outside."""
    skills = config.registry.skills
    reads_skill = skills is not None and tool in skills.tools and tool.read_only and tool.sandbox is None
    is_engine_tool = tool.name in config.engine_tools and tool.inner_agent is None
    return is_engine_tool or is_own(tool) or reads_skill


def _as_outcome(result: ToolResult) -> CallOutcome:
    return CallOutcome(
        result.outcome,
        result.content,
        result.error_type,
        result.retryable,
        parts=result.parts,
        labels=result.labels,
    )
