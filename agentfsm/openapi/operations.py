"""The operations of an OpenAPI document, with the arguments that a model gives for each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

import attrs

from agentfsm.core.errors import ArgumentsError, MisuseError
from agentfsm.core.value import Value
from agentfsm.openapi.document import Document

METHODS: Final = ("get", "head", "options", "put", "post", "delete", "patch", "trace")
# Methods that change nothing. PUT and DELETE may be repeated by the standard, but many servers do not keep it.
READ_ONLY_METHODS: Final = frozenset({"get", "head", "options", "trace"})
PLACES: Final = ("path", "query", "header", "cookie")
# Headers that OpenAPI ignores as parameters: the request sets them.
_OWN_HEADERS: Final = frozenset({"accept", "authorization", "content-type"})
_NAME_CHARS: Final = 64
_FORM: Final = "application/x-www-form-urlencoded"
_SEPARATORS: Final = {"form": ",", "spaceDelimited": " ", "pipeDelimited": "|"}


@attrs.frozen
class Parameter(Value):
    """A parameter of an operation, outside of its body."""

    argument: str
    """Name of the tool's argument."""

    name: str
    """Name in the request."""

    place: str
    """"path", "query", "header" or "cookie"."""

    required: bool
    """Whether each request has it."""

    schema: Any
    """Schema of the value, as the document has it."""

    description: str
    """Text for the model; may be empty."""

    style: str
    """Form of arrays and objects, in OpenAPI's words, for example "form"."""

    explode: bool
    """Whether each item of an array is a parameter of its own."""

    is_json: bool
    """Whether the value is written as JSON (`content` in place of `schema`)."""

    def render(self, value: Any) -> list[tuple[str, str]]:
        """Return the names and texts that the value becomes in a request."""
        if self.is_json:
            return [(self.name, json.dumps(value))]
        if isinstance(value, list):
            texts = [_to_text(each) for each in value]
            if self.explode and self.place in {"query", "cookie"}:
                return [(self.name, text) for text in texts]
            return [(self.name, _SEPARATORS.get(self.style, ",").join(texts))]
        if isinstance(value, Mapping):
            if self.style == "deepObject":
                return [(f"{self.name}[{key}]", _to_text(each)) for key, each in value.items()]
            if self.explode and self.place == "query":
                return [(key, _to_text(each)) for key, each in value.items()]
            pairs = [
                f"{key}={_to_text(each)}" if self.explode else f"{key},{_to_text(each)}" for key, each in value.items()
            ]
            return [(self.name, ",".join(pairs))]
        return [(self.name, _to_text(value))]


@attrs.frozen
class Body(Value):
    """The body of an operation's requests."""

    argument: str
    """Name of the tool's argument."""

    media_type: str
    """Media type, for example "application/json"."""

    required: bool
    """Whether each request has it."""

    schema: Any
    """Schema of the content, as the document has it."""

    description: str
    """Text for the model; may be empty."""

    def render(self, value: Any) -> dict[str, Any]:
        """Return the arguments of the HTTP client that send the value."""
        if self.media_type == _FORM:
            if not isinstance(value, Mapping):
                raise ArgumentsError(f"{self.argument}: expected an object, for a form")
            return {"data": {key: each if isinstance(each, str) else _to_text(each) for key, each in value.items()}}
        text = value if _is_text(self.media_type) and isinstance(value, str) else json.dumps(value)
        return {"content": text.encode(), "headers": {"Content-Type": self.media_type}}


@attrs.frozen
class Operation(Value):
    """An operation of the API."""

    name: str
    """Name of the tool: the `operationId`, or method and path, as 1 to 64 letters, digits, "_" or "-"."""

    ids: frozenset[str]
    """Names by which `include=` selects it: the `operationId`, the tool's name, and "GET /pets"."""

    tags: frozenset[str]
    """Tags of the operation."""

    method: str
    """HTTP method in lower case."""

    path: str
    """Path with placeholders, for example "/pets/{id}"."""

    description: str
    """Summary and description."""

    parameters: tuple[Parameter, ...]
    """Parameters in the order of the document."""

    body: Body | None
    """Body of requests; None if there is none."""

    unsupported: str
    """Reason why no tool can be made; empty if one can."""

    def build_schema(self, document: Document) -> dict[str, Any]:
        """Return the JSON Schema of the tool's arguments."""
        inputs: list[Parameter | Body] = [*self.parameters, *([self.body] if self.body else [])]
        properties, definitions = document.convert_schemas({each.argument: each.schema for each in inputs})
        for each in inputs:
            if each.description and "description" not in properties[each.argument]:
                properties[each.argument] = {**properties[each.argument], "description": each.description}
        return {
            "type": "object",
            "properties": properties,
            "required": [each.argument for each in inputs if each.required],
            "additionalProperties": False,
            **({"$defs": definitions} if definitions else {}),
        }

    def render_path(self, values: Mapping[str, str]) -> str:
        """Return the path with its placeholders replaced.

        Raises:
            ArgumentsError: if a value would change the path's structure.
        """
        for name, value in values.items():
            if value in {"", ".", ".."}:
                raise ArgumentsError(f"{name}: {value!r} cannot be a part of a path. Nothing was sent.")
        return re.sub(r"\{([^{}]+)\}", lambda match: quote(values[match[1]], safe=""), self.path)


