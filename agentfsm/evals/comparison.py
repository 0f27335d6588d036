"""Compare two evaluations of one suite, and conclude: worse, better, not shown to be worse, or undecided.

Both agents have run the same cases, so differences are paired by case. A conclusion needs an interval: a lower mean
alone may be noise, and a small sample without a difference does not exclude one. With 10 cases or more it is about all
cases like these. With fewer it is about these cases alone, and is decided by the number of their runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from statistics import NormalDist, fmean
from typing import Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import POSITIVE, ValueRule, is_number
from agentfsm.core.value import Value
from agentfsm.evals.results import PASSED, Evaluation
from agentfsm.evals.statistics import (
    CONFIDENCE,
    bootstrap_interval,
    cases_needed,
    interval_of_rates,
    mcnemar,
    mean_and_spread,
)

# Relative loss that is not accepted (document H, 3.4).
WORSE_BY: Final = 0.05
# Cases below which nothing is decided about other cases: an interval of fewer says more about its method than about the
# agents.
MIN_CASES: Final = 10
# Runs of a case beyond which no decision about the case alone is looked for.
MAX_RUNS: Final = 10_000
# Cases that a message names.
NAMED_CASES: Final = 3

_PROBABILITY: Final = ValueRule(
    fits=lambda value: is_number(value) and 0 < value < 1, wanted="a number above 0 and below 1"
)


class Conclusion(StrEnum):
    """Conclusion of a comparison."""

    WORSE = "worse"
    """The interval of the difference is below 0."""

    BETTER = "better"
    """The interval of the difference is above 0."""

    NOT_WORSE = "not shown to be worse"
    """The interval includes 0, and excludes the loss that is not accepted."""

    UNDECIDED = "undecided"
    """The interval includes both 0 and that loss."""


@attrs.frozen(kw_only=True)
class Comparison(Value):
    """Comparison of two evaluations by one aspect."""

    metric: str
    """Name of the scorer."""

    before: float
    """Mean of the first evaluation over the shared cases."""

    after: float
    """Mean of the second evaluation over the shared cases."""

    interval: tuple[float, float]
    """Interval that contains the real difference, second minus first, with the confidence."""

    confidence: float
    """Confidence of the interval."""

    cases: int
    """Number of cases that both evaluations have scored."""

    margin: float
    """Loss that is not accepted, in the unit of the means."""

    needed: int
    """Cases with which a loss of `margin` is found with a probability of 95 %."""

    conclusion: Conclusion
    """The conclusion."""

    excludes_margin: bool
    """Whether a loss of `margin` is excluded with the confidence."""

    unscored: tuple[str, ...] = ()
    """Cases of the first evaluation that do not count, because the second lacks them, or one of the two has not scored
    all of their runs. With any, it is not shown that nothing was lost.
    """

    is_about_these_cases: bool = False
    """Whether it is about these cases alone, because they are fewer than 10."""

    needed_runs: int = 0
    """If it is about these cases alone: runs of each that would settle it if the rates stay as they are; 0 if none."""

    p_value: float | None = None
    """P-value of McNemar's exact test, if each case ran once and passed or failed; else None."""

    @property
    def difference(self) -> float:
        """Second mean minus first."""
        return self.after - self.before

    @property
    def missing(self) -> int:
        """Number of further cases that would settle an undecided comparison; else 0."""
        wanted = max(1, len(self.unscored), self.needed - self.cases)
        return wanted if self.conclusion is Conclusion.UNDECIDED else 0

    def __str__(self) -> str:
        low, high = self.interval
        more = f"; {self.missing} more cases would settle a loss of {self.margin:.1%}" if self.missing else ""
        if self.unscored:
            more = f"; {name_cases(self.unscored)} missing or not scored"
        elif self.missing and self.needed_runs:
            more += f", or {self.needed_runs} runs of each for these cases alone"
        cases = f"{self.cases} case" if self.cases == 1 else f"{self.cases} cases"
        cases += " alone" if self.is_about_these_cases else ""
        return (
            f"{self.metric}: {self.conclusion}, {self.before:.1%} to {self.after:.1%} in {cases}, "
            f"difference {self.difference:+.1%} [{low:+.1%}, {high:+.1%}]{more}"
        )


def name_cases(cases: Sequence[str]) -> str:
    """Return the number of cases with the names of the first ones, and the verb that follows."""
    named = ", ".join(cases[:NAMED_CASES]) + (", ..." if len(cases) > NAMED_CASES else "")
    return f"1 case ({named}) is" if len(cases) == 1 else f"{len(cases)} cases ({named}) are"


