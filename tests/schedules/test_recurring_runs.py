"""Schedules: each time gets its run, once, whatever happens to the workers."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import attrs
import pytest

from agentfsm import Agent, ConflictError, CorruptError, MisuseError
from agentfsm.flow import Flow, step
from agentfsm.ports import Store
from agentfsm.releases import Rollout
from agentfsm.schedules import Schedules, due_runs, schedule_client
from agentfsm.schedules.schedule import SCHEDULE_KIND
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import FunctionModel, VirtualClock, run_virtual
from tests.support.gateway_client import named, serving

HOUR_S = 3_600.0
# Virtual time begins at 2027-01-15 08:00 UTC.
DAY = "2027-01-15"


def build_agent(store, **options):
    return Agent(FunctionModel(lambda request: request.messages[0].text), name="reporter", store=store, **options)


def in_time(main):
    """Call `main(agent, schedules)` in virtual time."""

    async def whole():
        clock = VirtualClock()
        agent = build_agent(MemoryStore(clock=clock), clock=clock)
        await main(agent, Schedules(agent.store))

    run_virtual(whole)


async def work_for(agent, seconds, *, workers=1):
    """Let workers work for a while."""
    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as group:
            for _ in range(workers):
                group.start_soon(agent.worker)


async def list_times(agent):
    """The times of the runs, as in their ids, oldest first."""
    return sorted(run.id.partition(":")[2] for run in await agent.runs.list())


def list_warnings(caplog):
    return [line.message for line in caplog.records if line.levelno >= logging.WARNING]


@pytest.mark.parametrize("workers", [1, 3])
def test_each_time_gets_one_run(workers):
    """However many workers there are, and the run knows its time."""

    async def main(agent, schedules):
        await schedules.add(
            agent,
            "news",
            cron="*/15 * * * *",
            tz="Europe/Vienna",
            prompt="News of {logical_date}",
            user="ann",
            roles=["reader"],
            tenant="acme",
            metadata={"team": "red"},
        )
        await work_for(agent, HOUR_S + 1, workers=workers)
        assert await list_times(agent) == [f"{DAY}T08:15Z", f"{DAY}T08:30Z", f"{DAY}T08:45Z", f"{DAY}T09:00Z"]
        run = await agent.load(f"news:{DAY}T09:00Z")
        assert run.output == f"News of {DAY}T10:00+01:00"
        assert run.created_at - datetime.fromisoformat(f"{DAY}T09:00Z").timestamp() < 1
        assert run.header.metadata == {"team": "red", "schedule": "news", "logical_date": f"{DAY}T10:00+01:00"}
        assert (run.header.user, run.header.roles, run.header.tenant) == ("ann", ("reader",), "acme")

    in_time(main)


@pytest.mark.parametrize(
    ("missed", "wanted"),
    [
        ("skip", []),
        ("latest", [f"{DAY}T12:00Z"]),
        ("all", [f"{DAY}T{hour:02}:00Z" for hour in (9, 10, 11, 12)]),
    ],
)
def test_missed_times_are_made_up_for_as_the_schedule_says(missed, wanted):
    """After the workers were away; the next time is on time."""

    async def main(agent, schedules):
        await schedules.add(agent, "hourly", cron="0 * * * *", prompt="Go.", missed=missed)
        await anyio.sleep(4.5 * HOUR_S)
        await agent.worker(until_idle=True)
        assert await list_times(agent) == wanted
        await work_for(agent, HOUR_S)
        assert await list_times(agent) == [*wanted, f"{DAY}T13:00Z"]
        assert all(run.state == "done" for run in await agent.runs.list())

    in_time(main)


def test_a_worker_that_is_a_little_late_skips_nothing():
    """Less than a minute counts as on time."""

    async def main(agent, schedules):
        await schedules.add(agent, "hourly", cron="0 * * * *", prompt="Go.", missed="skip")
        await anyio.sleep(HOUR_S + 50)
        await agent.worker(until_idle=True)
        assert await list_times(agent) == [f"{DAY}T09:00Z"]

    in_time(main)


def test_the_times_that_are_made_up_for_are_bounded(monkeypatch, caplog):
    """The newest ones, in portions between which runs are executed; the others are reported."""
    monkeypatch.setattr(due_runs, "MAX_MISSED", 50)

    async def main(agent, schedules):
        await schedules.add(agent, "minutely", cron="* * * * *", prompt="Go.", missed="all")
        await anyio.sleep(100 * 60 + 1)
        await agent.worker(until_idle=True)
        found = await list_times(agent)
        assert (len(found), found[0], found[-1]) == (50, f"{DAY}T08:51Z", f"{DAY}T09:40Z")

    in_time(main)
    assert list_warnings(caplog) == [
        "schedule 'minutely': no runs for the missed times before 2027-01-15 08:51:00+00:00, which are too many"
    ]


def test_a_change_is_noticed_while_workers_work():
    """A schedule is added, paused, resumed, replaced and removed; times during the pause are not made up for."""

    async def main(agent, schedules):
        async def change():
            await anyio.sleep(30)
            await schedules.add(agent, "s", cron="*/10 * * * *", prompt="Go.")
            await anyio.sleep(15 * 60)  # 08:15
            await schedules.pause("s")
            assert (await schedules.get("s")).paused
            await anyio.sleep(20 * 60)  # 08:35
            await schedules.resume("s")
            await anyio.sleep(10 * 60)  # 08:45
            await schedules.add(agent, "s", cron="5 * * * *", prompt="Go.", replace=True)
            await anyio.sleep(30 * 60)  # 09:15
            await schedules.remove("s")

        async with anyio.create_task_group() as group:
            group.start_soon(change)
            await work_for(agent, 3 * HOUR_S)
        assert await list_times(agent) == [f"{DAY}T08:10Z", f"{DAY}T08:40Z", f"{DAY}T09:05Z"]
        for ask in (schedules.get, schedules.pause, schedules.resume, schedules.remove, schedules.next_times):
            with pytest.raises(MisuseError, match="no schedule 's'"):
                await ask("s")

    in_time(main)


def test_a_broken_schedule_stops_no_other(caplog):
    """Neither a damaged one, nor one that the agent refuses, nor one of another agent. Each is reported once."""

    async def main(agent, schedules):
        await schedules.add(agent, "b", cron="* * * * *", prompt="Go.")
        good = (await schedules.get("b")).build_record()
        for key, value in {
            "a1": {**good, "from_the_future": 1},
            "a2": {**good, "cron": "never"},
            "a3": {**good, "prompt": ""},
            "a4": {**good, "agent": "other"},
            "a5": ["no object"],
        }.items():
            await agent.store.write_record(SCHEDULE_KIND, key, value, revision=0)
        await work_for(agent, 150)
        assert await list_times(agent) == [f"{DAY}T08:01Z", f"{DAY}T08:02Z"]
        with pytest.raises(CorruptError, match="'a1' cannot be read"):
            await schedules.list()

    in_time(main)
    found = list_warnings(caplog)
    assert len(found) == 3
    for line, problem in zip(found, ["from_the_future", "cron='never'", "empty"], strict=True):
        assert problem in line


def test_an_error_of_the_users_code_stops_no_worker(caplog):
    """For example of a function that makes the instructions."""

    async def main(agent, schedules):
        def instruct(header):
            if header.id.startswith("s:"):
                raise ValueError("no instructions today")
            return "Be brief."

        await schedules.add(agent, "s", cron="* * * * *", prompt="Go.")
        broken = agent.with_(instructions=instruct)
        await agent.submit("Go.", id="other")
        await work_for(broken, 70)
        assert (await agent.load("other")).is_over
        assert [run.id for run in await agent.runs.list()] == ["other"]

    in_time(main)
    assert any("no instructions today" in line for line in list_warnings(caplog))


def test_without_the_extra_schedules_rest(monkeypatch, caplog):
    """The error and the warning say what to install; the worker executes other runs."""

    async def main(agent, schedules):
        await schedules.add(agent, "s", cron="* * * * *", prompt="Go.")
        monkeypatch.setitem(sys.modules, "cronsim", None)
        monkeypatch.delitem(sys.modules, "agentfsm.schedules.cron_times")
        with pytest.raises(MisuseError, match=r"pip install 'agentfsm\[schedule\]'"):
            await schedules.add(agent, "t", cron="* * * * *", prompt="Go.")
        await agent.submit("Go.", id="other")
        await work_for(agent, 70)
        assert [(run.id, run.state) for run in await agent.runs.list()] == [("other", "done")]

    in_time(main)
    assert len(list_warnings(caplog)) == 1


def test_a_worker_without_schedules_looks_rarely(monkeypatch):
    """Once in ten seconds, whatever its polls; and at the very time of a run."""
    looks = Counter()

    class Counting(MemoryStore):
        async def list_records(self, kind, **options):
            looks[kind] += 1
            return await super().list_records(kind, **options)

    async def whole():
        clock = VirtualClock()
        agent = build_agent(Counting(clock=clock), clock=clock)
        await work_for(agent, 59)
        assert looks == {SCHEDULE_KIND: 6}

    run_virtual(whole)


def test_a_store_without_records_has_no_schedules(caplog):
    """Its workers work."""

    class Plain(MemoryStore):
        list_records = Store.list_records

    async def whole():
        clock = VirtualClock()
        agent = build_agent(Plain(clock=clock), clock=clock)
        await agent.submit("Go.", id="r")
        await work_for(agent, 60)
        assert (await agent.load("r")).is_over

    run_virtual(whole)
    assert list_warnings(caplog) == []


@step
async def extract(day: str) -> str:
    """Extract."""
    return f"rows of {day[:10]}"


def test_a_flow_takes_the_date_as_an_input():
    """Its inputs are checked when the schedule is added."""

    async def whole():
        clock = VirtualClock()
        flow = Flow([extract], name="etl", store=MemoryStore(clock=clock), clock=clock)
        schedules = Schedules(flow.store)
        with pytest.raises(MisuseError, match="needs the input 'day'"):
            await schedules.add(flow, "daily", cron="0 9 * * *", prompt={})
        await schedules.add(flow, "daily", cron="0 9 * * *", prompt={"day": "{logical_date}"})
        await work_for(flow, HOUR_S + 1)
        run = await flow.load(f"daily:{DAY}T09:00Z")
        assert flow.results(run) == {"extract": f"rows of {DAY}"}

    run_virtual(whole)


# Clients.


@pytest.fixture
async def store(tmp_path):
    store = SQLiteStore(tmp_path / "runs.db")
    yield store
    await store.aclose()


async def test_adding_twice_is_adding_once(store):
    """The same definition changes nothing, also after a pause; another one is refused, unless it replaces."""
    agent, schedules = build_agent(store), Schedules(store)
    first = await schedules.add(agent, "s", cron="0 3 * * *", prompt="Go.", metadata={"a": [1]}, roles=["r"])
    await schedules.pause("s")
    again = await schedules.add(agent, "s", cron="0 3 * * *", prompt="Go.", metadata={"a": [1]}, roles=["r"])
    assert again == attrs.evolve(first, paused=True, done_until=again.done_until)
    with pytest.raises(ConflictError, match="another schedule 's': replace it"):
        await schedules.add(agent, "s", cron="0 4 * * *", prompt="Go.")
    await schedules.add(agent, "s", cron="0 4 * * *", prompt="Go.", replace=True)
    await schedules.add(agent.with_(name="clerk"), "t", cron="0 5 * * *", prompt="Go.")
    assert [(each.name, each.cron, each.paused) for each in await schedules.list()] == [
        ("s", "0 4 * * *", False),
        ("t", "0 5 * * *", False),
    ]
    assert [each.name for each in await schedules.list("clerk")] == ["t"]
    [first, second] = await schedules.next_times("s", 2)
    assert (first.hour, first.minute, second - first) == (4, 0, timedelta(days=1))


@pytest.mark.parametrize("change", ["replace", "pause", "pause and replace"])
def test_a_change_loses_no_time_that_was_due(change):
    """The runs of a pause are not made up for; one that was due before it is started, once, after the resumption."""

    async def main(agent, schedules):
        await schedules.add(agent, "s", cron="0 * * * *", prompt="Go.")
        await anyio.sleep(HOUR_S + 10)  # no worker was there at 09:00
        if "pause" in change:
            await schedules.pause("s")
            await anyio.sleep(2 * HOUR_S)
            await agent.worker(until_idle=True)
            assert await list_times(agent) == []
        if "replace" in change:
            await schedules.add(agent, "s", cron="30 * * * *", prompt="Go on.", replace=True)
        else:
            await schedules.resume("s")
        for _ in range(2):
            await agent.worker(until_idle=True)
            assert await list_times(agent) == [f"{DAY}T09:00Z"]
        assert (await schedules.get("s")).due == ()

    in_time(main)


def test_the_workers_of_a_roll_out_choose_the_release_of_each_run():
    """A schedule is added with the base; its runs have an arm and a release like all others, also of a backfill."""

    async def main(base, schedules):
        rollout = Rollout("r", {"old": base.with_(version="1"), "new": base.with_(version="2")})
        await rollout.start({"old": 0, "new": 100}, by="ann", reason="a test")
        with pytest.raises(MisuseError, match=r"of a roll-out rollout\.base, since its workers choose the release"):
            await schedules.add(rollout, "s", cron="0 * * * *", prompt="Go.")
        await schedules.add(rollout.base, "s", cron="0 * * * *", prompt="Go.")
        await anyio.sleep(2 * HOUR_S)
        await rollout.worker(until_idle=True)
        span = local(f"{DAY}T09:00"), local(f"{DAY}T10:00")
        created = (await schedules.backfill(rollout.base, "s", *span, choose=rollout.choose)).created
        headers = [await base.runs.header(each) for each in (f"s:{DAY}T10:00Z", *created)]
        assert [(each.release, dict(each.arms)) for each in headers] == [("2", {"r": "new"})] * 2
        other = rollout.with_(store=MemoryStore())
        with pytest.raises(MisuseError, match="the roll-out has another store than the schedule"):
            await schedules.backfill(rollout.base, "s", *span, choose=other.choose)

    in_time(main)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "a:b"}, "name"),
        ({"name": "n" * 101}, "name"),
        ({"cron": "0 3 * *"}, "five fields"),
        ({"tz": "Mars"}, "tz='Mars'"),
        ({"missed": "none"}, "missed"),
        ({"prompt": " "}, "empty"),
        ({"roles": "admin"}, "roles"),
        ({"metadata": {"a": object()}}, "metadata"),
    ],
)
async def test_an_invalid_schedule_is_refused(changes, problem):
    """With the argument that is wrong; nothing is stored."""
    store = MemoryStore()
    with pytest.raises(MisuseError, match=problem):
        await Schedules(store).add(build_agent(store), **{"name": "s", "cron": "0 3 * * *", "prompt": "Go.", **changes})
    assert await store.list_records(SCHEDULE_KIND) == ()
    with pytest.raises(MisuseError, match="a store"):
        Schedules("runs.db")


def local(text):
    """A date without an offset: in the zone of the schedule."""
    return datetime.fromisoformat(text)


async def test_a_backfill_can_be_repeated(store):
    """It creates what is missing, in order, and executes nothing itself; the end is not included."""
    agent, schedules = build_agent(store), Schedules(store)
    await schedules.add(agent, "daily", cron="0 3 * * *", tz="Europe/Vienna", prompt="Report of {logical_date}.")
    first = await schedules.backfill(agent, "daily", local("2026-03-28"), local("2026-03-30T03:00"))
    assert first.created == ("daily:2026-03-28T02:00Z", "daily:2026-03-29T01:00Z")
    assert first.existing == ()
    again = await schedules.backfill(agent, "daily", datetime(2026, 3, 28, 2, tzinfo=UTC), local("2026-03-30T03:00:01"))
    assert (again.created, again.existing) == (("daily:2026-03-30T01:00Z",), first.created)
    assert [run.state for run in await agent.runs.list()] == ["observe"] * 3
    await schedules.add(agent, "daily", cron="0 3 * * *", tz="Europe/Vienna", prompt="Another.", replace=True)
    third = await schedules.backfill(agent, "daily", local("2026-03-28"), local("2026-03-29"))
    assert third.existing == ("daily:2026-03-28T02:00Z",)
    await agent.worker(until_idle=True)
    assert (await agent.load("daily:2026-03-28T02:00Z")).output == "Report of 2026-03-28T03:00+01:00."


async def test_a_backfill_is_bounded(monkeypatch):
    """By the number of its runs, and by now; the error says how to go on."""
    monkeypatch.setattr(schedule_client, "MAX_BACKFILL", 3)
    store = MemoryStore()
    agent, schedules = build_agent(store), Schedules(store)
    await schedules.add(agent, "s", cron="0 * * * *", prompt="Go.")
    start = datetime(2026, 1, 1, tzinfo=UTC)
    with pytest.raises(MisuseError, match=r"more than 3 times .* the first one up to 2026-01-01T03:00\+00:00"):
        await schedules.backfill(agent, "s", start, start + timedelta(hours=4))
    assert len((await schedules.backfill(agent, "s", start, start + timedelta(hours=3))).created) == 3
    for wrong, problem in (
        ((start, start), "is empty"),
        ((start, datetime.now(UTC) + timedelta(hours=1)), "in the future"),
        ((start, "2026-01-02"), "give a datetime"),
    ):
        with pytest.raises(MisuseError, match=problem):
            await schedules.backfill(agent, "s", *wrong)
    with pytest.raises(MisuseError, match="of the agent 'reporter', not of 'other'"):
        await schedules.backfill(agent.with_(name="other"), "s", start, start + timedelta(hours=1))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # that of uvicorn
async def test_a_server_starts_what_is_due(store):
    """The worker inside of it is one like the others."""
    agent, schedules = build_agent(store), Schedules(store)
    added = await schedules.add(agent, "yearly", cron="0 0 1 1 *", prompt="Go.", user="ann")
    await backdate(store, "yearly", added.done_until - 400 * 86_400)
    async with serving(agent) as http:
        while not (found := (await http.get("/v1/runs", headers=named("ann"))).json()["runs"]):  # noqa: ASYNC110
            await anyio.sleep(0.01)
    assert found[0]["id"].startswith("yearly:20")


# Several processes.


async def backdate(store, name, done_until):
    """Let a schedule look as if no worker had been there since then."""
    record = await store.read_record(SCHEDULE_KIND, name)
    value = {**record.value, "done_until": done_until}
    await store.write_record(SCHEDULE_KIND, name, value, revision=record.revision)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_worker_that_is_killed_in_between_starts_nothing_twice(tmp_path):
    """Killed after the creation of a run, and before the record of it, the next worker finds the run."""
    path = tmp_path / "runs.db"
    async with build_agent(SQLiteStore(path)) as agent:
        schedules = Schedules(agent.store)
        added = await schedules.add(agent, "yearly", cron="0 0 1 1 *", prompt="Go.")
        await backdate(agent.store, "yearly", added.done_until - 400 * 86_400)
        killed = Path(__file__).with_name("killed_worker.py")
        process = await anyio.run_process([sys.executable, killed, path], check=False, stderr=subprocess.PIPE)
        assert process.returncode == -signal.SIGKILL, process.stderr
        [before] = await agent.runs.list()
        assert (await schedules.get("yearly")).done_until < added.done_until - 399 * 86_400
        await agent.worker(until_idle=True)
        [after] = await agent.runs.list()
        assert (after.id, after.created_at) == (before.id, before.created_at)
        assert (await schedules.get("yearly")).done_until > added.done_until - 399 * 86_400


async def test_two_store_objects_create_each_run_once(tmp_path):
    """Two workers that make up for the same 60 times, as two processes would."""
    seen = Counter()

    def answer(request):
        seen[request.messages[0].text] += 1
        return "done"

    agents = [Agent(FunctionModel(answer), name="reporter", store=SQLiteStore(tmp_path / "runs.db")) for _ in range(2)]
    schedules = Schedules(agents[0].store)
    added = await schedules.add(agents[0], "s", cron="0 0 1 * *", prompt="{logical_date}", missed="all")
    await backdate(agents[0].store, "s", added.done_until - 5 * 365.25 * 86_400)
    async with anyio.create_task_group() as group:
        for agent in agents:
            group.start_soon(lambda agent=agent: agent.worker(until_idle=True))
    assert set(seen.values()) == {1}
    assert 59 <= len(seen) <= 61
    for agent in agents:
        await agent.aclose()
