"""SQLiteStore keeps the promises of every store, and those that only a file can make."""

import gc
import math
import re
import sqlite3
import threading
from contextlib import closing

import anyio
import attrs
import pytest

from agentfsm import ClosedError, LeaseHeldError, LeaseLostError, MisuseError, StoreError
from agentfsm.core.events import Observed
from agentfsm.core.inbox import Cancel
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.run import begin_run
from agentfsm.ports import Filter
from agentfsm.stores import SQLiteStore
from agentfsm.stores.sqlite import store as sqlite
from agentfsm.stores.sqlite.file import connect_sqlite3
from agentfsm.stores.threaded import group_commit
from agentfsm.stores.threaded.group_commit import StoreJob
from agentfsm.testing.conformance import StoreConformance
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    LeasedRun,
    check_refused,
    create_finished_run,
    create_waiting_run,
    list_claimable,
    make_header,
    make_input,
)
from tests.support.busy_writer import hold
from tests.support.lease_renewal import Renewal, beat
from tests.support.older_tables import to_sqlite_600
from tests.support.sqlite_faults import Faults


@attrs.define
class Time:
    """A boot clock that stands still until it is moved."""

    now: float = 1000.0

    def __call__(self):
        return self.now


class TestSQLiteStore(StoreConformance):
    """The published kit."""

    @pytest.fixture
    async def store(self, tmp_path):
        store = SQLiteStore(tmp_path / "runs.db")
        yield store
        await store.aclose()

    @pytest.fixture
    async def other(self, store):
        other = SQLiteStore(store.path)
        yield other
        await other.aclose()


@pytest.fixture
def time():
    return Time()


@pytest.fixture
async def pair(path, time):
    """Two workers on one file, whose leases end when the test says so."""
    stores = [SQLiteStore(path) for _ in range(2)]
    for store in stores:
        store._clock = time
    yield stores
    for store in stores:
        await store.aclose()


# What is written stays written.


async def test_runs_outlive_the_store(path):
    """What one store wrote the next one reads, whatever it was opened with."""
    first = SQLiteStore(path)
    driver = await LeasedRun.create(first)
    await first.post("r1", "k", make_input("x"))
    await driver.append(Observed(), *driver.build_turn()).wait()
    await first.aclose()
    second = SQLiteStore(str(path))
    stored = await second.read("r1")
    assert (stored.header, len(stored.events)) == (make_header(), 6)
    assert [row.key for row in await second.inbox("r1")] == ["k"]
    assert (await second.lease("r1")).version == 6
    await second.aclose()


async def test_closing_writes_what_is_queued(path):
    """Appends that nobody waited for are in the file when aclose returns; the log is folded into it."""
    store = SQLiteStore(path)
    driver = await LeasedRun.create(store)
    gate = hold(store)
    driver.append(Observed())
    for _ in range(50):
        driver.append(*driver.build_turn())
    gate.set()
    await store.aclose()
    assert [file.name for file in path.parent.iterdir()] == ["runs.db"]
    again = SQLiteStore(path)
    assert len((await again.read("r1")).events) == 251
    await again.aclose()


async def test_closing_goes_on_when_cancelled(path):
    """Who stops waiting for aclose does not keep the store from closing."""
    store = SQLiteStore(path)
    await store.runs()
    thread = store._writer._thread
    with anyio.CancelScope() as scope:
        scope.cancel()
        await store.aclose()
    await store.aclose()
    thread.join()
    with pytest.raises(ClosedError):
        await store.runs()


async def test_a_closed_store_says_so(path):
    """Every use after aclose is an error in the calling code; the thread is gone."""
    store = SQLiteStore(path)
    driver = await LeasedRun.create(store)
    thread = store._writer._thread
    await store.aclose()
    assert not thread.is_alive()
    for use in (store.runs, store.read, store.lease, store.delete, store.inbox):
        with pytest.raises(ClosedError):
            await (use() if use == store.runs else use("r1"))
    with pytest.raises(ClosedError):
        driver.append(Observed())


