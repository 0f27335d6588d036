"""The ASGI app: routes, credentials, bodies and errors of the gateway."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import attrs
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentfsm.agent import WORKER_PARALLEL, Agent
from agentfsm.core.errors import AgentError, ClosedError, ConflictError, MisuseError, RunNotFoundError, StoreError
from agentfsm.core.value import Value
from agentfsm.serve import bodies
from agentfsm.serve.gateway import ForbiddenError, Gateway

if TYPE_CHECKING:
    from starlette.requests import Request

    from agentfsm.ports.store import Store
    from agentfsm.serve.access import Authenticate, Caller
    from agentfsm.web.http_guard import Receive, Scope, Send

_log = logging.getLogger("agentfsm.serve")

# Maximum size of a request's body in bytes.
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
# Seconds after which a client should repeat a request that met a store that was down.
RETRY_AFTER_S: Final = 2


@attrs.frozen(kw_only=True)
class Endpoint(Value):
    """One operation: its method and path, the scope that it needs, and its body."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    """Method of `Gateway`. The first sentence of its docstring is the summary in the OpenAPI document."""

    scope: str | None = None
    """Scope that the caller needs; None if any caller may, of the runs that it sees."""

    body: type[bodies.RequestBody] | None = None
    """None: the operation has no body."""

    query: tuple[str, ...] = ()
    """Names of the parameters in the query."""


_RUN: Final = "/v1/runs/{run_id}"
ENDPOINTS: Final = (
    Endpoint(method="POST", path="/v1/runs", handler=Gateway.create_run, scope="run", body=bodies.StartBody),
    Endpoint(
        method="GET",
        path="/v1/runs",
        handler=Gateway.list_runs,
        query=("agent", "user", "session", "state", "waiting", "limit", "after"),
    ),
    Endpoint(method="GET", path=_RUN, handler=Gateway.get_run, query=("wait_s",)),
    Endpoint(method="DELETE", path=_RUN, handler=Gateway.delete, scope="admin"),
    Endpoint(method="GET", path=f"{_RUN}/events", handler=Gateway.stream_events, query=("after",)),
    Endpoint(method="POST", path=f"{_RUN}/input", handler=Gateway.send_input, scope="run", body=bodies.InputBody),
    Endpoint(method="POST", path=f"{_RUN}/approve", handler=Gateway.approve, scope="approve", body=bodies.ApproveBody),
    Endpoint(method="POST", path=f"{_RUN}/reject", handler=Gateway.reject, scope="approve", body=bodies.RejectBody),
    Endpoint(method="POST", path=f"{_RUN}/answer", handler=Gateway.answer, body=bodies.AnswerBody),
    Endpoint(method="POST", path=f"{_RUN}/settle", handler=Gateway.settle, scope="approve", body=bodies.SettleBody),
    Endpoint(method="POST", path=f"{_RUN}/pause", handler=Gateway.pause, scope="run", body=bodies.StopBody),
    Endpoint(method="POST", path=f"{_RUN}/resume", handler=Gateway.resume, scope="run", body=bodies.EmptyBody),
    Endpoint(method="POST", path=f"{_RUN}/cancel", handler=Gateway.cancel, scope="run", body=bodies.StopBody),
    Endpoint(method="POST", path=f"{_RUN}/fork", handler=Gateway.fork, scope="run", body=bodies.ForkBody),
    Endpoint(method="POST", path=f"{_RUN}/feedback", handler=Gateway.give_feedback, body=bodies.FeedbackBody),
    Endpoint(method="GET", path="/v1/agents", handler=Gateway.list_agents),
)


@attrs.frozen(eq=False)
class GatewayApp:
    """ASGI app of the gateway. Its lifespan executes runs."""

    gateway: Gateway
    """Operations on the runs."""

    app: Starlette
    """Routes of the operations."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or the lifespan."""
        await self.app(scope, receive, send)

    def lifespan(self) -> AbstractAsyncContextManager[None]:
        """Return a context that executes runs, for an application that mounts the app: `async with app.lifespan()`."""
        return self.gateway.lifespan(self)

    def close_streams(self) -> None:
        """End the event streams, since the server shuts down; their clients connect to the next one."""
        self.gateway.close_streams()


