"""Documents in the memory: their chunks as items, and the items that a new version of a document adds.

Items never change, so the versions of a document are in the index like everything else: each text of a chunk is a slot
of its own, which an item opens and a later one, which is never valid, closes. A chunk that stays is not written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final, Protocol

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.header import short_hash
from agentfsm.core.messages import Part, TextPart, replace_surrogates
from agentfsm.core.validation import ValueRule
from agentfsm.core.value import Value
from agentfsm.memory.chunks import split_document
from agentfsm.ports.memory_items import ItemKind, MemoryItem, Namespace

# Characters of a document, a book of a thousand pages. Longer ones are several documents.
MAX_DOCUMENT_CHARS: Final = 2_000_000
MAX_NAME_CHARS: Final = 500
# Seconds between the versions of a document, if the clock does not go on.
TICK_S: Final = 0.001
# Characters of the headings that stand above the text of a chunk.
MAX_HEADING_CHARS: Final = 1_000
_ID_CHARS: Final = 24
DOCUMENT_NAME: Final = ValueRule(
    fits=lambda value: isinstance(value, str) and bool(value.strip()) and len(value) <= MAX_NAME_CHARS,
    wanted=f"the name of the document, 1 to {MAX_NAME_CHARS} characters, such as its path or address",
)


class ResourceServer(Protocol):
    """A server that has resources to read, such as `agentfsm.mcp.MCPServer`."""

    @property
    def name(self) -> str:
        """Name of the server."""
        ...

    @property
    def is_trusted(self) -> bool:
        """Whether what the server says is trusted."""
        ...

    async def read(self, uri: str) -> Sequence[Part]:
        """Return the contents of a resource, in order."""
        ...


@attrs.frozen(kw_only=True)
class DocumentChange(Value):
    """Changes in the memory by a new version of a document, in chunks."""

    name: str
    """Name of the document."""

    added: int = 0
    """Number of chunks that are new."""

    kept: int = 0
    """Number of chunks that were there, and were not written again."""

    closed: int = 0
    """Number of chunks that are no longer in the document, and are found as of earlier times only."""

    left_out: int = 0
    """Number of chunks that were forgotten, and do not return."""


def read_text(name: str, text: str | Sequence[Part]) -> str:
    """Return the text of a document, which is given as such or as parts of a message.

    Raises:
        MisuseError: if there is none, or it is too long.
    """
    if not isinstance(text, str):
        text = "\n\n".join(part.text for part in text if isinstance(part, TextPart))
    if not text.strip():
        raise MisuseError(f"the document {name!r} has no text: a memory keeps texts, and no images or files")
    if len(text) > MAX_DOCUMENT_CHARS:
        raise MisuseError(
            f"the document {name!r} has {len(text):,} characters, and {MAX_DOCUMENT_CHARS:,} are the most: split it "
            "into several documents"
        )
    return replace_surrogates(text)


def build_chunks(name: str, text: str, fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of the items of a document's chunks by their slots, without the times and the ids.

    Args:
        name: Name of the document.
        text: Its text, not blank.
        fields: Further fields of the items: one that differs makes another chunk.
    """
    chunks: dict[str, dict[str, Any]] = {}
    for place, chunk in enumerate(split_document(text), 1):
        above = " > ".join((name, *chunk.headings))[:MAX_HEADING_CHARS]
        digest = short_hash(f"{above}\n{chunk.text}\n{sorted(fields.items())}", _ID_CHARS)
        slot = next(each for number in count(1) if (each := f"document\n{name}\n{digest}\n{number}") not in chunks)
        data = {"document": name, "headings": [*chunk.headings]}
        chunks[slot] = {**fields, "text": f"{above}\n{chunk.text}", "place": place, "data": data}
    return chunks


def plan_change(
    name: str,
    chunks: Mapping[str, Mapping[str, Any]],
    known: Iterable[MemoryItem],
    namespace: Namespace,
    now: float,
) -> tuple[list[MemoryItem], DocumentChange]:
    """Return the items to add, new chunks first, so that a document has these chunks; and the change.

    Args:
        name: Name of the document.
        chunks: Fields of the chunks by their slots, as `build_chunks` returns them.
        known: All items of the document so far, those of earlier versions included, in any order.
        namespace: Owner of the document.
        now: Time of the change, seconds since 1970.
    """
    newest: dict[str, MemoryItem] = {}
    for item in sorted(known, key=lambda item: (item.valid_from, item.recorded_at, item.id)):
        newest[item.slot] = item
    there = {slot for slot, item in newest.items() if item.valid_to > item.valid_from}  # the others have been closed
    at = max([now, *[item.valid_from + TICK_S for item in newest.values()]])

    def build_item(slot: str, fields: Mapping[str, Any]) -> MemoryItem:
        # The same for all processes, so that two with the same document add one item.
        before = f"{namespace}\n{slot}" if slot not in newest else newest[slot].id
        return MemoryItem(
            id=short_hash(f"next\n{before}", _ID_CHARS),
            namespace=namespace,
            kind=ItemKind.DOCUMENT,
            slot=slot,
            session=name,
            valid_from=at,
            recorded_at=at,
            **fields,
        )

    items = [build_item(slot, fields) for slot, fields in chunks.items() if slot not in there]
    gone = sorted(there - chunks.keys())
    change = DocumentChange(name=name, added=len(items), kept=len(chunks) - len(items), closed=len(gone))
    for slot in gone:
        old = newest[slot]
        said = {"text": f"A part of {name} that is no longer in it", "data": {"document": name, "closes": old.id}}
        items.append(build_item(slot, {**said, "place": old.place, "level": old.level, "valid_to": at}))
    return items, change
