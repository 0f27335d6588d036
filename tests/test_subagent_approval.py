"""A person decides inside an agent that works for another: the caller waits with it, and goes on when it does."""

from __future__ import annotations

import anyio
import pytest

from agentfsm import (
    Agent,
    ConflictError,
    Limits,
    MisuseError,
    Outcome,
    PendingKind,
    Run,
    RunContext,
    State,
    StopReason,
    tool,
)
from agentfsm.core.calls import Phase
from agentfsm.core.inbox import Cancel
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import HANG_S, keys_of, no_leases, results_of, sound, sound_run, virtually

CHILD, LEAF = "mine.t1.0", "mine.t1.0.t1.0"


@pytest.fixture(params=["memory", "sqlite"])
async def store(request, tmp_path):
    """A store, closed afterwards; no run in it may be leased then."""
    made = MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "runs.db")
    yield made
    await no_leases(made)
    await made.aclose()


class World:
    """What was paid."""

    def __init__(self) -> None:
        self.paid: list[tuple[str, int]] = []

    def pay(self, **options: object):
        """A tool that a person has to allow."""

        @tool(name="pay", requires_approval=True, **options)
        async def pay(ctx: RunContext[None], cents: int) -> str:
            """Pay."""
            self.paid.append((ctx.idempotency_key, cents))
            return f"paid {cents}"

        return pay


def scripts(*names: str) -> ScriptedModel:
    """A caller's model, that asks agents in one reply and then is done."""
    return ScriptedModel(say("", *[call(name, query="go") for name in names]), "done")


def payer(world: World, *cents: int, name: str = "payer", before: int = 0, **options: object) -> Agent:
    """An agent that pays, all in one reply; `before`: its model was asked so often by an earlier process."""
    script = [say("", *[call("pay", cents=each) for each in cents]), f"{name} is through"]
    return Agent(ScriptedModel(*script[before:]), tools=[world.pay(**options)], name=name)


def family(store, world: World, *cents: int, **options: object) -> Agent:
    """A caller with one agent that pays."""
    return Agent(scripts("payer"), tools=[payer(world, *cents, **options).as_tool()], store=store)


# A child whose tools change nothing has no ToolStarted in its caller's journal.
READING = {"writing": {}, "reading": {"read_only": True}}


@pytest.mark.parametrize("kind", READING)
async def test_the_caller_waits_with_what_the_child_waits_for(store, kind):
    """Its pending names the child's run, tool and exact arguments; approved there, both go on."""
    world = World()
    agent = family(store, world, 5, **READING[kind])
    run = await agent.run("go", id="mine")
    sound_run(run)
    assert run.is_waiting
    (item,) = run.pending
    assert (item.kind, item.run_id, item.call_id, item.tool) == (PendingKind.APPROVAL, CHILD, "t1.0", "pay")
    assert item.arguments == {"cents": 5}
    assert (await agent.load(CHILD)).pending == run.pending
    assert world.paid == []
    await agent.approve(item.run_id, item.call_id, by="ann")
    run = await agent.resume("mine")
    assert (run.output, run.usage.tokens) == ("done", 60)
    assert world.paid == [(keys_of(await agent.load(CHILD))["t1.0"], 5)]
    assert results_of(run.messages)[0].content == "payer is through"
    await sound(agent, run)
    await sound(agent, await agent.load(CHILD))


@pytest.mark.parametrize("kind", READING)
async def test_nothing_is_written_while_nobody_has_decided(store, kind):
    """Polling resume, step and steps return the run as it is, as often as one likes."""
    agent = family(store, World(), 5, **READING[kind])
    run = await agent.run("go", id="mine")
    for _ in range(3):
        assert await agent.resume("mine") == run
        assert await agent.step(run) is run
        assert [each async for each in agent.steps(run)] == []
        assert await agent.finish(run) is run
    assert (await agent.load("mine")).version == run.version


async def test_rejected_in_the_child(store):
    """The child's model reads why; the caller gets what the child makes of it."""
    world = World()
    agent = family(store, world, 5)
    await agent.run("go", id="mine")
    await agent.reject(CHILD, "t1.0", message="too dear", by="ann")
    run = await agent.resume("mine")
    assert run.output == "done"
    assert world.paid == []
    (result,) = results_of((await agent.load(CHILD)).messages)
    assert result.outcome is Outcome.REJECTED
    assert "too dear" in result.content


