"""Handle the questions that a server asks a person during a call, in both eras of the protocol.

A server of 2026-07-28 ends the call with `input_required`. The call is made again with the answers and the server's
`request_state`. That state may expire or be lost with the server's process before a person answers. If the server
refuses it, the call starts from its beginning, and known answers are reused, so that a person is asked only once.

A server of the handshake era asks during its call, and waits. A person who attends the run is asked while the call
stays open. In an unattended run the call cannot wait for a person. If it may be repeated, it is cancelled, and made
again from its beginning when the answer is there; the repeated question is then answered at once. In any other call
the question is refused, since its effects before the question would happen twice.
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
from agentfsm.core.header import short_hash
from agentfsm.core.pending import Question
from agentfsm.mcp.client.question_relay import CallEndedError, QuestionRelay
from agentfsm.mcp.connection import request_errors
from agentfsm.tools.run_context import InputRequired, RunContext

if TYPE_CHECKING:
    from mcp.client.session import ClientRequestContext
    from mcp.shared.dispatcher import ProgressFnT

# Result of one attempt at a call: an `m.Result` of another type is of an extension.
AttemptResult = m.CallToolResult | InputRequired | m.Result
ElicitParams = m.ElicitRequestFormParams | m.ElicitRequestURLParams

# Seconds before a call is repeated if the server asks for nothing but a later request; doubled each time. The timeout
# of the call limits the total.
FIRST_POLL_S: Final = 0.05
MAX_POLL_S: Final = 1.0
# Maximum number of requests in one attempt: about one minute.
MAX_ROUNDS: Final = 60
# Digits of a question's hash: enough that two questions of a call do not collide.
FINGERPRINT_DIGITS: Final = 16
UNSUPPORTED_REQUEST: Final = "the server requests sampling or roots, which this client does not support"
UNATTENDED: Final = "no person attends this run, and the call cannot be repeated safely"
AMBIGUOUS_ELICITATION: Final = (
    "several calls of this server were in progress when more than one of them asked for input, and the server does not "
    "say which call a question belongs to. All were cancelled, so check their effects. Make the calls one at a time."
)


@attrs.define(eq=False, repr=False)
class ElicitationState:
    """Questions of a call so far and people's answers, in the same form for both eras."""

    asked: list[tuple[str, str]]
    """Key and fingerprint of each question, in the order in which they were asked."""

    answers: dict[str, Any]
    """Answers by the question's key; None: declined."""

    request_state: str | None = None
    """State that a server of 2026-07-28 sent with its questions and expects back; None: it sent none."""

    last_keys: dict[str, str] = attrs.field(factory=dict)
    """Keys of the newest questions: from the server's to ours."""

    used_keys: set[str] = attrs.field(factory=set, init=False)
    """Keys of answers that the server has received."""

    @classmethod
    def from_context(cls, ctx: RunContext[Any]) -> ElicitationState:
        """Load the state of earlier attempts; it is empty on the first."""
        state: dict[str, Any] = ctx.state or {"asked": []}
        asked = [(key, mark) for key, mark in state["asked"]]
        return cls(asked, dict(ctx.answers), state.get("request_state"), state.get("now", {}))

    def take_answer(self, asked: ElicitParams) -> m.ElicitResult | None:
        """Return the answer to a question, or None. Each answer is used once, in order."""
        mark = _fingerprint(asked)
        for key, known in self.asked:
            if known == mark and key in self.answers and key not in self.used_keys:
                self.used_keys.add(key)
                reply = to_response(self.answers[key])
                return m.ElicitResult(action=reply.action) if isinstance(asked, m.ElicitRequestURLParams) else reply
        return None

    def take_answers(self, requests: Mapping[str, ElicitParams]) -> dict[str, m.ElicitResult] | None:
        """Return the answers to all questions, or None if one is missing."""
        before = set(self.used_keys)
        found = {key: self.take_answer(asked) for key, asked in requests.items()}
        if all(found.values()):
            return {key: reply for key, reply in found.items() if reply is not None}
        self.used_keys = before
        return None

    def last_answers(self) -> dict[str, m.ElicitResult]:
        """Return the answers to the newest questions, by the server's keys."""
        return {key: to_response(self.answers.get(own)) for key, own in self.last_keys.items()}

    def pause_for(self, requests: Mapping[str, ElicitParams], request_state: str | None = None) -> AttemptResult:
        """Return the pause that asks these questions, or an error result if they cannot be asked."""
        own = {key: f"q{len(self.asked) + number}" for number, key in enumerate(requests, 1)}
        marked = [(to_question(own[key], asked), _fingerprint(asked)) for key, asked in requests.items()]
        return self.pause_with(marked, {} if request_state is None else {"request_state": request_state, "now": own})

    def pause_with(self, marked: Sequence[tuple[Question, str]], extra_state: Mapping[str, Any]) -> AttemptResult:
        """Return the pause for questions with their fingerprints; `extra_state` is kept for the next attempt."""
        asked = [*self.asked, *((question.key, mark) for question, mark in marked)]
        state = {"asked": [[key, mark] for key, mark in asked], **extra_state}
        try:
            return InputRequired(*[question for question, _ in marked], state=state)
        except MisuseError as error:
            return error_result(f"the server asks for input in a form that cannot be shown to a person: {error}")