async def test_a_store_that_was_never_used_can_be_closed(path):
    """Nothing was opened, so nothing is there."""
    await SQLiteStore(path).aclose()
    assert not path.exists()


# One file, two workers.


async def test_a_lease_ends(pair, time):
    """An owner that was not heard of for the time of a lease is replaced, and learns it at its next append."""
    first, second = pair
    late = await LeasedRun.create(first)
    woken = []
    late.lease.wake = lambda: woken.append(True)
    time.now += 10.1
    assert [line.driven for line in await second.runs()] == [False]
    now = await LeasedRun.resume(second)
    commits = [late.append(Observed(at=9.0)), late.append(FINAL_ANSWER)]
    for commit in commits:
        await check_refused(commit, LeaseLostError)
    assert (late.lease.lost, woken) == (True, [True])
    assert await now.append(Observed(at=1.0)).wait()
    assert (await first.read("r1")).events == (Observed(at=1.0),)


async def test_a_lease_that_ended_and_that_nobody_took_goes_on(pair, time):
    """A worker that slept through the end of its lease goes on if nobody has taken it."""
    first, second = pair
    driver = await LeasedRun.create(first)
    time.now += 1000.0
    assert await driver.append(Observed()).wait()
    with pytest.raises(LeaseHeldError):
        await second.lease("r1")


async def test_an_append_renews_the_lease(pair, time):
    """A worker that writes is alive."""
    first, second = pair
    driver = await LeasedRun.create(first)
    time.now += 9.0
    await driver.append(Observed()).wait()
    time.now += 9.0
    with pytest.raises(LeaseHeldError):
        await second.lease("r1")


async def test_the_thread_renews_leases(pair, time):
    """A worker whose event loop is busy keeps its runs: the thread renews them, all in one transaction."""
    first, second = pair
    drivers = [await LeasedRun.create(first, make_header(f"r{number}")) for number in range(3)]
    time.now += 9.0
    await beat(first)
    time.now += 9.0
    for number in range(3):
        with pytest.raises(LeaseHeldError):
            await second.lease(f"r{number}")
    assert not any(driver.lease.lost for driver in drivers)


class TestRenewal(Renewal):
    """What was posted elsewhere is heard of with the next renewal."""


async def test_a_renewal_learns_that_the_lease_is_lost(pair, time):
    """An owner that was replaced is told without asking, and is not renewed."""
    first, second = pair
    driver = await LeasedRun.create(first)
    woken = []
    driver.lease.wake = lambda: woken.append(True)
    time.now += 10.1
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
    assert (await second.lease("r1")).crashes == 0
    assert first.statistics().leases == 0


async def test_a_dropped_lease_is_no_crash(store):
    """Who was thrown away in this process did not take it down: the next owner here counts none."""
    driver = await LeasedRun.create(store)
    del driver
    gc.collect()
    assert (await store.lease("r1")).crashes == 0


async def test_a_lease_that_is_dropped_hides_no_news(pair):
    """Who was thrown away has not looked: what came meanwhile makes the run due, and what was seen before does not."""
    first, second = pair
    await create_waiting_run(first, make_header("r1", agent="a"))
    await create_waiting_run(first, make_header("r2", agent="a"))
    row = await first.post("r1", "k", make_input("x"))
    await (await LeasedRun.resume(first)).release(inbox_read=row.number)
    drivers = [await LeasedRun.resume(first, run_id) for run_id in ("r1", "r2")]
    await second.post("r2", "k", make_input("x"))
    del drivers
    await beat(first)
    assert await list_claimable(second, "a") == ("r2",)


