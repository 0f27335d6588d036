"""Calls that start while the model still streams: which, when, and that nothing else about the run differs."""

from __future__ import annotations

import json
import threading
from collections import Counter

import anyio
import attrs
import pytest

from agentfsm import (
    Agent,
    Limits,
    Outcome,
    RunContext,
    Settings,
    State,
    StateChanged,
    ToolEvent,
    ToolEventType,
    ToolRegistry,
    UsageReported,
    tool,
)
from agentfsm.core.calls import Phase
from agentfsm.core.events import Event, ToolFinished
from agentfsm.ports import CallChunk, Emit, FinishChunk, FinishReason, Reply
from agentfsm.testing import ScriptedModel, call, raw_call, say
from agentfsm.testing.models import Call
from tests.support.checks import HANG_S, calls_of, names, results_of, sound, virtually
from tests.support.streaming_models import (
    FINISH,
    STREAM,
    StreamingModel,
    all_at_once,
    chunk_of,
    done,
    reply_of,
    watched,
)


@attrs.define(eq=False)
class World:
    """What the tools did."""

    begun: list[str] = attrs.field(factory=list)
    at_once: int = 0
    most: int = 0
    contexts: list[RunContext[None]] = attrs.field(factory=list)

    def looker(self, **options: object):
        """A read-only tool that is seen when it begins."""

        async def look(ctx: RunContext[None], at: str = "") -> str:
            self.contexts.append(ctx)
            self.begun.append(at)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            await anyio.lowlevel.checkpoint()
            self.at_once -= 1
            return f"saw {at}"

        return tool(**{"name": "look", "read_only": True, **options})(look)

    def sleeper(self):
        """A read-only tool that takes as long as it is told."""

        async def rest(seconds: float) -> str:
            self.begun.append(f"{seconds:g} s at {anyio.current_time():g}")
            await anyio.sleep(seconds)
            return f"rested {seconds:g} s"

        return tool(read_only=True)(rest)


@tool
async def write(at: str = "") -> str:
    """Write."""
    return f"wrote {at}"


def one_result_each(events: tuple[Event, ...], ids: list[str]) -> None:
    """Fail unless the reply stands in the journal before any result, and each call has one."""
    told = names(events)
    assert told.index("ToolsChosen") < told.index("ToolFinished")
    assert sorted(event.result.call_id for event in events if isinstance(event, ToolFinished)) == ids


# When


@pytest.mark.parametrize(("streamed", "ends"), [(True, 1.0), (False, 1.5)])
def test_a_batch_that_streams_in_over_a_second_is_done_with_the_stream(streamed, ends):
    """Each call runs while those behind it arrive; not streamed, all of them wait for the last."""

    async def play(store, clock):
        calls = [call("rest", seconds=seconds) for seconds in (0.5, 0.25, 0.0, 0.0)]
        world, model = World(), ScriptedModel(say("", *calls, pace_s=0.25, delay_s=0.0 if streamed else 1.0), "done")
        agent = Agent(model, tools=[world.sleeper()], store=store, clock=clock, settings=Settings(stream=streamed))
        run = await agent.run("go")
        assert run.output == "done"
        assert anyio.current_time() == pytest.approx(ends)
        return world.begun

    begun = virtually(play)
    assert begun[:2] == (["0.5 s at 0.5", "0.25 s at 0.75"] if streamed else ["0.5 s at 1", "0.25 s at 1"])
    assert begun[2:] == ["0 s at 1", "0 s at 1"]


def test_a_call_starts_when_the_next_begins_and_the_last_with_the_reason_to_stop():
    """Nothing is parsed before that, so arguments that are valid JSON half-way start nothing."""

    async def play(store, clock):
        world, calls = World(), [call("rest", seconds=1.5), call("rest", seconds=2.5)]

        async def line(emit: Emit) -> Reply:
            emit(CallChunk(index=0, name="rest"))
            emit(CallChunk(index=0, arguments='{"seconds": 1'))
            await anyio.sleep(1)
            emit(CallChunk(index=0, arguments=".5}"))
            await anyio.sleep(1)
            emit(chunk_of(1, calls[1]))
            await anyio.sleep(1)
            emit(FINISH)
            await anyio.sleep(1)
            return reply_of(*calls)

        agent = Agent(StreamingModel(line, done), tools=[world.sleeper()], store=store, clock=clock, settings=STREAM)
        await sound(agent, await agent.run("go"))
        return world.begun

    assert virtually(play) == ["1.5 s at 2", "2.5 s at 3"]