@attrs.define(eq=False, repr=False, kw_only=True)
class QuestionHandling:
    """Handling of the questions that a handshake-era server asks during one call."""

    relay: QuestionRelay | None
    """Asks the person who attends the run; None if there is none."""

    may_repeat: bool
    """Whether the call may be made again from its beginning when a question is answered later."""

    refused: list[str] = attrs.field(factory=list, init=False)
    """Questions that were refused, each with the reason."""


def to_question(key: str, asked: ElicitParams) -> Question:
    """Return a question of a server under a key of ours."""
    if isinstance(asked, m.ElicitRequestURLParams):
        return Question(key=key, message=asked.message, url=asked.url)
    schema = {name: part for name, part in asked.requested_schema.items() if name != "$schema"}
    return Question(key=key, message=asked.message, schema=schema)


def _fingerprint(asked: ElicitParams) -> str:
    """Return a hash that identifies a question. The URL is left out, since it may differ each time."""
    schema = asked.requested_schema if isinstance(asked, m.ElicitRequestFormParams) else None
    return short_hash(json.dumps([asked.mode, asked.message, schema], sort_keys=True), FINGERPRINT_DIGITS)


def to_response(answer: Any) -> m.ElicitResult:
    """Return the answer of a person for the server; None: declined."""
    if answer is None:
        return m.ElicitResult(action="decline")
    return m.ElicitResult(action="accept", content=answer or None)


def error_result(text: str) -> m.CallToolResult:
    """Return an error result with a text for the model."""
    return m.CallToolResult(content=[m.TextContent(text=text)], is_error=True)


async def call_tool(
    client: Client,
    router: ElicitationRouter,
    ctx: RunContext[Any],
    handling: QuestionHandling,
    *,
    name: str,
    arguments: dict[str, Any],
    report: ProgressFnT,
    relist: Callable[[], Awaitable[None]],
) -> AttemptResult:
    """Call a tool of a server, with the answers of people. Return its result, or the pause that asks them.

    Args:
        client: The connection.
        router: Assigns the questions of a handshake-era server to calls.
        ctx: Context of our call.
        handling: What happens to the questions of a handshake-era server.
        name: The tool's name on the server.
        arguments: Arguments of the call.
        report: Receives the progress.
        relist: Lists the tools again, and raises an error if the call must not be made any more.

    Raises:
        MCPError: when the server or the SDK reports an error.
    """
    elicitations = ElicitationState.from_context(ctx)
    if any(elicitations.answers.get(key) is None for key, mark in elicitations.asked if mark == _URL_REQUIRED):
        return error_result("the call was not made: the person declined to open the URL that the server requires")
    attempt = _CallAttempt(client, name, arguments, report, relist)
    try:
        if client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            return await attempt.run(elicitations)
        return await router.run_call(elicitations, handling, attempt)
    except MCPError as error:
        if error.code != m.URL_ELICITATION_REQUIRED:
            raise
        return _pause_for_url(elicitations, error)


