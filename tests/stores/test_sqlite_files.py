"""The files of a SQLite store: who may read them, what is left in them, and what happens when the log is deleted."""

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from agentfsm import LeaseHeldError, MisuseError, StoreError
from agentfsm.core.events import Observed
from agentfsm.ports import Filter
from agentfsm.stores import SQLiteStore
from agentfsm.stores.sqlite import store as sqlite
from agentfsm.testing.conformance.helpers import LeasedRun, create_finished_run, make_header, make_input

WORKER = Path(__file__).with_name("sqlite_worker.py")
WORD = "unforgettable7731"  # one word of the search, too


def bytes_of(path):
    """Return what the file and its log hold."""
    return b"".join(file.read_bytes() for file in path.parent.glob("runs.db*") if not file.name.endswith("-shm"))


def careless(path):
    """Open the file as a build of SQLite does that does not overwrite what is removed."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA secure_delete = OFF")
    return db


def delete_log(path, *names):
    for name in names or ("-wal", "-shm"):
        path.with_name(f"{path.name}{name}").unlink()


# Who may read them.


@pytest.fixture
def shared_umask():
    """A process whose new files everybody may read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("shared_umask")
async def test_only_the_owner_may_read_what_is_made(path):
    """The file, its log and the index of that hold prompts and results; at no moment may others read them."""
    seen = []

    def connect(name):
        seen.append(stat.S_IMODE(path.stat().st_mode))  # before SQLite has touched it
        return sqlite3.connect(name, isolation_level=None)

    store = SQLiteStore(path, connect=connect)
    await create_finished_run(store)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == {"runs.db": 0o600, "runs.db-wal": 0o600, "runs.db-shm": 0o600}
    assert seen == [0o600]
    await store.aclose()


@pytest.mark.usefixtures("shared_umask")
async def test_a_file_that_exists_keeps_its_mode(path):
    """Who has given a group the right to read has done so on purpose; the log follows the file."""
    path.touch()
    path.chmod(0o640)
    store = SQLiteStore(path)
    await create_finished_run(store)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o640}
    await store.aclose()


# What is left in them.


async def secretive(store):
    """Write a run full of a word, and delete it."""
    await create_finished_run(store, make_header("kept"))
    driver = await LeasedRun.create(store, make_header("gone", WORD * 3))
    for number in range(40):
        await store.post("gone", f"k{number}", make_input(f"{WORD} {number}"))
    await driver.append(Observed(), *driver.build_turn()).wait()
    await driver.release()
    await store.delete("gone")


async def test_a_deleted_run_is_overwritten(path):
    """No byte of it is left in file and log after a checkpoint, whatever the build of SQLite does by itself."""
    store = SQLiteStore(path, connect=careless)
    await secretive(store)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    assert WORD.encode() not in bytes_of(path)
    assert len((await store.read("kept")).events) == 2
    assert await store.prune(2e9) == 1
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    assert b"notes" not in bytes_of(path)
    await store.aclose()


async def test_words_of_removed_runs_do_not_stay(path):
    """Not if a prune that finds nothing shares the transaction of a deletion, nor if one was killed halfway."""

    async def fill(store, name):
        for number in range(9):  # segments of the index, in which words of removed runs are only marked
            await create_finished_run(store, make_header(f"{name}-{number}"))
        await create_finished_run(store, make_header("gone", WORD))

    def find_word():
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return WORD.encode() in bytes_of(path)

    store = SQLiteStore(path)
    await fill(store, "kept")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.delete, "gone")
        tasks.start_soon(store.prune, 0.0)
    assert not find_word()
    await fill(store, "old")
    await store._run_job(lambda backend: backend.prune(2e9, 0, 1_000, unread=True))  # and no more batch
    await store.aclose()
    store = SQLiteStore(path)
    assert await store.prune(2e9) == 0
    assert not find_word()
    await store.aclose()


async def test_compacting_empties_the_log(store, path):
    """The log still holds what was deleted, until it is written over, the last process closes it, or this."""
    await secretive(store)
    assert WORD.encode() in bytes_of(path)
    await store.compact()
    assert WORD.encode() not in bytes_of(path)


async def test_a_compacted_file_is_small(path):
    """The room of removed runs goes back to the disk, and what is left can be read; other stores go on."""
    first, second = SQLiteStore(path), SQLiteStore(path)
    driver = await LeasedRun.create(first, make_header("long"))
    driver.append(Observed())
    for _ in range(300):
        driver.append(*driver.build_turn())
    await driver.release()
    await create_finished_run(second, make_header("kept"))
    await first.delete("long")
    before = path.stat().st_size + path.with_name("runs.db-wal").stat().st_size
    freed = await first.compact()
    assert freed > before / 2
    assert path.stat().st_size == before - freed
    assert len((await second.read("kept")).events) == 2
    await create_finished_run(second, make_header("next"))
    for store in (first, second):
        await store.aclose()


