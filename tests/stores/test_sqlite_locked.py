"""Another connection keeps the SQLite file locked for longer than calls wait: what a run has to write is kept."""

import sqlite3
from contextlib import contextmanager

import anyio
import pytest

from agentfsm import Agent, LeaseHeldError, MisuseError, Outcome, State, StoreError, tool
from agentfsm.core.events import Observed, ToolFinished, ToolStarted
from agentfsm.stores import PostgresStore, RedisStore, SQLiteStore
from agentfsm.stores.threaded import group_commit
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    LeasedRun,
    check_refused,
    create_finished_run,
    make_header,
)

SHORT_S = 0.05


@pytest.fixture
async def store(path):
    store = SQLiteStore(path, patience_s=SHORT_S)
    yield store
    await store.aclose()


@contextmanager
def locked(path):
    """Hold the file's write lock, as a shell does in which a transaction was left open."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        other.close()


async def is_refused(store):
    """Make a call that writes, and see it refused: so long the file was locked for all that was queued before it."""
    with pytest.raises(StoreError, match=r"database is locked.*another process holds the write lock"):
        await store.lease("r0")


async def test_a_result_outlives_a_lock(store, path):
    """A payment returns while the file is locked, and stays so for longer than calls wait: it is recorded, once."""
    paid, returned, gate = [], anyio.Event(), anyio.Event()

    @tool
    async def pay() -> str:
        """Pay; nobody said that it may be done again."""
        paid.append("paid")
        returned.set()
        await gate.wait()
        return "paid"

    async def drive():
        runs.append(await agent.run("go", id="r1"))

    await create_finished_run(store, make_header("r0"))
    agent, runs = Agent(ScriptedModel(say("", call("pay")), "Done."), tools=[pay], store=store), []
    async with anyio.create_task_group() as group:
        group.start_soon(drive)
        await returned.wait()
        with locked(path):
            gate.set()
            for _ in range(3):
                await is_refused(store)
            [line] = [line for line in await store.runs() if line.id == "r1"]
            assert (line.state, runs) == (State.ACT, [])
    [run] = runs
    assert (run.state, run.pending, paid) == (State.DONE, (), ["paid"])
    events = await agent.history("r1")
    assert sum(isinstance(event, ToolStarted) for event in events) == 1
    [end] = [event for event in events if isinstance(event, ToolFinished)]
    assert (end.result.outcome, end.result.content) == (Outcome.DONE, "paid")


async def test_what_is_kept_is_written_in_order(store, path):
    """Several appends of a lease and its return wait behind one another, also those that come later."""
    await create_finished_run(store, make_header("r0"))
    driver = await LeasedRun.create(store)
    with locked(path):
        commits = [driver.append(Observed())]
        await is_refused(store)
        commits.append(driver.append(*driver.build_turn()))
        await is_refused(store)
        commits += [driver.append(*driver.build_turn()), store.release(driver.lease)]
        await is_refused(store)
        assert not any(commit.is_done for commit in commits)
        assert store.statistics().queued >= 1
    assert [await commit.wait() for commit in commits] == [True] * 4
    assert len((await store.read("r1")).events) == driver.run.version
    assert (await store.lease("r1")).crashes == 0


async def test_a_result_is_not_kept_for_ever(store, path, monkeypatch):
    """After ten minutes the append fails as well: who waits for it is told, and the run can be taken up again."""
    await create_finished_run(store, make_header("r0"))
    driver = await LeasedRun.create(store)
    with locked(path):
        commit = driver.append(Observed())
        await is_refused(store)
        monkeypatch.setattr(group_commit, "MAX_LOCKED_S", 0.0)
        await check_refused(commit, StoreError)
    await check_refused(driver.append(FINAL_ANSWER), StoreError)
    await driver.release()
    assert (await LeasedRun.resume(store)).run.version == 0


async def test_a_store_that_is_closed_waits_no_longer(path):
    """What is kept is tried once more, and then given up: the program ends."""
    store = SQLiteStore(path, patience_s=SHORT_S)
    await create_finished_run(store, make_header("r0"))
    driver = await LeasedRun.create(store)
    with locked(path):
        commit = driver.append(Observed())
        await is_refused(store)
        await store.aclose()
        await check_refused(commit, StoreError)


async def test_leases_that_ended_under_a_lock_are_held_a_moment_longer(path):
    """Nobody could renew his lease meanwhile: who has waited for the lock as well does not take the runs of others."""
    now = [1000.0]
    first, second = (SQLiteStore(path, patience_s=SHORT_S) for _ in range(2))
    for each in (first, second):
        each._clock = lambda: now[0]
        await create_finished_run(each, make_header("r0" if each is first else "r2"))
    driver = await LeasedRun.create(first)
    with locked(path):
        await is_refused(second)
        now[0] += first.lease_s
    with pytest.raises(LeaseHeldError):
        await second.lease("r1")
    assert await driver.append(Observed()).wait()
    for each in (first, second):
        await each.aclose()


def test_all_stores_wait_equally_long(path):
    """One knob, with one default."""
    stores = [SQLiteStore(path), PostgresStore("postgresql://localhost/x"), RedisStore("redis://localhost")]
    assert {store.patience_s for store in stores} == {30.0}


@pytest.mark.parametrize("patience_s", [-1, float("inf"), float("nan")])
def test_a_wait_has_an_end(path, patience_s):
    """A wait that is no number of seconds, or has no end, is refused."""
    with pytest.raises(MisuseError, match=r"SQLiteStore.patience_s=.*give a finite number, 0 or more"):
        SQLiteStore(path, patience_s=patience_s)
