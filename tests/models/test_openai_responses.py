"""`OpenAIResponses` against a local server: replies, failures, and whole runs of an agent."""

import json
import traceback

import attrs
import openai
import pytest

from agentfsm import Agent, ModelRetry, Outcome, State, tool
from agentfsm.core.errors import ContextTooLongError, ModelError, ModelReplyError, ModelUnavailableError
from agentfsm.core.messages import AudioPart, TextPart, Usage, UserMessage
from agentfsm.core.settings import Settings
from agentfsm.models.openai_chat import OpenAIChat
from agentfsm.models.openai_responses import OpenAIResponses
from agentfsm.ports import CallChunk, FinishChunk, FinishReason, OutputMode, Request, TextChunk, ThinkingChunk
from agentfsm.stores import SQLiteStore
from agentfsm.testing import LocalServer, Say
from tests.support.wire_rules import check_responses

KEY = "sk-very-secret-key"
REQUEST = Request(instructions="Help.", messages=(UserMessage(parts=(TextPart(text="Hello"),)),))
CALLS = (("weather", {"city": "Rome"}), ("clock", {"zone": "Europe/Rome"}))

both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_CUSTOM_HEADERS"):
        monkeypatch.delenv(name, raising=False)


async def ask(say, *, streamed=False, request=REQUEST, silence_s=60.0, name="m"):
    """Ask a server that says one thing; returns the reply, the chunks and what the server received."""
    chunks = []
    with LocalServer([say]) as server:
        model = OpenAIResponses(name, base_url=server.base_url, api_key=KEY)
        try:
            asked = attrs.evolve(request, timeout_s=silence_s)
            reply = await model.reply(asked, chunks.append if streamed else None)
        finally:
            await model.aclose()
    return reply, chunks, server.requests[0]


async def failure(kind, say, **options):
    """Ask, and return the error of exactly that kind; it never shows the key."""
    with pytest.raises(ModelError) as caught:
        await ask(say, **options)
    assert type(caught.value) is kind, caught.value
    assert KEY not in "".join(traceback.format_exception(caught.value))
    return caught.value


# Replies


@both_ways
async def test_text_and_thinking_arrive(streamed):
    """Streamed or not, the reply is the same, with its usage; the stream's chunks add up to it."""
    text = "It is sunny in Rome, and 20 degrees warm."
    reply, chunks, received = await ask(Say(text=text, thinking="Rome, then."), streamed=streamed)
    assert (reply.text, reply.finish_reason) == (text, FinishReason.STOP)
    assert reply.usage == Usage(input_tokens=1, output_tokens=(len(text) + 11) // 4, reasoning_tokens=2)
    assert '"encrypted_content":"sealed' in reply.native.content
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)) == (text if streamed else "")
    thought = "".join(chunk.text for chunk in chunks if isinstance(chunk, ThinkingChunk))
    assert thought == ("Rome, then." if streamed else "")
    assert chunks[-1:] == ([FinishChunk(reason=FinishReason.STOP)] if streamed else [])
    assert received.headers["authorization"] == f"Bearer {KEY}"


@both_ways
@pytest.mark.parametrize("interleave", [False, True])
async def test_calls_arrive(streamed, interleave):
    """Calls come out whole and in order, however their pieces were mixed."""
    reply, chunks, _ = await ask(Say(calls=CALLS, chunk_chars=3, interleave=interleave), streamed=streamed)
    assert [(call.name, call.arguments) for call in reply.calls] == [
        ("weather", '{"city": "Rome"}'),
        ("clock", '{"zone": "Europe/Rome"}'),
    ]
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    if streamed:
        assert CallChunk(index=1, name="clock") in chunks
        assert chunks.pop() == FinishChunk(reason=FinishReason.TOOL_CALLS)
        assert "".join(chunk.arguments for chunk in chunks if chunk.index == 0) == '{"city": "Rome"}'


@both_ways
async def test_usage_is_read_or_missing(streamed):
    """Cached tokens are counted; where the server says nothing, there is no usage."""
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    reply, _, _ = await ask(Say(text="x", usage=usage), streamed=streamed)
    assert reply.usage == Usage(input_tokens=10, output_tokens=3, cached_tokens=8)
    reply, _, _ = await ask(Say(text="x", without_usage=True), streamed=streamed)
    assert reply.usage is None


