"""Encode requests and decode replies of OpenAI's Responses API, without I/O or the SDK.

The server stores nothing: each request contains the whole history as items. Reasoning is received encrypted and sent
back unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from agentfsm.core.usage import CacheReport, Usage
from agentfsm.models.openai.responses_hosted import (
    encode_hosted_tools,
    explain_unanswered,
    find_unanswered,
    list_result_fields,
    read_hosted,
)
from agentfsm.models.openai.shared import read_openai_usage, tool_fields
from agentfsm.models.wire import (
    EncodedListCache,
    EncodingCache,
    InBandError,
    StreamAssembler,
    WireFormatError,
    check_count,
    encode_json,
    encode_messages,
    encode_object,
    parse_reply,
    raise_for_error,
    read_arguments,
    read_field,
    read_origin,
    read_token_count,
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
    from agentfsm.core.messages import Message, Part, ToolCall
    from agentfsm.core.settings import Settings
    from agentfsm.models.wire import PartCheck
    from agentfsm.ports.model import Chunk, Request, ToolDefinition

Item = dict[str, Any]

# Format of native replies. Other servers implement this API, too, and cannot decrypt OpenAI's reasoning, nor it theirs.
PROVIDER: Final = "openai-responses"

# Value of `include` that requests encrypted reasoning. OpenAI's servers now send it anyway, others do not.
ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"


# Encoding


def build_encoding_cache(provider: str = PROVIDER, part_check: PartCheck | None = None) -> EncodingCache:
    """Create an empty cache for encoded requests.

    Args:
        provider: Server of the requests, as in `decode`. Native replies of other servers are not sent to it.
        part_check: Returns why the model does not support a part of a result. None: `unsupported_part`.
    """
    wires = partial(_wire_items, provider, part_check or unsupported_part)
    return EncodingCache(messages=EncodedListCache(wires), tools=EncodedListCache(_wire_tools))


def encode(
    request: Request,
    *,
    model: str,
    streamed: bool,
    include_reasoning: bool = True,
    encoding_cache: EncodingCache | None = None,
    cache_key: str = "",
    compared_id: str | None = None,
) -> bytes:
    """Encode the body of a request. Settings that are not set are left out.

    Args:
        request: The request.
        model: Name of the model at the server.
        streamed: Whether to request a stream; its last event has the usage.
        include_reasoning: Whether to request encrypted reasoning. For a model without reasoning OpenAI answers 400,
            "Encrypted content is not supported with this model".
        encoding_cache: Cache to read and extend.
        cache_key: Key that the server uses to find its prompt cache; empty for none.
        compared_id: Id of the reply whose request the server compares with this one, to tell why its prompt cache was
            missed; "" or None for none.

    Raises:
        MisuseError: if a tool's parameters or a setting are not JSON, or a native reply does not fit its message.
        ModelError: if the request contains a setting or a part that the API does not support.
    """
    if (why := unsupported_settings(request.settings, model)) is not None:
        raise ModelError(why)
    encoding_cache = encoding_cache or build_encoding_cache()
    try:
        fields: Item = {"model": model, "store": False}
        if cache_key:
            fields["prompt_cache_key"] = cache_key
        if compared_id:
            fields["prompt_cache_options"] = {"comparison_response_id": compared_id}
        if include := [*([ENCRYPTED_REASONING] if include_reasoning else []), *list_result_fields(request)]:
            fields["include"] = include
        fields |= tool_fields(request, _named_tool_choice) | _text_fields(request) | _setting_fields(request.settings)
        fields = _merge_extra_body(fields, request.settings.extra_body)
        if streamed:
            fields |= {"stream": True}
        items = [encode_messages(encoding_cache, request)] if request.messages else []
        if request.instructions and _is_json_mode(request):
            items.insert(0, encode_json(_message_item("system", request.instructions)))
        lists = {"input": b",".join(items)}
        tools = [encoding_cache.tools.encode(request.tools)] if request.tools else []
        if tools := [*tools, *map(encode_json, encode_hosted_tools(request))]:
            lists["tools"] = b",".join(tools)
        return encode_object(fields, lists)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"the request cannot be written as JSON ({error}): check the tools' parameters and the settings"
        raise MisuseError(msg) from error


def unsupported_settings(settings: Settings, model: str) -> str | None:
    """Return the reason why the API does not support one of the settings; None if it supports all."""
    for name, value in (("seed", settings.seed), ("stop", settings.stop or None)):
        if value is not None:
            return (
                f"{model!r} cannot be asked with Settings({name}={value!r}): OpenAI's Responses API has no such field. "
                "Leave it out, or use chat completions, with OpenAIChat."
            )
    if settings.extra_body.get("background"):
        return (
            "extra_body has background=True, but agentfsm reads only replies that come at once: leave it out. A run "
            "goes on after a crash without it."
        )
    return None


def _setting_fields(settings: Settings) -> Item:
    fields = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_output_tokens": settings.max_tokens,
        "reasoning": None if settings.reasoning_effort is None else {"effort": settings.reasoning_effort},
    }
    return {name: value for name, value in fields.items() if value is not None}


def _text_fields(request: Request) -> Item:
    # In JSON mode OpenAI requires the word JSON in the input, which excludes instructions: "Response input messages
    # must contain the word 'json' in some form to use 'text.format' of type 'json_object'". In this mode they are
    # sent as input.
    fields = {"instructions": request.instructions} if request.instructions and not _is_json_mode(request) else {}
    if (form := request.output) is None:
        return fields
    if form.schema is None:
        return fields | {"text": {"format": {"type": "json_object"}}}
    schema = {"type": "json_schema", "name": form.name, "schema": to_mutable_json(form.schema), "strict": True}
    return fields | {"text": {"format": schema}}


def _is_json_mode(request: Request) -> bool:
    return request.output is not None and request.output.schema is None


def _named_tool_choice(tool: str) -> Item:
    return {"type": "function", "name": tool}


def _merge_extra_body(fields: Item, extra: Mapping[str, Any]) -> Item:
    """Override fields with those of `extra_body`; merge the fields that contain several settings."""
    extended = fields | dict(extra)
    for name in ("reasoning", "text", "prompt_cache_options"):
        if isinstance(own := fields.get(name), dict) and isinstance(theirs := extra.get(name), Mapping):
            extended[name] = own | dict(theirs)
    return extended


def _wire_tools(tools: Sequence[ToolDefinition]) -> Iterator[object]:
    # In this API, a tool without `strict` is strict.
    return ({"type": "function", **tool.openai()["function"], "strict": tool.strict} for tool in tools)


def _wire_items(provider: str, part_check: PartCheck, messages: Sequence[Message]) -> Iterator[Item]:
    for message in messages:
        yield from _message_items(message, provider, part_check)


def _message_items(message: Message, provider: str, part_check: PartCheck) -> list[Item]:
    match message:
        case ToolResult():
            output: str | list[Item] = message.text
            if message.parts:
                text, parts = render_result(message, part_check)
                output = [_wire_part(TextPart(text=text)), *map(_wire_part, parts.values())] if parts else text
            return [{"type": "function_call_output", "call_id": message.call_id, "output": output}]
        case AssistantMessage(native=NativeReply() as native) if native.provider == provider:
            return _native_items(native, message.calls)
        case AssistantMessage():
            # Models may write a blank text before their calls, which no provider accepts back.
            said = [_message_item("assistant", message.text)] if message.text.strip() else []
            return said + [{"type": "function_call"} | _call_fields(call) for call in message.calls]
        case UserMessage(parts=(TextPart() as part,)):
            return [_message_item("user", part.text)]
        case UserMessage():
            return [_message_item("user", [_wire_part(part) for part in message.parts])]
        case SystemMessage():
            return [_message_item("system", message.text)]


def _message_item(role: str, content: object) -> Item:
    return {"type": "message", "role": role, "content": content}


def _call_fields(call: ToolCall) -> Item:
    # OpenAI accepts call ids of up to 64 characters of any kind; ours, which the results refer to, are like "t3.0".
    # Source: "Invalid 'input[5].call_id': string too long. Expected a string with maximum length 64"; that only the
    # length is checked was measured in orchidfiles/ungate#41.
    return {"call_id": call.id, "name": call.name, "arguments": call.arguments}


def _native_items(native: NativeReply, calls: Sequence[ToolCall]) -> list[Item]:
    """Return the items of a native reply, with the calls of the message: a person may have edited the arguments."""
    items: list[Item]
    called: list[Item]
    try:
        items = json.loads(native.content)
        called = [item for item in items if item["type"] == "function_call"]
    except (ValueError, TypeError, KeyError, RecursionError):
        items, called = [], []
    if not items or len(called) != len(calls):
        msg = (
            f"the history has a native reply of {native.provider!r} that does not fit its message of {len(calls)} "
            "calls: leave the message as it was, or remove its `native`"
        )
        raise MisuseError(msg)
    for item, call in zip(called, calls, strict=True):
        item.update(_call_fields(call))
    return [_to_input_message(item) if item["type"] == "message" and "id" not in item else item for item in items]


def _to_input_message(item: Item) -> Item:
    """Return a message of a reply as an input. Without its id, its parts are none of OpenAI's input types."""
    parts = [part for part in item.get("content") or () if isinstance(part, dict)]
    text = "".join([str(part.get("text") or part.get("refusal") or "") for part in parts])
    phase = {"phase": item["phase"]} if item.get("phase") else {}
    return _message_item("assistant", text) | phase


