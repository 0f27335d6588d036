"""A model of a user's own: what it returns, raises and emits is looked at, and what is wrong is told to its author."""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm import (
    Agent,
    Limits,
    MisuseError,
    ModelReplyError,
    ModelUnavailableError,
    Settings,
    TextDelta,
    Usage,
    tool,
)
from agentfsm.core.messages import NativeReply
from agentfsm.ports import CallChunk, Emit, FinishChunk, Model, ProposedCall, Reply, Request, TextChunk, ThinkingChunk
from agentfsm.testing import FunctionModel


@tool(read_only=True)
def search(query: str) -> str:
    """Search."""
    return query


def having(**fields: Any) -> Model:
    """Return a model with these fields."""
    made: Model = type("Mine", (Model,), {"name": "mine", **fields})()
    return made


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ({"name": 5}, r"Mine\(name=5\): give a string"),
        ({"name": " "}, r"Mine\(name=' '\): give a string"),
        ({"window_tokens": None}, r"Mine\(window_tokens=None\): give a whole number, 1 or more"),
        ({"window_tokens": 0}, r"Mine\(window_tokens=0\)"),
        ({"window_tokens": float("nan")}, r"Mine\(window_tokens=nan\)"),
        ({"output_modes": "tool"}, r"Mine\(output_modes='tool'\): give a tuple of at least one OutputMode"),
        ({"output_modes": ()}, r"Mine\(output_modes=\(\)\)"),
    ],
    ids=repr,
)
def test_a_field_of_a_model_that_cannot_be_is_refused(model, match):
    """It is told when the agent is made, and not by an arithmetic error in its first run."""
    with pytest.raises(MisuseError, match=match):
        Agent(having(**model))


# Replies.


def replying(reply: Any) -> Model:
    """Return a model with this `reply`."""
    return having(reply=reply)


def plain(_self: Model, _request: Request, _emit: Emit | None = None) -> Any:
    """Reply without waiting, which nobody can await."""
    return Reply(text="x")


def returning(value: Any) -> Any:
    """Return a `reply` that returns this."""

    async def reply(_self: Model, _request: Request, _emit: Emit | None = None) -> Any:
        return value

    return reply


def odd(**fields: Any) -> Reply:
    """A reply as somebody makes one without a type checker."""
    return Reply(**fields)


def odd_native() -> NativeReply:
    """What stands beside text and calls, as somebody makes it without a type checker."""
    content: Any = b"{}"
    return NativeReply(provider="mine", content=content)


def proposed(**fields: Any) -> ProposedCall:
    """A call of such a reply."""
    return ProposedCall(**{"id": "1", "name": "search", "arguments": "{}", **fields})


