"""Serve tools and agents as an MCP server: over stdio, over HTTP, or in a web server of your own.

Both protocol revisions are served, 2026-07-28 and the handshake of 2025-11-25; the SDK detects the client's revision.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, redirect_stdout
from importlib.metadata import version
from typing import Any, Final, cast

import anyio
import attrs
import mcp.types as m
from anyio.abc import TaskGroup, TaskStatus
from anyio.lowlevel import current_token
from mcp import MCPError
from mcp.server import NotificationOptions, Server
from mcp.server.mcpserver import require_client_extension
from mcp.server.models import InitializationOptions
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.subscriptions import ListenHandler, ToolsListChanged
from mcp.server.transport_security import TransportSecuritySettings

from agentfsm._lib.web import http_server as web
from agentfsm._lib.web.http_connections import MAX_CONNECTIONS, ConnectionLimits
from agentfsm._lib.web.http_guard import (
    TOKEN_VARIABLE,
    App,
    HTTPGuard,
    build_allowed_hosts,
    is_loopback,
    resolve_token,
)
from agentfsm.agents.runnable_agent import RunnableAgent
from agentfsm.core.errors import MisuseError, first_error
from agentfsm.core.validation import COUNT, NOT_NEGATIVE, require_type
from agentfsm.core.value import Value
from agentfsm.mcp.client.tasks import TASKS_EXTENSION
from agentfsm.mcp.server.call_sequencer import MAX_CALLS
from agentfsm.mcp.server.handshake_clients import MAX_URI_CHARS, EventBus, attach, subscribe, unsubscribe
from agentfsm.mcp.server.http_sessions import MAX_SESSIONS, SESSION_IDLE_TIMEOUT_S, SessionLimiter
from agentfsm.mcp.server.input_requests import RequestContext
from agentfsm.mcp.server.resources import Prompt, Resource, propose_completions
from agentfsm.mcp.server.served_runs import ServedRuns
from agentfsm.mcp.server.served_tasks import ServedTasks, TaskRuns, declares_tasks
from agentfsm.mcp.server.served_tools import ServedTools
from agentfsm.tools.permission import Permissions
from agentfsm.tools.queue import result_text
from agentfsm.tools.queue.scheduler import DEFAULT_LIMIT, DEFAULT_TIMEOUT_S
from agentfsm.tools.registry import ToolRegistry, ToolSource
from agentfsm.tools.tool import Tool

# The default HTTP port, which is usual for MCP servers.
DEFAULT_PORT: Final = 8000
# Path of the endpoint.
ENDPOINT_PATH: Final = "/mcp"
# Seconds between two checks whether tools were added or removed outside of a call.
WATCH_S: Final = 1.0
# Prefix of a cursor into the runs, which are listed after the resources.
RUN_CURSOR_PREFIX: Final = "runs:"


@attrs.frozen(kw_only=True)
class ClientLimits(Value):
    """Limits of one client over HTTP, which is an IPv4 address or a /64 network of IPv6: half of what there is.

    Raises:
        MisuseError: when a limit is below 1.
    """

    connections: int = attrs.field(default=MAX_CONNECTIONS // 2, validator=COUNT)
    """Connections at once, 1 or more, of 512 for all clients. The one that has waited longest for a request is closed
    for another.
    """

    sessions: int = attrs.field(default=MAX_SESSIONS // 2, validator=COUNT)
    """Sessions at once, 1 or more, of 1,000 for all clients; only the handshake revision has sessions. The one that is
    idle for longest ends for another.
    """

    calls: int = attrs.field(default=MAX_CALLS // 2, validator=COUNT)
    """Calls in progress and waiting, 1 or more, of 1,000 for all clients. Further calls are refused."""


_CLIENT_LIMITS: Final = require_type(ClientLimits, wanted="ClientLimits(...)")


def _to_registry(tools: Iterable[Tool[..., Any] | Callable[..., Any] | ToolSource]) -> ToolRegistry:
    return ToolRegistry.of(tools)


def _as_resources(given: Iterable[Resource]) -> tuple[Resource, ...]:
    return tuple(given)


def _as_prompts(given: Iterable[Prompt]) -> tuple[Prompt, ...]:
    return tuple(given)


def _check_unique(kind: str, names: Iterable[str]) -> None:
    known: set[str] = set()
    for name in names:
        if name in known:
            raise MisuseError(f"two {kind} are called {name!r}: rename one")
        known.add(name)


def _check_resources(_service: object, _attribute: object, given: Sequence[Resource]) -> None:
    _check_unique("resources", (each.uri for each in given))


def _check_prompts(_service: object, _attribute: object, given: Sequence[Prompt]) -> None:
    _check_unique("prompts", (each.name for each in given))


class _AnnouncingServer(Server[TaskGroup]):
    """Server that promises to announce changes of its tools and resources, and not of its prompts, which are fixed.

    The SDK promises clients of the handshake revision no announcements, and those of 2026-07-28 all of them.
    """

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        """Return the server's part of the handshake."""
        announced = NotificationOptions(tools_changed=True, resources_changed=True)
        return super().create_initialization_options(
            notification_options or announced, experimental_capabilities, extensions
        )

    def get_capabilities(self, *args: Any, **options: Any) -> m.ServerCapabilities:
        """Return what the server can do, for either revision."""
        found = super().get_capabilities(*args, **options)
        if found.prompts is not None:
            found.prompts.list_changed = False
        return found


