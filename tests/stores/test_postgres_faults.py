"""What goes wrong with servers and on the way to them: cut, killed, locked, away, damaged."""

import os
import signal
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import anyio
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from agentfsm import AgentError, CorruptError, LeaseHeldError, MisuseError, StoreError
from agentfsm.core.events import Observed
from agentfsm.core.inbox import Cancel
from agentfsm.core.run import begin_run
from agentfsm.stores import PostgresStore
from agentfsm.stores.postgres import connection
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    LeasedRun,
    check_refused,
    create_finished_run,
    make_header,
    make_input,
)
from tests.support.busy_writer import hold
from tests.support.checks import HANG_S
from tests.support.database_servers import PostgresServer, empty_schema
from tests.support.lease_renewal import beat as renew
from tests.support.postgres_proxy import Proxy
from tests.support.server_reaper import await_that


@pytest.fixture
def schema(postgres_desk):
    with empty_schema(postgres_desk) as name:
        yield name


@pytest.fixture
async def store(shared_postgres, schema):
    store = PostgresStore(shared_postgres, schema=schema)
    yield store
    await store.aclose()


@pytest.fixture
def proxy(shared_postgres):
    settings = conninfo_to_dict(shared_postgres)
    with Proxy((settings["host"], int(settings["port"]))) as proxy:
        yield proxy


@pytest.fixture
async def frail(shared_postgres, schema, proxy, monkeypatch):
    """A store whose connection can be cut, and which does not wait long before it tries again."""
    monkeypatch.setattr(connection, "MIN_PAUSE_S", 0.001)
    url = make_conninfo(shared_postgres, host="127.0.0.1", port=proxy.own_port, sslmode="disable", gssencmode="disable")
    store = PostgresStore(url, schema=schema)
    await store.runs()
    yield store
    proxy.cut = None
    await store.aclose()


# Each job, cut at each of its messages. `prepare` makes what it needs, `act` does it, `check` sees what it said.


async def two_runs(store):
    return [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(2)]


async def append(store, drivers):
    commits = [driver.append(Observed()) for driver in drivers] + [
        driver.append(*driver.build_turn()) for driver in drivers
    ]
    return [await commit.wait() for commit in commits]


async def appended(said, other, drivers):
    assert said == [True] * 4
    for driver in drivers:
        assert len((await other.read(driver.run.id)).events) == 6
        assert await driver.append(FINAL_ANSWER, final=True).wait()


async def a_post(store):
    (driver, _) = await two_runs(store)
    row = await store.post("r0", "k", make_input("x"))
    return driver, row


async def append_final(store, given):
    driver, row = given
    held_up = await store.append(
        driver.lease, driver.run.fold((Observed(), FINAL_ANSWER)), (Observed(), FINAL_ANSWER), final=True
    ).wait()
    return held_up, await driver.append(Observed(), FINAL_ANSWER, taken=[row.number], final=True).wait()


async def appended_final(said, other, given):
    assert said == (False, True)
    assert len((await other.read("r0")).events) == 2
    assert await other.inbox("r0") == ()


async def nothing(store):
    return None


async def create(store, _given):
    return await store.create(make_header("r0", session="s"), events=(Observed(),))


async def created(said, other, _given):
    head, lease = said
    assert (head, lease.version, lease.crashes, lease.lost) == (make_header("r0", session="s"), 1, 0, False)
    assert len((await other.read("r0")).events) == 1
    with pytest.raises(LeaseHeldError):
        await other.lease("r0")


async def a_finished_session(store):
    return [await create_finished_run(store, make_header(f"r{number}", session="s")) for number in range(2)]


async def take(store, _given):
    return await store.lease("r1")


async def taken(said, other, _given):
    assert (said.version, said.crashes, said.lost) == (2, 0, False)
    with pytest.raises(LeaseHeldError):
        await other.lease("r1")


async def release(store, drivers):
    drivers[0].lease.inbox_read = 7
    return await store.release(drivers[0].lease).wait()


async def released(said, other, _given):
    assert said is True
    assert (await other.lease("r0")).crashes == 0
    with pytest.raises(LeaseHeldError):
        await other.lease("r1")


async def post(store, _given):
    return [await store.post("r0", "k", make_input("x")), await store.post("r0", "cancel", Cancel())]


async def was_posted(said, other, drivers):
    assert said == list(await other.inbox("r0"))
    assert [row.number for row in said] == [1, 2]
    assert (drivers[0].lease.inbox_head, drivers[0].lease.cancelled) == (2, True)