async def test_an_owner_that_was_not_heard_of_has_crashed(pair, time):
    """Owners that vanish one after another are counted, until one of them finishes a turn."""
    workers = pair * 2
    stalled = []
    for number, worker in enumerate(workers):
        stalled.append(await LeasedRun.create(worker))
        assert stalled[-1].lease.crashes == number
        time.now += 10.1
    driver = await LeasedRun.create(workers[0])
    assert await driver.append(Observed()).wait()
    await driver.release()
    driver = await LeasedRun.resume(workers[1])  # neither an append nor an orderly end clears the count
    assert driver.lease.crashes == 4
    assert await driver.append(*driver.build_turn()).wait()
    await driver.release()
    assert (await workers[0].lease("r1")).crashes == 0


async def test_a_lease_of_another_boot_is_over(pair, path):
    """Boot clocks of two boots do not compare: after a restart every lease is over."""
    first, second = pair
    await LeasedRun.create(first)
    lease = await first.lease("r1")
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE runs SET owner = 'another-boot' || substr(owner, 37)")
        db.execute("UPDATE workers SET name = 'another-boot' || substr(name, 37), until = 1e9")
        db.commit()
    assert (await second.lease("r1")).token == lease.token + 1


async def test_a_lease_that_no_clock_of_this_boot_can_have_written_is_over(pair, path):
    """Where no boot id tells two boots apart, a lease that seems to last for hours is of another one."""
    first, second = pair
    await LeasedRun.create(first)
    lease = await first.lease("r1")
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE workers SET until = 1e9")
        db.commit()
    assert (await second.lease("r1")).token == lease.token + 1


async def test_nobody_heard_of_counts_as_alive(pair, path, time):
    """An owner of whom nothing is known (a later format) keeps its lease until it ends."""
    first, second = pair
    await create_finished_run(first)
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE runs SET owner = 'v2:somebody'")
        db.execute("INSERT INTO workers VALUES ('v2:somebody', ?)", (time.now + 5,))
        db.commit()
    with pytest.raises(LeaseHeldError):
        await second.lease("r1")
    time.now += 5
    assert await second.lease("r1")


async def test_a_wake_that_fails_harms_nobody(store, caplog):
    """The thread serves everybody: what one owner's wake does is logged and goes no further."""
    driver = await LeasedRun.create(store)
    driver.lease.wake = lambda: 1 / 0
    await store.post("r1", "cancel", Cancel())
    assert driver.lease.cancelled
    assert await driver.append(Observed()).wait()
    assert "wake" in caplog.text


async def test_nothing_held_nothing_renewed(path):
    """A store that drives no run writes nothing of its own accord."""
    faults = Faults()
    store = SQLiteStore(path, connect=faults)
    await create_finished_run(store)
    before = faults.seen.count("BEGIN IMMEDIATE")
    await beat(store)
    assert faults.seen.count("BEGIN IMMEDIATE") == before
    await store.aclose()


# Groups.


async def test_appends_are_committed_in_groups(store):
    """A hundred runs that append at once share a commit."""
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(100)]
    before = store.statistics()
    gate = hold(store)
    commits = [driver.append(Observed()) for driver in drivers]
    assert store.statistics().queued >= 99
    gate.set()
    for commit in commits:
        assert await commit.wait()
    after = store.statistics()
    assert (after.jobs - before.jobs, after.leases, after.queued) == (101, 100, 0)
    assert after.commits - before.commits <= 2
    assert after.largest_group >= 100


async def test_a_group_has_a_bound(store, monkeypatch):
    """The first of many does not wait for all of them."""
    monkeypatch.setattr(group_commit, "MAX_GROUP_JOBS", 10)
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(35)]
    gate = hold(store)
    commits = [driver.append(Observed()) for driver in drivers]
    gate.set()
    for commit in commits:
        assert await commit.wait()
    assert store.statistics().largest_group == 10


