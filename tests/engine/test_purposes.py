"""What tokens and money of a run were spent for, as its journal records it."""

from __future__ import annotations

import json

import pytest

from agentfsm import Agent, AgentCost, Limits, Outcome, Purpose, ToolResult, Usage, tool, usage_by_purpose
from agentfsm.cli.render.text import format_run
from agentfsm.context import Summarise, TwoStage
from agentfsm.core import events as e
from agentfsm.planning import Planner
from agentfsm.reflection import Action, Reflector, Verdict
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import results_of


class Named(ScriptedModel):
    """A scripted model with a name and a price per token."""

    def __init__(self, name, *replies):
        super().__init__(*replies)
        self.name = name

    def cost_usd(self, usage):
        return usage.tokens / 2**20


async def spent_by(agent, run):
    """Return what was spent for what; the sum is the usage of the run."""
    spent = usage_by_purpose(await agent.history(run.id))
    assert sum(spent.values(), Usage()) == run.usage
    assert all(usage.tokens or usage.cost_usd for usage in spent.values())
    return spent


def recorded(events, kind):
    """Return the purpose and the model of the only event of a kind."""
    [event] = [each for each in events if isinstance(each, kind)]
    return event.purpose, event.model


async def test_the_parts_of_a_plan(store):
    """The plan and its question are asked of the planner's model, and recorded with its name."""

    @tool(read_only=True, cost_usd=0.25)
    async def weather(city: str) -> str:
        """Tell the weather."""
        return "sunny"

    steps = [
        {"id": 1, "tool": "weather", "arguments": {"city": "Oslo"}},
        {"id": 2, "question": "Hat?", "after": [1]},
    ]
    planner = Planner(model=Named("small", json.dumps({"steps": steps}), "yes"))
    agent = Agent(Named("large", "Take a hat."), tools=[weather], planner=planner, store=store)
    run = await agent.run("go")
    assert run.output == "Take a hat."
    spent = await spent_by(agent, run)
    assert list(spent) == [Purpose.TURN, Purpose.PLAN, Purpose.PLAN_QUESTION, Purpose.TOOL]
    assert (spent[Purpose.TOOL].tokens, spent[Purpose.TOOL].cost_usd) == (0, 0.25)
    history = await agent.history(run.id)
    assert recorded(history, e.Planned) == (Purpose.PLAN, "small")
    asked = [each for event in history if isinstance(event, e.ToolFinished) for each in event.result.spent]
    assert [(each.purpose, each.model) for each in asked] == [(Purpose.TOOL, ""), (Purpose.PLAN_QUESTION, "small")]


async def test_a_plan_that_is_not_needed(store):
    """The request is recorded with its purpose, and the agent's own model is not named."""
    agent = Agent(ScriptedModel('{"steps": []}', "Hello."), tools=[tool(lookup)], planner=Planner(), store=store)
    run = await agent.run("go")
    assert Purpose.PLAN in await spent_by(agent, run)
    assert recorded(await agent.history(run.id), e.PlanDropped) == (Purpose.PLAN, "")


async def lookup(name: str = "x") -> str:
    """Look something up."""
    return f"found {name} " * 400


async def test_a_judge(store):
    """Also one whose reply cannot be read: it was paid for."""
    judge = Reflector(model=Named("judge", "no JSON", "no JSON"))
    agent = Agent(ScriptedModel("Hello."), reflector=judge, store=store)
    run = await agent.run("go")
    assert Purpose.JUDGE in await spent_by(agent, run)
    assert recorded(await agent.history(run.id), e.Judged) == (Purpose.JUDGE, "judge")


