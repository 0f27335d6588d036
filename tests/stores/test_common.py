"""What all stores decide alike, where the published kit cannot see a difference."""

import pytest

from agentfsm import ConflictError
from agentfsm.core.inbox import Approve, Cancel, GiveInput, PostedItem
from agentfsm.stores.rules import check_deadline, resolve_duplicate_post


def test_a_decision_at_the_very_moment_comes_too_late():
    """It holds until then, and not then."""
    check_deadline("r1", 10.0, 9.999)
    check_deadline("r1", None, 1e12)
    with pytest.raises(ConflictError, match="the time is up"):
        check_deadline("r1", 10.0, 10.0)


def test_the_same_answers_are_the_same_whatever_their_order():
    """Who answers twice has not said two things."""
    first = GiveInput(call_id="t1.0", by="ann", answers={"a": 1, "b": {"c": 2, "d": 3}})
    again = GiveInput(call_id="t1.0", by="bob", answers={"b": {"d": 3, "c": 2}, "a": 1})
    winner = PostedItem(number=1, key="k", item=first)
    assert resolve_duplicate_post("r1", winner, again) is winner


def test_who_comes_second_is_told_what_was_decided_and_by_whom():
    """The call, where it was one."""
    call = PostedItem(number=1, key="k", item=Approve(call_id="t1.0", by="ann"))
    with pytest.raises(ConflictError, match=r"run 'r1': t1\.0 was approved already by 'ann'"):
        resolve_duplicate_post("r1", call, Approve(call_id="t1.0", by="bob", arguments="{}"))
    other = PostedItem(number=1, key="k", item=Cancel(by="ann"))
    with pytest.raises(ConflictError, match="run 'r1': it was decided already by 'ann'"):
        resolve_duplicate_post("r1", other, Approve(call_id="t1.0", by="bob"))
