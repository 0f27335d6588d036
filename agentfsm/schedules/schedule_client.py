"""Client for the schedules in a store: add, list, pause, resume and remove them, and make up for a span of time."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import attrs

from agentfsm.agents.runs import Runs
from agentfsm.agents.validation import as_roles, to_plain_json
from agentfsm.core.errors import (
    AgentError,
    ConflictError,
    CorruptError,
    MisuseError,
    PartlyDoneError,
    RunNotFoundError,
)
from agentfsm.core.run_ids import scheduled_run_id
from agentfsm.core.validation import COUNT, ValueRule, require_type, shorten_repr
from agentfsm.core.value import Value
from agentfsm.ports.store import STORE, Store
from agentfsm.schedules.schedule import MISSED, SCHEDULE_KIND, SCHEDULE_NAME, MissedPolicy, Schedule
from agentfsm.tools.executing_call import list_passed_labels

if TYPE_CHECKING:
    from agentfsm.agents.runnable_agent import AgentChoice, RunnableAgent
    from agentfsm.core.messages import JSON
    from agentfsm.ports.stored import StoreRecord
    from agentfsm.schedules.cron_times import CronTimes

_log = logging.getLogger("agentfsm.schedules")

# Maximum runs that one call creates for a span of time.
MAX_BACKFILL: Final = 1_000
_DATE: Final = require_type(datetime, wanted="a datetime")
_AGENT: Final = ValueRule(
    fits=lambda value: hasattr(value, "driver"),
    wanted="an agent or a flow; of a roll-out rollout.base, since its workers choose the release of each run",
)
# Fields of a schedule that count its conflicts.
_CONFLICTS: Final = ("conflicts", "last_conflict")
# Records that are read at a time.
_PAGE: Final = 1_000


@attrs.frozen(kw_only=True)
class BackfilledRuns(Value):
    """The runs of a schedule in a span of time."""

    created: tuple[str, ...]
    """Ids of the runs that the call has created, oldest first."""

    existing: tuple[str, ...]
    """Ids of the runs that existed before, oldest first."""

    taken: tuple[str, ...] = ()
    """Ids of times that have no run, because a run that is not the schedule's has the id, oldest first."""


