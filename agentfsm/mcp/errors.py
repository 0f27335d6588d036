"""What can go wrong with a server before any call: it cannot be started, reached or trusted."""

from __future__ import annotations

from agentfsm.core.errors import AgentError


class MCPServerError(AgentError):
    """A server cannot be used; the text says which, why, and what to do.

    Attributes:
        why: The same for the model, without what is for developers only: the command line, what the server has logged.
        is_passing: Whether it may work when it is tried again.
    """

    def __init__(self, message: str, *, why: str | None = None, is_passing: bool = False) -> None:
        super().__init__(message)
        self.why = message if why is None else why
        self.is_passing = is_passing


class ServerCircuitOpenError(MCPServerError):
    """A server has failed so often that it is not asked for a while.

    Attributes:
        wait_s: Seconds until it may be asked again, above 0.
    """

    def __init__(self, server: str, wait_s: float) -> None:
        super().__init__(
            f"the MCP server {server!r} was not asked: its last requests all failed, so it rests. "
            f"Try again in {max(1, round(wait_s))} s, or go on without its tools."
        )
        self.wait_s = wait_s


class NoAnswerError(MCPServerError):
    """A server could be asked, and has not answered, or not so that it could be used; the cause tells more."""