@both_ways
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTENT_FILTER])
async def test_a_reply_that_was_cut_short_is_passed_on(streamed, reason):
    """What to do about it is for the engine to decide."""
    reply, _, _ = await ask(Say(text="It is", finish_reason=reason.value), streamed=streamed)
    assert (reply.text, reply.finish_reason) == ("It is", reason)


@both_ways
async def test_a_refusal_arrives(streamed):
    """A refusal is a reply with a reason of its own."""
    reply, chunks, _ = await ask(Say(refusal="I cannot."), streamed=streamed)
    assert (reply.text, reply.finish_reason) == ("I cannot.", FinishReason.REFUSAL)
    told = [TextChunk(text="I cannot."), FinishChunk(reason=FinishReason.REFUSAL)]
    assert chunks == (told if streamed else [])


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
    _, _, received = await ask(Say(text="x"), name=name)
    assert received.body.get("include") == (["reasoning.encrypted_content"] if asked else None)
    assert received.body["store"] is False


def test_the_vendors_package_understands_the_local_server():
    """OpenAI's own client reads whole responses and streams of it, so that what is tested here is their wire."""
    say = Say(text="Hi", thinking="Hm", calls=(("f", {"a": 1}),))
    with (
        LocalServer(lambda _body: say) as server,
        openai.OpenAI(api_key="none", base_url=server.base_url, _strict_response_validation=True) as client,
    ):
        answer = client.responses.create(model="m", input=[{"role": "user", "content": "Hello"}])
        events = list(client.responses.create(model="m", input=[{"role": "user", "content": "Hello"}], stream=True))
    assert answer.output_text == "Hi"
    assert [each.type for each in answer.output] == ["reasoning", "message", "function_call"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [each.type for each in events[-1].response.output] == ["reasoning", "message", "function_call"]


# Failures


@both_ways
async def test_a_refused_key_names_where_to_look(streamed):
    """401 names the environment variable, and the key is taken out of what the server repeats."""
    error = await failure(ModelError, Say(status=401, error=f"No such key: {KEY}."), streamed=streamed)
    assert "OPENAI_API_KEY" in str(error)
    assert "No such key: ***." in str(error)


@both_ways
@pytest.mark.parametrize("status", [408, 429, 500, 529])
async def test_passing_trouble_may_be_asked_again(streamed, status):
    """Overload, outage and time-outs are unavailability, with the wait that the server asked for."""
    say = Say(status=status, headers={"retry-after": "2.5"})
    error = await failure(ModelUnavailableError, say, streamed=streamed)
    assert error.retry_after_s == pytest.approx(2.5)


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
    assert "Not like this." in str(await failure(kind, Say(raw=raw), streamed=form != "whole"))


@both_ways
async def test_a_page_is_no_reply(streamed):
    """HTML with status 200 is an unusable reply, and points at base_url."""
    assert "base_url" in str(await failure(ModelReplyError, Say(html=True), streamed=streamed))


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
    assert "a finished response" in str(await failure(ModelReplyError, Say(raw=raw), streamed=streamed))


@both_ways
@pytest.mark.parametrize("events", [0, 1, 3, 8])
async def test_a_broken_connection_may_be_asked_again(streamed, events):
    """A connection that breaks in the middle of the reply is unavailability."""
    await failure(ModelUnavailableError, Say(text="x" * 100, cut_after=events), streamed=streamed)


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
    assert "broke off" in str(await failure(ModelUnavailableError, Say(raw=raw + end), streamed=True))


@both_ways
async def test_silence_is_a_time_out(streamed):
    """A server that says nothing for timeout_s is unavailable, and the error names the setting."""
    say = Say(text="x", delay_s=60.0)
    assert "timeout_s" in str(await failure(ModelUnavailableError, say, streamed=streamed, silence_s=0.05))


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


TALK = (
    Say(
        text="I look.", thinking="Two cities.", calls=(("weather", {"city": "Rome"}), ("weather", {"city": "Atlantis"}))
    ),
    Say(thinking="Rome it is.", calls=(("book", {"city": "Rom"}),)),
    Say(text="Booked.", thinking="Done."),
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
            assert run.usage.reasoning_tokens == sum(len(say.thinking) // 4 for say in TALK)
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
    with LocalServer([Say(text="One.", thinking="Hm."), Say(text="Two."), Say(text="Three.")]) as server:
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
