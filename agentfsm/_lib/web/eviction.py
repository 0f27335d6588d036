"""Limit the places that clients share, sessions and connections, so that one client cannot take all of them."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection
from functools import lru_cache
from typing import Final, Protocol, TypeVar

# Bits of an IPv6 address that identify a client: a single customer gets a /64 or more.
CLIENT_BITS: Final = 64


class Evictable(Protocol):
    """Place that a client holds."""

    @property
    def client_key(self) -> str:
        """Key of the client, from `derive_client_key`."""
        ...

    @property
    def idle_rank(self) -> tuple[float, ...] | None:
        """None while the place is in use; otherwise its rank among the idle: the smallest is given up first."""
        ...


P = TypeVar("P", bound=Evictable)


@lru_cache(maxsize=1_000)
def derive_client_key(address: str) -> str:
    """Return the key that places are counted by: the IPv4 address of a client, or the /64 network of its IPv6 address.

    Any other text, such as the empty address of a Unix socket, is returned unchanged.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), CLIENT_BITS), strict=False))


def choose_evicted(holders: Collection[P], newest: P, *, max_total: int, max_per_client: int) -> P | None:
    """Return the place that has to be given up for the newest one; None: there is room.

    A client with more than its share gives up one of its own. Beyond `max_total` places, the client that holds most of
    them gives up one. A place in use is never given up: if all others are in use, the newest is returned.

    Args:
        holders: All places, the newest among them.
        newest: The place that was taken last.
        max_total: Places in all, 1 or more.
        max_per_client: Places of one client, 1 or more.
    """
    held = Counter(each.client_key for each in holders)
    if held[newest.client_key] > max_per_client:
        rivals = [each for each in holders if each.client_key == newest.client_key]
    elif len(holders) > max_total:
        rivals = list(holders)
    else:
        return None
    ranked = [
        (-held[each.client_key], rank, each) for each in rivals if each is not newest and (rank := each.idle_rank)
    ]
    return min(ranked, key=lambda found: found[:2])[2] if ranked else newest
