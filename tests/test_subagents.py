"""An agent as a tool of another: its own loop and journal, its share of the budget, and what its caller learns."""

from __future__ import annotations

import json

import anyio
import pytest

from agentfsm import (
    Agent,
    AgentEvent,
    AgentEventType,
    ErrorType,
    Level,
    Limits,
    MisuseError,
    ModelUnavailableError,
    Outcome,
    Run,
    RunContext,
    State,
    StopReason,
    StoreError,
    ToolCall,
    ToolEvent,
    ToolEventType,
    ToolQueue,
    ToolRegistry,
    ToolResult,
    Usage,
    tool,
)
from agentfsm.core.labels import ToolKind
from agentfsm.ports import Reply, Request
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, say
from tests.support.checks import HANG_S, keys_of, newest, no_leases, results_of, sound, texts, virtually

NO_RETRY = Limits(model_retries=0, errors=10)


@tool(read_only=True)
async def look(where: str) -> str:
    """Look somewhere."""
    return f"{where} looks fine"


@tool
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


@tool
async def hang() -> str:
    """Never end."""
    await anyio.sleep_forever()
    return "never"


class Priced(ScriptedModel):
    """A script whose tokens cost a cent each."""

    def cost_usd(self, usage: Usage) -> float:
        """US dollars for this usage."""
        return usage.tokens / 100


def asks(*names: str, **details: object) -> ScriptedModel:
    """A caller's model, that asks agents and then is done."""
    return ScriptedModel(say("", *[call(name, query="find out") for name in names]), say("done", **details))


def the_result(run: Run) -> ToolResult:
    """The only result of a run."""
    (result,) = results_of(run.messages)
    return result


# What it is.


async def test_its_run_is_one_of_its_own():
    """In the caller's store, under the caller's id and the call's, with the caller named in the header."""
    child = Agent(
        ScriptedModel(say("I look.", call("look", where="Rome")), "Rome is fine."), tools=[look], name="scout"
    )
    agent = Agent(asks("scout", expect="Rome is fine."), tools=[child.as_tool()])
    run = await agent.run("go", id="mine", user="ann", roles=["boss"], metadata={"tenant": 7})
    assert run.output == "done"
    below = await agent.load("mine.t1.0")
    assert (below.header.parent, below.header.depth, below.header.agent) == ("mine", 1, "scout")
    assert (below.header.user, below.header.roles, dict(below.metadata)) == ("ann", ("boss",), {"tenant": 7})
    assert (below.state, below.output, below.turn) == (State.DONE, "Rome is fine.", 2)
    await sound(agent, run)
    await sound(child.with_(store=agent.store), below)


async def test_its_tools_get_the_callers_deps_and_their_own_run():
    """`deps` reach every level; the ids are those of the agent's own run."""
    seen = []

    @tool(read_only=True)
    async def note(ctx: RunContext[str]) -> str:
        """Note who calls."""
        seen.append((ctx.deps, ctx.run_id, ctx.call_id, ctx.idempotency_key))
        return "noted"

    child = Agent(ScriptedModel(say("", call("note")), "fine"), tools=[note], name="child")
    agent = Agent(asks("child"), tools=[child.as_tool()])
    await agent.run("go", id="mine", deps="world")
    assert seen == [
        ("world", "mine.t1.0", "t1.0", keys_of(await child.with_(store=agent.store).load("mine.t1.0"))["t1.0"])
    ]


async def test_it_is_asked_a_query_by_default():
    """The first message is the input as JSON, so that the agent sees what is what."""
    model = ScriptedModel("fine")
    made = Agent(model, name="child").as_tool()
    assert made.kind is ToolKind.AGENT
    assert set(made.parameters["properties"]) == {"query"}
    assert made.parameters["required"] == ["query"]
    await Agent(asks("child"), tools=[made]).run("go")
    assert json.loads(newest(model.requests[0])) == {"query": "find out"}


async def test_a_first_message_may_be_made_of_the_arguments():
    """`prompt=` gets them validated, as attributes."""
    model = ScriptedModel("fine")
    made = Agent(model, name="child").as_tool(prompt=lambda a: f"Please: {a.query}!")
    await Agent(asks("child"), tools=[made]).run("go")
    assert newest(model.requests[0]) == "Please: find out!"


