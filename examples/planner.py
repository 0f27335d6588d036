"""Plan first, then act: two looks in parallel, a comparison and advice, and a booking that a person approves.

    python examples/planner.py

The plan is a fact in the journal. It waits for a person, who takes one step out and approves the rest. Then the process
"dies" in the middle of the plan; the next one continues with the steps that are left. Without OPENAI_API_KEY, a script
replaces the model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import attrs

from agentfsm import Agent, Purpose, tool
from agentfsm.planning import Plan, Planner
from agentfsm.ports import Model, Reply, Request
from agentfsm.stores import SQLiteStore
from agentfsm.testing.models import FunctionModel

TASK = "Compare the weather in Oslo and Rome, advise me where to go, and book the journey."
PLAN = {
    "analysis": "Two looks at once, then a comparison and advice, then the booking.",
    "steps": [
        {"id": 1, "tool": "weather", "arguments": {"city": "Oslo"}},
        {"id": 2, "tool": "weather", "arguments": {"city": "Rome"}},
        {"id": 3, "question": "Which city is warmer, and by how much?", "after": [1, 2]},
        {"id": 4, "question": "In one sentence: where should one go?", "after": [3]},
        {"id": 5, "tool": "book", "arguments": {"city": {"$step": 2, "path": "/city"}}, "after": [2, 4]},
        {"id": 6, "tool": "book", "arguments": {"city": {"$step": 1, "path": "/city"}}, "after": [1, 4]},
    ],
}
ANSWERS = {
    "Which city is warmer, and by how much?": "Rome, by 17 degrees.",
    "In one sentence: where should one go?": "Go to Rome.",
}


@tool(read_only=True)
async def weather(city: str) -> dict[str, object]:
    """Return the weather of a city."""
    await anyio.sleep(0.05)
    return {"city": city, "celsius": {"Oslo": 4, "Rome": 21}.get(city, 15)}


@tool
async def book(city: str) -> str:
    """Book a journey to a city."""
    print(f"  booked: {city}")
    return f"booked {city}"


def scripted(request: Request) -> Reply:
    """Play a model that plans, answers questions, and sums up."""
    if request.purpose is Purpose.PLAN:
        return Reply(text=json.dumps(PLAN))
    asked = json.loads(request.messages[-1].text) if request.purpose is Purpose.PLAN_QUESTION else {}
    return Reply(text=ANSWERS.get(asked.get("question", ""), "Rome is 17 degrees warmer, and your journey is booked."))


def build_agent(path: Path) -> Agent:
    """Return the agent; each process that works on the run has one."""
    model: Model | str = "openai:gpt-5.4-mini" if os.environ.get("OPENAI_API_KEY") else FunctionModel(scripted)
    return Agent(model, tools=[weather, book], planner=Planner(review=True), store=SQLiteStore(path))


async def main() -> None:
    """Plan, review, die, go on."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "runs.db")
        async with build_agent(path) as agent:
            run = await agent.run(TASK)
            [waiting] = run.pending
            print(f"waits for the {waiting.kind} of a plan:\n{waiting.description}")
            plan = Plan.from_json(waiting.arguments)
            edited = attrs.evolve(plan, steps=tuple(step for step in plan.steps if step.id != len(plan.steps)))
            await agent.approve(run.id, "plan", plan=edited, digest=waiting.digest, by="ann")
            print(f"approved without step {len(plan.steps)}")
            with anyio.move_on_after(0.02):  # this process ends while the first steps run
                await agent.resume(run.id)
        async with build_agent(path) as agent:
            run = await agent.resume(run.id)
            steps = [f"{call.call_id} {call.name}: {call.outcome}" for call in run.calls]
            print("after the crash:", *steps, run.output, sep="\n  ")


if __name__ == "__main__":
    anyio.run(main)
