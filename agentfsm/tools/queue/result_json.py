"""Values that functions return, as JSON: one conversion for results of tools and steps, findings and answers.

Pydantic's encoder writes plain values, dates, decimals, enumerations, dataclasses and models. It asks `_to_plain` about
each other value. So a value is written whole, or the text says that it is not. No array library is imported: arrays and
their scalars are known by the methods that they share with Python's own types.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, MappingView, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from importlib import import_module
from itertools import chain
from numbers import Number
from typing import Any, Final

import attrs
import jiter

from agentfsm.core.messages import replace_surrogates

# Maximum of items of an array or a range that are written. As JSON they take about 20 MB and 0.1 s of the event loop.
MAX_LISTED_ITEMS: Final = 1_000_000
_KINDS: Final = "plain values, a dataclass, an attrs class or a pydantic model"
_SCALAR_TYPES: Final[frozenset[type]] = frozenset({str, int, float, bool, type(None)})
_PLAIN_CONTAINERS: Final[frozenset[type]] = frozenset({dict, list, tuple})
# A repr that Python writes for a value that has none of its own: "<app.Weather object at 0x7f2a5c0b1d90>".
_DEFAULT_REPR: Final = re.compile(r"<[^<>]* at 0x[0-9a-fA-F]+>")

# Times of arrays that Python's own times cannot express: they would be listed as integers without a unit.
_FINE_TIMES: Final = re.compile(r"(?:datetime|timedelta)64\[\d*[npfa]s\]|timedelta64\[\d*[YM]\]")


def encode_value(value: object, shortened: set[str] | None = None) -> str:
    """Return a value as JSON without ASCII escapes. NaN and infinity are written as Python writes them.

    An attrs class becomes its fields, a mapping an object, a sequence or set an array. A number of another library
    becomes an integer if it has `__index__`, else the float that equals it. An array becomes the list that its `tolist`
    returns, up to `MAX_LISTED_ITEMS`. Of any other value, the text of Python is written with a note that it may be a
    short form.

    Args:
        value: The value.
        shortened: Set to which the names of the types are added whose short form was written; None to refuse them.

    Raises:
        TypeError: if the value has one that cannot be written whole, or has no readable content.
        ValueError: if the value contains itself, if two keys of an object are equal as text and `shortened` is None, or
            if an object of it cannot be written.
    """
    core, fallback = _pydantic_core(), partial(_to_plain, shortened)
    try:
        text = str(core.to_json(value, fallback=fallback).decode())
    except core.PydanticSerializationError as error:
        if "surrogates" not in str(error):  # half of a surrogate pair somewhere in it is replaced below
            raise
        text = json.dumps(core.to_jsonable_python(value, fallback=fallback), ensure_ascii=False)
        text = replace_surrogates(text)
    if "{" in text and not _has_only_text_keys(value) and (key := _find_equal_keys(text)) is not None:
        reason = f"two keys of an object are both {key} as text"
        if shortened is None:
            raise ValueError(f"{reason}: return keys that differ as text")
        wish = f"{reason}, and the tool has to return keys that differ as text"
        return json.dumps(_write_short_form(value, shortened, wish), ensure_ascii=False)
    return text


@cache
def _pydantic_core() -> Any:
    """Return pydantic's JSON encoder, imported with the first schema instead of with this module."""
    return import_module("pydantic_core")


def _to_plain(shortened: set[str] | None, value: Any) -> Any:
    """Return a value that the encoder knows in place of one that it does not know.

    Raises:
        TypeError: if there is none.
    """
    kind: Any = type(value)
    if attrs.has(kind):
        return attrs.asdict(value, recurse=False)
    if isinstance(value, Mapping):
        return dict(value)
    is_array = hasattr(kind, "tolist")
    if not hasattr(kind, "__len__"):
        # A scalar of an array library: its bool has no index, and its dates are none of Python's. As an integer it
        # returns also the nanoseconds of a date, which is no number.
        scalar = value.tolist() if is_array else value
        if type(scalar) not in (kind, int):
            return scalar
        if (number := _read_number(value)) is not None:
            return number
        wish = f"the tool has to return {_KINDS}"
    elif _FINE_TIMES.fullmatch(str(getattr(value, "dtype", ""))):
        wish = "the tool has to return its times as texts"
    elif is_array and hasattr(kind, "to_dict"):  # its labels are not in the list
        wish = "the tool has to return its to_dict() or tolist()"
    elif is_array or isinstance(value, Sequence | AbstractSet | MappingView):
        if (count := _count_items(value)) <= MAX_LISTED_ITEMS:
            items: Any = value
            return items.tolist() if is_array else list(items)
        wish = f"of its {count:,} items, {MAX_LISTED_ITEMS:,} could be kept; the tool has to return fewer"
    elif hasattr(kind, "to_dict"):
        wish = "the tool has to return plain values, such as its to_dict()"
    else:
        wish = f"the tool has to return {_KINDS}"
    if shortened is None:
        raise TypeError(f"{kind.__name__} is none of the types that it can have: return {_KINDS}")
    return _write_short_form(value, shortened, wish)


def _read_number(value: Any) -> int | float | str | None:
    """Return a number of another type as the equal number of Python, else as its digits; None for other values."""
    kind = type(value)
    try:
        if hasattr(kind, "__index__"):
            return operator.index(value)
    except TypeError:  # a float of an array library
        pass
    try:
        number = float(value) if hasattr(kind, "__float__") else None
        if number is not None and (number == value or number != number):  # noqa: PLR0124  NaN
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    return str(value) if isinstance(value, Number) else None


def _count_items(value: Any) -> int:
    """Return the number of items of an array or a sequence, or a larger one, without making them."""
    counts = (getattr(value, name, None) for name in ("size", "nbytes"))  # its length is that of its first axis
    return next((count for count in counts if isinstance(count, int)), None) or len(value)


def _write_short_form(value: object, shortened: set[str], wish: str) -> str:
    kind, text = type(value).__name__, repr(value)
    if _DEFAULT_REPR.fullmatch(text):
        text = str(value)
    if _DEFAULT_REPR.fullmatch(text):
        raise TypeError(f"the type {kind} has no readable content; the tool has to return {_KINDS}")
    shortened.add(kind)
    return f"(Python's short form of a value of type {kind}, which may leave some of it out: {wish}) {text}"


def _has_only_text_keys(value: object) -> bool:
    """Return whether a value has no types but those of JSON, with texts as keys, so that no keys can become equal."""
    level = [value]
    while level:
        if not set(map(type, level)) <= _PLAIN_CONTAINERS:
            return False
        objects = [each for each in level if type(each) is dict]
        arrays: list[Any] = [each for each in level if type(each) is not dict]
        if not set(map(type, chain.from_iterable(objects))) <= {str}:
            return False
        items = chain(chain.from_iterable(each.values() for each in objects), chain.from_iterable(arrays))
        level = [each for each in items if type(each) not in _SCALAR_TYPES]
    return True


def _find_equal_keys(text: str) -> str | None:
    """Return a key that occurs twice in an object, in quotes; None if there is none."""
    try:
        jiter.from_json(text.encode(), catch_duplicate_keys=True)
    except ValueError as error:
        found = re.search(r'duplicate key (".*") at line', str(error), re.IGNORECASE | re.DOTALL)
        return None if found is None else found[1]
    return None
