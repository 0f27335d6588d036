"""The engine step: perform the run's effect, and commit the events that its handler returns.

Each effect has one handler, a coroutine in a module of its own. OBSERVE, THINK and REFLECT return their events, and the
step commits them. ACT commits while it runs, through `OpenCalls.record`, since the start and the result of each call
have to be in the journal before anything depends on them. The transition table decides the next effect. New behaviour
is a new event or effect with one handler, never a branch in the step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

import anyio

from agentfsm._lib.concurrency import make_scope
from agentfsm._lib.fairness import StepThrottle
from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.effects import AskModel, Effect, ReadInbox, Reflect, RunTools, Wait
from agentfsm.core.inbox import Input
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.pending import PendingKind
from agentfsm.engine.act import act
from agentfsm.engine.background_runs import open_background
from agentfsm.engine.execution.child_runs import load_child_spending
from agentfsm.engine.execution.execution import Execution
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.execution.run_end import end_after_last_answer, stop_at_limit
from agentfsm.engine.execution.task_waits import wait_for_tasks
from agentfsm.engine.line import build_line
from agentfsm.engine.observe import observe
from agentfsm.engine.reflect import reflect
from agentfsm.engine.stop_requests import build_usage_events, cancel_run, end_children, find_requested_stop
from agentfsm.engine.think import think
from agentfsm.engine.tool_calls.host import ToolCalls

# Events that end a run.
_ENDS: Final = (e.AnswerGiven, e.Accepted, e.Failed)
# States before which a step passes the throttle of the event loop; steps in other states are short.
_THROTTLED_STATES: Final = frozenset({State.THINK, State.ACT})


async def _wait(execution: Execution, effect: Wait, calls: ToolCalls) -> StepOutcome | None:
    """Check whether the item that the run waits for has come. A pause ends only when the run is resumed."""
    run = execution.journal.run
    if run.paused is None and run.state is State.ACT:
        await act(execution, effect, calls)
        return None
    rows = await execution.journal.read_inbox()  # they count as read: no worker is woken for them again
    if run.paused is None and any(isinstance(row.item, Input) for row in rows):
        if run.state is State.REFLECT:  # the end of the run waits for background runs
            return StepOutcome((e.Continued(),))
        return await observe(execution, ReadInbox(), calls)
    return None


Handler: TypeAlias = Callable[[Execution, Any, ToolCalls], Awaitable[StepOutcome | None]]
HANDLERS: Mapping[type[Effect], Handler] = {
    ReadInbox: observe,
    AskModel: think,
    RunTools: act,
    Reflect: reflect,
    Wait: _wait,
}


async def step(execution: Execution, calls: ToolCalls) -> None:
    """Perform the run's effect, and commit the outcome of its handler. This is the whole control flow."""
    journal, lease = execution.journal, execution.journal.lease
    outcome = None
    if lease.cancelled:
        outcome = await cancel_run(execution)
    elif lease.inbox_head > lease.inbox_read or journal.has_pause_request:  # as `has_unread_inbox`, without its call
        outcome = await find_requested_stop(execution, await journal.read_inbox())
    if outcome is None and (effect := journal.run.effect) is not None:
        outcome = await HANDLERS[type(effect)](execution, effect, calls)
    if outcome is None:
        return
    if outcome.otherwise is None and outcome.scope is None and execution.background is None:
        journal.commit(*outcome.events, taken=outcome.taken)
    elif outcome.events:
        await _commit(execution, outcome)


async def _commit(execution: Execution, outcome: StepOutcome) -> None:
    """Commit an outcome in its scope. If new input forestalls the end of the run, commit the alternative instead.

    Background runs that are left at the end of the run are cancelled.
    """
    if outcome.scope is not None:
        async with outcome.scope:
            return await _commit(execution, outcome._replace(scope=None))
    journal = execution.journal
    if execution.background is not None and journal.run.open_background and isinstance(outcome.events[-1], _ENDS):
        if outcome.otherwise is not None:  # an answer, which is a draft until they have ended
            return await _commit(execution, await outcome.otherwise())
        reports = await execution.background.end()
        outcome = outcome._replace(events=(*outcome.events[:-1], *reports, outcome.events[-1]))
    while outcome.otherwise is not None:
        if await journal.try_commit_final(*outcome.events, taken=outcome.taken):
            return None
        outcome = await outcome.otherwise()
    return journal.commit(*outcome.events, taken=outcome.taken)


