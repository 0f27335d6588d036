"""PostgresStore keeps the promises of every store, and those that only a server can make."""

import math
import subprocess
import sys

import anyio
import psycopg
import pytest

from agentfsm import ConflictError, CorruptError, LeaseHeldError, LeaseLostError, MisuseError, StoreError, TooNewError
from agentfsm.core.events import Observed
from agentfsm.core.inbox import Cancel
from agentfsm.ports import Filter
from agentfsm.stores import PostgresStore
from agentfsm.stores.postgres import store as postgres
from agentfsm.stores.postgres.connection import PostgresConnection
from agentfsm.stores.rules import LIST_INDEXES
from agentfsm.stores.threaded import group_commit
from agentfsm.stores.threaded import store as threaded
from agentfsm.stores.threaded.owner import OwnerIdentity
from agentfsm.testing.conformance import StoreConformance
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    HOSTILE_TEXT,
    LeasedRun,
    check_refused,
    create_finished_run,
    make_header,
    make_input,
)
from tests.support.busy_writer import hold
from tests.support.database_servers import empty_schema
from tests.support.lease_renewal import Renewal, beat
from tests.support.older_tables import to_postgres_1, to_postgres_2, to_postgres_400
from tests.support.server_reaper import await_that

FORKS = """
import gc, os, sys, anyio
from agentfsm.stores import PostgresStore
from agentfsm.testing.conformance.helpers import FINAL_ANSWER, LeasedRun, create_finished_run, make_header
from agentfsm.core.events import Observed

def session():
    return store._writer.backend._db.info.backend_pid

store = PostgresStore(sys.argv[1], schema=sys.argv[2])
driver = anyio.run(LeasedRun.create, store)
before = session()
if (child := os.fork()) == 0:
    anyio.run(create_finished_run, store, make_header("of the child"))
    anyio.run(store.aclose)
    del store
    gc.collect()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0

del driver  # its event loop is over, and so is its lease

async def resume_from():
    driver = await LeasedRun.resume(store)
    assert await driver.append(Observed(), FINAL_ANSWER).wait()
    return [line.id for line in await store.runs()]

print(anyio.run(resume_from), session() == before)
anyio.run(store.aclose)
"""


@pytest.fixture
async def pair(shared_postgres, schema):
    """Two workers on one schema."""
    stores = [PostgresStore(shared_postgres, schema=schema) for _ in range(2)]
    yield stores
    for store in stores:
        await store.aclose()


@pytest.fixture
def store(pair):
    return pair[0]


@pytest.fixture
def rows(postgres_desk, schema):
    """Ask the server, or do to the tables what no agentfsm does."""

    def ask(sql, *values):
        cursor = postgres_desk.execute(sql.replace("{s}", schema), values)
        return cursor.fetchall() if cursor.description else []

    return ask


async def asked(store, sql):
    """Ask in a transaction of the store's."""
    return await store._run_job(lambda ledger: ledger.execute(sql).fetchall())


class TestPostgresStore(StoreConformance):
    """The published kit."""

    @pytest.fixture
    async def store(self, pair):
        return pair[0]

    @pytest.fixture
    async def other(self, pair):
        return pair[1]


@pytest.mark.parametrize("age", [to_postgres_400, to_postgres_2, to_postgres_1])
async def test_tables_of_an_older_version_get_the_indexes_of_lists(pair, rows, postgres_desk, schema, age):
    """The first store that connects builds them, while others read and write."""
    old, new = pair
    await create_finished_run(old, make_header("r1"))
    await old.aclose()
    age(postgres_desk, schema)
    await new.runs()
    found = {
        name for (name,) in rows("SELECT indexname FROM pg_indexes WHERE schemaname = '{s}' AND tablename = 'runs'")
    }
    assert LIST_INDEXES.keys() <= found


# Leases.


