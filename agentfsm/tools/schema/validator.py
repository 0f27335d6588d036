"""Validator of JSON Schemas: returns whether a value is valid, and checks the parts of the schema to explain a refusal.

The library's own list of errors is not used. It copies the value into each (1,000 errors on one value of 1 MB took 23
GB and two minutes), explores all ways through nested unions (a tree of 14 levels took four seconds), and does not know
which branch was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import quote, unquote

import attrs
import jsonschema_rs

from agentfsm.core.errors import MisuseError
from agentfsm.tools.schema.arguments import build_problem, join_alternatives
from agentfsm.tools.schema.introspection import summarise_error
from agentfsm.tools.schema.matching import declared_types, find_closest_branches, has_type, resolve_reference

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Nothing is fetched, and no pattern can take exponential time.
_OPTIONS: Final[dict[str, Any]] = {"offline": True, "pattern_options": jsonschema_rs.RegexOptions()}
# URI of the schema, by which probes refer to its parts.
_ROOT_URI: Final = "urn:root"
# Maximum of parts compiled to explain one refusal; with the largest schema each takes 10 ms.
_MAX_PROBES: Final = 200
# Maximum of references, branches and levels followed to a problem; each takes a few of Python's 1,000 frames.
_MAX_REPORT_DEPTH: Final = 25
# Maximum of characters of a path in an error.
_MAX_PATH_CHARS: Final = 100
# Keyword without subschemas -> its requirement.
_KEYWORD_MESSAGES: Final = {
    "enum": "should be {}",
    "const": "should be {}",
    "minimum": "should be at least {}",
    "maximum": "should be at most {}",
    "exclusiveMinimum": "should be greater than {}",
    "exclusiveMaximum": "should be less than {}",
    "multipleOf": "should be a multiple of {}",
    "minLength": "should have at least {} characters",
    "maxLength": "should have at most {} characters",
    "pattern": "should match {}",
    "format": "should be written as {}",
    "minItems": "should have at least {} items",
    "maxItems": "should have at most {} items",
    "uniqueItems": "should have no item twice",
    "minProperties": "should have at least {} properties",
    "maxProperties": "should have at most {} properties",
    "dependentRequired": "should have all properties that go together",
}
# Keywords that are named if there is no better description.
_QUOTED_KEYWORDS: Final = (
    *("not", "contains", "propertyNames", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems"),
)

_Location: TypeAlias = tuple[str | int, ...]
_Problems: TypeAlias = "Iterator[ErrorDetails]"


def compile_schema(schema: dict[str, Any], tool: str) -> Callable[[Any], bool]:
    """Compile a schema.

    Args:
        schema: A schema from `complexity.normalise_parameters`, with its `$schema`.
        tool: The tool's name, for error messages.

    Returns:
        A function that returns whether a value is valid. `complexity.ValidationCost` bounds its cost.

    Raises:
        MisuseError: if the schema is invalid, refers to a part outside of it, or has a pattern that does not run in
            linear time.
    """
    try:
        return jsonschema_rs.validator_for(schema, **_OPTIONS).is_valid
    except ValueError as error:
        place = "/".join(map(str, getattr(error, "instance_path", ())))[:_MAX_PATH_CHARS] or "its top"
        raise MisuseError(
            f"Tool {tool!r}: its JSON Schema is invalid at {place} ({summarise_error(error)}). It may refer to its own "
            "parts only, and its patterns have to take linear time, without lookaround and back references.",
        ) from error


def find_problems(schema: dict[str, Any], value: Any) -> _Problems:
    """Yield the problems of a value in pydantic's form; none if it is valid.

    Args:
        schema: As for `compile_schema`.
        value: Parsed JSON.
    """
    return _ProblemFinder(schema).find(value, schema, "", ())


@attrs.define
class _ProblemFinder:
    """Checks the parts of one schema to explain one refusal."""

    root: dict[str, Any]
    _probes: dict[tuple[str, str], Callable[[Any], bool]] = attrs.field(factory=dict, init=False)
    _registry: jsonschema_rs.Registry = attrs.field(
        default=attrs.Factory(lambda self: jsonschema_rs.Registry([(_ROOT_URI, self.root)]), takes_self=True),
        init=False,
    )

    def find(
        self, value: Any, schema: Any, pointer: str, place: _Location, levels: int = _MAX_REPORT_DEPTH
    ) -> _Problems:
        """Yield the problems of the value at this place: at least one if it does not fit.

        Args:
            value: The value.
            schema: The part of the schema for the value.
            pointer: Location of that part in the whole schema.
            place: Location of the value in the arguments.
            levels: Number of further levels to follow.
        """
        if self._is_valid_at(value, pointer):
            return
        nothing = True
        for problem in self._find_inside(value, schema, pointer, place, levels - 1) if levels else ():
            nothing = False
            yield problem
        if nothing:
            rules = [f'"{keyword}"' for keyword in _QUOTED_KEYWORDS if keyword in schema]
            yield build_problem("schema", place, value, f"should fit {' and '.join(rules) or 'its part'} of the schema")

    def _is_valid_at(self, value: Any, pointer: str) -> bool:
        return self._meets_keyword(value, pointer, "$ref", f"{_ROOT_URI}#{quote(pointer, safe='/~')}")

    def _meets_keyword(self, value: Any, pointer: str, keyword: str, limit: Any) -> bool:
        """Return whether the value meets one keyword. After `_MAX_PROBES` probes return True, which ends the search."""
        probe = self._probes.get((pointer, keyword))
        if probe is None:
            if len(self._probes) == _MAX_PROBES:
                return True
            schema = {"$schema": self.root["$schema"], keyword: limit}
            probe = jsonschema_rs.validator_for(schema, registry=self._registry, **_OPTIONS).is_valid
            self._probes[pointer, keyword] = probe
        return probe(value)

    def _find_inside(self, value: Any, schema: Any, pointer: str, place: _Location, levels: int) -> _Problems:
        if schema is False:
            yield build_problem("extra_forbidden", place, value)
            return
        kinds = declared_types(schema)
        if kinds and not any(has_type(value, kind) for kind in kinds):
            yield build_problem("schema", place, value, f"should be {' or '.join(map(_with_article, kinds))}")
            return
        if isinstance(value, dict):
            missing = [name for name in schema.get("required", ()) if name not in value]
            yield from (build_problem("missing", (*place, name), value) for name in missing)
        for keyword, words in _KEYWORD_MESSAGES.items():
            if keyword in schema and not self._meets_keyword(value, pointer, keyword, schema[keyword]):
                wish = join_alternatives(schema[keyword] if keyword == "enum" else [schema[keyword]])
                yield build_problem("schema", place, value, words.format(wish))
        for part, at in self._iter_same_value(value, schema, pointer):
            yield from self.find(value, part, at, place, levels)
        for step, part, at in self._iter_children(value, schema, pointer):
            yield from self.find(value[step], part, at, (*place, step), levels)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                yield from self._find_in_union(value, schema[keyword], f"{pointer}/{keyword}", place, levels)

    def _iter_same_value(self, value: Any, schema: Mapping[str, Any], pointer: str) -> Iterator[tuple[Any, str]]:
        """Yield the other subschemas that the value must fit, and their locations."""
        if "$ref" in schema:
            yield resolve_reference(self.root, schema["$ref"]), unquote(schema["$ref"]).removeprefix("#")
        for index, part in enumerate(schema.get("allOf", ())):
            yield part, f"{pointer}/allOf/{index}"
        if "if" in schema:
            branch = "then" if self._is_valid_at(value, f"{pointer}/if") else "else"
            if branch in schema:
                yield schema[branch], f"{pointer}/{branch}"

    def _iter_children(self, value: Any, schema: Mapping[str, Any], pointer: str) -> Iterator[tuple[Any, Any, str]]:
        """Yield each member or item with its subschema and the location of that."""
        if isinstance(value, dict):
            for name in value:
                yield from ((name, part, pointer + at) for part, at in self._iter_member_schemas(name, schema))
        if isinstance(value, list):
            first = next((keyword for keyword in ("prefixItems", "items") if isinstance(schema.get(keyword), list)), "")
            others = "additionalItems" if first == "items" else "items"
            for index in range(len(value)):
                if index < len(schema.get(first, ())):
                    yield index, schema[first][index], f"{pointer}/{first}/{index}"
                elif others in schema:
                    yield index, schema[others], f"{pointer}/{others}"

    def _iter_member_schemas(self, name: str, schema: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
        known = False
        if name in schema.get("properties", ()):
            known = True
            yield schema["properties"][name], f"/properties/{_escape_pointer(name)}"
        for pattern, part in schema.get("patternProperties", {}).items():
            if self._meets_keyword(name, pattern, "pattern", pattern):
                known = True
                yield part, f"/patternProperties/{_escape_pointer(pattern)}"
        if not known and "additionalProperties" in schema:
            yield schema["additionalProperties"], "/additionalProperties"

    def _find_in_union(
        self, value: Any, branches: Sequence[Any], pointer: str, place: _Location, levels: int
    ) -> _Problems:
        fitting = sum(self._is_valid_at(value, f"{pointer}/{index}") for index in range(len(branches)))
        if fitting > 1 and pointer.endswith("/oneOf"):
            yield build_problem("schema", place, value, "should fit one of its forms only")
        if fitting:
            return
        chosen = find_closest_branches(value, branches, self.root)
        for index, branch in enumerate(branches):
            if branch in chosen:
                place_as = (*place, _branch_name(branch, index)) if len(chosen) > 1 else place
                yield from self.find(value, branch, f"{pointer}/{index}", place_as, levels)


def _branch_name(branch: Any, index: int) -> str:
    """Return the name of a branch of a union, as an identifier."""
    stated = branch if isinstance(branch, Mapping) else {}
    name = str(stated.get("title", str(stated.get("$ref", "")).rpartition("/")[2]))
    return name if name.isidentifier() else f"branch_{index + 1}"


def _escape_pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _with_article(kind: str) -> str:
    return kind if kind == "null" else f"{'an' if kind[0] in 'aio' else 'a'} {kind}"