def find_operations(document: Document) -> Iterator[Operation]:
    """Return the operations of a document, in its order, with unique tool names."""
    taken: set[str] = set()
    for path, given in (document.content.get("paths") or {}).items():
        item = document.follow(given)
        for method in METHODS:
            if isinstance(item, Mapping) and isinstance(operation := item.get(method), Mapping):
                shared = item.get("parameters") or ()
                name = _make_unique(str(operation.get("operationId") or f"{method}_{path}"), taken)
                yield _build_operation(document, name, (method, path), shared, operation)


def _build_operation(
    document: Document,
    name: str,
    target: tuple[str, str],
    shared: Iterable[Any],
    operation: Mapping[str, Any],
) -> Operation:
    method, path = target
    given = operation.get("operationId")
    arguments: set[str] = set()
    parameters = tuple(_build_parameters(document, (*shared, *(operation.get("parameters") or ())), arguments))
    body, unsupported = _build_body(document, document.follow(operation.get("requestBody")), arguments)
    missing = set(re.findall(r"\{([^{}]+)\}", path)) - {each.name for each in parameters if each.place == "path"}
    if missing:
        unsupported = f"its path has {{{min(missing)}}}, which is not among its parameters"
    texts = [str(operation.get(key) or "").strip() for key in ("summary", "description")]
    return Operation(
        name=name,
        ids=frozenset({name, f"{method.upper()} {path}", *([str(given)] if given else ())}),
        tags=frozenset(map(str, operation.get("tags") or ())),
        method=method,
        path=path,
        description="\n\n".join(dict.fromkeys(text for text in texts if text)) or f"{method.upper()} {path}",
        parameters=parameters,
        body=body,
        unsupported=unsupported,
    )


def _build_parameters(document: Document, given: Iterable[Any], arguments: set[str]) -> Iterator[Parameter]:
    """Return the parameters; those of the operation replace shared ones of the same name and place."""
    found = [document.follow(each) for each in given]
    declared = {(each.get("in"), each.get("name")): each for each in found}
    for (place, name), each in declared.items():
        if place not in PLACES or not isinstance(name, str):
            raise MisuseError(f"the OpenAPI document has a parameter {name!r} in {place!r}: expected one of {PLACES}")
        if not (place == "header" and name.lower() in _OWN_HEADERS):
            yield _build_parameter(each, arguments)


def _build_parameter(found: Mapping[str, Any], arguments: set[str]) -> Parameter:
    place = found["in"]
    content = found.get("content")
    schema = next(iter(content.values())).get("schema", {}) if content else found.get("schema", {})
    style = found.get("style") or ("form" if place in {"query", "cookie"} else "simple")
    return Parameter(
        argument=_make_unique(found["name"], arguments),
        name=found["name"],
        place=place,
        required=place == "path" or found.get("required") is True,
        schema=schema,
        description=str(found.get("description") or ""),
        style=style,
        explode=found.get("explode", style == "form"),
        is_json=bool(content),
    )


def _build_body(document: Document, given: Any, arguments: set[str]) -> tuple[Body | None, str]:
    if not isinstance(given, Mapping):
        return None, ""
    content = {
        media_type.partition(";")[0].strip().lower(): each for media_type, each in given.get("content", {}).items()
    }
    readable = sorted(filter(_preference, content), key=_preference)
    if not readable:
        return None, f"its body is {' or '.join(content) or 'undeclared'}, which a model cannot write"
    chosen = readable[0]
    schema = document.follow(content[chosen]).get("schema") or ({} if not _is_text(chosen) else {"type": "string"})
    return Body(
        argument=_make_unique("body", arguments),
        media_type="application/json" if "*" in chosen else chosen,
        required=given.get("required") is True,
        schema=schema,
        description=str(given.get("description") or ""),
    ), ""


def _preference(media_type: str) -> int:
    """Rank a media type: 1 is best, 0 means that no body can be written in it."""
    if media_type in {"application/json", "*/*", "application/*"}:
        return 1
    if media_type.endswith("+json"):
        return 2
    if media_type == _FORM:
        return 3
    return 4 if _is_text(media_type) else 0


def _is_text(media_type: str) -> bool:
    return media_type.startswith("text/")


def _make_unique(text: str, taken: set[str]) -> str:
    """Return the text as a name for the model, different from those in `taken`, and add it there."""
    stem = re.sub(r"(_|[^A-Za-z0-9-])+", "_", text).strip("_")[:_NAME_CHARS] or "value"
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem[: _NAME_CHARS - 4]}_{number}"
    taken.add(name)
    return name


def _to_text(value: Any) -> str:
    """Return a scalar as a request has it; JSON for nested values."""
    return value if isinstance(value, str) else json.dumps(value)
