"""Memory in THINK: search it once for each input of the user, before the model or the planner is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentfsm.core import events as e
from agentfsm.core.messages import UserMessage
from agentfsm.core.usage import Purpose
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.ports.memory_items import Recall

if TYPE_CHECKING:
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.ports.memory_items import RunMemory

# Characters of the search that the journal keeps.
MAX_QUERY_CHARS: Final = 1_000


async def recall(execution: Execution, memory: RunMemory) -> StepOutcome | None:
    """Search the memory for the newest input; None if that was done, or the run has no memory.

    A memory that fails does not fail the run: the event says why nothing was found.
    """
    config, journal = execution.config, execution.journal
    run = journal.run
    if run.is_recalled or not memory.wants(run):
        return None
    said = (each for each in reversed(run.messages) if isinstance(each, UserMessage) and not each.is_note)
    query = next((message.text for message in said), "")
    room = config.room_tokens(execution.ledger, config.resolve_settings(run))
    try:
        found = await memory.recall_for(run, query, room)
    except Exception as error:  # noqa: BLE001  a memory is of any kind, and a run works without
        found = Recall(fault=f"{type(error).__name__}: {error}"[:MAX_QUERY_CHARS])
    if found.fault:
        journal.log.warning("memory_not_searched", turn=run.turn + 1, error=found.fault)
    recalled = e.Recalled(
        query=query[:MAX_QUERY_CHARS],
        items=found.items,
        fault=found.fault,
        usage=found.usage,
        purpose=Purpose.MEMORY if found.model else None,
        model=found.model,
    )
    return StepOutcome((recalled,))
