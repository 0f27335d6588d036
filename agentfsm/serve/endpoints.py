"""Endpoints of the gateway: an operation with its path, its scope and its body, and how its errors are answered."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from agentfsm.core.errors import AgentError, first_error
from agentfsm.core.value import Value
from agentfsm.serve.bodies import RequestBody
from agentfsm.serve.errors import STORE_RETRY_S, explain_error
from agentfsm.serve.event_stream import END_TIMEOUT_S, Ending, RunEventStream
from agentfsm.serve.gateway import Gateway
from agentfsm.serve.stream_tokens import read_stream_token

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from starlette.requests import Request

    from agentfsm._lib.web.http_guard import Message, Receive, Scope, Send
    from agentfsm.serve.access import Authenticate, Caller

_log = logging.getLogger("agentfsm.serve")

# Maximum size of a request's body in bytes.
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
# Seconds between two checks of the credential of a request that is still being answered, such as an event stream.
RECHECK_S: Final = 5.0
# Seconds that such a check may take; the request ends with it. So a key that was removed is refused after 9 s at most.
RECHECK_TIMEOUT_S: Final = 4.0


def answer_refusal(status: int, code: str, text: str, headers: Any = None) -> Response:
    """Return the answer to a request that is refused."""
    return JSONResponse({"error": {"code": code, "message": text}}, status, headers)


@attrs.frozen(kw_only=True)
class Endpoint(Value):
    """One operation: its method and path, the scope that it needs, and its body."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    """Takes the gateway, the request, its caller and its body, and returns the response, or another ASGI app. The first
    line of its docstring is the summary in the OpenAPI document.
    """

    scope: str | None = None
    """Scope that the caller needs; None if any caller may, of the runs that it sees."""

    body: type[RequestBody] | None = None
    """None: the operation has no body, or reads it itself."""

    query: tuple[str, ...] = ()
    """Names of the parameters in the query."""

    takes_token: bool = False
    """Whether a token of the run, `token` in the query, is enough in place of a key."""

    credential: str = "send a valid key as `Authorization: Bearer KEY`"
    """Text of the refusal of a client that is not authenticated: what to send."""

    refuse: Callable[[int, str, str, Any], Response] = answer_refusal
    """Returns the answer to a refused request from its status, code, text and headers, for clients that expect another
    form.
    """


@attrs.frozen(kw_only=True)
class RouteGroup(Value):
    """Operations that are served together, such as those of one protocol."""

    name: str
    """Name of the group: the tag of its operations in the OpenAPI document."""

    endpoints: tuple[Endpoint, ...] = ()
    """Operations with a caller, which is authenticated before they begin."""

    build_routes: Callable[[Gateway, Authenticate], Sequence[BaseRoute]] | None = None
    """Returns routes that check their callers themselves, such as static files and mounted apps. None: no such routes.
    """

    background: Callable[[Gateway], Coroutine[Any, Any, None]] | None = None
    """Task that runs as long as the server, such as the delivery of webhooks. None: no task."""

    def list_routes(self, gateway: Gateway, auth: Authenticate) -> list[BaseRoute]:
        """Return the routes of the group."""
        routes: list[BaseRoute] = [
            Route(each.path, EndpointHandler(gateway=gateway, auth=auth, endpoint=each), methods=[each.method])
            for each in self.endpoints
        ]
        return routes + list(self.build_routes(gateway, auth) if self.build_routes is not None else ())


@attrs.frozen(eq=False, kw_only=True)
class EndpointHandler:
    """ASGI app of one endpoint."""

    gateway: Gateway
    auth: Authenticate
    endpoint: Endpoint
    rechecks: bool = True
    """Whether the credential is checked again while a request is being answered, which ends if it is not valid any
    more, or has other rights. Not if it is a signature of this one request.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        from starlette.requests import Request  # noqa: PLC0415

        request, answer = Request(scope, receive), _Answer(send)
        try:
            caller = await self._authenticate(request)
        except AgentError as error:  # such as keys that cannot be read; the text may name files
            _log.warning("a request could not be authenticated: %s", error)
            text = "credentials cannot be checked: try again"
            refusal = self.endpoint.refuse(503, "unavailable", text, {"retry-after": str(STORE_RETRY_S)})
            return await self._send(refusal, scope, receive, send)
        if caller is None:
            return await self._send(self._refuse_credential(), scope, receive, send)
        try:
            async with anyio.create_task_group() as tasks:
                if self.rechecks:
                    tasks.start_soon(self._watch_credential, request, caller, answer, tasks.cancel_scope)
                with ExitStack() as places:
                    answer.response = await self._respond(request, caller, places)
                    await self._send(answer.response, scope, receive, answer.send)
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        if answer.is_revoked and not answer.is_complete:
            with anyio.move_on_after(END_TIMEOUT_S, shield=True):
                if answer.has_begun:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                else:
                    await self._send(self._refuse_credential(), scope, receive, send)
        return None

    async def _send(self, response: Any, scope: Scope, receive: Receive, send: Send) -> None:
        self.gateway.counts.count_request(self.endpoint.handler.__name__, getattr(response, "status_code", 200))
        await response(scope, receive, send)

    def _refuse_credential(self) -> Response:
        return self.endpoint.refuse(401, "unauthorized", self.endpoint.credential, _CHALLENGE)

    async def _watch_credential(
        self, request: Request, caller: Caller, answer: _Answer, scope: anyio.CancelScope
    ) -> None:
        """End the answer once the credential is not valid any more, has other rights, or cannot be checked."""
        now: Caller | None = caller
        while now is not None and now.rights == caller.rights:
            await anyio.sleep(RECHECK_S)
            now = None
            try:
                with anyio.move_on_after(RECHECK_TIMEOUT_S):
                    now = await self._authenticate(request)
            except Exception as error:  # noqa: BLE001  it may be code of the application; the client tries again
                _log.warning("a request is ended, because its credential could not be checked again: %s", error)
        answer.is_revoked = True
        if isinstance(answer.response, RunEventStream):
            answer.response.end(Ending.REVOKED)
        else:
            scope.cancel()

    async def _respond(self, request: Request, caller: Caller, places: ExitStack) -> Any:
        try:
            places.enter_context(self.gateway.admission.hold_request(caller))
            await self.gateway.admission.admit_request(caller)  # refused ones count as well
            if self.endpoint.scope is not None and not caller.allows(self.endpoint.scope):
                return self.endpoint.refuse(
                    403, "forbidden", f"this needs a key with the scope {self.endpoint.scope!r}", None
                )
            body = None if self.endpoint.body is None else await _read_body(request, self.endpoint.body)
            return await self.endpoint.handler(self.gateway, request, caller, body)
        except HTTPException as error:
            return answer_http_error(error, self.endpoint.refuse)
        except AgentError as error:
            refusal = explain_error(error)
            return self.endpoint.refuse(refusal.status, refusal.code, refusal.message, refusal.headers)

    async def _authenticate(self, request: Request) -> Caller | None:
        if self.endpoint.takes_token and "token" in request.query_params:
            return await read_stream_token(self.gateway, request)
        caller = self.auth(request)
        return await caller if isinstance(caller, Awaitable) else caller


