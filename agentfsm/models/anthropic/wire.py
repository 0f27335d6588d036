"""Encode requests and decode replies of Anthropic's Messages API, without I/O or the SDK.

**The provider's prompt cache.** A prefix that a request shares with an earlier one costs a tenth, up to a mark
(`cache_control`) that the earlier request had at the same place. Writing up to a mark costs a quarter more than other
input, or twice as much if it is kept for an hour and not for 5 minutes. Three of the four possible marks are used:

1. on the instructions, which follow the tools; on the last tool if there are no instructions;
2. at the end of the previous request: on the last block before the newest reply. The provider searches its cache only
   20 blocks back from a mark, and a turn of ten calls has more (redpanda-data/ai-sdk-go#205);
3. on the last block of the request, which is mark 2 of the next request. Blocks that the next request will not have
   (`Request.passing`) stand behind the mark; a request that none will follow has neither mark 2 nor 3.

All marks of a request are kept equally long, since one for an hour may not follow one for 5 minutes. Only what is
behind the last entry that is found is written and paid for, whatever its time. So after a wait, the whole history is
written for 5 minutes, and a later request with marks of an hour keeps it for the price of its own part
(platform.claude.com/docs/en/build-with-claude/prompt-caching, "Mixing different TTLs").

The messages before the newest reply do not change any more. They are encoded once, cached as bytes (`EncodingCache`),
and marked by inserting the mark before the last brackets. The newest reply and the messages after it are encoded for
this request, and again for the cache: user messages after it may be added, for example after a failed request, and all
of them are encoded as a single message.
"""

from __future__ import annotations

import json
import math
import weakref
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

import attrs

from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.messages import (
    AssistantMessage,
    AudioPart,
    FilePart,
    ImagePart,
    NativeReply,
    Outcome,
    SystemMessage,
    TextPart,
    ToolResult,
    UserMessage,
    read_inline_data,
    replace_surrogates,
)
from agentfsm.core.usage import CacheReport, Usage
from agentfsm.models.anthropic.hosted_blocks import encode_hosted_tools, hosted_fields, read_hosted
from agentfsm.models.anthropic.schema import adapt_schema, unsupported_schema
from agentfsm.models.profiles import DEFAULT_PROFILE, ModelProfile, Thinking
from agentfsm.models.wire import (
    EncodedListCache,
    EncodingCache,
    ReplyOrigin,
    StreamAssembler,
    WireFormatError,
    check_count,
    encode_json,
    encode_object,
    parse_reply,
    raise_for_error,
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
    ToolDefinition,
)

if TYPE_CHECKING:
    from agentfsm.core.messages import Message, Part, ToolCall
    from agentfsm.core.settings import Settings
    from agentfsm.models.wire import PartCheck
    from agentfsm.ports.model import Chunk, Request

# Format of native replies. Other servers implement this API, too. They refuse reasoning that Anthropic signed, and
# Anthropic refuses theirs.
PROVIDER: Final = "anthropic"

# Limit of an answer if the settings have none: the API requires a number. Reasoning and the arguments of calls are part
# of an answer, so it is twice the engine's reservation (4,096). Claude 3.5 refuses more, and an answer that is not
# streamed would exceed `Limits.model_timeout_s`. A reasoning budget is added: "`max_tokens` must be greater than
# `thinking.budget_tokens`" (anthropics/claude-code#8756).
DEFAULT_MAX_TOKENS: Final = 8_192

CacheTime: TypeAlias = Literal["", "5m", "1h"]
_CACHE_CONTROLS: Final[Mapping[CacheTime, bytes]] = {
    "5m": b',"cache_control":{"type":"ephemeral"}',
    "1h": b',"cache_control":{"type":"ephemeral","ttl":"1h"}',
}
# Inserted before a history that begins with a reply: the first message has to be the user's.
_OPENING_MESSAGE: Final = (
    b'{"role":"user","content":[{"type":"text","text":"<system>The conversation goes on.</system>"}]}'
)

_IMAGE_TYPES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")
# Base64 characters of an image: "image exceeds 5 MB maximum: 6275800 bytes > 5242880 bytes" (lobehub/lobehub#14711).
_MAX_IMAGE_CHARS: Final = 5 * 2**20


# Encoding


def build_encoding_cache(provider: str = PROVIDER, part_check: PartCheck | None = None) -> EncodingCache:
    """Create an empty cache for encoded requests.

    Args:
        provider: Server of the requests, as in `decode`. Native replies of other servers are not sent to it.
        part_check: Returns why the model does not support a part of a result. None: `unsupported_part`.
    """
    wires = partial(list_wire_messages, provider, part_check or unsupported_part)
    return EncodingCache(messages=EncodedListCache(wires, can_split=_can_split), tools=EncodedListCache(_wire_tools))


