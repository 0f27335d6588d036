"""Results and errors as text for the model: the outcome, whether to retry, and alternatives."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from agentfsm.core.calls import OpenCall
from agentfsm.core.errors import OutcomeUnknownError, RefusedError
from agentfsm.core.messages import (
    CHUNK_CHARS,
    AudioPart,
    FilePart,
    ImagePart,
    Media,
    Outcome,
    Part,
    TextPart,
    ToolResult,
    iter_chunks,
    replace_surrogates,
)
from agentfsm.tokens.ledger import BYTE_COUNTER
from agentfsm.tools.queue.media import MAX_PARTS_CHARS, describe_parts
from agentfsm.tools.queue.result_json import encode_value

if TYPE_CHECKING:
    from agentfsm.core.errors import ModelRetry
    from agentfsm.tools.tool import Tool

_log = logging.getLogger("agentfsm.tools")

# Maximum of tools listed for an unknown name: enough to choose from, not the whole catalogue.
MAX_NAMES = 30
# Maximum of characters of an error's own text: the cause is at its beginning.
MAX_ERROR_CHARS = 2_000
# Text of the result None.
NO_OUTPUT = "(done, no output)"
# Maximum of characters of a result as JSON. A record of the journal holds 67 million, and more than the result.
MAX_STORED_CHARS = 60_000_000
# Maximum of characters that JSON needs for one character.
MAX_ESCAPE_CHARS = 6
# The remaining text may be denser than the whole: a slightly smaller step makes two rounds enough.
SHRINK_FACTOR = 0.98
# The beginning takes three quarters of the shown part of a long result.
HEAD, WHOLE = 3, 4
_PART_TYPES: Final[frozenset[type]] = frozenset({TextPart, ImagePart, AudioPart, FilePart})
_MAY_HOLD_PARTS: Final[frozenset[type]] = _PART_TYPES | {list, tuple}
_TEXT_TYPES: Final = (str, bytes, bytearray)
_CONTAINER_TYPES: Final[frozenset[type]] = frozenset({list, tuple, dict})
# Prefix that pydantic gives to the TypeError of a fallback.
_FALLBACK_ERROR: Final = "PydanticSerializationError: Error serializing to JSON: TypeError: "
# What texts of failed calls advise the model, which is not for people.
_AGAIN: Final = "It may be called again; other arguments or another tool may do better."
_CHECK: Final = ": check before you call it again"
_GO_ON: Final = "Go on with what you have, or try again later."
_ELSE_GO_ON: Final = "Else go on with what you have."
GO_ON_WITHOUT: Final = "Go on without it, with what you have."
_WITHOUT_IT: Final = "Go on as far as you can without it, and do not call it again."
NOT_UNASKED: Final = "Do not try it again unasked."
_GENERATOR_TYPES: Final[frozenset[type]] = frozenset({GeneratorType, AsyncGeneratorType})
# A password in a connection string: whatever its form, unlike in a text that is not an error.
_PASSWORD: Final = re.compile(r"((?:password|passwd|pwd)=)[^\s;&,)\[]+", re.IGNORECASE)
# Tools of whose short results the log has a warning.
_warned_tools: Final[WeakSet[Tool[..., Any]]] = WeakSet()


def render_result(value: object, tool: Tool[..., Any] | None = None) -> tuple[str, tuple[Media, ...]]:
    """Return a tool's return value as text, and its parts. The value may be a part, or a list that contains parts.

    Never raises, whatever the value's own methods do.

    Args:
        value: The value.
        tool: The tool, which is named in a warning if the value is not kept whole.
    """
    try:
        if type(value) in _MAY_HOLD_PARTS:
            items = value if isinstance(value, list | tuple) else [value]
            if not _PART_TYPES.isdisjoint(map(type, items)):
                return render_parts([item if isinstance(item, Part) else render_text(item, tool) for item in items])
        return render_text(value, tool), ()
    except BaseException:  # noqa: BLE001  a type that cannot even be compared: the tool's effect stands
        return "(done, but the result cannot be read)", ()


def clean_long_text(text: str) -> str:
    """Return a long text as a journal record can hold it: truncated first, then without surrogates.

    Works in pieces, between which other threads run.
    """
    return "".join([replace_surrogates(chunk) for chunk in iter_chunks(truncate_for_journal(text))])


def render_parts(pieces: Iterable[str | Part]) -> tuple[str, tuple[Media, ...]]:
    """Return a text that names each part at its position, and the parts, as far as a journal record can hold both.

    Args:
        pieces: The returned texts and parts, in reading order.
    """
    text, parts = describe_parts(pieces)
    return replace_surrogates(truncate_for_journal(text, MAX_STORED_CHARS - MAX_PARTS_CHARS)), parts


def render_text(value: object, tool: Tool[..., Any] | None = None) -> str:
    """Return a tool's return value as text: a str unchanged, everything else as JSON, by `encode_value`.

    A value that cannot be written whole says so in its text, and once for each tool in the log. A text longer than a
    journal record is truncated first, since the event loop waits for the rest of the work. The same applies to the
    texts in a list, tuple or dict.
    """
    if value is None:
        return NO_OUTPUT
    if type(value) in _GENERATOR_TYPES:  # iterating it would run the tool outside of the call
        return f"(done, but the result is an unread {type(value).__name__}: the tool has to return a list)"
    try:
        if not isinstance(value, str):
            shortened = set[str]()
            written = encode_value(_truncate_items(value), shortened)
            if shortened and (tool is None or tool not in _warned_tools):
                _warn_of_short_form(tool, shortened)
            return written
        text = str.__str__(value)
        return replace_surrogates(text) if len(text) <= CHUNK_CHARS else clean_long_text(text)
    except BaseException as error:  # noqa: BLE001  cyclic, too deep, or a broken __repr__: the tool's effect stands
        kind, reason = type(value).__name__, describe_error(error).removeprefix(_FALLBACK_ERROR)
        _log.warning("a tool returned a value of type %s, which cannot be written as JSON: %s", kind, reason)
        return f"(done, but the result of type {kind} cannot be written as JSON: {reason})"


def _warn_of_short_form(tool: Tool[..., Any] | None, kinds: set[str]) -> None:
    if tool is not None:
        _warned_tools.add(tool)
    _log.warning(
        "%s returned a value that JSON cannot express (%s), so Python's short form was kept, which may leave some "
        "of it out: return plain values, a dataclass, an attrs class or a pydantic model",
        "a function" if tool is None else f"the tool {tool.name!r}",
        ", ".join(sorted(kinds)),
    )


def build_decided_result(entry: OpenCall, outcome: Outcome, content: str) -> ToolResult:
    """Build the result of a call whose outcome was not decided by its tool."""
    return entry.build_result(outcome, replace_surrogates(truncate_for_journal(content)))


def truncate_for_journal(text: str, room_chars: int = MAX_STORED_CHARS) -> str:
    """Return a result as far as a journal record can hold it: whole, or its beginning and end.

    Args:
        text: The result.
        room_chars: The maximum of characters of the result as JSON.
    """
    if len(text) * MAX_ESCAPE_CHARS <= room_chars or _fits_as_json(text, room_chars):
        return text
    end = room_chars // MAX_ESCAPE_CHARS // 2
    dropped = f"[... {len(text) - 2 * end} characters were dropped: too many to be kept ...]"
    return f"{text[:end]}\n{dropped}\n{text[len(text) - end :]}"


def _fits_as_json(text: str, room_chars: int) -> bool:
    """Return whether a text has at most this many characters as JSON. Stops encoding when the limit is exceeded."""
    if len(text) > room_chars:
        return False
    for chunk in iter_chunks(text):
        room_chars -= len(json.dumps(chunk, ensure_ascii=False)) - 2  # its quotation marks
        if room_chars < 0:
            return False
    return True


def _truncate_items(value: object) -> object:
    """Truncate the texts in a list, tuple or dict so that together they fit into a journal record."""
    if type(value) not in _CONTAINER_TYPES:
        return _truncate_item(value, MAX_STORED_CHARS)
    items: Iterable[object] = value.values() if isinstance(value, dict) else value  # type: ignore[assignment]
    if sum([len(item) for item in items if isinstance(item, _TEXT_TYPES)]) <= MAX_STORED_CHARS:
        return value
    short = [_truncate_item(item, MAX_STORED_CHARS // len(value)) for item in items]  # type: ignore[arg-type]
    return dict(zip(value, short, strict=True)) if isinstance(value, dict) else short


def _truncate_item(item: object, room: int) -> object:
    if not isinstance(item, _TEXT_TYPES) or len(item) <= room:
        return item
    if isinstance(item, str):
        return replace_surrogates(truncate_for_journal(item, room))
    end = room // MAX_ESCAPE_CHARS // 2
    head, tail = [part.decode(errors="replace") for part in (item[:end], item[len(item) - end :])]
    return f"{head}\n[... {len(item) - 2 * end} bytes were dropped: too many to be kept ...]\n{tail}"


def count_shown_chars(text: str, tool: Tool[..., Any], count: Callable[[str], int]) -> int | None:
    """Return the number of characters of a result shown to the model, within the tool's tokens and bytes; None for all.

    Only as much text is counted as those bytes can hold, since the event loop waits for this.
    """
    if len(text) * 4 <= min(tool.shown_tokens, tool.shown_bytes):
        return None  # a character has four bytes at most, and a token one at least
    shown = min(len(text), tool.shown_bytes)
    while True:
        part = text if shown == len(text) else text[: shown * HEAD // WHOLE] + text[len(text) - shown // WHOLE :]
        share = min(tool.shown_bytes / max(BYTE_COUNTER.count(part), 1), tool.shown_tokens / max(count(part), 1))
        if share >= 1:
            return None if shown == len(text) else shown
        shown = int(shown * share * SHRINK_FACTOR)


def describe_error(error: BaseException) -> str:
    """Return the error's type and text; for a group, those of its members. Never raises."""
    try:
        if isinstance(error, BaseExceptionGroup):
            return "; ".join(describe_error(each) for each in error.exceptions)[:MAX_ERROR_CHARS]
        text = _error_text(error)
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    except BaseException:  # noqa: BLE001  an attribute of it may raise anything, a wish to exit among them
        return "an error that cannot be read"


