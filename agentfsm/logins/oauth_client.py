"""The client's part of OAuth: find an authorization server, register, and get, renew and revoke tokens.

Each function sends its own requests and keeps nothing, so that the process which begins a login need not be the one
that completes it.

Source: RFC 6749 and 7636 (codes and PKCE), 7009 (revocation), 7591 (registration), 8414 and OpenID Connect Discovery
(authorization servers), 8707 (resource), 9207 (issuer), 9728 (protected resources), and the authorization of MCP.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

import anyio
import attrs
import httpx2

from agentfsm._lib.public_network import PublicAddressTransport, check_url, ssl_context
from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.logins.errors import LoginError, LoginUnavailableError
from agentfsm.logins.oauth_settings import OAuth

CLIENT_NAME: Final = "agentfsm"
_BASIC: Final = "client_secret_basic"
_FORM: Final = "client_secret_post"
# Seconds for a request to an authorization server.
_TIMEOUT_S: Final = 20.0
# Maximum size of an answer of an authorization server, in bytes.
_MAX_ANSWER_BYTES: Final = 1_000_000
_MAX_CODE_CHARS: Final = 60
_FIRST_TROUBLE: Final = 500
_TOO_MANY: Final = 429


@attrs.frozen(kw_only=True)
class Endpoints(Value):
    """An authorization server, and what it supports."""

    authorization_url: str
    token_url: str
    revocation_url: str = ""
    registration_url: str = ""
    issuer: str = ""
    """Issuer that an authorization response must name, if it names one; empty if not known."""

    names_issuer: bool = False
    """Whether each authorization response names the issuer."""

    takes_metadata_url: bool = False
    """Whether a client may be the URL of a document."""

    auth_methods: tuple[str, ...] = ()
    """Ways in which clients may authenticate at the token endpoint. Empty: not known, so by HTTP Basic."""

    scopes: str = ""
    """Scopes that the protected server supports."""


@attrs.frozen(kw_only=True)
class Client(Value):
    """This program as the authorization server knows it."""

    client_id: str
    client_secret: str = attrs.field(default="", repr=False)
    sends_form: bool = False
    """Whether the secret is sent in the form, and not by HTTP Basic."""


@attrs.frozen(kw_only=True)
class Tokens(Value):
    """Tokens of one user, as an authorization server gave them."""

    access_token: str = attrs.field(repr=False)
    refresh_token: str = attrs.field(default="", repr=False)
    expires_at: float | None = None
    """Unix time at which the access token expires. None: unknown."""

    scope: str = ""


class RefusedTokensError(LoginError):
    """The authorization server does not accept the code or the refresh token."""


@attrs.frozen(kw_only=True)
class AuthorizationClient(Value):
    """Requests to the authorization server of one server."""

    server: str
    """URL of the server that the tokens are for."""

    oauth: OAuth
    allow_private: bool = False

    async def find_endpoints(self) -> Endpoints:
        """Return the endpoints of the settings, or those that the server and its authorization server describe.

        Raises:
            LoginError: when they are not described, or are not safe to use.
        """
        oauth = self.oauth
        if oauth.authorization_url is not None and oauth.token_url is not None:
            return Endpoints(
                authorization_url=oauth.authorization_url,
                token_url=oauth.token_url,
                revocation_url=oauth.revocation_url or "",
                issuer=oauth.issuer or "",
            )
        issuer, scopes = oauth.issuer, ""
        if issuer is None:
            resource = await self._describe_resource()
            listed, supported = resource.get("authorization_servers"), resource.get("scopes_supported")
            if not isinstance(listed, list) or not listed or not isinstance(listed[0], str):
                raise LoginError(f"{self.server} names no authorization server: give OAuth(issuer=...)")
            issuer = listed[0]
            if isinstance(supported, list):
                scopes = " ".join(each for each in supported if isinstance(each, str))
        for place in _list_metadata_places(issuer):
            found = await self._read_document(place)
            if found is not None:
                return self._read_endpoints(issuer, found, scopes)
        raise LoginError(f"the authorization server {issuer} does not describe itself: give authorization_url=")

    async def _describe_resource(self) -> Mapping[str, Any]:
        for place in _list_resource_places(self.server):
            found = await self._read_document(place)
            if found is not None:
                named = found.get("resource")
                if not isinstance(named, str) or not _covers(named, self.server):
                    raise LoginError(f"{place} describes another server than {self.server}")
                return found
        raise LoginError(f"{self.server} does not describe its authorization (RFC 9728): give OAuth(issuer=...)")

    def _read_endpoints(self, issuer: str, found: Mapping[str, Any], scopes: str) -> Endpoints:
        if found.get("issuer") != issuer:
            raise LoginError(f"the authorization server {issuer} describes itself as another one")
        if "S256" not in (found.get("code_challenge_methods_supported") or ()):
            raise LoginError(f"the authorization server {issuer} does not support PKCE (S256), so no login is safe")

        methods = found.get("token_endpoint_auth_methods_supported") or ()

        def read(name: str, *, needed: bool = False) -> str:
            url = found.get(name)
            if not isinstance(url, str):
                if needed:
                    raise LoginError(f"the authorization server {issuer} names no {name}")
                return ""
            return self._check(url)

        return Endpoints(
            authorization_url=read("authorization_endpoint", needed=True),
            token_url=read("token_endpoint", needed=True),
            revocation_url=read("revocation_endpoint"),
            registration_url=read("registration_endpoint"),
            issuer=issuer,
            names_issuer=found.get("authorization_response_iss_parameter_supported") is True,
            auth_methods=tuple([each for each in methods if isinstance(each, str)]),
            takes_metadata_url=found.get("client_id_metadata_document_supported") is True,
            scopes=scopes,
        )

    def find_scope(self, endpoints: Endpoints) -> str:
        """Return the scopes to ask for: those of the settings, or else all that the server supports."""
        return " ".join(self.oauth.scopes) or endpoints.scopes

    def find_client(self, endpoints: Endpoints) -> Client | None:
        """Return the client of the settings, or that of the metadata URL; None if this program has to register."""
        if self.oauth.client_id is not None:
            return Client(
                client_id=self.oauth.client_id,
                client_secret=self.oauth.client_secret or "",
                sends_form=bool(endpoints.auth_methods) and _BASIC not in endpoints.auth_methods,
            )
        if self.oauth.client_metadata_url is not None and endpoints.takes_metadata_url:
            return Client(client_id=self.oauth.client_metadata_url)
        return None

    async def register(self, endpoints: Endpoints, redirect_url: str) -> Client:
        """Register this program for one redirect URL.

        Raises:
            LoginError: when the authorization server registers no clients.
        """
        if not endpoints.registration_url:
            raise LoginError(f"the authorization server of {self.server} registers no clients: give client_id=")
        local = (urlsplit(redirect_url).hostname or "") in {"127.0.0.1", "localhost"}
        known = endpoints.auth_methods or (_BASIC,)
        method = next((each for each in ("none", _FORM, _BASIC) if each in known), _BASIC)
        metadata: dict[str, Any] = {
            "client_name": CLIENT_NAME,
            "redirect_uris": [redirect_url],
            "grant_types": ["authorization_code", "refresh_token"],
            "response_types": ["code"],
            "token_endpoint_auth_method": method,
            "application_type": "native" if local else "web",
        }
        if scope := self.find_scope(endpoints):
            metadata["scope"] = scope
        response = await self._send("POST", endpoints.registration_url, json=metadata)
        found = _parse(response)
        if not response.is_success or not isinstance(found.get("client_id"), str):
            raise LoginError(f"the authorization server refused the registration: {_describe(response)}")
        secret = found.get("client_secret")
        return Client(
            client_id=found["client_id"],
            client_secret=secret if isinstance(secret, str) else "",
            sends_form=found.get("token_endpoint_auth_method", method) == _FORM,
        )

    def build_authorization_url(
        self, endpoints: Endpoints, client: Client, *, redirect_url: str, state: str, verifier: str
    ) -> str:
        """Return the page at which the user agrees."""
        digest = hashlib.sha256(verifier.encode("ascii")).digest()
        query = {
            "response_type": "code",
            "client_id": client.client_id,
            "redirect_uri": redirect_url,
            "state": state,
            "code_challenge": base64.urlsafe_b64encode(digest).decode("ascii").rstrip("="),
            "code_challenge_method": "S256",
            "resource": self.server,
        }
        if scope := self.find_scope(endpoints):
            query["scope"] = scope
        joint = "&" if urlsplit(endpoints.authorization_url).query else "?"
        return f"{endpoints.authorization_url}{joint}{urlencode(query, quote_via=quote)}"

    async def exchange(self, token_url: str, client: Client, *, code: str, verifier: str, redirect_url: str) -> Tokens:
        """Return the tokens for a code.

        Raises:
            RefusedTokensError: when the code is not accepted.
            LoginUnavailableError: when the authorization server has trouble.
        """
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_url,
            "code_verifier": verifier,
            "resource": self.server,
        }
        return await self._request_tokens(token_url, client, form)

    async def refresh(self, token_url: str, client: Client, refresh_token: str) -> Tokens:
        """Return new tokens; raises as `exchange`."""
        form = {"grant_type": "refresh_token", "refresh_token": refresh_token, "resource": self.server}
        return await self._request_tokens(token_url, client, form)

    async def revoke(self, revocation_url: str, client: Client, token: str, hint: str) -> None:
        """Revoke a token.

        Raises:
            LoginError: when the authorization server refuses it, or has trouble.
        """
        response = await self._post_form(revocation_url, client, {"token": token, "token_type_hint": hint})
        if not response.is_success:
            raise LoginError(f"the token was not revoked: {_describe(response)}")

    async def _request_tokens(self, token_url: str, client: Client, form: Mapping[str, str]) -> Tokens:
        response = await self._post_form(token_url, client, form)
        if response.status_code >= _FIRST_TROUBLE or response.status_code == _TOO_MANY:
            raise LoginUnavailableError(f"the authorization server gives no tokens now: {_describe(response)}")
        found = _parse(response)
        token = found.get("access_token")
        if not response.is_success or not isinstance(token, str):
            raise RefusedTokensError(f"the authorization server gives no tokens: {_describe(response)}")
        kind, refresh, lasts = found.get("token_type"), found.get("refresh_token"), found.get("expires_in")
        if not isinstance(kind, str) or kind.lower() != "bearer" or not is_header_text(token):
            raise RefusedTokensError("the authorization server gives tokens of another kind than Bearer")
        return Tokens(
            access_token=token,
            refresh_token=refresh if isinstance(refresh, str) else "",
            expires_at=time.time() + lasts if isinstance(lasts, int | float) and not isinstance(lasts, bool) else None,
            scope=scope if isinstance(scope := found.get("scope"), str) else "",
        )

    async def _post_form(self, url: str, client: Client, form: Mapping[str, str]) -> httpx2.Response:
        headers = {}
        if client.client_secret and client.sends_form:
            form = {**form, "client_id": client.client_id, "client_secret": client.client_secret}
        elif client.client_secret:
            pair = f"{quote(client.client_id, safe='')}:{quote(client.client_secret, safe='')}"
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode('ascii')}"
        else:
            form = {**form, "client_id": client.client_id}
        return await self._send("POST", url, data=dict(form), headers=headers)

    async def _read_document(self, url: str) -> Mapping[str, Any] | None:
        response = await self._send("GET", url)
        return _parse(response) or None if response.is_success else None

    def _check(self, url: str) -> str:
        try:
            check_url(url, allow_private=self.allow_private, role="an authorization server")
        except MisuseError as error:
            raise LoginError(str(error)) from None
        return url

    async def _send(self, method: str, url: str, **content: Any) -> httpx2.Response:
        self._check(url)
        transport = None if self.allow_private else PublicAddressTransport(self.server, error=LoginError)
        headers = {"accept": "application/json", "accept-encoding": "identity", **content.pop("headers", {})}
        try:
            with anyio.fail_after(_TIMEOUT_S):
                async with (
                    httpx2.AsyncClient(transport=transport, verify=ssl_context(), timeout=_TIMEOUT_S) as client,
                    client.stream(method, url, headers=headers, **content) as response,
                ):
                    body = b""
                    async for chunk in response.aiter_raw():
                        body += chunk
                        if len(body) > _MAX_ANSWER_BYTES:
                            raise LoginError(f"the answer of {response.url.host} is too long")
                    return httpx2.Response(response.status_code, content=body, request=response.request)
        except (httpx2.HTTPError, TimeoutError, OSError) as error:
            host = urlsplit(url).hostname
            raise LoginUnavailableError(f"{host} cannot be reached: {type(error).__name__}") from None


def new_secret() -> str:
    """Return a new random text, as a state or a verifier."""
    return secrets.token_urlsafe(48)


def is_header_text(text: str) -> bool:
    """Return whether a text may stand in a header: visible ASCII."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _list_resource_places(server: str) -> Iterator[str]:
    """Return the places of a server's description: with its path, then without."""
    parts = urlsplit(server)
    path = parts.path.rstrip("/")
    for end in dict.fromkeys((path, "")):
        yield urlunsplit((parts.scheme, parts.netloc, f"/.well-known/oauth-protected-resource{end}", "", ""))


