"""Calls of tools are counted over a run and all agents below it: never one more than allowed, and the model is told."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import (
    Agent,
    BudgetWarning,
    ErrorType,
    Limits,
    Outcome,
    Run,
    RunContext,
    Settings,
    StopReason,
    Usage,
    tool,
)
from agentfsm.cli.codes import ExitCode, for_run
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import names, results_of, sound, valid_history, virtually

CHILDREN = 8


def begun() -> tuple[list, set[str]]:
    """Return tools that note the key of each call that begins, and where they note it."""
    keys: set[str] = set()

    @tool(read_only=True)
    async def look(ctx: RunContext[None], at: int) -> str:
        """Look."""
        keys.add(ctx.idempotency_key)
        await anyio.sleep(0.1 * (at % 3))
        return "seen"

    @tool(locks=lambda a: {a.at}, on_unknown="fail")
    async def write(ctx: RunContext[None], at: int) -> str:
        """Write."""
        keys.add(ctx.idempotency_key)
        await anyio.sleep(0.1)
        return "written"

    return [look, write], keys


class Busy(Model):
    """Calls so many tools in each turn, as long as it is asked."""

    name = "busy"

    def __init__(self, widths: list[int], first: tuple[str, ...] = ()) -> None:
        """Take the number of calls of each turn; after the last it answers. `first` are agents, called before."""
        self.widths, self.first = [*widths], first

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer."""
        usage = Usage(input_tokens=5, output_tokens=5)
        if self.first:
            agents, self.first = self.first, ()
            calls = [ProposedCall(id=name, name=name, arguments='{"query": "go"}') for name in agents]
            return Reply(calls=tuple(calls), usage=usage)
        turn = sum(message.__class__.__name__ == "AssistantMessage" for message in request.messages)
        width = self.widths.pop(0) if self.widths else 0
        kinds = ("look", "write")
        calls = [
            ProposedCall(id=str(n), name=kinds[n % 2], arguments=f'{{"at": {100 * turn + n}}}') for n in range(width)
        ]
        return Reply(text="" if calls else "fine", calls=tuple(calls), usage=usage)


WIDTHS = st.lists(st.integers(0, 6), max_size=3)
FAMILY = st.lists(WIDTHS, min_size=CHILDREN, max_size=CHILDREN)
CUTS = st.lists(st.sampled_from([0.05, 0.15, 0.25]), max_size=2)


def family(shape: list[list[int]], allowed: int, tools: list) -> Agent:
    """A coordinator that calls eight agents at once, every second of them by way of another."""
    made = []
    for index, widths in enumerate(shape):
        child = Agent(Busy(widths), tools=tools, name=f"child{index}")
        if index % 2:
            child = Agent(Busy([], (child.name,)), tools=[child.as_tool()], name=f"over{index}")
        made.append(child.as_tool())
    first = tuple(each.name for each in made)
    return Agent(Busy([3, 3], first), tools=[*tools, *made], limits=Limits(tool_calls=allowed))


async def counted(store) -> int:
    """Return how many calls have a result and were not skipped, off the journals of all runs."""
    results = [
        event.result
        for summary in await store.runs()
        for event in (await store.read(summary.id)).events
        if type(event).__name__ == "ToolFinished"
    ]
    return sum(result.outcome is not Outcome.SKIPPED for result in results)


@given(FAMILY, st.integers(1, 60))
def test_eight_agents_never_make_one_call_too_many(shape, allowed):
    """Whatever each wants to call, at once: those that begin are no more than the coordinator was allowed."""

    async def story(store, clock) -> tuple[Run, int, int]:
        tools, keys = begun()
        with anyio.fail_after(3_600):
            run = await family(shape, allowed, tools).with_(store=store, clock=clock).run("go", id="mine")
        agents = len(await store.runs()) - 1
        return run, len(keys) + agents, await counted(store)

    run, started, done = virtually(story)
    valid_history(run.messages)
    assert started <= allowed
    assert done <= allowed
    assert run.tool_call_count == done, "each call is counted once"


