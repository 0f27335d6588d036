"""Results and errors that would end the program or hold up its event loop, and neither may."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest

from agentfsm import Agent, Outcome, tool
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.queue import result_json, result_text
from agentfsm.tools.queue.dispatch import QueueHost
from tests.support.tool_calls import ran


class Liar:
    @property
    def __class__(self) -> type:
        raise SystemExit(5)


def leaving(error: BaseException, kind: type = object) -> object:
    """A value whose words end the program."""

    def leave(_self: object) -> str:
        raise error

    return type("Leaving", (kind,), {"__str__": leave, "__repr__": leave})()


WISHES = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
# Made in the test: pytest would ask them for their names.
VALUES = {
    "liar": Liar,
    **{type(wish).__name__: partial(leaving, wish) for wish in WISHES},
    "in a list": lambda: [leaving(SystemExit(3))],
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_value_whose_words_end_the_program_is_done(value, plain):
    """What the methods of a result raise is no wish of the program's: the tool's effect stands, and the run goes on."""

    async def act() -> object:
        return VALUES[value]()

    def plain_act() -> object:
        return VALUES[value]()

    made = tool(plain_act if plain else act, name="act")
    run = await Agent(ScriptedModel(say("", call("act")), "done"), tools=[made]).run("go")
    assert (run.output, run.messages[2].outcome) == ("done", Outcome.DONE)


@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: type(wish).__name__)
async def test_an_error_whose_words_end_the_program_is_a_result(wish, caplog):
    """The model reads that the tool has failed; the log, which writes the traceback, goes on as well."""

    @tool
    async def act() -> None:
        raise leaving(wish, ValueError)

    run = await Agent(ScriptedModel(say("", call("act")), "done"), tools=[act]).run("go")
    assert (run.output, run.messages[2].outcome) == ("done", Outcome.FAILED)
    assert "Leaving: (its text cannot be read)" in run.messages[2].content


async def test_an_error_whose_attributes_end_the_program_is_a_result():
    """What is asked whether a failure passes may raise what it likes."""

    class LeavingError(ValueError):
        @property
        def status_code(self) -> int:
            raise SystemExit(3)

    @tool
    async def act() -> None:
        raise LeavingError("broken")

    run = await Agent(ScriptedModel(say("", call("act")), "done"), tools=[act]).run("go")
    assert "LeavingError: broken" in run.messages[2].content


HUGE = result_text.MAX_STORED_CHARS + 1_000_000


@pytest.mark.parametrize(
    "value",
    ["x" * HUGE, "中" * HUGE, b"x" * HUGE, {"page": "x" * HUGE, "more": 5}, ["x" * HUGE, 5], ["x" * 1_000_000] * 62],
    ids=["ascii", "wide", "bytes", "dict", "list", "list of many"],
)
async def test_a_huge_result_is_cut_before_anything_costly_is_done_with_it(value, monkeypatch):
    """No text longer than is kept is encoded, escaped or counted; what is kept says that it was cut."""
    sizes: list[int] = []

    def measured(function):
        def measure(text, *args: object, **options: object):
            result = function(text, *args, **options)
            sizes.append(max(len(each) for each in (text, result) if isinstance(each, str | bytes)))
            return result

        return measure

    monkeypatch.setattr(result_text, "replace_surrogates", measured(result_text.replace_surrogates))
    monkeypatch.setattr(result_text.json, "dumps", measured(json.dumps))
    core = SimpleNamespace(
        **vars(result_json._pydantic_core()) | {"to_json": measured(result_json._pydantic_core().to_json)}
    )
    monkeypatch.setattr(result_json, "_pydantic_core", lambda: core)

    def count(_self: QueueHost, text: str) -> int:
        sizes.append(len(text))
        return len(text) // 3

    monkeypatch.setattr(QueueHost, "count_tokens", count)

    async def act() -> object:
        return value

    result = await ran(act)
    assert max(sizes) <= result_text.MAX_STORED_CHARS // result_text.MAX_ESCAPE_CHARS + 10_000
    assert 4_000_000 < len(result.content) <= result_text.MAX_STORED_CHARS
    assert "were dropped: too many to be kept" in result.content
