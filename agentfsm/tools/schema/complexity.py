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

# Characters of JSON; the model is told the schema on every turn, where this is some 25,000 tokens.
_MAX_SCHEMA_CHARS: Final = 100_000
# Brackets within brackets: a property costs two, so thirty objects in each other; the validator's own end is at 255.
_MAX_SCHEMA_DEPTH: Final = 64
# Subschemas that can be reached; some 50 characters each at the longest schema.
_MAX_NODES: Final = 2_000
# References and branches in a row that stay with the same value; real schemas have up to six. With the 200 levels that
# arguments may have, some 4,000 native frames, where 50,000 were fine.
_MAX_CHAIN: Final = 20
# Looks at one place, times places: some two seconds, in which nothing else runs.
_MAX_VISITS: Final = 20_000_000
# A pattern reads some ten characters in the time of a look.
_CHARS_PER_VISIT: Final = 10
# Looks that one value of an enumeration with numbers like 0.5, arrays or objects counts for: each is compared in turn.
_COMPLEX_VALUE_VISITS: Final = 100
# The levels that strict JSON text may have here.
_MAX_VALUE_DEPTH: Final = 200
# Characters of the schema's own words in an error; enough to find them.
_MAX_QUOTE_CHARS: Final = 100
# Draft 4 is left out: it has addresses, bounds and references of its own kind.
_DRAFTS: Final = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
)

# The keywords that hold subschemas, by what those are applied to; `properties` stands alone, since a member meets one.
_SAME_VALUE: Final = ("allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
_UNIONS: Final = ("anyOf", "oneOf")
_ITEMS: Final = ("prefixItems", "items", "additionalItems", "contains", "unevaluatedItems")
_MEMBERS: Final = ("patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames")
# Keywords of a branch for which it was measured that its tag is looked at first.
_TAGGABLE_KEYWORDS: Final = frozenset(
    {"type", "properties", "required", "title", "description", "additionalProperties"}
)
# Keywords with which a part changes what references mean.
_ADDRESS_KEYWORDS: Final = ("$id", "$dynamicRef", "$recursiveRef")
# Those whose subschemas stand under names.
_KEYED_KEYWORDS: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})


# By subschema: looks at one place of an object, and of an array.
_Visits: TypeAlias = dict[int, tuple[int, int]]


def normalise_parameters(parameters: Mapping[str, Any], tool: str) -> dict[str, Any]:
    """Return a copy of the schema as plain JSON, of type object, with `properties`.

    Args:
        parameters: A JSON Schema from anywhere.
        tool: The tool's name, for error texts.

    Raises:
        MisuseError: when it is no JSON, larger than 100,000 characters, deeper than 64, or not of type "object".
    """
    schema = normalise_schema(parameters, tool)
    if schema.setdefault("type", "object") != "object":
        raise MisuseError(f'Tool {tool!r}: the type at the top of its JSON Schema has to be "object".')
    schema.setdefault("properties", {})
    return schema


