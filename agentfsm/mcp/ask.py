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

from agentfsm.core.effects import Question
from agentfsm.core.errors import MisuseError
from agentfsm.core.fingerprint import short_hash
from agentfsm.mcp.connection import trouble
from agentfsm.tools.run_context import InputRequired, RunContext

if TYPE_CHECKING:
    from mcp.client.session import ClientRequestContext
    from mcp.shared.dispatcher import ProgressFnT

# How one attempt at a call ended.
Outcome = m.CallToolResult | InputRequired
Asked = m.ElicitRequestFormParams | m.ElicitRequestURLParams

# Seconds before a call is made again whose server only wants to be asked later; twice as long each time. The call's
# own time bounds it.
FIRST_POLL_S: Final = 0.05
MAX_POLL_S: Final = 1.0
# Requests that one attempt may take: about a minute of them.
MAX_LEGS: Final = 60
# Digits of a hash, so many that no two questions of a call are taken for each other.
PRINT_DIGITS: Final = 16
UNTOLD: Final = (
    "several calls of this server were under way when more than one of them asked for input, and it cannot be told "
    "which asked what. They were given up in their middle, so check what they have done. Call them one at a time."
)


@attrs.define(eq=False, repr=False)
class Told:
    """What a call has asked so far, and what people have answered; in our terms, whatever the era."""

    asked: list[tuple[str, str]]
    # The question's key, and what tells it from others; in the order in which they were asked.
    answers: Mapping[str, Any]
    request_state: str | None = None
    # What a server of 2026-07-28 has given us to bring back.
    now: dict[str, str] = attrs.field(factory=dict)
    # What it asked last: its own keys, and ours.
    used: set[str] = attrs.field(factory=set, init=False)
    # Keys of answers that the server has been given.

    @classmethod
    def of(cls, ctx: RunContext[Any]) -> Told:
        """Return what an earlier attempt has left; nothing on the first."""
        state: dict[str, Any] = ctx.state or {"asked": []}
        asked = [(key, mark) for key, mark in state["asked"]]
        return cls(asked, ctx.answers, state.get("request_state"), state.get("now", {}))

    def reply(self, asked: Asked) -> m.ElicitResult | None:
        """Return the answer to what is asked, if it was given; each answer serves once, in their order."""
        mark = _mark(asked)
        for key, known in self.asked:
            if known == mark and key in self.answers and key not in self.used:
                self.used.add(key)
                return _result(asked, self.answers[key])
        return None

    def replies(self, requests: Mapping[str, Asked]) -> dict[str, m.ElicitResult] | None:
        """Return the answers to all that is asked; None where one of them was not given."""
        before = set(self.used)
        found = {key: self.reply(asked) for key, asked in requests.items()}
        if all(found.values()):
            return {key: reply for key, reply in found.items() if reply is not None}
        self.used = before
        return None

    def last(self) -> dict[str, m.ElicitResult]:
        """Return the answers to what the server asked last, by its own keys."""
        return {key: _given(self.answers.get(own)) for key, own in self.now.items()}

    def inquiry(self, requests: Mapping[str, Asked], request_state: str | None = None) -> Outcome:
        """Return the pause in which these are asked; a result for the model, where they cannot be."""
        own = {key: f"q{len(self.asked) + number}" for number, key in enumerate(requests, 1)}
        marked = [(_question(own[key], asked), _mark(asked)) for key, asked in requests.items()]
        return self.pause(marked, {} if request_state is None else {"request_state": request_state, "now": own})

    def pause(self, marked: Sequence[tuple[Question, str]], further: Mapping[str, Any]) -> Outcome:
        """Return the pause for questions, each with what tells it from others, and with further state; as `inquiry`."""
        asked = [*self.asked, *((question.key, mark) for question, mark in marked)]
        state = {"asked": [[key, mark] for key, mark in asked], **further}
        try:
            return InputRequired(*[question for question, _ in marked], state=state)
        except MisuseError as error:
            return refused(f"the server asks for input in a way that nobody can be shown: {error}")


def _question(key: str, asked: Asked) -> Question:
    if isinstance(asked, m.ElicitRequestURLParams):
        return Question(key=key, message=asked.message, url=asked.url)
    schema = {name: part for name, part in asked.requested_schema.items() if name != "$schema"}
    return Question(key=key, message=asked.message, schema=schema)


