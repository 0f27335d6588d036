"""The ASGI app of the gateway, and its OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from agentfsm.agents.agent import WORKER_PARALLEL, Agent
from agentfsm.agents.deltas import DeltaRelay
from agentfsm.agents.runs import Runs
from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import NOT_NEGATIVE
from agentfsm.releases import Rollout
from agentfsm.serve.administration import ADMINISTRATION
from agentfsm.serve.caller_limits import MAX_QUEUE, Admission, check_quota_store
from agentfsm.serve.continuation import Continuation
from agentfsm.serve.delta_hub import DeltaHub
from agentfsm.serve.details import DETAILS
from agentfsm.serve.dialects.ag_ui import AG_UI
from agentfsm.serve.dialects.chat_completions import OPENAI
from agentfsm.serve.dialects.mcp_sessions import ALLOWED_HEADERS, MCP, SESSION_HEADER
from agentfsm.serve.dialects.ui_messages import UI_MESSAGES
from agentfsm.serve.endpoints import RouteGroup, answer_http_error, answer_refusal
from agentfsm.serve.errors import SERVER_FAILED
from agentfsm.serve.gateway import Gateway
from agentfsm.serve.inspection import INSPECTION
from agentfsm.serve.logins import LOGINS
from agentfsm.serve.overview import OVERVIEW
from agentfsm.serve.rate_limits import NO_LIMITS, RateLimits
from agentfsm.serve.rollouts import ROLLOUTS
from agentfsm.serve.run_operations import CONTINUATION, RUNS
from agentfsm.serve.schedules import SCHEDULES

if TYPE_CHECKING:
    from starlette.requests import Request

    from agentfsm._lib.web.http_guard import Receive, Scope, Send
    from agentfsm.ports.store import Store
    from agentfsm.serve.access import Authenticate

# `Origin` as browsers send it.
_ORIGIN: Final = re.compile(r"https?://[a-z0-9.-]+(:[0-9]{1,5})?")
_ROOT_PATH: Final = re.compile(r"(/[\w.~-]+)+", re.ASCII)
# Headers that pages send to each protocol, and those that the tracing of browsers' SDKs adds to every request.
_PAGE_HEADERS: Final = (
    *("authorization", "content-type", "idempotency-key", "last-event-id"),
    *("traceparent", "tracestate", "baggage", "sentry-trace"),
)
# Paths of the checks of the server, which are answered also when it has no place for other requests.
HEALTH_PATH: Final = "/healthz"
READY_PATH: Final = "/readyz"
# Operations of every gateway.
ROUTE_GROUPS: Final = (
    *(RUNS, LOGINS, INSPECTION, DETAILS, ADMINISTRATION, OVERVIEW, ROLLOUTS, SCHEDULES),
    *(AG_UI, OPENAI, UI_MESSAGES, MCP),
)


@attrs.frozen(eq=False)
class GatewayApp:
    """ASGI app of the gateway. Its lifespan executes runs."""

    gateway: Gateway
    """Operations on the runs."""

    app: Starlette
    """Routes of the operations."""

    root_path: str = ""
    """Path below which a proxy, which removes it, has the server."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or the lifespan."""
        if self.root_path and "path" in scope:  # a full path, from which Starlette takes the root, as ASGI has it
            scope = {**scope, "root_path": self.root_path, "path": self.root_path + scope["path"]}
        await self.app(scope, receive, send)

    def lifespan(self) -> AbstractAsyncContextManager[None]:
        """Return a context that executes runs, for an application that mounts the app: `async with app.lifespan()`."""
        return self.gateway.lifespan(self)

    def close_streams(self) -> None:
        """End the event streams, and answer the requests that wait, since the server shuts down."""
        self.gateway.close_streams()


