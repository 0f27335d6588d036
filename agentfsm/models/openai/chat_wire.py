"""Encode requests and decode replies of OpenAI's chat completions, without I/O or the SDK."""

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
from agentfsm.models.openai.dialects import OPENAI, Dialect
from agentfsm.models.openai.shared import explain_foreign_call, read_openai_usage, tool_fields
from agentfsm.models.wire import (
    EncodedListCache,
    EncodingCache,
    InBandError,
    ReplyOrigin,
    StreamAssembler,
    WireFormatError,
    check_count,
    encode_json,
    encode_messages,
    encode_object,
    parse_json,
    parse_reply,
    raise_for_error,
    read_arguments,
    read_field,
    read_origin,
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

# Calls per message; OpenAI rejects more with "array too long".
MAX_CALLS_PER_MESSAGE: Final = 128


# Encoding


def build_encoding_cache(
    provider: str = "", part_check: PartCheck | None = None, dialect: Dialect = OPENAI
) -> EncodingCache:
    """Create an empty cache for encoded requests.

    Args:
        provider: Server of the requests, as in `decode`. Native replies of other servers are not sent to it.
        part_check: Returns why the model does not support a part of a result. None: `unsupported_part`.
        dialect: Requirements of that server.
    """
    wires = partial(wire_messages, provider, part_check or unsupported_part, dialect)
    can_split = partial(_can_split, dialect)
    return EncodingCache(messages=EncodedListCache(wires, can_split=can_split), tools=EncodedListCache(_wire_tools))


def encode(
    request: Request,
    *,
    model: str,
    limit_field: str,
    streamed: bool,
    encoding_cache: EncodingCache | None = None,
    dialect: Dialect = OPENAI,
    cache_key: str = "",
) -> bytes:
    """Encode the body of a request. Settings that are not set are left out.

    Args:
        request: The request.
        model: Name of the model at the server.
        limit_field: Name of the field that limits the answer: "max_completion_tokens" or "max_tokens".
        streamed: Whether to request a stream, with the usage at its end.
        encoding_cache: Cache to read and extend.
        dialect: Requirements of the server.
        cache_key: Key that the server uses to find its prompt cache; empty for none.

    Raises:
        MisuseError: if a tool's parameters or a setting are not JSON.
        ModelError: if the history contains a part that the API does not support.
    """
    encoding_cache = encoding_cache or build_encoding_cache()
    try:
        fields = {"model": model} | tool_fields(request, _named_tool_choice) | _format_field(request.output)
        if cache_key:
            fields["prompt_cache_key"] = cache_key
        fields |= _setting_fields(request.settings, {"max_tokens": limit_field, **dialect.field_names})
        if streamed:
            fields["stream"] = True
        if streamed and dialect.takes_stream_options:
            fields["stream_options"] = {"include_usage": True}
        messages = [encode_messages(encoding_cache, request)] if request.messages else []
        if request.instructions:
            messages.insert(0, encode_json({"role": "system", "content": request.instructions}))
        lists = {"messages": b",".join(messages)}
        if request.tools:  # OpenAI refuses an empty list
            lists["tools"] = encoding_cache.tools.encode(request.tools)
        return encode_object(fields, lists)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"the request cannot be written as JSON ({error}): check the tools' parameters and the settings"
        raise MisuseError(msg) from error


def _setting_fields(settings: Settings, names: Mapping[str, str]) -> dict[str, Any]:
    fields = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "reasoning_effort": settings.reasoning_effort,
        "max_tokens": settings.max_tokens,
        "seed": settings.seed,
        "stop": list(settings.stop) or None,
    }
    given = {names.get(name, name): value for name, value in fields.items() if value is not None}
    return given | dict(settings.extra_body)


