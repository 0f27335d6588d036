"""Encode and decode journal records: JSON with a format version and a bounded length; no pickle and no fallback.

`encoding` writes the values. The key "v" has the format version: in every header and inbox item, and in an event whose
version is not that of its header. Records of a newer version are refused, because skipping unknown fields would lose
facts. Records of an older version are migrated one version at a time by the functions in `_MIGRATIONS`.
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from json.encoder import encode_basestring
from secrets import token_hex
from typing import Any, Final, Union, get_args

import attrs
from cattrs import Converter
from cattrs.strategies import configure_tagged_union

from agentfsm.core.encoding import MAX_RECORD_CHARS, UNIONS, WRITERS, check_size, is_tuple, write_record, write_tagged
from agentfsm.core.errors import CorruptError, TooNewError
from agentfsm.core.events import EVENTS, Action, Event, GuardVerdict, PlanKind, ToolFinished
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import InboxItem, InputKind, Priority
from agentfsm.core.labels import Label, ToolKind
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import CHUNK_CHARS, ErrorType, Message, Outcome, iter_chunks, replace_surrogates
from agentfsm.core.pending import PendingKind
from agentfsm.core.usage import Purpose
from agentfsm.core.value import Value

# The oldest format that can be read: the first one.
FIRST_FORMAT: Final = 1

_AnyEvent: Any = Union[EVENTS]  # noqa: UP007  built from the tuple, the only list of events
_write_event: Final = partial(write_tagged, kinds=frozenset(EVENTS))

_PRIMITIVES: dict[type, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (float, int)}


def _structure_exact(accepted: tuple[type, ...], value: Any, kind: type) -> Any:
    """Return a value of the right type unchanged. The default of cattrs would convert "5" to 5 and 5 to "5"."""
    if type(value) not in accepted or (kind is float and not math.isfinite(value)):
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return float(value) if kind is float else value


def _structure_tuple(converter: Converter, value: Any, kind: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r}")
    item = get_args(kind)[0]
    return tuple([converter.structure(each, item) for each in value])


def _build_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=False)
    for kind, accepted in _PRIMITIVES.items():
        converter.register_structure_hook(kind, partial(_structure_exact, accepted))
    for enum in (
        Action,
        ErrorType,
        GuardVerdict,
        InputKind,
        Label,
        Outcome,
        PendingKind,
        PlanKind,
        Priority,
        Purpose,
        StopReason,
        ToolKind,
    ):  # one hook each, because the hook for str would match them too
        converter.register_structure_hook(enum, lambda value, kind: kind(value))
    converter.register_structure_hook_func(is_tuple, partial(_structure_tuple, converter))
    for union in (*UNIONS, _AnyEvent):
        configure_tagged_union(union, converter, tag_name="is")
    return converter


_CONVERTER = _build_converter()


def encode_event(event: Event, header: Header) -> str:
    """Return an event of the run with that header as JSON text.

    Raises:
        MisuseError: if it is too large for a record, or contains a value that JSON cannot express.
    """
    return write_record(_write_event, event, known_version=header.format)


@attrs.frozen(kw_only=True)
class LongRecord(Value):
    """The record of a long result, which is encoded by the thread that writes it: no event loop waits for that."""

    head: str
    """The record up to the text of the result."""

    text: str
    """The text of the result, not yet as JSON."""

    tail: str
    """The record after the text."""

    def __len__(self) -> int:
        return len(self.head) + len(self.text) + len(self.tail)

    def encode(self) -> str:
        """Return the record as JSON text, as `encode_event` does. Other threads run in between.

        Raises:
            MisuseError: if it is too large for a record.
        """
        pieces = [encode_basestring(replace_surrogates(chunk))[1:-1] for chunk in iter_chunks(self.text)]
        record = "".join([self.head, '"', *pieces, '"', self.tail])
        check_size(record)
        return record


def begin_encoding(event: Event, header: Header) -> str | LongRecord:
    """Return an event as JSON text; that of a long result as far as it takes no more than microseconds.

    Raises:
        MisuseError: as `encode_event`; for a long result that is too large, `LongRecord.encode` raises it.
    """
    if type(event) is not ToolFinished or len(event.result.content) <= CHUNK_CHARS:
        return encode_event(event, header)
    short = attrs.evolve(event, result=attrs.evolve(event.result, content=_CONTENT_MARK))
    head, tail = encode_event(short, header).split(f'"{_CONTENT_MARK}"')
    return LongRecord(head=head, text=event.result.content, tail=tail)


# Stands for the text of a result. It is random, so that no other text of a record contains it.
_CONTENT_MARK: Final = token_hex(16)


def message_to_json(message: Message) -> dict[str, Any]:
    """Return a message of the history as a dict; the key "is" has its class."""
    return {"is": type(message).__name__, **attrs.asdict(message)}


def decode_event(text: str, header: Header) -> Event:
    """Decode an event of the run with that header.

    Raises:
        TooNewError: if a newer agentfsm wrote it.
        CorruptError: if the text is not an event.
    """
    value, version = _parse_record(text, header.format)
    event: Event = _structure(text, value, version, _AnyEvent)
    return event


def encode_header(header: Header) -> str:
    """Return entry 0 as JSON text, with the format version.

    Raises:
        MisuseError: if it is too large for a record, or the metadata contain a value that JSON cannot express.
    """
    return write_record(WRITERS[Header], header if header.format == FORMAT else attrs.evolve(header, format=FORMAT))


def decode_header(text: str) -> Header:
    """Decode a header.

    Raises:
        TooNewError: if a newer agentfsm wrote it.
        CorruptError: if the text is not a header.
    """
    value, version = _parse_record(text)
    header: Header = _structure(text, value, version, Header)
    return attrs.evolve(header, format=version)


def encode_item(item: InboxItem) -> str:
    """Return an inbox item as JSON text."""
    return write_record(write_tagged, item)


def decode_item(text: str) -> InboxItem:
    """Decode an inbox item.

    Raises:
        TooNewError: if a newer agentfsm wrote it.
        CorruptError: if the text is not an inbox item.
    """
    value, version = _parse_record(text, FIRST_FORMAT)
    item: InboxItem = _structure(text, value, version, InboxItem)
    return item


def _parse_record(text: str, version: int | None = None) -> tuple[dict[str, Any], int]:
    """Return a record and its format version: the one under "v", or `version` if there is none."""
    if len(text) > MAX_RECORD_CHARS:
        raise CorruptError(f"the record has {len(text):,} characters; the maximum is {MAX_RECORD_CHARS:,}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"the record is not JSON ({error}): {_excerpt(text)}") from None
    if not isinstance(value, dict):
        raise CorruptError(f"the record is not an object: {_excerpt(text)}")
    version = value.pop("v", version)
    if type(version) is not int or version < FIRST_FORMAT:
        raise CorruptError(f"the record has no format version: {_excerpt(text)}")
    if version > FORMAT:
        raise TooNewError(
            f"the record was written in format {version}, and this agentfsm reads up to {FORMAT}: upgrade agentfsm",
        )
    return value, version


def _structure(text: str, value: dict[str, Any], version: int, kind: Any) -> Any:
    try:
        for number in range(version, FORMAT):
            value = _MIGRATIONS[number](value)
        return _CONVERTER.structure(value, kind)
    except Exception as error:  # noqa: BLE001  cattrs does not wrap all errors of broken values
        raise CorruptError(f"the record does not fit the format ({error!r}): {_excerpt(text)}") from None


def _migrate_1(value: dict[str, Any]) -> dict[str, Any]:
    """Drop the fingerprint of format 1: one hash for the whole agent, which does not show what has changed."""
    return {**value, "fingerprint": {}} if "fingerprint" in value and "is" not in value else value


def _migrate_2(value: dict[str, Any]) -> dict[str, Any]:
    """Return the record unchanged: format 3 only added judges, message parts other than text, and settings of a run."""
    return value


def _migrate_3(value: dict[str, Any]) -> dict[str, Any]:
    """Return the record unchanged: format 3 headers have no nonce, and their call keys begin with the run's id."""
    return value


