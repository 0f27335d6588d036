"""Duties: what rules want to have happened before a run ends. A draft goes back while something is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from agentfsm.core import events as e
from agentfsm.engine.execution.known_calls import list_due, read_calls

if TYPE_CHECKING:
    from agentfsm.core.effects import Reflect
    from agentfsm.engine.execution.execution import Execution

_DUE_NOTE: Final = "You cannot end here: {due}. Do that now, or say why it cannot be done."


async def find_due(execution: Execution) -> Sequence[str]:
    """Return what is due now, as clauses."""
    await read_calls(execution)
    found = list_due(execution)
    if found:
        execution.journal.log.warning("duties_open", turn=execution.journal.run.turn, due=found)
    return found


async def check_draft(execution: Execution, _effect: Reflect) -> e.Continued | None:
    """Return the objection to a draft while something is due, as often as answers are refused.

    A planner that has given the answer would give it again.
    """
    config, run = execution.config, execution.journal.run
    if run.refusals >= config.limits.answer_retries or (config.planner is not None and config.planner.conclude(run)):
        return None
    if not (due := await find_due(execution)):
        return None
    return e.Continued(note=_DUE_NOTE.format(due="; ".join(due)), refused=True)
