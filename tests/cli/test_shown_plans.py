"""`agentfsm show` of a run with plans."""

from __future__ import annotations

import json

from agentfsm import Agent, tool
from agentfsm.cli.render.text import build_turns, format_run
from agentfsm.flow import Flow, agent_step
from agentfsm.planning import Planner
from agentfsm.testing import ScriptedModel


async def test_a_plan_stands_before_the_turns_with_its_steps():
    @tool
    def pay(cents: int) -> str:
        """Pay."""
        return "paid"

    steps = [{"id": 1, "tool": "pay", "arguments": {"cents": 5}}, {"id": 2, "question": "Enough?", "after": [1]}]
    agent = Agent(ScriptedModel(json.dumps({"steps": steps}), "yes", "done"), tools=[pay], planner=Planner(review=True))
    run = await agent.run("go")
    assert [(turn.title, turn.closed) for turn in build_turns(run)] == [("plan 1", False)]
    await agent.approve(run.id, "plan", by="ann")
    run = await agent.resume(run.id)
    shown = format_run(run, (await agent.store.read(run.id)).events).splitlines()
    assert "       approved by ann" in shown
    assert "  p1.1 pay(cents=5)" in shown
    assert shown.index("plan 1") < shown.index("turn 1")
    assert [turn.title for turn in build_turns(run)] == ["plan 1", "turn 1"]


async def test_a_result_for_which_a_fallback_stands_is_marked():
    """A reader of the run does not take it for the agent's own."""
    mood = agent_step(Agent(ScriptedModel("Hm."), name="mood"), "Which mood?", validate={"good"}, fallback="good")
    run = await Flow([mood]).run({})
    (line,) = [line for line in format_run(run).splitlines() if "done with a fallback" in line]
    assert line.startswith("       done with a fallback in ")