def _wire_part(part: Part) -> Item:
    match part:
        case TextPart():
            return {"type": "input_text", "text": part.text}
        case ImagePart():
            return {"type": "input_image", "image_url": part.url, "detail": part.detail}
        case FilePart() if read_inline_data(part) is None:
            return {"type": "input_file", "file_url": part.url}
        case FilePart():
            return {"type": "input_file", "filename": part.name or "file", "file_data": part.url}
        case AudioPart():
            raise ModelError(f"The request contains a part that cannot be sent: {unsupported_part(part)}.")


def unsupported_part(part: Part) -> str | None:
    """Return the reason why the API does not support the part; None if it does."""
    if isinstance(part, AudioPart):
        return "OpenAI's Responses API accepts no recordings: use chat completions, with OpenAIChat and an audio model"
    return None


# Decoding


def decode(data: bytes, *, provider: str = PROVIDER, reports_cache: bool = False) -> Reply:
    """Decode a reply that was not streamed.

    Args:
        data: The body.
        provider: The reply's `NativeReply.provider`.
        reports_cache: Whether the reply tells of the server's prompt cache.

    Raises:
        WireFormatError: if it is not a finished response.
        InBandError: if the server sent an error, or the response failed.
    """
    answer = parse_reply(data)
    return _build_reply(answer, read_field(answer, "output", list, None), provider, reports_cache=reports_cache)


