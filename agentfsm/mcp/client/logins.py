"""Logins of people at one server: log in, log out, and say whether there is a login."""

from __future__ import annotations

import shlex
import time
import webbrowser
from pathlib import Path

import anyio
import attrs
import httpx2

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.logins.oauth_settings import OAuth
from agentfsm.mcp.connection import connection_thread
from agentfsm.mcp.connection.transports import RemoteTransport, ServerTransport
from agentfsm.mcp.oauth.person_login import OpenURL, log_in
from agentfsm.mcp.oauth.server_authorization import ServerAuthorization


@attrs.frozen(kw_only=True)
class LoginStatus(Value):
    """State of the stored login at a server."""

    is_stored: bool
    """Whether there is a token."""

    expires_in_s: float | None = None
    """Seconds until the token expires; negative: it has expired. None: unknown."""

    is_renewable: bool = False
    """Whether the token is renewed without a person."""

    scope: str | None = None
    """Scope of the token, as the authorization server gave it. None: unknown."""

    is_refused: bool = False
    """Whether the server has refused a request since the login, so that a person has to log in again."""


@attrs.frozen
class ServerLogins(Value):
    """Logins at one server."""

    name: str
    transport: RemoteTransport
    authorization: ServerAuthorization

    @classmethod
    def for_server(cls, name: str, transport: ServerTransport, origin: str | None) -> ServerLogins | None:
        """Return the logins of a server, or None if it does not use OAuth. Errors will name the way to log in."""
        if not isinstance(transport, RemoteTransport) or transport.authorization is None:
            return None
        transport.authorization.login_advice = _advise(name, transport.authorization, origin)
        return cls(name, transport, transport.authorization)

    @property
    def needs_person(self) -> bool:
        """Whether the tokens come from the login of a person."""
        return self.authorization.oauth.grant == "authorization_code"

    async def log_in(self, open_url: OpenURL | None, timeout_s: float) -> None:
        """Let a person log in.

        Raises:
            MisuseError: when the server needs no person.
            MCPServerError: when the login was refused or failed.
        """
        if not self.needs_person:
            raise MisuseError(f"the MCP server {self.name!r} needs no login of a person: it has client credentials")
        await connection_thread.run(self._log_in, open_url or open_browser, timeout_s)

    async def _log_in(self, open_url: OpenURL, timeout_s: float) -> None:
        async with httpx2.AsyncClient(
            transport=self.transport.build_network_transport(), headers=dict(self.transport.headers)
        ) as client:
            await log_in(self.authorization, client, open_url, timeout_s)

    async def log_out(self) -> bool:
        """Remove the stored tokens, and return whether there were any."""
        return await connection_thread.run(self.authorization.storage.delete)

    async def read_status(self) -> LoginStatus:
        """Return the state of the stored login.

        Raises:
            MCPServerError: when the tokens cannot be read.
        """
        login = await connection_thread.run(self.authorization.storage.read)
        if login.tokens is None:
            return LoginStatus(is_stored=False, is_refused=login.challenge is not None)
        return LoginStatus(
            is_stored=True,
            expires_in_s=None if login.expires_at is None else login.expires_at - time.time(),
            is_renewable=login.tokens.refresh_token is not None,
            scope=login.tokens.scope,
            is_refused=login.challenge is not None,
        )


def _advise(name: str, authorization: ServerAuthorization, origin: str | None) -> str:
    if origin is not None and Path(origin).is_absolute():  # a directory of servers has a name
        return f"run: agentfsm mcp login {shlex.quote(origin)} {name}"
    if authorization.oauth == OAuth():
        return f"run: agentfsm mcp login {shlex.quote(authorization.url)}"
    return f"call `login` of the MCPServer {name!r} in your program"


async def open_browser(url: str) -> None:
    """Open a URL in the browser of this machine."""
    await anyio.to_thread.run_sync(webbrowser.open, url)
