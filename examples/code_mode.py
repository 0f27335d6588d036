"""One script instead of twenty calls: the same job by plain calls and in code mode, with the requests of both.

    python examples/code_mode.py

A model compares nineteen offers and orders the best, which a person approves in the middle of the script. The process
that asked is gone by then: another one goes on, and no offer is asked for again. A script replaces the model, so no key
is needed.
"""

from __future__ import annotations

import json
from tempfile import TemporaryDirectory

import anyio

from agentfsm import Agent, Limits, Run, ToolResult, tool
from agentfsm.ports import Model, ProposedCall, Reply, Request
from agentfsm.scripts import Script
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel

SHOPS = [f"shop-{number}" for number in range(1, 20)]
CODE = """
import asyncio
shops = [f"shop-{number}" for number in range(1, 20)]
offers = await asyncio.gather(*[offer(shop, "lamp") for shop in shops])
best = min(offers, key=lambda each: each["cents"])
await order(best["shop"], best["cents"])
"""
asked: list[str] = []


@tool(read_only=True)
async def offer(shop: str, article: str) -> dict[str, object]:
    """Return what a shop asks for an article."""
    asked.append(shop)
    cents = 900 + 37 * int(shop.removeprefix("shop-")) % 100
    return {"shop": shop, "article": article, "cents": cents, "note": "Delivered within five days. " * 5}


@tool(requires_approval=True)
async def order(shop: str, cents: int) -> str:
    """Order it."""
    return f"ordered from {shop} for {cents} cents"


def call(number: int, name: str, **arguments: object) -> Reply:
    """Return a reply with one call."""
    return Reply(calls=(ProposedCall(id=f"c{number}", name=name, arguments=json.dumps(arguments)),))


def one_by_one(request: Request) -> Reply:
    """Play a model that asks one shop after the other."""
    results = [message for message in request.messages if isinstance(message, ToolResult)]
    if len(results) < len(SHOPS):
        return call(len(results), "offer", shop=SHOPS[len(results)], article="lamp")
    if len(results) == len(SHOPS):
        offers = [json.loads(each.content) for each in results]
        best = min(offers, key=lambda each: int(each["cents"]))
        return call(len(results), "order", shop=best["shop"], cents=best["cents"])
    return Reply(text=results[-1].content)


def with_a_script(request: Request) -> Reply:
    """Play a model that writes a script."""
    last = request.messages[-1]
    if isinstance(last, ToolResult):
        return Reply(text=str(json.loads(last.content)["result"]))
    return call(0, "run_python", code=CODE)


def agent_with(play: Model, place: str) -> Agent:
    """Return the agent, which may use its tools in both ways."""
    store = SQLiteStore(f"{place}/runs.db")
    return Agent(play, tools=[offer, order, Script(offer, order)], store=store, limits=Limits(turns=30))


async def buy(name: str, play: Model, place: str) -> Run:
    """Run to the approval in one agent and store, and to the end in others."""
    asked.clear()
    async with agent_with(play, place) as agent:
        run = await agent.run("Order the cheapest lamp.", id=name)
        [pending] = run.pending
    print(f"{name}: waits for an approval of {pending.tool}({dict(pending.arguments or {})})")
    async with agent_with(play, place) as agent:
        await agent.approve(pending.run_id, pending.call_id, by="ann")
        run = await agent.resume(name)
        cost = agent.cost(run)
    tokens = f"{cost.usage.input_tokens:,} input and {cost.usage.output_tokens:,} output tokens"
    print(f"  {run.output}; offers asked for: {len(asked)}; requests: {run.turn}, {tokens}")
    return run


async def main() -> list[Run]:
    """Do the job in both ways."""
    with TemporaryDirectory() as place:
        ways = {"plain calls": FunctionModel(one_by_one), "a script": FunctionModel(with_a_script)}
        return [await buy(name, play, place) for name, play in ways.items()]


if __name__ == "__main__":
    anyio.run(main)
