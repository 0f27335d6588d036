"""The model of flows, which is never asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.core.errors import ModelError
from agentfsm.ports.model import Emit, Model, Reply, Request

if TYPE_CHECKING:
    from agentfsm.core.usage import Usage


class NoModel(Model):
    """Stands where an agent has its model."""

    name = "none"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:  # noqa: ARG002  it answers nothing
        """Refuse the request."""
        raise ModelError("a flow has no model: its steps are given, and its agents are steps")

    def cost_usd(self, usage: Usage) -> float | None:  # noqa: ARG002  a flow requests nothing itself
        """Return 0, so that a limit of costs is that of the steps."""
        return 0.0
