"""The edge: one coroutine for each effect, which does it and commits what happened.

`step` is the whole control flow: take the effect, do it, commit the event. What comes next is the table's business.
New behaviour is a new event or effect and one function here, never a branch in the step. THINK, ACT and REFLECT have
files of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio

from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.effects import AskModel, Effect, ReadInbox, Reflect, RunTools, Wait
from agentfsm.core.inbox import PRIORITY_ORDER, Cancel, Input, PostedItem
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.pending import PendingKind
from agentfsm.core.verdict import Action, Verdict
from agentfsm.engine.execution.budget import Budget
from agentfsm.engine.execution.config import EngineConfig
from agentfsm.engine.execution.execution import Execution
from agentfsm.engine.execution.fairness import StepThrottle
from agentfsm.engine.reflect import review_draft, review_results
from agentfsm.engine.think import think
from agentfsm.engine.tool_calls.child_runs import add_child_cost, load_child_spending
from agentfsm.engine.tool_calls.host import act, create_queue
from agentfsm.engine.unattended import commit_pause, end_child_runs, format_cancel_message
from agentfsm.tokens.ledger import BYTE_COUNTER, BYTES_PER_TOKEN, TokenLedger, count_message

if TYPE_CHECKING:
    from agentfsm.engine.execution.journal import Journal

# The part of the window's room, for what comes in at once: the other half is for what was said before.
INPUT_SHARE: Final = 0.5
# Before them a run goes by the gate of its event loop; what is done in other states is short, and goes along.
_THROTTLED_STATES: Final = frozenset({State.THINK, State.ACT})
# What became of an attempt at a model that was paid for.
_CUT_OFF_ERROR: Final = "cut off before a usable reply came"


async def run_steps(execution: Execution, throttle: StepThrottle, *, once: bool = False) -> None:
    """Perform effects until the run is over or waits, within the active time that its limits leave."""
    limits, journal = execution.config.limits, execution.journal
    if journal.run.open:
        await load_child_spending(execution)
    is_wanted = not journal.run.is_over and not journal.lease.cancelled
    if is_wanted and journal.run.paused is None and journal.lease.crashes >= limits.crashes:
        return await _park(execution)
    while await _run_until_limit(execution, throttle, once=once):
        pass
    return await journal.flush()


async def _run_until_limit(execution: Execution, throttle: StepThrottle, *, once: bool) -> bool:
    """Perform effects within the time that is left; whether a limit was reached, and the last answer is asked for next.

    It has time of its own, so it is performed under a deadline of its own.
    """
    limits, journal = execution.config.limits, execution.journal
    reached = journal.run.limit_reached
    left_s = limits.seconds - journal.run.duration_s
    if execution.config.last_answer and reached is None:
        left_s -= limits.last_answer_s
    journal.cancel_scope = scope = anyio.CancelScope(deadline=anyio.current_time() + left_s)
    with scope:
        while not (before := journal.run).is_over:
            if before.state in _THROTTLED_STATES and not throttle.try_acquire():
                await throttle.acquire()
            await step(execution)
            if once or journal.run is before or journal.run.limit_reached is not reached:
                break
    if scope.cancelled_caught and (journal.run.limit_reached is reached or journal.lease.cancelled):
        await _record_interruption(execution)
    return not once and journal.run.limit_reached is not reached and not journal.run.is_over


async def step(execution: Execution) -> None:
    """Perform the run's effect: do it, and commit what happened. This is the whole control flow."""
    journal = execution.journal
    effect = journal.run.effect
    if journal.lease.cancelled:
        await cancel_run(execution)
    elif (journal.has_unread_inbox or journal.has_pause_request) and await stop_if_requested(
        execution, await journal.read_inbox()
    ):
        return
    elif effect is not None:
        await HANDLERS[type(effect)](execution, effect)


async def _record_interruption(execution: Execution) -> None:
    """Commit why the effect in flight was cut off: somebody asked for the end, or the time is up.

    Raises:
        LeaseLostError: when another worker has taken the run.
    """
    if execution.journal.lease.cancelled:
        return await cancel_run(execution)
    await execution.journal.flush()
    used_s, limit_s = execution.journal.active_s, execution.config.limits.seconds
    if (reached := execution.journal.run.limit_reached) is not None:
        return execution.end_after_last_answer(
            reached, f"no last answer came within {limit_s:.1f} seconds", *build_usage_events(execution)
        )
    message = f"{used_s:.1f} of {limit_s:.1f} seconds used, and what ran was cut off; a larger seconds= allows more"
    return execution.stop_at_limit(
        StopReason.TIMEOUT, message, *build_usage_events(execution), *await _end_child_runs(execution)
    )


async def _park(execution: Execution) -> None:
    """Pause a run that one worker after another died of: it is driven again when a person resumes it."""
    journal = execution.journal
    run, crashes = journal.run, journal.lease.crashes
    calls = ", ".join(f"{entry.call.name} ({entry.call.id})" for entry in run.open if entry.phase is not Phase.FINISHED)
    where = f"in {run.state.upper()}, turn {run.turn}{f', with open calls: {calls}' if calls else ''}"
    message = (
        f"{crashes} workers died while they drove it and no other run, {where}; see what they died of, then resume"
    )
    journal.log.error("run_paused", reason=message)
    journal.commit(e.Paused(kind=PendingKind.CRASH, message=message))
    await journal.flush()


