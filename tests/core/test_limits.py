"""Limits: finite by default, refused when they are not, and spent with the number reached."""

import math

import attrs
import pytest

from agentfsm import Limits, MisuseError, StopReason, Usage
from agentfsm.core.calls import FailureRecord
from agentfsm.core.limits import BUDGET_REASONS
from agentfsm.core.stops import find_near_limits, find_reached_limit
from tests.support.sample_runs import header, observing

FIELDS = [field.name for field in attrs.fields(Limits)]
LIMITS = Limits(turns=5, tokens=1_000, seconds=60.0, usd=0.5, errors=3, tool_calls=7)


def run_with(**changes):
    return attrs.evolve(observing(), **changes)


def test_every_default_is_finite():
    """Nothing is unlimited unless asked for, and nothing can be; only the price of an answer has no default."""
    for field in attrs.fields(Limits):
        assert field.name in {"usd", "model_retries"} or 0 < field.default < math.inf
    assert Limits().usd is None


def test_a_run_that_works_for_another_retries_once():
    """Unless the limits say how often, which then holds for both."""
    own, below = run_with(), run_with(header=header(parent="r0"))
    assert [Limits().max_model_retries(run.header) for run in (own, below)] == [3, 1]
    assert [Limits().fails_fast(run.header) for run in (own, below)] == [False, True]
    assert [Limits(model_retries=2).max_model_retries(run.header) for run in (own, below)] == [2, 2]
    assert not Limits(model_retries=2).fails_fast(below.header)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [-1, math.inf, -math.inf, math.nan])
def test_bad_values_are_refused(name, value):
    """Negative, infinite and undefined limits are a misuse that names field and value."""
    with pytest.raises(MisuseError, match=f"{name}={value!r}"):
        Limits(**{name: value})


MAY_BE_ZERO = {"model_retries", "retries_per_tool", "retries_per_run", "depth", "answer_retries"}


@pytest.mark.parametrize("name", sorted(set(FIELDS) - MAY_BE_ZERO))
def test_zero_is_refused(name):
    """A limit of nothing would stop a run before it began."""
    with pytest.raises(MisuseError, match=f"{name}=0"):
        Limits(**{name: 0})


@pytest.mark.parametrize("name", sorted(MAY_BE_ZERO))
def test_no_retries_is_a_choice(name):
    """Not to try a second time is sensible, and so is to have no agents below."""
    assert getattr(Limits(**{name: 0}), name) == 0


@pytest.mark.parametrize(
    "limits", [{"turns": "3"}, {"turns": None}, {"usd": "0.50"}, {"turns": True}, {"model_retries": [1]}]
)
def test_wrong_types_are_refused(limits):
    """A limit that is no number is a misuse like any other bad value."""
    with pytest.raises(MisuseError):
        Limits(**limits)


COUNTS = {field.name for field in attrs.fields(Limits) if field.type in {"int", "int | None"}}


@pytest.mark.parametrize("name", sorted(COUNTS))
@pytest.mark.parametrize("value", [2.5, 3.0])
def test_what_is_counted_is_whole(name, value):
    """Two and a half turns are a misuse, and so is a fraction that happens to be whole."""
    with pytest.raises(MisuseError, match=f"{name}={value}.*whole number"):
        Limits(**{name: value})


def test_the_counts_are_known():
    """No limit that counts something was forgotten."""
    assert (
        MAY_BE_ZERO | {"turns", "tokens", "errors", "tool_calls", "parallel", "crashes", "loop_turns", "loop_window"}
        == COUNTS
    )


