"""One walk over texts, names and numbers at any depth, in JSON and in Python's own values."""

import json
from enum import Enum

import attrs
import pytest

from agentfsm.core.json_text import build_object, list_leaves, map_leaves


class Mood(Enum):
    """A member of it has no JSON form of its own."""

    GOOD = "good"


@attrs.frozen
class Note:
    """An object whose names of fields were written by code."""

    text: str


def test_each_value_is_visited():
    """Members of enumerations count as their values; classes and functions are no containers."""
    given = {"a": [Mood.GOOD, Note("hi"), (1, None)], "b": {"kind": str}}
    assert list_leaves(given) == ["a", "good", "hi", 1, "b", "kind", str]
    assert list_leaves(given, names=True) == ["a", "b", "kind"]


def test_names_that_become_one_lose_no_member():
    """The second gets a number."""
    assert map_leaves({"a": 1, "b": 2, "c": 3}, lambda leaf, name: "x" if name is None else leaf) == {
        "x": 1,
        "x (2)": 2,
        "x (3)": 3,
    }


def test_a_key_that_is_there_twice_loses_nothing():
    """It is refused, at any depth."""
    assert json.loads('{"a": {"b": 1}}', object_pairs_hook=build_object) == {"a": {"b": 1}}
    with pytest.raises(ValueError, match="'b' is there twice"):
        json.loads('{"a": {"b": 1, "b": 2}}', object_pairs_hook=build_object)
