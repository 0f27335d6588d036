"""An MCP server among an agent's tools: `Agent(..., tools=[MCPServer.stdio("npx", ["-y", "..."])])`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

import attrs
import httpx2
import mcp.types as m

from agentfsm.core.messages import Message, Part
from agentfsm.limiter import Limiter
from agentfsm.mcp.client import server_features
from agentfsm.mcp.client.admission import AdmissionResult, admit_listing, log_exclusions
from agentfsm.mcp.client.catalogue import Catalogue
from agentfsm.mcp.client.elicitation import ElicitationRouter
from agentfsm.mcp.client.server_features import RemotePrompt, RemoteResource, ResourceTemplate
from agentfsm.mcp.connection.sandbox import Sandbox
from agentfsm.mcp.connection.server_connection import START_TIMEOUT_S, ServerConnection
from agentfsm.mcp.connection.transports import (
    ServerTransport,
    SSETransport,
    StdioTransport,
    StreamableHTTPTransport,
)
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.trust.consent import Consent, ConsentGate, build_start_text
from agentfsm.mcp.trust.names import check_server_name, derive_server_name
from agentfsm.mcp.trust.pins import ApprovedText, MemoryPins, PinFile, Pins
from agentfsm.mcp.trust.server_config import load_entries
from agentfsm.mcp.trust.tool_policy import Confirm, Constraint, ToolPolicy
from agentfsm.tools.tool import Tool

_log = logging.getLogger("agentfsm.mcp")

# Seconds for a call: document D, 7.4.
TIMEOUT_S: Final = 30.0


class ServerOptions(TypedDict, total=False):
    """What a server is told beside how it is reached; what each means is said at `ToolPolicy` and `MCPServer`."""

    trusted: bool
    confirm: Confirm | None
    allow: Iterable[str]
    deny: Iterable[str]
    constraints: Mapping[str, Constraint]
    pins: Pins
    consent: Consent | None
    timeout_s: float
    start_s: float
    required: bool
    resources_as_tools: bool


_POLICY_FIELDS: Final = frozenset(field.name for field in attrs.fields(ToolPolicy))


def _build_server_options(options: ServerOptions) -> dict[str, Any]:
    given: dict[str, Any] = dict(options)
    policy = ToolPolicy(**{name: given.pop(name) for name in _POLICY_FIELDS & given.keys()})
    return {**given, "tool_policy": policy}


@attrs.define(eq=False, repr=False, kw_only=True)
class MCPServer:
    """A server whose tools an agent may use. It is connected to when it is first needed, and closed with the agent.

    Nothing that a server says of itself is believed unless it is `trusted`, and each call of another's tool needs a
    person's yes, unless `confirm` says otherwise. A tool that has changed since it was approved is withheld.
    """

    name: str
    """1 to 32 ASCII letters, digits, "-" and single "_": its tools are called `name__tool`."""

    transport: ServerTransport
    tool_policy: ToolPolicy = attrs.field(factory=ToolPolicy)
    pins: Pins = attrs.field(factory=MemoryPins)
    """Where it is kept what was approved."""

    consent: Consent | None = None
    """Asks a person, for what was not approved yet."""

    origin: str | None = None
    """The file or the directory that it comes from; None for one that a program names in its code."""

    start: ApprovedText = attrs.field(
        default=attrs.Factory(lambda server: build_start_text(server.transport), takes_self=True)
    )
    """How it is started, as it is approved."""

    required: bool = True
    """Whether an agent cannot begin without it. Else it has no tools where it is away, until it was closed."""

    resources_as_tools: bool = False
    """Whether the model may list and read the server's resources, by two tools; else only the application does."""

    timeout_s: float = TIMEOUT_S
    start_s: float = START_TIMEOUT_S
    admitted: AdmissionResult = attrs.field(factory=AdmissionResult, init=False)
    """What of it is used, as it was last listed."""

    last_error: MCPServerError | None = attrs.field(default=None, init=False)
    """Why the tools could not be listed, the newest time; None where they could."""

    version: int = attrs.field(default=0, init=False)
    elicitation_router: ElicitationRouter = attrs.field(factory=ElicitationRouter, init=False, repr=False)
    """Takes what the server asks in mid-call."""

    catalogue: Catalogue = attrs.field(factory=Catalogue, init=False, repr=False)
    """What the connection at hand lists, which calls are compared with."""

    connection: ServerConnection = attrs.field(init=False)
    consent_gate: ConsentGate = attrs.field(init=False)
    needs_refresh: bool = attrs.field(default=True, init=False)
    """Whether the server was not asked yet, was started anew, or has said that its tools have changed."""

    _refresh_limit: Limiter = attrs.field(factory=lambda: Limiter(1), init=False)
    """So that of several runs, of any agents, one asks; a person is asked once."""

    def __attrs_post_init__(self) -> None:
        check_server_name(self.name)
        self.connection = ServerConnection(
            name=self.name,
            transport=self.transport,
            start_s=self.start_s,
            on_message=self._on_message,
            elicit=self.elicitation_router.elicit,
        )
        self.consent_gate = ConsentGate(server=self.name, pins=self.pins, consent=self.consent, origin=self.origin)

    @property
    def is_stale(self) -> bool:
        """Whether there is something to wait for: news, or the first answer, whoever has asked for it."""
        return self.needs_refresh or (not self.version and self._refresh_limit.in_use > 0)

    @property
    def tools(self) -> tuple[Tool[..., Any], ...]:
        """The tools as they were last listed; one that is withheld is among them, switched off."""
        return self.admitted.tools

    @property
    def refused(self) -> Mapping[str, str]:
        """Why tools cannot be used, by the server's own names."""
        return self.admitted.refused

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        sandbox: Sandbox | None = None,
        name: str | None = None,
        **options: Unpack[ServerOptions],
    ) -> MCPServer:
        """Return a server that is a command: `MCPServer.stdio("npx", ["-y", "mcp-server-example"])`.

        It gets `env`, and HOME, LOGNAME, PATH, SHELL, TERM and USER of our environment, and nothing else of it.

        Raises:
            MisuseError: when an option makes no sense.
        """
        transport = StdioTransport(command=command, args=args, env=env or {}, cwd=cwd, sandbox=sandbox)
        return cls(
            name=name or derive_server_name(Path(command).stem), transport=transport, **_build_server_options(options)
        )

    @classmethod
    def http(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        auth: httpx2.Auth | None = None,
        allow_private: bool = False,
        name: str | None = None,
        **options: Unpack[ServerOptions],
    ) -> MCPServer:
        """Return a server that is elsewhere: `MCPServer.http("https://example.org/mcp")`.

        Its host may not be at a private address, unless `allow_private` says so or the URL itself names this machine.

        Raises:
            MisuseError: when an option makes no sense, or plain HTTP goes to another machine.
        """
        transport = StreamableHTTPTransport(url=url, headers=headers or {}, auth=auth, allow_private=allow_private)
        return cls(
            name=name or derive_server_name(httpx2.URL(url).host), transport=transport, **_build_server_options(options)
        )

    @classmethod
    def sse(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        auth: httpx2.Auth | None = None,
        allow_private: bool = False,
        name: str | None = None,
        **options: Unpack[ServerOptions],
    ) -> MCPServer:
        """Return a server of the older kind, HTTP+SSE: `MCPServer.sse("https://example.org/sse")`; else as `http`."""
        transport = SSETransport(url=url, headers=headers or {}, auth=auth, allow_private=allow_private)
        return cls(
            name=name or derive_server_name(httpx2.URL(url).host), transport=transport, **_build_server_options(options)
        )

    @classmethod
    def load(
        cls, path: Path | str, *, pins: Pins | None = None, consent: Consent | None = None
    ) -> tuple[MCPServer, ...]:
        """Return the servers of a file that has `mcpServers`; none of them is started yet.

        Args:
            path: The file.
            pins: Where it is kept what was approved; by default `PinFile()`, where `agentfsm mcp approve` keeps it.
            consent: Asks a person about what was not; without it a server that was not approved is not started.

        Raises:
            MCPServerError: when the file cannot be read, or something in it makes no sense.
        """
        place = Path(path).absolute()
        kept = pins or PinFile()
        return tuple(
            cls(
                name=entry.name,
                transport=entry.transport,
                pins=kept,
                consent=consent,
                origin=str(place),
                start=build_start_text(entry.transport, entry.raw),
                **entry.options,
            )
            for entry in load_entries(place)
        )

    async def update(self) -> None:
        """List the tools, once it is approved how the server is started.

        Where that fails and they are known from before, those stay, and `last_error` says why; likewise where the
        server is not `required`.

        Raises:
            MCPServerError: when it is not approved, or the server was never asked with success and cannot be.
            MisuseError: when there is a constraint on a tool that there is not.
        """
        known = self.version
        async with self._refresh_limit.hold():
            if self.needs_refresh or self.version == known:  # else somebody was faster
                await self._update()

    async def _update(self) -> None:
        try:
            await self._refresh_tools()
            log_exclusions(self.name, self.admitted)
        except MCPServerError as error:
            self.needs_refresh = self.required or self.version > 0
            if self.required and not self.version:
                raise
            self._record_failure(error)
        except BaseException:
            self.needs_refresh = True
            raise

    async def _refresh_tools(self) -> None:
        listing = await server_features.fetch_tools(
            await self._approved_connection(), self.timeout_s, self.catalogue, self._on_connected
        )
        self.admitted = await admit_listing(self, listing)
        self.last_error = None
        self.version += 1

    async def _approved_connection(self) -> ServerConnection:
        """Return the connection, once it is approved how the server is started."""
        await self.consent_gate.check_start(self.transport, self.start)
        return self.connection

    def _record_failure(self, error: MCPServerError) -> None:
        if self.last_error is None:
            _log.warning("the tools of the MCP server %r could not be listed: %s", self.name, error)
        self.last_error = error

    async def approve(self) -> AdmissionResult:
        """Have a person asked about all of the server that was not approved, keep the answers, and close it.

        The log is told nothing: who calls this tells what came of it.

        Returns:
            What of it is used, what is refused, and what was not approved.

        Raises:
            MCPServerError: when it was not approved how it is started, or it cannot be asked.
        """
        try:
            await self._refresh_tools()
        finally:
            await self.aclose()
        return self.admitted

    async def resources(self) -> tuple[RemoteResource, ...]:
        """List what can be read from the server.

        Raises:
            MisuseError: when the server has not declared that it has resources.
            MCPServerError: when it cannot be asked, or does not answer as it should.
        """
        return await server_features.fetch_resources(await self._approved_connection(), self.timeout_s)

    async def resource_templates(self) -> tuple[ResourceTemplate, ...]:
        """List the forms of URIs by which more can be read; raises as `resources`."""
        return await server_features.fetch_resource_templates(await self._approved_connection(), self.timeout_s)

    async def read(self, uri: str) -> tuple[Part, ...]:
        """Read a resource: its contents in their order, as parts of a prompt; raises as `resources`."""
        return await server_features.fetch_resource(await self._approved_connection(), self.timeout_s, uri)

    async def prompts(self) -> tuple[RemotePrompt, ...]:
        """List the server's prompts, for a person to choose from: no model is told of them.

        Raises:
            MisuseError: when the server has not declared that it has prompts.
            MCPServerError: when it cannot be asked, or does not answer as it should.
        """
        return await server_features.fetch_prompts(await self._approved_connection(), self.timeout_s)

    async def prompt(self, name: str, /, **arguments: str) -> tuple[Message, ...]:
        """Get a prompt, filled in: messages such as `agent.start(messages=...)` goes on from; raises as `prompts`."""
        return await server_features.fetch_prompt(await self._approved_connection(), self.timeout_s, name, arguments)

    async def complete(
        self, of: RemotePrompt | ResourceTemplate, argument: str, begun: str, known: Mapping[str, str] | None = None
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
        return await server_features.fetch_completions(
            await self._approved_connection(), self.timeout_s, of, (argument, begun), dict(known or {})
        )

    async def aclose(self) -> None:
        """Close the connection; the next use opens another, and asks anew."""
        await self.connection.aclose()
        self.needs_refresh = True

    def _on_connected(self) -> None:
        self.needs_refresh = False

    def _on_message(self, message: object) -> None:
        if isinstance(message, m.ToolListChangedNotification):
            self.needs_refresh = True
