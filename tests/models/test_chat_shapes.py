"""Shapes of chat completions that few send: thinking, parts, speech, calls of the old form, bills of every kind."""

import json

import pytest

from agentfsm import Agent, AssistantMessage, CallDelta, Settings, TextPart, ToolCall, Usage, UserMessage, tool
from agentfsm.core.messages import NativeReply
from agentfsm.models import OpenAIChat
from agentfsm.models.openai.chat_wire import ChatStreamAssembler, build_encoding_cache, decode, encode
from agentfsm.models.wire import InBandError, WireFormatError
from agentfsm.ports import CallChunk, FinishChunk, FinishReason, ProposedCall, Request, TextChunk, ThinkingChunk
from agentfsm.stores import MemoryStore
from agentfsm.testing import LocalServer, WireReply, say

ASK = UserMessage(parts=(TextPart(text="And in Rome?"),))
PROVIDER = "chat completions of api.deepseek.com"


def whole(message, finish_reason="stop", **fields):
    """Read a reply of that message."""
    choice = {"index": 0, "finish_reason": finish_reason} | ({"message": message} if message is not None else {})
    return decode(json.dumps({"choices": [choice], **fields}).encode(), provider=PROVIDER)


def streamed(*deltas, finish_reason="stop"):
    """Read a stream of those deltas; returns the reply and the chunks."""
    assembly = ChatStreamAssembler(provider=PROVIDER)
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish_reason})
    chunks = []
    for choice in choices:
        chunks += assembly.feed(b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode())
    assert assembly.is_complete
    return assembly.build_reply(), chunks


# Thinking


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_is_told_and_is_no_text(name):
    """What a model thinks streams by as such, under either name, and is no part of the answer."""
    reply, chunks = streamed({"content": None, name: "Rome is "}, {name: "hot."}, {"content": "30 C", name: None})
    assert chunks == [
        ThinkingChunk("Rome is "),
        ThinkingChunk("hot."),
        TextChunk("30 C"),
        FinishChunk(reason=FinishReason.STOP),
    ]
    assert (reply.text, whole({"content": "30 C", name: "Rome is hot."}).text) == ("30 C", "30 C")


def test_thinking_under_two_names_is_told_once():
    """The same words under both names, as vLLM has sent them, are one thought."""
    _, chunks = streamed({"reasoning_content": "Hot.", "reasoning": "Hot."})
    assert chunks[:-1] == [ThinkingChunk("Hot.")]


@pytest.mark.parametrize("odd", [[], {"text": "x"}, 7, True, ""])
def test_odd_thinking_does_not_spoil_a_reply(odd):
    """Whatever a server puts there, the answer beside it is the answer."""
    reply, chunks = streamed({"reasoning": odd, "reasoning_content": None, "content": "30 C"})
    assert chunks[:-1] == [TextChunk("30 C")]
    assert whole({"content": "30 C", "reasoning": odd}) == reply


@pytest.mark.parametrize("thought", ["Rome is hot.", ""])
def test_thinking_goes_back_to_its_server(thought):
    """Who calls it `reasoning_content` gets it back with its message, even an empty one, and nobody else does."""
    reply, _ = streamed({"reasoning_content": thought[:5], "content": None}, {"reasoning_content": thought[5:]})
    assert whole({"content": None, "reasoning_content": thought}).native == reply.native
    call = ToolCall(id="t1.0", name="weather", arguments="{}")
    request = Request(instructions="", messages=(ASK, AssistantMessage(calls=(call,), native=reply.native)))
    written = {
        provider: json.loads(
            encode(request, model="m", limit_field="n", streamed=False, encoding_cache=build_encoding_cache(provider))
        )["messages"][1]
        for provider in (PROVIDER, "chat completions of api.groq.com")
    }
    mine, other = written.values()
    assert mine == other | {"reasoning_content": thought}
    assert "reasoning_content" not in other


