"""Errors of a server outside of tool calls: it cannot be started, reached or trusted."""

from __future__ import annotations

from agentfsm.core.errors import AgentError


class MCPServerError(AgentError):
    """A server cannot be used; the message names the server, the reason, and a remedy.

    Attributes:
        why: The message for the model, without details for developers such as the command line and the server's log.
        is_passing: Whether a retry may succeed.
    """

    def __init__(self, message: str, *, why: str | None = None, is_passing: bool = False) -> None:
        super().__init__(message)
        self.why: str = message if why is None else why
        self.is_passing = is_passing


class ServerCircuitOpenError(MCPServerError):
    """A server has failed so often that it gets no requests for a while.

    Attributes:
        wait_s: Seconds until the next request is allowed, above 0.
    """

    def __init__(self, server: str, wait_s: float) -> None:
        super().__init__(
            f"no request was sent to the MCP server {server!r}: its last requests all failed. "
            f"Try again in {max(1, round(wait_s))} s, or continue without its tools."
        )
        self.wait_s = wait_s


class NoAnswerError(MCPServerError):
    """A server is connected, but its answer is missing or invalid; `__cause__` has the details."""


class LoginRequiredError(MCPServerError):
    """A remote server wants a token that only a person can get, by logging in.

    Attributes:
        reason: Why the stored login does not suffice.
        advice: Command or method for the login, as the end of a sentence.
    """

    def __init__(self, reason: str, advice: str, *, server: str | None = None) -> None:
        place = "a person has to log in" if server is None else f"a person has to log in to the MCP server {server!r}"
        super().__init__(f"{place}: {reason}. To log in, {advice}")
        self.reason = reason
        self.advice = advice


class AuthorizationServerError(MCPServerError):
    """The authorization server of a remote server cannot be reached, or has trouble; the request was not sent."""
