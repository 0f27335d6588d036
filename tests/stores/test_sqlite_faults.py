"""What goes wrong with files: foreign, damaged, locked, full, gone."""

import sqlite3
from contextlib import closing

import anyio
import pytest

from agentfsm import CorruptError, LeaseLostError, RunNotFoundError, StoreError, TooNewError
from agentfsm.core.events import Observed
from agentfsm.core.header import Header
from agentfsm.stores import SQLiteStore
from agentfsm.stores.sqlite import file as sqlite_file
from agentfsm.stores.threaded import group_commit
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    LeasedRun,
    check_refused,
    create_finished_run,
    make_header,
    make_input,
)
from tests.support import sqlite_faults
from tests.support.busy_writer import hold
from tests.support.sqlite_faults import Faults

WORLD = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_IOERR | 4 << 8, sqlite3.SQLITE_READONLY)


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
async def frail(path, faults):
    """A store whose statements can be made to fail."""
    store = SQLiteStore(path, connect=faults)
    yield store
    faults.times = 0
    await store.aclose()


def change(path, statement):
    """Do to the file what no agentfsm does."""
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement)
        db.commit()


async def refuses(path, kind, match):
    """Check that a file is refused, and that it is left as it was."""
    before = path.read_bytes() if path.is_file() else None
    store = SQLiteStore(path)
    with pytest.raises(kind, match=match):
        await store.runs()
    with pytest.raises(kind, match=match):
        await store.create(make_header())
    await store.aclose()
    assert (path.read_bytes() if path.is_file() else None) == before


# Files that are not ours.


async def test_a_missing_folder_is_named(tmp_path):
    """The store makes a file, not folders."""
    await refuses(tmp_path / "nowhere" / "runs.db", StoreError, "nowhere does not exist; create it first")


async def test_the_folder_of_the_command_line_is_created(tmp_path):
    """`.agentfsm` is private and excluded from git, so that a program and the command line share the default store."""
    folder = tmp_path / ".agentfsm"
    store = SQLiteStore(folder / "runs.db")
    assert list(await store.runs()) == []
    await store.aclose()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / ".gitignore").read_text() == "*\n"


async def test_a_folder_is_no_file(tmp_path):
    """The error says what to give instead."""
    await refuses(tmp_path, StoreError, "is a folder: give the path of a file in it")


async def test_a_file_is_no_folder(tmp_path):
    """A path below a file cannot be made."""
    (tmp_path / "notes").write_text("x")
    await refuses(tmp_path / "notes" / "runs.db", StoreError, "notes is not a folder")


async def test_text_is_no_database(path):
    """A file of another kind is not touched, and SQLite's own words are in the error."""
    path.write_text("Dear diary, " * 100)
    await refuses(path, StoreError, "file is not a database.*give another path")


async def test_a_database_of_another_program_is_not_touched(path):
    """Tables of others are theirs."""
    change(path, "CREATE TABLE users (name)")
    await refuses(path, StoreError, "another program")


async def test_a_database_with_another_application_id_is_not_touched(path):
    """Neither is a file that says whose it is."""
    change(path, "PRAGMA application_id = 42")
    await refuses(path, StoreError, "another program")


async def test_a_file_of_a_newer_agentfsm_is_refused(store, path):
    """Half-understanding a file would lose facts."""
    await create_finished_run(store)
    await store.aclose()
    change(path, "PRAGMA user_version = 701")
    await refuses(path, TooNewError, r"newer agentfsm .its version is 7\.1, this one knows up to 6\.x.: upgrade")


async def test_a_file_that_lost_a_table_is_refused(store, path):
    """A file of ours without our tables is damaged."""
    await create_finished_run(store)
    await store.aclose()
    change(path, "DROP TABLE posts")
    await refuses(path, CorruptError, "lacks the tables posts")


async def test_an_empty_file_is_made_ours(path):
    """What `touch` or a temporary file made is as good as no file."""
    path.touch()
    store = SQLiteStore(path)
    await create_finished_run(store)
    await store.aclose()


