"""Going on with a run from its journal: load, history, resume, drift, and the end of an agent."""

from __future__ import annotations

import logging

import anyio
import pytest

from agentfsm import Agent, LeaseHeldError, Limits, MisuseError, Outcome, RunNotFoundError, Settings, State, tool
from agentfsm.context import Cut
from agentfsm.core.events import Resumed
from agentfsm.ports import Model, Reply, Request
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import HANG_S, names, reach, sound


@tool(read_only=True)
async def look(at: str) -> str:
    """Look."""
    return f"saw {at}"


@tool(requires_approval=True)
async def pay() -> str:
    """Pay."""
    return "paid"


def looking(store) -> Agent:
    return Agent(ScriptedModel(say("", call("look", at="x")), "done"), tools=[look], store=store)


async def test_load_gives_every_version_of_a_run(store):
    """`load(at=n)` is the run after n events; 0 is the run as it was begun."""
    agent = looking(store)
    run = await agent.run("hello", metadata={"a": 1})
    events = await agent.history(run.id)
    seen = [await agent.load(run.id, at=version) for version in range(run.version + 1)]
    assert [each.version for each in seen] == list(range(len(events) + 1))
    assert seen[0].state is State.OBSERVE
    assert seen[0].metadata == {"a": 1}
    for before, event, after in zip(seen, events, seen[1:], strict=False):
        assert before.apply(event) == after
    assert seen[-1] == run == await agent.load(run.id)


@pytest.mark.parametrize("version", [-1, 99])
async def test_a_version_that_there_never_was_is_refused(store, version):
    """A version below 0 or beyond the newest is no version of the run."""
    agent = looking(store)
    run = await agent.run("hello")
    with pytest.raises(MisuseError, match="version"):
        await agent.load(run.id, at=version)


async def test_history_tells_what_happened_oldest_first(store):
    """Event number n made version n, each with its time and its share of the active seconds."""
    agent = looking(store)
    run = await agent.run("hello")
    events = await agent.history(run.id)
    assert names(events) == [
        "Observed",
        "ToolsChosen",
        "ToolFinished",
        "ToolsReturned",
        "Continued",
        "Observed",
        "AnswerGiven",
    ]
    times = [run.created_at, *(event.at for event in events)]
    assert times == sorted(times)
    assert run.duration_s == pytest.approx(sum(event.took_s for event in events))
    assert all(event.took_s >= 0 for event in events)


@pytest.mark.parametrize("name", ["load", "history", "resume"])
async def test_an_unknown_id_is_named(store, name):
    """The error names the run that there is not."""
    with pytest.raises(RunNotFoundError, match="no-such-run"):
        await getattr(looking(store), name)("no-such-run")


async def test_nobody_can_talk_to_a_run_that_there_is_not(store):
    """Neither input nor decisions nor a cancel are taken for an unknown run."""
    agent = looking(store)
    for say_it in (
        agent.send("no-such-run", "hello"),
        agent.cancel("no-such-run"),
        agent.approve("no-such-run", "t1.0"),
        agent.reject("no-such-run", "t1.0"),
        agent.settle("no-such-run", "t1.0", result="x"),
    ):
        with pytest.raises(RunNotFoundError, match="no-such-run"):
            await say_it


async def test_resume_finishes_a_run_from_any_state(store):
    """Whatever step the first worker got to, another agent on the same store ends the run the same way."""
    for steps in range(1, 7):
        agent = looking(store)
        run = agent.start("hello")
        for _ in range(steps):
            run = await agent.step(run)
        other = agent.with_(name="other")
        done = await other.resume(run.id)
        assert done.output == "done"
        assert [record.name for record in done.calls] == ["look"]
        await sound(other, done)


async def test_resume_of_a_finished_run_does_nothing(store):
    """It is returned as it is, and nothing is asked or written."""
    agent = looking(store)
    run = await agent.run("hello")
    other = Agent(ScriptedModel(), tools=[look], store=store)
    assert await other.resume(run.id) == run
    assert len(await other.history(run.id)) == run.version


