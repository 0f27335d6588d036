"""`python -m benchmarks plans`: requests and tokens of the same tasks, step by step, with a plan and in a script.

Functions play the models, so the figures do not depend on a model's skill: step by step, the model asks for all calls
that can run now in one reply, and a script returns the result of the last of them. Each call returns `RESULT_CHARS`
characters. Tokens are estimated by agentfsm's own counter, of everything that a request holds and of the reply. Times
are the shortest of `ROUNDS`, and a second for each request, since the models that are played take none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import attrs

from agentfsm import Agent, Limits, Purpose, tool
from agentfsm.core.messages import AssistantMessage, Message
from agentfsm.planning import Planner
from agentfsm.ports import ProposedCall, Reply, Request
from agentfsm.ports.model import to_mutable_json
from agentfsm.scripts import Script
from agentfsm.testing.models import FunctionModel
from agentfsm.tokens.ledger import estimate_tokens

RESULT_CHARS = 2_000
ROUNDS = 5
ANSWER = "This is the answer, of about the length of a sentence that a person reads."
INSTRUCTIONS = "You help people to plan their journeys. Be brief, and never invent a figure. " * 10


@tool(read_only=True)
async def look_up(what: str) -> str:
    """Look something up in the archive, and return the text of the best entry."""
    return f"{what}: ".ljust(RESULT_CHARS, ".")


@attrs.frozen
class Task:
    """A task as groups of calls: those of a group can run at once, after the group before."""

    name: str
    groups: Sequence[int]
    questions: int = 0

    def plan(self) -> str:
        """Return the plan of the task."""
        steps: list[dict[str, Any]] = []
        before: list[int] = []
        for size in self.groups:
            first = len(steps) + 1
            steps += [
                {"id": first + at, "tool": "look_up", "arguments": {"what": f"entry {first + at}"}, "after": before}
                for at in range(size)
            ]
            before = list(range(first, first + size))
        for _ in range(self.questions):
            steps.append({"id": len(steps) + 1, "question": "What follows from these entries?", "after": before})
            before = [len(steps)]
        return json.dumps({"steps": steps})

    def write_script(self) -> str:
        """Return the script of the task."""
        return (
            f"import asyncio\nnumber = 0\nfor size in {tuple(self.groups)}:\n"
            '    found = await asyncio.gather(*[look_up(f"entry {number + at}") for at in range(size)])\n'
            "    number += size\nfound[-1]"
        )


TASKS = (
    Task("compare two, advise", (2,), questions=2),
    Task("one lookup", (1,)),
    Task("chain of 3", (1, 1, 1)),
    Task("chain of 8", (1,) * 8),
    Task("8 at once", (8,)),
    Task("2, then 2, then 2", (2, 2, 2)),
    Task("chain of 20", (1,) * 20),
    Task("20 at once", (20,)),
)


@attrs.define
class Counted:
    """Plays the model of a task, and counts."""

    task: Task
    turns: Iterator[int]
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def reply(self, request: Request) -> Reply:
        """Answer a request as a capable model would."""
        if request.purpose is Purpose.PLAN:
            answer = Reply(text=self.task.plan())
        elif request.purpose is Purpose.PLAN_QUESTION or not request.tools:
            answer = Reply(text=ANSWER)
        elif request.tools[0].name == "run_python" and not self.requests:
            code = json.dumps({"code": self.task.write_script()})
            answer = Reply(calls=(ProposedCall(id="c", name="run_python", arguments=code),))
        elif request.tools[0].name == "run_python":
            answer = Reply(text=ANSWER)
        else:
            size = 0 if "[Plan] Results" in str(request.messages[-1]) else next(self.turns, 0)
            calls = [
                ProposedCall(id=f"c{at}", name="look_up", arguments=f'{{"what": "entry {self.requests * 10 + at}"}}')
                for at in range(size)
            ]
            answer = Reply(text="" if calls else ANSWER, calls=tuple(calls))
        self.requests += 1
        tools = [[each.name, each.description, to_mutable_json(each.parameters)] for each in request.tools]
        sent = [request.instructions, json.dumps(tools), *map(_message_text, request.messages)]
        said = [answer.text, *[each.name + each.arguments for each in answer.calls]]
        self.tokens += sum(map(estimate_tokens, [*sent, *said]))
        return answer


def _message_text(message: Message) -> str:
    calls = message.calls if isinstance(message, AssistantMessage) else ()
    return message.text + "".join([each.name + each.arguments for each in calls])


async def count(task: Task, planner: Planner | None = None, *, in_script: bool = False) -> Counted:
    """Run a task several times, and return the counts of a run with the shortest time."""
    found: list[Counted] = []
    for _ in range(ROUNDS):
        counted = Counted(task, iter(task.groups))
        agent = Agent(
            FunctionModel(counted.reply),
            tools=[Script(look_up) if in_script else look_up],
            instructions=INSTRUCTIONS,
            planner=planner,
            limits=Limits(turns=sum(task.groups) + 2),
        )
        began = time.perf_counter()
        run = await agent.run("Do it.")
        counted.seconds = time.perf_counter() - began + counted.requests
        assert run.output == ANSWER
        assert in_script or len(run.calls) == sum(task.groups)
        found.append(counted)
    return min(found, key=lambda each: each.seconds)


async def _main() -> None:
    print(f"results of {RESULT_CHARS:,} characters\n")
    print("| task | step by step | with a plan | in a script |\n|---|---|---|---|")
    for task in TASKS:
        plain = await count(task)
        cells = [task.name, f"{plain.requests} requests, {plain.tokens:,} tokens"]
        for way in (await count(task, Planner(max_steps=30)), await count(task, in_script=True)):
            tokens, seconds = way.tokens / plain.tokens, way.seconds / plain.seconds
            cells.append(f"{way.requests}, {way.tokens:,} ({tokens:.2f}x), time {seconds:.2f}x")
        print(f"| {' | '.join(cells)} |")


def main() -> int:
    """Print the table."""
    anyio.run(_main)
    return 0