def _error_text(error: BaseException) -> str:
    try:
        return mask_secrets(replace_surrogates(str.__str__(str(error))[: 2 * MAX_ERROR_CHARS]))[:MAX_ERROR_CHARS]
    except BaseException:  # noqa: BLE001  a broken __str__ must not hide the error, nor end the program
        return "(its text cannot be read)"


def mask_secrets(text: str, known: Sequence[str] = ()) -> str:
    """Return the text of an error with secrets replaced by marks: known ones, and all that have the form of one.

    Args:
        text: Text of an error, such as that of a database that names its address with the password.
        known: Known secrets, none of them empty.
    """
    from agentfsm.core.sensitive_text import DataKind, redact_sensitive, redaction_mark  # noqa: PLC0415  20 patterns

    mark = redaction_mark(DataKind.SECRET)
    return _PASSWORD.sub(rf"\1{mark}", redact_sensitive(text, (DataKind.SECRET,), secrets=known))


def retry_text(hint: ModelRetry) -> str:
    """Return the text for a tool that asked for other arguments."""
    return _error_text(hint) or "not like this; try other arguments"


def failure_text(error: BaseException, tool: Tool[..., Any]) -> str:
    """Return the text for a tool that failed."""
    return f"{_drop_period(describe_error(error))}. {_retry_advice(tool)}"


