"""Requests to cancel or pause a run, as outcomes that a step commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from agentfsm.core import events as e
from agentfsm.core.inbox import Cancel, PostedItem
from agentfsm.core.limits import StopReason
from agentfsm.engine.execution.child_runs import add_child_cost
from agentfsm.engine.execution.known_calls import read_calls
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.execution.run_end import fail
from agentfsm.engine.execution.unattended import build_pause, end_child_runs, format_cancel_message

if TYPE_CHECKING:
    from agentfsm.engine.execution.execution import Execution

# Recorded for requests that were paid for but gave no reply that is in the journal.
CUT_OFF_ERROR: Final = "cut off before a usable reply came"


async def find_requested_stop(execution: Execution, rows: Sequence[PostedItem]) -> StepOutcome | None:
    """Return the end or the pause of the run that inbox rows request, or None."""
    if any(isinstance(row.item, Cancel) for row in rows):
        return await cancel_run(execution)
    return build_pause(rows)


async def cancel_run(execution: Execution) -> StepOutcome:
    """End the child runs, and return the end of the run."""
    rows = await execution.journal.store.inbox(execution.journal.run.id)
    request = next((row.item for row in rows if isinstance(row.item, Cancel)), Cancel())
    events = *build_usage_events(execution), *await end_children(execution)
    if any(guard.binds_end() for guard in execution.config.guards):
        await read_calls(execution)  # it may be the first step since the run waited
    return fail(execution, StopReason.CANCELLED, format_cancel_message(request), *events)


async def end_children(execution: Execution) -> list[e.ToolFinished]:
    """End the child runs of a run that is about to end, and return their effects as results of their calls."""
    results = await end_child_runs(execution.journal, execution.config.registry)
    return [e.ToolFinished(result=add_child_cost(execution, result)) for result in results]


def build_usage_events(execution: Execution) -> tuple[e.Event, ...]:
    """Return the event that records the cost of requests that gave no reply; empty if there was no cost."""
    usage, purpose = execution.budget.unjournalled_usage, execution.budget.unjournalled_purpose
    if not usage.tokens:
        return ()
    return (e.AttemptFailed(error=CUT_OFF_ERROR, usage=usage, purpose=purpose),)
