"""Any version of a run can be compared, forked and replayed."""

from __future__ import annotations

import attrs
import pytest

from agentfsm import (
    Agent,
    ConflictError,
    IllegalTransitionError,
    Limits,
    MisuseError,
    Outcome,
    PendingKind,
    RunContext,
    Settings,
    State,
    StopReason,
    UserMessage,
    ask_user,
    difference,
    tool,
)
from agentfsm.core.calls import Phase
from agentfsm.core.events import Answered, Resumed, ToolFinished, ToolLost
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import keys_of, names, sound, valid_history


@attrs.define
class World:
    """Tools whose effects are counted outside of any run."""

    done: list[str] = attrs.field(factory=list)

    def tools(self):
        """Return a read-only, an idempotent and an unsafe tool, and a question."""

        @tool(read_only=True)
        async def look(ctx: RunContext, at: str) -> str:
            """Look."""
            self.done.append(f"look {ctx.idempotency_key}")
            return f"seen {at}"

        @tool(idempotent=True)
        async def put(ctx: RunContext) -> str:
            """Put."""
            self.done.append(f"put {ctx.idempotency_key}")
            return "put"

        @tool
        async def pay(ctx: RunContext) -> str:
            """Pay."""
            self.done.append(f"pay {ctx.idempotency_key}")
            return "paid"

        return [look, put, pay, ask_user]


@pytest.fixture
def world():
    """The world outside."""
    return World()


def agent_of(world, store, *script, **options):
    """Return an agent with the world's tools."""
    return Agent(ScriptedModel(*script), tools=world.tools(), store=store, **options)


THREE = say("", call("look", at="x"), call("put"), call("pay"))


def version_of(events, kind, nth=1):
    """The version that the nth event of a kind made."""
    return [number for number, event in enumerate(events, 1) if isinstance(event, kind)][nth - 1]


# Forks.


async def test_a_fork_of_a_finished_run_begins_before_its_end(store, world):
    """All but the last event is the same, and another model answers otherwise."""
    agent = agent_of(world, store, THREE, "first")
    run = await agent.run("go")
    other = agent.with_(model=ScriptedModel(say("second", expect="paid")))
    fork = await other.fork(run.id)
    assert (fork.version, fork.state, fork.header.forked_from, fork.header.forked_at) == (
        run.version - 1,
        State.THINK,
        run.id,
        run.version - 1,
    )
    assert await agent.load(fork.id) == fork
    ended = await other.finish(fork)
    assert (ended.output, (await agent.load(run.id)).output) == ("second", "first")
    assert len(world.done) == 3  # nothing of the prefix ran again
    await sound(agent, ended)


async def test_a_fork_keeps_the_keys_of_its_prefix_and_mints_new_ones(store, world):
    """What was called before the fork keeps the first run's keys, what comes later has the fork's own."""
    agent = agent_of(world, store, say("", call("pay")), "done")
    run = await agent.run("go", id="one")
    other = agent.with_(model=ScriptedModel(say("", call("pay")), "done"))
    fork = await other.finish(await other.fork("one", id="two"))
    keys = keys_of(fork)
    assert keys["t1.0"] == keys_of(run)["t1.0"]
    assert keys["t2.0"].startswith(f"{fork.header.nonce}:")
    assert fork.header.nonce != run.header.nonce
    assert world.done == [f"pay {keys['t1.0']}", f"pay {keys['t2.0']}"]
    assert fork.usage.tokens > run.usage.tokens


async def test_open_calls_of_a_fork_wait_unless_they_only_read(store, world):
    """They may have had their effect in the run that was forked; what only reads runs."""
    agent = agent_of(world, store, THREE, "first")
    run = await agent.run("go", id="one")
    other = agent.with_(model=ScriptedModel("second"))
    fork = await other.fork("one", at=2, id="two")
    assert names(await other.history("two"))[2:] == ["ToolLost", "ToolLost"]
    fork = await other.finish(fork)
    assert [(item.kind, item.tool) for item in fork.pending] == [
        (PendingKind.OUTCOME, "put"),
        (PendingKind.OUTCOME, "pay"),
    ]
    assert [line.split()[0] for line in world.done] == ["look", "put", "pay", "look"]
    await other.settle("two", "t1.1", result="it is there")
    await other.settle("two", "t1.2", rerun=True)
    fork = await other.resume("two")
    assert fork.output == "second"
    assert world.done[-1] == f"pay {keys_of(run)['t1.2']}"  # a person said so, and it has the key of the first
    assert run.output == "first"
    await sound(other, fork)


async def test_a_question_is_asked_in_the_fork_as_well(store, world):
    """An answer to one run is none to the other."""
    agent = agent_of(world, store, say("", call("ask_user", question="who?")), say("hi", expect="Ann"))
    run = await agent.run("go", id="one")
    other = agent.with_(model=ScriptedModel(say("hi", expect="Bob")))
    fork = await other.fork("one", id="two")
    assert [(item.kind, item.run_id) for item in fork.pending] == [(PendingKind.QUESTION, "two")]
    await other.answer("two", "t1.0", "Bob")
    await agent.answer("one", "t1.0", "Ann")
    assert (await other.resume("two")).output == (await agent.resume("one")).output == "hi"
    assert not run.is_over