async def test_edited_arguments_are_what_runs(store):
    """The child's history says the same."""
    world = World()
    agent = family(store, world, 5)
    await agent.run("go", id="mine")
    await agent.approve(CHILD, "t1.0", arguments={"cents": 4})
    assert (await agent.resume("mine")).output == "done"
    assert [cents for _, cents in world.paid] == [4]
    assert (await agent.load(CHILD)).calls[0].arguments == {"cents": 4}


async def test_edited_arguments_are_not_held_against_the_callers_tool_of_the_same_name():
    """Two agents may each have a tool `pay`, with different arguments."""

    @tool(name="pay")
    async def other(person: str) -> str:
        """Pay somebody."""
        return person

    world = World()
    agent = Agent(scripts("payer"), tools=[payer(world, 5).as_tool(), other])
    await agent.run("go", id="mine")
    await agent.approve(CHILD, "t1.0", arguments={"cents": 4})
    await agent.resume("mine")
    assert [cents for _, cents in world.paid] == [4]


def test_nobody_answers_in_time():
    """The child's call is rejected when its time is up, and both go on."""

    async def story(store, clock) -> tuple[Run, World]:
        world = World()
        agent = family(store, world, 5, approval_expires_s=3_600.0).with_(clock=clock)
        run = await agent.run("go", id="mine")
        assert run.pending[0].expires_at == pytest.approx(clock.now() + 3_600)
        await anyio.sleep(3_599)
        assert (await agent.resume("mine")).version == run.version
        await anyio.sleep(1)
        with pytest.raises(ConflictError, match="time is up"):
            await agent.approve(CHILD, "t1.0")
        return await agent.resume("mine"), world

    run, world = virtually(story)
    assert run.output == "done"
    assert world.paid == []


async def test_a_decision_is_taken_once(store):
    """A second one is told who was first, also when the caller has gone on."""
    agent = family(store, World(), 5)
    await agent.run("go", id="mine")
    await agent.approve(CHILD, "t1.0", by="ann")
    await agent.approve(CHILD, "t1.0", by="ann")
    with pytest.raises(ConflictError, match="approved already by 'ann'"):
        await agent.approve(CHILD, "t1.0", by="bob")
    with pytest.raises(ConflictError, match="ann"):
        await agent.reject(CHILD, "t1.0", by="bob")
    await agent.resume("mine")
    with pytest.raises(ConflictError, match="decided already"):
        await agent.reject(CHILD, "t1.0")


async def test_a_decision_names_the_run_that_waits(store):
    """The caller's own id is not it, and the error says what is waited for."""
    agent = family(store, World(), 5)
    await agent.run("go", id="mine")
    with pytest.raises(MisuseError, match=r"approval of t1\.0"):
        await agent.approve("mine", "t1.9")


async def test_the_first_of_two_decides(store):
    """The later call was approved first: it waits behind the other, nothing is written, and nobody spins."""
    world = World()
    agent = family(store, world, 1, 2)
    run = await agent.run("go", id="mine")
    assert [item.call_id for item in run.pending] == ["t1.0", "t1.1"]
    await agent.approve(CHILD, "t1.1")
    for _ in range(2):
        with anyio.fail_after(HANG_S):
            assert await checked(agent) == run
    await agent.approve(CHILD, "t1.0")
    run = await agent.resume("mine")
    assert run.output == "done"
    assert [cents for _, cents in world.paid] == [1, 2]


async def checked(agent: Agent) -> Run:
    """Resume, and fail where that writes without an end."""
    store, before = agent.store, len(await agent.history("mine"))

    class Counting:
        def __getattr__(self, name):
            return getattr(store, name)

        def append(self, lease, run, events, **options):
            assert run.version < before + 20, "the run writes without an end"
            return store.append(lease, run, events, **options)

    return await agent.with_(store=Counting()).resume("mine")