async def test_a_lease_ends(pair, rows):
    """An owner that was not heard of for the time of a lease is replaced, and learns it at its next append."""
    first, second = pair
    late = await LeasedRun.create(first)
    woken = []
    late.lease.wake = lambda: woken.append(True)
    with pytest.raises(LeaseHeldError):
        await second.lease("r1")
    rows("UPDATE {s}.workers SET until = extract(epoch FROM now())")
    assert [line.driven for line in await second.runs()] == [False]
    now = await LeasedRun.resume(second)
    commits = [late.append(Observed(at=9.0)), late.append(FINAL_ANSWER)]
    for commit in commits:
        await check_refused(commit, LeaseLostError)
    assert (late.lease.lost, woken) == (True, [True])
    assert await now.append(Observed(at=1.0)).wait()
    assert (await first.read("r1")).events == (Observed(at=1.0),)


async def test_a_lease_that_ended_and_that_nobody_took_goes_on(pair, rows):
    """A worker that slept through the end of its lease goes on if nobody has taken it."""
    first, second = pair
    driver = await LeasedRun.create(first)
    rows("UPDATE {s}.workers SET until = 0")
    driver.lease.term.until = 0.0  # it has slept, too
    assert await driver.append(Observed()).wait()
    with pytest.raises(LeaseHeldError):
        await second.lease("r1")


async def test_the_thread_renews_leases(pair, rows):
    """A worker whose event loop is busy keeps its runs: the thread renews them."""
    first, second = pair
    drivers = [await LeasedRun.create(first, make_header(f"r{number}")) for number in range(3)]
    rows("UPDATE {s}.workers SET until = 0")
    drivers[0].lease.term.until = 0.0  # as the store knows
    await beat(first)
    for number in range(3):
        with pytest.raises(LeaseHeldError):
            await second.lease(f"r{number}")
    assert not any(driver.lease.lost for driver in drivers)


class TestRenewal(Renewal):
    """What was posted elsewhere is heard of with the next renewal."""


async def test_an_append_learns_of_posts_and_cancel(pair):
    """What was posted by another process reaches the owner with its next append, also one that is refused."""
    first, second = pair
    driver = await LeasedRun.create(first)
    row = await second.post("r1", "k", make_input("x"))
    await driver.append(Observed()).wait()
    assert (driver.lease.inbox_head, driver.lease.cancelled) == (row.number, False)
    await second.post("r1", "cancel", Cancel())
    assert await driver.append(FINAL_ANSWER, final=True).wait() is False
    assert driver.lease.cancelled


async def test_a_renewal_learns_that_the_lease_is_lost(pair, rows):
    """An owner that was replaced is told without asking, and holds the lease no more."""
    first, second = pair
    driver = await LeasedRun.create(first)
    woken = []
    driver.lease.wake = lambda: woken.append(True)
    rows("UPDATE {s}.workers SET until = 0")
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


async def test_a_release_that_failed_is_made_up_for(pair, rows, caplog):
    """The leases of a worker live as long as it does: one that could not be given back is with the next renewal."""
    first, second = pair
    driver = await LeasedRun.create(first)
    rows("ALTER TABLE {s}.runs RENAME TO away")
    with pytest.raises(StoreError, match=r"does not exist.*restore a backup"):
        await driver.release()
    assert "ends by itself" in caplog.text
    rows("ALTER TABLE {s}.away RENAME TO runs")
    with pytest.raises(LeaseHeldError):
        await second.lease("r1")
    assert first.statistics().leases == 1
    await beat(first)
    assert await second.lease("r1")
    assert first.statistics().leases == 0


