"""The times of a schedule, also when the clocks change."""

from __future__ import annotations

from datetime import datetime
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfsm import MisuseError
from agentfsm.schedules.cron_times import CronTimes

VIENNA = "Europe/Vienna"


def seconds(text):
    return datetime.fromisoformat(text).timestamp()


def list_times(cron, tz, after, count):
    """The next times, as texts with their offset."""
    times = CronTimes.parse(cron, tz)
    return [times.localise(at).isoformat(timespec="minutes") for at in islice(times.iterate(seconds(after)), count)]


@pytest.mark.parametrize(
    ("cron", "after", "wanted"),
    [
        # 2026-03-29: 02:00 +01:00 is followed by 03:00 +02:00.
        ("30 2 * * *", "2026-03-28T02:30+01:00", ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]),
        ("0,30 2 * * *", "2026-03-29T00:00+01:00", ["2026-03-29T03:00+02:00", "2026-03-30T02:00+02:00"]),
        ("*/30 * * * *", "2026-03-29T01:00+01:00", ["2026-03-29T01:30+01:00", "2026-03-29T03:00+02:00"]),
        ("*/30 2 * * *", "2026-03-29T00:00+01:00", ["2026-03-30T02:00+02:00", "2026-03-30T02:30+02:00"]),
        # 2026-10-25: 03:00 +02:00 is followed by 02:00 +01:00.
        ("30 2 * * *", "2026-10-25T02:00+02:00", ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
        ("30 2 * * *", "2026-10-25T02:10+01:00", ["2026-10-26T02:30+01:00", "2026-10-27T02:30+01:00"]),
        ("*/30 2 * * *", "2026-10-25T02:00+02:00", ["2026-10-25T02:30+02:00", "2026-10-25T02:00+01:00"]),
        ("0 3 * * *", "2026-10-24T12:00+02:00", ["2026-10-25T03:00+01:00", "2026-10-26T03:00+01:00"]),
        ("0 9 * * MON-FRI", "2026-11-27T09:00+01:00", ["2026-11-30T09:00+01:00", "2026-12-01T09:00+01:00"]),
        ("0 0 29 2 *", "2026-01-01T00:00+01:00", ["2028-02-29T00:00+01:00", "2032-02-29T00:00+01:00"]),
    ],
)
def test_the_times_follow_the_clocks_of_the_zone(cron, after, wanted):
    """A time in the gap is moved to its end, and one that comes twice is taken once; intervals go on."""
    assert list_times(cron, VIENNA, after, 2) == wanted


@pytest.mark.parametrize(
    ("cron", "tz", "problem"),
    [
        ("0 3 * *", "UTC", "five fields"),
        ("0 0 3 * * *", "UTC", "five fields"),
        ("@daily", "UTC", "five fields"),
        (None, "UTC", "five fields"),
        ("61 3 * * *", "UTC", "bad minute"),
        ("0 3 * * MOO", "UTC", "bad day-of-week"),
        ("0 3 30 2 *", "UTC", "bad day-of-month"),
        ("0 3 * * *", "Europe/Wien", "did you mean 'Europe/"),
        ("0 3 * * *", "", "give a name"),
        ("0 3 * * *", "../etc/passwd", "no time zone"),
        ("0 3 * * *", "Europe", "no time zone"),
        ("0 3 * * *", None, "no time zone"),
        ("0 3 * * *", "+01:00", "no time zone"),
    ],
)
def test_invalid_expressions_and_zones_are_refused(cron, tz, problem):
    with pytest.raises(MisuseError, match=problem):
        CronTimes.parse(cron, tz)


CRONS = ["*/7 * * * *", "30 2 * * *", "0,30 1-3 * * *", "15 */2 * * *", "0 0 1 * *", "*/20 2 * * SUN", "5 4 L * *"]


@settings(max_examples=60, deadline=None)
@given(
    cron=st.sampled_from(CRONS),
    tz=st.sampled_from([VIENNA, "UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]),
    start=st.integers(1_774_000_000, 1_796_000_000),
    steps=st.lists(st.integers(1, 90_000), min_size=1, max_size=6),
)
def test_the_times_do_not_depend_on_where_the_list_begins(cron, tz, start, steps):
    """So two workers that look at different moments find the same times."""
    times = CronTimes.parse(cron, tz)
    end = start + sum(steps)
    whole = times.list_between(start, end, 10_000)
    assert whole == sorted(set(whole))
    assert all(start <= at < end and at % 60 == 0 for at in whole)
    parts, at = [], start
    for step in steps:
        parts += times.list_between(at, at + step, 10_000)
        at += step
    assert parts == whole
    newest = times.list_newest(start - 1, end - 1, 3)
    assert newest == whole[-3:]
