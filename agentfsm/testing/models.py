"""Models for tests: one that follows a script and checks what it is asked, one that is a function."""

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
from agentfsm.core.validation import FUNCTION
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

# What a scripted reply costs unless it says otherwise: enough to see sums add up.
USAGE: Final = Usage(input_tokens=10, output_tokens=5)

Expectation = str | Callable[[Request], bool]


@attrs.frozen
class Call(Value):
    """A tool call of a script; make it with `call`."""

    name: str
    arguments: str


@attrs.frozen(kw_only=True)
class Line(Value):
    """A reply of a script; make it with `say` or `fail`."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    expect: Expectation | None = None
    """What the model must have been asked: words in the newest message, or a check of the whole request."""

    usage: Usage | None = USAGE
    finish_reason: FinishReason | None = None
    delay_s: float = 0.0
    """Seconds before the reply."""

    pace_s: float = 0.0
    """Seconds before each call, where the reply is streamed."""

    error: Exception | None = None
    """Raised in place of a reply."""


def call(name: str, /, **arguments: Any) -> Call:
    """Write a tool call into a script."""
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def raw_call(name: str, arguments: str) -> Call:
    """Write a tool call whose arguments are any text, also a broken one."""
    return Call(name, arguments)


def say(text: str = "", *calls: Call, expect: Expectation | None = None, **details: Any) -> Line:
    """Write a reply into a script: text, calls, or both; `details` are further fields of `Line`."""
    return Line(text=text, calls=calls, expect=expect, **details)


def fail(error: Exception, *, expect: Expectation | None = None) -> Line:
    """Let the model fail at this place of the script."""
    return Line(error=error, expect=expect)


class ScriptedModel(Model):
    """Follows a script, line by line, and fails the test when it is asked something else, or too much.

    Example: `ScriptedModel(say("", call("get_weather", city="Paris")), say("Sunny.", expect="28"))`

    Where an agent that is a tool, or a tool itself, asks it, that failure is a result which the caller's model reads:
    `assert_done` tells it again.

    Attributes:
        requests: What it was asked, oldest first.
    """

    name = "scripted"

    def __init__(self, *script: Line | str) -> None:
        """Take the lines; a str is a reply of that text.

        Raises:
            MisuseError: when something else is among them.
        """
        self._script = tuple([_to_line(each) for each in script])
        self._failure: AssertionError | None = None
        self.requests: list[Request] = []

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Give the next line.

        Raises:
            AssertionError: when the script is at its end, or the request is not what the line expects.
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
        """Fail the test when lines were left over, or the model was asked something else, or too much.

        Raises:
            AssertionError: naming how many, or as the first `reply` that failed.
        """
        if self._failure is not None:
            raise AssertionError(str(self._failure)) from self._failure
        left = len(self._script) - len(self.requests)
        if left > 0:
            raise AssertionError(f"{left} of {len(self._script)} lines of the script were not asked for")


def _to_line(given: object) -> Line:
    if isinstance(given, str):
        return say(given)
    if isinstance(given, Line):
        return given
    what = f"a {type(given).__name__}" if isinstance(given, list | tuple) else repr(given)
    raise MisuseError(
        f"{what} is no line of a script: give each line by itself, a text, say(...) or fail(...); "
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
    """A model that is a function of the request: plain or async, returning a `Reply`, a line of a script, or a text."""

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
        """Call the function.

        Raises:
            MisuseError: when it returned something else.
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
