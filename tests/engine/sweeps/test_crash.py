"""The worker dies at every write, and another one goes on: nothing is lost, nothing is done twice unasked.

A store that fails for good at its n-th append stands for a process that is killed: before the append was written, or
right after. Whatever the dying process still does reaches the store no more.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import anyio
import attrs
import pytest

from agentfsm import Agent, ConflictError, MisuseError, Outcome, PendingKind, Run, RunContext, Settings, State, tool
from agentfsm.ports import CallChunk, Emit, FinishChunk, FinishReason, Model, ProposedCall, Reply, Request, Store
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import HANG_S, calls_of, names, results_of, sound, sound_run, starts_of
from tests.support.failing_stores import CrashingStore, WorkerKilled


@attrs.define
class World:
    """What the tools did, counted outside of any run."""

    effects: list[tuple[str, str, int]] = attrs.field(factory=list)
    # Tool, idempotency key, and the attempt that the tool was told.

    def count(self, name: str) -> int:
        """How often a tool acted."""
        return sum(effect[0] == name for effect in self.effects)

    def tools(self) -> list:
        """A tool of each kind: read-only, idempotent, and without a promise."""

        def acting(name: str):
            async def act(ctx: RunContext[None]) -> str:
                self.effects.append((name, ctx.idempotency_key, ctx.attempt))
                await anyio.lowlevel.checkpoint()
                return f"{name} done"

            return act

        return [
            tool(name="read", read_only=True)(acting("read")),
            tool(name="put", idempotent=True)(acting("put")),
            tool(name="pay")(acting("pay")),
        ]


def answer(request: Request) -> Reply:
    """Call everything twice in the first turn and pay again in the second, then say that it is done."""
    turns = sum(bool(calls) for calls in (getattr(message, "calls", ()) for message in request.messages))
    wanted = (["read", "read", "put", "pay", "put", "read"], ["pay", "put"], [])[turns]
    calls = tuple(ProposedCall(id=f"p{turns}{n}", name=name, arguments="{}") for n, name in enumerate(wanted))
    return Reply(text="" if calls else "all done", calls=calls)


@attrs.define(eq=False)
class Speaker(Model):
    """Answers piece by piece, and looks whether a call acted before the reply was whole."""

    world: World
    name: str = "speaker"
    early: int = 0
    # Effects while it spoke.

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer."""
        reply = answer(request)
        if emit is not None:
            before = len(self.world.effects)
            for index, each in enumerate(reply.calls):
                emit(CallChunk(index=index, name=each.name, arguments=each.arguments))
                await anyio.wait_all_tasks_blocked()
            emit(FinishChunk(reason=FinishReason.TOOL_CALLS if reply.calls else FinishReason.STOP))
            self.early += len(self.world.effects) - before
        return reply


def worker(store: Store, world: World, *, stream: bool = False) -> Agent:
    """A fresh worker: a new agent with new tools on the same store. Streamed, read-only calls start early."""
    model = Speaker(world)
    return Agent(model, tools=world.tools(), store=store, name="worker", settings=Settings(stream=stream))


def check_promises(run: Run, world: World, unknown: set[str]) -> None:
    """Fail unless each effect is what the run says it was."""
    keys = {asked.id: asked.key for asked in calls_of(run.messages)}
    by_key = Counter(key for _, key, _ in world.effects)
    for result in results_of(run.messages):
        times = by_key[keys[result.call_id]]
        if result.tool == "pay":
            assert times <= 1, "an unsafe call acted twice"
        if result.outcome is Outcome.DONE:
            assert times >= 1 or result.call_id in unknown
    assert set(by_key) <= set(keys.values()), "an effect under a key that no call has"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
async def test_a_worker_that_is_killed_at_any_write_loses_nothing(store, written, stream):
    """At every append of a run in turn: the next worker ends it, and no unsafe call acts twice."""
    for at in range(1, 200):
        world, name = World(), f"run-{at}"
        mortal = CrashingStore(store, at, written=written)
        with contextlib.suppress(WorkerKilled):
            dying = worker(mortal, world, stream=stream)
            await dying.run("go", id=name)
        assert dying.model.early == (2 if stream and at > 1 else 0)
        if not mortal.dead:
            break
        before = await store.read(name)
        fresh = worker(store, world, stream=stream)
        done, asked = await settle_all(fresh, name, {"result": "it was paid"})
        assert done.output == "all done"
        events = await fresh.history(name)
        assert events[: len(before.events)] == before.events, "what was written is kept"
        check_promises(done, world, asked)
        assert [result.outcome for result in results_of(done.messages)] == [Outcome.DONE] * 8
        await sound(fresh, done)
    assert at > 10


