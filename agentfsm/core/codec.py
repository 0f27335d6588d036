"""Values to JSON text and back: a closed set of types, numbered, with caps; no pickle and no fallback.

A value of a union carries its type's name under "is"; fields that have their default are left out. A header says under
"v" which version of the format wrote it, and so does an event of another version than its header's, and every inbox
item. A newer version is refused, since half-understanding a journal would lose facts; an older one is brought up to
date, one version at a time, by a function in `_MIGRATIONS`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from json.encoder import encode_basestring
from typing import Any, Final, Union, get_args, get_origin

import attrs
from cattrs import Converter
from cattrs.strategies import configure_tagged_union

from agentfsm.core import events
from agentfsm.core.effects import PendingKind
from agentfsm.core.errors import CorruptError, MisuseError, TooNewError
from agentfsm.core.inbox import InboxItem, InputKind, Priority
from agentfsm.core.json_text import dump_compact, encode_json
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import ErrorType, Media, Message, Outcome, Part, replace_surrogates
from agentfsm.core.run import FORMAT, Header
from agentfsm.core.segments import Segment
from agentfsm.core.verdict import Action

# The oldest format that is still read: all that there ever were.
FIRST_FORMAT: Final = 1
# The longest record written or read: no model takes more, and a larger one would hurt every later reader.
MAX_RECORD_CHARS = 64 * 1024 * 1024

_AnyEvent: Any = Union[events.EVENTS]  # noqa: UP007  built from the list, so that there is one list
_UNIONS: Final[tuple[Any, ...]] = (Part, Media, Message, InboxItem, Segment, _AnyEvent)
_TAGGED: Final = frozenset(kind for union in _UNIONS for kind in get_args(union))

# Values to text. It is done for each event of each run, so the function for a class names its fields one after the
# other, as one would by hand: a turn's five events take 8 us. Through dicts and json.dumps they take 18.


class _JSONWriters(dict[type, Callable[[Any], str]]):
    """By class: what writes a value of it as a JSON object; made when it is first needed."""

    def __missing__(self, kind: type) -> Callable[[Any], str]:
        scope: dict[str, Any] = {"text": encode_basestring, "number": _write_number, "integer": int.__repr__}
        scope |= {"other": encode_json, "tagged": _write_tagged, "of": self}
        lines = [_field_statement(field, scope) for field in attrs.fields(attrs.resolve_types(kind))]
        lines.sort(key=lambda line: line.startswith("if"))  # what is always there comes first
        body = "\n    ".join(lines)
        source = f"def write(value):\n    out = ''\n    {body}\n    return '{{' + out[:-1] + '}}'"
        exec(source, scope)  # noqa: S102  of the fields of our own classes
        self[kind] = scope["write"]
        return self[kind]


def _field_statement(field: attrs.Attribute[Any], scope: dict[str, Any]) -> str:
    """Return the statement that writes one field, unless it has its default."""
    name: str = field.name
    default: Any = field.default
    line = f"out += '\"{name}\":' + {_value_expression(field.type, f'value.{name}', scope)} + ','"
    if default is attrs.NOTHING:
        return line
    scope[f"default_{name}"] = default
    made = isinstance(default, attrs.Factory)  # type: ignore[arg-type]  # a class, though declared as a function
    arguments = "" if not made else ".factory(value)" if default.takes_self else ".factory()"
    return f"if value.{name} != default_{name}{arguments}: {line}"


def _value_expression(kind: Any, value: str, scope: dict[str, Any]) -> str:
    """Return the expression that writes a value of that type."""
    if kind in _UNIONS:
        return f"tagged({value})"
    if _is_tuple(kind):
        return f"'[' + ','.join([{_value_expression(get_args(kind)[0], 'item', scope)} for item in {value}]) + ']'"
    if type(None) in get_args(kind):
        return f"('null' if {value} is None else {_value_expression(get_args(kind)[0], value, scope)})"
    if attrs.has(kind):
        scope[kind.__name__] = kind
        return f"of[{kind.__name__}]({value})"
    is_enum = isinstance(kind, type) and issubclass(kind, StrEnum)
    return f"{'text' if is_enum else _SCALAR_WRITERS.get(kind, 'other')}({value})"


# What writes them; all else is left to json.
_SCALAR_WRITERS: Final[Mapping[Any, str]] = {str: "text", float: "number", int: "integer"}


def _write_number(value: float) -> str:
    return repr(value) if type(value) is float and math.isfinite(value) else dump_compact(value)


def _write_tagged(value: object) -> str:
    """Return a value of a union, which says what it is."""
    kind = type(value)
    if kind not in _TAGGED:
        raise TypeError(f"{kind.__name__} is no type of a journal")
    text = _WRITERS[kind](value)
    return f'{text[:-1]}{"," if len(text) > 2 else ""}"is":"{kind.__name__}"}}'  # noqa: PLR2004  more than {}


_WRITERS: Final = _JSONWriters()


# Text to values.

_PRIMITIVES: dict[type, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (float, int)}


def _structure_exact(accepted: tuple[type, ...], value: Any, kind: type) -> Any:
    """Take a value of the right type as it is; cattrs by itself would make "5" a number and 5 a text."""
    if type(value) not in accepted or (kind is float and not math.isfinite(value)):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return float(value) if kind is float else value


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


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
    converter.register_structure_hook_func(_is_tuple, partial(_structure_tuple, converter))
    for union in _UNIONS:
        configure_tagged_union(union, converter, tag_name="is")
    return converter


_CONVERTER = _build_converter()


def encode_event(event: events.Event, header: Header) -> str:
    """Return an event of the run with that header as JSON text.

    Raises:
        MisuseError: when it is larger than a record may be, or holds what JSON cannot.
    """
    return _write_record(_write_tagged, event, known_version=header.format)


def event_to_json(event: events.Event) -> dict[str, Any]:
    """Return an event as the JSON object that a journal holds."""
    fields: dict[str, Any] = json.loads(_write_record(_write_tagged, event, known_version=FORMAT))
    return fields


def message_to_json(message: Message) -> dict[str, Any]:
    """Return a message of the history with its kind, for programs."""
    return {"is": type(message).__name__, **attrs.asdict(message)}


def decode_event(text: str, header: Header) -> events.Event:
    """Return the event that the text holds, of the run with that header.

    Raises:
        TooNewError: when a newer agentfsm wrote it.
        CorruptError: when it holds none.
    """
    value, version = _parse_record(text, header.format)
    event: events.Event = _structure(text, value, version, _AnyEvent)
    return event


def encode_header(header: Header) -> str:
    """Return entry 0 as JSON text, with the version of the format.

    Raises:
        MisuseError: when the metadata holds what JSON cannot, or it is larger than a record may be.
    """
    return _write_record(_WRITERS[Header], header if header.format == FORMAT else attrs.evolve(header, format=FORMAT))


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
    return _write_record(_write_tagged, item)


def decode_item(text: str) -> InboxItem:
    """Return the inbox item that the text holds.

    Raises:
        TooNewError: when a newer agentfsm wrote it.
        CorruptError: when it holds none.
    """
    value, version = _parse_record(text, FIRST_FORMAT)
    item: InboxItem = _structure(text, value, version, InboxItem)
    return item


def _write_record(write: Callable[[Any], str], value: object, known_version: int | None = None) -> str:
    """Return a record; it says which version of the format wrote it, unless that is known without."""
    try:
        text = write(value)
    except (TypeError, ValueError, RecursionError) as error:
        what = "metadata must be plain JSON, and so must extra_body of settings"
        raise MisuseError(f"the record cannot be written as JSON ({error}): {what}") from None
    if len(text) > MAX_RECORD_CHARS:
        raise MisuseError(
            f"the record has {len(text):,} characters, more than the {MAX_RECORD_CHARS:,} that one may have"
        )
    return replace_surrogates(text if known_version == FORMAT else f'{{"v":{FORMAT},{text[1:]}')


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
