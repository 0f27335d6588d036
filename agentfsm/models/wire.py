"""What the wires of all providers share: JSON written once and read quickly, fields checked, events out of a stream.

Pure, and no vendor. What each wire says is in a file of its own: `chat_wire`, `responses_wire`, `anthropic_wire`.
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

from agentfsm.core.messages import replace_surrogates
from agentfsm.core.parts import media_label
from agentfsm.ports import CallChunk, TextChunk, ThinkingChunk
from agentfsm.reply_size import MAX_REPLY_CALLS, MAX_REPLY_CHARS, TOO_MANY_CALLS, TOO_MANY_CHARS

if TYPE_CHECKING:
    from agentfsm.core.messages import Media, Message, Part, ToolResult, Usage
    from agentfsm.ports import Chunk, Reply, ToolDefinition

_T = TypeVar("_T")
# Says why a model cannot take a part, as `Model.refuses`.
Refuses: TypeAlias = "Callable[[Part], str | None]"

# Bytes of memory for what was written, see `_held`: 1,000 runs of 40 messages. Beyond it, those that rest longest are
# written anew when they go on.
KEPT_BYTES: Final = 64 * 2**20

# Bytes of a reply that came whole, before and after decompression; or of one event of a stream, after it. Both are held
# until they end, and may hold pictures in base64. The last event of OpenAI's responses is the whole reply once more.
MAX_HELD_BYTES: Final = 64 * 2**20
# Bytes of all events of a stream, before and after decompression: 1 KiB for each of 128,000 tokens, where most servers
# send 150 to 500 bytes.
MAX_STREAM_BYTES: Final = 128 * 2**20
# Blocks or items of a reply, its calls among them: pieces of text with their sources, searches, thoughts.
MAX_ITEMS: Final = 10_000

# Values of a reply that came whole, or of one event: a value of three bytes takes 70 once it is read. Each but the
# outermost stands behind a comma, or is the first of a list or an object; so commas and opening brackets are counted,
# and those in texts with them.
MAX_VALUES: Final = 2 * 2**20

# Of what is no JSON, bytes: an error shows the beginning of it.
_SHOWN_BYTES: Final = 64 * 2**10


# Writing


def _plain(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):  # a read-only view, say
        return dict(value)
    msg = f"a {type(value).__name__} is not JSON"
    raise TypeError(msg)


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)


def written_json(value: object) -> bytes:
    """Write a value as JSON, UTF-8.

    Raises:
        TypeError, ValueError, RecursionError: when it is none.
    """
    return replace_surrogates(_ENCODER.encode(value)).encode()


def _held(items: Sequence[object], text: bytes) -> int:
    # Bytes, about: what was written, and the items, whose run may be over: as much text, and 500 for the objects.
    return 2 * len(text) + 500 * len(items)


@attrs.define(eq=False, repr=False)
class WrittenLists(Generic[_T]):
    """Lists as they stand in JSON, without the brackets: what goes on from a list that is kept is only added to it."""

    wires: Callable[[Sequence[_T]], Iterable[object]]
    # What JSON is to say of some of the items.
    apart: Callable[[_T, _T], bool] = lambda _before, _after: True
    # Whether two neighbours may be written apart from each other; where not, the list is written anew.
    kept: OrderedDict[int, tuple[tuple[_T, ...], bytes]] = attrs.field(factory=OrderedDict)
    # By the identity of the first item, which is nobody else's for as long as it is kept; the one used last at the end.
    held: int = 0
    # Bytes of memory, about.

    def _may_go_on(self, known: tuple[_T, ...], items: tuple[_T, ...]) -> bool:
        return not known or len(known) == len(items) or self.apart(known[-1], items[len(known)])

    def text(self, items: Sequence[_T]) -> bytes:
        """Return the items as JSON, one behind the other."""
        items = tuple(items)
        first = id(items[0])
        known, text = self.kept.pop(first, ((), b""))
        self.held -= _held(known, text)
        # Tuples look at identity first: this takes 10 us for 800 messages, and writing them takes 2 ms.
        if items[: len(known)] != known or not self._may_go_on(known, items):
            known, text = (), b""
        if len(known) < len(items):
            news = b",".join([written_json(wire) for wire in self.wires(items[len(known) :])])
            text = text + b"," + news if known and news else text or news
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

    messages: WrittenLists[Message]
    tools: WrittenLists[ToolDefinition]


def joined(fields: Mapping[str, object], lists: Mapping[str, bytes]) -> bytes:
    """Write an object of fields and of lists that are written already; a field of the same name goes before a list.

    Raises:
        TypeError, ValueError, RecursionError: when a field is no JSON.
    """
    text = written_json(fields).removesuffix(b"}")
    added = [b'"%b":[%b]' % (name.encode(), each) for name, each in lists.items() if name not in fields]
    return text + b"," * (bool(fields) and bool(added)) + b",".join(added) + b"}"


def shown_of(result: ToolResult, refuses: Refuses) -> tuple[str, dict[str, Media]]:
    """Return what a model is shown of a result.

    Returns:
        Its text, which says what else the model cannot be shown; and the parts that it can, by the names that the text
        has for them, in order.
    """
    text, parts = result.text, {}
    for number, part in enumerate(result.parts, 1):
        name = media_label(part, number)
        if (reason := refuses(part)) is None:
            parts[name] = part
        else:
            text += f"\n[{name}: this model cannot be shown it ({reason})]"
    return text, parts


# Reading


class FormError(ValueError):
    """What came is not of the wire's form."""


