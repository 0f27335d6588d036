"""Models for tests: one that follows a script and checks the requests, and one that calls a function."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Final

import anyio
import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import AssistantMessage, Message
from agentfsm.core.usage import Usage
from agentfsm.core.validation import FUNCTION, require_tuple, require_type
from agentfsm.core.value import Value
from agentfsm.ports.model import (
    CallChunk,
    Emit,
    FinishChunk,
    FinishReason,
    Model,
    ProposedCall,
    Reply,
    Request,
    TextChunk,
)

# Default usage of a scripted reply: not zero, so that tests can check totals.
USAGE: Final = Usage(input_tokens=10, output_tokens=5)

Expectation = str | Callable[[Request], bool]


@attrs.frozen
class Call(Value):
    """Tool call in a script; created by `call` or `raw_call`."""

    name: str
    """Name of the tool."""

    arguments: str
    """Arguments as JSON text, which may be malformed."""


_CALLS: Final = require_tuple(Call, wanted="calls made by call() or raw_call()")
_ERROR: Final = require_type(Exception, wanted="an exception").or_none()


@attrs.frozen(kw_only=True)
class Line(Value):
    """Reply in a script; created by `say` or `fail`."""

    text: str = ""
    """Text of the reply."""

    calls: tuple[Call, ...] = attrs.field(default=(), validator=_CALLS)
    """Tool calls of the reply, in order."""

    expect: Expectation | None = None
    """Expected request: a text that the newest message must contain, or a function of the request that must return
    True. None: any request.
    """

    usage: Usage | None = USAGE
    """Token usage of the reply. None: the reply has none."""

    finish_reason: FinishReason | None = None
    """Finish reason of the reply. None: TOOL_CALLS if there are calls, else STOP."""

    delay_s: float = 0.0
    """Seconds before the reply."""

    pace_s: float = 0.0
    """Seconds before each call in a streamed reply."""

    error: Exception | None = attrs.field(default=None, validator=_ERROR)
    """Exception to raise in place of a reply."""


def call(name: str, /, **arguments: Any) -> Call:
    """Create a tool call for a script."""
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def raw_call(name: str, arguments: str) -> Call:
    """Create a tool call with raw argument text, which may be malformed JSON."""
    return Call(name, arguments)


def say(text: str = "", *calls: Call, expect: Expectation | None = None, **details: Any) -> Line:
    """Create a reply for a script: text, calls, or both; `details` are further fields of `Line`."""
    return Line(text=text, calls=calls, expect=expect, **details)


def fail(error: Exception, *, expect: Expectation | None = None) -> Line:
    """Create a line at which the model raises an error."""
    return Line(error=error, expect=expect)


class ScriptedModel(Model):
    """Model that follows a script, and fails the test on an unexpected or an additional request.

    Example: `ScriptedModel(say("", call("get_weather", city="Paris")), say("Sunny.", expect="28"))`

    If a tool or a subagent calls this model, the failure becomes a tool result for the calling model; `assert_done`
    raises it again.

    Attributes:
        requests: The requests so far, oldest first.
    """

    name = "scripted"

    def __init__(self, *script: Line | str) -> None:
        """Create a model with these lines; a str is a reply with that text.

        Raises:
            MisuseError: when a line has another type.
        """
        self._script = tuple([to_line(each) for each in script])
        self._failure: AssertionError | None = None
        self.requests: list[Request] = []

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Play the next line.

        Raises:
            AssertionError: when the script has ended, or the request does not match the line's `expect`.
        """
        at = len(self.requests)
        self.requests.append(request)
        try:
            line = self._next_line(at, request)
        except AssertionError as error:
            self._failure = self._failure or error
            raise
        return await _play_line(line, at, emit)

    def _next_line(self, at: int, request: Request) -> Line:
        if at >= len(self._script):
            lines = len(self._script)
            raise AssertionError(
                f"the script has {lines} lines and the model was asked once more: {_newest_text(request)}"
            )
        _check_expectation(self._script[at].expect, request, at)
        return self._script[at]

    def assert_done(self) -> None:
        """Fail the test if lines are left over, or if a request was unexpected.

        Raises:
            AssertionError: with the number of lines left, or with the error of the first failed `reply`.
        """
        if self._failure is not None:
            raise AssertionError(str(self._failure)) from self._failure
        left = len(self._script) - len(self.requests)
        if left > 0:
            raise AssertionError(f"{left} of {len(self._script)} lines of the script were not asked for")


def to_line(given: object) -> Line:
    """Return a line of a script; a text becomes a reply with that text.

    Raises:
        MisuseError: if it is neither a text nor made by `say` or `fail`.
    """
    if isinstance(given, str):
        return say(given)
    if isinstance(given, Line):
        return given
    got = f"a {type(given).__name__}" if isinstance(given, list | tuple) else repr(given)
    raise MisuseError(
        f"expected a line of a script, got {got}: pass each line by itself, as a text, say(...) or fail(...); "
        "say('', call('tool', x=1)) calls a tool"
    )


async def _play_line(line: Line, at: int, emit: Emit | None) -> Reply:
    if line.delay_s:
        await anyio.sleep(line.delay_s)
    if line.error is not None:
        raise line.error
    calls = tuple(
        ProposedCall(id=f"call_{at}_{index}", name=each.name, arguments=each.arguments)
        for index, each in enumerate(line.calls)
    )
    reason = line.finish_reason or (FinishReason.TOOL_CALLS if calls else FinishReason.STOP)
    if emit is not None:
        for piece in re.findall(r"\S*\s*", line.text)[:-1]:
            emit(TextChunk(piece))
        for index, each in enumerate(calls):
            if line.pace_s:
                await anyio.sleep(line.pace_s)
            emit(CallChunk(index=index, name=each.name))
            emit(CallChunk(index=index, arguments=each.arguments))
        emit(FinishChunk(reason=reason))
    return Reply(text=line.text, calls=calls, finish_reason=reason, usage=line.usage)


def _check_expectation(expect: Expectation | None, request: Request, at: int) -> None:
    if expect is None:
        return
    met = expect in _newest_text(request) if isinstance(expect, str) else expect(request)
    if not met:
        wish = repr(expect) if isinstance(expect, str) else "its check to pass"
        raise AssertionError(
            f"line {at + 1} of the script expects {wish}; the newest message is: {_newest_text(request)}"
        )


def _newest_text(request: Request) -> str:
    message: Message = request.messages[-1]
    return json.dumps([c.name for c in message.calls]) if isinstance(message, AssistantMessage) else message.text


class FunctionModel(Model):
    """Model that calls a function of the request, plain or async, which returns a `Reply`, a script line or a text."""

    name = "function"

    def __init__(self, function: Callable[[Request], Reply | Line | str | Awaitable[Reply | Line | str]]) -> None:
        """Take the function.

        Raises:
            MisuseError: if it cannot be called.
        """
        FUNCTION.check("FunctionModel", "function", function)
        self._function = function
        self._request_count = 0

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Call the function and return its reply.

        Raises:
            MisuseError: when the function returns another type.
        """
        answer = self._function(request)
        value = await answer if isawaitable(answer) else answer
        at, self._request_count = self._request_count, self._request_count + 1
        if isinstance(value, Line):
            _check_expectation(value.expect, request, at)
            return await _play_line(value, at, emit)
        reply = Reply(text=value) if isinstance(value, str) else value
        if not isinstance(reply, Reply):
            raise MisuseError(f"the function returned {type(reply).__name__}: return a Reply, say(...) or a text")
        if emit is not None and reply.text:
            emit(TextChunk(reply.text))
        return reply
