"""Rules of automatic roll-backs: how many runs of an arm may be bad, and when that is certain enough.

A rule looks at the share of bad runs, not at a mean, so one test serves failures, cost, time and ratings, and a single
expensive run rolls nothing back. The rule is checked after every run, which would make a usual test, made for one look,
raise false alarms. The evidence here is a likelihood ratio that a good arm exceeds rarely, however often it is checked.

Source: H. Robbins, Statistical Methods Related to the Law of the Iterated Logarithm, 1970 (mixtures of likelihoods).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import (
    BOOL,
    COUNT,
    POSITIVE,
    ValueRule,
    is_number,
    require_choice,
    shorten_repr,
)
from agentfsm.core.value import Value
from agentfsm.prompts import wilson_interval

Signal: TypeAlias = Literal["failures", "cost", "time", "ratings"]
"""Figure that a rule limits: runs that did not complete, cost too much or took too long, or ratings."""

# Probability with which an arm that is as good as the rule accepts is ever rolled back by it.
FALSE_ALARMS: Final = 0.01
# Runs of an arm before a rule may decide: fewer say more about chance than about the arm.
MIN_RUNS: Final = 20
# Shares above the accepted one that the likelihood ratio is a mean over.
_ALTERNATIVES: Final = 50
_PERCENT: Final = 100
_TEXT: Final = re.compile(
    r"(failures|cost|time|ratings)(?:\s*([<>])\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?))?"
    r"\s+(\+?)(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*%(?:\s+after\s+(\d{1,9}))?"
)
_SHARE: Final = ValueRule(fits=lambda value: is_number(value) and 0 <= value < 1, wanted="a share from 0 to below 1")


@attrs.frozen(kw_only=True)
class RunOutcome(Value):
    """The outcome of a run that is over, or whose executions have raised errors for 60 s, as the rules see it."""

    run_id: str
    """Id of the run."""

    arm: str
    """Arm of the run."""

    failed: bool
    """Whether it ended without completing, or has not ended. Cancelled runs have no outcome."""

    usd: float | None
    """Cost in US dollars; None if a price is unknown."""

    seconds: float
    """Time from its creation to its end, without the time that it waited for people or was paused; infinite if it has
    not ended.
    """

    rating: int | None
    """Newest rating, from 1 (bad) to 5 (good); None if there is none."""

    created_at: float
    """Time at which the run was created, seconds since 1970."""


@attrs.frozen(kw_only=True)
class RollbackRule(Value):
    """A limit of the share of bad runs, above which an arm is rolled back.

    As text: "failures 5%", "cost>0.50 5%", "time>30 5%", "ratings<3 20%"; "failures +5%" is 5 points above the base;
    "failures 5% after 50" needs 50 runs.
    """

    signal: Signal = attrs.field(validator=require_choice("failures", "cost", "time", "ratings"))
    """Figure by which a run is bad: "failures" (it did not complete), "cost" or "time" (above the limit), "ratings"
    (below the limit). Runs without a known price count for no rule on cost, those without a rating for none on ratings.
    """

    limit: float | None = attrs.field(default=None, validator=POSITIVE.or_none())
    """US dollars, seconds or rating that separate good and bad runs; None for failures."""

    share: float = attrs.field(validator=_SHARE)
    """Share of bad runs that is accepted, from 0 to below 1."""

    over_base: bool = attrs.field(default=False, validator=BOOL)
    """Whether `share` is added to the share of the base arm, of which as many runs are needed."""

    min_runs: int = attrs.field(default=MIN_RUNS, validator=COUNT)
    """Runs of the arm before the rule may decide, 1 or more."""

    def __attrs_post_init__(self) -> None:
        """Check that the limit belongs to the signal."""
        if (self.limit is None) != (self.signal == "failures"):
            needs = "takes no limit" if self.signal == "failures" else "needs a limit, such as RollbackRule(limit=30)"
            raise MisuseError(f"RollbackRule(signal={self.signal!r}, limit={self.limit!r}): {self.signal!r} {needs}")

    def __str__(self) -> str:
        """The rule as `parse` reads it, with all digits: the log of a roll-out keeps rules as text."""
        limit = "" if self.limit is None else f"{'<' if self.signal == 'ratings' else '>'}{_write_number(self.limit)}"
        share = f"{'+' if self.over_base else ''}{_write_number(self.share, _PERCENT)}%"
        return f"{self.signal}{limit} {share} after {self.min_runs}"

    @classmethod
    def parse(cls, text: str) -> RollbackRule:
        """Return the rule that a text stands for.

        Raises:
            MisuseError: if the text is not a rule.
        """
        found = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None or (found[2] or "") != {"failures": "", "ratings": "<"}.get(found[1], ">"):
            raise MisuseError(
                f"{shorten_repr(text)} is not a rule for roll-backs: write 'failures 5%', 'cost>0.50 5%', 'time>30 5%' "
                "or 'ratings<3 20%'; '+5%' is 5 points above the base, and 'after 50' needs 50 runs"
            )
        signal: Any = found[1]
        return cls(
            signal=signal,
            limit=None if found[3] is None else float(found[3]),
            share=float(Decimal(found[5]) / _PERCENT),
            over_base=bool(found[4]),
            min_runs=MIN_RUNS if found[6] is None else int(found[6]),
        )

    def is_bad(self, outcome: RunOutcome) -> bool | None:
        """Return whether a run is bad; None if it has no such figure."""
        match self.signal:
            case "failures":
                return outcome.failed
            case "ratings":
                return None if outcome.rating is None else outcome.rating < (self.limit or 0)
            case "cost":
                return None if outcome.usd is None else outcome.usd > (self.limit or 0)
        return outcome.seconds > (self.limit or 0)

    def check(self, arm: Iterable[RunOutcome], base: Iterable[RunOutcome], *, tests: int = 1) -> str:
        """Return why an arm is to be rolled back; empty if it is not.

        Args:
            arm: Runs of the arm.
            base: Runs of the base arm in the same time.
            tests: Number of arms and rules that are checked together, which share the probability of a false alarm.
        """
        bad, runs = self._count(arm)
        accepted, base_note = self.share, ""
        if self.over_base:
            base_bad, base_runs = self._count(base)
            if base_runs < self.min_runs:
                return ""
            accepted = min(1.0, wilson_interval(base_bad, base_runs)[1] + self.share)
            base_note = f", base {base_bad} of {base_runs:,}"
        if runs < self.min_runs or find_evidence(bad, runs, accepted) < tests / FALSE_ALARMS:
            return ""
        return f"{self}: {bad} of {runs:,} runs are bad ({bad / runs:.1%}{base_note})"

    def _count(self, outcomes: Iterable[RunOutcome]) -> tuple[int, int]:
        verdicts = [verdict for each in outcomes if (verdict := self.is_bad(each)) is not None]
        return sum(verdicts), len(verdicts)


def _write_number(value: float, factor: int = 1) -> str:
    """Return a number without an exponent."""
    return f"{(Decimal(repr(value)) * factor).normalize():f}"


def find_evidence(bad: int, runs: int, accepted: float) -> float:
    """Return how many times likelier the runs are with a share of bad ones above the accepted one than with that.

    If the real share is at most the accepted one, the probability that this ever exceeds `1 / p`, at any number of
    runs, is at most `p`.

    Args:
        bad: Number of bad runs.
        runs: Number of runs.
        accepted: Share of bad runs that is accepted, from 0 to 1.
    """
    if accepted >= 1 or runs == 0:
        return 0.0
    if accepted == 0:
        return math.inf if bad else 0.0
    total = 0.0
    for each in range(1, _ALTERNATIVES + 1):
        share = accepted + (1 - accepted) * (each - 0.5) / _ALTERNATIVES
        ratio = bad * math.log(share / accepted) + (runs - bad) * math.log((1 - share) / (1 - accepted))
        total += math.exp(min(ratio, 700.0))  # the largest that a float can hold
    return total / _ALTERNATIVES