@pytest.mark.parametrize("reason", FinishReason)
async def test_a_reason_that_says_cut_off_starts_nothing_more(store, reason):
    """The last call may be torn then, though it looks whole, and what comes behind the reason counts for nothing."""
    world, early, calls = World(), [], [call("look", at="a"), call("look", at="b")]

    async def line(emit: Emit) -> Reply:
        emit(chunk_of(0, calls[0]))
        emit(FinishChunk(reason=reason))
        emit(chunk_of(1, calls[1]))
        emit(FINISH)
        await anyio.wait_all_tasks_blocked()
        early.extend(world.begun)
        return reply_of(*calls)

    agent = Agent(StreamingModel(line, done), tools=[world.looker()], store=store, settings=STREAM)
    run = await agent.run("go")
    assert early == (["a"] if reason in {FinishReason.STOP, FinishReason.TOOL_CALLS} else [])
    assert [r.content for r in results_of(run.messages)] == ["saw a", "saw b"]
    await sound(agent, run)


async def test_whoever_watches_or_asks_for_a_stream_gets_an_early_start(store):
    """Both make the reply stream; without either of them the model is not even given a place for its chunks."""
    seen: dict[str, list[str]] = {}
    for how in ("watched", "streamed", "plain"):
        world = World()

        async def note(how: str = how, world: World = world) -> None:
            await anyio.wait_all_tasks_blocked()
            seen[how] = list(world.begun)

        settings = STREAM if how == "streamed" else Settings()
        model = all_at_once(call("look", at="a"), then=note)
        agent = Agent(model, tools=[world.looker()], store=store, settings=settings)
        await (watched(agent) if how == "watched" else agent.run("go"))
        assert world.begun == ["a"]
    assert seen == {"watched": ["a"], "streamed": ["a"], "plain": []}


# Which


def _barriers() -> dict[str, tuple[Call, list, Outcome | None]]:
    """What may not start early: a call of it, the tools for that, and how it ends; None where a person is asked."""

    async def act(at: str = "") -> str:
        return f"acted {at}"

    helper = Agent(ScriptedModel("helped"), name="helper")
    kinds: dict[str, dict[str, object]] = {
        "unsafe": {},
        "idempotent": {"idempotent": True, "concurrency_safe": True},
        "limited": {"read_only": True, "limit": 1},
        "limited by tag": {"read_only": True, "tags": ["db"]},
        "approval": {"read_only": True, "requires_approval": True},
        "approval of some": {"read_only": True, "requires_approval": lambda a: a.at == "x"},
        "approval of others": {"read_only": True, "requires_approval": lambda a: a.at == "y"},
    }
    asked = {"approval", "approval of some"}
    made = {
        kind: (call("act", at="x"), [tool(name="act", **options)(act)], None if kind in asked else Outcome.DONE)
        for kind, options in kinds.items()
    }
    return {
        **made,
        "agent": (call("helper", query="x"), [helper.as_tool(description="Help.")], Outcome.DONE),
        "unknown": (call("lookk", at="x"), [], Outcome.FAILED),
        "malformed": (raw_call("look", "at x"), [], Outcome.FAILED),
        "no object": (raw_call("look", '["x"]'), [], Outcome.FAILED),
        "mended": (raw_call("look", '{"at": "x",}'), [], Outcome.DONE),
    }


