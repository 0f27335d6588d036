"""Schedules of the agents of the server: their next times, their last run, what is overdue, pause and resume."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core.errors import CorruptError, MisuseError, RunNotFoundError
from agentfsm.core.run_ids import scheduled_run_id
from agentfsm.ports.store import Filter
from agentfsm.schedules.schedule import ON_TIME_S, Schedule
from agentfsm.schedules.schedule_client import Schedules, iter_schedule_records
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.run_documents import JSONDocument, build_row_documents

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from agentfsm.serve.access import Caller
    from agentfsm.serve.gateway import Gateway

# Next times of a schedule; newest times whose runs are looked for; overdue times that are counted.
NEXT_TIMES: Final = 3
PAST_TIMES: Final = 8
MAX_OVERDUE: Final = 100
_FIELDS: Final = ("name", "agent", "cron", "tz", "missed", "prompt", "user", "paused", "conflicts", "last_conflict")


async def list_schedules(gateway: Gateway, _request: Request, caller: Caller, _body: object) -> Response:
    """List the schedules of the tenant: next times, last run, and the times whose run is overdue."""
    found, unreadable = [], []
    with suppress(MisuseError):  # a store without records
        async for record in iter_schedule_records(gateway.runs.store):
            try:
                schedule = Schedule.parse(record)
            except CorruptError as error:
                unreadable.append({"name": record.key, "error": str(error)})
                continue
            if _is_shown(gateway, schedule, caller):
                found.append(await _describe(gateway, schedule))
    return JSONDocument({"schedules": found, "unreadable": unreadable if caller.tenant is None else []})


async def pause_schedule(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Pause a schedule: it starts no runs until it is resumed."""
    schedules, name = await _open(gateway, request, caller)
    await schedules.pause(name)
    return JSONDocument(await _describe(gateway, await schedules.get(name)))


async def resume_schedule(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Resume a schedule from its next time on. Times during the pause are not made up for."""
    schedules, name = await _open(gateway, request, caller)
    await schedules.resume(name)
    return JSONDocument(await _describe(gateway, await schedules.get(name)))


async def _open(gateway: Gateway, request: Request, caller: Caller) -> tuple[Schedules, str]:
    """Return the schedules, and the name of the one of a request.

    Raises:
        MisuseError: when the caller has no schedule of this name.
    """
    schedules, name = Schedules(gateway.runs.store), request.path_params["name"]
    if not any(each.name == name and _is_shown(gateway, each, caller) for each in await schedules.list()):
        raise MisuseError(f"there is no schedule {name[:80]!r} of an agent of this server")
    return schedules, name


def _is_shown(gateway: Gateway, schedule: Schedule, caller: Caller) -> bool:
    return schedule.tenant == caller.tenant and (not gateway.agents or schedule.agent in gateway.agents)


async def _describe(gateway: Gateway, schedule: Schedule) -> dict[str, Any]:
    store = gateway.runs.store
    document: dict[str, Any] = {name: getattr(schedule, name) for name in _FIELDS}
    document |= {"due": [*schedule.due], "overdue": [], "skipped": [], "next": [], "last": None, "error": ""}
    try:
        times, now = schedule.parse_times(), await store.now()
        document["next"] = [at.timestamp() for at in await Schedules(store).next_times(schedule.name, NEXT_TIMES)]
    except MisuseError as error:  # the extra is not installed, or it was removed meanwhile
        return document | {"error": str(error)}
    if not schedule.paused:
        document["overdue"] = times.list_newest(schedule.done_until, now - ON_TIME_S, MAX_OVERDUE)
    without: list[float] = []
    for at in reversed(times.list_newest(0.0, now, PAST_TIMES)):
        run_id = scheduled_run_id(schedule.name, at)
        if await _has_run(gateway, schedule, run_id):
            if document["last"] is None:
                rows = await build_row_documents(store, await store.runs(Filter(id=run_id), limit=1))
                document["last"] = {"at": at, "run": rows[0] if rows else None}
            document["skipped"] = [*without]  # before the oldest run, the schedule may not have been there
        elif at <= schedule.done_until and at not in schedule.due:
            without.insert(0, at)
    return document


async def _has_run(gateway: Gateway, schedule: Schedule, run_id: str) -> bool:
    try:
        return schedule.owns(await gateway.runs.header(run_id))
    except RunNotFoundError:
        return False


SCHEDULES: Final = RouteGroup(
    name="schedules",
    endpoints=(
        Endpoint(method="GET", path="/v1/schedules", handler=list_schedules, scope="approve"),
        Endpoint(method="POST", path="/v1/schedules/{name}/pause", handler=pause_schedule, scope="admin"),
        Endpoint(method="POST", path="/v1/schedules/{name}/resume", handler=resume_schedule, scope="admin"),
    ),
)
