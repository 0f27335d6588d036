"""Costs of the runs in a store, and forecasts."""

from __future__ import annotations

from datetime import UTC, datetime

import anyio
import pytest

from agentfsm import Agent, Spend, Usage, tool
from agentfsm.models import Price
from agentfsm.stores import MemoryStore
from agentfsm.telemetry import estimate, read_costs, read_spend
from agentfsm.telemetry.costs import count_growing_tokens
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import virtually

# Document H, 4.2: the tokens of five turns, and what each costs to four digits.
TURNS = [(800, 150, 0.0035), (1_200, 120, 0.0042), (1_600, 200, 0.0060), (2_100, 180, 0.0071), (2_500, 250, 0.0088)]
PRICE = Price(input_usd_per_million=2.5, output_usd_per_million=10)


class Priced(ScriptedModel):
    """A scripted model at the price of document H, 4.2."""

    name = "priced"

    def cost_usd(self, usage):
        return PRICE.cost_usd(usage)


@tool(read_only=True, cost_usd=0.005)
async def search(query: str) -> str:
    """Search."""
    return "found"


def five_turns():
    """Return the script of the document's example."""
    usages = [Usage(input_tokens=asked, output_tokens=said) for asked, said, _ in TURNS]
    calls = [say("", call("search", query=str(index)), usage=usage) for index, usage in enumerate(usages[:-1])]
    return [*calls, say("done", usage=usages[-1])]


async def test_the_example_of_the_document():
    """8,200 + 900 tokens cost $0.0295; the document's $0.0296 is the sum of five rounded figures."""
    agent = Agent(Priced(*five_turns()), tools=[search], store=MemoryStore())
    run = await agent.run("x")
    report = await read_costs(agent.store, by="purpose")
    costs = {row.name: row.usd for row in report.rows}
    assert (run.usage.input_tokens, run.usage.output_tokens) == (8_200, 900)
    assert costs == {"turn": pytest.approx(0.0295), "tool": pytest.approx(0.02)}
    each = [PRICE.cost_usd(Usage(input_tokens=asked, output_tokens=said)) for asked, said, _ in TURNS]
    assert each == [pytest.approx(usd, abs=0.000_051) for _, _, usd in TURNS]
    assert sum(usd for _, _, usd in TURNS) == pytest.approx(0.0296)
    # With the growth formula: 400 tokens of instructions, and T so that five turns have 8,200.
    assert count_growing_tokens(5, 400, 6_200 / 15) == pytest.approx(8_200)
    assert count_growing_tokens(10, 0, 1) == 55 * count_growing_tokens(1, 0, 1)


async def test_an_estimate_is_measured_in_recorded_runs():
    """The tokens that a turn adds are those with which the formula gives the input of the runs; else assumed."""
    agent = Agent(Priced(*five_turns()), tools=[search], store=MemoryStore(), instructions="Be brief." * 40)
    before = await estimate(agent, turns=5)
    assert (before.sampled_runs, before.added_tokens, before.reply_tokens) == (0, 413, 180)
    await agent.run("x")
    found = await estimate(agent)
    assert (found.turns, found.sampled_runs) == (5, 1)
    assert (found.input_tokens, found.output_tokens) == (8_200, 900)
    assert found.usd == pytest.approx(0.0295, rel=0.001)
    twice = await estimate(agent, turns=10)
    assert 3 < twice.input_tokens / found.input_tokens < 4  # it grows with the square
    assert (await estimate(Agent(ScriptedModel("x")))).usd is None


async def test_costs_by_everything():
    """Each amount is in one row of each table, those of sub-agents in the rows of their own runs."""
    store = MemoryStore()
    child = Agent(Priced(say("ok", usage=Usage(output_tokens=300))), name="child", store=store)
    script = [
        say("", call("child", query="?"), usage=Usage(output_tokens=100)),
        say("done", usage=Usage(output_tokens=50)),
    ]
    parent = Agent(Priced(*script), name="parent", tools=[child.as_tool()], store=store)
    run = await parent.run("x", user="ann", tenant="acme")
    await Agent(Priced(say("hi", usage=Usage(output_tokens=20))), store=store, name="other").run("y")
    today = datetime.fromtimestamp(run.created_at, UTC).strftime("%Y-%m-%d")
    for by, rows in {
        "agent": {"child": 0.003, "parent": 0.0015, "other": 0.0002},
        "user": {"ann": 0.0045, "(none)": 0.0002},
        "tenant": {"acme": 0.0045, "(none)": 0.0002},
        "model": {"priced": 0.0047},
        "purpose": {"turn": 0.0047},
        "day": {today: 0.0047},
    }.items():
        report = await read_costs(store, by=by)
        assert {row.name: row.usd for row in report.rows} == pytest.approx(rows), by
        assert report.usd == pytest.approx(0.0047)
        assert (report.runs, report.is_whole) == (3, True)
    newest = await read_costs(store, limit=1)
    assert ([row.name for row in newest.rows], newest.is_whole) == (["other"], False)


def test_the_month_at_the_present_rate():
    """Costs before the time do not count."""

    async def play(store, clock):
        model = Priced(*[say("x", usage=Usage(output_tokens=1_000)) for _ in range(4)])
        agent = Agent(model, store=store, clock=clock)
        for _ in range(4):
            await agent.run("x")
            clock_now = clock.now()

            await anyio.sleep(86_400)
        report = await read_costs(store, by="day", since=clock_now - 1.5 * 86_400)
        assert [row.runs for row in report.rows] == [1, 1]
        assert (report.days, report.usd_per_day) == (pytest.approx(2.5), pytest.approx(0.008))
        assert report.forecast_month() == (31, pytest.approx(0.248))

    virtually(play)


async def test_the_windows_of_spending_limits():
    """Those that have not ended; a tenant sees its own and those of its users."""
    store = MemoryStore()
    limits = [Spend(per="month", scope="tenant", usd=2), Spend(per="day", scope="user", usd=1), Spend(per="day", usd=5)]
    agent = Agent(Priced(*[say("x", usage=Usage(output_tokens=1_000))] * 2), store=store, spend=limits)
    for tenant in ("a", "b"):
        await agent.run("x", user="ann", tenant=tenant)
    found = {(each.window.scope, each.window.tenant, each.window.subject): each for each in await read_spend(store)}
    assert {key: each.spent_usd for key, each in found.items()} == pytest.approx(
        {("agent", "", "agent"): 0.02, ("tenant", "", "a"): 0.01, ("tenant", "", "b"): 0.01}
        | {("user", "a", "ann"): 0.01, ("user", "b", "ann"): 0.01}
    )
    assert found["agent", "", "agent"].limits_usd == (5.0,)
    own = await read_spend(store, tenant="a")
    assert [each.window.describe().partition(" in ")[0].partition(" on ")[0] for each in own] == [
        "the tenant a",
        "the user ann of the tenant a",
    ]
