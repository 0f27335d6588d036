"""The audit of a store: of a run with the agents below it, and of all runs, however many there are."""

from __future__ import annotations

import attrs
import pytest

from agentfsm import Agent, AuditRecord, Filter, Outcome, RunNotFoundError, Runs, ToolResult, tool
from agentfsm.core.calls import Phase
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports import ProposedCall, Reply
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say


@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


@tool(read_only=True)
async def look(where: str) -> str:
    """Look somewhere."""
    return f"{where} looks fine"


def looker(store, **changes):
    """Return an agent that looks once in each run."""

    def think(request):
        if isinstance(request.messages[-1], ToolResult):
            return "Fine."
        return Reply(calls=(ProposedCall(id="c", name="look", arguments='{"where": "there"}'),))

    return Agent(FunctionModel(think), tools=[look], store=store, **changes)


async def all_of(records):
    return [record async for record in records]


def briefly(records):
    return [(record.run_id, record.call_id, record.tool) for record in records]


async def test_a_call_that_a_person_let_run_and_changed():
    """Who said yes, what the model wanted, what ran, when and how long."""
    agent = Agent(ScriptedModel(say("", call("pay", cents=5)), say("Paid.")), tools=[pay], name="clerk")
    run = await agent.run("Pay.", user="bob", id="r1")
    [waiting] = await agent.audit("r1")
    assert (waiting.status, waiting.is_open) == (Phase.AWAITING_APPROVAL, True)
    await agent.approve("r1", run.pending[0].call_id, by="ann", arguments={"cents": 4})
    await agent.resume("r1")
    [record] = await agent.audit("r1")
    assert isinstance(record, AuditRecord)
    assert (record.agent, record.user, record.approved_by) == ("clerk", "bob", "ann")
    assert (record.arguments, record.proposed) == ({"cents": 4}, {"cents": 5})
    assert (record.status, record.result, record.attempts) == (Outcome.DONE, "paid 4", 1)
    assert record.asked_at <= record.started_at <= record.ended_at
    assert 0 <= record.duration_s <= record.ended_at - record.asked_at + 1


async def test_the_calls_of_an_agent_below_stand_behind_its_own():
    """Depth first, each with its run and its agent; a run of the same agent elsewhere is not among them."""
    store = MemoryStore()
    inner = looker(store, name="inner").as_tool(name="ask_inner")
    script = say("", call("ask_inner", query="?"), call("look", where="here")), say("", call("ask_inner", query="?"))
    outer = Agent(ScriptedModel(*script, say("Done.")), tools=[inner, look], store=store, name="outer")
    await looker(store, name="inner").run("Look.")
    await outer.run("Do.", id="r1")
    records = await outer.audit("r1")
    assert briefly(records) == [
        ("r1", "t1.0", "ask_inner"),
        ("r1.t1.0", "t1.0", "look"),
        ("r1", "t1.1", "look"),
        ("r1", "t2.0", "ask_inner"),
        ("r1.t2.0", "t1.0", "look"),
    ]
    assert [record.agent for record in records] == ["outer", "inner", "outer", "outer", "inner"]
    assert records[1].parent == "r1"


async def test_a_run_that_is_not_there():
    """It is said, as by `load`."""
    with pytest.raises(RunNotFoundError):
        await Agent(ScriptedModel()).audit("x")


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 100])
async def test_all_runs_are_listed_page_by_page(page_size):
    """Newest first and each once, although many were created at one time."""
    times = [100.0, 100.0, 100.0, 100.0, 200.0, 300.0, 300.0]
    store = await create_runs(times)
    listed = await all_of(RunIterator(store, Filter(), page_size))
    assert sorted(summary.id for summary in listed) == [f"r{number}" for number in range(7)]
    assert [summary.created_at for summary in listed] == sorted(times, reverse=True)
    assert len(await all_of(RunIterator(store, Filter(user="ann"), page_size))) == 3
    assert [summary.id for summary in listed] == [summary.id async for summary in Runs(store).iterate()]


async def create_runs(times):
    """Return a store with a finished run for each time."""
    store = MemoryStore()
    agent = looker(store)
    for number, time in enumerate(times):
        run = agent.start("Look.", id=f"r{number}", user="ann" if number % 2 else "bob")
        await agent.finish(attrs.evolve(run, header=attrs.evolve(run.header, created_at=time)))
    return store


async def test_the_calls_of_all_runs_are_audited():
    """Newest run first; a filter and a time leave some out."""
    moments = [100.0, 100.0, 100.0, 100.0, 200.0, 300.0, 300.0]
    store = await create_runs(moments)
    agent = looker(store)
    told = briefly(await all_of(agent.audits()))
    assert sorted(told) == [(f"r{number}", "t1.0", "look") for number in range(7)]
    assert [moments[int(run_id[1:])] for run_id, *_ in told] == sorted(moments, reverse=True)
    assert len(await all_of(agent.audits(Filter(user="ann")))) == 3
    assert len(await all_of(agent.audits(Filter(before=300.0)))) == 5
    newest = max(run.updated_at for run in await store.runs())
    assert await all_of(agent.audits(since=newest + 1)) == []
    assert len(await all_of(agent.audits(since=100.0))) == 7
    assert await all_of(agent.with_(store=MemoryStore()).audits()) == []


async def test_a_fork_is_told_with_its_own_calls_only():
    """What it has inherited was done once, and is told with the run that did it; asked for itself, it tells all."""
    agent = looker(MemoryStore())
    await agent.run("Look.", id="r1")
    await agent.finish(await agent.fork("r1", id="r2"))
    assert briefly(await all_of(agent.audits())) == [("r1", "t1.0", "look")]
    [record] = await agent.audit("r2")
    assert (record.run_id, record.inherited) == ("r2", True)


async def test_a_run_that_is_removed_meanwhile():
    """It is left out, and the others are told."""
    agent = looker(MemoryStore())
    for number in range(3):
        await agent.run("Look.", id=f"r{number}")
    records = agent.audits()
    first = (await anext(records)).run_id
    await agent.store.delete("r1")
    assert {first, *[record.run_id async for record in records]} == {"r0", "r2"}
