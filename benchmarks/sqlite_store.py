"""What SQLiteStore costs: `python benchmarks/sqlite_store.py [FOLDER]`. It asserts results, and nothing about time."""

from __future__ import annotations

import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path

import anyio

from agentfsm.core.events import Event, Observed
from agentfsm.core.run import begin
from agentfsm.stores import SQLiteStore
from agentfsm.testing.conformance import Driver, at_version, header

US = 1e6
TURNS = 400
TASKS = 100
EVENTS = 10_000


async def one_task(store: SQLiteStore, turns: int, run_id: str) -> list[float]:
    """Append event by event, each waited for; return the seconds that each took."""
    driver = await Driver.of(store, header(run_id))
    await driver.append(Observed()).wait()
    times = []
    for _ in range(turns):
        for event in driver.turn():
            begun = time.perf_counter()
            await driver.append(event).wait()
            times.append(time.perf_counter() - begun)
    await driver.release()
    return times


async def many_tasks(store: SQLiteStore) -> str:
    """Let tasks append at the same time, each waiting for each of its appends."""
    before = store.statistics()
    cpu, wall = time.process_time(), time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(TASKS):
            group.start_soon(one_task, store, 20, f"crowd-{number}")
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    after = store.statistics()
    appends = TASKS * 101
    commits = after.commits - before.commits
    return f"{wall / appends * US:.0f} us wall, {cpu / appends * US:.0f} us CPU each, {commits} commits"


async def reading(store: SQLiteStore) -> float:
    """Return the seconds that it takes to read 10,000 events."""
    driver = await Driver.of(store, header("long"))
    events: list[Event] = [Observed()]
    while len(events) < EVENTS:
        events += driver.turn()
    run = at_version(begin(header("long")), EVENTS)
    await store.append(driver.lease, run, events[:EVENTS]).wait()
    begun = time.perf_counter()
    assert len((await store.read("long")).events) == EVENTS
    return time.perf_counter() - begun


def floor(folder: Path, level: str) -> float:
    """Return the seconds of a bare commit of one row on this disk."""
    db = sqlite3.connect(folder / f"floor-{level}.db", isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {level}")
    db.execute("CREATE TABLE t (a, b)")
    times = []
    for number in range(1000):
        begun = time.perf_counter()
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO t VALUES (?, ?)", (number, "x" * 200))
        db.execute("COMMIT")
        times.append(time.perf_counter() - begun)
    db.close()
    return statistics.median(times)


async def main(folder: Path) -> None:
    """Print a table."""
    for durability in ("full", "normal"):
        store = SQLiteStore(folder / f"{durability}.db", durability=durability)
        times = await one_task(store, TURNS, "alone")
        bare = floor(folder, durability.upper()) * US
        alone = f"median {statistics.median(times) * US:.0f} us, mean {statistics.mean(times) * US:.0f} us"
        print(f"{durability:6}  append and wait, 1 task: {alone} (bare commit of one row here: {bare:.0f} us)")
        print(f"{durability:6}  append and wait, {TASKS} tasks: {await many_tasks(store)}")
        print(f"{durability:6}  read {EVENTS:,} events: {await reading(store) * 1000:.0f} ms")
        await store.aclose()
    store = SQLiteStore(folder / "size.db", durability="normal")
    await one_task(store, TURNS, "alone")
    await store.aclose()
    print(f"bytes per turn on disk: {(folder / 'size.db').stat().st_size / TURNS:.0f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        anyio.run(main, Path(name))
