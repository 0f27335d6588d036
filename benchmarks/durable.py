"""What durability costs on SQLite: `python -m benchmarks durable [FOLDER]`.

The floor is the bare loop with one INSERT and COMMIT for each turn, in a file of the same setting and in the same
process. Results are asserted, and nothing about time is.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from agentfsm import Agent
from agentfsm.core.events import Observed
from agentfsm.core.run import begin
from agentfsm.ports import Durability
from agentfsm.stores import SQLiteStore
from agentfsm.testing.conformance import Driver, header
from benchmarks import floor
from benchmarks.rows import WIDE, Counting, add, bare_add, bare_model

US = 1e6
TURNS = (20, 100, 400)
REPEATS = 5
CROWD = 300
EVENTS = 10_000


def _bare_file(path: Path, level: Durability) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {level}")
    db.execute("CREATE TABLE steps (run TEXT, body TEXT)")
    return db


async def _on_floor(path: Path, level: Durability, turns: int) -> float:
    db = _bare_file(path, level)
    model = bare_model(turns, 1)

    async def kept(messages: list[floor.Message]) -> floor.Message:
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO steps VALUES ('run', ?)", (json.dumps(messages[-2:]),))
        db.execute("COMMIT")
        return await model(messages)

    begun = time.perf_counter()
    assert await floor.run(kept, {"add": bare_add}, "go") == "done"
    took = time.perf_counter() - begun
    db.close()
    return took / turns * US


async def _on_ours(path: Path, level: Durability, turns: int) -> tuple[float, float]:
    """Return microseconds and bytes per turn."""
    store = SQLiteStore(path)
    agent = Agent(Counting(turns, 1), tools=[add], limits=WIDE, store=store, durability=level)
    begun = time.perf_counter()
    run = await agent.run("go")
    took = time.perf_counter() - begun
    assert (run.output, run.turn) == ("done", turns + 1)
    assert (await agent.load(run.id)).output == "done"
    await store.aclose()  # which moves the log into the file
    return took / turns * US, (await anyio.Path(path).stat()).st_size / turns


async def journal(folder: Path, level: Durability) -> None:
    """Print a line for each length of a run."""
    for turns in TURNS:
        bare: list[float] = []
        ours: list[tuple[float, float]] = []
        for number in range(REPEATS):
            bare.append(await _on_floor(folder / f"bare-{level}-{turns}-{number}.db", level, turns))
            ours.append(await _on_ours(folder / f"ours-{level}-{turns}-{number}.db", level, turns))
        base, own = statistics.median(bare), statistics.median(us for us, _ in ours)
        size = statistics.median(size for _, size in ours)
        print(f"{level:7}{turns:>5} turns {base:>9.0f} {own:>9.0f} us {own / base:>6.2f}x {size:>8.0f} bytes per turn")


async def crowd(folder: Path, level: Durability) -> None:
    """Print what runs cost that are driven at once."""
    store = SQLiteStore(folder / f"crowd-{level}.db")
    agents = [Agent(Counting(3, 1), tools=[add], store=store, durability=level) for _ in range(CROWD)]
    cpu, wall = time.process_time(), time.perf_counter()
    async with anyio.create_task_group() as group:
        for agent in agents:
            group.start_soon(agent.run, "go")
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    turns = CROWD * 4
    told = store.statistics()
    print(
        f"{level:7}{CROWD} runs of 3 turns at once: {wall / turns * US:.0f} us wall, {cpu / turns * US:.0f} us CPU per "
        f"turn, {told.jobs:,} jobs in {told.commits:,} commits"
    )
    await store.aclose()


async def opening(folder: Path) -> None:
    """Print what it takes to open a long run."""
    store = SQLiteStore(folder / "long.db")
    driver = await Driver.of(store, header("long"))
    driver.append(Observed())
    for _ in range(EVENTS // 5):
        driver.append(*driver.turn())
    await driver.release()
    begun = time.perf_counter()
    stored = await store.read("long")
    read = time.perf_counter() - begun
    folded = begin(stored.header).fold(stored.events)
    whole = time.perf_counter() - begun
    assert len(stored.events) == folded.version == EVENTS + 1
    print(f"a run of {EVENTS:,} events: {read * 1000:.0f} ms to read, {whole * 1000:.0f} ms to open")
    await store.aclose()


async def _main(folder: Path) -> None:
    print("setting             floor  agentfsm      ratio")
    measures: tuple[Callable[[Path, Durability], Any], ...] = (journal, crowd)
    for level in ("normal", "full"):
        for measure in measures:
            await measure(folder, level)
    await opening(folder)


def main(words: list[str]) -> int:
    """Measure in a folder of the file system that is meant, by default where temporary files go."""
    with tempfile.TemporaryDirectory(dir=words[0] if words else None) as name:
        anyio.run(_main, Path(name))
    return 0