async def test_it_may_be_asked_by_a_schema():
    """`parameters=` is what the caller's model sees, and what its arguments are held against."""
    model = ScriptedModel("fine")
    schema = {
        "type": "object",
        "properties": {"userInfo": {"type": "object"}, "categories": {"type": "array", "items": {"type": "string"}}},
        "required": ["userInfo"],
    }
    made = Agent(model, name="child").as_tool(parameters=schema, description="Judges people.")
    assert made.definition.description == "Judges people."
    script = ScriptedModel(
        say("", call("child", userInfo={"age": 30}, categories=["TTPS"]), call("child", categories=["TTPS"])), "done"
    )
    run = await Agent(script, tools=[made]).run("go")
    good, bad = results_of(run.messages)
    assert json.loads(newest(model.requests[0])) == {"userInfo": {"age": 30}, "categories": ["TTPS"]}
    assert (good.outcome, bad.error_type) == (Outcome.DONE, ErrorType.ARGUMENTS)
    assert "userInfo" in bad.content


KINDS = {
    "no tools": ([], True, True, Level.READ),
    "reading": ([look], True, True, Level.READ),
    "reading and paying": ([look, pay], False, False, Level.WRITE),
    "safe beside others, but writing": (
        [tool(name="log", concurrency_safe=True)(pay.function)],
        False,
        True,
        Level.WRITE,
    ),
    "safe for some arguments": (
        [tool(name="log", concurrency_safe=lambda a: a.cents < 5)(pay.function)],
        False,
        False,
        Level.WRITE,
    ),
    "administering": ([look, tool(name="drop", permission="admin")(pay.function)], False, False, Level.ADMIN),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_its_tools_are(kind):
    """Read-only and safe beside others exactly when all of them are; as much to be permitted as the most of them."""
    tools, read_only, safe, level = KINDS[kind]
    made = Agent(ScriptedModel(), tools=tools, name="child").as_tool()
    assert (made.read_only, made.concurrency_safe, made.permission) == (read_only, safe, level)
    above = Agent(ScriptedModel(), tools=[made, look], name="above").as_tool()
    assert (above.read_only, above.concurrency_safe, above.permission) == (read_only, safe, level)


@pytest.mark.parametrize(
    "options",
    [{"turns": 0}, {"timeout_s": -1.0}, {"name": "no spaces"}, {"read_only": True}, {"idempotent": False}],
    ids=str,
)
def test_what_makes_no_sense_is_refused_at_once(options):
    """Not in the middle of a run, where the model would be told of it."""
    with pytest.raises(MisuseError):
        Agent(ScriptedModel(), name="child").as_tool(**options)


# How it ends.


async def test_it_has_three_turns_unless_told_otherwise():
    """Then it hands over the last that it said, and its caller learns that this is not all."""
    busy = [say(f"Thought {n}.", call("look", where=f"place {n}")) for n in range(1, 9)]
    model = ScriptedModel(*busy)
    child = Agent(model, tools=[look], name="child")
    run = await Agent(asks("child"), tools=[child.as_tool()]).run("go")
    result = the_result(run)
    assert len(model.requests) == 3
    assert result.outcome is Outcome.DONE
    assert "max_turns" in result.content
    assert "3 of 3" in result.content
    assert result.content.endswith("Thought 3.")
    assert result.child is not None
    assert (result.child.turns, result.child.tool_calls) == (3, ("look",) * 3)
    model = ScriptedModel(*busy)
    child = Agent(model, tools=[look], name="child")
    await Agent(asks("child"), tools=[child.as_tool(turns=5)]).run("go")
    assert len(model.requests) == 5


async def test_a_limit_before_the_first_word_says_so():
    """There is nothing to hand over: the call has failed, and says why."""
    busy = [say("", call("look", where=f"place {n}")) for n in range(3)]
    child = Agent(ScriptedModel(*busy), tools=[look], name="child")
    run = await Agent(asks("child"), tools=[child.as_tool()]).run("go")
    result = the_result(run)
    assert (result.outcome, result.error_type) == (Outcome.FAILED, ErrorType.AGENT)
    assert "no answer yet" in result.content
    assert result.child is not None
    assert result.child.turns == 3


async def test_a_failed_agent_still_says_what_it_cost():
    """Tokens, turns and calls up to its end; the caller goes on with what it has."""
    script = [say("", call("look", where="Rome")), fail(ModelUnavailableError("overloaded", status=529))]
    child = Agent(ScriptedModel(*script), tools=[look], name="child", limits=Limits(model_retries=0, errors=1))
    agent = Agent(asks("child", expect="Go on without it"), tools=[child.as_tool()])
    run = await agent.run("go")
    result = the_result(run)
    assert (result.outcome, result.error_type) == (Outcome.FAILED, ErrorType.AGENT)
    assert "overloaded" in result.content
    assert "too_many_errors" in result.content
    cost = result.child
    assert cost is not None
    assert (cost.usage.tokens, cost.turns, cost.tool_calls) == (15, 2, ("look",))
    assert (run.output, run.usage.tokens) == ("done", 45)
    assert agent.cost(run).children == (cost,)


def test_an_agent_whose_time_is_up_ends_in_order():
    """Its run says why it ended, its caller gets what it had said, and each start has one end."""

    async def story(store, clock) -> tuple[Run, Run, list]:
        slow = say("Half of it.", call("hang"))
        child = Agent(ScriptedModel(slow), tools=[hang], name="child")
        agent = Agent(asks("child"), tools=[child.as_tool(timeout_s=8.0)], store=store, clock=clock)
        async with agent.stream("go", id="mine") as stream:
            told = [event async for event in stream if isinstance(event, AgentEvent | ToolEvent)]
        assert stream.run is not None
        return stream.run, await agent.load("mine.t1.0"), told

    run, below, told = virtually(story)
    result = the_result(run)
    assert (result.outcome, result.error_type) == (Outcome.TIMED_OUT, ErrorType.TIMEOUT)
    assert "Half of it." in result.content
    assert result.duration_s == pytest.approx(8.0)
    assert (below.state, below.stop_reason) == (State.ERROR, StopReason.TIMEOUT)
    assert below.calls[0].outcome is Outcome.UNKNOWN
    assert "hang" in result.content, "what may have had an effect is not hidden from the caller"
    assert [event.type for event in told if isinstance(event, AgentEvent)] == [
        AgentEventType.STARTED,
        AgentEventType.PROGRESS,
        AgentEventType.COMPLETED,
    ]
    last = told[-2:]
    assert [event.type for event in last] == [ToolEventType.ERROR, ToolEventType.DRAINED]


def test_the_callers_time_bounds_the_agent():
    """The caller's own seconds run out while the agent works: both are over, with valid journals."""

    async def story(store, clock) -> tuple[Run, Run, Run]:
        leaf = Agent(ScriptedModel(say("", call("hang"))), tools=[hang], name="leaf")
        child = Agent(asks("leaf"), tools=[leaf.as_tool()], name="child")
        agent = Agent(asks("child"), tools=[child.as_tool()], store=store, clock=clock, limits=Limits(seconds=4.0))
        run = await agent.run("go", id="mine")
        below, lowest = await agent.load("mine.t1.0"), await agent.load("mine.t1.0.t1.0")
        for each in (run, below, lowest):
            await sound(agent, each)
        return run, below, lowest

    run, below, lowest = virtually(story)
    assert (run.stop_reason, run.duration_s) == (StopReason.TIMEOUT, pytest.approx(4.0))
    assert {below.stop_reason, lowest.stop_reason} <= {StopReason.TIMEOUT, StopReason.CANCELLED}
    assert run.usage.tokens == 45, "what the agents spent is counted, though they gave no answer"


def test_an_agent_never_outlives_the_time_of_the_one_above():
    """A grandchild that would like an hour gets what its caller has left."""

    async def story(store, clock) -> Run:
        leaf = Agent(ScriptedModel(say("Leaf.", call("hang"))), tools=[hang], name="leaf", limits=Limits(seconds=7_200))
        child = Agent(asks("leaf"), tools=[leaf.as_tool(timeout_s=3_600.0)], name="child")
        agent = Agent(asks("child"), tools=[child.as_tool(timeout_s=5.0)], store=store, clock=clock)
        return await agent.run("go", id="mine")

    run = virtually(story)
    assert run.output == "done"
    assert run.duration_s < 15.0
    assert the_result(run).outcome is Outcome.TIMED_OUT


# Depth.


def chain(store: MemoryStore, **limits: int) -> Agent:
    """Agents that ask one another, five deep."""
    agent = Agent(ScriptedModel("the bottom"), name="a5", store=store)
    for level in range(4, -1, -1):
        agent = Agent(
            asks(agent.name),
            tools=[agent.as_tool()],
            name=f"a{level}",
            store=store,
            limits=Limits(**limits if not level else {}),
        )
    return agent


@pytest.mark.parametrize(("depth", "runs"), [(0, 1), (1, 2), (2, 3), (3, 4)])
async def test_agents_may_stand_below_one_another_so_deep_and_no_deeper(depth, runs):
    """The limit of the first run holds for all below it; who meets it is told to answer itself."""
    store = MemoryStore()
    run = await chain(store, depth=depth).run("go", id="mine")
    assert run.output == "done"
    assert [summary.id for summary in await store.runs()][::-1] == ["mine" + ".t1.0" * n for n in range(runs)]
    deepest = await chain(store).load("mine" + ".t1.0" * (runs - 1))
    assert the_result(deepest).outcome is Outcome.FAILED
    assert "answer yourself" in the_result(deepest).content


# What it cost.


async def test_cost_is_a_tree():
    """Every agent with its own tokens, money, turns, calls and time; the sums hold at every level."""
    leaf = Agent(Priced(say("leaf", usage=Usage(input_tokens=100, output_tokens=1))), name="leaf")
    child = Agent(
        Priced(
            say("", call("leaf", query="x"), call("look", where="Rome"), usage=Usage(input_tokens=10)),
            say("fine", usage=Usage(input_tokens=20)),
        ),
        tools=[leaf.as_tool(), look],
        name="child",
    )
    agent = Agent(
        Priced(
            say("", call("child", query="x"), call("look", where="Oslo"), usage=Usage(input_tokens=1)),
            say("done", usage=Usage(input_tokens=2)),
        ),
        tools=[child.as_tool(), look],
        name="top",
    )
    run = await agent.run("go", id="mine")
    cost = agent.cost(run)
    (below,) = cost.children
    (lowest,) = below.children
    assert (cost.agent, below.agent, lowest.agent) == ("top", "child", "leaf")
    assert (cost.run_id, below.run_id, lowest.run_id) == ("mine", "mine.t1.0", "mine.t1.0.t1.0")
    assert (cost.usage.tokens, below.usage.tokens, lowest.usage.tokens) == (134, 131, 101)
    assert (cost.usd, below.usd, lowest.usd) == (pytest.approx(1.34), pytest.approx(1.31), pytest.approx(1.01))
    assert (cost.turns, below.turns, lowest.turns) == (2, 2, 1)
    assert (cost.tool_calls, below.tool_calls) == (("child", "look"), ("leaf", "look"))
    assert cost.duration_s >= below.duration_s >= lowest.duration_s > 0
    assert (await agent.load("mine")).usage == run.usage
    assert agent.cost(await agent.load("mine")) == cost


@pytest.mark.parametrize("unknown", ["child", "caller"])
@pytest.mark.parametrize("limited", [False, True], ids=["", "child limited"])
async def test_an_unknown_price_makes_the_sum_unknown(unknown, limited):
    """Half of a sum is none; the half that is known is in the tree."""
    if unknown == "child" and limited:
        return  # refused: money that nobody can count cannot be limited
    limits = Limits(usd=50.0) if limited else Limits()
    child = Agent((ScriptedModel if unknown == "child" else Priced)("fine"), name="child", limits=limits)
    script = say("", call("child", query="x")), "done"
    agent = Agent((ScriptedModel if unknown == "caller" else Priced)(*script), tools=[child.as_tool()])
    cost = agent.cost(await agent.run("go"))
    assert cost.usd is None
    assert cost.children[0].usd == (None if unknown == "child" else pytest.approx(0.15))


async def test_money_that_nobody_can_count_is_refused_before_the_first_entry():
    """An agent limited in money, whose model has no price, is refused where it becomes a tool."""
    with pytest.raises(MisuseError, match="price"):
        Agent(ScriptedModel(), name="child", limits=Limits(usd=5.0)).as_tool()


async def test_a_childs_own_limit_of_money_does_not_blur_the_callers_cost():
    """The caller counts no money as it goes; its price is known all the same, and is all in the sum."""
    child = Agent(Priced("fine"), name="child", limits=Limits(usd=5.0))
    agent = Agent(Priced(say("", call("child", query="x")), "done"), tools=[child.as_tool()])
    assert agent.cost(await agent.run("go")).usd == pytest.approx(0.45)


# Events.


async def told_of(agent: Agent) -> list[AgentEvent]:
    """What a stream tells of agents."""
    async with agent.stream("go", id="mine") as stream:
        return [event async for event in stream if isinstance(event, AgentEvent)]


async def test_progress_is_told_by_turn():
    """Started, each turn with the limit, completed."""
    child = Agent(ScriptedModel(say("", call("look", where="Rome")), "fine"), tools=[look], name="child")
    told = await told_of(Agent(asks("child"), tools=[child.as_tool()]))
    assert [(event.type.value, event.turn, event.limit) for event in told] == [
        ("agent_started", 0, 3),
        ("agent_progress", 1, 3),
        ("agent_progress", 2, 3),
        ("agent_completed", 2, 3),
    ]
    assert {(e.run_id, e.call_id, e.agent, e.child_id) for e in told} == {("mine", "t1.0", "child", "mine.t1.0")}
    assert told[-1].success is True
    assert told[-1].duration_s is not None


async def test_no_turn_is_told_beyond_the_limit():
    """A model that keeps failing uses turns up; there is no turn 4 of 3."""
    down = [fail(ModelUnavailableError("down"))] * 3
    child = Agent(ScriptedModel(*down), name="child", limits=NO_RETRY)
    told = await told_of(Agent(asks("child"), tools=[child.as_tool()]))
    assert [event.turn for event in told if event.type is AgentEventType.PROGRESS] == [1, 2, 3]
    assert told[-1].success is False


async def test_every_start_has_one_end_whatever_happens():
    """Done, failed, asked in vain, too deep, and cut off with their caller."""
    inside = anyio.Event()

    @tool(concurrency_safe=True)
    async def stick() -> str:
        """Never end."""
        inside.set()
        await anyio.sleep_forever()
        return "never"

    kids = [
        Agent(ScriptedModel("fine"), name="good"),
        Agent(ScriptedModel(fail(ModelUnavailableError("down"))), name="bad", limits=Limits(model_retries=0, errors=1)),
        Agent(ScriptedModel(say("", call("stick"))), tools=[stick], name="stuck"),
    ]
    agent = Agent(asks("good", "bad", "stuck"), tools=[kid.as_tool() for kid in kids])
    told: list[AgentEvent] = []
    with anyio.fail_after(HANG_S):
        async with agent.stream("go", id="mine") as stream, anyio.create_task_group() as tasks:

            async def end() -> None:
                await inside.wait()
                await agent.cancel("mine")

            tasks.start_soon(end)
            told.extend([event async for event in stream if isinstance(event, AgentEvent)])
    for name, success in (("good", True), ("bad", False), ("stuck", False)):
        own = [event for event in told if event.agent == name]
        assert [event.type for event in own].count(AgentEventType.STARTED) == 1
        assert [event.success for event in own if event.type is AgentEventType.COMPLETED] == [success]
        assert own[-1].type is AgentEventType.COMPLETED


def test_the_end_of_an_agent_tells_how_long_it_worked():
    """Also where it was cut off together with its caller."""

    async def story(store, clock) -> list[AgentEvent]:
        child = Agent(ScriptedModel(say("", call("hang"))), tools=[hang], name="child")
        limits = Limits(seconds=4.0)
        return await told_of(Agent(asks("child"), tools=[child.as_tool()], store=store, clock=clock, limits=limits))

    told = virtually(story)
    assert told[-1].type is AgentEventType.COMPLETED
    assert (told[-1].success, told[-1].turn) == (False, 1)
    assert told[-1].duration_s == pytest.approx(4.0)


# Cancelling.


async def test_cancelling_the_caller_ends_all_below_it():
    """Every run below has an end of its own, says which calls may have had an effect, and what it cost is counted."""
    inside = anyio.Event()

    @tool
    async def stick() -> str:
        """Never end."""
        inside.set()
        await anyio.sleep_forever()
        return "never"

    leaf = Agent(ScriptedModel(say("", call("stick"))), tools=[stick], name="leaf")
    child = Agent(asks("leaf"), tools=[leaf.as_tool()], name="child")
    agent = Agent(asks("child"), tools=[child.as_tool()])
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.finish, agent.start("go", id="mine"))
            await inside.wait()
            await agent.cancel("mine", by="ann")
    run, below, lowest = [await agent.load(name) for name in ("mine", "mine.t1.0", "mine.t1.0.t1.0")]
    for each in (run, below, lowest):
        await sound(agent, each)
        assert each.stop_reason is StopReason.CANCELLED
    assert "ann" in run.stop_message
    assert lowest.calls[0].outcome is Outcome.UNKNOWN
    assert the_result(run).outcome is Outcome.UNKNOWN, "what may have had an effect is not said to be repeatable"
    assert run.usage.tokens == 45
    await no_leases(agent.store)


