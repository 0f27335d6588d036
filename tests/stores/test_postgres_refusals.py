"""A PostgreSQL server that is there, and refuses: others go first, no connection is left, a standby is missing."""

from contextlib import closing

import anyio
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from agentfsm import MisuseError, StoreError
from agentfsm.core.events import Observed
from agentfsm.stores import PostgresStore
from agentfsm.stores.postgres import connection
from agentfsm.testing.conformance.helpers import LeasedRun, make_header, make_input
from tests.support.database_servers import PASSWORD, PostgresServer
from tests.support.server_reaper import await_that

# Fails so often, as two transactions do that the server cannot put one behind the other.
FAILS = """
CREATE SEQUENCE agentfsm.failures;
CREATE FUNCTION agentfsm.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF nextval('agentfsm.failures') <= {times} THEN
        RAISE 'could not serialize access' USING errcode = '40001';
    END IF;
    RETURN NULL;
END $$;
CREATE {when} FOR EACH ROW EXECUTE FUNCTION agentfsm.fail();
"""
AT_ONCE = "TRIGGER fails AFTER UPDATE ON agentfsm.runs"
AT_COMMIT = "CONSTRAINT TRIGGER fails AFTER UPDATE ON agentfsm.runs DEFERRABLE INITIALLY DEFERRED"


@pytest.fixture
def server():
    with PostgresServer({"max_connections": "5", "superuser_reserved_connections": "2"}) as server:
        yield server


@pytest.fixture
def desk(server):
    with psycopg.connect(server.url, autocommit=True) as desk:
        yield desk


@pytest.fixture
def clerk(server, desk):
    """The URL of a user for whom there are two connections: the others are kept for administrators."""
    desk.execute(f"CREATE ROLE clerk LOGIN PASSWORD '{PASSWORD}'; GRANT CREATE ON DATABASE postgres TO clerk")
    return make_conninfo(server.url, user="clerk")


@pytest.mark.parametrize("when", [AT_ONCE, AT_COMMIT])
async def test_a_serialisation_failure_is_done_again(server, desk, when):
    """Whether the statement fails (40001) or the COMMIT, the group is done again, once, and nobody notices."""
    store = PostgresStore(server.url)
    driver = await LeasedRun.create(store)
    desk.execute(FAILS.format(times=3, when=when))
    assert await driver.append(Observed()).wait()
    assert await driver.append(*driver.build_turn()).wait()
    assert desk.execute("SELECT last_value > 3 FROM agentfsm.failures").fetchone() == (True,)
    assert len((await store.read("r1")).events) == 6
    await store.aclose()


async def test_a_serialisation_failure_that_does_not_end_is_told(server, desk):
    """Nothing of it is written; with a new lease the run goes on once the others are out of the way."""
    store = PostgresStore(server.url, patience_s=0.2)
    driver = await LeasedRun.create(store)
    desk.execute(FAILS.format(times=10**9, when=AT_COMMIT))
    with pytest.raises(StoreError, match=r"could not serialize access.*conflicts with other sessions persisted"):
        await driver.append(Observed()).wait()
    desk.execute("DROP TRIGGER fails ON agentfsm.runs")
    await driver.release()
    again = await LeasedRun.resume(store)
    assert again.run.version == 0
    assert await again.append(Observed()).wait()
    await store.aclose()


async def test_a_connection_that_is_not_left_is_waited_for(clerk, desk, monkeypatch):
    """Who has lost its connection, and finds the server full (53300), goes on where it was when one is free."""
    refusals = []
    connect = connection.WatchedConnection.connect

    def connected(**settings):
        try:
            return connect(**settings)
        except psycopg.OperationalError as error:
            refusals.append(str(error))
            raise

    store = PostgresStore(clerk)
    driver = await LeasedRun.create(store)
    monkeypatch.setattr(connection.WatchedConnection, "connect", connected)
    with psycopg.connect(clerk), anyio.fail_after(60):
        desk.execute("SELECT pg_terminate_backend(%s, 10000)", [store._writer.backend._db.info.backend_pid])
        with psycopg.connect(clerk):
            commit = driver.append(Observed())
            await anyio.to_thread.run_sync(await_that, lambda: len(refusals) > 1, "the store was refused")
        assert await commit.wait()
    assert "remaining connection slots are reserved" in refusals[0]
    assert len((await store.read("r1")).events) == 1
    await store.aclose()


