"""Keys by which clients name the runs that they start, so that a repeated request starts nothing twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentfsm.core.errors import RunNotFoundError
from agentfsm.core.run_ids import DerivedId, build_key_id, former_key_id
from agentfsm.journal.load import read_header

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.ports.store import Store

MAX_KEY_CHARS: Final = 200


def is_key(text: str) -> bool:
    """Return whether a text can be a key: 1 to 200 printable characters."""
    return 1 <= len(text) <= MAX_KEY_CHARS and text.isprintable()


async def find_keyed_run(
    store: Store, key: str, *, tenant: str | None, user: str | None, hook: str = ""
) -> tuple[DerivedId, Header | None]:
    """Return the id of the run for a key that a client chose, and its header; None if there is no such run.

    The id is a hash of the key with its tenant and user, so a key neither finds nor hides another client's run. Before
    version 0.3 the key itself was the id: such a run of this client is found too, so that a request which is repeated
    after an upgrade starts nothing twice.

    Args:
        store: Store of the runs.
        key: The key.
        tenant: Tenant of the client; None if it has none.
        user: User of the client; None if it has none.
        hook: Name of the webhook whose delivery has the key; empty for the key of a client.
    """
    run_id = build_key_id(key, tenant=tenant, user=user, hook=hook)
    former = former_key_id(key, hook=hook) if hook or is_key(key) else None
    for each in (run_id, *(() if former is None else (DerivedId(former),))):
        try:
            header = await read_header(store, each)
        except RunNotFoundError:
            continue
        if (header.tenant, header.user) == (tenant, user):
            return each, header
    return run_id, None
