"""A process that runs an agent until its spending limit refuses it.

The provider's bills are a file outside of the process: the model writes a line with its cents before it answers. So
they are known even if the process is killed before the answer is in the journal.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import anyio

from agentfsm import Agent, Limits, ModelUnavailableError, Settings, Spend, StopReason, Usage
from agentfsm.ports import Emit, Model, Reply, Request, Store, TextChunk
from agentfsm.testing.crash import report

LIMIT_USD = 3.0
# Cents of the longest answer.
LONGEST = 10
# Share of the answers that break off, so that no usage is reported.
BROKEN = 0.25
# Runs at once in each process.
PARALLEL = 4


class Billed(Model):
    """Answers with 5 to 10 tokens of a cent each, and bills them. Each fourth answer or so breaks off at its end."""

    name = "billed"

    def __init__(self, bills: str) -> None:
        self.bills = bills

    def cost_usd(self, usage: Usage) -> float:
        return usage.output_tokens * 0.01

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        cents = min(request.settings.max_tokens or LONGEST, random.randint(5, LONGEST))
        await anyio.sleep(random.uniform(0.0, 0.02))
        book = os.open(self.bills, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(book, f"{cents}\n".encode())
        os.close(book)
        report(cents)
        await anyio.sleep(random.uniform(0.0, 0.02))
        if emit is not None and random.random() < BROKEN:
            emit(TextChunk(text="word" * cents))
            raise ModelUnavailableError("the connection broke")
        return Reply(text="done", usage=Usage(input_tokens=1, output_tokens=cents))


def build_agent(store: Store, bills: str) -> Agent[Any]:
    """Return the agent of all processes."""
    # Runs are resumed while their workers die all the time.
    return Agent(
        Billed(bills),
        store=store,
        spend=Spend(per="month", usd=LIMIT_USD),
        settings=Settings(max_tokens=LONGEST, stream=True),
        limits=Limits(crashes=1_000_000, seconds=3_600, retry_wait_s=0.001),
    )


async def spend_all(store: Callable[[], Store], bills: str, name: str) -> None:
    """Continue the runs that the process before has left, and begin new ones until one is refused."""
    async with build_agent(store(), bills) as agent:
        left = [run.id for run in await agent.runs.list(limit=1_000) if run.stop_reason is None]

        async def work(index: int) -> None:
            for run_id in [each for each in left if each.startswith(name)][index::PARALLEL]:
                await agent.resume(run_id)
            while True:
                run = await agent.run("x", id=f"{name}-{os.urandom(8).hex()}")
                if run.stop_reason is StopReason.COST_BUDGET:
                    return

        async with anyio.create_task_group() as group:
            for index in range(PARALLEL):
                group.start_soon(work, index)
