"""A person's yes to a call, over the protocol: the client puts the question to whoever sits in front of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import mcp.types as m

from agentfsm.core.text_safety import format_exact_json, strip_unsafe
from agentfsm.core.value import Value
from agentfsm.mcp.server.input_requests import InputBroker, InputNotGivenError, InterruptedCall, RequestContext

# The key of the one question that a call has.
APPROVAL_KEY: Final = "approval"
# Characters of the arguments, which a person reads; a call with longer ones is not put to anybody.
MAX_APPROVAL_CHARS: Final = 20_000
APPROVAL_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "approve": {"type": "boolean", "title": "Run it", "description": "Whether the call may run.", "default": False}
    },
    "required": ["approve"],
}


@attrs.frozen(kw_only=True)
class ApprovalRequest(Value):
    """What a person is asked: may this call run?"""

    tool: str
    arguments: dict[str, Any]
    description: str
    # What it will do, where the tool says so.
    expires_s: float
    # Seconds for which an answer counts.

    @property
    def text(self) -> str:
        """The question with the exact arguments; hidden characters are spelt out."""
        says = f"{strip_unsafe(self.description)}\n\n" if self.description else ""
        return f"May {self.tool} run?\n\n{says}Arguments: {format_exact_json(self.arguments)}"

    async def obtain(
        self, broker: InputBroker, ctx: RequestContext, call_state: InterruptedCall, replies: Mapping[str, Any] | None
    ) -> m.InputRequiredResult | None:
        """Return None where a person said yes, or a question that is on its way.

        Args:
            broker: Puts it to people.
            ctx: Of the request.
            call_state: How far the call has come.
            replies: What the client brings in answer to this very question; None: it was not put yet.

        Raises:
            UnansweredError: when it cannot be put, or the answer is not a yes.
        """
        lead = f"{self.tool} was not run"
        if replies is None:
            if len(self.text) > MAX_APPROVAL_CHARS:
                raise InputNotGivenError(f"{lead}: a person could not read so long arguments: shorten them")
            form = m.ElicitRequestFormParams(message=self.text, requested_schema=APPROVAL_SCHEMA)
            said = await broker.request_input(
                ctx, call_state, {APPROVAL_KEY: form}, lead=lead, expires_s=self.expires_s
            )
            if isinstance(said, m.InputRequiredResult):
                return said
            replies = said
        if (no := _explain_refusal(replies.get(APPROVAL_KEY))) is not None:
            raise InputNotGivenError(f"{lead}: {no}")
        return None


def _explain_refusal(answer: object) -> str | None:
    """Return None for a yes, and nothing else than a yes; else why the call does not run."""
    if not isinstance(answer, m.ElicitResult):
        return "the question whether it may has no answer"
    if answer.action == "accept" and (answer.content or {}).get("approve") is True:
        return None
    if answer.action == "cancel":
        return "the question whether it may was dismissed. Do not try it again unasked."
    return "a person rejected it. Do not try it again unasked."