@pytest.mark.parametrize(
    ("host", "is_wanted"),
    [("api.groq.com", False), ("example.com", False), ("openrouter.ai", True), ("127.0.0.1", True), ("gpu7", True)],
)
def test_reasoning_goes_back_where_it_is_wanted(host, is_wanted):
    """OpenRouter and servers of one's own get their `reasoning` back; others refuse the field that they send."""
    model = OpenAIChat("m", base_url=f"https://{host}/v1", api_key="none")
    reply = model._decode(b'{"choices": [{"message": {"content": "30 C", "reasoning": "Hot."}}]}')
    assert reply.thinking == "Hot."
    request = Request(instructions="", messages=(ASK, AssistantMessage(text=reply.text, native=reply.native)))
    sent = json.loads(model._encode_request(request, model._make_encoding_cache(), streamed=False))["messages"][1]
    assert sent.get("reasoning") == ("Hot." if is_wanted else None)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_is_part_of_the_reply(name):
    """A reply that was not streamed has its thinking, as one that was."""
    reply, _ = streamed({"content": None, name: "Rome is "}, {name: "hot."}, {"content": "30 C"})
    assert reply.thinking == whole({"content": "30 C", name: "Rome is hot."}).thinking == "Rome is hot."


DETAIL = {"type": "reasoning.text", "format": "anthropic-claude-v1", "index": 0}
SEALED = {"type": "reasoning.encrypted", "data": "gAAA", "id": "rs_1", "index": 1}


def sent_back(reply, provider=PROVIDER):
    """Return the message of the assistant in a request after the reply, which had one call at most."""
    calls = [ToolCall(id=f"t1.{n}", name=call.name, arguments=call.arguments) for n, call in enumerate(reply.calls)]
    message = AssistantMessage(text=reply.text, calls=tuple(calls), native=reply.native)
    cache = build_encoding_cache(provider)
    request = Request(instructions="", messages=(ASK, message))
    return json.loads(encode(request, model="m", limit_field="n", streamed=False, encoding_cache=cache))["messages"][1]


def test_details_of_reasoning_are_put_together_and_sent_back():
    """OpenRouter streams a signed block in pieces, and Claude refuses the pieces."""
    block = {**DETAIL, "text": "Rome is hot.", "signature": "Et8B"}
    reply, chunks = streamed(
        {"reasoning": "Rome is ", "reasoning_details": [{**DETAIL, "text": "Rome is "}]},
        {"reasoning": "hot.", "reasoning_details": [{**DETAIL, "text": "hot."}]},
        {"reasoning_details": [{**DETAIL, "signature": "Et8B"}]},
        {"reasoning_details": [SEALED, {**SEALED, "id": "rs_2"}, "odd"]},
        {"content": "30 C"},
    )
    details = [block, SEALED, {**SEALED, "id": "rs_2"}]
    assert whole({"content": "30 C", "reasoning": "Rome is hot.", "reasoning_details": details}) == reply
    assert chunks[:2] == [ThinkingChunk("Rome is "), ThinkingChunk("hot.")]
    assert sent_back(reply) == {"role": "assistant", "content": "30 C", "reasoning_details": details}
    assert sent_back(reply, "another") == {"role": "assistant", "content": "30 C"}


@pytest.mark.parametrize("vendor", ["google", "vertex"])
def test_signatures_of_calls_are_sent_back(vendor):
    """Gemini 3 refuses the second turn without the signature of the first call; the others have none."""
    extra = {vendor: {"thought_signature": "CvwB"}}
    first = {"index": 0, "id": "a", "function": {"name": "look", "arguments": '{"at":"x"}'}, "extra_content": extra}
    second = {"index": 0, "id": "b", "function": {"name": "look", "arguments": '{"at":"y"}'}}
    reply, _ = streamed({"tool_calls": [first]}, {"tool_calls": [second]}, finish_reason="tool_calls")
    assert whole({"tool_calls": [first, second]}, "tool_calls") == reply
    assert [call.get("extra_content") for call in sent_back(reply)["tool_calls"]] == [extra, None]
    assert all("extra_content" not in call for call in sent_back(reply, "another")["tool_calls"])


