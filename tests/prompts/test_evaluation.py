"""Tests of prompts: checks of the form, pass rates and their intervals."""

import math

import pytest

from agentfsm import MisuseError
from agentfsm.prompts import (
    contains,
    field_in,
    find_failures,
    fits_schema,
    has_field,
    json_valid,
    matches,
    max_tokens,
    no_field,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("check", "reply", "why"),
    [
        (json_valid(), '{"a": 1}', None),
        (json_valid(), "[1]", None),
        (json_valid(), '```json\n{"a": 1}\n```', "not JSON"),
        (json_valid(), "NaN", "not JSON: NaN"),
        (json_valid(), "", "not JSON"),
        (json_valid(), "[" * 100_000, "not JSON"),
        (has_field("a"), '{"a": null}', None),
        (has_field("a"), '{"b": 1}', "field 'a' is missing"),
        (has_field("a"), '["a"]', "not a JSON object"),
        (field_in({"a": ["x", "y"]}), '{"a": "y"}', None),
        (field_in({"a": ["x", "y"]}), '{"a": "z"}', "field 'a' is 'z'"),
        (field_in({"a": ["x"]}), '["x"]', "not a JSON object"),
        (field_in({"a": ["x"]}), "{}", "field 'a' is missing"),
        (field_in({"a": [1]}), '{"a": true}', "field 'a' is True"),
        (field_in({"a": [[1]]}), '{"a": [1]}', None),
        (no_field("apology"), '{"a": 1}', None),
        (no_field("apology"), '{"apology": "x"}', "field 'apology' is there"),
        (no_field("apology"), "sorry", "not JSON"),
        (max_tokens(3), "a b c", None),
        (max_tokens(3), "a b c d", "4 tokens"),
        (contains("3 %"), "fell to 3 %", None),
        (contains("3 %"), "fell", "'3 %' is missing"),
        (matches("^[0-9]+$"), "17", None),
        (matches("^[0-9]+$"), "17 euro", "nothing matches"),
        (fits_schema({"type": "object", "required": ["a"]}), '{"a": 1}', None),
        (fits_schema({"type": "object", "required": ["a"]}), '{"b": 1}', "it does not fit the schema: {'b': 1}"),
        (fits_schema({"type": "string"}), "no JSON", "not JSON"),
    ],
)
def test_a_check_gives_its_reason(check, reply, why):
    """All five kinds, also on what is not an object."""
    found = check.find_failure(reply)
    assert (found is None) if why is None else found.startswith(why)


def test_checks_that_are_wrong():
    """A pattern or schema that cannot be used is refused when the check is made."""
    with pytest.raises(MisuseError, match="is not a regular expression"):
        matches("(")
    with pytest.raises(MisuseError, match="its JSON Schema is invalid"):
        fits_schema({"type": "text"})
    with pytest.raises(MisuseError, match="give a JSON Schema"):
        fits_schema([])


def test_a_counter_of_ones_own():
    """In place of the estimate."""
    assert max_tokens(3).find_failure("abcd", len) == "4 tokens"


@pytest.mark.parametrize(
    ("passed", "runs", "low", "high"),
    # R: binom::binom.confint(x, n, methods = "wilson")
    [(5, 5, 0.5655, 1.0), (9, 10, 0.5958, 0.9821), (0, 10, 0.0, 0.2775), (50, 100, 0.4038, 0.5962)],
)
def test_the_interval_of_wilson(passed, runs, low, high):
    """Known values."""
    found = wilson_interval(passed, runs)
    assert math.isclose(found[0], low, abs_tol=1e-4)
    assert math.isclose(found[1], high, abs_tol=1e-4)


def test_failures_of_a_reply():
    """Each with its reason."""
    assert find_failures([json_valid(), contains("a"), contains("b")], "a") == (
        "json_valid: not JSON: Expecting value: line 1 column 1 (char 0)",
        "contains 'b': 'b' is missing",
    )
