"""`python -m benchmarks claims [POSTGRES_URL]`: how workers share the runs of a store.

Runs per second that 1, 2, 4 and 8 worker processes drive on PostgreSQL, with the leases that they took and the claims
that came back empty; what a submission costs beside 1 to 100 idle workers there; the time per claimed run at 1,000,
100,000 and 300,000 open runs on PostgreSQL and SQLite, half of which wait for a person; and the time from `submit` in
one process to the model's first request in another, on each store. Without an address a PostgreSQL is started as in
`growth`. All processes share this machine with the server, which needs `max_connections` above 110.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from sqlite3 import connect
from tempfile import TemporaryDirectory
from typing import Any, Final

import psycopg

from agentfsm import Agent
from agentfsm.core.errors import LeaseHeldError
from agentfsm.ports import Claim, Lease, Store
from agentfsm.stores import MemoryStore, PostgresStore, SQLiteStore
from agentfsm.testing.conformance.helpers import LeasedRun, make_header
from agentfsm.testing.models import FunctionModel
from benchmarks.growth import postgres
from benchmarks.measure import machine
from benchmarks.rows import MS, US, WALL

WORKERS: Final = (1, 2, 4, 8)
# Idle workers, each with a store of its own; more than PROCESSES share these.
IDLE: Final = (1, 2, 4, 8, 40, 100)
PROCESSES: Final = 8
# Short runs, each of one model reply, and rounds of which the median is printed.
RUNS: Final = 800
ROUNDS: Final = 3
BACKLOGS: Final = (1_000, 100_000, 300_000)
# Runs of one claim, and claims of which the median is printed.
LIMIT: Final = 20
CLAIMS: Final = 25
SUBMITS: Final = 20
# Seconds between two polls of an idle worker, long enough for none in a measurement; until the server has counted the
# transactions of all sessions, and connections without use have ended; and between two submissions.
POLL_S: Final = 600.0
SETTLE_S: Final = 12.0
GAP_S: Final = 0.2
# Seconds between the starts of idle workers: of those that begin together, too many listen until their next poll.
STAGGER_S: Final = 0.2
# Seconds between two looks at a run, and from the start of a process to its first look at the store.
LOOK_S: Final = 0.02
READY: Final = "ready"


class Counted(PostgresStore):
    """Counts what a worker asks for."""

    claimed = empty = refused = 0

    async def claim(self, agent: str, **options: Any) -> Claim:
        """Claim, and count."""
        claim = await super().claim(agent, **options)
        self.claimed += len(claim.leases)
        self.empty += not claim.leases
        return claim

    async def lease(self, run_id: str, **options: Any) -> Lease:
        """Take a lease, and count."""
        try:
            return await super().lease(run_id, **options)
        except LeaseHeldError:
            self.refused += 1
            raise


def store_of(place: str) -> Store:
    """Return the store at a place."""
    return Counted(place) if place.startswith("postgres") else SQLiteStore(place)


def agent_on(store: Store) -> Agent[str]:
    """Return an agent whose model says at once when it was asked."""
    return Agent(FunctionModel(lambda _request: str(time.time())), name="clerk", store=store, durability="normal")


async def drive(place: str, count: int) -> None:
    """Be a process of workers: say so, wait for the word, and drive until nothing is left to do."""
    store = store_of(place)
    agent = agent_on(store)
    await agent.with_(store=MemoryStore()).run("warm up")
    await store.runs(limit=1)
    print(READY, flush=True)
    if sys.stdin.readline().strip() == "idle":
        others = [agent_on(store_of(place)) for _ in range(count - 1)]
        async with asyncio.TaskGroup() as tasks:
            for each in (agent, *others):
                tasks.create_task(each.worker(poll_s=POLL_S))
                await asyncio.sleep(STAGGER_S)
    await agent.worker(until_idle=True)
    assert isinstance(store, Counted)
    print(time.time(), store.claimed, store.empty, store.refused)
    await store.aclose()


def started(place: str, count: int, processes: int) -> list[subprocess.Popen[str]]:
    """Start processes of so many workers in all, and return when all of them wait for the word."""
    command = [sys.executable, "-m", "benchmarks.claims", place]
    shares = [len(range(each, count, processes)) for each in range(processes)]
    workers = [
        subprocess.Popen([*command, str(share)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        for share in shares
    ]
    assert all(_line(worker) == READY for worker in workers)
    return workers


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def _say(worker: subprocess.Popen[str], word: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{word}\n")
    worker.stdin.flush()


async def shared(url: str, count: int) -> tuple[float, float, int]:
    """Return runs per second of so many workers, leases taken per run, and how many were refused."""
    agent = agent_on(PostgresStore(url))
    await asyncio.gather(*[agent.submit("work") for _ in range(RUNS)])
    workers = started(url, count, count)
    begun = time.time()
    for worker in workers:
        _say(worker, "go")
    said = [worker.communicate()[0].split() for worker in workers]
    took = max(float(at) for at, *_ in said) - begun
    counts = [[int(number) for number in numbers] for _, *numbers in said]
    open_runs = [line for line in await agent.store.runs(limit=RUNS) if line.state not in ("done", "error")]
    assert not open_runs
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("DROP SCHEMA agentfsm CASCADE")
    await agent.aclose()
    claimed, _empty, refused = map(sum, zip(*counts, strict=True))
    return RUNS / took, claimed / RUNS, refused


async def sharing(url: str) -> None:
    """Print what more workers give."""
    print(f"{RUNS} short runs on PostgreSQL, median of {ROUNDS} rounds")
    print(f"{'workers':>8}{'runs/s':>10}{'to best':>9}{'leases a run':>14}{'refused':>9}")
    rates: dict[int, list[tuple[float, float, int]]] = {count: [] for count in WORKERS}
    for _ in range(ROUNDS):
        for count in WORKERS:
            rates[count].append(await shared(url, count))
    medians = {count: statistics.median(rate for rate, *_ in rates[count]) for count in WORKERS}
    for count in WORKERS:
        leases = statistics.median(leases for _, leases, _ in rates[count])
        refused = sum(refused for *_, refused in rates[count])
        share = medians[count] / max(medians.values())
        print(f"{count:>8}{medians[count]:>10.0f}{share:>8.2f}x{leases:>14.2f}{refused:>9}")


async def waking(url: str) -> None:
    """Print what a submission costs beside idle workers, which do not poll meanwhile: a lost wake-up would show."""
    print(f"\none submission beside idle workers on PostgreSQL, {SUBMITS} runs")
    print(f"{'workers':>8}{'to start':>11}{'longest':>11}{'commits':>9}{'connections':>13}")
    for count in IDLE:
        async with empty(url) as (store, where):
            agent = agent_on(store)
            await store.now()
            workers = started(where, count, min(count, PROCESSES))
            for worker in workers:
                _say(worker, "idle")
                await asyncio.sleep(STAGGER_S * count / len(workers))
            with psycopg.connect(url, autocommit=True) as desk:
                while _ask(desk, _CONNECTIONS) < count:  # noqa: ASYNC110  other processes
                    await asyncio.sleep(LOOK_S)
                await asyncio.sleep(SETTLE_S)
                connections, before, runs = _ask(desk, _CONNECTIONS), _ask(desk, _COMMITS), []
                for _ in range(SUBMITS):
                    runs.append((time.time(), await agent.submit("work")))
                    await asyncio.sleep(GAP_S)
                await asyncio.sleep(SETTLE_S)
                commits = (_ask(desk, _COMMITS) - before) / SUBMITS
            waits = [(float((await agent.load(run.id)).output) - at) * MS for at, run in runs]
            for worker in workers:
                worker.kill()
                worker.wait()
        print(
            f"{count:>8}{statistics.median(waits[1:]):>8.1f} ms{max(waits[1:]):>8.1f} ms{commits:>9.1f}"
            f"{connections / count:>13.2f}"
        )


# Those of the workers: that of the submitter has ended by then.
_CONNECTIONS: Final = """
SELECT count(*) FROM pg_stat_activity WHERE application_name = 'agentfsm' AND datname = current_database()
"""
_COMMITS: Final = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"


def _ask(desk: psycopg.Connection, question: str) -> int:
    (count,) = desk.execute(question.encode()).fetchone() or (0,)
    return int(count)


async def fill(store: Store, place: str, count: int) -> None:
    """Bring a store to so many open runs, copies of one: every other one waits for a person."""
    driver = await LeasedRun.create(store, make_header("template", agent="clerk"))
    await driver.release()
    if place.startswith("postgres"):
        with psycopg.connect(place, autocommit=True) as db:
            db.execute("SET search_path = agentfsm")
            names = [name for (name,) in db.execute(_COLUMNS_POSTGRES).fetchall()]
            db.execute(_copies(names, f"generate_series(1, {count - 1}) AS n", "").encode())
            db.execute("VACUUM ANALYZE runs")
        return
    await store.aclose()
    with connect(place) as db:
        names = [name for _, name, *_ in db.execute("PRAGMA table_info(runs)") if name != "number"]
        numbers = f"WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count - 1})"  # noqa: S608
        db.execute(_copies(names, "s", numbers))
        db.execute("ANALYZE")
    db.close()


_COLUMNS_POSTGRES: Final = """
SELECT column_name FROM information_schema.columns
WHERE table_schema = 'agentfsm' AND table_name = 'runs' AND column_name NOT IN ('number', 'over')
"""


def _copies(names: Sequence[str], numbers: str, before: str) -> str:
    changed = {
        "id": "'r' || n",
        "ready_at": "CASE WHEN n % 2 = 0 THEN ready_at END",
        "waiting": "n % 2 = 1" if "generate" in numbers else "n % 2",
    }
    shown = [changed.get(name, f'"{name}"') for name in names]
    into = ", ".join(f'"{name}"' for name in names)
    return f"""
        {before} INSERT INTO runs ({into}) SELECT {", ".join(shown)} FROM runs, {numbers} WHERE id = 'template'
    """  # noqa: S608  of our own names


async def claiming(store: Store) -> float:
    """Return microseconds per claimed run."""
    times = []
    for _ in range(CLAIMS):
        begun = WALL()
        claim = await store.claim("clerk", limit=LIMIT, durability="normal")
        times.append((WALL() - begun) * US / LIMIT)
        assert len(claim.leases) == LIMIT
        for lease in claim.leases:
            lease.backoff_s = 3600.0
        await asyncio.gather(*[store.release(lease).wait() for lease in claim.leases])
    return statistics.median(times)


@asynccontextmanager
async def empty(place: str) -> AsyncIterator[tuple[Store, str]]:
    """Give a store with nothing in it, and where it is."""
    with TemporaryDirectory() as folder:
        where = place or str(Path(folder) / "runs.db")
        store: Store = PostgresStore(where) if place else SQLiteStore(where)
        yield store, where
        await store.aclose()
        if place:
            with psycopg.connect(place, autocommit=True) as db:
                db.execute("DROP SCHEMA agentfsm CASCADE")


async def backlogs(url: str | None) -> None:
    """Print what a claim costs, however many runs are open."""
    print(f"\nper claimed run, {LIMIT} at once, median of {CLAIMS} claims")
    print(f"{'open runs':<12}" + "".join(f"{count:>12,}" for count in BACKLOGS) + f"{'last/first':>12}")
    for name, place in {"SQLite": "", **({"PostgreSQL": url} if url else {})}.items():
        took = []
        for count in BACKLOGS:
            async with empty(place) as (store, where):
                await fill(store, where, count)
                full = store if place else SQLiteStore(where)
                took.append(await claiming(full))
                await full.aclose()
        print(f"{name:<12}" + "".join(f"{each:>9.0f} us" for each in took) + f"{took[-1] / took[0]:>11.2f}x")


async def starting(url: str | None) -> None:
    """Print how long a run waits for an idle worker in another process."""
    print(f"\nfrom submit in one process to the model's first request in another, {SUBMITS} runs")
    for name, place in {"SQLite": "", **({"PostgreSQL": url} if url else {})}.items():
        async with empty(place) as (store, where):
            agent = agent_on(store)
            await store.now()
            [worker] = started(where, 1, 1)
            _say(worker, "idle")
            waits = []
            for _ in range(SUBMITS):
                begun = time.time()
                run = await agent.submit("work")
                while not (run := await agent.load(run.id)).is_over:  # noqa: ASYNC110  another process drives it
                    await asyncio.sleep(LOOK_S)
                waits.append((float(run.output) - begun) * MS)
                await asyncio.sleep(LOOK_S)
            worker.kill()
            worker.wait()
        print(f"{name:<12} median {statistics.median(waits[1:]):.1f} ms, longest {max(waits[1:]):.1f} ms")


async def measure(url: str | None) -> None:
    """Measure and print."""
    if url:
        await sharing(url)
        await waking(url)
    await backlogs(url)
    await starting(url)


def main(url: str = "") -> int:
    """Measure how workers share runs."""
    told = machine()
    print(f"Python {told['python']}, {told['processor']}\n")
    with postgres(url) as found:
        asyncio.run(measure(found))
    return 0


if __name__ == "__main__":
    asyncio.run(drive(sys.argv[1], int(sys.argv[2])))
