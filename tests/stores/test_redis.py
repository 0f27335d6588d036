"""RedisStore keeps the promises of every store, and those that only a server can make."""

import math
import subprocess
import sys

import anyio
import attrs
import pytest

from agentfsm import ConflictError, LeaseHeldError, LeaseLostError, MisuseError, RunNotFoundError
from agentfsm.core.events import Observed
from agentfsm.ports import Filter
from agentfsm.stores import RedisStore
from agentfsm.stores.redis import store as redis_store
from agentfsm.stores.redis.server import RedisServer
from agentfsm.stores.threaded import store as threaded
from agentfsm.stores.threaded.owner import OwnerIdentity
from agentfsm.testing.conformance import StoreConformance
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    LeasedRun,
    check_refused,
    create_finished_run,
    create_waiting_run,
    list_claimable,
    list_ids,
    make_header,
    make_input,
    wait_until,
)
from tests.support.busy_writer import hold
from tests.support.lease_renewal import Renewal, beat

TTL_S = 1000.0


class TestRedisStore(StoreConformance):
    """The published kit."""

    @pytest.fixture
    async def store(self, redis_url):
        store = RedisStore(redis_url, accept_loss="everything")
        yield store
        await store.aclose()

    @pytest.fixture
    async def other(self, redis_url):
        other = RedisStore(redis_url, accept_loss="everything")
        yield other
        await other.aclose()


@pytest.fixture
async def make(redis_url):
    """Make stores on the server, which are closed at the end of the test."""
    stores = []

    def make(**options):
        stores.append(RedisStore(redis_url, **{"accept_loss": "everything", **options}))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


@pytest.fixture
def pair(make):
    """Two workers on one server."""
    return [make(), make()]


@pytest.fixture
def small_pages(monkeypatch):
    """The script looks at two runs at a time."""
    script = redis_store._load_script()
    assert script.count("PAGE = 500") == 1
    monkeypatch.setattr(redis_store, "_load_script", lambda: script.replace("PAGE = 500", "PAGE = 2"))
    monkeypatch.setattr(threaded, "PRUNE_BATCH", 2)


async def tidy(store):
    """Let the store's thread tidy up now."""
    store._writer._needs_maintenance, store._writer._maintained_at = True, -math.inf
    await store.now()
    await store.now()


def end_lease(client, run_id="r1"):
    """Let the time of a lease be up."""
    client.hset("agentfsm:workers", client.hget(f"agentfsm:run:{run_id}", "owner"), "1.5")


def give(client, run_id, owner, seconds):
    """Let an owner that is no store of this process have a lease for so long."""
    run = f"agentfsm:run:{run_id}"
    number, token = client.hmget(run, "number", "token")
    client.hset(run, "owner", owner)
    client.hset("agentfsm:workers", owner, client.time()[0] + seconds)
    client.zadd(f"agentfsm:held:{owner}", {number + run_id.encode(): token})


# What is written stays written, and apart.


async def test_runs_outlive_the_store(make):
    """What one store wrote the next one reads."""
    first = make()
    driver = await LeasedRun.create(first)
    await first.post("r1", "k", make_input("x"))
    await driver.append(Observed(), *driver.build_turn()).wait()
    await first.aclose()
    second = make()
    stored = await second.read("r1")
    assert (stored.header, len(stored.events)) == (make_header(), 6)
    assert [row.key for row in await second.inbox("r1")] == ["k"]
    assert (await second.lease("r1")).version == 6


async def test_closing_writes_what_is_queued(make):
    """Appends that nobody waited for are there when aclose returns."""
    store = make()
    driver = await LeasedRun.create(store)
    gate = hold(store)
    for _ in range(50):
        driver.append(*(driver.build_turn() if driver.run.version else (Observed(),)))
    gate.set()
    await store.aclose()
    assert len((await make().read("r1")).events) == 246


async def test_prefixes_keep_stores_apart(make, client):
    """Stores of different prefixes share a server and see nothing of each other; no key is without its prefix."""
    stores = [make(prefix=prefix) for prefix in ("a:", "b:")]
    for store in stores:
        await create_finished_run(store, make_header(session="s"))
        assert list_ids(await store.runs()) == ["r1"]
    assert await stores[0].delete_session("s") == 1
    assert list_ids(await stores[1].runs()) == ["r1"]
    assert {key.partition(b":")[0] for key in client.scan_iter()} == {b"a", b"b"}


