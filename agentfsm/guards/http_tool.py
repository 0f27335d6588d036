"""A tool with which a model sends HTTP requests to the hosts of a list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import httpx2

from agentfsm._lib.public_network import is_local_host
from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import BOOL, COUNT, SECONDS
from agentfsm.guards.egress_client import MAX_BYTES, EgressError, open_http_client, to_allowed_hosts
from agentfsm.logins import APIKey, Login, OAuth
from agentfsm.logins.login import to_login
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.tool import Tool, make_tool

HTTP_REQUEST: Final = "http_request"
# Methods that change nothing, by RFC 9110, 9.2.1.
SAFE_METHODS: Final = ("GET", "HEAD")
METHODS: Final = (*SAFE_METHODS, "POST", "PUT", "PATCH", "DELETE")
# Redirects that one call follows.
MAX_REDIRECTS: Final = 5
_TEXT_TYPES: Final = (
    "application/json",
    "application/xml",
    "application/javascript",
    "application/yaml",
    "application/x-www-form-urlencoded",
)
_DEFAULT_TYPE: Final = "application/json"


def build_http_tool(
    hosts: Iterable[str],
    *,
    methods: Iterable[str] = SAFE_METHODS,
    name: str = HTTP_REQUEST,
    max_bytes: int = MAX_BYTES,
    seconds: float = 20.0,
    trusted: bool = False,
    irreversible: bool = True,
    login: Login | OAuth | APIKey | None = None,
) -> Tool[..., Any]:
    """Return a tool that sends HTTP requests to the hosts of a list, and returns status, content type and text.

    It has the label `sends_out`, because a URL can carry data, and `untrusted`, unless the hosts are `trusted`. With
    the methods GET and HEAD only, requests have no body, and the tool is read-only. Otherwise a call runs alone, is
    not repeated without asking, and carries its idempotency key as the header `Idempotency-Key`. Build one tool that
    reads and another that writes, so that each has its own labels.

    Redirects of GET and HEAD are followed, up to 5; each of their requests is checked like the first. Others are
    returned with their location. The model sets no headers but the content type.

    Args:
        hosts: Hosts that may be reached, as for `open_http_client`.
        methods: Methods that the model may use: GET, HEAD, POST, PUT, PATCH, DELETE.
        name: Name of the tool.
        max_bytes: Maximum size of the body of a response, bytes, 1 or more.
        seconds: Seconds for a call, redirects included, above 0.
        trusted: Whether no stranger can write what the hosts return.
        irreversible: Whether requests with other methods than GET and HEAD cannot be undone: the label
            `irreversible`. Without such methods it has no effect.
        login: How each user of a run logs in to the host, which must be a single one: `OAuth(...)` or `APIKey(...)`.
            Requests carry the token of the run's user; a call of a user without one waits. Redirects are then not
            followed. None: no login.

    Raises:
        MisuseError: if an argument is invalid.
    """
    allowed = to_allowed_hosts(hosts, name)
    usable = _to_methods(methods)
    COUNT.check("build_http_tool", "max_bytes", max_bytes)
    SECONDS.check("build_http_tool", "seconds", seconds)
    BOOL.check("build_http_tool", "trusted", trusted)
    BOOL.check("build_http_tool", "irreversible", irreversible)
    is_safe = set(usable) <= set(SAFE_METHODS)
    own = None if login is None else to_login(login, _find_server(allowed))
    reached = "any public host" if "*" in allowed else ", ".join(allowed)

    async def http_request(ctx: RunContext[Any], url: str, method: str = usable[0], **content: str) -> dict[str, Any]:
        headers = {}
        if method not in SAFE_METHODS:
            headers["Idempotency-Key"] = ctx.idempotency_key
        if content.get("body"):
            headers["Content-Type"] = content.get("content_type") or _DEFAULT_TYPE
        try:
            auth = None if own is None else own.auth(ctx)
            async with open_http_client(
                allowed, headers=headers, auth=auth, max_bytes=max_bytes, timeout_s=seconds
            ) as client:
                client.max_redirects = MAX_REDIRECTS
                with anyio.fail_after(seconds):
                    response = await client.request(
                        method,
                        url,
                        content=content["body"].encode() if content.get("body") else None,
                        follow_redirects=method in SAFE_METHODS and own is None,
                    )
        except TimeoutError:
            raise EgressError(f"the response was not complete within {seconds:g} seconds") from None
        except httpx2.TooManyRedirects:
            raise EgressError(f"there were more than {MAX_REDIRECTS} redirects") from None
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, UnicodeError) as error:
            raise EgressError(f"this is not a URL that can be requested ({error}): use https://host/path") from None
        described = _describe(response)
        return described if auth is None else auth.mask(described)

    return make_tool(
        http_request,
        name=name,
        description=f"Send an HTTP request ({', '.join(usable)}) to {reached}. "
        "Returns the status, the content type and the text.",
        parameters=_build_parameters(usable, has_body=not is_safe),
        read_only=is_safe,
        timeout_s=seconds + 1,
        reads_untrusted=not trusted,
        sends_out=True,
        irreversible=irreversible and not is_safe,
        login=own,
    )


def _find_server(hosts: tuple[str, ...]) -> str:
    """Return the URL of the one host that a login is for."""
    if len(hosts) != 1 or "*" in hosts[0]:
        raise MisuseError("build_http_tool(login=...) needs a single host, to which the tokens of users are sent")
    [host] = hosts
    is_local = is_local_host(urlsplit(f"//{host}").hostname or "")
    return f"{'http' if is_local else 'https'}://{host}"


def _to_methods(methods: Iterable[str]) -> tuple[str, ...]:
    given = () if isinstance(methods, str) or not isinstance(methods, Iterable) else tuple(methods)
    if not given or set(given) - set(METHODS):
        raise MisuseError(
            f"build_http_tool(methods={methods!r}): give some of {', '.join(METHODS)}, as ['GET', 'POST']"
        )
    return tuple(dict.fromkeys(given))


def _build_parameters(methods: tuple[str, ...], *, has_body: bool) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "url": {"type": "string", "description": "The whole URL, with https://."},
        "method": {"type": "string", "enum": list(methods), "default": methods[0]},
    }
    if has_body:
        properties["body"] = {"type": "string", "description": "Body of the request."}
        properties["content_type"] = {"type": "string", "default": _DEFAULT_TYPE, "pattern": "^[ -~]{0,200}$"}
    return {"type": "object", "properties": properties, "required": ["url"], "additionalProperties": False}


def _describe(response: httpx2.Response) -> dict[str, Any]:
    """Return a response as data. A body that is not text is only counted."""
    content_type = response.headers.get("content-type", "")
    described: dict[str, Any] = {
        "status": response.status_code,
        "content_type": content_type,
        "url": str(response.url),
    }
    if response.has_redirect_location:
        described["location"] = response.headers["location"]
    media_type = content_type.partition(";")[0].strip().lower()
    is_text = media_type.startswith("text/") or media_type.endswith(("+json", "+xml")) or media_type in _TEXT_TYPES
    if is_text or (not media_type and b"\0" not in response.content):
        try:
            described["text"] = response.content.decode(response.charset_encoding or "utf-8", "replace")
        except (LookupError, UnicodeError):  # an encoding that does not exist, or that is none of text
            described["text"] = response.content.decode("utf-8", "replace")
    elif response.content:
        described["bytes"] = len(response.content)
    return described
