"""Models for tests: what a script says, whole and in pieces, and when."""

from __future__ import annotations

import anyio
import pytest

from agentfsm import Agent, MisuseError, TextPart, UserMessage
from agentfsm.ports import CallChunk, Chunk, FinishChunk, FinishReason, ProposedCall, Reply, Request, TextChunk
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, raw_call, run_virtual, say
from agentfsm.testing.models import USAGE

REQUEST = Request(instructions="", messages=(UserMessage(parts=(TextPart(text="Hello"),)),))


async def spoken(line) -> tuple[Reply, list[Chunk]]:
    """What one line of a script says, whole and in pieces."""
    chunks: list[Chunk] = []
    reply = await ScriptedModel(line).reply(REQUEST, chunks.append)
    assert await ScriptedModel(line).reply(REQUEST) == reply
    return reply, chunks


async def test_the_pieces_of_a_line_are_the_line():
    """Text by words, each call by name and arguments, and the reason to stop at the end."""
    reply, chunks = await spoken(say("Let me see.", call("look", at="x"), raw_call("look", "{")))
    assert chunks == [
        TextChunk(text="Let "),
        TextChunk(text="me "),
        TextChunk(text="see."),
        CallChunk(index=0, name="look"),
        CallChunk(index=0, arguments='{"at": "x"}'),
        CallChunk(index=1, name="look"),
        CallChunk(index=1, arguments="{"),
        FinishChunk(reason=FinishReason.TOOL_CALLS),
    ]
    assert reply == Reply(
        text="Let me see.",
        calls=(
            ProposedCall(id="call_0_0", name="look", arguments='{"at": "x"}'),
            ProposedCall(id="call_0_1", name="look", arguments="{"),
        ),
        finish_reason=FinishReason.TOOL_CALLS,
        usage=USAGE,
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (say("Hi."), FinishReason.STOP),
        (say(""), FinishReason.STOP),
        (say("", call("look")), FinishReason.TOOL_CALLS),
        (say("Hi", finish_reason=FinishReason.LENGTH), FinishReason.LENGTH),
        (say("", call("look"), finish_reason=FinishReason.STOP), FinishReason.STOP),
    ],
)
async def test_the_last_piece_is_the_reason_to_stop(line, reason):
    """Once, and the same as the reply's."""
    reply, chunks = await spoken(line)
    assert [chunk for chunk in chunks if isinstance(chunk, FinishChunk)] == [FinishChunk(reason=reason)]
    assert chunks[-1] == FinishChunk(reason=reason)
    assert reply.finish_reason is reason


def test_a_paced_reply_waits_before_each_call():
    """Behind the delay of the whole; the reason to stop comes with the last call."""

    async def play() -> list[tuple[float, str]]:
        told: list[tuple[float, str]] = []

        def emit(chunk: Chunk) -> None:
            told.append((anyio.current_time(), type(chunk).__name__))

        await ScriptedModel(say("Hi.", call("a"), call("b"), pace_s=0.25, delay_s=1)).reply(REQUEST, emit)
        return told

    assert run_virtual(play) == [
        (1.0, "TextChunk"),
        (1.25, "CallChunk"),
        (1.25, "CallChunk"),
        (1.5, "CallChunk"),
        (1.5, "CallChunk"),
        (1.5, "FinishChunk"),
    ]


def test_a_paced_reply_that_nobody_streams_does_not_wait():
    """The pace is that of the pieces."""

    async def play() -> float:
        await ScriptedModel(say("", call("a"), call("b"), pace_s=10)).reply(REQUEST)
        return anyio.current_time()

    assert run_virtual(play) == 0


async def test_a_line_that_fails_says_nothing():
    """Not even a reason to stop."""
    chunks: list[Chunk] = []
    with pytest.raises(OSError, match="down"):
        await ScriptedModel(fail(OSError("down"))).reply(REQUEST, chunks.append)
    assert chunks == []


async def test_a_script_at_its_end_fails_the_test():
    """And so does one that was not used up, or is asked something else than it expects."""
    model = ScriptedModel(say("Hi.", expect="Hello"), say("Ho.", expect="Ciao"))
    await model.reply(REQUEST)
    with pytest.raises(AssertionError, match="1 of 2 lines"):
        model.assert_done()
    with pytest.raises(AssertionError, match="line 2 of the script expects 'Ciao'"):
        await model.reply(REQUEST)
    with pytest.raises(AssertionError, match="2 lines and the model was asked once more: Hello"):
        await model.reply(REQUEST)


@pytest.mark.parametrize(
    ("script", "flaw"),
    [((), "0 lines and the model was asked once more"), ((say("42", expect="Ciao"),), "expects 'Ciao'")],
)
async def test_a_script_that_failed_behind_a_tool_fails_the_test_at_its_end(script, flaw):
    """An agent that is a tool makes a result of whatever its model raises, which the caller's model reads."""
    below = ScriptedModel(*script)
    helper = Agent(below, name="helper").as_tool(name="helper", description="Help.")
    run = await Agent(ScriptedModel(say("", call("helper", query="Hello")), "Fine."), tools=[helper]).run("go")
    assert run.output == "Fine."
    for _ in range(2):
        with pytest.raises(AssertionError, match=flaw):
            below.assert_done()


@pytest.mark.parametrize("slip", [call("look"), 5, [say("Hi.")], Reply(text="Hi.")])
def test_what_is_no_line_is_refused(slip):
    """Where the script is written, not where the model comes to it."""
    with pytest.raises(MisuseError, match=r"expected a line of a script, got .*: pass each line by itself"):
        ScriptedModel("Hi.", slip)


async def test_a_function_may_be_a_model():
    """Plain or async, with the text or the whole reply; its text is streamed in one piece."""

    async def later(_request: Request) -> Reply:
        return Reply(text="Later.")

    for function, text in ((lambda _request: "Now.", "Now."), (later, "Later.")):
        chunks: list[Chunk] = []
        assert await FunctionModel(function).reply(REQUEST, chunks.append) == Reply(text=text)
        assert chunks == [TextChunk(text=text)]
