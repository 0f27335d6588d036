"""Hash chain over the journal of a run: changing a record changes the hash of its version and of all later ones."""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from agentfsm.core.codec import encode_event, encode_header
from agentfsm.core.events import Event
from agentfsm.core.header import FORMAT, Header

CHAIN_HASH: Final = "sha256"


def chain_journal(header: Header, events: Sequence[Event], key: bytes) -> Iterator[str]:
    """Yield the hash of each version of a journal in hexadecimal: of version 0, the header, first.

    A hash is the HMAC-SHA-256 of the hash before and the record. It covers the content of the records, not the way in
    which a store writes them.

    Args:
        header: Header of the run.
        events: Events of its journal, from the first on.
        key: Key of the HMAC; empty for hashes that everybody can compute.
    """
    current = attrs.evolve(header, format=FORMAT)
    digest = hmac.digest(key, encode_header(current).encode(), CHAIN_HASH)
    yield digest.hex()
    for event in events:
        digest = hmac.digest(key, digest + encode_event(event, current).encode(), CHAIN_HASH)
        yield digest.hex()
