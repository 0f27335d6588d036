"""Records of the journal and back: JSON with a version and a bounded length; no pickle and no fallback.

`encoding` writes the values. A header says under "v" which version of the format wrote it, and so does an event of
another version than its header's, and every inbox item. A newer version is refused, since half-understanding a journal
would lose facts; an older one is brought up to date, one version at a time, by a function in `_MIGRATIONS`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Union, get_args

import attrs
from cattrs import Converter
from cattrs.strategies import configure_tagged_union

from agentfsm.core.encoding import MAX_RECORD_CHARS, UNIONS, WRITERS, is_tuple, write_record, write_tagged
from agentfsm.core.errors import CorruptError, TooNewError
from agentfsm.core.events import EVENTS, Event
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import InboxItem, InputKind, Priority
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import ErrorType, Message, Outcome
from agentfsm.core.pending import PendingKind
from agentfsm.core.verdict import Action

# The oldest format that is still read: all that there ever were.
FIRST_FORMAT: Final = 1

_AnyEvent: Any = Union[EVENTS]  # noqa: UP007  built from the list, so that there is one list
_write_event: Final = partial(write_tagged, kinds=frozenset(EVENTS))

_PRIMITIVES: dict[type, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (float, int)}


def _structure_exact(accepted: tuple[type, ...], value: Any, kind: type) -> Any:
    """Take a value of the right type as it is; cattrs by itself would make "5" a number and 5 a text."""
    if type(value) not in accepted or (kind is float and not math.isfinite(value)):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return float(value) if kind is float else value


def _structure_tuple(converter: Converter, value: Any, kind: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    item = get_args(kind)[0]
    return tuple([converter.structure(each, item) for each in value])


def _build_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=False)
    for kind, accepted in _PRIMITIVES.items():
        converter.register_structure_hook(kind, partial(_structure_exact, accepted))
    for enum in (
        Action,
        ErrorType,
        InputKind,
        Outcome,
        PendingKind,
        Priority,
        StopReason,
    ):  # each by itself, since the hook for str would serve them as well
        converter.register_structure_hook(enum, lambda value, kind: kind(value))
    converter.register_structure_hook_func(is_tuple, partial(_structure_tuple, converter))
    for union in (*UNIONS, _AnyEvent):
        configure_tagged_union(union, converter, tag_name="is")
    return converter


_CONVERTER = _build_converter()


def encode_event(event: Event, header: Header) -> str:
    """Return an event of the run with that header as JSON text.

    Raises:
        MisuseError: when it is larger than a record may be, or holds what JSON cannot.
    """
    return write_record(_write_event, event, known_version=header.format)


def message_to_json(message: Message) -> dict[str, Any]:
    """Return a message of the history with its kind, for programs."""
    return {"is": type(message).__name__, **attrs.asdict(message)}


def decode_event(text: str, header: Header) -> Event:
    """Return the event that the text holds, of the run with that header.

    Raises:
        TooNewError: when a newer agentfsm wrote it.
        CorruptError: when it holds none.
    """
    value, version = _parse_record(text, header.format)
    event: Event = _structure(text, value, version, _AnyEvent)
    return event


def encode_header(header: Header) -> str:
    """Return entry 0 as JSON text, with the version of the format.

    Raises:
        MisuseError: when the metadata holds what JSON cannot, or it is larger than a record may be.
    """
    return write_record(WRITERS[Header], header if header.format == FORMAT else attrs.evolve(header, format=FORMAT))


def decode_header(text: str) -> Header:
    """Return the header that the text holds.

    Raises:
        TooNewError: when a newer agentfsm wrote it.
        CorruptError: when it holds none.
    """
    value, version = _parse_record(text)
    header: Header = _structure(text, value, version, Header)
    return attrs.evolve(header, format=version)


def encode_item(item: InboxItem) -> str:
    """Return an inbox item as JSON text."""
    return write_record(write_tagged, item)


def decode_item(text: str) -> InboxItem:
    """Return the inbox item that the text holds.

    Raises:
        TooNewError: when a newer agentfsm wrote it.
        CorruptError: when it holds none.
    """
    value, version = _parse_record(text, FIRST_FORMAT)
    item: InboxItem = _structure(text, value, version, InboxItem)
    return item


def _parse_record(text: str, version: int | None = None) -> tuple[dict[str, Any], int]:
    """Return a record, and the version of the format that it is in: what it says itself, else the one given."""
    if len(text) > MAX_RECORD_CHARS:
        raise CorruptError(
            f"the record has {len(text):,} characters, more than the {MAX_RECORD_CHARS:,} that one may have"
        )
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
    except Exception as error:  # noqa: BLE001  cattrs lets whatever a broken value provokes through
        raise CorruptError(f"the record does not fit the format ({error!r}): {_excerpt(text)}") from None


def _migrate_1(value: dict[str, Any]) -> dict[str, Any]:
    """Format 1 kept one hash for the whole agent, of which nobody can say what has changed since."""
    return {**value, "fingerprint": {}} if "fingerprint" in value and "is" not in value else value


def _migrate_2(value: dict[str, Any]) -> dict[str, Any]:
    """Format 2 said less, and nothing else: it knew no judges, no further parts of a message, no settings of a run."""
    return value


def _migrate_3(value: dict[str, Any]) -> dict[str, Any]:
    """Format 3 had no nonce in its headers: the keys of its calls begin with the run's id."""
    return value


# By the version that a record is in: what makes the next one of it.
_MIGRATIONS: Final[Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    1: _migrate_1,
    2: _migrate_2,
    3: _migrate_3,
}


def _excerpt(text: str) -> str:
    return repr(text[:120])
