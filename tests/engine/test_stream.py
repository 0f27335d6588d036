"""Watching a run: typed, numbered events, nothing dropped, nothing left behind, and no harm to the run."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import (
    Agent,
    CallDelta,
    ConflictError,
    LeaseHeldError,
    MisuseError,
    ModelError,
    Run,
    RunEnded,
    State,
    StateChanged,
    StopReason,
    StoreError,
    StreamEvent,
    TextDelta,
    ToolEvent,
    Usage,
    UsageReported,
    tool,
)
from agentfsm.ports import CallChunk, Emit, Model, ProposedCall, Reply, Request, TextChunk
from agentfsm.stores import MemoryStore
from agentfsm.streaming.stream import MERGE_THRESHOLD, RunStream, build_delta_factory
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, say
from tests.support.checks import HANG_S, names, no_leases, sound

VISITED = ["think", "act", "reflect", "observe", "think", "done"]


@tool(read_only=True)
async def look(at: str = "") -> str:
    """Look."""
    return f"saw {at}"


def looking(store) -> Agent:
    """An agent that looks twice, and answers."""
    lines = [say("Let me look at it.", call("look", at="x"), call("look", at="y")), "It is a fine thing."]
    return Agent(ScriptedModel(*lines), tools=[look], store=store)


async def watched(agent: Agent, *args: object, **options: object) -> tuple[list[StreamEvent], Run]:
    """All events of a stream, and the run that it ends with."""
    with anyio.fail_after(HANG_S):
        async with agent.stream(*args, **options) as stream:
            events = [event async for event in stream]
            assert [event async for event in stream] == []
    return events, stream.run


async def test_every_kind_of_event_is_seen_in_its_place(store):
    """States, texts, calls, tools, usage, and the end, in the order in which they happen."""
    events, run = await watched(looking(store), "look")
    assert {type(event) for event in events} == {
        StateChanged,
        TextDelta,
        CallDelta,
        ToolEvent,
        UsageReported,
        RunEnded,
    }
    states = [(str(event.state), type(event.event).__name__) for event in events if isinstance(event, StateChanged)]
    assert states == [
        ("think", "Observed"),
        ("act", "ToolsChosen"),
        ("reflect", "ToolsReturned"),
        ("observe", "Continued"),
        ("think", "Observed"),
        ("done", "AnswerGiven"),
    ]
    kinds = [type(event).__name__ for event in events]
    assert kinds.index("TextDelta") < kinds.index("CallDelta") < kinds.index("ToolEvent")
    assert isinstance(events[-1], RunEnded)
    assert events[-1].run == run
    assert {event.run_id for event in events} == {run.id}
    await sound(looking(store), run)


async def test_a_change_of_state_carries_its_event_of_the_journal(store):
    """Each is equal to that of the journal, with its time, so that a reader need not read the journal as well."""
    agent = looking(store)
    events, run = await watched(agent, "look")
    moved = [event.event for event in events if isinstance(event, StateChanged)]
    assert moved == [each for each in await agent.history(run.id) if each in moved]
    assert all(each.at for each in moved)


async def test_events_are_numbered_without_gaps(store):
    """From 1, by one, whoever reads."""
    events, _ = await watched(looking(store), "look")
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


async def test_the_deltas_joined_are_the_text(store):
    """Nothing of the answer is missing and nothing comes twice, in any turn."""
    events, run = await watched(looking(store), "look")
    for turn, text in ((1, "Let me look at it."), (2, "It is a fine thing.")):
        joined = "".join(e.text for e in events if isinstance(e, TextDelta) and e.turn == turn)
        assert joined == text
    assert run.output == "It is a fine thing."


async def test_the_pieces_of_calls_joined_are_the_calls(store):
    """Name first, then the arguments, under the id that the call will have."""
    events, run = await watched(looking(store), "look")
    deltas = [event for event in events if isinstance(event, CallDelta)]
    wanted = [("t1.0", "look", '{"at": "x"}'), ("t1.1", "look", '{"at": "y"}')]
    for index, (call_id, name, arguments) in enumerate(wanted):
        own = [delta for delta in deltas if delta.index == index]
        assert {delta.call_id for delta in own} == {call_id}
        assert "".join(delta.name for delta in own) == name
        assert "".join(delta.arguments for delta in own) == arguments
    assert [asked.id for asked in run.messages[1].calls] == ["t1.0", "t1.1"]


async def test_usage_is_told_with_each_reply(store):
    """Of the call, and of the run so far."""
    events, run = await watched(looking(store), "look")
    told = [event for event in events if isinstance(event, UsageReported)]
    assert [(event.turn, event.usage.tokens, event.total.tokens) for event in told] == [(1, 15, 15), (2, 15, 30)]
    assert told[-1].total == run.usage


async def test_tool_events_name_run_turn_and_call(store):
    """What the queue tells is completed by what it does not know."""
    events, run = await watched(looking(store), "look")
    tools = [event for event in events if isinstance(event, ToolEvent)]
    assert {(event.run_id, event.turn) for event in tools} == {(run.id, 1)}
    assert Counter(str(event.type) for event in tools) == {
        "tool_queued": 2,
        "tool_started": 2,
        "tool_completed": 2,
        "queue_drained": 1,
    }


async def test_a_watched_run_writes_the_journal_of_an_unwatched_one(store):
    """One path, watched or not."""
    agent = looking(store)
    _, seen = await watched(agent, "look")
    other = looking(store)
    unseen = await other.run("look")
    assert names(await agent.history(seen.id)) == names(await agent.history(unseen.id))
    assert [type(message) for message in seen.messages] == [type(message) for message in unseen.messages]


async def test_nothing_is_streamed_where_nobody_watches(store):
    """Without a watcher the model is asked for a whole reply."""
    emits: list[Emit | None] = []

    class Noting(Model):
        name = "noting"

        async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
            emits.append(emit)
            return Reply(text="done")

    agent = Agent(Noting(), store=store)
    await agent.run("go")
    await watched(agent, "go")
    assert emits[0] is None
    assert emits[1] is not None


# A run, a wait, an end


async def test_a_stream_drives_a_run_that_was_begun(store):
    """It takes a run as well as a prompt, and shows what is left of it."""
    agent = looking(store)
    run = await agent.step(await agent.step(agent.start("look")))
    events, done = await watched(agent, run)
    assert done.id == run.id
    assert [str(event.state) for event in events if isinstance(event, StateChanged)] == VISITED[2:]
    assert done.output == "It is a fine thing."


async def test_a_stream_of_a_run_that_is_over_only_says_so(store):
    """One event."""
    agent = looking(store)
    run = await agent.run("look")
    events, same = await watched(agent, run)
    assert [type(event) for event in events] == [RunEnded]
    assert same == run


async def test_a_stream_ends_where_the_run_waits(store):
    """The last event carries the run with what it waits for."""

    @tool(requires_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent = Agent(ScriptedModel(say("", call("pay")), "done"), tools=[pay], store=store)
    events, run = await watched(agent, "pay")
    assert isinstance(events[-1], RunEnded)
    assert [item.call_id for item in events[-1].run.pending] == ["t1.0"]
    await agent.approve(run.id, "t1.0")
    events, run = await watched(agent, run)
    assert run.output == "done"


async def test_a_run_that_fails_is_an_end_like_any_other(store):
    """ERROR is a state, not an exception."""
    events, run = await watched(Agent(ScriptedModel(fail(ModelError("401"))), store=store), "go")
    assert run.stop_reason is StopReason.MODEL_ERROR
    assert [str(event.state) for event in events if isinstance(event, StateChanged)] == ["think", "error"]


# Errors


async def read(stream: RunStream, into: list[StreamEvent] | None = None) -> None:
    """Read a stream to its end."""
    async with stream:
        async for event in stream:
            if into is not None:
                into.append(event)


async def test_an_error_of_the_driving_call_is_raised_to_the_reader(store):
    """It comes where the events end, as itself."""
    agent = Agent(ScriptedModel(fail(ZeroDivisionError("a bug"))), store=store)
    seen: list[StreamEvent] = []
    stream = agent.stream("go", id="mine")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await read(stream, seen)
    assert [type(event) for event in seen] == [StateChanged]
    assert stream.run.state is State.THINK


async def test_a_conflict_is_raised_to_the_reader(store):
    """A run that somebody else drives is refused, before any event."""
    agent = looking(store)
    run = await agent.step(agent.start("look"))
    await agent.step(run)
    with pytest.raises(ConflictError, match=r"agent\.load"):
        await read(agent.stream(run))


async def test_an_error_that_nobody_read_is_raised_where_the_block_is_left(store):
    """A reader that only waits for the end is told, too."""
    ready = anyio.Event()

    def answer(_request: Request) -> str:
        ready.set()
        raise ZeroDivisionError("a bug")

    async def wait() -> None:
        async with Agent(FunctionModel(answer), store=store).stream("go"):
            await ready.wait()
            await anyio.wait_all_tasks_blocked()

    with pytest.raises(ZeroDivisionError, match="a bug"):
        await wait()


async def test_an_error_of_the_reader_is_its_own(store):
    """What the block raises comes out as it is, and the run can be resumed."""
    agent = looking(store)

    async def fails() -> None:
        async with agent.stream("look", id="mine") as stream:
            async for _ in stream:
                raise LookupError("an error of mine")

    with pytest.raises(LookupError, match="of mine"):
        await fails()
    assert (await agent.resume("mine")).output == "It is a fine thing."


class Failing(MemoryStore):
    """A store that cannot write any more."""

    def append(self, *_args: object, **_options: object) -> object:
        """Fail."""
        raise StoreError("the disk is full")


async def test_a_store_that_fails_is_told():
    """The error of the journal reaches the reader, and no lease is kept."""
    kept = Failing()
    with pytest.raises(StoreError, match="disk is full"):
        await read(looking(kept).stream("go"))
    await no_leases(kept)


# Leaving early


@pytest.mark.parametrize("after", range(1, 16))
async def test_leaving_early_leaves_a_run_that_can_be_resumed(store, after):
    """After any number of events: the driving call is cancelled, its lease is free, and the run goes on."""
    agent = looking(store)
    with anyio.fail_after(HANG_S):
        async with agent.stream("look", id="mine") as stream:
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == after:
                    break
        await no_leases(store)
        run = await agent.with_(model=FunctionModel(_rest)).resume("mine")
    assert run.output == "It is a fine thing."
    assert [record.call_id for record in run.calls] == ["t1.0", "t1.1"]
    await sound(agent, run)


def _rest(request: Request) -> Reply:
    if len(request.messages) > 1:
        return Reply(text="It is a fine thing.")
    calls = tuple(ProposedCall(id=at, name="look", arguments=f'{{"at": "{at}"}}') for at in "xy")
    return Reply(text="Let me look at it.", calls=calls)


async def test_a_block_without_a_reader_cancels_the_run(store):
    """Leaving at once is leaving early."""
    agent = Agent(FunctionModel(lambda _r: anyio.sleep_forever()), store=store)
    with anyio.fail_after(HANG_S):
        async with agent.stream("look", id="mine"):
            pass
    await no_leases(store)
    assert [summary.state for summary in await store.runs()] in ([], [State.OBSERVE], [State.THINK])


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, GeneratorExit])
async def test_what_the_reader_raises_leaves_the_block_as_it_is(store, kind):
    """No group is put around it, whatever it is."""
    agent = Agent(FunctionModel(lambda _r: anyio.sleep_forever()), store=store)
    with anyio.fail_after(HANG_S):
        with pytest.raises(kind, match="the reader's own"):
            async with agent.stream("go"):
                raise kind("the reader's own")
        await no_leases(store)


async def test_a_generator_that_reads_a_stream_may_be_closed_early(store):
    """As a web service does with what it sends, when nobody reads it any more."""
    agent = Agent(FunctionModel(lambda _r: anyio.sleep_forever()), store=store)

    async def texts() -> AsyncGenerator[StreamEvent, None]:
        async with agent.stream("go", id="mine") as stream:
            async for event in stream:
                yield event

    with anyio.fail_after(HANG_S):
        async with aclosing(texts()) as events:
            async for event in events:
                assert isinstance(event, StateChanged)
                break
        await no_leases(store)
    assert not (await agent.load("mine")).is_over


async def test_the_watchers_own_cancellation_ends_the_drive(store):
    """The task that watches is cancelled, so the run is, as by any task cancellation."""
    agent = Agent(FunctionModel(lambda _r: anyio.sleep_forever()), store=store)
    with anyio.fail_after(HANG_S), anyio.CancelScope() as scope:
        async with agent.stream("go", id="mine") as stream:
            async for event in stream:
                if isinstance(event, StateChanged):
                    scope.cancel()
        await checkpoint()
    assert scope.cancelled_caught
    await no_leases(store)
    assert (await agent.load("mine")).state is State.THINK


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_native_cancellation_of_the_watcher_is_not_swallowed(store, anyio_backend):
    """`task.cancel()` ends the task that watches: asyncio asks only once."""
    agent = Agent(FunctionModel(lambda _r: anyio.sleep_forever()), store=store)
    inside = anyio.Event()
    after: list[str] = []

    async def watch() -> None:
        async with agent.stream("go", id="mine") as stream:
            async for event in stream:
                if isinstance(event, StateChanged):
                    inside.set()
        after.append("the block was left as if nothing had happened")

    task = asyncio.ensure_future(watch())
    with anyio.fail_after(HANG_S):
        await inside.wait()
        await anyio.wait_all_tasks_blocked()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not after
    assert task.cancelled()
    await no_leases(store)
    assert (await agent.load("mine")).state is State.THINK


async def test_while_it_is_watched_the_run_is_owned(store):
    """Nobody else may drive it at the same time."""
    agent = Agent(FunctionModel(lambda _r: anyio.sleep_forever()), store=store)
    with anyio.fail_after(HANG_S):
        async with agent.stream("go", id="mine") as stream:
            async for _ in stream:
                with pytest.raises(LeaseHeldError):
                    await agent.resume("mine", wait=False)
                break


# Slow readers


class Chatty(Model):
    """A model that says many words and makes one call of many pieces, without ever waiting."""

    name = "chatty"
    words = 20 * MERGE_THRESHOLD

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Talk."""
        assert emit is not None
        if len(request.messages) > 1:
            emit(TextChunk(text="done"))
            return Reply(text="done", usage=Usage(input_tokens=1, output_tokens=1))
        for number in range(self.words):
            emit(TextChunk(text=f"{number} "))
        emit(CallChunk(index=0, name="look"))
        arguments = '{"at": "' + "x" * self.words + '"}'
        for letter in arguments:
            emit(CallChunk(index=0, arguments=letter))
        text = "".join(f"{number} " for number in range(self.words))
        calls = (ProposedCall(id="a", name="look", arguments=arguments),)
        return Reply(text=text, calls=calls, usage=Usage(input_tokens=1, output_tokens=1))


