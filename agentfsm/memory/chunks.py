"""Cut a text into chunks: at headings, then between paragraphs, then between lines, sentences and words.

A heading always begins a chunk. So an edit changes the chunks of its own section only, and the others stay as they are.
Headings and fenced code are read as Markdown has them; any other text is one section of paragraphs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from agentfsm.core.value import Value
from agentfsm.tokens.ledger import BYTE_COUNTER, BYTES_PER_TOKEN

# Size of a chunk, and the part of it that repeats the end of the chunk before, in tokens.
CHUNK_TOKENS: Final = 512
OVERLAP_TOKENS: Final = 64

_HEADING: Final = re.compile(r" {0,3}(#{1,6})[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*")
_UNDERLINE: Final = re.compile(r" {0,3}(?:=+|-{2,})[ \t]*")
_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})")
# Places where a text that is too long is cut, in the order in which they are tried: after a line, a sentence, a word.
_ENDS: Final = (
    re.compile(r"(?<=\n)"),
    re.compile("(?<=[.!?;:]\\s)|(?<=[\u3002\uff01\uff1f\uff1b\uff1a])"),
    re.compile(r"(?<=\s)"),
)
# Bytes of a character, at most.
_CHAR_BYTES: Final = 4
# Parts into which a text without any of these is cut, for each size of a chunk.
_PARTS: Final = 8


@attrs.frozen(kw_only=True)
class Chunk(Value):
    """A part of a document."""

    headings: tuple[str, ...]
    """Headings above the text, outermost first."""

    text: str
    """The text, without its heading; never blank."""


@attrs.define
class _Section:
    level: int
    headings: tuple[str, ...]
    blocks: list[str] = attrs.field(factory=list)


def split_document(text: str, *, tokens: int = CHUNK_TOKENS, overlap: int = OVERLAP_TOKENS) -> list[Chunk]:
    """Return the chunks of a document in their order; none for a blank text.

    Args:
        text: The document: Markdown or plain text.
        tokens: Largest size of a chunk, in tokens of three bytes, as all estimates count.
        overlap: Tokens of a section's chunk that repeat the end of the chunk before, 0 or more and below `tokens`.
    """
    most, repeated = tokens * BYTES_PER_TOKEN, overlap * BYTES_PER_TOKEN
    return [
        Chunk(headings=section.headings, text=each)
        for section in _read_sections(text)
        for each in _pack(section.blocks, most, repeated)
    ]


def _read_sections(text: str) -> list[_Section]:
    """Return the sections with their paragraphs. A heading without any text below it is a text itself."""
    sections = [_Section(0, ())]
    for block in _iter_blocks(text):
        if isinstance(block, str):
            sections[-1].blocks.append(f"{block}\n\n")
            continue
        level, title = block
        last = sections[-1]
        _keep_title(last, level)
        above = next((each for each in reversed(sections) if each.level < level), sections[0])
        sections.append(_Section(level, (*above.headings, title)))
    _keep_title(sections[-1], 0)
    return sections


def _keep_title(section: _Section, next_level: int) -> None:
    if not section.blocks and section.level >= next_level and section.headings:
        section.blocks.append(section.headings[-1])


def _iter_blocks(text: str) -> Iterator[str | tuple[int, str]]:
    """Yield paragraphs and fenced code as texts, and headings as their level and title."""
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        if fence:
            lines.append(line)
            if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif (found := _FENCE.match(line)) is not None:
            fence = found[1]
            lines.append(line)
        elif (found := _HEADING.fullmatch(line)) is not None and found[2]:
            yield from _end_paragraph(lines)
            yield len(found[1]), found[2]
        elif len(lines) == 1 and _UNDERLINE.fullmatch(line) is not None:
            yield 1 if "=" in line else 2, lines.pop().strip()
        elif line.strip():
            lines.append(line)
        else:
            yield from _end_paragraph(lines)
    yield from _end_paragraph(lines)


def _end_paragraph(lines: list[str]) -> Iterator[str]:
    if lines:
        yield "\n".join(lines)
        lines.clear()


def _pack(blocks: Sequence[str], most: int, repeated: int) -> Iterator[str]:
    """Yield chunks of as many pieces as fit, each but the first with the end of the one before."""
    chunk, size, is_new = "", 0, False
    for block in blocks:
        for piece in _cut(block, most - repeated):
            added = BYTE_COUNTER.count(piece)
            if is_new and size + added > most:
                yield chunk.strip()
                chunk = _take_end(chunk, repeated)
                size = BYTE_COUNTER.count(chunk)
            chunk, size, is_new = chunk + piece, size + added, True
    if chunk.strip():
        yield chunk.strip()


def _cut(text: str, most: int, ends: Sequence[re.Pattern[str]] = _ENDS) -> Iterator[str]:
    """Yield pieces of at most `most` bytes, which make up the text."""
    if BYTE_COUNTER.count(text) <= most:
        yield text
    elif ends:
        for piece in filter(None, ends[0].split(text)):
            yield from _cut(piece, most, ends[1:])
    else:
        step = max(1, most // (_PARTS * _CHAR_BYTES))
        yield from (text[start : start + step] for start in range(0, len(text), step))


def _take_end(text: str, most: int) -> str:
    """Return whole sentences or words at the end of a text, at most `most` bytes."""
    kept, left = "", most
    for piece in reversed([*_cut(text, most)]):
        left -= BYTE_COUNTER.count(piece)
        if left < 0:
            break
        kept = piece + kept
    return kept.lstrip()