async def test_a_job_that_cannot_be_stored_harms_nobody_else(store):
    """A value that SQLite does not take is its caller's mistake; what is written together with it is written."""
    drivers = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(5)]
    errors = []

    async def misuse():
        with pytest.raises(MisuseError, match="plain text") as caught:
            await store.post("r1", "half \ud800", make_input("x"))
        errors.append(caught.value)

    gate = hold(store)
    async with anyio.create_task_group() as group:
        group.start_soon(misuse)
        await anyio.lowlevel.checkpoint()
        commits = [driver.append(Observed()) for driver in drivers]
        gate.set()
    assert [await commit.wait() for commit in commits] == [True] * 5
    assert len(errors) == 1
    assert await store.inbox("r1") == ()


async def test_an_event_that_cannot_be_encoded_is_the_callers_mistake(store):
    """It is raised by append itself, and nothing is queued: the lease is as good as before."""
    driver = await LeasedRun.create(store)
    with pytest.raises(MisuseError):
        store.append(driver.lease, driver.run.apply(Observed()), (Observed(at=math.nan),))
    assert await driver.append(Observed()).wait()


async def test_a_queue_that_is_full_refuses(store, monkeypatch):
    """When the disk hangs, appends are refused at last instead of filling the memory; none of those queued is lost."""
    driver = await LeasedRun.create(store)
    gate = hold(store)
    monkeypatch.setattr(group_commit, "MAX_QUEUED_JOBS", 5)
    driver.append(Observed())
    while store.statistics().queued < 5:
        driver.append(*driver.build_turn())
    with pytest.raises(StoreError, match="wait for the store already"):
        store.append(driver.lease, driver.run, (Observed(),))
    gate.set()
    monkeypatch.undo()
    assert len((await store.read("r1")).events) == driver.run.version


# What a commit survives.


@attrs.define
class Levels:
    """Makes connections that note, at each commit of a write, what SQLite goes by. Pass it as `connect`."""

    seen: list[str] = attrs.field(factory=list)

    def __call__(self, path):
        return _Connection(self, connect_sqlite3(path))


@attrs.define
class _Connection:
    levels: Levels
    inner: sqlite3.Connection
    writes: bool = False

    def execute(self, sql, parameters=()):
        if sql == "COMMIT" and self.writes:
            (level,) = self.inner.execute("PRAGMA synchronous").fetchone()
            self.levels.seen.append({1: "normal", 2: "full"}[level])
        self.writes = sql == "BEGIN IMMEDIATE" or (self.writes and sql not in ("COMMIT", "ROLLBACK"))
        return self.inner.execute(sql, parameters)

    def close(self):
        self.inner.close()


@pytest.fixture
def levels():
    return Levels()


@pytest.fixture
async def frank(path, levels):
    """A store that tells what its commits survive."""
    store = SQLiteStore(path, connect=levels)
    await store.create(make_header("r0"))  # so that the file is made
    levels.seen.clear()
    yield store
    await store.aclose()


@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_a_lease_decides_what_its_commits_survive(frank, levels, durability):
    """FULL waits for the disk in each commit, NORMAL does not: for creation, taking the lease, and appends."""
    head, lease = await frank.create(make_header(), durability=durability)
    run = begin_run(head).apply(Observed())
    await frank.append(lease, run, (Observed(),)).wait()
    await frank.release(lease).wait()
    await frank.lease("r1", durability=durability)
    assert levels.seen == [durability, durability, "normal", durability]


async def test_one_that_wants_more_is_given_it(frank, levels):
    """A group that holds one append which has to survive a power cut survives it whole; the next one need not."""
    drivers = []
    for number, durability in enumerate(("normal", "full", "normal")):
        head, lease = await frank.create(make_header(f"r{number + 1}"), durability=durability)
        drivers.append(LeasedRun(frank, lease, begin_run(head)))
    levels.seen.clear()
    gate = hold(frank, writes=False)
    commits = [driver.append(Observed()) for driver in drivers]
    gate.set()
    for commit in commits:
        await commit.wait()
    assert levels.seen == ["full"]
    gate = hold(frank, writes=False)
    commits = [driver.append(*driver.build_turn()) for driver in drivers[::2]]
    gate.set()
    for commit in commits:
        await commit.wait()
    assert levels.seen == ["full", "normal"]