def _format_field(form: OutputForm | None) -> dict[str, Any]:
    if form is None:
        return {}
    if form.schema is None:
        return {"response_format": {"type": "json_object"}}
    schema = {"name": form.name, "schema": to_mutable_json(form.schema), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _can_split(dialect: Dialect, before: Message, after: Message) -> bool:
    if dialect.joins_roles:
        return isinstance(before, AssistantMessage) != isinstance(after, AssistantMessage)
    # The media of a reply's results are sent after the last result.
    if dialect.sees_neighbours and isinstance(before, ToolResult | AssistantMessage):
        return isinstance(after, AssistantMessage)
    return not isinstance(after, ToolResult)


def wire_messages(
    provider: str, part_check: PartCheck, dialect: Dialect, messages: Sequence[Message]
) -> Iterator[dict[str, Any]]:
    """Return the encoded messages; arguments as of `build_encoding_cache`.

    Raises:
        ModelError: if a message contains a part that the API does not support.
    """
    return dialect.adapt(_wire_all(provider, part_check, messages))


def _wire_all(provider: str, part_check: PartCheck, messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
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
        wire = _wire_message(message)
        if isinstance(message, AssistantMessage) and message.native is not None and message.native.provider == provider:
            _add_native_fields(wire, message.native)
        yield wire
    yield from _media_message(held)


def _tool_message(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _media_message(parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a user message with the media of results, because messages of tools contain only text."""
    if parts:
        yield {"role": "user", "content": parts}


def _label_parts(result: ToolResult, parts: Mapping[str, Media]) -> Iterator[dict[str, Any]]:
    """Yield the media of a result, each with a label, because they are sent as a message of the user."""
    for name, part in parts.items():
        text = f"[{name} of result {result.call_id}, by the tool {result.tool}; not from the user]"
        yield {"type": "text", "text": text}
        yield _wire_part(part)


def _add_native_fields(wire: dict[str, Any], native: NativeReply) -> None:
    """Add the fields of a native reply, which only the server that sent them accepts.

    DeepSeek: "The `reasoning_content` in the thinking mode must be passed back to the API" (earendil-works/pi#3636).
    Other servers refuse the unknown field: Groq (janhq/jan#8136), Mistral (charmbracelet/crush#1590).
    """
    fields: dict[str, Any] = json.loads(native.content)
    for call, extra in zip(wire.get("tool_calls", ()), fields.pop("tool_calls", ()), strict=False):
        call.update(extra)
    wire |= fields


def _wire_tools(tools: Sequence[ToolDefinition]) -> Iterator[object]:
    return (tool.openai() for tool in tools)


def _split_large_replies(messages: Sequence[Message]) -> Iterator[Message]:
    """Split a reply with more calls than OpenAI accepts into several, each followed by its results."""
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
            calls = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.calls
            ]
            return {"role": "assistant", "content": message.text or None, "tool_calls": calls}
        case UserMessage(parts=(TextPart() as part,)):
            return {"role": "user", "content": part.text}
        case UserMessage():
            return {"role": "user", "content": [_wire_part(part) for part in message.parts]}
        case SystemMessage():
            return {"role": "system", "content": message.text}


def _wire_part(part: Part) -> dict[str, Any]:
    if (reason := unsupported_part(part)) is not None:
        raise ModelError(f"The request contains a part that cannot be sent: {reason}.")
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


# Format of a recording in the API, by media type.
AUDIO_FORMATS: Final = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3", "audio/mp3": "mp3"}


def unsupported_part(part: Part) -> str | None:
    """Return the reason why the API does not support the part; None if it does."""
    if isinstance(part, AudioPart) and (read_inline_data(part) or ("",))[0] not in AUDIO_FORMATS:
        return "chat completions accept a recording only as WAV or MP3 in a data: URL (AudioPart.of)"
    if isinstance(part, FilePart) and read_inline_data(part) is None:
        return "chat completions accept a file only in a data: URL (FilePart.of), not by its address"
    return None


def _named_tool_choice(tool: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool}}


# Decoding


def decode(data: bytes, *, provider: str = "", dialect: Dialect = OPENAI) -> Reply:
    """Decode a reply that was not streamed.

    Args:
        data: The body.
        provider: The reply's `NativeReply.provider`.
        dialect: Requirements of the server.

    Raises:
        WireFormatError: if it is not a chat completion, or has no choice.
        InBandError: if the server sent an error, or aborted the reply.
    """
    answer = parse_reply(data)
    choices = read_field(answer, "choices", list, [])
    if not choices:
        msg = "a reply without a choice"
        raise WireFormatError(msg)
    finish = read_field(choices[0], "finish_reason", str, "stop")
    message = read_field(choices[0], "message", dict, None)
    if message is None and finish == "content_filter":
        message = {}  # Azure sends no message if it was filtered
    if message is None:
        msg = "a choice without a message"
        raise WireFormatError(msg)
    refusal = read_field(message, "refusal", str, "")
    native = _NativeFields()
    native.add(message)
    deltas = _read_call_deltas(message)
    check_count(len(deltas))
    calls = [_PartialChatCall.of(delta) for delta in deltas]
    return _build_reply(
        text=_read_text(message) + refusal,
        calls=[call for call in calls if call.is_begun],
        has_custom=any(call.is_custom for call in calls),
        finish=finish,
        refused=bool(refusal),
        usage=read_usage(answer),
        native=native,
        provider=provider,
        dialect=dialect,
        origin=read_origin(answer),
    )


def _read_text(message: dict[str, Any]) -> str:
    """Return the text of a message or a delta, without its refusal."""
    content = message.get("content")
    if isinstance(content, list):  # parts, from some of Mistral's models; parts of reasoning have no text
        return "".join([read_field(part, "text", str, "") for part in content])
    # A message with audio has its text as a transcript.
    return read_field(message, "content", str, "") or read_field(
        read_field(message, "audio", dict, {}), "transcript", str, ""
    )


@attrs.define(eq=False, repr=False)
class _NativeFields:
    """Fields of a message that only its server understands, whole or from the deltas of a stream."""

    thoughts: dict[str, list[str]] = attrs.field(factory=dict)
    """Pieces of reasoning by the name of the field; OpenAI's own servers send none."""

    details: list[dict[str, Any]] = attrs.field(factory=list)
    """OpenRouter's `reasoning_details`. Claude refuses fragments of a signed block (agno-agi/agno#8794)."""

    signature: dict[str, Any] | None = None
    """Gemini's `extra_content` of a message without calls."""

    def add(self, message: dict[str, Any]) -> str:
        """Add a message or a delta; return the reasoning in it. A value of another type is ignored."""
        thinking = self._add_thinking(message)
        details = message.get("reasoning_details")
        for detail in details if isinstance(details, list) else ():
            if isinstance(detail, dict):
                self._add_detail(detail)
        self.signature = _read_signature(message) or self.signature
        return thinking

    def _add_thinking(self, message: dict[str, Any]) -> str:
        # DeepSeek's name of the field, and that of OpenRouter, Groq and Ollama; vLLM has used both at once.
        found = {name: text for name in _THINKING_FIELDS if isinstance(text := message.get(name), str)}
        name, text = next(((name, text) for name, text in found.items() if text), ("reasoning", ""))
        if not text and isinstance(content := message.get("content"), list):
            thoughts = [part.get("thinking") for part in content if isinstance(part, dict)]  # Mistral
            text = "".join([_read_text({"content": each}) for each in thoughts if isinstance(each, list)])
        # DeepSeek wants even an empty text back with each message.
        name = name if text else "reasoning_content"
        if text or name in found:
            self.thoughts.setdefault(name, []).append(text)
        return text

    def _add_detail(self, detail: dict[str, Any]) -> None:
        """Add a detail, or the next piece of the last one."""
        last = self.details[-1] if self.details else {}
        is_piece = detail.get("index") is not None and all(
            detail.get(key) == last.get(key) for key in ("type", "index")
        )
        if not is_piece or len({str(each["id"]) for each in (detail, last) if each.get("id")}) > 1:
            self.details.append(dict(detail))
            return
        for key, value in detail.items():
            if key in _GROWING_FIELDS and isinstance(value, str) and isinstance(last.get(key), str):
                last[key] += value
            elif value is not None:
                last[key] = value

    @property
    def _thinking(self) -> tuple[str, str]:
        """Name of the field with the reasoning and the whole text; both empty if there is none."""
        texts = [(name, "".join(self.thoughts[name])) for name in _THINKING_FIELDS if name in self.thoughts]
        return next((each for each in texts if each[1]), texts[0] if texts else ("", ""))

    @property
    def thinking(self) -> str:
        """The whole reasoning."""
        return self._thinking[1]

    def build(self, calls: Sequence[_PartialChatCall], provider: str, dialect: Dialect) -> NativeReply | None:
        """Return the fields that the server wants back; None if there are none."""
        name, text = self._thinking
        is_wanted = name == "reasoning_content" or (name and dialect.takes_reasoning and not self.details)
        fields: dict[str, Any] = {name: text} if is_wanted else {}
        if self.details:
            fields["reasoning_details"] = self.details
        if self.signature is not None:
            fields["extra_content"] = self.signature
        if any(call.signature for call in calls):
            fields["tool_calls"] = [{"extra_content": call.signature} if call.signature else {} for call in calls]
        return NativeReply(provider=provider, content=json.dumps(fields)) if fields else None


_THINKING_FIELDS: Final = ("reasoning_content", "reasoning")
# Texts of `reasoning_details` that a stream sends in pieces.
_GROWING_FIELDS: Final = frozenset({"text", "summary", "data"})


def _read_signature(source: dict[str, Any]) -> dict[str, Any] | None:
    """Return the `extra_content` of a message or a call if it contains the signature of Gemini's reasoning."""
    extra = source.get("extra_content")
    if not isinstance(extra, dict):
        return None
    signed = any(isinstance(each, dict) and "thought_signature" in each for each in extra.values())  # google, vertex
    return extra if signed else None


def _read_call_deltas(message: dict[str, Any]) -> list[object]:
    """Return the calls of a message, or the call deltas of a delta."""
    deltas = read_field(message, "tool_calls", list, [])
    # The old form of a single call, from older servers and with `functions` in extra_body. If both forms are present,
    # they have the same content. One without content is none (Snowflake's Cortex).
    function = None if deltas else read_field(message, "function_call", dict, {})
    return [{"index": 0, "function": function}] if function else deltas


def _build_reply(
    *,
    text: str,
    calls: list[_PartialChatCall],
    has_custom: bool,
    finish: str,
    refused: bool,
    usage: Usage | None,
    native: _NativeFields,
    provider: str,
    dialect: Dialect,
    origin: ReplyOrigin,
) -> Reply:
    return Reply(
        text=text,
        calls=tuple([call.to_proposed_call() for call in calls]),
        finish_reason=_read_finish_reason(finish, has_calls=bool(calls), refused=refused),
        usage=usage,
        native=native.build(calls, provider, dialect),
        thinking=native.thinking,
        served_model=origin.model,
        response_id=origin.id,
        unanswered=explain_foreign_call("custom tool call") if has_custom else "",
    )


_FINISH_REASONS: Final = {
    "length": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,  # Mistral, of the window
    "model_context_window_exceeded": FinishReason.LENGTH,  # Z.ai
    "content_filter": FinishReason.CONTENT_FILTER,
    "sensitive": FinishReason.CONTENT_FILTER,  # Z.ai
}
# Finish reasons of a reply that the server aborted: Mistral and OpenRouter, DeepSeek, Z.ai. The reply is incomplete.
_INTERRUPTED_REASONS: Final = frozenset({"error", "insufficient_system_resource", "network_error"})


def _read_finish_reason(finish: str, *, has_calls: bool, refused: bool) -> FinishReason:
    if finish in _INTERRUPTED_REASONS:
        raise InBandError({"message": f"the server aborted the reply: {finish}"})
    # OpenAI sends "stop" with calls if a tool was forced; other servers have reasons of their own.
    usual = FinishReason.TOOL_CALLS if has_calls else FinishReason.STOP
    return FinishReason.REFUSAL if refused else _FINISH_REASONS.get(finish, usual)


def read_usage(source: object) -> Usage | None:
    """Return the usage in a response or an event; None if it has none."""
    return read_openai_usage(source, "prompt", "completion")


@attrs.define(eq=False, repr=False)
class _PartialChatCall:
    """Tool call that is being received."""

    id: str = ""
    name: str = ""
    arguments: list[str] = attrs.field(factory=list)
    signature: dict[str, Any] | None = None
    """Gemini's `extra_content`."""

    place: int = 0
    """Position in the reply, once the call is begun."""

    is_custom: bool = False
    """Whether it calls a tool of the type "custom", whose input is a text."""

    @property
    def is_begun(self) -> bool:
        """Whether it has a name or arguments. Some servers send an empty call beside a text."""
        return bool(self.name or any(self.arguments))

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a JSON object, or the `null` of a call without arguments."""
        text = "".join(self.arguments)
        if text.strip() == "null":
            return True
        try:
            return text.rstrip().endswith("}") and isinstance(parse_json(text.encode("utf-8", "surrogatepass")), dict)
        except (ValueError, RecursionError):
            return False

    @classmethod
    def of(cls, call: object) -> _PartialChatCall:
        partial_call = cls()
        partial_call.add_delta(call)
        return partial_call

    def add_delta(self, delta: object) -> tuple[str, str]:
        """Add a delta; return the name if it is new, and the new part of the arguments."""
        function = read_field(delta, "function", dict, {})
        name = "" if self.name else read_field(function, "name", str, "")  # some servers repeat it in each delta
        arguments = read_arguments(function)
        self.id = self.id or _read_call_id(delta)
        self.name = self.name or name
        self.arguments.append(arguments)
        if isinstance(delta, dict):
            self.signature = _read_signature(delta) or self.signature
            self.is_custom = self.is_custom or "custom" in delta
        return name, arguments

    def matches(self, call_id: str, name: str, arguments: str) -> bool:
        """Return whether a delta with this id, name and arguments, each of which may be blank, may belong to this call.

        A delta with a name that begins arguments after those of this call are whole belongs to the next one, also if it
        repeats the id.
        """
        if name and self.name and arguments.lstrip().startswith("{") and self.is_whole:
            return False
        if call_id and self.id:
            return call_id == self.id or not name
        return bool(call_id or self.id) or not (name and self.name) or name == self.name

    def to_proposed_call(self) -> ProposedCall:
        return ProposedCall(id=self.id, name=self.name, arguments="".join(self.arguments))


def _read_call_id(call: object) -> str:
    return read_field(call, "id", str, "").strip()


@attrs.define(eq=False, repr=False)
class ChatStreamAssembler(StreamAssembler):
    """Assembler of a streamed chat completion.

    Deltas of several calls may be interleaved; the calls keep the order in which they began. The server's index only
    identifies the call of a delta: some servers count from 1, and Gemini sends 0 for each call
    (NousResearch/hermes-agent#57939).
    """

    dialect: Dialect = OPENAI
    """Requirements of the server."""

    texts: list[str] = attrs.field(factory=list)
    native: _NativeFields = attrs.field(factory=_NativeFields)
    partial_calls: list[_PartialChatCall] = attrs.field(factory=list)
    begun_calls: list[_PartialChatCall] = attrs.field(factory=list)
    """Calls with a name or arguments, in the order in which they began."""

    positions: dict[int, int] = attrs.field(factory=dict)
    """Position of the newest call of each index of the server."""

    finish_reason: str | None = None
    refused: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the reply has a finish reason, or the server has announced the end of a whole text or whole calls."""
        return self.is_begun and (self.finish_reason is not None or (self.is_done and self._is_whole()))

    def _is_whole(self) -> bool:
        if self.begun_calls:
            return all(call.name and call.is_whole for call in self.begun_calls)
        return any(text.strip() for text in self.texts)

    def _add_event(self, event: object, chunks: list[Chunk]) -> None:
        self.usage: Usage | None = (
            read_usage(event) or self.usage
        )  # some servers send it with each chunk, OpenAI with the last
        raise_for_error(event)
        for choice in read_field(event, "choices", list, []):
            if read_field(choice, "index", int, 0):
                continue  # a second answer, which only extra_body={"n": 2} requests
            self.is_begun: bool = self.is_begun or "delta" in choice
            self._add_delta(read_field(choice, "delta", dict, {}), chunks)
            before, self.finish_reason = (
                self.finish_reason,
                read_field(choice, "finish_reason", str, self.finish_reason or "") or None,
            )
            if self.finish_reason is not None and before is None:
                reason = _read_finish_reason(self.finish_reason, has_calls=bool(self.begun_calls), refused=self.refused)
                chunks.append(FinishChunk(reason=reason))

    def _add_delta(self, delta: dict[str, Any], chunks: list[Chunk]) -> None:
        text = delta.get("content")
        if len(delta) == 1 and isinstance(text, str):  # nearly all deltas: the code below would take a fifth longer
            self._add_text(text, chunks)
            return
        refusal = read_field(delta, "refusal", str, "")
        self.refused = self.refused or bool(refusal)
        text = _read_text(delta) + refusal
        if thinking := self.native.add(delta):
            chunks.append(ThinkingChunk(thinking))
        self._add_text(text, chunks)
        for call in _read_call_deltas(delta):
            position = self._find_position(call)
            if position == len(self.partial_calls):
                self.partial_calls.append(_PartialChatCall())
                check_count(position + 1)
            partial_call = self.partial_calls[position]
            is_new = not partial_call.is_begun
            name, arguments = partial_call.add_delta(call)
            if name or arguments:
                if is_new:
                    partial_call.place = len(self.begun_calls)
                    self.begun_calls.append(partial_call)
                chunks.append(CallChunk(index=partial_call.place, name=name, arguments=arguments))

    def _add_text(self, text: str, chunks: list[Chunk]) -> None:
        if text:
            self.texts.append(text)
            chunks.append(TextChunk(text))

    def _find_position(self, call: object) -> int:
        """Return the position of the call of this delta; the position after the last if it begins a new call."""
        index, call_id = read_field(call, "index", int, -1), _read_call_id(call)
        function = read_field(call, "function", dict, {})
        name, arguments = read_field(function, "name", str, ""), read_arguments(function)
        if index >= 0:
            position = self.positions.get(index, len(self.partial_calls))
            if position < len(self.partial_calls) and not self.partial_calls[position].matches(
                call_id, name, arguments
            ):
                position = self._find_position_by_id(call_id, name, arguments)
            self.positions[index] = position
            return position
        # The server sends no index: a known id continues its call, a new id or a name begins the next call.
        is_last = not (call_id or name)
        return max(len(self.partial_calls) - 1, 0) if is_last else self._find_position_by_id(call_id, name, arguments)

    def _find_position_by_id(self, call_id: str, name: str, arguments: str) -> int:
        known = [position for position, call in enumerate(self.partial_calls) if call_id and call.id == call_id]
        # Some servers give two calls the same id; another name, or arguments after whole ones, begin the second call.
        newest = self.partial_calls[known[-1]] if known else None
        is_same = newest is not None and name in ("", newest.name) and newest.matches(call_id, name, arguments)
        return known[-1] if is_same else len(self.partial_calls)

    def build_reply(self) -> Reply:
        """Build the reply, after the stream has ended."""
        return _build_reply(
            text="".join(self.texts),
            calls=self.begun_calls,
            has_custom=any(call.is_custom for call in self.partial_calls),
            finish=self.finish_reason or "",
            refused=self.refused,
            usage=self.usage,
            native=self.native,
            provider=self.provider,
            dialect=self.dialect,
            origin=self.origin,
        )
