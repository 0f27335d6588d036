"""The rungs of control: start, step, steps, finish, run; what they refuse, and how histories go on."""

from __future__ import annotations

import gc

import anyio
import attrs
import pytest

from agentfsm import (
    Agent,
    AssistantMessage,
    ConflictError,
    ImagePart,
    LeaseHeldError,
    MisuseError,
    ModelError,
    Outcome,
    RunContext,
    State,
    StopReason,
    TextPart,
    ToolCall,
    ToolResult,
    tool,
)
from agentfsm.ports import Model, Request
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, say
from tests.support.checks import HANG_S, calls_of, names, reach, sound, texts, valid_history


def echo_agent(store, **options) -> Agent:
    """An agent that answers with the newest message."""
    return Agent(FunctionModel(lambda request: f"re: {request.messages[-1].text}"), store=store, **options)


# start


@pytest.mark.parametrize(
    "prompt",
    ["", "  \n", [], [TextPart(text=" ")], None, 5, b"bytes", ["text"], {"role": "user"}],
    ids=repr,
)
def test_a_prompt_that_says_nothing_or_is_none_is_refused(prompt):
    """What is empty, or is neither text nor parts, is the caller's mistake."""
    with pytest.raises(MisuseError, match=r"empty|prompt"):
        Agent(ScriptedModel()).start(prompt)


@pytest.mark.parametrize(
    "prompt",
    ["hello", TextPart(text="hello"), [TextPart(text="hello")], (TextPart(text="hello"), ImagePart(url="https://a/b"))],
    ids=["text", "part", "list", "tuple"],
)
def test_a_prompt_is_text_or_parts(prompt):
    """Each way to write a prompt begins a run in OBSERVE that has done nothing yet."""
    run = Agent(ScriptedModel()).start(prompt)
    assert (run.state, run.version, run.turn, run.messages, run.pending) == (State.OBSERVE, 0, 0, (), ())
    assert run.header.prompt[0] == TextPart(text="hello")


def test_an_image_alone_is_a_prompt():
    """A picture says enough."""
    run = Agent(ScriptedModel()).start(ImagePart(url="data:image/png;base64,AAAA"))
    assert len(run.header.prompt) == 1


def test_two_histories_are_refused():
    """messages= is a history to go on from, as after= and session= are. A new session may branch off after a run."""
    agent = Agent(ScriptedModel("one", "two", "three"))
    earlier = agent.run_sync("hello")
    branch = agent.run_sync("more", after=earlier, session="s")
    assert [message.text for message in branch.messages] == ["hello", "one", "more", "two"]
    assert len(agent.run_sync("more", session="s").messages) == 6
    with pytest.raises(ConflictError, match="name another session"):
        agent.run_sync("more", after=earlier, session="s")
    for options in (
        {"after": earlier, "messages": earlier.messages},
        {"session": "s", "messages": earlier.messages},
    ):
        with pytest.raises(MisuseError, match="one of them"):
            agent.start("more", **options)


def test_after_a_run_that_is_not_over_is_refused():
    """One can only go on from a run that has ended."""
    agent = Agent(ScriptedModel())
    with pytest.raises(MisuseError, match="OBSERVE"):
        agent.start("more", after=agent.start("hello"))


@pytest.mark.parametrize("run_id", ["", "x" * 201, "a\nb", "a\x00b", "\x1b[2J", 17], ids=repr)
def test_a_strange_id_is_refused(run_id):
    """An id is what a person can type and any store can hold."""
    with pytest.raises(MisuseError, match="id"):
        Agent(ScriptedModel()).start("hello", id=run_id)


@pytest.mark.parametrize("run_id", ["x", "x" * 200, "order/17 (二)"], ids=len)
async def test_an_id_of_the_users_own_is_kept(store, run_id):
    """The id given is the id stored."""
    run = await echo_agent(store).run("hello", id=run_id)
    assert run.id == run_id
    assert (await echo_agent(store).load(run_id)) == run


@pytest.mark.parametrize("bad", [{"a": object()}, {"a": float("nan")}, {"a": {1, 2}}, {"a": b"x"}], ids=repr)
def test_metadata_that_is_no_json_is_refused(bad):
    """Metadata is stored with the run, so it has to be JSON; the error says so."""
    with pytest.raises(MisuseError, match="JSON"):
        Agent(ScriptedModel()).start("hello", metadata=bad)