# Marks a URL that the server requires a person to open before it accepts the call.
_URL_REQUIRED: Final = "url-required"


def _pause_for_url(elicitations: ElicitationState, error: MCPError) -> AttemptResult:
    """Return the pause in which a person opens the URLs that the server requires; it is the same for both eras."""
    try:
        required = m.ElicitationRequiredErrorData.model_validate(error.data).elicitations
    except ValueError:
        return error_result(f"the server requires a person to open a URL, but sent no valid one: {error.message}")
    numbered = enumerate(required, len(elicitations.asked) + 1)
    questions = [Question(key=f"q{number}", message=each.message, url=each.url) for number, each in numbered]
    return elicitations.pause_with([(question, _URL_REQUIRED) for question in questions], {})


@attrs.define(eq=False, repr=False)
class _CallAttempt:
    """Attempt at a call of a server."""

    client: Client
    name: str
    arguments: dict[str, Any]
    report: ProgressFnT
    relist: Callable[[], Awaitable[None]]

    async def send(self, responses: Mapping[str, m.ElicitResult] | None = None, state: str | None = None) -> Any:
        """Send the request; repeat it once if the server finds that its headers do not match the tool's schema.

        The SDK builds the headers from the newest listing, so the tools are listed before the repetition. The SDK
        repeats a request itself only if it also answers the server's questions.
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
            allow_claimed=True,
        )

    async def run(self, elicitations: ElicitationState) -> AttemptResult:
        """Make the call until it has a result or an unanswered question."""
        wait_s = FIRST_POLL_S
        result: m.Result = await self._resume_or_start(elicitations)
        for _ in range(MAX_ROUNDS):
            if not isinstance(result, m.InputRequiredResult):
                return result
            requests = result.input_requests or {}
            asked = {key: each.params for key, each in requests.items() if isinstance(each, m.ElicitRequest)}
            if len(asked) < len(requests):
                return error_result(UNSUPPORTED_REQUEST)
            replies = elicitations.take_answers(asked)
            if replies is None:
                return elicitations.pause_for(asked, result.request_state or "")
            if not replies:
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, MAX_POLL_S)
            request_errors.mark_accepted()
            result = await self.send(replies or None, result.request_state)
        return error_result(f"the server has postponed this call {MAX_ROUNDS} times, and gave no result")

    async def _resume_or_start(self, elicitations: ElicitationState) -> Any:
        """Continue from the server's request state, or start again if the server does not accept it any more."""
        if elicitations.request_state is None:
            return await self.send()
        try:
            result = await self.send(elicitations.last_answers(), elicitations.request_state or None)
        except MCPError as error:
            if error.code != m.INVALID_PARAMS:
                raise
            return await self.send()
        elicitations.used_keys |= elicitations.answers.keys()  # a new question needs a new answer
        return result


# Servers of the handshake era.


@attrs.define(eq=False, repr=False)
class _OngoingCall:
    """Call of a handshake-era server, while it is in progress."""

    elicitations: ElicitationState
    handling: QuestionHandling
    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    outcome: AttemptResult | None = None
    """Result of a call that was cancelled; else None."""

    has_returned: bool = False
    """Whether the server has answered the call, so that an open question cannot belong to it."""

    async def ask_person(self, relay: QuestionRelay, pause: InputRequired, params: ElicitParams) -> m.ElicitResult:
        """Ask the person who attends the run, while the call stays open."""
        [question] = pause.questions
        self.elicitations.asked.append((question.key, _fingerprint(params)))  # another question may come meanwhile
        try:
            answers = await relay.ask(pause)
        except CallEndedError:
            await self.ended.wait()  # the server has to learn first that the call is cancelled
            return m.ElicitResult(action="cancel")
        self.elicitations.answers.update(answers or {})
        return self.elicitations.take_answer(params) or m.ElicitResult(action="cancel")

    def give_up(self, outcome: AttemptResult) -> None:
        """Cancel the call; `ended` is set once the server has been notified."""
        self.outcome = outcome
        self.scope.cancel()