async def test_a_place_without_a_log_is_refused(path):
    """Where SQLite cannot keep a write-ahead log (a network share) it would lock or lose; the error says so."""

    class _NoLog:
        def __init__(self, name):
            self.db = sqlite3.connect(name, isolation_level=None)

        def execute(self, sql, parameters=()):
            return self.db.execute("SELECT 'delete'" if "journal_mode" in sql else sql, parameters)

        def close(self):
            self.db.close()

    store = SQLiteStore(path, connect=_NoLog)
    with pytest.raises(StoreError, match=r"write-ahead log.*'delete'.*local disk"):
        await store.runs()
    await store.aclose()


async def test_two_stores_may_make_the_file_at_once(path):
    """Whoever comes second finds it made."""
    stores = [SQLiteStore(path) for _ in range(8)]
    async with anyio.create_task_group() as group:
        for number, store in enumerate(stores):
            group.start_soon(create_finished_run, store, make_header(f"r{number}"))
    assert len(await stores[0].runs()) == 8
    for store in stores:
        await store.aclose()


# Damage.


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE events SET body = substr(body, 1, 9) WHERE version = 3",
        "UPDATE events SET body = 7 WHERE version = 3",
        "UPDATE events SET body = CAST(x'22ff22' AS TEXT) WHERE version = 3",
        'UPDATE events SET body = \'{"is":"Exploded"}\' WHERE version = 3',
        "UPDATE events SET body = '[' || body || ']' WHERE version = 3",
        "UPDATE events SET version = 30 WHERE version = 3",
        "DELETE FROM events WHERE version = 3",
    ],
)
async def test_a_damaged_record_is_named(store, path, damage):
    """A record that is torn, poisoned or missing is an error that names run and version; others are read."""
    driver = await LeasedRun.create(store)
    await driver.append(Observed(), *driver.build_turn()).wait()
    change(path, damage)
    with pytest.raises(CorruptError, match="'r1', version 3, cannot be read"):
        await store.read("r1")
    with pytest.raises(CorruptError, match="'r1', version 3, cannot be read"):
        await store.read("r1", 2)
    assert len((await store.read("r1", 3)).events) == 3


async def test_a_journal_that_lost_its_end_is_damaged(store, path):
    """Records that are missing at the end are missed, too."""
    driver = await LeasedRun.create(store)
    await driver.append(Observed(), *driver.build_turn()).wait()
    change(path, "DELETE FROM events WHERE version = 6")
    with pytest.raises(CorruptError, match=r"version 6, cannot be read \(it is missing\)"):
        await store.read("r1")


@pytest.mark.parametrize("damage", ["UPDATE events SET body = '{' WHERE version = 0", "DELETE FROM events"])
async def test_a_damaged_header_is_named(store, path, damage):
    """Without its header a run can be neither read nor created again; the error says so."""
    await create_finished_run(store)
    change(path, damage)
    with pytest.raises(CorruptError, match="'r1', the header, cannot be read"):
        await store.read("r1")
    with pytest.raises(CorruptError, match="'r1', the header, cannot be read"):
        await store.create(make_header())
    await store.delete("r1")


async def test_a_run_of_a_newer_format_is_refused(store, path):
    """A header says which format its run is written in."""
    await create_finished_run(store)
    change(path, "UPDATE events SET body = json_set(body, '$.v', 99) WHERE version = 0")
    with pytest.raises(TooNewError, match="99"):
        await store.read("r1")


async def test_a_damaged_inbox_row_is_named(store, path):
    """A post that cannot be read is an error that names run and row, for its readers and for the next of its key."""
    await LeasedRun.create(store)
    await store.post("r1", "k", make_input("x"))
    change(path, "UPDATE posts SET item = '{'")
    with pytest.raises(CorruptError, match="'r1', inbox row 1, cannot be read"):
        await store.inbox("r1")
    with pytest.raises(CorruptError, match="'r1', inbox row 1, cannot be read"):
        await store.post("r1", "k", make_input("x"))


