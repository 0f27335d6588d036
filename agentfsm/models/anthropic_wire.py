"""The wire of Anthropic's messages, read and written: our messages as JSON, and JSON as our reply. Pure, and no vendor.

**The provider's prompt cache.** What a request shares with an earlier one is read at a tenth of the price, up to a mark
(`cache_control`) that an earlier request had at the same place too. Three of the four that a request may have are used:

1. on the instructions, which stand behind the tools; on the last tool where there are no instructions;
2. where the request before ended: on the last block before the newest reply. The provider looks for what it has kept
   only 20 blocks back from a mark, and a turn of ten calls has more (redpanda-data/ai-sdk-go#205);
3. on the last block of all, which is mark 2 of the next request.

What stands before the newest reply never changes again. It is written once, kept as bytes (`Written`), and marked by
putting the mark's bytes before its last brackets. The newest reply and what follows it are written for this request and
once more when they are old: what follows may grow, as when a person writes on after a failed request, and is one
message of the user's all the same.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, cast

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
    Usage,
    UserMessage,
    read_inline_data,
    replace_surrogates,
)
from agentfsm.models.anthropic_schema import refuses as unsupported_schema
from agentfsm.models.anthropic_schema import supported_schema
from agentfsm.models.wire import (
    Assembly,
    FormError,
    Written,
    WrittenLists,
    check_count,
    check_error,
    count,
    field,
    joined,
    parsed_reply,
    shown_of,
    written_json,
)
from agentfsm.ports import (
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
    from agentfsm.models.wire import Refuses
    from agentfsm.ports import Chunk, Request

# Whose form a native reply is. Others speak this wire, too, and refuse what Anthropic has signed, as it refuses theirs.
PROVIDER: Final = "anthropic"

# The largest answer where none is set: the wire wants a number. Thinking and the arguments of calls are part of an
# answer, so it is twice what the engine reserves (4,096); more would be refused by Claude 3.5, and answers that take
# longer than `Limits.model_timeout_s` would come in vain where they are not streamed. What a budget of thinking takes
# comes on top: "`max_tokens` must be greater than `thinking.budget_tokens`" (anthropics/claude-code#8756).
ANSWER_TOKENS: Final = 8_192

_MARK: Final = b',"cache_control":{"type":"ephemeral"}'
# Before a history that begins with a reply: the first message has to be the user's.
_OPENING: Final = b'{"role":"user","content":[{"type":"text","text":"<system>The conversation goes on.</system>"}]}'

_IMAGES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")
# Characters of one, in base64: "image exceeds 5 MB maximum: 6275800 bytes > 5242880 bytes" (lobehub/lobehub#14711).
_IMAGE_CHARS: Final = 5 * 2**20


# Our messages as the wire writes them


def memory(provider: str = PROVIDER, refused: Refuses | None = None) -> Written:
    """Return a memory for what is written of requests.

    Args:
        provider: Who reads it, as in `decode`: nobody else gets its native replies back.
        refused: Says which parts of results the model cannot be shown; None where it is what the wire cannot carry.
    """
    wires = partial(_turns, provider, refused or refuses)
    return Written(messages=WrittenLists(wires, apart=_are_apart), tools=WrittenLists(_tools))


def encode(
    request: Request,
    *,
    model: str,
    streamed: bool,
    written: Written | None = None,
    cache: bool = True,
) -> bytes:
    """Write the body of a request. What is not set is not sent, but for the largest answer.

    Args:
        request: The whole question.
        model: As the server knows it.
        streamed: Whether to ask for a stream.
        written: What need not be written again; takes in what is written now.
        cache: Whether to mark what the provider shall keep for the next request.

    Raises:
        MisuseError: when a tool's parameters or a setting are not JSON.
        ModelError: when the request holds what the wire has no word for: a seed, a recording, any JSON as the answer.
    """
    written = written or memory()
    try:
        fields = {"model": model} | _setting_fields(request)
        if streamed:
            fields["stream"] = True
        return joined(fields, _lists(request, written, cache=cache))
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"the request cannot be written as JSON ({error}): look at the tools' parameters and the settings"
        raise MisuseError(msg) from error


def _setting_fields(request: Request) -> dict[str, Any]:
    settings = request.settings
    if (why := refuses_settings(settings)) is not None:
        raise ModelError(why)
    fields = {
        "max_tokens": settings.max_tokens or ANSWER_TOKENS + settings.thinking_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stop_sequences": list(settings.stop) or None,
        "thinking": _thinking(settings.reasoning_effort),
        "output_config": _output_config(request) or None,
        "tool_choice": _tool_choice(request),
    }
    return {name: value for name, value in fields.items() if value is not None} | dict(settings.extra_body)


def refuses_settings(settings: Settings) -> str | None:
    """Say which of the settings the wire has no word for; None where it has one for all."""
    if settings.seed is None:
        return None
    return f"Anthropic's messages have no seed, and Settings(seed={settings.seed}) is set: leave it out"


def _thinking(effort: str | None) -> dict[str, Any] | None:
    # An effort says how much of everything a model writes; that it may think at all, most models have to be told.
    if effort is None:
        return None
    return {"type": "disabled" if effort == "none" else "adaptive"}


def _output_config(request: Request) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if request.settings.reasoning_effort not in (None, "none"):
        config["effort"] = request.settings.reasoning_effort
    if request.output is not None:
        if request.output.schema is None:
            msg = "Anthropic's messages hold a model to a JSON Schema, and not to JSON of any form: give a schema"
            raise ModelError(msg)
        config["format"] = {"type": "json_schema", "schema": supported_schema(request.output.schema)}
    return config


def _tool_choice(request: Request) -> dict[str, Any] | None:
    choice, single = request.settings.tool_choice, request.settings.parallel_tool_calls is False
    if not request.tools:
        return {"type": "none"} if _called(request) else None
    if choice is None and not single:
        return None
    kind = {None: "auto", "auto": "auto", "none": "none", "required": "any"}.get(choice)
    told: dict[str, Any] = {"type": kind} if kind is not None else {"type": "tool", "name": choice}
    return told | {"disable_parallel_tool_use": True} if single and kind != "none" else told


def _called(request: Request) -> list[ToolDefinition]:
    """Return definitions of the tools that the history calls, for a request that offers none.

    Source: "Requests which include `tool_use` or `tool_result` blocks must define tools" (BerriAI/litellm#4689).
    """
    if "tools" in request.settings.extra_body:
        return []
    calls = (call for message in request.messages if isinstance(message, AssistantMessage) for call in message.calls)
    told = "Not on offer any more."
    names = dict.fromkeys(call.name for call in calls)
    return [ToolDefinition(name=name, description=told, parameters={"type": "object"}) for name in names]


def _lists(request: Request, written: Written, *, cache: bool) -> dict[str, bytes]:
    lists: dict[str, bytes] = {}
    has_instructions = bool(request.instructions.strip())
    tools = written.tools.text(request.tools) if request.tools else _joined(_tools(_called(request)))
    if tools:
        lists["tools"] = _marked(tools, b"}") if cache and not has_instructions else tools
    if has_instructions:
        system = written_json({"type": "text", "text": request.instructions})
        lists["system"] = _marked(system, b"}") if cache else system
    lists["messages"] = _history(request.messages, written, cache=cache)
    return lists


def _marked(text: bytes, end: bytes) -> bytes:
    """Mark the last block of what is written; `end` is how it ends, from the bracket of that block on."""
    return b"".join((memoryview(text)[: -len(end)], _MARK, end))  # copies a long history once, and not twice


def _joined(values: Iterable[object]) -> bytes:
    return b",".join([written_json(value) for value in values])


def _history(messages: Sequence[Message], written: Written, *, cache: bool) -> bytes:
    start = _newest(messages)
    old = written.messages.text(messages[:start]) if start else b""
    new = _joined(written.messages.wires(messages[start:]))
    if cache and old:
        old = _marked(old, b"}]}")
    if cache and new and _is_users(messages[-1]):  # thinking, which a reply may end with, takes no mark
        new = _marked(new, b"}]}")
    text = b",".join([text for text in (old, new) if text])
    return _OPENING + b"," + text if text.startswith(b'{"role":"assistant"') else text


def _newest(messages: Sequence[Message]) -> int:
    """Return where the newest reply begins; 0 where there is none."""
    at = len(messages)
    while at and _is_users(messages[at - 1]):
        at -= 1
    while at and not _is_users(messages[at - 1]):
        at -= 1
    return at


def _is_users(message: Message) -> bool:
    """Whether it is part of a message of the user's: all but replies are, and replies that say nothing part nothing."""
    return not isinstance(message, AssistantMessage) or not (message.calls or message.text.strip() or message.native)


def _are_apart(before: Message, after: Message) -> bool:
    return _is_users(before) != _is_users(after)


def _turns(provider: str, refused: Refuses, messages: Sequence[Message]) -> Iterator[object]:
    # Neighbours of one role are one message: Anthropic itself would put them together, others that speak its wire
    # refuse them. Results of a reply stand right behind it, so they come first in their message, as they have to.
    for is_users, run in groupby(messages, key=_is_users):
        if content := [block for message in run for block in _blocks(message, provider, refused)]:
            yield {"role": "user" if is_users else "assistant", "content": content}


def _tools(tools: Sequence[ToolDefinition]) -> Iterator[object]:
    for tool in tools:
        if not tool.strict:
            yield tool.anthropic()
        elif unsupported_schema(tool.parameters) is None:
            yield tool.anthropic() | {"input_schema": supported_schema(tool.parameters)}
        else:  # it is not held to the schema while it writes: its arguments are validated all the same
            yield attrs.evolve(tool, strict=False).anthropic()


def _blocks(message: Message, provider: str, refused: Refuses) -> Sequence[dict[str, Any]]:
    match message:
        case ToolResult():
            return [_result(message, refused)]
        case AssistantMessage():
            return _native_blocks(message, provider) or _plain_blocks(message)
        case UserMessage():
            return [_part(part) for part in message.parts if not isinstance(part, TextPart) or part.text.strip()]
        case SystemMessage():
            # Few models have the role "system" within a history. In tags, it is not taken for words of the user.
            return _texts(f"<system>{message.text}</system>" if message.text.strip() else "")


def _result(message: ToolResult, refused: Refuses) -> dict[str, Any]:
    text, parts = shown_of(message, refused) if message.parts else (message.text, {})
    content = [*_texts(text), *map(_part, parts.values())] if parts else text
    result = {"type": "tool_result", "tool_use_id": wire_id(message.call_id), "content": content}
    # "all content must be type `text` if `is_error` is true" (vellum-ai/vellum-assistant#18387): beside pictures, the
    # text alone says that the call has failed.
    return result if message.outcome is Outcome.DONE or parts else {**result, "is_error": True}


def _texts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text.strip() else []  # a blank block is refused


def _plain_blocks(message: AssistantMessage) -> list[dict[str, Any]]:
    # A last message that is the assistant's must not end with white space.
    return [*_texts(message.text.rstrip()), *map(_use, message.calls)]


def _use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": wire_id(call.id), "name": call.name, "input": _loads(call.arguments)}


def _native_blocks(message: AssistantMessage, provider: str) -> list[dict[str, Any]]:
    """Return the reply as the provider wrote it, with our calls in place of its own; nothing where there is none."""
    if message.native is None or message.native.provider != provider:
        return []
    blocks = _kept(message.native)
    if sum(block["type"] == "tool_use" for block in blocks) != len(message.calls):
        return []  # the message was changed: its thinking led to something else
    calls = iter(message.calls)
    # Only the ids are ours, and the arguments may be: a person may have edited them.
    whole = [{**block, **_use(next(calls))} if block["type"] == "tool_use" else block for block in blocks]
    return [block for block in whole if block["type"] != "text" or str(block.get("text")).strip()]


def _kept(native: NativeReply) -> list[dict[str, Any]]:
    try:
        blocks = _loads(native.content)
    except ValueError:
        blocks = None
    if not isinstance(blocks, list) or not all(isinstance(block, dict) and "type" in block for block in blocks):
        msg = f"Native(provider={native.provider!r}) holds no list of content blocks, as JSON: leave `native` out"
        raise MisuseError(msg)
    return blocks


def _float(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text  # "1e999" is JSON, and infinity cannot be written as JSON


def _integer(text: str) -> int | str:
    return int(text) if len(text) <= _DIGITS else text


# Python refuses to read and to write whole numbers of more than 4,300.
_DIGITS: Final = 4_000

# A call is sent for as long as its run goes on, so what its arguments hold must not end it.
_loads: Final = json.JSONDecoder(parse_float=_float, parse_int=_integer, parse_constant=str).decode

_IDS: Final = str.maketrans({"-": "--", ".": "-d", ":": "-c"})


def wire_id(call_id: str) -> str:
    """Return the id of a call with nothing in it but letters, digits, "_" and "-"; two ids never become the same.

    Source: "tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'" (tailcallhq/forgecode#1142).
    """
    return call_id.translate(_IDS)


# Parts


def _part(part: Part) -> dict[str, Any]:
    if reason := refuses(part):
        raise ModelError(f"The request holds a part that cannot be sent: {reason}.")
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case ImagePart():  # how closely to look is not for the request to say here
            return {"type": "image", "source": _source(part)}
        case _:
            title = part.name if isinstance(part, FilePart) else ""
            document = {"type": "document", "source": _source(part)}
            return {**document, "title": title} if title else document


def _source(part: ImagePart | AudioPart | FilePart) -> dict[str, Any]:
    carried = read_inline_data(part)
    if carried is None:
        return {"type": "url", "url": part.url}
    kind, data = carried
    if kind.startswith("text/"):
        return {"type": "text", "media_type": "text/plain", "data": _decoded(data)}
    return {"type": "base64", "media_type": kind, "data": data}


def _decoded(data: str) -> str | None:
    try:
        return b64decode(data, validate=True).decode()
    except ValueError:
        return None


def refuses(part: Part) -> str | None:
    """Say why the wire cannot carry the part; None where it can."""
    match part:
        case TextPart():
            return None
        case AudioPart():
            return "Anthropic's messages carry no recordings; send what is said in it as text"
        case ImagePart() | FilePart() if part.url.startswith("http://"):
            what = type(part).__name__
            return f"Anthropic fetches from https:// addresses only; give one, or the data itself ({what}.of)"
    kind, data = read_inline_data(part) or ("", "")
    match part:
        case ImagePart() if len(data) > _IMAGE_CHARS:
            return f"Anthropic takes images of {_IMAGE_CHARS * 3 // 4:,} bytes at most"
        case ImagePart() if kind and kind not in _IMAGES:
            return f"Anthropic's messages carry images as JPEG, PNG, GIF or WebP, and not as {kind}"
        case FilePart() if kind.startswith("text/") and _decoded(data) is None:
            return f"the file is {kind}, and its data is not UTF-8 in base64"
        case FilePart() if kind and kind != "application/pdf" and not kind.startswith("text/"):
            return f"Anthropic's messages carry files as PDF or as text, and not as {kind}"
    return None


# What the wire says


_REASONS: Final = {
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    # A turn of the provider's own tools that it laid down half-way: no more than half an answer, and not a whole one.
    "pause_turn": FinishReason.LENGTH,
}
# Kind of a delta -> the field of the block that it goes on with, and its own field that holds the piece.
_TEXTS: Final = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("input", "partial_json"),
}


def decode(data: bytes, *, provider: str = PROVIDER) -> Reply:
    """Read a reply that came whole.

    Args:
        data: The body.
        provider: Who wrote it, for the reply's `NativeReply.provider`.

    Raises:
        FormError: when it is not a message.
        SentError: when the server sent an error.
    """
    answer = parsed_reply(data)
    content = field(answer, "content", list, [])
    if not isinstance(answer, dict) or "content" not in answer:
        msg = "a reply without content"
        raise FormError(msg)
    check_count(sum(isinstance(block, dict) and block.get("type") == "tool_use" for block in content), len(content))
    blocks = [_Block.of(block) for block in content]
    stop = field(answer, "stop_reason", str, "")
    usage = usage_in(answer)
    return _reply(blocks, stop, _explanation(answer), usage=usage, provider=provider)


def _reply(blocks: Sequence[_Block], stop: str, explanation: str, *, usage: Usage | None, provider: str) -> Reply:
    text = "".join(block.text for block in blocks)
    calls = tuple(block.proposed() for block in blocks if block.kind == "tool_use")
    reason = _reason(stop, said=bool(text), calls=bool(calls))
    # A thought that was cut off has no signature, and a search no result: nobody takes these back.
    is_whole = reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
    return Reply(
        text=explanation if reason is FinishReason.REFUSAL else text,
        calls=calls,
        finish_reason=reason,
        usage=usage,
        native=_native(blocks, provider) if is_whole else None,
    )


def _reason(stop: str, *, said: bool, calls: bool) -> FinishReason:
    if stop == "refusal":
        # Not the model's own word, but a filter's, which may cut it off in the middle: that is no answer to go on with.
        return FinishReason.CONTENT_FILTER if said or calls else FinishReason.REFUSAL
    return _REASONS.get(stop, FinishReason.TOOL_CALLS if calls else FinishReason.STOP)


def _explanation(source: object) -> str:
    """Return why the answer was refused."""
    details = field(source, "stop_details", dict, {})
    category = field(details, "category", str, "")
    usual = f"Anthropic's filter let no answer through{category and f' ({category})'}."
    return field(details, "explanation", str, "") or usual


def usage_in(source: object) -> Usage | None:
    """Return what was billed, by an answer or by the counts of a stream.

    None where that is not said, or not in the wire's form: an odd bill spoils no reply.
    """
    try:
        usage = field(source, "usage", dict, {})
        return _usage(usage) if usage else None
    except FormError:
        return None


def _usage(usage: dict[str, Any]) -> Usage:
    read, wrote = count(usage, "cache_read_input_tokens"), count(usage, "cache_creation_input_tokens")
    output_tokens = count(usage, "output_tokens")
    thinking_tokens = count(field(usage, "output_tokens_details", dict, {}), "thinking_tokens")
    return Usage(
        input_tokens=count(usage, "input_tokens") + read + wrote,  # on this wire, what the cache has not
        output_tokens=output_tokens,
        cached_tokens=read,
        cache_write_tokens=wrote,
        reasoning_tokens=min(thinking_tokens, output_tokens),
    )


def _native(blocks: Sequence[_Block], provider: str) -> NativeReply | None:
    """Return the reply as it is to go back; None where text and calls are all there is."""
    if all(block.is_plain for block in blocks):
        return None
    content = json.dumps([block.whole() for block in blocks], ensure_ascii=False)
    return NativeReply(provider=provider, content=replace_surrogates(content))


@attrs.define(eq=False, repr=False)
class _Block:
    """A block of the content, as far as it has come."""

    fields: dict[str, Any]
    # As it began; whole, where the reply was not streamed.
    pieces: dict[str, list[str]] = attrs.field(factory=dict)
    # What came since, by the field that it goes on with.

    @classmethod
    def of(cls, fields: object) -> _Block:
        if not field(fields, "type", str, ""):
            msg = "a block without a type"
            raise FormError(msg)
        return cls(fields=cast("dict[str, Any]", fields))

    @property
    def kind(self) -> str:
        return field(self.fields, "type", str, "")

    @property
    def text(self) -> str:
        """What it adds to the answer's text."""
        return self._text("text") if self.kind == "text" else ""

    @property
    def is_plain(self) -> bool:
        """Whether it can be written again from text and calls."""
        if self.kind == "text":
            return not self.fields.get("citations")
        caller = field(self.fields, "caller", dict, {})
        return self.kind == "tool_use" and caller.get("type", "direct") == "direct"

    def _text(self, name: str) -> str:
        return field(self.fields, name, str, "") + "".join(self.pieces.get(name, ()))

    @property
    def arguments(self) -> str:
        """The input as JSON text, in the server's own words where it sent text."""
        text = "".join(self.pieces.get("input", ()))
        return text or json.dumps(self.fields.get("input") or {}, ensure_ascii=False)

    def take(self, delta: object) -> tuple[str, str]:
        """Add a piece; returns the field that it goes on with and the text; empty where it is none of ours."""
        kind = field(delta, "type", str, "")
        if kind == "citations_delta":
            citations = field(self.fields, "citations", list, [])
            citations.append(field(delta, "citation", dict, {}))
            self.fields["citations"] = citations
        name, source = _TEXTS.get(kind, ("", ""))
        piece = field(delta, source, str, "") if name else ""
        if piece:
            self.pieces.setdefault(name, []).append(piece)
        return name, piece

    def proposed(self) -> ProposedCall:
        name = field(self.fields, "name", str, "")
        return ProposedCall(id=field(self.fields, "id", str, ""), name=name, arguments=self.arguments)

    def whole(self) -> dict[str, Any]:
        """The block as a reply that is not streamed has it."""
        texts = {name: self._text(name) for name in self.pieces if name != "input"}
        return {**self.fields, **texts, **({"input": self._input()} if "input" in self.pieces else {})}

    def _input(self) -> dict[str, Any]:
        # What was cut off in the middle is not kept: an input has to be an object.
        try:
            value = _loads(self.arguments)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


@attrs.define(eq=False, repr=False)
class AnthropicAssembly(Assembly):
    """A streamed reply, as far as it has come: blocks, each with its beginning, its pieces and its end."""

    provider: str = PROVIDER
    blocks: dict[int, _Block] = attrs.field(factory=dict)
    # By the server's index, in the order in which they began, which is that of the reply.
    calls: dict[int, int] = attrs.field(factory=dict)
    # The server's index of a call -> its place among the calls.
    stop: str | None = None
    explanation: str = ""
    counts: dict[str, Any] = attrs.field(factory=dict)
    # Of the usage, as the server writes it: it counts on, and says each time only what has changed.

    @property
    def is_whole(self) -> bool:
        """Whether the model has said why it stopped, and the server that this was all."""
        return self.stop is not None and self.is_done

    def _take(self, event: object, pieces: list[Chunk]) -> None:
        pieces += self._news(event)

    def _news(self, event: object) -> Iterable[Chunk]:
        check_error(event)
        match field(event, "type", str, ""):
            case "message_start":
                self.is_begun = True
                self._count(field(event, "message", dict, {}))
            case "content_block_start":
                return self._begin(_index(event), _Block.of(field(event, "content_block", dict, {})))
            case "content_block_delta":
                return self._go_on(_index(event), field(event, "delta", dict, {}))
            case "content_block_stop":
                return self._end(_index(event))
            case "message_delta":
                return self._finish(event)
            case "message_stop":
                self.is_done = True
        return ()  # "ping", and what may be added to the wire

    def _count(self, source: object) -> None:
        usage = source.get("usage") if isinstance(source, dict) else None
        if isinstance(usage, dict):
            self.counts |= {name: value for name, value in usage.items() if value is not None}
            self.usage = usage_in({"usage": self.counts})

    def _begin(self, index: int, block: _Block) -> Iterable[Chunk]:
        if index in self.blocks:
            msg = f"block {index} begins twice"
            raise FormError(msg)
        self.is_begun = True
        self.blocks[index] = block
        check_count(len(self.calls) + (block.kind == "tool_use"), len(self.blocks))
        if block.kind == "tool_use":
            place = self.calls[index] = len(self.calls)
            yield CallChunk(index=place, name=field(block.fields, "name", str, ""))
        elif block.text:
            yield TextChunk(block.text)
        elif thought := field(block.fields, "thinking", str, ""):
            yield ThinkingChunk(thought)

    def _go_on(self, index: int, delta: dict[str, Any]) -> Iterable[Chunk]:
        name, piece = self._block(index).take(delta)
        if not piece:
            return
        if name == "text":
            yield TextChunk(piece)
        elif name == "thinking":
            yield ThinkingChunk(piece)
        elif name == "input" and index in self.calls:
            yield CallChunk(index=self.calls[index], arguments=piece)

    def _end(self, index: int) -> Iterable[Chunk]:
        block = self._block(index)
        if index in self.calls and "input" not in block.pieces:  # a call without arguments, or with all of them at once
            yield CallChunk(index=self.calls[index], arguments=block.arguments)

    def _block(self, index: int) -> _Block:
        if index not in self.blocks:
            msg = f"a piece of block {index}, which has not begun"
            raise FormError(msg)
        return self.blocks[index]

    def _finish(self, event: object) -> Iterable[Chunk]:
        self._count(event)
        delta = field(event, "delta", dict, {})
        before, self.stop = self.stop, field(delta, "stop_reason", str, self.stop or "") or None
        if self.stop is None or before is not None:
            return
        self.explanation = _explanation(delta)
        said = any(block.text for block in self.blocks.values())
        reason = _reason(self.stop, said=said, calls=bool(self.calls))
        if reason is FinishReason.REFUSAL:
            yield TextChunk(self.explanation)
        yield FinishChunk(reason=reason)

    def reply(self) -> Reply:
        """Put the reply together, once it is whole."""
        blocks = list(self.blocks.values())
        return _reply(blocks, self.stop or "", self.explanation, usage=self.usage, provider=self.provider)


def _index(event: object) -> int:
    index = field(event, "index", int, -1)
    if index < 0:
        msg = "a block without an index"
        raise FormError(msg)
    return index
