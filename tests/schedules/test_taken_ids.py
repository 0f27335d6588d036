"""A time whose id another run has gets no run, and that is said; one that has its run is not repeated by an upgrade."""

import logging
from datetime import datetime

import anyio
import pytest

from agentfsm import Agent
from agentfsm.core.run_ids import scheduled_run_id
from agentfsm.schedules import Schedules
from agentfsm.schedules.schedule_client import count_conflicts
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, VirtualClock, run_virtual

TIME = "2027-01-15T08:{}Z"


def build_agent(store, **options):
    return Agent(FunctionModel(lambda request: request.messages[0].text), name="reporter", store=store, **options)


async def take(agent, minute, **options):
    """Create a run with the id of a time of the schedule, as clients could before version 0.3."""
    at = datetime.fromisoformat(TIME.format(minute)).timestamp()
    await agent.submit(options.pop("prompt", "squat"), id=scheduled_run_id("news", at), **options)


def in_time(prepare, check):
    """Add a schedule for each minute, prepare the store, let a worker work, and check; in virtual time."""

    async def whole():
        clock = VirtualClock()  # begins at 2027-01-15 08:00 UTC
        agent = build_agent(MemoryStore(clock=clock), clock=clock)
        schedules = Schedules(agent.store)
        await schedules.add(agent, "news", cron="* * * * *", prompt="News", user="ann", tenant="acme")
        await prepare(agent)
        with anyio.move_on_after(121):
            await agent.worker()
        await check(agent, schedules)

    run_virtual(whole)


@pytest.mark.parametrize("prompt", ["News", "squat"])
@pytest.mark.parametrize("owner", [{"user": "ann", "tenant": "zeta"}, {"user": "gil", "tenant": "acme"}, {}])
def test_a_conflict_is_not_swallowed(caplog, owner, prompt):
    """It is logged, counted and kept in the schedule, whatever the run says of itself; later times have their runs."""
    taken = f"news:{TIME.format('01')}"

    async def prepare(agent):
        await take(agent, "01", prompt=prompt, metadata={"schedule": "news"}, **owner)

    async def check(agent, schedules):
        schedule = await schedules.get("news")
        assert (schedule.conflicts, schedule.last_conflict) == (1, taken)
        assert await count_conflicts(agent.store) == {"reporter": 1}
        errors = [line.getMessage() for line in caplog.records if line.levelno >= logging.ERROR]
        assert len(errors) == 1
        assert taken in errors[0]
        assert (await agent.load(f"news:{TIME.format('02')}")).answer == "News"
        span = [datetime.fromisoformat(TIME.format(minute)) for minute in ("01", "02")]
        assert (await schedules.backfill(agent, "news", *span)).taken == (taken,)
        await agent.runs.delete(taken)
        assert (await schedules.backfill(agent, "news", *span)).created == (taken,)

    in_time(prepare, check)


def test_a_run_from_before_an_upgrade_is_not_repeated(caplog):
    """The id of a time has been the same since the first version, so two versions side by side start it once."""

    async def prepare(agent):
        metadata = {"schedule": "news", "logical_date": "2027-01-15T08:01+00:00"}
        await take(agent, "01", prompt="News of an older definition", user="ann", tenant="acme", metadata=metadata)

    async def check(agent, schedules):
        assert (await schedules.get("news")).conflicts == 0
        assert sorted(run.prompt for run in await agent.runs.list()) == ["News", "News of an older definition"]
        assert not [line for line in caplog.records if line.levelno >= logging.WARNING]

    in_time(prepare, check)
