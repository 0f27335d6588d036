"""A plan of eight steps, whose workers are killed: each effect happens once, and finished steps are not repeated."""

from __future__ import annotations

import json
import os
from functools import partial
from itertools import count
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Agent, Found, Limits, RunContext, RunNotFoundError, tool
from agentfsm.core import events as e
from agentfsm.planning import Planner
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request
from agentfsm.stores import SQLiteStore
from agentfsm.testing.crash import connect, crash_point

STEPS = [
    {"id": 1, "tool": "look", "arguments": {"at": "a"}},
    {"id": 2, "tool": "look", "arguments": {"at": "b"}},
    {"id": 3, "tool": "pay", "arguments": {"whom": {"$step": 1}}, "after": [1]},
    {"id": 4, "tool": "pay", "arguments": {"whom": {"$step": 2}}, "after": [2]},
    {"id": 5, "question": "Who got more?", "after": [3, 4]},
    {"id": 6, "tool": "pay", "arguments": {"whom": {"$text": ["both: ", {"$step": 5}]}}, "after": [5]},
    {"id": 7, "tool": "look", "arguments": {"at": {"$step": 6}}, "after": [6]},
    {"id": 8, "question": "All well?", "after": [7]},
]
EFFECTS = ["both: answer", "seen a", "seen b"]
# The same for a plan with a goal, whose own run pays.
GOAL_STEPS = [
    {"id": 1, "tool": "look", "arguments": {"at": "a"}},
    {"id": 2, "goal": "Pay twice.", "tools": ["look", "pay"], "after": [1]},
    {"id": 3, "tool": "pay", "arguments": {"whom": {"$step": 2}}, "after": [2]},
]
GOAL_EFFECTS = ["answer", "first", "second"]


class PlanningModel(Model):
    """Plans, answers questions, pays twice for a goal, and answers at the end, in any process."""

    name = "planning"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the plan if one is wanted, the calls of a goal, and else always the same answer."""
        await checkpoint()
        task = "".join([message.text for message in request.messages[-2:-1]])
        if "You plan" in task:
            return Reply(text=json.dumps({"steps": GOAL_STEPS if "with these tools only" in task else STEPS}))
        if "Answer the question of a plan" in task:
            return Reply(text="answer")
        turn = len(request.messages) // 2
        if request.messages[0].text.startswith("Pay twice.") and turn < 2:
            whom = ("first", "second")[turn]
            return Reply(
                text="", calls=(ProposedCall(id=f"c{turn}", name="pay", arguments=json.dumps({"whom": whom})),)
            )
        return Reply(text="answer")


def agent_in(folder: str, mode: str) -> Agent:
    """Return the agent; its effects are lines of a file, which outlives its processes."""
    book = Path(folder, "effects")

    def write(text: str) -> None:
        crash_point("effect")
        with book.open("a") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
        crash_point("effect")

    @tool(read_only=True)
    async def look(at: str) -> str:
        """Look."""
        return f"seen {at}"

    def look_up(ctx: RunContext[None], _arguments: object) -> Found | str:
        return Found("paid") if ctx.idempotency_key in _keys(book) else "rerun"

    @tool(on_unknown=look_up, concurrency_safe=True)
    async def pay(ctx: RunContext[None], whom: str) -> str:
        """Pay once for a key, as a payment service does."""
        if ctx.idempotency_key not in _keys(book):
            write(f"{ctx.idempotency_key} {whom}")
        return "paid"

    return Agent(
        PlanningModel(),
        tools=[look, pay],
        planner=Planner(mode=mode),
        limits=Limits(crashes=1_000_000),
        store=SQLiteStore(str(Path(folder, "runs.db")), connect=connect),
    )


def _keys(book: Path) -> list[str]:
    return [line.split()[0] for line in book.read_text().splitlines()] if book.exists() else []


async def work(folder: str, mode: str) -> None:
    """Drive the run to its end, or until this process is killed."""
    agent = agent_in(folder, mode)
    try:
        run = await agent.load("plan")
    except RunNotFoundError:
        await agent.run("go", id="plan")
    else:
        if not run.is_over:
            await agent.resume("plan", takeover=True)
    await agent.store.aclose()


async def check(folder: str, mode: str) -> None:
    """Check the effects and the events of a run that is over."""
    agent = agent_in(folder, mode)
    run = await agent.load("plan")
    assert run.output == "answer"
    events = (await agent.store.read("plan")).events
    assert (await agent.replay("plan")).is_faithful
    await agent.store.aclose()
    lines = await anyio.Path(folder, "effects").read_text()
    paid = [line.split(" ", 1)[1] for line in lines.splitlines()]
    steps, effects = (STEPS, EFFECTS) if mode == "plan" else (GOAL_STEPS, GOAL_EFFECTS)
    assert sorted(paid) == effects
    results = [event.result.call_id for event in events if isinstance(event, e.ToolFinished)]
    assert sorted(results) == ["p1", *[f"p1.{step['id']}" for step in steps]]


@pytest.mark.parametrize("mode", ["plan", "hybrid"])
@pytest.mark.parametrize("kind", ["commit", pytest.param("effect", marks=pytest.mark.soak)])
def test_a_plan_may_be_killed_at_each_event(fork_server, tmp_path, kind, mode):
    """Before and after each commit and each effect, also within a goal."""
    for at in count(1):
        folder = tmp_path / str(at)
        folder.mkdir()
        first = fork_server.run(partial(work, str(folder), mode), kill_at=(kind, at))
        if first.killed:
            assert not fork_server.run(partial(work, str(folder), mode)).killed
        anyio.run(check, str(folder), mode)
        if not first.killed:
            break
    assert at > (6 if kind == "effect" else 10)