async def delete(store, _given):
    return await store.delete("r1")


async def deleted(_said, other, _given):
    assert [line.id for line in await other.runs()] == ["r0"]


async def delete_session(store, _given):
    return await store.delete_session("s")


async def prune(store, _given):
    return await store.prune(1e12)


async def all_removed(said, other, _given):
    assert said == 2
    assert await other.runs() == ()


async def read(store, _given):
    return await store.read("r1"), await store.runs(), await store.inbox("r1")


async def was_read(said, other, _given):
    assert said == await read(other, None)


async def two_that_rest(store):
    for driver in await two_runs(store):
        await driver.release()


async def claim(store, _given):
    return store, (await store.claim("", limit=10)).leases


async def claimed(said, other, _given):
    store, leases = said
    assert [lease.run_id for lease in leases] == ["r0", "r1"]
    assert (await other.claim("", limit=10)).leases == ()
    for lease in leases:
        assert await LeasedRun(store, lease, begin_run(make_header(lease.run_id))).append(Observed()).wait()


async def beat(store, drivers):
    store._writer._renewed_at = -1e9
    await store.runs()
    await store.runs()


async def beaten(_said, other, drivers):
    assert not any(driver.lease.lost for driver in drivers)
    for driver in drivers:
        assert await driver.append(Observed()).wait()


@pytest.mark.parametrize(
    ("prepare", "act", "check"),
    [
        (two_runs, append, appended),
        (a_post, append_final, appended_final),
        (nothing, create, created),
        (a_finished_session, take, taken),
        (two_runs, release, released),
        (two_runs, post, was_posted),
        (a_finished_session, delete, deleted),
        (a_finished_session, delete_session, all_removed),
        (a_finished_session, prune, all_removed),
        (a_finished_session, read, was_read),
        (two_runs, beat, beaten),
        (two_that_rest, claim, claimed),
    ],
    ids=lambda value: value.__name__,
)
@pytest.mark.parametrize("after", [False, True], ids=["before it arrives", "after it was answered"])
async def test_a_cut_connection_is_made_good(*, frail, store, proxy, postgres_desk, schema, prepare, act, check, after):
    """Wherever the connection is cut, each job is done once, and what is said of it is true.

    Each message is cut in turn, until a round is not cut any more. The commit is one of them: it may or may not have
    been made, and whoever asked is told what happened.
    """
    where = 0
    while True:
        given = await prepare(frail)
        proxy.seen.clear()
        proxy.after, proxy.cut, proxy.cuts = after, where, 0
        said = await act(frail, given)
        proxy.cut = None
        await check(said, store, given)
        if not proxy.cuts:
            break
        where += 1
        del given, said
        for each in (frail, store):
            each._writer.backend.leases.clear()
        for table in ("events", "posts", "runs"):
            postgres_desk.execute(f"DELETE FROM {schema}.{table}")  # noqa: S608  our own names
    assert where >= 2
    assert b"COMMIT" in b" ".join(proxy.seen)


async def test_transactions_may_each_go_to_another_session(frail, proxy, shared_postgres):
    """A pooler that gives a session for one transaction only, as PgBouncer does, is no obstacle."""
    with psycopg.connect(shared_postgres, autocommit=True) as other:
        spare = proxy.spare = socket.socket(fileno=socket.dup(other.pgconn.socket))
        spare.setblocking(True)
        driver = await LeasedRun.create(frail, make_header(session="s"))
        driver.append(Observed())
        for _ in range(20):
            assert await driver.append(*driver.build_turn()).wait()
        row = await frail.post("r1", "k", make_input("x"))
        assert await driver.append(FINAL_ANSWER, taken=[row.number], final=True).wait()
        await beat(frail, [driver])
        await driver.release()
        assert (await frail.runs())[0].version == 102
        assert await frail.delete_session("s") == 1
        await frail.aclose()
        spare.close()


async def test_a_commit_that_is_still_being_made_is_waited_for(frail, store, proxy, postgres_desk, schema):
    """A reply that is lost while the server still commits is no reason to do it twice."""
    driver = await LeasedRun.create(frail)
    postgres_desk.execute(f"""
        SET search_path = {schema};
        CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END';
        CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON events INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION slowly();
        RESET search_path;
        SELECT pg_advisory_lock(4711);
    """)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'agentfsm'"
    try:
        pid = frail._writer.backend._db.info.backend_pid
        commit = driver.append(Observed())
        await until(lambda: postgres_desk.execute(waiting).fetchone() == (1,), "the commit waits")
        assert postgres_desk.execute("SELECT query FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone() == (
            "COMMIT",
        )
        cut_off(frail)
        await until(lambda: postgres_desk.execute(waiting).fetchone() == (2,), "the store asks what became of it")
    finally:
        postgres_desk.execute("SELECT pg_advisory_unlock(4711)")
    assert await commit.wait()
    assert (await store.read("r1")).events == (Observed(),)


