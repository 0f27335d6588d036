"""The server at a glance: its caller, open runs by status, how the agents do, and which alerts fire."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm.journal.run_status import RunStatus, list_statuses
from agentfsm.ports.store import Filter
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.errors import ForbiddenError
from agentfsm.serve.queries import read_number, read_text
from agentfsm.serve.run_documents import JSONDocument
from agentfsm.telemetry import measurements as m
from agentfsm.telemetry.alerts import ALERTS, read_firings
from agentfsm.telemetry.metrics_summary import CANCELLED, COMPLETED, MeasurementLog, read_measurements, summarize
from agentfsm.telemetry.totals import DAY_S, HOUR_S, TotalsStatus, read_status

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from agentfsm.ports.store import RunSummary
    from agentfsm.serve.access import Caller
    from agentfsm.serve.gateway import Gateway

# Open runs whose status one request reads.
MAX_OPEN: Final = 500
# Days that metrics and alerts are of, and up to which metrics are by the hour.
MAX_DAYS: Final = 366
MAX_ALERT_DAYS: Final = 7
HOURLY_DAYS: Final = 2
# Seconds for which a report waits until what has just changed is in the totals, and until they are complete at all.
WHOLE_S: Final = 1.0
FIRST_S: Final = 10.0
# Fields of an alert that only its evaluation needs.
_HIDDEN: Final = {"parts", "wholes", "scale"}


async def get_caller(_gateway: Gateway, _request: Request, caller: Caller, _body: object) -> Response:
    """Return who the caller is, and its scopes: what pages show and offer depends on them."""
    scopes = [each for each in ("run", "approve", "admin") if caller.allows(each)]
    return JSONDocument({"user": caller.user, "tenant": caller.tenant, "scopes": scopes, "roles": caller.roles})


async def count_open(gateway: Gateway, _request: Request, caller: Caller, _body: object) -> Response:
    """Count the open runs of the caller, or with the scope "approve" of the tenant, by status, without sub-agents."""
    where = Filter(
        tenant=caller.tenant or "", user=None if caller.allows("approve") else caller.user, over=False, purpose=""
    )
    rows: list[RunSummary] = []
    is_whole = True
    async for row in gateway.runs.iterate(where):
        if row.parent is not None or not await gateway.serves(row):
            continue
        if len(rows) == MAX_OPEN:
            is_whole = False
            break
        rows.append(row)
    found = Counter(await list_statuses(gateway.runs.store, rows))
    counts = {str(each): found[each] for each in RunStatus if each not in {RunStatus.DONE, RunStatus.FAILED}}
    return JSONDocument({"open": counts, "is_whole": is_whole})


async def get_metrics_summary(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Return how the agents did in the last `days`, as `agentfsm metrics`, and the same by hour or day.

    They are those of all tenants, so the key has none.
    """
    status = await _open_totals(gateway, caller)
    if status is None or not status.is_whole:
        return JSONDocument({"is_whole": False, "summary": None, "steps": [], "step_s": 0})
    days = max(1, read_number(request.query_params, "days", 7, MAX_DAYS))
    step, now = HOUR_S if days <= HOURLY_DAYS else DAY_S, await gateway.runs.store.now()
    begin = (now - days * DAY_S) // step * step + step
    log = await read_measurements(
        gateway.runs.store,
        since=begin,
        agent=read_text(request.query_params, "agent"),
        step_s=step,
        with_open=False,
    )
    until = log.find_end(now)
    return JSONDocument(
        {
            "is_whole": True,
            "summary": attrs.asdict(summarize(log, begin, until)),
            "step_s": step,
            "steps": _list_steps(log, int(begin), step, until),
        }
    )


async def list_alerts(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """List the alerts, and when they have fired in the last `days`: `until` is null for those that fire now.

    They are about the runs of all tenants, so the key has none.
    """
    status = await _open_totals(gateway, caller)
    is_whole = status is not None and status.is_whole
    days = max(1, read_number(request.query_params, "days", 1, MAX_ALERT_DAYS))
    now = await gateway.runs.store.now()
    fired = await read_firings(gateway.runs.store, now - days * DAY_S) if is_whole else ()
    alerts = [attrs.asdict(each, filter=lambda field, _: field.name not in _HIDDEN) for each in ALERTS.values()]
    return JSONDocument(
        {"is_whole": is_whole, "now": now, "alerts": alerts, "fired": [attrs.asdict(each) for each in fired]}
    )


async def catch_up(gateway: Gateway) -> None:
    """Count what has changed in the totals of the store, if it has some, for a moment at most."""
    status = await read_status(gateway.runs.store)
    if status is not None:
        with anyio.move_on_after(WHOLE_S if status.is_whole else FIRST_S):
            await gateway.totals.catch_up(with_active=False)


async def _open_totals(gateway: Gateway, caller: Caller) -> TotalsStatus | None:
    if caller.tenant is not None:
        raise ForbiddenError("the totals are about the runs of all tenants: use a key without a tenant")
    await catch_up(gateway)
    return await read_status(gateway.runs.store)


def _list_steps(log: MeasurementLog, begin: int, step: int, until: float) -> list[dict[str, Any]]:
    """Return what production did in each hour or day: tasks by outcome, tokens, and cost."""
    steps = [
        {"at": at, "done": 0, "failed": 0, "cancelled": 0, "tokens": 0, "usd": 0.0, "unpriced": False}
        for at in range(begin, int(until) + 1, step)
    ]
    fields = {m.TOKENS.name: "tokens", m.COST.name: "usd", m.UNPRICED.name: "unpriced"}
    for (name, labels), points in log.series.items():
        field = fields.get(name)
        if name == m.RUNS.name:
            outcome = labels[m.RUNS.labels.index("outcome")]
            field = {COMPLETED: "done", CANCELLED: "cancelled"}.get(outcome, "failed")
        if field is None:
            continue
        for at, value, _ in points:
            if 0 <= (index := int(at - begin) // step) < len(steps):
                if field == "unpriced":
                    steps[index][field] = True
                else:
                    steps[index][field] += value if field == "usd" else round(value)
    return steps


OVERVIEW: Final = RouteGroup(
    name="overview",
    endpoints=(
        Endpoint(method="GET", path="/v1/caller", handler=get_caller),
        Endpoint(method="GET", path="/v1/open", handler=count_open),
        Endpoint(method="GET", path="/v1/metrics", handler=get_metrics_summary, scope="admin", query=("days", "agent")),
        Endpoint(method="GET", path="/v1/alerts", handler=list_alerts, scope="admin", query=("days",)),
    ),
)