def _migrate_4(value: dict[str, Any]) -> dict[str, Any]:
    """Say which plans are compensations: in format 4, those that no model made and that follow a failure."""
    is_compensation = value.get("is") == "Planned" and bool(value.get("reason")) and not value.get("purpose")
    return {**value, "kind": PlanKind.COMPENSATION.value} if is_compensation else value


# Functions that convert a record to the next version, by its version.
_MIGRATIONS: Final[Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    1: _migrate_1,
    2: _migrate_2,
    3: _migrate_3,
    4: _migrate_4,
}


def _excerpt(text: str) -> str:
    return repr(text[:120])


CHAIN_HASH: Final = "sha256"


def chain_journal(header: Header, events: Sequence[Event], key: bytes) -> Iterator[str]:
    """Yield the hash of each version of a journal in hexadecimal: of version 0, the header, first.

    A hash is the HMAC-SHA-256 of the hash before and the record. It covers the content of the records, not the way in
    which a store writes them.

    Args:
        header: Header of the run.
        events: Events of its journal, from the first on.
        key: Key of the HMAC; empty for hashes that everybody can compute.
    """
    current = attrs.evolve(header, format=FORMAT)
    digest = hmac.digest(key, encode_header(current).encode(), CHAIN_HASH)
    yield digest.hex()
    for event in events:
        digest = hmac.digest(key, digest + encode_event(event, current).encode(), CHAIN_HASH)
        yield digest.hex()
