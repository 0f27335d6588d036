"""Rules of automatic roll-backs: what is bad, how sure they are, and how they are written."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import MisuseError
from agentfsm.releases import RollbackRule
from agentfsm.releases.rollback_rules import FALSE_ALARMS, RunOutcome, find_evidence


def outcome(failed=False, usd=0.01, seconds=1.0, rating=None):
    return RunOutcome(run_id="r", arm="new", failed=failed, usd=usd, seconds=seconds, rating=rating, created_at=0.0)


@pytest.mark.parametrize(
    ("text", "bad", "good"),
    [
        ("failures 5% after 20", outcome(failed=True), outcome()),
        ("cost>0.5 5% after 20", outcome(usd=0.51), outcome(usd=0.5)),
        ("time>30 +2.5% after 50", outcome(seconds=31), outcome(seconds=30)),
        ("ratings<3 20% after 20", outcome(rating=2), outcome(rating=3)),
    ],
)
def test_a_rule_is_written_as_it_is_read(text, bad, good):
    """The text form has every field, and the rule tells bad runs from good ones."""
    rule = RollbackRule.parse(text)
    assert (str(rule), RollbackRule.parse(str(rule))) == (text, rule)
    assert (rule.is_bad(bad), rule.is_bad(good)) == (True, False)


@given(
    st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    st.floats(min_value=0, max_value=1, exclude_max=True),
    st.booleans(),
)
def test_the_text_of_a_rule_loses_no_digit(limit, share, over_base):
    """Whatever its numbers: the log of a roll-out keeps rules as text."""
    rule = RollbackRule(signal="time", limit=limit, share=share, over_base=over_base)
    assert RollbackRule.parse(str(rule)) == rule


def test_numbers_are_also_read_with_an_exponent():
    """As logs of earlier versions have them."""
    assert RollbackRule.parse("cost>1e-05 1e+1% after 20") == RollbackRule.parse("cost>0.00001 10%")


def test_runs_without_a_figure_do_not_count():
    """A missing rating is not a good one, and an unknown price is not 0."""
    ratings, cost = RollbackRule.parse("ratings<3 20%"), RollbackRule.parse("cost>0.5 5%")
    assert (ratings.is_bad(outcome()), cost.is_bad(outcome(usd=None))) == (None, None)
    assert ratings.check([outcome()] * 100, []) == ""


@pytest.mark.parametrize(
    "text",
    [
        "failures 5% after " + "9" * 5_000,
        "failures",
        "failures>1 5%",
        "cost 5%",
        "ratings>3 5%",
        "speed>3 5%",
        "failures 100%",
        5,
    ],
)
def test_a_rule_that_cannot_be_read_is_refused(text):
    """With the forms that there are."""
    with pytest.raises(MisuseError, match=r"give a share|is not a rule for roll-backs: write 'failures 5%'"):
        RollbackRule.parse(text)


def test_a_rule_needs_its_runs_and_more_than_the_accepted_share():
    """19 failures of 19 do not suffice, 20 of 20 do; neither does a share that chance could have brought."""
    rule = RollbackRule.parse("failures 10%")
    bad, good = outcome(failed=True), outcome()
    assert rule.check([bad] * 19, []) == ""
    assert rule.check([bad] * 20, []) == "failures 10% after 20: 20 of 20 runs are bad (100.0%)"
    assert rule.check([bad] * 4 + [good] * 16, []) == ""  # twice the share, of 20
    assert rule.check([bad] * 80 + [good] * 320, []) != ""


def test_a_rule_over_the_base_compares_with_it():
    """A base that fails as often is no reason to roll back, and a base of few runs is none to compare with."""
    rule = RollbackRule.parse("failures +5%")
    arm = [outcome(failed=True)] * 30 + [outcome()] * 70
    assert rule.check(arm, arm * 5) == ""
    assert rule.check(arm, [outcome()] * 10) == ""
    assert "base 0 of 500" in rule.check(arm, [outcome()] * 500)


def test_a_good_arm_is_rarely_rolled_back_however_often_it_is_checked():
    """Checked after each of 1,000 runs, an arm with just the accepted share is rolled back in 1 of 100 cases."""
    generator, fired = random.Random(7), 0
    for _ in range(300):
        bad = 0
        for runs in range(1, 1_001):
            bad += generator.random() < 0.05
            if runs >= 20 and bad > 0.07 * runs and find_evidence(bad, runs, 0.05) >= 1 / FALSE_ALARMS:
                fired += 1
                break
    assert fired <= 300 * FALSE_ALARMS * 2


def test_a_bad_arm_is_rolled_back_soon():
    """A share of failures of 50 % where 5 % is accepted shows within the least number of runs, 15 % within 300."""
    generator = random.Random(7)
    for share, most in ((0.5, 20), (0.15, 300)):
        for _ in range(20):
            bad, runs = 0, 0
            while runs < 20 or find_evidence(bad, runs, 0.05) < 1 / FALSE_ALARMS:
                runs, bad = runs + 1, bad + (generator.random() < share)
            assert runs <= most * 1.5
