"""What the wires of all providers share: JSON written once and read quickly, fields checked, events out of a stream.

Pure, and no vendor. What each wire says is in a file of its own: `chat_wire`, `responses_wire`, `anthropic.wire`.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

import attrs
import jiter

from agentfsm.core.messages import media_label, replace_surrogates
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
    from agentfsm.ports.model import Chunk, Reply, ToolDefinition

_T = TypeVar("_T")
# Says why a model cannot take a part, as `Model.refuses`.
PartCheck: TypeAlias = "Callable[[Part], str | None]"

# Bytes of memory for what was written, see `_held`: 1,000 runs of 40 messages. Beyond it, those that rest longest are
# written anew when they go on.
MAX_CACHE_BYTES: Final = 64 * 2**20

# Bytes of a reply that came whole, before and after decompression; or of one event of a stream, after it. Both are held
# until they end, and may hold pictures in base64. The last event of OpenAI's responses is the whole reply once more.
MAX_BODY_BYTES: Final = 64 * 2**20
# Bytes of all events of a stream, before and after decompression: 1 KiB for each of 128,000 tokens, where most servers
# send 150 to 500 bytes.
MAX_STREAM_BYTES: Final = 128 * 2**20
# Blocks or items of a reply, its calls among them: pieces of text with their sources, searches, thoughts.
MAX_ITEMS: Final = 10_000

# Values of a reply that came whole, or of one event: a value of three bytes takes 70 once it is read. Each but the
# outermost stands behind a comma, or is the first of a list or an object; so commas and opening brackets are counted,
# and those in texts with them.
MAX_JSON_VALUES: Final = 2 * 2**20

# Of what is no JSON, bytes: an error shows the beginning of it.
_MAX_SHOWN_BYTES: Final = 64 * 2**10


# Writing


def _json_default(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):  # a read-only view, say
        return dict(value)
    msg = f"a {type(value).__name__} is not JSON"
    raise TypeError(msg)


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_json_default)


def encode_json(value: object) -> bytes:
    """Write a value as JSON, UTF-8.

    Raises:
        TypeError, ValueError, RecursionError: when it is none.
    """
    return replace_surrogates(_ENCODER.encode(value)).encode()


def _estimate_memory(items: Sequence[object], text: bytes) -> int:
    # Bytes, about: what was written, and the items, whose run may be over: as much text, and 500 for the objects.
    return 2 * len(text) + 500 * len(items)


@attrs.define(eq=False, repr=False)
class EncodedListCache(Generic[_T]):
    """Lists as they stand in JSON, without the brackets: what goes on from a list that is kept is only added to it."""

    to_wire: Callable[[Sequence[_T]], Iterable[object]]
    """What JSON is to say of some of the items."""

    can_split: Callable[[_T, _T], bool] = lambda _before, _after: True
    """Whether two neighbours may be written apart from each other; where not, the list is written anew."""

    entries: OrderedDict[int, tuple[tuple[_T, ...], bytes]] = attrs.field(factory=OrderedDict)
    """By the identity of the first item, which is nobody else's for as long as it is kept; the one used last at the
    end.
    """

    memory_bytes: int = 0
    """Bytes of memory, about."""

    def _can_extend(self, known: tuple[_T, ...], items: tuple[_T, ...]) -> bool:
        return not known or len(known) == len(items) or self.can_split(known[-1], items[len(known)])

    def encode(self, items: Sequence[_T]) -> bytes:
        """Return the items as JSON, one behind the other."""
        items = tuple(items)
        first = id(items[0])
        known, text = self.entries.pop(first, ((), b""))
        self.memory_bytes -= _estimate_memory(known, text)
        # Tuples look at identity first: this takes 10 us for 800 messages, and writing them takes 2 ms.
        if items[: len(known)] != known or not self._can_extend(known, items):
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
    """What was written of earlier requests, so that each message and each tool is written once, and not in each turn.

    For one event loop.
    """

    messages: EncodedListCache[Message]
    tools: EncodedListCache[ToolDefinition]


def encode_object(fields: Mapping[str, object], lists: Mapping[str, bytes]) -> bytes:
    """Write an object of fields and of lists that are written already; a field of the same name goes before a list.

    Raises:
        TypeError, ValueError, RecursionError: when a field is no JSON.
    """
    text = encode_json(fields).removesuffix(b"}")
    added = [b'"%b":[%b]' % (name.encode(), each) for name, each in lists.items() if name not in fields]
    return text + b"," * (bool(fields) and bool(added)) + b",".join(added) + b"}"


def render_result(result: ToolResult, part_check: PartCheck) -> tuple[str, dict[str, Media]]:
    """Return what a model is shown of a result.

    Returns:
        Its text, which says what else the model cannot be shown; and the parts that it can, by the names that the text
        has for them, in order.
    """
    text, parts = result.text, {}
    for number, part in enumerate(result.parts, 1):
        name = media_label(part, number)
        if (reason := part_check(part)) is None:
            parts[name] = part
        else:
            text += f"\n[{name}: this model cannot be shown it ({reason})]"
    return text, parts


# Reading


class WireFormatError(ValueError):
    """What came is not of the wire's form."""