@pytest.mark.parametrize("slow", [False, True])
async def test_a_slow_reader_gets_merged_deltas_and_loses_nothing(store, slow):
    """The buffer stays small, the numbers have no gaps, and the pieces joined are the whole."""
    agent = Agent(Chatty(), tools=[look], store=store)
    events: list[StreamEvent] = []
    with anyio.fail_after(HANG_S):
        async with agent.stream("talk") as stream:
            async for event in stream:
                events.append(event)
                if slow:
                    await checkpoint()
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    said = "".join(event.text for event in events if isinstance(event, TextDelta) and event.turn == 1)
    assert said == "".join(f"{number} " for number in range(Chatty.words))
    deltas = [event for event in events if isinstance(event, CallDelta)]
    assert "".join(delta.arguments for delta in deltas) == '{"at": "' + "x" * Chatty.words + '"}'
    assert [delta.name for delta in deltas if delta.name] == ["look"]
    assert len(events) < 2 * MERGE_THRESHOLD
    assert stream.run.output == "done"


class Paced(Model):
    """A model whose words come in bursts: it waits as soon as so many are out."""

    name = "paced"
    words = 2 * MERGE_THRESHOLD

    def __init__(self, burst: int) -> None:
        """Take the size of a burst."""
        self._burst = burst

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Talk."""
        assert emit is not None
        for number in range(self.words):
            emit(TextChunk(f"{number} "))
            if number % self._burst == self._burst - 1:
                await checkpoint()
        return Reply(text="".join(f"{number} " for number in range(self.words)), usage=Usage(output_tokens=1))


@pytest.mark.parametrize("burst", [1, 7, MERGE_THRESHOLD // 4])
async def test_a_reader_that_keeps_up_gets_each_piece_by_itself(store, burst):
    """Nothing is merged while the buffer has room, and every piece is the event that the constructor would make."""
    events, run = await watched(Agent(Paced(burst), store=store), "talk")
    texts = [event for event in events if isinstance(event, TextDelta)]
    assert texts == [
        TextDelta(seq=texts[0].seq + number, run_id=run.id, turn=1, attempt=1, text=f"{number} ")
        for number in range(Paced.words)
    ]


def test_deltas_of_one_text_share_nothing():
    """Each is a frozen value of its own."""
    delta = build_delta_factory(TextDelta, "mine", 1, 2)
    first, second = delta("a"), delta("b")
    assert first == TextDelta(run_id="mine", turn=1, attempt=2, text="a")
    assert second == TextDelta(run_id="mine", turn=1, attempt=2, text="b")
    with pytest.raises(AttributeError):
        first.text = "c"


async def test_a_name_in_pieces_survives_the_merging(store):
    """A model that streams the tool's name in pieces, too, is understood by a slow reader."""

    class Spelling(Model):
        name = "spelling"

        async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
            assert emit is not None
            if len(request.messages) > 1:
                return Reply(text="done")
            for _ in range(MERGE_THRESHOLD):
                emit(TextChunk("x"))
            for letter in "look":
                emit(CallChunk(index=0, name=letter))
            for _ in range(MERGE_THRESHOLD):
                emit(CallChunk(index=0, arguments=" "))
            return Reply(calls=(ProposedCall(id="a", name="look", arguments="{}"),))

    events, _ = await watched(Agent(Spelling(), tools=[look], store=store), "talk")
    assert "".join(event.name for event in events if isinstance(event, CallDelta)) == "look"
    assert len([event for event in events if isinstance(event, CallDelta)]) < MERGE_THRESHOLD


