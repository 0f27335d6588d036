"""Use an MCP server as a source of tools: `Agent(..., tools=[MCPServer.stdio("npx", ["-y", "..."])])`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, Unpack

import attrs
import httpx2
import mcp.types as m

from agentfsm._lib.limiter import Limiter
from agentfsm._lib.pins import ApprovedText, MemoryPins, PinFile, Pins
from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import Message, Part
from agentfsm.logins import APIKey, Login
from agentfsm.logins.login import to_login
from agentfsm.logins.oauth_settings import OAuth, parse_auth
from agentfsm.mcp.client import server_features
from agentfsm.mcp.client.admission import AdmissionResult, admit_listing, log_exclusions
from agentfsm.mcp.client.catalogue import Catalogue
from agentfsm.mcp.client.elicitation import ElicitationRouter
from agentfsm.mcp.client.logins import ServerLogins
from agentfsm.mcp.client.server_features import RemotePrompt, RemoteResource, ResourceTemplate
from agentfsm.mcp.client.tasks import TasksExtension
from agentfsm.mcp.client.user_sessions import UserSessions
from agentfsm.mcp.connection.server_connection import START_TIMEOUT_S, ServerConnection
from agentfsm.mcp.connection.server_sandbox import ServerSandbox
from agentfsm.mcp.connection.transports import (
    ServerTransport,
    SSETransport,
    StdioTransport,
    StreamableHTTPTransport,
)
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.oauth.person_login import LOGIN_TIMEOUT_S, OpenURL
from agentfsm.mcp.trust.config_variables import AskInput
from agentfsm.mcp.trust.consent import Consent, ConsentGate, build_start_text
from agentfsm.mcp.trust.names import SEPARATOR, check_server_name, derive_server_name
from agentfsm.mcp.trust.server_config import RefusedEntry, load_entries
from agentfsm.mcp.trust.tool_policy import Confirm, Constraint, ToolPolicy
from agentfsm.tools.label_rules import LabelRules
from agentfsm.tools.tool import Tool

_log = logging.getLogger("agentfsm.mcp")

# Default timeout of one request in seconds, a tool call included.
TIMEOUT_S: Final = 30.0


class ServerOptions(TypedDict, total=False):
    """Options of an MCP server beside its transport; `ToolPolicy` and `MCPServer` describe each of them."""

    hints: bool
    trusted: bool
    labels: LabelRules
    confirm: Confirm | None
    allow: Iterable[str]
    deny: Iterable[str]
    repeat_for_input: Iterable[str]
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
    """An MCP server whose tools an agent may use. It connects on first use and closes with the agent.

    Each call needs a person's approval, unless the hints of the server are believed (`hints`) and say that the tool
    destroys nothing; `labels` and `confirm` override this. Results are labelled as a stranger's, unless the server is
    `trusted`. A tool that has changed since it was approved is withheld.
    """

    name: str
    """Name of the server: 1 to 32 ASCII letters, digits, "-" and single "_". The model sees its tools as
    `name__tool`.
    """

    transport: ServerTransport
    """Connection method: a command that is started, or a URL."""

    tool_policy: ToolPolicy = attrs.field(factory=ToolPolicy)
    """Rules for the tools: which ones are used, with which arguments and labels, and whether calls need approval."""

    pins: Pins = attrs.field(factory=MemoryPins)
    """Storage for approvals. Default: the memory of this process."""

    consent: Consent | None = None
    """Function that asks a person to approve a `Proposal`. None: no question is asked, changed tools are withheld, and
    a server from a file does not start until it is approved elsewhere.
    """

    origin: str | None = None
    """File or directory that lists the server. None: the program names the server in its code."""

    start: ApprovedText = attrs.field(
        default=attrs.Factory(lambda server: build_start_text(server.transport), takes_self=True)
    )
    """Text that a person approves before the server is started: its command or URL, with secrets hashed."""

    required: bool = True
    """Whether a run fails if the tools could never be listed. False: the run continues without them, and the server is
    not tried again until it is closed.
    """

    resources_as_tools: bool = False
    """Whether the model may list and read the server's resources, through two tools. False: only the application
    reads them.
    """

    timeout_s: float = TIMEOUT_S
    """Seconds that one request to the server may take, a tool call included. Default 30."""

    start_s: float = START_TIMEOUT_S
    """Seconds that starting the server and connecting to it may take, the first handshake included."""

    users: Login | None = None
    """Logins of the users of runs, whose calls go to the server with their own tokens. The listing of the tools uses
    the login of the program (`auth`), if it has one. None: all calls use that.
    """

    admitted: AdmissionResult = attrs.field(factory=AdmissionResult, init=False)
    """Result of the newest listing: the tools in use, those refused, and those that await approval."""

    last_error: MCPServerError | None = attrs.field(default=None, init=False)
    """Error of the newest attempt to list the tools; None if it succeeded."""

    version: int = attrs.field(default=0, init=False)
    """Number of successful listings, 0 before the first. A change means that `tools` may have changed."""

    elicitation_router: ElicitationRouter = attrs.field(factory=ElicitationRouter, init=False, repr=False)
    """Receiver of the questions that the server asks during a call."""

    catalogue: Catalogue = attrs.field(factory=Catalogue, init=False, repr=False)
    """Tools that the current connection lists. A call is checked against it."""

    connection: ServerConnection = attrs.field(init=False)
    """Connection to the server, opened on first use."""

    consent_gate: ConsentGate = attrs.field(init=False)
    """Check of the start and the tools against `pins`; it asks through `consent`."""

    logins: ServerLogins | None = attrs.field(init=False)
    """Logins by OAuth. None: the server has no settings of it."""

    sessions: UserSessions = attrs.field(init=False, repr=False)
    """Connections of the users, if each has a login."""

    needs_refresh: bool = attrs.field(default=True, init=False)
    """Whether the tools have to be listed before the next use: they were never listed, the server was restarted, or
    it has reported a change.
    """

    _refresh_limit: Limiter = attrs.field(factory=lambda: Limiter(1), init=False)
    """Lets one run at a time list the tools, over all agents, so that a person is asked once."""

    def __attrs_post_init__(self) -> None:
        check_server_name(self.name)
        self.connection = ServerConnection(
            name=self.name,
            transport=self.transport,
            start_s=self.start_s,
            on_message=self._on_message,
            elicit=self.elicitation_router.elicit,
            extensions=(TasksExtension(),),
        )
        self.consent_gate = ConsentGate(server=self.name, pins=self.pins, consent=self.consent, origin=self.origin)
        self.logins = ServerLogins.for_server(self.name, self.transport, self.origin)
        self.sessions = UserSessions(self.name, self.transport, self.start_s, self.users)

    @property
    def is_stale(self) -> bool:
        """Whether `update` has work to do, or another run is making the first listing."""
        return self.needs_refresh or (not self.version and self._refresh_limit.in_use > 0)

    @property
    def is_trusted(self) -> bool:
        """Whether what the server says is trusted; else it is labelled "untrusted"."""
        return self.tool_policy.trusted

    @property
    def tools(self) -> tuple[Tool[..., Any], ...]:
        """The tools of the newest listing; withheld tools are included, but disabled."""
        return self.admitted.tools

    @property
    def instructions(self) -> str:
        """Instructions of the server for the model, if it is trusted; else empty.

        Those of other servers are in `admitted.instructions`, and a person sees them when the server is approved.
        """
        found = self.admitted.instructions
        if not found or not self.tool_policy.trusted:
            return ""
        return f"Instructions of the MCP server {self.name!r} for its tools ({self.name}{SEPARATOR}...):\n{found}"

    @property
    def refused(self) -> Mapping[str, str]:
        """Reasons why tools cannot be used, by the server's own names for them."""
        return self.admitted.refused

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        sandbox: ServerSandbox | None = None,
        name: str | None = None,
        **options: Unpack[ServerOptions],
    ) -> MCPServer:
        """Create a server that is started as a command: `MCPServer.stdio("npx", ["-y", "mcp-server-example"])`.

        The process gets the variables in `env`. From our environment it gets only HOME, LOGNAME, PATH, SHELL, TERM and
        USER.

        Raises:
            MisuseError: when an option is invalid.
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
        auth: httpx2.Auth | OAuth | Literal["oauth"] | None = None,
        login: Login | OAuth | APIKey | None = None,
        allow_private: bool = False,
        name: str | None = None,
        **options: Unpack[ServerOptions],
    ) -> MCPServer:
        """Create a server that is reached over streamable HTTP: `MCPServer.http("https://example.org/mcp")`.

        Its host must not have a private address, unless `allow_private` is set or the URL itself names this machine.
        With `auth="oauth"` a person logs in once, by `login` or `agentfsm mcp login`. With `login=OAuth()` each user of
        a run logs in, and a call of a user who has not waits; `auth` is then used to list the tools.

        Raises:
            MisuseError: when an option is invalid, or the URL is plain HTTP to another machine.
        """
        transport = StreamableHTTPTransport(
            url=url, headers=headers or {}, auth=parse_auth(auth), allow_private=allow_private
        )
        return cls(
            name=name or derive_server_name(httpx2.URL(url).host),
            transport=transport,
            users=None if login is None else to_login(login, url, allow_private=allow_private),
            **_build_server_options(options),
        )

    @classmethod
    def sse(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        auth: httpx2.Auth | OAuth | Literal["oauth"] | None = None,
        allow_private: bool = False,
        name: str | None = None,
        **options: Unpack[ServerOptions],
    ) -> MCPServer:
        """Create a server with the older HTTP+SSE transport: `MCPServer.sse("https://example.org/sse")`; see `http`."""
        transport = SSETransport(url=url, headers=headers or {}, auth=parse_auth(auth), allow_private=allow_private)
        return cls(
            name=name or derive_server_name(httpx2.URL(url).host), transport=transport, **_build_server_options(options)
        )

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        pins: Pins | None = None,
        consent: Consent | None = None,
        ask: AskInput | None = None,
        project: Path | str | None = None,
        on_refused: Callable[[RefusedEntry], object] | None = None,
    ) -> tuple[MCPServer, ...]:
        """Create the servers listed in a configuration file of an MCP host. None of them is started yet.

        The file is one with `mcpServers` or `servers`, a `server.json` of the registry, or a bundle (`.mcpb`). An entry
        that cannot be used is left out.

        Args:
            path: The file.
            pins: Storage for approvals. Default: `PinFile()`, which `agentfsm mcp approve` also uses.
            consent: Function that asks a person to approve a server. Without it, an unapproved server is not started.
            ask: Function that gives the values of the file's inputs. They are taken from the environment first.
            project: Folder whose own servers in the file are used too: ~/.claude.json has some in `projects`. Default:
                the current folder. Those of other folders are entries that cannot be used.
            on_refused: Called with each entry that cannot be used. Default: it is logged.

        Raises:
            MCPServerError: when the file cannot be read, or none of its entries can be used.
        """
        place = Path(path).absolute()
        kept = pins or PinFile()
        loaded = load_entries(place, ask=ask, project=None if project is None else Path(project))
        for refused in loaded.refused:
            if on_refused is not None:
                on_refused(refused)
            else:
                _log.warning("the MCP server %r is left out: %s", refused.name, refused.why)
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
            for entry in loaded.entries
        )

    async def update(self) -> None:
        """List the tools, after checking that the start of the server is approved.

        If listing fails after an earlier success, or the server is not `required`, the known tools stay, and
        `last_error` holds the error.

        Raises:
            MCPServerError: when a required server is not approved or cannot be listed for the first time.
            MisuseError: when a constraint names a tool that the server does not list.
        """
        known = self.version
        async with self._refresh_limit.hold():
            if self.needs_refresh or self.version == known:  # else another run has updated it
                await self._update()

    async def _update(self) -> None:
        try:
            await self._refresh_tools()
            log_exclusions(self.name, self.admitted)
        except MCPServerError as error:
            self.needs_refresh = self.required or self.version > 0
            if self.required and not self.version:
                raise
            if self.last_error is None:
                _log.warning("the tools of the MCP server %r could not be listed: %s", self.name, error)
            self.last_error = error
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
        """Return the connection, after checking that the start of the server is approved."""
        await self.consent_gate.check_start(self.transport, self.start)
        return self.connection

    async def approve(self) -> AdmissionResult:
        """Ask a person to approve every part of the server that is not approved yet; then close the connection.

        Nothing is logged: the caller reports the result.

        Returns:
            The tools in use, the refused ones, and those that were not approved.

        Raises:
            MCPServerError: when the start of the server is not approved, or the server cannot be reached.
        """
        try:
            await self._refresh_tools()
        finally:
            await self.aclose()
        return self.admitted

    async def login(self, open_url: OpenURL | None = None, *, timeout_s: float = LOGIN_TIMEOUT_S) -> None:
        """Let a person log in to the server with a browser, and store the tokens for later requests and processes.

        Args:
            open_url: Coroutine function that takes the person to a URL; it runs in the connection thread, on asyncio.
                Default: the browser of this machine.
            timeout_s: Seconds for the login. Default 300.

        Raises:
            MisuseError: when the server does not use OAuth, or needs no person.
            MCPServerError: when the start of the server is not approved, or the login was refused or failed.
        """
        await self.consent_gate.check_start(self.transport, self.start)
        await self._require_logins().log_in(open_url, timeout_s)

    async def logout(self) -> bool:
        """Remove the stored tokens, and return whether there were any. The server keeps them valid.

        Raises:
            MisuseError: when the server does not use OAuth.
        """
        return await self._require_logins().log_out()

    def _require_logins(self) -> ServerLogins:
        if self.logins is None:
            raise MisuseError(f'the MCP server {self.name!r} has no logins: it needs auth="oauth"')
        return self.logins

    async def resources(self) -> tuple[RemoteResource, ...]:
        """List the server's resources.

        Raises:
            MisuseError: when the server has not declared resources.
            MCPServerError: when the server cannot be reached, or its answer is invalid.
        """
        return await server_features.fetch_resources(await self._approved_connection(), self.timeout_s)

    async def resource_templates(self) -> tuple[ResourceTemplate, ...]:
        """List the URI templates of further resources; raises as `resources`."""
        return await server_features.fetch_resource_templates(await self._approved_connection(), self.timeout_s)

    async def read(self, uri: str) -> tuple[Part, ...]:
        """Read a resource; return its contents in order, as message parts. Raises as `resources`."""
        return await server_features.fetch_resource(await self._approved_connection(), self.timeout_s, uri)

    async def prompts(self) -> tuple[RemotePrompt, ...]:
        """List the server's prompts, for a person to choose from. They are not sent to the model.

        Raises:
            MisuseError: when the server has not declared prompts.
            MCPServerError: when the server cannot be reached, or its answer is invalid.
        """
        return await server_features.fetch_prompts(await self._approved_connection(), self.timeout_s)

    async def prompt(self, name: str, /, **arguments: str) -> tuple[Message, ...]:
        """Render a prompt with its arguments, as messages for `agent.start(messages=...)`; raises as `prompts`."""
        return await server_features.fetch_prompt(await self._approved_connection(), self.timeout_s, name, arguments)

    async def complete(
        self, of: RemotePrompt | ResourceTemplate, argument: str, begun: str, known: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """Ask the server to complete an argument of a prompt or a template. Returns the values, best first.

        Args:
            of: The prompt or the template.
            argument: The argument's name.
            begun: The text typed so far.
            known: The other arguments that are already filled in.

        Raises:
            MisuseError: when the server has not declared completions.
            MCPServerError: when the server cannot be reached, or its answer is invalid.
        """
        return await server_features.fetch_completions(
            await self._approved_connection(), self.timeout_s, of, (argument, begun), dict(known or {})
        )

    async def aclose(self) -> None:
        """Close the connection. The next use opens a new one and lists the tools again."""
        await self.connection.aclose()
        await self.sessions.aclose()
        self.needs_refresh = True

    def _on_connected(self) -> None:
        self.needs_refresh = False

    def _on_message(self, message: object) -> None:
        if isinstance(message, m.ToolListChangedNotification):
            self.needs_refresh = True
