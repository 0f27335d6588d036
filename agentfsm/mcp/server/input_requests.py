"""Ask people questions for served calls, over the protocol: the tools' own (`InputRequired`), and approvals.

The revision 2026-07-28 has no requests from server to client. There the call is answered with the questions, and the
client makes it again with the answers. The state of the call is kept here, under an unguessable token that is valid
once, so a client can neither read nor change it. On the handshake revisions each question is a request of its own while
the call waits.
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

# Key of the approval question.
APPROVAL_KEY: Final = "approval"
# Maximum length of an approval question in characters, since a person has to read it; other calls are refused.
MAX_APPROVAL_CHARS: Final = 20_000
APPROVAL_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "approve": {"type": "boolean", "title": "Run it", "description": "Whether the call may run.", "default": False}
    },
    "required": ["approve"],
}
# Maximum of calls that wait for answers; the oldest are dropped and have to be made again.
MAX_WAITING_CALLS: Final = 1_000
# Maximum size of these calls in characters: a hundred times the usual size of their states and answers.
MAX_WAITING_CHARS: Final = 20_000_000

RequestContext: TypeAlias = ServerRequestContext[Any, Any]
ElicitParams: TypeAlias = m.ElicitRequestFormParams | m.ElicitRequestURLParams


class InputNotGivenError(Exception):
    """A call ended without a result, because no person could be asked or agreed. The message is for the model."""


@attrs.frozen(kw_only=True)
class InterruptedCall(Value):
    """State of a call that asks people."""

    call_id: str
    key: str
    """Idempotency key of the call, the same on every attempt."""

    digest: str
    """Hash of the tool and the arguments. Answers are valid only for this digest."""

    is_approved: bool = False
    """Whether a person approved exactly this call."""

    questions: tuple[Question, ...] = ()
    """Questions of the tool that are not answered yet."""

    inquiry: Inquiry = attrs.field(factory=Inquiry)
    """State of the tool's questions, and the answers so far."""

    @property
    def chars(self) -> int:
        """Approximate size in characters."""
        asked = [attrs.asdict(question) for question in self.questions]
        return len(self.inquiry.state) + len(json.dumps([asked, dict(self.inquiry.answers)]))


class _WaitingCall(NamedTuple):
    call_state: InterruptedCall
    expires_at: float
    """Time until which an answer is valid, in seconds of the monotonic clock."""

    chars: int


@attrs.define(eq=False, repr=False)
class InputBroker:
    """Asks people through the client, and keeps the calls that wait for an answer."""

    clock: Clock
    _waiting: OrderedDict[str, _WaitingCall] = attrs.field(factory=OrderedDict, init=False)
    """Waiting calls by token, the oldest first."""

    _chars: int = attrs.field(default=0, init=False)
    """Total size of the waiting calls in characters."""

    async def request_input(
        self,
        ctx: RequestContext,
        call_state: InterruptedCall,
        requests: Mapping[str, ElicitParams],
        *,
        lead: str,
        expires_s: float,
    ) -> m.InputRequiredResult | Mapping[str, Any]:
        """Return people's answers, or a result with which the client asks them and makes the call again.

        Args:
            ctx: Context of the request.
            call_state: State of the call.
            requests: Questions by key.
            lead: Beginning of the error text for the model: "wipe was not run".
            expires_s: Seconds for which an answer is valid.

        Raises:
            MCPError: when a client of 2026-07-28 has not declared that it can ask this.
            InputNotGivenError: when another client cannot ask this, or no answer comes in time.
        """
        for asked in requests.values():
            _check_can_ask(ctx, asked, lead)
        if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            listed: dict[str, m.InputRequest] = {key: m.ElicitRequest(params=each) for key, each in requests.items()}
            return m.InputRequiredResult(input_requests=listed, request_state=self._remember(call_state, expires_s))
        with anyio.move_on_after(expires_s):
            try:
                return {key: await _elicit(ctx, each) for key, each in requests.items()}
            except (MCPError, ValueError) as error:  # the client refused, or its answer is invalid
                why = describe_error(error)
                raise InputNotGivenError(f"{lead}: the client could not ask a person ({why})") from error
        raise InputNotGivenError(f"{lead}: its question was not answered in time")

    def _remember(self, call_state: InterruptedCall, expires_s: float) -> str:
        token = secrets.token_urlsafe(24)
        kept = _WaitingCall(call_state, self.clock.monotonic() + expires_s, call_state.chars)
        self._waiting[token] = kept
        self._chars += kept.chars
        while len(self._waiting) > 1 and (len(self._waiting) > MAX_WAITING_CALLS or self._chars > MAX_WAITING_CHARS):
            self._chars -= self._waiting.popitem(last=False)[1].chars
        return token

    def resume(self, token: str, digest: str) -> InterruptedCall:
        """Return the waiting call of a token, which is valid once.

        Raises:
            MCPError: when the token is unknown, belongs to another call, or has expired.
        """
        kept = self._waiting.pop(token, None)
        if kept is not None:
            self._chars -= kept.chars
            if kept.call_state.digest == digest and self.clock.monotonic() <= kept.expires_at:
                return kept.call_state
        raise MCPError(
            m.INVALID_PARAMS,
            "Invalid or expired requestState: it belongs to another call, or was used already. Nothing was run; make "
            "the call again without requestState.",
        )


