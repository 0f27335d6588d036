"""What the stores that have a thread have in common, beyond what the kit can ask of any store."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import anyio
import pytest

from agentfsm import LeaseHeldError, LeaseLostError, MisuseError, StoreError
from agentfsm.core.events import Observed
from agentfsm.core.run import begin_run
from agentfsm.stores import PostgresStore, RedisStore, SQLiteStore
from agentfsm.stores.threaded import outage
from agentfsm.stores.threaded import store as threaded
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    LeasedRun,
    check_refused,
    create_finished_run,
    list_claimable,
    list_ids,
    make_header,
    make_input,
)
from tests.support.busy_writer import hold
from tests.support.database_servers import PostgresServer, RedisServer, empty_schema


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def make(request, tmp_path):
    """Make stores on the same data."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield lambda: SQLiteStore(tmp_path / "runs.db")
        elif request.param == "postgres":
            schema = stack.enter_context(empty_schema(request.getfixturevalue("postgres_desk")))
            url = request.getfixturevalue("shared_postgres")
            yield lambda: PostgresStore(url, schema=schema)
        else:
            url = request.getfixturevalue("redis_url")
            yield lambda: RedisStore(url, accept_loss="everything")


@pytest.fixture
async def store(make):
    store = make()
    yield store
    await store.aclose()


@pytest.fixture
async def other(make):
    other = make()
    yield other
    await other.aclose()


async def test_what_is_no_id_is_refused(store):
    """Whoever gives a Run, or what is no text, is told what to give; nobody looks for it."""
    run = begin_run(make_header())
    asked = (store.lease, store.read, store.inbox, store.delete, lambda odd: store.post(odd, "k", make_input("x")))
    for ask in asked:
        with pytest.raises(MisuseError, match=r"give run\.id, not a Run \('r1' here\)"):
            await ask(run)
        with pytest.raises(MisuseError, match=r"give run\.id, not 17"):
            await ask(17)


# Jobs that are done together with one that fails.


async def misuse(store):
    """Ask for what no store can do, and spoil the group that it is done in."""
    with pytest.raises(MisuseError):
        await store.post("other", "half \ud800", make_input("x"))


async def test_an_append_before_a_release_is_written_when_the_group_is_done_again(store, other):
    """Who appends and gives the lease back does not lose the events over what a neighbour has asked for."""
    drivers = [await LeasedRun.create(store, make_header(run_id)) for run_id in ("other", "r1")]
    gate = hold(store)
    async with anyio.create_task_group() as group:
        commits = [drivers[1].append(Observed()), store.release(drivers[1].lease)]
        group.start_soon(misuse, store)
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert [await commit.wait() for commit in commits] == [True, True]
    assert (await store.read("r1")).events == (Observed(),)
    assert (await other.lease("r1")).crashes == 0


async def test_a_release_and_a_new_lease_are_told_apart_when_the_group_is_done_again(store, other):
    """Each lease of a run writes what was asked for under it, and nothing behind its release."""
    drivers = [await LeasedRun.create(store, make_header(run_id)) for run_id in ("other", "r1")]
    old = drivers[1]
    leases = []

    async def take():
        leases.append(await store.lease("r1"))

    gate = hold(store)
    async with anyio.create_task_group() as group:
        written = old.append(Observed())
        store.release(old.lease)
        late = old.append(*old.build_turn())
        group.start_soon(take)
        group.start_soon(misuse, store)
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert await written.wait()
    await check_refused(late, LeaseLostError)
    assert [(lease.version, lease.lost) for lease in leases] == [(1, False)]
    with pytest.raises(LeaseHeldError):
        await other.lease("r1")
    assert await LeasedRun(store, leases[0], begin_run(make_header()).apply(Observed())).append(FINAL_ANSWER).wait()


# The thread.


async def test_a_thread_that_cannot_be_started_is_told_of(store, monkeypatch):
    """Where the system gives no thread the caller is told; what was refused is not done later, and all goes on."""

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StoreError, match="no thread can be started: can't start new thread"):
            await store.create(make_header("refused"))
    await LeasedRun.create(store)
    assert [line.id for line in await store.runs()] == ["r1"]


# Portions.


