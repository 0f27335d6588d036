"""Background runs: the answer of a run is a draft until they have ended, and the model has read their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.core import events as e
from agentfsm.core.inbox import Input
from agentfsm.engine.execution.outcome import StepOutcome

if TYPE_CHECKING:
    from agentfsm.core.effects import Reflect
    from agentfsm.engine.execution.execution import Execution


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
