"""What is made of the official suite's verdicts."""

import pytest

from tests.support.mcp_conformance import MAX_AGAIN, Outcome, lasting

EXPECTED = {"a": "All of it.", "b:2": "One check."}


def outcome(*failures):
    return Outcome(scenarios=frozenset("abcdef"), failures=dict.fromkeys(failures, "it failed"), passed=1)


def test_what_is_expected_is_alike():
    """An entry stands for a check, or for all checks of a scenario."""
    assert outcome("a:1", "a:2", "b:2").unlike(EXPECTED) == {}


def test_a_new_failure_is_told():
    """Also another check of a scenario of which one is expected to fail."""
    assert outcome("a:1", "b:1", "b:2", "c:1").unlike(EXPECTED).keys() == {"b:1", "c:1"}


def test_an_entry_that_fails_no_more_is_told():
    """The list is true, or the test fails."""
    assert outcome("a:1", "b:1").unlike(EXPECTED).keys() == {"b:1", "b:2"}


@pytest.mark.parametrize(("second", "left"), [(("b:2",), set()), (("b:1", "b:2"), {"b:1"}), ((), {"b:2"})])
def test_a_failure_has_another_try(second, left):
    """What the scenario does by itself counts, held against its own entries."""
    tried = []

    def again(scenario):
        tried.append(scenario)
        return outcome(*second)

    assert lasting(outcome("a:1", "b:1", "b:2"), EXPECTED, again).keys() == left
    assert tried == ["b"]


def test_many_failures_have_no_other_try():
    """They are not for the clock, and would take long."""
    failures = [f"{name}:1" for name in "bcdef"]
    assert len(failures) > MAX_AGAIN
    assert lasting(outcome("a:1", "b:2", *failures), EXPECTED, pytest.fail).keys() == set(failures)
