"""The port of logins: the access of each user to the server of a tool."""

from __future__ import annotations

from typing import Any, Protocol


class ToolLogin(Protocol):
    """Login of the users of runs at the server of a tool: `agentfsm.logins.Login`, or your own."""

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