def encode(
    request: Request,
    *,
    model: str,
    streamed: bool,
    encoding_cache: EncodingCache | None = None,
    cache: CacheTime = "5m",
    provider: str = PROVIDER,
    api_version: str = "",
    profile: ModelProfile = DEFAULT_PROFILE,
    compared_id: str | None = None,
) -> bytes:
    """Encode the body of a request. Settings that are not set are left out, except the limit of the answer.

    Args:
        request: The request.
        model: Name of the model at the server.
        streamed: Whether to request a stream.
        encoding_cache: Cache to read and extend.
        cache: How long the provider's prompt cache keeps what is marked for the next request; empty for no marks.
        provider: Server of the request, as in `decode`.
        api_version: Version of Anthropic's API, such as "2026-10-21"; empty for other servers.
        profile: Abilities of the model.
        compared_id: Id of the reply whose request the provider compares with this one, to tell why its prompt cache was
            missed; "" if there is none yet, None not to ask.

    Raises:
        MisuseError: if a tool's parameters or a setting are not JSON.
        ModelError: if the API does not support a part of the request: a seed, a recording, an answer in any JSON.
    """
    encoding_cache = encoding_cache or build_encoding_cache()
    try:
        fields = (
            {"model": model}
            | ({} if compared_id is None else {"diagnostics": {"previous_message_id": compared_id or None}})
            | hosted_fields(request, provider)
            | _setting_fields(request, api_version, profile.thinking)
        )
        if streamed:
            fields["stream"] = True
        lists = _encode_prefix(request, encoding_cache, cache=cache)
        lists["messages"] = _encode_history(request, encoding_cache, cache=cache)
        return encode_object(fields, lists)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"the request cannot be written as JSON ({error}): check the tools' parameters and the settings"
        raise MisuseError(msg) from error


def _setting_fields(request: Request, api_version: str, thinking: Thinking) -> dict[str, Any]:
    settings = request.settings
    if (why := unsupported_settings(settings, api_version)) is not None:
        raise ModelError(why)
    fields = {
        "max_tokens": settings.max_tokens or DEFAULT_MAX_TOKENS + settings.thinking_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stop_sequences": list(settings.stop) or None,
        "thinking": _thinking(settings.reasoning_effort, thinking),
        "output_config": _output_config(request) or None,
        "tool_choice": _tool_choice(request),
    }
    return {name: value for name, value in fields.items() if value is not None} | dict(settings.extra_body)


# The last version of the API that has a temperature and top_p. Later ones refuse them, even at their defaults.
SAMPLING_VERSION: Final = "2023-06-01"


def unsupported_settings(settings: Settings, api_version: str = "") -> str | None:
    """Return the reason why the API does not support one of the settings; None if it supports all.

    Args:
        settings: The settings.
        api_version: Version of Anthropic's API; empty for other servers, which accept all that it ever had.
    """
    if settings.seed is not None:
        return f"Anthropic's API has no seed, but Settings(seed={settings.seed}) is set: leave it out"
    if api_version <= SAMPLING_VERSION:  # a date
        return None
    for name, value in (("temperature", settings.temperature), ("top_p", settings.top_p)):
        if value is not None:
            return (
                f"version {api_version} of Anthropic's API has no {name}, but Settings({name}={value}) is set: leave "
                "it out, or use the older version, with "
                f'Anthropic(headers={{"anthropic-version": "{SAMPLING_VERSION}"}})'
            )
    return None


def _thinking(effort: str | None, kind: Thinking) -> dict[str, Any] | None:
    # The effort controls how much a model writes; for most models, thinking has to be turned on separately. Opus 4.5
    # has efforts, and thinks by a budget only.
    if effort is None or kind is Thinking.NONE:
        return None
    if effort == "none":
        return {"type": "disabled"}
    return None if kind is Thinking.BUDGET else {"type": "adaptive"}


def _output_config(request: Request) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if request.settings.reasoning_effort not in (None, "none"):
        config["effort"] = request.settings.reasoning_effort
    if request.output is not None:
        if request.output.schema is None:
            msg = "Anthropic's API enforces a JSON Schema, but not JSON of any form: give a schema"
            raise ModelError(msg)
        config["format"] = {"type": "json_schema", "schema": adapt_schema(request.output.schema)}
    return config


