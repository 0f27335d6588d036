"""Read an OpenAPI 3.0 or 3.1 document: resolve references, and convert its schemas to plain JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value

_SCHEMAS: Final = "#/components/schemas/"
# Keywords of OpenAPI 3.0 that JSON Schema does not have, or that would show the model data of the API's authors.
_ANNOTATIONS: Final = frozenset({"discriminator", "example", "examples", "externalDocs", "nullable", "xml"})
# Keywords whose values are schemas by name, so that a name such as "example" in them is data and not a keyword.
_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# Keywords whose values are data, in which "$ref" and "nullable" mean nothing.
_DATA: Final = frozenset({"const", "default", "enum"})
# Longest chain of references that is followed: each reference of a document leads to its target in one or two steps.
_MAX_REFERENCES: Final = 20


@attrs.frozen
class Document(Value):
    """An OpenAPI document."""

    content: Mapping[str, Any]
    """The parsed document."""

    @classmethod
    def load(cls, spec: Mapping[str, Any] | str | Path) -> Document:
        """Return the document of a mapping or of a JSON file.

        Raises:
            MisuseError: if the file cannot be read, or it is not an OpenAPI 3.0 or 3.1 document.
        """
        content = spec if isinstance(spec, Mapping) else _read_json(spec)
        version = content.get("openapi") if isinstance(content, Mapping) else None
        if not isinstance(version, str) or not version.startswith(("3.0", "3.1")):
            found = f"version {version!r}" if version else "no 'openapi' version"
            if isinstance(content, Mapping) and "swagger" in content:
                found = f"Swagger {content['swagger']!r}; convert it to OpenAPI 3 first"
            raise MisuseError(f"tools_from_openapi() expected an OpenAPI 3.0 or 3.1 document, found {found}")
        return cls(content)

    def follow(self, value: Any) -> Any:
        """Return the object that a reference object points to, or the value itself if it is not a reference.

        Raises:
            MisuseError: if the reference leads outside of the document, to nothing, or in a circle.
        """
        reference = None
        for _ in range(_MAX_REFERENCES):
            if not isinstance(value, Mapping) or not isinstance(value.get("$ref"), str):
                return value
            reference = value["$ref"]
            value = self._look_up(reference)
        raise MisuseError(f"the reference {reference!r} of the OpenAPI document leads in a circle")

    def _look_up(self, reference: str) -> Any:
        if not reference.startswith("#/"):
            raise MisuseError(
                f"the OpenAPI document refers to {reference!r} outside of it: bundle it into one document first, for "
                "example with `npx @redocly/cli bundle`"
            )
        found: Any = self.content
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise MisuseError(f"the reference {reference!r} of the OpenAPI document leads to nothing")
            found = found[key]
        return found

    def convert_schemas(self, schemas: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Convert schemas of the document to JSON Schema.

        Returns:
            The converted schemas by the same names, and the `$defs` that they refer to.
        """
        converted = {name: self._convert(schema) for name, schema in schemas.items()}
        definitions: dict[str, Any] = {}
        wanted = list(_find_definitions(converted))
        while wanted:
            name = wanted.pop()
            if name not in definitions:
                definitions[name] = self._convert(self._look_up(_SCHEMAS + name))
                wanted += _find_definitions(definitions[name])
        return converted, definitions

    def _convert(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self._convert(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference.startswith(_SCHEMAS):
                return {"$ref": f"#/$defs/{reference.removeprefix(_SCHEMAS)}"}
            return self._convert(self.follow(schema))
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in _ANNOTATIONS or keyword.startswith("x-"):
                continue
            if keyword in _DATA:
                result[keyword] = value
            elif keyword in _BY_NAME and isinstance(value, Mapping):
                result[keyword] = {
                    name: self._convert(each) for name, each in value.items() if not self._is_read_only(each)
                }
            else:
                result[keyword] = self._convert(value)
        _drop_missing_required(result, schema)
        _convert_bounds(result)
        return _allow_null(result) if schema.get("nullable") is True else result

    def _is_read_only(self, schema: Any) -> bool:
        found = self.follow(schema)
        return isinstance(found, Mapping) and found.get("readOnly") is True


def _read_json(path: object) -> Any:
    if not isinstance(path, str | Path):
        raise MisuseError(
            f"tools_from_openapi(spec={path!r}): give the parsed document as a mapping, or the path of a JSON file"
        )
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MisuseError(f"the OpenAPI document {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise MisuseError(
            f"{str(path)!r} is not JSON ({error}); parse a YAML document with a YAML library and give the mapping"
        ) from error


def _find_definitions(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _find_definitions(each)
    elif isinstance(value, Mapping):
        reference = value.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/$defs/"):
            yield reference.removeprefix("#/$defs/")
        for each in value.values():
            yield from _find_definitions(each)


def _drop_missing_required(result: dict[str, Any], schema: Mapping[str, Any]) -> None:
    """Properties that only responses have are removed, so a request does not require them."""
    if isinstance(required := result.get("required"), list) and isinstance(schema.get("properties"), Mapping):
        removed = schema["properties"].keys() - result["properties"].keys()
        result["required"] = [name for name in required if name not in removed]


def _convert_bounds(schema: dict[str, Any]) -> None:
    """OpenAPI 3.0 has `exclusiveMinimum: true` beside `minimum`, JSON Schema a number."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and bound in schema:
            schema[exclusive] = schema.pop(bound)


def _allow_null(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(kind := schema.get("type"), str):
        values = {"enum": [*schema["enum"], None]} if None not in schema.get("enum", [None]) else {}
        return {**schema, "type": [kind, "null"], **values}
    return {"anyOf": [schema, {"type": "null"}]}
