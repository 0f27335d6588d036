"""The start rules: the record and the fate of a call that had started and has no result.

Once the start of a call that may have an effect is in the journal, no path may say that nothing was run. A call that is
cut off follows its tool's `on_unknown`, the stricter of the declaration in the journal and the present one. If the call
is refused instead, because the program or something around it has changed, a person decides. The run of an agent is
ended first, so that the result names its effects. A call whose executor dies follows `on_unknown`, too.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm._lib.concurrency import is_foreign_cancellation, start_in_thread
from agentfsm.core import events as e
from agentfsm.core.calls import OpenCall, stricter_policy
from agentfsm.core.labels import ToolKind
from agentfsm.core.messages import ErrorType, Outcome, ToolResult
from agentfsm.engine.deciders.labels import fence_result, list_call_labels
from agentfsm.engine.execution.child_runs import end_interrupted_child
from agentfsm.engine.execution.cost import bill_settled_call
from agentfsm.engine.execution.execution import Execution
from agentfsm.engine.execution.open_calls import EndedCall, OpenCalls
from agentfsm.tools.queue.dispatch import CallOutcome, QueueHost, failed_outcome
from agentfsm.tools.queue.result_text import build_decided_result, count_shown_chars, remove_advice, render_result
from agentfsm.tools.run_context import Found, RunContext
from agentfsm.tools.tool import UNKNOWN_OUTCOME_POLICIES, Tool

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall
    from agentfsm.core.run import Run
    from agentfsm.tools.schema.binding import BoundArguments

_UNKNOWN_TEXT: Final = (
    "outcome unknown: the work on the run was broken off while the call was under way, and its effect may have "
    "happened. Check before you repeat it."
)
_CHANGED_PARAMETERS: Final = (
    "it had started before, and is not run again: the parameters of its tool, or their defaults, have changed since"
)
# The format from which starts record the kind of the tool.
_FIRST_WITH_KIND: Final = 5
# Refusals that hold for the rest of the run. After others, such as an open circuit, the call may go on later.
_LASTING_REFUSALS: Final = frozenset({ErrorType.NOT_PERMITTED, ErrorType.WITHDRAWN})

# Reasons in place of the texts for the model, which say that nothing was run.
_REASONS: Final = {
    ErrorType.NOT_PERMITTED: "it is not permitted any more",
    ErrorType.WITHDRAWN: "its tool is not available any more",
    ErrorType.ARGUMENTS: "its arguments do not fit the tool as it is now",
    ErrorType.CIRCUIT_OPEN: "the last calls of the tool all failed, so it is not called for a while",
    ErrorType.BUDGET: "its cost is beyond a limit",
    ErrorType.WITHHELD: "the run withholds calls that are not read-only",
    ErrorType.UNKNOWN_TOOL: "this program no longer has its tool",
}


async def settle_cut_off_call(execution: Execution, entry: OpenCall, host: QueueHost) -> e.Event | None:
    """Return the event to record for a call that was running when its execution ended; None if it is run again."""
    call = entry.call
    tool = None if call.invented else execution.config.find_tool(call.name)
    if tool is not None and (change := find_other_kind(execution.journal.run, entry, tool)):
        return e.ToolLost(call_id=call.id, reason=change)
    if entry.has_task and tool is not None:
        return None  # made again, it looks at its task
    policy = "ask" if tool is None else await find_outcome(execution, entry, tool, host)
    if isinstance(policy, Found):
        content, parts = render_result(policy.result, tool)
        result = attrs.evolve(build_settled_result(execution, entry, Outcome.DONE, content), parts=parts)
        return e.ToolFinished(result=result, by="on_unknown")
    execution.journal.log.warning("call_unknown", call=call.id, policy=policy)
    if policy == "fail":
        result = build_settled_result(execution, entry, Outcome.UNKNOWN, _UNKNOWN_TEXT)
        return e.ToolFinished(result=result, by="on_unknown")
    if policy == "rerun":
        return None
    changed = tool is not None and has_other_parameters(entry, tool)
    return e.ToolLost(call_id=call.id, reason=_CHANGED_PARAMETERS if changed else "")


def check_start(calls: OpenCalls, call: ToolCall, tool: Tool[..., Any], _bound: BoundArguments) -> CallOutcome | None:
    """Refuse a call that had started before as another kind of tool: its effect may be repeated under another name."""
    ledger = calls.ledgers.get(call.id)
    if ledger is None or not ledger.has_started:
        return None
    run = calls.execution.journal.run
    change = find_other_kind(run, run.open_call(call.id), tool)
    return failed_outcome(change, ErrorType.BLOCKED) if change else None


def build_settled_result(execution: Execution, entry: OpenCall, outcome: Outcome, content: str) -> ToolResult:
    """Return a result from outside the tool; the model is shown at most as much of it as of the tool's own results."""
    tool, result = execution.config.find_tool(entry.call.name), build_decided_result(entry, outcome, content)
    shown = None if tool is None else count_shown_chars(result.content, tool, execution.count_tokens)
    labels = () if tool is None else list_call_labels(execution, tool, entry.call)
    settled = attrs.evolve(result, shown_chars=shown, spent=bill_settled_call(tool, entry), labels=labels)
    ended = EndedCall(settled)
    fence_result(execution, ended)
    return ended.result


