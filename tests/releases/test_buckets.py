"""Buckets: how many users an arm gets, and who moves when weights change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import MisuseError
from agentfsm.releases.buckets import BUCKETS, count_buckets, find_arm, find_bucket, move_buckets, read_weights

USERS = [f"user:acme:{number}" for number in range(100_000)]
BASE = {"v1": ((0, BUCKETS),)}


def test_100000_users_get_the_arms_in_the_weights_and_only_the_difference_moves():
    """Each arm has its share within 0.5 points, and a step moves no user but from the arm that shrinks to the other."""
    buckets = [find_bucket("billing#1", user) for user in USERS]
    ranges, before, first = BASE, None, None
    for weights in ({"v1": 95, "v2": 5}, {"v1": 80, "v2": 20}, {"v1": 50, "v2": 30, "v3": 20}, {"v1": 95, "v2": 5}):
        ranges = move_buckets(ranges, count_buckets(weights))
        table = [find_arm(ranges, bucket) for bucket in range(BUCKETS)]
        arms = [table[bucket] for bucket in buckets]
        for arm, weight in weights.items():
            assert abs(arms.count(arm) / len(USERS) * 100 - weight) < 0.5
        if before is not None:
            moved = {(then, now) for then, now in zip(before[0], arms, strict=True) if then != now}
            shrank = {arm for arm in before[1] if weights.get(arm, 0) < before[1][arm]}
            grew = {arm for arm in weights if weights[arm] > before[1].get(arm, 0)}
            assert all(then in shrank and now in grew for then, now in moved)
        first = first or arms
        before = arms, weights
    assert arms == first  # the way back moves the same users


@given(
    st.lists(st.lists(st.integers(0, BUCKETS), min_size=3, max_size=3), min_size=1, max_size=5),
)
def test_a_change_of_weights_moves_as_few_buckets_as_possible(steps):
    """After any steps every bucket has one arm, and a step moves exactly the buckets that arms grow by."""
    ranges, table = BASE, ["v1"] * BUCKETS
    for low, high, _ in map(sorted, steps):
        counts = {"v1": low, "v2": high - low, "v3": BUCKETS - high}
        ranges = move_buckets(ranges, counts)
        after = [""] * BUCKETS
        for arm, own in ranges.items():
            for first, end in own:
                assert not any(after[first:end])
                after[first:end] = [arm] * (end - first)
        grown = sum(max(0, count - table.count(arm)) for arm, count in counts.items())
        assert sum(then != now for then, now in zip(table, after, strict=True)) == grown
        assert read_weights(ranges) == {arm: count / 100 for arm, count in counts.items() if count}
        table = after


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"a": 95, "b": 4}, r"95 \+ 4 = 99 %: give weights of 100 %"),
        ({"a": 99.995, "b": 0.005}, "'a' is 99.995: give percent from 0 to 100 in steps of 0.01"),
        ({"a": -1, "b": 101}, "'a' is -1: give percent"),
        ({"a": True, "b": 99}, "'a' is True: give percent"),
        ({"a": float("nan")}, "'a' is nan: give percent"),
    ],
)
def test_weights_that_are_not_100_percent_are_refused(weights, text):
    """The message names the arm or the sum."""
    with pytest.raises(MisuseError, match=text):
        count_buckets(weights)
    assert count_buckets({"a": 33.33, "b": 66.67}) == {"a": 3_333, "b": 6_667}