class SizeError(ValueError):
    """More came than a reply may have."""


class SentError(Exception):
    """The server sent an error with status 200: in place of a reply, or in the middle of a stream.

    Attributes:
        body: The error's fields: message, type, code.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        super().__init__(str(body.get("message", "")))


def field(source: object, key: str, kind: type[_T], default: _T) -> _T:
    """Return a field of an object; its default where it is missing or null.

    Raises:
        FormError: when the source is no object, or the field is of another type.
    """
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


def check_count(calls: int, items: int = 0) -> None:
    """Check how many calls a reply has, and how many blocks or items in all, before anything is made of them.

    Raises:
        SizeError: when there are too many.
    """
    if calls > MAX_REPLY_CALLS:
        raise SizeError(TOO_MANY_CALLS)
    if items > MAX_ITEMS:
        msg = f"more than {MAX_ITEMS:,} blocks or items"
        raise SizeError(msg)


def count(usage: dict[str, Any], key: str) -> int:
    """Return a number of tokens, 0 or more; 0 where it is missing or null. Some servers write 5 as 5.0.

    Raises:
        FormError: when it is no number.
    """
    value = usage.get(key)
    if isinstance(value, float):
        return max(int(value), 0) if math.isfinite(value) else 0
    return max(field(usage, key, int, 0), 0)


def arguments_in(function: dict[str, Any]) -> str:
    """Return the arguments of a call as text; a few servers send the object itself.

    Raises:
        FormError: when they are neither.
    """
    value = function.get("arguments")
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else field(function, "arguments", str, "")


def parsed(text: bytes) -> object:
    """Read JSON.

    Raises:
        JSONDecodeError, UnicodeDecodeError, RecursionError: when it is none.
        FormError: when it holds a whole number of thousands of digits, which Python does not read.
        SizeError: when it holds too many values.
    """
    if len(text) > MAX_VALUES and sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        msg = f"more than {MAX_VALUES:,} values in its JSON"
        raise SizeError(msg)
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
        raise FormError(str(error)) from None


def parsed_reply(data: bytes) -> object:
    """Read the body of a reply that came whole.

    Raises:
        FormError: when it is no JSON.
        SizeError: when it holds too many values.
        SentError: when it is an error.
    """
    try:
        answer = parsed(data)
    except SizeError:
        raise
    except (ValueError, RecursionError):
        msg = f"text that is no JSON: {data[:_SHOWN_BYTES].decode('utf-8', 'replace')}"
        raise FormError(msg) from None
    check_error(answer)
    return answer


def billed(data: bytes, usage_in: Callable[[object], Usage | None]) -> Usage | None:
    """Return what the body of a reply that is none was billed all the same, as far as it says so.

    Args:
        data: The body.
        usage_in: Reads the usage of an answer of the wire.
    """
    try:
        return usage_in(parsed(data))
    except (ValueError, RecursionError):
        return None


def check_error(answer: object) -> None:
    """Raise what the server sent, if that is an error.

    Raises:
        SentError: when it is.
    """
    if isinstance(answer, dict) and (error := answer.get("error")):
        raise SentError(error if isinstance(error, dict) else {"message": str(error)})


def error_in(data: bytes) -> SentError | None:
    """Return the error that a body is; None where it is none."""
    try:
        check_error(parsed(data))
    except SentError as error:
        return error
    except (ValueError, RecursionError):
        return None
    return None


@attrs.define(eq=False, repr=False)
class Events:
    """Server-sent events, cut out of what the network brings.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, without a lone CR as the end of a line.
    """

    begun: list[bytes] = attrs.field(factory=list)
    # The pieces of a line that has not ended: a reply with a picture in it may be one line of megabytes.
    data: list[bytes] = attrs.field(factory=list)
    # The lines of the event that is not whole yet.
    is_fed: bool = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is whole now."""
        if not self.is_fed:
            self.is_fed = True
            data = data.removeprefix(BOM_UTF8)
        events: list[bytes] = []
        *lines, rest = data.split(b"\n")
        if lines and self.begun:
            lines[0] = b"".join([*self.begun, lines[0]])
            self.begun = []
        if rest:
            self.begun.append(rest)
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self.data.append(text[5:].removeprefix(b" "))
            elif not text and self.data:
                events.append(b"\n".join(self.data))
                self.data = []
        return events


