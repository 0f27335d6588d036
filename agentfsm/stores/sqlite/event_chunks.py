"""Chunks: a stretch of a journal in one row, as compressed JSON lines. They take a tenth of the room."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final

from agentfsm.core.errors import CorruptError

# Events in a chunk: a dozen turns. Twice as many would take a sixth less room, and leave twice as many outside.
CHUNK_EVENTS: Final = 64
# Bytes of events beyond which they stay as they are: the store's thread compresses them, and others wait for it.
MAX_CHUNK_BYTES: Final = 1_000_000


def find_chunk_ends(first: int, newest: int) -> range:
    """Return the versions at which chunks end, among those from `first`, 1 or more, to `newest`."""
    return range(-(-first // CHUNK_EVENTS) * CHUNK_EVENTS, newest + 1, CHUNK_EVENTS)


def compress_chunk(bodies: Sequence[bytes]) -> bytes | None:
    """Return events in one piece, oldest first; None where they are too large, or not as they were written."""
    lines = b"\n".join(bodies)
    if lines.count(b"\n") != CHUNK_EVENTS - 1 or len(lines) > MAX_CHUNK_BYTES:
        return None
    return zlib.compress(lines)


def decompress_chunk(run_id: str, newest: int, body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the events of a chunk with their versions, oldest first.

    Raises:
        CorruptError: when it is damaged.
    """
    try:
        lines = zlib.decompress(body).split(b"\n")
    except zlib.error as error:
        raise CorruptError(
            f"run {run_id!r}, the versions up to {newest}, cannot be read ({error}): restore a backup, or delete the "
            "run",
        ) from None
    yield from enumerate(lines, newest - len(lines) + 1)
