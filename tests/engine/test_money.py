"""What calls, turns, runs, agents below and sessions cost: in the journal where the price is known, else it is said."""

import logging

import attrs
import pytest

from agentfsm import Agent, AgentCost, Limits, ModelReplyError, Usage, tool
from agentfsm.cli.render.text import format_run
from agentfsm.core.events import AnswerGiven, ToolFinished, ToolsChosen
from agentfsm.models import Fallback
from agentfsm.ports import Selection, ToolSelector
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, fail, say

TOKENS = Usage(input_tokens=10, output_tokens=5)


class Priced(ScriptedModel):
    """A scripted model whose tokens cost so many dollars each; None: nobody knows."""

    def __init__(self, name, usd, *script):
        super().__init__(*script)
        self.name, self.usd = name, usd

    def cost_usd(self, usage):
        return None if self.usd is None else usage.tokens * self.usd


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "nothing"


async def test_each_reply_has_its_price_in_the_journal(store):
    """Without a limit of money, too: calls, turns and the run can be read off the journal, whatever costs later."""
    agent = Agent(Priced("m", 0.5, say("", call("look")), "done"), tools=[look], store=store)
    run = await agent.run("look")
    paid = [
        event.usage.cost_usd for event in await agent.history(run.id) if isinstance(event, ToolsChosen | AnswerGiven)
    ]
    assert paid == [7.5, 7.5]
    assert run.usage.cost_usd == agent.cost(run).usd == 15.0
    dearer = agent.with_(model=Priced("m", 9.0))
    assert dearer.cost(await dearer.load(run.id)).usd == 15.0


async def test_a_useless_reply_is_billed(store):
    """What a retry cost is part of the turn."""
    agent = Agent(
        Priced("m", 0.5, fail(ModelReplyError("garbled", TOKENS)), "done"),
        limits=Limits(retry_wait_s=0.001),
        store=store,
    )
    assert (await agent.run("hello")).usage.cost_usd == 15.0


async def test_the_choice_of_tools_is_billed(store):
    """Questions beside the run cost what others cost."""

    class Asks(ToolSelector):
        def wants(self, count):
            return True

        async def select(self, task, tools, ask):
            _, usage = await ask("Choose.", task)
            return Selection(tools=("look",), how="asked", usage=usage)

    agent = Agent(Priced("m", 0.5, "look", "done"), tools=[look], selector=Asks(), store=store)
    run = await agent.run("look")
    assert (run.usage.tokens, run.usage.cost_usd) == (30, 15.0)


async def test_an_unknown_price_is_said(store, caplog):
    """By the cost, by the run's text and, once for each agent, by the log; and never as zero."""
    caplog.set_level(logging.INFO, logger="agentfsm")
    agent = Agent(Priced("odd-model", None, say("", call("look")), "done", "again"), tools=[look], store=store)
    run = await agent.run("look")
    await agent.run("again")
    assert (run.usage.cost_usd, run.usage.unpriced) == (None, True)
    assert (agent.cost(run).usd, agent.cost(run).unpriced) == (None, ("odd-model",))
    assert '30 tokens (20 in, 10 out), no price for model "odd-model";' in format_run(run)
    (told,) = [line for line in caplog.messages if "price_unknown" in line]
    assert "odd-model" in told


async def test_a_sum_with_an_unknown_part_is_unknown(store):
    """One reply of a model whose price is known does not hide that another's is not."""
    overloaded = fail(ConnectionRefusedError("nobody listens"))
    known = Priced("known", 0.5, say("", call("look")), overloaded)
    agent = Agent(Fallback(known, Priced("local", None, "done")), tools=[look], store=store)
    run = await agent.run("look")
    assert (run.output, run.usage.cost_usd, run.usage.unpriced) == ("done", 7.5, True)
    assert (agent.cost(run).usd, agent.cost(run).unpriced) == (None, ("local",))
    assert '$7.50 and unknown prices, no price for model "local"' in format_run(run)


async def test_a_price_that_became_known_later_counts(store):
    """A run of the same model, whose journal holds no price, is priced by the agent that asks."""
    agent = Agent(Priced("m", None, "done"), store=store)
    run = await agent.run("hello")
    assert agent.with_(model=Priced("m", 0.5)).cost(run).usd == 7.5
    assert agent.with_(model=Priced("other", 0.5)).cost(run).usd is None


def coordinator(store, below_usd, above_usd=0.5):
    """Return an agent that asks another twice."""
    below = Agent(Priced("below-model", below_usd, "one", "two"), name="below")
    script = [say("", call("below", query="a"), call("below", query="b")), "done"]
    return Agent(Priced("above-model", above_usd, *script), name="above", tools=[below.as_tool()], store=store)


