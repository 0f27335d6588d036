"""Plain JSON text with bounded depth, the walk over its values and names, and times rounded for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

import attrs

# Maximum nesting that strict parsers accept. Other limits differ between parsers and versions of Python.
MAX_JSON_DEPTH: Final = 200

# Does not check the depth.
dump_compact: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encode_json(value: object) -> str:
    """Return a value as JSON text.

    Raises:
        TypeError, ValueError, RecursionError: if it is not plain JSON, or nested deeper than `MAX_JSON_DEPTH`.
    """
    text = dump_compact(value)
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _is_too_deep(value):
        raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH}")
    return text


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        held = [each for each in level if isinstance(each, dict | list | tuple)]
        level = [item for each in held for item in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


# White space of JSON, and the byte order mark that some programs put in front.
JSON_BLANKS: Final = " \t\r\n\ufeff"


def normalise_arguments(text: str) -> str:
    """Return the arguments of a call without white space and a byte order mark around them.

    An empty text, which models send for no arguments, and `null`, which local servers send for none, are `{}`.
    """
    text = text.strip(JSON_BLANKS)
    return "{}" if text in ("", "null") else text


def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; for `object_pairs_hook`.

    Raises:
        ValueError: if a key is there twice, so that a value would be lost.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def map_leaves(value: Any, change: Callable[[Any, str | None], Any], name: str = "") -> Any:
    """Return a value with each text, number and other plain value in it as `change` returns it, at any depth.

    Names of members count as texts, since a model writes them as freely as values. The names of an object's fields do
    not: code has written these.

    Args:
        value: A JSON value, or one of Python with sets, tuples and objects, which become lists and dicts.
        change: Returns the new value for a plain one, given the name of the member that holds it: empty outside of
            objects, None for a name itself.
        name: Name of the member that holds the value; empty outside of objects.
    """
    if isinstance(value, Mapping):
        members: dict[Any, Any] = {}
        for key, each in value.items():
            new = written = change(key, None)
            number = 2
            while new in members:  # no member is lost because two names became one
                new, number = f"{written} ({number})", number + 1
            members[new] = map_leaves(each, change, str(key))
        return members
    if isinstance(value, list | tuple | set | frozenset):
        return [map_leaves(each, change, name) for each in value]
    if isinstance(value, Enum):
        return map_leaves(value.value, change, name)
    if not isinstance(value, str | type) and (attrs.has(type(value)) or hasattr(value, "__dict__")):
        fields = attrs.asdict(value, recurse=False) if attrs.has(type(value)) else vars(value)
        own = {key: map_leaves(each, change, key) for key, each in fields.items()}
        return own | map_leaves(getattr(value, "__pydantic_extra__", None) or {}, change)
    return change(value, name)


def list_leaves(value: Any, *, names: bool | None = None) -> list[Any]:
    """Return the texts, names, numbers and other plain values in a value, in order; None is left out.

    Args:
        value: As for `map_leaves`.
        names: Whether to return the names alone, True, or all but the names, False. None: both.
    """
    found: list[Any] = []

    def collect(leaf: Any, name: str | None) -> Any:
        if leaf is not None and names in {None, name is None}:
            found.append(leaf)
        return leaf

    map_leaves(value, collect)
    return found


def map_json_texts(text: str, change: Callable[[str], str]) -> str:
    """Return a JSON document with each text and name in it as `change` returns it; any other text as it is."""
    try:
        value = json.loads(text) if text.lstrip()[:1] in {"{", "["} else None
        changed = map_leaves(value, lambda leaf, _name: change(leaf) if isinstance(leaf, str) else leaf)
        return text if value == changed else json.dumps(changed, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


# Full-precision floats would add about 10 % to the journal.


def round_timestamp(seconds: float) -> float:
    """Round seconds since 1970 to milliseconds."""
    return int(seconds * 1e3 + 0.5) / 1e3


def round_duration(seconds: float) -> float:
    """Round a duration in seconds to microseconds."""
    return int(seconds * 1e6 + 0.5) / 1e6
