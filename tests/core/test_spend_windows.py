"""Spending limits: their calendar windows, and what is refused."""

from datetime import UTC, datetime

import pytest

from agentfsm import MisuseError, Spend
from agentfsm.core.header import Header


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def header(**fields):
    return Header(id="r", prompt=(), created_at=0.0, agent="shop", **fields)


@pytest.mark.parametrize(
    ("spend", "now", "start", "end"),
    [
        (Spend(per="day", usd=1), "2026-11-26 23:59", "2026-11-26", "2026-11-27 00:00 +00:00"),
        (Spend(per="day", usd=1, tz="Asia/Tokyo"), "2026-11-26 16:00", "2026-11-27", "2026-11-28 00:00 +09:00"),
        (Spend(per="day", usd=1, tz="Europe/Berlin"), "2026-03-29 10:00", "2026-03-29", "2026-03-30 00:00 +02:00"),
        (Spend(per="day", usd=1, tz="Europe/Berlin"), "2026-10-25 22:30", "2026-10-25", "2026-10-26 00:00 +01:00"),
        (Spend(per="month", usd=1), "2026-12-31 23:59", "2026-12", "2027-01-01 00:00 +00:00"),
        (Spend(per="month", usd=1, tz="America/New_York"), "2026-03-01 03:00", "2026-02", "2026-03-01 00:00 -05:00"),
    ],
)
def test_a_window_is_a_day_or_a_month_of_the_calendar(spend, now, start, end):
    """Of the named zone, also when its clocks change: not 24 hours from the start of a process."""
    window = spend.find_window(header(), at(now))
    assert (window.start, window.format_end()) == (start, end)
    assert at(now) < window.ends_at
    assert spend.find_window(header(), window.ends_at - 0.001) == window
    assert spend.find_window(header(), window.ends_at).start > window.start


def test_each_subject_has_a_window_of_its_own():
    """Users of different tenants do not share one, even if they have the same name or look alike in a key."""
    user, tenant = Spend(per="day", scope="user", usd=1), Spend(per="day", scope="tenant", usd=1)
    headers = [
        header(),
        header(user="ann"),
        header(user="ann", tenant="a"),
        header(user="a|ann"),
        header(user="a" * 999),
        header(user="\ud800", tenant="\udfff"),  # the journal has replacement characters in their place
    ]
    keys = {user.find_window(each, 0).key for each in headers}
    assert len(keys) == len(headers)
    assert max(map(len, keys)) <= 500
    assert user.find_window(headers[2], 0).describe() == "the user ann of the tenant a on 1970-01-01 (UTC)"
    assert user.find_window(headers[-1], 0) == user.find_window(header(user="\ufffd", tenant="\ufffd"), 0)
    assert user.find_window(headers[0], 0).describe() == "runs without a user on 1970-01-01 (UTC)"
    assert tenant.find_window(headers[1], 0).subject == ""
    month = Spend(per="month", usd=1).find_window(headers[1], 0)
    assert month.describe() == "the agent shop in 1970-01 (UTC)"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"per": "week", "usd": 1}, "'day' or 'month'"),
        ({"per": "day", "usd": 0}, "above 0"),
        ({"per": "day", "usd": 1, "scope": "team"}, "'agent', 'user' or 'tenant'"),
        ({"per": "day", "usd": 1, "tz": "Berlin"}, "'Europe/Berlin'"),
        ({"per": "day", "usd": 1, "tz": None}, "IANA"),
        ({"per": "day", "usd": 1, "warn_at": 80}, "0.8"),
    ],
)
def test_a_wrong_limit_is_refused(fields, text):
    """With what to write instead."""
    with pytest.raises(MisuseError, match=text):
        Spend(**fields)
