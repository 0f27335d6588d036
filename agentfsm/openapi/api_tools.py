"""Make a tool of each operation of an OpenAPI document, and send its requests."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urljoin

import attrs
import httpx2

from agentfsm._lib.public_network import PublicAddressTransport, check_url, matches_host, ssl_context, to_hosts
from agentfsm.core.errors import MisuseError, ToolError
from agentfsm.core.labels import matches_tool
from agentfsm.core.shortening import shorten
from agentfsm.core.value import Value
from agentfsm.logins import APIKey, Login, OAuth
from agentfsm.logins.login import to_login
from agentfsm.openapi.document import Document
from agentfsm.openapi.operations import READ_ONLY_METHODS, Operation, find_operations, find_server
from agentfsm.tools.label_rules import LabelRules, as_label_rules, find_declarations
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.tool import Tool, make_tool

Auth: TypeAlias = "str | tuple[str, str] | httpx2.Auth"

# Operations that an error names.
_MAX_NAMED: Final = 50
# Largest response, bytes: a result is text for a model, which reads some thousand tokens of it.
_MAX_BYTES: Final = 10_000_000
# Characters of a refused response that the model reads.
_ERROR_CHARS: Final = 2_000
_FIRST_ERROR: Final = 400
_FIRST_REDIRECT: Final = 300

# Headers that each client of httpx has.
_HARMLESS_HEADERS: Final = frozenset({"accept", "accept-encoding", "connection", "user-agent"})

_log = logging.getLogger("agentfsm.openapi")


class APIError(ToolError):
    """An API refused a request of one of its tools, or sent a response that cannot be read."""

    def __init__(self, message: str, *, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the response."""
        self.headers = headers
        """Headers of the response; the engine reads `Retry-After`."""


class APITools(list[Tool[..., Any]]):
    """The tools of an API, and the operations that no tool was made of."""

    def __init__(self, tools: Iterable[Tool[..., Any]], skipped: Mapping[str, str]) -> None:
        super().__init__(tools)
        self.skipped = skipped
        """Reasons why operations are left out, by the name that the tool would have."""


def tools_from_openapi(
    spec: Mapping[str, Any] | str | Path,
    *,
    base_url: str | None = None,
    auth: Auth | None = None,
    headers: Mapping[str, str] | None = None,
    hosts: Iterable[str] = (),
    include: Collection[str] | Callable[[Operation], bool] | None = None,
    allow_private: bool = False,
    client: httpx2.AsyncClient | None = None,
    trusted: bool = False,
    labels: LabelRules | None = None,
    login: Login | OAuth | APIKey | None = None,
) -> APITools:
    """Make a tool of each operation of an API that an OpenAPI document of version 3.0, 3.1 or 3.2 describes.

    A GET, HEAD, OPTIONS, TRACE or QUERY is read-only. Of the other operations the worst is assumed: a call runs alone,
    is not repeated without asking, and has the labels `sends_out` and `irreversible`, so that guards ask about it.
    Their requests carry the call's idempotency key as the header `Idempotency-Key`. Redirects are not followed, since
    they could lead the credentials elsewhere.

    An operation that no tool can be made of is left out, with the reason in `skipped` of the result.

    Args:
        spec: The parsed document, or the path of a file, in YAML if it ends in .yaml or .yml (extra `openapi`).
        base_url: URL that the paths are appended to, in place of the document's `servers`, also where a path or an
            operation repeats one of these. Other servers that it names for itself are used as they are. Default: the
            first of `servers`.
        auth: A bearer token, a pair of user and password, or an `httpx2.Auth`.
        headers: Further headers of each request, for example an API key. The model does not see them.
        hosts: Further hosts that may get these credentials, such as "upload.example.org" or "*.example.org". Default:
            only the hosts of `base_url`, or else of the document's own `servers`. Operations on other hosts are left
            out, unless there are no credentials. A `client` with a login, headers, cookies or parameters has some.
        include: The operations to use, as `operationId`, tool name or "GET /pets", or a function that selects them.
            Default: all that a tool can be made of.
        allow_private: Whether the API may have a private address or, on another machine, use plain HTTP. A URL that
            names this machine is always allowed.
        client: A client of your own, for example with a proxy or certificates; its requests are not checked for
            private addresses. Default: a client per call.
        trusted: Whether the API is the user's own, so that no stranger can write what it returns or read what it is
            asked. Otherwise the results have the label `untrusted`, and `no_leaks()` looks at the arguments of each
            request, unless `labels` says of an operation that it does not send out.
        labels: Declarations by operation, which have the last word: `{"POST /search": {"read_only": True}}`. The names
            are those of `include`, or globs such as "DELETE *"; of several rules that match, the last one counts.
        login: How each user of a run logs in to the API: `OAuth(...)` or `APIKey(...)`. Requests carry the token of the
            run's user; a call of a user without one waits. It replaces `auth`, and is sent to no further `hosts`.

    Raises:
        MisuseError: if the document, the URL, `hosts`, `include` or `labels` is wrong, if an operation that `include`
            names cannot be a tool, or if none can.
        MissingExtraError: if the document is in YAML, and the extra `openapi` is not installed.
    """
    rules = as_label_rules(labels or {})
    document = Document.load(spec)
    servers = _Servers.build(document, base_url, to_hosts(hosts, "tools_from_openapi()"))
    if login is not None and (auth is not None or servers.hosts):
        raise MisuseError("tools_from_openapi(login=...) is for each user and one server: leave out auth= and hosts=")
    if client is None:
        check_url(servers.url, allow_private=allow_private, role="an API")
    api = _API(
        auth=_BearerAuth(auth) if isinstance(auth, str) else auth,
        headers=dict(headers or {}),
        allow_private=allow_private,
        client=client,
        trusted=trusted,
        login=None if login is None else to_login(login, servers.url, allow_private=allow_private),
    )
    operations = list(find_operations(document))
    for glob in rules:
        if not any(matches_tool(glob, name) for each in operations for name in each.ids):
            names = _list_names(operations)
            raise MisuseError(f"labels= has a rule on {glob!r}, which matches no operation of the document: {names}")
    chosen = _select(operations, include)
    has_credentials = api.has_credentials
    tools: list[Tool[..., Any]] = []
    skipped: dict[str, str] = {}
    for each in chosen:
        try:
            if each.unsupported:
                raise MisuseError(each.unsupported)  # noqa: TRY301  one place for all reasons
            url = servers.find_url(each, has_credentials=has_credentials, allow_private=allow_private)
            if client is None:
                check_url(url, allow_private=allow_private, role="an API")
            tools.append(_make_tool(api, url, document, each, rules))
        except MisuseError as error:
            if include is not None and not callable(include):
                raise MisuseError(
                    f"no tool can be made of {f'{each.method.upper()} {each.path}'.strip()}: {error}; leave it out"
                ) from error
            skipped[each.name] = str(error)
    if skipped and not tools:
        name, reason = next(iter(skipped.items()))
        raise MisuseError(f"no tool can be made of the {len(skipped)} operations; of {name} because {reason}")
    if skipped:
        _log.warning(
            "%d of %d operations are left out, see .skipped: %s", len(skipped), len(chosen), ", ".join(skipped)
        )
    return APITools(tools, skipped)


