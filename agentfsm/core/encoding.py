"""Encode values of a closed set of types as JSON text. Fields that have their default value are left out.

A value of a union type has the name of its class under "is".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from json.encoder import encode_basestring
from typing import Any, Final, get_args, get_origin

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.header import FORMAT
from agentfsm.core.history import Segment
from agentfsm.core.inbox import InboxItem
from agentfsm.core.json_text import dump_compact, encode_json
from agentfsm.core.messages import Media, Message, Part, replace_surrogates

# Maximum of characters of a record: no model accepts more, and a larger record would slow every later reader.
MAX_RECORD_CHARS = 64 * 1024 * 1024

# The union types of fields, and their members.
UNIONS: Final[tuple[Any, ...]] = (Part, Media, Message, InboxItem, Segment)
TAGGED: Final = frozenset(kind for union in UNIONS for kind in get_args(union))


def is_tuple(kind: Any) -> bool:
    """Return whether a type is a tuple such as `tuple[Part, ...]`."""
    return get_origin(kind) is tuple


# Every event of every run is encoded, so each class gets a generated function that writes its fields one by one. With
# cattrs and json.dumps a turn on SQLite (`benchmarks journal:100`) takes 8 % more time (and 16 % more instructions,
# under callgrind).


class _JSONWriters(dict[type, Callable[[Any], str]]):
    """Functions that write a value as a JSON object, by class; generated when first needed."""

    def __missing__(self, kind: type) -> Callable[[Any], str]:
        scope: dict[str, Any] = {"text": encode_basestring, "number": _write_number, "integer": int.__repr__}
        scope |= {"other": encode_json, "tagged": write_tagged, "of": self}
        lines = [_field_statement(field, scope) for field in attrs.fields(attrs.resolve_types(kind))]
        lines.sort(key=lambda line: line.startswith("if"))  # required fields come first
        body = "\n    ".join(lines)
        source = f"def write(value):\n    out = ''\n    {body}\n    return '{{' + out[:-1] + '}}'"
        exec(source, scope)  # noqa: S102  from the field names of our own classes
        self[kind] = scope["write"]
        return self[kind]


def _field_statement(field: attrs.Attribute[Any], scope: dict[str, Any]) -> str:
    """Return the statement that writes one field, unless it has its default value."""
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
    if kind in UNIONS:
        return f"tagged({value})"
    if is_tuple(kind):
        return f"'[' + ','.join([{_value_expression(get_args(kind)[0], 'item', scope)} for item in {value}]) + ']'"
    if type(None) in get_args(kind):
        return f"('null' if {value} is None else {_value_expression(get_args(kind)[0], value, scope)})"
    if attrs.has(kind):
        scope[kind.__name__] = kind
        return f"of[{kind.__name__}]({value})"
    is_enum = isinstance(kind, type) and issubclass(kind, StrEnum)
    return f"{'text' if is_enum else _SCALAR_WRITERS.get(kind, 'other')}({value})"


# Names of the writers of simple types; all others are written by json.
_SCALAR_WRITERS: Final[Mapping[Any, str]] = {str: "text", float: "number", int: "integer"}


def _write_number(value: float) -> str:
    return repr(value) if type(value) is float and math.isfinite(value) else dump_compact(value)


def write_tagged(value: object, kinds: AbstractSet[type] = TAGGED) -> str:
    """Return a value of a union type as JSON text, with its class under "is"."""
    kind = type(value)
    if kind not in kinds:
        raise TypeError(f"{kind.__name__} is not a type that journals contain")
    text = WRITERS[kind](value)
    return f'{text[:-1]}{"," if len(text) > 2 else ""}"is":"{kind.__name__}"}}'


WRITERS: Final = _JSONWriters()


def write_record(write: Callable[[Any], str], value: object, known_version: int | None = None) -> str:
    """Return a record as JSON text. It has the format version under "v", unless `known_version` is the current one."""
    try:
        text = write(value)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "metadata must be plain JSON, and so must extra_body of settings"
        raise MisuseError(f"the record cannot be written as JSON ({error}): {hint}") from None
    check_size(text)
    return replace_surrogates(text if known_version == FORMAT else f'{{"v":{FORMAT},{text[1:]}')


def check_size(text: str) -> None:
    """Raise MisuseError if a record is too large."""
    if len(text) > MAX_RECORD_CHARS:
        raise MisuseError(f"the record has {len(text):,} characters; the maximum is {MAX_RECORD_CHARS:,}")
