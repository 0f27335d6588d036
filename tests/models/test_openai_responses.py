"""`OpenAIResponses` against a local server: replies, failures, and whole runs of an agent."""

import json

import attrs
import openai
import pytest

from agentfsm import (
    Agent,
    AudioPart,
    ContextTooLongError,
    ModelError,
    ModelReplyError,
    ModelRetry,
    ModelUnavailableError,
    Outcome,
    Settings,
    State,
    Usage,
    tool,
)
from agentfsm.models import OpenAIChat, OpenAIResponses
from agentfsm.ports import FinishChunk, FinishReason, OutputMode, TextChunk, ThinkingChunk
from agentfsm.stores import SQLiteStore
from agentfsm.testing import LocalServer, WireReply, call, say
from tests.support.model_wires import KEY, REQUEST, RESPONSES, both_ways, forget_keys
from tests.support.wire_rules import check_responses

ask, failure = RESPONSES.ask, RESPONSES.failure


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    forget_keys(monkeypatch, tmp_path)


# Replies


@both_ways
async def test_text_and_thinking_arrive(streamed):
    """Streamed or not, the reply is the same, with its usage; the stream's chunks add up to it."""
    text = "It is sunny in Rome, and 20 degrees warm."
    usage = Usage(input_tokens=1, output_tokens=13, reasoning_tokens=2)
    reply, chunks, received = await ask(WireReply(say(text, usage=usage), thinking="Rome, then."), streamed=streamed)
    assert (reply.text, reply.finish_reason) == (text, FinishReason.STOP)
    assert reply.usage == usage
    assert '"encrypted_content":"sealed' in reply.native.content
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)) == (text if streamed else "")
    thought = "".join(chunk.text for chunk in chunks if isinstance(chunk, ThinkingChunk))
    assert thought == ("Rome, then." if streamed else "")
    assert chunks[-1:] == ([FinishChunk(reason=FinishReason.STOP)] if streamed else [])
    assert received.headers["authorization"] == f"Bearer {KEY}"


@both_ways
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTENT_FILTER])
async def test_a_reply_that_was_cut_short_is_passed_on(streamed, reason):
    """What to do about it is for the engine to decide."""
    reply, _, _ = await ask(WireReply("It is", finish_reason=reason.value), streamed=streamed)
    assert (reply.text, reply.finish_reason) == ("It is", reason)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("gpt-5", True),
        ("o3", True),
        ("openai/gpt-5-mini", True),
        ("a-deployment", True),
        ("gpt-4o", False),
        ("openai/gpt-4.1", False),
        ("ft:gpt-4o-mini:me", False),
        ("gpt-5-chat-latest", False),
        ("chatgpt-4o-latest", False),
    ],
)
async def test_thinking_is_asked_of_those_that_think(name, asked):
    """OpenAI refuses a request for sealed thinking to a model that does not think."""
    _, _, received = await ask(say("x"), name=name)
    assert received.body.get("include") == (["reasoning.encrypted_content"] if asked else None)
    assert received.body["store"] is False


def test_the_vendors_package_understands_the_local_server():
    """OpenAI's own client reads whole responses and streams of it, so that what is tested here is their wire."""
    line = WireReply(say("Hi", call("f", a=1)), thinking="Hm")
    with (
        LocalServer(lambda _body: line) as server,
        openai.OpenAI(api_key="none", base_url=server.base_url, _strict_response_validation=True) as client,
    ):
        answer = client.responses.create(model="m", input=[{"role": "user", "content": "Hello"}])
        events = list(client.responses.create(model="m", input=[{"role": "user", "content": "Hello"}], stream=True))
    assert answer.output_text == "Hi"
    assert [each.type for each in answer.output] == ["reasoning", "message", "function_call"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [each.type for each in events[-1].response.output] == ["reasoning", "message", "function_call"]


# Failures


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("server_error", ModelUnavailableError),
        ("rate_limit_exceeded", ModelUnavailableError),
        ("vector_store_timeout", ModelUnavailableError),
        ("a_code_that_is_new", ModelUnavailableError),
        (None, ModelUnavailableError),
        ("context_length_exceeded", ContextTooLongError),
        ("invalid_prompt", ModelError),
        ("image_too_large", ModelError),
        ("insufficient_quota", ModelError),
    ],
)
@pytest.mark.parametrize("form", ["whole", "failed", "flat", "nested"])
async def test_failures_with_status_200_are_translated(form, code, kind):
    """A response that failed, and an error in the middle of a stream, count like an error with a status."""
    error = {"code": code, "message": "Not like this."}
    failed = {"object": "response", "status": "failed", "error": error, "output": []}
    events = {
        "failed": {"type": "response.failed", "response": failed},
        "flat": {"type": "error", **error, "param": None, "sequence_number": 3},
        "nested": {"type": "error", "error": error},
    }
    raw = json.dumps(failed) if form == "whole" else f"data: {json.dumps(events[form])}\n\n"
    assert "Not like this." in str(await failure(kind, WireReply(raw=raw), streamed=form != "whole"))


@pytest.mark.parametrize(
    ("streamed", "raw"),
    [
        (False, "{}"),
        (False, '{"output": '),
        (False, '{"choices": []}'),
        (False, '{"status": "queued", "output": []}'),
        (True, 'data: {"choices": []}\n\n'),
        (True, "data: {oops\n\n"),
        (True, 'data: {"type": "response.completed", "response": {"output": ["x"]}}\n\n'),
        (True, "data: " + "[" * 100_000 + "\n\n"),
    ],
    ids=["nothing", "torn", "chat completion", "queued", "chunk", "event of no JSON", "bad items", "too deep"],
)
async def test_what_cannot_be_used_is_a_reply_error(streamed, raw):
    """What is no finished response is unusable, and is not taken for an empty one."""
    assert "a finished response" in str(await failure(ModelReplyError, WireReply(raw=raw), streamed=streamed))


