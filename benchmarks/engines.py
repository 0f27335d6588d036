"""`python -m benchmarks engines [PART] [RUNS] [ENGINE] [POSTGRES_URL]`: the two engines for runs, on PostgreSQL.

`drain`: so many queued runs of one tool call each, executed by the worker of the store and by the engine on DBOS, each
in two processes, with the time per run of each tenth. `recovery`: seconds from the `kill -9` of one of three executors
until its runs go on, on one machine and in separate pid namespaces. `sizes`: bytes, write-ahead log, commits and
connections, from which docs/scale.md calculates. Without a part all three. The processes share this machine with the
server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg

from agentfsm import Agent, tool
from agentfsm.core.messages import ToolResult
from agentfsm.engines.dbos import DBOSEngine
from agentfsm.ports import Request
from agentfsm.stores import PostgresStore
from agentfsm.testing import call, say
from agentfsm.testing.models import FunctionModel, Line
from benchmarks.growth import postgres
from benchmarks.measure import machine

RUNS: Final = 2_000
PROCESSES: Final = 2
ENGINES: Final = ("store", "dbos")
# Runs that are submitted at once, and the seconds of a call in `recovery`.
SUBMITTERS: Final = 16
LONG_S: Final = 15.0
RECOVERED: Final = 60
CLAIMS: Final = 300
LEASE_S: Final = 10.0
SCHEMAS: Final = ("agentfsm", "agentfsm_dbos")


def clerk(url: str, seconds: float = 0.0) -> Agent[str]:
    """Return an agent whose runs make one call that may be repeated."""

    @tool(idempotent=True)
    async def look() -> str:
        """Look."""
        await asyncio.sleep(seconds)
        return "seen"

    def answer(request: Request) -> Line | str:
        return "done" if isinstance(request.messages[-1], ToolResult) else say("", call("look"))

    store = PostgresStore(url, lease_s=LEASE_S)
    return Agent(FunctionModel(answer), tools=[look], name="clerk", store=store)


def engine_of(agent: Agent[str]) -> DBOSEngine:
    """Return its engine."""
    return DBOSEngine(agent, worker_concurrency=50, poll_s=0.1)


async def work(kind: str, url: str, seconds: str) -> None:
    """Be an executor, until killed."""
    agent = clerk(url, float(seconds))
    await (agent.worker(parallel=50) if kind == "store" else engine_of(agent).work())


async def submitted(kind: str, url: str, runs: int, seconds: float = 0.0) -> float:
    """Queue runs, and return the seconds per run."""
    agent = clerk(url, seconds)
    engine = engine_of(agent)
    numbers = iter(range(runs))

    async def submit() -> None:
        for number in numbers:
            await (agent if kind == "store" else engine).submit("look", id=f"run-{number}")

    begun = time.monotonic()
    await asyncio.gather(*[submit() for _ in range(SUBMITTERS)])
    took = time.monotonic() - begun
    await engine.aclose()
    await agent.aclose()
    return took / runs


@contextmanager
def executors(kind: str, url: str, count: int, seconds: float = 0.0, *before: str) -> Iterator[list[Any]]:
    """Start executors, and kill them in the end."""
    command = [*before, sys.executable, "-m", "benchmarks.engines", "work", kind, url, str(seconds)]
    found = [subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) for _ in range(count)]  # noqa: S603
    try:
        yield found
    finally:
        for each in found:
            kill(each)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def emptied(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Give a connection, and drop what was stored."""
    with psycopg.connect(url, autocommit=True) as db:
        try:
            yield db
        finally:
            for schema in SCHEMAS:
                db.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())
            db.execute("CHECKPOINT")


def number(db: psycopg.Connection[Any], statement: LiteralString) -> float:
    """Return the number that a statement finds."""
    row = db.execute(statement).fetchone()
    return float(row[0] or 0) if row else 0.0


COMMITS: Final = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
OVER: Final = "SELECT count(*) FROM agentfsm.runs WHERE over"


async def drain(url: str, runs: int, kinds: Sequence[str]) -> None:
    """Print the time per run of each tenth of a long queue."""
    print(f"\n{runs:,} queued runs of one call each, {PROCESSES} processes of 50 runs at a time; ms per run")
    print(f"{'engine':<8}{'submit':>8}{'all':>8}   each tenth, from the first")
    for kind in kinds:
        with emptied(url) as db:
            submit_s = await submitted(kind, url, runs)
            db.execute("ANALYZE")
            marks: list[float] = []
            with executors(kind, url, PROCESSES):
                while number(db, OVER) < PROCESSES:  # noqa: ASYNC110  they have not started
                    await asyncio.sleep(0.05)
                first, begun = number(db, OVER), time.monotonic()
                step = (runs - first) / 10
                while len(marks) < 10:
                    await asyncio.sleep(0.1)
                    done = number(db, OVER) - first
                    while len(marks) < 10 and done >= step * (len(marks) + 1):
                        marks.append(time.monotonic())
            tenths = [(end - start) / step * 1e3 for start, end in zip([begun, *marks], marks, strict=False)]
            print(
                f"{kind:<8}{submit_s * 1e3:>8.2f}{(marks[-1] - begun) / (runs - first) * 1e3:>8.2f}   "
                + " ".join(f"{each:.2f}" for each in tenths),
                flush=True,
            )


