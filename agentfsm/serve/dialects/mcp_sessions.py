"""MCP on the port of the gateway: each request has a caller, and each session belongs to the caller that opened it.

The tools are those of `CallerRunTools`. The MCP server is created at the first request, since loading it takes a second
and needs the extra "mcp".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
import attrs
from anyio.abc import TaskStatus
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route

from agentfsm._lib.concurrency import start_in_thread
from agentfsm._lib.plugins import MissingExtraError, require_extra
from agentfsm.core.value import Value
from agentfsm.serve.dialects.mcp_run_tools import MAX_CALLS, CallerRunTools
from agentfsm.serve.endpoints import Endpoint, EndpointHandler, RouteGroup

if TYPE_CHECKING:
    from starlette.requests import Request

    from agentfsm._lib.web.http_guard import App, Message, Receive, Scope, Send
    from agentfsm.mcp.server.service import MCPService
    from agentfsm.serve.access import Authenticate, Caller
    from agentfsm.serve.gateway import Gateway

# Path of the endpoint.
MCP_PATH: Final = "/mcp"
# Header of a session of the handshake revision, which pages of other origins may read.
SESSION_HEADER: Final = "mcp-session-id"
# Headers that clients in pages of other origins may send.
ALLOWED_HEADERS: Final = (SESSION_HEADER, "mcp-protocol-version", "mcp-method", "mcp-name")
# Key of the caller in the ASGI scope of a request.
_CALLER_KEY: Final = "agentfsm.caller"


@attrs.define(eq=False, repr=False)
class MCPSessions:
    """The MCP server of a gateway, and the sessions of its clients."""

    gateway: Gateway
    _server: _Server | None = attrs.field(default=None, init=False)
    """The MCP server; None before the first request."""

    _app: App | None = attrs.field(default=None, init=False)
    """ASGI app of the server; None while it is not executed."""

    _lock: anyio.Lock = attrs.field(factory=anyio.Lock, init=False)

    async def serve_mcp(self, _gateway: Gateway, _request: Request, caller: Caller, _body: object) -> App:
        """Return the ASGI app that answers a request of a caller.

        Raises:
            HTTPException: when the extra "mcp" is not installed.
            ClosedError: when the lifespan of the gateway is not running.
        """
        async with self._lock:
            if self._server is None:
                try:
                    self._server = await start_in_thread(partial(_load_server, self.gateway)).wait()
                except MissingExtraError as error:
                    raise HTTPException(501, str(error)) from None
            if self._app is None:
                await self.gateway.start_task(partial(self._run, self._server))
        return partial(self._answer, caller)

    async def _run(self, server: _Server, *, task_status: TaskStatus[None]) -> None:
        """Execute the server until the gateway ends."""
        self.gateway.on_close.append(server.close)
        try:
            async with server.service.endpoint() as self._app:
                task_status.started()
                await anyio.sleep_forever()
        finally:
            self._app = None
            self._server = None  # it serves for one lifespan
            self.gateway.on_close.remove(server.close)

    async def _answer(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._app is not None and self._server is not None  # noqa: S101, PT018  it answers during the lifespan
        # Sessions belong to who a caller is, with what it may do.
        owner = hashlib.sha256(json.dumps(caller.rights).encode()).hexdigest()
        claimed = {**self._server.claim(scope, owner), _CALLER_KEY: caller}
        if scope["method"] == "GET":
            await self._answer_stream(partial(self._app, claimed, receive), send)
        else:
            await self._app(claimed, receive, send)

    async def _answer_stream(self, answer: Callable[[Send], Awaitable[None]], send: Send) -> None:
        """Answer with a stream, which ends in order when the server shuts down."""
        is_open = False

        async def send_and_track(message: Message) -> None:
            nonlocal is_open
            is_open = message["type"] == "http.response.start" or bool(message.get("more_body"))
            await send(message)

        with anyio.CancelScope() as scope:
            self.gateway.streams.add(scope)
            try:
                await answer(send_and_track)
            finally:
                self.gateway.streams.discard(scope)
        if scope.cancelled_caught and is_open:
            with anyio.CancelScope(shield=True):
                await send({"type": "http.response.body", "body": b"", "more_body": False})


@attrs.frozen(kw_only=True)
class _Server(Value):
    """MCP server of a gateway, and what its requests need."""

    service: MCPService
    tools: CallerRunTools
    claim: Callable[[Scope, str], Scope]
    """`claim_request`."""

    def close(self) -> None:
        """Answer the clients that listen or wait for a run, so that they do not delay the shutdown."""
        self.tools.release_waiters()
        self.service.release_clients()


def _load_server(gateway: Gateway) -> _Server:
    """Return the server.

    Raises:
        MissingExtraError: when the extra "mcp" is not installed.
    """
    with require_extra(MCP_PATH, "mcp", "mcp", "httpcore2", "uvicorn"):
        from agentfsm.mcp.server.http_sessions import claim_request  # noqa: PLC0415
        from agentfsm.mcp.server.service import MCPService  # noqa: PLC0415
    tools = CallerRunTools(gateway)
    names = ", ".join(gateway.agents) or "none, so that runs can be read and decided on only"
    service = MCPService(
        tools.build_tools(),
        name="agentfsm",
        instructions=f"Runs of agents. Agents of this server: {names}.",
        resolve_deps=lambda request: request.scope[_CALLER_KEY],
        limit=MAX_CALLS,
        tasks=tools,
    )
    return _Server(service=service, tools=tools, claim=claim_request)


def _build_routes(gateway: Gateway, auth: Authenticate) -> Sequence[BaseRoute]:
    endpoint = Endpoint(method="POST", path=MCP_PATH, handler=MCPSessions(gateway).serve_mcp)
    handler = EndpointHandler(gateway=gateway, auth=auth, endpoint=endpoint)
    return [Route(MCP_PATH, handler, methods=["GET", "POST", "DELETE"])]


MCP: Final = RouteGroup(name="mcp", build_routes=_build_routes)