@pytest.mark.parametrize("value", [1.01, 80, "0.8", True])
def test_a_share_is_one(value):
    """A warning can come at the limit itself at the latest."""
    with pytest.raises(MisuseError, match=r"warn_at=.*share"):
        Limits(warn_at=value)
    assert Limits(warn_at=1).warn_at == 1


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({}, ()),
        ({"turn": 3, "usage": Usage(input_tokens=799, cost_usd=0.39), "tool_call_count": 5, "duration_s": 47.9}, ()),
        ({"turn": 4}, (("turns", 4, 5),)),
        ({"usage": Usage(input_tokens=700, output_tokens=100)}, (("tokens", 800, 1_000),)),
        ({"usage": Usage(cost_usd=0.4)}, (("usd", 0.4, 0.5),)),
        ({"tool_call_count": 6}, (("tool_calls", 6, 7),)),
        ({"duration_s": 48.0}, (("seconds", 48.0, 60.0),)),
        ({"turn": 4, "duration_s": 50.0}, (("turns", 4, 5), ("seconds", 50.0, 60.0))),
    ],
)
def test_limits_that_are_near(changes, near):
    """From the share on, and not before, each limit is named with what was used of it."""
    assert find_near_limits(run_with(**changes), LIMITS) == near


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"turn": 5}, StopReason.MAX_TURNS, "5 of 5 turns"),
        ({"turn": 7}, StopReason.MAX_TURNS, "7 of 5 turns"),
        ({"usage": Usage(input_tokens=900, output_tokens=134)}, StopReason.TOKEN_BUDGET, "1,034 of 1,000 tokens"),
        ({"usage": Usage(input_tokens=1_000)}, StopReason.TOKEN_BUDGET, "1,000 of 1,000 tokens"),
        ({"usage": Usage(cost_usd=0.5)}, StopReason.COST_BUDGET, "$0.50 of $0.50 used"),
        ({"tool_call_count": 7}, StopReason.TOOL_BUDGET, "7 of 7 tool calls"),
        ({"duration_s": 60.0}, StopReason.TIMEOUT, "60.0 of 60.0 seconds"),
        ({"duration_s": 61.25}, StopReason.TIMEOUT, "61.2 of 60.0 seconds"),
        ({"consecutive_errors": 3}, StopReason.TOO_MANY_ERRORS, "3 error turns in a row"),
    ],
)
def test_a_spent_limit_says_what_was_reached(changes, reason, words):
    """Each limit stops with its own reason, and the message carries the number reached."""
    assert find_reached_limit(run_with(**changes), LIMITS)[0] is reason
    assert words in find_reached_limit(run_with(**changes), LIMITS)[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"turn": 4, "duration_s": 59.9, "consecutive_errors": 2, "tool_call_count": 6},
        {"usage": Usage(input_tokens=999, cost_usd=0.49)},
        {"usage": Usage(input_tokens=999, cost_usd=None)},
    ],
)
def test_below_every_limit_nothing_is_spent(changes):
    """Just below all limits a run may go on, also where no price is known."""
    assert find_reached_limit(run_with(**changes), LIMITS) is None


def test_one_error_turn_is_no_row():
    """It is enough where no more are allowed."""
    assert find_reached_limit(run_with(consecutive_errors=1), Limits(errors=1)) == (
        StopReason.TOO_MANY_ERRORS,
        "1 error turn",
    )


def test_money_is_unlimited_unless_said():
    """Without a limit in dollars no cost stops a run."""
    assert find_reached_limit(run_with(usage=Usage(cost_usd=1e6)), Limits()) is None


def test_the_last_error_is_told_in_short():
    """What stops a run for its errors quotes the last one, cut to 300 characters."""
    failures = (
        FailureRecord(turn=1, source="model", message="first"),
        FailureRecord(turn=2, source="model", message="x" * 1_000),
    )
    _, message = find_reached_limit(run_with(consecutive_errors=3, model_failures=failures), LIMITS)
    assert message.endswith("; the last: " + "x" * 300)
    assert "first" not in message


def test_reasons_of_a_spent_budget():
    """A larger limit would have prevented exactly these ends."""
    assert {"max_turns", "token_budget", "cost_budget", "tool_budget", "timeout"} == BUDGET_REASONS