def serve(
    agents: Iterable[Agent[Any] | Rollout],
    *,
    auth: Authenticate,
    store: Store | None = None,
    deps: Any = None,
    parallel: int = WORKER_PARALLEL,
    drain_s: float = 0.0,
    groups: Iterable[RouteGroup] = (),
    limits: RateLimits = NO_LIMITS,
    tenant_limits: RateLimits = NO_LIMITS,
    max_queue: int | None = MAX_QUEUE,
    four_eyes: bool = False,
    origins: Iterable[str] = (),
    allow_headers: Iterable[str] = (),
    root_path: str = "",
    deltas: str | None = None,
    front_end_tools: bool = True,
    continuation: Continuation | None = None,
) -> GatewayApp:
    """Return an ASGI app that serves agents over HTTP, for a web server or to mount in an application.

    The lifespan of the app has to run: it executes the runs. An application that mounts the app enters `app.lifespan()`
    in its own lifespan.

    Args:
        agents: The agents, each with its own name, or roll-outs of their releases. None of them, with a `store`: the
            runs of all agents can be read and decided on, and none is executed.
        auth: Returns the caller of a request: `APIKeys("keys.json")`, or a function of the host application.
        store: Store of all runs; by default the agents' own, which must be the same.
        deps: Dependencies of every run, or a function, plain or async, that takes the run and returns them.
        parallel: Runs of each agent that this process executes at once; 0 if workers execute them.
        drain_s: Seconds that model requests and calls in flight have to end when the lifespan ends, 0 or more. The runs
            are then released between two steps. Default 0: they are cut off.
        groups: Further endpoints, such as those of other protocols.
        limits: Limits of each user whose key has none of its own.
        tenant_limits: Limits of all users of a tenant together.
        max_queue: Runs of an agent that may wait for a worker before new ones are refused with 503. None: any number.
        four_eyes: Whether no user may approve or settle a call that it has shaped, such as by the prompt, an answer or
            a fork (`Runs.influence`), so that an edit of a call needs a second approver.
        origins: Origins of pages that may call the server from a browser (CORS), such as "https://app.example.org".
        allow_headers: Names of further headers that these pages may send, beside those of the protocols and of tracing.
        root_path: Path below which a proxy, which removes it, has the server, such as "/agents". Not for an application
            that mounts the app, whose path is known.
        deltas: URL of a Redis through which servers and workers pass the text that models write to each other's event
            streams. None: a stream has the text of runs that this process executes.
        front_end_tools: Whether clients may give their runs tools that they carry out themselves (AG-UI). Default True:
            such a call has no effect on the server, its arguments go to the caller, who may read the run anyway, and
            its result is untrusted.
        continuation: Continues one run when a person asks for it, on a server over a store without agents. None: not
            by this server.

    Raises:
        MisuseError: when there is no agent, two have one name, they have different stores, an origin is not one,
            `root_path` is not a path, or `deltas` is not the URL
            of a Redis.
    """
    given = [each if store is None else each.with_(store=store) for each in agents]
    served = [each.base if isinstance(each, Rollout) else each for each in given]
    by_name = {each.name: each for each in served}
    runs = served[0].runs if served else None if store is None else Runs(store)
    if runs is None or len(by_name) < len(served):
        raise MisuseError("serve() needs one agent or more, each with a name of its own: give Agent(name=...)")
    if any(each.store is not served[0].store for each in served):
        raise MisuseError("the agents have different stores: give the store of all of them as store=")
    served_groups = (*ROUTE_GROUPS, *([CONTINUATION] if continuation is not None else ()), *groups)
    background = tuple([each.background for each in served_groups if each.background is not None])
    check_quota_store(runs.store, limits, tenant_limits)
    NOT_NEGATIVE.check("serve", "drain_s", drain_s)
    gateway = Gateway(
        agents=by_name,
        rollouts={each.base.name: each for each in given if isinstance(each, Rollout)},
        runs=runs,
        deps=deps,
        parallel=parallel,
        drain_s=drain_s,
        background=background,
        admission=Admission(runs=runs, user_limits=limits, tenant_limits=tenant_limits, max_queue=max_queue),
        four_eyes=four_eyes,
        front_end_tools=front_end_tools,
        continuation=continuation,
        hub=DeltaHub(None if deltas is None else DeltaRelay(deltas)),
    )
    routes: list[BaseRoute] = [route for each in served_groups for route in each.list_routes(gateway, auth)]
    routes += [
        Route(HEALTH_PATH, _answer_health, methods=["GET"]),
        Route(READY_PATH, _ReadyHandler(gateway), methods=["GET"]),
        Route("/openapi.json", _DocumentHandler(served_groups), methods=["GET"]),
    ]
    allowed = list(origins)
    if wrong := [each for each in allowed if _ORIGIN.fullmatch(each) is None]:
        raise MisuseError(f"origins={wrong[0]!r}: give an origin such as 'https://app.example.org', without a path")
    pages = Middleware(
        CORSMiddleware,
        allow_origins=allowed,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=[*_PAGE_HEADERS, *ALLOWED_HEADERS, *allow_headers],
        expose_headers=["location", "retry-after", SESSION_HEADER],
    )
    app = Starlette(
        routes=routes,
        middleware=[pages] if allowed else [],
        lifespan=gateway.lifespan,
        exception_handlers={HTTPException: _answer_http_error, Exception: _answer_crash},
    )
    if root_path and _ROOT_PATH.fullmatch(root_path) is None:
        raise MisuseError(f"root_path={root_path!r}: give a path such as '/agents', without a slash at the end")
    return GatewayApp(gateway, app, root_path)


def _answer_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  Starlette's types allow any exception
    return answer_http_error(error)


def _answer_crash(_request: Request, _error: Exception) -> Response:
    return answer_refusal(500, "error", SERVER_FAILED)


async def _answer_health(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


@attrs.frozen(eq=False)
class _ReadyHandler:
    gateway: Gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ready = await self.gateway.is_ready()
        response = JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)
        await response(scope, receive, send)


@attrs.frozen(eq=False)
class _DocumentHandler:
    groups: tuple[RouteGroup, ...]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        document = build_openapi(self.groups)
        if root := scope.get("root_path"):  # an application, or the ASGI server, has the gateway below a path
            document["servers"] = [{"url": root}]
        await JSONResponse(document)(scope, receive, send)


_PATH_PARAMETER: Final = re.compile(r"\{(\w+)\}")


def build_openapi(groups: Iterable[RouteGroup] = ROUTE_GROUPS) -> dict[str, Any]:
    """Return the OpenAPI document of the gateway."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for tag, each in [(group.name, each) for group in groups for each in group.endpoints]:
        operation: dict[str, Any] = {
            "operationId": each.handler.__name__,
            "tags": [tag],
            "summary": (each.handler.__doc__ or "").strip().splitlines()[0],
            "description": f"Needs the scope `{each.scope}`." if each.scope else "Any scope is enough.",
            "parameters": [
                *(
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    for name in _PATH_PARAMETER.findall(each.path)
                ),
                *({"name": name, "in": "query", "schema": {"type": "string"}} for name in each.query),
            ],
            "responses": {"2XX": {"description": "Success"}, "4XX": {"$ref": "#/components/responses/Error"}},
        }
        if each.body is not None:
            schema = each.body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
        paths.setdefault(each.path, {})[each.method.lower()] = operation
    error = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
                "required": ["code", "message"],
            }
        },
        "required": ["error"],
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentfsm", "version": version("agentfsm")},
        "paths": paths,
        "security": [{"key": []}],
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas,
            "responses": {"Error": {"description": "Error", "content": {"application/json": {"schema": error}}}},
        },
    }
