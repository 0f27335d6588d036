"""Convert a server's results for the model: a text and media parts. Invalid content becomes a note, not an error."""

from __future__ import annotations

import json
import re
from binascii import a2b_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import mcp.types as m

from agentfsm.core.messages import (
    AudioPart,
    FilePart,
    ImagePart,
    Media,
    Part,
    TextPart,
    count_base64_bytes,
    replace_surrogates,
)
from agentfsm.core.shortening import shorten_line
from agentfsm.core.value import Value
from agentfsm.mcp.connection.lenient_parsing import describe_unknown_block
from agentfsm.tools.queue.media import format_omitted_part, select_usable
from agentfsm.tools.queue.result_text import render_parts, render_result
from agentfsm.tools.schema.arguments import format_problems
from agentfsm.tools.schema.complexity import ValidationCost, compute_cost, normalise_schema
from agentfsm.tools.schema.validator import compile_schema, find_problems

# Maximum length of a name, an address or a description from a server, in characters.
MAX_LABEL_CHARS: Final = 300
EMPTY_RESULT: Final = "(done, no output)"
UNEXPLAINED_FAILURE: Final = "(failed; the server gave no reason)"

# Source: RFC 6838, 4.2.
_MEDIA_TYPE: Final = re.compile(r"[a-z0-9!#$&^_.+-]{1,80}/[a-z0-9!#$&^_.+-]{1,80}")
# Media types of text.
_TEXT_TYPES: Final = re.compile(r"text/.*|application/(?:.*\+)?(?:json|xml|yaml|toml|javascript|sql)|image/svg\+xml")


def convert_result(result: m.CallToolResult) -> tuple[str, tuple[Media, ...]]:
    """Return the text of a result, and its media parts.

    A note replaces content for the user only. Structured content is shown as JSON, unless a text repeats it.
    """
    pieces = [piece for block in result.content for piece in _iter_pieces(block)]
    if result.structured_content is not None and not _is_repeated_in_texts(result.structured_content, result.content):
        pieces.append(render_result(result.structured_content)[0])
    text, parts = render_parts(pieces)
    return text if text.strip() else UNEXPLAINED_FAILURE if result.is_error else EMPTY_RESULT, parts


def convert_block(block: m.ContentBlock) -> tuple[Part, ...]:
    """Convert a block of a prompt to parts of a message; a text replaces content that cannot be shown."""
    return _to_parts(_iter_pieces(block))


def convert_resource(contents: Iterable[m.TextResourceContents | m.BlobResourceContents]) -> tuple[Part, ...]:
    """Convert the contents of a resource to parts of a message; a text replaces content that cannot be shown."""
    return _to_parts(map(_resource_content, contents))


def _to_parts(pieces: Iterable[str | Part]) -> tuple[Part, ...]:
    return tuple(
        TextPart(text=replace_surrogates(each)) if isinstance(each, str) else each for each in select_usable(pieces)
    )


def _iter_pieces(block: m.ContentBlock) -> Iterator[str | Part]:
    """Yield the texts and parts of a block."""
    audience = None if block.annotations is None else block.annotations.audience
    if audience and "assistant" not in audience:
        yield f"[{block.type} for the user alone: not shown]"
        return
    match block:
        case m.TextContent():
            yield block.text
        case m.ImageContent():
            yield _convert_data(block.data, _normalize_media_type(block.mime_type, "image"))
        case m.AudioContent():
            yield _convert_data(block.data, _normalize_media_type(block.mime_type, "audio"))
        case m.EmbeddedResource():
            kind = f", {shorten_line(block.resource.mime_type, MAX_LABEL_CHARS)}" if block.resource.mime_type else ""
            yield f"[resource {shorten_line(block.resource.uri, MAX_LABEL_CHARS)}{kind}]"
            yield _resource_content(block.resource)
        case m.ResourceLink():  # its contents are not read
            fields = [block.uri, block.name, block.title, block.description, block.mime_type]
            words = [shorten_line(word, MAX_LABEL_CHARS) for word in fields if word and word.strip()]
            if block.size is not None and 0 <= block.size < _MAX_BYTES:
                words.append(f"{block.size:,} bytes")
            yield f"[link to a resource: {', '.join(words)}]"
        case _:  # a type of a later revision
            yield describe_unknown_block(str(block.type))


