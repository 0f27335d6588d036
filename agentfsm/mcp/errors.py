"""What can go wrong with a server before any call: it cannot be started, reached or trusted."""

from __future__ import annotations

from agentfsm.core.errors import AgentError


class MCPServerError(AgentError):
    """A server cannot be used; the text says which, why, and what to do."""
