"""The wire of chat completions, read and written: our messages as JSON, and JSON as our reply. Pure, and no vendor."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import attrs
import jiter

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import AssistantMessage, ImagePart, SystemMessage, ToolResult, Usage, UserMessage
from agentfsm.ports import CallChunk, FinishChunk, FinishReason, ProposedCall, Reply, TextChunk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentfsm.core.messages import Message, Part, ToolCall
    from agentfsm.ports import Chunk, Request, Settings, ToolDefinition

_T = TypeVar("_T")

MOST_CALLS: Final = 128
# Of one message; of more, OpenAI says "array too long".

KEPT_BYTES: Final = 64 * 2**20
# Of memory for what was written, see `_held`: 1,000 runs of 40 messages. Beyond it, those that rest longest are written
# anew when they go on.


# Our messages as the wire writes them


def _plain(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):  # a read-only view, say
        return dict(value)
    msg = f"a {type(value).__name__} is not JSON"
    raise TypeError(msg)


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)


def _json(value: object) -> bytes:
    # Half a surrogate pair, which tools may bring in, cannot be sent; a question mark stands for it.
    return _ENCODER.encode(value).encode("utf-8", "replace")


def _held(items: Sequence[object], text: bytes) -> int:
    # Bytes, about: what was written, and the items, whose run may be over: as much text, and 500 for the objects.
    return 2 * len(text) + 500 * len(items)


@attrs.define(eq=False, repr=False)
class _Lists(Generic[_T]):
    """Lists as they stand in JSON, without the brackets: what goes on from a list that is kept is only added to it."""

    wires: Callable[[Sequence[_T]], Iterable[object]]
    # What JSON is to say of some of the items.
    kept: OrderedDict[int, tuple[tuple[_T, ...], bytes]] = attrs.field(factory=OrderedDict)
    # By the identity of the first item, which is nobody else's for as long as it is kept; the one used last at the end.
    held: int = 0
    # Bytes of memory, about.

    def text(self, items: Sequence[_T]) -> bytes:
        items = tuple(items)
        first = id(items[0])
        known, text = self.kept.pop(first, ((), b""))
        self.held -= _held(known, text)
        # Tuples look at identity first: this takes 10 us for 800 messages, and writing them takes 2 ms.
        if items[: len(known)] != known:
            known, text = (), b""
        if len(known) < len(items):
            news = b",".join([_json(wire) for wire in self.wires(items[len(known) :])])
            text = text + b"," + news if known else news
        self.kept[first] = items, text
        self.held += _held(items, text)
        while self.held > KEPT_BYTES:
            _, oldest = self.kept.popitem(last=False)
            self.held -= _held(*oldest)
        return text


@attrs.define(eq=False, repr=False)
class Written:
    """What was written of earlier requests, so that each message and each tool is written once, and not in each turn.

    For one event loop.
    """

    messages: _Lists[Message] = attrs.field(factory=lambda: _Lists(_messages))
    tools: _Lists[ToolDefinition] = attrs.field(factory=lambda: _Lists(_tools))


def encode(
    request: Request,
    *,
    model: str,
    limit_field: str,
    streamed: bool,
    written: Written | None = None,
) -> bytes:
    """Write the body of a request. What is not set is not sent.

    Args:
        request: The whole question.
        model: As the server knows it.
        limit_field: What the server calls the largest answer: "max_completion_tokens" or "max_tokens".
        streamed: Whether to ask for a stream, with the usage at its end.
        written: What need not be written again; takes in what is written now.

    Raises:
        MisuseError: when a tool's parameters or a setting are not JSON.
    """
    written = written or Written()
    try:
        fields = {"model": model} | _tool_fields(request) | _setting_fields(request.settings, limit_field)
        if streamed:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        lists = {"messages": _history(request, written)}
        if request.tools:  # OpenAI refuses an empty list
            lists["tools"] = written.tools.text(request.tools)
        text = _json(fields).removesuffix(b"}")
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"the request cannot be written as JSON ({error}): look at the tools' parameters and the settings"
        raise MisuseError(msg) from error
    added = [b',"%b":[%b]' % (name.encode(), each) for name, each in lists.items() if name not in fields]
    return b"".join([text, *added, b"}"])


def _setting_fields(settings: Settings, limit_field: str) -> dict[str, Any]:
    fields = {
        "temperature": settings.temperature,
        limit_field: settings.max_tokens,
        "seed": settings.seed,
        "stop": list(settings.stop) or None,
    }
    return {name: value for name, value in fields.items() if value is not None} | dict(settings.extra_body)


def _history(request: Request, written: Written) -> bytes:
    messages = [written.messages.text(request.messages)] if request.messages else []
    if request.instructions:
        messages.insert(0, _json({"role": "system", "content": request.instructions}))
    return b",".join(messages)


def _messages(messages: Sequence[Message]) -> Iterator[object]:
    return map(_message, _in_portions(messages))


def _tools(tools: Sequence[ToolDefinition]) -> Iterator[object]:
    return (tool.openai() for tool in tools)


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
        return {}  # OpenAI refuses both fields where there are no tools
    fields: dict[str, Any] = {}
    choice, parallel = request.settings.tool_choice, request.settings.parallel_tool_calls
    if choice is not None:
        modes = {"auto", "none", "required"}
        fields["tool_choice"] = choice if choice in modes else {"type": "function", "function": {"name": choice}}
    if parallel is not None:
        fields["parallel_tool_calls"] = parallel
    return fields


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


def _parsed(text: bytes) -> object:
    # jiter takes 30 % of json's time, which was a quarter of all that a chunk costs. It refuses half a surrogate pair,
    # which a server that cuts its text in JavaScript sends; json takes it, and words the errors.
    try:
        return jiter.from_json(text)
    except ValueError:
        return json.loads(text)


def decode(data: bytes) -> Reply:
    """Read a reply that came whole.

    Raises:
        FormError: when it is not a chat completion, or has no choice.
        SentError: when the server sent an error.
    """
    try:
        answer = _parsed(data)
    except ValueError:
        msg = f"text that is no JSON: {data.decode('utf-8', 'replace')}"
        raise FormError(msg) from None
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


@attrs.define(eq=False, repr=False)
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


@attrs.define(eq=False, repr=False)
class _Events:
    """Server-sent events, cut out of what the network brings.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, without a lone CR as the end of a line.
    """

    rest: bytes = b""
    # The beginning of a line.
    data: list[bytes] = attrs.field(factory=list)
    # The lines of the event that is not whole yet.

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is whole now."""
        events: list[bytes] = []
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self.data.append(text[5:].removeprefix(b" "))
            elif not text and self.data:
                events.append(b"\n".join(self.data))
                self.data = []
        return events