async def test_awkward_names_stay_apart(make):
    """Ids, sessions, agents and keys may hold what separates words elsewhere, and be parts of each other."""
    store = make()
    names = [
        "a",
        "a:",
        ":a",
        "a:b",
        "run:a",
        "{a}",
        "a\x00",
        "a\x00b",
        "a\n",
        "*",
        "0000000000000001a",
        "journal:a",
        "ä",
    ]
    for name in names:
        driver = await LeasedRun.create(store, make_header(name, prompt=name, session=name, agent=name))
        assert await store.post(name, name, make_input(name))
        await driver.append(Observed(at=1.0)).wait()
        await driver.release()
    for name in names:
        assert (await store.read(name)).header.id == name
        assert [(row.key, row.item) for row in await store.inbox(name)] == [(name, make_input(name))]
        assert list_ids(await store.runs(Filter(session=name))) == [name]
        assert await list_claimable(store, name) == (name,)
    for name in names:
        await store.delete(name)
    assert await store.runs() == ()


async def test_what_is_no_text_is_the_callers_mistake(make):
    """An id with half a character is refused, and its neighbours in the group are not."""
    store = make()
    driver = await LeasedRun.create(store)
    gate = hold(store)
    commit = driver.append(Observed())
    read = store.lease("x\ud800")
    gate.set()
    with pytest.raises(MisuseError, match="text"):
        await read
    assert await commit.wait()


async def test_a_list_answers_no_other_request_of_its_group(make):
    """A list waits for its replies at once, with those of requests before it; these get their replies all the same."""
    store = make()
    await LeasedRun.create(store)
    times = []

    async def look():
        times.append(await store.now())

    gate = hold(store, writes=False)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(look)
            tasks.start_soon(store.list_records, "schedule")
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert len(times) == 3


async def test_deleting_leaves_no_key(make, client):
    """Of runs that are deleted, one by one, by session or for their age, nothing stays but what belongs to no run."""
    store = make()
    for number, fields in enumerate(({}, {"session": "s"}, {"session": "s"}, {"agent": "a"})):
        driver = await LeasedRun.create(store, make_header(f"r{number}", **fields))
        await store.post(f"r{number}", "k", make_input("x"))
        await driver.append(Observed(at=1.0), FINAL_ANSWER).wait()
        await driver.release()
        await create_finished_run(store, make_header(f"r{number}.a", parent=f"r{number}"))
    written = await store.write_record("kind", "deleted", 1, revision=0)
    assert await store.delete_record("kind", "deleted", revision=written.revision)
    for expires_at in (-1.0, 1.0, await store.now()):
        await store.write_record("kind", f"expired at {expires_at}", 1, revision=0, expires_at=expires_at)
    await store.delete("r0")
    assert await store.delete_session("s") == 2
    assert await store.prune(5.0) == 2
    answers = {key for key in client.scan_iter() if key.startswith(b"agentfsm:done:")}
    assert set(client.scan_iter()) - answers == {
        b"agentfsm:count",
        b"agentfsm:counter",
        b"agentfsm:schema",
        b"agentfsm:workers",
    }
    assert all(0 < client.ttl(key) <= 3600 for key in answers)


# Two workers.


async def test_a_lease_ends(pair, client):
    """An owner that was not heard of for the time of a lease is replaced, and learns it at its next append."""
    first, second = pair
    late = await LeasedRun.create(first)
    woken = []
    late.lease.wake = lambda: woken.append(True)
    end_lease(client)
    assert [line.driven for line in await second.runs()] == [False]
    now = await LeasedRun.resume(second)
    assert now.lease.crashes == 1
    for commit in [late.append(Observed(at=9.0)), late.append(FINAL_ANSWER)]:
        await check_refused(commit, LeaseLostError)
    assert (late.lease.lost, woken) == (True, [True])
    assert await now.append(Observed(at=1.0)).wait()
    assert (await first.read("r1")).events == (Observed(at=1.0),)