_INCOMPLETE_REASONS: Final = {"max_output_tokens": FinishReason.LENGTH, "content_filter": FinishReason.CONTENT_FILTER}

# Fields that are removed from an item before it is sent back to OpenAI, or to a server in front of it. With store=false
# these ids are not stored. OpenAI still looks for them, and for the item that has to follow reasoning, and answers
# "Item with id 'rs_...' not found" or "Item 'rs_...' of type 'reasoning' was provided without its required following
# item". It refuses an id of another form ("Expected an ID that begins with 'fc'") and the status of reasoning ("Unknown
# parameter").
# Source: NousResearch/hermes-agent#10217, `reasoning_item_id_policy` of openai-agents, nodetool-ai/nodetool#4252,
# 1jehuang/jcode#1028. OpenAI's own client, Codex, does not send ids of these items either.
_SERVER_FIELDS: Final = {
    "message": ("id", "status"),
    "function_call": ("id", "status"),
    "reasoning": ("id", "status"),
}


def _build_reply(response: object, output: list[Any] | None, provider: str, *, reports_cache: bool) -> Reply:
    reason = _read_stop_reason(response)
    if output is None:
        msg = "an object without output"
        raise WireFormatError(msg)
    items = [item for item in output if read_field(item, "type", str, "")]
    check_count(sum(item["type"] == "function_call" for item in items), len(items))
    said = [part for item in items if item["type"] == "message" for part in read_field(item, "content", list, [])]
    refused = any(read_field(part, "refusal", str, "") for part in said)
    calls = tuple(
        [
            ProposedCall(
                id=read_field(item, "call_id", str, ""),
                name=read_field(item, "name", str, ""),
                arguments=read_arguments(item),
            )
            for item in items
            if item["type"] == "function_call"
        ]
    )
    unanswered, origin = find_unanswered(items), read_origin(response)
    usual = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
    return Reply(
        # Joined as in `Response.output_text` of the openai package.
        text="".join([read_field(part, "text", str, "") + read_field(part, "refusal", str, "") for part in said]),
        calls=calls,
        finish_reason=FinishReason.REFUSAL if refused else reason or usual,
        usage=read_usage(response),
        native=_build_native([item for item in items if item not in unanswered], provider),
        thinking="\n\n".join(_read_thinking(items)),
        hosted=read_hosted(items),
        unanswered=" ".join(map(explain_unanswered, unanswered)),
        served_model=origin.model,
        response_id=origin.id,
        cache_report=_read_cache_report(response, provider) if reports_cache else None,
    )


