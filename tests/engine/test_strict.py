"""OpenAI's strict mode: schemas in the form that it takes, and the nulls on the way back."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Annotated, Any, Literal

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentfsm import ArgumentsError, MisuseError
from agentfsm.tools.schema.json_schema import build_schema_signature
from agentfsm.tools.schema.signature import build_function_signature
from agentfsm.tools.schema.strict import build_strict_schema, drop_nulls


@attrs.frozen
class Context:
    """Stands for the RunContext."""


class Level(Enum):
    LOW = "low"
    HIGH = "high"


class Node(BaseModel):
    """A part of a tree."""

    name: str
    weight: float = 1.0
    kids: list[Node] = Field(default_factory=list)
    above: Node | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    lives: int | None = 1


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


def sign(function: Any) -> Any:
    return build_function_signature(function, context_type=Context, name="search", strict=True)


def search(  # noqa: D417, PLR0917
    query: Annotated[str, Field(min_length=2, max_length=9, pattern="^[a-z]+$")],
    limit: Annotated[int, Field(ge=1, le=50)] = 5,
    level: Level = Level.LOW,
    since: str | None = "2026",
    pet: Pet | None = None,
    tree: Node | None = None,
    tags: Annotated[list[str], Field(min_length=1)] = ["all"],  # noqa: B006
) -> None:
    """Search.

    Args:
        query: Words.
        limit: How many.
        tags: Which.
    """


def test_every_rule_of_strict_mode_is_met():
    """All required, nothing more allowed, optional ones nullable, defaults told in words, oneOf as anyOf."""
    assert sign(search).parameters == {
        "$defs": {
            "Cat": {
                "type": "object",
                "properties": {
                    "kind": {"type": "string", "const": "cat"},
                    "lives": {"type": ["integer", "null"], "description": "Null means 9."},
                },
                "required": ["kind", "lives"],
                "additionalProperties": False,
            },
            "Dog": {
                "type": "object",
                "properties": {
                    "kind": {"type": "string", "const": "dog"},
                    "lives": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                },
                "required": ["kind", "lives"],
                "additionalProperties": False,
            },
            "Level": {"type": "string", "enum": ["low", "high"]},
            "Node": {
                "type": "object",
                "description": "A part of a tree.",
                "properties": {
                    "name": {"type": "string"},
                    "weight": {"type": ["number", "null"], "description": "Null means 1.0."},
                    "kids": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Node"}}, {"type": "null"}]},
                    "above": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                },
                "required": ["name", "weight", "kids", "above"],
                "additionalProperties": False,
            },
        },
        "type": "object",
        "properties": {
            "query": {"type": "string", "pattern": "^[a-z]+$", "description": "Words."},
            "limit": {
                "type": ["integer", "null"],
                "minimum": 1,
                "maximum": 50,
                "description": "How many. Null means 5.",
            },
            "level": {"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}], "description": 'Null means "low".'},
            "since": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "pet": {"anyOf": [{"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}, {"type": "null"}]},
            "tree": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            "tags": {
                "anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "null"}],
                "description": 'Which. Null means ["all"].',
            },
        },
        "required": ["query", "limit", "level", "since", "pet", "tree", "tags"],
        "additionalProperties": False,
    }


def test_null_stands_for_what_was_left_out():
    """It is taken out where the parameter was optional and takes no null by itself, at every level."""
    node = {"name": "a", "weight": None, "kids": None, "above": {"name": "b", "weight": 2, "kids": [], "above": None}}
    sent = {
        "query": "abc",
        "limit": None,
        "level": None,
        "since": None,
        "pet": {"kind": "cat", "lives": None},
        "tree": node,
        "tags": None,
    }
    signature = sign(search)
    above = Node(name="b", weight=2, above=None, kids=[])
    bound = signature.bind(json.dumps(sent))
    assert bound == (
        (),
        {
            "query": "abc",
            "since": None,
            "pet": Cat(kind="cat"),
            "tree": Node(name="a", above=above),
            "tags": ["all"],  # a copy of the function's list
        },
    )
    assert signature.to_namespace(bound).limit == 5
    assert signature.bind('{"query": "abc", "pet": {"kind": "dog", "lives": null}}')[1]["pet"].lives is None


def test_what_strict_mode_does_not_hold_the_model_to_is_checked_here():
    """The bounds that were dropped from the schema still apply, and null is no value where one is required."""
    with pytest.raises(ArgumentsError, match=r"query: .*at least 2 characters"):
        sign(search).bind('{"query": "a", "limit": null}')
    with pytest.raises(ArgumentsError, match=r"query: should be a valid string, got null"):
        sign(search).bind('{"query": null}')


def test_numbers_keep_their_digits():
    """A text without null is validated as it was sent; one with null loses nothing but the nulls."""

    def pay(amount: Any, note: str = "") -> None: ...

    pay.__annotations__["amount"] = "str | float"
    with pytest.raises(ArgumentsError, match="finite"):
        sign(pay).bind('{"amount": 1e999, "note": null}')
    assert sign(pay).bind('{"amount": 1e-7, "note": ""}')[1] == {"amount": 1e-7, "note": ""}
    assert sign(pay).bind('{"amount": "null", "note": "nullnull"}')[1] == {"amount": "null", "note": "nullnull"}
    assert sign(pay).bind(f'{{"amount": {"1" * 30}.5, "note": null}}')[1] == {"amount": float("1" * 30 + ".5")}


@pytest.mark.parametrize(
    ("hint", "place", "words"),
    [
        (dict[str, int], "x", "an object with any keys"),
        (dict[str, Any], "x", "an object with any keys"),
        (list[dict[str, int]], r"x\[\]", "an object with any keys"),
        (Any, "x", "a value of any type"),
        (list[Any], r"x\[\]", "a value of any type"),
        (list, r"x\[\]", "a value of any type"),
        (tuple[int, str], "x", "'prefixItems'"),
        (int | dict[str, int], "x", "an object with any keys"),
    ],
    ids=str,
)
def test_a_hint_that_cannot_be_said_is_refused(hint, place, words):
    """The error names tool and parameter and says what to do."""

    def function(fine: int, x: Any) -> None: ...

    function.__annotations__["x"] = hint
    with pytest.raises(MisuseError, match=rf"^Tool 'search', parameter '{place}': strict mode does not .* {words}; "):
        sign(function)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"allOf": [{"type": "string"}]}, "'allOf'; write the parts out"),
        ({"type": "string", "not": {"const": "a"}}, "'not'; list the allowed values or types"),
        ({"type": "string", "if": {"const": "a"}, "then": False}, "'if'; use anyOf"),
        ({"type": "object", "properties": {}, "patternProperties": {"a": {}}}, "'patternProperties'; take a list"),
        ({"type": "object", "properties": {}, "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "object"}, "an object with any keys"),
        ({"type": "object", "properties": {}, "additionalProperties": True}, "an object with any keys"),
        ({"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}, "an object with any keys"),
        ({"type": "array"}, "a value of any type"),
        ({"anyOf": [{"required": ["a"]}, {"type": "null"}]}, "a value of any type"),
        ({"enum": []}, "a value of any type"),
        (True, "a value of any type"),
        (False, "a value of any type"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_said_is_refused(part, words):
    """The same for a plain JSON Schema, also deep inside it; the place is a path."""
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": part}}}}
    with pytest.raises(
        MisuseError, match=rf"^Tool 'search', parameter 'a\.b(\[\])?': strict mode does not support {words}.* "
    ):
        build_strict_schema(schema, "search")
    with pytest.raises(MisuseError, match=rf"^Tool 'search', parameter 'B(\[\])?': strict mode does not .* {words}"):
        build_strict_schema({"type": "object", "properties": {}, "$defs": {"B": part}}, "search")


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "$ref", "enum", "const", "allOf", "if"])
def test_the_root_has_to_be_a_plain_object(keyword):
    """A union or reference at the top is refused."""
    with pytest.raises(MisuseError, match=f"^Tool 'search': strict mode does not support {re.escape(repr(keyword))}"):
        build_strict_schema({"type": "object", "properties": {}, keyword: "#/$defs/a"}, "search")


def test_annotations_and_unknown_bounds_are_dropped():
    """Types of listed values are filled in, formats that it does not know and keywords beside a reference go."""
    parts = {
        "a": {"enum": ["x", 1, None]},
        "b": {"const": 1.5},
        "c": {"type": "string", "format": "uri", "minLength": 3, "examples": ["x"], "title": "C"},
        "d": {"type": "string", "format": "date"},
        "e": {"$ref": "#/definitions/E", "minLength": 3, "description": "An e."},
        "f": {"type": ["string", "null"], "default": "x"},
    }
    schema = {"type": "object", "properties": parts, "required": ["e"], "definitions": {"E": {"type": "string"}}}
    assert build_strict_schema({**schema, "x-vendor": 1, "title": "T"}, "search") == {
        "definitions": {"E": {"type": "string"}},
        "title": "T",
        "type": "object",
        "properties": {
            "a": {"type": ["string", "integer", "null"], "enum": ["x", 1, None]},
            "b": {"anyOf": [{"type": "number", "const": 1.5}, {"type": "null"}]},
            "c": {"type": ["string", "null"], "title": "C"},
            "d": {"type": ["string", "null"], "format": "date"},
            "e": {"anyOf": [{"$ref": "#/definitions/E"}], "description": "An e."},
            "f": {"type": ["string", "null"]},
        },
        "required": ["a", "b", "c", "d", "e", "f"],
        "additionalProperties": False,
    }


def test_the_branch_of_a_union_tells_which_nulls_to_take_out():
    """Listed values, types and keys tell the branches apart; where several are left, the first is taken."""
    text, number = {"type": "string"}, {"type": "number"}
    union = {
        "anyOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "v": text}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "b"}, "v": {"type": ["string", "null"]}}},
            {"type": "object", "properties": {"n": number, "v": text}},
            {"type": "object", "properties": {"n": text, "v": {}}},
            True,
        ]
    }
    schema = {"properties": {"x": {"type": "array", "items": union}, "y": union}}
    sent = [
        {"k": "a", "v": None},
        {"k": "b", "v": None},
        {"n": 5.0, "v": None},
        {"n": "s", "v": None},
        {"other": None},
        [None],
        "text",
    ]
    left = [{"k": "a"}, {"k": "b", "v": None}, {"n": 5.0}, {"n": "s", "v": None}, *sent[4:]]
    assert drop_nulls({"x": sent, "y": None, "z": None}, schema) == {"x": left, "y": None, "z": None}


def test_a_plain_schema_may_be_strict_too():
    """The model is told the strict form; what arrives is bound by the schema as it was written."""
    schema = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "minLength": 1},
            "depth": {"type": "integer", "default": 3},
            "inner": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
        "required": ["path"],
    }
    signature = build_schema_signature(lambda **_: None, schema, context_type=Context, name="search", strict=True)
    assert signature.parameters["required"] == ["path", "depth", "inner"]
    bound = signature.bind('{"path": "a", "depth": null, "inner": {"a": null}}')
    assert bound == ((), {"path": "a", "inner": {}})
    assert vars(signature.to_namespace(bound)) == {"path": "a", "depth": 3, "inner": {}}
    with pytest.raises(ArgumentsError, match="path: should be a string, got null"):
        signature.bind('{"path": null}')


def test_values_nested_as_deep_as_may_be_are_cleaned():
    """A tree of 100 levels, 200 deep, is gone through to its end."""
    node: dict[str, Any] = {"name": "leaf", "weight": None}
    for _ in range(65):
        node = {"name": "n", "kids": [node], "weight": None}

    def plant(tree: Node) -> None: ...

    tree = sign(plant).bind(json.dumps({"tree": node}))[1]["tree"]
    while tree.kids:
        assert tree.weight == 1.0
        tree = tree.kids[0]
    assert tree.name == "leaf"


PARTS = st.recursive(
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "integer", "minimum": 1},
            {"type": ["number", "null"]},
            {"enum": ["a", None]},
            {"const": 1},
            {"type": "boolean", "default": True},
        ]
    ),
    lambda part: (
        st.builds(lambda items: {"type": "array", "items": items}, part)
        | st.builds(lambda *branches: {"anyOf": list(branches)}, part, part)
        | st.builds(
            lambda parts, needed: {
                "type": "object",
                "properties": parts,
                "required": [n for n in parts if n in needed],
            },
            st.dictionaries(st.sampled_from("abcd"), part, max_size=3),
            st.sets(st.sampled_from("abcd")),
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("xyz"), PARTS, max_size=3))
def test_every_object_of_a_strict_schema_is_closed_and_complete(parts):
    """Random schemas: each object lists all its properties as required and takes no other; no default is left."""
    strict = build_strict_schema({"type": "object", "properties": parts}, "search")
    waiting = [strict]
    while waiting:
        part = waiting.pop()
        assert "default" not in part
        assert "type" in part or "anyOf" in part
        if part.get("type") == "object":
            assert part["additionalProperties"] is False
            assert part["required"] == list(part["properties"])
        waiting += [*part.get("properties", {}).values(), *part.get("anyOf", ()), *filter(None, [part.get("items")])]
