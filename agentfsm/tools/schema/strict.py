"""OpenAI's strict mode: convert schemas to its form, and convert the model's arguments back.

In strict mode the provider enforces the schema during generation, and supports only a part of JSON Schema:

- the root is an object and not an `anyOf`; each object has `additionalProperties: false` and all properties in
  `required`, so that an optional one can only be nullable;
- supported are `type`, `properties`, `items`, `anyOf`, `enum`, `const`, `$ref`, `$defs`, for strings `pattern` and nine
  values of `format`, for numbers `multipleOf` and the four bounds, for arrays `minItems` and `maxItems`;
- not supported are `allOf`, `not`, `dependentRequired`, `dependentSchemas`, `if`, `then`, `else`;
- a `$ref` has no other keywords beside it, and `oneOf` becomes `anyOf`, as in the provider's own clients.

The limits on size (5,000 properties, 10 levels, 1,000 enum values, 120,000 characters of names) have grown more than
once, so the provider checks them.

Source: developers.openai.com/api/docs/guides/structured-outputs, "Supported schemas", and `openai/lib/_pydantic.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import JSON
from agentfsm.core.value import Value
from agentfsm.tools.schema.matching import accepts_null, declared_types, find_branch, json_type

# Keywords that are copied unchanged.
_COPIED_KEYWORDS: Final = (
    *("enum", "const", "pattern", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minItems", "maxItems"),
)
_COPIED_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
)
# Unsupported keyword -> advice. Any other is dropped, since the arguments are validated here afterwards.
_UNSUPPORTED_KEYWORDS: Final = {
    "allOf": "write the parts out as one schema",
    "not": "list the allowed values or types",
    "if": "use anyOf",
    "then": "use anyOf",
    "else": "use anyOf",
    "dependencies": "use anyOf",
    "dependentRequired": "use anyOf",
    "dependentSchemas": "use anyOf",
    "patternProperties": "take a list of objects with a name and a value",
    "prefixItems": "take an object with a property for each place",
    "additionalItems": "take an object with a property for each place",
}
_NULL: Final = {"type": "null"}


def build_strict_schema(parameters: Mapping[str, JSON], name: str) -> dict[str, Any]:
    """Convert a JSON Schema to the form for strict mode.

    An optional property becomes required and nullable; its default, which strict mode does not support, is added to the
    description. Unsupported bounds and notes (`minLength`, `uniqueItems`, `examples`...) are dropped, since the
    arguments are validated here against the whole schema.

    Args:
        parameters: The JSON Schema of the arguments, of type "object", whose references resolve.
        name: The tool's name, for error messages.

    Raises:
        MisuseError: if strict mode does not support the schema; the message names tool and parameter.
    """
    strict = _StrictRewriter(name, parameters)
    for keyword in ("anyOf", "oneOf", "$ref", "enum", "const"):
        if keyword in parameters:
            strict.refuse("", f"{keyword!r} at the top", "write an object with properties there")
    return strict.rewrite(parameters, "")


def drop_nulls(value: Any, parameters: Mapping[str, Any]) -> Any:
    """Remove the nulls that stand for omitted values: those of optional properties that do not accept null themselves.

    If the value may match several branches of a union, the first decides.

    Args:
        value: The parsed arguments of the model, nested at most 200 deep.
        parameters: The schema before `build_strict_schema`.
    """
    return _NullRemover(parameters).remove(value, parameters)


@attrs.frozen
class _StrictRewriter(Value):
    """Rewrites the schema of one tool."""

    tool: str
    root: Mapping[str, Any]

    def rewrite(self, schema: Any, place: str) -> dict[str, Any]:
        """Rewrite the part of the schema for this place in the arguments."""
        if not isinstance(schema, Mapping):
            self.refuse(place, "a value of any type", "give it a type")
        if refused := next((keyword for keyword in _UNSUPPORTED_KEYWORDS if keyword in schema), None):
            self.refuse(place, repr(refused), _UNSUPPORTED_KEYWORDS[refused])
        definitions = {
            keyword: {name: self.rewrite(part, name) for name, part in schema[keyword].items()}
            for keyword in ("$defs", "definitions")
            if keyword in schema
        }
        return definitions | self._rewrite_value(schema, place)

    def _rewrite_value(self, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
        noted = {key: schema[key] for key in ("title", "description") if key in schema}
        if "$ref" in schema:
            alone = {"$ref": schema["$ref"]}
            return {"anyOf": [alone], **noted} if noted else alone
        if branches := schema.get("anyOf") or schema.get("oneOf"):
            return {"anyOf": [self.rewrite(branch, place) for branch in branches], **noted}
        strict: dict[str, Any] = {
            "type": self._resolve_type(schema, place),
            **{key: schema[key] for key in _COPIED_KEYWORDS if key in schema},
            **noted,
        }
        if schema.get("format") in _COPIED_FORMATS:
            strict["format"] = schema["format"]
        if "object" in declared_types(strict):
            strict |= self._close_object(schema, place)
        if "array" in declared_types(strict):
            strict["items"] = self.rewrite(schema.get("items", True), f"{place}[]")
        return strict

    def _resolve_type(self, schema: Mapping[str, Any], place: str) -> str | list[str]:
        """Return the stated type, or else that of the listed values: strict mode requires one everywhere."""
        if "type" in schema:
            return schema["type"]  # type: ignore[no-any-return]  # a valid schema has a string or strings here
        listed = [schema["const"]] if "const" in schema else schema.get("enum", ())
        if not listed:
            self.refuse(place, "a value of any type", "give it a type")
        found = list(dict.fromkeys(map(json_type, listed)))
        return found if len(found) > 1 else found[0]

    def _close_object(self, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
        if schema.get("additionalProperties", "properties" not in schema) is not False:
            self.refuse(place, "an object with any keys", "name its properties, or take a list of name and value")
        needed = schema.get("required", ())
        parts = {
            name: self._rewrite_property(part, f"{place}.{name}" if place else name, optional=name not in needed)
            for name, part in schema.get("properties", {}).items()
        }
        return {"properties": parts, "required": list(parts), "additionalProperties": False}

    def _rewrite_property(self, schema: Any, place: str, *, optional: bool) -> dict[str, Any]:
        strict = self.rewrite(schema, place)
        if not optional or accepts_null(schema, self.root):
            return strict
        notes = [strict.pop("description")] if "description" in strict else []
        if "default" in schema:
            notes.append(f"Null means {json.dumps(schema['default'], ensure_ascii=False)}.")
        return _make_nullable(strict) | ({"description": " ".join(notes)} if notes else {})

    def refuse(self, place: str, feature: str, instead: str) -> NoReturn:
        """Raise an error for an unsupported part of the schema, with advice."""
        where = f"Tool {self.tool!r}, parameter {place!r}" if place else f"Tool {self.tool!r}"
        raise MisuseError(f"{where}: strict mode does not support {feature}; {instead}, or leave strict=True out.")


def _make_nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema extended by null.

    A list of types is used only for plain types, because an enumeration would have to list null, too.
    """
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], _NULL]}
    if "type" in schema and schema.keys().isdisjoint({"enum", "const", "items", "properties"}):
        return {**schema, "type": [*declared_types(schema), "null"]}
    return {"anyOf": [schema, _NULL]}


@attrs.frozen
class _NullRemover(Value):
    """Removes the nulls of omitted values from the arguments of one tool."""

    root: Mapping[str, Any]

    def remove(self, value: Any, schema: Any) -> Any:
        """Return the value without these nulls, at every level."""
        found = find_branch(value, schema, self.root)
        leaf = found if isinstance(found, Mapping) else {}
        if isinstance(value, list):
            return [self.remove(item, leaf.get("items", {})) for item in value]
        if not isinstance(value, dict):
            return value
        parts, needed = leaf.get("properties", {}), leaf.get("required", ())
        return {
            key: self.remove(item, parts.get(key, {}))
            for key, item in value.items()
            if not (item is None and key in parts and key not in needed and not accepts_null(parts[key], self.root))
        }