def test_the_signature_of_a_text_is_sent_back():
    """Gemini signs an answer without calls as a whole."""
    extra = {"google": {"thought_signature": "CvwB"}}
    reply, _ = streamed({"content": "30 C"}, {"content": "", "extra_content": extra})
    assert sent_back(reply) == {"role": "assistant", "content": "30 C", "extra_content": extra}
    assert whole({"content": "30 C", "extra_content": {"google": {"thought": True}}}).native is None


def test_a_model_knows_its_own_thinking_by_the_server():
    """Two models at one server are one provider, since the server is what takes or refuses the field."""
    here, there = (OpenAIChat("m", base_url=f"https://{host}/v1") for host in ("api.deepseek.com", "api.groq.com"))
    body = b'{"choices": [{"message": {"content": "x", "reasoning_content": "y"}}]}'
    assert here._decode(body).native == NativeReply(provider=PROVIDER, content='{"reasoning_content": "y"}')
    assert there._decode(body).native != here._decode(body).native


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_thinking_goes_back_in_the_next_turn_of_a_run(is_streamed):
    """DeepSeek refuses the second turn of a run that thinks, unless the first turn's thinking comes with it."""

    @tool
    async def weather(city: str) -> str:
        """Look out of the window."""
        return f"{city}: 30 C"

    call = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    says = [{"reasoning_content": "I have to look.", "tool_calls": [call]}, {"content": "30 C"}]
    choices = [{"message": line, "delta": line, "finish_reason": "stop"} for line in says]
    bodies = [json.dumps({"choices": [choice]}) for choice in choices]
    script = [WireReply(raw=f"data: {body}\n\ndata: [DONE]\n\n" if is_streamed else body) for body in bodies]
    with LocalServer(script) as server:
        agent = Agent(
            OpenAIChat("m", base_url=server.base_url),
            tools=[weather],
            settings=Settings(stream=is_streamed),
            store=MemoryStore(),
        )
        run = await agent.run("And in Rome?")
        await agent.model.aclose()
    assert run.output == "30 C"
    (asked,) = [message for message in server.requests[1].body["messages"] if message["role"] == "assistant"]
    assert asked["reasoning_content"] == "I have to look."
    assert asked["tool_calls"][0]["function"] == call["function"]


# Parts and speech


def test_content_in_parts_is_joined():
    """Some of Mistral's models answer in parts, of which those of thinking are no text."""
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hot."}]}
    parts = [thinking, {"type": "text", "text": "30 "}, {"type": "reference", "reference_ids": [1]}]
    reply, chunks = streamed({"content": parts}, {"content": "C"})
    assert chunks[:-1] == [ThinkingChunk("Hot."), TextChunk("30 "), TextChunk("C")]
    assert reply.text == "30 C"
    assert whole({"content": [*parts, {"type": "text", "text": "C"}]}) == reply


@pytest.mark.parametrize("parts", [["x"], [None], [{"text": 7}], [[]]])
def test_parts_that_are_none_are_a_form_error(parts):
    """What cannot be read is not taken for an empty part."""
    with pytest.raises(WireFormatError):
        whole({"content": parts})
    with pytest.raises(WireFormatError):
        streamed({"content": parts})


def test_what_is_spoken_is_the_text():
    """A reply in audio has no other text than what is spoken."""
    audio = {"id": "audio_1", "data": "UklGRg==", "expires_at": 1, "transcript": "30 degrees"}
    reply, chunks = streamed(
        {"audio": {"id": "audio_1", "transcript": "30 "}},
        {"audio": {"transcript": "degrees"}},
        {"audio": {"data": "UklGRg=="}},
        {"audio": {"expires_at": 1}},
    )
    assert chunks[:-1] == [TextChunk("30 "), TextChunk("degrees")]
    assert whole({"content": None, "audio": audio}) == reply


