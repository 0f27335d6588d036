"""A server with all there is to list: `python shelf.py`; its tool `learn` adds a tool, and tells of it."""

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.prompts.base import AssistantMessage, UserMessage
from mcp.types import Completion

server = MCPServer("shelf")


@server.tool()
async def learn(name: str, ctx: Context) -> str:
    """Learn something new."""

    def learned() -> str:
        """Do what was learned."""
        return f"{name} was done"

    server.add_tool(learned, name=name)
    for _ in range(50):
        await ctx.notify_tools_changed()
    return "learned"


@server.resource("note://today", mime_type="text/plain", description="What is to be done")
def today() -> str:
    return "buy milk"


@server.resource("note://picture", mime_type="image/png")
def picture() -> bytes:
    return b"\x89PNG\r\n\x1a\n"


@server.resource("note://day/{day}")
def of_day(day: str) -> str:
    return f"nothing on {day}"


@server.prompt(description="Plan a day")
def plan(day: str, name: str = "you") -> list[UserMessage | AssistantMessage]:
    return [UserMessage(f"Plan {day} for {name}."), AssistantMessage("With pleasure.")]


@server.completion()
async def complete(ref, argument, context):
    days = [day for day in ("monday", "tuesday", "thursday") if day.startswith(argument.value)]
    return Completion(values=days)


server.run()