async def test_a_lease_that_ended_and_that_nobody_took_goes_on(pair, client):
    """A worker that slept through the end of its lease goes on if nobody has taken it."""
    first, second = pair
    driver = await LeasedRun.create(first)
    end_lease(client)
    driver.lease.term.until = 0.0  # it has slept, too
    assert await driver.append(Observed()).wait()
    with pytest.raises(LeaseHeldError):
        await second.lease("r1")


async def test_an_own_lease_that_ended_is_not_taken_twice(pair, client):
    """Of its own leases a store knows: a second task does not take the run from the one that still drives it."""
    store, _other = pair
    driver = await LeasedRun.create(store)
    end_lease(client)
    driver.lease.term.until = 0.0  # it has slept, too
    with pytest.raises(LeaseHeldError):
        await store.lease("r1")
    assert [line.driven for line in await store.runs()] == [True]
    assert await list_claimable(store, "") == ()
    assert await driver.append(Observed()).wait()


async def test_the_thread_renews_leases(pair, client):
    """A worker whose event loop is busy keeps its runs: the thread renews them, all in one pipeline."""
    first, second = pair
    drivers = [await LeasedRun.create(first, make_header(f"r{number}")) for number in range(3)]
    for number in range(3):
        end_lease(client, f"r{number}")
    await beat(first)
    for number in range(3):
        with pytest.raises(LeaseHeldError):
            await second.lease(f"r{number}")
    assert not any(driver.lease.lost for driver in drivers)


class TestRenewal(Renewal):
    """What was posted elsewhere is heard of with the next renewal."""


async def test_a_renewal_learns_that_the_lease_is_lost(pair, client):
    """An owner that was replaced is told without asking, and is not renewed."""
    first, second = pair
    driver = await LeasedRun.create(first)
    woken = []
    driver.lease.wake = lambda: woken.append(True)
    end_lease(client)
    lease = await second.lease("r1")
    await beat(first)
    assert (driver.lease.lost, woken, lease.lost) == (True, [True], False)
    assert first.statistics().leases == 0


async def test_a_dropped_lease_is_let_go_of(pair):
    """A lease whose owner was thrown away is free for other processes after one renewal."""
    first, second = pair
    driver = await LeasedRun.create(first)
    with pytest.raises(LeaseHeldError):
        await second.lease("r1")
    del driver
    await beat(first)
    assert await second.lease("r1")
    assert first.statistics().leases == 0


def ended_process():
    """Return an owner on this machine whose process has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return attrs.evolve(OwnerIdentity.generate(), pid=process.pid, start_time="1")


async def test_a_dead_owner_on_this_machine_is_replaced_at_once(make, client):
    """Who can see that the owner is dead need not wait for the end of its lease, to drive, to list or to delete."""
    store = make()
    for run_id in ("r1", "r2"):
        await (await LeasedRun.create(store, make_header(run_id, agent="a"))).release()
        give(client, run_id, str(ended_process()), 3000)
    assert [line.driven for line in await store.runs()] == [False, False]
    assert set(await list_claimable(store, "a")) == {"r1", "r2"}
    assert (await store.lease("r1")).crashes == 1
    await store.delete("r2")


@pytest.mark.parametrize("owner", ["another-machine 1 2 3 name", "v2:somebody"])
async def test_an_owner_elsewhere_is_waited_for(make, client, owner):
    """Of whom nothing can be seen here, a later format of his name included, the lease has to end."""
    store = make()
    await create_finished_run(store)
    give(client, "r1", owner, 60)
    with pytest.raises(LeaseHeldError):
        await store.lease("r1")
    end_lease(client)
    assert await store.lease("r1")


async def test_a_lease_that_no_clock_can_have_written_is_over(make, client):
    """When the server's clock was put back by hours, a lease from before does not hold for hours."""
    store = make()
    await create_finished_run(store)
    give(client, "r1", "v2:somebody", 4000)
    assert await store.lease("r1")


async def test_the_same_append_twice_is_refused(make):
    """Only what is asked again after a broken connection may be there already."""
    driver = await LeasedRun.create(make())
    for event in (Observed(), driver.build_turn()[0]):
        assert await driver.append(event).wait()
    await check_refused(driver.store.append(driver.lease, driver.run, (event,)), ConflictError)