async def test_resume_waits_for_the_run_that_somebody_drives(store):
    """It goes on when the owner has let go; of a run that ended meanwhile it returns the end."""
    entered, leave = anyio.Event(), anyio.Event()
    asked = 0

    async def answer(_request: Request) -> str:
        nonlocal asked
        asked += 1
        entered.set()
        await leave.wait()
        return "done"

    agent = Agent(FunctionModel(answer), store=store)
    ended = []

    async def resume() -> None:
        ended.append(await Agent(ScriptedModel(), store=store).resume("mine"))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: agent.run("hello", id="mine"))
            await entered.wait()
            with pytest.raises(LeaseHeldError, match="driven"):
                await agent.resume("mine", wait=False)
            tasks.start_soon(resume)
            await anyio.wait_all_tasks_blocked()
            assert not ended
            leave.set()
    assert (ended[0].output, asked) == ("done", 1)


async def test_waiting_for_a_lease_can_be_cancelled(store):
    """Giving up the wait leaves the run to its owner."""
    entered = anyio.Event()
    leave = anyio.Event()

    async def answer(_request: Request) -> str:
        entered.set()
        await leave.wait()
        return "done"

    agent = Agent(FunctionModel(answer), store=store)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: agent.run("hello", id="mine"))
            await entered.wait()
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(agent.resume, "mine")
                await anyio.wait_all_tasks_blocked()
                waiting.cancel_scope.cancel()
            leave.set()
    assert (await agent.load("mine")).output == "done"


# Drift


async def test_drift_is_reported_and_the_run_goes_on(store, caplog):
    """An agent that has changed since the start may go on, and log and journal say what is not as it was."""
    agent = looking(store)
    run = await agent.step(agent.start("hello"))
    other = agent.with_(instructions="Be brief.", tools=[look, pay])
    with caplog.at_level(logging.WARNING, logger="agentfsm"):
        done = await other.resume(run.id)
    assert done.output == "done"
    (line,) = [record.getMessage() for record in caplog.records if "agent_changed" in record.getMessage()]
    assert run.id in line
    assert "other instructions; tool pay is new" in line
    (event,) = [event for event in await other.history(run.id) if isinstance(event, Resumed)]
    assert event.changes == ("other instructions", "tool pay is new")
    assert done.fingerprint == event.fingerprint == other.fingerprint
    await sound(other, done)


async def test_a_change_is_recorded_once(store):
    """Whoever goes on twice with the same new agent changes nothing the second time; the old one is a change again."""
    agent = looking(store)
    other = agent.with_(instructions="Be brief.")
    run = agent.start("hello")
    for each in (agent, other, other, agent):
        run = await each.step(run)
    events = await agent.history(run.id)
    assert [event.changes for event in events if isinstance(event, Resumed)] == [("other instructions",)] * 2
    assert run.fingerprint == agent.fingerprint


async def test_an_agent_that_is_as_it_was_leaves_no_trace(store):
    """A resume of a run by the agent that began it adds no event of its own."""
    agent = looking(store)
    run = await agent.resume((await agent.step(agent.start("hello"))).id)
    assert "Resumed" not in names(await agent.history(run.id))


def test_a_fingerprint_speaks_of_behaviour_only():
    """Instructions, model, tools, limits, settings and policies change it; the name and the store do not."""

    @tool(read_only=True, name="look")
    async def other(at: str, closely: bool = False) -> str:
        """Look."""
        return at

    base = Agent(ScriptedModel(), tools=[look], instructions="Be kind.")
    for same in ({"name": "x"}, {"version": "2"}, {"store": MemoryStore()}):
        assert base.with_(**same).fingerprint == base.fingerprint
    changes = ({"instructions": "Be brief."}, {"tools": []}, {"tools": [other]}, {"model": FunctionModel(str)})
    policies = ({"settings": Settings(seed=1)}, {"limits": Limits(turns=3)}, {"context": Cut(messages=5)})
    for change in (*changes, *policies):
        assert base.with_(**change).fingerprint != base.fingerprint


