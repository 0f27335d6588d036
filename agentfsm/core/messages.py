"""What the model reads and says: parts, messages, tool calls and their results.

All are frozen values. A history is a tuple of messages in which every call of an assistant message has exactly one
result, in call order, right behind it; `Run` builds histories so that this always holds.
"""

from __future__ import annotations

import json
import re
from binascii import b2a_base64
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from operator import itemgetter
from typing import Final, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.usage import AgentCost
from agentfsm.core.validation import require_choice
from agentfsm.core.value import Value

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


class Outcome(StrEnum):
    """How a tool call ended. Only DONE is a success."""

    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


class ErrorType(StrEnum):
    """Why a tool call gave no result, for code; the result's text says it for the model."""

    ARGUMENTS = "invalid_arguments"
    UNKNOWN_TOOL = "unknown_tool"
    NOT_PERMITTED = "not_permitted"
    WITHDRAWN = "withdrawn"
    BLOCKED = "blocked"
    BUDGET = "budget"
    CIRCUIT_OPEN = "circuit_open"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    RETRY = "model_retry"
    TOOL = "tool_error"
    AGENT = "agent_error"


@attrs.frozen(kw_only=True)
class TextPart(Value):
    """A piece of text."""

    text: str


def _check_url(kind: str) -> Callable[[object, object, str], None]:
    def check(part: object, _attribute: object, url: str) -> None:
        if not isinstance(url, str) or not url.startswith(("https://", "http://", f"data:{kind}")):
            what, shown = type(part).__name__, str(url)[:40]
            how = f"an http(s) address or a data:{kind}... URL, and bytes by {what}.of"
            raise MisuseError(f"{what} is given by {how}, not {shown!r}")
        if url.startswith("data:") and ";base64," not in url[:200]:
            raise MisuseError(f"{type(part).__name__} has a data: URL that is not base64: write data:TYPE;base64,...")

    return check


def data_url(data: bytes, media_type: str) -> str:
    """Return bytes as a data: URL."""
    return f"data:{media_type};base64,{b2a_base64(data, newline=False).decode('ascii')}"


def _shorten_url(url: str) -> str:
    """Return an address for `repr`, which goes into logs and error texts: without the data that it may carry."""
    head, comma, data = url.partition(",") if url.startswith("data:") else (url, "", "")
    return f"{head!r}, and {len(data):,} characters of data" if comma else repr(url)


@attrs.frozen(kw_only=True)
class ImagePart(Value):
    """An image, by reference or whole."""

    url: str = attrs.field(validator=_check_url("image/"), repr=_shorten_url)
    """An address that the provider can fetch, or a data: URL that carries the image."""

    detail: str = attrs.field(default="auto", validator=require_choice("auto", "low", "high"))
    """How closely the model looks: "auto", "low" or "high"."""

    @classmethod
    def of(cls, data: bytes, media_type: str = "image/png") -> ImagePart:
        """Return a part that carries the image: PNG, JPEG, GIF or WebP."""
        return cls(url=data_url(data, media_type))


@attrs.frozen(kw_only=True)
class AudioPart(Value):
    """A recording, by reference or whole."""

    url: str = attrs.field(validator=_check_url("audio/"), repr=_shorten_url)
    """A data: URL that carries it, or, where the provider fetches audio, an address."""

    @classmethod
    def of(cls, data: bytes, media_type: str = "audio/wav") -> AudioPart:
        """Return a part that carries the recording: WAV or MP3."""
        return cls(url=data_url(data, media_type))


@attrs.frozen(kw_only=True)
class FilePart(Value):
    """A document, such as a PDF, by reference or whole."""

    url: str = attrs.field(validator=_check_url(""), repr=_shorten_url)
    """An address that the provider can fetch, or a data: URL that carries the file."""

    name: str = ""
    """As the user calls it, for example "report.pdf"."""

    @classmethod
    def of(cls, data: bytes, media_type: str = "application/pdf", name: str = "") -> FilePart:
        """Return a part that carries the file."""
        return cls(url=data_url(data, media_type), name=name)


Part: TypeAlias = TextPart | ImagePart | AudioPart | FilePart
# Parts that are no text.
Media: TypeAlias = ImagePart | AudioPart | FilePart


def read_inline_data(part: Media) -> tuple[str, str] | None:
    """Return the media type and the base64 text of a part that carries its data; None where it is an address."""
    if not part.url.startswith("data:"):
        return None
    head, _, data = part.url.partition(",")
    return head[len("data:") :].partition(";")[0], data


_MEDIA_KINDS: Final[Mapping[type[Media], str]] = {ImagePart: "image", AudioPart: "recording", FilePart: "file"}
# Characters of a name or an address, as it is told.
MAX_LABEL_CHARS: Final = 200


def media_kind(part: Media) -> str:
    """Return what a part is, in a word."""
    return _MEDIA_KINDS[type(part)]


def media_label(part: Media, number: int) -> str:
    """Return what a result's text calls a part: "image 1".

    Args:
        part: One of the result's.
        number: Its place among them, from 1.
    """
    return f"{media_kind(part)} {number}"