@attrs.define(eq=False)
class Schedules:
    """A client for the schedules in a store: `await Schedules(store).add(agent, "nightly", cron="0 3 * * *", ...)`.

    A schedule is a record of the store. Each worker of its agent starts the runs that are due, under ids that consist
    of the name and the time, so each run is created once, however many workers there are.

    Raises:
        MisuseError: if `store` is not a store.
    """

    store: Store = attrs.field(validator=STORE)
    """Store of the schedules and of their runs."""

    async def add(
        self,
        agent: RunnableAgent,
        name: str,
        *,
        cron: str,
        prompt: str | Mapping[str, JSON],
        tz: str = "UTC",
        missed: MissedPolicy = "latest",
        user: str | None = None,
        tenant: str | None = None,
        roles: Iterable[str] = (),
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> Schedule:
        """Add a schedule. Its first run is that of the next time. A second call with the same arguments does nothing.

        Args:
            agent: Agent or flow that executes the runs, which checks the arguments.
            name: Name of the schedule, unique in the store: up to 100 letters, digits, ".", "-" and "_".
            cron: The times: minute, hour, day of the month, month and day of the week.
            prompt: Prompt of each run, or the inputs of a flow. `{logical_date}` in it stands for the time of the run,
                such as `2026-11-26T03:00+01:00`. In the function of a tool it gets the labels of the tool's run.
            tz: Time zone of `cron`, such as "Europe/Vienna".
            missed: Treatment of times at which no worker was there: "latest" makes up for the newest of them, "all"
                for each, up to the newest 1,000, and "skip" for none.
            user: User on whose behalf the runs work.
            tenant: Tenant that the user belongs to.
            roles: Roles of the user.
            metadata: Metadata of each run, as plain JSON.
            replace: Whether to replace a schedule of this name that differs. Runs that were due and not started yet are
                started by the new definition.

        Raises:
            ConflictError: if there is another schedule of this name, and `replace` is False.
            MisuseError: if an argument is invalid, or the extra `schedule` is not installed.
        """
        _AGENT.check("add", "agent", agent)
        SCHEDULE_NAME.check("add", "name", name)
        MISSED.check("add", "missed", missed)
        now = await self.store.now()
        new = Schedule(
            name=name,
            agent=agent.name,
            target=agent.target,
            cron=cron,
            tz=tz,
            missed=missed,
            prompt=prompt if isinstance(prompt, str) else json.dumps(to_plain_json(prompt, "prompt")),
            user=user,
            tenant=tenant,
            roles=as_roles(roles),
            metadata=to_plain_json(metadata, "metadata") if metadata else {},
            labels=list_passed_labels(),
            done_until=now,
        )
        times = new.parse_times()
        new.start_run(agent, times, next(times.iterate(now)))
        while True:
            record = await self.store.read_record(SCHEDULE_KIND, name)
            if record is not None and not replace:
                return _check_same(Schedule.parse(record), new)
            if record is not None:
                with suppress(AgentError):  # one that cannot be read may be replaced
                    kept = Schedule.parse(record).keep_due(now)
                    progress = {each: getattr(kept, each) for each in ("due", "done_until", "set_back", *_CONFLICTS)}
                    new = attrs.evolve(new, **progress)
            with suppress(ConflictError):  # another process has added it meanwhile
                revision = 0 if record is None else record.revision
                await self.store.write_record(SCHEDULE_KIND, name, new.build_record(), revision=revision)
                return new

    async def list(self, agent: str | None = None) -> tuple[Schedule, ...]:
        """Return the schedules by name, or those of the agent with this name.

        Raises:
            CorruptError: if one of them cannot be read.
        """
        records = [record async for record in iter_schedule_records(self.store)]
        found = [Schedule.parse(record) for record in records]
        return tuple(each for each in found if agent is None or each.agent == agent)

    async def get(self, name: str) -> Schedule:
        """Return a schedule.

        Raises:
            MisuseError: if there is none of this name.
            CorruptError: if it cannot be read.
        """
        return Schedule.parse(await self._read(name))

    async def remove(self, name: str) -> None:
        """Remove a schedule. Its runs stay, and those that are not over are executed.

        A worker that is starting a run at this moment may complete that.

        Raises:
            MisuseError: if there is none of this name.
        """
        SCHEDULE_NAME.check("remove", "name", name)
        if not await self.store.delete_record(SCHEDULE_KIND, name):
            raise _missing_error(name)

    async def pause(self, name: str) -> None:
        """Start no runs of a schedule until it is resumed. What was due and not started yet is started then.

        Raises:
            MisuseError: if there is none of this name, or the extra `schedule` is not installed.
            CorruptError: if it cannot be read.
        """
        await self._change(name, lambda schedule, now: attrs.evolve(schedule.keep_due(now), paused=True))

    async def resume(self, name: str) -> None:
        """Start runs of a schedule again from the next time on. The times during the pause are not made up for.

        Raises:
            MisuseError: if there is none of this name.
            CorruptError: if it cannot be read.
        """
        await self._change(
            name,
            lambda schedule, now: attrs.evolve(schedule.keep_due(now), paused=False) if schedule.paused else schedule,
        )

    async def next_times(self, name: str, count: int = 5) -> tuple[datetime, ...]:
        """Return the next times of a schedule, in its time zone, whether or not it is paused.

        Times that have their run already are left out: it was started early, while the clock was ahead.

        Args:
            name: Name of the schedule.
            count: Number of times, 1 or more.

        Raises:
            MisuseError: if there is none of this name, or `count` is below 1.
            CorruptError: if it cannot be read.
        """
        COUNT.check("next_times", "count", count)
        now = await self.store.now()
        schedule = (await self.get(name)).correct_progress(now)
        times, found = schedule.parse_times(), list[datetime]()
        for at in times.iterate(max(now, schedule.done_until)):
            if schedule.set_back is not None and at <= schedule.set_back[1]:
                with suppress(RunNotFoundError):
                    if schedule.owns(await Runs(self.store).header(scheduled_run_id(name, at))):
                        continue
            found.append(times.localise(at))
            if len(found) == count:
                break
        return tuple(found)

    async def backfill(
        self,
        agent: RunnableAgent,
        name: str,
        start: datetime,
        end: datetime,
        *,
        choose: AgentChoice | None = None,
    ) -> BackfilledRuns:
        """Create the runs of a schedule for a span of time in the past. Runs that exist are left as they are.

        So a call that was interrupted can be repeated. Each run is durable before the next one is created.

        Args:
            agent: Agent of the schedule. It creates the runs, and workers execute them.
            name: Name of the schedule, which may be paused.
            start: First moment of the span. Without an offset it is in the time zone of the schedule.
            end: End of the span, which is not part of it, up to now.
            choose: `rollout.choose`, to give each run a release of a roll-out in the same store; None: they have none.

        Raises:
            MisuseError: if there is no such schedule, it is that of another agent, the span is empty or ends in the
                future, or it has more than 1,000 times.
            PartlyDoneError: if it stopped after some runs were created; the message has their number.
        """
        _AGENT.check("backfill", "agent", agent)
        schedule = await self.get(name)
        if schedule.agent != agent.name:
            raise MisuseError(f"schedule {name!r} is one of the agent {schedule.agent!r}, not of {agent.name!r}")
        times = schedule.parse_times()
        if agent.store is not self.store:
            agent = agent.with_(store=self.store)
        made: dict[RunCreation, list[str]] = {"created": [], "existing": [], "taken": []}
        for at in self._list_span(schedule, times, start, end, await self.store.now()):
            try:
                found = await create_scheduled_run(agent, schedule, times, at, choose)
            except AgentError as error:
                if not (created := made["created"]):
                    raise
                raise PartlyDoneError(
                    f"{len(created)} runs were created, up to {created[-1]!r}, and the later ones were not: {error}; "
                    "repeat the call, which creates no run twice"
                ) from error
            made[found].append(scheduled_run_id(name, at))
        return BackfilledRuns(**{each: tuple(ids) for each, ids in made.items()})

    @staticmethod
    def _list_span(schedule: Schedule, times: CronTimes, start: datetime, end: datetime, now: float) -> Iterable[float]:
        """Return the times of a schedule in a span, after checking it."""
        _DATE.check("backfill", "start", start)
        _DATE.check("backfill", "end", end)
        first, last = (
            (each if each.tzinfo is not None else each.replace(tzinfo=times.zone)).timestamp() for each in (start, end)
        )
        if first >= last:
            raise MisuseError(f"the span from {start} to {end} is empty: give an end after the start")
        if last > now + 1:
            raise MisuseError(f"the span ends at {end}, which is in the future: workers start those runs in time")
        found = times.list_between(first, last, MAX_BACKFILL + 1)
        if len(found) > MAX_BACKFILL:
            date = times.localise(found[-1]).isoformat(timespec="minutes")
            raise MisuseError(
                f"schedule {schedule.name!r} has more than {MAX_BACKFILL:,} times from {start} to {end}: backfill it "
                f"in parts, the first one up to {date}"
            )
        return found

    async def _read(self, name: str) -> StoreRecord:
        SCHEDULE_NAME.check("Schedules", "name", name)
        if (record := await self.store.read_record(SCHEDULE_KIND, name)) is None:
            raise _missing_error(name)
        return record

    async def _change(self, name: str, change: Callable[[Schedule, float], Schedule]) -> None:
        while True:
            record = await self._read(name)
            changed = change(Schedule.parse(record), await self.store.now())
            with suppress(ConflictError):  # it was changed meanwhile
                await self.store.write_record(SCHEDULE_KIND, name, changed.build_record(), revision=record.revision)
                return


async def iter_schedule_records(store: Store) -> AsyncIterator[StoreRecord]:
    """Yield the records of all schedules by name."""
    after = ""
    while page := await store.list_records(SCHEDULE_KIND, after=after, limit=_PAGE):
        for record in page:
            yield record
        if len(page) < _PAGE:
            return
        after = page[-1].key


async def count_conflicts(store: Store) -> Counter[str]:
    """Return the number of times that got no run because of a conflict, by agent; empty for a store without records."""
    found = Counter[str]()
    with suppress(MisuseError):  # a store without records
        async for record in iter_schedule_records(store):
            with suppress(CorruptError):
                schedule = Schedule.parse(record)
                found[schedule.agent] += schedule.conflicts
    return found


RunCreation: TypeAlias = Literal["created", "existing", "taken"]
"""Outcome of the creation of the run of a time: it is new, it existed, or a run that is not the schedule's has its id.
"""


async def create_scheduled_run(
    agent: RunnableAgent, schedule: Schedule, times: CronTimes, at: float, choose: AgentChoice | None = None
) -> RunCreation:
    """Create the run of a time for a worker to execute, unless it exists. A conflict is logged.

    Raises:
        MisuseError: if the agent refuses the prompt or another option, or the chosen release is not in this process.
        StoreError: if it cannot be stored.
    """
    options: dict[str, Any] = {}
    if choose is not None:
        run_id, store = scheduled_run_id(schedule.name, at), agent.store
        agent, found = await choose(
            user=schedule.user, tenant=schedule.tenant, id=run_id, roles=schedule.roles, metadata=schedule.metadata
        )
        if agent.store is not store:
            raise MisuseError("the roll-out has another store than the schedule: use rollout.with_(store=store)")
        options = {each: found[each] for each in ("release", "arms")}
    run = schedule.start_run(agent, times, at, **options)
    try:
        header = (await agent.submit(run)).header
    except ConflictError:  # it has another prompt: that of the schedule may have been changed
        header = await Runs(agent.store).header(run.id)
    if header.nonce == run.header.nonce:
        return "created"
    if schedule.owns(header):
        return "existing"
    _log.error(
        "schedule %r: no run for %s, because its id is that of a run of user %r of tenant %r: look at run %s, "
        "delete it, and then repeat `agentfsm schedule backfill`",
        schedule.name,
        times.localise(at),
        header.user,
        header.tenant,
        header.id,
    )
    return "taken"


def _check_same(found: Schedule, new: Schedule) -> Schedule:
    """Return the schedule in the store if it has the same definition.

    Raises:
        ConflictError: if it differs.
    """
    kept = ("paused", "labels", "done_until", "due", "done_before", "set_back", *_CONFLICTS)
    progress = {each: getattr(found, each) for each in kept}
    if found != attrs.evolve(new, target=found.target, **progress):
        raise ConflictError(
            f"there is another schedule {new.name!r}: replace it (replace=True), or choose another name"
        )
    return found


def _missing_error(name: str) -> MisuseError:
    return MisuseError(f"there is no schedule {shorten_repr(name)}: `agentfsm schedule list` lists them")