async def test_cancelling_a_run_whose_worker_died_ends_all_below_it():
    """Another worker, that never drove the children, ends them too."""
    inside = anyio.Event()

    @tool
    async def stick() -> str:
        """Never end."""
        inside.set()
        await anyio.sleep_forever()
        return "never"

    leaf = Agent(ScriptedModel(say("", call("stick"))), tools=[stick], name="leaf")
    child = Agent(asks("leaf"), tools=[leaf.as_tool()], name="child")
    agent = Agent(asks("child"), tools=[child.as_tool()])
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.finish, agent.start("go", id="mine"))
            await inside.wait()
            tasks.cancel_scope.cancel()
    other = agent.with_(model=ScriptedModel())
    await other.cancel("mine")
    for name in ("mine", "mine.t1.0", "mine.t1.0.t1.0"):
        run = await other.load(name)
        assert (name, run.stop_reason) == (name, StopReason.CANCELLED)
        await sound(other, run)


async def test_cancelling_the_child_alone_is_a_result():
    """Its caller is told, and goes on."""
    inside = anyio.Event()

    @tool
    async def stick() -> str:
        """Never end."""
        inside.set()
        await anyio.sleep_forever()
        return "never"

    child = Agent(ScriptedModel(say("", call("stick"))), tools=[stick], name="child")
    agent = Agent(asks("child", expect="cancelled"), tools=[child.as_tool()])
    runs: list[Run] = []

    async def drive() -> None:
        runs.append(await agent.run("go", id="mine"))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive)
            await inside.wait()
            await child.with_(store=agent.store).cancel("mine.t1.0", by="ann")
    assert runs[0].output == "done"
    assert "stick" in the_result(runs[0]).content, "what may have had an effect is not hidden from the caller"