def _read_cache_report(response: object, provider: str) -> CacheReport | None:
    """Return what a response tells of the prompt cache; None if it is malformed, which does not fail the reply."""
    try:
        told = read_field(response, "prompt_cache_diagnostics", dict, {})
        kind = read_field(told, "type", str, "")
        return CacheReport(
            provider=provider,
            response_id=read_field(response, "id", str, ""),
            reason="" if kind == "cache_hit" else read_field(told, "reason", str, kind),
            missed_tokens=read_token_count(told, "cache_missed_tokens"),
        )
    except WireFormatError:
        return None


def _read_thinking(items: Sequence[Item]) -> Iterator[str]:
    for item in items:
        if item["type"] == "reasoning":
            for part in (*read_field(item, "summary", list, []), *read_field(item, "content", list, [])):
                if text := read_field(part, "text", str, ""):
                    yield text


def _read_stop_reason(response: object) -> FinishReason | None:
    """Return the reason why the model was stopped; None if it ended normally."""
    status = read_field(response, "status", str, "completed")
    if status == "failed":
        raise InBandError({"message": "the response failed, and no error was named"})
    if status == "incomplete":
        why = read_field(read_field(response, "incomplete_details", dict, {}), "reason", str, "")
        if why in _INCOMPLETE_REASONS:
            return _INCOMPLETE_REASONS[why]
        msg = f"a response that is incomplete, for the reason {why!r}"
        raise WireFormatError(msg)
    if status != "completed":
        msg = f"a response that is {status!r}: responses in the background are not supported"
        raise WireFormatError(msg)
    return None


def _build_native(items: Sequence[Item], provider: str) -> NativeReply | None:
    """Return the items to send back; None if text and calls are enough."""
    # Reasoning with only an id and a summary is left out: its content is lost, and OpenAI refuses the rest.
    kept = [
        item for item in items if item["type"] != "reasoning" or item.get("encrypted_content") or item.get("content")
    ]
    reasoning = [item for item in kept if item["type"] == "reasoning"]
    # Reasoning that is not sealed comes from other servers. Of these, vLLM checks items against the types of OpenAI's
    # package, which need the ids and the status of all.
    is_open = bool(reasoning) and not any(item.get("encrypted_content") for item in reasoning)
    kept = [_strip_server_fields(item, () if is_open else _SERVER_FIELDS.get(item["type"], ())) for item in kept]
    # The server refuses reasoning without a following item, and a reply that was cut off may end with reasoning.
    while kept and kept[-1]["type"] == "reasoning":
        kept.pop()
    if all(item["type"] in {"message", "function_call"} and not item.get("phase") for item in kept):
        return None
    return NativeReply(provider=provider, content=encode_json(kept).decode())


def _strip_server_fields(item: Item, left_out: Collection[str]) -> Item:
    # Nulls are left out. The outputs of a code interpreter are required, and null if they were not asked for.
    return {
        name: value for name, value in item.items() if name not in left_out and (value is not None or name == "outputs")
    }


def read_usage(response: object) -> Usage | None:
    """Return the usage of a response; None if it has none."""
    return read_openai_usage(response, "input", "output")


@attrs.define(eq=False, repr=False)
class _StreamedCall:
    """Function call of a stream."""

    index: int
    """Position among the calls."""

    has_arguments: bool = False
    """Whether a part of the arguments has arrived."""

    is_complete: bool = False
    """Whether the last part has arrived."""