@attrs.define(eq=False, repr=False)
class Assembly(ABC):
    """A streamed reply, as far as it has come; each wire has its own."""

    provider: str = ""
    # Who writes it, for the reply's `NativeReply.provider`.
    usage: Usage | None = None
    # What the server has billed so far; None where it did not say.
    events: int = 0
    # How many came, of any kind.
    unread: list[bytes] = attrs.field(factory=list)
    # All that came, where no event did.
    is_begun: bool = False
    # Whether any event was part of a reply.
    is_done: bool = False
    # Whether the server said that nothing will follow.
    size: int = 0
    # Bytes that came.
    read: int = 0
    # Bytes that had come when the last event was whole.
    chars: int = 0
    # Characters of text, thinking and arguments.
    _cut: Events = attrs.field(factory=Events)

    @property
    @abstractmethod
    def is_whole(self) -> bool:
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
        self.size += len(data)
        if self.size - self.read > MAX_HELD_BYTES or self.size > MAX_STREAM_BYTES:
            raise self._too_many_bytes()
        if not self.events:
            self.unread.append(data)
        for event in self._cut.feed(data):
            if event.startswith(b"[DONE]"):  # of OpenAI's chat completions, and of many that speak any of the wires
                self.is_done = True
            else:
                self.events, self.unread, self.read = self.events + 1, [], self.size
                self._take(parsed(event), pieces)
            if self.is_done:
                break
        self.chars += _chars_of(pieces)
        if self.chars > MAX_REPLY_CHARS:
            raise SizeError(TOO_MANY_CHARS)
        return pieces

    def _too_many_bytes(self) -> SizeError:
        if self.size <= MAX_STREAM_BYTES:
            return SizeError(f"more than {MAX_HELD_BYTES:,} bytes in one event")
        return SizeError(f"more than {MAX_STREAM_BYTES:,} bytes")

    @abstractmethod
    def _take(self, event: object, pieces: list[Chunk]) -> None:
        """Add an event, and what is news in it to the pieces. Raises as `feed`."""

    @abstractmethod
    def reply(self) -> Reply:
        """Put the reply together, once it is whole."""


def _chars_of(pieces: Sequence[Chunk]) -> int:
    chars = 0
    for piece in pieces:
        match piece:
            case TextChunk() | ThinkingChunk():
                chars += len(piece.text)
            case CallChunk():
                chars += len(piece.arguments)
    return chars
