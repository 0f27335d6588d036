"""Make a tool of each operation of an OpenAPI document, and send its requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urljoin

import attrs
import httpx2

from agentfsm._public_network import PublicAddressTransport, check_url
from agentfsm.core.errors import MisuseError, ToolError
from agentfsm.core.tool_traits import matches_tool
from agentfsm.core.value import Value
from agentfsm.openapi.document import Document
from agentfsm.openapi.operations import READ_ONLY_METHODS, Operation, find_operations
from agentfsm.tools.label_rules import LabelRules, as_label_rules, find_declarations
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.tool import Tool, make_tool

if TYPE_CHECKING:
    import ssl

Auth: TypeAlias = "str | tuple[str, str] | httpx2.Auth"

# Largest response, bytes: a result is text for a model, which reads some thousand tokens of it.
_MAX_BYTES: Final = 10_000_000
# Characters of a refused response that the model reads.
_ERROR_CHARS: Final = 2_000
_FIRST_ERROR: Final = 400
_FIRST_REDIRECT: Final = 300


class APIError(ToolError):
    """An API refused a request of one of its tools, or sent a response that cannot be read."""

    def __init__(self, message: str, *, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the response."""
        self.headers = headers
        """Headers of the response; the engine reads `Retry-After`."""


def tools_from_openapi(
    spec: Mapping[str, Any] | str | Path,
    *,
    base_url: str | None = None,
    auth: Auth | None = None,
    headers: Mapping[str, str] | None = None,
    include: Collection[str] | Callable[[Operation], bool] | None = None,
    allow_private: bool = False,
    client: httpx2.AsyncClient | None = None,
    trusted: bool = False,
    labels: LabelRules | None = None,
) -> list[Tool[..., Any]]:
    """Make a tool of each operation of an API that an OpenAPI 3.0 or 3.1 document describes.

    A GET, HEAD, OPTIONS or TRACE is read-only. Of the other operations the worst is assumed: a call runs alone, is not
    repeated without asking, and has the labels `sends_out` and `irreversible`, so that guards ask about it. Their
    requests carry the call's idempotency key as the header `Idempotency-Key`. Redirects are not followed, since they
    could lead the credentials elsewhere.

    Args:
        spec: The parsed document, or the path of a JSON file.
        base_url: URL that the paths are appended to. Default: the first of the document's `servers`.
        auth: A bearer token, a pair of user and password, or an `httpx2.Auth`.
        headers: Further headers of each request, for example an API key. The model does not see them.
        include: The operations to use, as `operationId`, tool name or "GET /pets", or a function that selects them.
            Default: all that a tool can be made of.
        allow_private: Whether the API may have a private address or, on another machine, use plain HTTP. A URL that
            names this machine is always allowed.
        client: A client of your own, for example with a proxy or certificates; its requests are not checked for
            private addresses. Default: a client per call.
        trusted: Whether no stranger can write what the API returns. Otherwise the results have the label `untrusted`.
        labels: Declarations by operation, which have the last word: `{"POST /search": {"read_only": True}}`. The names
            are those of `include`, or globs such as "DELETE *"; of several rules that match, the last one counts.

    Raises:
        MisuseError: if the document, the URL, `include` or `labels` is wrong, or an included operation cannot be a
            tool.
    """
    rules = as_label_rules(labels or {})
    document = Document.load(spec)
    url = _find_base_url(document, base_url)
    if client is None:
        check_url(url, allow_private=allow_private, role="an API")
    api = _API(
        url=url,
        auth=_BearerAuth(auth) if isinstance(auth, str) else auth,
        headers=dict(headers or {}),
        allow_private=allow_private,
        client=client,
        trusted=trusted,
    )
    operations = list(find_operations(document))
    for glob in rules:
        if not any(matches_tool(glob, name) for each in operations for name in each.ids):
            names = ", ".join(sorted(each.name for each in operations))
            raise MisuseError(f"labels= has a rule on {glob!r}, which matches no operation of the document: {names}")
    return [_make_tool(api, document, each, rules) for each in _select(operations, include)]


def _find_base_url(document: Document, base_url: str | None) -> str:
    if base_url is not None:
        if not isinstance(base_url, str):
            raise MisuseError(
                f"tools_from_openapi(base_url={base_url!r}): give a URL, for example 'https://api.example.org'"
            )
        return base_url
    server: Mapping[str, Any] = next(iter(document.content.get("servers") or ()), {})
    url = str(server.get("url", ""))
    for name, variable in (server.get("variables") or {}).items():
        url = url.replace(f"{{{name}}}", str(variable.get("default", "")))
    if not url.startswith(("http://", "https://")):
        raise MisuseError(
            f"the OpenAPI document names no server with a full URL (found {url!r}): give base_url='https://...'"
        )
    return url


def _select(
    operations: list[Operation], include: Collection[str] | Callable[[Operation], bool] | None
) -> list[Operation]:
    if include is None:
        chosen = [each for each in operations if not each.unsupported]
    elif callable(include):
        chosen = [each for each in operations if include(each)]
    elif isinstance(include, str):
        raise MisuseError(f"tools_from_openapi(include={include!r}): give a collection: [{include!r}]")
    else:
        known = {name for each in operations for name in each.ids}
        if unknown := sorted(set(include) - known):
            names = ", ".join(sorted(each.name for each in operations))
            raise MisuseError(f"the OpenAPI document has no operation {unknown[0]!r}; it has {names}")
        chosen = [each for each in operations if each.ids & set(include)]
    for each in chosen:
        if each.unsupported:
            raise MisuseError(
                f"no tool can be made of {each.method.upper()} {each.path}: {each.unsupported}; leave it out"
            )
    return chosen


