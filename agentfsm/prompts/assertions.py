"""Checks of the form of a reply. Each is a pure function of the reply's text.

Source: document F, 6.3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import COUNT, NAME, ValueRule, require_type, shorten_repr
from agentfsm.core.value import Value
from agentfsm.tokens.estimate import EstimatedCounter

# Returns the tokens of a text.
CountTokens: TypeAlias = Callable[[str], int]

_FIELD_VALUES: Final = ValueRule(
    fits=lambda value: (
        isinstance(value, Mapping)
        and len(value) == 1
        and all(isinstance(each, list | tuple) and each for each in value.values())
    ),
    wanted='one field with the values that it may have, for example {"tool_name": ["search", "none"]}',
)

_SCHEMA: Final = require_type(Mapping, wanted="a JSON Schema, as a dict")


@attrs.frozen(kw_only=True)
class ReplyCheck(Value):
    """A check of a reply, made by one of the functions of this module, such as `json_valid` and `contains`."""

    name: str
    """Description of the check, for reports: "field_in tool_name: calculator"."""

    find: Callable[[str, CountTokens], str | None] = attrs.field(repr=False, eq=False)
    """Returns the reason why a reply fails, or None if it passes."""

    def find_failure(self, reply: str, count: CountTokens | None = None) -> str | None:
        """Return the reason why a reply fails; None if it passes.

        Args:
            reply: Text of the reply.
            count: Function that counts tokens; None: tokens are estimated.
        """
        return self.find(reply, count or EstimatedCounter().count)


def json_valid() -> ReplyCheck:
    """Return the check that a reply is one JSON value, with nothing around it, such as a fence of Markdown."""
    return ReplyCheck(name="json_valid", find=lambda reply, _count: _parse(reply)[1])


def has_field(field: str) -> ReplyCheck:
    """Return the check that a reply is a JSON object with this field."""
    NAME.check("has_field", "field", field)

    def find(reply: str, _count: CountTokens) -> str | None:
        found, why = _parse_object(reply)
        return why or (None if field in found else f"field {field!r} is missing")

    return ReplyCheck(name=f"has_field {field}", find=find)


def no_field(field: str) -> ReplyCheck:
    """Return the check that a reply is a JSON object without this field."""
    NAME.check("no_field", "field", field)

    def find(reply: str, _count: CountTokens) -> str | None:
        found, why = _parse_object(reply)
        return why or (f"field {field!r} is there" if field in found else None)

    return ReplyCheck(name=f"no_field {field}", find=find)


def field_in(values: Mapping[str, list[Any] | tuple[Any, ...]]) -> ReplyCheck:
    """Return the check that a reply is a JSON object in which a field has one of these values.

    Args:
        values: The field with its values: `{"tool_name": ["search", "none"]}`.
    """
    _FIELD_VALUES.check("field_in", "values", values)
    [(field, allowed)] = values.items()

    def find(reply: str, _count: CountTokens) -> str | None:
        found, why = _parse_object(reply)
        if why or field not in found:
            return why or f"field {field!r} is missing"
        value = found[field]  # JSON has no number that is a bool
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
            return None
        return f"field {field!r} is {shorten_repr(value)}"

    return ReplyCheck(name=f"field_in {field}: {', '.join(map(str, allowed))}", find=find)


def max_tokens(limit: int) -> ReplyCheck:
    """Return the check that a reply has at most this number of tokens."""
    COUNT.check("max_tokens", "limit", limit)

    def find(reply: str, count: CountTokens) -> str | None:
        tokens = count(reply)
        return None if tokens <= limit else f"{tokens:,} tokens"

    return ReplyCheck(name=f"max_tokens {limit}", find=find)


def contains(text: str) -> ReplyCheck:
    """Return the check that a reply contains this text."""
    NAME.check("contains", "text", text)
    return ReplyCheck(
        name=f"contains {text!r}", find=lambda reply, _count: None if text in reply else f"{text!r} is missing"
    )


def not_contains(text: str) -> ReplyCheck:
    """Return the check that a reply does not contain this text."""
    NAME.check("not_contains", "text", text)
    return ReplyCheck(
        name=f"not_contains {text!r}", find=lambda reply, _count: f"{text!r} is there" if text in reply else None
    )


def matches(pattern: str) -> ReplyCheck:
    """Return the check that a part of a reply matches this regular expression."""
    compiled = _compile("matches", pattern)
    return ReplyCheck(
        name=f"matches {pattern}", find=lambda reply, _count: None if compiled.search(reply) else "nothing matches"
    )


def not_matches(pattern: str) -> ReplyCheck:
    """Return the check that no part of a reply matches this regular expression."""
    compiled = _compile("not_matches", pattern)

    def find(reply: str, _count: CountTokens) -> str | None:
        found = compiled.search(reply)
        return None if found is None else f"{shorten_repr(found[0])} matches"

    return ReplyCheck(name=f"not_matches {pattern}", find=find)


def _compile(check: str, pattern: str) -> re.Pattern[str]:
    NAME.check(check, "pattern", pattern)
    try:
        return re.compile(pattern)
    except re.error as error:
        raise MisuseError(f"{check}({pattern!r}): the pattern is not a regular expression: {error}") from None


def fits_schema(schema: Mapping[str, Any]) -> ReplyCheck:
    """Return the check that a reply is one JSON value that fits a JSON Schema."""
    from agentfsm.tools.schema.validator import compile_schema  # noqa: PLC0415  few checks need the validator

    _SCHEMA.check("fits_schema", "schema", schema)
    fits = compile_schema(dict(schema), "fits_schema")

    def find(reply: str, _count: CountTokens) -> str | None:
        value, why = _parse(reply)
        return why or (None if fits(value) else f"it does not fit the schema: {shorten_repr(value)}")

    return ReplyCheck(name="fits_schema", find=find)


def function(given: Callable[[str], object] | str) -> ReplyCheck:
    """Return the check of a function of the reply, which returns True, or False or the reason why it fails.

    Args:
        given: The function, or its name as "module:function".
    """
    check: Callable[[str], object] = load_function(given, "function")
    name = getattr(check, "__name__", type(check).__name__)

    def find(reply: str, _count: CountTokens) -> str | None:
        try:
            found = check(reply)
        except Exception as error:
            raise MisuseError(f"the check {name} raised {type(error).__name__}: {error}") from error
        if isinstance(found, bool | str):
            return None if found is True else found or "it does not hold"
        raise MisuseError(f"the check {name} returned {type(found).__name__}: return True, False or a reason")

    return ReplyCheck(name=name, find=find)


def load_function(given: Any, place: str) -> Any:
    """Return what is given, or for a text the function that it names as module:function.

    Raises:
        MisuseError: if there is not such a function; `place` says where it was given.
    """
    if not isinstance(given, str):
        return given
    module, colon, name = given.partition(":")
    if not colon:
        raise MisuseError(f"{place}={given!r}: name a function as module:function")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MisuseError(f"{place}={given!r} cannot be loaded: {error}") from error


_MAKERS: Final[Mapping[str, Callable[..., ReplyCheck]]] = {
    "has_field": has_field,
    "field_in": field_in,
    "no_field": no_field,
    "max_tokens": max_tokens,
    "contains": contains,
    "not_contains": not_contains,
    "matches": matches,
    "not_matches": not_matches,
    "fits_schema": fits_schema,
    "function": function,
}


def as_checks(given: Iterable[object], *, also: Sequence[str] = ()) -> tuple[ReplyCheck, ...]:
    """Convert checks: made by the functions of this module, functions of the reply, or as they are in front matter.

    Raises:
        MisuseError: if one is none of them. It names those of `also` too, which the caller knows.
    """
    return tuple([_as_check(each, also) for each in given])


def _as_check(data: object, also: Sequence[str]) -> ReplyCheck:
    """Convert `"json_valid"`, or a table with one entry: `{has_field = "tool_name"}`."""
    match data:
        case ReplyCheck():
            return data
        case "json_valid":
            return json_valid()
        case dict() if len(data) == 1 and (name := next(iter(data))) in _MAKERS:
            return _MAKERS[name](data[name])
    if callable(data) and not isinstance(data, type):
        return function(data)
    wanted = f"'json_valid', or a table with one of {', '.join([*_MAKERS, *also])}"
    raise MisuseError(f"the check {shorten_repr(data)}: give {wanted}, for example {{'has_field': 'tool_name'}}")


def _parse(reply: str) -> tuple[Any, str | None]:
    """Return the JSON value of a reply, or the reason why it has none. NaN and Infinity are not JSON."""
    try:
        return json.loads(reply, parse_constant=_refuse_constant), None
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a value of JSON")


def _parse_object(reply: str) -> tuple[dict[str, Any], str | None]:
    value, why = _parse(reply)
    if why is None and not isinstance(value, dict):
        why = f"not a JSON object but {shorten_repr(value)}"
    return (value, None) if why is None else ({}, why)
