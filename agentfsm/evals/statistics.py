"""Statistics of paired evaluations, without numpy: the bootstrap by case, McNemar's test, and the number of cases.

The runs of one case resemble each other, so the case is the unit of all of these: an interval that treats runs as
independent is too narrow, and raises false alarms.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist, StatisticsError, correlation, fmean, variance
from typing import Final

# Two-sided confidence of intervals, and the probability with which a real difference is to be found.
CONFIDENCE: Final = 0.95
POWER: Final = 0.95
# Resamples of a bootstrap: the limits then vary by less than a twentieth of the width of the interval.
RESAMPLES: Final = 4_000
# Seed of the resamples, so that the same results always give the same verdict.
SEED: Final = 20_240_917

_NORMAL: Final = NormalDist()


def student_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution, by the expansion of Cornish and Fisher.

    Args:
        probability: Probability, above 0 and below 1.
        freedom: Degrees of freedom, 4 or more; the error is then below 0.02 for the usual probabilities.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    z = _NORMAL.inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return z + math.fsum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float]:
    """Return the bootstrap interval of a mean, by percentiles that are widened for small samples.

    Neither limit lies within Student's interval: the bootstrap adapts to a skewed sample, and is too narrow for a small
    one. With both, two equal agents were found to differ in 4.0 % of 4,000 simulations with 20 cases, and in 4.5 % with
    40.

    Args:
        values: One value for each case, such as the difference of its means; 5 or more.
        confidence: Confidence, above 0 and below 1.
        resamples: Number of resamples.
        seed: Seed of the random numbers.

    Source: T. Hesterberg, What Teachers Should Know about the Bootstrap, 2015, section 5.3 (expanded percentiles).
    """
    number, generator = len(values), random.Random(seed)  # noqa: S311  statistics, not a secret
    means = sorted(sum(generator.choices(values, k=number)) / number for _ in range(resamples))
    quantile = student_quantile((1 - confidence) / 2, number - 1)
    tail = _NORMAL.cdf(quantile * math.sqrt(number / (number - 1)))
    mean, spread = mean_and_spread(values)
    half = -quantile * spread / math.sqrt(number)
    return min(_percentile(means, tail), mean - half), max(_percentile(means, 1 - tail), mean + half)


def interval_of_rates(
    rates: Sequence[tuple[float, int, float, int]], *, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Return the interval of the mean difference of two pass rates over given cases, whose runs are the sample.

    A success and a failure are added to the runs of each case, so that few runs without a failure prove little.

    Args:
        rates: For each case the rate and the runs of the first agent, and those of the second.
        confidence: Confidence, above 0 and below 1.

    Source: A. Agresti and B. Caffo, The American Statistician 54, 2000, for one pair of rates; here for their mean.
    """
    shift = spread = 0.0
    for before, runs_before, after, runs_after in rates:
        first, second = (before * runs_before + 1) / (runs_before + 2), (after * runs_after + 1) / (runs_after + 2)
        shift += second - first
        spread += first * (1 - first) / (runs_before + 2) + second * (1 - second) / (runs_after + 2)
    half = _NORMAL.inv_cdf((1 + confidence) / 2) * math.sqrt(spread)
    return max(-1.0, (shift - half) / len(rates)), min(1.0, (shift + half) / len(rates))


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile by linear interpolation between two neighbours."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def mcnemar(only_before: int, only_after: int) -> float:
    """Return the exact two-sided p-value of McNemar's test for paired results that pass or fail.

    Args:
        only_before: Cases that only the first agent passed.
        only_after: Cases that only the second agent passed.
    """
    changed = only_before + only_after
    tail: float = sum(math.comb(changed, each) for each in range(min(only_before, only_after) + 1)) / 2**changed
    return min(1.0, 2 * tail)


def find_power(cases: int, spread: float, effect: float, *, confidence: float = CONFIDENCE) -> float:
    """Return the probability that a difference is found: that its interval excludes 0 on the right side.

    Args:
        cases: Number of cases.
        spread: Standard deviation of the differences of the cases.
        effect: The real difference, above 0.
        confidence: Confidence of the interval.
    """
    z = _NORMAL.inv_cdf((1 + confidence) / 2)
    return 1 - _NORMAL.cdf(z - effect * math.sqrt(cases) / spread) if spread else 1.0


def cases_needed(spread: float, effect: float, *, confidence: float = CONFIDENCE, power: float = POWER) -> int:
    """Return the number of cases with which a difference of this size is found with this power.

    Args:
        spread: Standard deviation of the differences of the cases.
        effect: The real difference, above 0.
        confidence: Confidence of the interval.
        power: Probability of finding it, above 0 and below 1.
    """
    z = _NORMAL.inv_cdf((1 + confidence) / 2) + _NORMAL.inv_cdf(power)
    root = z * spread / effect
    return math.ceil(root * root)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and their standard deviation; two values or more."""
    return fmean(values), math.sqrt(variance(values))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two lists of the same length; 0 if all values of one are equal."""
    try:
        return correlation(_rank(first), _rank(second))
    except StatisticsError:
        return 0.0


def _rank(values: Sequence[float]) -> list[float]:
    """Return the ranks of values; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, at = [0.0] * len(values), 0
    while at < len(order):
        end = at
        while end < len(order) and values[order[end]] == values[order[at]]:
            end += 1
        for index in order[at:end]:
            ranks[index] = (at + end - 1) / 2
        at = end
    return ranks


def cohen_kappa(first: Sequence[object], second: Sequence[object]) -> float:
    """Return Cohen's kappa: the agreement of two lists of labels beyond chance, 1 for equal lists.

    If both lists have the same single label, agreement by chance is certain, and the result is 0.
    """
    number = len(first)
    agreed = sum(a == b for a, b in zip(first, second, strict=True)) / number
    labels = set(first) | set(second)
    chance = sum(sum(each == label for each in first) * sum(each == label for each in second) for label in labels) / (
        number * number
    )
    return 0.0 if chance == 1 else (agreed - chance) / (1 - chance)