async def test_a_child_that_another_worker_still_holds_is_waited_for():
    """The lease of a child may run out later than its caller's: that is no failure of the agent."""
    inside = anyio.Event()
    fates = iter([anyio.sleep_forever, anyio.lowlevel.checkpoint])

    async def answer(_request: Request) -> str:
        inside.set()
        await next(fates)()
        return "fine"

    child = Agent(FunctionModel(answer), name="child")
    agent = Agent(asks("child"), tools=[child.as_tool()])
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.finish, agent.start("go", id="mine"))
            await inside.wait()
            tasks.cancel_scope.cancel()
        held = await agent.store.lease("mine.t1.0")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.resume, "mine")
            await anyio.wait_all_tasks_blocked()
            agent.store.release(held)
    run = await agent.load("mine")
    assert (the_result(run).outcome, the_result(run).content) == (Outcome.DONE, "fine")


async def test_a_prompt_that_comes_out_otherwise_the_second_time_goes_on_with_the_first():
    """What was begun is resumed, also where the first message holds the time of day."""
    inside = anyio.Event()
    fates = iter([anyio.sleep_forever, anyio.lowlevel.checkpoint])
    hours = iter(["at nine", "at ten"])

    async def answer(request: Request) -> str:
        inside.set()
        await next(fates)()
        return texts(request)

    child = Agent(FunctionModel(answer), name="child")
    agent = Agent(asks("child"), tools=[child.as_tool(prompt=lambda _: next(hours))])
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.finish, agent.start("go", id="mine"))
            await inside.wait()
            tasks.cancel_scope.cancel()
        run = await agent.resume("mine")
    assert the_result(run).content == "at nine"