def describe_media(part: Media) -> str:
    """Return what a part holds: "image/png, 12,345 bytes", with a file's name before it; of an address, the address."""
    name = _shorten_label(part.name) if isinstance(part, FilePart) else ""
    carried = read_inline_data(part)
    if carried is None:
        told = _shorten_label(part.url)
    else:
        kind, data = carried
        told = f"{_shorten_label(kind) or 'unknown type'}, {count_base64_bytes(data):,} bytes"
    return f"{name}, {told}" if name else told


def count_base64_bytes(data: str) -> int:
    """Return how many bytes a base64 text stands for."""
    return len(data) * 3 // 4 - data[-2:].count("=")


def format_part(part: Part) -> str:
    """Return a part for people who read a line: a text as it is, all else by what it holds."""
    return part.text if isinstance(part, TextPart) else f"[{media_kind(part)}: {describe_media(part)}]"


def _shorten_label(text: str) -> str:
    line = " ".join(text[:MAX_LABEL_CHARS].split())
    return line if len(text) <= MAX_LABEL_CHARS else f"{line}..."


@attrs.frozen(kw_only=True)
class SystemMessage(Value):
    """A note of the system to the model, in its place in the history."""

    text: str


@attrs.frozen(kw_only=True)
class UserMessage(Value):
    """What the user said."""

    parts: tuple[Part, ...]
    """At least one part, in reading order."""

    @property
    def text(self) -> str:
        """The text parts, joined by line breaks."""
        return "\n".join(part.text for part in self.parts if isinstance(part, TextPart))


@attrs.frozen(kw_only=True)
class ToolCall(Value):
    """A call that the model asked for."""

    id: str
    """Ours, unique in the run: "t3.0" is the first call of turn 3. It is what goes back on the wire."""

    name: str
    arguments: str
    """A JSON object as text; "{}" where the model's own text was not one."""

    key: str = attrs.field(default=attrs.Factory(lambda call: call.id, takes_self=True))
    """The idempotency key: the same on every attempt at this call, unlike that of any other effect
    (`build_idempotency_key`).
    """

    provider_id: str = ""
    """The provider's own id."""

    invented: bool = False
    """Whether the agent had no tool of that name when the model asked for it."""

    malformed: str | None = None
    """Where the model's arguments are not a JSON object: why, and how they began; else None."""

    repaired: str | None = None
    """Where they were broken JSON and could be mended: how they began; else None."""

    @cached_property
    def canonical(self) -> str:
        """The arguments with sorted keys: equal for equal arguments, however they were written."""
        return f"{_parse_sorted(self.arguments.lstrip())[0]!r}"


@attrs.frozen(kw_only=True)
class NativeReply(Value):
    """What a provider wrote, in its own form, to be sent back to it whole: its thinking, signed; what it searched.

    A model of another provider does not get it.
    """

    provider: str
    """Whose form it is, for example "anthropic"."""

    content: str
    """The whole reply as that provider writes one back, as JSON; the calls in it are matched with ours by their order.
    """


@attrs.frozen(kw_only=True)
class AssistantMessage(Value):
    """What the model said: text, calls, or both."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    native: NativeReply | None = attrs.field(default=None, repr=False)

    @cached_property
    def signature(self) -> tuple[tuple[str, str], ...]:
        """The calls as names and arguments with sorted keys: equal for equal calls, however they were written."""
        return tuple([(call.name, call.canonical) for call in self.calls])


@attrs.frozen(kw_only=True)
class ToolResult(Value):
    """The one result of a call."""

    call_id: str
    tool: str
    outcome: Outcome
    content: str
    """The whole output as text; JSON (not ASCII-escaped) where the tool returned something else than text."""

    index: int = 0
    """The call's place in the reply, from 0."""

    started_at: float = 0.0
    """When the call was taken up, seconds since 1970; 0 where it never was."""

    duration_s: float = 0.0
    """Seconds from then to its end; also 0 where it is unknown because a worker died."""

    attempts: int = 1
    """How many times the tool was tried in this dispatch, 0 where something else came first; of a result that comes
    from elsewhere than the tool, in all dispatches.
    """

    error_type: ErrorType | None = None
    """Why there is no result; None where there is one."""

    retryable: bool = False
    """Whether the same call may do better later."""

    shown_chars: int | None = None
    """How many characters of the content the model is shown; None for all of it."""

    child: AgentCost | None = None
    """What it cost, where the tool is an agent."""

    parts: tuple[Media, ...] = ()
    """What the model is shown beside the content, which names them: "image 1" is the first."""

    @property
    def completed_at(self) -> float:
        """Seconds since 1970."""
        return self.started_at + self.duration_s

    @property
    def error(self) -> str | None:
        """What went wrong, in words; None where nothing did."""
        return None if self.outcome is Outcome.DONE else self.content

    @property
    def cut(self) -> tuple[int, int] | None:
        """Which characters of the content the model is not shown, as (first, end); None where it is shown all."""
        size = len(self.content)
        if self.shown_chars is None or size <= self.shown_chars:
            return None
        return self.shown_chars * 3 // 4, size - self.shown_chars // 4

    @property
    def text(self) -> str:
        """The result as the model reads it: tool, status, content, and a note where it was cut."""
        head = f"[{self.tool}: {self.outcome}]\n"
        if (cut := self.cut) is None:
            return head + self.content
        first, end = cut
        note = (
            f"\n[... characters {first} to {end} of {len(self.content)} are not shown: ask for a narrower result, or "
            f"read on in result {self.call_id} from character {first} ...]\n"
        )
        return head + self.content[:first] + note + self.content[end:]


