"""An MCP server among an agent's tools: `Agent(..., tools=[MCPServer.stdio("npx", ["-y", "..."])])`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import httpx2
import mcp.types as m
from mcp import Client

from agentfsm.engine.tools import Tool
from agentfsm.mcp.ask import Desk
from agentfsm.mcp.launch import Http, Launch, Stdio
from agentfsm.mcp.link import START_S, Link
from agentfsm.mcp.tools import tool_of

TIMEOUT_S: Final = 30.0
# Seconds for a call: document D, 7.4.
MOST_PAGES: Final = 100
# Of a listing: a server that goes on for ever is not followed.


@attrs.define(eq=False, repr=False, kw_only=True)
class MCPServer:
    """A server whose tools an agent may use. It is connected to when it is first needed, and closed with the agent."""

    name: str
    launch: Launch
    timeout_s: float = TIMEOUT_S
    start_s: float = START_S
    tools: tuple[Tool[..., Any], ...] = attrs.field(default=(), init=False)
    # As they were last listed.
    version: int = attrs.field(default=0, init=False)
    is_stale: bool = attrs.field(default=True, init=False)
    # Whether the server was not asked yet, or has said that its tools have changed.
    desk: Desk = attrs.field(factory=Desk, init=False, repr=False)
    # Takes what the server asks in mid-call.
    link: Link = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.link = Link(
            name=self.name, launch=self.launch, start_s=self.start_s, heard=self._hear, elicit=self.desk.elicit
        )

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> MCPServer:
        """Return a server that is a command: `MCPServer.stdio("npx", ["-y", "mcp-server-example"])`."""
        launch = Stdio(command=command, args=args, env=env or {}, cwd=cwd)
        return cls(name=name or Path(command).stem, launch=launch, **options)

    @classmethod
    def http(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        auth: httpx2.Auth | None = None,
        name: str | None = None,
        **options: Any,
    ) -> MCPServer:
        """Return a server that is elsewhere: `MCPServer.http("https://example.org/mcp")`."""
        launch = Http(url=url, headers=headers or {}, auth=auth)
        return cls(name=name or httpx2.URL(url).host.replace(".", "-"), launch=launch, **options)

    async def update(self) -> None:
        """List the tools."""
        self.is_stale = False
        try:
            listed = await self.link.ask(_listed)
        except BaseException:
            self.is_stale = True
            raise
        self.tools = tuple(tool_of(self, each) for each in listed)
        self.version += 1

    async def aclose(self) -> None:
        """Close the connection; the next use opens another."""
        await self.link.aclose()

    def _hear(self, message: object) -> None:
        if isinstance(message, m.ToolListChangedNotification):
            self.is_stale = True


async def _listed(client: Client) -> list[m.Tool]:
    tools: list[m.Tool] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools
