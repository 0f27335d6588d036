"""Operations on the server as a whole: sessions, workers and stuck runs, metrics."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from itertools import product
from typing import TYPE_CHECKING, Any, Final, get_args

import attrs
from starlette.responses import Response

from agentfsm.core.errors import MisuseError
from agentfsm.journal.run_list import StrandedReason, find_stranded
from agentfsm.ports.store import Filter
from agentfsm.schedules.schedule_client import count_conflicts
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.errors import ForbiddenError
from agentfsm.serve.metrics import CONTENT_TYPE, Samples, format_metric
from agentfsm.serve.overview import catch_up
from agentfsm.serve.queries import read_number, read_text
from agentfsm.serve.run_documents import JSONDocument, build_row_documents
from agentfsm.telemetry.costs import COST_GROUPS, CostGroup, SpendStatus, build_cost_document, read_costs, read_spend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from agentfsm.ports.store import RunSummary
    from agentfsm.serve.access import Caller
    from agentfsm.serve.gateway import Gateway

# Runs that one request reads to find sessions.
MAX_SCANNED: Final = 2_000
SESSIONS: Final = 50
MAX_SESSIONS: Final = 500
# Runs in the list of those that have a worker or wait for one.
MAX_ACTIVE: Final = 500
# Seconds ahead in which sleeping runs wake.
LONGEST_REST_S: Final = 366 * 86_400.0
# Count of waiting runs up to which a metric is exact.
MAX_COUNTED: Final = 10_000
# The last second of the year 9999, seconds since 1970.
_MAX_TIME: Final = 253_402_300_799
# Hexadecimal digits of the name of a worker.
_NAME_DIGITS: Final = 12


async def list_sessions(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """List the sessions of the caller, or with the scope "approve" of the tenant, each with its last run.

    `user` is the caller, who can continue its own sessions only.
    """
    query = request.query_params
    limit = max(1, read_number(query, "limit", SESSIONS, MAX_SESSIONS))
    user = read_text(query, "user") if caller.allows("approve") else caller.user
    found: dict[str, tuple[RunSummary, int]] = {}
    scanned, is_whole = 0, True
    async for row in gateway.runs.iterate(Filter(tenant=caller.tenant or "", user=user, purpose="")):
        if scanned == MAX_SCANNED:
            is_whole = False
            break
        scanned += 1
        if row.session is None or row.parent is not None or not await gateway.serves(row):
            continue
        if row.session not in found and len(found) == limit:
            is_whole = False
            continue
        last, count = found.get(row.session, (row, 0))
        found[row.session] = last, count + 1
    rows = await build_row_documents(gateway.runs.store, [last for last, _ in found.values()])
    sessions = [
        {"session": row["session"], "user": row["user"], "last": row, "runs": count}
        for row, (_, count) in zip(rows, found.values(), strict=True)
    ]
    return JSONDocument({"sessions": sessions, "is_whole": is_whole, "user": caller.user})


async def list_workers(gateway: Gateway, _request: Request, caller: Caller, _body: object) -> Response:
    """List the workers with their runs, the runs that wait for a worker or a time, and how long nothing happened."""
    now = await gateway.runs.store.now()
    where = Filter(tenant=caller.tenant or "", active_at=now, purpose="")
    active = await gateway.runs.list(where, limit=MAX_ACTIVE)
    rows = [row for row in active if await gateway.serves(row)]
    workers: dict[str, list[dict[str, Any]]] = {}
    queue = []
    for row, document in zip(rows, await build_row_documents(gateway.runs.store, rows), strict=True):
        if row.worker is None and not row.driven:
            queue.append(document | _describe_activity(row, now, "no worker has claimed it yet"))
        else:
            reason = "its worker executes it" if row.driven else "its worker died; another one claims it soon"
            name = "this process"
            if row.worker is not None:  # without the ids of the machine and the process
                name = sha256(row.worker.encode()).hexdigest()[:_NAME_DIGITS]
            workers.setdefault(name, []).append(document | _describe_activity(row, now, reason))
    rest = attrs.evolve(where, active_at=now + LONGEST_REST_S)
    resting = await gateway.runs.list(rest, limit=MAX_ACTIVE)
    sleepers = [
        row
        for row in resting
        if row.worker is None and not row.driven and row.ready_at is not None and row.ready_at > now
        if await gateway.serves(row)
    ]
    return JSONDocument(
        {
            "now": now,
            "workers": [{"name": name, "runs": runs} for name, runs in workers.items()],
            "queue": queue,
            "sleepers": [
                document | {"ready_at": row.ready_at}
                for row, document in zip(sleepers, await build_row_documents(gateway.runs.store, sleepers), strict=True)
            ],
            "is_whole": max(len(active), len(resting)) < MAX_ACTIVE,
            "followers": [attrs.asdict(each) for each in await gateway.runs.store.followers()]
            if caller.allows("admin") and caller.tenant is None
            else None,
        }
    )


async def list_costs(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Add up the costs of the tenant, and list its spending limits, with a forecast of the month.

    An administrator without a tenant gets those of all.

    Without totals, or while they are counted for the first time, only the newest runs are read, without a forecast.
    """
    query = request.query_params
    by, tz = read_text(query, "by") or "agent", read_text(query, "tz") or "UTC"
    group: CostGroup | None = next((each for each in COST_GROUPS if each == by), None)
    if group is None:
        raise MisuseError(f"by={by[:20]!r}: give one of {', '.join(COST_GROUPS)}")
    await catch_up(gateway)
    sees_all = caller.allows("admin") and caller.tenant is None
    report = await read_costs(
        gateway.runs.store,
        by=group,
        since=read_number(query, "since", 0, _MAX_TIME) if "since" in query else None,
        where=Filter(tenant=None if sees_all else caller.tenant or "", agent=read_text(query, "agent")),
        tz=tz,
        limit=MAX_SCANNED,
        agents=gateway.agents or None,
    )
    windows = await read_spend(gateway.runs.store, tenant=None if sees_all else caller.tenant or "")
    return JSONDocument(build_cost_document(report, windows, tz))


