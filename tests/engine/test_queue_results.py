"""What a call's result says: values of every kind, failures of every kind, and arguments that do not fit."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import datetime as dt
import json
from array import array
from collections import ChainMap
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from uuid import UUID

import anyio
import attrs
import pydantic
import pytest

from agentfsm import (
    Agent,
    ErrorType,
    ModelRetry,
    Outcome,
    RunContext,
    ToolCall,
    ToolEvent,
    ToolQueue,
    ToolRegistry,
    tool,
)
from agentfsm.core.events import ToolFinished
from agentfsm.testing import ScriptedModel, call, raw_call, say
from agentfsm.tokens.ledger import BYTES_PER_TOKEN
from tests.support.tool_calls import ran

SURROGATE = "\ud83d"


# Values


class Colour(Enum):
    RED = "red"


class Point(pydantic.BaseModel):
    x: int
    name: str = "点"


@dataclasses.dataclass
class Size:
    width: int
    parts: list[Point]


@attrs.frozen
class Box:
    size: Size
    note: str | None = None


class Strange:
    def __str__(self) -> str:
        return "a strange thing"


class Scalar:
    """A number of an array library, which is none of Python's."""

    def __init__(self, value: object) -> None:
        self.value = value

    def tolist(self) -> object:
        return self.value

    def __index__(self) -> int:
        if type(self.value) is not int:
            raise TypeError("only integer scalars can be converted to an index")
        return self.value


class Array:
    """An array, whose `repr` is short, whose `float` is that of its only item, and whose list is all of it."""

    def __init__(self, items: list, size: int | None = None, dtype: str = "int64") -> None:
        self.items, self.size, self.dtype = items, size or len(items), dtype

    def tolist(self) -> list:
        assert self.size < 1_000_000
        return self.items

    def __len__(self) -> int:
        return len(self.items)

    def __float__(self) -> float:
        return float(self.items[0])

    def __repr__(self) -> str:
        return "[0 ... 0]"


class Labelled(Array):
    def to_dict(self) -> dict:
        return dict(enumerate(self.items))


class Rounded(float):
    """A number that prints itself shortened: as a float of Python it is written whole."""

    def __repr__(self) -> str:
        return "about 1"


class Money:
    def __float__(self) -> float:
        return 5.0

    def __repr__(self) -> str:
        return "EUR 5"


