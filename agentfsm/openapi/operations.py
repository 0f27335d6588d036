"""The operations of an OpenAPI document: the arguments that a model gives for each, and how requests carry them."""

from __future__ import annotations

import base64
import binascii
import json
import mimetypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final
from urllib.parse import quote

import attrs

from agentfsm.core.errors import ArgumentsError, MisuseError
from agentfsm.core.value import Value
from agentfsm.openapi.document import FILE_SCHEMA, Document, make_unique

# Characters between percent signs that are encoded already.
_TRIPLE: Final = re.compile(r"(%[0-9A-Fa-f]{2})")
# Reserved characters that mean nothing in a query and in a form. The others have to be encoded there.
_HARMLESS: Final = ":/?@!$'()*,;"


def to_text(value: Any) -> str:
    """Return a value as text: a string as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def encode(text: str) -> str:
    """Percent-encode all but unreserved characters, for paths, queries, forms and cookies."""
    return quote(text, safe="")


def encode_reserved(text: str) -> str:
    """Percent-encode for `allowReserved`: reserved characters and encoded ones stay."""
    parts = _TRIPLE.split(text)
    return "".join(part if _TRIPLE.fullmatch(part) else quote(part, safe=_HARMLESS) for part in parts)


def to_pairs(
    name: str, value: Any, *, style: str, explode: bool, encode: Callable[[str], str]
) -> list[tuple[str, str]]:
    """Return the names and values that a value becomes in a query, a cookie or a form.

    `deepObject` is defined for objects of scalars. Nested values follow Stripe: `a[b][c]=1`, `a[0]=x`.
    """
    if style == "deepObject" and isinstance(value, list | Mapping):
        return list(_iter_nested(encode(name), value, encode))
    if isinstance(value, Mapping):
        pairs = [(encode(key), encode(to_text(each))) for key, each in value.items() if each is not None]
        if explode:
            return pairs
        texts = [*chain.from_iterable(pairs)]
    elif isinstance(value, list):
        texts = [encode(to_text(each)) for each in value if each is not None]
        if explode:
            return [(encode(name), text) for text in texts]
    else:
        texts = [] if value is None else [encode(to_text(value))]
    separator = {"spaceDelimited": encode(" "), "pipeDelimited": encode("|")}.get(style, ",")
    return [(encode(name), separator.join(texts))] if texts else []


def _iter_nested(name: str, value: Any, encode: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, list | Mapping):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _iter_nested(f"{name}{encode('[')}{encode(str(key))}{encode(']')}", each, encode)
    elif value is not None:
        yield name, encode(to_text(value))


def to_segment(name: str, value: Any, *, style: str, explode: bool, encode: Callable[[str], str]) -> str:
    """Return the text that a value becomes in a path or a header: of style `simple`, `label` or `matrix`."""
    lead = {"label": ".", "matrix": ";"}.get(style, "")
    named = False
    if isinstance(value, Mapping):
        pairs = [(encode(key), encode(to_text(each))) for key, each in value.items() if each is not None]
        parts = [f"{key}={text}" for key, text in pairs] if explode else [",".join(chain.from_iterable(pairs))]
        named = explode
    elif isinstance(value, list):
        texts = [encode(to_text(each)) for each in value if each is not None]
        parts = texts if explode else [",".join(texts)]
    else:
        parts = [encode(to_text(value))]
    if style == "matrix" and not named:
        parts = [f"{encode(name)}={part}" if part else encode(name) for part in parts]
    return lead + (lead or ",").join(parts)


METHODS: Final = ("get", "head", "options", "put", "post", "delete", "patch", "trace", "query")
# Methods that change nothing. PUT and DELETE may be repeated by the standard, but many servers do not keep it.
READ_ONLY_METHODS: Final = frozenset({"get", "head", "options", "trace", "query"})
PLACES: Final = ("path", "query", "header", "cookie")
# Headers that OpenAPI ignores as parameters: the request sets them.
_OWN_HEADERS: Final = frozenset({"accept", "authorization", "content-type"})
_FORM: Final = "application/x-www-form-urlencoded"
_MULTIPART: Final = "multipart/form-data"
# Fields of an encoding with which the styles of query parameters apply; without them its media type counts.
_STYLE_FIELDS: Final = frozenset({"style", "explode", "allowReserved"})
_PLACEHOLDER: Final = re.compile(r"\{([^{}]+)\}")


@attrs.frozen(kw_only=True)
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

    allow_reserved: bool
    """Whether reserved characters of a query parameter are sent as they are."""

    media_type: str
    """Media type in which the value is written (`content` in place of `schema`); empty: by its style."""

    def render(self, value: Any) -> list[tuple[str, str]]:
        """Return the names and texts that the value becomes in a request, encoded for its place.

        Raises:
            ArgumentsError: if a header or cookie cannot have the value.
        """
        if self.media_type:
            value = _write_content(value, self.media_type)
        if value is None:
            if self.place == "path":
                raise ArgumentsError(f"{self.argument}: null cannot be a part of a path. Nothing was sent.")
            return []
        if self.place == "path":
            return [(self.name, to_segment(self.name, value, style=self.style, explode=self.explode, encode=encode))]
        if self.place == "header":
            text = to_segment(self.name, value, style="simple", explode=self.explode, encode=str)
            return [(self.name, self._check(text, ""))] if text or value == "" else []
        write: Callable[[str], str] = encode_reserved if self.allow_reserved and self.place == "query" else encode
        if self.place == "cookie" and self.style == "cookie":
            write = str
        pairs = to_pairs(self.name, value, style=self.style, explode=self.explode, encode=write)
        return [(name, self._check(text, ";")) for name, text in pairs] if self.place == "cookie" else pairs

    def _check(self, text: str, separators: str) -> str:
        """Return a text that is sent as it is, if it cannot become a second header or cookie."""
        if not (text.isascii() and (text.isprintable() or not text)) or any(each in text for each in separators):
            raise ArgumentsError(
                f"{self.argument}: a {self.place} has printable ASCII characters only"
                f"{', and no semicolon' if separators else ''}. Nothing was sent."
            )
        return text


@attrs.frozen(kw_only=True)
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

    encoding: Mapping[str, Any]
    """Encodings of the fields of a form by their names, as the document has them."""

    files: frozenset[str]
    """Fields of a form whose values are files."""

    def render(self, value: Any) -> dict[str, Any]:
        """Return the arguments of the HTTP client that send the value.

        Raises:
            ArgumentsError: if there has to be an object, for a form, or the bytes of a file are not in Base64.
        """
        if self.media_type in {_FORM, _MULTIPART}:
            if value is None:
                return {}
            if not isinstance(value, Mapping):
                raise ArgumentsError(f"{self.argument}: expected an object, for a form")
            if self.media_type == _MULTIPART:
                return {"files": [part for name, each in value.items() for part in self._iter_parts(name, each)]}
            pairs = [pair for name, each in value.items() for pair in self._iter_pairs(name, each)]
            text = "&".join(f"{name}={text}" for name, text in pairs)
        else:
            is_text = _is_text(self.media_type) and isinstance(value, str)
            text = value if is_text else json.dumps(value)
        return {"content": text.encode(), "headers": {"Content-Type": self.media_type}}

    def _iter_pairs(self, name: str, value: Any) -> Iterator[tuple[str, str]]:
        """Yield the encoded names and values of a field of a form in a URL's encoding."""
        given = self.encoding.get(name) or {}
        if given.keys() & _STYLE_FIELDS:
            write = encode_reserved if given.get("allowReserved") else encode
            style = given.get("style") or "form"
            explode = given.get("explode", style == "form")
            yield from to_pairs(name, value, style=style, explode=explode, encode=write)
            return
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                yield encode(name), encode(_write_content(each, given.get("contentType", "")))

    def _iter_parts(self, name: str, value: Any) -> Iterator[tuple[str, tuple[str | None, bytes, str | None]]]:
        """Yield the parts of a field of a form in parts: its name, and the file name, content and media type."""
        given = self.encoding.get(name) or {}
        if given.keys() & _STYLE_FIELDS and name not in self.files:
            style = given.get("style") or "form"
            for key, text in to_pairs(
                name, value, style=style, explode=given.get("explode", style == "form"), encode=str
            ):
                yield key, (None, text.encode(), None)
            return
        allowed = [each.strip() for each in str(given.get("contentType") or "").split(",")]
        declared = allowed[0] if "*" not in allowed[0] else ""
        for each in value if isinstance(value, list) else [value]:
            if name in self.files and isinstance(each, Mapping) and each.keys() >= set(FILE_SCHEMA["required"]):
                guessed = mimetypes.guess_type(str(each["filename"]))[0] or "application/octet-stream"
                media_type = guessed if guessed in allowed or not declared else declared
                yield name, (str(each["filename"]), self._read_file(name, each), media_type)
            elif each is not None:
                kind = declared or ("application/json" if isinstance(each, list | Mapping) else None)
                yield name, (None, _write_content(each, declared).encode(), kind)

    def _read_file(self, name: str, file: Mapping[str, Any]) -> bytes:
        try:
            return base64.b64decode(file["content"], validate=True) if file.get("base64") else file["content"].encode()
        except (binascii.Error, ValueError) as error:
            raise ArgumentsError(
                f"{self.argument}.{name}: the content is not valid Base64 ({error}). Nothing was sent."
            ) from error


