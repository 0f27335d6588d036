"""An API whose users log in by OAuth, beside an authorization server of the MCP SDK: in a thread."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import attrs
import httpx2
import uvicorn
from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    AuthorizationParams,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.routes import create_auth_routes, create_protected_resource_routes
from mcp.server.auth.settings import ClientRegistrationOptions, RevocationOptions
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from pydantic import AnyHttpUrl
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support import server_reaper
from tests.support.port_servers import free_port


@attrs.define
class Shop:
    """The API with its authorization server, and what both have seen."""

    url: str
    expires_in: int = 3_600
    denies: bool = False
    trouble: int | None = None
    """HTTP status of the token endpoint; None: it works."""

    person: str = "ann"
    """Person who agrees at the page of the login."""

    seen: Counter[str] = attrs.field(factory=Counter)
    orders: list[tuple[str, str]] = attrs.field(factory=list)
    """Person and idempotency key of each order."""

    keys: dict[str, str] = attrs.field(factory=dict)
    """Persons by API key."""

    clients: dict[str, OAuthClientInformationFull] = attrs.field(factory=dict)
    codes: dict[str, AuthorizationCode] = attrs.field(factory=dict)
    access: dict[str, AccessToken] = attrs.field(factory=dict)
    refresh: dict[str, RefreshToken] = attrs.field(factory=dict)
    issued: list[str] = attrs.field(factory=list)
    """All tokens and codes, which no journal may have."""

    def reset(self) -> None:
        """Forget all that a test has done."""
        fresh = Shop(self.url)
        for field in attrs.fields(Shop):
            setattr(self, field.name, getattr(fresh, field.name))

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self.clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        self.seen["registered"] += 1
        self.clients[client_info.client_id or ""] = client_info

    async def authorize(self, client: OAuthClientInformationFull, params: AuthorizationParams) -> str:
        self.seen["authorized"] += 1
        back = str(params.redirect_uri)
        if self.denies:
            return construct_redirect_uri(back, error="access_denied", state=params.state)
        code = AuthorizationCode(
            code=secrets.token_hex(),
            client_id=client.client_id or "",
            expires_at=9e9,
            scopes=params.scopes or [],
            subject=self.person,
            **params.model_dump(
                include={"code_challenge", "redirect_uri", "redirect_uri_provided_explicitly", "resource"}
            ),
        )
        self.codes[code.code] = code
        self.issued.append(code.code)
        return construct_redirect_uri(back, code=code.code, state=params.state, iss=f"{self.url}/")

    async def load_authorization_code(self, client: Any, authorization_code: str) -> AuthorizationCode | None:
        return self.codes.get(authorization_code)

    async def exchange_authorization_code(self, client: Any, authorization_code: AuthorizationCode) -> OAuthToken:
        self.seen["exchanged"] += 1
        del self.codes[authorization_code.code]
        return self.issue(client.client_id, authorization_code.subject)

    async def load_refresh_token(self, client: Any, refresh_token: str) -> RefreshToken | None:
        found = self.refresh.pop(refresh_token, None)
        self.seen["reused"] += found is None
        return found

    async def exchange_refresh_token(self, client: Any, refresh_token: RefreshToken, scopes: list[str]) -> OAuthToken:
        self.seen["refreshed"] += 1
        return self.issue(client.client_id, refresh_token.subject)

    def issue(self, client_id: str, person: str | None) -> OAuthToken:
        token, refresh = secrets.token_hex(), secrets.token_hex()
        self.access[token] = AccessToken(token=token, client_id=client_id, scopes=[], subject=person)
        self.refresh[refresh] = RefreshToken(token=refresh, client_id=client_id, scopes=[], subject=person)
        self.issued += [token, refresh]
        return OAuthToken(access_token=token, refresh_token=refresh, expires_in=self.expires_in)

    async def load_access_token(self, token: str) -> AccessToken | None:
        return self.access.get(token)

    async def revoke_token(self, token: AccessToken | RefreshToken) -> None:
        self.seen["revoked"] += 1
        self.access = {each: own for each, own in self.access.items() if own.subject != token.subject}
        self.refresh = {each: own for each, own in self.refresh.items() if own.subject != token.subject}

    def find_person(self, request: Request) -> str | None:
        """Return the person of the token or the key of a request."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        found = self.access.get(token)
        person = found.subject if found is not None else self.keys.get(request.headers.get("x-api-key", ""))
        self.seen["accepted" if person else "refused"] += 1
        return person

    async def order(self, request: Request) -> Response:
        """Take an order, or list those of the person."""
        person = self.find_person(request)
        if person is None:
            where = f"{self.url}/.well-known/oauth-protected-resource"
            return Response(status_code=401, headers={"www-authenticate": f'Bearer resource_metadata="{where}"'})
        if request.method == "POST":
            self.orders.append((person, request.headers.get("idempotency-key", "")))
        return JSONResponse({"person": person, "sent": request.headers.get("authorization", "")})


def log_in(shop: Shop, url: str) -> dict[str, str]:
    """Agree at a page as the person of the shop; return what the browser brings back."""
    location = httpx2.get(url, follow_redirects=False).headers["location"]
    assert location.startswith(parse_qs(urlsplit(url).query)["redirect_uri"][0])
    return {name: each[0] for name, each in parse_qs(urlsplit(location).query).items()}


@contextmanager
def oauth_shop() -> Iterator[Shop]:
    """Serve the API and its authorization server at a port of this machine."""
    port = free_port()
    shop = Shop(f"http://127.0.0.1:{port}")
    issuer = AnyHttpUrl(shop.url)
    routes = [
        *create_auth_routes(
            shop,
            issuer,
            client_registration_options=ClientRegistrationOptions(enabled=True),
            revocation_options=RevocationOptions(enabled=True),
        ),
        *create_protected_resource_routes(issuer, [issuer], scopes_supported=["orders"]),
        Route("/orders", shop.order, methods=["GET", "POST"]),
    ]
    app = Starlette(routes=routes)

    async def door(scope: Any, receive: Any, send: Any) -> None:
        if shop.trouble is not None and scope.get("path") == "/token":
            await Response(status_code=shop.trouble)(scope, receive, send)
        else:
            await app(scope, receive, send)

    server = uvicorn.Server(
        uvicorn.Config(door, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        server_reaper.await_that(lambda: server.started or not thread.is_alive(), "the shop listens")
        yield shop
    finally:
        server.should_exit = True
        thread.join()