async def recovered(kind: str, url: str, *before: str) -> tuple[int, float, float]:
    """Kill one of three executors. Return how many runs it had, and after how many seconds the first and last went on.

    The others have room for its runs.
    """
    with emptied(url) as db:
        await submitted(kind, url, RECOVERED, LONG_S)
        with executors(kind, url, 3, LONG_S, *before) as processes:
            rows: list[Any] = []
            while len(rows) < RECOVERED:
                await asyncio.sleep(0.05)
                rows = db.execute(
                    "SELECT owner, id, version FROM agentfsm.runs WHERE owner IS NOT NULL AND version >= 3"
                ).fetchall()
            shares = {each: [row for row in rows if is_owner(row[0], each)] for each in processes}
            victim = min((each for each in processes if shares[each]), key=lambda each: len(shares[each]))
            held = {run_id: version for _owner, run_id, version in shares[victim]}
            kill(victim)
            begun, times = time.monotonic(), []
            while held:
                await asyncio.sleep(0.01)
                rows = db.execute("SELECT id, version FROM agentfsm.runs WHERE id = ANY(%s)", [list(held)]).fetchall()
                for run_id, version in rows:
                    if version > held[run_id]:
                        del held[run_id]
                        times.append(time.monotonic() - begun)
    return len(times), times[0], times[-1]


def is_owner(name: str, process: subprocess.Popen[bytes]) -> bool:
    """Return whether an owner of leases is in a process, or in a child that is the first of its pid namespace."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    _boot, namespace, pid, *_rest = name.split()
    for each in (str(process.pid), *children):
        inside = Path(f"/proc/{each}/status").read_text(encoding="ascii").partition("NSpid:")[2].split("\n")[0].split()
        if (str(Path(f"/proc/{each}/ns/pid").stat().st_ino), inside[-1]) == (namespace, pid):
            return True
    return False


async def sizes(url: str, runs: int) -> None:
    """Print what a run takes in the database."""
    print(f"\n{runs:,} runs of one call each")
    for kind in ENGINES:
        with emptied(url) as db:
            db.execute("CREATE SCHEMA IF NOT EXISTS agentfsm")
            await submitted(kind, url, 1)
            commits = number(db, COMMITS)
            start = number(db, "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')")
            await submitted(kind, url, runs)
            with executors(kind, url, PROCESSES):
                while number(db, OVER) < runs:  # noqa: ASYNC110  other processes do it
                    await asyncio.sleep(0.1)
                clients = number(
                    db,
                    "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' "
                    "AND pid <> pg_backend_pid() AND datname = current_database()",
                )
            wal = number(db, "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')") - start
            events = number(db, "SELECT count(*) FROM agentfsm.events")
            await asyncio.sleep(1)  # the statistics are behind
            commits = number(db, COMMITS) - commits
            entries = events / runs
            print(
                f"{kind:<8}{wal / runs:>8.0f} bytes of WAL and {commits / runs:.1f} commits a run, {entries:.1f} "
                f"events; {wal / events:.0f} bytes of WAL an event; {clients / PROCESSES:.1f} connections a process"
            )
            rows = db.execute(
                "SELECT relnamespace::regnamespace::text || '.' || relname, pg_total_relation_size(oid), "
                "pg_indexes_size(oid) FROM pg_class WHERE relkind = 'r' AND relnamespace::regnamespace::text = ANY(%s) "
                "AND pg_total_relation_size(oid) > 100000 ORDER BY 2 DESC",
                [list(SCHEMAS)],
            ).fetchall()
            for name, total, indexes in rows:
                print(f"    {name:<40}{total / runs:>8.0f} bytes a run, of these {indexes / runs:.0f} of indexes")
            dead = db.execute(
                "SELECT relname, n_tup_upd, n_tup_hot_upd, n_dead_tup FROM pg_stat_user_tables "
                "WHERE n_tup_upd > 100 ORDER BY n_tup_upd DESC"
            ).fetchall()
            for name, updates, hot, _dead in dead:
                print(f"    {name}: {updates / runs:.1f} updates a run, {hot / updates:.0%} HOT")


async def claims(url: str) -> None:
    """Print how long a claim takes that finds nothing."""
    with emptied(url):
        store = PostgresStore(url)
        await store.claim("clerk", limit=1)
        begun = time.monotonic()
        for _ in range(CLAIMS):
            await store.claim("clerk", limit=20)
        print(f"\na claim that finds nothing: {(time.monotonic() - begun) / CLAIMS * 1e3:.2f} ms")
        await store.aclose()


async def recovery(url: str) -> None:
    """Print how long runs rest after a kill."""
    print(f"\nkill -9 of one of three executors; lease {LEASE_S:.0f} s; seconds until its runs went on, first and last")
    for kind in ENGINES:
        for where, before in {"one machine": (), "pid namespaces": ("unshare", "--pid", "--fork")}.items():
            count, first, last = await recovered(kind, url, *before)
            print(f"{kind:<8}{where:<18}{count:>4} runs{first:>8.2f}{last:>8.2f}", flush=True)


def main(part: str = "all", runs: str = "", kind: str = "", url: str = "") -> int:
    """Measure."""
    asyncio.run(measure(part, runs, kind, url))
    return 0


async def measure(part: str, runs: str, kind: str, url: str) -> None:
    """Print the tables."""
    print(machine())
    with postgres(url) as found:
        if not found:
            return
        count = int(runs or RUNS)
        if part in ("all", "sizes"):
            await claims(found)
            await sizes(found, count)
        if part in ("all", "recovery"):
            await recovery(found)
        if part in ("all", "drain"):
            await drain(found, count, [kind] if kind else ENGINES)


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[2:]))