async def run_steps(execution: Execution, throttle: StepThrottle) -> None:
    """Perform steps until the run is over or waits, within the active time that its limits leave."""
    limits, journal = execution.config.limits, execution.journal
    if journal.run.open:
        await load_child_spending(execution)
    is_suspect = journal.lease.crashes >= limits.crashes and not journal.lease.cancelled
    if is_suspect and journal.run.paused is None and not journal.run.is_over:
        await _commit(execution, _park(execution))
        return await journal.flush()
    calls = ToolCalls(execution, build_line(execution))
    try:
        if calls.line.has_background:
            if journal.run.background:
                await load_child_spending(execution)
            async with open_background(execution, calls.line):
                while await _run_until_limit(execution, calls, throttle):
                    pass
        else:
            while await _run_until_limit(execution, calls, throttle):
                pass
    except BaseException:
        if not journal.lease.lost and (paid := build_usage_events(execution)):  # also if the run is resumed
            journal.commit(*paid)
        raise
    finally:
        for leave in calls.line.on_exit:
            await leave(execution)
    return await journal.flush()


async def _run_until_limit(execution: Execution, calls: ToolCalls, throttle: StepThrottle) -> bool:
    """Perform steps within the remaining time. Return whether a limit was reached and the last answer comes next.

    The last answer has its own deadline.
    """
    limits, journal = execution.config.limits, execution.journal
    once, drain = execution.options.once, execution.options.drain
    looks = once or calls.line.has_background
    reached = journal.run.limit_reached
    left_s = limits.seconds - journal.run.duration_s
    if execution.config.last_answer and reached is None:
        left_s -= limits.last_answer_s
    journal.cancel_scope = scope = make_scope(anyio.current_time() + left_s)
    with scope:
        while not (before := journal.run).is_over:
            if before.state in _THROTTLED_STATES and not throttle.try_acquire():
                await throttle.acquire()
            if drain is None:
                await step(execution, calls)
            else:
                await drain.enter()
                try:
                    await step(execution, calls)
                finally:
                    drain.leave()
            if looks or journal.run is before or journal.run.limit_reached is not reached:
                is_blocked, background = journal.run is before, execution.background
                if background is not None and await background.advance(is_blocked=is_blocked):
                    continue
                if is_blocked and await wait_for_tasks(execution):
                    continue
                if once or is_blocked or journal.run.limit_reached is not reached:
                    break
    if scope.cancelled_caught and (journal.run.limit_reached is reached or journal.lease.cancelled):
        await _commit(execution, await _interrupt(execution, calls))
    return not once and journal.run.limit_reached is not reached and not journal.run.is_over


async def _interrupt(execution: Execution, calls: ToolCalls) -> StepOutcome:
    """Return the reason why the effect in progress was cut off: the run was cancelled, or its time is up.

    Raises:
        LeaseLostError: if another worker has taken the run.
    """
    if execution.journal.lease.cancelled:
        return await cancel_run(execution)
    await execution.journal.flush()
    used_s, limit_s = execution.journal.active_s, execution.config.limits.seconds
    if (reached := execution.journal.run.limit_reached) is not None:
        message = f"no last answer came within {limit_s:.1f} seconds"
        return end_after_last_answer(execution, reached, message, *build_usage_events(execution))
    limit_waits = calls.host.cut_off_limit_waits
    waits = f" while calls waited for a limit of their tool or tag ({limit_waits:,})" if limit_waits else ""
    waits = "".join([*[describe(execution) for describe in calls.line.describe_wait], waits])
    message = f"{used_s:.1f} of {limit_s:.1f} seconds used, and running work was cut off{waits}; set a larger seconds="
    events = *build_usage_events(execution), *await end_children(execution)
    return stop_at_limit(execution, StopReason.TIMEOUT, message, *events)


def _park(execution: Execution) -> StepOutcome:
    """Return the pause of a run during which several workers crashed. A person has to resume it."""
    journal = execution.journal
    run, crashes = journal.run, journal.lease.crashes
    calls = ", ".join(f"{entry.call.name} ({entry.call.id})" for entry in run.open if entry.phase is not Phase.FINISHED)
    where = f"in {run.state.upper()}, turn {run.turn}{f', with open calls: {calls}' if calls else ''}"
    message = f"{crashes} workers died while they executed only this run, {where}; find the cause, then resume it"
    return StepOutcome((e.Paused(kind=PendingKind.CRASH, message=message),))
