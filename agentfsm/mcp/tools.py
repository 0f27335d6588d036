"""A server's tool as one of ours: its name, what is declared of it, and its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import mcp.types as m
from mcp import Client

from agentfsm.core.messages import ErrorType, Outcome
from agentfsm.mcp.ask import call as call_asking
from agentfsm.mcp.catalogue import NotAsAdmittedError
from agentfsm.mcp.connection import trouble
from agentfsm.mcp.content import content_of
from agentfsm.mcp.outputs import OutputCheck
from agentfsm.mcp.trust.names import tool_name
from agentfsm.mcp.trust.terms import title_of
from agentfsm.tools.run_context import InputRequired, RunContext, ToolReturn
from agentfsm.tools.tool import Tool, make_tool

if TYPE_CHECKING:
    from agentfsm.mcp.server import MCPServer

WITHHELD: Final = "Withheld: a person has to approve it as it is now."


def tool_of(server: MCPServer, listed: m.Tool) -> Tool[..., Any]:
    """Make a tool of what a server lists.

    Raises:
        MisuseError: when one of its schemas cannot be used.
    """
    name = tool_name(server.name, listed.name)
    check = None if listed.output_schema is None else OutputCheck.of(listed.output_schema, name)
    return make_tool(
        _function(server, listed, check),
        name=name,
        description=listed.description or title_of(listed) or "",
        parameters=listed.input_schema,
        timeout_s=server.timeout_s,
        **server.terms.declarations(server.name, listed),
    )


def withheld_tool(name: str) -> Tool[..., Any]:
    """Return what stands for a tool that is withheld: no model is told of it, and whoever calls it learns so."""
    return make_tool(_withheld, name=name, description=WITHHELD, parameters={}, enabled=False)


async def _withheld(**_arguments: Any) -> None:
    """Do nothing: the engine lets no call through."""


def _function(server: MCPServer, listed: m.Tool, check: OutputCheck | None) -> Callable[..., Any]:
    async def call(ctx: RunContext[Any], /, **arguments: Any) -> ToolReturn:
        is_sent = False

        async def ask(client: Client) -> m.CallToolResult | InputRequired:
            nonlocal is_sent

            async def report(progress: float, total: float | None, message: str | None) -> None:
                ctx.progress(message or f"{progress:g}{f' of {total:g}' if total else ''}")

            async def relist() -> None:
                await server.catalogue.check(client, listed, anew=True)

            await server.catalogue.check(client, listed)
            is_sent = True
            return await call_asking(
                client, server.desk, ctx, name=listed.name, arguments=arguments, report=report, relist=relist
            )

        try:
            result = await server.link.ask(ask, patience_s=server.timeout_s)
        except NotAsAdmittedError as error:
            server.has_news = True
            return _changed(server, listed, error)
        except Exception as error:  # noqa: BLE001  what is no trouble of a request is raised again
            return trouble.ended(error, server.name, listed.name, is_sent=is_sent)
        if isinstance(result, InputRequired):
            raise result
        return _end_of(result, check)

    return call


def _changed(server: MCPServer, listed: m.Tool, error: NotAsAdmittedError) -> ToolReturn:
    text = (
        f"{listed.name!r} was not called: the MCP server {server.name!r} has changed its tools since, and {error}. "
        "Nothing was run. Its tools are looked at again before your next turn: use what there is then, or tell the "
        "user that a person may have to approve the change."
    )
    return ToolReturn(outcome=Outcome.FAILED, content=text, error_type=ErrorType.UNAVAILABLE)


def _end_of(result: m.CallToolResult, check: OutputCheck | None) -> ToolReturn:
    if check is not None and (flaw := check.flaw(result)) is not None:
        return ToolReturn(outcome=Outcome.FAILED, content=flaw, error_type=ErrorType.TOOL)
    failed = bool(result.is_error)
    content, parts = content_of(result)
    return ToolReturn(
        outcome=Outcome.FAILED if failed else Outcome.DONE,
        content=content,
        error_type=ErrorType.TOOL if failed else None,
        parts=parts,
    )