@pytest.mark.parametrize("end", ["", "data: [DONE]\n\n"])
async def test_a_stream_without_its_last_event_is_broken_off(end):
    """All text may have come: usage and thinking have not."""
    done = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Once"}]}
    raw = "".join(
        f"data: {json.dumps(event)}\n\n"
        for event in (
            {"type": "response.output_text.delta", "delta": "Once"},
            {"type": "response.output_item.done", "output_index": 0, "item": done},
        )
    )
    assert "ended before the reply was complete" in str(
        await failure(ModelUnavailableError, WireReply(raw=raw + end), streamed=True)
    )


async def test_a_setting_that_cannot_be_sent_is_said_before_anything_is_sent():
    """There is no `seed` on this wire."""
    with LocalServer([]) as server:
        model = OpenAIResponses("m", base_url=server.base_url)
        with pytest.raises(ModelError, match="seed"):
            await model.reply(attrs.evolve(REQUEST, settings=Settings(seed=1)))
        await model.aclose()
    assert server.requests == ()
    assert "OpenAIChat" in model.unsupported_part(AudioPart.of(b"RIFF"))


@pytest.mark.parametrize("kind", [OpenAIChat, OpenAIResponses])
def test_schemas_are_left_to_openai(kind):
    """OpenAI's own servers hold a model to a schema; of others that is not known."""
    others = (OutputMode.TOOL, OutputMode.JSON, OutputMode.PROMPT)
    assert kind("m", base_url="http://localhost:8000/v1").output_modes == others
    assert kind("m", api_key=KEY).output_modes == (OutputMode.SCHEMA, *others)
    assert kind("m", base_url="https://me.openai.azure.com/v1", api_key=KEY).output_modes[0] is OutputMode.SCHEMA


# Runs


@tool(read_only=True)
async def weather(city: str) -> str:
    """Tell the weather."""
    if city == "Atlantis":
        message = "there is no such city"
        raise ModelRetry(message)
    return f"20 degrees in {city}"


@tool(requires_approval=True)
async def book(city: str) -> str:
    """Book a trip."""
    return f"booked {city}"


THOUGHT = Usage(input_tokens=10, output_tokens=5, reasoning_tokens=2)
LOOKS = (call("weather", city="Rome"), call("weather", city="Atlantis"))
TALK = (
    WireReply(say("I look.", *LOOKS, usage=THOUGHT), thinking="Two cities."),
    WireReply(say("", call("book", city="Rom"), usage=THOUGHT), thinking="Rome it is."),
    WireReply(say("Booked.", usage=THOUGHT), thinking="Done."),
)


def kinds(received):
    """The kinds of the items that a request sent; OpenAI would take them."""
    check_responses(received.body["input"])
    return [item["type"] for item in received.body["input"]]


TURN = ["reasoning", "message", "function_call", "function_call", "function_call_output", "function_call_output"]


@both_ways
async def test_a_run_goes_on_from_its_store_with_all_that_was_thought(tmp_path, streamed):
    """Parallel calls, one of which fails, a pause for a person who edits the arguments, another process, the end."""
    pytest.importorskip("apsw")
    with LocalServer(TALK) as server:

        def agent():
            model, store = OpenAIResponses("gpt-5", base_url=server.base_url), SQLiteStore(tmp_path / "runs.db")
            return Agent(model, tools=[weather, book], store=store, settings=Settings(stream=streamed))

        async with agent() as first:
            waiting = await first.run("Where to?", id="trip")
            assert [result.outcome for result in waiting.calls] == [Outcome.DONE, Outcome.FAILED]
        async with agent() as second:
            await second.approve("trip", "t2.0", arguments={"city": "Rome"})
            run = await second.resume("trip")
            assert (run.state, run.output) == (State.DONE, "Booked.")
            assert run.usage.reasoning_tokens == sum(line.line.usage.reasoning_tokens for line in TALK)
    first_turn, second_turn, third_turn = server.requests
    assert kinds(first_turn) == ["message"]
    assert kinds(second_turn) == ["message", *TURN]
    assert kinds(third_turn) == ["message", *TURN, "reasoning", "function_call", "function_call_output"]
    thought = [item for item in third_turn.body["input"] if item["type"] == "reasoning"]
    assert [item["encrypted_content"][-1] for item in thought] == ["1", "2"]
    assert third_turn.body["input"][-2]["arguments"] == '{"city": "Rome"}'
    assert [item["call_id"] for item in third_turn.body["input"] if "call_id" in item] == [
        *["t1.0", "t1.1", "t1.0", "t1.1"],
        *["t2.0", "t2.0"],
    ]
    assert third_turn.body["input"][6]["output"].startswith("[weather: failed]")


async def test_a_run_changes_to_another_wire_and_back():
    """What was thought on one wire is left out on the other, and is there again on the first."""
    with LocalServer([WireReply("One.", thinking="Hm."), say("Two."), say("Three.")]) as server:
        thinker = OpenAIResponses("gpt-5", base_url=server.base_url)
        chat = OpenAIChat("gpt-4o", base_url=server.base_url)
        agent = Agent(thinker)
        first = await agent.run("one")
        second = await agent.with_(model=chat).run("two", after=first)
        third = await agent.run("three", after=second)
        await thinker.aclose()
        await chat.aclose()
    assert third.output == "Three."
    assert [message["content"] for message in server.requests[1].body["messages"][-3:]] == ["one", "One.", "two"]
    assert kinds(server.requests[2]) == ["message", "reasoning", "message", "message", "message", "message"]
