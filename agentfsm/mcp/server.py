"""An MCP server among an agent's tools: `Agent(..., tools=[MCPServer.stdio("npx", ["-y", "..."])])`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import httpx2
import mcp.types as m

from agentfsm.core.messages import Message, Part
from agentfsm.engine.tools import Tool
from agentfsm.mcp import library
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.launch import Http, Launch, Sse, Stdio
from agentfsm.mcp.library import Prompt, Resource, ResourceTemplate
from agentfsm.mcp.link import START_S, Link
from agentfsm.mcp.tools import SEPARATOR, tool_of

TIMEOUT_S: Final = 30.0
# Seconds for a call: document D, 7.4.


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
    resources_as_tools: bool = False
    # Whether the model may list and read the server's resources, by two tools; else only the application does.
    trouble: MCPServerError | None = attrs.field(default=None, init=False)
    # Why the tools could not be listed anew, the newest time; None where they could.
    link: Link = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.link = Link(name=self.name, launch=self.launch, start_s=self.start_s, heard=self._hear)

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

    @classmethod
    def sse(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        auth: httpx2.Auth | None = None,
        name: str | None = None,
        **options: Any,
    ) -> MCPServer:
        """Return a server of the older kind, HTTP+SSE: `MCPServer.sse("https://example.org/sse")`."""
        launch = Sse(url=url, headers=headers or {}, auth=auth)
        return cls(name=name or httpx2.URL(url).host.replace(".", "-"), launch=launch, **options)

    async def update(self) -> None:
        """List the tools. Where that fails and they are known from before, those stay, and `trouble` says why.

        Raises:
            MCPServerError: when they were never listed, and cannot be.
        """
        try:
            listed = await library.tools(self.link, self.timeout_s, self._begin)
        except BaseException as error:
            self.is_stale = True
            if not self.version or not isinstance(error, MCPServerError):
                raise
            self.trouble = error
            return
        tools = [tool_of(self, each) for each in listed.tools]
        if self.resources_as_tools and listed.has_resources:
            taken = {tool.name for tool in tools}  # a server that has such a tool of its own knows best
            own = library.resource_tools(self, f"{self.name}{SEPARATOR}")
            tools += [tool for tool in own if tool.name not in taken]
        self.tools, self.trouble = tuple(tools), None
        self.version += 1

    async def resources(self) -> tuple[Resource, ...]:
        """List what can be read from the server.

        Raises:
            MisuseError: when the server has not declared that it has resources.
            MCPServerError: when it cannot be asked, or does not answer as it should.
        """
        return await library.resources(self.link, self.timeout_s)

    async def resource_templates(self) -> tuple[ResourceTemplate, ...]:
        """List the forms of URIs by which more can be read; raises as `resources`."""
        return await library.templates(self.link, self.timeout_s)

    async def read(self, uri: str) -> tuple[Part, ...]:
        """Read a resource: its contents in their order, as parts of a prompt; raises as `resources`."""
        return await library.read(self.link, self.timeout_s, uri)

    async def prompts(self) -> tuple[Prompt, ...]:
        """List the server's prompts, for a person to choose from: no model is told of them.

        Raises:
            MisuseError: when the server has not declared that it has prompts.
            MCPServerError: when it cannot be asked, or does not answer as it should.
        """
        return await library.prompts(self.link, self.timeout_s)

    async def prompt(self, name: str, /, **arguments: str) -> tuple[Message, ...]:
        """Get a prompt, filled in: messages such as `agent.start(messages=...)` goes on from; raises as `prompts`."""
        return await library.prompt(self.link, self.timeout_s, name, arguments)

    async def complete(
        self, of: Prompt | ResourceTemplate, argument: str, begun: str, known: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """Ask how an argument of a prompt or a template may go on, best first.

        Args:
            of: The prompt or the template.
            argument: Its name.
            begun: What there is of it.
            known: The other arguments, as far as they are known.

        Raises:
            MisuseError: when the server has not declared that it completes.
            MCPServerError: when it cannot be asked, or does not answer as it should.
        """
        return await library.complete(self.link, self.timeout_s, of, (argument, begun), dict(known or {}))

    async def aclose(self) -> None:
        """Close the connection; the next use opens another."""
        await self.link.aclose()

    def _begin(self) -> None:
        self.is_stale = False

    def _hear(self, message: object) -> None:
        if isinstance(message, m.ToolListChangedNotification):
            self.is_stale = True