VALUES = [
    ("text", "text"),
    ("", ""),
    ("天气 ☀", "天气 ☀"),
    (None, "(done, no output)"),
    (17, "17"),
    (1.5, "1.5"),
    (True, "true"),
    ({"city": "北京", "temp": 28}, '{"city":"北京","temp":28}'),
    (["a", None, 1], '["a",null,1]'),
    ((1, 2), "[1,2]"),
    ({}, "{}"),
    (b"bytes", '"bytes"'),
    (Point(x=1), '{"x":1,"name":"点"}'),
    (Size(width=2, parts=[Point(x=1)]), '{"width":2,"parts":[{"x":1,"name":"点"}]}'),
    (
        Box(size=Size(width=2, parts=[Point(x=3)])),
        '{"size":{"width":2,"parts":[{"x":3,"name":"点"}]},"note":null}',
    ),
    (dt.datetime(2027, 1, 31, 12, tzinfo=dt.UTC), '"2027-01-31T12:00:00Z"'),
    (dt.date(2027, 1, 31), '"2027-01-31"'),
    (Decimal("1.10"), '"1.10"'),
    (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
    (Colour.RED, '"red"'),
    (frozenset({1}), "[1]"),
    ({"at": dt.date(2027, 1, 31), 2: MappingProxyType({"a": ("b",)})}, '{"at":"2027-01-31","2":{"a":["b"]}}'),
    (Decimal("0.1000000000000000000000000000001"), '"0.1000000000000000000000000000001"'),
    (ChainMap({"a": range(3)}), '{"a":[0,1,2]}'),
    (array("h", [1, -2]), "[1,-2]"),
    (
        {"total": Scalar(5), "ok": Scalar(True), "share": Scalar(0.5), "day": Scalar(dt.date(2027, 1, 31))},
        '{"total":5,"ok":true,"share":0.5,"day":"2027-01-31"}',
    ),
    ({Scalar(5): [Array([[1, 2], [3, 4]])]}, '{"5":[[[1,2],[3,4]]]}'),
    (Rounded(1.25), "1.25"),
    (Fraction(1, 3), '"1/3"'),
]


@pytest.mark.parametrize(("value", "text"), VALUES, ids=[type(value).__name__ for value, _ in VALUES])
async def test_a_value_is_told_as_text(value, text):
    """Text stays text, and everything else is JSON in its own letters."""

    async def act():
        return value

    result = await ran(act)
    assert (result.outcome, result.content, result.shown_chars) == (Outcome.DONE, text, None)


NOT_WHOLE = [
    (Strange(), "Strange", "a strange thing", "the tool has to return plain values, a dataclass"),
    (Array([0] * 7, size=1_000_001), "Array", "[0 ... 0]", "of its 1,000,001 items, 1,000,000 could be kept"),
    (range(10**12), "range", "range(0, 1000000000000)", "1,000,000 could be kept"),
    (Labelled([1, 2]), "Labelled", "[0 ... 0]", "its to_dict() or tolist()"),
    (Array([1577836800000000000], dtype="datetime64[ns]"), "Array", "[0 ... 0]", "its times as texts"),
    (Money(), "Money", "EUR 5", "the tool has to return plain values"),
    ({1: "one", "1": "uno"}, "dict", "{1: 'one', '1': 'uno'}", 'keys of an object are both \\"1\\" as text'),
    (Box(size={"s": {None: 1, "None": 2}}), "Box", "None: 1", "keys that differ as text"),
]


@pytest.mark.parametrize(("value", "kind", "text", "wish"), NOT_WHOLE, ids=[kind for _, kind, _, _ in NOT_WHOLE])
async def test_a_value_that_is_not_kept_whole_says_so(value, kind, text, wish, caplog):
    """Text of Python may be short, so the result says it, and the log says it once for each tool."""

    @tool(read_only=True)
    async def act() -> object:
        return {"rows": value} if kind == "Strange" else value

    results = [
        await ToolQueue(ToolRegistry.of([act])).execute_all([ToolCall(id="t1.0", name="act", arguments="{}")])
        for _ in range(2)
    ]
    content = results[0][0].content
    assert f"Python's short form of a value of type {kind}, which may leave some of it out: " in content
    assert wish in content
    assert text in content
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"the tool 'act' returned a value that JSON cannot express ({kind})" in warning


async def test_a_generator_that_is_returned_is_not_run():
    """Its body belongs to the call, whose time and thread it would leave."""
    begun = []

    def lines():
        begun.append("line")
        yield "line"

    def act() -> object:
        return lines()

    result = await ran(act)
    assert result.outcome is Outcome.DONE
    assert "unread generator" in result.content
    assert begun == []


async def test_one_error_in_a_group_is_that_error():
    """A tool's own task group, such as any client of anyio has, makes nothing else of a hint to the model."""

    async def act() -> None:
        async with anyio.create_task_group():
            raise ModelRetry("Give an ISO date.")

    result = await ran(act)
    assert result.error_type is ErrorType.RETRY
    assert "Give an ISO date." in result.content


async def test_a_cyclic_value_is_done_and_says_so():
    """The effect stands, even if its result cannot be written."""
    cyclic: dict[str, object] = {}
    cyclic["self"] = cyclic

    async def act() -> dict:
        return cyclic

    result = await ran(act)
    assert result.outcome is Outcome.DONE
    assert "cannot be written as JSON" in result.content
    assert "dict" in result.content


@attrs.define
class Knot:
    other: object = None


async def test_a_cyclic_attrs_value_is_done_too():
    """Neither does one that is tied through attrs classes bring the process down."""
    knot = Knot()
    knot.other = knot

    async def act() -> Knot:
        return knot

    assert (await ran(act)).outcome is Outcome.DONE


async def test_a_value_nested_too_deep_is_done():
    """A hundred thousand brackets are no reason to lose a run."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]

    async def act() -> list:
        return deep

    assert (await ran(act)).outcome is Outcome.DONE
    while deep:
        deep = deep.pop()  # taken apart from outside, since Python would recurse


async def test_a_value_that_cannot_describe_itself_is_done():
    """A broken __str__ costs the text, not the call."""

    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    async def act() -> object:
        return Broken()

    result = await ran(act)
    assert result.outcome is Outcome.DONE
    assert "Broken" in result.content


@pytest.mark.parametrize("value", [f"half {SURROGATE}", {"a": f"half {SURROGATE}"}, [f"{SURROGATE}x"]], ids=ascii)
async def test_half_characters_do_not_reach_the_wire(value):
    """A lone surrogate is replaced, wherever it stands, and the rest of the result is kept."""

    async def act():
        return value

    result = await ran(act)
    assert result.outcome is Outcome.DONE
    assert "half" in result.content or "x" in result.content
    result.content.encode()
    assert "cannot be written" not in result.content


async def test_a_huge_result_is_cut_for_the_model_and_kept_whole(store):
    """The model sees the beginning, the end and a note; the journal has all of it."""
    whole = "".join(f"line {n}\n" for n in range(20_000))

    @tool(read_only=True, shown_bytes=400)
    async def read() -> str:
        """Read."""
        return whole

    agent = Agent(ScriptedModel(say("", call("read")), say("done", expect="are not shown")), tools=[read], store=store)
    run = await agent.run("read")
    result = run.messages[2]
    assert result.content == whole
    assert len(result.text) < 700
    assert result.text.startswith("[read: done]\nline 0\n")
    assert result.text.endswith("line 19999\n")
    first, end = result.cut
    assert f"characters {first} to {end} of {len(whole)} are not shown" in result.text
    assert f"in result t1.0 from character {first}" in result.text
    (finished,) = [event for event in await agent.history(run.id) if isinstance(event, ToolFinished)]
    assert finished.result.content == whole


@pytest.mark.parametrize(
    ("limit", "enough"),
    [("shown_bytes", 400), ("shown_tokens", 400 // BYTES_PER_TOKEN)],
)
async def test_a_result_just_within_the_limit_is_not_cut(limit, enough):
    """The limit is what is shown, not what is refused; by itself the queue takes three bytes for a token."""

    async def act() -> str:
        return "x" * 400

    assert (await ran(act, **{limit: enough})).text == "[act: done]\n" + "x" * 400
    less = await ran(act, **{limit: enough - 1})
    assert "are not shown" in less.text
    assert 0.9 * 400 < less.shown_chars < 400


@pytest.mark.parametrize("char", ["x", "é", "中", "☀", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("options", [{"shown_bytes": 999}, {"shown_tokens": 333}, {"shown_bytes": 3}], ids=str)
async def test_no_script_gets_more_room_than_another(char, options):
    """What is shown is bounded in bytes and tokens, whatever the letters, and uses what there is."""
    whole = f"{char * 20_000}x{char}"

    async def act() -> str:
        return whole

    result = await ran(act, **options)
    first, end = result.cut
    size = len((whole[:first] + whole[end:]).encode())
    limit = options.get("shown_bytes", 333 * BYTES_PER_TOKEN + BYTES_PER_TOKEN - 1)
    assert 0.9 * limit - len(char.encode()) * 2 < size <= limit


@pytest.mark.parametrize("waits", [False, True])
async def test_a_coroutine_that_an_async_function_returns_is_awaited(waits):
    """An `await` was forgotten: what nothing has run of must not be told as done."""
    made = []

    async def pay() -> str:
        await anyio.lowlevel.checkpoint()
        made.append("payment")
        return "paid"

    async def act() -> object:
        if waits:
            await anyio.lowlevel.checkpoint()
        return pay()

    result = await ran(act)
    assert (result.outcome, result.content, made) == (Outcome.DONE, "paid", ["payment"])


async def test_a_coroutine_that_is_returned_has_the_time_of_its_call():
    """It is cut off with it."""

    async def act() -> object:
        return anyio.sleep_forever()

    assert (await ran(act, timeout_s=0.001)).outcome is Outcome.TIMED_OUT


async def test_a_coroutine_that_a_plain_function_returns_is_awaited():
    """A decorator that hides `async def` does not turn the answer into the name of a coroutine."""

    async def inner() -> str:
        await anyio.lowlevel.checkpoint()
        return "the answer"

    def act():
        return inner()

    result = await ran(act)
    assert (result.outcome, result.content) == (Outcome.DONE, "the answer")


# Failures


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class MuteRetry(ModelRetry):
    def __str__(self) -> str:
        raise RuntimeError("no words")


ODD = [
    ValueError("plain"),
    SystemExit(3),
    ExceptionGroup("several", [ValueError("one"), OSError("two")]),
    BaseExceptionGroup("worse", [SystemExit(1), ValueError("one")]),
    MuteError(),
    MuteRetry(),
    ModelRetry(f"half {SURROGATE}"),
    ValueError(f"half {SURROGATE}"),
    ValueError("x" * 1_000_000),
    ModelRetry("x" * 1_000_000),
    RecursionError("too deep"),
    MemoryError(),
    StopAsyncIteration("stop"),
    StopIteration("stop"),
    TimeoutError("of its own"),
]


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
async def test_whatever_a_tool_raises_is_its_result(error, plain, beside):
    """No error of a tool leaves the queue, and none is longer than a model can use."""

    async def act() -> None:
        raise error

    def plain_act() -> None:
        raise error

    result = await ran(plain_act if plain else act, beside=beside)
    assert result.outcome is Outcome.FAILED
    assert result.content.strip()
    assert len(result.text) < 40_000
    result.content.encode()
    assert "Traceback" not in result.content


async def test_a_group_of_errors_names_what_is_in_it():
    """The model reads the causes, not only that there were several."""

    async def act() -> None:
        raise ExceptionGroup("several", [ValueError("bad order"), OSError("bad line")])

    content = (await ran(act)).content
    assert "bad order" in content
    assert "bad line" in content


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
async def test_a_cancelled_future_inside_a_tool_is_a_failure_of_the_tool(anyio_backend, beside):
    """On asyncio a tool may meet somebody else's cancellation; that ends its call, and not the run."""

    async def act() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    result = await ran(act, beside=beside)
    assert result.outcome is Outcome.FAILED


async def test_a_tool_may_use_tasks_of_its_own():
    """Its task group's errors come as the group that it is, and are its result."""

    async def act() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fails)
            await anyio.sleep_forever()

    async def fails() -> None:
        raise LookupError("not there")

    result = await ran(act)
    assert result.outcome is Outcome.FAILED
    assert "not there" in result.content