def _mark(asked: Asked) -> str:
    """Return what tells a question from others; an address may be another each time it is asked."""
    what = [asked.mode, asked.message, asked.requested_schema if isinstance(asked, m.ElicitRequestFormParams) else None]
    return short_hash(json.dumps(what, sort_keys=True), PRINT_DIGITS)


def _result(asked: Asked, answer: Any) -> m.ElicitResult:
    reply = _given(answer)
    return m.ElicitResult(action=reply.action) if isinstance(asked, m.ElicitRequestURLParams) else reply


def _given(answer: Any) -> m.ElicitResult:
    if answer is None:
        return m.ElicitResult(action="decline")
    return m.ElicitResult(action="accept", content=answer or None)


def refused(text: str) -> m.CallToolResult:
    """Return a result that tells the model why there is none."""
    return m.CallToolResult(content=[m.TextContent(text=text)], is_error=True)


async def call(
    client: Client,
    desk: Desk,
    ctx: RunContext[Any],
    *,
    name: str,
    arguments: dict[str, Any],
    report: ProgressFnT,
    relist: Callable[[], Awaitable[None]],
) -> Outcome:
    """Call a tool of a server, with what people have answered; return what came of it, or what has to be asked.

    Args:
        client: The connection.
        desk: What knows which call a server of the handshake era asks in.
        ctx: Of our call.
        name: The tool, as the server calls it.
        arguments: What it is given.
        report: Takes its progress.
        relist: Lists the tools anew, and raises where the call is not to be made any more.

    Raises:
        MCPError: what the server, or the SDK, says of the request.
    """
    told = Told.of(ctx)
    if any(told.answers.get(key) is None for key, mark in told.asked if mark == _REQUIRED):
        return refused("the person declined to open the address that the server requires: this cannot be done")
    attempt = _Attempt(client, name, arguments, report, relist)
    try:
        if client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            return await attempt.modern(told)
        return await desk.attend(told, attempt)
    except MCPError as error:
        if error.code != m.URL_ELICITATION_REQUIRED:
            raise
        return _elsewhere(told, error)


# Marks what a server wants opened before it takes the call at all.
_REQUIRED: Final = "url-required"


def _elsewhere(told: Told, error: MCPError) -> Outcome:
    """Return the pause in which a person opens what the server requires; it makes no difference who asks for it."""
    try:
        required = m.ElicitationRequiredErrorData.model_validate(error.data).elicitations
    except ValueError:
        return refused(f"the server requires that something be opened, and does not say what: {error.message}")
    numbered = enumerate(required, len(told.asked) + 1)
    questions = [Question(key=f"q{number}", message=each.message, url=each.url) for number, each in numbered]
    return told.pause([(question, _REQUIRED) for question in questions], {})


@attrs.define(eq=False, repr=False)
class _Attempt:
    """One attempt at a call of a server."""

    client: Client
    name: str
    arguments: dict[str, Any]
    report: ProgressFnT
    relist: Callable[[], Awaitable[None]]

    async def once(self, told: Mapping[str, m.ElicitResult] | None = None, state: str | None = None) -> Any:
        """Make the request; once more, when the server finds that its headers do not fit the tool's schema.

        They are made of the newest listing, so that one is fetched before. The SDK does so only where it also answers
        what a server asks.
        """
        try:
            return await self._send(told, state)
        except MCPError as mismatch:
            if mismatch.code != m.HEADER_MISMATCH or self.client.protocol_version not in MODERN_PROTOCOL_VERSIONS:
                raise
            try:
                await self.relist()
            except (MCPError, ValidationError) as error:
                raise mismatch from error
            return await self._send(told, state)

    async def _send(self, told: Mapping[str, m.ElicitResult] | None, state: str | None) -> Any:
        return await self.client.session.call_tool(
            self.name,
            self.arguments,
            progress_callback=self.report,
            input_responses=None if told is None else dict(told),
            request_state=state,
            allow_input_required=True,
        )

    async def modern(self, told: Told) -> Outcome:
        """Make the call until it has a result, or asks what nobody has answered."""
        result, wait_s = await self._resumed(told), FIRST_POLL_S
        for _ in range(MAX_LEGS):
            if isinstance(result, m.CallToolResult):
                return result
            requests = result.input_requests or {}
            asked = {key: each.params for key, each in requests.items() if isinstance(each, m.ElicitRequest)}
            if len(asked) < len(requests):
                return refused("the server asks for a model's words or for folders of ours, which are not given here")
            replies = told.replies(asked)
            if replies is None:
                return told.inquiry(asked, result.request_state or "")
            if not replies:
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, MAX_POLL_S)
            trouble.taken()
            result = await self.once(replies or None, result.request_state)
        return refused("the server has put this call off again and again, and gave no result")

    async def _resumed(self, told: Told) -> Any:
        """Go on where the server has asked, or from the beginning where it does not know of that any more."""
        if told.request_state is None:
            return await self.once()
        try:
            result = await self.once(told.last(), told.request_state or None)
        except MCPError as error:
            if error.code != m.INVALID_PARAMS:
                raise
            return await self.once()
        told.used |= told.answers.keys()  # it has them, so what it asks now is asked anew
        return result


