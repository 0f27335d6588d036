"""The part of a worker that starts the runs of schedules.

Two workers, or one that was killed between the creation of a run and the record of it, create the same id, and the
store creates an id once. The record is written by compare-and-set, so a change of the schedule meanwhile is kept.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final

import anyio
import attrs
from anyio.lowlevel import checkpoint

from agentfsm.core.errors import AgentError, ConflictError, MisuseError
from agentfsm.core.run_ids import scheduled_run_id
from agentfsm.schedules.schedule import MAX_MISSED, ON_TIME_S, SCHEDULE_KIND, Schedule
from agentfsm.schedules.schedule_client import create_scheduled_run, iter_schedule_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentfsm.agents.runnable_agent import AgentChoice, RunnableAgent
    from agentfsm.ports.stored import StoreRecord
    from agentfsm.schedules.cron_times import CronTimes

# Maximum seconds between two looks at the schedules, and so the delay of a change. At a known time the worker looks at
# once.
LOOK_INTERVAL_S: Final = 10.0
# Runs that are created for one schedule before the worker claims runs again.
RUNS_PER_LOOK: Final = 20

_log = logging.getLogger("agentfsm.schedules")


@attrs.define(eq=False, repr=False)
class DueRuns:
    """Creates the runs of an agent's schedules that are due."""

    agent: RunnableAgent
    """The agent of the worker."""

    choose: AgentChoice | None = None
    """Chooses the release of each run; None: the runs have no release."""

    _look_at: float = attrs.field(default=-math.inf, init=False)
    """Time of the next look, seconds by the event loop's clock."""

    _reported: dict[str, str] = attrs.field(factory=dict, init=False)
    """The last problem that was logged of each schedule, by name, so that it is logged once."""

    @property
    def wait_s(self) -> float:
        """Seconds until the next look, 0 or more."""
        return max(self._look_at - anyio.current_time(), 0.0)

    async def create(self) -> None:
        """Create the runs that are due, if it is time to look. Errors are logged, and do not stop the worker."""
        if self.wait_s > 0:
            return
        self._look_at = anyio.current_time() + LOOK_INTERVAL_S
        try:
            due_in_s = await self._look()
        except MisuseError as error:
            _log.debug("schedules are not looked at: %s", error)
            self._look_at = math.inf  # a store without records
        except AgentError as error:
            self._report("", f"the schedules could not be read, and are read again: {error}")
        else:
            self._look_at = anyio.current_time() + min(due_in_s, LOOK_INTERVAL_S)

    async def _look(self) -> float:
        """Create the runs that are due. Return the seconds until the next time."""
        own = [
            record
            async for record in iter_schedule_records(self.agent.store)
            if isinstance(record.value, dict) and record.value.get("agent") == self.agent.name
        ]
        if not own:
            return math.inf
        now = await self.agent.store.now()
        due_at = [await self._create_safely(record, now) for record in own]
        return max(min(due_at) - now, 0.0)

    async def _create_safely(self, record: StoreRecord, now: float) -> float:
        """Create the runs of one schedule that are due. Return the next time; infinity after an error."""
        await checkpoint()  # a thousand schedules take a tenth of a second
        try:
            schedule = Schedule.parse(record)
            return math.inf if schedule.paused else await self._create_runs(schedule, record.revision, now)
        except AgentError as error:
            self._report(record.key, f"schedule {record.key!r}: its runs are not started, and tried again: {error}")
        except Exception as error:  # noqa: BLE001  an error in the user's code must not stop the other runs
            self._report(record.key, f"schedule {record.key!r}: its runs are not started, and tried again: {error!r}")
        return math.inf

    async def _create_runs(self, stored: Schedule, revision: int, now: float) -> float:
        times, schedule = stored.parse_times(), stored.correct_progress(now)
        if schedule is not stored:  # before anything is started: one worker does it, and says so
            try:
                revision = (await self._write(schedule, revision)).revision
            except ConflictError:
                return now
            if schedule.done_until > stored.done_until:
                problem = "was set back while the clock was behind, and is moved forward again"
            else:
                problem = "is in the future, since the clock was ahead or is behind now; it is set back"
            _log.warning(
                "schedule %r: its progress, %s, %s to %s; no time that has its run is repeated, and `agentfsm schedule "
                "backfill` creates the runs of others",
                schedule.name,
                times.localise(stored.done_until),
                problem,
                times.localise(schedule.done_until),
            )
        if schedule.due:
            schedule = await self._create_each(schedule, times, schedule.due[:RUNS_PER_LOOK])
            await self._record(attrs.evolve(schedule, due=schedule.due[RUNS_PER_LOOK:]), revision)
            return now  # the next times follow with the next look
        due = times.list_newest(schedule.done_until, now, MAX_MISSED if schedule.missed == "all" else 1)
        if not due:
            return next(times.iterate(max(now, schedule.done_until)), math.inf)
        first = next(times.iterate(schedule.done_until))
        if len(due) == MAX_MISSED and due[0] > first:
            since = times.localise(due[0])
            _log.warning(
                "schedule %r: no runs for the missed times before %s, which are too many", schedule.name, since
            )
        due = due[:RUNS_PER_LOOK]
        done_until = due[-1]
        if schedule.missed == "skip" and now - done_until > ON_TIME_S:
            _log.info("schedule %r: no run for the missed times up to %s", schedule.name, times.localise(done_until))
            due = []
        schedule = await self._create_each(schedule, times, due)
        before = schedule.done_until if now - first > ON_TIME_S else None
        ahead = schedule.set_back if schedule.set_back is not None and schedule.set_back[1] > now else None
        await self._record(attrs.evolve(schedule, done_until=done_until, done_before=before, set_back=ahead), revision)
        self._reported.pop(schedule.name, None)
        return now if schedule.missed == "all" else next(times.iterate(now), math.inf)

    async def _create_each(self, schedule: Schedule, times: CronTimes, due: Sequence[float]) -> Schedule:
        """Create the runs of these times. Return the schedule with the conflicts, which are yet to be recorded."""
        for at in due:
            run_id = scheduled_run_id(schedule.name, at)
            found = await create_scheduled_run(self.agent, schedule, times, at, self.choose)
            if found == "created":
                _log.info("schedule %r: created run %s", schedule.name, run_id)
            elif found == "taken":
                schedule = attrs.evolve(schedule, conflicts=schedule.conflicts + 1, last_conflict=run_id)
        return schedule

    async def _record(self, schedule: Schedule, revision: int) -> None:
        try:
            await self._write(schedule, revision)
        except ConflictError:
            _log.debug("schedule %r was changed meanwhile", schedule.name)  # by another worker, or by a person

    async def _write(self, schedule: Schedule, revision: int) -> StoreRecord:
        record = schedule.build_record()
        return await self.agent.store.write_record(SCHEDULE_KIND, schedule.name, record, revision=revision)

    def _report(self, name: str, problem: str) -> None:
        if self._reported.get(name) != problem:
            self._reported[name] = problem
            _log.warning("%s", problem)