@attrs.frozen(kw_only=True)
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

    server: str
    """URL of the server that the document names for this operation or its path; empty: that of the document."""

    parameters: tuple[Parameter, ...] = ()
    """Parameters in the order of the document."""

    body: Body | None = None
    """Body of requests; None if there is none."""

    unsupported: str = ""
    """Reason why no tool can be made; empty if one can."""

    def build_schema(self, document: Document) -> dict[str, Any]:
        """Return the JSON Schema of the tool's arguments.

        Raises:
            MisuseError: if a schema cannot be converted.
        """
        inputs: list[Parameter | Body] = [*self.parameters, *([self.body] if self.body else [])]
        properties, definitions = document.convert_schemas(
            {each.argument: each.schema for each in inputs},
            files=self.body.files if self.body else frozenset(),
        )
        for each in inputs:
            own = properties[each.argument] if isinstance(properties[each.argument], dict) else {}
            said = each.description or str(own.get("description") or "")
            if isinstance(each, Parameter) and each.argument != each.name:
                said = f"`{each.name}`: {said}".removesuffix(": ")  # "StartTime<" and "StartTime>" differ in it only
            if said and (own.get("description") is None or said.startswith("`")):
                properties[each.argument] = {**own, "description": said}
        return {
            "type": "object",
            "properties": properties,
            "required": [each.argument for each in inputs if each.required],
            "additionalProperties": False,
            **({"$defs": definitions} if definitions else {}),
        }

    def render_url(self, path: Mapping[str, str], query: Iterable[tuple[str, str]]) -> str:
        """Return the path with its placeholders replaced, and the query; what follows a "#" is not sent.

        Args:
            path: Encoded texts by placeholder.
            query: Encoded names and values.

        Raises:
            ArgumentsError: if a value would change the path's structure.
        """
        own, _, fixed = self.path.partition("#")[0].partition("?")
        segments = []
        for segment in own.split("/"):
            names = _PLACEHOLDER.findall(segment)
            segments.append(_PLACEHOLDER.sub(lambda match: path[match[1]], segment))
            if names and (segments[-1] in {"", ".", ".."} or not all(path[name] for name in names)):
                raise ArgumentsError(
                    f"{', '.join(names)}: {segments[-1]!r} cannot be a part of a path. Nothing was sent."
                )
        pairs = "&".join(filter(None, [fixed, *(f"{name}={text}" for name, text in query)]))
        return "/".join(segments) + (f"?{pairs}" if pairs else "")


