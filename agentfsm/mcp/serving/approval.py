"""A person's yes to a call, over the protocol: the client puts the question to whoever sits in front of it.

The revision 2026-07-28 has no requests from server to client. There the call is answered with the question, and made
again with the answer; what was asked is kept here under a token that nobody can guess, and counts once. On the
handshake revisions the question is a request of its own while the call waits.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Any, Final

import anyio
import attrs
import mcp.types as m
from mcp import MCPError
from mcp.server import ServerRequestContext
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from agentfsm.core.clean import clean, exact_json
from agentfsm.ports import Clock

QUESTION: Final = "approval"
# The key of the one question that a call has.
MOST_ASKED: Final = 1_000
# Questions that wait for their answer; the oldest are forgotten, so that asking costs a client nothing but its call.
SHOWN_CHARS: Final = 20_000
# Of the arguments, which a person reads; a call with longer ones is not put to anybody.
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "approve": {"type": "boolean", "title": "Run it", "description": "Whether the call may run.", "default": False}
    },
    "required": ["approve"],
}


@attrs.frozen(kw_only=True)
class Question:
    """What a person is asked: may this call run?"""

    tool: str
    arguments: dict[str, Any]
    description: str
    # What it will do, where the tool says so.
    digest: str
    # Of the tool and the arguments: what a yes is bound to.
    expires_s: float
    # Seconds for which an answer counts.

    @property
    def text(self) -> str:
        """The question with the exact arguments; hidden characters are spelt out."""
        says = f"{clean(self.description)}\n\n" if self.description else ""
        return f"May {self.tool} run?\n\n{says}Arguments: {exact_json(self.arguments)}"

    @property
    def is_too_long(self) -> bool:
        """Whether nobody would read it to its end."""
        return len(self.text) > SHOWN_CHARS


@attrs.define(eq=False, repr=False)
class Asking:
    """Puts calls to people, and keeps what was asked until it is answered."""

    clock: Clock
    _asked: OrderedDict[str, tuple[str, float]] = attrs.field(factory=OrderedDict, init=False)
    # By token: the digest of what was asked, and until when an answer counts (monotonic seconds).

    async def answer(
        self, ctx: ServerRequestContext[Any, Any], params: m.CallToolRequestParams, question: Question
    ) -> m.InputRequiredResult | str | None:
        """Return None where a person said yes, a question that is on its way, or why the call does not run.

        Raises:
            MCPError: when the request answers a question that was not asked, or was answered already.
        """
        if params.request_state is not None:
            self._spend(params.request_state, question)
            return _verdict(question, (params.input_responses or {}).get(QUESTION))
        if question.is_too_long:
            return f"{question.tool} needs a person's approval, and its arguments are too long to be read: shorten them"
        if not _can_ask(ctx):
            return (
                f"{question.tool} was not run: it needs a person's approval, and this client cannot ask anybody (it "
                "has not declared elicitation). Use a client that can, or run it in an agent, where approvals wait."
            )
        if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            return self._request(question)
        with anyio.move_on_after(question.expires_s):
            return _verdict(question, await ctx.session.elicit_form(question.text, SCHEMA, ctx.request_id))
        return f"{question.tool} was not run: nobody approved it in time"

    def _request(self, question: Question) -> m.InputRequiredResult:
        token = secrets.token_urlsafe(24)
        self._asked[token] = question.digest, self.clock.monotonic() + question.expires_s
        if len(self._asked) > MOST_ASKED:
            self._asked.popitem(last=False)
        form = m.ElicitRequestFormParams(message=question.text, requested_schema=SCHEMA)
        return m.InputRequiredResult(input_requests={QUESTION: m.ElicitRequest(params=form)}, request_state=token)

    def _spend(self, token: str, question: Question) -> None:
        digest, until = self._asked.pop(token, ("", 0.0))
        if digest != question.digest or self.clock.monotonic() > until:
            raise MCPError(
                m.INVALID_PARAMS,
                "Invalid or expired requestState: this very call was not asked about, or was answered already. Nothing "
                "was run; make the call again without requestState.",
            )


def _can_ask(ctx: ServerRequestContext[Any, Any]) -> bool:
    declared = ctx.session.client_capabilities
    elicitation = None if declared is None else declared.elicitation
    if elicitation is None or (elicitation.form is None and elicitation.url is not None):
        return False
    return ctx.protocol_version in MODERN_PROTOCOL_VERSIONS or ctx.session.can_send_request


def _verdict(question: Question, answer: object) -> str | None:
    """Return None for a yes, and nothing else than a yes; else why the call does not run."""
    if not isinstance(answer, m.ElicitResult):
        return f"{question.tool} was not run: the question whether it may has no answer"
    if answer.action == "accept" and (answer.content or {}).get("approve") is True:
        return None
    if answer.action == "cancel":
        return f"{question.tool} was not run: the question whether it may was dismissed. Do not try it again unasked."
    return f"{question.tool} was not run: a person rejected it. Do not try it again unasked."
