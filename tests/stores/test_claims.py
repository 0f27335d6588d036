"""Runs are claimed once, by whoever comes first; a claim of which nobody heard holds none of them."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from redis.connection import parse_url

from agentfsm import StoreError
from agentfsm._lib.concurrency import boot_clock
from agentfsm.core.events import Observed, Paused, Resumed
from agentfsm.core.run import begin_run
from agentfsm.ports import Lease
from agentfsm.stores import PostgresStore, RedisStore
from agentfsm.stores.redis.server import RedisServer
from agentfsm.testing.conformance.helpers import LeasedRun, list_claimable, make_header
from tests.support.cutting_proxy import CuttingProxy
from tests.support.lease_renewal import beat
from tests.support.postgres_proxy import Proxy

RUNS = 60
STORES = 4
# Seconds for which a server that is away is waited for here.
PATIENCE_S = 0.01


async def submitted(store, count):
    """Make runs that a worker can take; return their ids."""
    ids = [f"r{number}" for number in range(count)]
    for run_id in ids:
        await (await LeasedRun.create(store, make_header(run_id, agent="a"))).release()
    return ids


async def test_a_run_is_claimed_once(place):
    """Workers that claim at the same time get all runs between them, each of them one time, and nobody is refused."""
    stores = [place.make() for _ in range(STORES)]
    ids = await submitted(stores[0], RUNS)
    taken: list[Lease] = []

    async def work(store):
        while leases := (await store.claim("a", limit=7)).leases:
            taken.extend(leases)
            for lease in leases:
                driver = LeasedRun(store, lease, begin_run(make_header(lease.run_id, agent="a")))
                assert await driver.append(Observed()).wait()

    async with anyio.create_task_group() as workers:
        for store in stores:
            workers.start_soon(work, store)
    assert Counter(lease.run_id for lease in taken) == Counter(ids)
    assert not any(lease.lost for lease in taken)


async def test_two_loops_of_a_store_share_what_is_there(place):
    """A claim by one task does not take what another one of the same store has claimed."""
    store = place.make()
    ids = await submitted(store, 6)
    claims = []

    async def claim():
        claims.append(await store.claim("a", limit=4))

    async with anyio.create_task_group() as workers:
        for _ in range(3):
            workers.start_soon(claim)
    assert sorted(lease.run_id for each in claims for lease in each.leases) == sorted(ids)


async def test_a_lease_that_was_lost_is_told_before_its_owner_is_renewed(place):
    """It would look as if it held, else, and an effect of its run be made by two workers."""
    store, other = place.make(), place.make()
    before = [await LeasedRun.create(store, make_header(run_id)) for run_id in ("r1", "r2")]
    before[0].lease.term.until = 0.0  # the process has slept
    place.end_leases()
    await other.lease("r1")
    now = await LeasedRun.create(store, make_header("r3"))
    assert (now.lease.valid_until > boot_clock(), now.lease.lost) == (True, False)
    assert [driver.lease.lost for driver in before] == [True, True]


async def test_a_pause_does_not_hide_that_an_owner_died(place):
    """The deaths count no longer against the run, but its open calls may have begun until its turn is finished."""
    store, other = place.make(), place.make()
    await LeasedRun.create(store)

    async def resume() -> LeasedRun:
        place.end_leases()
        return await LeasedRun.resume(other)

    driver = await resume()
    assert (driver.lease.crashes, driver.lease.abandoned, driver.lease.is_suspect) == (1, True, False)
    chosen, *rest = driver.build_turn()
    await driver.append(Observed(), Paused()).wait()
    await driver.release()
    driver = await LeasedRun.resume(store)
    assert (driver.lease.crashes, driver.lease.abandoned) == (0, True)
    await driver.append(Resumed()).wait()
    driver = await resume()
    assert (driver.lease.crashes, driver.lease.abandoned, driver.lease.is_suspect) == (1, True, True)
    await driver.append(chosen, *rest).wait()
    await driver.release()
    driver = await LeasedRun.resume(store)
    assert (driver.lease.crashes, driver.lease.abandoned) == (0, False)


@pytest.fixture
def postgres_proxy(shared_postgres):
    settings = conninfo_to_dict(shared_postgres)
    with Proxy((settings["host"], int(settings["port"]))) as proxy:
        yield proxy


@pytest.fixture
def redis_proxy(redis_url):
    with CuttingProxy(parse_url(redis_url)["port"]) as proxy:
        yield proxy


async def lost(store, other, strike, heal):
    """Let a claim be done of which the store never hears, and see that its runs come free."""
    driver = await LeasedRun.create(store, make_header("kept", agent="a"))
    ids = await submitted(store, 3)
    strike()
    with pytest.raises(StoreError):
        await store.claim("a", limit=10)
    heal()
    assert await list_claimable(other, "a") == ()  # it was done
    await beat(store)
    claim = await other.claim("a", limit=10)
    assert [lease.run_id for lease in claim.leases] == ids
    assert {lease.crashes for lease in claim.leases} == {0}
    assert await driver.append(Observed()).wait()


async def test_runs_of_a_claim_that_postgres_made_and_nobody_heard_of_come_free(
    shared_postgres, schema, postgres_proxy
):
    """The reply to the commit is lost, and the server is away for too long to ask: the next renewal lets go of them."""
    address = {"host": "127.0.0.1", "port": postgres_proxy.own_port, "sslmode": "disable", "gssencmode": "disable"}
    store = PostgresStore(make_conninfo(shared_postgres, **address), schema=schema, patience_s=PATIENCE_S)
    other = PostgresStore(shared_postgres, schema=schema)

    def strike():
        postgres_proxy.cut, postgres_proxy.after, postgres_proxy.for_good = b"COMMIT", True, True

    def heal():
        assert postgres_proxy.cuts == 1
        postgres_proxy.is_down = False

    await lost(store, other, strike, heal)
    for each in (store, other):
        await each.aclose()


async def test_runs_of_a_claim_that_redis_made_and_nobody_heard_of_come_free(redis_url, redis_proxy, monkeypatch):
    """The answer is lost, and the server is away for too long to ask again: the next renewal lets go of them."""
    near = redis_url.replace(str(redis_proxy.port), str(redis_proxy.own_port))
    store = RedisStore(near, accept_loss="everything", patience_s=PATIENCE_S)
    other = RedisStore(redis_url, accept_loss="everything")
    converse = RedisServer.send_pipeline

    def strike():
        monkeypatch.setattr(RedisServer, "send_pipeline", converse_until_it_claims)

    def converse_until_it_claims(server, questions):
        if any(question.args[0] == b"claim" for question in questions):
            redis_proxy.cut("answer", for_good=True)
            monkeypatch.undo()
        converse(server, questions)

    def heal():
        assert redis_proxy.cuts == 1
        redis_proxy.is_down = False

    await lost(store, other, strike, heal)
    for each in (store, other):
        await each.aclose()


@pytest.mark.parametrize("side", ["question", "answer"])
async def test_a_claim_that_redis_is_asked_for_twice_is_one(redis_url, redis_proxy, monkeypatch, side):
    """A connection that is cut at a claim costs no run: what the first question has taken the second one returns."""
    near = redis_url.replace(str(redis_proxy.port), str(redis_proxy.own_port))
    store, other = (RedisStore(url, accept_loss="everything") for url in (near, redis_url))
    ids = await submitted(store, 5)
    converse = RedisServer.send_pipeline

    def converse_and_cut(server, questions):
        if any(question.args[0] == b"claim" for question in questions):
            redis_proxy.cut(side)
            monkeypatch.undo()
        converse(server, questions)

    monkeypatch.setattr(RedisServer, "send_pipeline", converse_and_cut)
    claim = await store.claim("a", limit=3)
    assert redis_proxy.cuts == 1
    assert [lease.run_id for lease in claim.leases] == ids[:3]
    assert [lease.run_id for lease in (await other.claim("a", limit=10)).leases] == ids[3:]
    for lease in claim.leases:
        assert await LeasedRun(store, lease, begin_run(make_header(lease.run_id, agent="a"))).append(Observed()).wait()
    for each in (store, other):
        await each.aclose()
