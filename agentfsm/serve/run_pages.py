"""Pages of the list of runs that a caller may see."""

from __future__ import annotations

from math import inf, isfinite, nextafter
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.store import ORDER_FIELDS

if TYPE_CHECKING:
    from agentfsm.ports.store import Filter, RunOrder, RunSummary
    from agentfsm.serve.access import Caller
    from agentfsm.serve.gateway import Gateway

# Rows in a page of the list.
PAGE_SIZE: Final = 50
MAX_PAGE_SIZE: Final = 200
# Rows that one request reads from the store, at most, to find those that the caller may see.
MAX_SCANNED: Final = 1_000
# Runs up to which a total is counted.
MAX_COUNTED: Final = 1_000_000


async def find_page(
    gateway: Gateway,
    caller: Caller,
    where: Filter,
    *,
    order: RunOrder = "newest",
    limit: int = PAGE_SIZE,
    after: str | None = None,
) -> tuple[list[RunSummary], str | None]:
    """Return the first runs of a caller, or with the scope "approve" of its tenant, and the cursor of the next page.

    Args:
        gateway: The gateway.
        caller: The caller.
        where: Filter of the runs, as in `narrow`.
        order: Order of the runs.
        limit: Maximum of runs, 1 or more.
        after: Cursor of the page before; None for the first page.

    Raises:
        MisuseError: when the cursor is invalid.
    """
    found = narrow(caller, where)
    field = ORDER_FIELDS.get(order, "created_at")
    last = _parse_cursor(after)
    is_begun, position = True, None
    if order != "newest":
        position = last
    elif last is not None and last[0] < (inf if found.before is None else found.before):
        found, is_begun = attrs.evolve(found, before=nextafter(last[0], inf)), False
    rows: list[RunSummary] = []
    scanned = 0
    async for row in RunIterator(gateway.runs.store, found, order=order, after=position):
        if not is_begun and last is not None and row.created_at == last[0]:
            is_begun = row.id == last[1]
            continue
        is_begun = True
        scanned += 1
        if await gateway.serves(row):
            rows.append(row)
        if len(rows) == limit or scanned == MAX_SCANNED:
            return rows, f"{getattr(row, field)!r}:{row.id}"
    return rows, None


async def count_runs(gateway: Gateway, caller: Caller, where: Filter, order: RunOrder) -> int | None:
    """Return how many runs the pages of `find_page` have in all, up to `MAX_COUNTED`.

    None if that takes a look at each of them: at whose sub-agents' runs they are.
    """
    found = narrow(caller, where)
    if order == "cost":  # without a cost, they are not listed
        found = attrs.evolve(found, min_cost_usd=found.min_cost_usd or 0.0)
    if order == "duration":
        found = attrs.evolve(found, min_duration_s=found.min_duration_s or 0.0)
    if not gateway.agents:
        return await gateway.runs.store.count(found, limit=MAX_COUNTED)
    if found.parent != "":
        return None
    names = [name for name in gateway.agents if found.agent in (None, name)]
    filters = [attrs.evolve(found, agent=name) for name in names]
    return sum([await gateway.runs.store.count(each, limit=MAX_COUNTED) for each in filters])


def narrow(caller: Caller, where: Filter) -> Filter:
    """Return the filter of the runs that a caller sees.

    Args:
        caller: The caller.
        where: Filter that the caller has given. Its user has no effect without the scope "approve", its session is one
            of the caller, and if it has neither a session nor a purpose, it is of production.
    """
    return attrs.evolve(
        where,
        user=where.user if caller.allows("approve") else caller.user,
        session=None if where.session is None else caller.qualify_session(where.session),
        tenant=caller.tenant or "",
        purpose="" if where.purpose is None and where.session is None else where.purpose,
    )


def _parse_cursor(text: str | None) -> tuple[float, str] | None:
    """Return the value of the order, and the id, of the last run of the page before.

    Raises:
        MisuseError: when the cursor is invalid.
    """
    if text is None:
        return None
    number, _, run_id = text.partition(":")
    try:
        value = float(number)
    except ValueError:
        value = inf
    if not (isfinite(value) and run_id):
        raise MisuseError(f"after={text[:40]!r}: give the `after` of the page before")
    return value, run_id
