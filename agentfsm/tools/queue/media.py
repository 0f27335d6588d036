"""Media in tool results: each part is named in the text at its position, and unusable parts are left out.

A part is sent with every later request of its run, and a provider refuses a request with a part that is empty, too
large, or not of the declared type. Such a part would end the run, so it is left out, and the text states the reason.
"""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import attrs

from agentfsm.core.messages import (
    FilePart,
    ImagePart,
    Media,
    Part,
    TextPart,
    describe_media,
    media_kind,
    media_label,
    read_inline_data,
    replace_surrogates,
)

# Maximum of characters of one part in base64: 15 MB. Anthropic takes 32 MB in a request (its error is
# "request_too_large"), OpenAI 50.
MAX_PART_CHARS: Final = 20_000_000
# Maximum of characters of all parts of a result: half of a journal record.
MAX_PARTS_CHARS: Final = 30_000_000
# Maximum of parts of one result: 20 images have about 29,000 tokens.
MAX_PARTS: Final = 20
# Maximum of characters of an address: the limit of browsers and proxies. As JSON it may have six times as many.
MAX_URL_CHARS: Final = 8_000

_MEDIA_TYPE_ALIASES: Final = {"image/jpg": "image/jpeg", "audio/x-wav": "audio/wav", "audio/mp3": "audio/mpeg"}
# Image types that providers accept.
_IMAGE_TYPES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
# Number of bytes at the start of a PDF that must contain its signature (Source: ISO 32000-1, annex H.3.4.1).
_HEAD_BYTES: Final = 1_024
_MP3_SYNC: Final = 0xE0


def _is_mp3(data: bytes) -> bool:
    return data.startswith(b"ID3") or (data[:1] == b"\xff" and data[1:2] >= bytes([_MP3_SYNC]))


# Checks of the first bytes of data, by media type.
_SIGNATURES: Final[Mapping[str, Callable[[bytes], bool]]] = {
    "image/png": lambda data: data.startswith(b"\x89PNG\r\n\x1a\n"),
    "image/jpeg": lambda data: data.startswith(b"\xff\xd8\xff"),
    "image/gif": lambda data: data.startswith((b"GIF87a", b"GIF89a")),
    "image/webp": lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP",
    "audio/wav": lambda data: data[:4] == b"RIFF" and data[8:12] == b"WAVE",
    "audio/mpeg": _is_mp3,
    "application/pdf": lambda data: b"%PDF-" in data[:_HEAD_BYTES],
}
SIGNED_TYPES: Final = frozenset(_SIGNATURES)
"""Media types whose data is recognised by its first bytes."""


def describe_parts(pieces: Iterable[str | Part]) -> tuple[str, tuple[Media, ...]]:
    """Return a text that names each part at its position, and the parts.

    Args:
        pieces: Texts and parts, in reading order; each begins a line.

    Returns:
        The text, and the parts accepted by `select_usable`. The text names them by number,
        "[image 1: image/png, 12,345 bytes]", and states for all others why they were left out.
    """
    lines: list[str] = []
    parts: list[Media] = []
    for piece in select_usable(pieces):
        if not isinstance(piece, str):
            parts.append(piece)
            piece = f"[{media_label(piece, len(parts))}: {describe_media(piece)}]"  # noqa: PLW2901  its line
        lines.append(piece)
    return "\n".join(lines), tuple(parts)


def select_usable(pieces: Iterable[str | Part]) -> Iterator[str | Media]:
    """Yield texts, and at most 20 usable parts with 30,000,000 characters together.

    Args:
        pieces: Texts and parts, in reading order. An unusable part is replaced by a text with the reason.
    """
    count, room_chars = 0, MAX_PARTS_CHARS
    for piece in pieces:
        if isinstance(piece, str | TextPart):
            yield piece if isinstance(piece, str) else piece.text
            continue
        part = _normalise_part(piece)
        flaw = _find_flaw(part) if count < MAX_PARTS else f"a result holds {MAX_PARTS} parts at most"
        if flaw is None and len(part.url) > room_chars:
            flaw = "the parts of one result are too large together"
        if flaw is not None:
            yield format_omitted_part(media_kind(part), describe_media(part), flaw)
            continue
        count += 1
        room_chars -= len(part.url)
        yield part


def check_part(part: Media) -> tuple[Media, str | None]:
    """Return a part with the media type of its data, and the reason why providers would refuse it, or None."""
    part = _normalise_part(part)
    return part, _find_flaw(part)


def format_omitted_part(kind: str, facts: str, why: str) -> str:
    """Return the line that replaces a part not shown to the model."""
    return f"[{kind} left out, {facts}: {why}]"


def _normalise_part(part: Media) -> Media:
    """Return a part as the journal stores it: valid Unicode, and the media type of its actual data."""
    url = replace_surrogates(part.url)
    carried = read_inline_data(part)
    if carried is not None:
        kind, data = carried
        url = f"data:{_detect_media_type(part, kind.strip().lower(), data)};base64,{data}"
    part = part if url == part.url else attrs.evolve(part, url=url)
    return attrs.evolve(part, name=replace_surrogates(str(part.name))) if isinstance(part, FilePart) else part


def _detect_media_type(part: Media, declared: str, data: str) -> str:
    """Return the media type of data; for an image, its actual type takes precedence over the declared one."""
    declared = _MEDIA_TYPE_ALIASES.get(declared, declared)
    if not isinstance(part, ImagePart):
        return declared
    head = _decode_base64(data[: _HEAD_BYTES * 4])
    return next((kind for kind in _IMAGE_TYPES if head is not None and _SIGNATURES[kind](head)), declared)


def _decode_base64(data: str) -> bytes | None:
    try:
        return a2b_base64(data, strict_mode=True)
    except ValueError:
        return None


def _find_flaw(part: Media) -> str | None:
    """Return the reason why providers would refuse a part, or None if none is known."""
    carried = read_inline_data(part)
    if carried is None:
        return f"its address has more than {MAX_URL_CHARS:,} characters" if len(part.url) > MAX_URL_CHARS else None
    if len(part.url) > MAX_PART_CHARS:
        return f"it is too large to be kept; {MAX_PART_CHARS * 3 // 4:,} bytes are the most"
    kind, text = carried
    data = _decode_base64(text)
    if data is None:
        return "its data is not base64"
    if not data:
        return "it is empty"
    if isinstance(part, ImagePart) and kind not in _IMAGE_TYPES:
        return "a model is shown PNG, JPEG, GIF and WebP only"
    begins = _SIGNATURES.get(kind)
    if begins is not None and not begins(data):
        return f"its data is not {kind}"
    return None if kind else "its media type is not said"