@pytest.mark.parametrize("kind", _barriers())
async def test_what_may_not_start_early_holds_back_all_behind_it(store, kind):
    """What is before it runs while the reply streams, the rest from ACT on; each call has its one result, in order."""
    barrier, tools, outcome = _barriers()[kind]
    world, early = World(), []

    async def note() -> None:
        await anyio.wait_all_tasks_blocked()
        early.extend(world.begun)

    calls = [call("look", at="a"), call("look", at="b"), barrier, call("look", at="c")]
    registry = ToolRegistry(tag_limits={"db": 3})
    for each in [world.looker(), *tools]:
        registry.register(each)
    agent = Agent(all_at_once(*calls, then=note), tools=registry, store=store, settings=STREAM)
    run = await agent.run("go")
    assert early == ["a", "b"]
    if outcome is None:
        assert [item.call_id for item in run.pending] == ["t1.2"]
        assert [entry.phase for entry in run.open][:2] == [Phase.FINISHED, Phase.FINISHED]
        await agent.approve(run.id, "t1.2")
        run = await agent.resume(run.id)
    assert run.output == "done"
    assert world.begun[-1] == "c"
    outcomes = [result.outcome for result in results_of(run.messages)]
    assert outcomes == [Outcome.DONE, Outcome.DONE, outcome or Outcome.DONE, Outcome.DONE]
    one_result_each(await agent.history(run.id), ["t1.0", "t1.1", "t1.2", "t1.3"])
    await sound(agent, run)


@pytest.mark.parametrize("enabled", [False, lambda _ctx: False], ids=["never", "not now"])
async def test_a_tool_that_is_not_there_does_not_start_early_either(store, enabled):
    """It is refused as ever, and does not run at all."""
    world = World()
    agent = Agent(
        all_at_once(call("look", at="a"), call("gone", at="b"), call("look", at="c")),
        tools=[world.looker(), world.looker(name="gone", enabled=enabled)],
        store=store,
        settings=STREAM,
    )
    run = await agent.run("go")
    assert sorted(world.begun) == ["a", "c"]
    assert [r.outcome for r in results_of(run.messages)] == [Outcome.DONE, Outcome.SKIPPED, Outcome.DONE]
    await sound(agent, run)


async def test_arguments_that_do_not_fit_are_told_early_and_run_nothing(store):
    """The schema says no as it would later."""
    world = World()
    model = all_at_once(call("look", at=["a"]), call("look", at="b"))
    agent = Agent(model, tools=[world.looker()], store=store, settings=STREAM)
    run = await agent.run("go")
    assert world.begun == ["b"]
    assert [r.outcome for r in results_of(run.messages)] == [Outcome.FAILED, Outcome.DONE]
    await sound(agent, run)


async def test_mended_arguments_are_told_of_once(store, caplog):
    """A reply is looked at twice, as it streams in and when it is whole; the log hears of a repair once."""
    world = World()
    model = all_at_once(call("look", at="a"), raw_call("look", '{"at": "b",}'))
    agent = Agent(model, tools=[world.looker()], store=store, settings=STREAM)
    with caplog.at_level("WARNING", logger="agentfsm"):
        await agent.run("go")
    assert sum("arguments_repaired" in text for text in caplog.messages) == 1


# How


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 6),
        ({"limits": Limits(parallel=2)}, 2),
        ({"settings": Settings(stream=True, parallel_tool_calls=False)}, 1),
        ({"concurrency_safe": False}, 1),
        ({"locks": lambda _a: {"one"}, "concurrency_safe": False}, 1),
    ],
    ids=["free", "two", "serial", "unsafe", "locked"],
)
async def test_early_calls_keep_to_the_limits_and_the_plan(store, options, most):
    """As many at once as there may be, and what may not overlap does not."""
    world = World()
    agent = Agent(
        all_at_once(*[call("look", at=str(n)) for n in range(6)]),
        tools=[world.looker(**{k: options[k] for k in ("locks", "concurrency_safe") if k in options})],
        store=store,
        **{"settings": STREAM, **{k: options[k] for k in ("limits", "settings") if k in options}},
    )
    run = await agent.run("go")
    assert world.most == most
    assert [r.content for r in results_of(run.messages)] == [f"saw {n}" for n in range(6)]
    await sound(agent, run)


