"""The wire of chat completions, read and written: our messages as JSON, and JSON as our reply. Pure, and no vendor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import AssistantMessage, ImagePart, SystemMessage, ToolResult, Usage, UserMessage
from agentfsm.ports import CallChunk, FinishChunk, FinishReason, ProposedCall, Reply, TextChunk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentfsm.core.messages import Message, Part, ToolCall
    from agentfsm.ports import Chunk, Request, Settings

_T = TypeVar("_T")

MOST_CALLS: Final = 128
# Of one message; of more, OpenAI says "array too long".


# Our messages as the wire writes them


def encode(request: Request, *, model: str, limit_field: str, streamed: bool) -> bytes:
    """Write the body of a request. What is not set is not sent.

    Args:
        request: The whole question.
        model: As the server knows it.
        limit_field: What the server calls the largest answer: "max_completion_tokens" or "max_tokens".
        streamed: Whether to ask for a stream, with the usage at its end.

    Raises:
        MisuseError: when a tool's parameters or a setting are not JSON.
    """
    body: dict[str, Any] = {"model": model, "messages": _history(request)}
    try:
        body |= _tool_fields(request) | _setting_fields(request.settings, limit_field)
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"the request cannot be written as JSON ({error}): look at the tools' parameters and the settings"
        raise MisuseError(msg) from error
    # Half a surrogate pair, which tools may bring in, cannot be sent; a question mark stands for it.
    return text.encode("utf-8", "replace")


def _setting_fields(settings: Settings, limit_field: str) -> dict[str, Any]:
    fields = {
        "temperature": settings.temperature,
        limit_field: settings.max_tokens,
        "seed": settings.seed,
        "stop": list(settings.stop) or None,
    }
    return {name: value for name, value in fields.items() if value is not None} | dict(settings.extra_body)


def _history(request: Request) -> list[dict[str, Any]]:
    messages = [_message(message) for message in _in_portions(request.messages)]
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    return messages


def _in_portions(messages: Sequence[Message]) -> Iterator[Message]:
    """Split a reply of more calls than OpenAI takes back into several, each with its results right behind it."""
    rest: tuple[ToolCall, ...] = ()
    for message in messages:
        if isinstance(message, AssistantMessage) and len(message.calls) > MOST_CALLS:
            rest = message.calls[MOST_CALLS:]
            yield attrs.evolve(message, calls=message.calls[:MOST_CALLS])
            continue
        if rest and isinstance(message, ToolResult) and message.call_id == rest[0].id:
            yield AssistantMessage(calls=rest[:MOST_CALLS])
            rest = rest[MOST_CALLS:]
        yield message


def _message(message: Message) -> dict[str, Any]:
    match message:
        case ToolResult():
            return {"role": "tool", "tool_call_id": message.call_id, "content": message.text}
        case AssistantMessage(calls=()):
            return {"role": "assistant", "content": message.text}
        case AssistantMessage():
            calls = [_call(call.id, call.name, call.arguments) for call in message.calls]
            return {"role": "assistant", "content": message.text or None, "tool_calls": calls}
        case UserMessage(parts=(part,)) if not isinstance(part, ImagePart):
            return {"role": "user", "content": part.text}
        case UserMessage():
            return {"role": "user", "content": [_part(part) for part in message.parts]}
        case SystemMessage():
            return {"role": "system", "content": message.text}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": "image_url", "image_url": {"url": part.url, "detail": part.detail}}
    return {"type": "text", "text": part.text}


def _tool_fields(request: Request) -> dict[str, Any]:
    if not request.tools:
        return {}  # OpenAI refuses an empty list, and the other two fields where there are no tools
    fields: dict[str, Any] = {"tools": [tool.openai() for tool in request.tools]}
    choice, parallel = request.settings.tool_choice, request.settings.parallel_tool_calls
    if choice is not None:
        modes = {"auto", "none", "required"}
        fields["tool_choice"] = choice if choice in modes else {"type": "function", "function": {"name": choice}}
    if parallel is not None:
        fields["parallel_tool_calls"] = parallel
    return fields


def _plain(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):  # a read-only view, say
        return dict(value)
    msg = f"a {type(value).__name__} is not JSON"
    raise TypeError(msg)


# What the wire says


class FormError(ValueError):
    """What came is not a chat completion."""


class SentError(Exception):
    """The server sent an error with status 200: in place of a reply, or in the middle of a stream.

    Attributes:
        body: The error's fields: message, type, param, code.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        super().__init__(str(body.get("message", "")))