async def test_a_damaged_line_of_the_list_is_named(store, path):
    """A state that there is not is not shown as one."""
    await create_finished_run(store)
    change(path, "UPDATE runs SET state = 'exploded'")
    with pytest.raises(CorruptError, match=r"'r1'.*exploded"):
        await store.runs()


async def test_a_text_that_is_none_is_reported(store, path):
    """A text of the list that is no UTF-8 is damage, and says so; the journals can be read."""
    await create_finished_run(store)
    change(path, "UPDATE runs SET prompt = CAST(x'ff' AS TEXT)")
    with pytest.raises(CorruptError, match="damaged text"):
        await store.runs()
    assert len((await store.read("r1")).events) == 2


@pytest.mark.parametrize("column", ["token", "crashes", "version"])
async def test_a_damaged_row_is_named(store, path, column):
    """SQLite keeps text where a number belongs; that is told as damage of this run, and stops no other."""
    await create_finished_run(store)
    await create_finished_run(store, make_header("r2"))
    change(path, f"UPDATE runs SET {column} = 'x' WHERE id = 'r1'")  # noqa: S608  our own names
    for refusal in (store.read("r1"), store.lease("r1"), store.create(make_header("r1"))):
        with pytest.raises(CorruptError, match="'r1': its row is damaged: restore a backup"):
            await refusal
    assert await store.lease("r2")


async def test_an_error_that_sqlite_cannot_put_into_words_is_damage(frail, faults, monkeypatch):
    """Where the file is damaged SQLite's words may quote bytes that are no text; that is nobody's wrong value."""
    await create_finished_run(frail)
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    monkeypatch.setattr(sqlite_faults, "failure", lambda _code: error)
    faults.strike(sqlite3.SQLITE_CORRUPT, "SELECT")
    with pytest.raises(CorruptError, match="damaged text"):
        await frail.runs()


async def test_a_record_too_many_stops_the_run_alone(store, path):
    """Where a record that nobody wrote stands in the way of an append, other runs go on."""
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(3)]
    change(path, "INSERT INTO events SELECT number, 1, '{}' FROM runs WHERE id = 'r1'")
    commits = [driver.append(Observed()) for driver in drivers]
    assert await commits[0].wait()
    await check_refused(commits[1], CorruptError)
    assert await commits[2].wait()
    await check_refused(drivers[1].append(FINAL_ANSWER), StoreError)


async def test_a_damaged_page_is_reported(store, path):
    """When SQLite finds the file damaged, its words and a way out are in the error."""
    driver = await LeasedRun.create(store)
    for _ in range(50):
        driver.append(*((Observed(),) if driver.run.version == 0 else driver.build_turn()))
    await store.aclose()
    content = bytearray(path.read_bytes())
    content[4096 : len(content) - 4096] = b"\xff" * (len(content) - 8192)
    path.write_bytes(content)
    again = SQLiteStore(path)
    with pytest.raises(CorruptError, match="restore a backup"):
        await again.read("r1")
    await again.aclose()


# Locks.


async def test_a_lock_that_is_held_is_waited_for(frail, faults):
    """Another process's transaction delays a write, and no more."""
    driver = await LeasedRun.create(frail)
    faults.strike(sqlite3.SQLITE_BUSY, "BEGIN IMMEDIATE", times=5)
    assert await driver.append(Observed()).wait()
    assert faults.times == 0


async def test_a_lock_that_is_never_released_is_reported(path):
    """In the end the error says who is in the way and what to do; then the store works again. Reads do not wait."""
    store = SQLiteStore(path, patience_s=0.05)
    await create_finished_run(store)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"database is locked.*another process holds the write lock.*call again"):
            await store.lease("r1")
        assert len((await store.read("r1")).events) == 2
    assert await store.lease("r1")
    await store.aclose()


async def test_a_file_that_is_locked_while_it_is_opened_is_waited_for(frail, faults):
    """SQLite does not wait by itself when the journal mode changes: two processes may open a new file at once."""
    faults.strike(sqlite3.SQLITE_BUSY, "PRAGMA journal_mode", times=5)
    await create_finished_run(frail)
    assert faults.times == 0