def normalise_schema(given: Mapping[str, Any], tool: str) -> dict[str, Any]:
    """Return a copy of a schema of any type as plain JSON, with its `$schema`.

    Args:
        given: A JSON Schema from anywhere.
        tool: The tool's name, for error texts.

    Raises:
        MisuseError: when it is no JSON, larger than 100,000 characters, deeper than 64, or of an unknown draft.
    """
    try:
        text = json.dumps(dict(given), allow_nan=False)
        schema: dict[str, Any] = jiter.from_json(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise MisuseError(f"Tool {tool!r}: its parameters are no JSON Schema ({error or 'too deep'}).") from error
    if len(text) > _MAX_SCHEMA_CHARS or measure_depth(schema) > _MAX_SCHEMA_DEPTH:
        raise MisuseError(
            f"Tool {tool!r}: its JSON Schema is larger than {_MAX_SCHEMA_CHARS} characters or deeper than "
            f"{_MAX_SCHEMA_DEPTH}. Move what repeats into $defs, or split the tool.",
        )
    for keyword in ("$id", "id"):  # a reference may stay within the schema only, so its own address is of no use
        schema.pop(keyword, None)
    if any(isinstance(part.get(key), str) for part in _iter_objects(schema) for key in _ADDRESS_KEYWORDS):
        raise MisuseError(
            f"Tool {tool!r}: its JSON Schema has parts with an address of their own ({', '.join(_ADDRESS_KEYWORDS)}). "
            "Refer to them as '#/$defs/name'.",
        )
    draft = str(schema.setdefault("$schema", _DRAFTS[0]))
    if draft.rstrip("#") not in _DRAFTS:
        raise MisuseError(
            f"Tool {tool!r}: its JSON Schema is of {draft[:_MAX_QUOTE_CHARS]!r}; known are {', '.join(_DRAFTS)}."
        )
    return schema


def measure_depth(value: Any) -> int:
    """Return how deep arrays and objects are nested: 0 for a plain value."""
    level, deep = _children([value]), 0
    while level:
        level, deep = _children(level), deep + 1
    return deep


def _children(values: Iterable[Any]) -> list[Any]:
    """What stands in the arrays and objects among the values."""
    return [
        inner
        for value in values
        if isinstance(value, dict | list)
        for inner in (value.values() if isinstance(value, dict) else value)
    ]


@attrs.frozen
class ValidationCost(Value):
    """How often one place in a value may be looked at, for each depth of the value."""

    visits_by_depth: tuple[int, ...]
    """By depth, as far as it is allowed; grows or stays."""

    is_constant: bool
    """Whether it stays as the last one, however deep the value."""

    def check_value(self, text: str, value: Any) -> str | None:
        """Say why a value would cost too much to validate, or None.

        Args:
            text: The value as JSON.
            value: The same, parsed.
        """
        places = text.count(",") + 1 + len(text) // _CHARS_PER_VISIT
        brackets = text.count("{") + text.count("[")  # no less than the depth, and quickly had
        if self._is_affordable(brackets, places) or self._is_affordable(deep := measure_depth(value), places):
            return None
        if deep < len(self.visits_by_depth) or self.is_constant:
            return "it is too large for a schema with so many branches; send less at once, or nest it less"
        return f"it is nested {deep} deep, where its schema allows {len(self.visits_by_depth) - 1}"

    def _is_affordable(self, deep: int, places: int) -> bool:
        last = len(self.visits_by_depth) - 1
        return (deep <= last or self.is_constant) and self.visits_by_depth[min(deep, last)] * places <= _MAX_VISITS


def compute_cost(root: Mapping[str, Any], tool: str) -> ValidationCost:
    """Walk the schema, and work out what validating with it can cost.

    Args:
        root: What `admitted` returned and the validator has compiled.
        tool: The tool's name, for error texts.

    Raises:
        MisuseError: when there is more than may be walked, or a reference is not one within the schema.
    """
    parts = _SchemaWalk(root, tool).visit_all()
    looks: list[int] = []
    inner: _Visits = {}
    while len(looks) <= _MAX_VALUE_DEPTH:
        outer: _Visits = {}
        for part in parts:
            outer[part.key] = part.count_visits(outer, inner)
        if outer == inner:
            return ValidationCost(visits_by_depth=tuple(looks), is_constant=True)
        if (most := max(outer[id(root)])) > _MAX_VISITS:
            break
        looks.append(most)
        inner = outer
    if len(looks) < 2:  # noqa: PLR2004  not even an object with a plain value in it
        raise MisuseError(f"Tool {tool!r}: its JSON Schema has too many ways to fit one value. Use fewer unions.")
    return ValidationCost(visits_by_depth=tuple(looks), is_constant=False)


@attrs.frozen
class _SchemaNode(Value):
    """A subschema, by the `id` that it has in the tree, and those that it applies."""

    key: int
    weight: int
    same_value: tuple[int, ...]
    """To the same value."""

    alternatives: tuple[tuple[int, ...], ...]
    """To the same value, one of each group."""

    properties: tuple[int, ...]
    """To members, one each."""

    members: tuple[int, ...]
    """To members, all to each."""

    items: tuple[int, ...]

    def count_visits(self, outer: _Visits, inner: _Visits) -> tuple[int, int]:
        """Looks at one place, given those of the parts that see the same value and, one level in, of all parts."""

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
    """Finds the subschemas that can be reached; those that see the same value stand before what applies them."""

    root: Mapping[str, Any]
    tool: str
    nodes: list[_SchemaNode] = attrs.field(factory=list)
    _chain_lengths: dict[int, int] = attrs.field(factory=dict)
    """How many references and branches in a row begin at a part that was visited."""

    def visit_all(self) -> list[_SchemaNode]:
        """Visit everything that can be reached."""
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
            same *= 3  # what the others saw is found out anew; nested, it took 2.4 times as long with each level
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
        """Whether a required property tells the branches apart: the validator then looks into one of them only."""
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

    def _refuse(self, what: str) -> NoReturn:
        raise MisuseError(f"Tool {self.tool!r}: its JSON Schema {what}.")


def _iter_objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    level: list[Any] = [schema]
    while level:
        yield from (value for value in level if isinstance(value, dict))
        level = _children(level)


def _find_subschemas(schema: Mapping[str, Any], keywords: Sequence[str]) -> list[Mapping[str, Any]]:
    """The subschemas under these keywords; true and false are not worth a look."""
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
