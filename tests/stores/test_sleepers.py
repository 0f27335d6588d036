"""Idle workers on PostgreSQL: one is woken for each run, with a connection each, and none is relied on."""

from contextlib import AsyncExitStack, aclosing

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from agentfsm import Agent
from agentfsm._lib.concurrency import make_waker
from agentfsm.schedules import due_runs
from agentfsm.stores import PostgresStore
from agentfsm.stores.postgres.connection import LISTENER_PREFIX
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


async def test_a_run_wakes_one_worker_which_has_one_connection(crew, postgres_desk, schema, monkeypatch):
    """The others ask for nothing, also for the runs after it, whose workers were not woken before."""
    monkeypatch.setattr(due_runs, "LOOK_INTERVAL_S", NEVER_S)
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


async def test_a_worker_that_is_not_woken_stands_by(crew):
    """As long as others listen: without them it listens itself."""
    *stores, desk = crew
    claims = []
    for each in stores[:3]:
        each.subscribe("agent:clerk", lambda: None)
        claims.append(await each.claim("clerk", limit=100))
    assert [each.stands_by for each in claims] == [False, False, True]
    for each in stores[:2]:
        await each.aclose()
    assert not (await stores[2].claim("clerk", limit=100)).stands_by
    assert not (await desk.claim("other", limit=100)).stands_by


async def test_a_worker_listens_while_another_may_leave_its_place(crew, postgres_desk, schema, sleepers):
    """One that would take its run and leave relies on no row that another session has locked."""
    first, second, desk, *_ = crew
    for store in (first, second):
        store.subscribe("agent:clerk", lambda: None)
        await store.claim("clerk", limit=2)
    assert sleepers() == 2
    with postgres_desk.transaction():
        postgres_desk.execute(f"SELECT FROM {schema}.sleepers ORDER BY number LIMIT 1 FOR UPDATE")
        await (await LeasedRun.create(desk, make_header(agent="clerk"))).release()
        claim = await second.claim("clerk", limit=2)
        assert len(claim.leases) == 1
        assert not claim.stands_by
    assert sleepers() == 2


async def test_a_wake_up_on_its_way_reaches_a_worker_that_leaves_its_place(crew, postgres_desk, schema):
    """The run is committed after the worker has looked, and has left its place to others."""
    woken = anyio.Event()
    store, *others = crew[:3]
    store.subscribe("agent:clerk", make_waker(lambda: woken.set()))  # noqa: PLW0108  another event later
    await store.claim("clerk", limit=100)
    with postgres_desk.transaction():
        chosen = postgres_desk.execute(f"DELETE FROM {schema}.sleepers RETURNING worker").fetchone()  # noqa: S608
        for each in others:
            each.subscribe("agent:clerk", lambda: None)
            await each.claim("clerk", limit=100)
        await settled([store])
        woken = anyio.Event()
        assert not (await store.claim("clerk", limit=100)).leases
        postgres_desk.execute("SELECT pg_notify(%s || md5(%s), md5('agent:clerk'))", [LISTENER_PREFIX, *chosen])
    with anyio.fail_after(HANG_S):
        await woken.wait()


async def test_a_burst_reaches_as_many_workers_as_it_has_runs(crew):
    """Each worker has room for one run, and none polls."""
    (*stores, desk), asked, end = crew, 0, anyio.Event()

    async def reply(_request):
        nonlocal asked
        asked += 1
        if asked == WORKERS:
            end.set()
        await end.wait()
        return "done"

    agents = [Agent(FunctionModel(reply), name="clerk", store=each) for each in stores]
    async with anyio.create_task_group() as tasks:
        for each in agents:
            tasks.start_soon(lambda agent=each: agent.worker(parallel=1, poll_s=NEVER_S))
        await settled(stores)
        submitter = Agent(FunctionModel(reply), name="clerk", store=desk)
        async with anyio.create_task_group() as burst:
            for _ in range(WORKERS):
                burst.start_soon(submitter.submit, "work")
        with anyio.fail_after(HANG_S):
            await end.wait()
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