def compare(
    before: Evaluation,
    after: Evaluation,
    *,
    metric: str = PASSED,
    worse_by: float = WORSE_BY,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Compare two evaluations of one suite by one aspect, paired by case.

    Args:
        before: The baseline.
        after: The candidate.
        metric: Name of the scorer; "total" for the weighted mean of all.
        worse_by: Relative loss that is not accepted: 0.05 of a baseline of 80 % is 4 points.
        confidence: Confidence of the interval, above 0 and below 1.

    Raises:
        MisuseError: if they have no case in common with a grade of this aspect, they are of different cases or speeds,
            or an argument is wrong.
    """
    POSITIVE.check("compare", "worse_by", worse_by)
    _PROBABILITY.check("compare", "confidence", confidence)
    _check_same_suite(before, after)
    first, second = before.by_case(metric), after.by_case(metric)
    lost = {**before.find_unscored(metric), **after.find_unscored(metric)}
    made = Counter(each.case for each in after.results)
    partial = [case for case in first if len(second.get(case, ())) < max(1, made[case])]
    unscored = tuple(dict.fromkeys([*partial, *lost]))
    shared = [case for case in first if case in second]
    if not shared:
        known = ", ".join(dict.fromkeys([*before.metrics, *after.metrics])) or "none"
        raise MisuseError(f"no case has a grade of {metric!r} in both evaluations; scored aspects: {known}")
    means = [(fmean(first[case]), fmean(second[case])) for case in shared]
    base, differences = fmean(mean for mean, _ in means), [after - before for before, after in means]
    margin = worse_by * base
    interval, lowest, needed_runs, needed = (-1.0, 1.0), -1.0, 0, MIN_CASES
    is_few = len(shared) < MIN_CASES and all({*first[case], *second[case]} <= {0.0, 1.0} for case in shared)
    # A sample in which nothing differs has no spread, and could have come from an agent that fails in a few kinds of
    # cases. If a loss of the margin is real, and each case passes or fails, the differences have at least this spread.
    # Repeats do not lower it, since runs of one case may all be the same.
    least = math.sqrt(margin * max(0.0, 1 - margin))
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    own = 0.0
    if len(shared) >= MIN_CASES:
        mean, own = mean_and_spread(differences)
        low, high = bootstrap_interval(differences, confidence=confidence)
        half = z * max(least, own) / math.sqrt(len(shared))
        lowest = max(-1.0, min(low, mean - half))
        interval = lowest, min(1.0, high if own else mean + half)
    elif is_few:
        rates = [(fmean(first[case]), len(first[case]), fmean(second[case]), len(second[case])) for case in shared]
        lowest, high = interval_of_rates(rates, confidence=confidence)
        interval = min(lowest, fmean(differences)), max(high, fmean(differences))
        needed_runs = _count_runs(rates, margin, confidence)
    if margin:
        found = cases_needed(own, margin, confidence=confidence)
        needed = max(MIN_CASES, found, math.ceil((z * least / margin) ** 2))
    excludes_margin = not unscored and (lowest > -margin or (not margin and len(shared) >= MIN_CASES))
    return Comparison(
        metric=metric,
        before=base,
        after=fmean(mean for _, mean in means),
        interval=interval,
        confidence=confidence,
        cases=len(shared),
        margin=margin,
        needed=needed,
        conclusion=_conclude(interval, excludes_margin),
        excludes_margin=excludes_margin,
        unscored=unscored,
        is_about_these_cases=is_few,
        needed_runs=needed_runs,
        p_value=_test_pairs(first, second, shared),
    )


def _check_same_suite(before: Evaluation, after: Evaluation) -> None:
    """Raise a MisuseError if two evaluations are of different cases, or were made at different speeds."""
    if before.speed != after.speed:
        raise MisuseError(
            f"the evaluations have the speeds {before.speed!r} and {after.speed!r}, at which tools are not the same: "
            "evaluate both at one speed"
        )
    is_known = bool(before.cases and after.cases)
    if not is_known and before.suite != after.suite:
        raise MisuseError(
            f"the evaluations are of the suites {before.suite!r} and {after.suite!r}: evaluate both with one suite"
        )
    others = [case for case, digest in after.cases.items() if before.cases.get(case, digest) != digest]
    if is_known and others:
        raise MisuseError(
            f"{name_cases(others)} not the same in both evaluations: what the user says or what is expected has "
            "changed; evaluate the baseline again with this suite (runs whose input is the same are kept)"
        )


def _count_runs(rates: Sequence[tuple[float, int, float, int]], margin: float, confidence: float) -> int:
    """Return the runs of each case with which these rates would settle a loss of `margin`; 0 if no number does."""
    low, high = 1, MAX_RUNS

    def settles(runs: int) -> bool:
        lower, upper = interval_of_rates(
            [(before, runs, after, runs) for before, _, after, _ in rates], confidence=confidence
        )
        return upper < 0 or lower > 0 or lower > -margin

    if not settles(high):
        return 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if settles(middle) else (middle + 1, high)
    return low


def _conclude(interval: tuple[float, float], excludes_margin: bool) -> Conclusion:
    if interval[1] < 0:
        return Conclusion.WORSE
    if interval[0] > 0 and excludes_margin:
        return Conclusion.BETTER
    return Conclusion.NOT_WORSE if excludes_margin else Conclusion.UNDECIDED


def _test_pairs(
    first: Mapping[str, list[float]], second: Mapping[str, list[float]], shared: Iterable[str]
) -> float | None:
    pairs = [(first[case], second[case]) for case in shared]
    if any(len(a) != 1 or len(b) != 1 or not {*a, *b} <= {0.0, 1.0} for a, b in pairs):
        return None
    return mcnemar(sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))