@given(FAMILY, st.integers(1, 60), CUTS)
def test_nor_when_processes_end_in_the_middle(shape, allowed, cuts):
    """The journals say what was called before; what goes on does not begin to count anew."""

    async def story(store, clock) -> tuple[Run, int]:
        for number, seconds in enumerate([*cuts, 3_600]):
            tools, _ = begun()
            agent = family(shape, allowed, tools).with_(store=store, clock=clock)
            with anyio.move_on_after(seconds):
                await (agent.resume("mine") if number else agent.run("go", id="mine"))
        return await agent.load("mine"), await counted(store)

    run, done = virtually(story)
    assert run.is_over
    assert done <= allowed
    assert run.tool_call_count == done


async def test_calls_beyond_the_limit_are_told_and_the_run_stops(store):
    """Of five calls three run, in call order; the model reads why not the others, and the command line exits with 4."""
    tools, keys = begun()
    agent = Agent(Busy([5, 5]), tools=tools, limits=Limits(tool_calls=3), store=store)
    run = await agent.run("go", id="mine")
    assert [result.outcome for result in results_of(run.messages)] == [Outcome.DONE] * 3 + [Outcome.SKIPPED] * 2
    assert len(keys) == 3
    refused = results_of(run.messages)[-1]
    assert refused.error_type is ErrorType.BUDGET
    assert "3 tool calls in all" in refused.content
    assert "answer with what you have" in refused.content
    assert (run.stop_reason, run.tool_call_count) == (StopReason.TOOL_BUDGET, 3)
    assert "3 of 3 tool calls made" in run.stop_message
    assert for_run(run) is ExitCode.LIMIT
    await sound(agent, run)


async def test_a_call_counts_once_whatever_becomes_of_it(store):
    """Attempts at one call are one; a call of a tool that there is not is one; one of a tool that is gone is none."""
    tries: list[int] = []

    @tool(read_only=True)
    async def shaky() -> str:
        """Fail once."""
        tries.append(1)
        if len(tries) < 2:
            raise ConnectionError("down")
        return "up"

    @tool(enabled=lambda _: False)
    async def gone() -> str:
        """Never there."""
        return "no"

    asked = say("", call("shaky"), call("invented"), call("gone"), call("shaky", wrong=1))
    run = await Agent(ScriptedModel(asked, "done"), tools=[shaky, gone], store=store).run("go")
    assert len(tries) == 2
    assert run.tool_call_count == 3


async def test_nobody_is_asked_about_a_call_that_cannot_run(store):
    """A person decides on the first of two calls; the second has no place, and is refused at once."""

    @tool(requires_approval=True)
    async def pay(cents: int) -> str:
        """Pay."""
        return "paid"

    model = ScriptedModel(say("", call("pay", cents=1), call("pay", cents=2)), "done")
    agent = Agent(model, tools=[pay], limits=Limits(tool_calls=1), store=store)
    run = await agent.run("go", id="mine")
    assert [wish.call_id for wish in run.pending] == ["t1.0"]
    await agent.approve("mine", "t1.0")
    run = await agent.resume("mine")
    assert [result.outcome for result in results_of(run.messages)] == [Outcome.DONE, Outcome.SKIPPED]
    assert run.stop_reason is StopReason.TOOL_BUDGET
    assert "ApprovalAsked" in names(await agent.history("mine"))


async def test_an_agent_stops_with_the_calls_of_the_run_above(store):
    """Its own limit is wide; the caller's is used up, so it asks its model nothing more."""
    tools, _ = begun()
    model = Busy([3, 3, 3])
    child = Agent(model, tools=tools, name="child")
    agent = Agent(Busy([], ("child",)), tools=[child.as_tool()], limits=Limits(tool_calls=3), store=store)
    run = await agent.run("go", id="mine")
    below = await agent.load("mine.t1.0")
    assert (below.stop_reason, below.tool_call_count, below.turn) == (StopReason.TOOL_BUDGET, 2, 1)
    assert "3 of 3 tool calls made" in below.stop_message
    assert "by a run above" in below.stop_message
    assert "run above and its agents may make 3" in results_of(below.messages)[-1].content
    assert (run.tool_call_count, run.stop_reason) == (3, StopReason.TOOL_BUDGET)


