"""An MCP server of the handshake revision that reserves a seat, then asks a person, and notes all that it does.

Its first argument is the file of the notes; with PORT it listens there, otherwise it uses standard input and output.
"""

import asyncio
import os
import sys
from pathlib import Path

from mcp.server import MCPServer, runner, streamable_http_manager
from mcp.server.lowlevel import server as lowlevel
from mcp.server.mcpserver import Context
from mcp.types import ToolAnnotations
from mcp.types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel

# It knows the handshake only, as servers did before 2026.
lowlevel.serve_dual_era_loop = runner.serve_loop
streamable_http_manager.HANDSHAKE_PROTOCOL_VERSIONS = (*HANDSHAKE_PROTOCOL_VERSIONS, *MODERN_PROTOCOL_VERSIONS)

LOG = Path(sys.argv[1])
server = MCPServer("desk", instructions="Reserve before you pay.")


class Traveller(BaseModel):
    """A form."""

    name: str


def note(text):
    """Write down an effect."""
    with LOG.open("a") as file:
        file.write(text + "\n")


async def ask(ctx, message="Who travels?"):
    """Return the answer as text."""
    answer = await ctx.elicit(message, Traveller)
    return answer.data.name if answer.action == "accept" else answer.action


@server.tool()
async def reserve(ctx: Context) -> str:
    """Reserve a seat, then ask who travels."""
    note("reserved")
    try:
        who = await ask(ctx)
    except asyncio.CancelledError:
        note("cancelled")
        raise
    note(f"answer:{who}")
    return f"a seat for {who}"


@server.tool()
async def twice(ctx: Context) -> str:
    """Reserve a seat, and ask two things."""
    note("reserved")
    return f"{await ask(ctx)} and {await ask(ctx, 'Who else?')}"


@server.tool()
async def impatient(ctx: Context) -> str:
    """Reserve a seat, and wait only a moment for the answer."""
    note("reserved")
    try:
        return await asyncio.wait_for(ask(ctx), 0.1)
    except TimeoutError:
        return "nobody answered in time"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def look(ctx: Context) -> str:
    """Look something up for a person."""
    note("looked")
    return f"seats of {await ask(ctx)}"


if "PORT" in os.environ:
    server.run(transport="streamable-http", port=int(os.environ["PORT"]))
else:
    server.run()
