"""Messages of a conversation with a model: their parts, tool calls and tool results.

All are frozen values. A history is a tuple of messages in which every call of an assistant message has exactly one
result, in call order, right behind it; `Run` builds histories so that this always holds.
"""

from __future__ import annotations

import json
import re
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import Final, TypeAlias, get_args

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import Label, join_labels
from agentfsm.core.shortening import shorten_line
from agentfsm.core.text_safety import fence_with
from agentfsm.core.usage import AgentCost, CacheReport, Spending, Usage
from agentfsm.core.validation import STRING, ValueRule, require_choice, require_tuple, require_type
from agentfsm.core.value import Value, cached

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


class Outcome(StrEnum):
    """Outcome of a tool call. Only DONE is a success."""

    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


class ErrorType(StrEnum):
    """Reason why a tool call has no result of its own, for programs. The model reads it in the text of the result."""

    ARGUMENTS = "invalid_arguments"
    UNKNOWN_TOOL = "unknown_tool"
    NOT_PERMITTED = "not_permitted"
    WITHDRAWN = "withdrawn"
    WITHHELD = "withheld"
    BLOCKED = "blocked"
    BUDGET = "budget"
    CIRCUIT_OPEN = "circuit_open"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    RETRY = "model_retry"
    TOOL = "tool_error"
    AGENT = "agent_error"
    CONDITION = "condition"
    FALLBACK = "fallback"


def _check_text(owner: object, attribute: attrs.Attribute[str], text: object) -> None:
    if type(text) is not str:  # without `isinstance`, so that a valid text costs one call
        STRING(owner, attribute, text)


@attrs.frozen(kw_only=True)
class TextPart(Value):
    """A text."""

    text: str = attrs.field(validator=_check_text)
    """The text, as the model reads it."""


def _check_url(kind: str) -> Callable[[object, object, str], None]:
    def check(part: object, _attribute: object, url: str) -> None:
        if not isinstance(url, str) or not url.startswith(("https://", "http://", f"data:{kind}")):
            name, shown = type(part).__name__, str(url)[:40]
            raise MisuseError(f"{name} takes an http(s) or data:{kind}... URL, or bytes by {name}.of, not {shown!r}")
        if url.startswith("data:") and ";base64," not in url[:200]:
            raise MisuseError(f"{type(part).__name__} has a data: URL that is not base64: write data:TYPE;base64,...")

    return check


def data_url(data: bytes, media_type: str) -> str:
    """Return bytes as a data: URL."""
    return f"data:{media_type};base64,{b2a_base64(data, newline=False).decode('ascii')}"


def _shorten_url(url: str) -> str:
    """Return a URL for `repr` without the data that it may contain, because a repr goes into logs and errors."""
    head, comma, data = url.partition(",") if url.startswith("data:") else (url, "", "")
    return f"{head!r}, and {len(data):,} characters of data" if comma else repr(url)


@attrs.frozen(kw_only=True)
class ImagePart(Value):
    """An image, by URL or inline."""

    url: str = attrs.field(validator=_check_url("image/"), repr=_shorten_url)
    """URL that the provider can fetch, or a data: URL that contains the image."""

    detail: str = attrs.field(default="auto", validator=require_choice("auto", "low", "high"))
    """Resolution at which the model sees the image: "auto", "low" or "high"."""

    @classmethod
    def of(cls, data: bytes, media_type: str = "image/png") -> ImagePart:
        """Return a part that contains the image: PNG, JPEG, GIF or WebP."""
        return cls(url=data_url(data, media_type))


@attrs.frozen(kw_only=True)
class AudioPart(Value):
    """An audio recording, by URL or inline."""

    url: str = attrs.field(validator=_check_url("audio/"), repr=_shorten_url)
    """A data: URL that contains the recording, or a URL if the provider fetches audio."""

    @classmethod
    def of(cls, data: bytes, media_type: str = "audio/wav") -> AudioPart:
        """Return a part that contains the recording: WAV or MP3."""
        return cls(url=data_url(data, media_type))


