"""The status of a run: one function, from its lease and its journal."""

import logging

import anyio
import attrs
import pytest

from agentfsm import Agent, Limits, Runs, State, TextPart, tool
from agentfsm.core.events import Observed
from agentfsm.core.header import Header
from agentfsm.journal import follow
from agentfsm.journal.run_status import RunStatus, explain_standstill, find_past_status, find_status, list_statuses
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, say


@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


def make_agent(**options):
    return Agent(ScriptedModel(say("", call("pay", cents=5)), "Done."), tools=[pay], name="payer", **options)


async def see(agent, run_id):
    """Return the status of a run alone and in a list, which agree."""
    rows = await agent.runs.list()
    alone = await agent.runs.status(run_id)
    assert dict(zip([row.id for row in rows], await list_statuses(agent.store, rows), strict=True))[run_id] == alone
    return alone


async def test_from_the_queue_to_the_end():
    """Queued, waiting, queued again after the decision, paused, done: each status has its fact in the store."""
    async with make_agent(store=MemoryStore()) as agent:
        await agent.submit("Pay.", id="r")
        assert await see(agent, "r") is RunStatus.QUEUED
        await agent.resume("r")
        assert await see(agent, "r") is RunStatus.WAITING
        await agent.approve("r", "t1.0", by="ann")
        assert await see(agent, "r") is RunStatus.QUEUED
        await agent.pause("r", by="ann")
        assert await see(agent, "r") is RunStatus.PAUSED
        assert (await agent.resume("r")).output == "Done."
        assert await see(agent, "r") is RunStatus.DONE
        assert find_past_status(await agent.load("r", at=0)) is RunStatus.RUNNING


async def test_a_run_that_failed():
    """A run that ended without an answer has failed, whichever the reason."""
    async with make_agent(store=MemoryStore(), limits=Limits(turns=1)) as agent:
        run = await agent.run("Pay.")
        await agent.cancel(run.id)
        assert await see(agent, run.id) is RunStatus.FAILED


async def test_a_run_without_a_process(tmp_path):
    """It is running while a lease is held, and idle after: with the process that died, and how it continues."""
    store = SQLiteStore(tmp_path / "runs.db")
    runs = Runs(store)
    header = Header(id="r", prompt=(TextPart(text="go"),), created_at=1.0, agent="payer")
    _, lease = await store.create(header, events=[Observed(at=2.0)])
    assert await runs.status("r") is RunStatus.RUNNING
    await store.release(lease).wait()
    assert await runs.status("r") is RunStatus.IDLE
    [row] = await runs.list()
    assert row.state is State.THINK
    assert explain_standstill(row, RunStatus.IDLE) == (
        "no process executes it: a worker of agent payer continues it, or `agentfsm resume r`"
    )
    dead = attrs.evolve(row, worker="w", ready_at=None)
    assert find_status(dead, 3.0, is_paused=False) is RunStatus.IDLE
    assert find_status(attrs.evolve(dead, version=0), 3.0, is_paused=False) is RunStatus.IDLE
    assert find_status(attrs.evolve(row, version=0), 3.0, is_paused=False) is RunStatus.QUEUED
    assert explain_standstill(dead, RunStatus.IDLE).startswith("the process that executed it has died: a worker of ")
    assert "run p has called it" in explain_standstill(attrs.evolve(dead, parent="p"), RunStatus.IDLE)
    assert explain_standstill(row, RunStatus.WAITING) == ""
    await store.aclose()


async def test_who_waits_for_a_run_that_stands_still_is_told(monkeypatch, caplog):
    """`wait` logs once how the run continues, and goes on waiting."""
    monkeypatch.setattr(follow, "STANDSTILL_S", 0.0)
    async with make_agent(store=MemoryStore()) as agent:
        await agent.submit("Pay.", id="r")
        with caplog.at_level(logging.WARNING, "agentfsm"):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(agent.runs.wait, "r")
                while not caplog.messages:
                    await anyio.lowlevel.checkpoint()
                await agent.resume("r")
    [told] = caplog.messages
    assert told.startswith(
        "run r is waited for and stands still: no process has taken it yet: a worker of agent payer "
    )


@pytest.mark.parametrize("row_waits", [False, True])
async def test_a_decision_or_a_deadline_makes_a_run_ready(row_waits):
    """A waiting run that a worker may claim is queued: no worker has applied the decision or the deadline yet."""
    async with make_agent(store=MemoryStore()) as agent:
        await agent.run("Pay.")
        [row] = await agent.runs.list()
    due = attrs.evolve(row, waiting=row_waits, ready_at=5.0)
    assert find_status(due, 5.0, is_paused=False) is (RunStatus.QUEUED if row_waits else RunStatus.IDLE)
    assert find_status(due, 4.0, is_paused=False) is (RunStatus.WAITING if row_waits else RunStatus.IDLE)