async def refuse_started_call(
    execution: Execution, entry: OpenCall, tool: Tool[..., Any] | None, refusal: CallOutcome, host: QueueHost
) -> CallOutcome | str:
    """Return the outcome of a call that had started and is refused now; a reason if a person has to decide."""
    reason = _REASONS.get(refusal.error_type or ErrorType.TOOL) or remove_advice(refusal.text)
    is_agent = tool is not None and tool.kind is entry.kind is ToolKind.AGENT
    if tool is not None and is_agent and (entry.read_only or refusal.error_type in _LASTING_REFUSALS):
        text = f"the call of {tool.name} had started, and was ended: {reason}."
        end = CallOutcome(Outcome.CANCELLED, text, refusal.error_type)
        return await end_interrupted_child(execution, tool, entry.call, end)
    unknown = CallOutcome(Outcome.UNKNOWN, f"{_UNKNOWN_TEXT} It was not repeated: {reason}.", refusal.error_type)
    found = "ask" if tool is None else await apply_policy(execution, entry, tool, host, unknown)
    return found if isinstance(found, CallOutcome) else f"it had started before, and is not run again: {reason}"


async def apply_policy(
    execution: Execution, entry: OpenCall, tool: Tool[..., Any], host: QueueHost, unknown: CallOutcome
) -> CallOutcome | str:
    """Return the outcome of a call by its tool's policy, `unknown` for "fail"; or the policy: "rerun" or "ask"."""
    found = await find_outcome(execution, entry, tool, host)
    if isinstance(found, Found):
        content, parts = render_result(found.result, tool)
        return CallOutcome(Outcome.DONE, content, parts=parts)
    return unknown if found == "fail" else found


async def find_outcome(execution: Execution, entry: OpenCall, tool: Tool[..., Any], host: QueueHost) -> str | Found:
    """Return the policy for a call of unknown outcome, or the finding of the tool's function."""
    present: Any = tool.on_unknown
    recorded = entry.on_unknown or "rerun"
    if callable(present):
        present = await _ask_tool(execution, entry, tool, host)
        if isinstance(present, Found):
            return present
        recorded = "rerun" if recorded == "check" else recorded
    strictest = stricter_policy(recorded, present)
    if strictest == "rerun" and has_other_parameters(entry, tool):
        return "ask"
    return "ask" if strictest == "check" else strictest  # the function is gone


def has_other_parameters(entry: OpenCall, tool: Tool[..., Any]) -> bool:
    """Return whether a repetition under the same key might be another order: other defaults, more or fewer parameters.

    Repeating a call that only reads, or going on with the run of an agent, is none.
    """
    is_other = entry.parameters not in {"", tool.parameters_hash}
    return is_other and not (entry.read_only or tool.kind is ToolKind.AGENT)


def find_other_kind(run: Run, entry: OpenCall, tool: Tool[..., Any]) -> str:
    """Return how a call that had started differs from its tool as it is now; empty if it is of the same kind."""
    if entry.kind is tool.kind or not entry.may_have_acted or run.header.format < _FIRST_WITH_KIND:
        return ""
    was, now = ("an agent", "a function") if entry.kind is ToolKind.AGENT else ("a function", "an agent")
    return f"it had started as {was}, and {entry.call.name} is {now} here: settle it, or rerun it by the other program"


async def _ask_tool(execution: Execution, entry: OpenCall, tool: Tool[..., Any], host: QueueHost) -> str | Found:
    """Return the finding or the policy from the tool's function; if that fails, a person is asked."""
    limit_s = tool.timeout_s or execution.config.limits.tool_timeout_s
    try:
        arguments = tool.to_namespace(tool.bind(entry.call.arguments))
        ctx = host.build_context(entry.call, tool, execution.config.clock.now() + limit_s)
        with anyio.fail_after(limit_s):
            found = await _call_on_unknown(tool.on_unknown, ctx, arguments)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_foreign_cancellation(error):
            raise
        execution.journal.log.warning("on_unknown_failed", call=entry.call.id, exc_info=error)
        return "ask"
    is_known = isinstance(found, Found) or (isinstance(found, str) and found in UNKNOWN_OUTCOME_POLICIES)
    return found if is_known else "ask"


async def _call_on_unknown(find_out: Callable[..., Any] | str, ctx: RunContext[Any], arguments: Any) -> Any:
    """Call a function, async or plain. A plain one runs in a thread, so that it does not block the event loop."""
    assert callable(find_out)  # checked by the caller  # noqa: S101
    if iscoroutinefunction(find_out):
        return await find_out(ctx, arguments)
    found = await start_in_thread(lambda: find_out(ctx, arguments)).wait()
    return await found if isawaitable(found) else found
