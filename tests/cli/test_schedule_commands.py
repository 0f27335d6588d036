"""`agentfsm schedule`, from the first command to the run that a worker has started."""

import anyio

from agentfsm.schedules.schedule import SCHEDULE_KIND
from agentfsm.stores import SQLiteStore

ADD = ("schedule", "add", "sums", "app:adder", "2 + 2", "--cron", "0 3 * * *", "--tz", "Europe/Vienna")


def change_record(here, name, change):
    """Replace fields of the record of a schedule by those that a function returns; return the fields before."""

    async def act():
        store = SQLiteStore(here.folder / ".agentfsm" / "runs.db")
        record = await store.read_record(SCHEDULE_KIND, name)
        value = {**record.value, **change(record.value)}
        await store.write_record(SCHEDULE_KIND, name, value, revision=record.revision)
        await store.aclose()
        return record.value

    return anyio.run(act)


def backdate(here, name, seconds):
    """Let a schedule look as if no worker had been there for a while."""
    change_record(here, name, lambda value: {"done_until": value["done_until"] - seconds})


def test_a_schedule_from_the_command_line(here):
    """It is added, shown, paused, resumed and removed; a worker starts what is due."""
    line = here(*ADD, "--missed", "all", "--user", "ann", "--metadata", "team=red")
    assert "added; any worker of the agent starts the runs: agentfsm worker app:adder" in here.err
    assert line.startswith("sums  adder  0 3 * * * Europe/Vienna  next 20")
    assert line.endswith(("T03:00+01:00  missed: all\n", "T03:00+02:00  missed: all\n"))
    assert here("schedule", "list") == line
    [shown] = here.json("schedule", "list")["schedules"]
    assert (shown["name"], shown["target"], shown["user"], shown["metadata"]) == (
        "sums",
        "app:adder",
        "ann",
        {"team": "red"},
    )
    assert len(here("schedule", "next", "sums", "--count", "3").splitlines()) == 3
    assert here.json("schedule", "next", "sums")["next"][0] == shown["next"]
    assert here("schedule", "pause", "sums") == "paused the schedule sums\n"
    assert "  paused  " in here("schedule", "list")
    assert here.json("schedule", "resume", "sums") == {"resumed": "sums"}
    backdate(here, "sums", 3.5 * 86_400)
    found = here.json("worker", "app:adder", "--until-idle")
    assert found["runs"]["done"] in (3, 4)
    assert here("schedule", "remove", "sums") == "removed the schedule sums\n"
    assert here("schedule", "list") == ""
    assert "no schedules" in here.err
    here("schedule", "remove", "sums", code=2)
    assert "there is no schedule 'sums': `agentfsm schedule list`" in here.err


def test_a_span_of_time_is_backfilled(here):
    """By the agent that the schedule names; a second time, all runs exist."""
    here(*ADD)
    span = ("schedule", "backfill", "sums", "--from", "2026-03-28", "--to", "2026-03-30")
    assert here(*span).splitlines() == ["sums:2026-03-28T02:00Z", "sums:2026-03-29T01:00Z"]
    assert "created 2 runs; 0 runs existed already" in here.err
    assert here.json(*span, "--agent", "app:adder") == {
        "created": [],
        "existing": ["sums:2026-03-28T02:00Z", "sums:2026-03-29T01:00Z"],
        "taken": [],
    }
    here("schedule", "backfill", "sums", "--from", "yesterday", "--to", "2026-03-30", code=2)
    assert "'yesterday' is not a valid time" in here.err


def test_mistakes_are_named(here):
    """The expression, the zone, and a name that is taken."""
    here("schedule", "add", "sums", "app:adder", "2 + 2", "--cron", "0 3 * *", code=2)
    assert "give five fields" in here.err
    here(*ADD[:-1], "Europe/Wien", code=2)
    assert "did you mean" in here.err
    here(*ADD)
    here(*ADD)
    here(*ADD[:4], "3 + 3", *ADD[5:], code=1)
    assert "there is another schedule 'sums': replace it" in here.err
    here(*ADD[:4], "3 + 3", *ADD[5:], "--replace")


def test_a_schedule_is_shown_with_its_conflicts(here):
    """The definition, and the newest time without its run; a record without conflicts is as version 0.2 reads it."""
    here(*ADD, "--user", "ann", "--tenant", "acme")
    lines = here("schedule", "show", "sums").splitlines()
    assert lines[1:] == ["prompt: 2 + 2", "for: user ann, tenant acme"]

    conflicts = {"conflicts": 2, "last_conflict": "sums:2026-11-28T02:00Z"}
    assert not conflicts.keys() & change_record(here, "sums", lambda _: conflicts).keys()
    shown = here("schedule", "show", "sums").splitlines()
    assert shown[:-1] == lines
    assert "2 times got no run" in shown[-1]
    assert here.json("schedule", "show", "sums")["last_conflict"] == "sums:2026-11-28T02:00Z"
