"""Tools that cost money: `@tool(cost_usd=)` and `ctx.add_cost`, in the journal, in the limits and in what is shown."""

from __future__ import annotations

import anyio
import pytest

from agentfsm import (
    Agent,
    ErrorType,
    InputRequired,
    Limits,
    MisuseError,
    Outcome,
    Question,
    RunContext,
    Settings,
    StopReason,
    Usage,
    tool,
)
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import results_of, sound, virtually
from tests.support.unknown_outcomes import recovered

SURE = Question(key="sure", message="Sure?", schema={"type": "object", "properties": {"ok": {"type": "boolean"}}})


class Cheap(ScriptedModel):
    """A scripted model whose tokens cost nothing, so that the tools alone cost money."""

    def cost_usd(self, usage):
        return 0.0


def paid_calls(made, cost_usd, **options):
    """Return a tool that appends to a list, and costs money."""

    @tool(cost_usd=cost_usd, **options)
    async def look_up(ctx: RunContext[None], pages: int = 1) -> str:
        """Look something up in a service that charges for it."""
        made.append(pages)
        await anyio.sleep(0.001)
        return "found"

    return look_up


def agent_of(store, *replies, tools, usd=1.0, **fields):
    return Agent(Cheap(*replies), tools=tools, limits=Limits(usd=usd), store=store, **fields)


@pytest.mark.parametrize(
    ("cost_usd", "usd"), [(0.25, 0.25), (lambda a: a.pages * 0.1, 0.5), (0, 0.0)], ids=["number", "function", "free"]
)
@pytest.mark.parametrize("limit", [None, 1.0])
async def test_a_call_costs_what_its_tool_declares(store, cost_usd, usd, limit):
    """The result records it, and the run's cost contains it, with or without a limit."""
    made = []
    script = (say("", call("look_up", pages=5)), "done")
    agent = agent_of(store, *script, tools=[paid_calls(made, cost_usd)], usd=limit)
    run = await agent.run("go")
    assert (run.output, made) == ("done", [5])
    assert results_of(run.messages)[0].usage == Usage(cost_usd=usd)
    assert run.usage.cost_usd == agent.cost(run).usd == usd
    assert agent.cost(await agent.load(run.id)).usd == usd
    await sound(agent, run)


async def test_a_call_beyond_the_money_is_not_made(store):
    """The model reads what it costs and what is left, and the run goes on."""
    made = []
    script = (say("", call("look_up", pages=3)), say("", call("look_up", pages=1)), "done")
    agent = agent_of(store, *script, tools=[paid_calls(made, lambda a: a.pages * 0.5)])
    run = await agent.run("go")
    refused, done = results_of(run.messages)
    assert (refused.outcome, refused.error_type, refused.usage) == (Outcome.SKIPPED, ErrorType.BUDGET, None)
    assert "costs $1.50, and $1.00 are left" in refused.content
    assert (done.outcome, made, run.usage.cost_usd) == (Outcome.DONE, [1], 0.5)


async def test_parallel_calls_cannot_together_exceed_the_limit(store):
    """The cost is reserved before a call starts."""
    made = []
    look_up = paid_calls(made, 0.4, concurrency_safe=True)
    agent = agent_of(store, say("", *[call("look_up", pages=n) for n in range(5)]), "done", tools=[look_up])
    run = await agent.run("go")
    assert len(made) == 2
    assert run.usage.cost_usd == 0.8
    assert [r.outcome for r in results_of(run.messages)].count(Outcome.SKIPPED) == 3


async def test_the_limit_can_be_used_up_exactly(store):
    """Ten tenths fit, although floats add up to something else; then the run stops."""
    made = []
    script = [*[say("", call("look_up", pages=n)) for n in range(10)], "done"]
    run = await agent_of(store, *script, tools=[paid_calls(made, 0.1)], usd=0.3).run("go")
    assert (made, run.stop_reason) == ([0, 1, 2], StopReason.COST_BUDGET)
    assert run.usage.cost_usd == pytest.approx(0.3)


async def test_a_tool_reports_its_cost_itself(store):
    """The reported amounts add up and take the place of the declared one, also if the call fails."""

    @tool(cost_usd=0.5)
    async def generate(ctx: RunContext[None], *, breaks: bool) -> str:
        """Generate."""
        ctx.add_cost(0.125)
        ctx.add_cost(0.125)
        if breaks:
            raise ValueError("no")
        return "here"

    script = (say("", call("generate", breaks=True)), say("", call("generate", breaks=False)), "done")
    run = await agent_of(store, *script, tools=[generate]).run("go")
    assert [(r.outcome, r.usage.cost_usd) for r in results_of(run.messages)] == [
        (Outcome.FAILED, 0.25),
        (Outcome.DONE, 0.25),
    ]
    assert run.usage.cost_usd == 0.5


async def test_a_plain_tool_reports_from_its_thread(store):
    @tool(cost_usd=0)
    def generate(ctx: RunContext[None]) -> str:
        """Generate."""
        ctx.add_cost(0.25)
        return "here"

    run = await agent_of(store, say("", call("generate")), "done", tools=[generate]).run("go")
    assert run.usage.cost_usd == 0.25


@pytest.mark.parametrize("usd", [-1, "1", float("nan"), None, True])
def test_an_amount_that_is_none_is_refused(usd):
    with pytest.raises(MisuseError, match=r"^add_cost\(usd="):
        RunContext(deps=None).add_cost(usd)