@pytest.mark.parametrize(
    ("is_dead", "elsewhere"),
    [(True, False), (False, False), (False, True)],
    ids=["seen dead", "alive", "on another machine"],
)
async def test_a_dead_owner_of_this_machine_is_replaced_at_once(pair, rows, is_dead, elsewhere):
    """Who can see that the owner is dead need not wait; whose owner is elsewhere waits for the end of the lease."""
    first, second = pair
    await create_finished_run(first)
    here = OwnerIdentity.generate()
    boot = "of-another-machine" if elsewhere else here.boot_id
    name = str(
        OwnerIdentity(boot, here.pid_namespace, here.pid, "1" if is_dead or elsewhere else here.start_time, "killed")
    )
    rows("INSERT INTO {s}.workers VALUES (%s, extract(epoch FROM now()) + 10, 1)", name)
    rows("UPDATE {s}.runs SET owner = %s", name)
    assert [line.driven for line in await second.runs()] == [not is_dead]
    if is_dead:
        assert (await second.lease("r1")).crashes == 1
    else:
        with pytest.raises(LeaseHeldError):
            await second.lease("r1")


async def test_a_turn_that_was_finished_clears_the_crashes(pair, rows):
    """Owners that died count until one of them gets on; appends within a turn are not enough for that."""
    first, second = pair

    async def crash():
        rows("UPDATE {s}.runs SET owner = 'somebody who died'")
        lease = await second.lease("r1")
        await second.release(lease).wait()
        return lease.crashes

    driver = await LeasedRun.create(first)
    assert await crash() == 1
    driver = await LeasedRun.resume(first)
    await driver.append(Observed()).wait()
    assert await crash() == 2
    driver = await LeasedRun.resume(first)
    await driver.append(*driver.build_turn()).wait()
    assert await crash() == 1


async def test_a_lease_of_a_clock_that_went_back_is_over(pair, rows):
    """A lease that seems to last for hours was written before the server's clock was set back."""
    first, second = pair
    await LeasedRun.create(first)
    _lease = await first.lease("r1")
    rows("UPDATE {s}.workers SET until = extract(epoch FROM now()) + 86400")
    assert await second.lease("r1")


async def test_a_token_is_never_given_twice(store):
    """The lease of a run that was deleted is not one of its successor, which its late release leaves alone."""
    late = await LeasedRun.create(store)
    await late.release()
    await store.delete("r1")
    now = await LeasedRun.create(store)
    assert now.lease.token > late.lease.token
    await late.release()
    assert await now.append(Observed()).wait()


async def test_workers_that_ended_long_ago_are_forgotten(store, rows, monkeypatch):
    """A row of each worker there ever was would be too many; those of last week are kept."""
    for name, days in (("old", 8), ("new", 6)):
        rows("INSERT INTO {s}.workers VALUES (%s, extract(epoch FROM now()) - 86400 * %s, 1)", name, days)
    monkeypatch.setattr(group_commit, "MAINTENANCE_DELAY_S", 0.0)
    await create_finished_run(store)
    await store.runs()
    await store.runs()
    names = {name for (name,) in rows("SELECT name FROM {s}.workers")}
    assert "new" in names
    assert "old" not in names


# Groups.


@pytest.fixture
def sent(monkeypatch):
    """What the stores send; commits are not shown."""
    sent = []

    def execute(link, sql, values=()):
        sent.append(sql)
        return as_before(link, sql, values)

    as_before = PostgresConnection.execute
    monkeypatch.setattr(PostgresConnection, "execute", execute)
    return sent


async def test_appends_are_written_together(store, rows, sent):
    """A hundred runs that append at once, some of them twice, share two round trips."""
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(100)]
    gate = hold(store)
    sent.clear()
    commits = [driver.append(Observed()) for driver in drivers]
    commits += [driver.append(*driver.build_turn()) for driver in drivers[:50]]
    gate.set()
    for commit in commits:
        assert await commit.wait()
    assert len([each for each in sent if "written" in each]) == 1  # beside the upkeep of the store
    assert rows("SELECT version, count(*) FROM {s}.runs GROUP BY 1 ORDER BY 1") == [(1, 50), (6, 50)]
    assert rows("SELECT count(*) FROM {s}.events WHERE version > 0") == [(50 + 50 * 6,)]


