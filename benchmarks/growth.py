"""`python -m benchmarks growth [POSTGRES_URL]`: what long runs cost, and many of them.

Time and bytes for a turn at several lengths, the time of single turns of a run of 10,000, memory for a run that waits
and one that works, the time to open a run of 10,000 turns and how long the event loop stalls meanwhile, and appends per
second of many runs on each store. Without an address a PostgreSQL is started as the tests do it:
one that is installed, or the wheel of the test group. Its database should be on the disk that is meant, as should the
folder for temporary files (TMPDIR).
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from agentfsm import Agent, Run
from agentfsm.core.events import Observed
from agentfsm.core.run import begin_run
from agentfsm.ports import Durability, Emit, Reply, Request, Store
from agentfsm.stores import MemoryStore, PostgresStore, SQLiteStore
from agentfsm.testing.conformance.helpers import LeasedRun, make_header
from benchmarks.contender import PROMPT, Script, ran
from benchmarks.ours import WIDE, Scripted, contender, following, job, summing
from benchmarks.rows import CPU, MS, US, WALL, check, remembered, size_of, ticking, timed

TURNS = (20, 100, 400, 2_000)
REPEATS = 5
# For memory.
RUNS = 1_000
CROWDS = (1, 100, 1_000)
# In all, by a crowd: seconds at most.
APPENDS = 3_000
# By one run: alone it waits for the disk each time.
LONGEST = 500
KIB = 1024
# A long run: the turns whose cost is told, each as the mean of so many before it and as many behind it.
LONG = Script(turns=10_000)
TOLD = (200, 5_000, 9_900)
AROUND = 100
# Times that it is driven.
DRIVES = 3


class Stamped(Scripted):
    """Follows a script, and notes by the processor's clock when each turn asks it."""

    def __init__(self, script: Script) -> None:
        """Take the script."""
        super().__init__(script)
        self.asked: list[float] = []

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Reply according to the length of the history."""
        self.asked.append(CPU())
        return await super().reply(request, emit)


async def lengths() -> None:
    """Print time and bytes for a turn."""
    print(f"{'turns':>6}  {'memory, CPU':>12}{'memory, kept':>14}   {'SQLite, wall':>12}{'SQLite, file':>14}")
    for turns in TURNS:
        script = Script(turns=turns)
        quick: list[float] = []
        slow: list[float] = []
        with TemporaryDirectory() as folder:
            store = SQLiteStore(Path(folder) / "runs.db")
            memory = job(following(script, MemoryStore()), script)
            disk = job(following(script, store, durability="normal"), script)
            await timed(disk, script, 1, WALL)  # a warm-up
            for _ in range(REPEATS):
                quick.append(await timed(memory, script, 1, CPU) / turns * US)
                slow.append(await timed(disk, script, 1, WALL) / turns * US)
            await store.aclose()
            size = size_of(Path(folder)) / (1 + REPEATS) / turns
        held = await kept(script) / turns
        print(
            f"{turns:>6}{statistics.median(quick):>11.0f} us{held:>8.0f} bytes{statistics.median(slow):>12.0f} us"
            f"{size:>8.0f} bytes"
        )


async def kept(script: Script) -> float:
    """Return the bytes that a run leaves in a store in memory."""
    once = job(following(script, MemoryStore()), script)
    await once()
    gc.collect()
    tracemalloc.start()
    await once()
    gc.collect()
    size, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


async def footprint() -> None:
    """Print what a run takes that waits for a person, and one that works."""
    with TemporaryDirectory() as folder:
        store = SQLiteStore(Path(folder) / "runs.db")
        script = Script(turns=3)
        agent = following(script, store, tools=[summing(0.0, requires_approval=True)])
        ran.set([])
        assert (await agent.run(PROMPT)).is_waiting
        gc.collect()
        tracemalloc.start()
        runs: list[Run] = [await agent.run(PROMPT) for _ in range(RUNS)]
        gc.collect()
        idle, _peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert all(run.is_waiting for run in runs)
        await store.aclose()
    async with remembered(contender(), RUNS) as sample:
        running = await sample()
    print(f"\na run that waits (its value; its journal is on disk): {idle / RUNS / KIB:.1f} KiB")
    print(f"a run that works (1,000 at once, its journal in memory, all included): {running:.1f} KiB")


async def single_turns() -> None:
    """Print what single turns of a long run take, in memory and on disk."""
    print(f"\n{'CPU of a turn':<22}" + "".join(f"{f'turn {turn:,}':>20}" for turn in TOLD))
    for name in ("in memory", "SQLite, normal"):
        costs: list[list[float]] = []
        for _ in range(DRIVES):
            with TemporaryDirectory() as folder:
                store = MemoryStore() if name == "in memory" else SQLiteStore(Path(folder) / "runs.db")
                costs.append(await costs_of_turns(store))
                await store.aclose()
        medians = [statistics.median(each) for each in zip(*costs, strict=True)]
        told = [f"{cost * US:,.0f} us, {cost / medians[0]:.2f}x" for cost in medians]
        print(f"{name:<22}" + "".join(f"{each:>20}" for each in told), flush=True)
    print()


async def costs_of_turns(store: Store) -> list[float]:
    """Return the seconds of the turns that are told, of a run in this store."""
    model = Stamped(LONG)
    agent = Agent(model, tools=[summing(0.0)], limits=WIDE, store=store, durability="normal")
    gc.collect()
    check(await job(agent, LONG)(), LONG)
    return [(model.asked[turn + AROUND] - model.asked[turn - AROUND]) / 2 / AROUND for turn in TOLD]


async def opening(store: Store, name: str) -> None:
    """Print what it takes to open a long run whose last call waits for a person: to read, to load and to resume it."""
    tools = [summing(0.0, requires_approval=lambda call: call.a == LONG.turns - 1)]
    ran.set([])
    waiting = await following(LONG, store, tools=tools, durability="normal").run(PROMPT)
    assert (waiting.turn, waiting.is_waiting) == (LONG.turns, True)
    agent = following(LONG, store, tools=tools)
    ways = {"read": store.read, "load": agent.load, "resume": agent.resume}
    told: list[str] = []
    for way, opened in ways.items():
        times: list[float] = []
        stalls: list[float] = []
        for _ in range(DRIVES):
            gc.collect()
            async with ticking() as longest:
                begun = WALL()
                await opened(waiting.id)
                times.append(WALL() - begun)
            stalls.append(longest())
        told.append(
            f"{statistics.median(times) * MS:,.0f} ms to {way} (stall {statistics.median(stalls) * MS:,.0f} ms)"
        )
    print(f"{name:<12} a run of {LONG.turns:,} turns: {', '.join(told)}", flush=True)


async def throughput(store: Store, name: str, level: Durability) -> None:
    """Print how many appends a second are acknowledged, each of the five events of a turn, and waited for."""
    for crowd in CROWDS:
        each = min(LONGEST, APPENDS // crowd)
        ids = [f"{level}-{crowd}-{number}" for number in range(crowd)]
        drivers = await asyncio.gather(*[begun(store, run_id, level) for run_id in ids])

        async def drive(driver: LeasedRun) -> None:
            for _ in range(each):  # noqa: B023  awaited below, within the same turn of the loop
                await driver.append(*driver.build_turn()).wait()

        cpu, wall = CPU(), WALL()
        await asyncio.gather(*map(drive, drivers))
        cpu, wall = CPU() - cpu, WALL() - wall
        total = crowd * each
        assert all(driver.run.turn == each for driver in drivers)
        rate, price = f"{total / wall:,.0f} a second", f"{cpu / total * US:.0f} us CPU each"
        print(f"{name:<12}{level:<8}{crowd:>6,} at once{rate:>18}{price:>18}")
        for driver in drivers:
            await driver.release()


async def begun(store: Store, run_id: str, level: Durability) -> LeasedRun:
    """Return a run of that durability, ready to be driven."""
    head, lease = await store.create(make_header(run_id), durability=level)
    driver = LeasedRun(store, lease, begin_run(head))
    await driver.append(Observed()).wait()
    return driver


@contextmanager
def postgres(url: str) -> Iterator[str | None]:
    """Give the address of a PostgreSQL, or None where there is none."""
    if url:
        yield url
        return
    from tests.support.database_servers import PostgresServer  # noqa: PLC0415  only this needs it

    with ExitStack() as stack:
        try:
            found = stack.enter_context(PostgresServer()).url
        except pytest.skip.Exception as word:
            print(f"PostgreSQL is left out: {word}")
            found = None
        yield found


async def stores(url: str | None) -> None:
    """Print what the stores do."""
    with TemporaryDirectory() as folder:
        ready: dict[str, Store] = {"SQLite": SQLiteStore(Path(folder) / "runs.db")}
        if url:
            ready["PostgreSQL"] = PostgresStore(url)
        print()
        for name, store in ready.items():
            await opening(store, name)
        print()
        for name, store in ready.items():
            for level in ("normal", "full"):
                await throughput(store, name, level)
        for store in ready.values():
            await store.aclose()


async def measure(url: str | None) -> None:
    """Measure and print."""
    await lengths()
    await single_turns()
    await footprint()
    await stores(url)


def main(url: str = "") -> int:
    """Measure growth."""
    with postgres(url) as found:
        asyncio.run(measure(found))
    return 0
