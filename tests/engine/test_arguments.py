"""Is a text one strict JSON object, and what is a model told if not."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.tools.schema.arguments import check_object, describe_parameters, normalise_text

SURROGATE = "\ud800"
BOM = "\ufeff"

REFUSED = {
    "[]": "it is an array",
    "null": "it is null",
    '"text"': 'it is "text"',
    "17": "it is 17",
    "": "EOF",
    '{"a": "cut': "EOF while parsing a string",
    '```json\n{"a": 1}\n```': "expected a value",
    '{"a": 1} and so on': "trailing characters",
    '{"a": 1}{"a": 2}': "trailing characters",
    '{"a": 1,}': "trailing comma",
    "{'a': 1}": "key must be a string",
    '{"a": 1, "a": 2}': 'duplicate key "a"',
    '{"x": {"a": 1, "a": 2}}': 'duplicate key "a"',
    '{"a": NaN}': "not NaN, Infinity or a bare word",
    '{"a": Infinity}': "not NaN, Infinity or a bare word",
    '{"a": -Infinity}': "invalid number",
    '{"a": "\\ud800"}': "surrogate",
    '{"a": "\\ud800\\ud800"}': "surrogate",
    '{"a": "\\udc00x"}': "surrogate",
    f'{{"a": "{SURROGATE}"}}': "surrogate pair at character 7",
    '{"a": "\\u0000"}': "\\u0000",
    '{"a": "\\\\\\u0000"}': "\\u0000",
    '{"\\u0000": 1}': "\\u0000",
    '{"a": "\0"}': "control character",
    '{"a": ' + "9" * 5_000 + "}": "too many digits",
    "[" * 200_000: "more than 200 deep",
    '{"a":' * 200_000: "more than 200 deep",
    '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}": "more than 200 deep",
    '{"' + "k" * 100_000 + '": 1, "' + "k" * 100_000 + '": 1}': "duplicate key",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text[:30]))
def test_what_is_not_a_strict_object_is_refused_in_few_words(text: str) -> None:
    """Each hostile text gets a reason that names its fault, short enough to be sent back, and never an exception."""
    reason = check_object(text)
    assert reason is not None
    assert REFUSED[text] in reason
    assert len(reason) < 400


@pytest.mark.parametrize("text", ["{}", ' {"a": [1, 2.5e3, null, true]} ', '{"a": "\\ud83d\\ude00 \\\\u0000"}'])
def test_a_strict_object_is_fine(text: str) -> None:
    """Blanks, whole surrogate pairs and an escaped backslash before u0000 are all well."""
    assert check_object(text) is None


@pytest.mark.parametrize("text", ["", " \r\n\t", BOM, f"{BOM} {{}}\n"])
def test_no_text_and_a_byte_order_mark_count_as_an_empty_object(text: str) -> None:
    """Models send nothing at all for a tool without parameters."""
    assert normalise_text(text) == "{}"


@given(st.text() | st.text(alphabet='{}[]":,\\u0dN1e-. \ud800\0'))
def test_no_text_escapes(text: str) -> None:
    """Whatever the text, the answer is None for an object of the standard parser, or a reason."""
    text = normalise_text(text)
    if check_object(text) is None:
        assert isinstance(json.loads(text), dict)


@given(st.dictionaries(st.text(st.characters(exclude_characters="\0", codec="utf-8")), st.integers() | st.floats()))
def test_what_the_standard_writer_writes_is_fine_if_finite(value: dict[str, Any]) -> None:
    """A dict of numbers passes, ASCII-escaped or not, exactly if all of them are finite."""
    finite = all(math.isfinite(number) for number in value.values() if isinstance(number, float))
    assert (check_object(json.dumps(value)) is None) == finite
    assert (check_object(json.dumps(value, ensure_ascii=False)) is None) == finite


def test_expected_parameters_fit_on_one_line() -> None:
    """Each kind of schema has a word: type, values, branches, items, a nested type's name, or anything."""
    kinds = {
        "a": {"type": "integer", "default": 5},
        "b": {"enum": ["x", "y"]},
        "c": {"const": 1},
        "d": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "e": {"type": "array", "items": {"type": "string"}},
        "f": {"type": "array", "items": True},
        "g": {},
        "h": True,
        "i": False,
        "j": {"type": ["integer", "null"]},
        "k": {"$ref": "#"},
        "l": {"enum": []},
        "m": {"oneOf": [True, {"type": "array", "items": {"$ref": "#/$defs/Point"}}]},
        "n": {"const": None},
        "o" * 100: {"type": "string", "default": "d" * 100},
    }
    assert describe_parameters({"properties": kinds, "required": ["b"]}) == (
        'Parameters: a (integer, default 5), b ("x" | "y", required), c (1), d (Point | null), e (array of string), '
        "f (array), g (anything), h (anything), i (nothing), j (integer | null), k (object), l (), "
        f'm (anything | array of Point), n (null), {"o" * 60}... (string, default "{"d" * 59}...).'
    )
    assert describe_parameters({"properties": {}}) == "It takes no parameters: send {}."
    assert (
        describe_parameters({"properties": {}, "anyOf": [{"required": ["a"]}]})
        == "Its schema describes the parameters."
    )


def test_thousands_of_parameters_are_not_all_told() -> None:
    """A schema from outside may have more than a model should read at each mistake."""
    told = describe_parameters({"properties": {f"p{n}": {"type": "integer"} for n in range(2_000)}})
    assert told.startswith("Parameters: p0 (integer), p1 (integer), ")
    assert told.endswith(", p49 (integer), and 1950 more.")
