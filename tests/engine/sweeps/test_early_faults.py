"""Early calls when things go wrong: a stream that breaks off, a model that lies, a run that is cut, a crash.

What started before the reply is in the journal may be dropped at any moment. Then nothing of it may be seen: neither
in the journal, nor as the result of a later call, nor as something that still runs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import attrs
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import (
    Agent,
    Limits,
    ModelUnavailableError,
    Outcome,
    Run,
    State,
    StopReason,
    ToolEvent,
    ToolEventType,
    tool,
)
from agentfsm.core.events import ToolFinished, ToolsChosen
from agentfsm.ports import CallChunk, Chunk, Emit, FinishChunk, FinishReason, Model, Reply, Store
from agentfsm.testing import ScriptedModel, call, raw_call
from agentfsm.testing.models import Call
from agentfsm.tools.queue.dispatch import find_abandoned
from tests.support.checks import HANG_S, Trap, names, results_of, settled, sound, sound_run, virtually
from tests.support.failing_stores import CancellingStore, CrashingStore, WorkerKilled
from tests.support.streaming_models import FINISH, STREAM, StreamingModel, chunk_of, done, reply_of

OLD = [call("look", at="old"), call("look", at="older")]
NEW = [call("look", at="new"), call("look", at="newer")]


@attrs.define(eq=False)
class World:
    """What the tools did."""

    begun: list[str] = attrs.field(factory=list)
    cut: dict[str, float] = attrs.field(factory=dict)
    # What was cancelled, and when.
    running: int = 0
    trap: Trap = attrs.field(factory=lambda: Trap(10**9))

    def looker(self, seconds: float = 0.0, *, stubborn: bool = False):
        """A read-only tool that takes so long; a stubborn one returns where it is cancelled."""

        async def look(at: str = "") -> str:
            self.begun.append(at)
            self.running += 1
            try:
                await self.trap.visit()
                await anyio.sleep(seconds)
            except anyio.get_cancelled_exc_class():
                self.cut[at] = anyio.current_time()
                if not stubborn:
                    raise
            finally:
                self.running -= 1
            return f"look {at}"

        return tool(read_only=True)(look)


@tool
async def write(at: str = "") -> str:
    """Write."""
    return f"write {at}"


def broken(*calls: Call, after_s: float = 1.0) -> Callable[[Emit], Awaitable[Reply]]:
    """A reply that streams calls, the last of them not whole, and breaks off after a while."""

    async def line(emit: Emit) -> Reply:
        for index, each in enumerate(calls):
            emit(chunk_of(index, each))
        await anyio.sleep(after_s)
        raise ModelUnavailableError("the stream broke off")

    return line


def whole(*calls: Call, after_s: float = 1.0) -> Callable[[Emit], Awaitable[Reply]]:
    """A reply that streams calls and is whole after a while."""

    async def line(emit: Emit) -> Reply:
        for index, each in enumerate(calls):
            emit(chunk_of(index, each))
        emit(FINISH)
        await anyio.sleep(after_s)
        return reply_of(*calls)

    return line


def contents(run: Run) -> list[str]:
    """The results of a run, in order."""
    return [result.content for result in results_of(run.messages)]


async def only_of_the_reply(agent: Agent, run: Run, wanted: list[str]) -> None:
    """Fail unless the run, and each result in its journal, is of the reply that counts."""
    assert contents(run) == wanted
    events = await agent.history(run.id)
    finished = [event.result.content for event in events if isinstance(event, ToolFinished)]
    assert sorted(finished) == sorted(wanted)
    await sound(agent, run)


# A stream that breaks off


async def _ended(at: str) -> str:
    """Be quick."""
    return f"look {at}"


async def _swallowing(at: str) -> str:
    """Take a cancellation for a reason to return."""
    if not at.startswith("old"):
        return f"look {at}"
    try:
        await anyio.sleep(100)
    except anyio.get_cancelled_exc_class():
        return "look at what was never asked"
    return "look at what nobody waited for"


async def _shielded(seconds: float, at: str) -> str:
    """Outlive a cancellation."""
    if at == "newer":
        await anyio.sleep(20)
    if not at.startswith("old"):
        return f"look {at}"
    with anyio.CancelScope(shield=True):
        await anyio.sleep(seconds)
    return "look at what was never asked"


# The second attempt begins between 2 and 2.5 s, is whole a second later, and its slower call ends at 22 s at least.
OLD_WAYS = {
    "ended before the break": _ended,
    "returns when it is cancelled": _swallowing,
    "ends while the model is asked again": partial(_shielded, 2.75),
    "ends while the new calls run": partial(_shielded, 10.0),
    "ends after all of the new calls": partial(_shielded, 100.0),
}


@pytest.mark.parametrize("way", OLD_WAYS)
@pytest.mark.parametrize("behind", [[], [call("write", at="x")]], ids=["all early", "with one behind"])
def test_a_result_of_a_reply_that_broke_off_is_never_used(way, behind):
    """The same call of the next attempt has the same id, and its own result; also where the old tool ends late."""

    async def play(store, clock):
        async def look(at: str) -> str:
            return await OLD_WAYS[way](at)

        agent = Agent(
            StreamingModel(broken(*OLD), whole(*NEW, *behind), done),
            tools=[tool(read_only=True)(look), write],
            store=store,
            clock=clock,
            settings=STREAM,
            limits=Limits(tool_timeout_s=200),
        )
        run = await agent.run("go")
        await only_of_the_reply(agent, run, ["look new", "look newer", *["write x" for _ in behind]])
        assert run.output == "done"

    virtually(play)


def test_what_a_broken_reply_started_is_cancelled_at_once():
    """Not only when the wait before the next attempt is over: nobody wants it any more."""

    async def play(store, clock):
        world = World()
        agent = Agent(
            StreamingModel(broken(*OLD), whole(*NEW), done),
            tools=[world.looker(seconds=10)],
            store=store,
            clock=clock,
            settings=STREAM,
            limits=Limits(retry_wait_s=40, retry_wait_max_s=40),
        )
        run = await agent.run("go")
        assert world.cut == {"old": 1.0}
        assert world.begun == ["old", "new", "newer"]
        await only_of_the_reply(agent, run, ["look new", "look newer"])

    virtually(play)


def test_what_a_broken_reply_has_not_started_yet_never_starts():
    """The stream breaks off before the call had its turn."""

    async def play(store, clock):
        async def torn(emit: Emit) -> Reply:
            for index, each in enumerate(OLD):
                emit(chunk_of(index, each))
            raise ModelUnavailableError("the stream broke off")

        world = World()
        agent = Agent(
            StreamingModel(torn, whole(*NEW), done), tools=[world.looker()], store=store, clock=clock, settings=STREAM
        )
        run = await agent.run("go")
        assert world.begun == ["new", "newer"]
        await only_of_the_reply(agent, run, ["look new", "look newer"])

    virtually(play)


def test_a_watcher_sees_each_start_end_before_the_next_attempt_starts():
    """The call of the broken reply ends in an error, and then the one of the next reply begins, under the same id."""

    async def play(store, clock):
        agent = Agent(
            StreamingModel(broken(*OLD), whole(*NEW), done),
            tools=[World().looker(seconds=10)],
            store=store,
            clock=clock,
        )
        async with agent.stream("go") as stream:
            events = [event async for event in stream]
        own = [event.type for event in events if isinstance(event, ToolEvent) and event.call_id == "t1.0"]
        begun = [ToolEventType.QUEUED, ToolEventType.STARTED]
        assert own == [*begun, ToolEventType.ERROR, *begun, ToolEventType.COMPLETED]
        kinds = Counter(event.type for event in events if isinstance(event, ToolEvent))
        assert kinds[ToolEventType.STARTED] == kinds[ToolEventType.ERROR] + kinds[ToolEventType.COMPLETED]
        assert kinds[ToolEventType.DRAINED] == 1

    virtually(play)


def test_an_answer_without_calls_ends_what_its_pieces_started():
    """It is cut off before the run is over, so that nothing comes behind the end."""

    async def play(store, clock):
        async def line(emit: Emit) -> Reply:
            emit(chunk_of(0, OLD[0]))
            emit(FINISH)
            await anyio.sleep(1)
            return Reply(text="done")

        world = World()
        agent = Agent(StreamingModel(line), tools=[world.looker(seconds=10)], store=store, clock=clock)
        async with agent.stream("go") as stream:
            events = [event async for event in stream]
        assert world.cut == {"old": 1.0}
        kinds = [event.type for event in events if isinstance(event, ToolEvent)]
        assert kinds == [ToolEventType.QUEUED, ToolEventType.STARTED, ToolEventType.ERROR]
        await sound(agent, stream.run)

    virtually(play)


def test_a_reply_that_never_comes_whole_leaves_no_call():
    """When the last attempt has failed too, the journal knows of the model's failure only, and the run goes on."""

    async def play(store, clock):
        world = World()
        agent = Agent(
            StreamingModel(broken(*OLD), broken(*OLD), done),
            tools=[world.looker(seconds=10)],
            store=store,
            clock=clock,
            settings=STREAM,
            limits=Limits(model_retries=1),
        )
        run = await agent.run("go")
        assert run.output == "done"
        told = names(await agent.history(run.id))
        assert told.count("ModelFaltered") == 1
        assert not {"ToolsChosen", "ToolFinished"} & set(told)
        assert (world.begun, world.running) == (["old", "old"], 0)
        await sound(agent, run)

    virtually(play)


