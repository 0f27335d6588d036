"""Encoding and decoding that all provider APIs share: cached JSON, checked fields, server-sent events.

It does no I/O and uses no SDK. Each API has its own module: `chat_wire`, `responses_wire`, `anthropic.wire`.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import attrs
import jiter

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import media_label, replace_surrogates
from agentfsm.core.settings import EXTRA_TOOLS
from agentfsm.ports.model import (
    MAX_REPLY_CALLS,
    MAX_REPLY_CHARS,
    TOO_MANY_CALLS,
    TOO_MANY_CHARS,
    CallChunk,
    TextChunk,
    ThinkingChunk,
)

if TYPE_CHECKING:
    from agentfsm.core.messages import Media, Message, Part, ToolResult
    from agentfsm.core.usage import Usage
    from agentfsm.ports.model import Chunk, Reply, Request, ToolDefinition

_T = TypeVar("_T")
# Returns the reason why a model does not support a part, as `Model.unsupported_part`.
PartCheck: TypeAlias = "Callable[[Part], str | None]"

# Bytes of memory for encoded lists, see `_estimate_memory`: 1,000 runs of 40 messages. Beyond it, the least recently
# used lists are dropped and encoded again when needed.
MAX_CACHE_BYTES: Final = 64 * 2**20

# Bytes of a reply that is not streamed, before and after decompression; or of one event of a stream, after it. Both are
# buffered whole, and may contain images in base64. The last event of OpenAI's responses repeats the whole reply.
MAX_BODY_BYTES: Final = 64 * 2**20
# Bytes of all events of a stream, before and after decompression: 1 KiB for each of 128,000 tokens, where most servers
# send 150 to 500 bytes.
MAX_STREAM_BYTES: Final = 128 * 2**20
# Blocks or items of a reply, including calls: texts with their sources, searches, reasoning.
MAX_ITEMS: Final = 10_000

# JSON values of a reply or of one event: a value of three bytes takes 70 bytes once it is parsed. Each one except the
# outermost follows a comma or an opening bracket, so these are counted, including those within strings.
MAX_JSON_VALUES: Final = 2 * 2**20

# Bytes of invalid JSON whose beginning an error shows.
_MAX_SHOWN_BYTES: Final = 64 * 2**10


# Encoding


def _json_default(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):  # for example a read-only view
        return dict(value)
    msg = f"a {type(value).__name__} is not JSON"
    raise TypeError(msg)


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_json_default)


def encode_json(value: object) -> bytes:
    """Encode a value as JSON in UTF-8.

    Raises:
        TypeError, ValueError, RecursionError: if the value has no JSON form.
    """
    return replace_surrogates(_ENCODER.encode(value)).encode()


def _estimate_memory(items: Sequence[object], text: bytes) -> int:
    # Approximate bytes of the encoded text, and of the items, which the cache may keep alive: the same text, and 500
    # per item for its objects.
    return 2 * len(text) + 500 * len(items)


@attrs.define(eq=False, repr=False)
class EncodedListCache(Generic[_T]):
    """Cache of lists encoded as JSON, without brackets. A list that extends a cached one only encodes the new items."""

    to_wire: Callable[[Sequence[_T]], Iterable[object]]
    """Returns the JSON values of a part of the items."""

    can_split: Callable[[_T, _T], bool] = lambda _before, _after: True
    """Returns whether two neighbours may be encoded separately; if not, the whole list is encoded again."""

    entries: OrderedDict[int, tuple[tuple[_T, ...], bytes]] = attrs.field(factory=OrderedDict)
    """Items and text by the identity of the first item, which is unique while it is cached; most recently used last."""

    memory_bytes: int = 0
    """Approximate bytes of the cache."""

    def encode(self, items: Sequence[_T]) -> bytes:
        """Return the items as JSON, separated by commas."""
        items = tuple(items)
        first = id(items[0])
        known, text = self.entries.pop(first, ((), b""))
        self.memory_bytes -= _estimate_memory(known, text)
        # Tuples compare identity first: this takes 10 us for 800 messages, and encoding them takes 2 ms.
        if items[: len(known)] != known or (
            known and len(known) < len(items) and not self.can_split(known[-1], items[len(known)])
        ):
            known, text = (), b""
        if len(known) < len(items):
            news = b",".join([encode_json(wire) for wire in self.to_wire(items[len(known) :])])
            text = text + b"," + news if known and news else text or news
        self.entries[first] = items, text
        self.memory_bytes += _estimate_memory(items, text)
        while self.memory_bytes > MAX_CACHE_BYTES:
            _, oldest = self.entries.popitem(last=False)
            self.memory_bytes -= _estimate_memory(*oldest)
        return text


@attrs.define(eq=False, repr=False)
class EncodingCache:
    """Cache for the requests of one event loop: each message and tool is encoded once, and not in each turn."""

    messages: EncodedListCache[Message]
    """Encoded histories."""

    tools: EncodedListCache[ToolDefinition]
    """Encoded lists of tools."""


def encode_messages(cache: EncodingCache, request: Request) -> bytes:
    """Return the messages of a request as JSON, separated by commas. The cache keeps those that the next one has."""
    end = len(request.messages) - request.passing
    while end and request.passing and not cache.messages.can_split(request.messages[end - 1], request.messages[end]):
        end -= 1
    kept = [cache.messages.encode(request.messages[:end])] if end else []
    passing = [encode_json(wire) for wire in cache.messages.to_wire(request.messages[end:])]
    return b",".join([*kept, *passing])


def encode_object(fields: Mapping[str, object], lists: Mapping[str, bytes]) -> bytes:
    """Encode an object of fields and of encoded lists. A field replaces a list of the same name, except the tools.

    Raises:
        TypeError, ValueError, RecursionError: if a field has no JSON form.
        MisuseError: if a field would replace the tools.
    """
    if "tools" in fields and "tools" in lists:
        raise MisuseError(EXTRA_TOOLS)
    text = encode_json(fields).removesuffix(b"}")
    added = [b'"%b":[%b]' % (name.encode(), each) for name, each in lists.items() if name not in fields]
    return text + b"," * (bool(fields) and bool(added)) + b",".join(added) + b"}"


def render_result(result: ToolResult, part_check: PartCheck) -> tuple[str, dict[str, Media]]:
    """Split a tool result into the text and the parts that a model supports.

    Returns:
        The text, with a note for each unsupported part; and the supported parts in order, by their names in the text.
    """
    text, parts = result.text, {}
    for number, part in enumerate(result.parts, 1):
        name = media_label(part, number)
        if (reason := part_check(part)) is None:
            parts[name] = part
        else:
            text += f"\n[{name}: this model cannot be shown it ({reason})]"
    return text, parts


# Decoding


class WireFormatError(ValueError):
    """The response does not have the form of the API."""


class SizeLimitError(ValueError):
    """The response exceeds a limit of replies."""


class InBandError(Exception):
    """The server sent an error with status 200, instead of a reply or within a stream.

    Attributes:
        body: The error's fields: message, type, code.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        super().__init__(str(body.get("message", "")))