@attrs.frozen(kw_only=True)
class FilePart(Value):
    """A document, such as a PDF, by URL or inline."""

    url: str = attrs.field(validator=_check_url(""), repr=_shorten_url)
    """URL that the provider can fetch, or a data: URL that contains the file."""

    name: str = ""
    """File name that the model reads, for example "report.pdf"; empty for none."""

    @classmethod
    def of(cls, data: bytes, media_type: str = "application/pdf", name: str = "") -> FilePart:
        """Return a part that contains the file."""
        return cls(url=data_url(data, media_type), name=name)


Part: TypeAlias = TextPart | ImagePart | AudioPart | FilePart
_PART_TYPES: Final = frozenset(get_args(Part))
_PARTS: Final = require_tuple(*_PART_TYPES, wanted="a tuple of parts: (TextPart(text='...'),)")
# Parts other than text.
Media: TypeAlias = ImagePart | AudioPart | FilePart


def read_inline_data(part: Media) -> tuple[str, str] | None:
    """Return the media type and the base64 text of an inline part; None if the part has a URL."""
    if not part.url.startswith("data:"):
        return None
    head, _, data = part.url.partition(",")
    return head[len("data:") :].partition(";")[0], data


_MEDIA_KINDS: Final[Mapping[type[Media], str]] = {ImagePart: "image", AudioPart: "recording", FilePart: "file"}
# Characters that are shown of a file name or a URL.
MAX_LABEL_CHARS: Final = 200


def media_kind(part: Media) -> str:
    """Return the kind of a part in one word: "image", "recording" or "file"."""
    return _MEDIA_KINDS[type(part)]


def media_label(part: Media, number: int) -> str:
    """Return the name of a part in the text of a result, for example "image 1".

    Args:
        part: A part of the result.
        number: Position of the part in the result, from 1.
    """
    return f"{media_kind(part)} {number}"


def describe_media(part: Media) -> str:
    """Describe a part: "image/png, 12,345 bytes", or its URL; for a file, its name comes first."""
    name = shorten_line(part.name, MAX_LABEL_CHARS) if isinstance(part, FilePart) else ""
    carried = read_inline_data(part)
    if carried is None:
        text = shorten_line(part.url, MAX_LABEL_CHARS)
    else:
        kind, data = carried
        text = f"{shorten_line(kind, MAX_LABEL_CHARS) or 'unknown type'}, {count_base64_bytes(data):,} bytes"
    return f"{name}, {text}" if name else text


def count_base64_bytes(data: str) -> int:
    """Return the number of bytes that a base64 text encodes."""
    return len(data) * 3 // 4 - data[-2:].count("=")


def format_part(part: Part) -> str:
    """Format a part for people: a text unchanged, any other part by its description."""
    return part.text if isinstance(part, TextPart) else f"[{media_kind(part)}: {describe_media(part)}]"


@attrs.frozen(kw_only=True)
class SystemMessage(Value):
    """A note of the system to the model, at its position in the history."""

    text: str = attrs.field(validator=_check_text)
    """The note, as the model reads it."""


def _check_parts(owner: object, attribute: attrs.Attribute[tuple[Part, ...]], parts: object) -> None:
    if type(parts) is tuple:
        for part in parts:
            if type(part) not in _PART_TYPES:
                break
        else:
            return
    _PARTS(owner, attribute, parts)


class MessageOrigin(StrEnum):
    """Origin of a message that stands where the user speaks."""

    USER = "user"
    """The user."""

    MEMORY = "memory"
    """A note with the items that were recalled from the memory."""

    PLAN = "plan"
    """A note with the results of a plan."""