async def test_a_worker_that_is_killed_again_and_again_gets_there(store):
    """Each life writes one append more than the one before; the run still ends as it would have."""
    world, lives = World(), 0
    done = None
    while done is None:
        lives += 1
        assert lives < 60
        mortal = CrashingStore(store, 2, written=True)
        agent = worker(mortal, world)
        try:
            run = await (agent.run("go", id="mine") if lives == 1 else agent.resume("mine"))
        except WorkerKilled:
            continue
        sound_run(run)
        for item in run.pending:
            await agent.settle("mine", item.call_id, result="it was paid")
        done = run if run.is_over else None
    assert done.output == "all done"
    check_promises(done, world, {"t1.3", "t2.0"})
    await sound(worker(store, world), done)


async def settle_all(agent: Agent, run_id: str, how: dict[str, object]) -> tuple[Run, set[str]]:
    """Resume until the run is over, and say of each unknown call how it ended."""
    asked: set[str] = set()
    with anyio.fail_after(HANG_S):
        while not (run := await agent.resume(run_id)).is_over:
            sound_run(run)
            assert run.is_waiting
            for item in run.pending:
                assert (item.kind, item.tool, item.expires_at) == (PendingKind.OUTCOME, "pay", None)
                assert item.call_id not in asked
                asked.add(item.call_id)
                await agent.settle(run_id, item.call_id, **how)
    return run, asked


async def test_a_read_only_call_in_flight_runs_again(store):
    """Nobody is asked: it changes nothing."""
    run, world = await cut_in_flight(store, "read")
    assert run.output == "done"
    assert [name for name, _, _ in world.effects] == ["read", "read"]


async def test_an_idempotent_call_in_flight_runs_again_under_its_key(store):
    """The second attempt says that it is one, and has the key of the first."""
    run, world = await cut_in_flight(store, "put")
    assert run.output == "done"
    (_, first, one), (_, second, two) = world.effects
    assert first == second == calls_of(run.messages)[0].key
    assert (one, two) == (1, 2)


async def test_an_unsafe_call_in_flight_waits_for_a_person(store):
    """It is shown with its tool and exact arguments, and nothing runs until somebody has said how it ended."""
    run, world = await cut_in_flight(store, "pay")
    assert run.is_waiting
    (item,) = run.pending
    assert (item.kind, item.call_id, item.tool, item.arguments) == (PendingKind.OUTCOME, "t1.0", "pay", {})
    assert (item.run_id, item.expires_at) == (run.id, None)
    assert world.count("pay") == 1
    agent = Agent(ScriptedModel(), tools=world.tools(), store=store)
    assert await agent.resume(run.id) == run
    assert world.count("pay") == 1


async def cut_in_flight(store: Store, name: str) -> tuple[Run, World]:
    """Kill a worker while a call of the tool is in flight, and let another one resume the run."""
    world = World()
    script = [say("", call(name)), "done"]
    mortal = CrashingStore(store, 1_000, written=False)
    tools = world.tools()
    index = ["read", "put", "pay"].index(name)
    whole = tools[index].function

    async def dies(ctx: RunContext[None]) -> str:
        await whole(ctx)
        mortal.dead = True
        raise WorkerKilled

    dying = attrs.evolve(tools[index], function=dies)
    with pytest.raises(WorkerKilled):
        await Agent(ScriptedModel(*script), tools=[dying], store=mortal).run("go", id="mine")
    fresh = Agent(ScriptedModel(*script[1:]), tools=tools, store=store)
    return await fresh.resume("mine"), world


SETTLED = {
    "result": ({"result": "paid, says the bank"}, Outcome.DONE, "paid, says the bank", 1),
    "failed": ({"failed": "no money"}, Outcome.FAILED, "no money", 1),
    "rerun": ({"rerun": True}, Outcome.DONE, "pay done", 2),
}


@pytest.mark.parametrize("way", SETTLED)
async def test_a_person_says_what_became_of_it(store, way):
    """Its result, its failure, or that it shall be run again under the same key."""
    how, outcome, content, times = SETTLED[way]
    run, world = await cut_in_flight(store, "pay")
    agent = Agent(ScriptedModel(say("done", expect=content)), tools=world.tools(), store=store)
    await agent.settle(run.id, "t1.0", by="ann", **how)
    done = await agent.resume(run.id)
    assert done.output == "done"
    (result,) = results_of(done.messages)
    assert (result.outcome, result.content) == (outcome, content)
    assert world.count("pay") == times
    assert len({key for _, key, _ in world.effects}) == 1
    assert [attempt for _, _, attempt in world.effects] == [1, 2][:times]
    events = await agent.history(run.id)
    assert starts_of(events, "t1.0") == times
    assert "ann" in [getattr(event, "by", "") for event in events]
    await sound(agent, done)


