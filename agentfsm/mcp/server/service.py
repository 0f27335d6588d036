"""Our tools and agents as an MCP server: over stdio, over HTTP, or in a web server of your own.

Both revisions of the protocol are served, 2026-07-28 and the handshake of 2025-11-25; the SDK tells them apart.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, redirect_stdout
from importlib.metadata import version
from typing import Any, Final

import anyio
import attrs
import mcp.types as m
from anyio.abc import TaskGroup, TaskStatus
from anyio.lowlevel import current_token
from mcp import MCPError
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import ListenHandler
from mcp.server.transport_security import TransportSecuritySettings

from agentfsm._runnable_agent import RunnableAgent
from agentfsm.core.errors import MisuseError, first_error
from agentfsm.mcp.server import http_server as web
from agentfsm.mcp.server.call_sequencer import MAX_CALLS
from agentfsm.mcp.server.event_bus import EventBus
from agentfsm.mcp.server.http_guard import (
    TOKEN_VARIABLE,
    App,
    HTTPGuard,
    build_allowed_hosts,
    is_loopback,
    resolve_token,
)
from agentfsm.mcp.server.http_sessions import SESSION_IDLE_TIMEOUT_S, SessionLimiter
from agentfsm.mcp.server.input_requests import RequestContext
from agentfsm.mcp.server.resource_subscriptions import MAX_URI_CHARS, subscribe, unsubscribe
from agentfsm.mcp.server.resources import Prompt, Resource, propose_completions
from agentfsm.mcp.server.served_runs import ServedRuns
from agentfsm.mcp.server.served_tools import ServedTools
from agentfsm.tools.permission import Permissions
from agentfsm.tools.queue import result_text
from agentfsm.tools.queue.scheduler import DEFAULT_LIMIT, DEFAULT_TIMEOUT_S
from agentfsm.tools.registry import ToolRegistry, ToolSource
from agentfsm.tools.tool import Tool

# The port of HTTP unless another is given: what MCP servers usually have.
DEFAULT_PORT: Final = 8000
# The beginning of a cursor into the runs; they come behind the resources.
RUN_CURSOR_PREFIX: Final = "runs:"


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


@attrs.define(eq=False, repr=False, kw_only=True)
class MCPService:
    """A registry of tools as an MCP server, with resources and prompts; `Agent.as_mcp_server` makes one of an agent.

    Example: `await MCPService(registry, name="project-manager").stdio()`

    Raises:
        MisuseError: when two things share a name.
    """

    registry: ToolRegistry = attrs.field(kw_only=False, converter=_to_registry)
    """Whose tools clients may call: a registry, or several tools."""

    name: str
    version: str = ""
    """Of yours."""

    instructions: str = ""
    """What the server is for, for the model that uses it."""

    resources: tuple[Resource, ...] = attrs.field(default=(), converter=_as_resources, validator=_check_resources)
    prompts: tuple[Prompt, ...] = attrs.field(default=(), converter=_as_prompts, validator=_check_prompts)
    permissions: Permissions | None = None
    """What clients may do with the tools; None: everything."""

    deps: Any = None
    """Handed to tools as `ctx.deps`."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds for a call whose tool sets none."""

    limit: int = DEFAULT_LIMIT
    """Calls of the tools in flight at once, 1 or more."""

    runs: ServedRuns | None = None
    """Of an agent."""

    server: Server[TaskGroup] = attrs.field(init=False)
    """The SDK's, for whoever connects to it in this process."""

    _tools: tuple[ServedTools, ...] = attrs.field(init=False)
    """Those of the runs first."""

    _bus: EventBus = attrs.field(init=False)
    _listen: ListenHandler = attrs.field(init=False)
    _announced_version: int = attrs.field(default=0, init=False)
    """Of the registry, as clients were last told."""

    def __attrs_post_init__(self) -> None:
        own = ServedTools(
            registry=self.registry,
            permissions=self.permissions,
            deps=self.deps,
            timeout_s=self.timeout_s,
            limit=self.limit,
        )
        self._bus = EventBus() if self.runs is None else self.runs.bus
        self._tools = (own,) if self.runs is None else (_build_run_tools(self.runs, self.registry), own)
        self._listen = ListenHandler(self._bus)
        self._announced_version = self.registry.version
        self.server = self._build_server()

    def _build_server(self) -> Server[TaskGroup]:
        has_resources = bool(self.resources) or self.runs is not None
        has_tools = any(len(each.registry) or each.registry.sources for each in self._tools)
        has_completion = any(each.complete for each in self.prompts) or any(each.complete for each in self.resources)
        return Server(
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

    # How it is reached.

    async def stdio(self) -> None:
        """Serve the one client at the other end of standard input and output, until it closes them.

        Meanwhile nothing else gets to standard output: what is printed goes to standard error.
        """
        try:
            async with stdio_server() as (read, write):
                # The SDK has turned the descriptor to standard error; what Python holds back would come after that.
                with redirect_stdout(sys.stderr):
                    await self.server.run(read, write, self.server.create_initialization_options())
                sys.stdout.flush()
        except BaseExceptionGroup as group:
            if not isinstance(error := first_error(group), BrokenPipeError):  # the client has gone in mid-word
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
        """Serve over streamable HTTP until SIGTERM or Ctrl-C comes, or this is cancelled. It needs asyncio.

        Runs under way at the end are given back to the store, and go on with the next server.

        Args:
            host: The address to listen on. Any other than loopback needs a token.
            port: The port; 0 for any that is free.
            token: What clients have to bring as `Authorization: Bearer ...`; by default $AGENTFSM_MCP_TOKEN.
            hosts: Further names by which it is called, such as that of a proxy.
            task_status: Told the URL when it is there: `url = await tasks.start(service.http)`.

        Raises:
            MisuseError: when anybody could reach it, a name is no host, or the event loop is another.
            MCPServerError: when the address is taken.
        """
        if not hasattr(current_token().native_token, "call_soon_threadsafe"):
            raise MisuseError(
                "http() needs asyncio, which uvicorn runs on; on trio, give `asgi()` to a server of trio's"
            )
        app = self.asgi(host, token=token, hosts=hosts)
        bound = web.bind_socket(host, port)
        with bound:
            await web.serve(app, bound, web.format_url(host, bound), task_status, self._release_clients)

    def asgi(self, host: str = "127.0.0.1", *, token: str | None = None, hosts: Iterable[str] = ()) -> App:
        """Return the server as an ASGI app, for a web server of your own; its endpoint is /mcp.

        That server has to run the app's lifespan, in which runs are driven. An app serves for one lifespan.

        Args:
            host: The address that your server listens on.
            token: As for `http`.
            hosts: As for `http`.

        Raises:
            MisuseError: when anybody could reach it, or a name is no host.
        """
        token = resolve_token(token)
        if token is None and not is_loopback(host):
            raise MisuseError(
                f"{host!r} is reached from other machines, so clients need a bearer token: set ${TOKEN_VARIABLE}, "
                "give token=..., or listen on 127.0.0.1"
            )
        app = self.server.streamable_http_app(
            streamable_http_path=web.ENDPOINT_PATH,
            max_request_body_size=web.MAX_BODY_BYTES,
            session_idle_timeout=SESSION_IDLE_TIMEOUT_S,
            # `SessionLimiter` bounds them, and `HTTPGuard` checks `Host` and `Origin` more strictly.
            max_sessions=None,
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        return HTTPGuard(SessionLimiter(app), build_allowed_hosts(host, hosts), token)

    async def release_runs(self) -> None:
        """Give back the runs that are driven, for the next server; clients are still answered."""
        if self.runs is not None:
            await self.runs.release_runs()

    @asynccontextmanager
    async def _lifespan(self, _server: Server[TaskGroup]) -> AsyncIterator[TaskGroup]:
        async with anyio.create_task_group() as tasks, nullcontext() if self.runs is None else self.runs.lifespan():
            yield tasks
            tasks.cancel_scope.cancel()

    def _release_clients(self) -> None:
        """Answer the clients who listen, or wait for a run, so that nobody holds up the end."""
        self._listen.close()
        if self.runs is not None:
            self.runs.release_waiters()

    # Tools.

    def _find_tool(self, name: str) -> tuple[ServedTools, Tool[..., Any]] | None:
        for each in self._tools:
            if (tool := each.get(name)) is not None:
                return each, tool
        return None

    def _input_schema(self, name: str) -> dict[str, Any] | None:
        found = self._find_tool(name)
        return None if found is None else dict(found[1].parameters)

    async def _refresh(self) -> str:
        """Take in what sources of tools have news of; return why that failed, if it did."""
        flaw = await self._tools[-1].refresh()
        self._announce_tools()
        return flaw

    def _announce_tools(self) -> None:
        if self.registry.version != self._announced_version:
            self._announced_version = self.registry.version
            self._bus.notify_tools_changed()

    async def _list_tools(self, _ctx: RequestContext, params: m.PaginatedRequestParams | None) -> m.ListToolsResult:
        _check_no_cursor(params)
        await self._refresh()
        return m.ListToolsResult(tools=[tool for each in self._tools for tool in each.list_tools()])

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
            why = f" Some tools are not known now: {flaw}" if flaw else ""
            raise MCPError(m.INVALID_PARAMS, result_text.unknown_tool_text(params.name, names) + why)
        tools, tool = found
        try:
            return await tools.call(ctx, params, tool)
        finally:
            self._announce_tools()  # a tool may bring others, or take them away

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
        subscribe(ctx, uri, self._bus, ctx.lifespan_context)
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
        return MCPError(m.INVALID_PARAMS, f"there is no prompt {name[:100]!r}; there are: {names}")

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
    text = f"there is no resource {uri[:200]!r}: resources/list tells which there are"
    return MCPError(m.INVALID_PARAMS, text, {"uri": uri})


def _unknown_page_error(cursor: str) -> MCPError:
    return MCPError(m.INVALID_PARAMS, f"there is no page {cursor[:40]!r}: begin anew without a cursor")


def _build_run_tools(runs: ServedRuns, registry: ToolRegistry) -> ServedTools:
    """Return the tools for an agent's runs.

    Raises:
        MisuseError: when the agent has tools of these names itself.
    """
    made, outputs = runs.build_tools()
    if taken := [name for name in made.names if name in registry]:
        raise MisuseError(
            f"the agent has tools of its own called {', '.join(taken)}, as are those for its runs: name the latter "
            "otherwise with prefix='agent_', or leave the agent's own out with tools=False"
        )
    return ServedTools(registry=made, outputs=outputs, limit=MAX_CALLS)


def build_service(
    agent: RunnableAgent, *, prefix: str, tools: bool, about: str, deps: Any, **options: Any
) -> MCPService:
    """Make a server of an agent; `Agent.as_mcp_server` is this."""
    runs = ServedRuns(agent=agent, deps=deps, description=about, prefix=prefix)
    told = {"name": agent.name, "version": agent.version, "permissions": agent.permissions} | options
    timeout_s = agent.limits.tool_timeout_s
    registry = agent.driver.config.registry if tools else ToolRegistry()
    return MCPService(registry, runs=runs, deps=None if callable(deps) else deps, timeout_s=timeout_s, **told)