async def test_a_failed_run_goes_on_from_a_fork(store, world):
    """ERROR is final, and the fork stands before it."""
    agent = agent_of(world, store, say("", call("look", at="x")), limits=Limits(turns=1))
    run = await agent.run("go")
    assert run.stop_reason is StopReason.MAX_TURNS
    other = agent.with_(model=ScriptedModel("now"), limits=Limits(turns=5))
    assert (await other.finish(await other.fork(run.id))).output == "now"


async def test_a_paused_run_is_forked_awake(store, world):
    """The pause is of the run that was paused."""
    agent = agent_of(world, store, say("", call("look", at="x")), "done", pause_before={State.ACT})
    run = await agent.run("go")
    assert run.paused is not None
    other = agent.with_(model=ScriptedModel("done"), pause_before=())
    fork = await other.fork(run.id)
    assert fork.paused is None
    assert isinstance((await other.history(fork.id))[-1], Resumed)
    assert (await other.finish(fork)).output == "done"


async def test_a_fork_with_an_edited_result(store, world):
    """Another result in place of what a tool said, and the model reads that."""
    agent = agent_of(world, store, say("", call("look", at="x")), say("first", expect="seen x"))
    run = await agent.run("go")
    history = await agent.history(run.id)
    at = version_of(history, ToolFinished)
    edited = attrs.evolve(history[at - 1], result=attrs.evolve(history[at - 1].result, content="seen nothing"))
    other = agent.with_(model=ScriptedModel(say("second", expect="seen nothing")))
    fork = await other.fork(run.id, edit={at: edited}, prompt="go elsewhere")
    assert isinstance(fork.messages[0], UserMessage)
    assert fork.messages[0].text == "go elsewhere"
    assert (await other.finish(fork)).output == "second"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"at": -1}, MisuseError, "versions are 0 to"),
        ({"at": 99}, MisuseError, "versions are 0 to"),
        ({"at": 2, "edit": {3: Resumed()}}, MisuseError, "no 3 to edit"),
        ({"at": 2, "edit": {0: Resumed()}}, MisuseError, "no 0 to edit"),
        ({"at": 2, "edit": {1: ToolLost(call_id="t1.0")}}, IllegalTransitionError, "does not fit"),
        ({"id": "one"}, ConflictError, "exists"),
        ({"prompt": ""}, MisuseError, "empty"),
    ],
)
async def test_a_fork_that_makes_no_run_is_refused(store, world, options, error, words):
    """Each with what is wrong; and nothing is left in the store."""
    agent = agent_of(world, store, say("", call("look", at="x")), "done")
    await agent.run("go", id="one")
    with pytest.raises(error, match=words):
        await agent.fork("one", **options)
    assert len(await store.runs()) == 1


async def test_the_end_of_a_run_is_no_beginning(store, world):
    """A prefix that holds the end is refused, with the way out."""
    agent = agent_of(world, store, "done")
    run = await agent.run("go")
    with pytest.raises(MisuseError, match="fork it at an earlier one"):
        await agent.fork(run.id, at=run.version)


async def test_every_version_can_be_forked(store, world):
    """Whatever it is forked at, the fork is sound, ends, and no effect of the first run is repeated unasked."""
    agent = agent_of(world, store, THREE, say("", call("pay")), "done")
    run = await agent.run("go")
    effects = [line for line in world.done if not line.startswith("look")]

    def think(request):
        return "done" if any(getattr(message, "calls", ()) for message in request.messages) else "nothing was done"

    other = agent.with_(model=FunctionModel(think))
    for at in range(run.version):
        fork = await other.finish(await other.fork(run.id, at=at))
        while fork.pending:
            for item in fork.pending:
                await other.settle(fork.id, item.call_id, failed="it was not")
            fork = await other.resume(fork.id)
        assert fork.state is State.DONE, at
        valid_history(fork.messages)
        await sound(other, fork)
    assert [line for line in world.done if not line.startswith("look")] == effects


async def test_a_fork_goes_on_from_what_the_first_went_on_from(store, world):
    """Of a run in a session the fork has the history, and belongs to no session."""
    agent = agent_of(world, store, "one", "two")
    await agent.run("first", session="s")
    run = await agent.run("second", session="s")
    other = agent.with_(model=ScriptedModel(say("three", expect="second")))
    fork = await other.finish(await other.fork(run.id))
    assert [message.text for message in fork.messages] == ["first", "one", "second", "three"]
    assert fork.session is None


# Replays.


async def test_a_replay_calls_nobody(store, world):
    """The fold is the run, and no model and no tool was called."""
    agent = agent_of(world, store, THREE, "done")
    run = await agent.run("go")
    before = list(world.done)
    model = ScriptedModel()
    told = await agent.with_(model=model).replay(run.id)
    assert (told.run, told.checked, told.is_faithful, told.divergences) == (run, 2, True, ())
    assert (world.done, model.requests) == (before, [])


