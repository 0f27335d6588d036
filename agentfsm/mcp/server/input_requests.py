"""The questions of served calls to people, over the protocol: the tools' own (`InputRequired`), and their approval.

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
from agentfsm.core.errors import MisuseError
from agentfsm.core.pending import Question
from agentfsm.core.text_safety import format_exact_json, strip_unsafe
from agentfsm.core.value import Value
from agentfsm.ports.store import Clock
from agentfsm.tools.question_validation import validate_answer
from agentfsm.tools.queue.result_text import describe_error

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
    """Of the call: the same on every attempt."""

    digest: str
    """Of the tool and the arguments: what the answers are bound to."""

    is_approved: bool = False
    """Whether a person said yes to this very call."""

    questions: tuple[Question, ...] = ()
    """What its tool has asked and nobody has answered yet."""

    inquiry: Inquiry = attrs.field(factory=Inquiry)
    """What its tool has asked, and was told."""

    @property
    def chars(self) -> int:
        """About what it takes to keep it."""
        asked = [attrs.asdict(question) for question in self.questions]
        return len(self.inquiry.state) + len(json.dumps([asked, dict(self.inquiry.answers)]))


class _WaitingCall(NamedTuple):
    call_state: InterruptedCall
    expires_at: float
    """Monotonic seconds: for how long an answer counts."""

    chars: int


@attrs.define(eq=False, repr=False)
class InputBroker:
    """Puts questions to people, and keeps the calls that wait for an answer."""

    clock: Clock
    _waiting: OrderedDict[str, _WaitingCall] = attrs.field(factory=OrderedDict, init=False)
    """By token."""

    _chars: int = attrs.field(default=0, init=False)
    """Of all of them."""

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
            InputNotGivenError: when the client cannot ask this, or nobody answers in time.
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


@attrs.frozen(kw_only=True)
class ApprovalRequest(Value):
    """What a person is asked: may this call run?"""

    tool: str
    arguments: dict[str, Any]
    description: str
    """What it will do, where the tool says so."""

    expires_s: float
    """Seconds for which an answer counts."""

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
            InputNotGivenError: when it cannot be put, or the answer is not a yes.
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


async def collect_answers(
    broker: InputBroker,
    ctx: RequestContext,
    call_state: InterruptedCall,
    replies: Mapping[str, Any],
    *,
    tool: str,
    expires_s: float,
) -> m.InputRequiredResult | InterruptedCall:
    """Return the call with the answers to what its tool has asked, or the questions that are on their way.

    Args:
        broker: Puts them to people.
        ctx: Of the request.
        call_state: How far the call has come.
        replies: What the client brings along, by the question's key; what was not asked is passed over.
        tool: The tool's name.
        expires_s: Seconds for which an answer counts.

    Raises:
        InputNotGivenError: when they cannot be put, are dismissed, or an answer does not fit.
    """
    lead = f"{tool} was not finished"
    told = _add_answers(call_state, replies, lead)
    if not told.questions:
        return told
    requests = {question.key: _to_elicit_params(question) for question in told.questions}
    said = await broker.request_input(ctx, told, requests, lead=lead, expires_s=expires_s)
    return said if isinstance(said, m.InputRequiredResult) else _add_answers(told, said, lead)


def _to_elicit_params(question: Question) -> ElicitParams:
    if question.url:
        return m.ElicitRequestURLParams(message=strip_unsafe(question.message), url=question.url)
    schema = {"type": "object", "properties": {}, **(question.schema or {})}
    return m.ElicitRequestFormParams(message=strip_unsafe(question.message), requested_schema=schema)


def _add_answers(call_state: InterruptedCall, replies: Mapping[str, Any], lead: str) -> InterruptedCall:
    """Return the call with those answers that are there; the other questions stay."""
    given = {key: reply for key, reply in replies.items() if isinstance(reply, m.ElicitResult)}
    answers = {
        each.key: _parse_answer(each, given[each.key], lead) for each in call_state.questions if each.key in given
    }
    return attrs.evolve(
        call_state,
        questions=tuple(question for question in call_state.questions if question.key not in answers),
        inquiry=attrs.evolve(call_state.inquiry, answers={**call_state.inquiry.answers, **answers}),
    )


def _parse_answer(question: Question, reply: m.ElicitResult, lead: str) -> dict[str, Any] | None:
    """Return what the tool is told: an object, or None where it was declined."""
    if reply.action == "cancel":
        raise InputNotGivenError(f"{lead}: the question {question.key!r} was dismissed. Do not try it again unasked.")
    if reply.action == "decline":
        return None
    try:
        return validate_answer(question, None if question.url else reply.content)
    except MisuseError as error:
        raise InputNotGivenError(f"{lead}: {error}. Call it again to have a person asked anew.") from error