@attrs.define(eq=False, repr=False, kw_only=True)
class MCPService:
    """MCP server of a tool registry, resources and prompts. `Agent.as_mcp_server` creates one for an agent.

    Example: `await MCPService(registry, name="project-manager").stdio()`

    Raises:
        MisuseError: when two tools, two resource URIs or two prompts have the same name.
    """

    registry: ToolRegistry = attrs.field(kw_only=False, converter=_to_registry)
    """Tools that clients may call: a registry, or an iterable of tools, functions and tool sources."""

    name: str
    """Name that the server reports to clients."""

    version: str = ""
    """Version that the server reports to clients. Default: the version of agentfsm."""

    instructions: str = ""
    """Usage notes for the client's model; empty: none are sent."""

    resources: tuple[Resource, ...] = attrs.field(default=(), converter=_as_resources, validator=_check_resources)
    """Resources that clients may read, each with its own URI."""

    prompts: tuple[Prompt, ...] = attrs.field(default=(), converter=_as_prompts, validator=_check_prompts)
    """Prompts that clients may list and render, each with its own name."""

    permissions: Permissions | None = None
    """Permissions of clients on the tools. None: all calls are allowed."""

    deps: Any = None
    """Application object that tools receive as `ctx.deps`."""

    resolve_deps: Callable[[Any], Any] | None = None
    """Function that returns `ctx.deps` of a call from the `starlette.requests.Request` that made it, such as the user
    whom your web server has authenticated. None: all calls get `deps`, as over standard input.
    """

    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds that a call may take if its tool sets no timeout."""

    limit: int = DEFAULT_LIMIT
    """Maximum of tool calls in flight at once, 1 or more."""

    client_limits: ClientLimits = attrs.field(factory=ClientLimits, validator=_CLIENT_LIMITS)
    """Limits of one client over HTTP."""

    runs: ServedRuns | None = None
    """Runs of an agent that clients may start and follow. None: only tools, resources and prompts are served."""

    tasks: TaskRuns | None = attrs.field(default=attrs.Factory(lambda service: service.runs, takes_self=True))
    """Runs that are tasks for clients that declare the extension. Default: those of `runs`. None: there are none."""

    drain_s: float = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """Seconds that calls in flight, and those of runs, have to end when the server stops, 0 or more. Default 0: runs
    are cut off, and requests over HTTP have 3 s.
    """

    server: Server[TaskGroup] = attrs.field(init=False)
    """The SDK's server object, for in-process connections."""

    _tools: tuple[ServedTools, ...] = attrs.field(init=False)
    """Served tools: those for the runs first, then the registry's."""

    _served_tasks: ServedTasks | None = attrs.field(init=False)
    _bus: EventBus = attrs.field(init=False)
    _listen: ListenHandler = attrs.field(init=False)
    _announced_version: int = attrs.field(default=0, init=False)
    """Version of the registry at the last change notification."""

    def __attrs_post_init__(self) -> None:
        own = ServedTools(
            registry=self.registry,
            permissions=self.permissions,
            deps=self.deps,
            resolve_deps=self.resolve_deps,
            timeout_s=self.timeout_s,
            limit=self.limit,
            max_client_calls=self.client_limits.calls,
            long_tools=frozenset() if self.tasks is None else frozenset(self.tasks.long_tools),
        )
        self._bus = EventBus() if self.runs is None else self.runs.bus
        self._tools = (own,) if self.runs is None else (self._build_run_tools(self.runs), own)
        self._listen = ListenHandler(self._bus)
        self._served_tasks = None if self.tasks is None else ServedTasks(self.tasks, own.find_deps)
        self._announced_version = self.registry.version
        self.server = self._build_server()

    def _build_run_tools(self, runs: ServedRuns) -> ServedTools:
        """Build the tools that start and control an agent's runs.

        Raises:
            MisuseError: when the agent's own tools have these names.
        """
        made, outputs = runs.build_tools()
        if duplicates := [name for name in made.names if name in self.registry]:
            raise MisuseError(
                f"tools of the agent have the same names as the tools for its runs: {', '.join(duplicates)}. Rename "
                "the latter with prefix='agent_', or do not serve the agent's tools: tools=False"
            )
        return ServedTools(registry=made, outputs=outputs, limit=MAX_CALLS, max_client_calls=self.client_limits.calls)

    def _build_server(self) -> Server[TaskGroup]:
        has_resources = bool(self.resources) or self.runs is not None
        has_tools = any(len(each.registry) or each.registry.sources for each in self._tools)
        has_completion = any(each.complete for each in self.prompts) or any(each.complete for each in self.resources)
        server = _AnnouncingServer(
            self.name,
            version=self.version or version("agentfsm"),
            instructions=self.instructions or None,
            lifespan=self._lifespan,
            get_tool_input_schema=self._input_schema,
            on_list_tools=self._list_tools if has_tools else None,
            on_call_tool=self._call_tool if has_tools else None,
            on_list_resources=self._list_resources if has_resources else None,
            on_list_resource_templates=self._list_templates if has_resources else None,
            on_read_resource=self._read_resource if has_resources else None,
            on_subscribe_resource=self._subscribe if has_resources else None,
            on_unsubscribe_resource=self._unsubscribe if has_resources else None,
            on_list_prompts=self._list_prompts if self.prompts else None,
            on_get_prompt=self._get_prompt if self.prompts else None,
            on_completion=self._complete if has_completion else None,
            on_subscriptions_listen=self._listen,
        )
        if self._served_tasks is not None:
            self._served_tasks.register(server)
        server.add_notification_handler("notifications/initialized", m.NotificationParams, self._attach_client)
        return server

    # Transports.

    async def stdio(self) -> None:
        """Serve the one client at the other end of standard input and output, until it closes them.

        Meanwhile `print` writes to standard error, since other output would break the protocol.
        """
        try:
            async with stdio_server() as (read, write):
                # The SDK redirects the file descriptor; Python's buffered output would be written after that ends.
                with redirect_stdout(sys.stderr):
                    await self.server.run(read, write, self.server.create_initialization_options())
                sys.stdout.flush()
        except BaseExceptionGroup as group:
            if not isinstance(error := first_error(group), BrokenPipeError):  # the client has disconnected
                raise error from None

    async def http(
        self,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        token: str | None = None,
        hosts: Iterable[str] = (),
        task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve over streamable HTTP until SIGTERM, Ctrl-C or cancellation. Needs asyncio.

        At the end, active runs are released to the store, and the next server continues them.

        Args:
            host: The address to listen on. An address other than loopback needs a token.
            port: The port; 0 for any free one.
            token: Token that clients send as `Authorization: Bearer ...`. Default: $AGENTFSM_MCP_TOKEN.
            hosts: Further host names of the server, such as that of a proxy.
            task_status: Receives the URL when the server listens: `url = await tasks.start(service.http)`.

        Raises:
            MisuseError: when other machines could connect without a token, a host name is invalid, the event loop is
                not asyncio, or the address is in use.
        """
        if not hasattr(current_token().native_token, "call_soon_threadsafe"):
            raise MisuseError(
                "http() needs asyncio, because it uses uvicorn; on trio, run the app of `asgi()` in a trio web server"
            )
        app = self.asgi(host, token=token, hosts=hosts)
        bound = web.bind_socket(host, port)
        with bound:
            url = web.format_url(host, bound, ENDPOINT_PATH)
            limits = ConnectionLimits(per_address=self.client_limits.connections)
            drain_s = self.drain_s
            await web.serve(
                app,
                bound,
                url,
                task_status,
                self.release_clients,
                limits=limits,
                drain_s=drain_s,
                end_drain=self.end_drain,
            )

    def asgi(self, host: str = "127.0.0.1", *, token: str | None = None, hosts: Iterable[str] = ()) -> App:
        """Return an ASGI app with the endpoint /mcp, for a web server of your own.

        The web server has to run the app's lifespan, in which runs are executed. An app serves for one lifespan.

        Args:
            host: The address that your server listens on.
            token: As for `http`.
            hosts: As for `http`.

        Raises:
            MisuseError: when other machines could connect without a token, or a host name is invalid.
        """
        token = resolve_token(token)
        if token is None and not is_loopback(host):
            raise MisuseError(
                f"{host!r} can be reached from other machines, so clients need a bearer token: set ${TOKEN_VARIABLE}, "
                "give token=..., or listen on 127.0.0.1"
            )
        app = self.server.streamable_http_app(
            streamable_http_path=ENDPOINT_PATH,
            max_request_body_size=web.MAX_BODY_BYTES,
            session_idle_timeout=SESSION_IDLE_TIMEOUT_S,
            # `SessionLimiter` limits sessions, and `HTTPGuard` checks `Host` and `Origin` more strictly than the SDK.
            max_sessions=None,
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        return HTTPGuard(SessionLimiter(app, self.client_limits.sessions), build_allowed_hosts(host, hosts), token)

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator[App]:
        """Serve while the block lasts. Yield the ASGI app of the endpoint, for a server that has its own access rules.

        The app checks neither `Host` nor `Origin` nor a token. `claim_request` gives a request to the caller that the
        server has authenticated. The context can be entered once.
        """
        manager = StreamableHTTPSessionManager(
            self.server,
            max_request_body_size=web.MAX_BODY_BYTES,
            session_idle_timeout=SESSION_IDLE_TIMEOUT_S,
            max_sessions=None,  # `SessionLimiter` limits sessions
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        async with manager.run():
            yield SessionLimiter(manager.handle_request, self.client_limits.sessions)

    async def release_runs(self) -> None:
        """Release the active runs to the store, for the next server; clients are still answered."""
        if self.runs is not None:
            await self.runs.release_runs()

    async def drain(self) -> None:
        """Begin no further call, and wait until those in flight have ended and the runs are released.

        Effects that are in flight after `drain_s` are cut off.
        """
        with anyio.move_on_after(self.drain_s):
            self.release_clients()
            self._stop_calls()
            for each in self._tools:
                await each.sequencer.wait_idle()
        await self.release_runs()

    def end_drain(self) -> None:
        """Cut off the effects of runs that are still in flight."""
        if self.runs is not None:
            self.runs.end_drain()

    def _stop_calls(self) -> None:
        for each in self._tools:
            each.is_stopping = True
        if self.runs is not None:
            self.runs.drain()

    @asynccontextmanager
    async def _lifespan(self, _server: Server[TaskGroup]) -> AsyncIterator[TaskGroup]:
        async with (
            anyio.create_task_group() as tasks,
            nullcontext() if self.runs is None else self.runs.lifespan(self.drain_s),
        ):
            tasks.start_soon(self._watch_tools)
            yield tasks
            tasks.cancel_scope.cancel()

    async def _watch_tools(self) -> None:
        """Announce changes of the tools that no client has caused."""
        while True:
            await anyio.sleep(WATCH_S)
            if any(source.is_stale for source in self.registry.sources):
                await self._refresh()
            self._announce_tools()

    def release_clients(self) -> None:
        """Answer the clients that listen or wait for a run, so that they do not delay the shutdown."""
        self._listen.close()
        if self.runs is not None:
            self.runs.release_waiters()
        if self.drain_s:
            self._stop_calls()

    # Tools.

    def _find_tool(self, name: str) -> tuple[ServedTools, Tool[..., Any]] | None:
        for each in self._tools:
            if (tool := each.get(name)) is not None:
                return each, tool
        return None

    def _input_schema(self, name: str) -> dict[str, Any] | None:
        found = self._find_tool(name)
        return None if found is None else found[1].input_schema

    async def _refresh(self) -> str:
        """Update the tool sources. Returns the error text, or "" if that succeeded."""
        flaw = await self._tools[-1].refresh()
        self._announce_tools()
        return flaw

    def _announce_tools(self) -> None:
        if self.registry.version != self._announced_version:
            self._announced_version = self.registry.version
            self._bus.announce(ToolsListChanged())

    async def _attach_client(self, ctx: RequestContext, _params: m.NotificationParams) -> None:
        attach(ctx, self._bus, ctx.lifespan_context)

    async def _list_tools(self, ctx: RequestContext, params: m.PaginatedRequestParams | None) -> m.ListToolsResult:
        _check_no_cursor(params)
        await self._refresh()
        has_tasks = declares_tasks(ctx)
        return m.ListToolsResult(tools=[tool for each in self._tools for tool in each.list_tools(has_tasks=has_tasks)])

    async def _call_tool(
        self, ctx: RequestContext, params: m.CallToolRequestParams
    ) -> m.CallToolResult | m.InputRequiredResult:
        flaw = ""
        found = self._find_tool(params.name)
        if found is None or found[0] is self._tools[-1]:
            flaw = await self._refresh()
            found = self._find_tool(params.name)
        if found is None:
            names = [name for each in self._tools for name in each.names()]
            why = f" The tools of a source could not be listed: {flaw}" if flaw else ""
            raise MCPError(m.INVALID_PARAMS, result_text.unknown_tool_text(params.name, names) + why)
        tools, tool = found
        try:
            if self.tasks is None or self._served_tasks is None or tool.name not in self._task_tools(self.tasks):
                return await tools.call(ctx, params, tool)
            if tool.name in self.tasks.long_tools:
                require_client_extension(ctx, TASKS_EXTENSION)
                begun: m.Result | str = await tools.begin_call(ctx, params, tool, self.tasks.long_tools[tool.name])
            elif declares_tasks(ctx):
                begun = await self._start_run(ctx, params, tools, tool)
            else:
                return await tools.call(ctx, params, tool)
            task = begun if isinstance(begun, m.Result) else await self._served_tasks.begin(ctx, begun)
            return cast("m.CallToolResult", task)  # the type of the SDK has no results of extensions
        finally:
            self._announce_tools()  # a tool may add or remove tools

    def _task_tools(self, tasks: TaskRuns) -> set[str]:
        return {tasks.start_tool, *tasks.long_tools}

    async def _start_run(
        self, ctx: RequestContext, params: m.CallToolRequestParams, tools: ServedTools, tool: Tool[..., Any]
    ) -> m.Result | str:
        """Start a run without waiting for it. Return its id, or a result if it was not started."""
        arguments = {**(params.arguments or {}), "wait_s": 0}
        started = await tools.call(ctx, params.model_copy(update={"arguments": arguments}), tool)
        if isinstance(started, m.CallToolResult) and not started.is_error and started.structured_content is not None:
            return str(started.structured_content["run_id"])
        return started

    # Resources.

    async def _list_resources(
        self, _ctx: RequestContext, params: m.PaginatedRequestParams | None
    ) -> m.ListResourcesResult:
        cursor = None if params is None else params.cursor
        if cursor is not None and (self.runs is None or not cursor.startswith(RUN_CURSOR_PREFIX)):
            raise _unknown_page_error(cursor)
        first = [each.to_mcp() for each in self.resources if not each.is_template] if cursor is None else []
        if self.runs is None:
            return m.ListResourcesResult(resources=first)
        page, more = await self.runs.list_page(None if cursor is None else cursor.removeprefix(RUN_CURSOR_PREFIX))
        return m.ListResourcesResult(
            resources=first + page, next_cursor=None if more is None else f"{RUN_CURSOR_PREFIX}{more}"
        )

    @property
    def _readable_resources(self) -> tuple[Resource, ...]:
        return self.resources if self.runs is None else (*self.resources, self.runs.resource)

    async def _list_templates(
        self, _ctx: RequestContext, params: m.PaginatedRequestParams | None
    ) -> m.ListResourceTemplatesResult:
        _check_no_cursor(params)
        listed = [each.to_mcp_template() for each in self._readable_resources if each.is_template]
        return m.ListResourceTemplatesResult(resource_templates=listed)

    async def _read_resource(self, _ctx: RequestContext, params: m.ReadResourceRequestParams) -> m.ReadResourceResult:
        uri = str(params.uri)
        for each in sorted(self._readable_resources, key=lambda resource: resource.is_template):
            if (variables := each.match(uri)) is not None:
                return await each.load_contents(uri, variables)
        raise _unknown_resource_error(uri)

    async def _subscribe(self, ctx: RequestContext, params: m.SubscribeRequestParams) -> m.EmptyResult:
        uri = str(params.uri)
        if len(uri) > MAX_URI_CHARS or all(each.match(uri) is None for each in self._readable_resources):
            raise _unknown_resource_error(uri)
        subscribe(ctx, uri)
        return m.EmptyResult()

    async def _unsubscribe(self, ctx: RequestContext, params: m.UnsubscribeRequestParams) -> m.EmptyResult:
        unsubscribe(ctx, str(params.uri))
        return m.EmptyResult()

    # Prompts.

    async def _list_prompts(self, _ctx: RequestContext, params: m.PaginatedRequestParams | None) -> m.ListPromptsResult:
        _check_no_cursor(params)
        return m.ListPromptsResult(prompts=[each.to_mcp() for each in self.prompts])

    async def _get_prompt(self, _ctx: RequestContext, params: m.GetPromptRequestParams) -> m.GetPromptResult:
        for each in self.prompts:
            if each.name == params.name:
                return await each.build_messages(params.arguments or {})
        raise self._unknown_prompt_error(params.name)

    def _unknown_prompt_error(self, name: str) -> MCPError:
        names = ", ".join(each.name for each in self.prompts) or "none"
        return MCPError(m.INVALID_PARAMS, f"unknown prompt {name[:100]!r}; available: {names}")

    async def _complete(self, _ctx: RequestContext, params: m.CompleteRequestParams) -> m.CompleteResult:
        asked = params.ref
        if isinstance(asked, m.PromptReference):
            offer: Prompt | Resource | None = next((each for each in self.prompts if each.name == asked.name), None)
            if offer is None:
                raise self._unknown_prompt_error(asked.name)
        else:
            offer = next((each for each in self._readable_resources if each.uri == asked.uri), None)
            if offer is None:
                raise _unknown_resource_error(asked.uri)
        return await propose_completions(offer, params)


def _check_no_cursor(params: m.PaginatedRequestParams | None) -> None:
    if params is not None and params.cursor is not None:
        raise _unknown_page_error(params.cursor)


def _unknown_resource_error(uri: str) -> MCPError:
    text = f"unknown resource {uri[:200]!r}: use a URI from resources/list"
    return MCPError(m.INVALID_PARAMS, text, {"uri": uri})


def _unknown_page_error(cursor: str) -> MCPError:
    return MCPError(m.INVALID_PARAMS, f"invalid cursor {cursor[:40]!r}: start again without a cursor")


def build_service(
    agent: RunnableAgent, *, prefix: str, tools: bool, about: str, deps: Any, **options: Any
) -> MCPService:
    """Build the server of an agent; implements `Agent.as_mcp_server`."""
    runs = ServedRuns(agent=agent, deps=deps, description=about, prefix=prefix)
    fields = {"name": agent.name, "version": agent.version, "permissions": agent.permissions} | options
    timeout_s = agent.limits.tool_timeout_s
    registry = agent.driver.config.registry if tools else ToolRegistry()
    return MCPService(registry, runs=runs, deps=None if callable(deps) else deps, timeout_s=timeout_s, **fields)