def test_metadata_that_contains_itself_is_refused():
    """A cyclic value is no JSON."""
    bad: dict[str, object] = {}
    bad["self"] = bad
    with pytest.raises(MisuseError, match="JSON"):
        Agent(ScriptedModel()).start("hello", metadata=bad)


def nested(depth):
    """Return an object of so many levels."""
    value: dict[str, object] = {}
    for _ in range(depth - 1):
        value = {"in": value}
    return value


def test_metadata_that_some_readers_could_not_follow_is_refused():
    """What is deeper than 200 levels is refused before anything is stored; up to there it is kept."""
    agent = Agent(ScriptedModel())
    assert agent.start("hello", metadata=nested(200)).metadata == nested(200)
    with pytest.raises(MisuseError, match=r"metadata must be plain JSON.*deeper than 200"):
        agent.start("hello", metadata=nested(201))


def test_metadata_is_a_copy_that_nobody_can_change():
    """What the caller changes later is not the run's, and the run's own is read-only."""
    mine = {"order": {"id": 17}}
    run = Agent(ScriptedModel()).start("hello", metadata=mine)
    mine["order"]["id"] = 18
    assert run.metadata == {"order": {"id": 17}}
    with pytest.raises(TypeError):
        run.metadata["order"] = None  # type: ignore[index]


def a_call(call_id: str, arguments: str = "{}") -> ToolCall:
    """A call of a history from outside."""
    return ToolCall(id=call_id, name="x", arguments=arguments, key=call_id)


def a_result(call_id: str) -> ToolResult:
    """A result of a history from outside."""
    return ToolResult(call_id=call_id, tool="x", outcome=Outcome.DONE, content="")


TORN = {
    "no result": (AssistantMessage(calls=(a_call("t1.0"),)),),
    "no call": (a_result("t1.0"),),
    "two results": (AssistantMessage(calls=(a_call("t1.0"),)), a_result("t1.0"), a_result("t1.0")),
    "another order": (AssistantMessage(calls=(a_call("t1.0"), a_call("t1.1"))), a_result("t1.1"), a_result("t1.0")),
    "an id twice": (AssistantMessage(calls=(a_call("t1.0"), a_call("t1.0"))), a_result("t1.0"), a_result("t1.0")),
    "an id again": (AssistantMessage(calls=(a_call("t1.0"),)), a_result("t1.0")) * 2,
    "no JSON": (AssistantMessage(calls=(a_call("t1.0", "nope"),)), a_result("t1.0")),
    "no message": ({"role": "user", "content": "hello"},),
}


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_history_is_refused(torn):
    """A history from outside has to be valid too: each call once, with its one result, in order."""
    with pytest.raises(MisuseError, match=r"history|JSON object"):
        Agent(ScriptedModel()).start("more", messages=TORN[torn])


async def test_start_does_no_io(store):
    """A run is in no store before somebody drives it."""
    agent = echo_agent(store)
    run = agent.start("hello")
    assert await store.runs() == ()
    await agent.step(run)
    assert [summary.id for summary in await store.runs()] == [run.id]


# The same id again


async def test_the_same_id_and_prompt_is_not_run_twice(store):
    """A webhook that is delivered twice finds the run of the first time."""
    asked: list[Request] = []

    def answer(request: Request) -> str:
        asked.append(request)
        return "done"

    agent = Agent(FunctionModel(answer), store=store)
    first = await agent.run("refund order 17", id="order-17")
    again = await agent.run("refund order 17", id="order-17")
    assert again == first
    assert len(asked) == 1
    assert len(await store.runs()) == 1


async def test_the_same_id_goes_on_where_the_run_stands(store):
    """`run` with the id of a run that is half done finishes that one."""
    agent = echo_agent(store)
    half = await agent.step(agent.start("hello", id="mine"))
    run = await agent.run("hello", id="mine")
    assert (half.version, run.state, run.output) == (1, State.DONE, "re: hello")
    assert names(await agent.history("mine")) == ["Observed", "AnswerGiven"]


async def test_the_same_id_with_another_prompt_is_a_conflict(store):
    """An id stands for one prompt, whoever asks."""
    agent = echo_agent(store)
    await agent.run("refund order 17", id="mine")
    with pytest.raises(ConflictError, match="another prompt"):
        await agent.run("refund order 18", id="mine")