def _field(source: object, key: str, kind: type[_T], default: _T) -> _T:
    if not isinstance(source, dict):
        msg = f"{type(source).__name__} where an object belongs"
        raise FormError(msg)
    value = source.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        msg = f"{key!r} is {type(value).__name__} where {kind.__name__} belongs"
        raise FormError(msg)
    return value


def decode(answer: object) -> Reply:
    """Read a reply that came whole.

    Raises:
        FormError: when it is not a chat completion, or has no choice.
        SentError: when the server sent an error.
    """
    if isinstance(answer, str):
        msg = f"text that is no JSON: {answer}"
        raise FormError(msg)
    _check_error(answer)
    choices = _field(answer, "choices", list, [])
    if not choices:
        msg = "a reply without a choice"
        raise FormError(msg)
    message = _field(choices[0], "message", dict, {})
    calls = [_Draft.of(call) for call in _field(message, "tool_calls", list, [])]
    refusal = _field(message, "refusal", str, "")
    return _reply(
        text=_field(message, "content", str, "") + refusal,
        calls=calls,
        finish=_field(choices[0], "finish_reason", str, "stop"),
        refused=bool(refusal),
        usage=_usage(answer),
    )


def _check_error(answer: object) -> None:
    if isinstance(answer, dict) and (error := answer.get("error")):
        raise SentError(error if isinstance(error, dict) else {"message": str(error)})


def _reply(*, text: str, calls: list[_Draft], finish: str, refused: bool, usage: Usage | None) -> Reply:
    reason = _reason(finish, calls=bool(calls), refused=refused)
    return Reply(text=text, calls=tuple(call.proposed() for call in calls), finish_reason=reason, usage=usage)


def _reason(finish: str, *, calls: bool, refused: bool) -> FinishReason:
    # "stop" with calls is what OpenAI says when a tool was forced; other servers say words of their own.
    reasons = {"length": FinishReason.LENGTH, "content_filter": FinishReason.CONTENT_FILTER}
    usual = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
    return FinishReason.REFUSAL if refused else reasons.get(finish, usual)


def _usage(source: object) -> Usage | None:
    usage = _field(source, "usage", dict, {})
    if not usage:
        return None
    input_tokens = _field(usage, "prompt_tokens", int, 0)
    cached_tokens = _field(_field(usage, "prompt_tokens_details", dict, {}), "cached_tokens", int, 0)
    return Usage(
        input_tokens=input_tokens,
        output_tokens=_field(usage, "completion_tokens", int, 0),
        cached_tokens=min(cached_tokens, input_tokens),
    )


@attrs.define(eq=False)
class _Draft:
    """A tool call, as far as it has come."""

    id: str = ""
    name: str = ""
    arguments: list[str] = attrs.field(factory=list)

    @classmethod
    def of(cls, call: object) -> _Draft:
        draft = cls()
        draft.take(call)
        return draft

    def take(self, delta: object) -> tuple[str, str]:
        """Add a piece; returns the name, where it is news, and the piece of the arguments."""
        function = _field(delta, "function", dict, {})
        name = "" if self.name else _field(function, "name", str, "")  # some servers repeat it in each piece
        arguments = _field(function, "arguments", str, "")
        self.id = self.id or _field(delta, "id", str, "")
        self.name = self.name or name
        self.arguments.append(arguments)
        return name, arguments

    def proposed(self) -> ProposedCall:
        return ProposedCall(id=self.id, name=self.name, arguments="".join(self.arguments))