async def test_what_others_were_told_survives(frank, levels):
    """Posts and deletions survive a power cut, whatever the runs do; upkeep is not worth the wait."""
    head, lease = await frank.create(make_header(), durability="normal")
    await frank.append(lease, begin_run(head).fold((Observed(), FINAL_ANSWER)), (Observed(), FINAL_ANSWER)).wait()
    await frank.release(lease).wait()
    await (await LeasedRun.create(frank, make_header("r2"))).release()
    levels.seen.clear()
    await frank.post("r2", "k", make_input("x"))
    await frank.delete("r1")
    assert levels.seen == ["full", "full"]
    _lease = await frank.lease("r2", durability="normal")
    await beat(frank)
    assert levels.seen[2:] == ["normal", "normal"]


async def test_a_read_tells_sqlite_nothing(path):
    """The level is set where it changes, before a write; a row of equal commits costs no statement more."""
    faults = Faults()
    store = SQLiteStore(path, connect=faults)
    driver = await LeasedRun.create(store)
    await driver.append(Observed()).wait()
    await store.runs()
    await driver.append(FINAL_ANSWER).wait()
    assert [sql for sql in faults.seen if "synchronous" in sql] == ["PRAGMA synchronous = FULL"]
    await store.aclose()


# Event loops and threads.


def test_one_store_serves_event_loops_one_after_another(path):
    """A lease that was taken in one event loop goes on in the next, of whichever kind; nothing has to be closed."""
    store = SQLiteStore(path)
    driver = anyio.run(LeasedRun.create, store)

    async def resume_from():
        assert await driver.append(*((Observed(),) if driver.run.version == 0 else driver.build_turn())).wait()

    for backend in ("trio", "asyncio", "trio", "asyncio"):
        anyio.run(resume_from, backend=backend)
    assert len(anyio.run(store.read, "r1").events) == 16
    anyio.run(store.aclose)


