"""Limits: finite by default, refused when they are not, and spent with the number reached."""

import math

import attrs
import pytest
from sample_runs import observing

from agentfsm.core.errors import MisuseError
from agentfsm.core.limits import OUT_OF_BUDGET, Limits, StopReason
from agentfsm.core.messages import Usage
from agentfsm.core.run import Fault

FIELDS = [field.name for field in attrs.fields(Limits)]
LIMITS = Limits(turns=5, tokens=1_000, seconds=60.0, usd=0.5, errors=3)


def run_with(**changes):
    return attrs.evolve(observing(), **changes)


def test_every_default_is_finite():
    """Nothing is unlimited unless asked for, and nothing can be; only the price of an answer has no default."""
    for field in attrs.fields(Limits):
        assert field.name == "usd" or 0 < field.default < math.inf
    assert Limits().usd is None


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


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"turn": 5}, StopReason.MAX_TURNS, "5 of 5 turns"),
        ({"turn": 7}, StopReason.MAX_TURNS, "7 of 5 turns"),
        ({"usage": Usage(input_tokens=900, output_tokens=134)}, StopReason.TOKEN_BUDGET, "1,034 of 1,000 tokens"),
        ({"usage": Usage(input_tokens=1_000)}, StopReason.TOKEN_BUDGET, "1,000 of 1,000 tokens"),
        ({"usage": Usage(cost_usd=0.5)}, StopReason.COST_BUDGET, "0.5 of 0.5 US dollars"),
        ({"duration_s": 60.0}, StopReason.TIMEOUT, "60.0 of 60.0 seconds"),
        ({"duration_s": 61.25}, StopReason.TIMEOUT, "61.2 of 60.0 seconds"),
        ({"consecutive_errors": 3}, StopReason.TOO_MANY_ERRORS, "3 error turns in a row"),
    ],
)
def test_a_spent_limit_says_what_was_reached(changes, reason, words):
    """Each limit stops with its own reason, and the message carries the number reached."""
    assert LIMITS.spent(run_with(**changes))[0] is reason
    assert words in LIMITS.spent(run_with(**changes))[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"turn": 4, "duration_s": 59.9, "consecutive_errors": 2},
        {"usage": Usage(input_tokens=999, cost_usd=0.49)},
        {"usage": Usage(input_tokens=999, cost_usd=None)},
    ],
)
def test_below_every_limit_nothing_is_spent(changes):
    """Just below all limits a run may go on, also where no price is known."""
    assert LIMITS.spent(run_with(**changes)) is None


def test_money_is_unlimited_unless_said():
    """Without a limit in dollars no cost stops a run."""
    assert Limits().spent(run_with(usage=Usage(cost_usd=1e6))) is None


def test_the_last_error_is_told_in_short():
    """What stops a run for its errors quotes the last one, cut to 300 characters."""
    faults = (Fault(turn=1, source="model", message="first"), Fault(turn=2, source="model", message="x" * 1_000))
    _, message = LIMITS.spent(run_with(consecutive_errors=3, faults=faults))
    assert message.endswith("; the last: " + "x" * 300)
    assert "first" not in message


def test_reasons_of_a_spent_budget():
    """A larger limit would have prevented exactly these ends."""
    assert {"max_turns", "token_budget", "cost_budget", "timeout"} == OUT_OF_BUDGET