@attrs.frozen(kw_only=True)
class UserMessage(Value):
    """A message of the user, or a note with data that stands where the user speaks."""

    parts: tuple[Part, ...] = attrs.field(validator=_check_parts)
    """Parts of the message in reading order, at least one."""

    origin: MessageOrigin = MessageOrigin.USER
    """Origin of the text: the user, or the part of agentfsm that wrote it as a note."""

    @property
    def is_note(self) -> bool:
        """Whether the message is a note with data, and not in the words of the user."""
        return self.origin is not MessageOrigin.USER

    @property
    def text(self) -> str:
        """The text parts, joined by line breaks."""
        return "\n".join(part.text for part in self.parts if isinstance(part, TextPart))


class _CallCache(Value):
    __slots__ = ("_canonical",)


class _ReplyCache(Value):
    __slots__ = ("_signature",)


class _ResultCache(Value):
    __slots__ = ("_shown",)


@attrs.frozen(kw_only=True)
class ToolCall(_CallCache):
    """A tool call that the model asked for."""

    id: str
    """Id that agentfsm assigns, unique in the run: "t3.0" is the first call of turn 3. It is sent back to the model."""

    name: str
    """Name of the tool, as the model wrote it."""

    arguments: str
    """Arguments as the text of a JSON object; "{}" if the model's text was not one."""

    key: str = attrs.field(default=attrs.Factory(lambda call: call.id, takes_self=True))
    """Idempotency key: the same for every attempt at this call, and different for any other effect. See
    `build_idempotency_key`. Default: the id.
    """

    provider_id: str = ""
    """Id that the provider gave to the call; empty if none."""

    invented: bool = False
    """Whether the agent had no tool of this name when the model asked for it."""

    malformed: str | None = None
    """Error and beginning of the model's arguments if they were not a JSON object; else None."""

    repaired: str | None = None
    """Beginning of the model's arguments if they were invalid JSON and were repaired; else None."""

    @cached
    def canonical(self) -> str:
        """The arguments with sorted keys, so that equal arguments compare equal in any spelling."""
        return f"{_parse_sorted(self.arguments.lstrip())[0]!r}"


@attrs.frozen(kw_only=True)
class NativeReply(Value):
    """A reply in the provider's own form, which is sent back unchanged: signed reasoning, results of searches.

    It is sent only to models that can read it: of the same provider, and, if that binds reasoning to all that came
    before it, while that is unchanged.
    """

    provider: str
    """Name of the provider whose form the content has, for example "anthropic"."""

    content: str
    """JSON text of the whole reply, as the provider accepts it back. Its calls match `AssistantMessage.calls` by
    position.
    """

    model: str = ""
    """Name of the model that was asked for it. Empty in records before format 5: any model of the provider."""

    prefix: str = ""
    """Digest of the instructions, tools and messages that the reply answered; empty if its reasoning is not bound to
    them.
    """


@attrs.frozen(kw_only=True)
class HostedCall(Value):
    """An action of the provider within a reply: a call of a hosted tool, or another item such as a compaction."""

    tool: str
    """Name of the tool: "web_search", "url_context", "code_execution", "image_generation", "file_search", or the
    server's and the tool's names for hosted MCP, "crm.find". For any other item, the provider's type, such as
    "compaction".
    """

    id: str = ""
    """Id of the call at the provider; empty if it has none."""

    arguments: str = ""
    """Arguments of the call: JSON text, or the code that was run."""

    output: str = ""
    """Result of the call as text, or as JSON text; empty if the provider sent none."""

    error: str | None = None
    """Error of the call; None if the provider reported none."""


@attrs.frozen(kw_only=True)
class Citation(Value):
    """A source that the provider names for a part of the text."""

    url: str = ""
    """Address of the page; empty for a file."""

    title: str = ""
    """Title of the page, or name of the file; empty if the provider sent none."""

    file_id: str = ""
    """Id of the file at the provider; empty for a page."""

    quote: str = ""
    """Passage of the source; empty if the provider sent none."""

    start: int | None = None
    """First character of `AssistantMessage.text` that the source is for; None if unknown."""

    end: int | None = None
    """Character after the last one that the source is for; None if unknown."""


