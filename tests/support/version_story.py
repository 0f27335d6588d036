"""Runs of one agent that workers of two versions of agentfsm execute: a script that works with each of the versions.

It reads requests from stdin, a line of JSON for each, executes them with the agentfsm on the path, and prints the
outcomes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

import agentfsm
from agentfsm import Agent, AssistantMessage, Found, RunContext, tool
from agentfsm.stores import PostgresStore, RedisStore, SQLiteStore
from agentfsm.testing import FunctionModel, call, say

PAY_ID = "t1.0"


class Books:
    """The file of effects: a line for each, with the id of its run."""

    def __init__(self, path: str, dies_at: int = 0) -> None:
        self.path = Path(path)
        # Number of the effect with which the process kills itself; 0 for never.
        self.dies_at = dies_at
        # While this file exists, payments do not end.
        self.delay = self.path.with_suffix(".delay")
        # The warnings of all processes.
        self.log = self.path.with_suffix(".log")

    def write(self, run_id: str) -> None:
        """Do something that cannot be taken back."""
        book = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(book, f"{run_id}\n".encode())
        os.close(book)

    def effects(self) -> list[str]:
        """Return the ids of the runs of all effects."""
        return self.path.read_text().split() if self.path.exists() else []


async def look_up(ctx: RunContext[Books], _arguments: object) -> object:
    """Say what became of a call: the books know."""
    return Found("paid") if ctx.run_id in ctx.deps.effects() else "rerun"


@tool(on_unknown=look_up, requires_approval=True)
async def pay(ctx: RunContext[Books]) -> str:
    """Pay once; die in some processes, and take as long as a file exists."""
    ctx.deps.write(ctx.run_id)
    while ctx.deps.delay.exists():  # noqa: ASYNC110  another process removes it
        await anyio.sleep(0.01)
    ctx.deps.dies_at -= 1
    if ctx.deps.dies_at == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return "paid"


async def reply(request: Any) -> object:
    """Call the tool, then answer."""
    turn = sum(isinstance(message, AssistantMessage) for message in request.messages)
    return say("Paid.") if turn else say("", call("pay"))


def open_store(place: str) -> Any:
    """Open "sqlite PATH", "postgres URL SCHEMA" or "redis URL"."""
    kind, address, *rest = place.split(" ")
    if kind == "sqlite":
        return SQLiteStore(address)
    if kind == "postgres":
        return PostgresStore(address, schema=rest[0])
    return RedisStore(address, accept_loss="everything")


def make_agent(store: Any) -> Agent:
    """Return the agent of all these runs."""
    return Agent(FunctionModel(reply), tools=[pay], name="cashier", store=store)


class Warnings(logging.Handler):
    """Collects the warnings of agentfsm, in a list and in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = path
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        self.texts.append(record.getMessage())
        with self.path.open("a") as file:
            file.write(f"{record.getMessage()}\n")


async def execute(command: str, agent: Agent, books: Books, ids: Sequence[str]) -> dict[str, Any]:
    """Execute a command. Return what the test wants to know."""
    if command == "submit":
        for run_id in ids:
            await agent.submit("Pay.", id=run_id)
    elif command == "begin":  # up to the question whether to pay
        for run_id in ids:
            await agent.run("Pay.", id=run_id, deps=books)
    elif command == "send":
        for run_id in ids:
            await agent.send(run_id, "Thanks.")
    elif command == "approve":
        for run_id in ids:
            await agent.approve(run_id, PAY_ID, by="ann")
    elif command == "die":
        books.dies_at = len(ids)
        await agent.worker(deps=books, until_idle=True)
    elif command == "work":
        claimed: list[Any] = []
        claim = agent.store.claim

        async def count(*args: Any, **options: Any) -> Any:
            found = await claim(*args, **options)
            claimed.extend((lease.run_id, lease.crashes) for lease in found.leases)
            return found

        agent.store.claim = count  # type: ignore[method-assign]
        await agent.worker(deps=books, until_idle=True)
        return {"claimed": claimed}
    return {}


async def answer(agents: dict[str, Agent], request: dict[str, Any]) -> dict[str, Any]:
    """Execute a command; keep its store open if the request says so. Return its outcome, or its error."""
    place = request["place"]
    agent = agents.pop(place, None) or make_agent(open_store(place))
    books = Books(request["effects"])
    warnings = Warnings(books.log)
    logging.getLogger("agentfsm").addHandler(warnings)
    try:
        outcome = await execute(request["command"], agent, books, request["ids"])
    except agentfsm.AgentError as error:
        outcome = {"error": type(error).__name__, "text": str(error)}
    finally:
        logging.getLogger("agentfsm").removeHandler(warnings)
    if request["keep_open"]:
        agents[place] = agent
    else:
        await agent.aclose()
    return {**outcome, "warnings": warnings.texts, "package": agentfsm.__file__}


async def main() -> None:
    """Answer each line of stdin, until there are no more."""
    agents: dict[str, Agent] = {}
    while line := await anyio.to_thread.run_sync(sys.stdin.readline):
        sys.stdout.write(json.dumps(await answer(agents, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(main)