# Calls


def test_a_function_call_of_the_old_form_is_a_call():
    """What was before there were several calls at once is a call without an id."""
    call = ProposedCall(id="", name="weather", arguments='{"city": "Rome"}')
    reply, chunks = streamed(
        {"content": None, "function_call": {"name": "weather", "arguments": ""}},
        {"function_call": {"arguments": '{"city": '}},
        {"function_call": {"arguments": '"Rome"}'}},
        finish_reason="function_call",
    )
    assert (reply.calls, reply.finish_reason) == ((call,), FinishReason.TOOL_CALLS)
    assert chunks[0] == CallChunk(index=0, name="weather")
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert whole({"content": None, "function_call": function}, "function_call") == reply


def test_a_call_in_both_forms_is_one_call():
    """A server that writes a call in the old form and in the new means it once."""
    function = {"name": "weather", "arguments": "{}"}
    both = {"tool_calls": [{"index": 0, "id": "c", "function": function}], "function_call": function}
    assert len(whole(both).calls) == len(streamed(both)[0].calls) == 1


@pytest.mark.parametrize("arguments", ["", "{}", None])
def test_empty_arguments_are_passed_on(arguments):
    """A call without arguments is a call; what stands for them is for the engine to read."""
    message = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "now", "arguments": arguments}}]}
    call = ProposedCall(id="c", name="now", arguments=arguments or "")
    assert whole(message, "tool_calls").calls == streamed(message)[0].calls == (call,)


def test_arguments_that_are_an_object_are_written_as_text():
    """A few servers leave out to write them as text; what they hold is the same."""
    function = {"name": "look", "arguments": {"at": "Zürich", "n": [1, None]}}
    message = {"tool_calls": [{"index": 0, "id": "c", "function": function}]}
    call = ProposedCall(id="c", name="look", arguments='{"at": "Zürich", "n": [1, null]}')
    reply, chunks = streamed(message)
    assert whole(message, "tool_calls").calls == reply.calls == (call,)
    assert chunks[0] == CallChunk(index=0, name="look", arguments=call.arguments)


def piece(index, call_id, name, arguments):
    """Return a delta with a piece of one call; what is None is left out."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"tool_calls": [{"index": index, "function": function} | ({} if call_id is None else {"id": call_id})]}


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, "a", "look", '{"at":"x"}'), (0, "b", "look", '{"at":"y"}')],
        [(0, "a", "look", ""), (0, None, None, '{"at":"x"}'), (0, "b", "look", '{"at":'), (0, None, None, '"y"}')],
        [(0, "a", "look", '{"at":"x'), (0, "b", "look", '{"at":"y"}'), (0, "a", "look", '"}')],
        [(1, "a", "look", '{"at":"x"}'), (2, "b", "look", '{"at":"y'), (2, " ", None, '"}')],
        [(1, "a", "look", '{"at":'), (2, "b", "look", '{"at":"y"}'), (1, None, None, '"x"}')],
    ],
    ids=["one number", "in pieces", "by id", "from 1", "interleaved"],
)
def test_calls_are_told_apart_whatever_their_numbers(pieces):
    """A server may give each call the number 0, as Gemini does, or count from 1: what counts is the place."""
    reply, chunks = streamed(*[piece(*each) for each in pieces], finish_reason="tool_calls")
    assert [(call.id, call.arguments) for call in reply.calls] == [("a", '{"at":"x"}'), ("b", '{"at":"y"}')]
    for place, call in enumerate(reply.calls):
        own = [chunk for chunk in chunks if isinstance(chunk, CallChunk) and chunk.index == place]
        assert own[0].name == call.name
        assert "".join(chunk.arguments for chunk in own) == call.arguments


def test_calls_without_ids_are_told_apart_by_their_names():
    """Of two names under one number, and no id, the second begins a call; the same name again goes on with its own."""
    reply, _ = streamed(piece(0, "", "now", ""), piece(0, "", "look", '{"at":'), piece(0, "", "look", '"x"}'))
    assert [(call.name, call.arguments) for call in reply.calls] == [("now", ""), ("look", '{"at":"x"}')]


def test_calls_of_one_name_without_ids_are_told_apart():
    """Under one number, arguments that begin after whole ones are those of the next call."""
    pieces = [(0, "", "look", '{"at":'), (0, "", "look", '"x"}'), (0, "", "look", '{"at":"y"}'), (0, "", None, "")]
    reply, chunks = streamed(*[piece(*each) for each in pieces])
    assert [call.arguments for call in reply.calls] == ['{"at":"x"}', '{"at":"y"}']
    assert [chunk.index for chunk in chunks if isinstance(chunk, CallChunk)] == [0, 0, 1]


EMPTY = {"name": "", "arguments": ""}


@pytest.mark.parametrize(
    "fields",
    [
        {"function_call": EMPTY},
        {"tool_calls": [{"index": 0, "id": "", "type": "function", "function": EMPTY}]},
        {"tool_calls": [{"index": 0, "id": "c"}]},
        {"tool_calls": [{}]},
    ],
)
def test_an_empty_call_is_none(fields):
    """Snowflake's Cortex sends one with each text; calls behind it keep their places."""
    reply, chunks = streamed({"content": "30 C", **fields})
    assert (reply.text, reply.calls, reply.finish_reason) == ("30 C", (), FinishReason.STOP)
    assert whole({"content": "30 C", **fields}) == reply
    assert not [chunk for chunk in chunks if isinstance(chunk, CallChunk)]
    reply, chunks = streamed(fields, piece(3, "d", "look", "{}"))
    assert reply.calls == (ProposedCall(id="d", name="look", arguments="{}"),)
    assert chunks[:-1] == [CallChunk(index=0, name="look", arguments="{}")]