def _list_metadata_places(issuer: str) -> Iterator[str]:
    """Return the places of an authorization server's description, in the order of MCP's specification."""
    parts = urlsplit(issuer)
    path = parts.path.rstrip("/")
    places = [f"/.well-known/oauth-authorization-server{path}", f"/.well-known/openid-configuration{path}"]
    if path:
        places.append(f"{path}/.well-known/openid-configuration")
    for place in places:
        yield urlunsplit((parts.scheme, parts.netloc, place, "", ""))


def _covers(resource: str, server: str) -> bool:
    """Return whether a description is that of a server: the same origin, and its path or one above it."""
    named, ours = urlsplit(resource), urlsplit(server)
    if (named.scheme.lower(), named.netloc.lower()) != (ours.scheme.lower(), ours.netloc.lower()):
        return False
    above = named.path.rstrip("/")
    return ours.path.rstrip("/") == above or ours.path.startswith(f"{above}/")


def _parse(response: httpx2.Response) -> Mapping[str, Any]:
    try:
        found = json.loads(response.content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _describe(response: httpx2.Response) -> str:
    """Return the status, and the error's code if it is one: the rest of an answer may have secrets."""
    code = _parse(response).get("error")
    is_code = isinstance(code, str) and code.replace("_", "").isalnum() and len(code) <= _MAX_CODE_CHARS
    return f"HTTP {response.status_code}{f', {code}' if is_code else ''}"