async def test_each_append_of_a_group_has_its_own_outcome(pair, rows):
    """What is refused is told why, whatever stands before and behind it, and the rest is written."""
    first, second = pair
    drivers = [await LeasedRun.create(first, make_header(f"r{number}")) for number in range(5)]
    for driver in drivers:
        await driver.append(Observed()).wait()
    await second.post("r2", "k", make_input("x"))
    rows("UPDATE {s}.runs SET owner = 'another' WHERE id = 'r3'")
    gate = hold(first)
    stale = first.append(drivers[1].lease, drivers[1].run, (Observed(),))
    fine, last, lost = (drivers[number].append(FINAL_ANSWER, final=True) for number in (0, 2, 3))
    chain = [drivers[4].append(*drivers[4].build_turn()), drivers[4].append(FINAL_ANSWER, final=True)]
    gate.set()
    assert await fine.wait() is True
    await check_refused(stale, ConflictError)
    assert await last.wait() is False
    await check_refused(lost, LeaseLostError)
    assert [await commit.wait() for commit in chain] == [True, True]
    versions = {"r0": 2, "r1": 1, "r2": 1, "r3": 1, "r4": 7}
    assert dict(rows("SELECT id, version FROM {s}.runs")) == versions


async def test_a_gap_in_a_chain_is_refused(store):
    """Of appends of one run that were queued together, those behind one that does not fit are refused, too."""
    driver = await LeasedRun.create(store)
    gate = hold(store)
    first = driver.append(Observed())
    begun = driver.run
    driver.append(*driver.build_turn())
    gap = store.append(driver.lease, driver.run.apply(FINAL_ANSWER), (FINAL_ANSWER,))
    again = store.append(driver.lease, begun.apply(FINAL_ANSWER), (FINAL_ANSWER,))
    gate.set()
    assert await first.wait()
    assert await gap.wait()
    await check_refused(again, ConflictError)


async def test_large_groups_are_cut(store, sent, monkeypatch):
    """A statement has a bound: what comes beyond it is written by another one of the same transaction."""
    monkeypatch.setattr(postgres, "MAX_STATEMENT_CHARS", 2_000)
    monkeypatch.setattr(threaded, "MAX_MERGED_CHARS", 0)
    driver = await LeasedRun.create(store)
    driver.append(Observed())
    gate = hold(store)
    sent.clear()
    commits = [driver.append(*driver.build_turn()) for _ in range(20)]
    gate.set()
    assert all([await commit.wait() for commit in commits])
    assert 3 < len(sent) < 15
    assert len((await store.read("r1")).events) == 101


async def test_a_job_that_cannot_be_stored_harms_nobody_else(store):
    """A value that is no text is its caller's mistake; what is written together with it is written."""
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(5)]

    async def misuse(key):
        with pytest.raises(MisuseError):
            await store.post("r1", key, make_input("x"))

    gate = hold(store)
    async with anyio.create_task_group() as group:
        group.start_soon(misuse, "half \ud800")
        group.start_soon(misuse, "".join(map(chr, range(32, 6_000))))  # longer than a row of an index
        await anyio.lowlevel.checkpoint()
        commits = [driver.append(Observed()) for driver in drivers]
        gate.set()
    assert [await commit.wait() for commit in commits] == [True] * 5
    assert await store.inbox("r1") == ()


# Races that one thread cannot have.


async def test_a_post_and_the_end_race_over_two_connections(pair):
    """Of a post by one worker and the end of the run by another one is refused."""
    first, second = pair
    outcome = {}

    async def post(run_id):
        try:
            await second.post(run_id, "k", make_input("x"))
            outcome["posted"] = True
        except ConflictError:
            outcome["posted"] = False

    async def end(driver):
        outcome["ended"] = await driver.append(FINAL_ANSWER, final=True).wait()

    for number in range(30):
        driver = await LeasedRun.create(first, make_header(f"r{number}"))
        await driver.append(Observed()).wait()
        async with anyio.create_task_group() as group:
            group.start_soon(post, driver.run.id)
            group.start_soon(end, driver)
        assert outcome["posted"] is not outcome["ended"]