@attrs.define(eq=False)
class _Events:
    """Server-sent events, cut out of what the network brings.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, without a lone CR as the end of a line.
    """

    rest: bytes = b""
    # The beginning of a line.
    data: list[bytes] = attrs.field(factory=list)
    # The lines of the event that is not whole yet.

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is whole now."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self.data.append(text[5:].removeprefix(b" "))
            elif not text and self.data:
                yield b"\n".join(self.data)
                self.data = []


@attrs.define(eq=False)
class Assembly:
    """A streamed reply, as far as it has come.

    Pieces of several calls may come interleaved and in any order; the calls are ordered by the server's index.
    """

    texts: list[str] = attrs.field(factory=list)
    drafts: dict[int, _Draft] = attrs.field(factory=dict)
    # By the server's own index, which is the order of the calls.
    finish: str | None = None
    refused: bool = False
    usage: Usage | None = None
    events: _Events = attrs.field(factory=_Events)
    chunks: int = 0
    choices: int = 0
    done: bool = False
    # Whether the server said that nothing will follow.

    def feed(self, data: bytes) -> list[Chunk]:
        """Add what the network brought.

        Returns:
            What is news in it, in order.

        Raises:
            FormError: when it is not of the wire's form.
            JSONDecodeError, UnicodeDecodeError: when it is not JSON.
            SentError: when the server sent an error.
        """
        pieces: list[Chunk] = []
        for event in self.events.feed(data):
            if event.startswith(b"[DONE]"):
                self.done = True
                break
            pieces += self._take(json.loads(event))
        return pieces

    def _take(self, chunk: object) -> Iterator[Chunk]:
        _check_error(chunk)
        self.chunks += 1
        self.usage = _usage(chunk) or self.usage  # some servers count on in each chunk, OpenAI in the last
        for choice in _field(chunk, "choices", list, []):
            if _field(choice, "index", int, 0):
                continue  # a second answer, which only extra_body={"n": 2} asks for
            self.choices += 1
            yield from self._delta(_field(choice, "delta", dict, {}))
            before, self.finish = self.finish, _field(choice, "finish_reason", str, self.finish or "") or None
            if self.finish is not None and before is None:
                yield FinishChunk(reason=_reason(self.finish, calls=bool(self.drafts), refused=self.refused))

    def _delta(self, delta: dict[str, Any]) -> Iterator[Chunk]:
        refusal = _field(delta, "refusal", str, "")
        self.refused = self.refused or bool(refusal)
        if text := _field(delta, "content", str, "") + refusal:
            self.texts.append(text)
            yield TextChunk(text=text)
        for call in _field(delta, "tool_calls", list, []):
            index = self._index(call)
            name, arguments = self.drafts.setdefault(index, _Draft()).take(call)
            if name or arguments:
                yield CallChunk(index=index, name=name, arguments=arguments)

    def _index(self, call: object) -> int:
        index = _field(call, "index", int, -1)
        if index >= 0:
            return index
        # A server that leaves the index out: a known id goes on with its call, a new id or a name begins the next one.
        last = max(self.drafts, default=-1)
        if call_id := _field(call, "id", str, ""):
            return next((index for index, draft in self.drafts.items() if draft.id == call_id), last + 1)
        named = bool(_field(_field(call, "function", dict, {}), "name", str, ""))
        return last + 1 if named else max(last, 0)

    def reply(self) -> Reply:
        """Put the reply together, once the stream has ended."""
        return _reply(
            text="".join(self.texts),
            calls=[self.drafts[index] for index in sorted(self.drafts)],
            finish=self.finish or "",
            refused=self.refused,
            usage=self.usage,
        )
