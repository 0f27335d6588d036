"""Buckets of an experiment: the hash that puts a user into one, and the arms that the buckets belong to.

A user always falls into the same bucket of an experiment. A change of weights gives buckets from the arms that shrink
to those that grow, and no other bucket changes its arm: so only the users of these buckets change theirs. An arm that
shrinks gives back the buckets that it got last, so a step and its reversal move the same users.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Final, TypeAlias

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import is_number, shorten_repr

BUCKETS: Final = 10_000
"""Number of buckets of an experiment: the smallest weight is 0.01 %."""

_BUCKETS_PER_PERCENT: Final = BUCKETS // 100

# Buckets of each arm by its name: ranges from the first bucket up to the one before the second number, in the order in
# which the arm got them.
BucketRanges: TypeAlias = Mapping[str, tuple[tuple[int, int], ...]]


def find_bucket(salt: str, unit: str) -> int:
    """Return the bucket of a unit, from 0 to 9,999, by SHA-256.

    Args:
        salt: Salt of the experiment, so that the users of a bucket are others in each experiment.
        unit: The user, session or run.
    """
    digest = sha256(f"{salt}\0{unit}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS


def count_buckets(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the number of buckets by arm.

    Args:
        weights: Percent by arm, in steps of 0.01; their sum is 100.

    Raises:
        MisuseError: if a weight is not such a number, or their sum is not 100.
    """
    counts = {}
    for arm, weight in weights.items():
        count = round(weight * _BUCKETS_PER_PERCENT) if is_number(weight) and 0 <= weight <= 100 else -1
        if count < 0 or abs(weight * _BUCKETS_PER_PERCENT - count) > 1e-6:
            raise MisuseError(
                f"the weight of arm {arm!r} is {shorten_repr(weight)}: give percent from 0 to 100 in steps of 0.01"
            )
        counts[arm] = count
    if sum(counts.values()) != BUCKETS:
        given = " + ".join(f"{weight:g}" for weight in weights.values())
        raise MisuseError(
            f"the weights add up to {given} = {sum(weights.values()):g} %: give weights of 100 % together"
        )
    return counts


def move_buckets(before: BucketRanges, counts: Mapping[str, int]) -> BucketRanges:
    """Return the ranges after a change of weights. Only the difference moves.

    Args:
        before: Ranges by arm before the change, which have all buckets.
        counts: Number of buckets by arm afterwards, from `count_buckets`.
    """
    ranges = {arm: list(before.get(arm, ())) for arm in {**counts, **before}}
    free: list[tuple[int, int]] = []
    for arm, own in ranges.items():
        excess = _count(own) - counts.get(arm, 0)
        while excess > 0:
            first, end = own.pop()
            kept = max(0, end - first - excess)
            if kept:
                own.append((first, first + kept))
            free.append((first + kept, end))
            excess -= end - first - kept
    for arm, count in counts.items():
        missing = count - _count(ranges[arm])
        while missing > 0:
            first, end = free.pop()
            taken = min(missing, end - first)
            ranges[arm].append((end - taken, end))
            if first < end - taken:
                free.append((first, end - taken))
            missing -= taken
    return {arm: tuple(own) for arm, own in ranges.items() if own}


def _count(ranges: list[tuple[int, int]]) -> int:
    return sum(end - first for first, end in ranges)


def find_arm(ranges: BucketRanges, bucket: int) -> str:
    """Return the arm that a bucket belongs to."""
    return next(arm for arm, own in ranges.items() for first, end in own if first <= bucket < end)


def read_weights(ranges: BucketRanges) -> dict[str, float]:
    """Return the percent of each arm that has buckets."""
    return {arm: _count(list(own)) / _BUCKETS_PER_PERCENT for arm, own in ranges.items()}
