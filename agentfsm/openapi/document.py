"""Read an OpenAPI document of version 3: resolve references, and convert its schemas to plain JSON Schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import attrs

from agentfsm._lib.plugins import require_extra
from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value

_VERSIONS: Final = ("3.0", "3.1", "3.2")
# Keywords that JSON Schema does not have, that would show the model data of the API's authors, or that give a part an
# address: references of a document begin at its top.
_DROPPED: Final = frozenset(
    {"discriminator", "example", "examples", "externalDocs", "nullable", "xml"}
    | {"$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$recursiveRef", "$dynamicRef"}
)
# Keywords whose values are schemas by name, so that a name such as "example" in them is data and not a keyword.
_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# Keywords whose values are data, in which "$ref" and "nullable" mean nothing.
_DATA: Final = frozenset({"const", "default", "enum"})
# Keywords whose schemas describe the same field of a form, or its items.
_SAME_FIELD: Final = frozenset({"allOf", "anyOf", "items", "oneOf"})
# Keywords beside which a schema still describes any bytes.
_FILE_NOTES: Final = frozenset({"contentMediaType", "description", "title"})
# Longest chain of references that is followed: each reference of a document leads to its target in one or two steps.
_MAX_REFERENCES: Final = 20
# Maximum of schemas in the arguments of one tool, which has room for 2,000 that differ.
_MAX_SCHEMAS: Final = 20_000
# Maximum of nested schemas.
_MAX_DEPTH: Final = 64
_NAME_CHARS: Final = 64
# Lookaround and references back, which take more than linear time and are not supported in patterns.
_COSTLY_PATTERN: Final = re.compile(r"\(\?<?[=!]|\\[1-9]|\(\?P=")

FILE_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "filename": {"type": "string"},
        "content": {"type": "string", "description": "The text of the file, or its bytes in Base64"},
        "base64": {"type": "boolean", "description": "Whether the content is in Base64. Default: false"},
    },
    "required": ["filename", "content"],
    "additionalProperties": False,
}
"""JSON Schema of a file that a model gives."""


@attrs.frozen
class Document(Value):
    """An OpenAPI document."""

    content: Mapping[str, Any]
    """The parsed document."""

    @classmethod
    def load(cls, spec: Mapping[str, Any] | str | Path) -> Document:
        """Return the document of a mapping, or of a file in JSON or YAML.

        Raises:
            MisuseError: if the file cannot be read, or it is not an OpenAPI document of version 3.
            MissingExtraError: if it is in YAML, and the extra `openapi` is not installed.
        """
        content = spec if isinstance(spec, Mapping) else _read_file(spec)
        version = str(content.get("openapi", "")) if isinstance(content, Mapping) else ""
        if not version.startswith(_VERSIONS):
            found = f"version {version!r}" if version else "no 'openapi' version"
            if isinstance(content, Mapping) and "swagger" in content:
                found = (
                    f"Swagger {content['swagger']!r}: convert it to OpenAPI 3 first, for example with "
                    "`npx swagger2openapi old.json -o new.json`"
                )
            raise MisuseError(f"tools_from_openapi() expected an OpenAPI 3.0, 3.1 or 3.2 document, found {found}")
        if not isinstance(content.get("paths") or {}, Mapping):
            raise MisuseError(
                "the OpenAPI document has paths that are no object: see its specification, 'Paths Object'"
            )
        return cls(content)

    @property
    def is_3_0(self) -> bool:
        """Whether it is of version 3.0, whose schemas are not yet those of JSON Schema."""
        return str(self.content["openapi"]).startswith("3.0")

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
            value = self.look_up(reference)
        raise MisuseError(f"the reference {reference!r} of the OpenAPI document leads in a circle")

    def look_up(self, reference: str) -> Any:
        """Return the part of the document at a reference such as "#/components/schemas/Pet".

        Raises:
            MisuseError: if it leads outside of the document, or to nothing.
        """
        if not reference.startswith("#/"):
            raise MisuseError(
                f"the OpenAPI document refers to {reference!r} outside of it: bundle it into one document first, for "
                "example with `npx @redocly/cli bundle`"
            )
        found: Any = self.content
        for part in reference[2:].split("/"):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                raise MisuseError(f"the reference {reference!r} of the OpenAPI document leads to nothing")
        return found

    def convert_schemas(
        self, schemas: Mapping[str, Any], *, files: frozenset[str] = frozenset()
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Convert schemas of the document to JSON Schema.

        Args:
            schemas: The schemas of a tool's arguments, by name.
            files: Properties that are files, in the body of an upload.

        Returns:
            The converted schemas by the same names, and the `$defs` that they refer to.

        Raises:
            MisuseError: if a reference cannot be followed, or the schemas are too large for a tool.
        """
        conversion = _Conversion(self, files=files)
        converted = {name: conversion.convert(schema, f"#/properties/{name}") for name, schema in schemas.items()}
        return converted, dict(conversion.iter_definitions())

    def is_file(self, schema: Any) -> bool:
        """Return whether a schema describes bytes, or a choice or list of them, in the body of an upload."""
        wanted = [schema]
        for _ in range(_MAX_REFERENCES):
            if not wanted:
                break
            found = self.follow(wanted.pop(0))
            if self.is_binary(found, is_field=True):
                return True
            if isinstance(found, Mapping):
                for keyword in ("allOf", "anyOf", "oneOf"):
                    wanted += found.get(keyword) or ()
                wanted += [found["items"]] if "items" in found else []
        return False

    def is_binary(self, schema: Any, *, is_field: bool) -> bool:
        """Return whether a schema describes bytes: by its format, or its media type without an encoding as text.

        From OpenAPI 3.1 on, a schema without keywords does so as well, if it is that of a field of an upload.
        """
        if not isinstance(schema, Mapping):
            return False
        if schema.get("format") == "binary" or ("contentMediaType" in schema and "contentEncoding" not in schema):
            return True
        return is_field and not self.is_3_0 and schema.keys() <= _FILE_NOTES

    def find_properties(self, schema: Any) -> dict[str, Any]:
        """Return the schemas of the properties that an object has by its schema, with those of `allOf` and choices."""
        found: dict[str, Any] = {}
        wanted = [schema]
        for _ in range(_MAX_REFERENCES):
            if not wanted:
                break
            part = self.follow(wanted.pop(0))
            if isinstance(part, Mapping):
                found = {**(part.get("properties") or {}), **found}
                for keyword in ("allOf", "anyOf", "oneOf"):
                    wanted += part.get(keyword) or ()
        return found


