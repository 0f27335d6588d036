"""Schedules after a clock that was wrong for a while, and all else in a store that goes by its clock."""

from __future__ import annotations

import logging

import attrs
import pytest

from agentfsm import Agent
from agentfsm.engine.execution.spend_windows import WindowRecord
from agentfsm.releases import RolloutControl
from agentfsm.releases.rollout_guard import RolloutGuard
from agentfsm.schedules import Schedules
from agentfsm.schedules.due_runs import DueRuns
from agentfsm.schedules.schedule import SCHEDULE_KIND
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel

HOUR_S = 3_600.0
DAY_S = 24 * HOUR_S
# 2027-01-15 08:10 UTC.
START = 1_800_000_600.0


@attrs.define(eq=False)
class SetClock:
    """A clock that the test sets."""

    at: float = START

    def now(self):
        return self.at

    def monotonic(self):
        return self.at


class Story:
    """An agent with an hourly schedule, and looks of its workers at given times."""

    def __init__(self):
        self.clock = SetClock()
        self.agent = Agent(FunctionModel(lambda _request: "done"), name="rep", store=MemoryStore(clock=self.clock))
        self.schedules = Schedules(self.agent.store)

    async def add(self, missed="latest", **options):
        await self.schedules.add(self.agent, "hourly", cron="0 * * * *", prompt="Go.", missed=missed, **options)

    async def look(self, at):
        """Let a worker look at a time, and return the runs that it creates, without the name and the month."""
        self.clock.at = at
        before = await self._list_ids()
        await DueRuns(self.agent).create()
        return [each.removeprefix("hourly:2027-01-") for each in await self._list_ids() if each not in before]

    async def look_hourly(self, start, hours):
        return [each for hour in range(hours) for each in await self.look(start + hour * HOUR_S)]

    async def _list_ids(self):
        return sorted([run.id for run in await self.agent.runs.list(limit=1000)])


def list_warnings(caplog):
    return [line.message for line in caplog.records if line.levelno >= logging.WARNING]


async def test_a_clock_that_was_ahead_for_one_look_costs_no_time(caplog):
    """The progress is set back to where it was, which is logged once, and `next_times` tells the truth."""
    story = Story()
    await story.add()
    assert await story.look(START + HOUR_S) == ["15T09:00Z"]
    assert await story.look(START + 30 * DAY_S) == ["hourly:2027-02-14T08:00Z"]
    found = await story.look_hourly(START + 2 * HOUR_S, 4)
    assert found == ["15T10:00Z", "15T11:00Z", "15T12:00Z", "15T13:00Z"]
    assert [each.hour for each in await story.schedules.next_times("hourly", 2)] == [14, 15]
    [warning] = list_warnings(caplog)
    assert "its progress, 2027-02-14 08:00:00+00:00, is in the future" in warning


async def test_what_was_started_early_is_neither_repeated_nor_promised():
    """With missed="all", the clock that was ahead has started the runs of 20 times to come."""
    story = Story()
    await story.add("all")
    assert len(await story.look(START + 30 * DAY_S)) == 20
    story.clock.at = START + 60
    [first] = await story.schedules.next_times("hourly", 1)
    assert (first.day, first.hour) == (16, 5)
    found = await story.look_hourly(START + 60, 24)
    assert found == ["16T05:00Z", "16T06:00Z", "16T07:00Z"]


async def test_a_clock_that_was_behind_for_one_look_repeats_nothing():
    """Also if the runs of the past were deleted meanwhile; the next look takes the old progress again."""
    story = Story()
    await story.add("all")
    done = await story.look_hourly(START + HOUR_S, 3)
    for name in done:
        lease = await story.agent.store.lease(f"hourly:2027-01-{name}")
        await story.agent.store.release(lease).wait()
        await story.agent.runs.delete(f"hourly:2027-01-{name}")
    assert await story.look(START - 30 * DAY_S) == []
    assert await story.look(START + 4 * HOUR_S) == ["15T12:00Z"]


@pytest.mark.parametrize("change", ["add", "pause", "replace"])
async def test_a_change_with_a_clock_that_is_ahead_is_mended(change):
    """The first time after it gets its run, and no time of the pause."""
    story = Story()
    if change != "add":
        await story.add()
    story.clock.at = START + 30 * DAY_S
    if change == "pause":
        await story.schedules.pause("hourly")
        story.clock.at = START + 3 * HOUR_S
        await story.schedules.resume("hourly")
    else:
        await story.add(missed="all", replace=True)
    await story.look(START + 3 * HOUR_S)
    assert await story.look(START + 4 * HOUR_S) == ["15T12:00Z"]


async def test_a_right_schedule_has_the_record_that_older_workers_read():
    """The fields of a wrong clock are in a record only while they matter."""
    story = Story()
    await story.add()
    await story.look(START + HOUR_S - 600)
    await story.look(START + 30 * DAY_S)
    record = await story.agent.store.read_record(SCHEDULE_KIND, "hourly")
    assert record.value["done_before"] == START + HOUR_S - 600
    await story.look(START + HOUR_S)
    await story.look(START + 2 * HOUR_S - 600)
    await story.look(START + 31 * DAY_S - 600)
    await story.look(START + 31 * DAY_S - 600 + HOUR_S)
    record = await story.agent.store.read_record(SCHEDULE_KIND, "hourly")
    assert not {"done_before", "set_back"} & record.value.keys()


# Other progress by the clock that is kept in the store.


async def test_the_rules_of_a_roll_out_are_checked_after_a_clock_that_was_ahead():
    """The process that checked them then, and has died, does not hold them for as long as the clock was ahead."""
    clock = SetClock()
    control = RolloutControl("shop", MemoryStore(clock=clock))
    clock.at = START + 30 * DAY_S
    assert await RolloutGuard(control).hold()
    clock.at = START
    guard = RolloutGuard(control)
    assert await guard.hold()
    assert not await RolloutGuard(control).hold()
    clock.at = START + 60
    assert await RolloutGuard(control).hold()


def test_a_reservation_of_a_clock_that_was_ahead_counts_as_spent():
    """Else it would keep its room, and other requests waiting, until that time comes."""
    record = WindowRecord(reserved={"dead-1": (2.0, START + 30 * DAY_S), "live-1": (1.0, START - 10.0)})
    assert record.settle_left("own", "own-1", START)
    assert (record.spent_usd, list(record.reserved)) == (2.0, ["live-1"])