def test_one_store_serves_event_loops_at_the_same_time(path):
    """Threads with event loops of their own share a store."""
    store = SQLiteStore(path)

    async def drive(name):
        for number in range(20):
            await create_finished_run(store, make_header(f"{name}{number}"))

    threads = [
        threading.Thread(target=anyio.run, args=(drive, backend), kwargs={"backend": backend})
        for backend in ("asyncio", "trio")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(anyio.run(store.runs)) == 40
    anyio.run(store.aclose)


def test_a_loop_that_is_gone_harms_nobody(path):
    """A waiter whose event loop was closed does not keep the thread from serving others."""
    store = SQLiteStore(path)
    driver = anyio.run(LeasedRun.create, store)
    gate = hold(store)

    async def leave():
        commit = driver.append(Observed())
        with anyio.CancelScope() as scope:
            scope.cancel()
            await commit.wait()

    anyio.run(leave)
    gate.set()
    assert len(anyio.run(store.read, "r1").events) == 1
    anyio.run(store.aclose)


async def test_the_thread_ends_when_idle_and_starts_again(path, monkeypatch):
    """A store that nobody closes holds no thread and no file for long; a lease keeps it, since it has to be renewed."""
    store = SQLiteStore(path)
    driver = await LeasedRun.create(store)
    monkeypatch.setattr(group_commit, "IDLE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(group_commit, "MAINTENANCE_DELAY_S", 0.0)
    await driver.append(Observed()).wait()
    thread = store._writer._thread
    assert thread.is_alive()
    await driver.release()
    thread.join()
    assert [file.name for file in path.parent.iterdir()] == ["runs.db"]
    assert len((await store.read("r1")).events) == 1
    await store.aclose()


async def test_a_job_that_comes_as_the_thread_ends_is_done(path, monkeypatch):
    """While the file is being closed somebody may ask for more: the same thread does it."""
    late = []

    @attrs.define
    class _Closing:
        inner: sqlite3.Connection

        def execute(self, sql, parameters=()):
            return self.inner.execute(sql, parameters)

        def close(self):
            self.inner.close()
            if not late:
                late.append(StoreJob(lambda ledger: ledger.now()))
                store._writer.submit(late[0])

    store = SQLiteStore(path, connect=lambda name: _Closing(connect_sqlite3(name)))
    await store.runs()
    thread = store._writer._thread
    monkeypatch.setattr(group_commit, "IDLE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(group_commit, "MAINTENANCE_DELAY_S", 0.0)
    await store.runs()
    thread.join()
    assert late[0].is_done
    await store.aclose()


async def test_the_log_is_folded_in_when_quiet(path, monkeypatch):
    """Commits do not stop to move the log's pages; the first quiet moment does."""
    faults = Faults()
    store = SQLiteStore(path, connect=faults)
    driver = await LeasedRun.create(store)
    monkeypatch.setattr(group_commit, "MAINTENANCE_DELAY_S", math.inf)
    await driver.append(Observed()).wait()
    assert "PRAGMA wal_checkpoint(PASSIVE)" not in faults.seen
    monkeypatch.setattr(group_commit, "MAINTENANCE_DELAY_S", 0.0)
    await store.runs()
    await store.runs()
    assert "PRAGMA wal_checkpoint(PASSIVE)" in faults.seen
    await store.aclose()


async def test_the_log_is_folded_in_under_unbroken_load(path, monkeypatch):
    """Where no moment is quiet it is done all the same, so that the log does not grow for ever."""
    faults = Faults()
    store = SQLiteStore(path, connect=faults)
    monkeypatch.setattr(group_commit, "MAINTENANCE_DELAY_S", math.inf)
    monkeypatch.setattr(group_commit, "MAX_MAINTENANCE_DELAY_S", 0.0)
    await create_finished_run(store)
    await store.runs()
    assert "PRAGMA wal_checkpoint(PASSIVE)" in faults.seen
    await store.aclose()


# What is given to it.


@pytest.mark.parametrize(
    ("path", "words"), [(":memory:", "MemoryStore"), ("", "MemoryStore"), (b"runs.db", "give the path of a file")]
)
def test_a_path_is_the_path_of_a_file(path, words):
    """A database in memory would be lost; the error names the store that is meant."""
    with pytest.raises(MisuseError, match=words):
        SQLiteStore(path)


@pytest.mark.parametrize("lease_s", [0, -1, math.nan, math.inf, 3601])
def test_a_lease_has_a_length(lease_s):
    """A lease without an end would outlive its owner."""
    with pytest.raises(MisuseError, match="lease_s"):
        SQLiteStore("runs.db", lease_s=lease_s)


async def test_a_relative_path_stays_the_same_file(tmp_path, monkeypatch):
    """The path means what it meant when the store was made."""
    monkeypatch.chdir(tmp_path)
    store = SQLiteStore("runs.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    await create_finished_run(store)
    await store.aclose()
    assert (tmp_path / "runs.db").exists()


async def test_records_are_small(path):
    """A turn costs less than a KiB on disk, at the four hundredth turn as at the first."""
    store = SQLiteStore(path)
    driver = await LeasedRun.create(store)
    driver.append(Observed())
    for _ in range(400):
        driver.append(*driver.build_turn())
    await store.aclose()
    assert path.stat().st_size / 400 < 1024


def test_no_placeholder_has_a_number():
    """Of one with a sequence of values Python 3.12 warns, and whoever takes warnings for errors could not prune."""
    statements = [text for name, text in vars(sqlite).items() if name.isupper() and isinstance(text, str)]
    assert len(statements) > 20
    assert [text for text in statements if re.search(r"\?\d", text)] == []


# The index that has the runs of each filter, newest first, and few others.
FILTERS_BY_INDEX = {
    "runs_listed": [
        Filter(),
        Filter(before=9.0),
        Filter(since=1.0, before=9.0, parent=""),
        Filter(over=True),
        Filter(state=State.DONE),
        Filter(stop_reason=StopReason.COMPLETED, min_cost_usd=1.0, max_duration_s=2.0),
        Filter(waiting=False),
    ],
    "runs_by_user": [Filter(user="u"), Filter(user=""), Filter(user="u", agent="a", before=9.0, tenant="")],
    "runs_by_agent": [Filter(agent="a"), Filter(agent="a", user=""), Filter(agent="a", tenant="t", release="2")],
    "runs_by_tenant": [Filter(tenant="t"), Filter(tenant="t", state=State.DONE)],
    "runs_waiting": [Filter(waiting=True), Filter(waiting=True, user="u"), Filter(waiting=True, agent="a", before=9.0)],
    "runs_not_over": [
        Filter(over=False),
        Filter(state=State.THINK, user="u"),
        Filter(ready_by=9.0),
        Filter(active_at=9.0),
    ],
    "runs_failed": [
        Filter(state=State.ERROR),
        Filter(stop_reason=StopReason.TIMEOUT),
        Filter(state=State.ERROR, user="u", agent="a", tenant=""),
    ],
    "runs_rated": [Filter(max_rating=2), Filter(max_rating=2, agent="a", tenant="t")],
}


async def test_each_order_of_a_list_has_an_index(tmp_path, monkeypatch):
    """A page of the dearest or longest runs is read in their order, and the runs of a user by theirs."""
    store, plans = SQLiteStore(tmp_path / "runs.db"), []
    execute = sqlite._SQLiteBackend.execute

    def explain(self, sql, parameters=()):
        if "ORDER BY cost_usd" in sql or "ORDER BY duration_s" in sql:
            plans.append([step for *_, step in execute(self, f"EXPLAIN QUERY PLAN {sql}", parameters).fetchall()])
        return execute(self, sql, parameters)

    monkeypatch.setattr(sqlite._SQLiteBackend, "execute", explain)
    await store.runs(Filter(agent="a", tenant="", min_duration_s=1.0), order="cost", after=(0.5, "r1"))
    await store.runs(Filter(parent="", since=5.0), order="duration")
    await store.runs(Filter(user="u"), order="cost")
    await store.aclose()
    assert [" ".join(plan) for plan in plans] == [
        "SEARCH runs USING INDEX runs_by_cost (cost_usd>? AND (cost_usd,id)<(?,?))",
        "SEARCH runs USING INDEX runs_by_duration (duration_s>?)",
        "SEARCH runs USING INDEX runs_by_user (<expr>=?) USE TEMP B-TREE FOR ORDER BY",
    ]


@pytest.mark.parametrize("index", FILTERS_BY_INDEX)
async def test_each_filter_of_a_list_has_an_index(index, tmp_path, monkeypatch):
    """A page of it reads about as many runs as it shows, however many there are; also in a file of an older version."""
    store, plans = SQLiteStore(tmp_path / "runs.db"), []
    await create_finished_run(store, make_header("r1"))
    await store.aclose()
    to_sqlite_600(store.path)
    execute = sqlite._SQLiteBackend.execute

    def explain(self, sql, parameters=()):
        if "ORDER BY created_at" in sql:
            plans.append([step for *_, step in execute(self, f"EXPLAIN QUERY PLAN {sql}", parameters).fetchall()])
        return execute(self, sql, parameters)

    monkeypatch.setattr(sqlite._SQLiteBackend, "execute", explain)
    store = SQLiteStore(store.path)
    for where in FILTERS_BY_INDEX[index]:
        await store.runs(where)
    await store.aclose()
    assert len(plans) == len(FILTERS_BY_INDEX[index])
    assert [plan for plan in plans if len(plan) > 1 or f"INDEX {index}" not in plan[0]] == []