# step


async def test_a_stale_run_is_refused_before_any_effect(store):
    """A step on an old value does nothing: no model call, no tool, no event."""
    ran: list[str] = []

    @tool
    async def note(text: str) -> str:
        """Note."""
        ran.append(text)
        return "ok"

    model = ScriptedModel(say("", call("note", text="a")), "done")
    agent = Agent(model, tools=[note], store=store)
    thinking = await agent.step(agent.start("hello"))
    acting = await agent.step(thinking)
    with pytest.raises(ConflictError, match=r"agent\.load"):
        await agent.step(thinking)
    assert len(model.requests) == 1
    acted = await agent.step(acting)
    with pytest.raises(ConflictError):
        await agent.step(acting)
    with pytest.raises(ConflictError):
        await agent.finish(acting)
    assert ran == ["a"]
    assert await agent.load(acted.id) == acted
    assert (await agent.finish(acted)).output == "done"


async def test_a_step_on_a_fresh_run_whose_id_has_moved_on_is_refused(store):
    """The same goes for a value that was started and never driven."""
    agent = echo_agent(store)
    fresh = agent.start("hello", id="mine")
    await agent.run("hello", id="mine")
    with pytest.raises(ConflictError, match=r"agent\.load"):
        await agent.step(fresh)


async def test_a_step_on_a_finished_run_returns_it(store):
    """Nothing is left to do, so the very same value comes back, from `finish` too."""
    agent = echo_agent(store)
    run = await agent.run("hello")
    assert await agent.step(run) is run
    assert await agent.finish(run) is run
    assert [each async for each in agent.steps(run)] == []


async def test_a_step_on_a_waiting_run_returns_it(store):
    """Nobody has decided, so nothing changes, and `steps` ends."""

    @tool(requires_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent = Agent(ScriptedModel(say("", call("pay"))), tools=[pay], store=store)
    run = await agent.run("pay")
    assert run.is_waiting
    assert await agent.step(run) == run
    assert await agent.finish(run) == run
    assert await agent.resume(run.id) == run
    assert [each async for each in agent.steps(run)] == []
    assert len(await agent.history(run.id)) == run.version


async def test_a_run_that_somebody_else_drives_is_refused_at_once(store):
    """Two owners never drive one run: step and finish raise, before the model is asked."""
    entered, leave = anyio.Event(), anyio.Event()

    async def answer(_request: Request) -> str:
        entered.set()
        await leave.wait()
        return "done"

    agent = Agent(FunctionModel(answer), store=store)
    run = await agent.step(agent.start("hello"))
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.finish, run)
            await entered.wait()
            other = Agent(ScriptedModel(), store=store)
            for drive in (other.step, other.finish):
                with pytest.raises(ConflictError, match="driven"):
                    await drive(run)
            with pytest.raises(LeaseHeldError):
                await other.resume(run.id, wait=False)
            leave.set()
    assert (await agent.load(run.id)).output == "done"


async def test_nobody_holds_a_lease_between_two_steps(store):
    """Any other agent on the same store may do the next step."""
    one, two = echo_agent(store), echo_agent(store)
    run = await one.step(one.start("hello"))
    assert not (await store.runs())[0].driven
    run = await two.step(run)
    assert run.output == "re: hello"


async def test_leaving_steps_early_leaves_nothing_behind(store):
    """`steps` holds no lease while its caller looks at a run."""
    agent = echo_agent(store)
    async for run in agent.steps(agent.start("hello")):
        assert run.state is State.THINK
        break
    gc.collect()
    assert (await agent.finish(run)).output == "re: hello"


# Histories


async def test_after_goes_on_from_a_run(store):
    """The second run sees what was said in the first, and its own journal holds none of it."""
    model = ScriptedModel("I am Ann.", say("You asked who I am.", expect=lambda r: "I am Ann." in texts(r)))
    agent = Agent(model, store=store)
    first = await agent.run("Who are you?")
    second = await agent.run("What did I ask?", after=first)
    assert second.messages[: len(first.messages)] == first.messages
    assert (second.header.after, second.header.history) == (first.id, ())
    await sound(agent, second)


