"""Values to JSON text: a closed set of types; fields that have their default are left out.

A value of a union carries its type's name under "is".
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
from agentfsm.core.inbox import InboxItem
from agentfsm.core.json_text import dump_compact, encode_json
from agentfsm.core.messages import Media, Message, Part, replace_surrogates
from agentfsm.core.segments import Segment

# The longest record written or read: no model takes more, and a larger one would hurt every later reader.
MAX_RECORD_CHARS = 64 * 1024 * 1024

# The unions among the types of fields, and their members.
UNIONS: Final[tuple[Any, ...]] = (Part, Media, Message, InboxItem, Segment)
TAGGED: Final = frozenset(kind for union in UNIONS for kind in get_args(union))


def is_tuple(kind: Any) -> bool:
    """Whether a type is a tuple, as `tuple[Part, ...]`."""
    return get_origin(kind) is tuple


# This is done for each event of each run, so the function for a class names its fields one after the other, as one
# would by hand. Through cattrs' dicts and json.dumps a turn on SQLite (`benchmarks journal:100`) takes 16 % more
# instructions under callgrind, and 8 % more time.


class _JSONWriters(dict[type, Callable[[Any], str]]):
    """By class: what writes a value of it as a JSON object; made when it is first needed."""

    def __missing__(self, kind: type) -> Callable[[Any], str]:
        scope: dict[str, Any] = {"text": encode_basestring, "number": _write_number, "integer": int.__repr__}
        scope |= {"other": encode_json, "tagged": write_tagged, "of": self}
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


# What writes them; all else is left to json.
_SCALAR_WRITERS: Final[Mapping[Any, str]] = {str: "text", float: "number", int: "integer"}


def _write_number(value: float) -> str:
    return repr(value) if type(value) is float and math.isfinite(value) else dump_compact(value)


def write_tagged(value: object, kinds: AbstractSet[type] = TAGGED) -> str:
    """Return a value of a union, which says what it is."""
    kind = type(value)
    if kind not in kinds:
        raise TypeError(f"{kind.__name__} is no type of a journal")
    text = WRITERS[kind](value)
    return f'{text[:-1]}{"," if len(text) > 2 else ""}"is":"{kind.__name__}"}}'  # noqa: PLR2004  more than {}


WRITERS: Final = _JSONWriters()


def write_record(write: Callable[[Any], str], value: object, known_version: int | None = None) -> str:
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
