"""The wire of chat completions, read and written: our messages as JSON, and JSON as our reply. Pure, and no vendor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.messages import (
    AssistantMessage,
    AudioPart,
    FilePart,
    ImagePart,
    NativeReply,
    SystemMessage,
    TextPart,
    ToolResult,
    UserMessage,
    read_inline_data,
)
from agentfsm.core.usage import Usage
from agentfsm.models.openai.shared import read_openai_usage, tool_fields
from agentfsm.models.wire import (
    EncodedListCache,
    EncodingCache,
    InBandError,
    StreamAssembler,
    WireFormatError,
    check_count,
    encode_json,
    encode_object,
    parse_reply,
    raise_for_error,
    read_arguments,
    read_field,
    render_result,
)
from agentfsm.ports.model import (
    CallChunk,
    FinishChunk,
    FinishReason,
    ProposedCall,
    Reply,
    TextChunk,
    ThinkingChunk,
    to_mutable_json,
)

if TYPE_CHECKING:
    from agentfsm.core.messages import Media, Message, Part, ToolCall
    from agentfsm.core.settings import Settings
    from agentfsm.models.wire import PartCheck
    from agentfsm.ports.model import Chunk, OutputForm, Request, ToolDefinition

# Calls of one message; of more, OpenAI says "array too long".
MAX_CALLS_PER_MESSAGE: Final = 128


# Our messages as the wire writes them


def build_encoding_cache(provider: str = "", part_check: PartCheck | None = None) -> EncodingCache:
    """Return a memory for what is written of requests.

    Args:
        provider: Who reads it, as in `decode`: nobody else gets its thinking back.
        part_check: Says which parts of results the model cannot be shown; None where it is what the wire cannot carry.
    """
    wires = partial(wire_messages, provider, part_check or unsupported_part)
    return EncodingCache(messages=EncodedListCache(wires, can_split=_can_split), tools=EncodedListCache(_wire_tools))


def encode(
    request: Request,
    *,
    model: str,
    limit_field: str,
    streamed: bool,
    encoding_cache: EncodingCache | None = None,
) -> bytes:
    """Write the body of a request. What is not set is not sent.

    Args:
        request: The whole question.
        model: As the server knows it.
        limit_field: What the server calls the largest answer: "max_completion_tokens" or "max_tokens".
        streamed: Whether to ask for a stream, with the usage at its end.
        encoding_cache: What need not be written again; takes in what is written now.

    Raises:
        MisuseError: when a tool's parameters or a setting are not JSON.
        ModelError: when the history holds a part that the wire cannot carry.
    """
    encoding_cache = encoding_cache or build_encoding_cache()
    try:
        fields = {"model": model} | tool_fields(request, _named_tool_choice) | _format_field(request.output)
        fields |= _setting_fields(request.settings, limit_field)
        if streamed:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        lists = {"messages": _encode_history(request, encoding_cache)}
        if request.tools:  # OpenAI refuses an empty list
            lists["tools"] = encoding_cache.tools.encode(request.tools)
        return encode_object(fields, lists)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"the request cannot be written as JSON ({error}): look at the tools' parameters and the settings"
        raise MisuseError(msg) from error


def _setting_fields(settings: Settings, limit_field: str) -> dict[str, Any]:
    fields = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "reasoning_effort": settings.reasoning_effort,
        limit_field: settings.max_tokens,
        "seed": settings.seed,
        "stop": list(settings.stop) or None,
    }
    return {name: value for name, value in fields.items() if value is not None} | dict(settings.extra_body)


def _format_field(form: OutputForm | None) -> dict[str, Any]:
    if form is None:
        return {}
    if form.schema is None:
        return {"response_format": {"type": "json_object"}}
    schema = {"name": form.name, "schema": to_mutable_json(form.schema), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _encode_history(request: Request, encoding_cache: EncodingCache) -> bytes:
    messages = [encoding_cache.messages.encode(request.messages)] if request.messages else []
    if request.instructions:
        messages.insert(0, encode_json({"role": "system", "content": request.instructions}))
    return b",".join(messages)


def _can_split(_before: Message, after: Message) -> bool:
    # What the results of a reply hold beside text comes behind the last of them.
    return not isinstance(after, ToolResult)


def wire_messages(provider: str, part_check: PartCheck, messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield messages as the wire has them; provider and refused as for `memory`.

    Raises:
        ModelError: when one holds a part that the wire cannot carry.
    """
    held: list[dict[str, Any]] = []
    for message in _split_large_replies(messages):
        if not isinstance(message, ToolResult):
            yield from _media_message(held)
            held = []
        elif message.parts:
            text, parts = render_result(message, part_check)
            yield _tool_message(message.call_id, text)
            held += _label_parts(message, parts)
            continue
        yield _wire_message(message) | _thinking_field(message, provider)
    yield from _media_message(held)


