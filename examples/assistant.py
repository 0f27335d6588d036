"""An assistant that remembers a user across sessions, and forgets on request.

    python examples/assistant.py

On Monday one agent, in one process, writes a report for Ann and is told where she lives. On Tuesday another agent, in
another process, is asked for the report of yesterday. Then Ann wants to be forgotten, and no byte remains. Without
OPENAI_API_KEY, a script replaces the model; it knows nothing but what it reads.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio

from agentfsm import Agent, ToolResult, UserMessage
from agentfsm.memory import Learner, Memory, build_memory_tools
from agentfsm.ports import Model, ProposedCall, Reply, Request
from agentfsm.ports.store import SystemClock
from agentfsm.stores import SQLiteStore
from agentfsm.testing.models import FunctionModel

DAY_S = 86_400.0
# What a model that follows the instructions of an extraction makes of Monday's record.
LEARNED = {
    "approach": "Kept where she lives, and wrote the report.",
    "answer": "Sales rose by 7 %.",
    "outcome": "done",
    "decisions": [],
    "lessons": [],
    "facts": [{"text": "Ann wants short reports", "kind": "preference", "action": "add"}],
    "importance": 0.5,
}


class MondayClock(SystemClock):
    """The time, a day ago."""

    def now(self) -> float:
        """Return seconds since 1970."""
        return super().now() - DAY_S


def call(name: str, **arguments: object) -> Reply:
    """Return a reply that calls a tool."""
    return Reply(text="", calls=(ProposedCall(id=name, name=name, arguments=json.dumps(arguments)),))


def scripted(request: Request) -> Reply:
    """Play a model: it answers from what it was given, and that includes what was recalled."""
    if "read the record of a task" in request.instructions:
        assert all(f"- {name}: " in request.instructions for name in LEARNED)  # noqa: S101  it asks for all of it
        return Reply(text=json.dumps(LEARNED))
    inputs = [message.text for message in request.messages if isinstance(message, UserMessage)]
    task = next(text for text in reversed(inputs) if text.startswith("Ann: "))
    read = "\n".join(text for text in inputs if text.startswith("["))  # the profile, and what was recalled
    last = request.messages[-1]
    result = str(last.content) if isinstance(last, ToolResult) else ""
    if "I live in Porto" in task:
        return Reply(text="Sales rose by 7 %.") if result else call("remember", text="Ann lives in Porto", topic="home")
    if "forget where I live" in task:
        if not result:
            return call("recall_memory", query="Ann lives")
        if not result.startswith("["):
            return Reply(text=f"It is forgotten ({result}).")
        ids = [item["id"] for item in json.loads(result) if "Porto" in item["text"]]
        return call("forget_memory", item_ids=ids)
    found = re.search(r"Answer: (.*?)\.? Outcome", read)
    home = re.search(r"Ann lives in (\w+)", read)
    report = f"Yesterday's report says: {found[1]}" if found else "I know of no report"
    return Reply(text=f"{report}, and {f'you live in {home[1]}' if home else 'I do not know where you live'}.")


def choose_model() -> Model | str:
    """Return a real model if there is a key."""
    return "openai:gpt-5.4-mini" if os.environ.get("OPENAI_API_KEY") else FunctionModel(scripted)


def build_agent(name: str, memory: Memory, store: SQLiteStore, **options: Any) -> Agent:
    """Return an agent with the memory."""
    return Agent(choose_model(), name=name, memory=memory, tools=build_memory_tools(memory), store=store, **options)


async def monday(folder: Path) -> None:
    """Work for Ann, and learn from it."""
    clock = MondayClock()
    memory, store = Memory(folder / "memory.db", clock=clock), SQLiteStore(folder / "runs.db", clock=clock)
    async with build_agent("writer", memory, store, clock=clock) as agent:
        run = await agent.run("Ann: I live in Porto. Write the sales report.", user="ann", session="monday")
        print(f"monday, writer: {run.output}")
        await Learner(memory, choose_model(), store).run(until_idle=True)
    await memory.aclose()


async def tuesday(folder: Path) -> None:
    """Answer from what is remembered, and forget one thing."""
    memory, store = Memory(folder / "memory.db"), SQLiteStore(folder / "runs.db")
    question = "Ann: What does the sales report of yesterday say, and where do I live?"
    async with build_agent("assistant", memory, store) as agent:
        for user in ("ann", "bob"):
            run = await agent.run(question, user=user, session=f"tuesday of {user}")
            print(f"tuesday, assistant to {user}: {run.output}")
        run = await agent.run("Ann: Please forget where I live.", user="ann", session="tuesday of ann")
        for waiting in run.pending:
            print(f"waits for approval: {waiting.tool}")
            await agent.approve(run.id, waiting.call_id, digest=waiting.digest, by="ann")
        run = await agent.resume(run.id)
        print(f"tuesday, assistant to ann: {run.output}")
        run = await agent.run(question, user="ann", session="evening")
        print(f"tuesday, assistant to ann: {run.output}")
    await memory.aclose()


async def forget(folder: Path) -> None:
    """Forget Ann: her items, and the runs in which they were said."""
    memory, store = Memory(folder / "memory.db"), SQLiteStore(folder / "runs.db")
    print(f"'Porto' in a file: {is_in_files(folder, b'Porto')}")
    await memory.for_(user="ann").forget_all(runs="delete", store=store, by="ann", reason="asked")
    [*_, proof] = await memory.list_deletions()
    print(f"items forgotten for {proof.by}: {proof.items}")
    await memory.aclose()
    await store.aclose()
    print(f"'Porto' in a file: {is_in_files(folder, b'Porto')}")


def is_in_files(folder: Path, word: bytes) -> bool:
    """Return whether a word is in a file of a folder."""
    return any(word in path.read_bytes() for path in folder.iterdir())


DAYS = {"monday": monday, "tuesday": tuesday, "forget": forget}


def main() -> None:
    """Run each day in a process of its own."""
    with TemporaryDirectory() as folder:
        for day in DAYS:
            command = [sys.executable, __file__, day, folder]
            ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603  ours
            print(ended.stdout, end="")


if __name__ == "__main__":
    if sys.argv[1:]:
        anyio.run(DAYS[sys.argv[1]], Path(sys.argv[2]))
    else:
        main()
