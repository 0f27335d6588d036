"""Statistics against known answers, which scipy 1.17 and scikit-learn 1.8 gave."""

import math
import random

import pytest

from agentfsm.evals.statistics import (
    bootstrap_interval,
    cases_needed,
    cohen_kappa,
    find_power,
    mcnemar,
    spearman,
    student_quantile,
)

FIRST, SECOND = [1, 2, 2, 4, 5, 3, 3, 1, 5, 4], [2, 1, 3, 4, 5, 3, 2, 1, 4, 4]
DIFFERENCES = [-2, 0, 0, 2, -4, 0, 2, -2, 0, 0, -6, 2, 0, 0, -2, 0, 4, 0, -2, 0]


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.975, 4, 2.77645), (0.975, 9, 2.26216), (0.975, 49, 2.00958), (0.95, 9, 1.83311), (0.995, 14, 2.97684)],
)
def test_quantiles_of_student(probability, freedom, value):
    """scipy.stats.t.ppf."""
    assert student_quantile(probability, freedom) == pytest.approx(value, abs=0.02 if freedom < 9 else 2e-3)
    assert student_quantile(1 - probability, freedom) == pytest.approx(-student_quantile(probability, freedom))


@pytest.mark.parametrize(
    ("only_before", "only_after", "p_value"),
    [(10, 2, 0.03857421875), (0, 5, 0.0625), (7, 7, 1), (25, 11, 0.028816719655878845), (0, 0, 1)],
)
def test_mcnemar(only_before, only_after, p_value):
    """scipy.stats.binomtest."""
    assert mcnemar(only_before, only_after) == pytest.approx(p_value)
    assert mcnemar(only_after, only_before) == pytest.approx(p_value)


@pytest.mark.parametrize(
    ("values", "interval"),
    # Lower and upper limits: scipy.stats.bootstrap, 400,000 resamples at the level of Hesterberg's rule, had the lower
    # ones and the upper limits 0.06 and -0.03; scipy.stats.t.interval had the upper ones, and -0.14343 and -0.33148.
    [
        ([each / 10 for each in DIFFERENCES], (-0.15, 0.06343)),
        ([0] * 15 + [-0.2, -0.4, -1, -1, -0.8], (-0.35, -0.00852)),
    ],
)
def test_the_bootstrap(values, interval):
    """The wider of both on each side; and no chance in it."""
    found = bootstrap_interval(values)
    assert found == pytest.approx(interval, abs=0.006)
    assert bootstrap_interval(values) == found


def test_measures_of_agreement():
    """scipy.stats.spearmanr, sklearn.metrics.cohen_kappa_score."""
    assert spearman(FIRST, SECOND) == pytest.approx(0.8805205594965985)
    assert spearman(FIRST, [-each for each in FIRST]) == pytest.approx(-1)
    assert spearman(FIRST, [3] * 10) == 0
    assert cohen_kappa(FIRST, SECOND) == pytest.approx(0.375)
    assert cohen_kappa([1, 1, 0, 0, 1, 0, 1, 1], [1, 0, 0, 0, 1, 0, 1, 0]) == pytest.approx(0.5294117647058824)
    assert cohen_kappa(FIRST, FIRST) == 1
    assert cohen_kappa([1, 1], [1, 1]) == 0


def test_power():
    """The normal approximation, and its inverse."""
    assert find_power(50, 0.25, 0.1) == pytest.approx(0.80742957458383)
    assert cases_needed(0.25, 0.1) == 82  # ((1.959964 + 1.644854) 0.25 / 0.1)^2 = 81.2
    assert find_power(82, 0.25, 0.1) >= 0.95 > find_power(81, 0.25, 0.1)
    assert find_power(10, 0, 0.1) == 1


def make_differences(generator, cases, drop=0.0, runs=5):
    """Return differences of pass rates by case. The runs of a case share its difficulty, so they are clustered."""
    found = []
    for _ in range(cases):
        rate = generator.betavariate(3.4, 0.6)
        rates = (rate, rate * (1 - drop))
        before, after = (sum(generator.random() < each for _ in range(runs)) / runs for each in rates)
        found.append(after - before)
    return found


def count_alarms(trials, cases, resamples, seed=20):
    """Return the share of trials with two equal agents in which the interval excludes 0."""
    generator, alarms = random.Random(seed), 0
    for trial in range(trials):
        low, high = bootstrap_interval(make_differences(generator, cases), resamples=resamples, seed=trial)
        alarms += high < 0 or low > 0
    return alarms / trials


def test_equal_agents_give_few_alarms():
    """About one in twenty; a naive interval over runs would give more."""
    assert 0.01 <= count_alarms(150, 40, 300, seed=5) <= 0.09


@pytest.mark.soak
def test_equal_agents_give_one_alarm_in_twenty():
    """Within one point, with 50 cases of 5 runs."""
    assert count_alarms(5_000, 50, 2_000) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("trials", [pytest.param(60), pytest.param(2_000, marks=pytest.mark.soak)])
def test_power_is_kept(trials):
    """With the number of cases that the formula names, a real loss of 10 % is found as often as it says."""
    generator, drop = random.Random(3), 0.1
    pilot = make_differences(generator, 4_000, drop)
    effect = -sum(pilot) / len(pilot)
    spread = math.sqrt(sum((each + effect) ** 2 for each in pilot) / len(pilot))
    cases, found = cases_needed(spread, effect), 0
    for trial in range(trials):
        found += bootstrap_interval(make_differences(generator, cases, drop), resamples=400, seed=trial)[1] < 0
    assert found / trials == pytest.approx(0.95, abs=0.02 if trials > 100 else 0.08)