def cut_off(store):
    """Cut the connection under the store, which waits for a reply."""
    with socket.socket(fileno=socket.dup(store._writer.backend._db.pgconn.socket)) as line:
        line.shutdown(socket.SHUT_RDWR)


async def until(condition, what):
    await anyio.to_thread.run_sync(await_that, condition, what)


async def test_a_session_that_was_ended_is_opened_again(store, postgres_desk):
    """An administrator who ends our session (57P01) is nobody's error."""
    driver = await LeasedRun.create(store)
    for _ in range(3):
        pid = store._writer.backend._db.info.backend_pid
        postgres_desk.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
        assert await driver.append(*((Observed(),) if driver.run.version == 0 else driver.build_turn())).wait()
    assert len((await store.read("r1")).events) == 11


async def test_a_victim_of_a_deadlock_is_done_again(store, shared_postgres, postgres_desk, schema):
    """The server ends one of two transactions that wait for each other; ours tries again, and nobody notices."""
    for number in range(2):
        await LeasedRun.create(store, make_header(f"r{number}"))
    gate = hold(store)
    async with anyio.create_task_group() as group:
        with session(shared_postgres, schema) as other:
            other.execute("SET deadlock_timeout = '1min'")  # so that the store is the first to notice
            other.execute("UPDATE runs SET turn = 1 WHERE id = 'r1'")
            group.start_soon(store.post, "r0", "k", make_input("x"))
            group.start_soon(store.post, "r1", "k", make_input("x"))
            await anyio.wait_all_tasks_blocked()
            gate.set()
            waiting = (
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'agentfsm'"
            )
            await until(lambda: postgres_desk.execute(waiting).fetchone() == (1,), "the store waits")
            await anyio.to_thread.run_sync(other.execute, "UPDATE runs SET turn = 1 WHERE id = 'r0'")
    for number in range(2):
        assert len(await store.inbox(f"r{number}")) == 1


def session(url, schema):
    """Open another session; at its end its transaction is committed."""
    return psycopg.connect(make_conninfo(url, options=f"-csearch_path={schema}"))


async def test_a_lock_that_was_left_is_told(store, shared_postgres, schema, monkeypatch):
    """A transaction that was left open elsewhere holds up its own run only, and the error says what to look for."""
    monkeypatch.setattr(connection, "LOCK_TIMEOUT_S", 0.1)
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(3)]
    with session(shared_postgres, schema) as other:
        other.execute("UPDATE runs SET turn = 1 WHERE id = 'r1'")
        gate = hold(store)
        commits = [driver.append(Observed()) for driver in drivers]
        gate.set()
        with anyio.fail_after(60):
            assert [await commits[number].wait() for number in (0, 2)] == [True, True]
            with pytest.raises(StoreError, match=r"lock timeout.*end its open transaction"):
                await commits[1].wait()
        await check_refused(drivers[1].append(*drivers[1].build_turn()), StoreError)
        other.rollback()


async def test_leases_are_renewed_while_locks_are_waited_for(shared_postgres, schema, monkeypatch):
    """Runs whose rows are locked elsewhere hold up one another, but cost no other run of the worker its lease."""
    monkeypatch.setattr(connection, "LOCK_TIMEOUT_S", 0.1)
    store = PostgresStore(shared_postgres, schema=schema, lease_s=0.03)
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(4)]
    beats = []
    beat = type(store._writer.backend).renew_leases
    monkeypatch.setattr(type(store._writer.backend), "renew_leases", lambda ledger: [beats.append(True), beat(ledger)])
    with session(shared_postgres, schema) as other:
        other.execute("UPDATE runs SET turn = 1 WHERE id <> 'r3'")
        gate = hold(store)
        commits = [driver.append(Observed()) for driver in drivers]
        beats.clear()
        gate.set()
        for commit in commits[:3]:
            await check_refused(commit, StoreError)
        assert len(beats) >= 3
        assert await commits[3].wait()
        other.rollback()
    await store.aclose()