async def test_the_end_sees_a_post_that_it_waited_for(store, rows, shared_postgres, schema):
    """A final append that waits for a poster's lock sees what was posted, though it began before that."""
    driver = await LeasedRun.create(store)
    await driver.append(Observed()).wait()
    with session(shared_postgres, schema) as poster:
        poster.execute("SELECT 1 FROM runs FOR NO KEY UPDATE")
        commit = driver.append(FINAL_ANSWER, final=True)
        await in_wait(rows)
        poster.execute("INSERT INTO posts SELECT number, 1, 'k', '', false, NULL, false FROM runs")
    assert await commit.wait() is False


async def test_a_run_goes_on_from_no_run_that_is_being_deleted(pair, rows, shared_postgres, schema):
    """Who starts in a session while its last run is removed goes on from the one before."""
    first, second = pair
    for number in range(2):
        await create_finished_run(first, make_header(f"r{number}", session="s"))
    with session(shared_postgres, schema) as remover:
        remover.execute("DELETE FROM runs WHERE id = 'r1'")
        async with anyio.create_task_group() as group:
            group.start_soon(first.create, make_header("r2", session="s"))
            await in_wait(rows)
            remover.commit()
    assert (await second.read("r2")).header.after == "r0"


async def test_a_run_goes_on_after_no_run_that_is_being_deleted(pair, rows, shared_postgres, schema):
    """Who begins after a run while that is removed waits for the removal, and is told."""
    first, second = pair
    await create_finished_run(first, make_header("first"))
    with session(shared_postgres, schema) as remover:
        remover.execute("DELETE FROM runs")
        async with anyio.create_task_group() as group:
            group.start_soon(refused_create, first, make_header(after="first"))
            await in_wait(rows)
            remover.commit()
    assert await second.runs() == ()


async def refused_create(store, head):
    with pytest.raises(ConflictError, match="'first', which this store does not hold"):
        await store.create(head)


async def test_a_run_that_is_just_being_taken_is_not_deleted(pair, rows, shared_postgres, schema):
    """Whoever deletes looks again once it has the locks."""
    first, second = pair
    await create_finished_run(first, make_header("r1"))
    await create_finished_run(first, make_header("r1.a", parent="r1"))
    async with anyio.create_task_group() as group:
        with session(shared_postgres, schema) as taker:
            await second.create(make_header("r2"))
            taker.execute("UPDATE runs SET owner = (SELECT owner FROM runs WHERE id = 'r2') WHERE id = 'r1.a'")
            group.start_soon(refused_delete, first)
            await in_wait(rows)
    assert len(await first.runs()) == 3


async def refused_delete(store):
    with pytest.raises(LeaseHeldError, match=r"r1\.a"):
        await store.delete("r1")


def session(url, schema):
    """Open another session; at its end its transaction is committed."""
    return psycopg.connect(psycopg.conninfo.make_conninfo(url, options=f"-csearch_path={schema}"))


async def in_wait(rows):
    """Return when a store waits for a lock."""
    waiting = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'agentfsm' AND wait_event_type = 'Lock'"
    await anyio.to_thread.run_sync(await_that, lambda: bool(rows(waiting)), "a store waits for a lock")


# What is kept.


async def test_awkward_names(store):
    """NUL, which PostgreSQL refuses, and all else that is text comes back as it was; no two names become one."""
    names = [HOSTILE_TEXT, "a\x00b", "a\x01b", "a\x01\x02b", "a\x01\x01b", "a\x00\x01b", "%s %% {} $1", "\ufeff\uffff"]
    for number, name in enumerate(names):
        head = make_header(name, name, session=name, agent=name, user=name, parent=name, created_at=float(number))
        driver = await LeasedRun.create(store, head)
        await store.post(name, name, make_input(name))
        assert (await store.read(name)).header == head
        assert [row.key for row in await store.inbox(name)] == [name]
        (line,) = await store.runs(Filter(session=name, agent=name, user=name, parent=name))
        assert (line.id, line.session, line.agent, line.user, line.parent, line.prompt) == (name,) * 6
        await driver.release()
    assert await store.delete_session(names[1]) == 1
    assert len(await store.runs()) == len(names) - 1