async def test_after_a_chain_of_runs_everything_is_remembered(store):
    """Each run goes on from the one before, by reference, and loading the last reads them all."""
    agent = echo_agent(store)
    run = await agent.run("0")
    for number in range(1, 6):
        run = await agent.run(str(number), after=run)
    assert [message.text for message in run.messages[::2]] == list("012345")
    assert await agent.load(run.id) == run


async def test_messages_goes_on_from_a_history_that_no_store_has(store):
    """`messages=earlier.messages` carries a history into another store, and is kept there."""
    earlier = await echo_agent(MemoryStore()).run("one")
    agent = Agent(ScriptedModel(say("two!", expect=lambda r: "re: one" in texts(r))), store=store)
    run = await agent.run("two", messages=earlier.messages)
    assert run.messages[:2] == earlier.messages
    await sound(agent, run)


@tool(read_only=True)
async def look(at: str) -> str:
    """Look."""
    return f"saw {at}"


async def test_call_ids_stay_unique_over_a_whole_conversation(store):
    """Calls of a later run are numbered on from those before, by session, after= and messages= alike."""

    def model() -> Model:
        return ScriptedModel(say("", call("look", at="x"), call("look", at="y")), "done")

    agent = Agent(model(), tools=[look], store=store)
    run = await agent.run("0", session="s")
    for options in ({"session": "s"}, {"session": "s"}):
        run = await agent.with_(model=model()).run("more", **options)
    run = await agent.with_(model=model()).run("more", after=run)
    run = await agent.with_(model=model()).run("more", messages=run.messages)
    ids = [each.id for each in calls_of(run.messages)]
    assert len(ids) == len(set(ids)) == 10
    assert len({each.key for each in calls_of(run.messages)}) == 10
    valid_history(run.messages)
    assert [(record.turn, record.name) for record in run.calls] == [(1, "look"), (1, "look")]


async def test_a_session_goes_on_from_its_last_run(store):
    """The name of a conversation is enough to go on with it."""
    agent = echo_agent(store)
    first = await agent.run("one", session="ann")
    await agent.run("something else", session="bob")
    second = await agent.run("two", session="ann")
    third = await agent.run("three", session="ann")
    assert second.header.after == first.id
    assert [message.text for message in third.messages] == ["one", "re: one", "two", "re: two", "three", "re: three"]
    await sound(agent, third)


async def test_what_was_said_is_not_read_from_its_beginning_each_time(store, monkeypatch):
    """Going on costs the same at the thousandth run: what the agent has just said it has at hand."""
    agent, reads = echo_agent(store), []
    read = type(store).read

    async def counted(self, run_id, after=0):
        stored = await read(self, run_id, after)
        reads.append(len(stored.events))
        return stored

    monkeypatch.setattr(type(store), "read", counted)
    costs = []
    for number in range(6):
        reads.clear()
        await agent.run(str(number), session="ann")
        costs.append(sum(reads))
    assert costs == [0] * 6
    again = await echo_agent(store).run("6", session="ann")  # another process
    assert sum(reads) > 6
    assert [message.text for message in again.messages][-4:] == ["5", "re: 5", "6", "re: 6"]
    last = await agent.run("7", session="ann")
    assert last.prior == again.messages
    assert (await agent.load(last.id)) == last == await echo_agent(store).load(last.id)


async def test_a_run_at_hand_that_stands_for_another_by_now_is_not_gone_on_from(store):
    """Ids may be used again, once what they stood for is deleted."""
    agent = echo_agent(store)
    await agent.run("one", id="r", session="ann")
    await store.delete("r")
    await echo_agent(store).run("another", id="r", session="ann")
    run = await agent.run("two", session="ann")
    assert [message.text for message in run.messages] == ["another", "re: another", "two", "re: two"]


async def test_a_session_has_one_live_run(store):
    """A second run is refused, and the error names the first, until that one is over."""
    agent = echo_agent(store)
    live = await agent.step(agent.start("one", session="ann"))
    with pytest.raises(ConflictError, match=live.id):
        await agent.run("two", session="ann")
    assert len(await store.runs()) == 1
    await agent.finish(live)
    assert (await agent.run("two", session="ann")).output == "re: two"


