"""Child runs: their spending, their end when the run or their call ends, and their results as text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentfsm.core.calls import OpenCall, Phase, format_names, may_have_happened
from agentfsm.core.claims import format_claims
from agentfsm.core.errors import RunNotFoundError, StoreError
from agentfsm.core.labels import Label, ToolKind
from agentfsm.core.limits import BUDGET_REASONS, StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import ErrorType, Outcome, ToolCall, ToolResult
from agentfsm.core.reducers import add_counts
from agentfsm.core.run_facts import list_brought_labels, list_results
from agentfsm.core.run_ids import child_run_id
from agentfsm.core.usage import AgentCost
from agentfsm.engine.execution.budget import RunSpending
from agentfsm.engine.execution.cost import calculate_run_cost
from agentfsm.engine.execution.execution import Execution
from agentfsm.engine.execution.journal import CLOSE_TIMEOUT_S
from agentfsm.journal.load import load_run, read_header
from agentfsm.ports.store import Store
from agentfsm.tools.queue.dispatch import CallOutcome
from agentfsm.tools.queue.result_text import GO_ON_WITHOUT
from agentfsm.tools.run_context import ToolReturn
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.ports.model import Model


async def load_child_spending(execution: Execution) -> None:
    """Add the spending of child runs that are not over to the budget, from their own journals."""
    journal = execution.journal
    begun = [each.call.id for each in journal.run.open_background]
    for entry in journal.run.open:
        tool = execution.config.find_tool(entry.call.name)
        is_agent = entry.kind is ToolKind.AGENT or (tool is not None and tool.kind is ToolKind.AGENT)
        if entry.phase is not Phase.FINISHED and is_agent:
            begun.append(entry.call.id)
    below = [await _load_spending(journal.store, journal.run.id, call_id) for call_id in begun]
    execution.budget.restore([spent for spent in below if spent is not None])


async def load_child_run(store: Store, caller: str, call_id: str) -> Run:
    """Return the child run of a call.

    Args:
        store: The store of both runs.
        caller: The id of the parent run.
        call_id: The id of the call.

    Raises:
        RunNotFoundError: if the store has no such child run: it never began, was lost, or the id belongs to another
            run.
    """
    run = await load_run(store, child_run_id(caller, call_id))
    if run.header.parent != caller:
        raise RunNotFoundError(f"call {call_id} of run {caller!r} has no run: {run.id!r} does not work for that one")
    return run


async def has_child_run(store: Store, caller: str, call_id: str) -> bool:
    """Return whether the store has the child run of a call, without reading its events."""
    try:
        header = await read_header(store, child_run_id(caller, call_id))
    except RunNotFoundError:
        return False
    return header.parent == caller


async def _load_spending(store: Store, caller: str, call_id: str) -> RunSpending | None:
    """Return the spending of a child run and of its own open child runs; None if it does not exist."""
    try:
        run = await load_child_run(store, caller, call_id)
    except RunNotFoundError:
        return None
    usage, calls, counted = run.usage, run.tool_call_count, run.counted
    for entry in run.open:
        if entry.phase is Phase.FINISHED:
            continue  # it is in the usage
        calls += entry.phase is not Phase.INTENDED
        if (below := await _load_spending(store, run.id, entry.call.id)) is not None:
            usage, calls = usage + below.usage, calls + below.calls
            counted = add_counts(counted, below.counted)
    for each in run.open_background:
        if (below := await _load_spending(store, run.id, each.call.id)) is not None:
            usage, calls = usage + below.usage, calls + below.calls
            counted = add_counts(counted, below.counted)
    return RunSpending(run, usage, calls, counted)


def add_child_cost(execution: Execution, result: ToolResult) -> ToolResult:
    """Return the result of a child run with its spending, also if it failed or was cut off before it could report."""
    spent = execution.budget.pop_child(child_run_id(execution.journal.run.id, result.call_id))
    if spent is None:
        return result
    child = result.child or _build_cost(spent)
    if spent.counted:
        child = attrs.evolve(child, counted=tuple(Counter(spent.counted).elements()))
    return attrs.evolve(result, child=child)


async def load_child_cost(store: Store, caller: str, call_id: str) -> AgentCost | None:
    """Return the cost of a child run, with its own open child runs; None if it cannot be read."""
    try:
        spent = await _load_spending(store, caller, call_id)
    except StoreError:
        return None
    return None if spent is None else _build_cost(spent)


def _build_cost(spent: RunSpending) -> AgentCost:
    return attrs.evolve(calculate_run_cost(spent.run), usage=spent.usage)


async def end_interrupted_child(
    execution: Execution, tool: Tool[..., Any], call: ToolCall, end: CallOutcome
) -> CallOutcome:
    """End a child run whose call was cut off or failed without a report, and return its outcome with its effects.

    Raises:
        StoreError: if that is not possible now; the call is then continued when the run is resumed.
    """
    journal = execution.journal
    if tool.inner_agent is None:  # a function of the user's that was declared to be one
        return end
    with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
        try:
            ended = await tool.inner_agent.end_run(journal.store, journal.clock, journal.run.id, call.id)
        except RunNotFoundError:
            return end  # it never began
        if end.outcome is Outcome.DONE and ended.outcome is not Outcome.UNKNOWN:  # the call has a fallback
            return end._replace(child=ended.child, labels=ended.labels)
        if ended.outcome is Outcome.DONE or end.outcome is Outcome.DONE:
            return CallOutcome(ended.outcome, ended.content, child=ended.child, labels=ended.labels)
        outcome = Outcome.UNKNOWN if ended.outcome is Outcome.UNKNOWN else end.outcome
        text = f"{end.text}\n{ended.content}"
        return end._replace(outcome=outcome, text=text, child=ended.child, labels=ended.labels)
    raise StoreError(
        f"the agent of {call.name} ({call.id}) was not ended within {CLOSE_TIMEOUT_S:g} s; resume its caller"
    )


def waits_on_child(run: Run, entry: OpenCall) -> bool:
    """Return whether the call waits for a decision in a child run."""
    return entry.phase is Phase.PAUSED and any(item.run_id != run.id for item in entry.pending)


# Texts about child runs for the model of the parent.


def build_missing_result(entry: OpenCall) -> ToolReturn:
    """Return the result of a call whose child run had begun, but is missing in the store."""
    text = (
        f"the run of {entry.call.name} is no longer in the store, so it is not known what it did. Check before you "
        "repeat anything."
    )
    return ToolReturn(outcome=Outcome.UNKNOWN, content=text)


def build_final_result(run: Run, model: Model | None = None) -> ToolReturn:
    """Return the result of a call whose child run is over."""
    return attrs.evolve(_build_final_result(run, model), labels=list_own_labels(run))


def list_own_labels(run: Run) -> tuple[Label, ...]:
    """Return the labels of data that a child run has brought in, also of those that its parent has."""
    return list_brought_labels(run, [source.label for source in run.header.labels])


def _build_final_result(run: Run, model: Model | None) -> ToolReturn:
    name, cost = run.header.agent, calculate_run_cost(run, model)
    mark = f"[the agent {name} says what was not done: {format_claims(run.not_done)}]\n" if run.not_done else ""
    if run.state is State.DONE and mark:
        return ToolReturn(outcome=Outcome.FAILED, content=mark + run.answer, error_type=ErrorType.AGENT, child=cost)
    if run.state is State.DONE:
        return ToolReturn(outcome=Outcome.DONE, content=run.answer, child=cost)
    if run.stop_reason in BUDGET_REASONS or run.limit_reached is not None:
        said = run.partial
        head = f"[the agent {name} was stopped by its limit: {run.stop_reason}, {run.stop_message}]"
        outcome, kind = (Outcome.DONE, None) if said and not mark else (Outcome.FAILED, ErrorType.AGENT)
        if run.stop_reason is StopReason.TIMEOUT:
            outcome, kind = Outcome.TIMED_OUT, ErrorType.TIMEOUT
        rest = f"This is what it had so far:\n{said}" if said else "(it had written no answer yet)"
        text = f"{mark}{head}{_describe_effects(run)}\n{rest}"
        return ToolReturn(outcome=outcome, content=text, error_type=kind, child=cost)
    if run.stop_reason is StopReason.CANCELLED:
        is_known = all(record.outcome is not Outcome.UNKNOWN for record in run.calls)
        outcome = Outcome.CANCELLED if is_known else Outcome.UNKNOWN
        text = f"the agent {name} was stopped: {run.stop_message}.{_describe_effects(run)}"
        return ToolReturn(outcome=outcome, content=text, child=cost)
    if run.stop_reason is StopReason.STEP_FAILED:  # a flow
        text = f"{run.stop_message.removesuffix('.')}.{_describe_effects(run)}"
        return ToolReturn(outcome=Outcome.FAILED, content=text, error_type=ErrorType.AGENT, child=cost)
    text = (
        f"the agent {name} gave no answer ({run.stop_reason}: {run.stop_message}). "
        f"{GO_ON_WITHOUT}{_describe_effects(run)}"
    )
    return ToolReturn(outcome=Outcome.FAILED, content=text, error_type=ErrorType.AGENT, child=cost)


def build_unresponsive_result(run: Run, model: Model | None = None) -> ToolReturn:
    """Return the text for a child run that was cancelled but has not ended: another worker has its lease."""
    names = [entry.call.name for entry in run.open if entry.attempts and entry.phase is not Phase.FINISHED]
    doing = f", and may still be doing: {', '.join(names)}" if names else ""
    name, cost = run.header.agent, calculate_run_cost(run, model)
    text = f"the agent {name} was cancelled but has not ended{doing}. Check before you repeat anything."
    return ToolReturn(
        outcome=Outcome.UNKNOWN, content=f"{text}{_describe_effects(run)}", child=cost, labels=list_own_labels(run)
    )


def _describe_effects(run: Run) -> str:
    """Return a text about the effects of a child run's calls: those completed, and those with an unknown outcome.

    The parent has no other record of them, and a repeated call of the agent makes its calls under other keys.
    """
    results = list_results(run)
    whole = [each.tool for each in results if each.outcome is Outcome.DONE]
    done = format_names(whole + [f"{each.tool} in part" for each in results if _is_interrupted_agent(each)])
    unseen = format_names([each.tool for each in results if may_have_happened(each)])
    did = f" It had done: {done}." if done else ""
    return f"{did} May have happened all the same, so check before repeating: {unseen}." if unseen else did


def _is_interrupted_agent(result: ToolResult) -> bool:
    """Return whether this is the result of a child run that has called tools but gave no answer."""
    return result.outcome is not Outcome.DONE and result.child is not None and result.child.calls > 0
