"""Idle workers on PostgreSQL: one is woken for each run, with a connection each, and none is relied on."""

from contextlib import AsyncExitStack, aclosing

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from agentfsm import Agent
from agentfsm._lib.concurrency import make_waker
from agentfsm.stores import PostgresStore
from agentfsm.testing import FunctionModel
from agentfsm.testing.conformance.helpers import LeasedRun, make_header
from tests.support.checks import HANG_S

WORKERS = 5
# Seconds between two polls, of which none comes in a test.
NEVER_S = 3_600.0
# Requests of a worker after one claim and before the next one, and one more.
REQUESTS = 4
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"


class Counted(PostgresStore):
    """Counts the claims."""

    claims = 0

    async def claim(self, agent, **options):
        self.claims += 1
        return await super().claim(agent, **options)


@pytest.fixture
async def crew(shared_postgres, schema):
    """Give stores whose sessions have a name of their own; the last one is that of the submitter."""
    async with AsyncExitStack() as stack:
        url = f"{shared_postgres}?application_name={schema}"
        stores = [Counted(url, schema=schema) for _ in range(WORKERS + 1)]
        yield [await stack.enter_async_context(aclosing(each)) for each in stores]


@pytest.fixture
def sleepers(postgres_desk, schema):
    """Ask for the number of workers that can be woken."""
    return lambda: postgres_desk.execute(f"SELECT count(*) FROM {schema}.sleepers").fetchone()[0]  # noqa: S608


async def settled(stores):
    """Wait until no worker claims any more, and return the number of claims so far."""
    before = None
    while before != (now := sum(each.claims for each in stores)):
        before = now
        for _ in range(REQUESTS):
            await wait_all_tasks_blocked()
            for each in stores:
                await each.now()  # behind what its worker has asked for
        await wait_all_tasks_blocked()
    return before


class Story:
    """Agents whose model says which run it was asked for, and lets a test wait for that."""

    def __init__(self):
        self.asked = anyio.Event()

    def agent(self, store):
        def reply(_request):
            self.asked.set()
            return "done"

        return Agent(FunctionModel(reply), name="clerk", store=store)

    async def submit(self, store):
        self.asked = anyio.Event()
        await self.agent(store).submit("work")
        with anyio.fail_after(HANG_S):
            await self.asked.wait()


@pytest.mark.soak  # on a loaded machine a look for schedules comes in between, and without one a wake-up may be lost
async def test_a_run_wakes_one_worker_which_has_one_connection(crew, postgres_desk, schema):
    """The others ask for nothing, also for the runs after it, whose workers were not woken before."""
    story, (*stores, desk) = Story(), crew
    async with anyio.create_task_group() as tasks:
        for each in stores:
            tasks.start_soon(lambda store=each: story.agent(store).worker(poll_s=NEVER_S))
        before = await settled(stores)
        assert postgres_desk.execute(SESSIONS, [schema]).fetchone() == (WORKERS,)
        for count in range(1, WORKERS):
            await story.submit(desk)
            assert await settled(stores) == before + count
        tasks.cancel_scope.cancel()


async def test_a_worker_is_woken_for_a_release_that_it_has(crew):
    """The one that sleeps longer has another release, and hears nothing."""
    first, second, desk, *_ = crew
    woken = {"1": anyio.Event(), "2": anyio.Event()}
    for release, store in (("1", first), ("2", second)):
        store.subscribe("agent:clerk", make_waker(lambda release=release: woken[release].set()))
        await settled([store])
        await store.claim("clerk", limit=1, releases=(release,))
    woken |= {"1": anyio.Event(), "2": anyio.Event()}
    driver = await LeasedRun.create(desk, make_header(agent="clerk", release="2"))
    await driver.release()
    with anyio.fail_after(HANG_S):
        await woken["2"].wait()
    assert not woken["1"].is_set()


async def test_a_poll_makes_good_for_a_worker_that_died_asleep(crew, sleepers):
    """It is woken, and hears nothing; the next poll of another finds the run."""
    story, (dead, store, desk, *_) = Story(), crew
    end = dead.subscribe("agent:clerk", lambda: None)
    await dead.claim("clerk", limit=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: story.agent(store).worker(poll_s=0.05))
        await wait_all_tasks_blocked()
        await story.submit(desk)
        tasks.cancel_scope.cancel()
    end()


async def test_a_worker_that_ends_leaves_its_place(crew, sleepers):
    """Its store stays open; a run that comes then is not announced to it alone."""
    story, (store, *_) = Story(), crew
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: story.agent(store).worker(poll_s=NEVER_S))
        await settled([store])
        assert sleepers() == 1
        tasks.cancel_scope.cancel()
    await settled([store])
    assert sleepers() == 0
