"""An executor of runs through DBOS, as a process: `python -m tests.support.dbos_executor URL SCHEMA BOOKS RUNS`.

The agent of these runs makes two calls, one after the other. Each writes its process and key into the books, a file,
and then takes the time that the prompt names. So a key that stands there twice is an effect that happened twice.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentfsm import Agent, Limits, RunContext, ToolResult, tool
from agentfsm.engines.dbos import DBOSEngine
from agentfsm.ports import Request
from agentfsm.stores import PostgresStore
from agentfsm.testing import FunctionModel, call, say
from agentfsm.testing.models import Line

CALLS = 2
# The prompt of a run that kills its executor.
POISON = "die"


def make_clerk(url: str, schema: str, books: Path, **options: object) -> Agent:
    """Return the agent."""

    @tool
    async def pay(ctx: RunContext, seconds: float) -> str:
        """Pay."""
        with books.open("ab", buffering=0) as file:
            file.write(f"{os.getpid()} {ctx.idempotency_key}\n".encode())
        await asyncio.sleep(seconds)
        return "paid"

    def answer(request: Request) -> Line | str:
        if request.messages[0].text == POISON:
            os._exit(1)
        done = sum(isinstance(message, ToolResult) for message in request.messages)
        return "all paid" if done == CALLS else say("", call("pay", seconds=float(request.messages[0].text)))

    return Agent(
        FunctionModel(answer),
        tools=[pay],
        name="clerk",
        store=PostgresStore(url, schema=schema, **options),
        limits=Limits(turns=9),
    )


def make_engine(agent: Agent, **options: object) -> DBOSEngine:
    """Return an engine that looks often into the queue."""
    return DBOSEngine(agent, poll_s=0.05, **options)


@contextmanager
def start(url: str, schema: str, books: Path, runs: int, *wrapper: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start an executor of so many runs at a time, and kill it in the end."""
    process = subprocess.Popen(
        [*wrapper, sys.executable, "-m", "tests.support.dbos_executor", url, schema, str(books), str(runs)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def main() -> None:
    """Work until killed."""
    url, schema, books, runs = sys.argv[1:]
    agent = make_clerk(url, schema, Path(books))
    await make_engine(agent, worker_concurrency=int(runs)).work()


if __name__ == "__main__":
    asyncio.run(main())