async def test_an_open_call_whose_tool_is_gone_is_refused_and_nothing_changes(store):
    """The error names run, call and tool, and an agent that has the tool goes on."""
    agent = Agent(ScriptedModel(say("", call("pay")), "done"), tools=[pay], store=store)
    run = await agent.run("pay")
    await agent.approve(run.id, "t1.0")
    without = Agent(ScriptedModel(), tools=[look], store=store)
    with pytest.raises(MisuseError, match=r"t1\.0.*'pay'"):
        await without.resume(run.id)
    with pytest.raises(MisuseError, match="'pay'"):
        await without.finish(run)
    assert await agent.load(run.id) == run
    assert (await agent.resume(run.id)).output == "done"


async def test_a_run_whose_tool_is_gone_can_still_be_cancelled(store):
    """The way out that the error names is open."""
    agent = Agent(ScriptedModel(say("", call("pay"))), tools=[pay], store=store)
    run = await agent.run("pay")
    without = Agent(ScriptedModel(), tools=[look], store=store)
    await without.cancel(run.id)
    done = await without.load(run.id)
    assert (done.state, [r.outcome for r in done.calls]) == (State.ERROR, [Outcome.SKIPPED])
    await sound(without, done)


async def test_a_tool_that_there_never_was_stops_no_resume(store):
    """A call of an invented tool is a mistake of the model; a new version of the agent goes on all the same."""
    agent = Agent(ScriptedModel(say("", call("pay"), call("invented")), "done"), tools=[pay], store=store)
    run = await agent.run("pay")
    assert run.is_waiting
    await agent.approve(run.id, "t1.0")
    done = await agent.with_(instructions="A new version.").resume(run.id)
    assert done.output == "done"
    assert [(r.name, r.outcome) for r in done.calls] == [("pay", Outcome.DONE), ("invented", Outcome.FAILED)]


async def test_a_tool_that_is_gone_between_turns_is_unknown_to_the_model(store):
    """Without an open call nothing is refused: the model is told that there is no such tool."""
    agent = Agent(ScriptedModel(say("", call("look", at="x"))), tools=[look], store=store)
    run = await reach(agent, agent.start("hello"), State.REFLECT)
    model = ScriptedModel(say("", call("look", at="y")), say("done", expect="there is no tool 'look'"))
    done = await Agent(model, tools=[pay], store=store).resume(run.id)
    assert done.output == "done"


# The end of an agent


class Closing(Model):
    """A model that counts how often it was closed."""

    name = "closing"
    closed = 0

    async def reply(self, request: Request, emit: object = None) -> Reply:
        """Answer."""
        return Reply(text="done")

    async def aclose(self) -> None:
        """Count."""
        self.closed += 1


class Counting(MemoryStore):
    """A store that counts how often it was closed."""

    closed = 0

    async def aclose(self) -> None:
        """Count."""
        self.closed += 1


async def test_leaving_the_block_closes_model_and_store():
    """`async with agent` closes what is open, once, and `aclose` does the same."""
    model, kept = Closing(), Counting()
    async with Agent(model, store=kept) as agent:
        assert (await agent.run("hello")).output == "done"
        assert (model.closed, kept.closed) == (0, 0)
    assert (model.closed, kept.closed) == (1, 1)
    await agent.aclose()
    assert (model.closed, kept.closed) == (2, 2)


async def test_the_store_is_closed_even_when_the_model_cannot_be():
    """One that fails to close does not keep the other open."""

    class Stuck(Closing):
        async def aclose(self) -> None:
            raise OSError("the connection is gone")

    kept = Counting()
    with pytest.raises(OSError, match="gone"):
        await Agent(Stuck(), store=kept).aclose()
    assert kept.closed == 1