@attrs.define(eq=False, repr=False)
class ElicitationRouter:
    """Assigns a handshake-era server's questions to its calls. It is used in the connection thread only.

    The protocol does not say which call a question belongs to. So a question waits until only one call is in progress.
    A server that asks while several calls are in progress gets one call at a time from then on.
    """

    is_serial: bool = False
    """Whether the server gets one call at a time."""

    _calls: list[_OngoingCall] = attrs.field(factory=list, init=False)
    _waiting: int = attrs.field(default=0, init=False)
    """Number of questions that are not assigned to a call yet."""

    _change_event: anyio.Event | None = attrs.field(default=None, init=False)

    async def run_call(
        self, elicitations: ElicitationState, handling: QuestionHandling, attempt: _CallAttempt
    ) -> AttemptResult:
        """Make a call. An unanswered question that no person can be asked now ends it, if it may be repeated."""
        while self.is_serial and self._calls:
            await self._wait_for_change()
        own = _OngoingCall(elicitations, handling)
        self._calls.append(own)
        try:
            with own.scope:
                result: m.Result = await attempt.send()
                own.has_returned = True
                return result
        finally:
            self._calls.remove(own)
            own.ended.set()
            if self._change_event is not None:
                self._change_event.set()
                self._change_event = None
        return error_result("the call was cancelled") if own.outcome is None else own.outcome

    async def elicit(self, context: ClientRequestContext, params: m.ElicitRequestParams) -> m.ElicitResult:  # noqa: ARG002  it does not identify the call
        """Answer a question of the server, ask the attending person, pause the call for an answer, or refuse it."""
        own = await self._find_asking_call()
        if own is None:
            return m.ElicitResult(action="cancel")
        if (reply := own.elicitations.take_answer(params)) is not None:
            return reply
        pause = own.elicitations.pause_for({"": params})
        if own.handling.relay is not None and isinstance(pause, InputRequired):
            return await own.ask_person(own.handling.relay, pause, params)
        if own.handling.may_repeat:
            own.give_up(pause)
            await own.ended.wait()
        else:
            reason = UNATTENDED if isinstance(pause, InputRequired) else "it cannot be shown to a person"
            own.handling.refused.append(f"{request_errors.shorten(params.message)!r} ({reason})")
        return m.ElicitResult(action="cancel")

    async def _find_asking_call(self) -> _OngoingCall | None:
        """Return the call that a question belongs to, or None if that is unknown; open calls may then be cancelled."""
        self._waiting += 1
        candidates = tuple(self._calls)
        try:
            while len(self._calls) > 1:
                self.is_serial = True
                if self._waiting >= len(self._calls):
                    await self._give_up_all()
                    return None
                await self._wait_for_change()
            own = self._calls[0] if self._calls else None
            is_known = own is not None and own.outcome is None and all(c is own or c.has_returned for c in candidates)
            return own if is_known else None
        finally:
            self._waiting -= 1

    async def _give_up_all(self) -> None:
        """Cancel all calls before waiting for any, so that none is mistaken for the one that asks."""
        calls = tuple(self._calls)
        for own in calls:
            own.give_up(error_result(AMBIGUOUS_ELICITATION))
        for own in calls:
            await own.ended.wait()

    async def _wait_for_change(self) -> None:
        if self._change_event is None:
            self._change_event = anyio.Event()
        await self._change_event.wait()
