"""Pages of the list of runs that a caller may see."""

from __future__ import annotations

from math import inf, isfinite, nextafter
from typing import TYPE_CHECKING, Final

from agentfsm.core.errors import MisuseError
from agentfsm.ports.store import Filter

if TYPE_CHECKING:
    from agentfsm.core.machine import State
    from agentfsm.ports.store import RunSummary
    from agentfsm.serve.access import Caller
    from agentfsm.serve.gateway import Gateway

# Rows in a page of the list.
PAGE_SIZE: Final = 50
MAX_PAGE_SIZE: Final = 200
# Rows that one request reads from the store, at most, to find those that the caller may see.
MAX_SCANNED: Final = 1_000


async def find_page(
    gateway: Gateway,
    caller: Caller,
    *,
    agent: str | None = None,
    user: str | None = None,
    session: str | None = None,
    state: State | None = None,
    is_waiting: bool | None = None,
    purpose: str | None = None,
    limit: int = PAGE_SIZE,
    after: str | None = None,
) -> tuple[list[RunSummary], str | None]:
    """Return the newest runs of a caller, or with the scope "approve" of its tenant, and the cursor of the next page.

    Args:
        gateway: The gateway.
        caller: The caller.
        agent: Name of the agent; None for all, like the other filters.
        user: User of the runs; has no effect without the scope "approve".
        session: Name of a conversation of the caller.
        state: State of the runs.
        is_waiting: Whether the runs wait.
        purpose: Purpose of the runs, such as "eval". None: those of production, and in a session all.
        limit: Maximum of runs, 1 or more.
        after: Cursor of the page before; None for the first page.

    Raises:
        MisuseError: when the cursor is invalid.
    """
    before, last_id = _parse_cursor(after)
    where = Filter(
        agent=agent,
        user=user if caller.allows("approve") else caller.user,
        session=None if session is None else caller.qualify_session(session),
        state=state,
        waiting=is_waiting,
        before=before,
        tenant=caller.tenant or "",
        purpose="" if purpose is None and session is None else purpose,
    )
    rows: list[RunSummary] = []
    scanned, is_begun = 0, before is None
    async for row in gateway.runs.iterate(where):
        if not is_begun and nextafter(row.created_at, inf) == before:
            is_begun = row.id == last_id
            continue
        is_begun = True
        scanned += 1
        if await gateway.serves(row):
            rows.append(row)
        if len(rows) == limit or scanned == MAX_SCANNED:
            return rows, f"{row.created_at!r}:{row.id}"
    return rows, None


def _parse_cursor(text: str | None) -> tuple[float | None, str]:
    """Return the time of creation before which a page begins, and the last run of the page before, which has this time.

    Raises:
        MisuseError: when the cursor is invalid.
    """
    if text is None:
        return None, ""
    moment, _, run_id = text.partition(":")
    try:
        created_at = float(moment)
    except ValueError:
        created_at = inf
    if not (isfinite(created_at) and run_id):
        raise MisuseError(f"after={text[:40]!r}: give the `after` of the page before")
    return nextafter(created_at, inf), run_id