async def generating(_self: Model, _request: Request, _emit: Emit | None = None) -> Any:
    """Yield where a reply is returned."""
    yield "x"


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        (plain, r"Mine\.reply returned Reply, not an awaitable: write `async def reply`"),
        (generating, r"Mine\.reply returned async_generator, not"),
        (returning("hello"), r"Mine\.reply returned str: return a Reply"),
        (returning(None), r"Mine\.reply returned NoneType: return a Reply"),
        (returning(Reply(calls=({"name": "x"},))), "calls that are dict: give a tuple of ProposedCall"),  # type: ignore[arg-type]
        (returning(odd(text=None)), r"whose text is of the type NoneType: give '' for a reply without text"),
        (returning(odd(calls=None)), r"whose calls is of the type NoneType: give a tuple of ProposedCall"),
        (
            returning(odd(text="x", finish_reason="max_tokens")),
            r"finish_reason is of the type str: give a FinishReason",
        ),
        (returning(odd(text="x", usage={})), r"whose usage is of the type dict: give Usage\("),
        (returning(odd(text="x", native="{}")), r"whose native is of the type str: give NativeReply\("),
        (
            returning(odd(text="x", native=NativeReply(provider="mine", content=b"{}"))),
            "a native whose content is of the type bytes",
        ),  # type: ignore[arg-type]
        (returning(odd(text="x", model=None)), "whose model is of the type NoneType: give the name of the model"),
        (returning(odd(calls=(proposed(id=None),))), "a call whose id is of the type NoneType: give a string"),
        (returning(odd(calls=(proposed(arguments={}),))), "whose arguments is of the type dict: give the JSON text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_no_reply_is_said_to_be_none(reply, match):
    """A model of one's own is told what it has to return, and the run stays as it was."""
    with pytest.raises(MisuseError, match=match):
        await Agent(replying(reply)).run("hello")


# Counts that no reply can have, and what is said of them.
ODD_USAGES: list[tuple[dict[str, Any], str]] = [
    ({"input_tokens": -5}, "usage has input_tokens=-5: give a whole number, 0 or more"),
    ({"output_tokens": float("nan")}, "usage has output_tokens=nan"),
    ({"cached_tokens": "5"}, "usage has cached_tokens='5'"),
    ({"reasoning_tokens": None}, "usage has reasoning_tokens=None"),
    ({"input_tokens": 5, "cost_usd": float("nan")}, "usage has cost_usd=nan: give 0 or more, or None"),
    ({"input_tokens": 5, "cost_usd": -1.0}, "usage has cost_usd=-1.0"),
]


@pytest.mark.parametrize(("fields", "match"), ODD_USAGES, ids=repr)
@pytest.mark.parametrize("fails", [False, True], ids=["returned", "raised"])
async def test_a_usage_that_cannot_be_gives_no_run_back_what_it_has_spent(fields, match, fails):
    """A count below 0 raised the limits of the run, and one that is no number ended in the store."""

    async def reply(_self: Model, _request: Request, _emit: Emit | None = None) -> Reply:
        if fails:
            raise ModelReplyError("nothing", Usage(**fields))
        return Reply(text="x", usage=Usage(**fields))

    with pytest.raises(MisuseError, match=r"Mine\.reply r.*" + match):
        await Agent(replying(reply)).run("hello")


@pytest.mark.parametrize("cost_usd", [float("nan"), -0.5, "1"])
@pytest.mark.parametrize("limits", [Limits(), Limits(usd=1.0)], ids=["free", "limited"])
async def test_what_is_no_price_is_said_to_be_none(cost_usd, limits):
    """Neither the budget nor the journal reckons with it."""
    answer = returning(Reply(text="x", usage=Usage(input_tokens=1)))
    model = having(reply=answer, cost_usd=lambda _self, _usage: cost_usd)
    with pytest.raises(MisuseError, match=r"Mine\.cost_usd returned .*: return US dollars"):
        await Agent(model, limits=limits).run("hello")


@pytest.mark.parametrize("wait_s", [-5.0, float("nan"), "0"])
async def test_a_wait_that_cannot_be_is_not_waited_for(wait_s):
    """The error of a model of one's own may ask for any: it ended in a ValueError of the event loop."""
    attempts: list[Request] = []

    async def reply(_self: Model, request: Request, _emit: Emit | None = None) -> Reply:
        attempts.append(request)
        if len(attempts) == 1:
            raise ModelUnavailableError("not now", wait_s)
        return Reply(text="x")

    assert (await Agent(replying(reply), limits=Limits(retry_wait_s=0.001)).run("hello")).output == "x"


# Pieces of replies.


def piece(kind: Any, *args: Any, **fields: Any) -> Any:
    """A piece as somebody makes one without a type checker."""
    return kind(*args, **fields)


@pytest.mark.parametrize(
    ("chunk", "match"),
    [
        ("hello", r"str, which is not a chunk of a reply: emit one of TextChunk"),
        (None, "NoneType, which is not a chunk"),
        (piece(TextChunk, None), "a TextChunk whose text is of the type NoneType: give a text, or emit nothing"),
        (piece(ThinkingChunk, 5), "a ThinkingChunk whose text is of the type int"),
        (piece(CallChunk, index="0"), "a CallChunk whose index is of the type str: give the place of the call"),
        (piece(CallChunk, index=0, name=None), "a CallChunk whose name is of the type NoneType: give a text, ''"),
        (piece(CallChunk, index=0, arguments={}), "a CallChunk whose arguments is of the type dict"),
        (piece(FinishChunk, reason="stop"), "a FinishChunk whose reason is of the type str: give a FinishReason"),
    ],
    ids=repr,
)
async def test_what_is_no_piece_of_a_reply_is_said_to_be_none(chunk, match):
    """It is told to the model that emits it, and nobody who watches has to take it."""

    async def reply(_self: Model, _request: Request, emit: Emit | None = None) -> Reply:
        assert emit is not None
        emit(chunk)
        return Reply(text="x")

    agent = Agent(replying(reply), tools=[search], settings=Settings(stream=True))
    with pytest.raises(MisuseError, match=r"Mine\.reply emitted " + match):
        await agent.run("hello")


@pytest.mark.parametrize("fails", [False, True], ids=["returned", "raised"])
async def test_a_piece_that_comes_after_its_reply_goes_nowhere(fails):
    """It would stand in the text of the next reply: who emits it so late is told."""
    emits: list[Emit] = []

    async def reply(_self: Model, _request: Request, emit: Emit | None = None) -> Reply:
        assert emit is not None
        emits.append(emit)
        if len(emits) == 1 and fails:
            raise ModelUnavailableError("not now")
        if len(emits) == 2:
            with pytest.raises(MisuseError, match=r"Mine\.reply emitted a chunk after it had ended: await all"):
                emits[0](TextChunk("late"))
        emit(TextChunk("x"))
        return Reply(text="x") if len(emits) == 2 else Reply(calls=(proposed(arguments='{"query": "y"}'),))

    agent = Agent(replying(reply), tools=[search], limits=Limits(retry_wait_s=0.001))
    async with agent.stream("hello") as stream:
        told = [event.text async for event in stream if isinstance(event, TextDelta)]
    assert (stream.run.output, told) == ("x", ["x"] if fails else ["x", "x"])


async def test_a_reply_may_be_of_subclasses():
    """Texts and lists of one's own are as good as any."""

    class Mine(str):
        __slots__ = ()

    replies = iter([odd(calls=[proposed(name=Mine("search"))]), odd(text=Mine("found"))])
    run = await Agent(FunctionModel(lambda _request: next(replies)), tools=[search]).run("hello")
    assert (run.output, len(run.calls)) == ("found", 1)


async def test_a_type_error_of_a_model_is_its_own():
    """It is not taken for a reply that cannot be awaited."""

    async def reply(_self: Model, _request: Request, _emit: Emit | None = None) -> Reply:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        await Agent(replying(reply)).run("hello")