async def test_durability_is_what_the_server_is_told(store):
    """Full never waits for less than the disk, and no less than the server is set to; normal does not wait."""
    levels = []
    for durability in ("full", "normal"):
        levels += await store._run_job(
            lambda ledger: ledger.execute("SHOW synchronous_commit").fetchall(), durability=durability
        )
    assert levels == [("on",), ("off",)]


@pytest.mark.parametrize(("default", "full"), [("off", "on"), ("local", "local"), ("remote_apply", "remote_apply")])
async def test_full_is_what_the_server_is_set_to(shared_postgres, schema, default, full):
    """A server that is set to more, or to the own disk only, knows why; one that waits for nothing has to."""
    store = PostgresStore(f"{shared_postgres}?options=-csynchronous_commit%3D{default}", schema=schema)
    assert await asked(store, "SHOW synchronous_commit") == [(full,)]
    await store.aclose()


async def test_nothing_is_left_open(store, postgres_desk, schema):
    """Between jobs the connection is idle, in no transaction, with no lock and no setting of ours."""
    driver = await LeasedRun.create(store)
    await driver.append(Observed()).wait()
    with pytest.raises(ConflictError):
        await store.create(make_header(prompt="another"))
    store._writer.backend._db.execute("SELECT 1")
    pid = store._writer.backend._db.info.backend_pid
    state = "SELECT state, xact_start, application_name FROM pg_stat_activity WHERE pid = %s"
    assert postgres_desk.execute(state, [pid]).fetchall() == [("idle", None, "agentfsm")]
    assert postgres_desk.execute("SELECT 1 FROM pg_locks WHERE pid = %s", [pid]).fetchall() == []
    left = store._writer.backend._db.execute("SHOW search_path").fetchall()
    assert schema not in left[0][0]