async def test_one_of_two_decided_moves_the_child_on(store):
    """The first of two calls is allowed and runs; the caller then waits for the second alone."""
    world = World()
    agent = family(store, world, 1, 2)
    await agent.run("go", id="mine")
    await agent.approve(CHILD, "t1.0")
    run = await checked(agent)
    assert [item.call_id for item in run.pending] == ["t1.1"]
    assert [cents for _, cents in world.paid] == [1]
    await agent.reject(CHILD, "t1.1")
    assert (await agent.resume("mine")).output == "done"


async def test_input_for_a_waiting_child_decides_nothing(store):
    """It is read when the child goes on; until then nothing is written, and nobody spins."""
    agent = family(store, World(), 1)
    run = await agent.run("go", id="mine")
    await agent.send(CHILD, "please hurry")
    with anyio.fail_after(HANG_S):
        assert await checked(agent) == run
    await agent.approve(CHILD, "t1.0")
    assert (await agent.resume("mine")).output == "done"
    assert "please hurry" in [message.text for message in (await agent.load(CHILD)).messages]


async def test_a_child_that_somebody_drove_on_by_itself(store):
    """Whoever resumes the child's own run does no harm: the caller finds it done."""
    world = World()
    child = payer(world, 5)
    agent = Agent(scripts("payer"), tools=[child.as_tool()], store=store)
    await agent.run("go", id="mine")
    await agent.approve(CHILD, "t1.0")
    assert (await child.with_(store=store).resume(CHILD)).output == "payer is through"
    run = await agent.resume("mine")
    assert (run.state, run.usage.tokens) == (State.DONE, 60)
    assert len(world.paid) == 1


async def test_a_waiting_child_that_somebody_cancelled(store):
    """The caller is told, and goes on."""
    child = payer(World(), 5)
    agent = Agent(scripts("payer"), tools=[child.as_tool()], store=store)
    await agent.run("go", id="mine")
    await child.with_(store=store).cancel(CHILD, by="ann")
    run = await agent.resume("mine")
    assert run.output == "done"
    assert results_of(run.messages)[0].outcome is Outcome.CANCELLED
    assert "cancelled by ann" in results_of(run.messages)[0].content


async def test_a_grandchild_waits_for_all_above_it(store):
    """What it waits for is shown at the top, with its own run's id."""
    world = World()
    child = Agent(scripts("payer"), tools=[payer(world, 5).as_tool()], name="child")
    agent = Agent(scripts("child"), tools=[child.as_tool()], store=store)
    run = await agent.run("go", id="mine")
    assert [(item.run_id, item.call_id) for item in run.pending] == [(LEAF, "t1.0")]
    assert (await agent.load(CHILD)).pending == (await agent.load(LEAF)).pending == run.pending
    assert await agent.resume("mine") == run
    await agent.approve(LEAF, "t1.0")
    run = await agent.resume("mine")
    assert (run.output, run.usage.tokens) == ("done", 90)
    assert len(world.paid) == 1
    for name in ("mine", CHILD, LEAF):
        await sound(agent, await agent.load(name))


async def test_two_children_wait_at_once(store):
    """Both are shown, in call order; each decision moves its own child on, in either order."""
    world = World()
    kids = [payer(world, n, name=f"kid{n}", concurrency_safe=True) for n in (1, 2)]
    agent = Agent(scripts("kid1", "kid2"), tools=[kid.as_tool() for kid in kids], store=store)
    run = await agent.run("go", id="mine")
    assert [item.run_id for item in run.pending] == ["mine.t1.0", "mine.t1.1"]
    await agent.approve("mine.t1.1", "t1.0")
    run = await checked(agent)
    assert run.is_waiting
    assert world.paid == [], "a call waits behind the one before it"
    await agent.approve("mine.t1.0", "t1.0")
    run = await agent.resume("mine")
    assert run.output == "done"
    assert sorted(cents for _, cents in world.paid) == [1, 2]
    assert [result.content for result in results_of(run.messages)] == ["kid1 is through", "kid2 is through"]
    await sound(agent, run)