@attrs.define(eq=False)
class _Conversion:
    """The conversion of the schemas of one tool."""

    document: Document
    files: frozenset[str] = attrs.field(kw_only=True)
    _names: dict[str, str] = attrs.field(factory=dict, init=False)
    """Names in `$defs` by reference."""

    _taken: set[str] = attrs.field(factory=set, init=False)
    _wanted: list[str] = attrs.field(factory=list, init=False)
    """References to schemas that are not converted yet."""

    _root: str = attrs.field(default="", init=False)
    """Reference, in the tool's schema, to the schema that is converted."""

    _anchor: object = attrs.field(default=None, init=False)
    """The `$dynamicAnchor` of that schema."""

    _left: int = attrs.field(default=_MAX_SCHEMAS, init=False)

    def convert(self, schema: Any, root: str) -> Any:
        """Return the JSON Schema of a schema that stands at a place of the tool's schema."""
        self._root = root
        self._anchor = schema.get("$dynamicAnchor") if isinstance(schema, Mapping) else None
        return self._convert(schema, 0)

    def iter_definitions(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the JSON Schema of each schema that was referred to."""
        while self._wanted:
            reference = self._wanted.pop(0)
            name = self._names[reference]
            yield name, self.convert(self.document.look_up(reference), f"#/$defs/{name}")

    def _convert(self, schema: Any, depth: int, *, is_field: bool = False) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise MisuseError(
                f"its schema is too large for a tool: more than {_MAX_SCHEMAS:,} parts, or {_MAX_DEPTH} levels"
            )
        if isinstance(schema, list):
            return [self._convert(each, depth + 1, is_field=is_field) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        if self.files and self.document.is_binary(schema, is_field=is_field):
            return {**FILE_SCHEMA, **{name: schema[name] for name in ("description", "title") if name in schema}}
        reference = self._find_reference(schema)
        if reference is not None and self.document.is_3_0:
            return {"$ref": reference}  # other keywords beside it count from version 3.1 on
        result: dict[str, Any] = {} if reference is None else {"$ref": reference}
        for keyword, value in schema.items():
            if keyword in _DROPPED or keyword == "$ref" or keyword.startswith("x-"):
                continue
            if keyword in _DATA:
                result[keyword] = value
            elif keyword in _BY_NAME and isinstance(value, Mapping):
                result[keyword] = {
                    name: self._convert(each, depth + 1, is_field=name in self.files)
                    for name, each in value.items()
                    if not self._is_read_only(each)
                }
            elif keyword != "pattern" or not _COSTLY_PATTERN.search(str(value)):
                result[keyword] = self._convert(value, depth + 1, is_field=is_field and keyword in _SAME_FIELD)
        # Properties that only responses have are removed, so a request does not require them.
        required, properties = result.get("required"), schema.get("properties")
        if isinstance(required, list) and isinstance(properties, Mapping):
            removed = properties.keys() - result["properties"].keys()
            result["required"] = [name for name in required if not (isinstance(name, str) and name in removed)]
        # OpenAPI 3.0 has `exclusiveMinimum: true` beside `minimum`, JSON Schema a number.
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(result.get(exclusive), bool) and result.pop(exclusive) and bound in result:
                result[exclusive] = result.pop(bound)
        return _allow_null(result) if schema.get("nullable") is True else result

    def _find_reference(self, schema: Mapping[str, Any]) -> str | None:
        """Return the place in the tool's schema that a schema refers to. None: it refers to none."""
        if isinstance(reference := schema.get("$ref"), str):
            self.document.look_up(reference)
            if reference not in self._names:
                self._names[reference] = make_unique(unquote(reference).rpartition("/")[2], self._taken)
                self._wanted.append(reference)
            return f"#/$defs/{self._names[reference]}"
        if schema.get("$recursiveRef") == "#":
            return self._root
        if isinstance(reference := schema.get("$dynamicRef"), str):
            if reference != f"#{self._anchor}":
                raise MisuseError(
                    f"its schema has the $dynamicRef {reference!r}, which is not the $dynamicAnchor of the schema that "
                    "it stands in: write a $ref"
                )
            return self._root
        return None

    def _is_read_only(self, schema: Any) -> bool:
        found = self.document.follow(schema)
        return any(isinstance(each, Mapping) and each.get("readOnly") is True for each in (schema, found))


def make_unique(text: str, taken: set[str]) -> str:
    """Return the text as a name for the model, different from those in `taken`, and add it there."""
    stem = re.sub(r"(_|[^A-Za-z0-9-])+", "_", text).strip("_")[:_NAME_CHARS] or "value"
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem[: _NAME_CHARS - 4]}_{number}"
    taken.add(name)
    return name