async def test_the_connection_is_closed_when_idle(store, rows, monkeypatch):
    """A store that nobody closes holds no thread and no connection for long, and opens them again."""
    await create_finished_run(store)
    pid = store._writer.backend._db.info.backend_pid
    thread = store._writer._thread
    monkeypatch.setattr(group_commit, "IDLE_TIMEOUT_S", 0.0)
    await store.runs()
    thread.join()
    await anyio.to_thread.run_sync(
        await_that, lambda: not rows("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid), "its session ends"
    )
    assert rows("SELECT FROM {s}.workers") == []
    assert len(await store.runs()) == 1


def test_a_forked_child_has_a_connection_of_its_own(shared_postgres, schema):
    """What the child does, and that it closes and ends, leaves the parent's connection as it was."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, shared_postgres, schema], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("['of the child', 'r1'] True\n", 0), done.stderr


# The schema.


async def test_workers_may_make_the_tables_at_once(shared_postgres, postgres_desk):
    """Whoever comes second finds them made."""
    name = "test_made_at_once"
    stores = [PostgresStore(shared_postgres, schema=name) for _ in range(6)]
    try:
        async with anyio.create_task_group() as group:
            for number, store in enumerate(stores):
                group.start_soon(create_finished_run, store, make_header(f"r{number}"))
        assert len(await stores[0].runs()) == 6
    finally:
        for store in stores:
            await store.aclose()
        postgres_desk.execute(f"DROP SCHEMA {name} CASCADE")


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ("CREATE TABLE {s}.runs (distance float)", StoreError, "tables of another program.*give another schema"),
        (
            "CREATE VIEW {s}.layout AS SELECT 405 AS version, 2 AS other",
            CorruptError,
            "lacks the tables events, feedback, follow",
        ),
        ("CREATE TABLE {s}.layout AS SELECT 501 AS version", TooNewError, r"version is 5.1, .* up to 4\.x.: upgrade"),
    ],
)
async def test_a_schema_that_is_not_ours_is_left_alone(shared_postgres, postgres_desk, change, kind, text):
    """Tables of others are theirs, and half-understanding newer ones would lose facts."""
    with empty_schema(postgres_desk) as name:
        postgres_desk.execute(change.replace("{s}", name))
        store = PostgresStore(shared_postgres, schema=name)
        for use in (store.runs(), store.create(make_header())):
            with pytest.raises(kind, match=text):
                await use
        await store.aclose()
        made = "SELECT count(*) FROM pg_class WHERE relnamespace = to_regnamespace(%s)"
        assert postgres_desk.execute(made, [name]).fetchone() == (1,)


async def test_who_may_not_create_is_told_what_to_grant(shared_postgres, postgres_desk):
    """A schema that was made for a user needs no right on the database; without it the error says what to do."""
    user = "test_without_rights"
    address = shared_postgres.replace("postgresql://postgres:", f"postgresql://{user}:", 1)
    if address == shared_postgres:
        pytest.skip("the server was given by its address, in another form than ours")
    password = address.split(":")[2].partition("@")[0]
    postgres_desk.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{password}'")
    try:
        with empty_schema(postgres_desk) as name:
            postgres_desk.execute(f"GRANT ALL ON SCHEMA {name} TO {user}")
            own, none = PostgresStore(address, schema=name), PostgresStore(address, schema="test_nowhere")
            await create_finished_run(own)
            with pytest.raises(StoreError, match=r"permission denied for database.*grant it the schema"):
                await create_finished_run(none)
            for store in (own, none):
                await store.aclose()
    finally:
        postgres_desk.execute(f"DROP OWNED BY {user}; DROP ROLE {user}")


async def test_a_database_that_cannot_hold_all_text_is_refused(shared_postgres, postgres_desk):
    """In another encoding than UTF-8 some text could be stored and some not."""
    name = "test_latin"
    postgres_desk.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    try:
        settings = psycopg.conninfo.conninfo_to_dict(shared_postgres, dbname=name)
        store = PostgresStore(psycopg.conninfo.make_conninfo(**settings))
        with pytest.raises(StoreError, match="keeps text as LATIN1: create a database with ENCODING 'UTF8'"):
            await store.runs()
        await store.aclose()
    finally:
        postgres_desk.execute(f"DROP DATABASE {name}")


# What is given to it.


@pytest.mark.parametrize("url", ["postgres//u:secret@h", "postgresql://u:se%zzcret@h", "host=h password='secret", 7])
def test_a_url_is_read_at_once_and_never_shown(url):
    """One that libpq cannot read is a mistake, told without its password."""
    with pytest.raises(MisuseError, match="give 'postgresql://") as caught:
        PostgresStore(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_store_does_not_show_its_password():
    """Neither does its text, nor that of its ledger."""
    store = PostgresStore("postgresql://user:secret@host/database")
    assert "secret" not in f"{store!r} {store._create_backend()!r} {store._create_backend().address}"


@pytest.mark.parametrize(
    "options",
    [
        {"lease_s": 0},
        {"lease_s": 3601},
        {"patience_s": -1},
        {"patience_s": math.inf},
        {"patience_s": math.nan},
        {"schema": ""},
        {"schema": 'x"; DROP'},
        {"schema": "Runs"},
        {"schema": "x" * 64},
        {"schema": None},
    ],
)
def test_options_have_bounds(options):
    """What cannot be meant is refused when the store is made."""
    (name,) = options
    with pytest.raises(MisuseError, match=name):
        PostgresStore("postgresql://host/database", **options)


async def test_a_schema_may_have_any_plain_name(shared_postgres, postgres_desk):
    """Words of SQL, too."""
    store = PostgresStore(shared_postgres, schema="select")
    try:
        await create_finished_run(store)
        assert len(await store.runs()) == 1
    finally:
        await store.aclose()
        postgres_desk.execute('DROP SCHEMA "select" CASCADE')