# Data


def _normalize_media_type(declared: str | None, family: str = "") -> str:
    """Return a media type without its parameters.

    A type outside of the given family becomes "FAMILY/unknown"; the type of an image is then read from its data.
    """
    kind = (declared or "").partition(";")[0].strip().lower()
    if not _MEDIA_TYPE.fullmatch(kind):
        kind = "application/octet-stream"
    return kind if kind.startswith(family) else f"{family}/unknown"


def _convert_data(data: str, kind: str, name: str = "") -> str | Part:
    """Return data as text or a part that models accept, or as a note on its type and size."""
    data = "".join(data.split())  # some encoders break lines
    url = f"data:{kind};base64,{data}"
    if _TEXT_TYPES.fullmatch(kind):
        try:
            return a2b_base64(data, strict_mode=True).decode()
        except ValueError:
            return format_omitted_part("file", _describe_data(data, kind), "its data is not UTF-8 in base64")
    if kind.startswith("image/"):
        return ImagePart(url=url)
    if kind.startswith("audio/"):
        return AudioPart(url=url)
    if kind == "application/pdf":
        return FilePart(url=url, name=name)
    return format_omitted_part("file", _describe_data(data, kind), "models accept only text, images, audio and PDF")


def _describe_data(data: str, kind: str) -> str:
    return f"{kind}, {count_base64_bytes(data):,} bytes"


# Resources


def _resource_content(resource: m.TextResourceContents | m.BlobResourceContents) -> str | Part:
    if isinstance(resource, m.TextResourceContents):
        return resource.text
    name = shorten_line(resource.uri.rpartition("/")[2], MAX_LABEL_CHARS)
    return _convert_data(resource.blob, _normalize_media_type(resource.mime_type), name)


# A declared size of this many bytes or more is not believed.
_MAX_BYTES: Final = 2**63


# Structured content


def _is_repeated_in_texts(value: Any, blocks: Sequence[m.ContentBlock]) -> bool:
    """Return whether the texts of a result repeat its structured content as JSON, as the protocol recommends.

    A value that is not an object is wrapped: `{"result": ...}`, or with another key, such as `{"content": ...}` in the
    official filesystem server. Each item of a list may have a text of its own.
    """
    texts = [block.text for block in blocks if isinstance(block, m.TextContent)]
    if not texts:
        return False
    values = [value]
    if isinstance(value, dict) and len(value) == 1:
        values += value.values()
    for each in values:
        if any(_matches_text(each, text) for text in texts):
            return True
        if isinstance(each, list) and len(each) == len(texts) and all(map(_matches_text, each, texts)):
            return True
    return False


def _matches_text(value: Any, text: str) -> bool:
    if isinstance(value, str) and value == text:
        return True
    try:
        return bool(json.loads(text) == value)
    except (ValueError, RecursionError):
        return False


@attrs.frozen(kw_only=True)
class OutputCheck(Value):
    """Compiled output schema of a tool."""

    tool: str
    schema: dict[str, Any] = attrs.field(repr=False)
    is_valid: Callable[[Any], bool] = attrs.field(repr=False)
    work: ValidationCost = attrs.field(repr=False)

    @classmethod
    def from_schema(cls, schema: Mapping[str, Any], tool: str) -> OutputCheck:
        """Compile the schema of a tool's results.

        Raises:
            MisuseError: when it is invalid or too large, has an external reference, or could require unbounded work.
        """
        plain = normalise_schema(schema, tool)
        return cls(tool=tool, schema=plain, is_valid=compile_schema(plain, tool), work=compute_cost(plain, tool))

    def explain_mismatch(self, result: m.CallToolResult) -> str | None:
        """Return how a result violates its schema, or None. An error result is not checked."""
        if result.is_error:
            return None
        value = result.structured_content
        if value is None and "structured_content" not in result.model_fields_set:
            return f"the server declared an output schema for {self.tool}, but returned no structured content"
        if reason := self.work.check_value(json.dumps(value), value):
            return f"the result of {self.tool} cannot be checked: {reason}"
        if self.is_valid(value):
            return None
        known = {"properties": self.schema.get("properties", {})}
        text = format_problems(f"the result of {self.tool} does", find_problems(self.schema, value), value, known)
        return text.rpartition("\n")[0]  # its last line is about arguments