# A disk that is full, or fails.


@pytest.mark.parametrize("code", WORLD)
@pytest.mark.parametrize("on", ["BEGIN IMMEDIATE", "SELECT", "INSERT INTO events", "UPDATE runs SET state", "COMMIT"])
async def test_a_disk_that_fails_fails_the_whole_group(frail, faults, on, code):
    """Nobody is told that something was written which was not: everybody in the group gets the error.

    Behind a failed append no other one of the lease is written, so there is no gap; with a new lease the run goes on.
    """
    drivers = [await LeasedRun.create(frail, make_header(f"r{number}")) for number in range(5)]
    gate = hold(frail, writes=False)
    commits = [driver.append(Observed()) for driver in drivers]
    faults.strike(code, on, times=2 if on == "COMMIT" else 1)  # the first one ends what held the thread
    gate.set()
    for commit in commits:
        with pytest.raises(StoreError, match=str(code)) as caught:
            await commit.wait()
        assert caught.type is StoreError
    for driver in drivers:
        assert (await frail.read(driver.run.id)).events == ()
        with pytest.raises(StoreError, match="an earlier append was not written"):
            await driver.append(FINAL_ANSWER).wait()
        await driver.release()
        again = await LeasedRun.resume(frail, driver.run.id)
        assert await again.append(Observed()).wait()


@pytest.mark.parametrize("code", WORLD)
async def test_a_disk_that_fails_in_other_jobs(frail, faults, code):
    """Creation, posts and deletions fail as appends do: nothing happened, and the next attempt works."""
    await create_finished_run(frail, make_header("r0"))
    for operation, count in (
        (lambda: frail.create(make_header("r1")), 1),
        (lambda: frail.lease("r0"), 1),
        (lambda: frail.post("r1", "k", make_input("x")), 1),
    ):
        faults.strike(code, "COMMIT", times=count)
        with pytest.raises(StoreError, match=str(code)):
            await operation()
        await operation()
    assert [row.number for row in await frail.inbox("r1")] == [1]


async def test_a_connection_that_cannot_roll_back_is_replaced(frail, faults, monkeypatch, caplog):
    """When the connection itself is of no more use, the next job opens another; upkeep has nothing to do until then."""
    driver = await LeasedRun.create(frail)
    opened = faults.opened
    monkeypatch.setattr(group_commit, "MAINTENANCE_DELAY_S", 0.0)
    faults.strike(sqlite3.SQLITE_IOERR, ("INSERT INTO events", "ROLLBACK"), times=2)
    await check_refused(driver.append(Observed()), StoreError)
    assert (await frail.read("r1")).events == ()
    assert faults.opened > opened
    assert "maintain" not in caplog.text


async def test_a_release_that_cannot_be_written_is_harmless(frail, faults, caplog):
    """Who cleans up without waiting is not stopped by a full disk: it is logged, and the lease ends by itself."""
    driver = await LeasedRun.create(frail)
    faults.strike(sqlite3.SQLITE_FULL, "COMMIT")
    await check_refused(frail.release(driver.lease), StoreError)
    assert "ends by itself" in caplog.text
    assert (await frail.lease("r1")).token == driver.lease.token + 1


async def test_a_release_that_fails_with_its_append_is_harmless(frail, faults):
    """Nothing of the group happened: neither is the event there, nor does the lease stand in the way."""
    driver = await LeasedRun.create(frail)
    gate = hold(frail, writes=False)
    commits = driver.append(Observed()), frail.release(driver.lease)
    faults.strike(sqlite3.SQLITE_FULL, "COMMIT", times=2)  # the first one ends what held the thread
    gate.set()
    for commit in commits:
        await check_refused(commit, StoreError)
    again = await LeasedRun.resume(frail)
    assert again.run.version == 0
    assert await again.append(Observed()).wait()