@attrs.frozen(kw_only=True)
class HostedFile(Value):
    """A file that a hosted tool has written. It is stored at the provider, from which its client can download it."""

    id: str
    """Id of the file at the provider."""

    name: str = ""
    """File name; empty if the provider sent none."""

    container: str = ""
    """Id of the container that has the file, which OpenAI's client needs for a download; else empty."""


@attrs.frozen(kw_only=True)
class HostedContent(Value):
    """The outcome of the provider's own tools: their calls, and the sources, files and images that resulted."""

    calls: tuple[HostedCall, ...] = ()
    """Actions of the provider, in order."""

    citations: tuple[Citation, ...] = ()
    """Sources that the text cites, in order."""

    files: tuple[HostedFile, ...] = ()
    """Files that were written and are stored at the provider."""

    images: tuple[ImagePart, ...] = ()
    """Images that were generated."""

    container: str = ""
    """Id of the container in which code was run, for the next request; empty if there is none."""

    labels: tuple[Label, ...] = ()
    """Labels of what the provider's tools have read and done, as the agent declares them."""

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.calls or self.citations or self.files or self.images)


def join_hosted(contents: Sequence[HostedContent]) -> HostedContent:
    """Join the outcomes of several replies, in order; the container is the newest."""
    return HostedContent(
        calls=tuple([call for content in contents for call in content.calls]),
        citations=tuple([citation for content in contents for citation in content.citations]),
        files=tuple([file for content in contents for file in content.files]),
        images=tuple([image for content in contents for image in content.images]),
        container=next((content.container for content in reversed(contents) if content.container), ""),
        labels=join_labels(*[content.labels for content in contents]),
    )


@attrs.frozen(kw_only=True)
class AssistantMessage(_ReplyCache):
    """A reply of the model: text, tool calls, or both."""

    text: str = ""
    """Text of the reply; empty if it has only calls."""

    calls: tuple[ToolCall, ...] = ()
    """Tool calls of the reply, in the model's order."""

    native: NativeReply | None = attrs.field(default=None, repr=False)
    """The reply in the provider's own form; None if the adapter does not keep it."""

    thinking: str = attrs.field(default="", repr=False)
    """The model's thinking, or a summary of it, as far as the provider shows it; not part of the answer."""

    hosted: HostedContent | None = attrs.field(default=None, repr=False)
    """Outcome of the provider's own tools; None if the reply has none."""

    paused: bool = False
    """Whether the provider paused the reply in the middle, to be continued by the next request."""

    cache_report: CacheReport | None = attrs.field(default=None, repr=False)
    """Report of the provider on its prompt cache; None if none was requested."""

    @cached
    def signature(self) -> tuple[tuple[str, str], ...]:
        """Name and canonical arguments of each call, so that equal calls compare equal in any spelling."""
        return tuple([(call.name, call.canonical) for call in self.calls])