async def test_one_waits_and_the_others_are_done(store):
    """Results that are there stay, are counted, and are not made again."""
    world, looked = World(), []

    @tool(read_only=True)
    async def look() -> str:
        """Look."""
        looked.append(1)
        return "seen"

    quick = Agent(ScriptedModel("quick is through"), name="quick")
    kids = [quick.as_tool(), payer(world, 1, read_only=True).as_tool(), look]
    script = ScriptedModel(say("", call("quick", query="go"), call("payer", query="go"), call("look")), "done")
    agent = Agent(script, tools=kids, store=store)
    run = await agent.run("go", id="mine")
    assert [entry.phase for entry in run.open] == [Phase.FINISHED, Phase.PAUSED, Phase.FINISHED]
    assert run.usage.tokens == 30
    cost = agent.cost(run)
    assert [each.agent for each in cost.children] == ["quick"]
    await agent.approve("mine.t1.1", "t1.0")
    run = await agent.resume("mine")
    assert (run.output, run.usage.tokens, looked) == ("done", 75, [1])


@pytest.mark.parametrize("kind", READING)
async def test_the_call_of_an_agent_may_need_approval_itself(store, kind):
    """First the call, then what the agent does: two questions, one after the other."""
    world = World()
    made = payer(world, 5, **READING[kind]).as_tool(requires_approval=True)
    agent = Agent(scripts("payer"), tools=[made], store=store)
    run = await agent.run("go", id="mine")
    assert [(item.run_id, item.tool) for item in run.pending] == [("mine", "payer")]
    await agent.approve("mine", "t1.0", arguments={"query": "go slowly"})
    run = await agent.resume("mine")
    assert [(item.run_id, item.tool) for item in run.pending] == [(CHILD, "pay")]
    assert "go slowly" in (await agent.load(CHILD)).messages[0].text
    await agent.approve(CHILD, "t1.0")
    assert (await agent.resume("mine")).output == "done"


async def test_the_decision_arrives_while_the_caller_is_driven():
    """A sibling is still at work: when that ends, the child goes on in the same driving call."""
    world, asked, go_on = World(), anyio.Event(), anyio.Event()

    @tool(read_only=True)
    async def slow() -> str:
        """Take a while."""
        asked.set()
        await go_on.wait()
        return "at last"

    script = ScriptedModel(say("", call("payer", query="go"), call("slow")), "done")
    agent = Agent(script, tools=[payer(world, 5, read_only=True).as_tool(), slow])
    runs: list[Run] = []

    async def drive() -> None:
        runs.append(await agent.run("go", id="mine"))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive)
            await asked.wait()
            await anyio.wait_all_tasks_blocked()
            await agent.approve(CHILD, "t1.0")
            go_on.set()
    assert [run.output for run in runs] == ["done"]
    assert len(world.paid) == 1


@pytest.mark.parametrize("kind", READING)
async def test_a_worker_that_dies_after_the_decision_was_taken(kind, store):
    """The child has its yes in the journal, and nobody is asked again: the next worker goes on with it."""
    inside, lives = anyio.Event(), []

    @tool(requires_approval=True, idempotent=True, **READING[kind])
    async def look(ctx: RunContext[None]) -> str:
        """Look."""
        lives.append(ctx.idempotency_key)
        if len(lives) == 1:
            inside.set()
            await anyio.sleep_forever()
        return "seen"

    child = Agent(ScriptedModel(say("", call("look")), "through"), tools=[look], name="child")
    agent = Agent(scripts("child"), tools=[child.as_tool()], store=store)
    await agent.run("go", id="mine")
    await agent.approve(CHILD, "t1.0")
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.resume, "mine")
            await inside.wait()
            tasks.cancel_scope.cancel()
    run = await agent.resume("mine")
    assert run.state is State.DONE
    assert lives == [keys_of(await agent.load(CHILD))["t1.0"]] * 2


