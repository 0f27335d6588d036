"""Pauses: a run rests at a boundary between two steps, durably, and goes on when it is resumed."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import anyio
import pytest

from agentfsm import Agent, ConflictError, MisuseError, Outcome, PendingKind, Run, State, StopReason, tool
from agentfsm.core.effects import Wait
from agentfsm.core.events import Paused, Resumed
from agentfsm.core.inbox import Pause, PostedItem
from agentfsm.ports import ProposedCall, Reply, Request
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import HANG_S, Wrapped, names, results_of, sound, sound_run, texts, virtually
from tests.support.failing_stores import CrashingStore, WorkerKilled

# How often the run of `worker` comes into each state by an arrow.
RESTS = {State.OBSERVE: 1, State.THINK: 2, State.ACT: 1, State.REFLECT: 1}


class World:
    """What was done."""

    def __init__(self, **options: object) -> None:
        """Make the tool."""
        self.did: list[str] = []

        async def pay(to: str) -> str:
            self.did.append(to)
            return f"paid {to}"

        self.tools = [tool(**options)(pay)]

    def agent(self, store, *script: object, **options: object) -> Agent:
        """An agent with these tools: by default it pays, and is done."""
        script = script or (say("", call("pay", to="Ann")), "done")
        return Agent(ScriptedModel(*script), tools=self.tools, store=store, **options)


def pause_of(run: Run):
    """Return the pause that the run waits for the end of."""
    [item] = [item for item in run.pending if item.kind is PendingKind.PAUSE]
    return item


# Before a state


@pytest.mark.parametrize("state", RESTS)
async def test_a_run_rests_before_a_state(store, state):
    """It stops each time it comes there, before anything of that state was done; `resume` goes on."""
    world = World()
    agent = world.agent(store, pause_before={state})
    run, rests = await agent.run("go"), 0
    while not run.is_over:
        assert (run.state, run.is_waiting) == (state, True)
        assert pause_of(run).description == f"paused: before {state.upper()}"
        assert world.did == (["Ann"] if rests or state in {State.REFLECT, State.OBSERVE} else [])
        sound_run(run)
        rests += 1
        run = await agent.resume(run.id)
    assert (run.output, rests, world.did) == ("done", RESTS[state], ["Ann"])
    await sound(agent, run)


async def test_before_acting_each_call_is_shown(store):
    """A run that rests before ACT shows the calls that it would make, and has made none."""
    agent = World().agent(store, pause_before={State.ACT})
    run = await agent.run("go")
    assert [(entry.call.name, entry.call.arguments) for entry in run.open] == [("pay", '{"to": "Ann"}')]
    assert run.effect == Wait(pending=(pause_of(run),))


async def test_a_pause_before_acting_holds_back_calls_that_could_start_early(store):
    """Also a read-only call does not run while the reply streams in, since it is not shown then."""
    world = World(read_only=True)
    agent = world.agent(store, pause_before={State.ACT})
    async with agent.stream("go") as stream:
        async for _ in stream:
            pass
    run = await agent.load((await store.runs())[0].id)
    assert (pause_of(run).run_id, world.did) == (run.id, [])
    assert (await agent.resume(run.id)).output == "done"
    assert world.did == ["Ann"]


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("state", RESTS)
async def test_no_crash_skips_a_pause(store, state, written):
    """The pause is in the very append that leads to the state: killed at any append, a run still rests there."""
    for at in range(1, 40):
        world, name = World(idempotent=True), f"run-{at}"
        mortal = CrashingStore(store, at, written=written)
        dying, run = world.agent(mortal, pause_before={state}), None
        with contextlib.suppress(WorkerKilled):
            run = await dying.run("go", id=name)
            while not run.is_over:
                run = await dying.resume(name)
        model = FunctionModel(lambda request: "done" if "paid" in texts(request) else _paying())
        fresh = Agent(model, tools=world.tools, store=store, pause_before={state})
        while not (run := await fresh.resume(name)).is_over:
            assert run.state is state
        events = await fresh.history(name)
        states = [(await fresh.load(name, at=version)).state for version in range(len(events) + 1)]
        came = [version for version, (a, b) in enumerate(pairwise(states)) if a is not b and b is state]
        assert all(isinstance(events[version + 1], Paused) for version in came)
        assert len(came) == RESTS[state]
        if not mortal.dead:
            break
    assert at > 5


def _paying() -> Reply:
    return Reply(calls=(ProposedCall(id="p", name="pay", arguments='{"to": "Ann"}'),))


async def test_it_may_rest_before_every_state(store):
    """Driven by nothing but `resume`, the run takes one arrow at a time."""
    world = World()
    agent = world.agent(store, pause_before=set(RESTS))
    run, visited = await agent.run("go"), []
    while not run.is_over:
        visited.append(run.state.upper())
        run = await agent.resume(run.id)
    assert " ".join(visited) == "THINK ACT REFLECT OBSERVE THINK"
    assert world.did == ["Ann"]


@pytest.mark.parametrize("states", [{State.DONE}, {State.ACT, State.ERROR}, {"done"}], ids=str)
def test_a_run_does_not_rest_where_it_ends(states):
    """A final state has nothing to go on with."""
    with pytest.raises(MisuseError, match="is over"):
        Agent(ScriptedModel(), pause_before=states)


@pytest.mark.parametrize("states", [{"lunch"}, "act", [5]], ids=str)
def test_what_is_no_state_is_misuse(states):
    """The error is ours, and says which states there are."""
    with pytest.raises(MisuseError, match=r"pause_before=.*observe.*reflect"):
        Agent(ScriptedModel(), pause_before=states)


def test_states_may_be_named():
    """A state is the text of its name, too."""
    assert Agent(ScriptedModel(), pause_before={"act"}).pause_before == {State.ACT}


# On request


async def test_a_resting_run_is_paused_at_once(store):
    """Nobody drives it, so that it is done right away; who asked for it and why is shown and kept."""
    world = World()
    agent = world.agent(store)
    run = await agent.step(agent.start("go"))
    await agent.pause(run.id, by="ann", message="wait for the boss")
    paused = await agent.load(run.id)
    assert pause_of(paused).description == "paused by ann: wait for the boss"
    assert names(await agent.history(run.id)) == ["Observed", "Paused"]
    assert await store.inbox(run.id) == ()
    done = await agent.resume(run.id)
    assert (done.output, done.paused) == ("done", None)
    await sound(agent, done)


async def test_who_drives_a_run_stops_at_the_next_boundary(store):
    """What is under way ends first, and is recorded; nothing further is begun."""
    entered, leave, world = anyio.Event(), anyio.Event(), World()

    async def answer(_request: Request) -> Reply:
        entered.set()
        await leave.wait()
        return _paying()

    agent = Agent(FunctionModel(answer), tools=world.tools, store=store)
    ended: list[Run] = []

    async def drive() -> None:
        ended.append(await agent.run("go", id="mine"))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive)
            await entered.wait()
            await agent.pause("mine")
            assert not ended
            leave.set()
    [run] = ended
    assert (run.state, pause_of(run).description, world.did) == (State.ACT, "paused", [])
    assert (await world.agent(store, "done").resume("mine")).output == "done"
    assert world.did == ["Ann"]


async def test_a_pause_from_another_process_is_seen_before_the_run_can_end(tmp_path):
    """Another store on the same file stands for it: an answer on its way becomes a draft, and the run rests."""
    here, there = SQLiteStore(tmp_path / "runs.db"), SQLiteStore(tmp_path / "runs.db")

    async def answer(_request: Request) -> str:
        await Agent(ScriptedModel(), store=there).pause("mine", by="ann")
        return "done"

    agent = Agent(FunctionModel(answer), store=here)
    run = await agent.run("go", id="mine")
    assert (run.state, pause_of(run).description) == (State.REFLECT, "paused by ann")
    assert (await agent.resume("mine")).output == "done"
    await here.aclose()
    await there.aclose()


async def test_a_run_that_waits_can_be_paused_too(store):
    """It then waits for both; what is decided meanwhile is kept, and acted on when it is resumed."""
    world = World(requires_approval=True)
    agent = world.agent(store)
    run = await agent.run("go")
    await agent.pause(run.id)
    run = await agent.load(run.id)
    assert [item.kind for item in run.pending] == [PendingKind.PAUSE, PendingKind.APPROVAL]
    await agent.approve(run.id, "t1.0")
    assert await agent.finish(run) == run
    assert world.did == []
    done = await agent.resume(run.id)
    assert (done.output, world.did) == ("done", ["Ann"])
    await sound(agent, done)


async def test_a_paused_run_is_given_back_as_it_is(store):
    """`step`, `steps` and `finish` leave it where it rests, and write nothing; also with an agent that has changed."""
    agent = World().agent(store, pause_before={State.ACT})
    run = await agent.run("go")
    for each in (agent, agent.with_(instructions="Be brief.")):
        assert await each.step(run) == run
        assert await each.finish(run) == run
        assert [later async for later in each.steps(run)] == []
    assert len(await agent.history(run.id)) == run.version


async def test_the_end_of_a_pause_says_what_has_changed_since(store):
    """A pause is when an agent is likely to be changed: the journal says so where the run goes on."""
    agent = World().agent(store, say("", call("pay", to="Ann")), "done", pause_before={State.ACT})
    run = await agent.run("go")
    await agent.with_(instructions="Be brief.").resume(run.id)
    [resumed] = [event for event in await agent.history(run.id) if isinstance(event, Resumed)]
    assert resumed.changes == ("other instructions",)


async def test_a_paused_run_can_be_cancelled(store):
    """It ends, its pause with it, and its history is whole."""
    world = World()
    agent = world.agent(store, pause_before={State.ACT})
    run = await agent.run("go")
    await agent.cancel(run.id, by="ann")
    done = await agent.load(run.id)
    assert (done.stop_reason, done.pending, done.paused) == (StopReason.CANCELLED, (), None)
    assert [r.outcome for r in results_of(done.messages)] == [Outcome.SKIPPED]
    await sound(agent, done)


async def test_input_to_a_paused_run_waits_for_its_end(store):
    """It wakes nobody, and is read in the OBSERVE after the pause."""
    agent = World().agent(store, "first", say("second", expect="one more thing"), pause_before={State.THINK})
    run = await agent.run("go")
    await agent.send(run.id, "one more thing")
    assert await agent.finish(run) == run
    run = await agent.resume(run.id)
    assert (run.state, run.messages[-1].text) == (State.THINK, "one more thing")
    assert (await agent.resume(run.id)).output == "second"


async def test_a_run_that_is_over_takes_no_pause(store):
    """There is no boundary left to rest at."""
    agent = World().agent(store)
    run = await agent.run("go")
    with pytest.raises(ConflictError, match="is over"):
        await agent.pause(run.id)


async def test_a_second_pause_is_no_second_wait(store):
    """Two people pause a run: one resume ends it, and the newest word is shown."""
    agent = World().agent(store)
    run = await agent.step(agent.start("go"))
    await agent.pause(run.id, by="ann")
    await agent.pause(run.id, by="bob")
    paused = await agent.load(run.id)
    assert [item.description for item in paused.pending] == ["paused by bob"]
    assert (await agent.resume(run.id)).output == "done"


def test_a_pause_costs_no_active_time():
    """Days of rest do not count towards the limit."""

    async def play(store, clock):
        agent = World().agent(store, clock=clock, pause_before={State.ACT})
        run = await agent.run("go")
        await anyio.sleep(7 * 86_400)
        done = await agent.resume(run.id)
        assert (done.output, done.duration_s) == ("done", 0.0)

    virtually(play)


class Sudden(Wrapped):
    """A store in which somebody pauses the run right before its inbox is read for the n-th time."""

    def __init__(self, inner: object, at: int) -> None:
        """Take the real store, and when."""
        self.inner, self.left = inner, at

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Pass on."""
        self.left -= 1
        if not self.left:
            await self.inner.post(run_id, "pause:now", Pause(by="ann"))
        return await self.inner.inbox(run_id)


async def test_a_pause_that_comes_between_two_looks_is_not_lost(store):
    """Whenever it comes in, the run rests: it is not struck with the input that is taken in at the same time."""
    for at in range(1, 20):
        sudden, name = Sudden(store, at), f"run-{at}"
        agent = Agent(ScriptedModel("first", "second", "third"), store=sudden)
        run = await agent.step(agent.start("go", id=name))
        await agent.send(name, "one more thing")
        await agent.send(name, "not yet", at=1e12)
        await agent.finish(await agent.load(name))
        if sudden.left > 0:
            break
        history = await agent.history(name)
        assert [event.by for event in history if isinstance(event, Paused)] == ["ann"]
        assert (await agent.resume(name)).is_over
    assert at > 3
    assert run.state is State.THINK