def _tool_choice(request: Request) -> dict[str, Any] | None:
    choice, single = request.settings.tool_choice, request.settings.parallel_tool_calls is False
    if not (request.tools or request.hosted_tools):
        return {"type": "none"} if request.withheld_tools or _define_called_tools(request) else None
    if choice is None and not single:
        return None
    kind = {None: "auto", "auto": "auto", "none": "none", "required": "any"}.get(choice)
    fields: dict[str, Any] = {"type": kind} if kind is not None else {"type": "tool", "name": choice}
    return fields | {"disable_parallel_tool_use": True} if single and kind != "none" else fields


def _define_called_tools(request: Request) -> list[ToolDefinition]:
    """Return definitions of the tools that the history calls, for a request that offers none.

    Source: "Requests which include `tool_use` or `tool_result` blocks must define tools" (BerriAI/litellm#4689).
    """
    if "tools" in request.settings.extra_body:
        return []
    calls = (call for message in request.messages if isinstance(message, AssistantMessage) for call in message.calls)
    description = "No longer available."
    names = dict.fromkeys(call.name for call in calls)
    return [ToolDefinition(name=name, description=description, parameters={"type": "object"}) for name in names]


def _encode_prefix(request: Request, encoding_cache: EncodingCache, *, cache: CacheTime) -> dict[str, bytes]:
    """Return the encoded tools and instructions, which stand before the messages."""
    lists: dict[str, bytes] = {}
    has_instructions = bool(request.instructions.strip())
    # Withheld tools are defined all the same, and `tool_choice` forbids their calls: so the prefix stays.
    offered = request.tools or request.withheld_tools
    tools = encoding_cache.tools.encode(offered) if offered else _join_json(_wire_tools(_define_called_tools(request)))
    if hosted := _join_json(encode_hosted_tools(request)):
        tools = b",".join(filter(None, (tools, hosted)))
    if tools:
        lists["tools"] = _mark_last_block(tools, b"}", cache) if cache and not has_instructions else tools
    if has_instructions:
        system = encode_json({"type": "text", "text": request.instructions})
        lists["system"] = _mark_last_block(system, b"}", cache) if cache else system
    return lists


def _mark_last_block(text: bytes, end: bytes, cache: CacheTime) -> bytes:
    """Insert the mark into the last block of an encoded text, which ends with `end` from that block's bracket on."""
    return b"".join((memoryview(text)[: -len(end)], _CACHE_CONTROLS[cache], end))  # copies a long history only once


def _join_json(values: Iterable[object]) -> bytes:
    return b",".join([encode_json(value) for value in values])


def _encode_history(request: Request, encoding_cache: EncodingCache, *, cache: CacheTime) -> bytes:
    messages = request.messages[: len(request.messages) - request.passing]
    start = _find_newest_reply(messages)
    old = encoding_cache.messages.encode(messages[:start]) if start else b""
    new = _join_json(encoding_cache.messages.to_wire(messages[start:]))
    if cache and old:
        old = _mark_last_block(old, b"}]}", cache)
    if cache and new and _is_user_side(messages[-1]):  # a reply may end with reasoning, which cannot be marked
        new = _mark_last_block(new, b"}]}", cache)
    if passing := _join_json(encoding_cache.messages.to_wire(request.messages[len(messages) :])):
        if new and _is_user_side(messages[-1]):  # the blocks join those of the last message, which is the user's, too
            new = new.removesuffix(b"]}") + b"," + passing.removeprefix(_USER_START)
        else:
            new = b",".join(filter(None, (new, passing)))
    text = b",".join([text for text in (old, new) if text])
    return _OPENING_MESSAGE + b"," + text if text.startswith(b'{"role":"assistant"') else text


_USER_START: Final = b'{"role":"user","content":['


def _find_newest_reply(messages: Sequence[Message]) -> int:
    """Return the index of the newest reply's first message; 0 if there is no reply."""
    index = len(messages)
    while index and _is_user_side(messages[index - 1]):
        index -= 1
    while index and not _is_user_side(messages[index - 1]):
        index -= 1
    return index


def _is_user_side(message: Message) -> bool:
    """Return whether it is encoded in a user message: all messages but replies, and replies without content."""
    return not isinstance(message, AssistantMessage) or not (message.calls or message.text.strip() or message.native)


def _can_split(before: Message, after: Message) -> bool:
    return _is_user_side(before) != _is_user_side(after)


def list_wire_messages(provider: str, part_check: PartCheck, messages: Sequence[Message]) -> Iterator[object]:
    """Yield messages as the API has them; those of several neighbours in one."""
    # Neighbours of the same role are merged: Anthropic would merge them itself, and other servers refuse them.
    # Results follow their reply directly, so they are first in their message, as the API requires.
    for is_users, run in groupby(messages, key=_is_user_side):
        if content := [block for message in run for block in _message_blocks(message, provider, part_check)]:
            yield {"role": "user" if is_users else "assistant", "content": content}