def find_operations(document: Document) -> Iterator[Operation]:
    """Return the operations of a document, in its order, with unique tool names.

    One that cannot be read is returned with the reason.
    """
    taken: set[str] = set()
    for path, given in (document.content.get("paths") or {}).items():
        try:
            item = document.follow(given)
        except MisuseError as error:
            yield Operation(
                name=make_unique(path, taken),
                ids=frozenset({path}),
                tags=frozenset(),
                method="",
                path=path,
                description="",
                server="",
                unsupported=str(error),
            )
            continue
        if not isinstance(item, Mapping):
            continue
        named = {method: item[method] for method in METHODS if method in item}
        further = {str(name).lower(): each for name, each in (item.get("additionalOperations") or {}).items()}
        for method, operation in {**named, **further}.items():
            if isinstance(operation, Mapping):
                name = make_unique(str(operation.get("operationId") or f"{method}_{path}"), taken)
                yield _build_operation(document, name, (method, path), item, operation)


def _build_operation(
    document: Document,
    name: str,
    target: tuple[str, str],
    item: Mapping[str, Any],
    operation: Mapping[str, Any],
) -> Operation:
    method, path = target
    given = operation.get("operationId")
    texts = [str(operation.get(key) or "").strip() for key in ("summary", "description")]
    tags = operation.get("tags")
    bare = Operation(
        name=name,
        ids=frozenset({name, f"{method.upper()} {path}", *([str(given)] if given else ())}),
        tags=frozenset(map(str, tags)) if isinstance(tags, list) else frozenset(),
        method=method,
        path=path,
        description="\n\n".join(dict.fromkeys(text for text in texts if text)) or f"{method.upper()} {path}",
        server=find_server(operation.get("servers") or item.get("servers")),
    )
    arguments: set[str] = set()
    try:
        declared = (*(item.get("parameters") or ()), *(operation.get("parameters") or ()))
        parameters = tuple(_build_parameters(document, declared, arguments))
        body, unsupported = _build_body(document, document.follow(operation.get("requestBody")), arguments)
    except MisuseError as error:
        return attrs.evolve(bare, unsupported=str(error))
    except (AttributeError, TypeError) as error:  # a text where an object has to be: the others are to be used
        return attrs.evolve(
            bare, unsupported=f"the document describes it in a form that OpenAPI does not have ({error})"
        )
    missing = set(_PLACEHOLDER.findall(path)) - {each.name for each in parameters if each.place == "path"}
    if missing:
        unsupported = f"its path has {{{min(missing)}}}, which is not among its parameters"
    return attrs.evolve(bare, parameters=parameters, body=body, unsupported=unsupported)