@attrs.define(eq=False)
class _Answer:
    """The answer to a request, and the parts of it that were sent."""

    _send: Send
    response: Any = None
    """The ASGI app that answers; None until the handler has returned it."""

    is_revoked: bool = False
    has_begun: bool = False
    is_complete: bool = False

    async def send(self, message: Message) -> None:
        self.has_begun = True
        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)


_CHALLENGE: Final = {"www-authenticate": 'Bearer realm="agentfsm"'}


async def read_content(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        HTTPException: when it is too large.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
        parts.append(part)
    return b"".join(parts)


async def _read_body(request: Request, kind: type[RequestBody]) -> RequestBody:
    """Read and validate the body of a request.

    Raises:
        HTTPException: when it is too large, not JSON, or does not fit.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    content = await read_content(request)
    if content and content_type != "application/json":
        raise HTTPException(415, "send the body as `Content-Type: application/json`")
    try:
        return kind.model_validate(json.loads(content or b"{}"))
    except ValidationError as error:
        flaws = error.errors(include_url=False, include_input=False, include_context=False)
        raise HTTPException(422, "; ".join(_describe_flaw(kind, each) for each in flaws[:10])) from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not valid JSON") from None


def _describe_flaw(kind: type[RequestBody], flaw: ErrorDetails) -> str:
    """Return the place of a flaw and what is wrong there; of a missing field also what it is."""
    place = ".".join(map(str, flaw["loc"]))
    field = kind.model_fields.get(place) if flaw["type"] == "missing" else None
    about = f" ({field.description})" if field is not None and field.description else ""
    return f"{place or 'body'}: {flaw['msg']}{about}"


def answer_http_error(
    error: HTTPException, refuse: Callable[[int, str, str, Any], Response] = answer_refusal
) -> Response:
    """Return the answer to a request that does not fit its endpoint, or has none."""
    codes = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 415: "unsupported_type", 422: "invalid"}
    return refuse(error.status_code, codes.get(error.status_code, "invalid"), error.detail, error.headers)
