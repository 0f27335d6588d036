"""One script for `ScriptedModel` and `LocalServer`: the same lines give the same run with each protocol."""

import time

import pytest

from agentfsm import (
    Agent,
    ContextTooLongError,
    Limits,
    MisuseError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    Settings,
    Usage,
    tool,
)
from agentfsm.ports import FinishReason
from agentfsm.testing import LocalServer, ScriptedModel, call, fail, raw_call, say
from tests.support.model_wires import ANTHROPIC, CHAT, KEY, RESPONSES, both_ways

wires = pytest.mark.parametrize("wire", [CHAT, RESPONSES, ANTHROPIC], ids=str)
BILLED = Usage(input_tokens=100, output_tokens=20, cached_tokens=30)
SCRIPT = (
    fail(ModelUnavailableError("overloaded", retry_after_s=0.01, status=503)),
    say("Let me look.", call("weather", city="Rome"), call("weather", city="Oslo"), expect="go"),
    say("", raw_call("weather", '{"city": "Bern"'), expect="rain in Oslo", usage=BILLED),
    say("Rain everywhere.", expect="not a JSON object"),
)


@tool(read_only=True)
async def weather(city: str) -> str:
    """Get the weather."""
    return f"rain in {city}"


async def play(model, *, streamed):
    limits, settings = Limits(retry_wait_s=0.01), Settings(stream=streamed)
    async with Agent(model, tools=[weather], limits=limits, settings=settings) as agent:
        return await agent.run("go")


@both_ways
@wires
async def test_a_script_gives_the_same_run(wire, streamed):
    """Calls, results, the answer and the usage are equal; the expectations are met, and the failure is retried."""
    scripted = await play(ScriptedModel(*SCRIPT), streamed=streamed)
    with LocalServer(SCRIPT) as server:
        run = await play(wire.kind("local", base_url=server.base_url, api_key=KEY), streamed=streamed)
        assert len(server.requests) == 4
    assert run.output == scripted.output == "Rain everywhere."
    assert [(each.name, each.outcome) for each in run.calls] == [(each.name, each.outcome) for each in scripted.calls]
    spent = scripted.usage
    assert (run.usage.input_tokens, run.usage.output_tokens) == (spent.input_tokens, spent.output_tokens)
    assert run.usage.cached_tokens == 30


@wires
async def test_an_unexpected_request_is_refused(wire):
    """The response names the line and what it expects, and is not retried."""
    error = await wire.failure(ModelError, say("Sunny.", expect="28 degrees"))
    assert "line 1 of the script expects '28 degrees'; the newest message is: Hello" in str(error)


async def test_an_expectation_must_be_a_text():
    """A server has no `Request` to pass to a function."""
    assert "pass a text to expect=" in str(await CHAT.failure(ModelError, say("x", expect=lambda _request: True)))


@both_ways
@pytest.mark.parametrize(
    "error",
    [
        ModelUnavailableError("down"),
        ModelReplyError("no choice"),
        ContextTooLongError("too many tokens"),
        ModelError("no such model"),
    ],
    ids=lambda error: type(error).__name__,
)
@wires
async def test_a_scripted_failure_has_the_same_type(wire, error, streamed):
    """A `fail` line becomes a response that the adapter reads as the same error."""
    await wire.failure(type(error), fail(error), streamed=streamed)


@both_ways
@pytest.mark.parametrize(
    "reason", [FinishReason.LENGTH, FinishReason.CONTENT_FILTER, FinishReason.REFUSAL], ids=lambda reason: reason.value
)
@wires
async def test_a_finish_reason_is_that_of_the_line(wire, reason, streamed):
    """Each protocol has its own words for it."""
    reply, _, _ = await wire.ask(say("I cannot", finish_reason=reason), streamed=streamed)
    assert (reply.text, reply.finish_reason) == ("I cannot", reason)


@both_ways
@wires
async def test_a_line_without_usage_has_none(wire, streamed):
    """`usage=None` omits the field."""
    reply, _, _ = await wire.ask(say("x", usage=None), streamed=streamed)
    assert reply.usage is None


@wires
async def test_a_pace_delays_each_call_of_a_stream(wire):
    """`pace_s` passes before each call."""
    began = time.monotonic()
    await wire.ask(say("", call("a"), call("b"), pace_s=0.1), streamed=True)
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("write", [lambda: say("x", 3), lambda: fail(3)])
def test_a_line_is_made_of_calls_and_errors(write):
    """A wrong value is refused in the script, not in the run."""
    with pytest.raises(MisuseError, match="Line"):
        write()
