"""What a server asks a person in the middle of a call: our durable pause, for both eras of the protocol.

A server of 2026-07-28 ends the call with `input_required`; the call is made again with the answers and the server's
own `request_state`. That state may expire, or die with the server's process, long before a person answers: where the
server refuses it, the call begins anew, and what was answered is answered at once, without asking anybody twice.

A server of the handshake era asks while its call is under way, and waits. Nobody can be waited for there: the call is
given up, and made again from its beginning when the answer is there. What it asks then is answered at once.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
import mcp.types as m
from mcp import Client, MCPError
from mcp.types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from agentfsm.core.errors import MisuseError
from agentfsm.core.fingerprint import short_hash
from agentfsm.core.pending import Question
from agentfsm.mcp.connection import request_errors
from agentfsm.tools.run_context import InputRequired, RunContext

if TYPE_CHECKING:
    from mcp.client.session import ClientRequestContext
    from mcp.shared.dispatcher import ProgressFnT

# How one attempt at a call ended.
AttemptResult = m.CallToolResult | InputRequired
ElicitParams = m.ElicitRequestFormParams | m.ElicitRequestURLParams

# Seconds before a call is made again whose server only wants to be asked later; twice as long each time. The call's
# own time bounds it.
FIRST_POLL_S: Final = 0.05
MAX_POLL_S: Final = 1.0
# Requests that one attempt may take: about a minute of them.
MAX_ROUNDS: Final = 60
# Digits of a hash, so many that no two questions of a call are taken for each other.
FINGERPRINT_DIGITS: Final = 16
AMBIGUOUS_ELICITATION: Final = (
    "several calls of this server were under way when more than one of them asked for input, and it cannot be told "
    "which asked what. They were given up in their middle, so check what they have done. Call them one at a time."
)


@attrs.define(eq=False, repr=False)
class ElicitationState:
    """What a call has asked so far, and what people have answered; in our terms, whatever the era."""

    asked: list[tuple[str, str]]
    """The question's key, and what tells it from others; in the order in which they were asked."""

    answers: Mapping[str, Any]
    request_state: str | None = None
    """What a server of 2026-07-28 has given us to bring back."""

    last_keys: dict[str, str] = attrs.field(factory=dict)
    """What it asked last: its own keys, and ours."""

    used_keys: set[str] = attrs.field(factory=set, init=False)
    """Keys of answers that the server has been given."""

    @classmethod
    def from_context(cls, ctx: RunContext[Any]) -> ElicitationState:
        """Return what an earlier attempt has left; nothing on the first."""
        state: dict[str, Any] = ctx.state or {"asked": []}
        asked = [(key, mark) for key, mark in state["asked"]]
        return cls(asked, ctx.answers, state.get("request_state"), state.get("now", {}))

    def take_answer(self, asked: ElicitParams) -> m.ElicitResult | None:
        """Return the answer to what is asked, if it was given; each answer serves once, in their order."""
        mark = _fingerprint(asked)
        for key, known in self.asked:
            if known == mark and key in self.answers and key not in self.used_keys:
                self.used_keys.add(key)
                return _to_elicit_result(asked, self.answers[key])
        return None

    def take_answers(self, requests: Mapping[str, ElicitParams]) -> dict[str, m.ElicitResult] | None:
        """Return the answers to all that is asked; None where one of them was not given."""
        before = set(self.used_keys)
        found = {key: self.take_answer(asked) for key, asked in requests.items()}
        if all(found.values()):
            return {key: reply for key, reply in found.items() if reply is not None}
        self.used_keys = before
        return None

    def last_answers(self) -> dict[str, m.ElicitResult]:
        """Return the answers to what the server asked last, by its own keys."""
        return {key: _to_response(self.answers.get(own)) for key, own in self.last_keys.items()}

    def pause_for(self, requests: Mapping[str, ElicitParams], request_state: str | None = None) -> AttemptResult:
        """Return the pause in which these are asked; a result for the model, where they cannot be."""
        own = {key: f"q{len(self.asked) + number}" for number, key in enumerate(requests, 1)}
        marked = [(_to_question(own[key], asked), _fingerprint(asked)) for key, asked in requests.items()]
        return self.pause_with(marked, {} if request_state is None else {"request_state": request_state, "now": own})

    def pause_with(self, marked: Sequence[tuple[Question, str]], extra_state: Mapping[str, Any]) -> AttemptResult:
        """Return the pause for questions, each with what tells it from others, and with further state; as `inquiry`."""
        asked = [*self.asked, *((question.key, mark) for question, mark in marked)]
        state = {"asked": [[key, mark] for key, mark in asked], **extra_state}
        try:
            return InputRequired(*[question for question, _ in marked], state=state)
        except MisuseError as error:
            return error_result(f"the server asks for input in a way that nobody can be shown: {error}")