async def test_a_reply_that_turns_out_empty_drops_what_it_started(store):
    """The chunks of an empty reply are no reply."""

    async def empty(emit: Emit) -> Reply:
        for index, each in enumerate(OLD):
            emit(chunk_of(index, each))
        await anyio.wait_all_tasks_blocked()
        return Reply()

    agent = Agent(
        StreamingModel(empty, whole(*NEW, after_s=0), done),
        tools=[World().looker()],
        store=store,
        settings=STREAM,
        limits=Limits(retry_wait_s=0.001),
    )
    await only_of_the_reply(agent, await agent.run("go"), ["look new", "look newer"])


@pytest.mark.parametrize("chained", [False, True], ids=["while handling", "from"])
async def test_an_error_of_the_users_own_model_comes_out_as_it_is(store, chained):
    """No group around it, and what led to it still there."""
    error, reason = RuntimeError("a bug in the model"), ValueError("the reason")

    async def line(emit: Emit) -> Reply:
        emit(chunk_of(0, OLD[0]))
        emit(FINISH)
        await anyio.wait_all_tasks_blocked()
        try:
            raise reason
        except ValueError:
            if chained:
                raise error from reason
            raise error  # noqa: B904  that is the case

    world = World()
    agent = Agent(StreamingModel(line), tools=[world.looker(seconds=100)], store=store, settings=STREAM)
    with pytest.raises(RuntimeError) as caught:
        await agent.run("go")
    assert caught.value is error
    assert (error.__context__, error.__cause__) == (reason, reason if chained else None)
    assert error.__suppress_context__ == chained
    assert (world.begun, world.running) == (["old"], 0)


