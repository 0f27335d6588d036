"""A nightly flow over the reviews of a day: read them, have an agent judge their mood, and write them back.

    python examples/flow.py

The steps and their order are the program's; only the mood is left to an agent, and its answer is checked before the
next step reads it. The first process "dies" while it stores the moods; the next one goes on, and nothing is stored
twice. Then the same flow runs over a day whose reviews cannot be published, and what it has stored is taken back.
Without OPENAI_API_KEY, a script replaces the model.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from agentfsm import Agent, RunContext
from agentfsm.flow import Flow, agent_step, step
from agentfsm.ports import Reply, Request
from agentfsm.stores import SQLiteStore
from agentfsm.testing.models import FunctionModel

REVIEWS = {"2025-07-28": ["Arrived early, works.", "It is blue."], "2025-07-29": ["Broke on the first day."]}
MOODS = {"positive", "negative", "neutral"}
STORED: dict[str, str] = {}


@step(read_only=True)
async def extract(day: str) -> list[str]:
    """Read the reviews of a day."""
    return REVIEWS[day]


def scripted(request: Request) -> Reply:
    """Play a model that judges reviews, and sometimes says more than it should."""
    text = request.messages[-1].text
    return Reply(
        text="Negative" if "Broke" in text else "It depends on whom you ask." if "blue" in text else "positive"
    )


reader = Agent("openai:gpt-4o" if os.environ.get("OPENAI_API_KEY") else FunctionModel(scripted), name="mood")
mood = agent_step(
    reader,
    lambda extract: f"The mood of these reviews, one word of {sorted(MOODS)}:\n{json.dumps(extract)}",
    depends_on=[extract],
    validate=MOODS,
    fallback="neutral",
)


@step(depends_on=[mood], when=lambda mood: mood == "negative")
async def alarm(mood: str) -> str:
    """Tell somebody about bad reviews."""
    return f"somebody was told about {mood} reviews"


def remove(day: str) -> None:
    """Take back what was stored for a day."""
    print(f"  removed: {STORED.pop(day)}")


@step(depends_on=[mood], key=lambda day: f"mood-{day}", compensate=remove)
async def load(ctx: RunContext[anyio.Event | None], day: str, mood: str) -> str:
    """Store the mood of a day, once for each key."""
    if day not in STORED:
        STORED[day] = mood
        print(f"  stored: {mood} ({ctx.idempotency_key})")
        if ctx.deps is not None:
            ctx.deps.set()
        await anyio.sleep(0.1)  # until the database answers
    return mood


@step(depends_on=[load, alarm])
async def publish(load: str, alarm: str | None) -> str:
    """Publish the mood; not if somebody has to look at it first."""
    if alarm is not None:
        raise PermissionError(alarm)
    return f"published: {load}"


def build_flow(path: Path) -> Flow:
    """Return the flow; each process that works on the run has one."""
    return Flow([extract, mood, alarm, load, publish], name="reviews", store=SQLiteStore(path))


async def main() -> None:
    """Run the flow, die, go on; then run it over a bad day."""
    with TemporaryDirectory() as folder:
        path, stored = Path(folder, "runs.db"), anyio.Event()
        async with build_flow(path) as flow:
            run = await flow.submit({"day": "2025-07-28"}, id="reviews:2025-07-28")
            async with anyio.create_task_group() as process:
                process.start_soon(partial(flow.resume, run.id, deps=stored))
                await stored.wait()
                process.cancel_scope.cancel()  # this process ends while the step runs
        async with build_flow(path) as flow:
            run = await flow.resume(run.id)
            print("after the crash:", *[f"{name}: {status}" for name, status in flow.statuses(run).items()], sep="\n  ")
            print(run.output)
            run = await flow.run({"day": "2025-07-29"})
            print(f"{run.stop_reason}: {run.stop_message}")


if __name__ == "__main__":
    anyio.run(main)
