"""Approvals that a person gives once for all calls of a tool. They are stored with the server's pin."""

from __future__ import annotations

from enum import StrEnum

import attrs

from agentfsm.mcp.trust.consent import ConsentGate
from agentfsm.tools.schema.binding import Arguments


class StandingScope(StrEnum):
    """Calls that a standing approval covers."""

    TOOL = "tool"
    """All calls of this tool, as it is described now."""

    READING = "reading"
    """All calls of the server's tools that it describes as read-only."""


@attrs.frozen(eq=False, kw_only=True)
class StandingRule:
    """Rule whether a call needs approval: it does, unless a person has approved all calls of the tool.

    An approval of a tool is bound to the hash of its text, so it ends when the tool changes.
    """

    gate: ConsentGate
    """Check of the tool's server, which stores the approvals."""

    text_hash: str
    """Hash of the tool's text."""

    claims_reading: bool
    """Whether the server describes the tool as read-only. It counts only after a person has said so."""

    def __call__(self, _arguments: Arguments) -> bool:
        """Return whether a call of the tool needs approval."""
        return not self.is_covered()

    def is_covered(self) -> bool:
        """Return whether a person has approved all calls of the tool."""
        standing = self.gate.standing
        return self.text_hash in standing.tools or (self.claims_reading and standing.reading)

    def scopes(self) -> tuple[StandingScope, ...]:
        """Return the standing approvals that a person may give."""
        return (StandingScope.TOOL, *([StandingScope.READING] if self.claims_reading else []))

    def allow(self, scope: str) -> None:
        """Store a standing approval.

        Raises:
            MCPServerError: when it cannot be stored.
        """
        self.gate.add_standing(tool=self.text_hash if scope == StandingScope.TOOL else None)