async def test_a_hundred_appends_share_a_pipeline(make, client):
    """Runs that append at once are written in one group, each event where it belongs."""
    store = make()
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(100)]
    before, asked = store.statistics(), client.info("commandstats")["cmdstat_evalsha"]["calls"]
    gate = hold(store)
    commits = [driver.append(Observed(at=float(number))) for number, driver in enumerate(drivers)]
    gate.set()
    for commit in commits:
        assert await commit.wait()
    after = store.statistics()
    assert after.commits - before.commits <= 2
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - asked == 100
    for number in range(100):
        assert [event.at for event in (await store.read(f"r{number}")).events] == [float(number)]


async def test_a_group_may_take_give_back_and_take_again(make):
    """Jobs of one run that are done together see what those before them have done, however many rounds that takes."""
    store = make()
    await create_finished_run(store, make_header("r2"))
    driver = await LeasedRun.create(store)
    leases = []

    async def take():
        leases.append(await store.lease("r1"))

    gate = hold(store)
    written = driver.append(Observed(at=1.0))
    store.release(driver.lease)
    late = driver.append(FINAL_ANSWER)
    async with anyio.create_task_group() as group:
        group.start_soon(take)
        group.start_soon(store.create, make_header("r2"))  # it is there: the lease is asked for in a second round
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert await written.wait()
    await check_refused(late, LeaseLostError)
    assert (leases[0].version, leases[0].token > driver.lease.token, leases[0].lost) == (1, True, False)
    with pytest.raises(LeaseHeldError):
        await store.lease("r1")


async def test_a_session_that_is_deleted_while_it_goes_on_begins_anew(pair, monkeypatch):
    """Who has seen the last run of a session, and finds it gone when he names it, goes on from none."""
    store, other = pair
    await create_finished_run(store, make_header("first", session="s"))
    asked, desk = RedisServer.send_pipeline, store._writer.backend

    def converse(server, questions):
        if server is desk and any(question.args[2:3] not in [(), (b"",)] for question in questions):
            monkeypatch.undo()
            anyio.run(other.delete_session, "s")
        return asked(server, questions)

    monkeypatch.setattr(RedisServer, "send_pipeline", converse)
    stored, lease = await store.create(make_header("next", session="s"))
    assert (stored.after, lease.version, list_ids(await other.runs())) == (None, 0, ["next"])


# Lists that are longer than a page.


@pytest.mark.usefixtures("small_pages")
async def test_long_lists_are_read_page_by_page(make):
    """What is listed, due or pruned is all there, whatever a page holds and however many times are the same."""
    store = make()
    for number in range(9):
        await create_waiting_run(store, make_header(f"w{number}", created_at=5.0, agent="a", session=f"s{number}"))
        await (
            await LeasedRun.create(store, make_header(f"r{number}", created_at=float(number % 3), agent="a", user="u"))
        ).release()
        await create_finished_run(store, make_header(f"o{number}", agent="b"), at=float(number))
    newest_first = [f"r{number}" for number in (8, 5, 2, 7, 4, 1, 6, 3, 0)]
    assert list_ids(await store.runs(Filter(user="u"))) == newest_first
    assert list_ids(await store.runs(Filter(user="u"), limit=4)) == newest_first[:4]
    assert list_ids(await store.runs(Filter(user="u", before=2.0))) == newest_first[3:]
    assert len(await store.runs()) == 27
    pages = [(await store.claim("a", limit=100)).leases for _ in range(6)]
    assert [len(page) for page in pages] == [2, 2, 2, 2, 1, 0]
    assert {lease.run_id for page in pages for lease in page} == {f"r{number}" for number in range(9)}
    assert await store.prune(6.0) == 6
    assert list_ids(await store.runs(Filter(agent="b"))) == ["o8", "o7", "o6"]


@pytest.mark.usefixtures("small_pages")
async def test_a_long_session_is_pruned_whole(make):
    """The runs of a session and those below them go together, wherever the pages end."""
    store = make()
    for number in range(5):
        await create_finished_run(store, make_header(f"r{number}", session="s"), at=1.0)
        await create_finished_run(store, make_header(f"r{number}.a", parent=f"r{number}"), at=1.0)
        await create_finished_run(store, make_header(f"t{number}", session="t"), at=float(number))
    assert await store.prune(3.0) == 10
    assert set(list_ids(await store.runs())) == {f"t{number}" for number in range(5)}


# The end of sessions.


