"""Followers, where a database needs more than the published kit says."""

from __future__ import annotations

import signal
import sqlite3
import sys
from contextlib import closing, contextmanager

import anyio
import psycopg
import pytest

from agentfsm import MisuseError
from agentfsm.core.errors import LeaseLostError
from agentfsm.core.events import Observed
from agentfsm.ports import Feedback, followers
from agentfsm.ports.store import SystemClock
from agentfsm.stores import MemoryStore, PostgresStore, RedisStore, SQLiteStore, memory
from agentfsm.stores.postgres import sql
from agentfsm.stores.threaded import store as threaded
from agentfsm.stores.threaded.lease_table import lease_owner
from agentfsm.testing.conformance.following import read_new, read_one
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    LeasedRun,
    create_finished_run,
    create_waiting_run,
    list_ids,
    make_header,
)
from tests.support.sqlite_faults import Faults

TTL_S = 1000.0


# PostgreSQL: changes that are committed in another order than they were made.


@pytest.fixture
async def postgres(shared_postgres, schema):
    store = PostgresStore(shared_postgres, schema=schema)
    yield store
    await store.aclose()


@contextmanager
def session(url, schema):
    """Open a transaction of another worker, which is committed at the end, or rolled back by `rollback`."""
    with psycopg.connect(url) as db:
        db.execute(f"SET LOCAL search_path = {schema}")
        yield db


def release_in(db, lease):
    """Release a lease as a store does, in a transaction that stays open."""
    values = (lease.run_id, lease.token, lease_owner(lease).name, 0, 0.0, 0.0, 0)
    with psycopg.ClientCursor(db) as cursor:
        cursor.execute(sql.RELEASE_RUNS, ([lease.run_id], *[[value] for value in values]))


async def test_a_release_that_is_committed_late_is_not_lost(postgres, shared_postgres, schema):
    """A run is released first and committed last; a follower has read the other one meanwhile."""
    early = await LeasedRun.create(postgres, make_header("early"))
    late = await LeasedRun.create(postgres, make_header("late"))
    for driver in (early, late):
        await driver.append(Observed()).wait()
    with session(shared_postgres, schema) as db:
        release_in(db, early.lease)
        await late.release()
        assert await read_new(postgres) == [("late", 0, 1)]
    assert await read_new(postgres) == [("early", 0, 1)]


@pytest.mark.parametrize("is_committed", [True, False])
async def test_a_number_that_is_committed_late_is_not_lost(postgres, shared_postgres, schema, is_committed):
    """While a transaction that gave numbers is open, no other gives larger ones, so a follower passes none of them."""
    await create_finished_run(postgres, make_header("r1"))
    with session(shared_postgres, schema) as db:
        assert db.execute(sql.LOCK_CHANGES).fetchone() == (True,)
        assert db.execute(sql.NUMBER_CHANGES, (10,)).fetchone() == (1,)
        await create_finished_run(postgres, make_header("r2"))
        assert await read_new(postgres) == []
        if not is_committed:
            db.rollback()
    assert {run_id for run_id, *_ in await read_new(postgres)} == {"r1", "r2"}
    assert [status.lag for status in await postgres.followers()] == [0]


async def test_an_old_transaction_of_another_program_delays_nothing(postgres, shared_postgres, schema):
    """A backup, or a forgotten shell, keeps an old snapshot for hours; followers do not wait for it."""
    with session(shared_postgres, schema) as db:
        db.execute("SELECT pg_current_xact_id()")
        await create_finished_run(postgres)
        assert await read_new(postgres) == [("r1", 0, 2)]


# A process that is killed.

DIES = """
import os, signal, sys, anyio
from agentfsm.stores import SQLiteStore

async def follow():
    async with SQLiteStore(sys.argv[1]).follow("f", lease_s=0.5) as follower:
        await (await anext(follower)).done()
        delivery = await anext(follower)
        print(delivery.run_id, delivery.after_version, delivery.version, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

anyio.run(follow)
"""