async def test_two_calls_are_never_merged_into_one(store):
    """Pieces of different calls stay apart, however full the buffer."""

    class Interleaved(Model):
        name = "interleaved"

        async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
            assert emit is not None
            if len(request.messages) > 1:
                return Reply(text="done")
            for index in range(2):
                emit(CallChunk(index=index, name="look"))
            for number in range(2 * MERGE_THRESHOLD):
                emit(CallChunk(index=number % 2, arguments="ab"[number % 2]))
            return Reply(calls=(ProposedCall(id="a", name="look", arguments="{}"),) * 2)

    events, _ = await watched(Agent(Interleaved(), tools=[look], store=store), "talk")
    for index, letter in enumerate("ab"):
        joined = "".join(event.arguments for event in events if isinstance(event, CallDelta) and event.index == index)
        assert joined == letter * MERGE_THRESHOLD


async def test_events_go_into_json(store):
    """Each is a dict of plain values with its type's name, for a server to send."""
    events, run = await watched(looking(store), "look")
    told = [json.loads(json.dumps(event.to_dict())) for event in events]
    assert {each["type"] for each in told} == {
        "state_changed",
        "text_delta",
        "call_delta",
        "usage",
        "run_ended",
        "tool_queued",
        "tool_started",
        "tool_completed",
        "queue_drained",
    }
    assert told[-1] == {
        "type": "run_ended",
        "seq": len(told),
        "run_id": run.id,
        "turn": 2,
        "state": "done",
        "stop_reason": "completed",
        "pending": [],
    }


