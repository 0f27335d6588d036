"""Background runs: runs of agents that go on after the call that began them."""

from __future__ import annotations

import attrs

from agentfsm.core.messages import SystemMessage, ToolCall, ToolResult
from agentfsm.core.pending import Pending
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class BackgroundRun(Value):
    """The run of an agent that a call began and left in the background."""

    call: ToolCall
    """The call that began it. The id of the run is made of the ids of the calling run and of this call."""

    pending: tuple[Pending, ...] = ()
    """Things that it waited for when it was last executed; empty while it goes on, and at its end."""

    result: ToolResult | None = None
    """Result of its work, with its cost and its labels; None until it has ended."""

    is_told: bool = False
    """Whether the model of the calling run has the result in its history."""

    @property
    def note(self) -> SystemMessage:
        """The result as the model of the calling run reads it."""
        text = "" if self.result is None else self.result.text
        return SystemMessage(text=f"[Background run {self.call.id}] {text}")
