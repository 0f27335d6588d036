"""`python -m benchmarks upgrades [RUNS]`: how long it takes to say what becomes of many open runs after a deploy.

A SQLite file is filled with RUNS open runs, 10,000 without a number: each has had five turns with a call that reads,
and waits for an approval. They are compared with the same agent, and with one whose instructions and tool differ.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from agentfsm import Agent, tool
from agentfsm.core.messages import ToolResult
from agentfsm.ports import Request, Store
from agentfsm.releases import check_upgrade
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, call, say
from agentfsm.testing.models import Line
from benchmarks.measure import short
from benchmarks.rows import CPU, US, WALL, size_of

RUNS: Final = 10_000
TURNS: Final = 5
# Runs that are executed at once.
CROWD: Final = 100


@tool(read_only=True)
async def look_up(number: int) -> str:
    """Look an order up."""
    return f"order {number} costs {number} cents"


@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


@tool(name="pay", requires_approval=True)
async def pay_somebody(cents: int, to: str) -> str:
    """Pay somebody."""
    return f"paid {cents} to {to}"


def reply(request: Request) -> Line:
    """Look five orders up, then pay."""
    turn = sum(isinstance(message, ToolResult) for message in request.messages)
    return say("", call("look_up", number=turn) if turn < TURNS else call("pay", cents=turn))


def agent_of(store: Store, payment: Any, instructions: str) -> Agent[str]:
    """Return a release of the agent."""
    tools = [look_up, payment]
    return Agent(FunctionModel(reply), tools=tools, name="clerk", instructions=instructions, store=store)


async def measure(path: Path, runs: int) -> None:
    """Fill the store, and print."""
    store = SQLiteStore(path)
    old = agent_of(store, pay, "Pay what is due.").with_(durability="normal")
    for start in range(0, runs, CROWD):
        await asyncio.gather(*[old.run("Pay.") for _ in range(start, min(start + CROWD, runs))])
    print(f"{runs:,} open runs of {TURNS + 1} requests, {size_of(path.parent) / runs:.0f} bytes of the file for a run")
    for name, release in {"unchanged": old, "changed": agent_of(store, pay_somebody, "Pay what is due, once.")}.items():
        begun, cpu = WALL(), CPU()
        report = await check_upgrade(release)
        took, used = WALL() - begun, (CPU() - cpu) / runs * US
        counted = ", ".join([f"{number:,} {verdict}" for verdict, number in report.verdicts.items() if number])
        print(f"{name:<10}{took:>8.1f} s {short(used):>8} us CPU for a run    {counted}")
    await store.aclose()


def main(runs: str = str(RUNS)) -> int:
    """Measure checks of upgrades."""
    with TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder) / "runs.db", int(runs)))
    return 0