@pytest.mark.parametrize("function", [lambda a: a.nothing, lambda _a: "1", lambda _a: -1, lambda _a: None])
async def test_a_call_of_unknown_cost_is_not_made(store, function, caplog):
    """The author finds the fault in the log."""
    made = []
    agent = agent_of(store, say("", call("look_up")), "done", tools=[paid_calls(made, function)])
    run = await agent.run("go")
    (result,) = results_of(run.messages)
    assert (made, result.outcome, result.error_type) == ([], Outcome.FAILED, ErrorType.BLOCKED)
    assert "cost_usd of the tool 'look_up' has failed, so the call is not made" in caplog.text


async def test_a_run_above_pays_for_the_tools_of_its_agents(store):
    """Its limit refuses their calls, and its cost contains theirs."""
    made = []
    below = Agent(
        Cheap(say("", call("look_up")), say("", call("look_up")), "enough"),
        name="below",
        tools=[paid_calls(made, 0.6)],
    )
    agent = agent_of(store, say("", call("below", query="go")), "done", tools=[below.as_tool(description="Look.")])
    run = await agent.run("go")
    assert (run.output, made) == ("done", [1])
    assert run.usage.cost_usd == agent.cost(run).usd == 0.6
    assert agent.cost(run).children[0].usd == 0.6


async def test_a_call_that_waits_for_a_person_reserves_nothing(store):
    """It is charged once, when it has ended."""
    made = []

    @tool(cost_usd=0.6, concurrency_safe=True)
    async def book(ctx: RunContext[None]) -> str:
        """Book."""
        if "sure" not in ctx.answers:
            raise InputRequired(SURE)
        made.append("book")
        return "booked"

    script = (say("", call("book"), call("look_up")), "done")
    agent = agent_of(store, *script, tools=[book, paid_calls(made, 0.3, concurrency_safe=True)])
    run = await agent.run("go")
    assert (made, run.usage.cost_usd) == ([1], 0.3)
    await agent.answer(run.id, run.pending[0].call_id, {"ok": True})
    run = await agent.resume(run.id)
    assert (run.output, made) == ("done", [1, "book"])
    assert run.usage.cost_usd == pytest.approx(0.9)


async def test_a_paid_tool_does_not_start_early():
    """A reply that is dropped must not cost anything."""
    assert not paid_calls([], 0.1, read_only=True).may_start_early
    assert not paid_calls([], 0, read_only=True).may_start_early


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost_usd": -1}, r"\(cost_usd=-1\): give US dollars, 0 or more, or a function"),
        ({"cost_usd": "1"}, r"\(cost_usd='1'\): give US dollars"),
        ({"cost_usd": 1, "external": True}, "leave out cost_usd="),
    ],
)
def test_wrong_declarations_are_refused(options, message):
    with pytest.raises(MisuseError, match=message):
        tool(name="look_up", **options)(lambda: "")


@pytest.mark.parametrize("policy", ["rerun", "fail"])
async def test_a_call_is_charged_once_after_a_crash(store, policy):
    """Whether it ran again or ended as unknown: its worker died after the service had been called."""
    run, _, agent = await recovered(store, on_unknown=policy, cost_usd=0.5)
    assert run.usage.cost_usd == 0.5
    await sound(agent, run)


async def test_a_call_settled_by_a_person_is_charged(store):
    """The person says what came of it; it had started."""
    run, _, agent = await recovered(store, on_unknown="ask", cost_usd=0.5)
    assert not run.usage.cost_usd
    await agent.settle(run.id, "t1.0", result="paid")
    assert (await agent.resume(run.id)).usage.cost_usd == 0.5


@pytest.mark.parametrize("end", ["timeout", "cancelled"])
def test_a_call_that_the_end_of_its_run_cuts_off_is_charged(end):
    """The service has been called; a call that never started costs nothing."""

    async def play(store, clock):
        begun = anyio.Event()

        @tool(cost_usd=0.25, timeout_s=1_000)
        async def look_up() -> str:
            """Look something up."""
            begun.set()
            await anyio.sleep_forever()

        calls = say("", call("look_up"), call("look_up"))
        limits = Limits(usd=1.0, parallel=1)
        agent = agent_of(store, calls, tools=[look_up]).with_(limits=limits, clock=clock)
        run = agent.start("go")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.finish, run)
            await begun.wait()
            if end == "cancelled":
                await agent.cancel(run.id)
        run = await agent.load(run.id)
        assert (run.stop_reason, run.usage.cost_usd) == (end, 0.25)
        assert [record.outcome for record in run.calls] == [Outcome.UNKNOWN, Outcome.SKIPPED]
        await sound(agent, run)

    virtually(play)


async def test_the_requests_of_a_costly_agent_do_not_wait_for_its_call(store):
    """The cost of the call counts as spent: the request gets what is left, or the agent ends. Neither waits."""

    class CentPerToken(ScriptedModel):
        def cost_usd(self, usage):
            return usage.output_tokens * 0.01

    def answer(tokens):
        return say("found", usage=Usage(output_tokens=tokens))

    for call_usd, outcome in ((0.06, Outcome.DONE), (0.09, Outcome.FAILED)):
        inner = Agent(CentPerToken(answer(3)), name="inner", settings=Settings(max_tokens=5))
        outer = Agent(
            CentPerToken(say("", call("inner", query="it"), usage=Usage(output_tokens=1)), answer(1)),
            tools=[inner.as_tool(cost_usd=call_usd)],
            limits=Limits(usd=0.10),
            settings=Settings(max_tokens=1),
            store=store,
        )
        run = await outer.run("go")
        assert results_of(run.messages)[0].outcome is outcome
        assert run.usage.cost_usd == pytest.approx(0.10)