def expiring(client):
    """Return the ids of the runs that expire, and check that all keys of a run do or none."""
    found = {}
    for key in client.scan_iter():
        kind, _, name = key.removeprefix(b"agentfsm:").partition(b":")
        if kind in (b"run", b"journal", b"inbox", b"open", b"followers", b"below"):
            found.setdefault(name.decode(), set()).add(0 < client.ttl(key) <= TTL_S)
    assert all(len(of_keys) == 1 for of_keys in found.values())
    return {name for name, of_keys in found.items() if of_keys == {True}}


async def test_a_run_expires_when_it_is_over(make, client):
    """Not before, and with all that it has; without the option nothing does."""
    store, lasting = make(ttl_s=TTL_S), make()
    driver = await LeasedRun.create(store)
    await store.post("r1", "k", make_input("x"))
    await driver.append(Observed()).wait()
    await create_finished_run(lasting, make_header("r2"))
    assert expiring(client) == set()
    await driver.append(FINAL_ANSWER).wait()
    await driver.release()
    assert expiring(client) == {"r1"}


async def test_a_session_expires_with_its_last_run(make, client):
    """While one of its runs is live nothing of it does, and a new run keeps all of it again."""
    store = make(ttl_s=TTL_S)
    await create_finished_run(store, make_header("r1", session="s"))
    await create_finished_run(store, make_header("r1.a", parent="r1"))
    await create_finished_run(store, make_header("other", session="t"))
    assert expiring(client) == {"r1", "r1.a", "other"}
    driver = await LeasedRun.create(store, make_header("r2", session="s"))
    assert expiring(client) == {"other"}
    assert (client.ttl("agentfsm:session:s"), client.zcard("agentfsm:ending")) == (-1, 1)
    await driver.append(Observed(), FINAL_ANSWER).wait()
    assert expiring(client) == {"r1", "r1.a", "r2", "other"}
    assert 0 < client.ttl("agentfsm:session:s") <= TTL_S


async def test_what_a_run_goes_on_from_is_kept_for_it(make, client):
    """A history that is needed does not expire, also without a session; nor does the caller of who is at work."""
    store = make(ttl_s=TTL_S)
    await create_finished_run(store, make_header("r1"))
    later = await LeasedRun.create(store, make_header("r2", after="r1"))
    caller = await LeasedRun.create(store, make_header("r3"))
    await create_finished_run(store, make_header("r3.a", parent="r3"))
    assert expiring(client) == set()
    await later.append(Observed(), FINAL_ANSWER).wait()
    assert expiring(client) == {"r1", "r2"}
    await caller.append(Observed(), FINAL_ANSWER).wait()
    assert expiring(client) == {"r1", "r2", "r3", "r3.a"}


async def test_what_has_expired_is_gone_from_the_lists(make, client):
    """No list names a run that is no more, its ids and its session are free, and nothing of it is left."""
    store = make(ttl_s=0.02)
    await create_finished_run(store, make_header("r1", session="s"))
    await create_finished_run(store, make_header("r2", session="s"))
    await create_finished_run(store, make_header("r2.a", parent="r2"))
    await wait_until(store, await store.now() + 0.05)
    assert await store.runs() == ()
    assert await store.runs(Filter(session="s")) == await store.runs(Filter(parent="r2")) == ()
    assert await store.delete_session("s") == 0
    for use in (store.read, store.lease, store.delete, store.inbox):
        with pytest.raises(RunNotFoundError):
            await use("r1")
    stored, lease = await store.create(make_header("r1", session="s", prompt="Something else"))
    assert (stored.after, lease.version) == (None, 0)
    await store.release(lease).wait()
    await store.delete("r1")


async def test_what_has_expired_is_tidied_away(make, client):
    """The lists of all runs do not grow by what nobody looks at any more; an id that is used again is another run."""
    store = make(ttl_s=0.02)
    for number in range(3):
        await create_finished_run(store, make_header(f"r{number}"))
    await wait_until(store, await store.now() + 0.05)
    driver = await LeasedRun.create(store, make_header("r0"))
    await tidy(store)
    assert (client.zcard("agentfsm:runs"), client.zcard("agentfsm:ending")) == (1, 0)
    assert list_ids(await store.runs()) == ["r0"]
    assert await driver.append(Observed()).wait()
