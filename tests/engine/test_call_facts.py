"""Calls as facts, for guards and validators: with outcomes, and those of the runs that a run continues."""

from __future__ import annotations

from agentfsm import Agent, AssistantMessage, Outcome, TextPart, ToolCall, ToolResult, UserMessage, tool
from agentfsm.core.call_facts import iterate_closed_calls, list_call_facts
from agentfsm.core.run import begin_run
from agentfsm.flow import Flow, step
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import sound


@tool(read_only=True)
async def verify(account: str) -> str:
    """Verify an account."""
    if account == "B":
        raise RuntimeError("not verified")
    return f"{account} is verified"


@tool(requires_approval=True)
async def pay(account: str, cents: int = 1) -> str:
    """Pay."""
    return f"paid {cents}"


@step(read_only=True)
async def check(account: str) -> str:
    """Check an account."""
    return account


TOOLS = [verify, pay]


def facts_of(run):
    return [(each.call_id, each.tool, each.outcome, each.approved_by) for each in list_call_facts(run)]


async def test_calls_of_a_session_with_outcomes_and_approvals(store):
    """Those of earlier runs come first; open calls last; what a caller gave as history is no fact."""
    given = [
        UserMessage(parts=(TextPart(text="before"),)),
        AssistantMessage(calls=(ToolCall(id="t1.0", name="verify", arguments='{"account": "C"}'),)),
        ToolResult(call_id="t1.0", tool="verify", outcome=Outcome.DONE, content="C is verified"),
    ]
    script = (say("", call("verify", account="B"), call("pay", account="A")), "one", say("", call("pay", account="A")))
    agent = Agent(ScriptedModel(*script), tools=TOOLS, store=store)
    first = await agent.run("go", messages=given)
    [waiting] = [each for each in list_call_facts(first) if each.outcome is None]
    assert (waiting.tool, waiting.is_started, waiting.may_have_happened) == ("pay", False, False)
    await agent.approve(first.id, "t2.1", by="ann", arguments={"account": "A", "cents": 3})
    first = await agent.resume(first.id)
    second = await agent.run("and again", after=first)
    known = [("t2.0", "verify", Outcome.FAILED, None), ("t2.1", "pay", Outcome.DONE, "ann")]
    assert facts_of(first) == known
    assert facts_of(second) == [*known, ("t3.0", "pay", None, None)]
    paid = list_call_facts(second)[1]
    assert paid.is_done
    assert (paid.arguments, paid.result, paid.is_started) == ({"account": "A", "cents": 3}, "paid 3", True)
    assert paid.ended_at >= paid.started_at > 0
    assert list(iterate_closed_calls(second, start=len(second.prior))) == []
    await sound(agent, second)


async def test_steps_of_earlier_plans(store):
    """A run knows the steps of the flows that it continues, whose messages are notes only."""
    first = await Flow([check], store=store).run({"account": "A"})
    second = begin_run(first.header, first)
    assert facts_of(first) == facts_of(second) == [("p1.1", "check", Outcome.DONE, None)]


async def test_a_background_run_that_waits_may_have_acted(store):
    """Its call has begun and has no outcome, until the run is reported."""
    payer = Agent(ScriptedModel(say("", call("pay", account="A")), "Paid."), tools=[pay], name="payer")
    script = ScriptedModel(say("", call("payer", query="Pay A.")), "It is being paid.", "Paid.")
    agent = Agent(script, tools=[payer.as_tool(background=True)], store=store)
    run = await agent.run("Pay A.")
    (fact,) = list_call_facts(run)
    assert (fact.outcome, fact.is_started, fact.may_have_happened, fact.is_agent) == (None, True, True, True)
    await agent.approve(run.pending[0].run_id, run.pending[0].call_id)
    (fact,) = list_call_facts(await agent.resume(run.id))
    assert (fact.outcome, fact.is_done, fact.is_agent) == (Outcome.DONE, True, True)
