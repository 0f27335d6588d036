"""A nightly load: rows of three sources are read, checked and added up, and each total is loaded once.

    python examples/etl.py

The first worker is killed (signal 9) in the middle of the load. Another one continues: sources are not read again, and
no total is loaded twice. For the next day, the totals are not what the bank says, so what was loaded is taken back.
Running the flow again for a day loads nothing twice either, since the keys of the rows are made of the day.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio

from agentfsm import RunContext, TransientError
from agentfsm.flow import Flow, each, step
from agentfsm.ports import Store
from agentfsm.stores import SQLiteStore

Row = dict[str, Any]
SOURCES = {
    "shop": [{"product": "tea", "cents": 450}, {"product": "cup", "cents": 900}],
    "web": [{"product": "tea", "cents": 300}, {"product": "pot", "cents": None}],
    "market": [{"product": "pot", "cents": 2_500}, {"product": "mat", "cents": 650}],
}
BANK = {"2025-07-28": 4_800, "2025-07-29": 5_000}


class Warehouse:
    """The table of totals, in a SQLite file: each key is written once."""

    def __init__(self, path: str, *, dies_after: int = 0) -> None:
        self.path, self.dies_after = path, dies_after

    def execute(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Execute a statement in a transaction of its own."""
        with closing(sqlite3.connect(self.path)) as db, db:
            db.execute("CREATE TABLE IF NOT EXISTS totals (key TEXT PRIMARY KEY, product TEXT, cents INTEGER)")
            return db.execute(sql, values).fetchall()

    def load(self, key: str, product: str, cents: int) -> None:
        """Insert a total, unless there is one with the key."""
        self.execute("INSERT INTO totals VALUES (?, ?, ?) ON CONFLICT DO NOTHING", key, product, cents)
        if self.dies_after and len(self.execute("SELECT key FROM totals")) >= self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def unload(self, key: str) -> None:
        """Delete a total."""
        self.execute("DELETE FROM totals WHERE key = ?", key)


@step(read_only=True, retry=2)
def extract(ctx: RunContext[Warehouse], source: str, day: str) -> list[Row]:
    """Read the rows of a source."""
    if source == "web" and ctx.attempt == 1:
        raise TransientError(f"{source} is busy on {day}", retry_after_s=0.01)  # only this source is read again
    return SOURCES[source]


@step(depends_on=["extract"], read_only=True)
def validate(extract: list[list[Row]]) -> list[Row]:
    """Leave out rows without a price; fail if they are many."""
    rows = [row for part in extract for row in part]
    valid = [row for row in rows if row["cents"] is not None]
    if len(valid) < 0.8 * len(rows):
        raise ValueError(f"only {len(valid)} of {len(rows)} rows are valid")
    return valid


@step(depends_on=[validate], read_only=True)
def transform(validate: list[Row]) -> list[Row]:
    """Add up the prices of each product."""
    totals = Counter[str]()
    for row in validate:
        totals[row["product"]] += row["cents"]
    return [{"product": product, "cents": cents} for product, cents in totals.items()]


@step(idempotent=True)
def unload(ctx: RunContext[Warehouse], total: Row, day: str) -> None:
    """Take back a total."""
    ctx.deps.unload(f"{day}:{total['product']}")


@step(key=lambda total, day: f"{day}:{total['product']}", compensate=unload)
def load(ctx: RunContext[Warehouse], total: Row) -> int:
    """Write a total into the warehouse."""
    ctx.deps.load(ctx.idempotency_key, total["product"], total["cents"])
    return int(total["cents"])


@step(depends_on=["load"], read_only=True)
def reconcile(load: list[int], day: str) -> int:
    """Compare the sum with that of the bank."""
    if sum(load) != BANK[day]:
        raise ValueError(f"loaded {sum(load)}, and the bank has {BANK[day]}")
    return sum(load)


def build_flow(store: Store) -> Flow:
    """Return the flow; each process that works on its runs has one."""
    sources = each(extract, over="sources", key=str)
    totals = each(load, over=transform, key=lambda total: total["product"], parallel=2)
    return Flow([sources, validate, transform, totals, reconcile], name="etl", store=store)


async def work(folder: str, day: str, *, dies_after: int = 0) -> None:
    """Load a day, in this process."""
    warehouse = Warehouse(str(Path(folder, "warehouse.db")), dies_after=dies_after)
    async with build_flow(SQLiteStore(Path(folder, "runs.db"))) as flow:
        run = await flow.submit({"day": day, "sources": list(SOURCES)}, id=f"etl:{day}")  # there is one run of a day
        run = await flow.resume(run.id, deps=warehouse)
        print(f"{day}:", *[f"{name} {status}" for name, status in flow.statuses(run).items()], sep="\n  ")
        print(f"  {run.stop_reason}: {run.stop_message or run.output}")
        print("  the warehouse has:", warehouse.execute("SELECT key, cents FROM totals ORDER BY key"))


def main() -> None:
    """Load two days, the first of them in two processes."""
    with TemporaryDirectory() as folder:
        ended = subprocess.run([sys.executable, __file__, folder], check=False)  # noqa: S603  a worker that dies
        print(f"the first worker was killed by signal {-ended.returncode}")
        for day in BANK:
            anyio.run(work, folder, day)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        anyio.run(lambda: work(sys.argv[1], "2025-07-28", dies_after=2))
    else:
        main()