def _list_names(operations: Iterable[Operation]) -> str:
    names = sorted(each.name for each in operations)
    return ", ".join(names[:_MAX_NAMED]) + (f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")


def _select(
    operations: list[Operation], include: Collection[str] | Callable[[Operation], bool] | None
) -> list[Operation]:
    if include is None:
        return operations
    if callable(include):
        return [each for each in operations if include(each)]
    if isinstance(include, str):
        raise MisuseError(f"tools_from_openapi(include={include!r}): give a collection: [{include!r}]")
    known = {name for each in operations for name in each.ids}
    if unknown := sorted(set(include) - known):
        raise MisuseError(f"the OpenAPI document has no operation {unknown[0]!r}; it has {_list_names(operations)}")
    return [each for each in operations if each.ids & set(include)]


@attrs.frozen(kw_only=True)
class _Servers(Value):
    """The servers of a document, and the hosts that may get the credentials."""

    url: str
    """URL that paths are appended to."""

    replaced: tuple[str, ...]
    """URLs of the document in whose place it is used."""

    origins: frozenset[tuple[str, str, int | None]]
    """Schemes, hosts and ports that get credentials."""

    hosts: tuple[str, ...]
    """Further hosts that get credentials."""

    @classmethod
    def build(cls, document: Document, base_url: str | None, hosts: tuple[str, ...]) -> _Servers:
        """Return the servers of a document, or that of the user in their place."""
        servers = document.content.get("servers")
        declared = [find_server([each]) for each in servers] if isinstance(servers, list | tuple) else []
        if base_url is not None and not isinstance(base_url, str):
            raise MisuseError(
                f"tools_from_openapi(base_url={base_url!r}): give a URL, for example 'https://api.example.org'"
            )
        url = base_url if base_url is not None else next(iter(declared), "")
        if base_url is None and not url.startswith(("http://", "https://")):
            raise MisuseError(
                f"the OpenAPI document names no server with a full URL (found {url!r}): give base_url='https://...'"
            )
        if "?" in url or "#" in url:
            raise MisuseError(f"{url!r} is the URL that paths are appended to: give it without a query and a fragment")
        known = [url] if base_url is not None else [each for each in declared if each.startswith(("http:", "https:"))]
        replaced = () if base_url is None else tuple(declared)
        return cls(url=url, replaced=replaced, origins=frozenset(map(_find_origin, known)), hosts=hosts)

    def find_url(self, operation: Operation, *, has_credentials: bool, allow_private: bool) -> str:
        """Return the URL that the path of an operation is appended to.

        Raises:
            MisuseError: if the credentials must not be sent there.
        """
        if not operation.server or operation.server in self.replaced:
            return self.url
        try:
            url = urljoin(f"{self.url.rstrip('/')}/", operation.server)
        except ValueError as error:
            raise MisuseError(f"the document sends it to {operation.server!r}, which is not a URL ({error})") from error
        scheme, host, port = origin = _find_origin(url)
        if has_credentials and origin not in self.origins:
            if not any(matches_host(each, host, port or (80 if scheme == "http" else 443)) for each in self.hosts):
                entry = host if port is None else f"{host}:{port}"
                raise MisuseError(
                    f"the document sends it to {url}, and the credentials are for other hosts: to send them there as "
                    f"well, give hosts=[{entry!r}]"
                )
            check_url(url, allow_private=allow_private, role="an API")
        return url


def _find_origin(url: str) -> tuple[str, str, int | None]:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise MisuseError(f"{url!r} is not a URL of an API ({error}): use one such as https://example.org") from error
    return parsed.scheme, parsed.host, parsed.port


def _make_tool(api: _API, url: str, document: Document, operation: Operation, rules: LabelRules) -> Tool[..., Any]:
    async def call(ctx: RunContext[Any], **arguments: Any) -> Any:
        if api.login is None:
            return await api.send(url, operation, arguments, key=ctx.idempotency_key)
        auth = api.login.auth(ctx)
        try:
            return auth.mask(await api.send(url, operation, arguments, key=ctx.idempotency_key, auth=auth))
        except APIError as error:
            raise APIError(auth.mask(str(error)), status=error.status, headers=error.headers) from None

    said = find_declarations(rules, operation.ids)
    read_only = said.get("read_only", operation.method in READ_ONLY_METHODS and not said.get("irreversible"))
    if read_only:  # an interrupted call runs again
        said.pop("on_unknown", None)
    labels = {
        "read_only": read_only,
        "reads_untrusted": not api.trusted,
        "sends_out": not read_only,
        "sends_arguments": not api.trusted and said.get("sends_out") is not False,
        "irreversible": not read_only,
    }
    return make_tool(
        call,
        name=operation.name,
        description=operation.description,
        parameters=operation.build_schema(document),
        tags=operation.tags,
        login=api.login,
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
    """The access to an API."""

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

    login: Login | None = None
    """Logins of the users of runs. None: all requests have the same credentials."""

    @property
    def has_credentials(self) -> bool:
        """Whether requests carry anything that the server of another host must not learn."""
        own = self.client
        return bool(self.auth or self.headers or self.login) or (
            own is not None and bool(own.auth or own.params or own.cookies or {*own.headers} - _HARMLESS_HEADERS)
        )

    async def send(
        self,
        url: str,
        operation: Operation,
        arguments: Mapping[str, Any],
        *,
        key: str,
        auth: httpx2.Auth | None = None,
    ) -> Any:
        """Send a request of the operation to a server, and return the content of the response."""
        if self.client is not None:
            return await self._send(self.client, url, operation, arguments, key, login=auth)
        transport = None if self.allow_private else PublicAddressTransport(url, error=ToolError)
        # The time-out of the call applies, so the client has none of its own.
        async with httpx2.AsyncClient(transport=transport, verify=ssl_context(), timeout=None) as client:
            return await self._send(client, url, operation, arguments, key, login=auth)

    async def _send(
        self,
        client: httpx2.AsyncClient,
        server: str,
        operation: Operation,
        arguments: Mapping[str, Any],
        key: str,
        *,
        login: httpx2.Auth | None,
    ) -> Any:
        rendered: dict[str, list[tuple[str, str]]] = {"path": [], "query": [], "header": [], "cookie": []}
        for parameter in operation.parameters:
            if parameter.argument in arguments:
                rendered[parameter.place] += parameter.render(arguments[parameter.argument])
        body = operation.body
        content = body.render(arguments[body.argument]) if body and body.argument in arguments else {}
        headers = httpx2.Headers({"Accept": "application/json, text/*;q=0.9, */*;q=0.5"})
        if operation.method not in READ_ONLY_METHODS:
            headers["Idempotency-Key"] = key
        headers.update(dict(rendered["header"]))
        if rendered["cookie"]:
            headers["Cookie"] = "; ".join(f"{name}={text}" for name, text in rendered["cookie"])
        headers.update(content.pop("headers", {}))
        headers.update(self.headers)
        # The client's own parameters have the last word, like the headers. They would replace the query of a URL.
        pairs = [(name, text) for name, text in rendered["query"] if unquote(name) not in client.params]
        path, _, query = operation.render_url(dict(rendered["path"]), pairs).partition("?")
        request = client.build_request(operation.method.upper(), server.rstrip("/") + path, headers=headers, **content)
        if query:
            own = request.url.query.decode()
            request.url = request.url.copy_with(query="&".join(filter(None, [query, own])).encode())
        auth = login or (httpx2.USE_CLIENT_DEFAULT if self.auth is None else self.auth)
        response = await client.send(request, auth=auth, follow_redirects=False, stream=True)
        try:
            return _read_response(response, await _read_body(response))
        finally:
            await response.aclose()


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
        shown = shorten(text, _ERROR_CHARS, with_length=True)
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
