"""Calls that ask people, over the protocol: what is asked, and how far such a call has come.

The revision 2026-07-28 has no requests from server to client. There the call is answered with the questions, and made
again with the answers. How far it has come is kept here, under a token that nobody can guess and that counts once: a
client that brings it back has nothing in its hands that it could read or change. On the handshake revisions each
question is a request of its own while the call waits.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import anyio
import attrs
import mcp.types as m
from mcp import MCPError
from mcp.server import ServerRequestContext
from mcp.types.version import MODERN_PROTOCOL_VERSIONS

from agentfsm.core.calls import Inquiry
from agentfsm.core.pending import Question
from agentfsm.core.value import Value
from agentfsm.ports.store import Clock
from agentfsm.tools.queue.result_text import describe_error

# Calls that wait for their answers; the oldest are forgotten, so that asking costs a client nothing but its call.
MAX_WAITING_CALLS: Final = 1_000
# Characters kept of all of them: as much as their tools' states and answers usually have a hundred times over.
MAX_WAITING_CHARS: Final = 20_000_000

RequestContext: TypeAlias = ServerRequestContext[Any, Any]
ElicitParams: TypeAlias = m.ElicitRequestFormParams | m.ElicitRequestURLParams


class InputNotGivenError(Exception):
    """A call ends without a result of its tool, since nobody could be asked, or nobody agreed; says so to the model."""


@attrs.frozen(kw_only=True)
class InterruptedCall(Value):
    """How far a call has come that asks people."""

    call_id: str
    key: str
    # Of the call: the same on every attempt.
    digest: str
    # Of the tool and the arguments: what the answers are bound to.
    is_approved: bool = False
    # Whether a person said yes to this very call.
    questions: tuple[Question, ...] = ()
    # What its tool has asked and nobody has answered yet.
    inquiry: Inquiry = attrs.field(factory=Inquiry)
    # What its tool has asked, and was told.

    @property
    def chars(self) -> int:
        """About what it takes to keep it."""
        asked = [attrs.asdict(question) for question in self.questions]
        return len(self.inquiry.state) + len(json.dumps([asked, dict(self.inquiry.answers)]))


class _WaitingCall(NamedTuple):
    call_state: InterruptedCall
    expires_at: float
    # Monotonic seconds: for how long an answer counts.
    chars: int


@attrs.define(eq=False, repr=False)
class InputBroker:
    """Puts questions to people, and keeps the calls that wait for an answer."""

    clock: Clock
    _waiting: OrderedDict[str, _WaitingCall] = attrs.field(factory=OrderedDict, init=False)
    # By token.
    _chars: int = attrs.field(default=0, init=False)
    # Of all of them.

    async def request_input(
        self,
        ctx: RequestContext,
        call_state: InterruptedCall,
        requests: Mapping[str, ElicitParams],
        *,
        lead: str,
        expires_s: float,
    ) -> m.InputRequiredResult | Mapping[str, Any]:
        """Return what people say, or, where the call cannot wait for that, what it is answered with.

        Args:
            ctx: Of the request.
            call_state: How far the call has come.
            requests: What is asked, by key.
            lead: Begins the text for the model, where there is no answer: "wipe was not run".
            expires_s: Seconds for which an answer counts.

        Raises:
            UnansweredError: when the client cannot ask this, or nobody answers in time.
        """
        for asked in requests.values():
            _check_can_ask(ctx, asked, lead)
        if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            listed: dict[str, m.InputRequest] = {key: m.ElicitRequest(params=each) for key, each in requests.items()}
            return m.InputRequiredResult(input_requests=listed, request_state=self._remember(call_state, expires_s))
        with anyio.move_on_after(expires_s):
            try:
                return {key: await _elicit(ctx, each) for key, each in requests.items()}
            except (MCPError, ValueError) as error:  # it has refused, or its answer is none of the protocol's
                why = describe_error(error)
                raise InputNotGivenError(f"{lead}: the client could not put its question to anybody ({why})") from error
        raise InputNotGivenError(f"{lead}: nobody has answered its question in time")

    def _remember(self, call_state: InterruptedCall, expires_s: float) -> str:
        token = secrets.token_urlsafe(24)
        kept = _WaitingCall(call_state, self.clock.monotonic() + expires_s, call_state.chars)
        self._waiting[token] = kept
        self._chars += kept.chars
        while len(self._waiting) > 1 and (len(self._waiting) > MAX_WAITING_CALLS or self._chars > MAX_WAITING_CHARS):
            self._chars -= self._waiting.popitem(last=False)[1].chars
        return token

    def resume(self, token: str, digest: str) -> InterruptedCall:
        """Return the call that waits under a token, which counts once.

        Raises:
            MCPError: when none does, or another call does, or it is too late.
        """
        kept = self._waiting.pop(token, None)
        if kept is not None:
            self._chars -= kept.chars
            if kept.call_state.digest == digest and self.clock.monotonic() <= kept.expires_at:
                return kept.call_state
        raise MCPError(
            m.INVALID_PARAMS,
            "Invalid or expired requestState: this very call was not asked about, or was answered already. Nothing "
            "was run; make the call again without requestState.",
        )


def _check_can_ask(ctx: RequestContext, asked: ElicitParams, lead: str) -> None:
    declared = ctx.session.client_capabilities
    elicitation = None if declared is None else declared.elicitation
    has_way = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS or ctx.session.can_send_request
    if elicitation is None or not has_way:
        what = "ask anybody (it has not declared elicitation)"
    elif isinstance(asked, m.ElicitRequestURLParams) and elicitation.url is None:
        what = "have an address opened (it has not declared elicitation by URL)"
    elif isinstance(asked, m.ElicitRequestFormParams) and elicitation.form is None and elicitation.url is not None:
        what = "have a form filled in (it has not declared elicitation by form)"
    else:
        return
    raise InputNotGivenError(
        f"{lead}: it has to ask a person, and this client cannot {what}. Use a client that can, or run it in an "
        "agent, where questions wait."
    )


async def _elicit(ctx: RequestContext, asked: ElicitParams) -> m.ElicitResult:
    if isinstance(asked, m.ElicitRequestFormParams):
        return await ctx.session.elicit_form(asked.message, asked.requested_schema, ctx.request_id)
    return await ctx.session.elicit_url(asked.message, asked.url, secrets.token_urlsafe(), ctx.request_id)