# Characters that are kept of the names of a model and of a reply.
_MAX_NAME_CHARS: Final = 200


class ReplyOrigin(NamedTuple):
    """The origin of a reply, as the provider names it; both empty where it does not."""

    model: str = ""
    """Name of the model."""

    id: str = ""
    """Id of the reply."""


def read_origin(answer: object) -> ReplyOrigin:
    """Return the names of the model and of the reply in a reply, or in an event of a stream."""
    source = answer
    if isinstance(answer, dict) and "model" not in answer:
        source = answer.get("message") or answer.get("response")  # Anthropic's first event; those of Responses
    named = [source.get(key) for key in ("model", "id")] if isinstance(source, dict) else []
    return ReplyOrigin(*[replace_surrogates(n[:_MAX_NAME_CHARS]) if isinstance(n, str) else "" for n in named])


def read_field(source: object, key: str, kind: type[_T], default: _T) -> _T:
    """Return a field of an object, or the default if it is missing or null.

    Raises:
        WireFormatError: if the source is not an object, or the field has another type.
    """
    if not isinstance(source, dict):
        msg = f"{type(source).__name__} where an object belongs"
        raise WireFormatError(msg)
    value = source.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        msg = f"{key!r} is {type(value).__name__} where {kind.__name__} belongs"
        raise WireFormatError(msg)
    return value