def _read_file(path: object) -> Any:
    if not isinstance(path, str | Path):
        raise MisuseError(
            f"tools_from_openapi(spec={path!r}): give the parsed document as a mapping, or the path of a file in JSON "
            "or YAML"
        )
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        return _parse_yaml(text, file) if file.suffix.lower() in {".yaml", ".yml"} else json.loads(text)
    except OSError as error:
        raise MisuseError(f"the OpenAPI document {str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"{str(path)!r} is not JSON ({error}); a file in YAML is named .yaml or .yml") from error


def _parse_yaml(text: str, file: Path) -> Any:
    """Parse a document in YAML 1.2: `no` and `2020-01-01` are texts there, and so are all keys of a document."""
    with require_extra("an OpenAPI document in YAML", "openapi", "yaml"):
        import yaml  # type: ignore[import-untyped]  # noqa: PLC0415  an extra

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the one in C is ten times as fast
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  as yaml has it

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            found = super().construct_mapping(node, deep)
            return {key if isinstance(key, str) else json.dumps(key): value for key, value in found.items()}

    for kind, pattern, first in (
        ("bool", r"true|false|True|False|TRUE|FALSE", "tTfF"),
        ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
        ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
        ("float", r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
        ("merge", "<<", "<"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(rf"^(?:{pattern})$"), list(first))
    try:
        return yaml.load(text, Loader)  # noqa: S506  a safe loader
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise MisuseError(f"{str(file)!r} is not YAML: {error}") from error


def _allow_null(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(kind := schema.get("type"), str):
        values = {"enum": [*schema["enum"], None]} if None not in schema.get("enum", [None]) else {}
        return {**schema, "type": [kind, "null"], **values}
    return {"anyOf": [schema, {"type": "null"}]}