@attrs.define(eq=False, repr=False)
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
            self._take(_parsed(event), pieces)
        return pieces

    def _take(self, chunk: object, pieces: list[Chunk]) -> None:
        _check_error(chunk)
        self.chunks += 1
        self.usage = _usage(chunk) or self.usage  # some servers count on in each chunk, OpenAI in the last
        for choice in _field(chunk, "choices", list, []):
            if _field(choice, "index", int, 0):
                continue  # a second answer, which only extra_body={"n": 2} asks for
            self.choices += 1
            self._delta(_field(choice, "delta", dict, {}), pieces)
            before, self.finish = self.finish, _field(choice, "finish_reason", str, self.finish or "") or None
            if self.finish is not None and before is None:
                reason = _reason(self.finish, calls=bool(self.drafts), refused=self.refused)
                pieces.append(FinishChunk(reason=reason))

    def _delta(self, delta: dict[str, Any], pieces: list[Chunk]) -> None:
        refusal = _field(delta, "refusal", str, "")
        self.refused = self.refused or bool(refusal)
        if text := _field(delta, "content", str, "") + refusal:
            self.texts.append(text)
            pieces.append(TextChunk(text))
        for call in _field(delta, "tool_calls", list, []):
            index = self._index(call)
            name, arguments = self.drafts.setdefault(index, _Draft()).take(call)
            if name or arguments:
                pieces.append(CallChunk(index=index, name=name, arguments=arguments))

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