async def test_a_thread_of_a_broken_reply_is_counted_and_its_result_never_used(store):
    """A plain function cannot be cut off: it keeps its place until it ends, and nobody hears what it returns."""
    begun, go, kept = threading.Event(), threading.Event(), []

    @tool(read_only=True)
    def look(at: str) -> str:
        if at == "old":
            begun.set()
            assert go.wait(HANG_S)
        return f"look {at}"

    async def first(emit: Emit) -> Reply:
        for index, each in enumerate(OLD):
            emit(chunk_of(index, each))
        assert await anyio.to_thread.run_sync(begun.wait, HANG_S)
        raise ModelUnavailableError("the stream broke off")

    async def second(emit: Emit) -> Reply:
        kept.extend(place.name for place in find_abandoned("mine"))
        for index, each in enumerate([*NEW, call("write", at="x")]):
            emit(chunk_of(index, each))
        emit(FINISH)
        go.set()
        return reply_of(*NEW, call("write", at="x"))

    agent = Agent(
        StreamingModel(first, second, done),
        tools=[look, write],
        store=store,
        settings=STREAM,
        limits=Limits(retry_wait_s=0.001),
    )
    with anyio.fail_after(HANG_S):
        run = await agent.run("go", id="mine")
    assert kept == ["look"]
    await only_of_the_reply(agent, run, ["look new", "look newer", "write x"])
    await anyio.to_thread.run_sync(settled, lambda: not find_abandoned("mine"))


# A stream that is left, or a run that is cut


def streaming(world: World) -> Model:
    """A model that streams two early calls and one behind them, then answers; it may be cut before each chunk."""
    calls = [*NEW, call("write", at="x")]

    async def line(emit: Emit) -> Reply:
        for index, each in enumerate(calls):
            await world.trap.visit()
            emit(chunk_of(index, each))
        await world.trap.visit()
        emit(FINISH)
        await world.trap.visit()
        return reply_of(*calls)

    return StreamingModel(line, done)


