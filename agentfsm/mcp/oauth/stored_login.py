"""Everything that is stored of a login at a server: tokens, registration, and where to renew the tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import attrs
from mcp.client.auth.oauth2 import OAuthContext
from mcp.shared.auth import OAuthClientInformationFull, OAuthMetadata, OAuthToken, ProtectedResourceMetadata
from pydantic import BaseModel, ValidationError

from agentfsm.logins.errors import TokenStoreError
from agentfsm.logins.token_store import TokenStore
from agentfsm.mcp.errors import MCPServerError

T = TypeVar("T")


class Challenge(BaseModel):
    """Refusal of a request with HTTP 401, or with 403 because the token's scope does not suffice."""

    status: int = 401
    """HTTP status, 401 or 403."""

    www_authenticate: str = ""
    """Header of the response, which may name the scope that is needed; "" if there was none."""


class StoredLogin(BaseModel):
    """Content of a `TokenStore` for one server.

    The SDK stores only tokens and registration. After a restart it would know neither that a token has expired nor
    where to renew it.
    """

    tokens: OAuthToken | None = None
    """Access token and refresh token. None: there is no login."""

    expires_at: float | None = None
    """Unix time at which the access token expires. None: unknown."""

    client: OAuthClientInformationFull | None = None
    """Registration of this program at the authorization server."""

    server_metadata: OAuthMetadata | None = None
    """Description of the authorization server, with its endpoints."""

    resource_metadata: ProtectedResourceMetadata | None = None
    """Description of the MCP server, which names the authorization server."""

    challenge: Challenge | None = None
    """Refusal that the next login answers. None: no request was refused since the last login."""


async def _use(function: Callable[..., T], *args: Any) -> T:
    """Read or write a store in a thread.

    Raises:
        MCPServerError: when it cannot be used.
    """
    try:
        return await anyio.to_thread.run_sync(function, *args)
    except TokenStoreError as error:
        raise MCPServerError(str(error)) from error


@attrs.define(eq=False, repr=False)
class LoginStorage:
    """Login of one server in a `TokenStore`; the storage that a provider of the SDK reads and writes."""

    store: TokenStore
    key: str
    registered: OAuthClientInformationFull | None
    """Client that the user has registered. None: the program registers itself."""

    login: StoredLogin = attrs.field(factory=StoredLogin, init=False)
    """Login as it was last read or written."""

    _context: OAuthContext | None = attrs.field(default=None, init=False)
    """Context of the SDK's provider."""

    async def read(self) -> StoredLogin:
        """Read the login.

        Raises:
            MCPServerError: when the tokens cannot be read.
        """
        text = await _use(self.store.read, self.key)
        try:
            self.login = StoredLogin() if text is None else StoredLogin.model_validate_json(text)
        except ValidationError as error:
            raise MCPServerError(
                f"the stored login for {self.key} cannot be parsed: log out of the server, and log in again"
            ) from error
        return self.login

    async def load(self, context: OAuthContext) -> None:
        """Read the login into the context of a provider, which is saved with its tokens from now on."""
        await self.read()
        self._context = context
        self.restore()

    def restore(self) -> None:
        """Put the login as it was last read or written into the context."""
        if (context := self._context) is None:
            return
        login = self.login
        context.client_info = self.registered or login.client
        context.current_tokens, context.token_expiry_time = login.tokens, login.expires_at
        context.oauth_metadata = login.server_metadata
        context.protected_resource_metadata = resource = login.resource_metadata
        context.auth_server_url = None if resource is None else str(resource.authorization_servers[0])

    async def save(self, **changes: object) -> None:
        """Change parts of the login, and write it."""
        self.login = self.login.model_copy(update=changes)
        text = self.login.model_dump_json(exclude_none=True)
        await _use(self.store.write, self.key, text)

    async def replace(self, text: str | None) -> None:
        """Write another login."""
        await _use(self.store.write, self.key, text)
        await self.read()
        self.restore()

    async def delete(self) -> bool:
        """Remove the login; return whether there was one. A renewal in another process cannot write it back."""
        async with self.store.renewal(self.key):
            was_stored = await _use(self.store.read, self.key) is not None
            await self.replace(None)
        return was_stored

    @asynccontextmanager
    async def renewal(self) -> AsyncIterator[None]:
        """Hold the lock against other processes, with what they have stored meanwhile."""
        async with self.store.renewal(self.key):
            await self.read()
            self.restore()
            yield

    async def get_tokens(self) -> OAuthToken | None:
        """Return the tokens, for the SDK."""
        return self.login.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        """Store new tokens with what is needed to renew them, for the SDK."""
        context = self._context
        assert context is not None  # the provider was made with `load`  # noqa: S101
        await self.save(
            tokens=tokens,
            expires_at=context.token_expiry_time,
            server_metadata=context.oauth_metadata,
            resource_metadata=context.protected_resource_metadata,
            challenge=None,
        )

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        """Return the client, for the SDK."""
        return self.registered or self.login.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        """Store the registration, for the SDK."""
        await self.save(client=client_info)