@pytest.mark.parametrize("deep", [False, True], ids=["child", "grandchild"])
async def test_cancelling_a_waiting_caller_ends_what_waits_below_it(store, deep):
    """No run below goes on waiting for a decision that would lead nowhere."""
    world = World()
    child = payer(world, 5)
    if deep:
        child = Agent(scripts("payer"), tools=[child.as_tool()], name="child")
    agent = Agent(scripts(child.name), tools=[child.as_tool()], store=store)
    await agent.run("go", id="mine")
    await agent.cancel("mine")
    assert (await agent.load("mine")).stop_reason is StopReason.CANCELLED
    for name in [CHILD, LEAF][: 1 + deep]:
        below = await agent.load(name)
        assert below.is_over or [Cancel] == [type(row.item) for row in await store.inbox(name)]
        await child.with_(store=store).resume(name)
        assert (await agent.load(name)).stop_reason is StopReason.CANCELLED
    with pytest.raises((ConflictError, MisuseError)):
        await agent.approve(LEAF if deep else CHILD, "t1.0")
    assert world.paid == []
    await sound(agent, await agent.load("mine"))


def test_waiting_takes_no_active_time():
    """A child that waited for a day still has its seconds."""

    async def story(store, clock) -> Run:
        agent = family(store, World(), 5).with_(clock=clock, limits=Limits(seconds=10.0))
        await agent.run("go", id="mine")
        await anyio.sleep(86_400)
        await agent.approve(CHILD, "t1.0")
        return await agent.resume("mine")

    run = virtually(story)
    assert run.output == "done"
    assert run.duration_s < 1.0


async def test_another_process_takes_the_decision_and_goes_on(tmp_path):
    """Two stores on one file, two agents of the same make: asked in one, decided in a second, resumed in a third."""
    world = World()
    path = tmp_path / "runs.db"

    async def process(before: int, work) -> Run | None:
        asking = [say("", call("payer", query="go")), "done"]
        tools = [payer(world, 5, before=before).as_tool()]
        async with Agent(ScriptedModel(*asking[before:]), tools=tools, store=SQLiteStore(path)) as agent:
            return await work(agent)

    run = await process(0, lambda agent: agent.run("go", id="mine"))
    assert run is not None
    assert run.is_waiting
    await process(0, lambda agent: agent.approve(CHILD, "t1.0", by="ann"))
    assert world.paid == []
    run = await process(1, lambda agent: agent.resume("mine"))
    assert run is not None
    assert (run.output, run.usage.tokens) == ("done", 60)
    assert run.messages[-2].child.usage.tokens == 30
    below = await process(1, lambda agent: agent.load(CHILD))
    assert world.paid == [(keys_of(below)["t1.0"], 5)]


@pytest.mark.parametrize("how", ["result", "rerun"])
async def test_an_unknown_outcome_in_a_child_is_settled_there(store, how):
    """A payment was in flight when the worker died: the caller shows the question, and it is answered once."""
    inside, lives = anyio.Event(), []

    @tool
    async def wire(ctx: RunContext[None]) -> str:
        """Pay."""
        lives.append(ctx.idempotency_key)
        if len(lives) == 1:
            inside.set()
            await anyio.sleep_forever()
        return "wired"

    child = Agent(ScriptedModel(say("", call("wire")), "through"), tools=[wire], name="child")
    agent = Agent(scripts("child"), tools=[child.as_tool()], store=store)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.finish, agent.start("go", id="mine"))
            await inside.wait()
            tasks.cancel_scope.cancel()
    run = await agent.resume("mine")
    (item,) = run.pending
    assert (item.kind, item.run_id, item.tool, item.expires_at) == (PendingKind.OUTCOME, CHILD, "wire", None)
    assert await agent.resume("mine") == run
    if how == "result":
        await agent.settle(CHILD, "t1.0", result="it was wired")
    else:
        await agent.settle(CHILD, "t1.0", rerun=True)
    assert (await agent.resume("mine")).output == "done"
    assert lives == [keys_of(await agent.load(CHILD))["t1.0"]] * (1 if how == "result" else 2)


async def test_a_caller_that_is_cancelled_without_its_tools_leaves_word(store):
    """Whoever takes the waiting child up next finds that it is to end."""
    child = payer(World(), 5)
    agent = Agent(scripts("payer"), tools=[child.as_tool()], store=store)
    await agent.run("go", id="mine")
    await Agent(ScriptedModel(), store=store).cancel("mine", by="ann")
    assert (await agent.load("mine")).stop_reason is StopReason.CANCELLED
    run = await child.with_(store=store).resume(CHILD)
    assert (run.stop_reason, run.stop_message) == (StopReason.CANCELLED, "cancelled by its caller")