async def test_a_dropped_lease_whose_row_is_locked_costs_no_other(store, shared_postgres, schema, monkeypatch, caplog):
    """What cannot be let go of yet is let go of later; meanwhile the other leases are renewed, and all goes on."""
    monkeypatch.setattr(connection, "LOCK_TIMEOUT_S", 0.1)
    other = PostgresStore(shared_postgres, schema=schema)
    kept, dropped = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(2)]
    with session(shared_postgres, schema) as locker:
        locker.execute("UPDATE workers SET until = 0")
        locker.commit()
        kept.lease.term.until = 0.0  # it has slept, too
        locker.execute("UPDATE runs SET turn = 1 WHERE id = 'r1'")
        del dropped
        await renew(store)
        assert store.statistics().leases == 2
        with pytest.raises(LeaseHeldError):
            await other.lease("r0")
        assert await kept.append(Observed()).wait()
    await renew(store)
    assert (store.statistics().leases, caplog.text) == (1, "")
    assert (await other.lease("r1")).crashes == 0
    await other.aclose()


async def test_a_worker_that_stands_still_lets_others_go_on(store, shared_postgres, schema, monkeypatch):
    """What stops in the middle of a transaction (SIGSTOP) holds its locks for a moment; it goes on where it was."""
    other = PostgresStore(shared_postgres, schema=schema)
    await create_finished_run(store)
    gate, entered = threading.Event(), threading.Event()
    taker = store._build_lease_request("lease", "full")

    def stand_still(ledger):
        lease = ledger.acquire_lease("r1", taker)
        entered.set()
        gate.wait(HANG_S)
        return ledger.execute("SELECT count(*) FROM runs").fetchall(), lease

    async def stop():
        outcome.append(await store._run_job(stand_still))

    outcome = []
    async with anyio.create_task_group() as group:
        with monkeypatch.context() as patch:  # for this transaction: those of the other store take what they take
            patch.setattr(connection, "IDLE_TRANSACTION_TIMEOUT_S", 0.1)
            group.start_soon(stop)
            await anyio.to_thread.run_sync(entered.wait)
        lease = await other.lease("r1")
        await other.release(lease).wait()
        gate.set()
    ((count, taken_again),) = outcome
    assert (count, taken_again.token > lease.token) == ([(1,)], True)
    await other.aclose()


# A server that is away.


@pytest.fixture
def server():
    with PostgresServer() as server:
        yield server


async def test_runs_outlive_the_death_of_the_server(server):
    """Runs go on when the server is killed under them and comes back; what was acknowledged is there, once."""
    store = PostgresStore(server.url)
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(20)]
    for driver in drivers:
        await driver.append(Observed()).wait()

    async def drive(driver):
        for _ in range(10):
            assert await driver.append(*driver.build_turn()).wait()

    async with anyio.create_task_group() as group:
        for driver in drivers:
            group.start_soon(drive, driver)
        for _ in range(2):
            await anyio.to_thread.run_sync(server.kill)
            await anyio.to_thread.run_sync(server.start)
    for driver in drivers:
        assert len((await store.read(driver.run.id)).events) == 51
    await store.aclose()


async def test_patience_ends(server):
    """A server that stays away is told; the run whose append was not written stops, and others go on afterwards."""
    store = PostgresStore(server.url, patience_s=0.2)
    lost, other = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(2)]
    server.kill()
    with pytest.raises(
        StoreError,
        match=f"127.0.0.1:{server.port}/postgres says .*cannot be reached, refuses connections, or the connection",
    ):
        await lost.append(Observed()).wait()
    server.start()
    await check_refused(lost.append(*lost.build_turn()), StoreError)
    assert await other.append(Observed()).wait()
    assert (await store.read("r0")).events == ()
    await store.aclose()


async def test_a_server_that_stands_still_is_given_up(server, monkeypatch):
    """A server that neither answers nor hangs up (SIGSTOP, a disk that hangs) is away, and can be left."""
    url = make_conninfo(server.url, connect_timeout=2)  # libpq takes no less
    store = PostgresStore(url, patience_s=0.0)
    driver = await LeasedRun.create(store)
    monkeypatch.setattr(
        connection, "SILENCE_TIMEOUT_S", 0.1
    )  # from here on: a busy machine may take longer for the tables
    with stopped(server):
        with pytest.raises(StoreError, match=r"has not answered for 0\.1 s"):
            await driver.append(Observed()).wait()
        await store.aclose()
    monkeypatch.undo()
    store = PostgresStore(server.url)
    assert (await store.read("r1")).events == ()
    await store.aclose()