async def test_a_file_is_not_compacted_under_a_run(store):
    """Who drives one would wait, perhaps for longer than its lease: that is refused, and the run goes on."""
    driver = await LeasedRun.create(store)
    with pytest.raises(LeaseHeldError, match=r"'r1' is being driven.*stop the workers first"):
        await store.compact()
    assert await driver.append(Observed()).wait()
    await driver.release()
    await store.compact()


async def test_a_locked_file_is_not_compacted(path):
    """It says so after the time that one is willing to wait."""
    store = SQLiteStore(path, patience_s=0.05)
    await create_finished_run(store)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process holds the write lock"):
            await store.compact()
    await store.compact()
    await store.aclose()


# A log that was deleted.


@pytest.mark.parametrize("names", [("-wal",), ("-shm",), ("-wal", "-shm")], ids="+".join)
async def test_all_stores_of_a_process_outlive_a_deleted_log(path, names, caplog):
    """Each saves what its connection can still read, and none begins a new log before the last has closed the old."""
    stores = [SQLiteStore(path) for _ in range(3)]
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number, store in enumerate(stores)]
    for driver in drivers:
        await driver.append(Observed()).wait()
    delete_log(path, *names)
    commits = [driver.append(*driver.build_turn()) for driver in drivers]
    assert [await commit.wait() for commit in commits] == [True] * 3
    assert "was deleted while it was open; nothing was lost" in caplog.text
    fresh = SQLiteStore(path)
    for number in range(3):
        assert len((await fresh.read(f"r{number}")).events) == 6
    for store in (*stores, fresh):
        await store.aclose()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_a_deleted_log_that_cannot_be_saved_yet_is_told(path):
    """While another process writes, the error says to leave the process running; then all of it is saved."""
    store = SQLiteStore(path, patience_s=0.05)
    driver = await LeasedRun.create(store)
    await driver.append(Observed()).wait()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("SELECT count(*) FROM runs").fetchone()
        delete_log(path)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"cannot be saved now.*keep this process running"):
            await store.read("r1")
    assert len((await store.read("r1")).events) == 1
    assert await driver.append(*driver.build_turn()).wait()
    await store.aclose()


@pytest.fixture
def start():
    """Start worker processes; what is left of them at the end of the test is killed."""
    workers = []

    def start(*arguments):
        command = [sys.executable, WORKER, *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        workers.append(subprocess.Popen(command, text=True, **pipes))
        return workers[-1]

    yield start
    for worker in workers:
        with worker:
            worker.kill()


async def test_a_log_that_another_process_has_begun_is_not_touched(start, path):
    """Who finds another log in the place of its own says that something may be missing, and writes no more.

    The other process is killed, so that what it was told to be written is only in its log, and the first one is the
    last to close the file.
    """
    first = start("goes_on", path, "first", "second")
    assert first.stdout.readline() == "written first\n"
    delete_log(path)
    other = start("append_for_ever", path, "other")
    acknowledged = int(other.stdout.readline())
    other.kill()
    await anyio.to_thread.run_sync(other.communicate)
    out, errors = await anyio.to_thread.run_sync(first.communicate, "go\n")
    *refusals, last = out.splitlines()
    assert len(refusals) == 3, (out, errors)
    assert all("another process has begun a new one" in line and "stop all processes" in line for line in refusals)
    assert (last, first.returncode) == ("ended", 0), errors
    store = SQLiteStore(path)
    assert "second" not in [line.id for line in await store.runs()]
    assert len((await store.read("other")).events) >= acknowledged
    await store.aclose()


async def test_threads_that_make_a_file_together_agree_on_it(path):
    """A file is made under a lock: who closes it there would take the locks of another thread's connection."""
    barrier = threading.Barrier(8)

    def make(number):
        barrier.wait()
        anyio.run(create_finished_run, SQLiteStore(path), make_header(f"r{number}"))

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(anyio.to_thread.run_sync, make, number)
    store = SQLiteStore(path)
    assert len(await store.runs()) == 8
    await store.aclose()


async def test_a_sqlite_without_full_text_search_keeps_runs(path, monkeypatch):
    """It refuses a text, and runs that it has written are found by another as far as they have words there."""
    monkeypatch.setattr(sqlite, "_HAS_FTS5", "SELECT 0")
    store = SQLiteStore(path)
    await create_finished_run(store, make_header("r1"))
    assert [line.id for line in await store.runs()] == ["r1"]
    with pytest.raises(MisuseError, match="FTS5"):
        await store.runs(Filter(text="notes"))
    await store.aclose()
    monkeypatch.undo()
    store = SQLiteStore(path)
    await create_finished_run(store, make_header("r2"))
    assert [line.id for line in await store.runs(Filter(text="notes"))] == ["r2"]
    await store.aclose()