def test_a_new_id_without_a_name_begins_no_call():
    """Some servers make an id for each piece."""
    reply, _ = streamed(piece(0, "a", "look", '{"at":'), piece(0, "b", None, '"x"}'))
    assert reply.calls == (ProposedCall(id="a", name="look", arguments='{"at":"x"}'),)


async def test_no_call_is_made_with_the_arguments_of_another():
    """A call without arguments, and behind it one with some, under one number: each tool gets its own."""
    made = []

    @tool
    async def archive(folder: str = "spam") -> str:
        """Archive a folder."""
        made.append(("archive", folder))
        return "done"

    @tool(read_only=True)
    async def look(folder: str = "inbox") -> str:
        """List a folder."""
        made.append(("look", folder))
        return "3 mails"

    pieces = [piece(0, "a", "archive", ""), piece(0, "b", "look", '{"folder":"work"}')]
    choices = [{"index": 0, "delta": delta} for delta in pieces]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    events = [json.dumps({"choices": [choice]}) for choice in choices]
    script = [WireReply(raw="".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])), say("ok")]
    with LocalServer(script) as server:
        agent = Agent(OpenAIChat("m", base_url=server.base_url), tools=[archive, look], store=MemoryStore())
        async with agent.stream("Tidy up.") as stream:
            deltas = [event async for event in stream if isinstance(event, CallDelta)]
        await agent.model.aclose()
    assert stream.run.output == "ok"
    assert made == [("archive", "spam"), ("look", "work")]
    assert [(event.call_id, event.name) for event in deltas] == [("t1.0", "archive"), ("t1.1", "look")]


# Reasons


def test_a_filtered_reply_may_have_no_message():
    """Azure sends nothing of what it filters; any other reply without a message is none."""
    assert whole(None, "content_filter").finish_reason is FinishReason.CONTENT_FILTER
    with pytest.raises(WireFormatError, match="a choice without a message"):
        whole(None)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("model_length", FinishReason.LENGTH),
        ("model_context_window_exceeded", FinishReason.LENGTH),
        ("sensitive", FinishReason.CONTENT_FILTER),
        ("eos", FinishReason.STOP),
    ],
)
def test_a_reason_in_other_words_is_understood(said, reason):
    """What Mistral's and Z.ai's windows and filters cut off was taken for a whole answer."""
    assert whole({"content": "Rome is"}, said).finish_reason is reason
    assert streamed({"content": "Rome is"}, finish_reason=said)[0].finish_reason is reason


