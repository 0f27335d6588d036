"""Adapt JSON Schemas to the keywords that Anthropic enforces, for structured answers and strict tools.

Anthropic refuses any other keyword with status 400. Such keywords are moved to the description, which the model reads,
and the result is validated against the whole schema afterwards. A recursive schema is refused ("Circular reference
detected in schema definitions"), and has no equivalent. Tools that are not strict accept any schema.

Source: `transform_schema` of the anthropic package 2.12, and
platform.claude.com/docs/en/build-with-claude/structured-outputs, "JSON Schema limitations".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from agentfsm.ports.model import to_mutable_json

if TYPE_CHECKING:
    from agentfsm.core.messages import JSON

_SUPPORTED_KEYWORDS: Final = frozenset({"type", "$ref", "required", "title", "description"})
# Marks a keyword that the provider does not support.
_UNSUPPORTED: Final = object()
_SUPPORTED_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"}
)


def unsupported_schema(schema: Mapping[str, JSON]) -> str | None:
    """Return the reason why the provider cannot enforce this schema; None if it can."""
    targets = {name: set(_iter_references(_resolve_reference(schema, name))) for name in _iter_references(schema)}
    while ends := [name for name, others in targets.items() if not others & targets.keys()]:
        for name in ends:
            del targets[name]
    # The remaining references lead only to each other.
    return "Anthropic does not support recursive schemas" if targets else None


def _iter_references(value: object) -> Iterator[str]:
    """Yield all references in a part of a schema."""
    if isinstance(value, Mapping):
        if isinstance(name := value.get("$ref"), str):
            yield name
        for each in value.values():
            yield from _iter_references(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _iter_references(each)


def _resolve_reference(schema: Mapping[str, JSON], name: str) -> object:
    """Return the target of a reference within the schema; None if there is none.

    Source: RFC 6901, without percent-encoding.
    """
    target: Any = schema
    for step in name.removeprefix("#").split("/")[1:]:
        word = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(word)
        elif isinstance(target, list | tuple) and word.isdecimal() and int(word) < len(target):
            target = target[int(word)]
        else:
            return None
    return target if name.startswith("#") else None


def adapt_schema(schema: Mapping[str, JSON]) -> dict[str, Any]:
    """Return a copy of a schema with the keywords that Anthropic supports, and the others in its description."""
    has_values = any(_has_plain_values(word, value) for word, value in schema.items())
    kept: dict[str, Any] = {}
    described: list[str] = []
    for word, value in schema.items():
        adapted = _adapt_keyword(word, value)
        if adapted is _UNSUPPORTED:
            described.append(f"{word}: {json.dumps(to_mutable_json(value), ensure_ascii=False)}")
        elif word != "type" or not has_values:  # the listed values imply their type
            kept["anyOf" if word == "oneOf" else word] = adapted
    if described:
        kept["description"] = "\n\n".join([*filter(None, [kept.get("description")]), "{" + ", ".join(described) + "}"])
    return kept


def _adapt_keyword(keyword: str, value: Any) -> Any:
    match keyword, value:
        case (("$defs" | "properties"), Mapping()):
            return {name: _adapt_subschema(each) for name, each in value.items()}
        case "items", Mapping():
            return adapt_schema(value)
        case (("anyOf" | "oneOf" | "allOf"), list() | tuple()):
            return [_adapt_subschema(each) for each in value]
        case "additionalProperties", _:
            return False
        case ("format", str()) if value in _SUPPORTED_FORMATS:
            return value
        case "minItems", 0 | 1:
            return value
    return (
        to_mutable_json(value) if keyword in _SUPPORTED_KEYWORDS or _has_plain_values(keyword, value) else _UNSUPPORTED
    )


def _has_plain_values(keyword: str, value: object) -> bool:
    """Return whether the keyword lists values that are all strings, numbers, booleans or null."""
    values = value if keyword == "enum" and isinstance(value, list | tuple) else [value]
    return keyword in {"enum", "const"} and all(each is None or isinstance(each, str | int | float) for each in values)


def _adapt_subschema(value: Any) -> Any:
    return adapt_schema(value) if isinstance(value, Mapping) else value  # a schema may also be True or False
