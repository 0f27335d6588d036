"""Types of inputs and results, from the hints of the steps: shown as a schema, and checked as early as possible."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from inspect import Parameter, Signature
from io import StringIO
from typing import Annotated, Any, Literal

import attrs
import pytest
from pydantic import BaseModel, BeforeValidator, Field

from agentfsm import Agent, MisuseError
from agentfsm.evals import Case, evaluate
from agentfsm.flow import Flow, Step, agent_step, each, step, until
from agentfsm.mcp.server.served_runs import ServedRuns
from agentfsm.schedules import Schedules
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.gateways import named, serving

pytestmark = pytest.mark.anyio


class Order(BaseModel):
    """An order."""

    id: str
    cents: int = Field(gt=0)


@attrs.frozen
class Point:
    """A point."""

    x: int


@step
async def book(order: Order, day: date) -> str:
    """Book an order.

    Args:
        order: The order.
        day: Day of the booking.
    """
    return f"{order.id} {day}"


@step(depends_on=[book])
async def tell(book: str, order: Order, title: str = "Booked") -> str:
    """Tell about it."""
    return f"{title}: {book} {order.cents}"


SHOP = Flow([tell, book], name="shop")
FITTING = {"order": {"id": "o1", "cents": 5}, "day": "2026-11-29"}
ORDER = {
    "description": "An order.",
    "type": "object",
    "properties": {"id": {"type": "string"}, "cents": {"type": "integer", "exclusiveMinimum": 0}},
    "required": ["id", "cents"],
}


def test_the_inputs_of_a_flow_have_a_schema():
    """From the hints, docstrings and defaults of the parameters; of steps that repeat others, too."""
    wanted = {
        "type": "object",
        "properties": {
            "order": {"$ref": "#/$defs/Order", "description": "The order."},
            "day": {"type": "string", "format": "date", "description": "Day of the booking."},
            "title": {"type": "string", "default": "Booked"},
        },
        "required": ["order", "day"],
        "additionalProperties": False,
        "$defs": {"Order": ORDER},
    }
    assert SHOP.input_schema == wanted
    assert Flow([SHOP.as_step()]).input_schema == wanted
    assert Flow([until([book, tell], lambda tell: True, times=1)]).input_schema == wanted
    assert SHOP.as_tool().parameters == wanted
    listed = Flow([each(SHOP.as_step(), over="orders", item="order")]).input_schema
    assert listed["properties"]["orders"] == {"type": "array", "items": wanted["properties"]["order"]}
    assert listed["required"] == ["orders", "day"]


def test_what_has_no_hint_takes_any_value():
    """So do conditions, keys and prompts that are lambdas; a prompt may have hints."""

    def ask(review: str, stars: Literal[1, 2, 3]) -> str:
        return review

    agent = Agent(ScriptedModel(), name="mood")
    flow = Flow([agent_step(agent, ask, when=lambda review, level: bool(level)), named_step("a", {"x": Any})])
    assert flow.input_schema["properties"] == {
        "review": {"type": "string"},
        "stars": {"type": "integer", "enum": [1, 2, 3]},
        "level": {},
        "x": {},
    }


def named_step(name: str, takes: dict[str, Any], gives: Any = Any, **options: Any) -> Step:
    """Return a step with these hints."""

    def act(**_: object) -> int:
        return 1

    parameters = [Parameter(each, Parameter.KEYWORD_ONLY, annotation=hint) for each, hint in takes.items()]
    act.__signature__ = Signature(parameters, return_annotation=gives)
    return step(act, name=name, **options)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"order": {"id": 1, "cents": 0}, "day": "x"},
            "order.id: should be a valid string, got 1; order.cents: should",
        ),
        ({**FITTING, "day": "x"}, "day: should be a valid date"),
        ({**FITTING, "title": None}, "title: should be a valid string, got null"),
        ({**FITTING, "order": {"id": "o", "cents": True}}, "order.cents: should be a number: true and false are none"),
    ],
)
async def test_inputs_that_do_not_fit_begin_no_run(given, reason):
    """With the field and the reason; the journal has the inputs as they were given."""
    flow = SHOP.with_(store=MemoryStore())
    for begin in (flow.start, flow.run, flow.submit):
        with pytest.raises(MisuseError, match="the inputs of the flow do not fit: ") as caught:
            await begin(given)
        assert reason in str(caught.value)
        with pytest.raises(MisuseError, match="do not fit"):
            await begin(json.dumps(given))
    assert [run async for run in flow.runs.iterate()] == []
    run = await flow.run({"order": {"id": "o1", "cents": "5"}, "day": "2026-11-29"})
    assert json.loads(run.header.prompt[0].text)["order"] == {"id": "o1", "cents": "5"}
    assert run.output == '{"tell": "Booked: o1 2026-11-29 5"}'


async def test_a_fork_with_inputs_that_do_not_fit():
    """It is refused as a new run is."""
    flow = SHOP.with_(store=MemoryStore())
    run = await flow.submit(FITTING)
    for wrong in ({**FITTING, "day": "x"}, '{"day": 1}', "not JSON"):
        with pytest.raises(MisuseError):
            await flow.fork(run.id, prompt=wrong)
    other = await flow.fork(run.id, prompt={**FITTING, "title": "other"})
    assert "other" in str(other.header.prompt)


async def test_items_that_do_not_fit_are_named_by_their_places():
    """A fallback stands for items that do not fit, so those are not checked; null is a list without items."""

    @step(read_only=True)
    async def double(item: int) -> int:
        return 2 * item

    flow = Flow([each(double, over="items")])
    with pytest.raises(MisuseError, match=r"items\[1\]: should be a valid integer"):
        flow.start({"items": [1, "x"]})
    with pytest.raises(MisuseError, match="items: should be a valid array"):
        flow.start({"items": "x"})
    assert (await flow.run({"items": None})).output == '{"double": []}'
    run = await Flow([each(double, over="items", fallback=0)]).run({"items": [1, "x"]})
    assert run.output == '{"double": [2, 0]}'


async def test_a_flow_within_another_is_not_begun_with_inputs_that_do_not_fit():
    """The step fails and says that nothing has begun, as a step of an agent does and as a function."""

    @step
    async def order() -> object:
        return {"id": "o1", "cents": 0}

    as_agent = agent_step(SHOP, lambda order, day: {"order": order, "day": day}, depends_on=[order])
    for inner in (SHOP.as_step(depends_on=[order]), as_agent):
        run = await Flow([order, inner]).run({"day": "2026-11-29"})
        assert "the inputs of the flow do not fit: order.cents: should be greater than 0, got 0)" in run.stop_message
        assert "may have happened" not in run.stop_message


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # uvicorn
async def test_doors_refuse_inputs_that_do_not_fit_and_show_the_schema():
    """Over HTTP it is an error of the client."""
    async with serving(SHOP.with_(store=MemoryStore())) as client:
        body = {"prompt": json.dumps({**FITTING, "day": "x"})}
        wrong = await client.post("/v1/runs", json=body, headers=named())
        shown = await client.get("/v1/agents/shop", headers=named())
    assert (wrong.status_code, "day: should be a valid date" in wrong.text) == (400, True)
    assert shown.json()["input_schema"] == SHOP.input_schema
    tools, _ = ServedRuns(agent=SHOP).build_tools()
    assert json.dumps(SHOP.input_schema) in tools.get("start").description


async def test_an_agent_calls_a_flow_with_its_inputs():
    """By name, and what does not fit is a refusal that its model reads."""
    script = say("", call("shop", **FITTING)), say("", call("shop", order={"id": "o1"}, day="x")), say("done")
    run = await Agent(ScriptedModel(*script), tools=[SHOP.as_tool()]).run("Book it.")
    results = [each.content for each in run.messages if hasattr(each, "outcome")]
    assert results[0] == '{"tell": "Booked: o1 2026-11-29 5"}'
    assert "order.cents: required, but missing" in results[1]


async def test_evaluations_and_schedules_refuse_inputs_that_do_not_fit():
    """An evaluation before its run begins, a schedule when it is added."""
    flow, wrong = SHOP.with_(store=MemoryStore()), {**FITTING, "day": "x"}
    with pytest.raises(MisuseError, match="day: should be a valid date"):
        await evaluate(flow, [Case(input=json.dumps(wrong))])
    with pytest.raises(MisuseError, match="day: should be a valid date"):
        await Schedules(flow.store).add(flow, "daily", cron="0 9 * * *", prompt=wrong)


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        (int, float, [{"type": "integer"}, {"type": "number"}]),
        (str, date, [{"type": "string"}, {"type": "string", "format": "date"}]),
        (Any, str, [{"type": "string"}]),
        (str, Annotated[str, Field(description="The value.")], [{"type": "string"}]),
        (int, str, None),
        (list[int], list[str], None),
        (Order, list[Order], None),
    ],
    ids=str,
)
def test_steps_that_take_the_same_input_agree_on_it(first, second, parts):
    """Or their types are both checked; types that contradict each other are refused with the names."""
    steps = [named_step("a", {"x": first}), named_step("b", {"x": second})]
    if parts is None:
        with pytest.raises(MisuseError, match=r"the steps 'a' and 'b' take the input 'x', as .* and as .*"):
            Flow(steps)
    else:
        found = Flow(steps).input_schema["properties"]["x"]
        assert found.get("allOf", [found]) == parts


@pytest.mark.parametrize(
    ("gives", "takes"),
    [
        (int, str),
        (list[int], str),
        (list[int], list[str]),
        (dict[str, int], list[int]),
        (Order, str),
        (Point, int),
        (None, str),
        (str, Order),
    ],
    ids=str,
)
def test_a_result_that_its_taker_always_refuses_is_found_when_the_flow_is_made(gives, takes):
    """In a flow, in a cycle, also with the repetition before, in a list and in a compensation."""
    first = named_step("first", {}, gives)
    with pytest.raises(MisuseError, match=r"step 'second' takes the result of 'first' as .*, and 'first' returns "):
        Flow([first, named_step("second", {"first": takes}, depends_on=["first"])])
    with pytest.raises(MisuseError, match="step 'second' takes the result of 'first'"):
        until([first, named_step("second", {"first": takes})], lambda: True, times=1, name="both")
    with pytest.raises(MisuseError, match="step 'undo' takes the result of 'first'"):
        Flow([named_step("first", {}, gives, compensate=named_step("undo", {"first": takes}))])
    items = each(named_step("item", {"n": int}, gives), over="numbers", name="list")
    with pytest.raises(MisuseError, match="step 'second' takes the result of 'list'"):
        Flow([items, named_step("second", {"list": list[takes]}, depends_on=["list"])])


@pytest.mark.parametrize(
    ("gives", "takes"),
    [
        (str, int),
        (float, int),
        (int, float),
        (int | None, int),
        (int | str, int),
        (str, date),
        (date, datetime),
        (Decimal, float),
        (dict[str, Any], Order),
        (list[dict[str, str]], list[Order]),
        (Order, Point),
        (list, set[int]),
        (str, Literal["a"]),
        (int, Annotated[str, BeforeValidator(str)]),
        (Any, str),
        (object, int),
        (StringIO, str),
        ("Unknown", str),
    ],
    ids=str,
)
def test_a_result_that_may_fit_is_left_alone(gives, takes):
    """Texts may be numbers, values may be converted, and some types are not known."""
    first = named_step("first", {}, gives)
    assert Flow([first, named_step("second", {"first": takes}, depends_on=["first"])]).inputs == ()


def test_a_variant_of_a_flow_compiles_no_type_again():
    """`with_` is called for each run of some doors."""
    steps = [named_step(f"s{number}", {"x": int}) for number in range(3)]
    flow = Flow(steps)
    made = [types.signature for each in flow.ordered_steps for types in each.types]
    again = flow.with_(store=MemoryStore())
    assert all(a is b.signature for a, b in zip(made, [t for s in again.ordered_steps for t in s.types], strict=True))