async def test_calls_that_start_early_have_their_place(store):
    """While the reply streams only so many start as may run; the rest is refused when it is whole."""
    tools, keys = begun()
    calls = [call("look", at=3 * n) for n in range(6)]
    agent = Agent(
        ScriptedModel(say("", *calls), "done"),
        tools=tools,
        limits=Limits(tool_calls=4),
        settings=Settings(stream=True),
        store=store,
    )
    run = await agent.run("go")
    assert len(keys) == 4
    assert [result.outcome for result in results_of(run.messages)] == [Outcome.DONE] * 4 + [Outcome.SKIPPED] * 2
    assert run.tool_call_count == 4


async def test_what_an_agent_spent_that_broke_down_still_counts(store):
    """A bug in a child's model is the failure of a call; what the child had spent and called stays with its caller."""
    tools, _ = begun()
    script = Busy([2])

    async def buggy(request: Request) -> Reply:
        if not script.widths:
            raise ZeroDivisionError("a bug")
        return await script.reply(request)

    child = Agent(FunctionModel(buggy), tools=tools, name="child")
    agent = Agent(Busy([], ("child",)), tools=[child.as_tool()], store=store)
    run = await agent.run("go", id="mine")
    [result] = results_of(run.messages)
    assert result.outcome is Outcome.FAILED
    assert result.child is not None
    assert (result.child.usage.tokens, result.child.tool_calls) == (10, ("look", "write"))
    assert (run.usage.tokens, run.tool_call_count) == (30, 3)


# Warnings


def limited(**limits: float) -> Agent:
    """An agent that looks around for ten turns, 100 tokens, a dollar, a second and a call each."""

    @tool(read_only=True)
    async def look(at: int) -> str:
        """Look."""
        await anyio.sleep(1)
        return f"seen {at}"

    lines = [
        say("", call("look", at=n), usage=Usage(input_tokens=90, output_tokens=10, cost_usd=1.0)) for n in range(9)
    ]
    wide = {"turns": 1_000, "tokens": 10**6, "seconds": 1_000.0, "tool_calls": 1_000, **limits}
    return Agent(Priced(*lines, "done"), tools=[look], limits=Limits(**wide))


class Priced(ScriptedModel):
    """A model whose price is known."""

    def cost_usd(self, usage: Usage) -> float:
        """US dollars for this usage."""
        return usage.tokens / 100


async def told_of(agent: Agent, store, clock) -> list[BudgetWarning]:
    """Return the warnings of a run."""
    async with agent.with_(store=store, clock=clock).stream("go", id="mine") as stream:
        return [event async for event in stream if isinstance(event, BudgetWarning)]


@pytest.mark.parametrize(
    ("limits", "limit", "used", "of"),
    [
        ({"turns": 10}, "turns", 8, 10),
        ({"tokens": 6_000, "warn_at": 0.05}, "tokens", 300, 6_000),
        ({"usd": 100.0, "warn_at": 0.05}, "usd", 5.0, 100.0),
        ({"seconds": 12.0, "warn_at": 0.5}, "seconds", 6.0, 12.0),
        ({"tool_calls": 10}, "tool_calls", 8, 10),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_limit_that_is_near_is_told_once(limits, limit, used, of):
    """When a run has used the share of a limit, whoever watches is told: of which, how much, and of how much."""
    [event] = virtually(partial(told_of, limited(**limits)))
    assert (event.limit, event.used, event.of) == (limit, pytest.approx(used), of)
    assert event.to_dict()["type"] == "budget_warning"
    assert event.run_id == "mine"


def test_nothing_is_told_of_limits_that_are_far():
    """A run within its means says nothing."""
    assert virtually(partial(told_of, limited())) == []


def test_a_later_driving_call_tells_again():
    """Who takes a run over beyond the share has heard nothing of it: it is told once in each driving call."""

    async def story(store, clock) -> list[tuple[int, float]]:
        agent = limited(turns=10).with_(store=store, clock=clock)
        run = agent.start("go", id="mine")
        while run.turn < 9:
            run = await agent.step(run)
        async with agent.stream(run) as stream:
            return [(event.turn, event.used) async for event in stream if isinstance(event, BudgetWarning)]

    assert virtually(story) == [(9, 9)]