def serve(
    agents: Iterable[Agent[Any]],
    *,
    auth: Authenticate,
    store: Store | None = None,
    deps: Any = None,
    parallel: int = WORKER_PARALLEL,
) -> GatewayApp:
    """Return an ASGI app that serves agents over HTTP, for a web server or to mount in an application.

    The lifespan of the app has to run: it executes the runs. An application that mounts the app enters `app.lifespan()`
    in its own lifespan.

    Args:
        agents: The agents, each with its own name.
        auth: Returns the caller of a request: `APIKeys("keys.json")`, or a function of the host application.
        store: Store of all runs; by default the agents' own, which must be the same.
        deps: Dependencies of every run, or a function, plain or async, that takes the run and returns them.
        parallel: Runs of each agent that this process executes at once; 0 if workers execute them.

    Raises:
        MisuseError: when there is no agent, two have one name, or they have different stores.
    """
    served = [each if store is None else each.with_(store=store) for each in agents]
    by_name = {each.name: each for each in served}
    if not served or len(by_name) < len(served):
        raise MisuseError("serve() needs one agent or more, each with a name of its own: give Agent(name=...)")
    if any(each.store is not served[0].store for each in served):
        raise MisuseError("the agents have different stores: give the store of all of them as store=")
    gateway = Gateway(agents=by_name, deps=deps, parallel=parallel)
    routes = [
        Route(each.path, _EndpointHandler(gateway=gateway, auth=auth, endpoint=each), methods=[each.method])
        for each in ENDPOINTS
    ]
    routes += [
        Route("/healthz", _answer_health, methods=["GET"]),
        Route("/readyz", _ReadyHandler(gateway), methods=["GET"]),
        Route("/openapi.json", _answer_document, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        lifespan=gateway.lifespan,
        exception_handlers={HTTPException: _answer_http_error, Exception: _answer_crash},
    )
    return GatewayApp(gateway, app)


@attrs.frozen(eq=False, kw_only=True)
class _EndpointHandler:
    """ASGI app of one endpoint."""

    gateway: Gateway
    auth: Authenticate
    endpoint: Endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request  # noqa: PLC0415

        request = Request(scope, receive)
        response = await self._respond(request)
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Any:
        try:
            caller = await self._authenticate(request)
        except AgentError as error:  # such as keys that cannot be read; the text may name files
            _log.warning("a request could not be authenticated: %s", error)
            text = "credentials cannot be checked: try again"
            return _refuse(503, "unavailable", text, {"retry-after": str(RETRY_AFTER_S)})
        try:
            if caller is None:
                return _refuse(401, "unauthorized", "send a valid key as `Authorization: Bearer KEY`", _CHALLENGE)
            if self.endpoint.scope is not None and not caller.allows(self.endpoint.scope):
                return _refuse(403, "forbidden", f"this needs a key with the scope {self.endpoint.scope!r}")
            body = None if self.endpoint.body is None else await _read_body(request, self.endpoint.body)
            return await self.endpoint.handler(self.gateway, request, caller, body)
        except HTTPException as error:
            return _answer_http_error(request, error)
        except AgentError as error:
            return _answer_error(error)

    async def _authenticate(self, request: Request) -> Caller | None:
        caller = self.auth(request)
        return await caller if isinstance(caller, Awaitable) else caller


_CHALLENGE: Final = {"www-authenticate": 'Bearer realm="agentfsm"'}


async def _read_body(request: Request, kind: type[bodies.RequestBody]) -> bodies.RequestBody:
    """Read and validate the body of a request.

    Raises:
        HTTPException: when it is too large, not JSON, or does not fit.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
        parts.append(part)
    if size and content_type != "application/json":
        raise HTTPException(415, "send the body as `Content-Type: application/json`")
    try:
        return kind.model_validate(json.loads(b"".join(parts) or b"{}"))
    except ValidationError as error:
        flaws = error.errors(include_url=False, include_input=False, include_context=False)
        text = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in flaws[:10])
        raise HTTPException(422, text) from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not valid JSON") from None


# Status and code of each kind of error, the most specific first.
_STATUSES: Final = (
    (RunNotFoundError, 404, "not_found"),
    (ForbiddenError, 403, "forbidden"),
    (ConflictError, 409, "conflict"),
    (ClosedError, 503, "unavailable"),
    (StoreError, 503, "unavailable"),
    (MisuseError, 400, "invalid"),
)


def _answer_error(error: AgentError) -> Response:
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            if status == 503:  # noqa: PLR2004  the text may name hosts
                _log.warning("a request failed: %s", error)
                text = "the store does not answer: try again"
                return _refuse(status, code, text, {"retry-after": str(RETRY_AFTER_S)})
            return _refuse(status, code, str(error))
    _log.error("a request failed", exc_info=error)
    return _refuse(500, "error", "the server failed; its log has the details")


def _answer_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  Starlette's types allow any exception
    codes = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 415: "unsupported_type", 422: "invalid"}
    return _refuse(error.status_code, codes.get(error.status_code, "invalid"), error.detail, error.headers)


def _answer_crash(_request: Request, _error: Exception) -> Response:
    return _refuse(500, "error", "the server failed; its log has the details")


def _refuse(status: int, code: str, text: str, headers: Any = None) -> Response:
    return JSONResponse({"error": {"code": code, "message": text}}, status, headers)


async def _answer_health(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


@attrs.frozen(eq=False)
class _ReadyHandler:
    gateway: Gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ready = await self.gateway.is_ready()
        response = JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)
        await response(scope, receive, send)


async def _answer_document(_request: Request) -> Response:
    return JSONResponse(build_openapi())


_RUN_PARAMETER: Final = {"name": "run_id", "in": "path", "required": True, "schema": {"type": "string"}}


def build_openapi() -> dict[str, Any]:
    """Return the OpenAPI document of the gateway."""
    paths: dict[str, dict[str, Any]] = {}
    for each in ENDPOINTS:
        operation: dict[str, Any] = {
            "operationId": each.handler.__name__,
            "summary": (each.handler.__doc__ or "").strip().splitlines()[0],
            "description": f"Needs the scope `{each.scope}`." if each.scope else "Any scope is enough.",
            "parameters": [
                *([_RUN_PARAMETER] if "{" in each.path else []),
                *({"name": name, "in": "query", "schema": {"type": "string"}} for name in each.query),
            ],
            "responses": {"2XX": {"description": "Success"}, "4XX": {"$ref": "#/components/responses/Error"}},
        }
        if each.body is not None:
            schema = each.body.model_json_schema()
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
            "responses": {"Error": {"description": "Error", "content": {"application/json": {"schema": error}}}},
        },
    }
