"""Interpret JSON Schema: references, types, and the branch of a union that a value is meant to match."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

_NUMBER_TYPES: Final = frozenset({"integer", "number"})


def resolve_reference(root: Mapping[str, Any], reference: str) -> Any:
    """Return the part of a valid schema that a reference points at.

    Raises:
        LookupError: if it is not written `#` or `#/...`.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise LookupError(reference)
    found: Any = root
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def declared_types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that the schema states; empty if it states none."""
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def json_type(value: object) -> str:
    """Return the JSON Schema name of a value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def has_type(value: object, kind: str) -> bool:
    """Return whether the value is of the type; 5 is a number, and 5.0 an integer."""
    own = json_type(value)
    if own == "number" and kind == "integer":
        return isinstance(value, float) and value.is_integer()
    return own == kind or (own == "integer" and kind == "number")


def expand_branches(schema: Any, root: Mapping[str, Any]) -> list[Any]:
    """Return the alternatives that a value may match: references are followed and unions expanded, each part once."""
    found, waiting, seen = [], [schema], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Mapping) and "$ref" in part:
            waiting.append(resolve_reference(root, part["$ref"]))
        elif isinstance(part, Mapping) and (branches := part.get("anyOf") or part.get("oneOf")):
            waiting += reversed(branches)
        else:
            found.append(part)
    return found


def find_branch(value: object, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the first leaf of the schema that the value may match, or True, which accepts any value.

    Leaves that define all keys of an object come first.
    """
    found = [
        leaf for leaf in expand_branches(schema, root) if _may_match(value, leaf) and _members_match(value, leaf, root)
    ]
    return min(found, key=lambda leaf: not _knows_all_keys(leaf, value), default=True)


def find_closest_branches(value: object, branches: Sequence[Any], root: Mapping[str, Any]) -> Sequence[Any]:
    """Return the branches of a union that a value, which fits none, probably means; all branches if that is unclear.

    Branches are compared by type and listed values, such as `"kind": {"const": "cat"}`, and then by their keys.
    """
    alike = [
        b
        for b in branches
        if any(_may_match(value, leaf) and _tags_match(value, leaf) for leaf in expand_branches(b, root))
    ]
    pool = alike or branches
    return [b for b in pool if any(_knows_all_keys(leaf, value) for leaf in expand_branches(b, root))] or pool


def accepts_null(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return whether null fits the schema."""
    return any(_may_match(None, leaf) for leaf in expand_branches(schema, root))


def find_confused_booleans(
    value: Any, schema: Mapping[str, Any]
) -> Iterator[tuple[tuple[str | int, ...], bool | float, str]]:
    """Yield each boolean where a number is expected, and number where a boolean is, as place, value and wish.

    Python counts True as 1, and so do validators of its types. In JSON they differ: `true` does not state an amount.

    Args:
        value: Parsed JSON.
        schema: JSON Schema of the value, whose references resolve.
    """
    leaves_by_parts: dict[tuple[int, ...], list[Any]] = {}
    waiting: deque[tuple[tuple[str | int, ...], Any, list[Any]]] = deque([((), value, [schema])])
    while waiting:
        place, value, parts = waiting.popleft()
        ids = tuple(map(id, parts))  # the items of a list have the same schema
        if ids not in leaves_by_parts:
            leaves_by_parts[ids] = [leaf for part in parts for leaf in expand_branches(part, schema)]
        leaves = leaves_by_parts[ids]
        if isinstance(value, bool | int | float):
            kinds = {kind for leaf in leaves for kind in _scalar_types(leaf)}
            if isinstance(value, bool) and "boolean" not in kinds and not kinds.isdisjoint(_NUMBER_TYPES):
                yield place, value, "should be a number: true and false are none"
            if not isinstance(value, bool) and "boolean" in kinds and kinds.isdisjoint(_NUMBER_TYPES):
                yield place, value, "should be true or false: a number is neither"
        elif isinstance(value, dict):
            fitting = _find_object_leaves(value, leaves)
            waiting += [((*place, key), item, _member_schemas(key, fitting)) for key, item in value.items()]
        elif isinstance(value, list):
            arrays = [leaf for leaf in leaves if isinstance(leaf, Mapping)]
            rest = [leaf["items"] for leaf in arrays if "items" in leaf]
            for index, item in enumerate(value):
                first = [leaf["prefixItems"][index] for leaf in arrays if index < len(leaf.get("prefixItems", ()))]
                waiting.append(((*place, index), item, first or rest))


def _scalar_types(leaf: Any) -> Sequence[str]:
    """Return the types of the scalars that a leaf accepts."""
    if not isinstance(leaf, Mapping):
        return ("boolean", "number") if leaf else ()
    listed = leaf["enum"] if "enum" in leaf else [leaf["const"]] if "const" in leaf else ()
    return [json_type(each) for each in listed] or declared_types(leaf) or ("boolean", "number")


def _find_object_leaves(value: dict[str, Any], leaves: Sequence[Any]) -> Sequence[Any]:
    """Return the leaves that an object may match; all that have keys if it matches none."""
    objects = [leaf for leaf in leaves if isinstance(leaf, Mapping)]
    tagged = [leaf for leaf in objects if _may_match(value, leaf) and _tags_match(value, leaf)] or objects
    return [leaf for leaf in tagged if all(key in value for key in leaf.get("required", ()))] or tagged


def _member_schemas(key: str, leaves: Sequence[Any]) -> list[Any]:
    found = [leaf["properties"][key] for leaf in leaves if key in leaf.get("properties", {})]
    if found:
        return found
    patterns = [part for leaf in leaves for part in leaf.get("patternProperties", {}).values()]
    return patterns + [leaf["additionalProperties"] for leaf in leaves if "additionalProperties" in leaf]


def _may_match(value: object, leaf: Any) -> bool:
    if not isinstance(leaf, Mapping):
        return bool(leaf)
    kinds = declared_types(leaf)
    if kinds and not any(has_type(value, kind) for kind in kinds):
        return False
    return leaf.get("const", value) == value and ("enum" not in leaf or value in leaf["enum"])


def _known_members(value: object, leaf: Any) -> list[tuple[Any, Any]]:
    """Return the members of an object that the leaf defines, with its schema for each."""
    if not isinstance(value, dict) or not isinstance(leaf, Mapping):
        return []
    parts = leaf.get("properties", {})
    return [(item, parts[key]) for key, item in value.items() if key in parts]


def _members_match(value: object, leaf: Any, root: Mapping[str, Any]) -> bool:
    # Null may stand for an omitted value, whatever the schema of the part.
    given = [(item, part) for item, part in _known_members(value, leaf) if item is not None]
    return all(any(_may_match(item, inner) for inner in expand_branches(part, root)) for item, part in given)


def _tags_match(value: object, leaf: Any) -> bool:
    tags = [(item, part) for item, part in _known_members(value, leaf) if isinstance(part, Mapping)]
    return all(_may_match(item, part) for item, part in tags if "const" in part or "enum" in part)


def _knows_all_keys(leaf: Any, value: object) -> bool:
    return isinstance(value, dict) and len(_known_members(value, leaf)) == len(value)
