"""Count the tokens of a growing history, each message once.

Until a vocabulary is loaded the ledger counts bytes. A token is at least one byte, so a history that fits in bytes fits
in tokens, and a short run never loads a vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.history import Span, default_segments
from agentfsm.core.messages import (
    AssistantMessage,
    AudioPart,
    ImagePart,
    Media,
    Message,
    Part,
    SystemMessage,
    TextPart,
    ToolResult,
    UserMessage,
    read_inline_data,
)
from agentfsm.ports.model import TokenCounter

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.core.view_parts import FixedParts

# Average: English, code and Chinese (three bytes a character) have four bytes a token, JSON and logs two.
BYTES_PER_TOKEN: Final = 3

# Tokens of the provider's framing of each message: start, role, end and a line break. Calls are framed likewise.
MESSAGE_TOKENS: Final = 4

# Tokens of the framing of a call or a result, with its id: "t12345.67" has six tokens.
CALL_TOKENS: Final = MESSAGE_TOKENS + 6

# Tokens of the largest image of gpt-4o: scaled to 768 x 2,048 it has 8 tiles of 170 tokens, plus 85. The size is
# unknown until the image is fetched, which counting must not do. gpt-4.1 uses 1,536 at most; the mini models bill a
# multiple (gpt-4o-mini 2,833 for detail="low"), so this number is not an upper bound.
IMAGE_TOKENS: Final = 1_445

# Tokens of an image of any size with detail="low".
LOW_IMAGE_TOKENS: Final = 85

# The minimum for a file or a recording, and the count for one that is given by address: a page of a PDF, which
# providers read as text and picture (1,500 to 3,000: Anthropic's page on PDF support), or two minutes of speech.
MIN_MEDIA_TOKENS: Final = 1_500

# Tokens of the text around a media part of a result: the call that it belongs to, or why the model cannot see it.
PART_TOKENS: Final = 100

# Base64 characters of a file per token: a page of text takes 50 to 100 KB with its fonts.
FILE_CHARS_PER_TOKEN: Final = 30

# Base64 characters of a recording per token: 10 tokens a second (OpenAI), 16 to 32 KB a second.
AUDIO_CHARS_PER_TOKEN: Final = 1_000

# Messages that are counted without yielding to the event loop: up to 10 ms with a vocabulary.
BATCH_MESSAGES: Final = 500

CountText = Callable[[str], int]


@attrs.frozen
class _ByteCounter(TokenCounter):
    """Counts UTF-8 bytes: never less than the tokens of any byte-pair vocabulary, and almost free."""

    encoding: str = attrs.field(default="bound: UTF-8 bytes", init=False)
    exact: bool = attrs.field(default=False, init=False)

    def count(self, text: str) -> int:
        return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


# A counter that returns an upper bound.
BYTE_COUNTER: Final = _ByteCounter()


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text without a vocabulary."""
    return BYTE_COUNTER.count(text) // BYTES_PER_TOKEN


def count_message(message: Message, counter: TokenCounter) -> int:
    """Return the tokens of a message, including the provider's framing."""
    return MESSAGE_TOKENS + _MESSAGE_COUNTERS[type(message)](message, counter.count)