class SizeLimitError(ValueError):
    """More came than a reply may have."""


class InBandError(Exception):
    """The server sent an error with status 200: in place of a reply, or in the middle of a stream.

    Attributes:
        body: The error's fields: message, type, code.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        super().__init__(str(body.get("message", "")))


def read_field(source: object, key: str, kind: type[_T], default: _T) -> _T:
    """Return a field of an object; its default where it is missing or null.

    Raises:
        FormError: when the source is no object, or the field is of another type.
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
    """Check how many calls a reply has, and how many blocks or items in all, before anything is made of them.

    Raises:
        SizeError: when there are too many.
    """
    if calls > MAX_REPLY_CALLS:
        raise SizeLimitError(TOO_MANY_CALLS)
    if items > MAX_ITEMS:
        msg = f"more than {MAX_ITEMS:,} blocks or items"
        raise SizeLimitError(msg)


def read_token_count(usage: dict[str, Any], key: str) -> int:
    """Return a number of tokens, 0 or more; 0 where it is missing or null. Some servers write 5 as 5.0.

    Raises:
        FormError: when it is no number.
    """
    value = usage.get(key)
    if isinstance(value, float):
        return max(int(value), 0) if math.isfinite(value) else 0
    return max(read_field(usage, key, int, 0), 0)


def read_arguments(function: dict[str, Any]) -> str:
    """Return the arguments of a call as text; a few servers send the object itself.

    Raises:
        FormError: when they are neither.
    """
    value = function.get("arguments")
    return (
        json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else read_field(function, "arguments", str, "")
    )