async def test_an_early_call_knows_what_a_later_one_knows(store):
    """Turn, call id, key and attempt are those under which it is journalled, also where the reply is not streamed."""
    known = []
    for settings in (STREAM, Settings()):
        world, calls = World(), [call("look", at="a"), call("look", at="b")]
        agent = Agent(all_at_once(*calls), tools=[world.looker()], store=store, settings=settings)
        run = await agent.run("go", id=f"run {settings.stream}")
        assert [asked.key for asked in calls_of(run.messages)] == [each.idempotency_key for each in world.contexts]
        known.append([(each.turn, each.call_id, each.attempt, each.run_id == run.id) for each in world.contexts])
    assert known[0] == known[1] == [(1, "t1.0", 1, True), (1, "t1.1", 1, True)]


async def test_a_result_names_the_place_of_its_call_in_the_reply(store):
    """Whether it started early or after the others."""
    calls = [call("look", at="a"), call("look", at="b"), call("write", at="c"), call("look", at="d")]
    agent = Agent(all_at_once(*calls), tools=[World().looker(), write], store=store, settings=STREAM)
    run = await agent.run("go")
    assert [result.index for result in results_of(run.messages)] == [0, 1, 2, 3]


def test_the_retries_of_early_calls_count_for_the_run():
    """What a tool may try again is counted over the whole run, whoever started the call."""

    async def play(store, clock):
        tried: list[str] = []

        @tool(read_only=True)
        async def early() -> str:
            tried.append("early")
            raise ConnectionError("down")

        @tool(idempotent=True)
        async def late() -> str:
            tried.append("late")
            raise ConnectionError("down")

        agent = Agent(
            all_at_once(call("early"), call("late"), then=lambda: anyio.sleep(10)),
            tools=[early, late],
            store=store,
            clock=clock,
            settings=STREAM,
            limits=Limits(retries_per_run=1),
        )
        await sound(agent, await agent.run("go"))
        return tried

    assert virtually(play) == ["early", "early", "late"]


async def test_a_plain_function_starts_early_in_its_thread(store):
    """It runs while the model still streams, and is waited for."""
    begun, go = threading.Event(), threading.Event()

    @tool(read_only=True)
    def look(at: str) -> str:
        begun.set()
        assert go.wait(HANG_S)
        return f"saw {at}"

    async def until_begun() -> None:
        assert await anyio.to_thread.run_sync(begun.wait, HANG_S)
        go.set()

    agent = Agent(all_at_once(call("look", at="a"), then=until_begun), tools=[look], store=store, settings=STREAM)
    run = await agent.run("go")
    assert [r.content for r in results_of(run.messages)] == ["saw a"]
    await sound(agent, run)


# What is told and recorded


async def test_the_journal_has_the_reply_before_its_results(store):
    """One result each, and the fold of the journal is the run; the newest facts are those of a run not streamed."""
    told = {}
    for settings in (STREAM, Settings()):
        world = World()
        calls = [call("look", at="a"), call("look", at="b"), call("write", at="c"), call("look", at="d")]
        agent = Agent(all_at_once(*calls), tools=[world.looker(), write], store=store, settings=settings)
        run = await agent.run("go")
        events = await agent.history(run.id)
        one_result_each(events, ["t1.0", "t1.1", "t1.2", "t1.3"])
        await sound(agent, run)
        told[settings.stream] = [(type(e).__name__, getattr(e, "call_id", None)) for e in events]
        assert [result.content for result in results_of(run.messages)] == ["saw a", "saw b", "wrote c", "saw d"]
    assert told[True] == told[False]