async def test_a_prune_leaves_room_for_others(store, monkeypatch):
    """It goes in portions: between two of them leases are renewed, and other jobs are done."""
    monkeypatch.setattr(threaded, "PRUNE_BATCH", 2)
    driver = await LeasedRun.create(store)
    for number in range(5):
        await create_finished_run(store, make_header(f"old{number}"))
    desk, done = store._writer.backend, []
    prune, beat = type(desk).prune, type(desk).renew_leases

    def pruned(ledger, *portion, **how):
        result = prune(ledger, *portion, **how)
        store._writer._renewed_at = -math.inf
        done.append("portion")
        return result

    monkeypatch.setattr(type(desk), "prune", pruned)
    monkeypatch.setattr(type(desk), "renew_leases", lambda ledger: [done.append("beat"), beat(ledger)])
    assert await store.prune(5.0) == 5
    assert done.count("portion") >= 3
    assert "portion portion" not in " ".join(done)
    assert await driver.append(Observed()).wait()


@pytest.mark.parametrize("portion", [1, 3])
async def test_what_hangs_together_is_pruned_together(store, monkeypatch, portion):
    """Sessions, callers and histories go whole or not at all, wherever the portions end."""
    monkeypatch.setattr(threaded, "PRUNE_BATCH", portion)
    for number in range(4):
        await create_finished_run(store, make_header(f"r{number}", session="old"), at=1.0)
        await create_finished_run(store, make_header(f"r{number}.a", parent=f"r{number}"), at=1.0)
        await create_finished_run(store, make_header(f"t{number}", session="young"), at=2.0 * number)
        after = f"c{number - 1}" if number else None
        await create_finished_run(store, make_header(f"c{number}", after=after), at=1.0)
    await create_finished_run(store, make_header("d0", after="c3"), at=1.0)
    await create_finished_run(store, make_header("d1", after="t2"), at=1.0)
    await create_finished_run(store, make_header("e0", after="r0", session="e"), at=1.0)
    await create_finished_run(store, make_header("e1", session="e"), at=1.0)
    assert await store.prune(5.0) == 16
    assert set(list_ids(await store.runs())) == {"t0", "t1", "t2", "t3"}


@pytest.mark.parametrize("portion", [1, 3])
async def test_what_is_needed_is_kept_together(store, monkeypatch, portion):
    """One run that may not go keeps all that it needs, however many steps away that is."""
    monkeypatch.setattr(threaded, "PRUNE_BATCH", portion)
    for number in range(3):
        await create_finished_run(store, make_header(f"r{number}", session="s"), at=1.0)
        await create_finished_run(store, make_header(f"r{number}.a", parent=f"r{number}"), at=1.0)
    await create_finished_run(store, make_header("c0", after="r1"), at=1.0)
    await create_finished_run(store, make_header("c1", after="c0"), at=1.0)
    await create_finished_run(store, make_header("c2", after="c1"), at=9.0)
    await create_finished_run(store, make_header("gone", after="c0"), at=1.0)
    assert await store.prune(5.0) == 1
    assert "gone" not in list_ids(await store.runs())
    assert await store.prune(10.0) == 9


# A server that was away.


@pytest.mark.parametrize("kind", [PostgresServer, RedisServer])
async def test_an_outage_costs_no_living_worker_its_runs(kind):
    """Who reaches the server first takes no run whose owner could not renew its lease either, and comes next."""
    make = PostgresStore if kind is PostgresServer else RedisStore
    with kind({} if kind is PostgresServer else {"appendonly": "yes", "appendfsync": "always"}) as server:
        first, second = make(server.url, lease_s=0.5), make(server.url)
        driver = await LeasedRun.create(first)
        await second.runs()
        gate = hold(first, writes=False)
        server.kill()
        async with anyio.create_task_group() as group:
            group.start_soon(second.runs)
            await anyio.sleep(0.6)  # longer than the lease
            server.start()
        assert await list_claimable(second, "") == ()
        with pytest.raises(LeaseHeldError):
            await second.lease("r1")
        gate.set()
        assert await driver.append(Observed()).wait()
        await first.aclose()
        await second.aclose()


async def test_a_lease_ends_after_an_outage_too(monkeypatch):
    """What ended in an outage counts as held for the time of a lease after it, and no longer."""
    now = [100.0]
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=lambda: now[0]))
    seen = outage.Outage(10.0)
    seen.begin()
    assert seen.grace_s == 0.0  # it was never reached
    seen.end()
    now[0] = 130.0
    seen.begin()
    assert seen.grace_s == 30.0
    seen.end()
    now[0] = 135.0
    seen.begin()  # it goes on
    seen.end()
    now[0] = 144.0
    assert seen.grace_s == 44.0
    now[0] = 145.0
    assert seen.grace_s == 0.0