@attrs.frozen(kw_only=True)
class ToolResult(_ResultCache):
    """The result of a tool call. Each call has exactly one."""

    call_id: str
    """Id of the call (`ToolCall.id`)."""

    tool: str
    """Name of the tool."""

    outcome: Outcome
    """Outcome of the call."""

    content: str
    """The whole output as text. A value that is not text is written as JSON, without ASCII escapes."""

    index: int = 0
    """Position of the call in the reply, from 0."""

    started_at: float = 0.0
    """Time at which the call was started, seconds since 1970; 0 if it never was."""

    duration_s: float = 0.0
    """Seconds from the start of the call to its end; 0 if unknown because a worker died."""

    attempts: int = 1
    """Number of times the tool was tried in this dispatch; 0 if the call ended before its tool was tried. For a result
    that does not come from the tool, the number in all dispatches.
    """

    error_type: ErrorType | None = None
    """Reason why the tool gave no result, or why a flow uses a fallback instead of it; None if it gave one."""

    retryable: bool = False
    """Whether the same call may succeed later."""

    shown_chars: int | None = None
    """Number of characters of the content that the model is shown; None for all."""

    child: AgentCost | None = None
    """Cost of the sub-agent's run if the tool is an agent; else None."""

    parts: tuple[Media, ...] = ()
    """Media that the model is shown beside the content. The content refers to them by name: "image 1" is the first."""

    spent: tuple[Spending, ...] = ()
    """Tokens and money that the call has spent itself, by purpose: what its tool costs, and model requests that it
    made. What the run of a sub-agent has spent is in `child`.
    """

    labels: tuple[Label, ...] = ()
    """Labels of what the call has read and done: those that its tool declares, and those that the tool added."""

    sandbox: str = ""
    """Isolation in which the tool's function ran, such as "bubblewrap" or "unsandboxed"; empty if the tool has no
    sandbox, or none could be set up.
    """

    fence: str = ""
    """Name of the marks between which the model reads the content, without its hidden characters, because it comes from
    outside; empty for none. `content` is as the tool returned it.
    """

    @property
    def usage(self) -> Usage | None:
        """Sum of `spent`; None if the call has spent nothing itself."""
        return sum([each.usage for each in self.spent], Usage()) if self.spent else None

    @property
    def completed_at(self) -> float:
        """Time at which the call ended, seconds since 1970."""
        return self.started_at + self.duration_s

    @property
    def error(self) -> str | None:
        """The error text; None if the outcome is DONE."""
        return None if self.outcome is Outcome.DONE else self.content

    @property
    def cut(self) -> tuple[int, int] | None:
        """Range of characters of the content that the model is not shown, as (first, end); None if it is shown all."""
        size = len(self.content)
        if self.shown_chars is None or size <= self.shown_chars:
            return None
        return self.shown_chars * 3 // 4, size - self.shown_chars // 4

    @property
    def text(self) -> str:
        """The result as the model reads it: tool, outcome, content, and a note where it was cut."""
        if self.fence:
            return self.shown
        head = f"[{self.tool}: {self.outcome}]\n"
        if (cut := self.cut) is None:
            return head + self.content
        first, end = cut
        return head + self.content[:first] + self._describe_cut(first, end) + self.content[end:]

    @cached
    def shown(self) -> str:
        """The text that the model is shown, with its marks and without what was cut out."""
        head = f"[{self.tool}: {self.outcome}]\n"
        if (cut := self.cut) is None:
            return head + fence_with(self.fence, self.content)
        first, end = cut
        beginning, rest = fence_with(self.fence, self.content[:first]), fence_with(self.fence, self.content[end:])
        return head + beginning + self._describe_cut(first, end) + rest

    def _describe_cut(self, first: int, end: int) -> str:
        return (
            f"\n[... characters {first} to {end} of {len(self.content)} are not shown: ask for a narrower result, or "
            f"read on in result {self.call_id} from character {first} ...]\n"
        )


Message: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolResult


def replace_surrogates(text: str) -> str:
    """Replace surrogates, which no wire and no database accepts. A pair becomes the character that it encodes."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# Characters of a long text that are processed at a time: a few ms, after which another thread may run.
CHUNK_CHARS: Final = 1_000_000


def iter_chunks(text: str) -> Iterator[str]:
    """Yield a long text in chunks, none of which ends within a pair of surrogates."""
    start = 0
    while start < len(text):
        end = start + CHUNK_CHARS
        end += "\ud800" <= text[end - 1 : end] <= "\udbff"
        yield text[start:end]
        start = end


_TOOL_NAME_PATTERN: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Call ids that OpenAI accepts.
CALL_ID_PATTERN: Final = re.compile(r"[a-zA-Z0-9_.:-]{1,40}")
_BY_NAME: Final = itemgetter(0)


def _sort_pairs(pairs: list[tuple[str, object]]) -> tuple[tuple[str, object], ...]:
    """Return the members of a JSON object in an order that does not depend on how it was written."""
    return tuple(sorted(pairs, key=_BY_NAME))


# A third of the cost of `json.loads`, because it does not look for text after the value.
_parse_sorted: Final = json.JSONDecoder(object_pairs_hook=_sort_pairs).raw_decode


def check_history(messages: Sequence[Message]) -> None:
    """Check that a model accepts a history: each call has exactly one result, in call order, right after it.

    Raises:
        MisuseError: naming the call that breaks the rule, or the value of a wrong type.
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
                raise MisuseError(f"the history has a call id twice, among {', '.join(waiting)}; give each its own")
            seen.update(waiting)
            _check_calls(message.calls)
    if waiting:
        raise MisuseError(
            f"the history has no result of {waiting[0]!r}; put the result of each call after it, in order"
        )