# A queue by itself.


def registry(*agents: Agent) -> ToolRegistry:
    """A registry of agents as tools."""
    return ToolRegistry.of([agent.as_tool() for agent in agents])


async def test_a_queue_by_itself_runs_agents():
    """Without a run above it, the agent works in its own store, and says what it cost."""
    child = Agent(ScriptedModel(say("", call("look", where="Rome")), "Rome is fine."), tools=[look], name="child")
    (result,) = await ToolQueue(registry(child)).execute_all(
        [ToolCall(id="c1", name="child", arguments='{"query": "Rome"}')]
    )
    assert (result.outcome, result.content) == (Outcome.DONE, "Rome is fine.")
    assert result.child is not None
    assert (result.child.turns, result.child.tool_calls) == (2, ("look",))
    (summary,) = await child.store.runs()
    run = await child.load(summary.id)
    assert (run.header.parent, run.header.depth) == (None, 0)


async def test_a_queue_by_itself_runs_agents_together_and_tells():
    """Both are inside at once, results come in call order, and each start has its end."""
    both = [anyio.Event(), anyio.Event()]

    def meets(mine: int) -> FunctionModel:
        async def answer(_request: Request) -> Reply:
            both[mine].set()
            await both[1 - mine].wait()
            return Reply(text=f"met {mine}", usage=Usage(input_tokens=1))

        return FunctionModel(answer)

    agents = [Agent(meets(n), name=f"a{n}") for n in range(2)]
    calls = [ToolCall(id=f"c{n}", name=f"a{n}", arguments='{"query": "go"}') for n in range(2)]
    with anyio.fail_after(HANG_S):
        async with ToolQueue(registry(*agents)).stream(calls) as stream:
            told = [event async for event in stream if isinstance(event, AgentEvent)]
    assert [result.content for result in stream.results] == ["met 0", "met 1"]
    for n in range(2):
        own = [event.type.value for event in told if event.agent == f"a{n}"]
        assert own == ["agent_started", "agent_progress", "agent_completed"]


