"""A run of many turns is opened and counted in portions, and leaves the event loop to others in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Agent, Limits, tool
from agentfsm.engine.deciders import window as compaction
from agentfsm.journal import load
from agentfsm.ports import Store
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tokens import ledger

TURNS = 60
WIDE = Limits(turns=TURNS + 10, tokens=10**9, tool_calls=TURNS + 10)


@tool(read_only=True)
async def look(at: int) -> str:
    """Look."""
    return f"seen {at}"


async def many_turns(store: Store) -> str:
    """Return the id of a run with many turns, which waits for nobody and is not over."""
    script = [say("", call("look", at=at)) for at in range(TURNS)]
    agent = Agent(ScriptedModel(*script, "done"), tools=[look], store=store, limits=WIDE)
    run = await agent.run("go")
    return (await agent.fork(run.id)).id


@asynccontextmanager
async def neighbour() -> AsyncIterator[list[int]]:
    """Count how many turns of the event loop another task gets meanwhile."""
    ticks = [0]

    async def tick() -> None:
        while True:
            await checkpoint()
            ticks[0] += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        await checkpoint()
        yield ticks
        tasks.cancel_scope.cancel()


@pytest.fixture
def memory() -> MemoryStore:
    """A store that never waits: what gives way here is the opening itself."""
    return MemoryStore()


async def test_a_long_run_is_loaded_in_portions(memory, monkeypatch):
    """Between two portions of its events other tasks go on; a short run is loaded without that."""
    run_id = await many_turns(memory)
    agent = Agent(ScriptedModel(), tools=[look], store=memory)
    run = await agent.load(run_id)
    async with neighbour() as ticks:
        assert await agent.load(run_id) == run
        assert ticks == [0]
        monkeypatch.setattr(load, "FOLD_BATCH", 10)
        assert await agent.load(run_id) == run
        assert ticks[0] >= run.version // 10 - 1


async def test_a_long_history_is_counted_in_portions(memory, monkeypatch):
    """So it is where a run is taken up whose messages nobody has counted yet, and again when there is a vocabulary."""
    run_id = await many_turns(memory)
    portion = 8
    monkeypatch.setattr(compaction, "BATCH_MESSAGES", portion)
    monkeypatch.setattr(ledger, "BATCH_MESSAGES", portion)
    counted: list[int] = [0]
    count_message = ledger.count_message

    def counting(*args: Any) -> int:
        counted[-1] += 1
        return count_message(*args)

    async def look_in() -> None:
        while True:
            counted.append(0)
            await checkpoint()

    monkeypatch.setattr(ledger, "count_message", counting)
    model = ScriptedModel("done")
    model.window_tokens = 4_000  # so that the bytes of the history do not fit, and its tokens do
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look_in)
        await checkpoint()
        run = await Agent(model, tools=[look], store=memory, limits=WIDE).resume(run_id)
        tasks.cancel_scope.cancel()
    assert run.output == "done"
    assert sum(counted) >= 2 * len(run.messages) - 2
    assert max(counted) <= 2 * portion
