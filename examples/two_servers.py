"""An agent with two MCP servers: it reads from one without approval, and writes with the other after approval.

This file is the agent and both servers, each in its own process. The model is a script, so no API key is needed. For a
real model, give `Agent` the string "openai:gpt-5.4-mini" instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from agentfsm import Agent, Run, ToolResult, tool
from agentfsm.mcp import MCPServer, MCPService
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say

# The servers. Each serves plain tools over stdio; any other MCP server could take its place.

SHELF = {"tea": 3, "coffee": 40, "sugar": 25}


@tool(read_only=True)
def count(item: str) -> int:
    """Count the stock of an item.

    Args:
        item: Name of the item.
    """
    return SHELF[item]


@tool
def order(item: str, boxes: int) -> str:
    """Order an item from the supplier, who sends it and the bill.

    Args:
        item: Name of the item.
        boxes: Number of boxes, 1 or more.
    """
    with Path(sys.argv[2]).open("a", encoding="utf-8") as book:
        book.write(json.dumps({"item": item, "boxes": boxes}) + "\n")
    return f"{boxes} boxes of {item} are on their way"


async def serve(name: str) -> None:
    """Run one of the two servers until the agent closes the connection."""
    tools = {"stock": [count], "supplier": [order]}[name]
    await MCPService(tools, name=name).stdio()


# The agent.

SCRIPT = (
    say("", call("stock__count", item="tea"), call("stock__count", item="coffee"), call("stock__count", item="sugar")),
    say("Only tea runs low.", call("supplier__order", item="tea", boxes=20), expect="stock__count"),
    say("Tea ran low; boxes were ordered, as the supplier has confirmed.", expect="on their way"),
)


def clerk(folder: Path) -> Agent:
    """Return the agent. Its runs and the supplier's orders are in the folder."""
    stock = MCPServer.stdio(sys.executable, [__file__, "stock"], name="stock", hints=True)
    # Its hint that `count` is read-only is believed, so a call needs no approval.
    supplier = MCPServer.stdio(sys.executable, [__file__, "supplier", str(folder / "orders.jsonl")], name="supplier")
    # Its hints are not believed, so each call waits for approval.
    store = SQLiteStore(folder / "runs.db")
    return Agent(ScriptedModel(*SCRIPT), tools=[stock, supplier], name="clerk", store=store)


def show(run: Run) -> None:
    """Print the results of the calls so far, and the calls that wait for approval."""
    done = [message for message in run.messages if isinstance(message, ToolResult)]
    for result in done:
        print(f"    {result.tool}, {result.outcome}: {result.content}")
    for item in run.pending:
        print(f"    {item.call_id} waits for approval: {item.tool}({json.dumps(item.arguments)})")


async def main() -> Run:
    """Run the agent until it needs approval, approve with edited arguments, and finish the run."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        book = folder / "orders.jsonl"
        async with clerk(folder) as agent:
            print("1. The agent counts with one server, and asks to order with the other.")
            run = await agent.run("See to it that nothing runs out.", id="evening")
            show(run)
            print(f"    orders at the supplier: {book.read_text(encoding='utf-8') if book.exists() else 'none'}")

            print("2. A person looks at the call, finds 20 boxes too many, and approves 12.")
            [item] = run.pending
            changed = {**item.arguments, "boxes": 12}
            await agent.approve(item.run_id, item.call_id, by="ann", arguments=changed, digest=item.digest)

            print("3. The run continues, in this or in any other process.")
            run = await agent.resume("evening")
            print(f"    the agent says: {run.output}")
            print(f"    orders at the supplier: {book.read_text(encoding='utf-8').strip()}")

            print("4. The audit record of each call:")
            for record in await agent.audit("evening"):
                who = "" if record.approved_by is None else f", approved by {record.approved_by}"
                print(f"    {record.tool}({json.dumps(record.arguments)}): {record.status}{who}")
        return run


if __name__ == "__main__":
    if len(sys.argv) > 1:
        anyio.run(serve, sys.argv[1])
    else:
        anyio.run(main)