def _count_assistant(message: AssistantMessage, count: CountText) -> int:
    calls = [count(call.name) + count(call.arguments) + CALL_TOKENS for call in message.calls]
    spoken = count(message.text) + sum(calls)
    if message.native is None:
        return spoken
    # The reply in its provider's form is estimated by its size, in the unit of the counter: a vocabulary would count
    # far more tokens in encrypted or signed content than the provider does.
    in_bytes = BYTE_COUNTER.count(message.native.content)
    return max(spoken, in_bytes if count == BYTE_COUNTER.count else in_bytes // BYTES_PER_TOKEN)


def _count_result(message: ToolResult, count: CountText) -> int:
    tokens = count(message.text) + CALL_TOKENS
    return tokens + sum(count_media(part) + PART_TOKENS for part in message.parts) if message.parts else tokens


def _count_user(message: UserMessage, count: CountText) -> int:
    media = [part for part in message.parts if not isinstance(part, TextPart)]
    return count(message.text) + sum(count_media(part) for part in media) if media else count(message.text)


def count_media(part: Media) -> int:
    """Return the approximate tokens of an image, a file or a recording."""
    if isinstance(part, ImagePart):
        return LOW_IMAGE_TOKENS if part.detail == "low" else IMAGE_TOKENS
    carried = read_inline_data(part)
    if carried is None:
        return MIN_MEDIA_TOKENS
    return max(
        MIN_MEDIA_TOKENS,
        len(carried[1]) // (AUDIO_CHARS_PER_TOKEN if isinstance(part, AudioPart) else FILE_CHARS_PER_TOKEN),
    )


_MESSAGE_COUNTERS: Mapping[type[Message], Callable[[Any, CountText], int]] = {
    SystemMessage: lambda message, count: count(message.text),
    UserMessage: _count_user,
    AssistantMessage: _count_assistant,
    ToolResult: _count_result,
}


def _part_text(part: Part) -> str:
    if isinstance(part, TextPart):
        return part.text
    return f"{part.detail}\0{part.url}" if isinstance(part, ImagePart) else part.url


def _join_parts(parts: Sequence[Part]) -> str:
    return "".join([f"\0{_part_text(part)}" for part in parts])


_READ_TEXTS: Mapping[type[Message], Callable[[Any], str]] = {
    SystemMessage: lambda message: f"\0s{message.text}",
    UserMessage: lambda message: "\0u" + "\0".join([_part_text(part) for part in message.parts]),
    AssistantMessage: lambda message: (
        f"\0a{message.text}" + "".join([f"\0{call.id}\0{call.name}\0{call.arguments}" for call in message.calls])
    ),
    ToolResult: lambda message: (
        f"\0t{message.call_id}\0{message.text}" + (_join_parts(message.parts) if message.parts else "")
    ),
}


def read_text(message: Message) -> str:
    """Return the parts of a message that a model reads, as one text that enters hashes."""
    return _READ_TEXTS[type(message)](message)


@attrs.define(eq=False, repr=False)
class TokenLedger:
    """Token counts of a run's growing history, and of the part that requests show. Each message is counted once."""

    counter: TokenCounter = BYTE_COUNTER
    """The counter in use: `BYTE_COUNTER` until a vocabulary is loaded, see `recount`."""

    own_start: int = attrs.field(default=0, kw_only=True)
    """Index of the run's first own message; those before it belong to runs that it goes on from."""

    overhead_tokens: int = attrs.field(default=0, kw_only=True)
    """Tokens of the instructions and tool definitions, which every request contains besides messages."""

    task_index: int | None = attrs.field(default=None, init=False)
    """Index of the run's first user message; None if there is none yet."""

    _sums: list[int] = attrs.field(factory=lambda: [0], init=False)
    """Cumulative tokens of the first 0, 1, 2, ... messages."""

    _hash: Any = attrs.field(factory=sha256, init=False)
    """Running hash of the messages."""

    _note_tokens: dict[int, int] = attrs.field(factory=dict, init=False)
    """Tokens of the notes that stay between the messages, by their place."""

    _cutoff: int = attrs.field(default=0, init=False)
    _compacted_messages: tuple[Message, ...] = attrs.field(default=(), init=False)
    """The compacted messages of the run that were counted last."""

    compacted_tokens: tuple[int, ...] = attrs.field(default=(), init=False)
    """Tokens of each compacted message."""

    _compacted_total: int = attrs.field(default=0, init=False)
    """Sum of `compacted_tokens`."""

    correction_tokens: int = attrs.field(default=0, init=False)
    """Tokens by which the provider's count of the latest request exceeds that of the counter, at least 0. It is 0 until
    there is one, and while bytes are counted, which are an upper bound. A lower count of the provider is not used,
    because some servers leave cached tokens out.
    """

    answered: tuple[FixedParts, int] | None = attrs.field(default=None, init=False)
    """Tools and instructions of the newest request that was answered, and the provider's count of its tokens."""

    has_logged_loss: bool = attrs.field(default=False, init=False)
    """Whether it was logged that tools or instructions have changed, so that the provider's prompt cache was lost."""

    _compacted_digest: bytes = attrs.field(default=b"", init=False)
    """Hash of the compacted messages; empty if they follow from the cutoff alone."""

    def __len__(self) -> int:
        return len(self._sums) - 1

    def message_tokens(self, index: int) -> int:
        """Return the tokens of one message."""
        return self._sums[index + 1] - self._sums[index]

    @property
    def shown_tokens(self) -> int:
        """The tokens of the messages in a request: the compacted ones, and those from the cutoff on."""
        noted = sum(self._note_tokens.values()) if self._note_tokens else 0
        return self._compacted_total + self._sums[-1] - self._sums[self._cutoff] + noted

    @property
    def request_tokens(self) -> int:
        """The approximate tokens of a whole request, even if only bytes were counted."""
        if self.counter is BYTE_COUNTER:
            return (self.overhead_tokens + self.shown_tokens) // BYTES_PER_TOKEN
        return self.overhead_tokens + self.shown_tokens + self.correction_tokens

    def calibrate(self, input_tokens: int) -> None:
        """Take over the provider's count of the request that was counted last."""
        self.correction_tokens = max(input_tokens - self.overhead_tokens - self.shown_tokens, 0)

    @property
    def digest(self) -> str:
        """A hash of the messages in a request: 8 hexadecimal digits."""
        digest = self._hash.copy()
        digest.update(b"%d" % self._cutoff + self._compacted_digest)
        return str(digest.hexdigest()[:8])

    def update(self, run: Run, most: int | None = None) -> bool:
        """Count the new messages of the run, and the messages that a compaction has made.

        Args:
            run: The run that was counted so far, or one that goes on from it.
            most: Maximum messages to count now, 1 or more; None for all.

        Returns:
            Whether all messages are counted. If not, call it again.

        Raises:
            MisuseError: if the history is shorter than the part that was counted.
        """
        messages, known = run.messages, len(self)
        if len(messages) < known:
            msg = (
                f"the history has {len(messages)} messages, but {known} were counted: a fork needs its own TokenLedger"
            )
            raise MisuseError(msg)
        news = messages[known:] if most is None else messages[known : known + most]
        for index, message in enumerate(news, known):
            if self.task_index is None and index >= self.own_start and isinstance(message, UserMessage):
                self.task_index = index
            self._sums.append(self._sums[-1] + count_message(message, self.counter))
            self._hash.update(_READ_TEXTS[type(message)](message).encode("utf-8", "surrogatepass"))
        if most is not None and len(news) == most:
            return False
        if run.compacted_messages is not self._compacted_messages or run.cutoff != self._cutoff:
            self._count_compacted(run)
        if run.kept_notes or self._note_tokens:
            self._count_notes(run)
        return True

    def resume_from(self, first: int) -> None:
        """Continue with a run that goes on from this one; its own messages start at `first`."""
        self.own_start, self.task_index = first, None

    def _count_compacted(self, run: Run) -> None:
        self._cutoff, self._compacted_messages = run.cutoff, run.compacted_messages
        places: list[int | None] = []
        for entry in run.segments:
            places += range(entry.start, entry.end) if isinstance(entry, Span) else [None]
        # The counts of messages that are shown whole are reused.
        self.compacted_tokens = tuple(
            [
                self.message_tokens(place)
                if place is not None and message is run.messages[place]
                else count_message(message, self.counter)
                for place, message in zip(places, run.compacted_messages, strict=True)
            ]
        )
        self._compacted_total = sum(self.compacted_tokens)
        self._compacted_digest = b""
        if run.segments != default_segments(run.cutoff, self.task_index):
            digest = sha256()
            for message in run.compacted_messages:
                digest.update(read_text(message).encode("utf-8", "surrogatepass"))
            self._compacted_digest = digest.digest()

    def recount_in_batches(self, run: Run, counter: TokenCounter) -> Iterator[None]:
        """Count the whole history again, with a counter that has become available.

        Yields:
            None, between two portions of the history; nothing is changed before the end.
        """
        sums = [0]
        for start in range(0, len(run.messages), BATCH_MESSAGES):
            if start:
                yield
            for message in run.messages[start : start + BATCH_MESSAGES]:
                sums.append(sums[-1] + count_message(message, counter))
        self.counter, self._sums, self._note_tokens = counter, sums, {}
        self._count_compacted(run)
        self._count_notes(run)

    def _count_notes(self, run: Run) -> None:
        known, notes = self._note_tokens, run.kept_notes
        self._note_tokens = {at: known.get(at) or count_message(notes[at], self.counter) for at in notes}