def find_server(servers: Any) -> str:
    """Return the URL of the first of some servers, with the defaults of its variables; empty if there is none."""
    server = servers[0] if isinstance(servers, list | tuple) and servers else None
    if not isinstance(server, Mapping):
        return ""
    url, variables = str(server.get("url", "")), server.get("variables")
    for name, variable in variables.items() if isinstance(variables, Mapping) else ():
        if isinstance(variable, Mapping):
            url = url.replace(f"{{{name}}}", str(variable.get("default", "")))
    return url


def _build_parameters(document: Document, given: Iterable[Any], arguments: set[str]) -> Iterator[Parameter]:
    """Return the parameters; those of the operation replace shared ones of the same name and place."""
    found = [document.follow(each) for each in given]
    declared = {(each.get("in"), each.get("name")): each for each in found}
    for (place, name), each in declared.items():
        if place not in PLACES or not isinstance(name, str):
            raise MisuseError(f"it has a parameter {name!r} in {place!r}: expected one of {', '.join(PLACES)}")
        if not (place == "header" and name.lower() in _OWN_HEADERS):
            yield _build_parameter(document, each, arguments)


def _build_parameter(document: Document, found: Mapping[str, Any], arguments: set[str]) -> Parameter:
    place = found["in"]
    content = found.get("content") or {}
    media_type, written = next(((name, document.follow(each)) for name, each in content.items()), ("", found))
    style = found.get("style") or ("form" if place in {"query", "cookie"} else "simple")
    return Parameter(
        argument=make_unique(found["name"], arguments),
        name=found["name"],
        place=place,
        required=place == "path" or found.get("required") is True,
        schema=written.get("schema", {}),
        description=str(found.get("description") or ""),
        style=style,
        explode=found.get("explode", style in {"form", "cookie"}),
        allow_reserved=found.get("allowReserved") is True,
        media_type=media_type,
    )


def _build_body(document: Document, given: Any, arguments: set[str]) -> tuple[Body | None, str]:
    if not isinstance(given, Mapping):
        return None, ""
    content = {
        media_type.partition(";")[0].strip().lower(): document.follow(each)
        for media_type, each in (given.get("content") or {}).items()
    }
    readable = sorted(filter(_preference, content), key=_preference)
    if not readable:
        return None, f"its body is {' or '.join(content) or 'undeclared'}, which a model cannot write"
    chosen = readable[0]
    schema = content[chosen].get("schema") or ({} if not _is_text(chosen) else {"type": "string"})
    return Body(
        argument=make_unique("body", arguments),
        media_type="application/json" if "*" in chosen else chosen,
        required=given.get("required") is True,
        schema=schema,
        description=str(given.get("description") or ""),
        encoding={
            name: each for name, each in (content[chosen].get("encoding") or {}).items() if isinstance(each, Mapping)
        },
        files=frozenset(
            name
            for name, each in (document.find_properties(schema) if chosen == _MULTIPART else {}).items()
            if document.is_file(each)
        ),
    ), ""


def _preference(media_type: str) -> int:
    """Rank a media type: 1 is best, 0 means that no body can be written in it."""
    if media_type in {"application/json", "*/*", "application/*"}:
        return 1
    if media_type.endswith("+json"):
        return 2
    if media_type in {_FORM, _MULTIPART}:
        return 3 if media_type == _FORM else 4
    return 5 if _is_text(media_type) else 0


def _is_text(media_type: str) -> bool:
    return media_type.startswith("text/")


def _write_content(value: Any, media_type: str) -> str:
    """Return a value in a media type: a string as JSON only where that is said."""
    return json.dumps(value, separators=(",", ":")) if "json" in media_type.lower() else to_text(value)
