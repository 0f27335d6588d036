"""Parts that are no text, told in words: for a result's text, for people, and wherever the data itself has no place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agentfsm.core.messages import AudioPart, FilePart, ImagePart, Media, Part, TextPart, read_inline_data

_MEDIA_KINDS: Final[Mapping[type[Media], str]] = {ImagePart: "image", AudioPart: "recording", FilePart: "file"}
# Characters of a name or an address, as it is told.
MAX_LABEL_CHARS: Final = 200


def media_kind(part: Media) -> str:
    """Return what a part is, in a word."""
    return _MEDIA_KINDS[type(part)]


def media_label(part: Media, number: int) -> str:
    """Return what a result's text calls a part: "image 1".

    Args:
        part: One of the result's.
        number: Its place among them, from 1.
    """
    return f"{media_kind(part)} {number}"


def describe_media(part: Media) -> str:
    """Return what a part holds: "image/png, 12,345 bytes", with a file's name before it; of an address, the address."""
    name = _shorten_label(part.name) if isinstance(part, FilePart) else ""
    carried = read_inline_data(part)
    if carried is None:
        told = _shorten_label(part.url)
    else:
        kind, data = carried
        told = f"{_shorten_label(kind) or 'unknown type'}, {count_base64_bytes(data):,} bytes"
    return f"{name}, {told}" if name else told


def count_base64_bytes(data: str) -> int:
    """Return how many bytes a base64 text stands for."""
    return len(data) * 3 // 4 - data[-2:].count("=")


def format_part(part: Part) -> str:
    """Return a part for people who read a line: a text as it is, all else by what it holds."""
    return part.text if isinstance(part, TextPart) else f"[{media_kind(part)}: {describe_media(part)}]"


def _shorten_label(text: str) -> str:
    line = " ".join(text[:MAX_LABEL_CHARS].split())
    return line if len(text) <= MAX_LABEL_CHARS else f"{line}..."