async def stop_if_requested(execution: Execution, rows: Sequence[PostedItem]) -> bool:
    """Whether somebody asked for the end of the run, or for a rest at this boundary between two steps; then do it."""
    if any(isinstance(row.item, Cancel) for row in rows):
        await cancel_run(execution)
        return True
    return commit_pause(execution.journal, rows)


async def _check_wait(execution: Execution, effect: Wait) -> None:
    """See whether what the run waits for has come; a pause ends with `resume` only."""
    run = execution.journal.run
    if run.paused is None and not run.asks:
        return await act(execution, effect)
    rows = await execution.journal.read_inbox()  # they are seen: nobody need be woken for them again
    if run.paused is None and any(isinstance(row.item, Input) for row in rows):
        return await observe(execution, ReadInbox())
    return None


async def cancel_run(execution: Execution) -> None:
    """End the run as its cancel request says, and the child runs with it."""
    rows = await execution.journal.store.inbox(execution.journal.run.id)
    request = next((row.item for row in rows if isinstance(row.item, Cancel)), Cancel())
    events = *build_usage_events(execution), *await _end_child_runs(execution)
    execution.fail(StopReason.CANCELLED, format_cancel_message(request), *events)


async def _end_child_runs(execution: Execution) -> list[e.Event]:
    """End the agents at work for a run that is about to end, and return what they did as results of their calls."""
    results = await end_child_runs(execution.journal, execution.config.registry)
    return [e.ToolFinished(result=add_child_cost(execution, result)) for result in results]


def build_usage_events(execution: Execution) -> tuple[e.Event, ...]:
    """Return what brings into the journal what attempts at the model have cost of which no reply came."""
    usage = execution.budget.unjournalled_usage
    if not usage.tokens:
        return ()
    if execution.journal.run.state is State.REFLECT:
        return (e.Judged(verdict=Verdict(action=Action.ESCALATE, note=_CUT_OFF_ERROR), usage=usage),)
    return (e.ModelFaltered(error=_CUT_OFF_ERROR, usage=usage),)


async def observe(execution: Execution, _effect: ReadInbox) -> None:
    """Take in the inputs that wait in the inbox, unless a stop was requested."""
    journal = execution.journal
    rows = await journal.read_inbox()
    if not rows:
        return journal.commit(e.Observed())
    if await stop_if_requested(execution, rows):
        return None
    taken = _select_inputs(execution, rows)
    inputs = tuple([row.item for row in taken if isinstance(row.item, Input)])
    return journal.commit(e.Observed(inputs=inputs), taken=[row.number for row in taken])


def _select_inputs(execution: Execution, rows: Sequence[PostedItem]) -> list[PostedItem]:
    """Return what is taken in now, most urgent first: inputs that half of the window holds, one at least.

    The others wait for the next OBSERVE. What is no input is taken in any case: nothing is left to be decided here.
    """
    inputs = [(row, row.item) for row in rows if isinstance(row.item, Input)]
    engine = execution.config
    inputs.sort(key=lambda pair: PRIORITY_ORDER[pair[1].priority])
    room = (
        engine.room_tokens(execution.ledger, engine.resolve_settings(execution.journal.run))
        * INPUT_SHARE
        * (BYTES_PER_TOKEN if execution.ledger.counter is BYTE_COUNTER else 1)
    )
    fitting: list[PostedItem] = []
    for row, item in inputs:
        room -= count_message(item.message, execution.ledger.counter)
        if room < 0 and fitting:
            break
        fitting.append(row)
    return fitting + [row for row in rows if not isinstance(row.item, Input)]


async def reflect(execution: Execution, effect: Reflect) -> None:
    """Review the results of the turn, or the draft of the answer."""
    if effect.draft is None:
        await review_results(execution, effect)
    elif await review_draft(execution, effect):
        await _accept_draft(execution)


async def _accept_draft(execution: Execution) -> None:
    """Accept the draft, unless input has arrived that it does not answer."""
    journal = execution.journal
    rows = await journal.read_inbox()
    while not await stop_if_requested(execution, rows):
        if any(isinstance(row.item, Input) for row in rows):
            journal.commit(e.Continued())
            return
        if await journal.try_commit_final(e.Accepted(), taken=[row.number for row in rows]):
            return
        # What came meanwhile may be a late click, and no input: the model would go on from its own draft.
        rows = await journal.read_inbox(force=True)


Handler: TypeAlias = Callable[[Execution, Any], Awaitable[None]]
HANDLERS: Final[Mapping[type[Effect], Handler]] = {
    ReadInbox: observe,
    AskModel: think,
    RunTools: act,
    Wait: _check_wait,
    Reflect: reflect,
}


def build_execution(
    config: EngineConfig,
    journal: Journal,
    deps: Any,
    ledger: TokenLedger,
    parent_budget: Budget | None = None,
    *,
    resume: bool = False,
    takeover: bool = False,
) -> Execution:
    """Return a driving call.

    Args:
        config: Of the agent.
        journal: Of the run, under its lease.
        deps: Handed to tools.
        ledger: The count of the run's tokens.
        parent_budget: The budget of the run that this one works for.
        resume: Whether somebody has resumed the run, and not a worker.
        takeover: Whether the run was taken from the worker that drove it.
    """
    return Execution(
        config=config,
        journal=journal,
        deps=deps,
        ledger=ledger,
        budget=Budget(config.limits, journal, parent_budget, config.last_answer),
        make_queue=create_queue,
        is_resumed=resume,
        is_takeover=takeover,
        orphaned_calls=frozenset([entry.call.id for entry in journal.run.open])
        if journal.lease.abandoned
        else frozenset(),
    )