async def ended_by_another(store: Store, run_id: str) -> None:
    """Fail unless another worker ends the run, with the results of a reply."""
    model = (
        ScriptedModel("done") if (await Agent(ScriptedModel(), store=store).load(run_id)).turn else streaming(World())
    )
    agent = Agent(model, tools=[World().looker(), write], store=store)
    run = await agent.resume(run_id)
    for item in run.pending:  # the write was under way, and nobody knows what became of it
        await agent.settle(run_id, item.call_id, result="write x")
    run = await agent.resume(run_id)
    assert run.output == "done"
    await only_of_the_reply(agent, run, ["look new", "look newer", "write x"])


async def check_cut(store: Store, world: World, run_id: str) -> None:
    """Fail unless what the cut left behind is a run as any other, with nothing that still runs."""
    assert world.running == 0
    if run_id not in [summary.id for summary in await store.runs(limit=1_000)]:
        return
    events = (await store.read(run_id)).events
    if not any(isinstance(event, ToolsChosen) for event in events):
        assert not any(isinstance(event, ToolFinished) for event in events)
    run = await Agent(ScriptedModel(), store=store).load(run_id)
    sound_run(run)
    if not run.is_over:
        await ended_by_another(store, run_id)


async def test_a_stream_may_be_left_at_any_event(store):
    """What was started is cancelled with it, and another worker ends the run."""
    for at in range(1, 100):
        world, run_id = World(), f"run-{at}"
        agent = Agent(streaming(world), tools=[world.looker(), write], store=store)
        seen = 0
        with anyio.fail_after(HANG_S):
            async with agent.stream("go", id=run_id) as stream:
                async for _ in stream:
                    seen += 1
                    if seen == at:
                        break
        await check_cut(store, world, run_id)
        if seen < at:
            assert at > 20
            return
    pytest.fail("the stream has no end")


@pytest.mark.parametrize("watching", [False, True], ids=["run", "stream"])
@pytest.mark.parametrize("stubborn", [False, True], ids=["obedient", "stubborn"])
async def test_a_streamed_run_may_be_cancelled_at_any_await(store, watching, stubborn):
    """At each chunk, in each tool, and at every wait for the store."""
    for at in range(1, 300):
        trap = Trap(at)
        world, run_id = World(trap=trap), f"run-{at}"
        agent = Agent(
            streaming(world),
            tools=[world.looker(stubborn=stubborn), write],
            store=CancellingStore(store, trap),
            settings=STREAM,
        )
        with anyio.fail_after(HANG_S), anyio.CancelScope() as scope:
            trap.cancel = scope.cancel
            if watching:
                async with agent.stream("go", id=run_id) as stream:
                    async for _ in stream:
                        pass
            else:
                await agent.run("go", id=run_id)
            await checkpoint()
        await check_cut(store, world, run_id)
        if not trap.sprung:
            assert at > 15
            return
        assert scope.cancelled_caught
    pytest.fail("the run has no end")


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
async def test_a_worker_that_dies_at_any_write_loses_nothing(store, written):
    """What has a result keeps it, and the next worker runs what has none."""
    for at in range(1, 100):
        world, run_id = World(), f"run-{at}"
        mortal = CrashingStore(store, at, written=written)
        agent = Agent(streaming(world), tools=[world.looker(), write], store=mortal, settings=STREAM)
        try:
            with anyio.fail_after(HANG_S):
                await agent.run("go", id=run_id)
        except WorkerKilled:
            await check_cut(store, world, run_id)
            continue
        assert at > 6
        return
    pytest.fail("the run has no end")


async def test_a_result_in_the_journal_is_not_asked_for_again(store):
    """The worker dies after the first early result was written; the other call is run anew, and only that."""
    world = World()
    agent = Agent(streaming(world), tools=[world.looker(), write], store=store, settings=STREAM)
    run = await agent.step(agent.start("go", id="mine"))
    dying = agent.with_(store=CrashingStore(store, 2, written=True))
    with pytest.raises(WorkerKilled):
        await dying.step(run)
    left = await agent.load("mine")
    assert [entry.result is None for entry in left.open] == [False, True, True]
    later = World()
    run = await agent.with_(tools=[later.looker(), write], model=ScriptedModel("done")).resume("mine")
    assert later.begun == ["newer"]
    await only_of_the_reply(agent, run, ["look new", "look newer", "write x"])