def _check_can_ask(ctx: RequestContext, asked: ElicitParams, lead: str) -> None:
    """Refuse a call whose client cannot ask this question.

    Raises:
        MCPError: for a client of 2026-07-28, with the capability that it would have to declare.
        InputNotGivenError: for a client of the handshake revision, which has no such error.
    """
    declared = ctx.session.client_capabilities
    elicitation = None if declared is None else declared.elicitation
    is_modern = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
    by_url = isinstance(asked, m.ElicitRequestURLParams)
    if elicitation is None or not (is_modern or ctx.session.can_send_request):
        missing = "elicitation"
    elif by_url and elicitation.url is None:
        missing = "elicitation by URL"
    elif not by_url and elicitation.form is None and elicitation.url is not None:
        missing = "elicitation by form"
    else:
        return
    text = (
        f"{lead}: it has to ask a person, but this client has not declared {missing}. Use a client that has, or run it "
        "in an agent, where questions can wait."
    )
    if not is_modern:
        raise InputNotGivenError(text)
    if by_url:
        asking = m.ElicitationCapability(url=m.UrlElicitationCapability())
    else:
        asking = m.ElicitationCapability(form=m.FormElicitationCapability())
    required = m.ClientCapabilities(elicitation=asking)
    data = m.MissingRequiredClientCapabilityErrorData(required_capabilities=required)
    raise MCPError(
        m.MISSING_REQUIRED_CLIENT_CAPABILITY, text, data.model_dump(by_alias=True, mode="json", exclude_none=True)
    )


async def _elicit(ctx: RequestContext, asked: ElicitParams) -> m.ElicitResult:
    if isinstance(asked, m.ElicitRequestFormParams):
        return await ctx.session.elicit_form(asked.message, asked.requested_schema, ctx.request_id)
    return await ctx.session.elicit_url(asked.message, asked.url, secrets.token_urlsafe(), ctx.request_id)


