"""`python -m benchmarks totals [RUNS] [PLACE] [FOLDER]`: how long reports take in a store with many runs and its totals.

A place is "sqlite" or "postgres", which starts a server of its own; with a folder, the SQLite file is made in it, and
found there the next time. The store gets RUNS runs, 100,000 without a number, of the last 90 days: of 20 agents, 5,000
users, each of whom talks with three of them, four releases and two models; one run in twenty has failed, one in ten
thousand is of an evaluation. Their journals are copies of 60, written as rows with other ids, names and times. Then the
follower of the totals counts them all, and each report is asked for several times: the medians of the wall time and of
the CPU time of this process, which is what counts on a busy machine. What a command takes to start is not in it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import attrs
import httpx2

from agentfsm import Agent, StopReason
from agentfsm.core.header import Fingerprint
from agentfsm.ports import Store
from agentfsm.serve import Caller, serve
from agentfsm.stores import PostgresStore, SQLiteStore
from agentfsm.telemetry import read_costs
from agentfsm.telemetry.alerts import LOOKBACK_S, replay_alerts
from agentfsm.telemetry.metrics_summary import read_measurements, summarize
from agentfsm.telemetry.totals import DAY_S, Totals, catch_up_totals, read_status
from agentfsm.testing import ScriptedModel
from benchmarks.rows import CPU, MS, WALL

RUNS: Final = 100_000
DAYS: Final = 90
AGENTS: Final = 20
USERS: Final = 5_000
REPEATS: Final = 5
# Seconds after which a report is not asked for again.
GIVE_UP_S: Final = 10.0
# Rows of runs that are written at once.
CROWD: Final = 5_000
# Times of the copied journals begin with these digits, and so do no other numbers in them.
TIME: Final = "17000000"
NAMES: Final = (
    "the-id-of-a-run",
    "the-name-of-an-agent",
    "the-id-of-a-user",
    "the-release",
    "the-model",
    "the-purpose",
)


async def make_templates(path: Path) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the columns and the texts of the journals that are copied."""
    from tests.support.recorded_tasks import record_task  # noqa: PLC0415  only this needs it

    store, chance = SQLiteStore(path), random.Random(0)
    for number in range(60):
        made = record_task(
            number,
            1_700_000_000.0 + number % 50,
            seconds=round(chance.lognormvariate(1.5, 0.7), 3),
            turns=chance.choice((1, 1, 2, 3)),
            tokens=chance.randrange(200, 4_000),
            usd=round(chance.uniform(0.001, 0.05), 6),
            failed=StopReason.TIMEOUT if number % 20 == 0 else None,
        )
        run_id, agent, user, release, model, purpose = NAMES
        head = attrs.evolve(
            made.header, id=f"{run_id}{number:02}", agent=agent, user=user, release=release, purpose=purpose
        )
        head = attrs.evolve(head, fingerprint=Fingerprint(model=model))
        _, lease = await store.create(head, events=made.events)
        await store.release(lease).wait()
    await store.aclose()
    with closing(sqlite3.connect(path)) as db:
        db.row_factory = sqlite3.Row
        rows = [dict(row) for row in db.execute("SELECT * FROM runs ORDER BY number")]
        bodies = [
            [
                text
                for (text,) in map(
                    tuple, db.execute("SELECT body FROM events WHERE run = ? ORDER BY version", (row["number"],))
                )
            ]
            for row in rows
        ]
    return list(zip(rows, bodies, strict=True))


