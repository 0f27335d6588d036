"""What tests of MCP servers share: an agent that calls the rude server's tool once, and a look for what it left."""

import asyncio
import json
import os
import sys
from pathlib import Path

import anyio

from agentfsm import Agent, PendingKind, ToolResult
from agentfsm.core.messages import check_history
from agentfsm.mcp import MCPServer
from agentfsm.mcp.connection import connection_thread
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import settled

RUDE = str(Path(__file__).with_name("misbehaving_server.py"))


def rude(habit, record, **options):
    """Return the rude server; its habit is told in `misbehaving_server.py`."""
    return MCPServer.stdio(sys.executable, [RUDE, habit, str(record)], name="rude", confirm=False, **options)


def heard(record):
    """Return the messages that a rude server got, over all of its lives."""
    return [line for line in _lines(record) if "life" not in line]


def lives(record):
    """Return the ids of the processes that a rude server had."""
    return [line["life"] for line in _lines(record) if "life" in line]


def _lines(record):
    text = Path(record).read_text(encoding="utf-8") if Path(record).exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def is_alive(pid):
    """Whether a process runs; one that nobody has waited for yet has ended all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def leftovers(record):
    """Return the processes of a rude server that still run."""
    return [pid for pid in lives(record) if is_alive(pid)]


def at_home():
    """Return how many tasks there are in the thread of connections, and how many files the process has open."""

    async def count():
        return len(asyncio.all_tasks())

    return connection_thread.get_connection_thread().portal.call(count), len(list(Path("/proc/self/fd").iterdir()))


async def one_call(server, turns=1, calls=1):
    """Run an agent whose model calls `rude__act` in each turn; check what must hold, and return the results.

    A call whose server was lost waits for a person, who settles it as failed, with the reason that is shown.
    """
    turns = [say("", *[call("rude__act") for _ in range(calls)]) for _ in range(turns)]
    async with Agent(ScriptedModel(*turns, say("so be it")), tools=[server]) as agent:
        run = await agent.finish(agent.start("act"))
        while run.is_waiting:
            for item in run.pending:
                assert item.kind is PendingKind.OUTCOME
                await agent.settle(run.id, item.call_id, failed=f"settled: {item.error}")
            run = await agent.resume(run.id)
    assert run.output == "so be it"
    check_history(run.messages)
    return [message for message in run.messages if isinstance(message, ToolResult)]


async def until(condition):
    """Wait until what another process or thread does has made the condition true."""
    await anyio.to_thread.run_sync(settled, condition)


def environment():
    """Return the environment for a program that imports this agentfsm."""
    import agentfsm  # noqa: PLC0415  its place is what is wanted

    return {**os.environ, "PYTHONPATH": str(Path(agentfsm.__file__).parents[1])}
