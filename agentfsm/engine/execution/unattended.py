"""Stop a run that no worker drives: apply the cancel and pause requests in its inbox, with only its store.

No agent, model or tool is needed. Where the tools are unknown, the record of the run's open calls is conservative: each
call that may have started says so. The runs of agents below a cancelled run end with it.

A client posts its request first and tries to take the lease then. A holder of the lease gives it back first and looks
at the inbox then. So either the client gets the lease, or the holder sees the request.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import OpenCall, Phase
from agentfsm.core.errors import AgentError, ConflictError, LeaseHeldError, RunNotFoundError
from agentfsm.core.inbox import Cancel, Pause, PostedItem
from agentfsm.core.labels import ToolKind
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import Outcome, ToolResult
from agentfsm.engine.execution.child_runs import (
    build_final_result,
    build_missing_result,
    build_unresponsive_result,
    load_child_cost,
    load_child_run,
    waits_on_child,
)
from agentfsm.engine.execution.journal import CLOSE_TIMEOUT_S, Journal
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.execution.run_end import build_doubtful_ends, build_failure
from agentfsm.journal.load import load_run
from agentfsm.ports.store import Clock, Durability, Store
from agentfsm.tools.queue.result_text import build_decided_result
from agentfsm.tools.registry import ToolRegistry
from agentfsm.tools.run_context import ToolReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agentfsm.core.calls import BackgroundRun
    from agentfsm.core.run import Run
    from agentfsm.streaming.stream import Listener
    from agentfsm.streaming.watch import Outlet
    from agentfsm.tools.tool import Tool

# Registry for runs whose agent is not available.
NO_TOOLS: Final = ToolRegistry()


async def apply_stop_requests(
    store: Store,
    run_id: str,
    *,
    clock: Clock,
    tools: ToolRegistry = NO_TOOLS,
    durability: Durability = "full",
    on_event: Listener | None = None,
    on_run: Callable[[Run], None] | None = None,
    watch: tuple[Outlet, ...] = (),
) -> Run | None:
    """Cancel or pause a run if its inbox requests that and its lease is free; otherwise do nothing.

    Call this after a post, and after each release of the lease of a run that is not over. If another worker holds the
    lease, that worker applies the request: during its execution, or after it has released the lease.

    Args:
        store: The store that holds the run.
        run_id: The id of the run.
        clock: Clock for the times in the journal.
        tools: Tools of the run's agent, as far as they are known.
        durability: Durability of the events that are appended.
        on_event: Called with each streamed event.
        on_run: Called with each new state of the run.
        watch: Watchers, which receive each commit.

    Returns:
        The run after the last request; None if no request was applied here.

    Raises:
        RunNotFoundError: if the store has no such run.
    """
    run: Run | None = None
    with suppress(LeaseHeldError):
        while (run is None or not run.is_over) and (requests := await _read_stop_requests(store, run_id)):
            is_cancelled = any(isinstance(item, Cancel) for item in requests)
            if is_cancelled and await _lacks_task_tool(await load_run(store, run_id), tools):
                break  # a worker that can reach the server ends the run, and the task with it
            journal = await Journal.open(store, run_id, clock, on_event, on_run, durability=durability, watch=watch)
            run = await _stop_and_release(journal, tools)
    return run


async def _read_stop_requests(store: Store, run_id: str) -> list[Cancel | Pause]:
    return [row.item for row in await store.inbox(run_id) if isinstance(row.item, Cancel | Pause)]


async def _lacks_task_tool(run: Run, tools: ToolRegistry) -> bool:
    """Return whether a call has a task at a server that cannot be asked to end it with these tools."""
    names = [entry.call.name for entry in run.open if entry.has_task and entry.phase is not Phase.FINISHED]
    if tools.sources and any(tools.get(name) is None for name in names):
        await tools.refresh()
    return any((tool := tools.get(name)) is None or tool.end_task is None for name in names)


async def give_up_cut_off_call(store: Store, run_id: str, call_id: str, *, clock: Clock) -> bool:
    """Record that the outcome of a call is unknown if it had started and no worker executes its run, so that it waits.

    Return whether it waits for a person now.

    Args:
        store: The store that holds the run.
        run_id: The id of the run.
        call_id: The id of the call.
        clock: Clock for the times in the journal.
    """
    reason = "it was cut off, and a person settles it before the run is taken up again"
    with suppress(LeaseHeldError):
        journal = await Journal.open(store, run_id, clock)
        phases = {entry.call.id: entry.phase for entry in journal.run.open}
        is_cut_off = phases.get(call_id) is Phase.RUNNING
        lost = StepOutcome((e.ToolLost(call_id=call_id, reason=reason),) if is_cut_off else ())
        await _stop_and_release(journal, NO_TOOLS, lost)
        return is_cut_off
    return False


async def _stop_and_release(journal: Journal, tools: ToolRegistry, outcome: StepOutcome | None = None) -> Run:
    """Commit an outcome, else apply the requests in the inbox. Release the lease, and return the run."""
    try:
        if not journal.run.is_over:
            rows = () if outcome is not None else await journal.read_inbox(force=True)
            stop = outcome or await _find_requested_stop(journal, rows, tools)
            if stop is not None and stop.events:
                journal.commit(*stop.events, taken=stop.taken)
            await journal.flush()
    except GeneratorExit:  # the coroutine was closed, perhaps after its event loop: awaiting is impossible
        journal.release()
        raise
    finally:
        await journal.close()
    return journal.run


async def _find_requested_stop(journal: Journal, rows: Sequence[PostedItem], tools: ToolRegistry) -> StepOutcome | None:
    cancels = [row.item for row in rows if isinstance(row.item, Cancel)]
    if not cancels:
        return build_pause(rows)
    ended = [e.ToolFinished(result=result) for result in await end_child_runs(journal, tools)]
    orphaned = journal.list_orphaned_calls()
    doubtful = build_doubtful_ends(journal.run, orphaned, tools, StopReason.CANCELLED, ended)
    left = await end_background_runs(journal, tools) if journal.run.background else ()
    reports = [e.ChildReported(call_id=each.call.id, result=result) for each, result in left]
    return build_failure(journal, doubtful, StopReason.CANCELLED, format_cancel_message(cancels[0]), *ended, *reports)


def build_pause(rows: Iterable[PostedItem]) -> StepOutcome | None:
    """Return the pause that inbox rows request, or None."""
    requests = [(row.number, row.item) for row in rows if isinstance(row.item, Pause)]
    if not requests:
        return None
    first = requests[0][1]
    return StepOutcome((e.Paused(by=first.by, message=first.message),), [number for number, _ in requests])


def format_cancel_message(request: Cancel) -> str:
    """Return the stop message of a cancelled run."""
    who = f"cancelled by {request.by}" if request.by else "cancelled"
    return f"{who}: {request.message}" if request.message else who


# Child runs.


async def cancel_child_run(
    store: Store,
    caller: str,
    call_id: str,
    *,
    clock: Clock,
    tools: ToolRegistry = NO_TOOLS,
    durability: Durability = "full",
) -> Run:
    """Cancel a child run because its parent run or its call ends.

    Args:
        store: The store that holds both runs.
        caller: The id of the parent run.
        call_id: The id of the call.
        clock: Clock for the times in the journal.
        tools: Tools of the agent, as far as they are known.
        durability: Durability of the events that are appended.

    Returns:
        The child run. It is not over if another worker executes it; that worker ends it later.

    Raises:
        RunNotFoundError: if the child run never began, or is missing in the store.
    """
    run = await load_child_run(store, caller, call_id)
    if not run.is_over:
        with suppress(ConflictError):  # it has ended in the meantime
            await store.post(run.id, "cancel", Cancel(by="its caller"))
            await apply_stop_requests(store, run.id, clock=clock, tools=tools, durability=durability)
        run = await load_run(store, run.id)
    return run


async def end_child_runs(journal: Journal, tools: ToolRegistry) -> list[ToolResult]:
    """End the child runs and the tasks of a run that is about to end, and return the results of their calls."""
    results: list[ToolResult] = []
    for entry in journal.run.open:
        if entry.phase is not Phase.FINISHED and (ended := await _end_child_run(journal, tools, entry)) is not None:
            result = build_decided_result(entry, ended.outcome, ended.content)
            results.append(attrs.evolve(result, child=ended.child, labels=ended.labels))
    return results


async def _end_child_run(journal: Journal, tools: ToolRegistry, entry: OpenCall) -> ToolReturn | None:
    """Cancel the child run of a call of a run that ends, and return its result; None if the call has none."""
    try:
        return await end_child_run(journal, tools.get(entry.call.name), entry)
    except AgentError as error:
        call_id = entry.call.id
        journal.log.warning("child_not_ended", call=call_id, error=type(error).__name__)
        text = f"the agent of {entry.call.name} could not be cancelled. Check before you repeat anything."
        cost = await load_child_cost(journal.store, journal.run.id, call_id)
        return ToolReturn(outcome=Outcome.UNKNOWN, content=text, child=cost)


async def end_child_run(journal: Journal, tool: Tool[..., Any] | None, entry: OpenCall) -> ToolReturn | None:
    """End the child run or the task of an open call, and return its result; None if the call has neither.

    Args:
        journal: Journal of the parent run.
        tool: The tool of the call; None if it is not known.
        entry: The call.

    Raises:
        AgentError: if the child run cannot be cancelled now.
    """
    store, caller, call_id = journal.store, journal.run.id, entry.call.id
    if entry.has_task:
        return await _end_task(journal, tool, entry)
    try:
        if tool is not None and tool.inner_agent is not None:
            return await tool.inner_agent.end_run(store, journal.clock, caller, call_id)
        if tool is not None and entry.kind is not ToolKind.AGENT:
            return None
        child = await cancel_child_run(store, caller, call_id, clock=journal.clock, durability=journal.lease.durability)
    except RunNotFoundError:
        return build_missing_result(entry) if waits_on_child(journal.run, entry) else None  # otherwise it never began
    return build_final_result(child) if child.is_over else build_unresponsive_result(child)


async def _end_task(journal: Journal, tool: Tool[..., Any] | None, entry: OpenCall) -> ToolReturn:
    """Ask the server to end the task of a call. What the task did until then may stay."""
    has_asked, header = False, journal.run.header
    if tool is not None and tool.end_task is not None and entry.inquiry is not None:
        state = json.loads(entry.inquiry.state)
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            try:
                has_asked = await tool.end_task(state, tenant=header.tenant, user=header.user)
            except Exception as error:  # noqa: BLE001  the run ends all the same
                journal.log.warning("task_not_ended", call=entry.call.id, error=type(error).__name__)
    done = "was asked to end it" if has_asked else "could not be asked to end it, and may go on with it"
    text = f"outcome unknown: a server worked on a task of {entry.call.name}, and {done}. Check before you repeat it."
    return ToolReturn(outcome=Outcome.UNKNOWN, content=text)


# Background runs.


def wrap_background_call(each: BackgroundRun) -> OpenCall:
    """Return the call of a background run as an open one, for what is known of the ends of calls of agents."""
    return OpenCall(call=each.call, phase=Phase.RUNNING, attempts=1, kind=ToolKind.AGENT)


def build_background_result(each: BackgroundRun, end: ToolReturn) -> ToolResult:
    """Return the result of a background run."""
    result = build_decided_result(wrap_background_call(each), end.outcome, end.content)
    return attrs.evolve(result, error_type=end.error_type, child=end.child, labels=end.labels, retryable=end.retryable)


async def end_background_runs(journal: Journal, tools: ToolRegistry) -> list[tuple[BackgroundRun, ToolResult]]:
    """Cancel the background runs of a run that is about to end, and return them with their results."""
    ended: list[tuple[BackgroundRun, ToolResult]] = []
    for each in journal.run.open_background:
        entry = wrap_background_call(each)
        end = await _end_child_run(journal, tools, entry) or build_missing_result(entry)
        ended.append((each, build_background_result(each, end)))
    return ended