def _make_tool(api: _API, document: Document, operation: Operation, rules: LabelRules) -> Tool[..., Any]:
    async def call(ctx: RunContext[Any], **arguments: Any) -> Any:
        return await api.send(operation, arguments, key=ctx.idempotency_key)

    said = find_declarations(rules, operation.ids)
    read_only = said.get("read_only", operation.method in READ_ONLY_METHODS and not said.get("irreversible"))
    if read_only:  # an interrupted call runs again
        said.pop("on_unknown", None)
    labels = {
        "read_only": read_only,
        "reads_untrusted": not api.trusted,
        "sends_out": not read_only,
        "irreversible": not read_only,
    }
    return make_tool(
        call,
        name=operation.name,
        description=operation.description,
        parameters=operation.build_schema(document),
        tags=operation.tags,
        **{**labels, **said},
    )


@attrs.frozen
class _BearerAuth(httpx2.Auth):
    """Authentication by a token, which does not appear in a `repr`."""

    token: str = attrs.field(repr=False)

    def auth_flow(self, request: httpx2.Request) -> Any:
        request.headers["Authorization"] = f"Bearer {self.token}"
        yield request


@attrs.frozen(kw_only=True)
class _API(Value):
    """The server of an OpenAPI document."""

    url: str
    """URL that the paths are appended to."""

    auth: tuple[str, str] | httpx2.Auth | None = attrs.field(repr=False)
    """Credentials for each request."""

    headers: Mapping[str, str] = attrs.field(repr=False)
    """Further headers of each request."""

    allow_private: bool
    """Whether the server may have a private address."""

    client: httpx2.AsyncClient | None
    """Client of the user; None: a client per call."""

    trusted: bool
    """Whether no stranger can write what the server returns."""

    async def send(self, operation: Operation, arguments: Mapping[str, Any], *, key: str) -> Any:
        """Send a request of the operation, and return the content of the response."""
        if self.client is not None:
            return await self._send(self.client, operation, arguments, key)
        transport = None if self.allow_private else PublicAddressTransport(self.url, error=ToolError)
        # The time-out of the call applies, so the client has none of its own.
        async with httpx2.AsyncClient(transport=transport, verify=_ssl_context(), timeout=None) as client:
            return await self._send(client, operation, arguments, key)

    async def _send(
        self, client: httpx2.AsyncClient, operation: Operation, arguments: Mapping[str, Any], key: str
    ) -> Any:
        rendered: dict[str, list[tuple[str, str]]] = {"path": [], "query": [], "header": [], "cookie": []}
        for parameter in operation.parameters:
            if parameter.argument in arguments:
                rendered[parameter.place] += parameter.render(arguments[parameter.argument])
        body = operation.body
        content = body.render(arguments[body.argument]) if body and body.argument in arguments else {}
        headers = {
            "Accept": "application/json, text/*;q=0.9, */*;q=0.5",
            **({} if operation.method in READ_ONLY_METHODS else {"Idempotency-Key": key}),
            **dict(rendered["header"]),
            **(
                {"Cookie": "; ".join(f"{name}={text}" for name, text in rendered["cookie"])}
                if rendered["cookie"]
                else {}
            ),
            **content.pop("headers", {}),
            **self.headers,
        }
        url = self.url.rstrip("/") + operation.render_path(dict(rendered["path"]))
        auth = httpx2.USE_CLIENT_DEFAULT if self.auth is None else self.auth
        async with client.stream(
            operation.method.upper(),
            url,
            params=tuple(rendered["query"]),
            headers=headers,
            auth=auth,
            follow_redirects=False,
            **content,
        ) as response:
            return _read_response(response, await _read_body(response))


@cache
def _ssl_context() -> ssl.SSLContext:
    return httpx2.create_ssl_context()


async def _read_body(response: httpx2.Response) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES:
            raise APIError(
                f"the response has more than {_MAX_BYTES:,} bytes; ask for less, for example by a filter",
                status=response.status_code,
                headers=response.headers,
            )
    return b"".join(parts)


def _read_response(response: httpx2.Response, body: bytes) -> Any:
    text = body.decode(response.charset_encoding or "utf-8", errors="replace")
    status = f"{response.status_code} {response.reason_phrase}".strip()
    if response.status_code >= _FIRST_ERROR:
        shown = text if len(text) <= _ERROR_CHARS else f"{text[:_ERROR_CHARS]}... ({len(text):,} characters)"
        raise APIError(f"{status}: {shown}" if shown else status, status=response.status_code, headers=response.headers)
    if response.status_code >= _FIRST_REDIRECT:
        target = urljoin(str(response.url), response.headers.get("location", ""))
        raise APIError(
            f"{status}: the API redirects to {target}, which is not followed",
            status=response.status_code,
            headers=response.headers,
        )
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not body:
        return status
    if media_type == "application/json" or media_type.endswith("+json"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    if media_type.startswith("text/") or media_type in {"application/xml", "application/javascript", ""}:
        return text
    return f"{status}: {len(body):,} bytes of {media_type}, which are not shown"