@attrs.define(eq=False, repr=False)
class ResponsesStreamAssembler(StreamAssembler):
    """Assembler of a streamed response. Its last event contains the whole response, and completes the reply."""

    provider: str = PROVIDER
    reports_cache: bool = False
    """Whether the reply tells of the server's prompt cache."""

    calls: dict[int, _StreamedCall] = attrs.field(factory=dict)
    """Newest call of each index of an item."""

    call_count: int = 0
    """Number of calls: some servers give several the same index."""

    items: list[tuple[int, Any]] = attrs.field(factory=list)
    """Finished items with their index: some servers leave the output of the last event empty."""

    begun_indexes: set[int] = attrs.field(factory=set)
    """Indexes of the items that have begun and not ended."""

    completed_reply: Reply | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the whole response has arrived."""
        return self.completed_reply is not None

    def _add_event(self, event: object, chunks: list[Chunk]) -> None:
        raise_for_error(event)
        kind = read_field(event, "type", str, "")
        self.is_begun: bool = self.is_begun or kind.startswith("response.")
        match kind:
            case "response.output_text.delta" | "response.refusal.delta":
                if text := read_field(event, "delta", str, ""):
                    chunks.append(TextChunk(text))
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                if text := read_field(event, "delta", str, ""):
                    chunks.append(ThinkingChunk(text))
            case "response.function_call_arguments.delta":
                self._add_arguments(_read_output_index(event), read_field(event, "delta", str, ""), chunks)
            case "response.function_call_arguments.done":
                self._complete_call(event, chunks)
            case "response.output_item.added" | "response.output_item.done":
                self._add_item(event, chunks, done=kind.endswith("done"))
            case "response.completed" | "response.incomplete" | "response.failed":
                self._complete(read_field(event, "response", dict, {}), chunks)
            case "error":
                raise InBandError(event if isinstance(event, dict) else {})

    def _add_item(self, event: object, chunks: list[Chunk], *, done: bool) -> None:
        index, item = _read_output_index(event), read_field(event, "item", dict, {})
        if read_field(item, "type", str, "") == "function_call":
            if index not in self.calls or (self.calls[index].is_complete and not done):  # another one with that index
                self.calls[index] = _StreamedCall(index=self.call_count)
                self.call_count += 1
                check_count(self.call_count)
                chunks.append(CallChunk(index=self.calls[index].index, name=read_field(item, "name", str, "")))
            if not self.calls[index].has_arguments:  # some servers send them all at once
                self._add_arguments(index, read_arguments(item), chunks)
            if done and not self.calls[index].is_complete:
                self._end_call(self.calls[index], chunks)
        if not done:
            self.begun_indexes.add(index)
        elif index in self.begun_indexes or (index, item) not in self.items[-1:]:  # some servers repeat the end
            self.begun_indexes.discard(index)
            self.items.append((index, item))
            check_count(0, len(self.items))

    def _add_arguments(self, index: int, arguments: str, chunks: list[Chunk]) -> None:
        call = self.calls.get(index)
        if arguments and call is not None:
            call.has_arguments = True
            chunks.append(CallChunk(index=call.index, arguments=arguments))

    def _complete_call(self, event: object, chunks: list[Chunk]) -> None:
        index = _read_output_index(event)
        call = self.calls.get(index)
        if call is not None and not call.is_complete:
            if not call.has_arguments:
                self._add_arguments(index, read_field(event, "arguments", str, ""), chunks)
            self._end_call(call, chunks)

    def _end_call(self, call: _StreamedCall, chunks: list[Chunk]) -> None:
        call.is_complete = True
        chunks.append(CallChunk(index=call.index, is_complete=True))

    def _complete(self, response: Item, chunks: list[Chunk]) -> None:
        self.usage: Usage | None = read_usage(response)
        raise_for_error(response)
        output = read_field(response, "output", list, []) or [
            item for _, item in sorted(self.items, key=lambda each: each[0])
        ]
        self.completed_reply = _build_reply(response, output, self.provider, reports_cache=self.reports_cache)
        self.is_done = True
        chunks.append(FinishChunk(reason=self.completed_reply.finish_reason))

    def build_reply(self) -> Reply:
        """Return the reply, after the stream is complete."""
        return self.completed_reply or Reply()


def _read_output_index(event: object) -> int:
    return read_field(event, "output_index", int, 0)