# Limits, and the word of somebody else


@pytest.mark.parametrize(
    ("seconds", "outcomes"), [(0.5, []), (1.5, [Outcome.DONE, Outcome.CANCELLED])], ids=["streaming", "waiting"]
)
def test_the_time_of_the_run_ends_early_calls(seconds, outcomes):
    """While the reply streams nothing is known of them; when it is whole, what has no result yet is closed."""

    async def play(store, clock):
        world = World()

        @tool(read_only=True)
        async def glance(at: str) -> str:
            return f"glance {at}"

        agent = Agent(
            StreamingModel(whole(call("glance", at="a"), call("look", at="b")), done),
            tools=[glance, world.looker(seconds=60)],
            store=store,
            clock=clock,
            settings=STREAM,
            limits=Limits(seconds=seconds),
        )
        run = await agent.run("go")
        assert (run.state, run.stop_reason) == (State.ERROR, StopReason.TIMEOUT)
        assert [result.outcome for result in results_of(run.messages)] == outcomes
        assert world.cut == {"b": seconds}
        await sound(agent, run)

    virtually(play)


@pytest.mark.parametrize("phase", ["streaming", "waiting"])
async def test_somebody_else_may_cancel_while_early_calls_run(store, phase):
    """The driver hears of it, cancels what it started, and ends the run."""
    world, entered, ends = World(), anyio.Event(), []

    async def line(emit: Emit) -> Reply:
        emit(chunk_of(0, OLD[0]))
        emit(FINISH)
        await anyio.wait_all_tasks_blocked()
        assert world.begun == ["old"]
        if phase == "streaming":
            entered.set()
            await anyio.sleep_forever()
        return reply_of(OLD[0])

    agent = Agent(StreamingModel(line, done), tools=[world.looker(seconds=1_000)], store=store)

    async def drive() -> None:
        async with agent.stream("go", id="mine") as stream:
            async for event in stream:
                if isinstance(getattr(event, "event", None), ToolsChosen):
                    entered.set()
            ends.append(stream.run)

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive)
            await entered.wait()
            await Agent(ScriptedModel(), store=store).cancel("mine", by="ann")
    (run,) = ends
    assert (run.stop_reason, run.stop_message) == (StopReason.CANCELLED, "cancelled by ann")
    assert [r.outcome for r in results_of(run.messages)] == ([] if phase == "streaming" else [Outcome.CANCELLED])
    assert (list(world.cut), world.running) == (["old"], 0)
    await sound(agent, run)


# A model that lies


async def peek(at: str = "") -> str:
    """Peek."""
    return f"peek {at}"


def piece(index: int, name: str = "", arguments: str = "") -> CallChunk:
    """A piece of a call."""
    return CallChunk(index=index, name=name, arguments=arguments)


A, B, C = (call("look", at=at) for at in "abc")
LIES: dict[str, tuple[list[Chunk], list[Call]]] = {
    "the calls are swapped": ([chunk_of(0, A), chunk_of(1, B), FINISH], [B, A]),
    "another name": ([chunk_of(0, A), FINISH], [call("peek", at="a")]),
    "other arguments": ([chunk_of(0, A), chunk_of(1, B), FINISH], [A, C]),
    "fewer calls": ([chunk_of(0, A), chunk_of(1, B), chunk_of(2, C), FINISH], [A, B]),
    "more calls": ([chunk_of(0, A), FINISH], [A, B, C]),
    "no call": ([chunk_of(0, A), chunk_of(1, B), FINISH], []),
    "one more in front": ([chunk_of(0, A), chunk_of(1, B), FINISH], [C, A, B]),
    "no reason to stop": ([chunk_of(0, A), chunk_of(1, B)], [A, B]),
    "two reasons to stop": ([chunk_of(0, A), FINISH, FINISH], [A]),
    "calls after the reason": ([chunk_of(0, A), FINISH, chunk_of(1, B), FINISH], [A, B]),
    "arguments after the reason": ([piece(0, "look", "{}"), FINISH, piece(0, arguments='{"at": "a"}')], [A]),
    "cut off by length": (
        [chunk_of(0, A), piece(1, "look", '{"at": "'), FinishChunk(reason=FinishReason.LENGTH)],
        [A, raw_call("look", '{"at": "')],
    ),
    "filtered": ([chunk_of(0, A), FinishChunk(reason=FinishReason.CONTENT_FILTER)], [A]),
    "the second first": ([chunk_of(1, B), chunk_of(0, A), FINISH], [A, B]),
    "a gap": ([chunk_of(0, A), chunk_of(2, C), chunk_of(1, B), FINISH], [A, B, C]),
    "a call below zero": ([chunk_of(-1, A), chunk_of(0, B), FINISH], [A, B]),
    "only a call below zero": ([chunk_of(-1, A), FINISH], [A]),
    "the same index again": ([chunk_of(0, A), chunk_of(0, B), FINISH], [A, B]),
    "interleaved": (
        [piece(0, "look"), piece(1, "look"), piece(0, "", '{"at": "a"}'), piece(1, "", '{"at": "b"}'), FINISH],
        [A, B],
    ),
    "an earlier call goes on": (
        [piece(0, "look", "{}"), piece(1, "look", '{"at": "b"}'), piece(0, "", " "), chunk_of(2, C), FINISH],
        [call("look"), B, C],
    ),
    "a name in pieces": ([piece(0, "lo"), piece(0, "ok"), piece(0, "", '{"at": "a"}'), FINISH], [A]),
    "only a reason": ([FINISH], [A]),
    "nothing": ([], [A, B]),
    "an empty piece": ([piece(0), FINISH], [A]),
    "white space": ([piece(0, "look", ' \n{"at": "a"} '), FINISH], [raw_call("look", '{"at": "a"}')]),
}


