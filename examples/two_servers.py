"""Two MCP servers and one agent: it reads from the one unasked, and writes with the other when a person says yes.

It runs without a key and without any server from elsewhere: this file is the agent, and both servers, each of which is
a process of its own. The model is a script; give `Agent` the string "openai:gpt-4o" instead, and it is a real one.
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

# The servers. Each is a registry of plain tools, served over standard input and output; any other MCP server would do.

SHELF = {"tea": 3, "coffee": 40, "sugar": 25}


@tool(read_only=True)
def count(item: str) -> int:
    """Count what is on the shelf of an item.

    Args:
        item: Its name.
    """
    return SHELF[item]


@tool
def order(item: str, boxes: int) -> str:
    """Order an item from the supplier, who sends it and the bill.

    Args:
        item: Its name.
        boxes: How many.
    """
    with Path(sys.argv[2]).open("a", encoding="utf-8") as book:
        book.write(json.dumps({"item": item, "boxes": boxes}) + "\n")
    return f"{boxes} boxes of {item} are on their way"


async def serve(name: str) -> None:
    """Be one of the two servers, until the agent closes the connection."""
    tools = {"stock": [count], "supplier": [order]}[name]
    await MCPService(tools, name=name).stdio()


# The agent.

SCRIPT = (
    say("", call("stock__count", item="tea"), call("stock__count", item="coffee"), call("stock__count", item="sugar")),
    say("Only tea runs low.", call("supplier__order", item="tea", boxes=20), expect="stock__count"),
    say("Tea ran low; boxes were ordered, as the supplier has confirmed.", expect="on their way"),
)


def clerk(folder: Path) -> Agent:
    """Make the agent; its runs and the supplier's book of orders are in the folder."""
    stock = MCPServer.stdio(sys.executable, [__file__, "stock"], name="stock", trusted=True)
    # What it says of its tools counts, since it is ours: `count` only reads, so nobody is asked.
    supplier = MCPServer.stdio(sys.executable, [__file__, "supplier", str(folder / "orders.jsonl")], name="supplier")
    # What this one says of its tools counts for nothing: each call waits for a person.
    store = SQLiteStore(folder / "runs.db")
    return Agent(ScriptedModel(*SCRIPT), tools=[stock, supplier], name="clerk", store=store)


def show(run: Run) -> None:
    """Print what came of the calls so far, and what the run waits for."""
    done = [message for message in run.messages if isinstance(message, ToolResult)]
    for result in done:
        print(f"    {result.tool}, {result.outcome}: {result.content}")
    for item in run.pending:
        print(f"    {item.call_id} waits for a yes: {item.tool}({json.dumps(item.arguments)})")


async def main() -> Run:
    """Tell the story."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        book = folder / "orders.jsonl"
        async with clerk(folder) as agent:
            print("1. The agent counts with one server, and would like to order with the other.")
            run = await agent.run("See to it that nothing runs out.", id="evening")
            show(run)
            print(f"    orders at the supplier: {book.read_text(encoding='utf-8') if book.exists() else 'none'}")

            print("2. A person looks at the call, finds 20 boxes too many, and lets it run with 12.")
            [item] = run.pending
            changed = {**item.arguments, "boxes": 12}
            await agent.approve(item.run_id, item.call_id, by="ann", arguments=changed, digest=item.digest)

            print("3. The run goes on from where it was; here or in any other process.")
            run = await agent.resume("evening")
            print(f"    the agent says: {run.output}")
            print(f"    orders at the supplier: {book.read_text(encoding='utf-8').strip()}")

            print("4. What is on record of each call:")
            for record in await agent.audit("evening"):
                who = "" if record.approved_by is None else f", approved by {record.approved_by}"
                print(f"    {record.tool}({json.dumps(record.arguments)}): {record.status}{who}")
        return run


if __name__ == "__main__":
    if len(sys.argv) > 1:
        anyio.run(serve, sys.argv[1])
    else:
        anyio.run(main)