@attrs.frozen(kw_only=True)
class ApprovalRequest(Value):
    """Question to a person whether a call may run."""

    tool: str
    arguments: dict[str, Any]
    description: str
    """Description of the call by the tool; empty: none."""

    expires_s: float
    """Seconds for which an answer is valid."""

    @property
    def text(self) -> str:
        """The question with the exact arguments; hidden characters are escaped."""
        about = f"{strip_unsafe(self.description)}\n\n" if self.description else ""
        return f"May {self.tool} run?\n\n{about}Arguments: {format_exact_json(self.arguments)}"

    async def obtain(
        self, broker: InputBroker, ctx: RequestContext, call_state: InterruptedCall, replies: Mapping[str, Any] | None
    ) -> m.InputRequiredResult | None:
        """Return None if a person approved the call, or a result with which the client asks.

        Args:
            broker: Asks people.
            ctx: Context of the request.
            call_state: State of the call.
            replies: Answers of the client to this question. None: it was not asked yet.

        Raises:
            InputNotGivenError: when the question cannot be asked, or the call is not approved.
        """
        lead = f"{self.tool} was not run"
        if replies is None:
            if len(self.text) > MAX_APPROVAL_CHARS:
                raise InputNotGivenError(f"{lead}: its arguments are too long for a person to review: shorten them")
            form = m.ElicitRequestFormParams(message=self.text, requested_schema=APPROVAL_SCHEMA)
            outcome = await broker.request_input(
                ctx, call_state, {APPROVAL_KEY: form}, lead=lead, expires_s=self.expires_s
            )
            if isinstance(outcome, m.InputRequiredResult):
                return outcome
            replies = outcome
        if (refusal := _explain_refusal(replies.get(APPROVAL_KEY))) is not None:
            raise InputNotGivenError(f"{lead}: {refusal}")
        return None


def _explain_refusal(answer: object) -> str | None:
    """Return None for an explicit approval; else why the call is not run."""
    if not isinstance(answer, m.ElicitResult):
        return "the approval question has no answer"
    if answer.action == "accept" and (answer.content or {}).get("approve") is True:
        return None
    if answer.action == "cancel":
        return "the approval question was dismissed. Do not try it again unless the user asks for it."
    return "a person rejected it. Do not try it again unless the user asks for it."


async def collect_answers(
    broker: InputBroker,
    ctx: RequestContext,
    call_state: InterruptedCall,
    replies: Mapping[str, Any],
    *,
    tool: str,
    expires_s: float,
) -> m.InputRequiredResult | InterruptedCall:
    """Return the call with the answers to its tool's questions, or a result with which the client asks them.

    Args:
        broker: Asks people.
        ctx: Context of the request.
        call_state: State of the call.
        replies: Answers of the client by the question's key; unknown keys are ignored.
        tool: The tool's name.
        expires_s: Seconds for which an answer is valid.

    Raises:
        InputNotGivenError: when a question cannot be asked or is dismissed, or an answer is invalid.
    """
    lead = f"{tool} was not finished"
    call_state = _add_answers(call_state, replies, lead)
    if not call_state.questions:
        return call_state
    requests = {question.key: to_elicit_params(question) for question in call_state.questions}
    outcome = await broker.request_input(ctx, call_state, requests, lead=lead, expires_s=expires_s)
    return outcome if isinstance(outcome, m.InputRequiredResult) else _add_answers(call_state, outcome, lead)


def to_elicit_params(question: Question) -> ElicitParams:
    """Return a question in the protocol's form."""
    if question.url:
        return m.ElicitRequestURLParams(message=strip_unsafe(question.message), url=question.url)
    schema = {"type": "object", "properties": {}, **(question.schema or {})}
    return m.ElicitRequestFormParams(message=strip_unsafe(question.message), requested_schema=schema)


def _add_answers(call_state: InterruptedCall, replies: Mapping[str, Any], lead: str) -> InterruptedCall:
    """Return the call with the given answers; unanswered questions stay."""
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
    """Return the answer for the tool: an object, or None if the person declined."""
    if reply.action == "cancel":
        raise InputNotGivenError(
            f"{lead}: the question {question.key!r} was dismissed. Do not try it again unless the user asks for it."
        )
    if reply.action == "decline":
        return None
    try:
        return validate_answer(question, None if question.url else reply.content)
    except MisuseError as error:
        raise InputNotGivenError(f"{lead}: {error}. Call it again to ask a person again.") from error