async def test_an_agent_at_work_as_a_tool_goes_into_json_too(store):
    """It begins, has turns of so many, and ends; the call around it says that an agent is behind it."""
    child = looking(store).with_(name="scout")
    agent = Agent(ScriptedModel(say("", call("scout", query="x")), "done"), tools=[child.as_tool(turns=5)], store=store)
    events, run = await watched(agent, "look")
    told = [json.loads(json.dumps(event.to_dict())) for event in events]
    (started,) = [each for each in told if each["type"] == "tool_started" and each["run_id"] == run.id]
    assert started["kind"] == "agent"
    first, *between, last = [each for each in told if each["type"].startswith("agent_")]
    who = {"run_id": run.id, "call_id": "t1.0", "agent": "scout", "child_id": f"{run.id}.t1.0", "limit": 5}
    for each in (first, *between, last):
        assert who.items() <= each.items()
    assert [(each["type"], each["turn"]) for each in between] == [("agent_progress", 1), ("agent_progress", 2)]
    assert (first["type"], last["type"], last["success"]) == ("agent_started", "agent_completed", True)
    assert [each["seq"] for each in told] == list(range(1, len(told) + 1))


async def test_a_stream_is_watched_in_a_block_and_once():
    """Who forgets the block, or enters it again, is shown the form; the run is there from the beginning."""
    stream = Agent(ScriptedModel("done")).stream("go", id="mine")
    assert (stream.run.id, stream.run.state) == ("mine", State.OBSERVE)
    with pytest.raises(MisuseError, match=r"entered before it is read: async with agent\.stream"):
        await anext(aiter(stream))
    await read(stream)
    assert stream.run.output == "done"
    with pytest.raises(MisuseError, match=r"entered only once.*async with agent\.stream"):
        await read(stream)
