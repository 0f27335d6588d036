"""The agents at work for a run: what they have spent, and their end when the run ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from agentfsm.core import events as e
from agentfsm.core.errors import AgentError, RunNotFoundError, StoreError
from agentfsm.core.inbox import Cancel
from agentfsm.core.run import OpenCall, Phase
from agentfsm.engine.drive.budget import Spent
from agentfsm.engine.drive.cost import cost_of
from agentfsm.engine.drive.drive import Drive
from agentfsm.engine.drive.engine import Engine
from agentfsm.engine.drive.family import child_id
from agentfsm.engine.drive.journal import load
from agentfsm.engine.queue.render import decided
from agentfsm.engine.tools.context import ToolKind
from agentfsm.ports import Store

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolResult


async def note_children(engine: Engine, drive: Drive) -> None:
    """Put on the budget what agents below have spent whose calls are open, from their own journals."""
    journal, below = drive.journal, []
    for entry in journal.run.open:
        tool = engine.registry.get(entry.call.name)
        if entry.phase is Phase.FINISHED or tool is None or tool.kind is not ToolKind.AGENT:
            continue
        if (spent := await _spent_below(journal.store, child_id(journal.run.id, entry.call.id))) is not None:
            below.append(spent)
    drive.budget.open(below)


async def _spent_below(store: Store, run_id: str) -> Spent | None:
    """Return what a run and the open calls of agents below it have spent; None where there is no such run."""
    try:
        run = await load(store, run_id)
    except RunNotFoundError:
        return None
    usage, calls = run.usage, run.called
    for entry in run.open:
        if entry.phase is Phase.FINISHED:
            continue  # it is in the usage
        calls += entry.phase is not Phase.INTENDED
        if (below := await _spent_below(store, child_id(run_id, entry.call.id))) is not None:
            usage, calls = usage + below.usage, calls + below.calls
    return Spent(run, usage, calls)


def returned(drive: Drive, result: ToolResult) -> ToolResult:
    """Return the result of an agent with what it spent, also where it broke down or was cut off before it could say."""
    spent = drive.budget.returned(child_id(drive.journal.run.id, result.call_id))
    if result.child is not None or spent is None:
        return result
    return attrs.evolve(result, child=attrs.evolve(cost_of(spent.run), usage=spent.usage))


async def end_children(engine: Engine, drive: Drive) -> list[e.ToolFinished]:
    """End the agents at work for a run that is about to end, and return what they did as results of their calls."""
    journal, results = drive.journal, []
    for entry in journal.run.open:
        tool = engine.registry.get(entry.call.name)
        if tool is None and entry.phase is Phase.PAUSED:
            await _leave_word(drive, entry)
        if tool is None or tool.end is None or entry.phase is Phase.FINISHED:
            continue
        try:
            ended = await tool.end(journal.store, engine.clock, child_id(journal.run.id, entry.call.id))
        except RunNotFoundError:
            continue  # it never began
        except AgentError as error:
            journal.log.warning("child_not_ended", call=entry.call.id, error=type(error).__name__)
            continue
        result = attrs.evolve(decided(entry.call, ended.outcome, ended.content), child=ended.child)
        results.append(e.ToolFinished(result=result))
    return results


async def _leave_word(drive: Drive, entry: OpenCall) -> None:
    """Tell waiting agents that their caller has ended, where it has ended without the tools that drive them."""
    journal = drive.journal
    if all(item.run_id == journal.run.id for item in entry.waits):
        return  # it waits for an answer, and nobody is below
    for run_id in {child_id(journal.run.id, entry.call.id), *(item.run_id for item in entry.waits)}:
        try:
            await journal.store.post(run_id, "cancel", Cancel(by="its caller"))
        except StoreError as error:
            journal.log.warning("child_not_told", child=run_id, error=type(error).__name__)
