"""Results of typed tools as structured data, in both revisions of the protocol."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NotRequired

import attrs
import jsonschema
import pytest
from mcp import Client
from pydantic import BaseModel, Field, computed_field
from typing_extensions import TypedDict

from agentfsm import ImagePart, Outcome, TextPart, tool
from agentfsm.mcp import MCPService
from agentfsm.tools.run_context import ToolReturn
from agentfsm.tools.tool import make_tool

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
NOON = datetime(2026, 11, 24, 12, tzinfo=UTC)


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    celsius: Annotated[float, Field(alias="temperature", le=60)]
    seen: datetime | None = None

    @computed_field
    @property
    def is_warm(self) -> bool:
        return self.celsius > 20


@dataclass
class Pair:
    left: int
    right: tuple[int, str]


class Row(TypedDict):
    x: int
    note: NotRequired[str]


@attrs.frozen
class Node:
    _secret: int
    below: list[Node] = attrs.field(factory=list)
    depth: int = attrs.field(default=3, init=False)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


ROME = Weather(city="Rome", temperature=21.5, seen=NOON)
ROME_JSON = {"city": "Rome", "temperature": 21.5, "seen": "2026-11-24T12:00:00Z", "is_warm": True}


def returning(hint, value):
    """Return a tool that declares this and returns that."""

    def fetch():
        return value

    fetch.__annotations__["return"] = hint
    return make_tool(fetch, name="fetch", description="Fetch it.", read_only=True)


async def listed_and_called(made, mode="auto"):
    """Return what a client is told of a tool, and the result of a call, which the client holds against its schema."""
    async with Client(MCPService([made], name="demo").server, mode=mode) as client:
        (listed,) = (await client.list_tools()).tools
        return listed, await client.call_tool(made.name, {})


OBJECTS = [
    (Weather, ROME, ROME_JSON),
    (Pair, Pair(1, (2, "é")), {"left": 1, "right": [2, "é"]}),
    (Row, {"x": 1}, {"x": 1}),
    (Node, Node(1, [Node(2)]), {"_secret": 1, "below": [{"_secret": 2, "below": [], "depth": 3}], "depth": 3}),
    ("dict[str, Any]", {"a": [None]}, {"a": [None]}),
    (dict, {1: "x"}, {"1": "x"}),
]
WRAPPED = [
    (list[Weather], [ROME], [ROME_JSON]),
    (int, 3, 3),
    (float, 2, 2),
    (bool, False, False),
    (Weather | None, None, None),
    (Weather | Row, {"x": 1}, {"x": 1}),
    (Literal[1, 2], 2, 2),
    (Color, Color.BLUE, 2),
    (set[int], {5}, [5]),
    (dict[str, int] | None, {"a": 1}, {"a": 1}),
]


@MODES
@pytest.mark.parametrize(
    ("hint", "value", "sent"), [*OBJECTS, *((hint, value, {"result": sent}) for hint, value, sent in WRAPPED)]
)
async def test_a_typed_result_is_structured_content(hint, value, sent, mode):
    """It fits the schema that is listed; the text is as before. What is no object is under "result"."""
    listed, result = await listed_and_called(returning(hint, value), mode)
    jsonschema.validate(sent, listed.output_schema)
    assert listed.output_schema["type"] == "object"
    assert (result.is_error, result.structured_content) == (False, sent)
    assert result.content[0].text


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (str, "5"),
        (Any, 5),
        (object, 5),
        (None, None),
        (int | str, 5),
        (datetime, NOON),
        (bytes, b"x"),
        (list, [1]),
        (list[Any], ["x", ImagePart.of(b"\x89PNG\r\n\x1a\n")]),
        (list[ImagePart], [ImagePart.of(b"\x89PNG\r\n\x1a\n")]),
        (TextPart, TextPart(text="x")),
        (ToolReturn, ToolReturn(outcome=Outcome.DONE, content="x")),
        ("Unknown", 5),
        (type, 5),
    ],
)
async def test_other_results_are_text_and_parts_only(hint, value):
    """Text, images, and what a hint does not say; a text such as "5" is never taken for a number."""
    listed, result = await listed_and_called(returning(hint, value))
    assert (listed.output_schema, result.structured_content, result.is_error) == (None, None, False)


def test_a_hint_is_none_of_the_schema_unless_it_is_used():
    """A definition is listed only where something refers to it."""
    tools = MCPService([returning(Weather, ROME)], name="demo")._tools[-1]
    assert "$defs" not in tools.list_tools()[0].output_schema


@MODES
@pytest.mark.parametrize(
    ("hint", "value", "words"),
    [
        (Weather, None, "should be an object"),
        (Weather, {"city": 1, "temperature": 2, "is_warm": False}, "city: should be a string"),
        (float, float("nan"), "not JSON"),
    ],
)
async def test_a_result_that_does_not_fit_is_an_error_that_has_it(hint, value, words, mode):
    """The tool was run: who reads the error learns that, why its result is refused, and what it was."""
    _, result = await listed_and_called(returning(hint, value), mode)
    assert (result.is_error, result.structured_content) == (True, None)
    said, whole = [block.text for block in result.content]
    assert said.startswith("fetch was run, but its result does not fit its return type")
    assert words in said
    assert whole


@MODES
async def test_a_failure_of_a_typed_tool_is_a_failure(mode):
    """It needs no structured content."""

    @tool
    def fails() -> Weather:
        """Fail."""
        raise RuntimeError("no disk")

    _, result = await listed_and_called(fails, mode)
    assert (result.is_error, result.structured_content) == (True, None)
    assert "no disk" in result.content[0].text
