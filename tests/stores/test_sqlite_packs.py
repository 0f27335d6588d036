"""Old events of a long journal lie in packs: in a tenth of the room, and read as if they did not."""

import sqlite3
from contextlib import closing

import pytest

from agentfsm import AssistantMessage, CorruptError, StoreError, Usage
from agentfsm.core.events import AnswerDrafted, Observed
from agentfsm.core.run import begin_run
from agentfsm.stores import SQLiteStore
from agentfsm.stores.sqlite.store import CHUNK_EVENTS, MAX_CHUNK_BYTES, find_chunk_ends
from agentfsm.testing.conformance.helpers import LeasedRun, build_turn, make_header, with_version
from tests.support.older_tables import to_sqlite_3
from tests.support.sqlite_faults import Faults


def rows(path):
    """Return the versions of the journal's rows, and which of them are packs."""
    with closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT version, typeof(body) = 'blob' FROM events ORDER BY version").fetchall())


def change(path, statement, *values):
    """Do to the file what no agentfsm does."""
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement, values)
        db.commit()


async def long_journal(store, events=CHUNK_EVENTS, portion=1):
    """Write a journal of so many events, by appends of so many."""
    driver = await LeasedRun.create(store)
    for first in range(1, events + 1, portion):
        driver.run = with_version(driver.run, min(first + portion - 1, events))
        facts = [Observed(at=float(number)) for number in range(first, driver.run.version + 1)]
        assert await store.append(driver.lease, driver.run, facts).wait()
    return driver


@pytest.mark.parametrize(
    ("first", "newest", "ends"),
    [(1, 63, []), (1, 64, [64]), (64, 64, [64]), (65, 127, []), (60, 200, [64, 128, 192]), (128, 129, [128])],
)
def test_where_packs_end(first, newest, ends):
    """At every multiple, whoever comes to it by how many events at once."""
    assert list(find_chunk_ends(first, newest)) == ends


@pytest.mark.parametrize("portion", [1, 5, CHUNK_EVENTS, 3 * CHUNK_EVENTS])
async def test_a_long_journal_is_packed_and_reads_the_same(store, path, portion):
    """Read from anywhere: from before a pack, out of the middle of one, and from behind all."""
    events = 2 * CHUNK_EVENTS + 10
    await long_journal(store, events, portion)
    packs = {CHUNK_EVENTS: True, 2 * CHUNK_EVENTS: True}
    assert rows(path) == {0: False, **packs, **dict.fromkeys(range(2 * CHUNK_EVENTS + 1, events + 1), False)}
    for after in range(events + 1):
        read = (await store.read("r1", after)).events
        assert [event.at for event in read] == [float(number) for number in range(after + 1, events + 1)]


async def test_a_journal_that_begins_with_many_events_is_packed(store, path):
    """As that of a fork does."""
    run, events = begin_run(make_header()).apply(Observed()), [Observed()]
    while len(events) <= CHUNK_EVENTS:
        more = build_turn(run)
        run, events = run.fold(more), [*events, *more]
    await store.create(make_header(), events=events)
    assert rows(path) == {
        0: False,
        CHUNK_EVENTS: True,
        **dict.fromkeys(range(CHUNK_EVENTS + 1, len(events) + 1), False),
    }
    assert (await store.read("r1")).events == tuple(events)


async def test_large_events_stay_as_they_are(store, path):
    """The store's thread has others to serve: it does not compress what would take it long."""
    driver = await long_journal(store, CHUNK_EVENTS - 1)
    driver.run = with_version(driver.run, CHUNK_EVENTS)
    said = AnswerDrafted(message=AssistantMessage(text="x" * MAX_CHUNK_BYTES), usage=Usage())
    assert await store.append(driver.lease, driver.run, (said,)).wait()
    assert not any(rows(path).values())
    assert (await store.read("r1", CHUNK_EVENTS - 1)).events == (said,)


async def test_a_damaged_pack_is_named(store, path):
    """What lies behind it is read."""
    await long_journal(store, CHUNK_EVENTS + 1)
    change(path, "UPDATE events SET body = CAST(substr(body, 1, 99) AS BLOB) WHERE version = ?", CHUNK_EVENTS)
    with pytest.raises(CorruptError, match=r"'r1', the versions up to 64, cannot be read.*restore a backup"):
        await store.read("r1", CHUNK_EVENTS - 1)
    assert len((await store.read("r1", CHUNK_EVENTS)).events) == 1


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM events WHERE version = 3",
        "UPDATE events SET version = 300 WHERE version = 3",
        "UPDATE events SET body = body || x'0a' || body WHERE version = 3",
    ],
)
async def test_damage_is_not_packed_away(store, path, damage):
    """The others would be taken for what they are not."""
    driver = await long_journal(store, CHUNK_EVENTS - 1)
    change(path, damage)
    driver.run = with_version(driver.run, CHUNK_EVENTS)
    assert await store.append(driver.lease, driver.run, (Observed(),)).wait()
    assert not any(rows(path).values())
    with pytest.raises(CorruptError, match="version 3, cannot be read"):
        await store.read("r1")


@pytest.mark.parametrize("on", ["SELECT CAST", "DELETE FROM events", "INSERT INTO events", "COMMIT"])
async def test_a_disk_that_fails_while_it_packs_leaves_the_journal_as_it_was(path, on):
    """The append that came to it is not written either; with a new lease the run goes on, and is packed then."""
    faults = Faults()
    store = SQLiteStore(path, connect=faults)
    driver = await long_journal(store, CHUNK_EVENTS - 1)
    faults.strike(sqlite3.SQLITE_FULL, on, times=9)
    driver.run = with_version(driver.run, CHUNK_EVENTS)
    with pytest.raises(StoreError):
        await store.append(driver.lease, driver.run, (Observed(),)).wait()
    faults.times = 0
    assert len((await store.read("r1")).events) == CHUNK_EVENTS - 1
    await driver.release()
    again = await store.lease("r1")
    assert await store.append(again, driver.run, (Observed(),)).wait()
    assert rows(path) == {0: False, CHUNK_EVENTS: True}
    assert len((await store.read("r1")).events) == CHUNK_EVENTS
    await store.aclose()


async def test_a_file_without_packs_is_packed_from_now_on(store, path):
    """As files of version 2 are: what they hold is read, and stays as it is."""
    driver = await long_journal(store, CHUNK_EVENTS + 9)
    await driver.release()
    await store.aclose()
    change(path, "DELETE FROM events WHERE version > 0")
    for version in range(1, CHUNK_EVENTS + 10):
        body = f'{{"at":{version}.0,"is":"Observed"}}'
        change(path, "INSERT INTO events SELECT number, ?, ? FROM runs", version, body)
    to_sqlite_3(path, version=2)
    later = SQLiteStore(path)
    lease = await later.lease("r1")
    run = with_version(driver.run, 2 * CHUNK_EVENTS)
    more = [Observed(at=float(number)) for number in range(CHUNK_EVENTS + 10, 2 * CHUNK_EVENTS + 1)]
    assert await later.append(lease, run, more).wait()
    assert rows(path) == {**dict.fromkeys(range(CHUNK_EVENTS + 1), False), 2 * CHUNK_EVENTS: True}
    assert [event.at for event in (await later.read("r1")).events] == [float(n) for n in range(1, 2 * CHUNK_EVENTS + 1)]
    await later.aclose()
