"""ACT: apply the decisions that have come in, and run the calls that may run.

ACT commits while it runs, through `RunHost.record`: each stage of a call is in the journal before it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import UNDECIDED_PHASES, OpenCall, Phase
from agentfsm.core.effects import RunTools, Wait
from agentfsm.core.inbox import PostedItem
from agentfsm.core.messages import ErrorType, Outcome, ToolCall
from agentfsm.core.reducers import add_counts
from agentfsm.engine.execution.forked_calls import ForkedCalls, find_line
from agentfsm.engine.tool_calls.approvals import Decisions, decide_open_calls, edit_call
from agentfsm.engine.tool_calls.call_guards import Finding, guard_calls, needs_approval_by_guard, screen_texts
from agentfsm.engine.tool_calls.host import RunHost, ToolCalls
from agentfsm.engine.unattended import end_child_run
from agentfsm.tools.queue.result_text import build_decided_result

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.execution import Execution


async def act(execution: Execution, effect: RunTools | Wait, calls: ToolCalls) -> None:
    """Run the calls that may run. If no call may run and some are open, the run waits for a person."""
    host, budget = calls.host, execution.budget
    entries, asking, intended = execution.journal.run.open, execution.config.registry.interactive_tools, Phase.INTENDED
    ready = effect.calls if isinstance(effect, RunTools) else ()
    host.unfinished = len(entries)
    run = execution.journal.run
    if run.plan is not None and (
        run.reply is None or run.plan.guards_calls
    ):  # the steps of a plan, or calls outside it
        special = list(entries)
    else:
        special = [
            each
            for each in entries
            if each.phase is not intended or each.call.name in asking or each.guarded is not None
        ]
    refused = budget.admit_calls(_list_unfinished(entries) if special else entries)
    if refused:  # before a person is asked about them
        text = budget.format_refusal()
        results = [build_decided_result(entry, Outcome.SKIPPED, text) for entry in refused]
        execution.journal.log.warning("calls_refused", turn=run.turn, calls=len(results))
        host.record(*[e.ToolFinished(result=attrs.evolve(each, error_type=ErrorType.BUDGET)) for each in results])
    if execution.config.guards:
        special += await _apply_guards(execution, host)
    if special or refused:
        decisions = await decide_open_calls(execution, host, calls.last_waits, end_child_run)
        if decisions.events:
            host.record(*decisions.events, taken=decisions.taken)
        settled = execution.journal.run
        host.approvals = decisions.approvals
        host.restarted_calls = frozenset([entry.call.id for entry in settled.open if entry.attempts])
        ready = _list_ready_calls(settled, decisions)
        waiting = _list_unfinished(settled.open)
        host.unfinished = len(waiting)
        budget.admit_calls(waiting)  # some may have their result now
    if calls.drained_pending and not (ready and host.unfinished):
        await calls.queue.emit_drained()
    calls.drained_pending = False
    if not host.unfinished:
        host.record()
    elif ready:
        running = calls.execute_steps(ready) if run.reply is None else calls.queue.execute_all(ready)
        await calls.run_deferring_changes(running)


def _list_unfinished(entries: Sequence[OpenCall]) -> list[OpenCall]:
    return [each for each in entries if each.phase is not Phase.FINISHED]


async def _apply_guards(execution: Execution, host: RunHost) -> list[OpenCall]:
    """Commit the decisions of guards, and return the open calls that cannot run at once, perhaps because of them."""
    found = await screen_texts(execution) if execution.config.screens else ()
    is_first, host.has_guarded = not host.has_guarded, True
    counted = execution.config.counted_tools
    if counted and any(entry.call.name in counted for entry in execution.journal.run.open):
        await _apply_quotas(execution, host, found, is_first=is_first)
    elif decisions := guard_calls(execution, found, is_first=is_first):
        host.record(*decisions)
        execution.budget.report_counted_calls()
    entries = execution.journal.run.open
    return [each for each in entries if each.phase is not Phase.INTENDED or needs_approval_by_guard(each)]


async def _apply_quotas(execution: Execution, host: RunHost, found: Sequence[Finding], *, is_first: bool) -> None:
    """Commit the decisions of guards that count calls, also those that other forks of the session make meanwhile."""
    budget, journal = execution.budget, execution.journal
    if budget.tree.forked_calls is None:
        root = (budget.ancestors or (budget,))[-1].source.run.header
        budget.tree.forked_calls = ForkedCalls(journal.store, await find_line(journal.store, root))
    forked = budget.tree.forked_calls
    async with forked.lock:
        await forked.read()
        while decisions := guard_calls(execution, found, is_first=is_first):
            before, after = journal.run.counted, journal.run.fold(decisions).counted
            added = {name: count - before.get(name, 0) for name, count in after.items()}
            if await forked.write(add_counts(budget.root_counted_calls, added)):
                host.record(*decisions)
                budget.report_counted_calls()
                return
            await forked.read()


def _list_ready_calls(run: Run, decisions: Decisions) -> tuple[ToolCall, ...]:
    """Return the calls that may run now: those before the first one that still needs a decision.

    The steps of a plan do not depend on their order.
    """
    ready: list[ToolCall] = []
    for entry in run.open:
        row = decisions.approvals.get(entry.call.id)
        if entry.phase in UNDECIDED_PHASES and row is None and entry.call.id not in decisions.resumable:
            if run.reply is None:
                continue
            break
        if entry.phase is not Phase.FINISHED:
            decision = row.item if isinstance(row, PostedItem) else row
            ready.append(entry.call if decision is None else edit_call(run, entry.call, decision))
    return tuple(ready)
