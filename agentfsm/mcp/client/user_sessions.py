"""Connections to one server with the tokens of users: each user has one, and no other user's calls go over it."""

from __future__ import annotations

from typing import Final, NoReturn

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.logins import Login
from agentfsm.logins.login import TokenAuth
from agentfsm.mcp.client.catalogue import Catalogue
from agentfsm.mcp.client.elicitation import ElicitationRouter
from agentfsm.mcp.client.tasks import TasksExtension
from agentfsm.mcp.connection.server_connection import ServerConnection
from agentfsm.mcp.connection.transports import RemoteTransport, ServerTransport
from agentfsm.mcp.errors import LoginRequiredError

# Connections that are kept. That which was used longest ago is closed for one more, and opens again when it is needed.
MAX_SESSIONS: Final = 100


class _UserTokens(TokenAuth):
    """Authentication of the requests of one user's connection."""

    async def _report_missing(self) -> NoReturn:
        raise LoginRequiredError("the user has no login", "let the user open the link of the run")


@attrs.define(eq=False, repr=False)
class UserSession:
    """The connection of one user, with what belongs to it."""

    connection: ServerConnection
    auth: TokenAuth
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

    async def find(self, tenant: str | None, user: str | None) -> UserSession:
        """Return the connection of a user."""
        found = self._sessions.pop((tenant, user), None) or self._build(tenant, user)
        self._sessions[tenant, user] = found
        while len(self._sessions) > MAX_SESSIONS:
            oldest = self._sessions.pop(next(iter(self._sessions)))
            await oldest.connection.aclose()
        return found

    def _build(self, tenant: str | None, user: str | None) -> UserSession:
        assert self.login is not None  # callers have checked it  # noqa: S101
        assert isinstance(self.transport, RemoteTransport)  # noqa: S101
        auth = _UserTokens(self.login, tenant=tenant, user=user)
        transport = attrs.evolve(self.transport, auth=auth)
        router = ElicitationRouter()
        connection = ServerConnection(
            name=self.name,
            transport=transport,
            start_s=self.start_s,
            elicit=router.elicit,
            extensions=(TasksExtension(),),
        )
        return UserSession(connection, auth, elicitation_router=router)

    async def aclose(self) -> None:
        """Close the connections."""
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.connection.aclose()