def unavailable_text(error: BaseException, tool: Tool[..., Any], attempts: int, retry_after_s: float | None) -> str:
    """Return the text for a tool that failed transiently, after the permitted retries."""
    tried = f" after {attempts} attempts" if attempts > 1 else ""
    later = "" if retry_after_s is None else f" It asks to wait {retry_after_s:g} s."
    nothing = "Nothing was done. " if isinstance(error, RefusedError) else ""
    is_safe = nothing or tool.read_only
    advice = _GO_ON if is_safe else f"{_retry_advice(tool)} {_ELSE_GO_ON}"
    return f"{tool.name} is not available right now{tried} ({describe_error(error)}).{later} {nothing}{advice}"


def describe_broken_off(error: BaseException) -> str:
    """Return why a call broke off, for people: the text of the error, or what is known of a group of them."""
    return _drop_period((_error_text(error) if isinstance(error, OutcomeUnknownError) else "") or describe_error(error))


def broken_off_text(reason: str, tool: Tool[..., Any]) -> str:
    """Return the text for a call that broke off, so that its outcome is unknown."""
    return f"outcome unknown: {reason}. {_retry_advice(tool)}"


def circuit_open_text(tool: Tool[..., Any], wait_s: float) -> str:
    """Return the text for a tool that is not called for a while, since it keeps failing."""
    return (
        f"{tool.name} was not called, because its last calls all failed. Try again in {max(1, round(wait_s))} s, or go "
        "on without it."
    )


