"""A server's tool as one of ours: its name, what is declared of it, and its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import mcp.types as m
from mcp import Client, MCPError

from agentfsm.core.errors import TransientError
from agentfsm.core.messages import ErrorType, Outcome
from agentfsm.engine.context import Ended, InputRequired, RunContext
from agentfsm.engine.tools import NAME_CHARS, Tool, make_tool
from agentfsm.mcp.ask import call as call_asking
from agentfsm.mcp.content import text_of

if TYPE_CHECKING:
    from agentfsm.mcp.server import MCPServer

SEPARATOR: Final = "__"
# Between the names of a server and of its tool: neither may hold it, so that no two tools share a name.


def tool_of(server: MCPServer, listed: m.Tool) -> Tool[..., Any]:
    """Make a tool of what a server lists.

    Raises:
        MisuseError: when its name or its schema cannot be used.
    """
    return make_tool(
        _function(server, listed),
        name=f"{server.name}{SEPARATOR}{listed.name}"[:NAME_CHARS],
        description=listed.description or "",
        parameters=listed.input_schema,
        timeout_s=server.timeout_s,
    )


def _function(server: MCPServer, listed: m.Tool) -> Callable[..., Any]:
    async def call(ctx: RunContext[Any], /, **arguments: Any) -> Ended:
        async def ask(client: Client) -> m.CallToolResult | InputRequired:
            async def report(progress: float, total: float | None, message: str | None) -> None:
                ctx.progress(message or f"{progress:g}{f' of {total:g}' if total else ''}")

            return await call_asking(client, server.desk, ctx, name=listed.name, arguments=arguments, report=report)

        try:
            result = await server.link.ask(ask)
        except MCPError as error:
            raise TransientError(str(error)) from error
        if isinstance(result, InputRequired):
            raise result
        failed = bool(result.is_error)
        return Ended(
            outcome=Outcome.FAILED if failed else Outcome.DONE,
            content=text_of(result),
            error_type=ErrorType.TOOL if failed else None,
        )

    return call
