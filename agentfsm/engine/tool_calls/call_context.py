"""The context of a call: what the function of a tool may read, report and ask for while it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from agentfsm.core.calls import Inquiry
from agentfsm.core.labels import ToolKind
from agentfsm.core.messages import Media, ToolCall, ToolResult
from agentfsm.core.plans import QUESTION_TOOL
from agentfsm.engine.background_runs import post_to_child
from agentfsm.engine.deciders.plans import answer_question
from agentfsm.engine.deciders.tool_selection import search_tools
from agentfsm.engine.execution.parent import Parent, build_parent
from agentfsm.engine.execution.tool_access import build_context
from agentfsm.tools.attendance import Attendance
from agentfsm.tools.builtin import BACKGROUND_TOOLS
from agentfsm.tools.run_context import RunContext

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.open_calls import OpenCalls
    from agentfsm.tools.attendance import Attendant, AttendedQuestions
    from agentfsm.tools.tool import Tool

# Asks the questions of a call of a tool.
AskPerson: TypeAlias = (
    "Callable[[ToolCall, Tool[..., Any], Attendant, AttendedQuestions], Awaitable[Mapping[str, Any] | None]]"
)


def build_call_context(
    host: OpenCalls, ask_person: AskPerson, call: ToolCall, tool: Tool[..., Any], deadline: float
) -> RunContext[Any]:
    """Build the context of a call.

    Args:
        host: The open calls of the run.
        ask_person: Asks the person who attends the execution the questions of a call.
        call: The call.
        tool: Its tool.
        deadline: Unix time in seconds at which the call is cut off.
    """
    execution, journal = host.execution, host.execution.journal
    entry, is_agent = host.find_entry(call), tool.kind is ToolKind.AGENT
    if is_agent:
        host.open_ledger(call.id)  # for the cost of its run, which the result records
    attendance: Attendance | None = None
    if (attendant := execution.options.attendant) is not None:
        direct = Attendance(attendant, partial(ask_person, call, tool))
        attendance = direct.with_clock(journal.stop_active_time)  # which stops while the person is asked
    return build_context(
        execution,
        call_id=call.id,
        idempotency_key=call.key,
        fencing_token=journal.lease.token,
        attempt=max(1, entry.attempts),
        inquiry=entry.inquiry or Inquiry(),
        deadline=deadline,
        find_result_text=partial(_find_result_text, execution),
        find_result_parts=partial(_find_result_parts, execution),
        find_tools=partial(search_tools, execution),
        on_cost=partial(host.add_cost, call.id),
        on_labels=partial(host.add_labels, call.id),
        attendance=attendance,
        parent=_build_parent(execution, call, is_agent=is_agent) if is_agent or execution.background else None,
        ask_model=partial(answer_question, host, call.id) if tool.name == QUESTION_TOOL else None,
    )


def _build_parent(execution: Execution, call: ToolCall, *, is_agent: bool) -> Parent | None:
    """Return the run behind the call of an agent, or of a tool that reaches background runs; None for another tool."""
    if not is_agent and call.name not in BACKGROUND_TOOLS:
        return None
    return attrs.evolve(build_parent(execution, execution.options), post=partial(post_to_child, execution, call.key))


def _find_result_text(execution: Execution, call_id: str) -> str | None:
    left = execution.journal.run.background.get(call_id)
    if left is not None and left.result is not None:
        return left.result.content
    return next((result.content for result in _iter_results(execution.journal.run, call_id)), None)


def _find_result_parts(execution: Execution, call_id: str) -> tuple[Media, ...]:
    return next((result.parts for result in _iter_results(execution.journal.run, call_id)), ())


def _iter_results(run: Run, call_id: str) -> Iterator[ToolResult]:
    steps = () if run.plan is None else run.plan.closed
    results = (*run.messages, *[entry.result for entry in steps])
    return (m for m in results if isinstance(m, ToolResult) and m.call_id == call_id)