def _tool_message(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _media_message(parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the message with what results hold beside text: that of a tool holds text only."""
    if parts:
        yield {"role": "user", "content": parts}


def _label_parts(result: ToolResult, parts: Mapping[str, Media]) -> Iterator[dict[str, Any]]:
    """Yield parts of a result, each with whose it is: they stand where the user speaks."""
    for name, part in parts.items():
        text = f"[{name} of result {result.call_id}, by the tool {result.tool}; not from the user]"
        yield {"type": "text", "text": text}
        yield _wire_part(part)


def _thinking_field(message: Message, provider: str) -> dict[str, Any]:
    # DeepSeek: "The `reasoning_content` in the thinking mode must be passed back to the API" (earendil-works/pi#3636).
    # Others know no such field and refuse it: Groq (janhq/jan#8136), Mistral (charmbracelet/crush#1590).
    if not isinstance(message, AssistantMessage) or message.native is None or message.native.provider != provider:
        return {}
    native: dict[str, Any] = json.loads(message.native.content)
    return native


def _wire_tools(tools: Sequence[ToolDefinition]) -> Iterator[object]:
    return (tool.openai() for tool in tools)


def _split_large_replies(messages: Sequence[Message]) -> Iterator[Message]:
    """Split a reply of more calls than OpenAI takes back into several, each with its results right behind it."""
    rest: tuple[ToolCall, ...] = ()
    for message in messages:
        if isinstance(message, AssistantMessage) and len(message.calls) > MAX_CALLS_PER_MESSAGE:
            rest = message.calls[MAX_CALLS_PER_MESSAGE:]
            yield attrs.evolve(message, calls=message.calls[:MAX_CALLS_PER_MESSAGE])
            continue
        if rest and isinstance(message, ToolResult) and message.call_id == rest[0].id:
            yield AssistantMessage(calls=rest[:MAX_CALLS_PER_MESSAGE])
            rest = rest[MAX_CALLS_PER_MESSAGE:]
        yield message


def _wire_message(message: Message) -> dict[str, Any]:
    match message:
        case ToolResult():
            return _tool_message(message.call_id, message.text)
        case AssistantMessage(calls=()):
            return {"role": "assistant", "content": message.text}
        case AssistantMessage():
            calls = [_wire_call(call.id, call.name, call.arguments) for call in message.calls]
            return {"role": "assistant", "content": message.text or None, "tool_calls": calls}
        case UserMessage(parts=(TextPart() as part,)):
            return {"role": "user", "content": part.text}
        case UserMessage():
            return {"role": "user", "content": [_wire_part(part) for part in message.parts]}
        case SystemMessage():
            return {"role": "system", "content": message.text}


def _wire_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _wire_part(part: Part) -> dict[str, Any]:
    if (reason := unsupported_part(part)) is not None:
        raise ModelError(f"The request holds a part that cannot be sent: {reason}.")
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case ImagePart():
            return {"type": "image_url", "image_url": {"url": part.url, "detail": part.detail}}
        case AudioPart():
            kind, data = read_inline_data(part) or ("", "")
            return {"type": "input_audio", "input_audio": {"data": data, "format": AUDIO_FORMATS[kind]}}
        case FilePart():
            return {"type": "file", "file": {"filename": part.name or "file", "file_data": part.url}}


# What the wire calls a recording of that media type.
AUDIO_FORMATS: Final = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3", "audio/mp3": "mp3"}


def unsupported_part(part: Part) -> str | None:
    """Say why the wire cannot carry the part; None where it can."""
    if isinstance(part, AudioPart) and (read_inline_data(part) or ("",))[0] not in AUDIO_FORMATS:
        return "chat completions take a recording as WAV or MP3 in a data: URL (AudioPart.of), and not this one"
    if isinstance(part, FilePart) and read_inline_data(part) is None:
        return "chat completions take a file whole, in a data: URL (FilePart.of), and not by its address"
    return None


def _named_tool_choice(tool: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool}}


# What the wire says


def decode(data: bytes, *, provider: str = "") -> Reply:
    """Read a reply that came whole.

    Args:
        data: The body.
        provider: Who wrote it, for the reply's `NativeReply.provider`.

    Raises:
        FormError: when it is not a chat completion, or has no choice.
        SentError: when the server sent an error, or broke the reply off.
    """
    answer = parse_reply(data)
    choices = read_field(answer, "choices", list, [])
    if not choices:
        msg = "a reply without a choice"
        raise WireFormatError(msg)
    finish = read_field(choices[0], "finish_reason", str, "stop")
    message = read_field(choices[0], "message", dict, None)
    if message is None and finish == "content_filter":
        message = {}  # of what it filters, Azure sends no message
    if message is None:
        msg = "a choice without a message"
        raise WireFormatError(msg)
    refusal = read_field(message, "refusal", str, "")
    return _build_reply(
        text=_read_text(message) + refusal,
        calls=[_PartialChatCall.of(call) for call in _read_calls(message)],
        finish=finish,
        refused=bool(refusal),
        usage=read_usage(answer),
        native=_build_native(_read_thinking(message), provider) if _is_thinking_required(message) else None,
    )


def _read_text(message: dict[str, Any]) -> str:
    """Return the text of a message, or of a piece of one, without what it refuses."""
    content = message.get("content")
    if isinstance(content, list):  # of parts, with some of Mistral's models; those of thinking have no text
        return "".join([read_field(part, "text", str, "") for part in content])
    # With audio, the text is what is spoken.
    return read_field(message, "content", str, "") or read_field(
        read_field(message, "audio", dict, {}), "transcript", str, ""
    )


def _read_thinking(message: dict[str, Any]) -> str:
    """Return what a message, or a piece of one, holds of thinking; OpenAI's own have none."""
    # DeepSeek's name for it, and that of OpenRouter, Groq and Ollama; vLLM has used both at once. Whatever else stands
    # there is no reason to throw a reply away.
    for name in ("reasoning_content", "reasoning"):
        if isinstance(text := message.get(name), str) and text:
            return text
    content = message.get("content")
    if not isinstance(content, list):
        return ""
    thoughts = [part.get("thinking") for part in content if isinstance(part, dict)]
    return "".join([_read_text({"content": each}) for each in thoughts if isinstance(each, list)])


def _is_thinking_required(message: dict[str, Any]) -> bool:
    # Who calls it so wants it back with each message, even if it is empty.
    return isinstance(message.get("reasoning_content"), str)


def _build_native(thinking: str, provider: str) -> NativeReply:
    return NativeReply(provider=provider, content=json.dumps({"reasoning_content": thinking}))


def _read_call_deltas(message: dict[str, Any]) -> list[object]:
    """Return the calls of a message, or the pieces of calls in a piece of one."""
    pieces = read_field(message, "tool_calls", list, [])
    # What was before there were several calls at once: older servers bring it, and `functions` in extra_body. Whoever
    # brings both says the same twice.
    function = None if pieces else read_field(message, "function_call", dict, {})
    return [{"index": 0, "function": function}] if function else pieces


def _read_calls(message: dict[str, Any]) -> list[object]:
    calls = _read_call_deltas(message)
    check_count(len(calls))
    return calls


def _build_reply(
    *,
    text: str,
    calls: list[_PartialChatCall],
    finish: str,
    refused: bool,
    usage: Usage | None,
    native: NativeReply | None,
) -> Reply:
    return Reply(
        text=text,
        calls=tuple([call.to_proposed_call() for call in calls]),
        finish_reason=_read_finish_reason(finish, has_calls=bool(calls), refused=refused),
        usage=usage,
        native=native,
    )


_FINISH_REASONS: Final = {
    "length": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,  # Mistral, of the window
    "model_context_window_exceeded": FinishReason.LENGTH,  # Z.ai
    "content_filter": FinishReason.CONTENT_FILTER,
    "sensitive": FinishReason.CONTENT_FILTER,  # Z.ai
}
# What servers call a reply that they broke off: Mistral and OpenRouter, DeepSeek, Z.ai. It is no whole one.
_INTERRUPTED_REASONS: Final = frozenset({"error", "insufficient_system_resource", "network_error"})


def _read_finish_reason(finish: str, *, has_calls: bool, refused: bool) -> FinishReason:
    if finish in _INTERRUPTED_REASONS:
        raise InBandError({"message": f"the server broke the reply off: {finish}"})
    # "stop" with calls is what OpenAI says when a tool was forced; other servers say words of their own.
    usual = FinishReason.TOOL_CALLS if has_calls else FinishReason.STOP
    return FinishReason.REFUSAL if refused else _FINISH_REASONS.get(finish, usual)


def read_usage(source: object) -> Usage | None:
    """Return what was billed, by an answer or by a piece of one; None where that is not said."""
    return read_openai_usage(source, "prompt", "completion")


@attrs.define(eq=False, repr=False)
class _PartialChatCall:
    """A tool call, as far as it has come."""

    id: str = ""
    name: str = ""
    arguments: list[str] = attrs.field(factory=list)

    @classmethod
    def of(cls, call: object) -> _PartialChatCall:
        draft = cls()
        draft.add_delta(call)
        return draft

    def add_delta(self, delta: object) -> tuple[str, str]:
        """Add a piece; returns the name, where it is news, and the piece of the arguments."""
        function = read_field(delta, "function", dict, {})
        name = "" if self.name else read_field(function, "name", str, "")  # some servers repeat it in each piece
        arguments = read_arguments(function)
        self.id = self.id or _read_call_id(delta)
        self.name = self.name or name
        self.arguments.append(arguments)
        return name, arguments

    def matches(self, call_id: str, name: str) -> bool:
        """Whether a piece with this id and this name, either of which may be blank, may be one of this call."""
        if call_id and self.id:
            return call_id == self.id or not name
        return bool(call_id or self.id) or not (name and self.name) or name == self.name

    def to_proposed_call(self) -> ProposedCall:
        return ProposedCall(id=self.id, name=self.name, arguments="".join(self.arguments))


def _read_call_id(call: object) -> str:
    return read_field(call, "id", str, "").strip()


@attrs.define(eq=False, repr=False)
class ChatStreamAssembler(StreamAssembler):
    """A streamed reply, as far as it has come.

    Pieces of several calls may come interleaved; the calls are in the order in which they began. A server's index says
    which of them goes on, and nothing else: some count from 1, and Gemini says 0 of each call
    (NousResearch/hermes-agent#57939).
    """

    texts: list[str] = attrs.field(factory=list)
    thoughts: list[str] = attrs.field(factory=list)
    """What the server wants back of its thinking."""

    partial_calls: list[_PartialChatCall] = attrs.field(factory=list)
    positions: dict[int, int] = attrs.field(factory=dict)
    """The server's index -> the place of the newest call that it has begun there."""

    finish_reason: str | None = None
    refused: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the model has said why it stopped."""
        return self.is_begun and self.finish_reason is not None

    def _add_event(self, event: object, chunks: list[Chunk]) -> None:
        self.usage = read_usage(event) or self.usage  # some servers count on in each chunk, OpenAI in the last
        raise_for_error(event)
        for choice in read_field(event, "choices", list, []):
            if read_field(choice, "index", int, 0):
                continue  # a second answer, which only extra_body={"n": 2} asks for
            self.is_begun = self.is_begun or "delta" in choice
            self._add_delta(read_field(choice, "delta", dict, {}), chunks)
            before, self.finish_reason = (
                self.finish_reason,
                read_field(choice, "finish_reason", str, self.finish_reason or "") or None,
            )
            if self.finish_reason is not None and before is None:
                reason = _read_finish_reason(
                    self.finish_reason, has_calls=bool(self.partial_calls), refused=self.refused
                )
                chunks.append(FinishChunk(reason=reason))

    def _add_delta(self, delta: dict[str, Any], chunks: list[Chunk]) -> None:
        text = delta.get("content")
        if len(delta) == 1 and isinstance(text, str):  # nearly all: what follows would add a fifth to their cost
            self._add_text(text, chunks)
            return
        refusal = read_field(delta, "refusal", str, "")
        self.refused = self.refused or bool(refusal)
        text = _read_text(delta) + refusal
        if thinking := _read_thinking(delta):
            chunks.append(ThinkingChunk(thinking))
        if _is_thinking_required(delta):
            self.thoughts.append(thinking)
        self._add_text(text, chunks)
        for call in _read_call_deltas(delta):
            place = self._find_position(call)
            if place == len(self.partial_calls):
                self.partial_calls.append(_PartialChatCall())
                check_count(place + 1)
            name, arguments = self.partial_calls[place].add_delta(call)
            if name or arguments:
                chunks.append(CallChunk(index=place, name=name, arguments=arguments))

    def _add_text(self, text: str, chunks: list[Chunk]) -> None:
        if text:
            self.texts.append(text)
            chunks.append(TextChunk(text))

    def _find_position(self, call: object) -> int:
        """Return the place of the call that this is a piece of; behind the last, where it begins the next one."""
        index, call_id = read_field(call, "index", int, -1), _read_call_id(call)
        name = read_field(read_field(call, "function", dict, {}), "name", str, "")
        if index >= 0:
            place = self.positions.get(index, len(self.partial_calls))
            if place < len(self.partial_calls) and not self.partial_calls[place].matches(call_id, name):
                place = self._find_position_by_id(call_id, name)
            self.positions[index] = place
            return place
        # A server that leaves the index out: a known id goes on with its call, a new id or a name begins the next one.
        return self._find_position_by_id(call_id, name) if call_id or name else max(len(self.partial_calls) - 1, 0)

    def _find_position_by_id(self, call_id: str, name: str) -> int:
        known = [place for place, draft in enumerate(self.partial_calls) if call_id and draft.id == call_id]
        # Of two calls with one id, which some servers make, the name tells the second.
        return known[-1] if known and name in ("", self.partial_calls[known[-1]].name) else len(self.partial_calls)

    def build_reply(self) -> Reply:
        """Put the reply together, once the stream has ended."""
        return _build_reply(
            text="".join(self.texts),
            calls=self.partial_calls,
            finish=self.finish_reason or "",
            refused=self.refused,
            usage=self.usage,
            native=_build_native("".join(self.thoughts), self.provider) if self.thoughts else None,
        )