def told(wanted: Call) -> str:
    """What a call of the reply has to result in."""
    return f"{wanted.name} {wanted.arguments[8:-2]}" if wanted.arguments != "{}" else f"{wanted.name} "


@pytest.mark.parametrize("lie", LIES)
async def test_a_model_that_lies_gets_the_results_of_what_it_says_in_the_end(store, lie):
    """Whatever came in pieces, each call of the reply has the result that belongs to it."""
    chunks, calls = LIES[lie]

    async def line(emit: Emit) -> Reply:
        for chunk in chunks:
            emit(chunk)
            await anyio.wait_all_tasks_blocked()
        return reply_of(*calls) if calls else Reply(text="done")

    agent = Agent(
        StreamingModel(line, done), tools=[World().looker(), tool(read_only=True)(peek)], store=store, settings=STREAM
    )
    run = await agent.run("go")
    assert run.output == "done"
    assert contents(run)[: len(calls) - (lie == "cut off by length")] == [
        told(each) for each in calls if each.arguments != '{"at": "'
    ]
    assert [r.outcome for r in results_of(run.messages)].count(Outcome.DONE) >= len(calls) - 1
    await sound(agent, run)


NAMES = st.sampled_from(["", "look", "peek", "write", "nobody"])
PIECES = st.sampled_from(["", "{}", '{"at": "a"}', '{"at": "b"}', '{"at": ', '"b"}', "x"])
CHUNKS = st.one_of(
    st.builds(CallChunk, index=st.integers(-1, 3), name=NAMES, arguments=PIECES),
    st.builds(FinishChunk, reason=st.sampled_from(FinishReason)),
    st.none(),
)
CALLS = st.builds(
    Call, st.sampled_from(["look", "peek", "write"]), st.sampled_from(["{}", '{"at": "a"}', '{"at": "b"}'])
)


@given(st.lists(CHUNKS, max_size=10), st.lists(CALLS, max_size=4), st.integers(0, 2))
def test_whatever_comes_in_pieces_the_results_are_those_of_the_reply(chunks, calls, seconds):
    """Random pieces and a random reply, with time passing in between; None lets a second pass."""

    async def play(store, clock):
        async def line(emit: Emit) -> Reply:
            for chunk in chunks:
                if chunk is None:
                    await anyio.sleep(1)
                else:
                    emit(chunk)
            return reply_of(*calls) if calls else Reply(text="done")

        world = World()
        agent = Agent(
            StreamingModel(line, done),
            tools=[world.looker(seconds=seconds), tool(read_only=True)(peek), write],
            store=store,
            clock=clock,
            settings=STREAM,
        )
        run = await agent.run("go")
        assert run.output == "done"
        assert world.running == 0
        await only_of_the_reply(agent, run, [told(each) for each in calls])
        assert [result.index for result in results_of(run.messages)] == list(range(len(calls)))

    virtually(play)
