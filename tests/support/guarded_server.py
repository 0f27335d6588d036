"""An MCP server that wants tokens, with its own authorization server, both of the SDK: in a thread of the test."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import attrs
import httpx2
import uvicorn
from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    AuthorizationParams,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from starlette.responses import PlainTextResponse

from tests.support import server_reaper
from tests.support.port_servers import free_port


@attrs.define
class Guard:
    """The authorization server, and what it has seen; each test may set how it goes on."""

    url: str
    expires_in: int = 3_600
    """Seconds that its tokens are said to last; they last until they are revoked."""

    denies: bool = False
    """Whether the person says no."""

    token_status: int | None = None
    """HTTP status of the token endpoint; None: it works."""

    seen: Counter[str] = attrs.field(factory=Counter)
    clients: dict[str, OAuthClientInformationFull] = attrs.field(factory=dict)
    codes: dict[str, AuthorizationCode] = attrs.field(factory=dict)
    access: dict[str, AccessToken] = attrs.field(factory=dict)
    refresh: dict[str, RefreshToken] = attrs.field(factory=dict)
    quick: threading.Event = attrs.field(factory=threading.Event)
    """Set by the quick call, for which the slow one waits."""

    def reset(self) -> None:
        """Forget all that a test has done."""
        fresh = Guard(self.url)
        for field in attrs.fields(Guard):
            setattr(self, field.name, getattr(fresh, field.name))

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self.clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        self.seen["registered"] += 1
        self.clients[client_info.client_id] = client_info

    async def authorize(self, client: OAuthClientInformationFull, params: AuthorizationParams) -> str:
        self.seen["authorized"] += 1
        back = str(params.redirect_uri)
        if self.denies:
            return construct_redirect_uri(back, error="access_denied", error_description="No!", state=params.state)
        code = AuthorizationCode(
            code=secrets.token_hex(),
            client_id=client.client_id,
            expires_at=9e9,
            scopes=params.scopes or [],
            **params.model_dump(
                include={"code_challenge", "redirect_uri", "redirect_uri_provided_explicitly", "resource"}
            ),
        )
        self.codes[code.code] = code
        return construct_redirect_uri(back, code=code.code, state=params.state, iss=self.url)

    async def load_authorization_code(self, client: Any, authorization_code: str) -> AuthorizationCode | None:
        return self.codes.get(authorization_code)

    async def exchange_authorization_code(self, client: Any, authorization_code: AuthorizationCode) -> OAuthToken:
        del self.codes[authorization_code.code]
        return self.issue(client.client_id, authorization_code.resource)

    async def load_refresh_token(self, client: Any, refresh_token: str) -> RefreshToken | None:
        found = self.refresh.pop(refresh_token, None)
        if found is None:  # it was used before: a thief may have it
            self.seen["reused"] += 1
            self.access.clear()
            self.refresh.clear()
        return found

    async def exchange_refresh_token(self, client: Any, refresh_token: RefreshToken, scopes: list[str]) -> OAuthToken:
        self.seen["refreshed"] += 1
        return self.issue(client.client_id, refresh_token.resource)

    def issue(self, client_id: str, resource: str | None) -> OAuthToken:
        token, refresh = secrets.token_hex(), secrets.token_hex()
        self.access[token] = AccessToken(token=token, client_id=client_id, scopes=[], resource=resource)
        self.refresh[refresh] = RefreshToken(token=refresh, client_id=client_id, scopes=[], resource=resource)
        return OAuthToken(access_token=token, refresh_token=refresh, expires_in=self.expires_in)

    async def load_access_token(self, token: str) -> AccessToken | None:
        found = self.access.get(token)
        self.seen["accepted" if found else "refused"] += 1
        return found

    async def revoke_token(self, token: Any) -> None:
        raise NotImplementedError


def _build_app(guard: Guard) -> Any:
    server = MCPServer(
        "guarded",
        auth_server_provider=guard,
        auth=AuthSettings(
            issuer_url=guard.url,
            resource_server_url=f"{guard.url}/mcp",
            validate_token_resource=True,
            client_registration_options=ClientRegistrationOptions(enabled=True),
        ),
    )

    @server.tool()
    def pay() -> str:
        """Pay."""
        guard.seen["paid"] += 1
        return "paid"

    def read_token() -> str:
        token = get_access_token()
        assert token is not None
        return token.token

    @server.tool()
    def repeat(fails: bool = False) -> str:
        """Return the token, or fail with it."""
        if fails:
            raise MCPError(-32000, f"bad token {read_token()}")
        return f"your token is {read_token()}"

    @server.resource("shop://account")
    def account() -> str:
        """Return whose account it is."""
        return sha256(read_token().encode()).hexdigest()

    @server.tool()
    async def quick() -> str:
        """Return at once."""
        guard.quick.set()
        return "quick"

    @server.tool()
    def slow() -> str:
        """Return after `quick`."""
        return "slow" if guard.quick.wait(server_reaper.HANG_S) else "quick never came"

    app = server.streamable_http_app(json_response=True)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if guard.token_status is not None and scope.get("path") == "/token":
            await PlainTextResponse("out of order", guard.token_status)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return guarded


@contextmanager
def guarded_server() -> Iterator[Guard]:
    """Run the server in a thread; yields its guard."""
    port = free_port()
    guard = Guard(f"http://127.0.0.1:{port}")
    server = uvicorn.Server(
        uvicorn.Config(_build_app(guard), port=port, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        server_reaper.await_that(lambda: server.started or not thread.is_alive(), "the guarded server listens")
        yield guard
    finally:
        server.should_exit = True
        thread.join()


async def agree(url: str) -> None:
    """Log in as a person does: open the page, and let it lead back."""
    async with httpx2.AsyncClient(trust_env=False, follow_redirects=True) as client:
        await client.get(url)