async def test_a_summary(store):
    """Requests of context policies have a word of their own."""
    model = ScriptedModel(*[say("", call("lookup", name=f"x{n}")) for n in range(8)], "done")
    model.window_tokens = 9_000
    summary = Summarise(model=Named("small", *["They looked."] * 8), keep=1, least=0.0)
    agent = Agent(model, tools=[tool(read_only=True)(lookup)], context=summary, store=store)
    run = await agent.run("go")
    assert list(await spent_by(agent, run)) == [Purpose.TURN, Purpose.SUMMARY]
    cuts = [event for event in await agent.history(run.id) if isinstance(event, e.Compacted)]
    assert {(event.purpose, event.model) for event in cuts} == {(Purpose.SUMMARY, "small")}


async def test_a_selection(store):
    """The model is asked which of many tools it needs; the word stands in the event with the tools."""
    tools = [tool(name=f"look_{n}", read_only=True)(lookup) for n in range(8)]
    agent = Agent(ScriptedModel('["look_1"]', "done"), tools=tools, selector=TwoStage(picks=2), store=store)
    run = await agent.run("go")
    assert list(await spent_by(agent, run)) == [Purpose.TURN, Purpose.TOOL_SELECTION]
    assert recorded(await agent.history(run.id), e.ToolsOffered) == (Purpose.TOOL_SELECTION, "")


async def test_a_last_answer_and_a_sub_agent(store):
    """The answer after a limit is not one of the turns, and neither is what another agent has spent."""
    clerk = Agent(ScriptedModel("Ann"), name="clerk").as_tool()
    script = (say("", call("clerk", query="who?")), "It is Ann.")
    agent = Agent(ScriptedModel(*script), tools=[clerk], limits=Limits(turns=2), last_answer=True, store=store)
    run = await agent.run("go")
    assert run.partial == "It is Ann."
    assert list(await spent_by(agent, run)) == [Purpose.TURN, Purpose.LAST_ANSWER, Purpose.AGENT]
    shown = format_run(run, await agent.history(run.id))
    assert "         last_answer: " in shown
    assert "         agent: " in shown


async def test_no_purpose_without_a_request(store):
    """A compaction by rule alone has none, and `show` of a run of turns alone has no list."""
    model = ScriptedModel(*[say("", call("lookup", name=f"x{n}")) for n in range(8)], "done")
    model.window_tokens = 4_000
    agent = Agent(model, tools=[tool(read_only=True)(lookup)], store=store)
    run = await agent.run("go")
    cuts = [event for event in await agent.history(run.id) if isinstance(event, e.Compacted)]
    assert cuts
    assert {(event.purpose, event.model) for event in cuts} == {(None, "")}
    assert list(await spent_by(agent, run)) == [Purpose.TURN]
    assert "turn: " not in format_run(run, await agent.history(run.id))
    assert all(not result.spent for result in results_of(run.messages))


@pytest.mark.parametrize(
    ("event", "purpose"),
    [
        (e.Judged(verdict=Verdict(action=Action.ACCEPT), usage=Usage(input_tokens=5)), Purpose.JUDGE),
        (e.ToolsOffered(tools=(), how="", usage=Usage(input_tokens=5)), Purpose.TOOL_SELECTION),
        (e.ModelFaltered(error="", usage=Usage(input_tokens=5)), Purpose.TURN),
        (e.ModelFaltered(error="", usage=Usage(input_tokens=5), purpose=Purpose.PLAN), Purpose.PLAN),
    ],
)
def test_events_of_older_journals(event, purpose):
    """Those that record no purpose have that of their kind."""
    assert usage_by_purpose([event]) == {purpose: Usage(input_tokens=5)}


def test_nothing_is_spent_twice():
    """The usage of a sub-agent's run is under `agent` only."""
    child = AgentCost(agent="clerk", run_id="r.t1.0", usage=Usage(input_tokens=7), usd=None, turns=1)
    result = ToolResult(call_id="t1.0", tool="clerk", outcome=Outcome.DONE, content="", child=child)
    assert usage_by_purpose([e.ToolFinished(result=result)]) == {Purpose.AGENT: Usage(input_tokens=7)}
