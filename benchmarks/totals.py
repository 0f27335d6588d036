"""`python -m benchmarks totals [RUNS] [PLACE] [FOLDER]`: what reports cost in a store with many runs and its totals.

A place is "sqlite" or "postgres", which starts a server of its own; with a folder, the SQLite file is made in it, and
found there the next time. The store gets RUNS runs, 100,000 without a number, of the last 90 days: of 20 agents, 5,000
users, each of whom talks with three of them, four releases and two models; one run in twenty has failed, one in ten
thousand is of an evaluation. Their journals are copies of 60, written as rows with other ids, names and times, and the
follower of the totals counts them all. More than 100,000 would take too long: then only the records are written that it
would have made of them. Each report is asked for several times: the medians of the wall time and of
the CPU time of this process, which is what counts on a busy machine. What a command takes to start is not in it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from itertools import islice
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import attrs
import httpx2

from agentfsm import Agent, StopReason
from agentfsm.core.header import Fingerprint
from agentfsm.ports import Store, StoredRun
from agentfsm.serve import Caller, serve
from agentfsm.stores import PostgresStore, SQLiteStore
from agentfsm.telemetry import read_costs
from agentfsm.telemetry.alerts import LOOKBACK_S, find_starts, replay_alerts
from agentfsm.telemetry.metrics_summary import read_measurements, summarize
from agentfsm.telemetry.notifier import KEY as NOTIFIED
from agentfsm.telemetry.notifier import KIND as ALERT_RECORDS
from agentfsm.telemetry.notifier import AlertNotifier
from agentfsm.telemetry.totals import (
    CALLS,
    COSTS,
    DAY_S,
    HOUR_S,
    MEASURED,
    SLOT_S,
    STEPS,
    USER_COSTS,
    Cell,
    Level,
    Subject,
    Totals,
    add_cell,
    catch_up_totals,
    measure_cells,
    place_cell,
    read_status,
    write_cells,
)
from agentfsm.testing import ScriptedModel
from benchmarks.rows import CPU, MS, WALL

RUNS: Final = 100_000
MAX_FOLLOWED: Final = 100_000
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


async def make_templates(path: Path) -> tuple[list[tuple[dict[str, Any], list[str]]], list[StoredRun]]:
    """Return the columns and the texts of the journals that are copied, and the journals."""
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
    stored = [await store.read(f"{NAMES[0]}{number:02}") for number in range(60)]
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
    return list(zip(rows, bodies, strict=True)), stored


def draw_runs(templates: int, runs: int, now: float) -> Iterator[tuple[int, int, int, int, int, str, str]]:
    """Yield the template, the time, the user, the agent, the release and the purpose of each run, oldest first."""
    chance = random.Random(1)
    for number in range(1, runs + 1):
        age = DAYS * DAY_S * (1 - number / runs)
        user = int(USERS * chance.random() ** 2)
        agent = (user * 7 + chance.randrange(3)) % AGENTS
        release, purpose = f"v{int((DAYS - age / DAY_S) // 23)}", "eval" if number % 10_000 == 0 else ""
        yield number, chance.randrange(templates), int(now - 300 - age) // 100 * 100, user, agent, release, purpose


def copy_runs(
    templates: Sequence[tuple[dict[str, Any], list[str]]], runs: int, now: float
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the columns and the texts of each run."""
    for number, template, start, user, agent, release, purpose in draw_runs(len(templates), runs, now):
        columns, texts = templates[template]
        named = {
            columns["id"]: f"run{number:09}",
            NAMES[1]: f"agent{agent:02}",
            NAMES[2]: f"user{user:04}",
            NAMES[3]: release,
            NAMES[4]: f"model{agent % 2}",
            NAMES[5]: purpose,
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


def add_up(stored: Sequence[StoredRun], runs: int, now: float, generation: str) -> Iterator[tuple[str, str]]:
    """Yield the records that the follower would write: the cells of each journal, copied as its rows are."""
    chains = (MEASURED, STEPS, CALLS, COSTS, USER_COSTS)
    cells: dict[tuple[Level, ...], dict[Subject, Cell]] = {levels: {} for levels in chains}

    @cache
    def measure(template: int, offset: int, agent: int) -> list[tuple[int, list[Cell]]]:
        found, shift = stored[template], offset - 1_700_000_000
        events = tuple([attrs.evolve(event, at=event.at + shift) for event in found.events])
        parts: list[tuple[int, list[Cell]]] = []
        for of, cell in measure_cells(attrs.evolve(found, events=events)).items():
            text = json.dumps(cell).replace(NAMES[1], f"agent{agent:02}").replace(NAMES[4], f"model{agent % 2}")
            named = json.loads(text)
            parts.append((of.at, [place_cell(levels[0], of, named)[2] for levels in cells]))
        return parts

    for _, template, start, user, agent, release, purpose in draw_runs(len(stored), runs, now):
        hour, name = start // HOUR_S * HOUR_S, f"agent{agent:02}"
        for at, parts in measure(template, start - hour, agent):
            of = Subject(hour + at, name, name, "", release, purpose)
            for levels, part in zip(chains, parts, strict=True):
                add_cell(cells[levels], of._replace(user=f"user{user:04}") if levels is USER_COSTS else of, part)
    for levels, each in cells.items():
        for level in levels:
            records: dict[str, dict[Subject, Cell]] = {}
            for of, cell in each.items():
                key, placed, kept = place_cell(level, of, cell)
                if not kept:
                    continue
                add_cell(records.setdefault(key, {}), placed, kept)
            for key, placed_cells in records.items():
                document = {"number": 1} | write_cells(level, placed_cells)
                yield f"{generation}|{key}", json.dumps(document, separators=(",", ":"))


@contextmanager
def writing(place: str) -> Iterator[Callable[[str, Sequence[str], Iterable[Sequence[Any]]], None]]:
    """Give a function that writes rows to a table of a SQLite file, or of a PostgreSQL."""
    if place.startswith("postgres"):
        import psycopg  # noqa: PLC0415  only this needs it

        with psycopg.connect(place) as server:
            server.execute("SET search_path = agentfsm")

            def copy(table: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
                columns = ", ".join(f'"{name}"' for name in names)
                with server.cursor().copy(f"COPY {table} ({columns}) FROM STDIN".encode()) as copied:
                    for row in rows:
                        copied.write_row(row)

            yield copy
            server.execute("SELECT setval(pg_get_serial_sequence('runs', 'number'), max(number)) FROM runs")
            server.execute("SELECT setval('revisions', 1000000000)")
    else:
        with closing(sqlite3.connect(place)) as file:
            file.execute("PRAGMA synchronous = OFF")

            def insert(table: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
                columns, marks = ", ".join(f'"{name}"' for name in names), ", ".join("?" for _ in names)
                with file:
                    file.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)  # noqa: S608  our own names

            yield insert


async def fill(store: Store, place: str, runs: int, folder: Path) -> None:
    """Fill a store. If the runs are few, the follower counts them; else only their totals are written, as rows too."""
    await Totals(store).catch_up()
    status = await read_status(store)
    assert status is not None
    templates, stored = await make_templates(folder / "templates.db")
    now, begun = time.time(), (WALL(), CPU())
    if runs > MAX_FOLLOWED:
        with writing(place) as write:
            rows = (
                ("totals", key, text, number)
                for number, (key, text) in enumerate(add_up(stored, runs, now, status.generation), 1_000)
            )
            write("records", ("kind", "key", "value", "revision"), rows)
        print(
            f"totals of {runs:,} runs, without their journals, written as rows in {WALL() - begun[0]:.0f} s", flush=True
        )
        return
    lacking = {"alone", "company", "suspect"} if place.startswith("postgres") else set()
    for columns, _ in templates if lacking else ():
        columns["waiting"] = bool(columns["waiting"])
    names = [name for name in templates[0][0] if name not in lacking]
    made = copy_runs(templates, runs, now)
    with writing(place) as write:
        while crowd := list(islice(made, CROWD)):
            write("runs", names, [[row[name] for name in names] for row, _ in crowd])
            events = [(row["number"], version, text) for row, texts in crowd for version, text in enumerate(texts)]
            write("events", ("run", "version", "body"), events)
    print(f"{runs:,} runs written as rows in {WALL() - begun[0]:.0f} s", flush=True)
    begun = WALL(), CPU()
    await Totals(store).catch_up()
    took, cpu = WALL() - begun[0], CPU() - begun[1]
    print(
        f"counted by the follower: {runs / took:,.0f} runs a second, {cpu / runs * MS:.2f} ms of CPU each", flush=True
    )


async def measure(place: str, runs: int, folder: Path) -> None:
    """Fill the store, and print the time of each report."""
    store: Store = PostgresStore(place) if place.startswith("postgres") else SQLiteStore(place)
    if await store.read_record("totals", "root") is None:
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
        log = await read_measurements(store, since=since - LOOKBACK_S, step_s=SLOT_S, only=find_starts(since))
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
    notifier = AlertNotifier(store=store, url="http://127.0.0.1:9", allow_private=True)

    async def notify() -> object:
        await store.delete_record(ALERT_RECORDS, NOTIFIED)  # else others have just evaluated them
        return await notifier.check()

    reports |= {
        "the notifier": notify,
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