async def test_a_follower_that_is_killed_before_done_gets_the_same_again(path):
    """Its successor waits for the end of its lease, and reads neither less nor more."""
    store = SQLiteStore(path)
    for number in range(3):
        await create_finished_run(store, make_header(f"r{number}"))
    done = await anyio.run_process([sys.executable, "-c", DIES, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.decode().split() == ["r1", "0", "2"]
    with anyio.fail_after(60):
        async with store.follow("f", poll_s=0.05) as follower:
            again = [await read_one(await anext(follower)) for _ in range(2)]
    assert again == [("r1", 0, 2), ("r2", 0, 2)]
    assert await read_new(store) == []
    await store.aclose()


# Costs.


async def test_an_append_costs_no_statement_for_followers(path):
    """Only a release, a pause and an end mark the run; numbers are given when a follower looks."""
    faults = Faults()
    store = SQLiteStore(path, connect=faults)
    driver = await LeasedRun.create(store)
    faults.seen.clear()
    for _ in range(3):
        await driver.append(*(driver.build_turn() if driver.run.version else (Observed(),))).wait()
    assert [statement for statement in faults.seen if "change" in statement] == []
    await driver.append(FINAL_ANSWER).wait()
    await driver.release()
    assert len([statement for statement in faults.seen if "change" in statement]) == 2
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT change FROM runs").fetchall() == [(None,)]
        assert db.execute("SELECT last FROM changes").fetchall() == [(0,)]
    await store.aclose()


async def test_a_follower_that_waits_writes_nothing(path):
    """A look into the store without new changes only reads, so it takes no lock of the file."""
    faults = Faults()
    store = SQLiteStore(path, connect=faults)
    await create_finished_run(store)
    assert await read_new(store) == [("r1", 0, 2)]
    async with store.follow("f", wait=False) as follower:
        faults.seen.clear()
        assert [each async for each in follower] == []
        assert not [statement for statement in faults.seen if statement.startswith(("BEGIN IMMEDIATE", "UPDATE"))]
    await store.aclose()


# Batches.


async def test_old_changes_are_numbered_in_batches(place, monkeypatch):
    """A store that had no followers for long is not locked while its first one begins."""
    monkeypatch.setattr(threaded, "CHANGES_BATCH", 2)
    store = place.make()
    for number in range(5):
        await create_finished_run(store, make_header(f"r{number}"))
    assert await read_new(store, start="now") == []
    await create_finished_run(store, make_header("new"))
    assert await read_new(store) == [("new", 0, 2)]
    assert len(await read_new(store, "all")) == 6


async def test_a_follower_reads_more_than_a_batch(place, monkeypatch):
    """Nothing is missing or repeated where one request ends and the next begins."""
    monkeypatch.setattr(threaded, "CHANGES_BATCH", 2)
    monkeypatch.setattr(followers, "BATCH", 3)
    store = place.make()
    for number in range(8):
        await create_finished_run(store, make_header(f"r{number}"))
    assert sorted(await read_new(store)) == [(f"r{number}", 0, 2) for number in range(8)]


async def test_who_never_says_done_is_told(monkeypatch):
    """Else every restart would deliver everything again."""
    monkeypatch.setattr(followers, "MAX_OPEN_DELIVERIES", 3)
    store = MemoryStore()
    for number in range(4):
        await create_finished_run(store, make_header(f"r{number}"))
    async with store.follow("f", wait=False) as follower:
        with pytest.raises(MisuseError, match=r"'f': 4 deliveries are not done; call `await delivery\.done\(\)`"):
            [each async for each in follower]


# What a follower has not read is kept.


async def test_memory_keeps_what_a_follower_has_not_read(monkeypatch):
    """Beyond the number of finished runs that it keeps; they go as soon as the slowest follower has read them."""
    monkeypatch.setattr(memory, "MAX_FINISHED_RUNS", 3)
    store = MemoryStore()
    await store.add_follower("slow")
    await store.add_follower("fast")
    for number in range(6):
        await create_finished_run(store, make_header(f"r{number}", created_at=float(number)))
    assert len(await read_new(store, "fast")) == 6
    assert len(await store.runs()) == 6
    async with store.follow("slow", wait=False) as follower:
        await (await anext(follower)).done()
        await (await anext(follower)).done()
    assert list_ids(await store.runs()) == ["r5", "r4", "r3", "r2"]
    await store.drop_follower("slow")
    assert list_ids(await store.runs()) == ["r5", "r4", "r3"]


@pytest.fixture
async def expiring(redis_url):
    """A store whose runs expire."""
    store = RedisStore(redis_url, accept_loss="everything", ttl_s=TTL_S)
    yield store
    await store.aclose()


async def test_redis_keeps_what_a_follower_has_not_read(expiring, client):
    """A run expires `ttl_s` seconds after the last follower has read it, and a session with its last run."""
    await expiring.add_follower("slow")
    await create_finished_run(expiring, make_header("r1"))
    await create_finished_run(expiring, make_header("r2", session="s"))
    await create_finished_run(expiring, make_header("r3", session="s"))
    assert len(await read_new(expiring, "fast")) == 3
    assert [client.ttl(f"agentfsm:run:r{number}") for number in (1, 2, 3)] == [-1, -1, -1]
    async with expiring.follow("slow", wait=False) as follower:
        for run_id in ("r1", "r2"):
            delivery = await anext(follower)
            assert delivery.run_id == run_id
            await delivery.done()
        assert 0 < client.ttl("agentfsm:run:r1") <= TTL_S
        assert [client.ttl(f"agentfsm:run:r{number}") for number in (2, 3)] == [-1, -1]
        await (await anext(follower)).done()
    assert all(0 < client.ttl(f"agentfsm:run:r{number}") <= TTL_S for number in (2, 3))


async def test_redis_lets_go_of_what_a_dropped_follower_had_not_read(expiring, client):
    """Its runs expire as if it had read them."""
    await expiring.add_follower("slow")
    await create_finished_run(expiring, make_header("r1"))
    await create_waiting_run(expiring, make_header("r2"))
    assert client.ttl("agentfsm:run:r1") == -1
    assert await expiring.drop_follower("slow")
    assert 0 < client.ttl("agentfsm:run:r1") <= TTL_S
    assert client.ttl("agentfsm:run:r2") == -1


async def test_redis_keeps_feedback_as_long_as_its_run(expiring, client):
    """Feedback on a run that expires soon expires with it, or keeps both until the followers have read it."""
    await create_finished_run(expiring)
    await expiring.add_feedback("r1", "a", Feedback(rating=1))
    assert 0 < client.ttl("agentfsm:feedback:r1") <= client.ttl("agentfsm:run:r1") <= TTL_S
    assert len(await read_new(expiring)) == 1
    await expiring.add_feedback("r1", "b", Feedback(rating=2))
    assert (client.ttl("agentfsm:feedback:r1"), client.ttl("agentfsm:run:r1")) == (-1, -1)
    assert len(await read_new(expiring)) == 1
    assert 0 < client.ttl("agentfsm:feedback:r1") <= client.ttl("agentfsm:run:r1") <= TTL_S


async def test_a_run_that_has_expired_is_left_out(redis_url, client):
    """Also of the lag, once the lists were tidied."""
    store = RedisStore(redis_url, accept_loss="everything")
    await create_finished_run(store, make_header("r1"))
    await create_finished_run(store, make_header("r2"))
    for key in client.scan_iter(match="agentfsm:*:r1"):
        client.delete(key)
    assert await read_new(store) == [("r2", 0, 2)]
    assert [status.lag for status in await store.followers()] == [0]
    await store.aclose()


async def test_a_renewal_takes_no_place_back():
    """A process that stood still while another one did its delivery is refused, though it renews its lease again."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    await create_finished_run(store)
    async with store.follow("f", wait=False, lease_s=0.05) as stalled:
        delivery = await anext(stalled)
        async with delivery.hold():
            clock.time += 1
            async with store.follow("f", wait=False) as successor:
                await (await anext(successor)).done()
            await anyio.sleep(0.1)
        with pytest.raises(LeaseLostError):
            await delivery.done()


class Clock(SystemClock):
    """A clock that a test moves."""

    time = 1_000_000.0

    def now(self) -> float:
        return self.time