async def test_a_queue_by_itself_cannot_wait_for_a_person():
    """Nobody could take the run up again: the call is blocked, and nothing was done."""
    gate = tool(name="gate", requires_approval=True)(pay.function)
    child = Agent(ScriptedModel(say("", call("gate", cents=5))), tools=[gate], name="child")
    (result,) = await ToolQueue(registry(child)).execute_all(
        [ToolCall(id="c", name="child", arguments='{"query": ""}')]
    )
    assert (result.outcome, result.error_type) == (Outcome.FAILED, ErrorType.BLOCKED)


async def test_what_a_first_message_cannot_be_made_of_is_a_result():
    """A `prompt=` that breaks, or makes nothing, fails its call and no more."""

    def breaks(_arguments: object) -> str:
        raise KeyError("nothing there")

    for prompt in (breaks, lambda _: ""):
        agent = Agent(asks("child"), tools=[Agent(ScriptedModel(), name="child").as_tool(prompt=prompt)])
        run = await agent.run("go")
        assert (the_result(run).outcome, run.output) == (Outcome.FAILED, "done")


async def test_a_fault_of_the_childs_journal_is_no_result():
    """What became of the agent is not known then: the caller's driving call ends as with a fault of its own journal."""

    class Faulty(MemoryStore):
        broken = False

        def append(self, lease, run, events, **options):
            """Fail for the child."""
            if self.broken and run.header.parent is not None:
                raise StoreError("disk full")
            return super().append(lease, run, events, **options)

    store = Faulty()
    paid = []

    @tool
    async def pay_and_break() -> str:
        """Pay, and lose the disk."""
        paid.append(1)
        store.broken = True
        return "paid"

    child = Agent(ScriptedModel(say("", call("pay_and_break"))), tools=[pay_and_break], name="child")
    agent = Agent(asks("child"), tools=[child.as_tool()], store=store)
    with pytest.raises(StoreError, match="disk full"):
        await agent.run("go", id="mine")
    store.broken = False
    run = await agent.resume("mine")
    assert [(item.run_id, item.tool) for item in run.pending] == [("mine.t1.0", "pay_and_break")]
    assert paid == [1]