# Arguments


async def transfer(amount: int, to: str, note: str = "") -> str:
    """Transfer."""
    return f"{amount} to {to} {note}"


async def test_all_bad_arguments_are_told_at_once():
    """The model can mend them in one go, and nothing was run."""
    result = await ran(transfer, '{"amount": "much", "too": "Ann"}')
    assert result.outcome is Outcome.FAILED
    for word in ("amount", "too", "to", "integer", "required"):
        assert word in result.content


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"amount": 1, "to": "A', "EOF"),
        ("[1]", "array"),
        ("nul", "EOF"),
        ('{"amount": 1, "amount": 2, "to": "A"}', "duplicate"),
        ('{"amount": NaN, "to": "A"}', "NaN"),
        ("[" * 200_000, "nested more than 200 deep"),
        ('{"amount": 1, "to": "A"} {"amount": 2, "to": "A"}', "trailing"),
        ('{"amount": 1' + "0" * 5_000 + ', "to": "A"}', "digits"),
    ],
    ids=lambda text: text[:12],
)
async def test_arguments_that_are_no_json_object_are_answered_with_the_reason(store, text, reason):
    """They go back on the wire as {}, the model reads what is wrong, and the call was not run."""
    made = tool(transfer)
    model = ScriptedModel(say("", raw_call("transfer", text)), say("done", expect=reason))
    run = await Agent(model, tools=[made], store=store).run("pay")
    assert run.output == "done"
    (asked,) = run.messages[1].calls
    assert asked.arguments == "{}"
    assert asked.malformed is not None
    assert len(asked.malformed) < 3_000
    result = run.messages[2]
    assert (result.outcome, result.call_id) == (Outcome.FAILED, "t1.0")
    assert "Nothing was run" in result.content


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"amount": 1, "to": "A"}\n```',
        '{"amount": 1, "to": "A"} thanks',
        "{'amount': 1, 'to': 'A',}",
    ],
    ids=lambda text: text[:12],
)
async def test_arguments_that_can_be_mended_are(store, text):
    """They run, go back on the wire and are recorded as they were mended; what the model wrote is kept beside them."""
    run = await Agent(
        ScriptedModel(say("", raw_call("transfer", text)), "ok"), tools=[tool(transfer)], store=store
    ).run("pay")
    (asked,) = run.messages[1].calls
    assert json.loads(asked.arguments) == {"amount": 1, "to": "A"} == run.calls[0].arguments
    assert (asked.malformed, asked.repaired) == (None, text)
    assert (run.messages[2].outcome, run.messages[2].content) == (Outcome.DONE, "1 to A ")


async def test_no_arguments_at_all_are_an_empty_object(store):
    """Models send an empty text for want of parameters."""

    @tool
    async def ping() -> str:
        """Ping."""
        return "pong"

    run = await Agent(ScriptedModel(say("", raw_call("ping", "  ")), "done"), tools=[ping], store=store).run("ping")
    assert [(record.outcome, record.arguments) for record in run.calls] == [(Outcome.DONE, {})]


async def test_an_unknown_tool_is_answered_with_the_nearest_name(store):
    """The model reads what there is, and what it may have meant."""
    model = ScriptedModel(
        say("", call("tranfser", amount=1), call("../etc/passwd"), call("")), say("done", expect="there is no tool")
    )
    run = await Agent(model, tools=[tool(transfer)], store=store).run("pay")
    near, far, _ = run.messages[2:5]
    assert "Did you mean 'transfer'?" in near.content
    assert "Did you mean" not in far.content
    assert "transfer" in far.content
    assert [asked.name for asked in run.messages[1].calls] == ["tranfser", "___etc_passwd", "unnamed"]


async def test_many_tools_are_not_all_listed():
    """A catalogue of a hundred is not sent again with each mistake."""

    async def act() -> None:
        """Act."""

    registry = ToolRegistry.of([tool(name=f"tool_{n:03}")(act) for n in range(100)])
    (result,) = await ToolQueue(registry=registry).execute_all(
        [ToolCall(id="t1.0", name="nothing-like-it", arguments="{}", key="k")]
    )
    assert "and 70 more" in result.content
    assert len(result.content) < 1_000


# What surrounds a call


async def test_context_variables_do_not_leak_between_siblings():
    """What one call sets is not seen by the next, nor by the caller."""
    who = contextvars.ContextVar("who", default="nobody")

    async def act(n: int) -> str:
        seen = who.get()
        who.set(f"call {n}")
        await anyio.lowlevel.checkpoint()
        return seen

    for safe, limit in ((False, 20), (True, 2), (True, 20)):
        who.set("caller")
        queue = ToolQueue(registry=ToolRegistry.of([tool(name="act", concurrency_safe=safe)(act)]), limit=limit)
        wanted = [ToolCall(id=f"t1.{n}", name="act", arguments=f'{{"n": {n}}}', key="k") for n in range(6)]
        results = await queue.execute_all(wanted)
        assert {result.content for result in results} == {"caller"}
        assert who.get() == "caller"


async def test_a_plain_tool_sees_the_callers_context_variables():
    """A thread has a copy of the caller's, and cannot change them."""
    who = contextvars.ContextVar("who", default="nobody")
    who.set("ann")

    def act() -> str:
        seen = who.get()
        who.set("the thread")
        return seen

    assert (await ran(act)).content == "ann"
    assert who.get() == "ann"


async def test_progress_is_told_to_whoever_watches(store):
    """`ctx.progress` shows in the stream with its call, and is nothing where nobody watches."""

    @tool
    async def dig(ctx: RunContext[None]) -> str:
        """Dig."""
        await ctx.progress("half way")
        await ctx.progress("done soon")
        return "gold"

    agent = Agent(ScriptedModel(say("", call("dig")), "done", say("", call("dig")), "done"), tools=[dig], store=store)
    assert (await agent.run("dig")).output == "done"
    async with agent.stream("dig") as stream:
        events = [event async for event in stream]
    progress = [event for event in events if isinstance(event, ToolEvent) and event.type == "tool_progress"]
    assert [(event.message, event.tool, event.call_id, event.turn) for event in progress] == [
        ("half way", "dig", "t1.0", 1),
        ("done soon", "dig", "t1.0", 1),
    ]
    kinds = [str(event.type) for event in events if isinstance(event, ToolEvent)]
    assert kinds == ["tool_queued", "tool_started", *["tool_progress"] * 2, "tool_completed", "queue_drained"]


async def test_arguments_of_the_history_are_those_that_ran(store):
    """What the model wrote is kept as it wrote it."""
    text = '{ "amount": 5, "to":"Ann" }'
    agent = Agent(ScriptedModel(say("", raw_call("transfer", text)), "ok"), tools=[tool(transfer)], store=store)
    run = await agent.run("pay")
    assert run.messages[1].calls[0].arguments == text
    assert json.loads(text) == run.calls[0].arguments
    assert run.messages[2].content == "5 to Ann "