def copy_runs(
    templates: Sequence[tuple[dict[str, Any], list[str]]], runs: int, now: float
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the columns and the texts of each run, oldest first."""
    chance = random.Random(1)
    for number in range(1, runs + 1):
        columns, texts = templates[chance.randrange(len(templates))]
        age = DAYS * DAY_S * (1 - number / runs)
        start = int(now - 300 - age) // 100 * 100
        user = int(USERS * chance.random() ** 2)
        agent = (user * 7 + chance.randrange(3)) % AGENTS
        named = {
            columns["id"]: f"run{number:09}",
            NAMES[1]: f"agent{agent:02}",
            NAMES[2]: f"user{user:04}",
            NAMES[3]: f"v{int((DAYS - age / DAY_S) // 23)}",
            NAMES[4]: f"model{agent % 2}",
            NAMES[5]: "eval" if number % 10_000 == 0 else "",
        }
        head, *events = [text.replace(TIME, str(start)[:8]) for text in texts]
        for old, new in named.items():
            head = head.replace(old, new)
        shift = start - 1_700_000_000
        row = {
            **{name: named.get(value, value) for name, value in columns.items()},
            "number": number,
            "created_at": columns["created_at"] + shift,
            "updated_at": columns["updated_at"] + shift,
            "change": None,
        }
        yield row, [head, *[each.replace(columns["id"], row["id"]) for each in events]]


def write_runs(made: Iterator[tuple[dict[str, Any], list[str]]], place: str, names: Sequence[str]) -> None:
    """Write runs as rows of a SQLite file, or of a PostgreSQL."""
    quoted = ", ".join(f'"{name}"' for name in names)
    with ExitStack() as stack:
        if place.startswith("postgres"):
            import psycopg  # noqa: PLC0415  only this needs it

            server = stack.enter_context(psycopg.connect(place))
            server.execute("SET search_path = agentfsm")

            def write(table: str, columns: str, rows: list[Sequence[Any]]) -> None:
                with server.cursor().copy(f"COPY {table} ({columns}) FROM STDIN".encode()) as copy:
                    for row in rows:
                        copy.write_row(row)
        else:
            file = stack.enter_context(closing(sqlite3.connect(place)))
            file.execute("PRAGMA synchronous = OFF")

            def write(table: str, columns: str, rows: list[Sequence[Any]]) -> None:
                marks = ", ".join("?" * len(rows[0]))
                with file:
                    file.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)  # noqa: S608  our own names

        runs: list[Sequence[Any]] = []
        events: list[Sequence[Any]] = []
        for row, texts in made:
            runs.append([row[name] for name in names])
            events += [(row["number"], version, text) for version, text in enumerate(texts)]
            if len(runs) == CROWD:
                write("runs", quoted, runs)
                write("events", "run, version, body", events)
                runs, events = [], []
        if runs:
            write("runs", quoted, runs)
            write("events", "run, version, body", events)
        if place.startswith("postgres"):
            server.execute("SELECT setval(pg_get_serial_sequence('runs', 'number'), max(number)) FROM runs")
            server.commit()


async def fill(store: Store, place: str, runs: int, folder: Path) -> None:
    """Fill a store, and count its totals, unless it has them."""
    if not await store.runs(limit=1):
        templates = await make_templates(folder / "templates.db")
        boolean = {"waiting"} if place.startswith("postgres") else set()
        lacking = {"alone", "company", "suspect"} if place.startswith("postgres") else set()
        for columns, _ in templates:
            columns.update({name: bool(columns[name]) for name in boolean})
        begun = WALL()
        names = [name for name in templates[0][0] if name not in lacking]
        await asyncio.to_thread(write_runs, copy_runs(templates, runs, time.time()), place, names)
        print(f"{runs:,} runs written as rows in {WALL() - begun:.0f} s", flush=True)
    if (status := await read_status(store)) is None or not status.is_whole or status.uncounted:
        begun, cpu = WALL(), CPU()
        await Totals(store).catch_up()
        took = WALL() - begun
        print(
            f"counted by the follower: {runs / took:,.0f} runs a second, {(CPU() - cpu) / runs * MS:.2f} ms of CPU each"
        )


async def measure(place: str, runs: int, folder: Path) -> None:
    """Fill the store, and print the time of each report."""
    store: Store = PostgresStore(place) if place.startswith("postgres") else SQLiteStore(place)
    await fill(store, place, runs, folder)
    status = await read_status(store)
    assert status is not None
    sizes: dict[str, list[int]] = {}
    after = ""
    while page := await store.list_records("totals", after=after):
        after = page[-1].key
        for record in page:
            size = sizes.setdefault(record.key.split("|")[1] if "|" in record.key else record.key, [0, 0])
            size[0] += 1
            size[1] += len(json.dumps(record.value, separators=(",", ":")))
    print(*[f"{level}: {count:,} records, {size / 1e6:,.1f} MB" for level, (count, size) in sizes.items()], sep="\n")
    now = await store.now()
    week, month, tz = now - 7 * DAY_S, now - 30 * DAY_S, "Asia/Shanghai"

    async def metrics(since: float) -> object:
        await catch_up_totals(store)
        log = await read_measurements(store, since=since)
        return summarize(log, since, log.find_end(await store.now()))

    async def alerts(since: float) -> object:
        await catch_up_totals(store)
        log = await read_measurements(store, since=since - LOOKBACK_S, with_days=False)
        return replay_alerts(log, since, log.find_end(await store.now()))

    async def costs(**options: Any) -> object:
        await catch_up_totals(store)
        return await read_costs(store, **options)

    agents = [Agent(ScriptedModel(), name=f"agent{number:02}", store=store) for number in range(AGENTS)]
    app = serve(agents, auth=lambda _request: Caller(user="x", scopes={"admin"}), parallel=0)
    client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://here")

    async def over_http(**query: Any) -> object:
        found = (await client.get("/v1/costs", params=query)).raise_for_status().json()
        assert found["is_whole"]
        return found

    reports: dict[str, Callable[[], Awaitable[object]]] = {}
    for by in ("agent", "model", "purpose", "tenant", "day", "user"):
        for text, since in (("", None), (", 7 days", week), (", 30 days", month)):
            reports[f"costs by {by}{text}"] = lambda by=by, since=since: costs(by=by, since=since)  # type: ignore[misc]
    reports |= {
        f"costs by day of {tz}, 30 days": lambda: costs(by="day", since=month, tz=tz),
        "metrics": lambda: metrics(-inf),
        "metrics, 7 days": lambda: metrics(week),
        "metrics, a day": lambda: metrics(now - DAY_S),
        "alerts test, a day": lambda: alerts(now - DAY_S),
        "alerts test, 7 days": lambda: alerts(week),
        "GET /v1/costs": over_http,
        "GET /v1/costs, by user": lambda: over_http(by="user"),
        "studio: by day, 30 days": lambda: over_http(by="day", since=int(month), tz=tz),
    }
    for name, ask in reports.items():
        wall, cpu = [], []
        for _ in range(REPEATS):
            begun = WALL(), CPU()
            await ask()
            wall.append(WALL() - begun[0])
            cpu.append(CPU() - begun[1])
            if sum(wall) > GIVE_UP_S:
                break
        print(
            f"{name:<40}{statistics.median(wall) * MS:>10.0f} ms{statistics.median(cpu) * MS:>10.0f} ms CPU", flush=True
        )
    await client.aclose()
    await store.aclose()


def main(runs: str = str(RUNS), place: str = "sqlite", folder: str = "") -> int:
    """Measure reports."""
    with ExitStack() as stack:
        where = Path(folder or stack.enter_context(TemporaryDirectory()))
        where.mkdir(exist_ok=True)
        if place == "postgres":
            from tests.support.database_servers import PostgresServer  # noqa: PLC0415  only this needs it

            place = stack.enter_context(PostgresServer()).url
        else:
            place = str(where / f"runs-{runs}.db")
        asyncio.run(measure(place, int(runs), where))
    return 0
