"""Connections to one server with the tokens of users: each user has one, and no other user's calls go over it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import attrs
import httpx2

from agentfsm.core.errors import MisuseError
from agentfsm.logins import Login
from agentfsm.logins.login import UNAUTHORIZED
from agentfsm.mcp.client.catalogue import Catalogue
from agentfsm.mcp.client.elicitation import ElicitationRouter
from agentfsm.mcp.client.tasks import TasksExtension
from agentfsm.mcp.connection.server_connection import ServerConnection
from agentfsm.mcp.connection.transports import RemoteTransport, ServerTransport
from agentfsm.mcp.errors import LoginRequiredError


class _UserTokens(httpx2.Auth):
    """Authentication of the requests of one user's connection. A missing login is an error of the request."""

    def __init__(self, login: Login, tenant: str | None, user: str | None) -> None:
        self._login = login
        self._tenant = tenant
        self._user = user

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        token = await self._add_token(request, refused="")
        response = yield request
        if response.status_code == UNAUTHORIZED:  # it was refused, so it has done nothing
            await self._add_token(request, refused=token)
            yield request

    async def _add_token(self, request: httpx2.Request, refused: str) -> str:
        token = await self._login.find_token(tenant=self._tenant, user=self._user, refused=refused)
        if token is None:
            raise LoginRequiredError("the user has no login", "let the user open the link of the run")
        self._login.authorize(request, token)
        return token


@attrs.define(eq=False, repr=False)
class UserSession:
    """The connection of one user, with what belongs to it."""

    connection: ServerConnection
    catalogue: Catalogue = attrs.field(factory=Catalogue)
    elicitation_router: ElicitationRouter = attrs.field(factory=ElicitationRouter)


@attrs.define(eq=False, repr=False)
class UserSessions:
    """The connections of the users of one server, which open on demand."""

    name: str
    transport: ServerTransport
    start_s: float
    login: Login | None
    _sessions: dict[tuple[str | None, str | None], UserSession] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        if self.login is not None and not isinstance(self.transport, RemoteTransport):
            raise MisuseError(f"the MCP server {self.name!r} is a process of this machine, which takes no logins")

    def find(self, tenant: str | None, user: str | None) -> UserSession:
        """Return the connection of a user."""
        found = self._sessions.get((tenant, user))
        if found is None:
            found = self._sessions[tenant, user] = self._build(tenant, user)
        return found

    def _build(self, tenant: str | None, user: str | None) -> UserSession:
        assert self.login is not None  # callers have checked it  # noqa: S101
        assert isinstance(self.transport, RemoteTransport)  # noqa: S101
        transport = attrs.evolve(self.transport, auth=_UserTokens(self.login, tenant, user))
        router = ElicitationRouter()
        connection = ServerConnection(
            name=self.name,
            transport=transport,
            start_s=self.start_s,
            elicit=router.elicit,
            extensions=(TasksExtension(),),
        )
        return UserSession(connection, elicitation_router=router)

    async def aclose(self) -> None:
        """Close the connections."""
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.connection.aclose()