def _check_message(message: Message) -> None:
    name = type(message).__name__
    if not isinstance(message, SystemMessage | UserMessage | AssistantMessage | ToolResult):
        kinds = "UserMessage, AssistantMessage, SystemMessage, ToolResult"
        how = "; agentfsm.models.from_openai reads OpenAI's dicts" if isinstance(message, dict) else ""
        raise MisuseError(f"a history consists of messages of agentfsm ({kinds}), not {name}{how}")
    _check_fields(message)
    for call in message.calls if isinstance(message, AssistantMessage) else ():
        _check_fields(call)
    if _is_blank(message):
        raise MisuseError(f"the history has an empty {name}; leave it out")


# Rules for the values that the engine builds on every turn. A user's values are checked with the history that has them.
_FIELD_RULES: Final[Mapping[type, Mapping[str, ValueRule]]] = {
    AssistantMessage: {"text": STRING, "calls": require_tuple(ToolCall, wanted="a tuple of ToolCall")},
    ToolCall: dict.fromkeys(("id", "name", "arguments", "key"), STRING),
    ToolResult: {
        **dict.fromkeys(("call_id", "tool", "content"), STRING),
        "outcome": require_type(Outcome, wanted="an Outcome, such as Outcome.DONE"),
        "parts": require_tuple(*_MEDIA_KINDS, wanted="a tuple of ImagePart, AudioPart or FilePart"),
    },
}


def _check_fields(value: Message | ToolCall) -> None:
    for name, rule in _FIELD_RULES.get(type(value), {}).items():
        rule.check(type(value).__name__, name, getattr(value, name))


def _is_blank(message: Message) -> bool:
    if isinstance(message, UserMessage):
        return not message.parts or any(isinstance(each, TextPart) and not each.text.strip() for each in message.parts)
    return not message.text.strip() and not (
        isinstance(message, AssistantMessage) and (message.calls or message.native or message.hosted)
    )


def _check_calls(calls: Sequence[ToolCall]) -> None:
    for call in calls:
        if not _TOOL_NAME_PATTERN.fullmatch(call.name):
            raise MisuseError(f"the history calls {call.name!r}; tool names have 1 to 64 letters, digits, '_' or '-'")
        if not CALL_ID_PATTERN.fullmatch(call.id):
            raise MisuseError(f"the history has a call {call.id!r}; ids have 1 to 40 letters, digits or any of _.:-")
        try:
            fits = isinstance(_parse_strict(call.arguments), dict)
        except (ValueError, RecursionError):
            fits = False
        if not fits:
            raise MisuseError(f"the arguments of the call {call.id!r} are not a JSON object: {call.arguments[:80]!r}")


def _reject_constant(constant: str) -> None:
    raise ValueError(constant)


# Built once, because `json.loads` would build a decoder for each call.
_parse_strict: Final = json.JSONDecoder(parse_constant=_reject_constant).decode


def as_parts(content: str | Part | tuple[Part, ...] | list[Part]) -> tuple[Part, ...]:
    """Convert a prompt, which may be a text, a part or several parts, to a tuple of parts.

    Raises:
        MisuseError: if it is empty, or is neither text nor parts.
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
        elif part.text.strip():  # providers refuse blank parts
            text = replace_surrogates(part.text)
            parts.append(part if text is part.text else TextPart(text=text))
    if not parts:
        raise MisuseError("the text is empty: give a part that is not blank, for example 'Summarise notes.md'")
    return tuple(parts)
