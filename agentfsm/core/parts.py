"""Parts that are no text, told in words: for a result's text, for people, and wherever the data itself has no place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agentfsm.core.messages import AudioPart, FilePart, ImagePart, Media, Part, TextPart, data_of

_KINDS: Final[Mapping[type[Media], str]] = {ImagePart: "image", AudioPart: "recording", FilePart: "file"}
# Characters of a name or an address, as it is told.
WORDS_CHARS: Final = 200


def kind_of(part: Media) -> str:
    """Return what a part is, in a word."""
    return _KINDS[type(part)]


def name_of(part: Media, number: int) -> str:
    """Return what a result's text calls a part: "image 1".

    Args:
        part: One of the result's.
        number: Its place among them, from 1.
    """
    return f"{kind_of(part)} {number}"


def facts_of(part: Media) -> str:
    """Return what a part holds: "image/png, 12,345 bytes", with a file's name before it; of an address, the address."""
    name = _one_line(part.name) if isinstance(part, FilePart) else ""
    carried = data_of(part)
    if carried is None:
        told = _one_line(part.url)
    else:
        kind, data = carried
        told = f"{_one_line(kind) or 'unknown type'}, {size_of(data):,} bytes"
    return f"{name}, {told}" if name else told


def size_of(data: str) -> int:
    """Return how many bytes a base64 text stands for."""
    return len(data) * 3 // 4 - data[-2:].count("=")


def in_words(part: Part) -> str:
    """Return a part for people who read a line: a text as it is, all else by what it holds."""
    return part.text if isinstance(part, TextPart) else f"[{kind_of(part)}: {facts_of(part)}]"


def _one_line(text: str) -> str:
    line = " ".join(text[:WORDS_CHARS].split())
    return line if len(text) <= WORDS_CHARS else f"{line}..."