def _to_question(key: str, asked: ElicitParams) -> Question:
    if isinstance(asked, m.ElicitRequestURLParams):
        return Question(key=key, message=asked.message, url=asked.url)
    schema = {name: part for name, part in asked.requested_schema.items() if name != "$schema"}
    return Question(key=key, message=asked.message, schema=schema)


def _fingerprint(asked: ElicitParams) -> str:
    """Return what tells a question from others; an address may be another each time it is asked."""
    what = [asked.mode, asked.message, asked.requested_schema if isinstance(asked, m.ElicitRequestFormParams) else None]
    return short_hash(json.dumps(what, sort_keys=True), FINGERPRINT_DIGITS)


def _to_elicit_result(asked: ElicitParams, answer: Any) -> m.ElicitResult:
    reply = _to_response(answer)
    return m.ElicitResult(action=reply.action) if isinstance(asked, m.ElicitRequestURLParams) else reply


def _to_response(answer: Any) -> m.ElicitResult:
    if answer is None:
        return m.ElicitResult(action="decline")
    return m.ElicitResult(action="accept", content=answer or None)


def error_result(text: str) -> m.CallToolResult:
    """Return a result that tells the model why there is none."""
    return m.CallToolResult(content=[m.TextContent(text=text)], is_error=True)


async def call_tool(
    client: Client,
    router: ElicitationRouter,
    ctx: RunContext[Any],
    *,
    name: str,
    arguments: dict[str, Any],
    report: ProgressFnT,
    relist: Callable[[], Awaitable[None]],
) -> AttemptResult:
    """Call a tool of a server, with what people have answered; return what came of it, or what has to be asked.

    Args:
        client: The connection.
        router: What knows which call a server of the handshake era asks in.
        ctx: Of our call.
        name: The tool, as the server calls it.
        arguments: What it is given.
        report: Takes its progress.
        relist: Lists the tools anew, and raises where the call is not to be made any more.

    Raises:
        MCPError: what the server, or the SDK, says of the request.
    """
    told = ElicitationState.from_context(ctx)
    if any(told.answers.get(key) is None for key, mark in told.asked if mark == _URL_REQUIRED):
        return error_result("the person declined to open the address that the server requires: this cannot be done")
    attempt = _CallAttempt(client, name, arguments, report, relist)
    try:
        if client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            return await attempt.run(told)
        return await router.run_call(told, attempt)
    except MCPError as error:
        if error.code != m.URL_ELICITATION_REQUIRED:
            raise
        return _pause_for_url(told, error)


# Marks what a server wants opened before it takes the call at all.
_URL_REQUIRED: Final = "url-required"


def _pause_for_url(elicitations: ElicitationState, error: MCPError) -> AttemptResult:
    """Return the pause in which a person opens what the server requires; it makes no difference who asks for it."""
    try:
        required = m.ElicitationRequiredErrorData.model_validate(error.data).elicitations
    except ValueError:
        return error_result(f"the server requires that something be opened, and does not say what: {error.message}")
    numbered = enumerate(required, len(elicitations.asked) + 1)
    questions = [Question(key=f"q{number}", message=each.message, url=each.url) for number, each in numbered]
    return elicitations.pause_with([(question, _URL_REQUIRED) for question in questions], {})


@attrs.define(eq=False, repr=False)
class _CallAttempt:
    """One attempt at a call of a server."""

    client: Client
    name: str
    arguments: dict[str, Any]
    report: ProgressFnT
    relist: Callable[[], Awaitable[None]]

    async def send(self, responses: Mapping[str, m.ElicitResult] | None = None, state: str | None = None) -> Any:
        """Make the request; once more, when the server finds that its headers do not fit the tool's schema.

        They are made of the newest listing, so that one is fetched before. The SDK does so only where it also answers
        what a server asks.
        """
        try:
            return await self._send_once(responses, state)
        except MCPError as mismatch:
            if mismatch.code != m.HEADER_MISMATCH or self.client.protocol_version not in MODERN_PROTOCOL_VERSIONS:
                raise
            try:
                await self.relist()
            except (MCPError, ValidationError) as error:
                raise mismatch from error
            return await self._send_once(responses, state)

    async def _send_once(self, responses: Mapping[str, m.ElicitResult] | None, state: str | None) -> Any:
        return await self.client.session.call_tool(
            self.name,
            self.arguments,
            progress_callback=self.report,
            input_responses=None if responses is None else dict(responses),
            request_state=state,
            allow_input_required=True,
        )

    async def run(self, elicitations: ElicitationState) -> AttemptResult:
        """Make the call until it has a result, or asks what nobody has answered."""
        result, wait_s = await self._resume_or_start(elicitations), FIRST_POLL_S
        for _ in range(MAX_ROUNDS):
            if isinstance(result, m.CallToolResult):
                return result
            requests = result.input_requests or {}
            asked = {key: each.params for key, each in requests.items() if isinstance(each, m.ElicitRequest)}
            if len(asked) < len(requests):
                return error_result(
                    "the server asks for a model's words or for folders of ours, which are not given here"
                )
            replies = elicitations.take_answers(asked)
            if replies is None:
                return elicitations.pause_for(asked, result.request_state or "")
            if not replies:
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, MAX_POLL_S)
            request_errors.mark_accepted()
            result = await self.send(replies or None, result.request_state)
        return error_result("the server has put this call off again and again, and gave no result")

    async def _resume_or_start(self, elicitations: ElicitationState) -> Any:
        """Go on where the server has asked, or from the beginning where it does not know of that any more."""
        if elicitations.request_state is None:
            return await self.send()
        try:
            result = await self.send(elicitations.last_answers(), elicitations.request_state or None)
        except MCPError as error:
            if error.code != m.INVALID_PARAMS:
                raise
            return await self.send()
        elicitations.used_keys |= elicitations.answers.keys()  # it has them, so what it asks now is asked anew
        return result


