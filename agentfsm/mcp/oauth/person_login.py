"""Login of a person at a remote server: the browser is opened, and returns to a port of this machine with a code."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import anyio
import attrs
import httpx2
from anyio.abc import Listener, SocketAttribute, SocketStream
from mcp.client.auth import OAuthClientProvider, OAuthFlowError
from mcp.shared._httpx_utils import RedirectAwareAuth
from mcp.shared.auth import AuthorizationCodeResult
from mcp.types.version import LATEST_HANDSHAKE_VERSION

from agentfsm._lib.public_network import check_url
from agentfsm.core.errors import first_error
from agentfsm.core.text_safety import escape_hidden
from agentfsm.logins.local_page import RECEIVE_TIMEOUT_S, format_page, listen_at, parse_query, receive_target
from agentfsm.logins.token_store import MemoryTokens
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.oauth.server_authorization import (
    FORBIDDEN,
    ServerAuthorization,
    advance,
    build_client_metadata,
    read_answer,
)
from agentfsm.mcp.oauth.stored_login import Challenge, LoginStorage, StoredLogin
from agentfsm.mcp.sdk_parts import find_part

OpenURL: TypeAlias = Callable[[str], Awaitable[None]]
"""Coroutine function that takes a person to a URL, for example in a browser."""

# Seconds for a person to log in.
LOGIN_TIMEOUT_S: Final = 300.0
_MAX_REASON_CHARS: Final = 300
_DONE: Final = (200, "The login is complete. You may close this window.")
_REFUSED: Final = (
    200,
    "The login was refused. You may close this window; the program that asked for it has the reason.",
)
_UNKNOWN: Final = (404, "No login is waiting at this address.")


async def log_in(
    authorization: ServerAuthorization, client: httpx2.AsyncClient, open_url: OpenURL, timeout_s: float
) -> None:
    """Let a person log in, and store the tokens.

    Args:
        authorization: Authorization of the server.
        client: Client for requests to the server and its authorization server.
        open_url: Takes the person to the page of the login.
        timeout_s: Seconds for all of it.

    Raises:
        MCPServerError: when the login was refused, took too long or failed; earlier tokens are kept.
    """
    storage, draft = authorization.storage, MemoryTokens()
    login = await storage.read()
    draft.write(storage.key, login.model_dump_json())
    try:
        with anyio.fail_after(timeout_s):
            async with await _listen(authorization, login) as listener, anyio.create_task_group() as tasks:
                callback = _Callback(listener, open_url, allow_private=authorization.allow_private)
                tasks.start_soon(listener.serve, callback.answer)
                await _run(authorization, client, callback, LoginStorage(draft, storage.key, storage.registered))
                tasks.cancel_scope.cancel()
    except TimeoutError:
        raise MCPServerError(f"nobody logged in within {timeout_s:g} s") from None
    except BaseExceptionGroup as group:
        raise _translate(first_error(group)) from group
    async with storage.renewal():
        await storage.replace(draft.read(storage.key))


def _translate(error: BaseException) -> BaseException:
    """Return the error of a login for the person."""
    match error:
        case OAuthFlowError() | httpx2.HTTPError() | OSError() | ValueError():
            reason = escape_hidden(" ".join(str(error).split()))[:_MAX_REASON_CHARS]
            return MCPServerError(f"the login failed: {reason or type(error).__name__}")
    return error


async def _listen(authorization: ServerAuthorization, login: StoredLogin) -> Listener[SocketStream]:
    """Listen at the port of the settings, or that of the registration; if it is not free, at any other."""
    port = authorization.oauth.callback_port
    if not port and login.client is not None and login.client.redirect_uris:
        try:
            return await listen_at(login.client.redirect_uris[0].port or 0)
        except OSError:
            pass  # the client is registered anew, for another port
    try:
        return await listen_at(port)
    except OSError as error:
        raise MCPServerError(f"the port {port} for the return of the browser cannot be used: {error}") from error


async def _run(
    authorization: ServerAuthorization, client: httpx2.AsyncClient, callback: _Callback, storage: LoginStorage
) -> None:
    """Run the login with a provider of its own: the other requests of this process continue meanwhile."""
    metadata = build_client_metadata(callback.port)
    provider = OAuthClientProvider(
        authorization.url,
        metadata,
        storage,
        redirect_handler=callback.open,
        callback_handler=callback.wait,
        client_metadata_url=authorization.oauth.client_metadata_url,
    )
    context = provider.context
    await storage.load(context)
    await find_part(provider, "_initialize")()
    storage.restore()
    context.token_expiry_time = None  # no refresh: a person is here
    known = context.client_info
    if storage.registered is None and known is not None and known.redirect_uris != metadata.redirect_uris:
        context.client_info = None
    # A request without a token: its refusal says where to get one.
    headers = {"accept": "application/json, text/event-stream", "mcp-protocol-version": LATEST_HANDSHAKE_VERSION}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    probe = httpx2.Request("POST", authorization.url, headers=headers, json=message)
    context.protocol_version = LATEST_HANDSHAKE_VERSION
    async with aclosing(_LoginFlow(authorization, provider, storage.login.challenge).async_auth_flow(probe)) as steps:
        outgoing = await advance(steps)
        while outgoing is not None:
            answer = await client.send(outgoing, auth=None, stream=True, follow_redirects=False)
            try:
                outgoing = await advance(steps, answer if outgoing is probe else await read_answer(answer))
            finally:
                await answer.aclose()


@attrs.define(eq=False, repr=False)
class _LoginFlow(RedirectAwareAuth):
    """Requests of a login: the probe, unless the server has already said what it wants, and those of the provider."""

    authorization: ServerAuthorization
    provider: OAuthClientProvider
    challenge: Challenge | None

    async def _auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        challenge = self.challenge
        if challenge is None or challenge.status != FORBIDDEN:
            response = yield request
            if self.authorization.is_challenge(response):
                challenge = Challenge(www_authenticate=response.headers.get("www-authenticate", ""))
        challenge = challenge or Challenge()  # the server has public parts, and describes its authorization elsewhere
        refusal = httpx2.Response(
            challenge.status, headers={"www-authenticate": challenge.www_authenticate}, request=request
        )
        async with aclosing(self.authorization.run_grant(self.provider, request, refusal)) as steps:
            outgoing = await advance(steps)
            while outgoing is not None:
                outgoing = await advance(steps, (yield outgoing))


@attrs.define(eq=False, repr=False)
class _Callback:
    """The page of this machine to which the browser returns."""

    listener: Listener[SocketStream]
    open_url: OpenURL
    allow_private: bool
    _state: str | None = attrs.field(default=None, init=False)
    """Secret of the login, which the browser brings back. None before the person was sent away."""

    _query: Mapping[str, str] = attrs.field(factory=dict, init=False)
    _returned: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    @property
    def port(self) -> int:
        """Port of this machine."""
        return int(self.listener.extra(SocketAttribute.local_port))  # noqa: S610  not Django's

    async def open(self, url: str) -> None:
        """Send the person to the authorization server."""
        check_url(url, allow_private=self.allow_private, role="an authorization server")
        self._state = parse_query(url).get("state")
        await self.open_url(url)

    async def wait(self) -> AuthorizationCodeResult:
        """Wait until the browser returns.

        Raises:
            OAuthFlowError: when it brings an error instead of a code.
        """
        await self._returned.wait()
        query = self._query
        if "code" not in query:
            reason = ": ".join(query[name] for name in ("error", "error_description") if name in query)
            raise OAuthFlowError(f"the authorization server refused it: {reason or 'no code was returned'}")
        return AuthorizationCodeResult(code=query["code"], state=query["state"], iss=query.get("iss"))

    async def answer(self, stream: SocketStream) -> None:
        """Answer one request. Requests without the secret of the login are not for it, and end nothing."""
        async with stream:
            with anyio.move_on_after(RECEIVE_TIMEOUT_S):
                target = await receive_target(stream)
                if target is None:
                    return
                query = parse_query(target)
                is_ours = urlsplit(target).path == "/callback" and query.get("state", "") == self._state
                page = _UNKNOWN if not is_ours else _DONE if "code" in query else _REFUSED
                await stream.send(format_page(*page))
                if is_ours and not self._returned.is_set():
                    self._query = query
                    self._returned.set()