async def test_agents_below_are_billed_by_their_own_price(store):
    """Each is a child of the cost, and in the run's usage once."""
    agent = coordinator(store, 2.0)
    run = await agent.run("ask")
    total = agent.cost(run)
    assert [(child.agent, child.usd) for child in total.children] == [("below", 30.0)] * 2
    assert total.usd == run.usage.cost_usd == 2 * 7.5 + 2 * 30.0
    assert total.unpriced == ()
    finished = [event.result.child for event in await agent.history(run.id) if isinstance(event, ToolFinished)]
    assert [child.usage.cost_usd for child in finished] == [30.0, 30.0]


async def test_a_child_of_unknown_price_makes_the_whole_unknown(store):
    """And is the only one that is named; a caller of unknown price does not make its children unknown."""
    agent = coordinator(store, None)
    total = agent.cost(await agent.run("ask"))
    assert (total.usd, total.unpriced) == (None, ("below-model",))
    assert total.usage.cost_usd == 15.0
    agent = coordinator(store, 2.0, None)
    total = agent.cost(await agent.run("ask"))
    assert (total.usd, total.unpriced) == (None, ("above-model",))
    assert [child.usd for child in total.children] == [30.0, 30.0]


async def test_a_session_costs_what_its_runs_cost(store):
    """Oldest first, each once, with the agents below; what belongs to no session or to another is not in it."""
    agent = coordinator(store, 2.0)
    first = await agent.run("ask", session="user-7")
    chat = agent.with_(model=Priced("chat-model", 0.1, "b", "c", "d"))
    second = await chat.run("go on", session="user-7")
    await chat.run("hello", session="user-8")
    await chat.run("hello")
    bill = await chat.session_cost("user-7")
    assert [one.run_id for one in bill.runs] == [first.id, second.id]
    assert bill.runs == (agent.cost(first), chat.cost(second))
    assert bill.usd == bill.usage.cost_usd == pytest.approx(75.0 + 1.5)
    assert bill.usage.tokens == first.usage.tokens + second.usage.tokens
    assert bill.unpriced == ()


async def test_a_session_with_an_unknown_price_has_an_unknown_cost(store):
    """The model is named, once."""
    agent = Agent(Priced("odd-model", None, "one", "two"), store=store)
    for _ in range(2):
        await agent.run("hello", session="s")
    bill = await agent.session_cost("s")
    assert (bill.usd, bill.unpriced, bill.usage.tokens) == (None, ("odd-model",), 30)


async def test_no_session_costs_nothing(store):
    """There is nothing to be unknown."""
    bill = await Agent(Priced("m", None), store=store).session_cost("nobody")
    assert (bill.usd, bill.usage, bill.runs) == (0.0, Usage(), ())


async def test_a_long_session_is_read_whole():
    """Each journal once, oldest first, also where all began in the same millisecond; runs of others are not in it."""

    class Still:
        def now(self):
            return 1_800_000_000.0

        monotonic = now

    reads = []

    class Counting(MemoryStore):
        async def read(self, run_id, after=0):
            reads.append(run_id)
            return await super().read(run_id, after)

    agent = Agent(Priced("m", 0.5, *["ok"] * 9), store=Counting(clock=Still()), clock=Still())
    earlier = await agent.run("hello", session="another")
    runs = [await agent.run("hello", session="s") for _ in range(8)]
    reads.clear()
    bill = await agent.session_cost("s")
    assert [one.run_id for one in bill.runs] == [run.id for run in runs]
    assert bill.usd == 8 * 7.5
    assert sorted(reads) == sorted(run.id for run in runs)
    assert [one.run_id for one in (await agent.session_cost("another")).runs] == [earlier.id]


def test_costs_add_up_or_are_unknown():
    """A usage remembers that a part of it has no price."""
    known, unknown = Usage(input_tokens=1, cost_usd=0.5), Usage(input_tokens=1, unpriced=True)
    assert known + unknown == unknown + known == Usage(input_tokens=2, cost_usd=0.5, unpriced=True)
    assert not (known + known).unpriced
    assert attrs.fields(AgentCost).unpriced.default == ()


@pytest.mark.parametrize(
    ("usage", "text"),
    [
        (Usage(), "$0.00"),
        (Usage(cost_usd=0.000_021), "$0.000021"),
        (Usage(cost_usd=0.999_99), "$1.00"),
        (Usage(cost_usd=1_234.5), "$1,234.50"),
        (Usage(cost_usd=0.1, estimated=True), "about $0.10"),
        (Usage(cost_usd=0.1, estimated=True, unpriced=True), "about $0.10 and unknown prices"),
        (Usage(cost_usd=0.0, unpriced=True), "unknown price"),
        (Usage(input_tokens=1, unpriced=True), "unknown price"),
    ],
)
def test_a_cost_says_what_is_not_known_of_it(usage, text):
    """No amount looks like 0 or like a whole one that is not."""
    assert usage.format_cost() == text
