"""REFLECT: review tool results, or a draft of the answer, and continue, accept or stop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs

from agentfsm.core import events as e
from agentfsm.core.inbox import Input
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.stop_requests import find_requested_stop

if TYPE_CHECKING:
    from agentfsm.core.effects import Reflect
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.tool_calls.host import ToolCalls


async def reflect(execution: Execution, effect: Reflect, calls: ToolCalls) -> StepOutcome:
    """Review tool results or a draft of the answer, and return how the run continues."""
    if effect.is_paused:
        return StepOutcome((e.Continued(),))
    line, is_draft = calls.line, effect.draft is not None
    found: e.Continued | e.Accepted | StepOutcome | None = None
    for review in line.review_draft if is_draft else line.review_results:
        if (found := await review(execution, effect)) is not None:
            break
    if found is None and is_draft:
        found = e.Accepted()
    if found is None or isinstance(found, e.Continued):
        found = found or e.Continued()
        if not is_draft:
            found = line.after_results(execution, found)
        else:
            for decide in line.after_draft:
                if isinstance(found := decide(execution, found), StepOutcome):
                    break
    if isinstance(found, e.Accepted):
        for find in line.find_faults:
            found = attrs.evolve(found, findings=(*found.findings, *await find(execution)))
        return await _accept_draft(execution, found)
    return found if isinstance(found, StepOutcome) else StepOutcome((found,))


async def _accept_draft(execution: Execution, accepted: e.Accepted, *, reread: bool = False) -> StepOutcome:
    """Accept the draft, unless input has arrived that it does not answer.

    Args:
        execution: The execution of the run.
        accepted: The end of the run.
        reread: Whether to read the inbox anew, since something arrived before the end was written. It may be a late
            decision and no input: then the draft still stands, and the model must not go on from it.
    """
    rows = await execution.journal.read_inbox(force=reread)
    if (stop := await find_requested_stop(execution, rows)) is not None:
        return stop
    if any(isinstance(row.item, Input) for row in rows):
        return StepOutcome((e.Continued(),))
    retry = partial(_accept_draft, execution, accepted, reread=True)
    return StepOutcome((accepted,), [row.number for row in rows], otherwise=retry)
