"""Background runs: they begin with the results of calls, and an answer is a draft until their own are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.core import events as e
from agentfsm.core.inbox import Input
from agentfsm.core.messages import Outcome
from agentfsm.engine.execution.outcome import StepOutcome

if TYPE_CHECKING:
    from agentfsm.core.effects import Reflect
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.open_calls import EndedCall


def note_begin(execution: Execution, ended: EndedCall) -> None:
    """Record that a call has begun a run which goes on in the background, with the result of the call."""
    result = ended.result
    if result.outcome is not Outcome.DONE or result.child is not None:
        return
    tool = execution.config.find_tool(result.tool)
    if tool is not None and tool.background:
        ended.facts.append(e.ChildReported(call_id=result.call_id))


async def await_runs(execution: Execution, _effect: Reflect) -> StepOutcome | None:
    """Return the end of a draft that has come before the results of background runs, once all of these are there.

    Input is read before. Until then there is nothing to commit, and the execution waits for the background runs.
    """
    run = execution.journal.run
    left, news = run.open_background, run.untold_background
    if not (left or news):
        return None
    rows = await execution.journal.read_inbox()
    if any(isinstance(row.item, Input) for row in rows) or all(each.pending for each in left):
        return StepOutcome((e.Continued(),))
    return StepOutcome(())
