"""A SQLite file that cannot be written can be read, and a write says that the file is read-only."""

import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from agentfsm import Agent, Runs, StoreError, tool
from agentfsm.cli import main
from agentfsm.stores import SQLiteStore
from agentfsm.stores.sqlite import file as sqlite_file
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.testing.conformance.helpers import LeasedRun, create_finished_run, list_ids, make_header, make_input
from tests.support.sqlite_faults import Faults


@pytest.fixture
def folder():
    """A folder that other users may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@contextmanager
def nobody(folder):
    """Own the folder as a user whom permissions bind, in the block. Root may write everywhere."""
    user = os.geteuid()
    if user == 0:
        other = pwd.getpwnam("nobody").pw_uid
        for place in (folder, *folder.iterdir()):
            os.chown(place, other, -1)
        os.seteuid(other)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def mount(folder, tmp_path):
    """A function that mounts the folder read-only and returns the mount point; it may be called once."""
    point = tmp_path / "mounted"
    point.mkdir()
    mounted = []

    def bind():
        commands = (["mount", "--bind", folder, point], ["mount", "-o", "remount,ro,bind", point])
        for command in commands:
            if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("this process may not mount")
            mounted.append(point)
        return point

    yield bind
    if mounted:
        subprocess.run(["umount", "-l", point], check=True)


async def closed_after(act, path):
    """Use a store and close it, so that no log is left."""
    store = SQLiteStore(path)
    await act(store)
    await store.aclose()


async def check_readable(store):
    """Read run r1 in each way; refuse each way to write."""
    runs = Runs(store)
    for _ in range(2):  # a refused write does not spoil the reads after it
        assert list_ids(await runs.list()) == ["r1"]
        assert (await runs.load("r1")).is_over
        assert (await runs.header("r1")).id == "r1"
        assert await store.inbox("r1") == ()
        writes = (
            *(partial(store.lease, "r1"), partial(store.create, make_header("r2")), partial(store.delete, "r1")),
            *(partial(store.prune, 1e12), partial(store.post, "r1", "k", make_input("go on")), store.compact),
        )
        for write in writes[:4]:
            with pytest.raises(StoreError, match=r"runs\.db.*is read-only here: to write, mount its file system"):
                await write()
        for write in writes[4:]:
            with pytest.raises(StoreError):
                await write()


# Permissions.


async def test_a_file_that_may_only_be_read_is_read(folder):
    """The file alone is read-only; the same store writes once the right is granted."""
    path = folder / "runs.db"
    await closed_after(create_finished_run, path)
    path.chmod(0o444)
    with nobody(folder):
        store = SQLiteStore(path)
        for refusal in (store.lease("r1"), store.create(make_header("r2")), store.prune(1e12)):
            assert len((await store.read("r1")).events) == 2
            with pytest.raises(StoreError, match=r"readonly database.*read-only here: .*or grant this process"):
                await refusal
        for place in folder.iterdir():
            place.chmod(0o644)
        assert await store.lease("r1")
        await store.aclose()


async def test_a_file_in_a_folder_that_may_only_be_read_is_read(folder):
    """SQLite cannot create a log there, so the file is read without one; nothing is left in the folder."""
    path = folder / "runs.db"
    await closed_after(create_finished_run, path)
    folder.chmod(0o555)
    with nobody(folder):
        store = SQLiteStore(path)
        await check_readable(store)
        assert [file.name for file in folder.iterdir()] == ["runs.db"]
        folder.chmod(0o755)
        assert await store.lease("r1")
        await store.aclose()


async def test_a_missing_file_in_a_read_only_folder_is_named(folder):
    """Neither a read nor a write can create it."""
    folder.chmod(0o555)
    with nobody(folder):
        store = SQLiteStore(folder / "runs.db")
        for use in (store.runs, partial(store.create, make_header())):
            with pytest.raises(StoreError, match=r"runs\.db does not exist, and its folder is read-only here"):
                await use()
        await store.aclose()


# Mounts, which bind root too.


async def test_a_read_only_mount_is_read(folder, mount):
    """Of a file that was closed in order, SQLite can read the file alone."""
    await closed_after(create_finished_run, folder / "runs.db")
    store = SQLiteStore(mount() / "runs.db")
    await check_readable(store)
    await store.aclose()


async def test_a_read_only_mount_shows_the_changes_of_other_processes(folder, mount):
    """A writer elsewhere begins a log, appends and closes; each read sees the newest commit."""
    await closed_after(create_finished_run, folder / "runs.db")
    reader = SQLiteStore(mount() / "runs.db")
    assert list_ids(await reader.runs()) == ["r1"]
    writer = SQLiteStore(folder / "runs.db")
    await LeasedRun.create(writer, make_header("r2", created_at=9e9))
    assert list_ids(await reader.runs()) == ["r2", "r1"]
    with pytest.raises(StoreError, match="read-only here"):
        await reader.lease("r1")
    await writer.aclose()
    assert list_ids(await reader.runs()) == ["r2", "r1"]
    await reader.aclose()


async def test_a_log_that_cannot_be_read_is_named(folder, mount):
    """The copy of a log without its index: the file alone would lack the newest commits."""
    writer = SQLiteStore(folder / "live.db")
    await create_finished_run(writer)
    for suffix in ("", "-wal"):
        shutil.copy(folder / f"live.db{suffix}", folder / f"runs.db{suffix}")
    await writer.aclose()
    store = SQLiteStore(mount() / "runs.db")
    with pytest.raises(StoreError, match=r"is read-only, and its newest changes are in a log .*: copy the file and"):
        await store.runs()
    await store.aclose()


async def test_an_old_or_empty_file_on_a_read_only_mount_is_refused(folder, mount):
    """Its tables cannot be created or upgraded there."""
    (folder / "empty.db").touch()
    await closed_after(create_finished_run, folder / "old.db")
    with closing(sqlite3.connect(folder / "old.db")) as db:
        db.execute("PRAGMA user_version = 3")
    point = mount()
    for name, match in (("empty.db", "is empty, and it is read-only"), ("old.db", "version 3, which must be upgraded")):
        store = SQLiteStore(point / name)
        with pytest.raises(StoreError, match=match):
            await store.runs()
        await store.aclose()


async def test_an_agent_reads_a_read_only_mount(folder, mount):
    """Load, history, audit and cost need no lease; a run does."""

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = ScriptedModel(say("", call("add", a=1, b=2)), "3", "4")
    async with Agent(model, tools=[add], store=SQLiteStore(folder / "runs.db")) as agent:
        run = await agent.run("1 + 2?")
    reader = agent.with_(store=SQLiteStore(mount() / "runs.db"))
    assert (await reader.load(run.id)).output == "3"
    assert (await reader.history(run.id))[-1]
    assert [each.tool for each in await reader.audit(run.id)] == ["add"]
    with pytest.raises(StoreError, match="read-only here: to write"):
        await reader.run("2 + 2?")
    await reader.store.aclose()


def test_the_command_line_reads_a_read_only_mount(folder, mount, capsys):
    """`runs` and `show` print, and `delete` says that the file is read-only."""
    anyio.run(closed_after, create_finished_run, folder / "runs.db")
    where = ["--store", str(mount() / "runs.db")]
    assert main(["runs", *where]) == 0
    assert "r1" in capsys.readouterr().out
    assert main(["show", "r1", *where]) == 0
    assert "r1" in capsys.readouterr().out
    assert main(["delete", "r1", *where]) != 0
    assert "read-only here" in capsys.readouterr().err


# Where the process may not mount: the error of the opening is made.


@pytest.fixture
async def faults(path, monkeypatch):
    """A connection whose opening fails once, for a file with a run that this process may not write."""
    await closed_after(create_finished_run, path)
    faults = Faults()
    faults.strike(sqlite3.SQLITE_CANTOPEN, "BEGIN")
    monkeypatch.setattr(sqlite_file, "_may_write", lambda _path: False)
    return faults


async def test_a_snapshot_is_opened_again_after_a_change(path, faults):
    """A commit by another process changes the file; the next read opens it again."""
    store = SQLiteStore(path, connect=faults)
    assert list_ids(await store.runs()) == ["r1"]
    assert store._writer.backend._snapshot is not None
    await closed_after(partial(create_finished_run, head=make_header("r2", created_at=9e9)), path)
    assert store._writer.backend.has_changed()
    assert list_ids(await store.runs()) == ["r2", "r1"]
    await store.aclose()


async def test_a_change_during_a_read_fails_it(path, faults, monkeypatch):
    """Without locks, a read that a commit overlaps could be torn."""
    store = SQLiteStore(path, connect=faults)
    await store.runs()
    now = iter([sqlite_file._read_snapshot(str(path)), None])
    monkeypatch.setattr(sqlite_file, "_read_snapshot", lambda _path: next(now))
    with pytest.raises(StoreError, match="another process changed it meanwhile: call again"):
        await store.runs()
    monkeypatch.undo()
    assert list_ids(await store.runs()) == ["r1"]
    await store.aclose()


async def test_a_writable_file_is_never_read_as_a_snapshot(path):
    """Too many open files, for example, are an error, since the file could be written by others."""
    await closed_after(create_finished_run, path)
    faults = Faults()
    faults.strike(sqlite3.SQLITE_CANTOPEN, "BEGIN")
    store = SQLiteStore(path, connect=faults)
    with pytest.raises(StoreError, match="the file cannot be opened: check that it exists"):
        await store.runs()
    await store.aclose()
