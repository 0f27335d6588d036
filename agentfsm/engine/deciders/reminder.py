"""Reminders: the note at the end of a request, which a function of the user's returns for each turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.core import events as e
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.execution.tool_access import build_context

if TYPE_CHECKING:
    from agentfsm.engine.model_calls.request import PreparedRequest


async def remind(request: PreparedRequest) -> StepOutcome | None:
    """Return the note of this turn if it differs from the last one; at most once in a turn."""
    run, reminder = request.execution.journal.run, request.execution.config.reminder
    if run.reminded_turn == run.turn:
        return None
    text = "" if reminder is None else await reminder(run, build_context(request.execution))
    if text == run.reminder:
        return None
    return StepOutcome((e.Reminded(text=str(text), prompts=getattr(text, "sources", ())),))