def absent_text(name: str) -> str:
    """Return the text for a tool that is not available now."""
    return f"{name} is not available now, and nothing was run; go on without it"


def blocked_text(name: str) -> str:
    """Return the text for a call that could not start because of a thread that still runs."""
    return f"blocked: {name} is still running from an earlier call. Nothing was run; try again later."


def not_permitted_text(reason: str) -> str:
    """Return the text for a call that is permanently refused."""
    return f"{reason}. Nothing was run, and trying again will not help: do something else, or tell the user."


def withdrawn_text(name: str) -> str:
    """Return the text for a tool withdrawn from the run."""
    return f"{name} is withdrawn for the rest of this run; go on without it"


def withheld_text(name: str, arguments: str) -> str:
    """Return the text for a call that a run only shows, and does not make."""
    return (
        f"withheld: {name}({arguments}) would have been called now. This run is a trial that changes nothing, so the "
        f"call was not made and has no result. {_WITHOUT_IT}"
    )


def not_recorded_text(name: str, arguments: str) -> str:
    """Return the text for a call that only reads, which a recorded world cannot answer."""
    return (
        f"outside the evidence: {name}({arguments}) was not recorded. This run is a trial in a recorded world, so the "
        f"call was not made and has no result. {_WITHOUT_IT}"
    )


def timeout_text(tool: Tool[..., Any], timeout_s: float) -> str:
    """Return the text for a call that timed out."""
    return f"no result within {timeout_s:g} s, so the call was cut off. {_retry_advice(tool)}"


def sandbox_failure_text(error: str, tool: Tool[..., Any]) -> str:
    """Return the text for a function that failed in its sandbox."""
    return f"{error[:MAX_ERROR_CHARS]}. {_retry_advice(tool)}"


def not_sandboxed_text(reason: str) -> str:
    """Return the text for a call that had no sandbox to run in."""
    return f"{reason[:MAX_ERROR_CHARS]}. Nothing was run; go on without it."


def _retry_advice(tool: Tool[..., Any]) -> str:
    if tool.read_only:  # being idempotent is not enough: a new call has a new key
        return _AGAIN
    return f"Its effect may have happened, in whole or in part{_CHECK}."


def remove_advice(text: str) -> str:
    """Return the text of a call that failed for people: without what it advises the model, on one line."""
    for advice in (_AGAIN, _CHECK, _GO_ON, _ELSE_GO_ON, GO_ON_WITHOUT, NOT_UNASKED, _WITHOUT_IT):
        text = text.replace(advice, "")
    return _drop_period(" ".join(text.split()))


def _drop_period(text: str) -> str:
    return text if text.endswith("..") else text.removesuffix(".")


def too_many_rounds_text(name: str, rounds: int) -> str:
    """Return the text for a tool that asks people too often."""
    return f"{name} has asked for input {rounds} times and still asks for more: it was given up."


def malformed_arguments_text(reason: str) -> str:
    """Return the text for arguments that are not a JSON object."""
    return f"the arguments are not a JSON object ({reason}). Nothing was run: call again with valid JSON."


def unknown_tool_text(name: str, known: Sequence[str]) -> str:
    """Return the text for an unknown tool, with the known names."""
    nearest = difflib.get_close_matches(name[:100], known, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    listed = ", ".join(known[:MAX_NAMES]) or "none"
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return replace_surrogates(f"there is no tool {name[:100]!r}.{hint} Nothing was run. Tools: {listed}{more}.")