Message: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolResult


def replace_surrogates(text: str) -> str:
    """Return the text without surrogates, which no wire and no database takes: pairs become their character again."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_TOOL_NAME_PATTERN: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# The ids of calls that OpenAI takes back.
CALL_ID_PATTERN: Final = re.compile(r"[a-zA-Z0-9_.:-]{1,40}")
_BY_NAME: Final = itemgetter(0)


def _sort_pairs(pairs: list[tuple[str, object]]) -> tuple[tuple[str, object], ...]:
    """Return what stands for a JSON object where its keys may come in any order."""
    return tuple(sorted(pairs, key=_BY_NAME))


# A third of what `json.loads` costs: nothing behind the value is looked for.
_parse_sorted: Final = json.JSONDecoder(object_pairs_hook=_sort_pairs).raw_decode


def check_history(messages: Sequence[Message]) -> None:
    """Check that a history is one that a model accepts: each call has its one result, in call order, right behind it.

    Raises:
        MisuseError: when it is not, naming the call; or when something in it is no message.
    """
    seen: set[str] = set()
    waiting: list[str] = []
    for message in messages:
        _check_message(message)
        if isinstance(message, ToolResult):
            if message.call_id not in waiting:
                raise MisuseError(f"the history has a result of {message.call_id!r} without its call right before it")
            if message.call_id != waiting[0]:
                break
            waiting.pop(0)
        elif waiting:
            break
        elif isinstance(message, AssistantMessage):
            waiting = [call.id for call in message.calls]
            if len(set(waiting) - seen) < len(waiting):
                raise MisuseError(f"the history has a call id twice, among {', '.join(waiting)}: each needs its own")
            seen.update(waiting)
            _check_calls(message.calls)
    if waiting:
        raise MisuseError(f"the history has no result of {waiting[0]!r}: each call needs one behind it, in order")


def _check_message(message: Message) -> None:
    what = type(message).__name__
    if not isinstance(message, SystemMessage | UserMessage | AssistantMessage | ToolResult):
        kinds = "UserMessage, AssistantMessage, SystemMessage, ToolResult"
        how = "; agentfsm.models.from_openai reads OpenAI's dicts" if isinstance(message, dict) else ""
        raise MisuseError(f"a history is made of messages of agentfsm ({kinds}), and {what} is none{how}")
    if _is_blank(message):
        raise MisuseError(f"the history has a {what} that says nothing: leave it out")


def _is_blank(message: Message) -> bool:
    if isinstance(message, UserMessage):
        return not message.parts or any(isinstance(each, TextPart) and not each.text.strip() for each in message.parts)
    return not message.text.strip() and not (isinstance(message, AssistantMessage) and message.calls)


def _check_calls(calls: Sequence[ToolCall]) -> None:
    for call in calls:
        if not _TOOL_NAME_PATTERN.fullmatch(call.name):
            raise MisuseError(f"the history calls {call.name!r}: a name has 1 to 64 letters, digits, '_' or '-'")
        if not CALL_ID_PATTERN.fullmatch(call.id):
            raise MisuseError(f"the history has a call {call.id!r}: an id has 1 to 40 letters, digits or any of _.:-")
        try:
            fits = isinstance(_parse_strict(call.arguments), dict)
        except (ValueError, RecursionError):
            fits = False
        if not fits:
            raise MisuseError(f"the history has a call {call.id!r} with {call.arguments[:80]!r} for a JSON object")


def _reject_constant(constant: str) -> None:
    raise ValueError(constant)


# Made once: `json.loads` would make a decoder for each call.
_parse_strict: Final = json.JSONDecoder(parse_constant=_reject_constant).decode


def as_parts(content: str | Part | tuple[Part, ...] | list[Part]) -> tuple[Part, ...]:
    """Normalise what a user may pass as a prompt.

    Raises:
        MisuseError: when it is empty, or is not text or parts.
    """
    if isinstance(content, str):
        content = TextPart(text=content)
    parts: list[Part] = []
    for part in content if isinstance(content, tuple | list) else (content,):
        if not isinstance(part, Part):
            kinds = "TextPart, ImagePart, AudioPart and FilePart"
            raise MisuseError(f"a prompt is text or a sequence of {kinds}, not {type(part).__name__}")
        if not isinstance(part, TextPart):
            parts.append(part)
        elif part.text.strip():  # no provider takes a blank part back
            parts.append(TextPart(text=replace_surrogates(part.text)))
    if not parts:
        raise MisuseError("the text is empty: give a part that is not blank, for example 'Summarise notes.md'")
    return tuple(parts)