async def test_a_renewal_that_fails_is_tried_again(frail, faults, caplog):
    """Nobody waits for a renewal; its failure is logged, and the lease is not given up."""
    driver = await LeasedRun.create(frail)
    faults.strike(sqlite3.SQLITE_FULL, "INSERT INTO workers")
    frail._writer._renewed_at = float("-inf")
    await frail.runs()
    await frail.runs()
    assert "renew_leases" in caplog.text
    assert await driver.append(Observed()).wait()


async def test_a_file_that_is_full_in_truth_loses_nothing(path):
    """SQLite itself ends the transaction in the middle; what was acknowledged stays, and each run goes on after it."""
    bounds = []

    def connect(name):
        bounds.append(sqlite3.connect(name, isolation_level=None, check_same_thread=False))
        return bounds[-1]

    store = SQLiteStore(path, connect=connect)
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(5)]
    bounds[-1].execute("PRAGMA max_page_count = 20")
    written, told = {}, ""
    for driver in drivers:
        assert await driver.append(Observed()).wait()
    while len(written) < len(drivers):
        for driver in drivers:
            before = driver.run.version
            try:
                await driver.append(*driver.build_turn()).wait()
            except StoreError as error:
                written.setdefault(driver.run.id, before)
                told = told or str(error)
    assert "the disk is full: free some space" in told
    for run_id, version in written.items():
        assert len((await store.read(run_id)).events) == version
    bounds[-1].execute("PRAGMA max_page_count = 1000000")
    for driver in drivers:
        await driver.release()
        again = await LeasedRun.resume(store, driver.run.id)
        assert await again.append(*again.build_turn()).wait()
    await store.aclose()


# A file that is gone.


async def test_a_file_that_was_deleted_is_noticed(store, path):
    """Nothing is acknowledged that was written to a file which nobody can find; then what is there is opened."""
    driver, late = await LeasedRun.create(store), await LeasedRun.create(store, make_header("r2"))
    await driver.append(Observed()).wait()
    for file in path.parent.iterdir():
        file.unlink()
    await check_refused(driver.append(FINAL_ANSWER), StoreError)
    with pytest.raises(RunNotFoundError):
        await store.read("r1")
    await check_refused(store.append(driver.lease, driver.run, (FINAL_ANSWER,)), StoreError)
    with pytest.raises(LeaseLostError, match="or the store has lost it"):
        await late.append(Observed()).wait()
    assert late.lease.lost
    await create_finished_run(store, make_header("r3"))


async def test_a_file_that_was_replaced_is_noticed(store, path, tmp_path):
    """A backup that is put in place while the store is open is not mixed with what was there before."""
    driver = await LeasedRun.create(store)
    other = SQLiteStore(tmp_path / "backup.db")
    await create_finished_run(other, make_header("old"))
    await other.aclose()
    (tmp_path / "backup.db").replace(path)
    for log in ("runs.db-wal", "runs.db-shm"):
        (tmp_path / log).unlink()
    await check_refused(driver.append(Observed()), StoreError)
    assert [line.id for line in await store.runs()] == ["old"]


# What cannot be told by a code.


async def test_a_fault_of_the_store_itself_is_said_to_be_one(frail, monkeypatch):
    """An error that nobody thought of still reaches everybody who waits."""
    driver = await LeasedRun.create(frail)
    monkeypatch.setattr(sqlite_file.DatabaseFile, "execute", lambda *_args: 1 / 0)
    await check_refused(driver.append(Observed()), StoreError)
    with pytest.raises(StoreError, match=r"ZeroDivisionError.*report it"):
        await frail.runs()


async def test_a_header_that_cannot_be_encoded_is_the_callers_mistake(store):
    """It is refused as misuse, and nothing is created."""
    strange = Header(id="r1", prompt=make_header().prompt, created_at=1.0, metadata={"x": object()})
    with pytest.raises(Exception, match="JSON") as caught:
        await store.create(strange)
    assert type(caught.value).__name__ == "MisuseError"
    assert await store.runs() == ()
