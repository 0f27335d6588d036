"""Memory: search it, and read the user's profile, once for each input, before the model or the planner is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentfsm.core import events as e
from agentfsm.core.messages import UserMessage
from agentfsm.core.usage import Purpose
from agentfsm.core.window_layers import TaskKind, WindowDemand
from agentfsm.engine.deciders.spend import count_usage
from agentfsm.engine.execution.config import ANSWER_TOKENS
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.model_calls.view import build_view
from agentfsm.ports.memory_items import Recall
from agentfsm.tokens.ledger import BYTE_COUNTER, BYTES_PER_TOKEN

if TYPE_CHECKING:
    from agentfsm.engine.model_calls.request import PreparedRequest

# Characters of the search that the journal keeps.
MAX_QUERY_CHARS: Final = 1_000


async def recall(request: PreparedRequest) -> StepOutcome | None:
    """Search the memory for the newest input; None if that was done.

    A memory that fails does not fail the run: the event says why nothing was found, and the run keeps its profile.
    """
    execution, memory = request.execution, request.execution.config.memory
    journal, run = execution.journal, execution.journal.run
    if memory is None or run.is_recalled or not memory.wants(run):
        return None
    said = (each for each in reversed(run.messages) if isinstance(each, UserMessage) and not each.is_note)
    query = next((message.text for message in said), "")
    demand = _measure_demand(request)
    try:
        found = await memory.recall_for(run, query, demand)
    except Exception as error:  # noqa: BLE001  a memory is of any kind, and a run works without
        found = Recall(fault=f"{type(error).__name__}: {error}"[:MAX_QUERY_CHARS])
    if found.fault:
        journal.log.warning("memory_not_searched", turn=run.turn + 1, error=found.fault)
    count_usage(execution, found.usage)
    recalled = e.Recalled(
        query=query[:MAX_QUERY_CHARS],
        items=found.items,
        fault=found.fault,
        usage=found.usage,
        purpose=Purpose.MEMORY if found.model else None,
        model=found.model,
        layers=found.layers,
        left_out=found.left_out,
        profile=found.profile,
    )
    return StepOutcome((recalled,))


def _measure_demand(request: PreparedRequest) -> WindowDemand:
    """Return what the next request needs of the window, beside messages and recalled items."""
    execution, view = request.execution, build_view(request.execution)
    config, run, counter = execution.config, execution.journal.run, execution.ledger.counter
    is_chosen = run.offered is not None or not config.selector.wants(len(config.registry))
    unit = BYTES_PER_TOKEN if counter is BYTE_COUNTER else 1
    tools_tokens = view.fixed.tools_tokens // unit if is_chosen else 0  # not all of many tools will be offered
    task = TaskKind.MEDIUM if len(config.registry) else TaskKind.SIMPLE
    return WindowDemand(
        window_tokens=config.model.window_tokens,
        task=task if config.planner is None else TaskKind.COMPLEX,
        instructions_tokens=view.fixed.instructions_tokens // unit,
        reserve_tokens=tools_tokens + (view.settings.max_tokens or ANSWER_TOKENS),
        working_tokens=counter.count(view.note) // unit,
        messages=len(run.shown),
    )