def _wire_tools(tools: Sequence[ToolDefinition]) -> Iterator[object]:
    for tool in tools:
        if not tool.strict:
            yield tool.anthropic()
        elif unsupported_schema(tool.parameters) is None:
            yield tool.anthropic() | {"input_schema": adapt_schema(tool.parameters)}
        else:  # the provider does not enforce the schema; the engine validates the arguments
            yield attrs.evolve(tool, strict=False).anthropic()


def _message_blocks(message: Message, provider: str, part_check: PartCheck) -> Sequence[dict[str, Any]]:
    match message:
        case ToolResult():
            return [_result_block(message, part_check)]
        case AssistantMessage():
            if native := _native_blocks(message, provider):
                return native
            # The API refuses a last message of the assistant that ends with white space.
            return [*_text_blocks(message.text.rstrip()), *map(_tool_use_block, message.calls)]
        case UserMessage():
            return [_part_block(part) for part in message.parts if not isinstance(part, TextPart) or part.text.strip()]
        case SystemMessage():
            # Few models support the role "system" within a history. The tags show that the user did not write it.
            return _text_blocks(f"<system>{message.text}</system>" if message.text.strip() else "")


def _result_block(message: ToolResult, part_check: PartCheck) -> dict[str, Any]:
    text, parts = render_result(message, part_check) if message.parts else (message.text, {})
    content = [*_text_blocks(text), *map(_part_block, parts.values())] if parts else text
    result = {"type": "tool_result", "tool_use_id": escape_call_id(message.call_id), "content": content}
    # "all content must be type `text` if `is_error` is true" (vellum-ai/vellum-assistant#18387): with images, only the
    # text shows that the call has failed.
    return result if message.outcome is Outcome.DONE or parts else {**result, "is_error": True}