@pytest.mark.parametrize("said", ["error", "insufficient_system_resource", "network_error"])
def test_a_reply_that_the_server_broke_off_is_none(said):
    """Mistral, DeepSeek and Z.ai have words for it: half an answer was taken for a whole one."""
    for read in (whole, streamed):
        with pytest.raises(InBandError, match=f"aborted the reply: {said}"):
            read({"content": "Rome is"}, finish_reason=said)


def test_two_calls_may_have_one_id():
    """Without an index it is the name that begins the second, which was lost in the arguments of the first."""
    first = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    second = {"id": "a", "function": {"name": "g", "arguments": '{"x"'}}
    rest = {"id": "a", "function": {"arguments": ": 1}"}}
    reply, _ = streamed(*[{"tool_calls": [call]} for call in (first, second, rest)], finish_reason="tool_calls")
    assert [(call.name, call.arguments) for call in reply.calls] == [("f", "{}"), ("g", '{"x": 1}')]


def test_a_stream_of_old_completions_is_not_begun():
    """Choices without a delta are no chat completion, though one of them says why it stopped."""
    assembly = ChatStreamAssembler()
    assembly.feed(b'data: {"choices": [{"text": "Once", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')
    assert (assembly.event_count, assembly.is_begun, assembly.is_complete) == (1, False, False)


# Bills


@pytest.mark.parametrize(
    ("bill", "usage"),
    [
        (None, None),
        ({}, None),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, None),
        ({"prompt_tokens": 3, "completion_tokens": None}, Usage(input_tokens=3)),
        ({"prompt_tokens": 3, "prompt_tokens_details": None, "completion_tokens_details": {}}, Usage(input_tokens=3)),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 8,
                "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 2, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 6, "accepted_prediction_tokens": 0},
            },
            Usage(input_tokens=9, output_tokens=8, cached_tokens=4, cache_write_tokens=2, reasoning_tokens=6),
        ),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 8,
                "prompt_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 7},
                "completion_tokens_details": {"reasoning_tokens": 70},
            },
            Usage(input_tokens=9, output_tokens=8, cached_tokens=7, cache_write_tokens=2, reasoning_tokens=8),
        ),
        ({"prompt_tokens": -9, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": -3}}, None),
        (
            {"prompt_tokens": 5.0, "completion_tokens": 2.0, "prompt_tokens_details": {"cached_tokens": 1.0}},
            Usage(input_tokens=5, output_tokens=2, cached_tokens=1),
        ),
        ({"prompt_tokens": float("nan"), "completion_tokens": -1.5}, None),
        ([7], None),
        ({"prompt_tokens": "many"}, None),
    ],
    ids=["null", "empty", "zeros", "half", "no details", "all", "beyond", "below", "floats", "odd", "list", "words"],
)
def test_usage_is_read_in_every_shape(bill, usage):
    """What is missing is zero, a share is at most the whole; without a readable bill there is none."""
    assert whole({"content": "x"}, usage=bill).usage == usage


def test_usage_that_is_counted_on_in_each_chunk_is_the_last():
    """A server that tells it with each chunk means the sum so far."""
    assembly = ChatStreamAssembler()
    for tokens, finish in ((1, None), (2, None), (3, "stop")):
        choice = {"delta": {"content": "x"}, "finish_reason": finish}
        chunk = {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}}
        assembly.feed(b"data: %b\n\n" % json.dumps(chunk).encode())
    assembly.feed(b'data: {"choices": [], "usage": null}\n\n')
    assert assembly.build_reply().usage == Usage(input_tokens=7, output_tokens=3)