async def test_a_session_goes_on_after_an_error(store):
    """A run that ended in ERROR does not close the conversation, and its history stays."""
    agent = Agent(ScriptedModel(fail(ModelError("401")), say("here", expect=lambda r: "one" in texts(r))), store=store)
    failed = await agent.run("one", session="ann")
    assert failed.stop_reason is StopReason.MODEL_ERROR
    run = await agent.run("two", session="ann")
    assert run.output == "here"
    assert run.header.after == failed.id


async def test_a_session_stepped_by_hand_knows_its_history(store):
    """The history is read with the first step, not only by `run`."""
    agent = echo_agent(store)
    await agent.run("one", session="ann")
    run = await agent.step(agent.start("two", session="ann"))
    assert [message.text for message in run.messages] == ["one", "re: one", "two"]


async def test_a_conversation_is_kept_whole_or_forgotten_whole():
    """The memory store forgets old runs, but never one out of the middle of what is said later."""
    agent = Agent(FunctionModel(lambda request: f"re: {request.messages[-1].text}"))
    for noise in (990, 999, 1_100):
        name = f"user-{noise}"
        await agent.run("one", session=name)
        await agent.run("two", session=name)
        for _ in range(noise):
            await agent.run("noise")
        run = await agent.run("three", session=name)
        assert [message.text for message in run.messages][::2] in (["one", "two", "three"], ["three"])
        assert await agent.load(run.id) == run


async def test_a_conversation_of_a_thousand_runs_keeps_its_newest():
    """However long it gets, the run that has just ended is there, with all that it goes on from."""
    agent = Agent(FunctionModel(lambda _request: "yes"))
    run = await agent.run("0")
    for number in range(1, 1_005):
        run = await agent.run(str(number), after=run)
    loaded = await agent.load(run.id)
    assert loaded == run
    assert len(loaded.messages) == 2 * 1_005


# What reaches the tools


async def test_metadata_user_and_roles_reach_the_tools(store):
    """A tool's context says on whose behalf the run is, and what the caller attached."""
    seen: list[RunContext[str]] = []

    @tool
    async def whoami(ctx: RunContext[str]) -> str:
        """Say who."""
        seen.append(ctx)
        return "ok"

    agent = Agent(ScriptedModel(say("", call("whoami")), "done"), tools=[whoami], store=store)
    run = await agent.run("hello", deps="my deps", user="ann", roles=["admin", "ops"], metadata={"order": 17})
    (ctx,) = seen
    assert (ctx.deps, ctx.user, ctx.roles, dict(ctx.metadata)) == ("my deps", "ann", ("admin", "ops"), {"order": 17})
    assert (ctx.run_id, ctx.turn, ctx.call_id, ctx.attempt) == (run.id, 1, "t1.0", 1)
    assert ctx.idempotency_key == calls_of(run.messages)[0].key
    loaded = await agent.load(run.id)
    assert (loaded.header.user, loaded.header.roles, loaded.metadata) == ("ann", ("admin", "ops"), {"order": 17})


async def test_deps_come_with_each_driving_call_and_are_stored_nowhere(store):
    """Every driving call takes its own deps, and neither the run nor its journal holds them."""
    seen: list[object] = []
    secret = object()

    @tool
    async def use(ctx: RunContext[object]) -> str:
        """Use."""
        seen.append(ctx.deps)
        return "ok"

    agent = Agent(ScriptedModel(*[say("", call("use"))] * 4, "done"), tools=[use], store=store)
    run = await reach(agent, agent.start("hello"), State.REFLECT, deps="first")
    run = await reach(agent, run, State.ACT, deps=secret)
    run = await agent.step(run, deps=secret)
    assert seen == ["first", secret]
    assert repr(secret) not in repr(attrs.asdict(run)) + repr(await agent.history(run.id))
    await agent.resume(run.id, deps="resume")
    assert seen == ["first", secret, "resume", "resume"]


async def test_an_agent_holds_nothing_of_a_run(store):
    """A hundred runs at once through one agent do not mix."""
    agent = Agent(
        FunctionModel(lambda r: f"re: {r.messages[0].text}"),
        store=store,
        tools=[look],
    )
    answers: dict[int, str] = {}

    async def one(number: int) -> None:
        answers[number] = (await agent.run(str(number))).output

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(one, number)
    assert answers == {number: f"re: {number}" for number in range(100)}