async def test_a_watcher_sees_calls_start_before_the_reply_is_whole(store):
    """Each call is queued, started and ended once, under its turn and its place; the queue is empty once."""
    calls = [call("look", at="a"), call("look", at="b"), call("write", at="c"), call("look", at="d")]
    events, run = await watched(
        Agent(all_at_once(*calls), tools=[World().looker(), write], store=store),
    )
    tools = [event for event in events if isinstance(event, ToolEvent)]
    assert {(event.run_id, event.turn) for event in tools} == {(run.id, 1)}
    for n in range(4):
        own = [event.type for event in tools if event.call_id == f"t1.{n}"]
        assert own == [ToolEventType.QUEUED, ToolEventType.STARTED, ToolEventType.COMPLETED]
    queued = [event.position for event in tools if event.type is ToolEventType.QUEUED]
    assert queued == [0, 1, 2, 3]
    chosen = next(n for n, event in enumerate(events) if isinstance(event, StateChanged) and event.state is State.ACT)
    whole = next(n for n, event in enumerate(events) if isinstance(event, UsageReported))
    started = {e.call_id: n for n, e in enumerate(events) if getattr(e, "type", "") == ToolEventType.STARTED}
    assert max(started["t1.0"], started["t1.1"]) < whole < chosen < min(started["t1.2"], started["t1.3"])
    assert [event.type for event in tools].count(ToolEventType.DRAINED) == 1
    assert tools[-1].type is ToolEventType.DRAINED


async def test_the_queue_is_told_empty_also_where_all_started_early(store):
    """After the last result, once."""
    calls = [call("look", at="a"), call("look", at="b")]
    events, _ = await watched(Agent(all_at_once(*calls), tools=[World().looker()], store=store))
    kinds = [event.type for event in events if isinstance(event, ToolEvent)]
    assert Counter(kinds) == {
        ToolEventType.QUEUED: 2,
        ToolEventType.STARTED: 2,
        ToolEventType.COMPLETED: 2,
        ToolEventType.DRAINED: 1,
    }
    assert kinds[-1] is ToolEventType.DRAINED


@pytest.mark.parametrize("read_only", [True, False], ids=["early", "late"])
async def test_the_queue_is_told_empty_where_the_rest_waits_for_a_person(store, read_only):
    """Once, when nothing is left that may run; whether what ran was early makes no difference."""
    world, pay = World(), tool(name="pay", requires_approval=True)(write.function)
    model = all_at_once(call("look", at="a"), call("pay", at="b"))
    events, run = await watched(Agent(model, tools=[world.looker(read_only=read_only), pay], store=store))
    assert run.is_waiting
    kinds = [event.type for event in events if isinstance(event, ToolEvent)]
    assert kinds == [
        ToolEventType.QUEUED,
        ToolEventType.STARTED,
        ToolEventType.COMPLETED,
        ToolEventType.DRAINED,
    ]


# Step by step


async def test_a_step_of_think_returns_when_its_early_calls_have_ended(store):
    """Nothing runs between two steps; the calls that had to wait are still to do."""
    world = World()
    calls = [call("look", at="a"), call("look", at="b"), call("write", at="c")]

    async def no_wait() -> None:
        """Give the whole reply before any call had its turn."""

    agent = Agent(all_at_once(*calls, then=no_wait), tools=[world.looker(), write], store=store, settings=STREAM)
    run = await agent.step(agent.start("go"))
    run = await agent.step(run)
    assert run.state is State.ACT
    assert (sorted(world.begun), world.at_once) == (["a", "b"], 0)
    assert [entry.phase for entry in run.open] == [Phase.FINISHED, Phase.FINISHED, Phase.INTENDED]
    run = await agent.step(run)
    assert run.state is State.REFLECT
    assert [json.loads(each.arguments)["at"] for each in calls_of(run.messages)] == ["a", "b", "c"]
    await sound(agent, await agent.finish(run))


async def test_a_step_of_think_passes_act_where_all_calls_are_early(store):
    """The turn ends with the last result, so the next step is REFLECT."""
    agent = Agent(all_at_once(call("look", at="a")), tools=[World().looker()], store=store, settings=STREAM)
    run = await agent.step(await agent.step(agent.start("go")))
    assert run.state is State.REFLECT
    await sound(agent, await agent.finish(run))
