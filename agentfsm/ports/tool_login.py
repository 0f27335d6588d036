"""The port of logins: the access of each user to the server of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class LoginLink(Value):
    """A link that a user was given, and its outcome."""

    tenant: str | None
    """Tenant of the user."""

    user: str | None
    """User who logs in."""

    run_id: str
    """Run whose call waits."""

    call_id: str
    """The call."""

    outcome: str = ""
    """"granted" or "declined" once the browser has returned; else empty."""


class ToolLogin(Protocol):
    """Login of the users of runs at the server of a tool: `agentfsm.logins.Login`, or your own."""

    @property
    def server(self) -> str:
        """Name of the login in waits: the URL of the server."""
        ...

    async def require(self, ctx: Any, /) -> None:
        """Check, before the start of a call is recorded, that the user of its run has a login.

        Args:
            ctx: The `RunContext` of the call.

        Raises:
            LoginRequired: when the user has to log in: the call waits, and has not started.
            ToolError: when it cannot be known; the call is refused with the text.
        """
        ...

    async def is_ready(self, *, tenant: str | None, user: str | None) -> bool:
        """Return whether the user has a login, so that a call which waits for it may continue."""
        ...

    async def find_link(self, query: Mapping[str, str], /) -> LoginLink | None:
        """Return the link that a browser has returned from; None if it is not one of this server's.

        Args:
            query: Parameters of the URL that the browser was sent to.
        """
        ...

    async def complete(self, query: Mapping[str, str], /) -> LoginLink | None:
        """Complete a login, and return the link with its outcome. The same answer may be given again.

        Raises:
            ToolError: when the link has expired, or the answer is not valid.
        """
        ...

    async def forget(self, *, tenant: str | None, user: str | None) -> bool:
        """Revoke and delete the login of a user; return whether there was one.

        Raises:
            ToolError: when it was not revoked; it is deleted nevertheless.
            StoreError: when it was not deleted.
        """
        ...