# Servers of the handshake era.


@attrs.define(eq=False, repr=False)
class _OngoingCall:
    """A call of a server of the handshake era, as long as it is under way."""

    elicitations: ElicitationState
    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    outcome: AttemptResult | None = None
    """What came of it, where it was given up."""

    has_returned: bool = False
    """Whether the server has answered it, so that it cannot be the one that still asks."""

    def give_up(self, outcome: AttemptResult) -> None:
        """Cut the call off; it has ended when the server was told."""
        self.outcome = outcome
        self.scope.cancel()


@attrs.define(eq=False, repr=False)
class ElicitationRouter:
    """Takes what a server of the handshake era asks in mid-call; lives in the thread of `home`, as the connection does.

    The protocol does not say in which call it asks. So a question is put off until its call is the only one under way;
    a server that has asked once while others were is given one call at a time from then on.
    """

    is_serial: bool = False
    """Whether it is."""

    _calls: list[_OngoingCall] = attrs.field(factory=list, init=False)
    _waiting: int = attrs.field(default=0, init=False)
    """Questions that wait until it is known whose they are."""

    _change_event: anyio.Event | None = attrs.field(default=None, init=False)

    async def run_call(self, elicitations: ElicitationState, attempt: _CallAttempt) -> AttemptResult:
        """Make a call; what it asks and nobody has answered ends it."""
        while self.is_serial and self._calls:
            await self._wait_for_change()
        own = _OngoingCall(elicitations)
        self._calls.append(own)
        try:
            with own.scope:
                result: m.CallToolResult = await attempt.send()
                own.has_returned = True
                return result
        finally:
            self._calls.remove(own)
            own.ended.set()
            self._notify_change()
        return error_result("the call was given up") if own.outcome is None else own.outcome

    async def elicit(self, context: ClientRequestContext, params: m.ElicitRequestParams) -> m.ElicitResult:  # noqa: ARG002  it does not say which call
        """Answer what the server asks, if a person has answered it; else give its call up, so that one is asked."""
        own = await self._find_asking_call()
        if own is None:
            return m.ElicitResult(action="cancel")
        if (reply := own.elicitations.take_answer(params)) is not None:
            return reply
        own.give_up(own.elicitations.pause_for({"": params}))
        await own.ended.wait()
        return m.ElicitResult(action="cancel")

    async def _find_asking_call(self) -> _OngoingCall | None:
        """Return the call in which it is asked, when that can be told; None where it cannot, and all were given up."""
        self._waiting += 1
        perhaps = tuple(self._calls)
        try:
            while len(self._calls) > 1:
                self.is_serial = True
                if self._waiting >= len(self._calls):
                    await self._give_up_all()
                    return None
                await self._wait_for_change()
            own = self._calls[0] if self._calls else None
            is_told = own is not None and own.outcome is None and all(c is own or c.has_returned for c in perhaps)
            return own if is_told else None
        finally:
            self._waiting -= 1

    async def _give_up_all(self) -> None:
        """Cut off all calls, all at once, so that none is left that could be taken for the one that asks."""
        calls = tuple(self._calls)
        for own in calls:
            own.give_up(error_result(AMBIGUOUS_ELICITATION))
        for own in calls:
            await own.ended.wait()

    async def _wait_for_change(self) -> None:
        if self._change_event is None:
            self._change_event = anyio.Event()
        await self._change_event.wait()

    def _notify_change(self) -> None:
        if self._change_event is not None:
            self._change_event.set()
            self._change_event = None