def _describe_activity(row: RunSummary, now: float, reason: str) -> dict[str, Any]:
    more = f"; {row.crashes} workers died with it" if row.crashes else ""
    times = {
        "ready_s": None if row.ready_at is None else round(max(0.0, now - row.ready_at), 3),
        "silent_s": round(max(0.0, now - row.updated_at), 3),
    }
    return times | {"crashes": row.crashes, "reason": f"{reason}{more}"}


async def read_metrics(gateway: Gateway, _request: Request, caller: Caller, _body: object) -> Response:
    """Return the metrics of this process, and those of the runs in the store, in the text format of Prometheus.

    They are those of all tenants, so the key has none.
    """
    if caller.tenant is not None:
        raise ForbiddenError("metrics are about the runs of all tenants: use a key without a tenant")
    counts = gateway.counts
    queues: Samples = [
        ({"agent": name}, await gateway.admission.count_queue(name, MAX_COUNTED)) for name in gateway.agents
    ]
    found = await find_stranded(gateway.runs.store, Filter(purpose=""), examined=MAX_COUNTED)
    stranded = Counter(dict.fromkeys(product(gateway.agents, get_args(StrandedReason)), 0))
    stranded.update([(each.run.agent, each.reason) for each in found])
    conflicts = await count_conflicts(gateway.runs.store)
    metrics: tuple[tuple[str, str, str, Samples], ...] = (
        (
            "agentfsm_requests_total",
            "counter",
            "Requests by operation and class of the status.",
            [({"operation": name, "status": status}, count) for (name, status), count in counts.requests.items()],
        ),
        ("agentfsm_streams_open", "gauge", "Open event streams.", [({}, len(gateway.streams))]),
        (
            "agentfsm_executions_total",
            "counter",
            "Executions of runs in this process, each until the run is over or waits.",
            [({"agent": name}, counts.executions[name]) for name in gateway.agents],
        ),
        (
            "agentfsm_crashes_total",
            "counter",
            "Executions in this process that went on with a run whose last worker had not released it.",
            [({"agent": name}, counts.crashes[name]) for name in gateway.agents],
        ),
        (
            "agentfsm_leases_lost_total",
            "counter",
            "Executions in this process that ended because another worker had taken the run.",
            [({"agent": name}, counts.lost_leases[name]) for name in gateway.agents],
        ),
        ("agentfsm_queue_runs", "gauge", f"Runs that wait for a worker, up to {MAX_COUNTED}.", queues),
        (
            "agentfsm_waiting_runs",
            "gauge",
            f"Runs that wait for an approval, another decision or input, up to {MAX_COUNTED}.",
            [({"agent": name}, await gateway.count_waiting(name, MAX_COUNTED)) for name in gateway.agents],
        ),
        (
            "agentfsm_stranded_runs",
            "gauge",
            f"Runs of all agents that are ready and that no worker takes, of the newest {MAX_COUNTED} ready runs.",
            [({"agent": agent, "reason": reason}, count) for (agent, reason), count in stranded.items()],
        ),
        (
            "agentfsm_schedule_conflicts_total",
            "counter",
            "Times of the schedules in the store that got no run, because another run had the id of theirs.",
            [({"agent": name}, conflicts[name]) for name in gateway.agents],
        ),
        (
            "agentfsm_refusals_total",
            "counter",
            "Requests refused by a limit of the caller, or because of the queue.",
            [({"limit": name}, count) for name, count in gateway.admission.refused.items()],
        ),
    )
    metrics += _describe_spend(await read_spend(gateway.runs.store, scopes=("agent",)))
    text = "".join(format_metric(*each) for each in metrics) + await gateway.read_run_metrics()
    return Response(text, headers={"content-type": CONTENT_TYPE})


def _describe_spend(windows: Sequence[SpendStatus]) -> tuple[tuple[str, str, str, Samples], ...]:
    """Return the metrics of the spending limits of agents. Users and tenants are too many for labels."""
    labels = []
    for each in windows:
        of = {"agent": each.window.subject, "per": each.window.per, "tz": each.window.tz}
        if each.window.purpose is not None:
            of["purpose"] = each.window.purpose or "production"
        labels.append((of, each))
    return (
        (
            "agentfsm_spend_usd",
            "gauge",
            "US dollars spent and reserved in the current day or month, of agents with a spending limit.",
            [(of, each.spent_usd + each.reserved_usd) for of, each in labels],
        ),
        (
            "agentfsm_spend_limit_usd",
            "gauge",
            "Spending limit of the agent for the day or month, US dollars.",
            [(of, each.limits_usd[0]) for of, each in labels if each.limits_usd],
        ),
    )


ADMINISTRATION: Final = RouteGroup(
    name="administration",
    endpoints=(
        Endpoint(method="GET", path="/v1/sessions", handler=list_sessions, query=("user", "limit")),
        Endpoint(method="GET", path="/v1/workers", handler=list_workers, scope="approve"),
        Endpoint(
            method="GET", path="/v1/costs", handler=list_costs, scope="approve", query=("by", "since", "agent", "tz")
        ),
        Endpoint(method="GET", path="/metrics", handler=read_metrics, scope="admin"),
    ),
)
