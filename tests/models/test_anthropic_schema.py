"""The part of JSON Schema that Anthropic takes: as its own package would make it of the same schema."""

from types import MappingProxyType
from typing import Literal

import anthropic
import pydantic
import pytest

from agentfsm.models.anthropic.schema import adapt_schema, unsupported_schema
from agentfsm.tools.schema.strict import build_strict_schema


class Leg(pydantic.BaseModel):
    to: str = pydantic.Field(min_length=2, pattern="^[A-Z]", description="A city.")
    on: str = pydantic.Field(json_schema_extra={"format": "date"})
    kind: Literal["train", "bus"]


class Trip(pydantic.BaseModel):
    """A trip."""

    days: int = pydantic.Field(ge=1, le=30)
    legs: list[Leg] = pydantic.Field(min_length=1, max_length=9)
    guide: Leg | None


SCHEMAS = {
    "a model": Trip.model_json_schema(),
    "bounds": {"type": "integer", "minimum": 1, "maximum": 10, "description": "A number"},
    "formats": {
        "type": "object",
        "properties": {name: {"type": "string", "format": name} for name in ("uuid", "uri-x")},
    },
    "one of": {"oneOf": [{"type": "string"}, {"type": "null"}]},
    "all of": {"allOf": [{"type": "string"}, {"const": "x"}]},
    "items": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 2},
    "an enum": {"type": "string", "enum": ["a", "b"]},
    "a constant": {"type": "object", "const": 7, "title": "Seven"},
    "an enum of objects": {"type": "object", "properties": {}, "enum": [{"a": 1}], "additionalProperties": True},
    "a reference": {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}},
    "one item": {"type": "array", "items": {"enum": ["a", None]}, "minItems": 1},
}


def sorted_words(value):
    """The same without an order, and without the quotes of a description, which the two set in different ways."""
    if isinstance(value, dict):
        return {key: sorted_words(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [sorted_words(each) for each in value]
    return value.replace('"', "").replace("'", "") if isinstance(value, str) else value


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_what_the_package_makes_of_it(name):
    """Keyword by keyword; an object is closed."""
    schema = build_strict_schema(SCHEMAS[name], "t") if name == "a model" else SCHEMAS[name]
    ours, theirs = adapt_schema(schema), anthropic.transform_schema(schema)
    if name == "formats":
        ours["additionalProperties"] = False  # schemas for answers and strict tools are closed before they come here
    assert sorted_words(ours) == sorted_words(theirs)


def test_the_schema_that_was_given_stays_as_it_is():
    """It is validated against afterwards, and may be a read-only view at any depth."""
    schema = MappingProxyType({"type": "array", "items": MappingProxyType({"type": "string", "maxLength": 3})})
    assert adapt_schema(schema) == {"type": "array", "items": {"type": "string", "description": "{maxLength: 3}"}}
    assert schema["items"]["maxLength"] == 3


def test_what_is_no_schema_of_words_is_passed_on():
    """`true` is a schema, and a default of any kind is told."""
    assert adapt_schema({"properties": {"x": True}, "default": {"a": (1,)}}) == {
        "properties": {"x": True},
        "description": '{default: {"a": [1]}}',
    }


REFERS = {
    "to itself": ({"$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}, True),
    "to each other": ({"$defs": {"a": {"anyOf": ({"$ref": "#/$defs/b"},)}, "b": {"$ref": "#/$defs/a"}}}, True),
    "to the whole": ({"properties": {"next": {"$ref": "#"}}}, True),
    "to a place above": ({"properties": {"a/b": {"items": [{"$ref": "#/properties/a~1b/items"}]}}}, True),
    "twice to one": ({"$defs": {"x": {}, "y": {"$ref": "#/$defs/x"}}, "anyOf": [{"$ref": "#/$defs/y"}] * 2}, False),
    "to an item": ({"allOf": [{}, {"$ref": "#/allOf/0"}]}, False),
    "nowhere": ({"items": {"$ref": "#/$defs/none/at/all"}}, False),
    "elsewhere": ({"items": {"$ref": "https://example.com/schema#/items"}}, False),
    "as a name": ({"properties": {"$ref": {"type": "string"}}}, False),
}


@pytest.mark.parametrize("where", REFERS)
def test_a_schema_that_refers_back_to_itself_is_refused(where):
    """The provider takes references, and none that come round."""
    schema, is_circular = REFERS[where]
    assert (unsupported_schema(schema) is not None) == is_circular
    assert (unsupported_schema(MappingProxyType(schema)) is not None) == is_circular