def parse_json(text: bytes) -> object:
    """Read JSON.

    Raises:
        JSONDecodeError, UnicodeDecodeError, RecursionError: when it is none.
        FormError: when it holds a whole number of thousands of digits, which Python does not read.
        SizeError: when it holds too many values.
    """
    if len(text) > MAX_JSON_VALUES and sum(map(text.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        msg = f"more than {MAX_JSON_VALUES:,} values in its JSON"
        raise SizeLimitError(msg)
    # jiter takes 30 % of json's time, which was a quarter of all that a chunk costs. It refuses half a surrogate pair,
    # which a server that cuts its text in JavaScript sends; json takes it, and words the errors.
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
    """Read the body of a reply that came whole.

    Raises:
        FormError: when it is no JSON.
        SizeError: when it holds too many values.
        SentError: when it is an error.
    """
    try:
        answer = parse_json(data)
    except SizeLimitError:
        raise
    except (ValueError, RecursionError):
        msg = f"text that is no JSON: {data[:_MAX_SHOWN_BYTES].decode('utf-8', 'replace')}"
        raise WireFormatError(msg) from None
    raise_for_error(answer)
    return answer


def read_billed_usage(data: bytes, read_usage: Callable[[object], Usage | None]) -> Usage | None:
    """Return what the body of a reply that is none was billed all the same, as far as it says so.

    Args:
        data: The body.
        read_usage: Reads the usage of an answer of the wire.
    """
    try:
        return read_usage(parse_json(data))
    except (ValueError, RecursionError):
        return None


def raise_for_error(answer: object) -> None:
    """Raise what the server sent, if that is an error.

    Raises:
        SentError: when it is.
    """
    if isinstance(answer, dict) and (error := answer.get("error")):
        raise InBandError(error if isinstance(error, dict) else {"message": str(error)})


def find_error(data: bytes) -> InBandError | None:
    """Return the error that a body is; None where it is none."""
    try:
        raise_for_error(parse_json(data))
    except InBandError as error:
        return error
    except (ValueError, RecursionError):
        return None
    return None


@attrs.define(eq=False, repr=False)
class SSEDecoder:
    """Server-sent events, cut out of what the network brings.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, without a lone CR as the end of a line.
    """

    partial_line: list[bytes] = attrs.field(factory=list)
    """The pieces of a line that has not ended: a reply with a picture in it may be one line of megabytes."""

    data_lines: list[bytes] = attrs.field(factory=list)
    """The lines of the event that is not whole yet."""

    is_bom_checked: bool = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is whole now."""
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
    """A streamed reply, as far as it has come; each wire has its own."""

    provider: str = ""
    """Who writes it, for the reply's `NativeReply.provider`."""

    usage: Usage | None = None
    """What the server has billed so far; None where it did not say."""

    event_count: int = 0
    """How many came, of any kind."""

    unparsed: list[bytes] = attrs.field(factory=list)
    """All that came, where no event did."""

    is_begun: bool = False
    """Whether any event was part of a reply."""

    is_done: bool = False
    """Whether the server said that nothing will follow."""

    byte_count: int = 0
    """Bytes that came."""

    bytes_at_last_event: int = 0
    """Bytes that had come when the last event was whole."""

    char_count: int = 0
    """Characters of text, thinking and arguments."""

    _decoder: SSEDecoder = attrs.field(factory=SSEDecoder)

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the model has said why it stopped."""

    def feed(self, data: bytes) -> list[Chunk]:
        """Add what the network brought.

        Returns:
            What is news in it, in order.

        Raises:
            FormError: when it is not of the wire's form.
            JSONDecodeError, UnicodeDecodeError, RecursionError: when it is not JSON.
            SizeError: when more came than a reply may have.
            SentError: when the server sent an error, or broke the reply off.
            ModelError: when the model asked for what agentfsm cannot do.
        """
        pieces: list[Chunk] = []
        self.byte_count += len(data)
        if self.byte_count - self.bytes_at_last_event > MAX_BODY_BYTES or self.byte_count > MAX_STREAM_BYTES:
            raise self._build_size_error()
        if not self.event_count:
            self.unparsed.append(data)
        for event in self._decoder.feed(data):
            if event.startswith(b"[DONE]"):  # of OpenAI's chat completions, and of many that speak any of the wires
                self.is_done = True
            else:
                self.event_count, self.unparsed, self.bytes_at_last_event = self.event_count + 1, [], self.byte_count
                self._add_event(parse_json(event), pieces)
            if self.is_done:
                break
        self.char_count += _count_chars(pieces)
        if self.char_count > MAX_REPLY_CHARS:
            raise SizeLimitError(TOO_MANY_CHARS)
        return pieces

    def _build_size_error(self) -> SizeLimitError:
        if self.byte_count <= MAX_STREAM_BYTES:
            return SizeLimitError(f"more than {MAX_BODY_BYTES:,} bytes in one event")
        return SizeLimitError(f"more than {MAX_STREAM_BYTES:,} bytes")

    @abstractmethod
    def _add_event(self, event: object, chunks: list[Chunk]) -> None:
        """Add an event, and what is news in it to the pieces. Raises as `feed`."""

    @abstractmethod
    def build_reply(self) -> Reply:
        """Put the reply together, once it is whole."""


def _count_chars(chunks: Sequence[Chunk]) -> int:
    chars = 0
    for piece in chunks:
        match piece:
            case TextChunk() | ThinkingChunk():
                chars += len(piece.text)
            case CallChunk():
                chars += len(piece.arguments)
    return chars
