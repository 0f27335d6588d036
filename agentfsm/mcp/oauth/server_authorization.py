"""Authorize the requests to a remote server with stored tokens, and renew these without a person.

The SDK has the protocol of OAuth: discovery, registration, PKCE, token requests. Its own provider holds a lock during
each request, so that a slow call would hold up all others, and asks a person in the middle of a request. Here requests
overlap, a person logs in separately (`person_login`), and processes that share a login renew its tokens in turns.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import anyio
import attrs
import httpx2
from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import (
    ClientCredentialsOAuthProvider,
    PrivateKeyJWTOAuthProvider,
    SignedJWTParameters,
)
from mcp.client.auth.utils import extract_field_from_www_auth, extract_resource_metadata_from_www_auth
from mcp.shared._httpx_utils import RedirectAwareAuth
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata
from pydantic import AnyUrl

from agentfsm._lib.public_network import check_url
from agentfsm.logins.oauth_settings import OAuth
from agentfsm.logins.token_store import default_tokens
from agentfsm.mcp.errors import AuthorizationServerError, LoginRequiredError
from agentfsm.mcp.oauth.stored_login import Challenge, LoginStorage
from agentfsm.mcp.sdk_parts import find_part

UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
CLIENT_NAME: Final = "agentfsm"
# Statuses with which a token endpoint refuses a refresh token for good, and 200 with an invalid content. Others may
# pass.
_REFRESH_REFUSED: Final = frozenset({200, 400, 401})
# Maximum size of an answer of an authorization server, in bytes.
MAX_ANSWER_BYTES: Final = 1_000_000


@attrs.define(eq=False, repr=False)
class ServerAuthorization(RedirectAwareAuth):
    """Authorization of the HTTP requests to one server. It may share its tokens with other processes."""

    url: str
    """Endpoint of the MCP server."""

    oauth: OAuth
    """Settings."""

    allow_private: bool = False
    """Whether the authorization server may be reached by plain HTTP."""

    login_advice: str = "call `login` of the server"
    """Command or method for a login, as the end of a sentence."""

    storage: LoginStorage = attrs.field(
        default=attrs.Factory(
            lambda self: LoginStorage(
                self.oauth.tokens or default_tokens(), self.oauth.storage_key(self.url), _registered_client(self.oauth)
            ),
            takes_self=True,
        ),
        init=False,
    )
    """Stored login of the server."""

    _provider: OAuthClientProvider | None = attrs.field(default=None, init=False)
    """Provider of the SDK. None before the first request."""

    _lock: anyio.Lock | None = attrs.field(default=None, init=False)
    """Held while the tokens are loaded or renewed. It is made by the first request, in the event loop of all of them.
    """

    async def _auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Send a request with a token. If the server refuses it, get another token and send it once more."""
        provider = await self._load_provider()
        if _is_refreshable(provider):
            async with self._renewing():
                if _is_refreshable(provider):
                    await self._finish_refresh(provider, await read_answer((yield await self._refresh(provider))))
        used = _authorize(provider, request)
        response = yield request
        if not self.is_challenge(response):
            return
        async with self._renewing():
            is_renewed = provider.context.is_token_valid() and _access_token(provider) != used
            if not is_renewed and response.status_code == UNAUTHORIZED and provider.context.can_refresh_token():
                is_renewed = await self._finish_refresh(
                    provider, await read_answer((yield await self._refresh(provider)))
                )
            if not is_renewed:
                await self._check_unattended(response)
                async with aclosing(self.run_grant(provider, request, response)) as steps:
                    outgoing = await advance(steps)
                    while outgoing is not None:
                        outgoing = await advance(steps, await read_answer((yield outgoing)))
        _authorize(provider, request)
        yield request

    def is_challenge(self, response: httpx2.Response) -> bool:
        """Return whether another token may be accepted. If the scopes are fixed, a token with more is not requested."""
        if response.status_code == FORBIDDEN and not self.oauth.scopes:
            return extract_field_from_www_auth(response, "error") == "insufficient_scope"
        return response.status_code == UNAUTHORIZED

    async def run_grant(
        self, provider: OAuthClientProvider, request: httpx2.Request, response: httpx2.Response
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Yield the requests by which a provider gets a token, after a request was refused."""
        challenge = self._add_scopes(response)
        async with aclosing(find_part(provider, "_auth_flow")(request)) as flow:
            await anext(flow)  # the request itself, which was sent already
            outgoing = await flow.asend(challenge)
            while outgoing is not request:
                check_url(str(outgoing.url), allow_private=self.allow_private, role="an authorization server")
                outgoing = await flow.asend((yield outgoing))

    def _add_scopes(self, response: httpx2.Response) -> httpx2.Response:
        """Return the response with the scopes of the settings, which the SDK requests if the server names them."""
        if not self.oauth.scopes:
            return response
        parts = [f'scope="{" ".join(self.oauth.scopes)}"']
        if place := extract_resource_metadata_from_www_auth(response):
            parts.append(f'resource_metadata="{place}"')
        return httpx2.Response(
            UNAUTHORIZED, headers={"www-authenticate": f"Bearer {', '.join(parts)}"}, request=response.request
        )

    async def _load_provider(self) -> OAuthClientProvider:
        async with self._hold_lock():
            if self._provider is None:
                provider = self._build_provider()
                await self.storage.load(provider.context)
                await find_part(provider, "_initialize")()
                self.storage.restore()
                self._provider = provider
            return self._provider

    def _hold_lock(self) -> anyio.Lock:
        if self._lock is None:
            self._lock = anyio.Lock()
        return self._lock

    def _build_provider(self) -> OAuthClientProvider:
        """Return the provider for requests without a person."""
        oauth = self.oauth
        if oauth.grant == "authorization_code":
            return OAuthClientProvider(self.url, build_client_metadata(oauth.callback_port), self.storage)
        client_id = oauth.client_id or ""  # the settings have checked it
        if oauth.private_key is None:
            return ClientCredentialsOAuthProvider(
                self.url, self.storage, client_id, oauth.client_secret or "", issuer=oauth.issuer
            )
        signed = SignedJWTParameters(
            issuer=client_id, subject=client_id, signing_key=oauth.private_key, signing_algorithm=oauth.key_algorithm
        )
        return PrivateKeyJWTOAuthProvider(
            self.url, self.storage, client_id, signed.create_assertion_provider(), issuer=oauth.issuer
        )

    @asynccontextmanager
    async def _renewing(self) -> AsyncIterator[None]:
        """Hold the locks of this process and of the others, with the newest stored login."""
        async with self._hold_lock(), self.storage.renewal():
            yield

    async def _refresh(self, provider: OAuthClientProvider) -> httpx2.Request:
        request: httpx2.Request = await find_part(provider, "_refresh_token")()
        check_url(str(request.url), allow_private=self.allow_private, role="an authorization server")
        return request

    async def _finish_refresh(self, provider: OAuthClientProvider, answer: httpx2.Response) -> bool:
        """Store refreshed tokens; return whether there are any.

        Raises:
            AuthorizationServerError: when the authorization server has trouble; the tokens are kept.
        """
        if await find_part(provider, "_handle_refresh_response")(answer):
            return True
        if answer.status_code in _REFRESH_REFUSED:
            await self.storage.save(tokens=None, expires_at=None)
            return False
        self.storage.restore()
        raise AuthorizationServerError(
            f"the authorization server did not renew the token (HTTP {answer.status_code})", is_passing=True
        )

    async def _check_unattended(self, response: httpx2.Response) -> None:
        """Raise LoginRequiredError if only a person can get a token; the next login answers this response."""
        if self.oauth.grant != "authorization_code":
            return
        header = response.headers.get("www-authenticate", "")
        tokens = self.storage.login.tokens
        challenge = Challenge(status=response.status_code, www_authenticate=header)
        if challenge != self.storage.login.challenge:
            await self.storage.save(challenge=challenge)
        if tokens is None:
            reason = "there is no stored login, or it has expired"
        elif response.status_code == FORBIDDEN:
            wanted = extract_field_from_www_auth(response, "scope")
            reason = f"the stored login does not have the scope {wanted!r}" if wanted else "its scope does not suffice"
        else:
            reason = "the server does not accept the stored login any more"
        raise LoginRequiredError(reason, self.login_advice)


def _registered_client(oauth: OAuth) -> OAuthClientInformationFull | None:
    """Return the client that the user has registered, or None."""
    if oauth.client_id is None:
        return None
    return OAuthClientInformationFull(
        client_id=oauth.client_id,
        client_secret=oauth.client_secret,
        redirect_uris=None,
        token_endpoint_auth_method="none" if oauth.client_secret is None else "client_secret_basic",
        issuer=oauth.issuer,
    )


def build_client_metadata(port: int) -> OAuthClientMetadata:
    """Return the description with which this program registers itself.

    Args:
        port: Port of this machine to which the browser returns.
    """
    return OAuthClientMetadata(
        client_name=CLIENT_NAME,
        redirect_uris=[AnyUrl(f"http://127.0.0.1:{port}/callback")],
        grant_types=["authorization_code", "refresh_token"],
        response_types=["code"],
    )


def _is_refreshable(provider: OAuthClientProvider) -> bool:
    return not provider.context.is_token_valid() and provider.context.can_refresh_token()


def _access_token(provider: OAuthClientProvider) -> str | None:
    tokens = provider.context.current_tokens
    return None if tokens is None else tokens.access_token


def _authorize(provider: OAuthClientProvider, request: httpx2.Request) -> str | None:
    """Add the token to a request if there is a valid one; return it."""
    if not provider.context.is_token_valid():
        request.headers.pop("authorization", None)
        return None
    request.headers["Authorization"] = f"Bearer {_access_token(provider)}"
    return _access_token(provider)


async def advance(
    steps: AsyncGenerator[httpx2.Request, httpx2.Response], answer: httpx2.Response | None = None
) -> httpx2.Request | None:
    """Send an answer to a generator of requests; return its next request, or None at its end."""
    try:
        return await (anext(steps) if answer is None else steps.asend(answer))
    except StopAsyncIteration:
        return None


async def read_answer(response: httpx2.Response) -> httpx2.Response:
    """Read an answer of an authorization server, and return it.

    Raises:
        AuthorizationServerError: when it is too long.
    """
    if not response.is_stream_consumed:
        response.stream = _LimitedStream(response)
        await response.aread()
    return response


class _LimitedStream(httpx2.AsyncByteStream):
    """Body of an answer. It was requested uncompressed, so its size is that of the content."""

    def __init__(self, response: httpx2.Response) -> None:
        self._stream: Any = response.stream
        self._host = response.url.host
        self._is_compressed = response.headers.get("content-encoding", "identity").lower() != "identity"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > MAX_ANSWER_BYTES or self._is_compressed:
                raise AuthorizationServerError(
                    f"the answer of {self._host} is compressed, or has more than {MAX_ANSWER_BYTES:,} bytes"
                )
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
