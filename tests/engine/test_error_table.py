"""What the model reads when a call gives no result: the cause, whether to try again, and what to do instead.

The rows are those of document C, 9.1, and those that this package adds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import attrs
import httpx
import pytest

from agentfsm import (
    Agent,
    ErrorType,
    ModelError,
    ModelRetry,
    Outcome,
    Permissions,
    RefusedError,
    Rule,
    Run,
    Tool,
    ToolResult,
    TransientError,
    tool,
)
from agentfsm.ports import Request
from agentfsm.testing import ScriptedModel, call, fail, raw_call, say
from agentfsm.testing.models import Call, Line
from agentfsm.tools.breaker import FAILURE_THRESHOLD
from tests.support.checks import results_of, sound, virtually

SAFE, UNSAFE = {"read_only": True}, {}
AGAIN, CHECK = "It may be called again", "check before you call it again"


@attrs.frozen(kw_only=True)
class Row:
    """A way in which a call fails, and what comes of it."""

    tools: Callable[[], Sequence[Tool[..., Any]]]
    call: Call
    outcome: Outcome = Outcome.FAILED
    error_type: ErrorType
    retryable: bool
    says: tuple[str, ...]
    permissions: Permissions | None = None
    before: tuple[Line, ...] = ()
    # Replies before the one with the call.


def raising(error: Exception, **options: Any) -> Callable[[], Sequence[Tool[..., Any]]]:
    """A tool that raises this."""

    async def act(at: int = 0) -> str:
        await anyio.lowlevel.checkpoint()
        raise error

    return lambda: [tool(**options)(act)]


def hanging(**options: Any) -> Callable[[], Sequence[Tool[..., Any]]]:
    """A tool that does not come to an end."""

    async def act() -> None:
        await anyio.sleep_forever()

    return lambda: [tool(timeout_s=5, **options)(act)]


def broken_agent() -> Sequence[Tool[..., Any]]:
    """An agent as a tool, whose model fails."""
    inner = Agent(ScriptedModel(fail(ModelError("401: no such key"))), name="act")
    return [inner.as_tool()]


def httpx_status(status: int) -> Exception:
    """What httpx raises for a status."""
    request = httpx.Request("GET", "https://example.org/")
    return httpx.HTTPStatusError(str(status), request=request, response=httpx.Response(status, request=request))


@tool
async def act(to: str = "nobody", cents: int = 0) -> str:
    """Act."""
    return f"{cents} to {to}"


def with_options(**options: Any) -> Callable[[], Sequence[Tool[..., Any]]]:
    """The tool above, with other declarations."""
    return lambda: [tool(**options)(act.function)]


def closing() -> Sequence[Tool[..., Any]]:
    """A tool whose circuit five failures open."""
    return raising(TransientError("down"))()


TABLE = {
    "time-out": Row(
        tools=hanging(**SAFE),
        call=call("act"),
        outcome=Outcome.TIMED_OUT,
        error_type=ErrorType.TIMEOUT,
        retryable=True,
        says=("no result within 5 s", AGAIN, "another tool"),
    ),
    "time-out, unsafe": Row(
        tools=hanging(),
        call=call("act"),
        outcome=Outcome.TIMED_OUT,
        error_type=ErrorType.TIMEOUT,
        retryable=False,
        says=("no result within 5 s", "effect may have happened", CHECK),
    ),
    "unavailable": Row(
        tools=raising(TransientError("the index is down"), **SAFE),
        call=call("act"),
        error_type=ErrorType.UNAVAILABLE,
        retryable=True,
        says=("act is not available right now", "after 3 attempts", "the index is down", "Go on with what you have"),
    ),
    "unavailable, unsafe": Row(
        tools=raising(ConnectionResetError("reset by peer")),
        call=call("act"),
        error_type=ErrorType.UNAVAILABLE,
        retryable=False,
        says=("act is not available right now", "reset by peer", CHECK, "go on with what you have"),
    ),
    "unavailable, asks for long": Row(
        tools=raising(TransientError("down", 600), **SAFE),
        call=call("act"),
        error_type=ErrorType.UNAVAILABLE,
        retryable=True,
        says=("It asks to wait 600 s", "try again later"),
    ),
    "refused": Row(
        tools=raising(RefusedError("busy")),
        call=call("act"),
        error_type=ErrorType.UNAVAILABLE,
        retryable=True,
        says=("busy", "Nothing was done", "try again later"),
    ),
    "agent error": Row(
        tools=broken_agent,
        call=call("act", query="x"),
        error_type=ErrorType.AGENT,
        retryable=False,
        says=("the agent act gave no answer", "Go on without it, with what you have"),
    ),
    "input, not JSON": Row(
        tools=with_options(),
        call=raw_call("act", '{"to": "Ann'),
        error_type=ErrorType.ARGUMENTS,
        retryable=True,
        says=("not a JSON object", '{"to": "Ann', "Nothing was run", "call again with valid JSON"),
    ),
    "input, schema": Row(
        tools=with_options(),
        call=call("act", cents="much", too="Ann"),
        error_type=ErrorType.ARGUMENTS,
        retryable=True,
        says=("the arguments of act do not fit", '"much"', 'did you mean "to"?', "Parameters:"),
    ),
    "input, rule": Row(
        tools=with_options(validate=lambda a: f"{a.cents} is too much" if a.cents > 5 else None),
        call=call("act", cents=6),
        error_type=ErrorType.ARGUMENTS,
        retryable=True,
        says=("break a rule", "6 is too much", "Nothing was run"),
    ),
    "rate limit": Row(
        tools=raising(httpx_status(429), **SAFE),
        call=call("act"),
        error_type=ErrorType.RATE_LIMITED,
        retryable=True,
        says=("act is not available right now", "after 2 attempts", "429", "try again later"),
    ),
    "rate limit, unsafe": Row(
        tools=raising(httpx_status(429)),
        call=call("act"),
        error_type=ErrorType.RATE_LIMITED,
        retryable=False,
        says=("act is not available right now", "429", CHECK),
    ),
    "unknown tool": Row(
        tools=with_options(),
        call=call("delete_all"),
        error_type=ErrorType.UNKNOWN_TOOL,
        retryable=False,
        says=("there is no tool 'delete_all'", "Nothing was run", "Tools: act."),
    ),
    "unknown tool, nearly": Row(
        tools=with_options(),
        call=call("atc"),
        error_type=ErrorType.UNKNOWN_TOOL,
        retryable=False,
        says=("there is no tool 'atc'", "Did you mean 'act'?"),
    ),
    "level": Row(
        tools=with_options(),
        call=call("act"),
        permissions=Permissions(level="read"),
        error_type=ErrorType.NOT_PERMITTED,
        retryable=False,
        says=("act needs level write, and this run has read", "Nothing was run", "will not help", "tell the user"),
    ),
    "rule on arguments": Row(
        tools=with_options(),
        call=call("act", cents=6),
        permissions=Permissions(deny=(Rule("act", when=lambda a: a.cents > 5),)),
        error_type=ErrorType.NOT_PERMITTED,
        retryable=False,
        says=("act is not permitted with these arguments", "Nothing was run", "do something else"),
    ),
    "not there": Row(
        tools=with_options(enabled=lambda _ctx: False),
        call=call("act"),
        outcome=Outcome.SKIPPED,
        error_type=ErrorType.WITHDRAWN,
        retryable=False,
        says=("act is", "go on without it"),
    ),
    "circuit open": Row(
        tools=closing,
        call=call("act", at=9),
        before=(say("", *[call("act", at=n) for n in range(FAILURE_THRESHOLD)]),),
        error_type=ErrorType.CIRCUIT_OPEN,
        retryable=True,
        says=("act was not called", "Try again in 60 s", "go on without it"),
    ),
    "model retry": Row(
        tools=raising(ModelRetry("use an ISO date, such as 2027-01-15")),
        call=call("act"),
        error_type=ErrorType.RETRY,
        retryable=True,
        says=("use an ISO date, such as 2027-01-15",),
    ),
    "model retry without a word": Row(
        tools=raising(ModelRetry("")),
        call=call("act"),
        error_type=ErrorType.RETRY,
        retryable=True,
        says=("try other arguments",),
    ),
    "bug": Row(
        tools=raising(KeyError("city"), **SAFE),
        call=call("act"),
        error_type=ErrorType.TOOL,
        retryable=True,
        says=("KeyError: 'city'", AGAIN),
    ),
    "bug, unsafe": Row(
        tools=raising(ZeroDivisionError("division by zero")),
        call=call("act"),
        error_type=ErrorType.TOOL,
        retryable=False,
        says=("ZeroDivisionError: division by zero", CHECK),
    ),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=list(TABLE))
def test_what_the_model_is_told(row):
    """Each failure has its kind, whether the same call may do better later, and words that say what to do."""

    async def play(store, clock) -> tuple[Run, Sequence[Request]]:
        model = ScriptedModel(*row.before, say("", row.call), "done")
        agent = Agent(model, tools=row.tools(), permissions=row.permissions, store=store, clock=clock)
        run = await agent.run("go")
        assert run.output == "done"
        await sound(agent, run)
        return run, model.requests

    run, requests = virtually(play)
    result = results_of(run.messages)[-1]
    assert (result.outcome, result.error_type, result.retryable) == (row.outcome, row.error_type, row.retryable)
    assert result.error == result.content
    text = requests[-1].messages[-1].text
    assert text == f"[{row.call.name}: {row.outcome}]\n{result.content}"
    for words in row.says:
        assert words in text
    assert "Traceback" not in text
    assert __file__ not in text


def test_the_table_has_every_kind_but_five():
    """A kind without words for the model would be missing; five are shown elsewhere, the fallback in flows."""
    elsewhere = {ErrorType.BLOCKED, ErrorType.BUDGET, ErrorType.CONDITION, ErrorType.FALLBACK, ErrorType.WITHHELD}
    assert {row.error_type for row in TABLE.values()} == set(ErrorType) - elsewhere


async def test_a_call_that_a_thread_is_in_the_way_of(store):
    """A plain function that outlived its call is named, and nothing was run."""
    gate = threading.Event()

    @tool(timeout_s=0.05)
    def slow() -> None:
        gate.wait(20)

    model = ScriptedModel(say("", call("slow")), say("", call("act")), "done")
    agent = Agent(model, tools=[slow, tool(timeout_s=0.05)(act.function)], store=store)
    try:
        run = await agent.run("go")
    finally:
        gate.set()
    result = results_of(run.messages)[-1]
    assert (result.outcome, result.error_type, result.retryable) == (Outcome.FAILED, ErrorType.BLOCKED, True)
    assert "slow is still running" in result.content
    assert "Nothing was run; try again later" in result.content


async def test_a_success_has_no_error(store):
    """Nothing went wrong, so nothing is said of it."""
    agent = Agent(ScriptedModel(say("", call("act", to="Ann", cents=3)), "done"), tools=[act], store=store)
    (result,) = results_of((await agent.run("go")).messages)
    assert (result.content, result.error, result.error_type, result.retryable) == ("3 to Ann", None, None, False)


# What the model must not read


class LeakyError(Exception):
    """An error that holds more than it says."""

    def __init__(self) -> None:
        """Hold a secret."""
        super().__init__("sk-secret", "/home/ann/.netrc")
        self.token = "sk-secret"  # noqa: S105  it must not show

    def __str__(self) -> str:
        return "the login failed"

    def __repr__(self) -> str:
        return "LeakyError(token='sk-secret')"


def chained() -> None:
    """Raise an error that was caused by one with a secret, and carries a note with one."""
    try:
        int("sk-secret")
    except ValueError as cause:
        error = LeakyError()
        error.add_note("sk-secret")
        raise error from cause


def grouped() -> None:
    """Raise a group of such errors."""
    raise ExceptionGroup("sk-secret", [LeakyError(), ExceptionGroup("sk-secret", [LeakyError()])])


@pytest.mark.parametrize("way", [chained, grouped])
@pytest.mark.parametrize("options", [{}, {"read_only": True}], ids=str)
async def test_only_an_errors_own_words_reach_the_model(store, way, options):
    """Neither its cause, its notes, its arguments nor its repr, and no path of the code that raised it."""

    @tool(**options)
    def leak() -> None:
        way()

    model = ScriptedModel(say("", call("leak")), "done")
    agent = Agent(model, tools=[leak], store=store)
    run = await agent.run("go")
    (result,) = results_of(run.messages)
    assert "LeakyError: the login failed" in result.content
    told = repr([message.text for request in model.requests for message in request.messages])
    for secret in ("sk-secret", ".netrc", __file__, "Traceback", "line "):
        assert secret not in told
        assert secret not in repr(await agent.history(run.id))


async def test_a_rule_that_breaks_tells_its_kind_only(store):
    """What it was given may be in its words, and nobody wrote those for the model."""

    def rule(_arguments: object) -> str | None:
        raise RuntimeError("sk-secret")

    tools = [tool(name="a", validate=rule)(act.function), tool(name="b")(act.function)]
    permissions = Permissions(deny=(Rule("b", when=rule),))
    model = ScriptedModel(say("", call("a"), call("b")), "done")
    run = await Agent(model, tools=tools, permissions=permissions, store=store).run("go")
    for result in results_of(run.messages):
        assert "RuntimeError" in result.content
        assert "sk-secret" not in result.content


async def test_a_long_error_is_cut(store):
    """The cause stands at its beginning, and a megabyte of it would fill the window."""

    @tool
    async def verbose() -> None:
        raise ValueError("the cause " + "x" * 1_000_000)

    run = await Agent(ScriptedModel(say("", call("verbose")), "done"), tools=[verbose], store=store).run("go")
    (result,) = results_of(run.messages)
    assert "the cause" in result.content
    assert len(result.content) < 3_000


def media_kind(result: ToolResult) -> tuple[Outcome, ErrorType | None, bool]:
    """What code reads of a result."""
    return result.outcome, result.error_type, result.retryable


async def test_the_kinds_are_kept_in_the_journal(store):
    """Whoever loads the run reads the same."""
    calls = [call("nope"), call("act", cents="x"), raw_call("act", "[]"), call("fails")]
    fails = raising(ValueError("a bug"), name="fails")()
    agent = Agent(ScriptedModel(say("", *calls), "done"), tools=[act, *fails], store=store)
    run = await agent.run("go")
    loaded = await agent.load(run.id)
    kinds = [media_kind(result) for result in results_of(run.messages)]
    assert kinds == [media_kind(result) for result in results_of(loaded.messages)]
    assert {kind[1] for kind in kinds} == {ErrorType.UNKNOWN_TOOL, ErrorType.ARGUMENTS, ErrorType.TOOL}