def _text_blocks(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text.strip() else []  # the API refuses a blank block


def _tool_use_block(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": escape_call_id(call.id), "name": call.name, "input": _loads(call.arguments)}


def _native_blocks(message: AssistantMessage, provider: str) -> list[dict[str, Any]]:
    """Return the blocks of the native reply, with the calls of the message; an empty list if there are none."""
    if message.native is None or message.native.provider != provider:
        return []
    blocks = _parse_native(message.native)
    if sum(block["type"] == "tool_use" for block in blocks) != len(message.calls):
        return []  # the message was changed, so its reasoning does not fit
    calls = iter(message.calls)
    # Ids are replaced by those of the run, and a person may have edited the arguments.
    whole = [{**block, **_tool_use_block(next(calls))} if block["type"] == "tool_use" else block for block in blocks]
    return [block for block in whole if block["type"] != "text" or str(block.get("text")).strip()]


def _parse_native(native: NativeReply) -> list[dict[str, Any]]:
    try:
        blocks = _loads(native.content)
    except ValueError:
        blocks = None
    if not isinstance(blocks, list) or not all(isinstance(block, dict) and "type" in block for block in blocks):
        msg = f"NativeReply(provider={native.provider!r}) is not a JSON list of content blocks: leave `native` out"
        raise MisuseError(msg)
    return blocks


def _parse_float(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text  # "1e999" is JSON, and infinity cannot be written as JSON


def _parse_int(text: str) -> int | str:
    return int(text) if len(text) <= _MAX_INT_DIGITS else text


# Digits of the longest integer that is kept: Python refuses to parse or write one of more than 4,300.
_MAX_INT_DIGITS: Final = 4_000

# A call is sent again in each request of its run, so no value in its arguments may make a request fail.
_loads: Final = json.JSONDecoder(parse_float=_parse_float, parse_int=_parse_int, parse_constant=str).decode

_ID_ESCAPES: Final = str.maketrans({"-": "--", ".": "-d", ":": "-c"})


def escape_call_id(call_id: str) -> str:
    """Return a call id of letters, digits, "_" and "-" only; different ids stay different.

    Source: "tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'" (tailcallhq/forgecode#1142).
    """
    return call_id.translate(_ID_ESCAPES)


# Thinking that is bound to all that came before it


_THINKING: Final = frozenset({"thinking", "redacted_thinking"})


@attrs.define(eq=False, repr=False)
class PrefixDigests:
    """Digests of encoded messages, for the life of each message: a history is not encoded again in each turn."""

    wires: Callable[[Sequence[Message]], Iterable[object]]
    """Returns the JSON values of messages."""

    known: dict[int, tuple[weakref.ref[Message], bytes]] = attrs.field(factory=dict)
    """Digests by the identity of the message."""

    def digest(self, message: Message) -> bytes:
        """Return the digest of a message as it is sent."""
        kept = self.known.get(id(message))
        if kept is not None and kept[0]() is message:
            return kept[1]
        digest = blake2b(_join_json(self.wires([message])), digest_size=16).digest()
        key, known = id(message), self.known
        self.known[key] = weakref.ref(message, lambda _: known.pop(key, None)), digest
        return digest


def keep_valid_thinking(
    request: Request, encoding_cache: EncodingCache, digests: PrefixDigests, provider: str
) -> tuple[Request, str]:
    """Return the request without thinking that a model which binds it would refuse, and the digest of the request.

    Thinking is valid if tools, instructions and all earlier messages, with their thinking, are as they were when it was
    written. After a change it is left out, as the API documents for histories that cannot keep their beginning. The
    digest is recorded with the reply, and covers the request as it was sent, so thinking that was left out stays out.
    """
    sent = blake2b(digest_size=16)
    for name, text in _encode_prefix(request, encoding_cache, cache="").items():
        sent.update(b"%b %d " % (name.encode(), len(text)))
        sent.update(text)
    messages: list[Message] = []
    for message in request.messages:
        match message:
            case AssistantMessage(native=NativeReply(provider=own, prefix=prefix) as native) if (
                own == provider and prefix != sent.hexdigest()
            ):
                messages.append(_drop_thinking(message, native))
            case _:
                messages.append(message)
        sent.update(digests.digest(messages[-1]))
    return attrs.evolve(request, messages=messages), sent.hexdigest()


def _drop_thinking(message: AssistantMessage, native: NativeReply) -> AssistantMessage:
    blocks = [block for block in _parse_native(native) if block["type"] not in _THINKING]
    if all(block["type"] in ("text", "tool_use") for block in blocks):
        return attrs.evolve(message, native=None)
    return attrs.evolve(message, native=attrs.evolve(native, content=json.dumps(blocks, ensure_ascii=False)))


# Parts


def _part_block(part: Part) -> dict[str, Any]:
    if reason := unsupported_part(part):
        raise ModelError(f"The request contains a part that cannot be sent: {reason}.")
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case ImagePart():  # this API has no setting for `detail`
            return {"type": "image", "source": _part_source(part)}
        case _:
            title = part.name if isinstance(part, FilePart) else ""
            document = {"type": "document", "source": _part_source(part)}
            return {**document, "title": title} if title else document


def _part_source(part: ImagePart | AudioPart | FilePart) -> dict[str, Any]:
    carried = read_inline_data(part)
    if carried is None:
        return {"type": "url", "url": part.url}
    kind, data = carried
    if kind.startswith("text/"):
        return {"type": "text", "media_type": "text/plain", "data": _decode_text(data)}
    return {"type": "base64", "media_type": kind, "data": data}


def _decode_text(data: str) -> str | None:
    try:
        return b64decode(data, validate=True).decode()
    except ValueError:
        return None


def unsupported_part(part: Part) -> str | None:
    """Return the reason why the API does not support the part; None if it does."""
    match part:
        case TextPart():
            return None
        case AudioPart():
            return "Anthropic's API accepts no recordings: send a transcript as text"
        case ImagePart() | FilePart() if part.url.startswith("http://"):
            name = type(part).__name__
            return f"Anthropic fetches from https:// addresses only: give one, or the data itself ({name}.of)"
    kind, data = read_inline_data(part) or ("", "")
    match part:
        case ImagePart() if len(data) > _MAX_IMAGE_CHARS:
            return f"Anthropic accepts images of {_MAX_IMAGE_CHARS * 3 // 4:,} bytes at most"
        case ImagePart() if kind and kind not in _IMAGE_TYPES:
            return f"Anthropic's API accepts images as JPEG, PNG, GIF or WebP, not as {kind}"
        case FilePart() if kind.startswith("text/") and _decode_text(data) is None:
            return f"the file is {kind}, but its data is not UTF-8 in base64"
        case FilePart() if kind and kind != "application/pdf" and not kind.startswith("text/"):
            return f"Anthropic's API accepts files as PDF or text, not as {kind}"
    return None


# Decoding


_FINISH_REASONS: Final = {
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    # The provider paused a turn of its own tools, or compacted the history, and goes on with the next request.
    "pause_turn": FinishReason.PAUSED,
    "compaction": FinishReason.PAUSED,
}
# For each kind of delta: the field of the block that it extends, and the field of the delta with the new part.
_DELTA_FIELDS: Final = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("input", "partial_json"),
}


def decode(data: bytes, *, provider: str = PROVIDER, reports_cache: bool = False) -> Reply:
    """Decode a reply that was not streamed.

    Args:
        data: The body.
        provider: The reply's `NativeReply.provider`.
        reports_cache: Whether the reply tells of the provider's prompt cache.

    Raises:
        WireFormatError: if it is not a message.
        InBandError: if the server sent an error.
    """
    answer = parse_reply(data)
    content = read_field(answer, "content", list, [])
    if not isinstance(answer, dict) or "content" not in answer:
        msg = "a reply without content"
        raise WireFormatError(msg)
    check_count(sum(isinstance(block, dict) and block.get("type") == "tool_use" for block in content), len(content))
    blocks = [_ContentBlock.of(block) for block in content]
    stop = read_field(answer, "stop_reason", str, "")
    usage = read_usage(answer)
    container = _read_container(answer)
    return _build_reply(
        blocks,
        stop,
        _refusal_text(answer),
        usage=usage,
        provider=provider,
        container=container,
        origin=read_origin(answer),
        cache_report=_read_cache_report(answer, provider) if reports_cache else None,
    )


def _build_reply(
    blocks: Sequence[_ContentBlock],
    stop: str,
    explanation: str,
    *,
    usage: Usage | None,
    provider: str,
    container: str,
    origin: ReplyOrigin,
    cache_report: CacheReport | None,
) -> Reply:
    text = "".join(block.text for block in blocks)
    calls = tuple(block.to_proposed_call() for block in blocks if block.kind == "tool_use")
    reason = _finish_reason(stop, has_text=bool(text), has_calls=bool(calls))
    native, hosted = None, None
    if not all(block.is_plain for block in blocks):  # else text and calls are enough
        sent = [block.to_dict() for block in blocks]
        hosted = read_hosted(sent, container)
        # Reasoning that was cut off has no signature, and a search no result: the server would refuse them.
        if reason in (FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.PAUSED):
            content = replace_surrogates(json.dumps(sent, ensure_ascii=False))
            native = NativeReply(provider=provider, content=content)
    return Reply(
        text=explanation if reason is FinishReason.REFUSAL else text,
        calls=calls,
        finish_reason=reason,
        usage=usage,
        native=native,
        thinking="\n\n".join([block.thinking for block in blocks if block.thinking]),
        hosted=hosted,
        served_model=origin.model,
        response_id=origin.id,
        cache_report=cache_report,
    )


def _read_container(source: object) -> str:
    """Return the id of the container in which code was run; empty if there is none."""
    return read_field(read_field(source, "container", dict, {}), "id", str, "")


def _read_cache_report(message: object, provider: str) -> CacheReport | None:
    """Return what a message tells of the prompt cache; None if it is malformed, which does not fail the reply."""
    try:
        told = read_field(message, "diagnostics", dict, {})
        why = read_field(told, "cache_miss_reason", dict, {})
        return CacheReport(
            provider=provider,
            response_id=read_field(message, "id", str, ""),
            reason=read_field(why, "type", str, "") or ("pending" if told else ""),
            missed_tokens=read_token_count(why, "cache_missed_input_tokens"),
        )
    except WireFormatError:
        return None


def _finish_reason(stop: str, *, has_text: bool, has_calls: bool) -> FinishReason:
    if stop == "refusal":
        # A filter refuses, and not the model. It may cut an answer in the middle, which is unusable then.
        return FinishReason.CONTENT_FILTER if has_text or has_calls else FinishReason.REFUSAL
    reason = _FINISH_REASONS.get(stop, FinishReason.TOOL_CALLS if has_calls else FinishReason.STOP)
    # A pause lasts until the calls have results.
    return FinishReason.TOOL_CALLS if has_calls and reason is FinishReason.PAUSED else reason


def _refusal_text(source: object) -> str:
    """Return the reason why the answer was refused."""
    details = read_field(source, "stop_details", dict, {})
    category = read_field(details, "category", str, "")
    usual = f"Anthropic's filter let no answer through{category and f' ({category})'}."
    return read_field(details, "explanation", str, "") or usual


def read_usage(source: object) -> Usage | None:
    """Return the usage of a message or a stream; None if it is missing, zero or malformed.

    A malformed one does not fail the reply. Servers that do not count send zeros; the engine then estimates.
    """
    try:
        usage = _build_usage(read_field(source, "usage", dict, {}))
    except WireFormatError:
        return None
    return usage if usage.tokens else None


def _build_usage(usage: dict[str, Any]) -> Usage:
    cached, written = (
        read_token_count(usage, "cache_read_input_tokens"),
        read_token_count(usage, "cache_creation_input_tokens"),
    )
    output_tokens = read_token_count(usage, "output_tokens")
    # The two kinds of writes are in an object of their own, which streams and older versions of the API may lack.
    kept = read_token_count(read_field(usage, "cache_creation", dict, {}), "ephemeral_1h_input_tokens")
    thinking_tokens = read_token_count(read_field(usage, "output_tokens_details", dict, {}), "thinking_tokens")
    return Usage(
        input_tokens=read_token_count(usage, "input_tokens") + cached + written,  # this API counts them separately
        output_tokens=output_tokens,
        cached_tokens=cached,
        cache_write_tokens=written,
        cache_write_1h_tokens=min(kept, written),
        reasoning_tokens=min(thinking_tokens, output_tokens),
    )


@attrs.define(eq=False, repr=False)
class _ContentBlock:
    """Content block that is being received."""

    fields: dict[str, Any]
    """Fields at the start of the block; all its fields if the reply was not streamed."""

    pieces: dict[str, list[str]] = attrs.field(factory=dict)
    """Parts from deltas, by the field that they extend."""

    @classmethod
    def of(cls, fields: object) -> _ContentBlock:
        if not read_field(fields, "type", str, ""):
            msg = "a block without a type"
            raise WireFormatError(msg)
        return cls(fields=cast("dict[str, Any]", fields))

    @property
    def kind(self) -> str:
        return read_field(self.fields, "type", str, "")

    @property
    def text(self) -> str:
        """Text of the answer in this block; empty if it is not a text block."""
        return self._join_field("text") if self.kind == "text" else ""

    @property
    def thinking(self) -> str:
        """Thinking in this block; empty if it is not a block of thinking, or is sealed."""
        return self._join_field("thinking") if self.kind == "thinking" else ""

    @property
    def is_plain(self) -> bool:
        """Whether text and calls are enough to encode it again."""
        if self.kind == "text":
            return not self.fields.get("citations")
        caller = read_field(self.fields, "caller", dict, {})
        return self.kind == "tool_use" and caller.get("type", "direct") == "direct"

    def _join_field(self, name: str) -> str:
        return read_field(self.fields, name, str, "") + "".join(self.pieces.get(name, ()))

    @property
    def arguments(self) -> str:
        """The input as JSON text, unchanged if the server sent text."""
        text = "".join(self.pieces.get("input", ()))
        return text or json.dumps(self.fields.get("input") or {}, ensure_ascii=False)

    def add_delta(self, delta: object) -> tuple[str, str]:
        """Add a delta; return the field that it extends and the new text; empty strings for an unknown kind."""
        kind = read_field(delta, "type", str, "")
        if kind == "citations_delta":
            citations = read_field(self.fields, "citations", list, [])
            citations.append(read_field(delta, "citation", dict, {}))
            self.fields["citations"] = citations
        name, source = _DELTA_FIELDS.get(kind, ("", ""))
        piece = read_field(delta, source, str, "") if name else ""
        if piece:
            self.pieces.setdefault(name, []).append(piece)
        return name, piece

    def to_proposed_call(self) -> ProposedCall:
        name = read_field(self.fields, "name", str, "")
        return ProposedCall(id=read_field(self.fields, "id", str, ""), name=name, arguments=self.arguments)

    def to_dict(self) -> dict[str, Any]:
        """Return the block in the form of a reply that is not streamed."""
        texts = {name: self._join_field(name) for name in self.pieces if name != "input"}
        return {**self.fields, **texts, **({"input": self._parse_input()} if "input" in self.pieces else {})}

    def _parse_input(self) -> dict[str, Any]:
        # An input that was cut off is dropped, since it has to be an object.
        try:
            value = _loads(self.arguments)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


@attrs.define(eq=False, repr=False)
class AnthropicStreamAssembler(StreamAssembler):
    """Assembler of a streamed message: blocks, each with a start event, deltas and a stop event."""

    provider: str = PROVIDER
    reports_cache: bool = False
    """Whether the reply tells of the provider's prompt cache."""

    cache_report: CacheReport | None = None
    blocks: dict[int, _ContentBlock] = attrs.field(factory=dict)
    """Blocks by the server's index, in the order in which they began."""

    call_indexes: dict[int, int] = attrs.field(factory=dict)
    """Position among the calls, by the server's index of the block."""

    stop_reason: str | None = None
    container: str = ""
    """Id of the container in which code was run."""

    refusal_text: str = ""
    usage_fields: dict[str, Any] = attrs.field(factory=dict)
    """Merged fields of the usage: the server sends totals, and only those that changed."""

    @property
    def is_complete(self) -> bool:
        """Whether the reply has a stop reason, and the server has announced the end of the stream."""
        return self.stop_reason is not None and self.is_done

    def _add_event(self, event: object, chunks: list[Chunk]) -> None:
        chunks += self._read_event(event)

    def _read_event(self, event: object) -> Iterable[Chunk]:
        raise_for_error(event)
        match read_field(event, "type", str, ""):
            case "message_start":
                self.is_begun: bool = True
                message = read_field(event, "message", dict, {})
                self.container = _read_container(message)
                self.cache_report = _read_cache_report(message, self.provider) if self.reports_cache else None
                self._add_usage(message)
                if self.usage is not None:  # the output is not known before the end
                    self.usage = attrs.evolve(self.usage, estimated=True)
            case "content_block_start":
                return self._begin_block(
                    _read_index(event), _ContentBlock.of(read_field(event, "content_block", dict, {}))
                )
            case "content_block_delta":
                return self._extend_block(_read_index(event), read_field(event, "delta", dict, {}))
            case "content_block_stop":
                return self._end_block(_read_index(event))
            case "message_delta":
                return self._finish(event)
            case "message_stop":
                self.is_done = True
        return ()  # "ping" and unknown events

    def _add_usage(self, source: object) -> None:
        usage = source.get("usage") if isinstance(source, dict) else None
        if isinstance(usage, dict):
            self.usage_fields |= {name: value for name, value in usage.items() if value is not None}
            self.usage: Usage | None = read_usage({"usage": self.usage_fields})

    def _begin_block(self, index: int, block: _ContentBlock) -> Iterable[Chunk]:
        if index in self.blocks:
            msg = f"block {index} begins twice"
            raise WireFormatError(msg)
        self.is_begun = True
        self.blocks[index] = block
        check_count(len(self.call_indexes) + (block.kind == "tool_use"), len(self.blocks))
        if block.kind == "tool_use":
            position = self.call_indexes[index] = len(self.call_indexes)
            yield CallChunk(index=position, name=read_field(block.fields, "name", str, ""))
        elif block.text:
            yield TextChunk(block.text)
        elif thought := read_field(block.fields, "thinking", str, ""):
            yield ThinkingChunk(thought)

    def _extend_block(self, index: int, delta: dict[str, Any]) -> Iterable[Chunk]:
        name, piece = self._get_block(index).add_delta(delta)
        if not piece:
            return
        if name == "text":
            yield TextChunk(piece)
        elif name == "thinking":
            yield ThinkingChunk(piece)
        elif name == "input" and index in self.call_indexes:
            yield CallChunk(index=self.call_indexes[index], arguments=piece)

    def _end_block(self, index: int) -> Iterable[Chunk]:
        block = self._get_block(index)
        if index in self.call_indexes:
            # Without pieces, the call has no arguments, or had all of them at its start.
            rest = "" if "input" in block.pieces else block.arguments
            yield CallChunk(index=self.call_indexes[index], arguments=rest, is_complete=True)

    def _get_block(self, index: int) -> _ContentBlock:
        if index not in self.blocks:
            msg = f"a delta of block {index}, which has not begun"
            raise WireFormatError(msg)
        return self.blocks[index]

    def _finish(self, event: object) -> Iterable[Chunk]:
        self._add_usage(event)
        delta = read_field(event, "delta", dict, {})
        self.container = _read_container(delta) or self.container
        before, self.stop_reason = (
            self.stop_reason,
            read_field(delta, "stop_reason", str, self.stop_reason or "") or None,
        )
        if self.stop_reason is None or before is not None:
            return
        self.refusal_text = _refusal_text(delta)
        has_text = any(block.text for block in self.blocks.values())
        reason = _finish_reason(self.stop_reason, has_text=has_text, has_calls=bool(self.call_indexes))
        if reason is FinishReason.REFUSAL:
            yield TextChunk(self.refusal_text)
        yield FinishChunk(reason=reason)

    def build_reply(self) -> Reply:
        """Build the reply, after the stream is complete."""
        blocks = list(self.blocks.values())
        return _build_reply(
            blocks,
            self.stop_reason or "",
            self.refusal_text,
            usage=self.usage,
            provider=self.provider,
            container=self.container,
            origin=self.origin,
            cache_report=self.cache_report,
        )


def _read_index(event: object) -> int:
    index = read_field(event, "index", int, -1)
    if index < 0:
        msg = "a block without an index"
        raise WireFormatError(msg)
    return index