async def test_a_server_without_connections_is_told_in_its_own_words(clerk, desk):
    """A first connection is not waited for; the same store works when one is free."""
    store = PostgresStore(clerk)
    told = r"connection slots are reserved.*refuses connections.*see its message"
    with psycopg.connect(clerk), psycopg.connect(clerk), pytest.raises(StoreError, match=told):
        await store.runs()
    left = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'clerk'"  # a server ends a session in its own time
    await anyio.to_thread.run_sync(await_that, lambda: desk.execute(left).fetchone() == (0,), "both are gone")
    assert await store.runs() == ()
    await store.aclose()


async def test_a_commit_that_no_standby_takes_is_told_as_such(server, desk, monkeypatch):
    """A COMMIT that waits for a standby is given up; whether it was made is seen later, and the run goes on there."""
    store = PostgresStore(server.url, patience_s=0.2)
    driver = await LeasedRun.create(store)
    monkeypatch.setattr(connection, "SILENCE_TIMEOUT_S", 0.2)
    waits_for(desk, "nobody")
    await_that(lambda: commits_wait(server, desk), "a COMMIT waits for a standby")
    with pytest.raises(StoreError, match=r"has not answered for 0\.2 s"):
        await driver.append(Observed()).wait()
    with pytest.raises(StoreError, match="an earlier append was not written"):
        await driver.append(*driver.build_turn()).wait()
    waits_for(desk, "")
    monkeypatch.undo()
    await driver.release()
    again = await LeasedRun.resume(store)
    assert again.run.version in (0, 1)
    assert await again.append(*([] if again.run.version else [Observed()]), *again.build_turn()).wait()
    await store.aclose()


def waits_for(desk, standby):
    """Let the server wait for a standby at each COMMIT."""
    desk.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{standby}'")
    desk.execute("SELECT pg_reload_conf()")


def commits_wait(server, desk):
    """Whether a COMMIT waits for a standby: the server has it so some time after it was told."""
    with closing(psycopg.connect(server.url, autocommit=True)) as other:
        pid = other.info.backend_pid
        other.pgconn.send_query(b"CREATE TABLE IF NOT EXISTS probe (); INSERT INTO probe DEFAULT VALUES")
        event = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s AND wait_event IN ('SyncRep', 'ClientRead')"
        await_that(lambda: desk.execute(event, [pid]).fetchone() is not None, "the other session waits")
        waits = desk.execute(event, [pid]).fetchone() == ("SyncRep",)
        desk.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
    return waits


async def test_a_right_that_was_taken_away_is_named(clerk, desk):
    """What to grant is said; nothing of the group is written, and with a new lease the run goes on."""
    store = PostgresStore(clerk)
    driver, other = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(2)]
    desk.execute("REVOKE INSERT ON agentfsm.events FROM clerk")
    with pytest.raises(StoreError, match=r"permission denied.*grant it the schema and its tables"):
        await driver.append(Observed()).wait()
    desk.execute("GRANT INSERT ON agentfsm.events TO clerk")
    assert await other.append(Observed()).wait()
    await driver.release()
    assert await (await LeasedRun.resume(store, "r0")).append(Observed()).wait()
    await store.aclose()


async def test_a_server_that_does_not_wait_for_its_disk_promises_nothing_in_full():
    """With fsync = off no run is created or taken with durability "full"; with "normal" all goes on, posts included."""
    with PostgresServer({"fsync": "off"}) as server:
        store = PostgresStore(server.url)
        with pytest.raises(MisuseError, match=r"does not wait for its disk \(fsync = off\).*durability='normal'"):
            await store.create(make_header())
        _, lease = await store.create(make_header(), durability="normal")
        await store.post("r1", "k", make_input("x"))
        await store.release(lease).wait()
        with pytest.raises(MisuseError, match="set fsync = on there"):
            await store.lease("r1")
        assert (await store.lease("r1", durability="normal")).inbox_head == 1
        await store.aclose()


async def test_a_server_that_waits_for_its_disk_again_is_believed(server, desk):
    """What it is set to is asked at each connection."""
    store = PostgresStore(server.url)

    def switch(how, value):
        desk.execute(f"ALTER SYSTEM {how}")
        desk.execute("SELECT pg_reload_conf()")
        await_that(lambda: desk.execute("SHOW fsync").fetchone() == (value,), f"fsync is {value}")

    await anyio.to_thread.run_sync(switch, "SET fsync = off", "off")
    with pytest.raises(MisuseError):
        await store.create(make_header())
    await anyio.to_thread.run_sync(switch, "RESET fsync", "on")
    store._writer.backend.disconnect()
    await store.create(make_header())
    await store.aclose()