async def test_a_rerun_that_is_cut_off_too_is_asked_again(store):
    """The second crash is a second question, with an answer of its own."""
    run, world = await cut_in_flight(store, "pay")
    mortal = CrashingStore(store, 2, written=False)
    agent = Agent(ScriptedModel(), tools=world.tools(), store=mortal)
    await agent.settle(run.id, "t1.0", rerun=True)
    with pytest.raises(WorkerKilled):
        await agent.resume(run.id)
    again = Agent(ScriptedModel("done"), tools=world.tools(), store=store)
    waiting = await again.resume(run.id)
    assert [item.kind for item in waiting.pending] == [PendingKind.OUTCOME]
    assert waiting.open_call("t1.0").attempts == 2
    await again.settle(run.id, "t1.0", result="paid once or twice")
    done = await again.resume(run.id)
    assert done.output == "done"
    assert world.count("pay") == 2
    await sound(again, done)


async def test_the_first_settlement_wins(store):
    """The same person may repeat it; another person learns who was first, even with the same words."""
    run, world = await cut_in_flight(store, "pay")
    agent = worker(store, world)
    await agent.settle(run.id, "t1.0", result="paid", by="ann")
    await agent.settle(run.id, "t1.0", result="paid", by="ann")
    for other in ({"result": "paid"}, {"failed": "not paid"}, {"rerun": True}, {"result": "paid twice"}):
        with pytest.raises(ConflictError, match="ann"):
            await agent.settle(run.id, "t1.0", by="bob", **other)


@pytest.mark.parametrize(
    "how", [{}, {"result": "a", "failed": "b"}, {"result": "a", "rerun": True}, {"failed": "", "rerun": True}], ids=str
)
async def test_settle_takes_one_answer(store, how):
    """Neither none nor two."""
    run, world = await cut_in_flight(store, "pay")
    with pytest.raises(MisuseError, match="exactly one"):
        await worker(store, world).settle(run.id, "t1.0", **how)


async def test_an_empty_result_is_a_result(store):
    """What a tool returned may be an empty text."""
    run, world = await cut_in_flight(store, "pay")
    agent = Agent(ScriptedModel("done"), tools=world.tools(), store=store)
    await agent.settle(run.id, "t1.0", result="")
    assert results_of((await agent.resume(run.id)).messages)[0].content == ""


@pytest.mark.parametrize("decide", ["approve", "reject"])
async def test_a_question_of_outcome_is_no_question_of_approval(store, decide):
    """The error says what the run does wait for."""
    run, world = await cut_in_flight(store, "pay")
    with pytest.raises(MisuseError, match=r"outcome of t1\.0"):
        await getattr(worker(store, world), decide)(run.id, "t1.0")


async def test_settling_a_call_that_nobody_asks_about_is_misuse(store):
    """A run that waits for nothing takes no settlement."""
    world = World()
    agent = worker(store, world)
    run = await agent.step(agent.start("go"))
    with pytest.raises(MisuseError, match="waits for: nothing"):
        await agent.settle(run.id, "t1.0", result="x")


async def test_calls_behind_an_unknown_one_wait(store):
    """The barrier holds: what stands behind it starts after it is settled, and what was finished is kept."""
    world = World()
    mortal = CrashingStore(store, 1_000, written=False)
    tools = world.tools()
    pay = tools[2].function

    async def dies(ctx: RunContext[None]) -> str:
        await pay(ctx)
        mortal.dead = True
        raise WorkerKilled

    dying = [*tools[:2], attrs.evolve(tools[2], function=dies)]
    with pytest.raises(WorkerKilled):
        await Agent(FunctionModel(answer), tools=dying, store=mortal).run("go", id="mine")
    before = Counter(name for name, _, _ in world.effects)
    assert before == {"read": 2, "put": 1, "pay": 1}
    agent = worker(store, world)
    run = await agent.resume("mine")
    assert Counter(name for name, _, _ in world.effects) == before
    assert [entry.phase.value for entry in run.open] == ["finished"] * 3 + ["lost"] + ["intended"] * 2
    assert [item.call_id for item in run.pending] == ["t1.3"]
    assert run.state is State.ACT
    await agent.settle("mine", "t1.3", result="paid")
    run = await agent.resume("mine")
    assert run.output == "all done"
    assert Counter(name for name, _, _ in world.effects) == {"read": 3, "put": 3, "pay": 2}


async def test_cancelling_a_run_with_an_unknown_call_says_unknown(store):
    """The history is closed without guessing."""
    run, world = await cut_in_flight(store, "pay")
    agent = worker(store, world)
    await agent.cancel(run.id)
    done = await agent.load(run.id)
    assert [r.outcome for r in done.calls] == [Outcome.UNKNOWN]
    assert "check before" in results_of(done.messages)[0].content
    assert names(await agent.history(run.id))[-1] == "Failed"
    await sound(agent, done)


async def test_what_an_effect_depends_on_is_durable_before_it(store):
    """When an unsafe tool runs its first line, the journal already says that it started."""
    seen: list[list[str]] = []

    @tool
    async def pay(ctx: RunContext[None]) -> str:
        """Pay."""
        seen.append(names((await store.read(ctx.run_id)).events))
        return "paid"

    await Agent(ScriptedModel(say("", call("pay")), "done"), tools=[pay], store=store).run("go")
    assert seen == [["Observed", "ToolsChosen", "ToolStarted"]]