def check_count(calls: int, items: int = 0) -> None:
    """Check the number of calls, and of all blocks or items, before they are decoded.

    Raises:
        SizeLimitError: if there are too many.
    """
    if calls > MAX_REPLY_CALLS:
        raise SizeLimitError(TOO_MANY_CALLS)
    if items > MAX_ITEMS:
        msg = f"more than {MAX_ITEMS:,} blocks or items"
        raise SizeLimitError(msg)


def read_token_count(usage: dict[str, Any], key: str) -> int:
    """Return a number of tokens, 0 or more; 0 if it is missing or null. Some servers write 5 as 5.0.

    Raises:
        WireFormatError: if it is not a number.
    """
    value = usage.get(key)
    if isinstance(value, float):
        return max(int(value), 0) if math.isfinite(value) else 0
    return max(read_field(usage, key, int, 0), 0)


def read_arguments(function: dict[str, Any]) -> str:
    """Return the arguments of a call as JSON text; a few servers send an object instead.

    Raises:
        WireFormatError: if they are neither a string nor an object.
    """
    value = function.get("arguments")
    return (
        json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else read_field(function, "arguments", str, "")
    )


def parse_json(text: bytes) -> object:
    """Parse JSON.

    Raises:
        JSONDecodeError, UnicodeDecodeError, RecursionError: if it is invalid or nested too deeply.
        WireFormatError: if it contains an integer of thousands of digits, which Python does not parse.
        SizeLimitError: if it contains too many values.
    """
    if len(text) > MAX_JSON_VALUES and sum(map(text.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        msg = f"more than {MAX_JSON_VALUES:,} values in its JSON"
        raise SizeLimitError(msg)
    # jiter takes 30 % of json's time, which was a quarter of the cost of a chunk. It rejects a lone surrogate, which
    # servers send that cut text in JavaScript; json accepts it, and has the better error messages.
    try:
        return jiter.from_json(text)
    except ValueError:
        pass
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        raise WireFormatError(str(error)) from None


def parse_reply(data: bytes) -> object:
    """Parse the body of a reply that was not streamed.

    Raises:
        WireFormatError: if it is not JSON.
        SizeLimitError: if it contains too many values.
        InBandError: if it is an error.
    """
    try:
        answer = parse_json(data)
    except SizeLimitError:
        raise
    except (ValueError, RecursionError):
        msg = f"text that is not JSON: {data[:_MAX_SHOWN_BYTES].decode('utf-8', 'replace')}"
        raise WireFormatError(msg) from None
    raise_for_error(answer)
    return answer


def read_billed_usage(data: bytes, read_usage: Callable[[object], Usage | None]) -> Usage | None:
    """Return the usage in the body of an unusable reply; None if it has none.

    Args:
        data: The body.
        read_usage: Reads the usage of a parsed response.
    """
    try:
        return read_usage(parse_json(data))
    except (ValueError, RecursionError):
        return None


def raise_for_error(answer: object) -> None:
    """Raise the error that a response contains, if any.

    Raises:
        InBandError: if it contains one.
    """
    if isinstance(answer, list):  # Gemini
        answer = answer[0] if answer else None
    if not isinstance(answer, dict):
        return
    if error := answer.get("error"):
        raise InBandError(error if isinstance(error, dict) else {"message": str(error)})
    if answer.get("object") == "error":  # Mistral, vLLM
        raise InBandError(answer)


def find_error(data: bytes) -> InBandError | None:
    """Return the error that a body contains; None if it contains none."""
    try:
        raise_for_error(parse_json(data))
    except InBandError as error:
        return error
    except (ValueError, RecursionError):
        return None
    return None


@attrs.define(eq=False, repr=False)
class SSEDecoder:
    """Decoder of server-sent events.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, except that a lone CR does not end a line.
    """

    partial_line: list[bytes] = attrs.field(factory=list)
    """Pieces of a line that has not ended: a reply with an image may be one line of megabytes."""

    data_lines: list[bytes] = attrs.field(factory=list)
    """Data lines of the event that has not ended."""

    is_bom_checked: bool = False
    """Whether the start of the stream was checked for a byte order mark."""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes, and return the data of each event that they complete."""
        if not self.is_bom_checked:
            self.is_bom_checked = True
            data = data.removeprefix(BOM_UTF8)
        events: list[bytes] = []
        *lines, rest = data.split(b"\n")
        if lines and self.partial_line:
            lines[0] = b"".join([*self.partial_line, lines[0]])
            self.partial_line = []
        if rest:
            self.partial_line.append(rest)
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self.data_lines.append(text[5:].removeprefix(b" "))
            elif not text and self.data_lines:
                events.append(b"\n".join(self.data_lines))
                self.data_lines = []
        return events


@attrs.define(eq=False, repr=False)
class StreamAssembler(ABC):
    """Builder of a reply from a stream; each API has its own."""

    provider: str = ""
    """The reply's `NativeReply.provider`."""

    usage: Usage | None = None
    """Usage so far; None if the server has not sent any."""

    event_count: int = 0
    """Number of events of any kind."""

    unparsed: list[bytes] = attrs.field(factory=list)
    """All received bytes, as long as there was no event."""

    is_begun: bool = False
    """Whether an event was part of a reply."""

    is_done: bool = False
    """Whether the server has announced the end of the stream."""

    byte_count: int = 0
    """Number of received bytes."""

    bytes_at_last_event: int = 0
    """Value of `byte_count` at the end of the last event."""

    char_count: int = 0
    """Characters of text, thinking and arguments."""

    origin: ReplyOrigin = attrs.field(factory=ReplyOrigin)
    """Names of the model and of the reply in the stream; empty if no event had one yet."""

    _decoder: SSEDecoder = attrs.field(factory=SSEDecoder)

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the reply has a finish reason."""

    def feed(self, data: bytes) -> list[Chunk]:
        """Add bytes of the stream.

        Returns:
            The new chunks, in order.

        Raises:
            WireFormatError: if an event does not have the form of the API.
            JSONDecodeError, UnicodeDecodeError, RecursionError: if an event is not JSON.
            SizeLimitError: if the reply exceeds a limit.
            InBandError: if the server sent an error, or aborted the reply.
            ModelError: if the model requested something that agentfsm does not support.
        """
        chunks: list[Chunk] = []
        self.byte_count += len(data)
        if self.byte_count > MAX_STREAM_BYTES:
            raise SizeLimitError(f"more than {MAX_STREAM_BYTES:,} bytes")
        if self.byte_count - self.bytes_at_last_event > MAX_BODY_BYTES:
            raise SizeLimitError(f"more than {MAX_BODY_BYTES:,} bytes in one event")
        if not self.event_count:
            self.unparsed.append(data)
        for event in self._decoder.feed(data):
            if event.startswith(
                b"[DONE]"
            ):  # the end of chat completions; many servers send it with the other APIs, too
                self.is_done = True
            else:
                self.event_count, self.unparsed, self.bytes_at_last_event = self.event_count + 1, [], self.byte_count
                content = parse_json(event)
                self.origin = self.origin if self.origin.model else read_origin(content)
                self._add_event(content, chunks)
            if self.is_done:
                break
        self.char_count += _count_chars(chunks)
        if self.char_count > MAX_REPLY_CHARS:
            raise SizeLimitError(TOO_MANY_CHARS)
        return chunks

    @abstractmethod
    def _add_event(self, event: object, chunks: list[Chunk]) -> None:
        """Add an event, and append its chunks to `chunks`. Raises as `feed`."""

    @abstractmethod
    def build_reply(self) -> Reply:
        """Build the reply, after the stream is complete."""


def _count_chars(chunks: Sequence[Chunk]) -> int:
    chars = 0
    for chunk in chunks:
        match chunk:
            case TextChunk() | ThinkingChunk():
                chars += len(chunk.text)
            case CallChunk():
                chars += len(chunk.arguments)
    return chars
