"""`python -m benchmarks what_if [RUNS]`: what-if runs per second, with a model that answers at once.

The runs are in a SQLite file: an agent with a sub-agent, and five calls in each run of both together. The candidate
pays another amount in every tenth one. It fails if a tool is called, or one of these differences is not named.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from agentfsm import Agent, ToolResult, UserMessage, tool
from agentfsm.evals import whatif
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, call, say
from benchmarks.measure import machine

if TYPE_CHECKING:
    from agentfsm.ports import Request, Store

RUNS: Final = 1_000
# One in so many runs is changed.
CHANGED: Final = 10
CALLS: Final = 5
_PAID: Final[list[int]] = []


@tool(read_only=True)
async def look(order: int) -> str:
    """Look up an order."""
    _PAID.append(0)
    return f"order {order}: 500 cents"


@tool
async def pay(order: int, cents: int) -> str:
    """Pay."""
    _PAID.append(cents)
    return f"paid {order}"


def _read_order(request: Request) -> int:
    task = next(each.text for each in request.messages if isinstance(each, UserMessage))
    return int("".join(filter(str.isdigit, task)))


def _step(request: Request, steps: list[Any]) -> Any:
    done = len([each for each in request.messages if isinstance(each, ToolResult)])
    return say("", steps[done]) if done < len(steps) else "Done."


def build(store: Store, cents: int) -> Agent[Any]:
    """Return an agent that pays this amount in every tenth run, and 500 cents in the others."""

    def work(request: Request) -> Any:
        order = _read_order(request)
        amount = 500 if order % CHANGED else cents
        steps = [call("look", order=order), call("pay", order=order, cents=amount), call("look", order=order)]
        return _step(request, steps)

    def lead(request: Request) -> Any:
        order = _read_order(request)
        return _step(request, [call("look", order=order), call("refunds", query=f"Refund {order}")])

    refunds = Agent(FunctionModel(work), tools=[look, pay], name="refunds")
    tools = [look, refunds.as_tool(turns=CALLS)]
    return Agent(FunctionModel(lead), tools=tools, name="desk", store=store)


async def measure(runs: int) -> int:
    """Record the runs, try them with a candidate, and print the time."""
    with TemporaryDirectory() as folder:
        store = SQLiteStore(Path(folder) / "runs.db")
        agent = build(store, 500)
        ids = [(await agent.run(f"Refund order {number}")).id for number in range(runs)]
        made = len(_PAID)
        began = time.perf_counter()
        report = await whatif(build(store, 400), ids)
        seconds = time.perf_counter() - began
        named = sum(len(trial.effects.other) for trial in report.trials)
        await store.aclose()
    print(f"{runs:,} what-if runs of two agents each in {seconds:.1f} s, {runs / seconds:,.0f} per second")
    print(f"{named} other amounts named, {len(_PAID) - made} calls made")
    return int(len(_PAID) != made or named != -(-runs // CHANGED))


def main(runs: str = str(RUNS)) -> int:
    """Measure what-if runs."""
    told = machine()
    print(f"Python {told['python']}, {told['processor']}\n")
    return asyncio.run(measure(int(runs)))