@contextmanager
def stopped(server):
    """Let the server and all its processes stand still."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    pids = [server.pid, *map(int, children)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def test_a_commit_of_which_nobody_can_be_asked_is_told_as_such(server):
    """When the server dies in a commit and stays away, the error says that it may have been made."""
    with Proxy(("127.0.0.1", server.port)) as proxy:
        url = make_conninfo(server.url, port=proxy.own_port, sslmode="disable", gssencmode="disable")
        store = PostgresStore(url, patience_s=0.2)
        driver = await LeasedRun.create(store)
        proxy.after, proxy.cut = True, b"COMMIT"
        proxy.address = ("127.0.0.1", 1)
        with pytest.raises(StoreError, match="It is unknown whether the last writes were made"):
            await driver.append(Observed()).wait()
        proxy.address = ("127.0.0.1", server.port)
        assert (await store.read("r1")).events == (Observed(),)
        await store.aclose()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"port": 1},
            "127.0.0.1:1/postgres says .*see its message, check that it runs and that the address is right",
        ),
        ({"password": "hunter2"}, "password authentication failed"),
        ({"dbname": "nowhere"}, "nowhere. does not exist"),
    ],
)
async def test_a_first_connection_that_fails_is_told_at_once(shared_postgres, monkeypatch, change, text):
    """A wrong address is not waited for, and no error shows a password."""
    tries = []
    connect = connection.WatchedConnection.connect
    monkeypatch.setattr(
        connection.WatchedConnection, "connect", lambda **settings: [tries.append(settings), connect(**settings)][1]
    )
    url = make_conninfo(shared_postgres, **change)
    store = PostgresStore(url, patience_s=0.5)
    with pytest.raises(StoreError, match=text) as caught:
        await store.runs()
    assert len(tries) == 1
    error = caught.value
    while error is not None:
        assert conninfo_to_dict(url)["password"] not in f"{error!r} {error}"
        error = error.__cause__
    await store.aclose()


# Damage, and other errors.


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("UPDATE events SET body = substr(body, 1, 9) WHERE version = 3", "'r1', version 3, cannot be read"),
        ("DELETE FROM events WHERE version = 3", r"'r1', version 3, cannot be read \(it is missing\)"),
        ("DELETE FROM events WHERE version = 6", r"'r1', version 6, cannot be read \(it is missing\)"),
        ("UPDATE events SET body = '{' WHERE version = 0", "'r1', the header, cannot be read"),
        ("DELETE FROM events WHERE version = 0", r"'r1', the header, cannot be read \(it is missing\)"),
    ],
)
async def test_a_damaged_record_is_named(store, shared_postgres, schema, damage, text):
    """A record that is torn or missing is an error that names run and version; the run can be deleted."""
    driver = await LeasedRun.create(store)
    await driver.append(Observed(), *driver.build_turn()).wait()
    await driver.release()
    with session(shared_postgres, schema) as other:
        other.execute(damage)
    with pytest.raises(CorruptError, match=text):
        await store.read("r1")
    await store.delete("r1")


async def test_a_journal_with_records_too_many_is_damaged(store, shared_postgres, schema):
    """A record where the next one shall be written is not ours, and is not overwritten."""
    driver = await LeasedRun.create(store)
    with session(shared_postgres, schema) as other:
        other.execute("INSERT INTO events SELECT number, 1, 'theirs' FROM runs")
    with pytest.raises(CorruptError, match=r"duplicate key.*restore a backup") as caught:
        await driver.append(Observed()).wait()
    assert "theirs" not in str(caught.value)


def test_each_error_of_the_server_is_explained():
    """For each SQLSTATE that psycopg knows there is a why and a next, and a kind that fits."""
    ledger = PostgresStore("postgresql://user:secret@host/database")._create_backend()
    told = {}
    for code, kind in vars(psycopg.errors)["_sqlcodes"].items():
        error = ledger.translate_error(kind("it said: secret"))
        assert isinstance(error, AgentError)
        assert "secret" not in str(error)
        assert "; " in str(error), code
        told[code] = type(error)
    assert (told["23505"], told["22021"], told["53100"], told["XX001"]) == (
        CorruptError,
        MisuseError,
        StoreError,
        CorruptError,
    )
    fault = ledger.translate_error(ZeroDivisionError("x"))
    assert "please report it" in str(fault)
