"""Arguments mean what their JSON says: `null` is none, `true` is no number, and no call changes another's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum
from typing import Any, Literal

import attrs
import pydantic
import pytest
from typing_extensions import TypedDict

from agentfsm import Agent, ArgumentsError, MisuseError, Outcome, State, tool
from agentfsm.models import from_openai
from agentfsm.planning import Plan
from agentfsm.testing import ScriptedModel, call, raw_call, say
from agentfsm.tools.schema.signature import compile_type
from tests.support.checks import results_of


@dataclass
class Line:
    cents: int
    paid: bool = False


@attrs.frozen
class Row:
    cents: int


class Bill(pydantic.BaseModel):
    lines: list[Line]


class Cat(TypedDict):
    kind: Literal["cat"]
    lives: int


class Dog(TypedDict):
    kind: Literal["dog"]
    lives: bool


class Size(IntEnum):
    ONE = 1


def taking(hint: Any, **options: Any) -> Any:
    """Make a tool with one parameter."""

    def act(value: object) -> str:
        return repr(value)

    act.__annotations__["value"] = hint
    return tool(**options)(act)


NO_NUMBER = "should be a number: true and false are none"
NO_BOOLEAN = "should be true or false: a number is neither"


@pytest.mark.parametrize(
    ("hint", "value", "flaw"),
    [
        (int, "true", f"value: {NO_NUMBER}, got true"),
        (float, "false", f"value: {NO_NUMBER}, got false"),
        (bool, "1", f"value: {NO_BOOLEAN}, got 1"),
        (list[int], "[1, true]", f"value[1]: {NO_NUMBER}"),
        (int | None, "true", f"value: {NO_NUMBER}"),
        (int | str, "true", f"value: {NO_NUMBER}"),
        (bool | str, "0", f"value: {NO_BOOLEAN}"),
        (tuple[bool, int], "[true, true]", f"value[1]: {NO_NUMBER}"),
        (dict[str, bool], '{"a": 0.0}', f"value.a: {NO_BOOLEAN}, got 0.0"),
        (Line, '{"cents": true, "paid": 1}', f"value.cents: {NO_NUMBER}, got true\n- value.paid: {NO_BOOLEAN}"),
        (Row, '{"cents": true}', f"value.cents: {NO_NUMBER}"),
        (list[Bill], '[{"lines": [{"cents": true}]}]', f"value[0].lines[0].cents: {NO_NUMBER}"),
        (Cat | Dog, '{"kind": "cat", "lives": true}', f"value.lives: {NO_NUMBER}"),
        (Cat | Dog, '{"kind": "dog", "lives": 1}', f"value.lives: {NO_BOOLEAN}"),
        (Literal[1, "a"], "true", f"value: {NO_NUMBER}"),
        (Literal[True, "a"], "1", f"value: {NO_BOOLEAN}"),
        (Size, "true", f"value: {NO_NUMBER}"),
        (Line, '{"cents": "x", "paid": 1}', f'got "x"\n- value.paid: {NO_BOOLEAN}'),
    ],
)
def test_a_boolean_is_no_number(hint, value, flaw):
    """Python counts True as 1, but a model that sends true for an amount has named none, at any depth."""
    with pytest.raises(ArgumentsError) as refused:
        taking(hint).bind_and_check(f'{{"value": {value}}}')
    assert flaw in str(refused.value)


@pytest.mark.parametrize(
    ("hint", "value", "bound"),
    [
        (int, '"5"', 5),
        (int, "1.0", 1),
        (bool, '"true"', True),
        (int | bool, "true", True),
        (int | bool, "1", 1),
        (list[int] | list[bool], "[true]", [True]),
        (Cat | Dog, '{"kind": "dog", "lives": true}', {"kind": "dog", "lives": True}),
        (Decimal, "1", Decimal(1)),
        (dict[str, Any], '{"x": [true, 1]}', {"x": [True, 1]}),
    ],
)
def test_what_means_the_same_is_taken(hint, value, bound):
    """A number in quotes is that number, and a union takes each of its types as it is."""
    _, found = taking(hint).bind_and_check(f'{{"value": {value}}}')
    assert found == {"value": bound}
    assert type(found["value"]) is type(bound)


def test_a_boolean_is_no_number_in_an_answer():
    """The form of an answer reads JSON as arguments do."""
    assert compile_type(int).parse('{"result": 1}') == 1
    with pytest.raises(ArgumentsError, match=f"result: {NO_NUMBER}, got true"):
        compile_type(int).parse('{"result": true}')


async def test_true_is_not_paid(store):
    """The call is not run, and the model reads why."""
    paid = []

    @tool
    async def pay(cents: int) -> None:
        """Pay."""
        paid.append(cents)

    run = await Agent(ScriptedModel(say("", call("pay", cents=True)), "No."), tools=[pay], store=store).run("pay")
    [result] = results_of(run.messages)
    assert (result.outcome, paid) == (Outcome.FAILED, [])
    assert f"cents: {NO_NUMBER}, got true" in result.content


@pytest.mark.parametrize("stream", [False, True])
async def test_null_stands_for_no_arguments(store, stream):
    """Local servers send it for a tool without parameters; where some are required, the model reads which."""

    @tool(read_only=True)
    async def now(zone: str = "UTC") -> str:
        """Tell the time."""
        return f"12:00 {zone}"

    @tool(read_only=True, parameters={"type": "object", "properties": {"zone": {"type": "string"}}})
    async def today(zone: str = "UTC") -> str:
        """Tell the date."""
        return f"Monday {zone}"

    @tool(read_only=True)
    async def look(at: str) -> str:
        """Look."""
        return at

    model = ScriptedModel(
        say("", raw_call("now", "null"), raw_call("today", " null\n"), raw_call("look", "null")), "ok"
    )
    agent = Agent(model, tools=[now, today, look], store=store)
    if stream:  # read-only calls start while the reply streams
        async with agent.stream("time?") as events:
            async for _ in events:
                pass
            run = events.run
    else:
        run = await agent.run("time?")
    assert run.state is State.DONE
    assert [result.content for result in results_of(run.messages)][:2] == ["12:00 UTC", "Monday UTC"]
    assert "at: required, but missing" in results_of(run.messages)[2].content
    assert {each.arguments for each in run.messages[1].calls} == {"{}"}


def test_null_stands_for_no_arguments_in_plans_and_histories():
    """A planner and another program write it, too."""
    assert Plan.from_json({"steps": [{"id": 1, "tool": "now", "arguments": None}]}).steps[0].arguments == {}
    called = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "null"}}
    history = from_openai(
        [
            {"role": "user", "content": "time?"},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "a", "content": "12:00"},
        ]
    )
    assert history[1].calls[0].arguments == "{}"


@dataclass
class Basket:
    items: list[str]


@pytest.mark.parametrize(
    "parameters", [None, {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}]
)
def test_calls_do_not_share_a_default(parameters):
    """A default that one call changes is that of the next one as the function has it, in any run of any tenant."""

    def add(item: str, seen: list[str] = [], basket: Basket = Basket(["bag"])) -> list[str]:  # noqa: B006, B008
        """Add."""
        seen.append(item)
        basket.items.append(item)
        return seen + basket.items

    made = tool(parameters=parameters)(add)
    found = []
    for _ in range(2):
        args, kwargs = made.bind_and_check('{"item": "x"}')
        assert made.to_namespace((args, kwargs)).seen is kwargs["seen"]
        found.append(add(*args, **kwargs))
    assert found == 2 * [["x", "bag", "x"]]


def test_a_default_that_cannot_be_copied_is_refused():
    """Better than calls that share it."""

    class Fixed(list):
        def __deepcopy__(self, memo):
            raise TypeError("one of a kind")

    with pytest.raises(MisuseError, match=r"'seen': all calls would share its default.*one of a kind.*Use None"):

        @tool
        def add(seen: list[str] = Fixed()) -> None:  # noqa: B008
            """Add."""