# Servers of the handshake era.


@attrs.define(eq=False, repr=False)
class _Underway:
    """A call of a server of the handshake era, as long as it is under way."""

    told: Told
    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    outcome: Outcome | None = None
    # What came of it, where it was given up.
    returned: bool = False
    # Whether the server has answered it, so that it cannot be the one that still asks.

    def give_up(self, outcome: Outcome) -> None:
        """Cut the call off; it has ended when the server was told."""
        self.outcome = outcome
        self.scope.cancel()


@attrs.define(eq=False, repr=False)
class Desk:
    """Takes what a server of the handshake era asks in mid-call; lives in the thread of `home`, as the connection does.

    The protocol does not say in which call it asks. So a question is put off until its call is the only one under way;
    a server that has asked once while others were is given one call at a time from then on.
    """

    alone: bool = False
    # Whether it is.
    _calls: list[_Underway] = attrs.field(factory=list, init=False)
    _held: int = attrs.field(default=0, init=False)
    # Questions that wait until it is known whose they are.
    _news: anyio.Event | None = attrs.field(default=None, init=False)

    async def attend(self, told: Told, attempt: _Attempt) -> Outcome:
        """Make a call; what it asks and nobody has answered ends it."""
        while self.alone and self._calls:
            await self._change()
        own = _Underway(told)
        self._calls.append(own)
        try:
            with own.scope:
                result: m.CallToolResult = await attempt.once()
                own.returned = True
                return result
        finally:
            self._calls.remove(own)
            own.ended.set()
            self._changed()
        return refused("the call was given up") if own.outcome is None else own.outcome

    async def elicit(self, context: ClientRequestContext, params: m.ElicitRequestParams) -> m.ElicitResult:  # noqa: ARG002  it does not say which call
        """Answer what the server asks, if a person has answered it; else give its call up, so that one is asked."""
        own = await self._whose()
        if own is None:
            return m.ElicitResult(action="cancel")
        if (reply := own.told.reply(params)) is not None:
            return reply
        own.give_up(own.told.inquiry({"": params}))
        await own.ended.wait()
        return m.ElicitResult(action="cancel")

    async def _whose(self) -> _Underway | None:
        """Return the call in which it is asked, when that can be told; None where it cannot, and all were given up."""
        self._held += 1
        perhaps = tuple(self._calls)
        try:
            while len(self._calls) > 1:
                self.alone = True
                if self._held >= len(self._calls):
                    await self._give_up_all()
                    return None
                await self._change()
            own = self._calls[0] if self._calls else None
            is_told = own is not None and own.outcome is None and all(c is own or c.returned for c in perhaps)
            return own if is_told else None
        finally:
            self._held -= 1

    async def _give_up_all(self) -> None:
        """Cut off all calls, all at once, so that none is left that could be taken for the one that asks."""
        calls = tuple(self._calls)
        for own in calls:
            own.give_up(refused(UNTOLD))
        for own in calls:
            await own.ended.wait()

    async def _change(self) -> None:
        if self._news is None:
            self._news = anyio.Event()
        await self._news.wait()

    def _changed(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None