@pytest.mark.parametrize(
    "change",
    [
        {"instructions": "other"},
        {"settings": Settings(temperature=0.5)},
        {"tools": []},
    ],
    ids=["instructions", "settings", "tools"],
)
async def test_a_replay_finds_what_would_be_asked_otherwise(store, world, change):
    """Each request is told, with the part that differs."""
    agent = agent_of(world, store, say("", call("look", at="x")), "done")
    run = await agent.run("go")
    told = await agent.with_(**change).replay(run.id)
    assert [(each.turn, len(each.what)) for each in told.divergences] == [(1, 1), (2, 1)]
    assert [each.version for each in told.divergences] == [2, run.version]  # of the call, and of the answer
    assert all("the agent" in each.what[0] for each in told.divergences)
    assert not told.is_faithful


async def test_a_replay_of_an_edited_history_finds_the_messages(store, world):
    """The hash of a request is of what was asked: a journal that was changed afterwards does not fit."""
    agent = agent_of(world, store, say("", call("look", at="x")), "done")
    run = await agent.run("go")
    history = await agent.history(run.id)
    at = version_of(history, ToolFinished)
    edited = attrs.evolve(history[at - 1], result=attrs.evolve(history[at - 1].result, content="forged"))
    last = history[-1]
    fork = await agent.fork(run.id, edit={at: edited})
    other = agent.with_(model=ScriptedModel("done"))
    ended = await other.finish(fork)
    assert (await other.replay(ended.id)).is_faithful  # its own requests were asked as they are now
    asked = [event.request for event in await other.history(ended.id) if isinstance(event, Answered)]
    assert asked[0] == history[1].request
    assert asked[1].split("-")[0] == last.request.split("-")[0]
    assert asked[1].split("-")[1] != last.request.split("-")[1]


async def test_a_streamed_request_is_the_same_request(store, world):
    """How the answer is sent is no part of the question."""
    agent = agent_of(world, store, say("", call("look", at="x")), "done")
    run = await agent.run("go")
    assert (await agent.with_(settings=Settings(stream=True)).replay(run.id)).is_faithful


async def test_a_run_that_waits_can_be_replayed(store, world):
    """Up to where it stands."""
    agent = agent_of(world, store, say("", call("ask_user", question="who?")))
    run = await agent.run("go")
    told = await agent.replay(run.id)
    assert (told.run, told.checked, told.is_faithful) == (run, 1, True)


async def test_a_compacted_run_is_replayed_faithfully(store, world):
    """Where the window starts is part of the request."""
    model = ScriptedModel(*[say("x" * 400, call("look", at=f"{n}" * 300)) for n in range(8)], "done")
    model.window_tokens = 5_200
    agent = Agent(model, tools=world.tools(), store=store)
    run = await agent.run("go")
    assert run.cutoff > 0
    told = await agent.replay(run.id)
    assert (told.checked, told.divergences) == (9, ())


# Differences.


async def test_the_difference_of_two_versions(store, world):
    """What came in between: messages, state, calls."""
    agent = agent_of(world, store, say("", call("pay")), "done")
    run = await agent.run("go")
    early, late = await agent.load(run.id, at=2), await agent.load(run.id, at=3)
    told = difference(early, late)
    assert told.calls == {"t1.0": (Phase.INTENDED, Phase.RUNNING)}
    assert (told.removed, told.added, told.changed["version"]) == ((), (), (2, 3))
    whole = difference(early, run)
    assert [type(message).__name__ for message in whole.added] == [
        "AssistantMessage",
        "ToolResult",
        "AssistantMessage",
    ]
    assert whole.changed["state"] == (State.ACT, State.DONE)
    assert whole.lines()[-1] == "+ assistant: 'done'"
    assert any("pay({})" in line for line in whole.lines())


async def test_a_run_does_not_differ_from_itself(store, world):
    """And says so."""
    agent = agent_of(world, store, "done")
    run = await agent.run("go")
    told = difference(run, await agent.load(run.id))
    assert not told
    assert told.lines() == []


async def test_the_difference_of_a_run_and_its_fork(store, world):
    """Where they part, and what each says."""
    agent = agent_of(world, store, say("", call("look", at="x")), "one")
    run = await agent.run("go")
    other = agent.with_(model=ScriptedModel("two"), instructions="otherwise")
    fork = await other.finish(await other.fork(run.id))
    told = difference(run, fork)
    assert told.shared == 3
    assert [message.text for message in (*told.removed, *told.added)] == ["one", "two"]
    assert told.agent == ("other instructions",)
    assert "  agent: other instructions" in told.lines()
    assert Outcome.DONE.value in "\n".join(difference(await agent.load(run.id, at=1), run).lines())


async def test_the_difference_of_two_arms_of_an_experiment():
    """The release and the arms are what the runs were assigned to."""
    agent = Agent(ScriptedModel("one", "one"))
    first = await agent.run("go", release="1", arms={"tone": "warm"})
    second = await agent.run("go", release="2", arms={"tone": "cold"})
    told = difference(first, second)
    assert told.changed["release"] == ("1", "2")
    assert told.changed["arms"] == ({"tone": "warm"}, {"tone": "cold"})
    assert "release" not in difference(first, first).changed
