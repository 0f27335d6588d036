"""Bound the cost of JSON Schemas from other authors: their size, depth and branching.

A small schema can require endless work. Twenty definitions, each "one of the next, or the next again", have a million
paths, thirty a thousand million. A thousand references in a row, under a value nested 190 deep, overflow the native
stack and end the process (both measured on jsonschema-rs 0.60). So when a tool is made, its schema is walked once to
compute how often one place in a value may be checked, for each depth of the value. That number bounds the cost of a
validation, and a value that would cost more is refused without validation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

import attrs
import jiter

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.tools.schema.matching import resolve_reference

# Maximum of characters of a schema as JSON. It is sent on every turn, where this is about 25,000 tokens.
_MAX_SCHEMA_CHARS: Final = 100_000
# Maximum of nested brackets: a property takes two, so about 30 nested objects. The validator's own limit is 255.
_MAX_SCHEMA_DEPTH: Final = 64
# Maximum of reachable subschemas: about 50 characters each in the longest schema.
_MAX_NODES: Final = 2_000
# Maximum of consecutive references and branches for the same value; real schemas have up to six. With the 200 levels of
# arguments, this takes about 4,000 native frames; 50,000 were fine.
_MAX_CHAIN: Final = 20
# Maximum of checks of one value: about two seconds, in which nothing else runs.
_MAX_VISITS: Final = 20_000_000
# Characters that a pattern reads in the time of one check.
_CHARS_PER_VISIT: Final = 10
# Checks that one enumerated value counts as if some are floats, arrays or objects, which are compared one by one.
_COMPLEX_VALUE_VISITS: Final = 100
# Maximum of levels of the arguments' JSON text.
_MAX_VALUE_DEPTH: Final = 200
# Maximum of quoted characters of a schema in an error: enough to find them.
_MAX_QUOTE_CHARS: Final = 100
# Draft 4 is not supported: its addresses, bounds and references differ.
_DRAFTS: Final = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
)

# Keywords with subschemas, by the values that these apply to. `properties` is separate: one applies to each member.
_SAME_VALUE: Final = ("allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
_UNIONS: Final = ("anyOf", "oneOf")
_ITEMS: Final = ("prefixItems", "items", "additionalItems", "contains", "unevaluatedItems")
_MEMBERS: Final = ("patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames")
# Keywords of a branch with which the validator was measured to check the tag first.
_TAGGABLE_KEYWORDS: Final = frozenset(
    {"type", "properties", "required", "title", "description", "additionalProperties"}
)
# Keywords with which a part changes the meaning of references.
_ADDRESS_KEYWORDS: Final = ("$id", "$dynamicRef", "$recursiveRef")
# Keywords whose subschemas have names.
_KEYED_KEYWORDS: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})


# Checks of one place in an object and in an array, by subschema.
_Visits: TypeAlias = dict[int, tuple[int, int]]


def normalise_parameters(parameters: Mapping[str, Any], tool: str) -> dict[str, Any]:
    """Return a copy of the schema as plain JSON, of type object, with `properties`.

    Args:
        parameters: An untrusted JSON Schema.
        tool: The tool's name, for error messages.

    Raises:
        MisuseError: if it is not JSON, larger than 100,000 characters, deeper than 64, or not of type "object".
    """
    schema = normalise_schema(parameters, tool)
    if schema.setdefault("type", "object") != "object":
        raise MisuseError(f'Tool {tool!r}: the type at the top of its JSON Schema has to be "object".')
    schema.setdefault("properties", {})
    return schema


def normalise_schema(given: Mapping[str, Any], tool: str) -> dict[str, Any]:
    """Return a copy of a schema of any type as plain JSON, with its `$schema`.

    Args:
        given: An untrusted JSON Schema.
        tool: The tool's name, for error messages.

    Raises:
        MisuseError: if it is not JSON, larger than 100,000 characters, deeper than 64, or of an unknown draft.
    """
    try:
        text = json.dumps(dict(given), allow_nan=False)
        schema: dict[str, Any] = jiter.from_json(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise MisuseError(f"Tool {tool!r}: its parameters are not a JSON Schema ({error or 'too deep'}).") from error
    if len(text) > _MAX_SCHEMA_CHARS or measure_depth(schema) > _MAX_SCHEMA_DEPTH:
        raise MisuseError(
            f"Tool {tool!r}: its JSON Schema is larger than {_MAX_SCHEMA_CHARS} characters or deeper than "
            f"{_MAX_SCHEMA_DEPTH}. Move repeated parts into $defs, or split the tool.",
        )
    for keyword in ("$id", "id"):  # references stay within the schema, so its address is not needed
        schema.pop(keyword, None)
    if any(isinstance(part.get(key), str) for part in _iter_objects(schema) for key in _ADDRESS_KEYWORDS):
        raise MisuseError(
            f"Tool {tool!r}: its JSON Schema has parts with an address of their own ({', '.join(_ADDRESS_KEYWORDS)}). "
            "Refer to them as '#/$defs/name'.",
        )
    draft = str(schema.setdefault("$schema", _DRAFTS[0]))
    if draft.rstrip("#") not in _DRAFTS:
        raise MisuseError(
            f"Tool {tool!r}: its JSON Schema has the draft {draft[:_MAX_QUOTE_CHARS]!r}; known: {', '.join(_DRAFTS)}."
        )
    return schema


def measure_depth(value: Any) -> int:
    """Return the depth of nested arrays and objects: 0 for a plain value."""
    level, deep = _children([value]), 0
    while level:
        level, deep = _children(level), deep + 1
    return deep


def _children(values: Iterable[Any]) -> list[Any]:
    """Return the contents of the arrays and objects among the values."""
    return [
        inner
        for value in values
        if isinstance(value, dict | list)
        for inner in (value.values() if isinstance(value, dict) else value)
    ]


@attrs.frozen
class ValidationCost(Value):
    """Maximum number of checks of one place in a value, for each depth of the value."""

    visits_by_depth: tuple[int, ...]
    """Checks by depth, up to the permitted depth; they never decrease."""

    is_constant: bool
    """Whether the last number applies to all greater depths."""

    def check_value(self, text: str, value: Any) -> str | None:
        """Return why a value would cost too much to validate; None if it would not.

        Args:
            text: The value as JSON.
            value: The parsed value.
        """
        places = text.count(",") + 1 + len(text) // _CHARS_PER_VISIT
        brackets = text.count("{") + text.count("[")  # an upper bound of the depth that is cheap to compute
        if self._is_affordable(brackets, places) or self._is_affordable(deep := measure_depth(value), places):
            return None
        if deep < len(self.visits_by_depth) or self.is_constant:
            return "it is too large for a schema with so many branches; send less at once, or nest it less"
        return f"it is nested {deep} levels deep, and its schema allows {len(self.visits_by_depth) - 1}"

    def _is_affordable(self, deep: int, places: int) -> bool:
        last = len(self.visits_by_depth) - 1
        return (deep <= last or self.is_constant) and self.visits_by_depth[min(deep, last)] * places <= _MAX_VISITS


def compute_cost(root: Mapping[str, Any], tool: str) -> ValidationCost:
    """Walk the schema and compute the maximum cost of a validation.

    Args:
        root: A schema from `normalise_parameters` that the validator has compiled.
        tool: The tool's name, for error messages.

    Raises:
        MisuseError: if the schema has too many parts, or a reference that does not stay within it.
    """
    parts = _SchemaWalk(root, tool).visit_all()
    visits: list[int] = []
    inner: _Visits = {}
    while len(visits) <= _MAX_VALUE_DEPTH:
        outer: _Visits = {}
        for part in parts:
            outer[part.key] = part.count_visits(outer, inner)
        if outer == inner:
            return ValidationCost(visits_by_depth=tuple(visits), is_constant=True)
        if (most := max(outer[id(root)])) > _MAX_VISITS:
            break
        visits.append(most)
        inner = outer
    if len(visits) < 2:
        raise MisuseError(f"Tool {tool!r}: its JSON Schema has too many ways to fit one value. Use fewer unions.")
    return ValidationCost(visits_by_depth=tuple(visits), is_constant=False)


@attrs.frozen
class _SchemaNode(Value):
    """A subschema, identified by the `id` of its object, and the subschemas that it applies."""

    key: int
    weight: int
    same_value: tuple[int, ...]
    """Subschemas applied to the same value."""

    alternatives: tuple[tuple[int, ...], ...]
    """Groups of subschemas of which one each is applied to the same value."""

    properties: tuple[int, ...]
    """Subschemas applied to members, one to each."""

    members: tuple[int, ...]
    """Subschemas applied to members, all of them to each."""

    items: tuple[int, ...]
    """Subschemas applied to items."""

    def count_visits(self, outer: _Visits, inner: _Visits) -> tuple[int, int]:
        """Return the checks of one place, given those of parts for the same value and of all parts a level deeper."""

        def most(key: int) -> int:
            return max(inner.get(key, (0, 0)))

        as_object = max(map(most, self.properties), default=0) + sum(map(most, self.members))
        as_array = sum(map(most, self.items))
        groups = [*((key,) for key in self.same_value), *self.alternatives]
        as_object += sum(max(outer[key][0] for key in group) for group in groups)
        as_array += sum(max(outer[key][1] for key in group) for group in groups)
        return self.weight + as_object, self.weight + as_array


@attrs.define
class _SchemaWalk:
    """Finds the reachable subschemas. Those for the same value come before the subschema that applies them."""

    root: Mapping[str, Any]
    tool: str
    nodes: list[_SchemaNode] = attrs.field(factory=list)
    _chain_lengths: dict[int, int] = attrs.field(factory=dict)
    """Length of the chain of references and branches that begins at a visited part."""

    def visit_all(self) -> list[_SchemaNode]:
        """Visit all reachable subschemas."""
        waiting: list[Mapping[str, Any]] = [self.root]
        while waiting:
            self._visit(waiting.pop(), 0, waiting)
        return self.nodes

    def _visit(self, schema: Mapping[str, Any], chain: int, waiting: list[Mapping[str, Any]]) -> None:
        if chain + self._chain_lengths.get(id(schema), 0) > _MAX_CHAIN:
            self._refuse(
                f"has more than {_MAX_CHAIN} references and unions in a row, or one that leads to itself. "
                "Let it lead into a property or an item first"
            )
        if id(schema) in self._chain_lengths:
            return
        if len(self.nodes) > _MAX_NODES:
            self._refuse(f"has more than {_MAX_NODES} parts. Split the tool")
        same = [*_find_subschemas(schema, _SAME_VALUE), *self._resolve_reference(schema)]
        unions = [_find_subschemas(schema, (keyword,)) for keyword in _UNIONS]
        for part in (*same, *(branch for union in unions for branch in union)):
            self._visit(part, chain + 1, waiting)
        either = [union for union in unions if self._is_tagged(union)]
        same += (branch for union in unions if union not in either for branch in union)
        if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
            same *= 3  # the others are evaluated again: each nested level took 2.4 times as long
        named, members, items = (_find_subschemas(schema, keywords) for keywords in (("properties",), _MEMBERS, _ITEMS))
        below = [self._chain_lengths[id(part)] for group in (same, *either) for part in group]
        self._chain_lengths[id(schema)] = 1 + max(below, default=-1)
        self.nodes.append(
            _SchemaNode(
                key=id(schema),
                weight=_count_weight(schema),
                same_value=_ids(same),
                alternatives=tuple(map(_ids, either)),
                properties=_ids(named),
                members=_ids(members),
                items=_ids(items),
            )
        )
        waiting += (*named, *members, *items)

    def _is_tagged(self, union: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether a required property distinguishes the branches: the validator then evaluates only one."""
        tags = [self._read_tags(branch) for branch in union]
        common = set.intersection(*map(set, tags)) if tags else set()
        return any(len({tag[name] for tag in tags}) == len(tags) for name in common)

    def _read_tags(self, branch: Mapping[str, Any]) -> dict[str, str]:
        while branch.keys() == {"$ref"}:
            found = resolve_reference(self.root, branch["$ref"])
            branch = found if isinstance(found, Mapping) else {}
        if not branch.keys() <= _TAGGABLE_KEYWORDS:
            return {}
        parts, required = branch.get("properties", {}), branch.get("required", ())
        stated = [(name, parts[name]) for name in required if isinstance(parts.get(name), Mapping)]
        return {name: json.dumps(part["const"]) for name, part in stated if "const" in part}

    def _resolve_reference(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if "$ref" not in schema:
            return []
        try:
            found = resolve_reference(self.root, schema["$ref"])
        except LookupError:
            self._refuse(f"refers to {schema['$ref'][:_MAX_QUOTE_CHARS]!r}. Write '#/$defs/name'")
        return [found] if isinstance(found, Mapping) else []

    def _refuse(self, flaw: str) -> NoReturn:
        raise MisuseError(f"Tool {self.tool!r}: its JSON Schema {flaw}.")


def _iter_objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    level: list[Any] = [schema]
    while level:
        yield from (value for value in level if isinstance(value, dict))
        level = _children(level)


def _find_subschemas(schema: Mapping[str, Any], keywords: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the subschemas under these keywords, without `true` and `false`, which cost nothing."""
    found: list[Any] = []
    for keyword in keywords:
        held = schema.get(keyword)
        if isinstance(held, list):
            found += held
        elif isinstance(held, Mapping):
            found += held.values() if keyword in _KEYED_KEYWORDS else [held]
    return [part for part in found if isinstance(part, Mapping)]


def _count_weight(schema: Mapping[str, Any]) -> int:
    values = schema.get("enum", ())
    plain = all(value is None or isinstance(value, str | int) for value in values)
    return 1 if plain else 1 + _COMPLEX_VALUE_VISITS * len(values)


def _ids(parts: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    return tuple(map(id, parts))
