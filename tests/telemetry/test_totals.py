"""Totals: each event of each journal counts once, whenever their follower dies, and reports from them are right."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from math import inf
from typing import get_args

import anyio
import pytest

from agentfsm import Agent, Runs, StopReason, Usage, tool
from agentfsm.core.errors import AgentError, ConflictError, CorruptError, StoreError
from agentfsm.ports import Feedback
from agentfsm.ports.store import Filter
from agentfsm.serve import administration
from agentfsm.serve.metrics import RunMetrics
from agentfsm.stores import MemoryStore, PostgresStore, RedisStore, SQLiteStore
from agentfsm.telemetry import read_costs
from agentfsm.telemetry import totals as t
from agentfsm.telemetry.alerts import LOOKBACK_S, find_starts, replay_alerts
from agentfsm.telemetry.costs import COST_GROUPS
from agentfsm.telemetry.measurements import RUNS
from agentfsm.telemetry.metrics_summary import read_measurements, summarize
from agentfsm.testing import ScriptedModel, call, say
from tests.support.database_servers import empty_schema
from tests.support.gateways import named, serving
from tests.support.recorded_tasks import record_task

pytestmark = pytest.mark.anyio
LEVELS = get_args(t.Level)


class Priced(ScriptedModel):
    """A scripted model whose output costs a cent per token."""

    name = "priced"

    def cost_usd(self, usage):
        return usage.output_tokens * 0.01


@tool(read_only=True, cost_usd=0.005)
async def search(query: str) -> str:
    """Search."""
    return query


@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


@pytest.fixture(params=("memory", "sqlite"))
async def store(request, tmp_path):
    made = MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "runs.db")
    yield made
    await made.aclose()


def script():
    """Return two turns with a call."""
    return say("", call("search", query="x"), usage=Usage(input_tokens=10, output_tokens=2)), say(
        "done", usage=Usage(input_tokens=20, cached_tokens=5, output_tokens=1)
    )


def build(store, **options):
    return Agent(Priced(*script()), tools=[search], name="shop", store=store, **options)


async def fill(store, count):
    """Execute runs of several users, one with a sub-agent that is rated, and one that waits for an approval."""
    for index in range(count):
        await build(store).run(f"task {index}", user=f"u{index % 3}", tenant=None if index % 2 else "acme")
    child = Agent(Priced(say("ok", usage=Usage(output_tokens=3))), name="child", store=store)
    asks = say("", call("child", query="?"), usage=Usage(output_tokens=1))
    await Agent(Priced(asks, "done"), name="parent", tools=[child.as_tool()], store=store).run("x", id="parent")
    await store.add_feedback("parent", "1", Feedback(rating=4, at=await store.now()))
    await Agent(Priced(say("", call("pay", cents=1))), name="payer", tools=[pay], store=store).run("x", id="waits")


async def resume(store):
    """Let the run end that waits."""
    await Runs(store).approve("waits", "t1.0")
    await Agent(Priced("paid"), name="payer", tools=[pay], store=store).resume("waits")
    await store.add_feedback("parent", "2", Feedback(rating=2, at=await store.now()))


async def fold(store):
    """Return what all journals give, by level and cell, apart from any totals."""
    cells = {level: {} for level in LEVELS}
    for row in await store.runs(limit=10_000):
        stored = await store.read(row.id)
        root = await t.read_root_agent(store, stored.header)
        before = await t.read_previous_header(store, stored.header)
        feedback = await store.list_feedback(row.id)
        for subject, cell in t.measure_cells(stored, root=root, previous=before, feedback=feedback).items():
            for level in LEVELS:
                _, of, kept = t.place_cell(level, subject, cell)
                for series, fields in kept.items():
                    found = cells[level].setdefault(of, {}).setdefault(series, {})
                    for name, value in fields.items():
                        found[name] = found.get(name, 0) + value
    return cells


async def counted(store):
    """Return the totals by level and cell, without the times at which their series began."""
    status = await t.read_status(store)
    found = {level: {} for level in LEVELS}
    for level in LEVELS:
        async for record in t.iter_level(store, status.generation, level):
            for subject, cell in t.read_cells(record.value).items():
                found[level][subject] = {
                    series: {name: value for name, value in fields.items() if name != t.BORN}
                    for series, fields in cell.items()
                }
    return found


async def read_counters(store):
    """Return the metrics of a gateway: those over all time."""
    return await RunMetrics(store).format([])


async def test_they_are_the_sums_of_the_journals(store):
    """Each level has each event once, costs with and without users as well, and a second look adds nothing."""
    await fill(store, 5)
    totals = t.Totals(store)
    await totals.catch_up()
    await t.Totals(store).catch_up()
    assert await counted(store) == await fold(store)
    status = await t.read_status(store)
    assert (status.is_whole, status.uncounted) == (True, 0)
    for level, cells in (await counted(store)).items():
        if level == "all":
            assert {subject.agent for subject in cells} == {"shop", "child", "parent", "payer"}
            continue
        if level in t.SHORTEST:
            assert sum(cell.get('["events"]', {"n": 0})["n"] for cell in cells.values()) == sum(
                row.version for row in await store.runs(limit=100)
            )
        assert {subject.user for subject in cells} == ({"u0", "u1", "u2", ""} if level in t.USER_COSTS else {""})
    await build(store).run("later")
    await totals.catch_up()
    assert await counted(store) == await fold(store)


class KilledError(Exception):
    """Stands for the end of a process."""


class Passage:
    """A store that stops its caller at one of its operations: before it is done, or after."""

    def __init__(self, store, stop_at, after, act):
        self._store, self._stop_at, self._after, self._act, self.count = store, stop_at, after, act, 0

    def __getattr__(self, name):
        member = getattr(self._store, name)
        if name not in {"read_record", "write_record", "take_unread", "confirm_read", "read", "followers"}:
            return member

        async def passed(*args, **options):
            self.count += 1
            is_chosen = self.count == self._stop_at
            if is_chosen and not self._after:
                await self._act()
            found = await member(*args, **options)
            if is_chosen and self._after:
                await self._act()
            return found

        return passed


@pytest.fixture
def no_lease(monkeypatch):
    """Let another process count at once, and many small batches be made."""
    monkeypatch.setattr(t, "FOLLOWER_LEASE_S", 0.0)
    monkeypatch.setattr(t, "BATCH", 2)
    monkeypatch.setattr(t, "_MAX_EVENTS", 5)


async def play(passage, store):
    """Count in a process while a run is executed and another waits, let both end, and count again."""
    totals, may_end, has_begun = t.Totals(passage), anyio.Event(), anyio.Event()

    @tool(read_only=True)
    async def work() -> str:
        """Work."""
        has_begun.set()
        await may_end.wait()
        return "done"

    worker = Agent(
        Priced(say("", call("work"), usage=Usage(output_tokens=1)), "x"), name="w", tools=[work], store=store
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run, "x")
        await has_begun.wait()
        try:
            await totals.catch_up()
            await resume(store)
            await totals.catch_up()
        finally:
            may_end.set()
    await totals.catch_up()


# Operations between two stops: each of them in the soak.
STEPS = [5, pytest.param(1, marks=pytest.mark.soak)]


@pytest.mark.parametrize("step", STEPS)
async def test_a_process_that_is_killed_neither_loses_nor_doubles(step, no_lease):
    """Before and after operations of it; the next process goes on."""

    async def die():
        raise KilledError

    for stop_at in range(1, 200, step):
        store = MemoryStore()
        await fill(store, 3)
        passage = Passage(store, stop_at, after=stop_at % 2, act=die)
        with suppress(KilledError, ExceptionGroup):
            await play(passage, store)
        await t.Totals(store).catch_up()
        assert await counted(store) == await fold(store), stop_at
        if passage.count < stop_at:
            break
    assert stop_at > 60


@pytest.fixture(params=("memory", "sqlite", "postgres", "redis"))
async def each_store(request, tmp_path):
    """A store of each kind, empty at first."""
    given = request.getfixturevalue
    with ExitStack() as stack:
        if request.param == "postgres":
            schema = stack.enter_context(empty_schema(given("postgres_desk")))
            made = PostgresStore(given("shared_postgres"), schema=schema)
        elif request.param == "redis":
            made = RedisStore(given("redis_url"), accept_loss="everything")
        else:
            made = MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "runs.db")
        yield made
        await made.aclose()


@pytest.mark.parametrize(("kills", "step"), [(3, 13), pytest.param(60, 1, marks=pytest.mark.soak)])
async def test_they_are_those_of_the_journals_after_kills_on_each_store(each_store, no_lease, kills, step):
    """Of the follower, one process after the other, while runs are executed; a rebuild gives the same."""

    async def die():
        raise KilledError

    killed, stop_at = 0, step
    await fill(each_store, 1)
    while killed < kills:
        await build(each_store).run("more", user=f"u{killed % 3}", tenant=None if killed % 2 else "acme")
        passage = Passage(each_store, stop_at, after=killed % 2, act=die)
        with suppress(KilledError, ExceptionGroup):
            await t.Totals(passage).catch_up()
        killed += passage.count >= stop_at
        stop_at = stop_at + step if passage.count >= stop_at else step
    await t.Totals(each_store).catch_up()
    found = await counted(each_store)
    assert found == await fold(each_store)
    await t.rebuild_totals(each_store)
    assert await counted(each_store) == found


@pytest.mark.parametrize("step", STEPS)
async def test_a_process_that_was_overtaken_counts_nothing_twice(step, no_lease):
    """It stops at operations of it, while another one counts all, and a run changes."""
    for stop_at in range(1, 200, step):
        store = MemoryStore()
        await fill(store, 3)

        async def overtake(store=store):
            await t.Totals(store).catch_up()
            await build(store).run("meanwhile", user="u2")
            await t.Totals(store).catch_up()

        passage = Passage(store, stop_at, after=stop_at % 2, act=overtake)
        with suppress(AgentError, ExceptionGroup):  # the lease, or the record, is that of the other one
            await play(passage, store)
        await t.Totals(store).catch_up()
        assert await counted(store) == await fold(store), stop_at
        if passage.count < stop_at:
            break
    assert stop_at > 60


async def test_a_rebuild_gives_the_same_and_keeps_what_was_removed(store, no_lease):
    """It makes the totals for the first time, equal ones again, and goes on where it was interrupted."""
    await fill(store, 3)
    totals = t.Totals(store)
    await totals.catch_up()
    first = await t.rebuild_totals(store)
    before = await counted(store)
    assert before == await fold(store)
    counters = await read_counters(store)
    status = await t.rebuild_totals(store)
    assert (status.generation != first.generation, status.is_whole, status.pruned_before) == (True, True, 0)
    assert await counted(store) == before
    assert [each.name for each in await store.followers()] == [f"totals-{status.generation}"]
    count = await store.prune(await store.now() + 1)
    with pytest.raises(KilledError):
        await t.rebuild_totals(Passage(store, 12, after=True, act=_die))
    status = await t.rebuild_totals(store)
    assert (count > 0, await counted(store)) == (True, before)
    assert sorted((await read_counters(store)).splitlines()) == sorted(counters.splitlines())
    assert status.pruned_before >= await store.now()
    report = await read_costs(store)
    assert (report.pruned_before, report.runs) == (status.pruned_before, 6)
    await build(store).run("later")
    await totals.catch_up()
    assert (await read_costs(store)).runs == 7


async def _die():
    raise KilledError


@pytest.mark.parametrize("by", COST_GROUPS)
async def test_costs_are_those_of_the_journals(store, by):
    """In each table, of one tenant, agent or user, and of the agents of a server with their sub-agents."""
    await fill(store, 4)
    options = [
        {},
        {"tz": "Asia/Kolkata"},
        {"where": Filter(tenant="acme")},
        {"where": Filter(tenant="", agent="shop")},
        {"where": Filter(user="u1")},
        {"agents": ["parent"]},
        {"since": (await store.now() // 3_600 - 5) * 3_600},
    ]
    expected = [await read_costs(store, by=by, **each) for each in options]
    await t.Totals(store).catch_up()
    for each, report in zip(options, expected, strict=True):
        found = await read_costs(store, by=by, **each)
        assert (found.is_from_totals, report.is_from_totals) == (True, False)
        assert {row.name: (row.usage.tokens, row.runs) for row in found.rows} == {
            row.name: (row.usage.tokens, row.runs) for row in report.rows
        }
        assert (found.usd, found.runs) == (pytest.approx(report.usd), report.runs)
        assert found.total.cached_tokens == report.total.cached_tokens
        assert report.since - 3_600 <= found.since <= report.since + 1


async def test_metrics_are_those_of_the_journals(store):
    """Counts and means are the same; percentiles are within 5 %."""
    await fill(store, 4)
    now = await store.now()
    first = summarize(log := await read_measurements(store), -inf, log.find_end(now))
    await t.Totals(store).catch_up()
    found = summarize(log := await read_measurements(store), -inf, log.find_end(now))
    assert found.outcomes == first.outcomes == {"completed": 5}
    assert (found.waiting, found.ratings, found.user_satisfaction) == ({"approval": 1}, 1, 4)
    for name in ("tasks", "task_success_rate", "avg_rounds_per_task", "avg_tokens_per_task", "input_tokens", "signals"):
        assert getattr(found, name) == getattr(first, name), name
    assert found.avg_latency_ms == pytest.approx(first.avg_latency_ms)
    assert found.latency_s.p95 == pytest.approx(first.latency_s.p95, rel=0.051)
    assert [(each.tool, each.calls, each.tool_error_rate) for each in found.tools] == [
        (each.tool, each.calls, each.tool_error_rate) for each in first.tools
    ]
    assert found.daily_cost_usd == pytest.approx(first.daily_cost_usd)
    assert (await read_measurements(store, agent="other")).series == {}


async def record(store, number, at, **options):
    """Put the journal of a task into a store."""
    made = record_task(number, at, **options)
    _, lease = await store.create(made.header, events=made.events)
    await store.release(lease).wait()


async def test_a_rating_of_a_run_that_has_not_begun_is_counted(store):
    """And that of a judge, which is apart."""
    made = record_task(1, await store.now())
    _, lease = await store.create(made.header)
    await store.release(lease).wait()
    await store.add_feedback(made.header.id, "1", Feedback(rating=2, at=await store.now()))
    await store.add_feedback(made.header.id, "2", Feedback(rating=5, at=await store.now(), by="judge:m 1a2b"))
    await t.Totals(store).catch_up()
    assert (await counted(store), (await t.read_status(store)).unreadable) == (await fold(store), 0)
    lines = (await read_counters(store)).splitlines()
    assert 'agentfsm_feedback_rating_sum{agent="shop"} 2' in lines
    assert 'agentfsm_judge_rating_bucket{agent="shop",judge="m 1a2b",le="4"} 0' in lines
    assert 'agentfsm_judge_rating_sum{agent="shop",judge="m 1a2b"} 5' in lines


async def test_a_rebuild_adds_up_longer_times_from_hours(store):
    """A day and a month have the runs that were removed, and those that only the new totals have counted."""
    await record(store, 1, 1_780_000_000.0)
    await t.Totals(store).catch_up()
    assert await store.prune(await store.now() + 1, unread=True) == 1
    await record(store, 2, 1_780_000_000.0 + 7_200)
    await t.rebuild_totals(store)
    for level, cells in (await counted(store)).items():
        if level == "all":
            assert sum(sum(cell[series]["n"] for series in cell if RUNS.name in series) for cell in cells.values()) == 2
            continue
        if level in t.SHORTEST:
            assert sum(cell['["events"]']["n"] for cell in cells.values()) == 4, level


async def test_alerts_fire_as_with_the_journals(store):
    """On bursts, slow hours and errors, of which totals keep steps of 5 minutes."""
    until = await store.now() // 3_600 * 3_600
    number = 0
    for hour in range(30):
        for index in range({10: 24, 11: 24, 20: 30, 28: 45}.get(hour, 9)):
            number += 1
            at = until - (30 - hour) * 3_600 + index * 70 + 1
            failed = StopReason.TIMEOUT if hour in {10, 11} and index % 2 else None
            seconds, usd = 25 if hour == 20 else 2, 40 if hour == 15 else 0.01
            await record(store, number, at, turns=3, seconds=seconds, usd=usd, failed=failed)
    since = until - 29 * 3_600
    expected = replay_alerts(await read_measurements(store), since, until)
    assert {each.alert for each in expected} >= {"error_rate", "avg_latency_ms", "tool_call_frequency"}
    await t.Totals(store).catch_up()
    log = await read_measurements(store, since=since - LOOKBACK_S, step_s=t.SLOT_S, only=find_starts(since))
    found = replay_alerts(log, since, until)
    assert [(each.alert, each.since, each.until) for each in found] == [
        (each.alert, each.since, each.until) for each in expected
    ]
    assert [each.worst for each in found] == pytest.approx([each.worst for each in expected])


async def test_a_follower_goes_on_after_a_failure(store, monkeypatch):
    """Of the store, and of a bug; then it counts all, and runs that are executed."""
    monkeypatch.setattr(t, "POLL_S", 0.001)
    monkeypatch.setattr(t, "ACTIVE_S", 0.0)
    await fill(store, 1)
    faults = [StoreError("the disk is full"), ValueError("a bug"), ConflictError("another one was faster")]

    async def fail():
        if faults:
            passage._stop_at = passage.count + 5
            raise faults.pop()

    passage = Passage(store, 2, after=False, act=fail)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(t.Totals(passage).follow)
            while (found := await t.read_status(store)) is None or not found.is_whole or found.uncounted:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert (await counted(store), faults) == (await fold(store), [])


async def test_a_run_that_is_executed_is_counted(store):
    """Up to its newest event, and once; it is no task yet."""
    may_end, has_begun = anyio.Event(), anyio.Event()

    @tool(read_only=True)
    async def work() -> str:
        """Work."""
        has_begun.set()
        await may_end.wait()
        return "done"

    works = say("", call("work"), usage=Usage(output_tokens=3))
    worker = Agent(Priced(works, say("x", usage=Usage(output_tokens=1))), name="w", tools=[work], store=store)
    totals = t.Totals(store)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run, "x")
        await has_begun.wait()
        await totals.catch_up()
        report, log = await read_costs(store), await read_measurements(store)
        assert (report.usd, report.runs) == (0.03, 1)
        assert summarize(log, -inf, log.find_end(await store.now())).tasks == 0
        may_end.set()
    await totals.catch_up()
    assert ((await read_costs(store)).usd, await counted(store)) == (0.04, await fold(store))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # that of the server
async def test_costs_over_http(store, monkeypatch):
    """Of all runs from the totals that a server with agents keeps; one without reads the newest, and says so."""
    monkeypatch.setattr(administration, "MAX_SCANNED", 2)
    await fill(store, 3)
    for tenant, runs in {"": 3, "acme": 2}.items():
        expected = await read_costs(store, where=Filter(tenant=tenant), agents=["shop", "parent"])
        caller = {"headers": named("eve", tenant, "approve")}
        async with serving(store=store) as client:
            partial = (await client.get("/v1/costs", **caller)).json()
            if not tenant:
                assert (partial["is_whole"], partial["total"]["runs"], partial["forecast"]) == (False, 2, None)
        async with serving(build(store), build(store).with_(name="parent")) as client:
            whole = {"runs": 0}
            with anyio.fail_after(60):
                while whole["runs"] < runs:  # the first count begins with the server
                    found = (await client.get("/v1/costs", **caller)).json()
                    whole = found["total"]
            assert (found["is_whole"], found["is_from_totals"], whole["usd"]) == (
                True,
                True,
                pytest.approx(expected.usd),
            )
            assert (found["forecast"], found["forecast_gap"]) == (None, "the costs are of less than a day")


async def test_evaluations_are_kept_apart(store):
    """Their costs are in a row of their own, and metrics leave them out unless they are asked for."""
    await build(store).run("production", user="ann")
    await build(store).run("a case", user="ann", purpose="eval")
    await t.Totals(store).catch_up()
    report = await read_costs(store, by="agent")
    assert report.is_from_totals
    assert {row.name: row.runs for row in report.rows} == {"shop": 1, "eval": 1}

    async def count_tasks(purpose):
        log = await read_measurements(store, purpose=purpose)
        return summarize(log, -inf, await store.now()).tasks

    assert [await count_tasks(each) for each in ("", "eval", None)] == [1, 1, 2]


async def test_alerts_are_judged_until_now(store):
    """Not until the next evaluation: a time of a firing is never to come, and ten minutes are ten."""
    until = await store.now() // 300 * 300 + 120.0  # in the middle of a step of 5 minutes
    for number in range(30):
        failed = StopReason.TIMEOUT if number else StopReason.COST_BUDGET
        await record(store, number, until - 100 + number, failed=failed)
    await t.Totals(store).catch_up()
    log = await read_measurements(store, step_s=t.SLOT_S)
    assert not [each for each in replay_alerts(log, until - 3_600, until) if each.alert == "error_rate"]
    assert not [each for each in replay_alerts(log, until - 3_600, until + 700) if each.alert == "error_rate"]
    [found] = [each for each in replay_alerts(log, until - 3_600, until + 800) if each.alert == "error_rate"]
    assert found.since == until + 780
    assert [(each.alert, each.since) for each in replay_alerts(log, until, until)] == [("over_cost_limit", until)]


async def test_a_journal_that_cannot_be_read_is_one(store, monkeypatch):
    """However often its run is released; a report names it, until it can be read."""
    _, lease = await store.create(record_task(1, await store.now()).header)
    await store.release(lease).wait()
    run_id, can_read, read = lease.run_id, [], store.read

    async def fail(name, after=0):
        if not can_read:
            raise CorruptError("line 1 is no JSON")
        return await read(name, after)

    monkeypatch.setattr(store, "read", fail)
    for _ in range(3):
        await t.Totals(store).catch_up()
        await store.add_feedback(run_id, str(await store.now()), Feedback(rating=2, at=await store.now()))
        assert ((await t.read_status(store)).unreadable, (await read_costs(store)).unreadable) == (1, 1)
    can_read.append(True)
    await t.Totals(store).catch_up()
    assert ((await t.read_status(store)).unreadable, (await read_costs(store)).unreadable) == (0, 0)
    assert await counted(store) == await fold(store)


async def test_a_cost_without_a_price_is_named(store):
    """An amount beside it is not the whole, and none is not nothing."""
    await build(store).run("priced")
    await Agent(ScriptedModel(say("hi", usage=Usage(output_tokens=7))), name="other", store=store).run("unpriced")
    await t.Totals(store).catch_up()
    log = await read_measurements(store)
    found = summarize(log, -inf, log.find_end(await store.now()))
    assert (found.unpriced_tokens, found.daily_cost_usd) == (7, pytest.approx(0.035))
    log = await read_measurements(store, agent="other")
    assert summarize(log, -inf, log.find_end(await store.now())).daily_cost_usd is None
