"""The wire: what is written, and what is made of what comes."""

import json
from types import MappingProxyType

import pytest

from agentfsm import (
    AssistantMessage,
    AudioPart,
    FilePart,
    ImagePart,
    MisuseError,
    ModelError,
    Outcome,
    Settings,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
)
from agentfsm.models import wire
from agentfsm.models.openai import chat_wire
from agentfsm.models.openai.chat_wire import ChatStreamAssembler as Assembly
from agentfsm.models.openai.chat_wire import build_encoding_cache, decode, encode
from agentfsm.models.wire import InBandError, WireFormatError
from agentfsm.ports import (
    CallChunk,
    FinishChunk,
    FinishReason,
    OutputForm,
    ProposedCall,
    Request,
    TextChunk,
    ToolDefinition,
)
from agentfsm.testing.fake_llm.openai_chat import find_history_error

ASK = UserMessage(parts=(TextPart(text="And in Rome?"),))
TOOL = ToolDefinition(name="weather", description="The weather.", parameters={"type": "object"})


def body_of(*messages, instructions="", tools=(), streamed=False, output=None, **settings):
    request = Request(
        instructions=instructions,
        messages=messages or (ASK,),
        tools=tools,
        output=output,
        settings=Settings(**settings),
    )
    return json.loads(encode(request, model="m", limit_field="max_tokens", streamed=streamed))


def assembled(*chunks):
    """Feed the chunks as one stream; returns the assembly and the pieces that were news."""
    assembly = Assembly()
    pieces = []
    for chunk in chunks:
        pieces += assembly.feed(f"data: {json.dumps(chunk)}\n\n".encode())
    return assembly, pieces


def delta(finish_reason=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def call_delta(index=None, call_id=None, name=None, arguments=None):
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    fields = {"index": index, "id": call_id, "function": function}
    return delta(tool_calls=[{key: value for key, value in fields.items() if value is not None}])


# What is written


def test_a_history_is_written_as_openai_wants_it():
    """Each kind of message has its role and form, and OpenAI's own rules find no fault."""
    call = ToolCall(id="t1.0", name="weather", arguments='{"city":"Rome"}', key="k", provider_id="call_9")
    result = ToolResult(call_id="t1.0", tool="weather", outcome=Outcome.DONE, content="20 C")
    image = ImagePart(url="https://a.test/x.png", detail="low")
    messages = body_of(
        UserMessage(parts=(TextPart(text="Look"), image)),
        AssistantMessage(text="Hm.", calls=(call,)),
        result,
        AssistantMessage(calls=(ToolCall(id="t2.0", name="weather", arguments="{}", key="k"),)),
        ToolResult(call_id="t2.0", tool="weather", outcome=Outcome.FAILED, content="no"),
        AssistantMessage(text="20 degrees."),
        SystemMessage(text="Be short."),
        ASK,
        instructions="Help.",
    )["messages"]
    assert find_history_error(messages) is None
    assert messages == [
        {"role": "system", "content": "Help."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look"},
                {"type": "image_url", "image_url": {"url": "https://a.test/x.png", "detail": "low"}},
            ],
        },
        {
            "role": "assistant",
            "content": "Hm.",
            "tool_calls": [
                {"id": "t1.0", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1.0", "content": result.text},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "t2.0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "t2.0", "content": "[weather: failed]\nno"},
        {"role": "assistant", "content": "20 degrees."},
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "And in Rome?"},
    ]


@pytest.mark.parametrize("part", [AudioPart(url="https://a.test/a.wav"), FilePart(url="https://a.test/a.pdf")])
def test_a_history_may_hold_what_the_wire_cannot_carry(part):
    """It was said to a model that could take it, and the conversation goes on with this one."""
    with pytest.raises(ModelError, match=r"cannot be sent: .* in a data: URL"):
        body_of(UserMessage(parts=(TextPart(text="Look."), part)))


def test_what_is_not_set_is_not_sent():
    """Without instructions, tools and settings, a body is a model and messages."""
    assert body_of() == {"model": "m", "messages": [{"role": "user", "content": "And in Rome?"}]}


def test_settings_are_sent_under_the_wires_names():
    """Each setting has its field, zero counts as set, and further fields are merged."""
    body = body_of(temperature=0.0, max_tokens=5, seed=0, stop=("END",), extra_body={"top_p": 0.5, "seed": 7})
    assert {key: body[key] for key in body.keys() - {"model", "messages"}} == {
        "temperature": 0.0,
        "max_tokens": 5,
        "seed": 7,
        "stop": ["END"],
        "top_p": 0.5,
    }


def test_what_thinking_takes_is_sent():
    """The effort and the share of likely words have fields of their own."""
    body = body_of(reasoning_effort="low", top_p=0.0)
    assert (body["reasoning_effort"], body["top_p"]) == ("low", 0.0)


def test_the_form_of_an_answer_is_asked_for():
    """A schema goes along whole, read-only views in it too; without one, any object will do."""
    schema = MappingProxyType({"type": "object", "properties": MappingProxyType({})})
    assert body_of(output=OutputForm(name="city", schema=schema))["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": {"type": "object", "properties": {}}, "strict": True},
    }
    assert body_of(output=OutputForm(name="city", schema=None))["response_format"] == {"type": "json_object"}


def test_tools_are_sent_with_the_fields_that_need_them():
    """A tool is a function with a schema, and the two fields about tools go along."""
    body = body_of(tools=(TOOL,), tool_choice="required", parallel_tool_calls=False)
    function = {"name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    assert body_of(tools=(TOOL,), tool_choice="weather")["tool_choice"] == {
        "type": "function",
        "function": {"name": "weather"},
    }


def test_a_tool_is_sent_as_strict_only_where_it_is():
    """Servers that speak like OpenAI may refuse a field that they do not know."""
    strict = ToolDefinition(name="weather", description="The weather.", parameters={"type": "object"}, strict=True)
    first, second = (tool["function"] for tool in body_of(tools=(TOOL, strict))["tools"])
    assert "strict" not in first
    assert second == first | {"strict": True}


def test_without_tools_the_fields_about_tools_are_left_out():
    """OpenAI refuses tool_choice and parallel_tool_calls where there is no tool."""
    assert body_of(tool_choice="auto", parallel_tool_calls=True).keys() == {"model", "messages"}


def test_a_stream_is_asked_for_with_its_usage():
    """The usage is part of a stream only where it is asked for; further fields cannot undo that."""
    body = body_of(streamed=True, extra_body={"stream": False})
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


def test_read_only_mappings_are_written():
    """The schema of a tool may be a read-only view, at any depth."""
    schema = MappingProxyType({"type": "object", "properties": MappingProxyType({})})
    tool = ToolDefinition(name="t", description="", parameters=schema)
    assert body_of(tools=(tool,))["tools"][0]["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize("value", [float("nan"), {1, 2}], ids=["nan", "set"])
def test_what_is_not_json_is_a_misuse(value):
    """A value that JSON does not have is the caller's mistake, said before anything is sent."""
    with pytest.raises(MisuseError, match="cannot be written as JSON"):
        body_of(extra_body={"x": value})


def test_half_a_surrogate_pair_does_not_stop_a_run():
    """Text that UTF-8 cannot carry is sent with U+FFFD in its place."""
    body = body_of(UserMessage(parts=(TextPart(text="a\ud800b 😀"),)))
    assert body["messages"][0]["content"] == "a\ufffdb 😀"


# Written once


def call(turn, text="ok"):
    """A turn of one call."""
    calls = (ToolCall(id=f"t{turn}.0", name="weather", arguments="{}"),)
    result = ToolResult(call_id=f"t{turn}.0", tool="weather", outcome=Outcome.DONE, content=text)
    return AssistantMessage(calls=calls), result


@pytest.fixture
def wired(monkeypatch):
    """The messages that were written, in order."""
    wired = []
    write = chat_wire._wire_message
    monkeypatch.setattr(chat_wire, "_wire_message", lambda message: wired.append(message) or write(message))
    return wired


def written_anew(written, messages, tools=()):
    """Write a request after others; its bytes are those of one that is written alone."""
    request = Request(instructions="Help.", messages=messages, tools=tools)
    body = encode(request, model="m", limit_field="n", streamed=False, encoding_cache=written)
    assert body == encode(request, model="m", limit_field="n", streamed=False)
    return json.loads(body)


def test_each_message_of_a_history_that_grows_is_written_once(wired):
    """A turn writes what is new in it, however long the history is."""
    written, messages = build_encoding_cache(), (ASK,)
    for turn in range(5):
        encode(
            Request(instructions="", messages=messages),
            model="m",
            limit_field="n",
            streamed=False,
            encoding_cache=written,
        )
        messages = (*messages, *call(turn))
    assert tuple(wired) == messages[:-2]


def test_what_is_written_after_other_requests_is_the_same():
    """A history that goes on, forks, shrinks, or was read from a store again comes out as if it were the first."""
    written = build_encoding_cache()
    long = (ASK, *call(1), *call(2))
    again = (UserMessage(parts=ASK.parts), *call(1), *call(2), *call(3))
    fork = (ASK, *call(1), *call(2, "no"), *call(3))
    for messages in (long, again, long, fork, long[:3], (ASK, SystemMessage(text="Cut."), *call(2)), long, ()):
        written_anew(written, messages)


def test_a_reply_of_too_many_calls_is_split_alike_where_it_is_added():
    """The portions of a reply are all in what is added, since a history never ends amid its results."""
    calls = tuple(ToolCall(id=f"t1.{n}", name="weather", arguments="{}") for n in range(300))
    results = [ToolResult(call_id=each.id, tool="weather", outcome=Outcome.DONE, content="") for each in calls]
    written = build_encoding_cache()
    written_anew(written, (ASK,))
    written_anew(written, (ASK, AssistantMessage(calls=calls), *results))
    written_anew(written, (ASK, AssistantMessage(calls=calls), *results, *call(2)))


def test_tools_that_change_are_written_anew():
    """A tool that is added, replaced or taken away is so in the next request."""
    other = ToolDefinition(name="clock", description="The time.", parameters={"type": "object"})
    changed = ToolDefinition(name="weather", description="The weather.", parameters={"type": "object", "title": "x"})
    written = build_encoding_cache()
    for tools in ((TOOL,), (TOOL, other), (TOOL,), (changed, other), (TOOL, changed), ()):
        sent = written_anew(written, (ASK,), tools).get("tools", [])
        assert [tool["function"] for tool in sent] == [tool.openai()["function"] for tool in tools]


def test_what_is_kept_is_bounded(monkeypatch):
    """The histories that rest longest are forgotten, and one that is too large for itself is not kept at all."""
    monkeypatch.setattr(wire, "MAX_CACHE_BYTES", 1_500)
    asks = [UserMessage(parts=(TextPart(text=str(n) * 60),)) for n in range(3)]
    written = build_encoding_cache()
    for ask in (asks[0], asks[1], asks[0], asks[2]):
        written_anew(written, (ask,))
    assert [known for known, _ in written.messages.entries.values()] == [(asks[0],), (asks[2],)]
    written_anew(written, (UserMessage(parts=(TextPart(text="x" * 1_000),)),))
    assert (len(written.messages.entries), written.messages.memory_bytes) == (0, 0)


def test_what_could_not_be_written_leaves_nothing_behind():
    """After a tool that is no JSON the same tools, mended, are written."""
    bad = ToolDefinition(name="clock", description="", parameters={"type": "object", "default": {1}})
    written = build_encoding_cache()
    written_anew(written, (ASK,), (TOOL,))
    with pytest.raises(MisuseError, match="cannot be written as JSON"):
        written_anew(written, (ASK,), (TOOL, bad))
    assert len(written_anew(written, (ASK,), (TOOL, TOOL))["tools"]) == 2


def test_further_fields_never_replace_the_tools():
    """Tools of the provider are a further field of an agent without tools; they would replace those of another."""
    body = body_of(extra_body={"tools": [{"type": "web_search"}]})
    assert body["tools"] == [{"type": "web_search"}]
    with pytest.raises(MisuseError, match="would replace those of the agent"):
        body_of(tools=(TOOL,), extra_body={"tools": [{"type": "web_search"}]})


# What comes whole


def whole(finish_reason="stop", usage=None, **message):
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], "usage": usage}


def read(answer):
    return decode(json.dumps(answer).encode())


def test_a_whole_reply_is_read():
    """Text, calls, finish reason and usage come out of a reply that was not streamed."""
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    reply = read(whole("tool_calls", usage, content=None, tool_calls=[call]))
    assert reply.calls == (ProposedCall(id="call_1", name="weather", arguments="{}"),)
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    assert reply.usage == Usage(input_tokens=9, output_tokens=2, cached_tokens=4)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("content_filter", FinishReason.CONTENT_FILTER),
        ("tool_calls", FinishReason.STOP),
        ("eos", FinishReason.STOP),
        (None, FinishReason.STOP),
    ],
)
def test_finish_reasons_are_mapped(said, meant):
    """Words of other servers, and calls that are none, mean that the model stopped."""
    assert read(whole(said, content="x")).finish_reason is meant


def test_calls_count_for_more_than_the_word_stop():
    """A forced tool ends with "stop", and is a tool call all the same."""
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    assert read(whole("stop", tool_calls=[call])).finish_reason is FinishReason.TOOL_CALLS


def test_a_refusal_is_its_own_reason():
    """What the model says in refusing is the text of the reply."""
    reply = read(whole("stop", content=None, refusal="I cannot."))
    assert (reply.text, reply.finish_reason) == ("I cannot.", FinishReason.REFUSAL)


def test_without_usage_there_is_none():
    """A server that does not count leaves the counting to the engine."""
    assert read(whole(content="x")).usage is None


def test_cached_tokens_are_a_share_of_the_input():
    """A server that counts more cached tokens than input tokens is not believed."""
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    assert read(whole(usage=usage, content="x")).usage == Usage(input_tokens=3, cached_tokens=3)


@pytest.mark.parametrize(
    "answer",
    [b"<html>", b"\xff", [], {}, {"choices": []}, {"choices": ["x"]}, {"choices": "x"}, whole(content=["x"])],
    ids=["page", "not UTF-8", "list", "nothing", "no choice", "choice of text", "choices of text", "content in parts"],
)
def test_what_is_no_chat_completion_is_a_form_error(answer):
    """Whatever else comes is named, and never taken for an empty reply."""
    with pytest.raises(WireFormatError):
        decode(answer if isinstance(answer, bytes) else json.dumps(answer).encode())


@pytest.mark.parametrize("error", ["out of order", {"message": "out of order"}])
def test_an_error_in_place_of_a_reply_is_read(error):
    """Some routers send an error with status 200."""
    with pytest.raises(InBandError, match="out of order"):
        read({"error": error})


# What comes as a stream


def test_text_is_put_together():
    """Each piece of text is news once, in order, and the empty first one is none; the end is news too."""
    assembly, pieces = assembled(delta(role="assistant", content=""), delta(content="Hel"), delta("stop", content="lo"))
    assert pieces == [TextChunk(text="Hel"), TextChunk(text="lo"), FinishChunk(reason=FinishReason.STOP)]
    assert (assembly.build_reply().text, assembly.build_reply().finish_reason) == ("Hello", FinishReason.STOP)


def test_interleaved_calls_are_put_together_by_index():
    """Calls whose pieces alternate come out whole, in the order in which they began, whatever the server's numbers."""
    assembly, pieces = assembled(
        call_delta(1, "b", "second", ""),
        call_delta(0, "a", "first", ""),
        call_delta(1, arguments='{"x"'),
        call_delta(0, arguments="{"),
        call_delta(1, arguments=":1}"),
        call_delta(0, arguments="}"),
        delta("tool_calls"),
    )
    assert assembly.build_reply().calls == (
        ProposedCall(id="b", name="second", arguments='{"x":1}'),
        ProposedCall(id="a", name="first", arguments="{}"),
    )
    assert pieces[:3] == [
        CallChunk(index=0, name="second"),
        CallChunk(index=1, name="first"),
        CallChunk(index=0, arguments='{"x"'),
    ]


def test_repeated_ids_and_names_count_once():
    """A server that says id and name with each piece does not get them doubled."""
    assembly, pieces = assembled(call_delta(0, "a", "f", "{"), call_delta(0, "a", "f", "}"), delta("tool_calls"))
    assert assembly.build_reply().calls == (ProposedCall(id="a", name="f", arguments="{}"),)
    assert [piece.name for piece in pieces[:-1]] == ["f", ""]
    assert pieces[-1] == FinishChunk(reason=FinishReason.TOOL_CALLS)


def test_missing_indexes_are_made_up_by_id():
    """Without an index a known id goes on, a new one begins a call, and a piece with neither belongs to the last."""
    assembly, _ = assembled(
        call_delta(None, "a", "f", "{"),
        call_delta(None, None, None, "}"),
        call_delta(None, "b", "g", "{"),
        call_delta(None, "b", "g", "}"),
        call_delta(None, None, "h", "{}"),
        delta("stop"),
    )
    reply = assembly.build_reply()
    assert [(call.id, call.name, call.arguments) for call in reply.calls] == [
        ("a", "f", "{}"),
        ("b", "g", "{}"),
        ("", "h", "{}"),
    ]
    assert reply.finish_reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("index", [0, None])
def test_two_whole_calls_of_one_id_and_index_are_two_calls(index):
    """A server that numbers nothing sends equal ids; neither call is lost, nor are both of them refused as one."""
    assembly, pieces = assembled(
        call_delta(index, "call", "pay", '{"cents"'),
        call_delta(index, "call", "pay", ":1}"),
        call_delta(index, "call", "pay", '{"cents":2}'),
        call_delta(index, "call", "now", "null" if index is None else "{}"),
        delta("tool_calls"),
    )
    assert [(call.name, call.arguments) for call in assembly.build_reply().calls] == [
        ("pay", '{"cents":1}'),
        ("pay", '{"cents":2}'),
        ("now", "null" if index is None else "{}"),
    ]
    assert [piece.index for piece in pieces[:-1]] == [0, 0, 1, 2]


def test_the_last_usage_counts():
    """The usage comes in a chunk without a choice, after chunks that have none; a later one replaces it."""
    assembly, _ = assembled(
        delta(content="x") | {"usage": None},
        delta("stop") | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
    )
    assert assembly.build_reply().usage == Usage(input_tokens=5, output_tokens=2)


def test_a_streamed_refusal_is_text_and_a_reason():
    """A refusal streams as text, and the reply says that it is one."""
    assembly, pieces = assembled(delta(refusal="I can"), delta(refusal="not."), delta("stop"))
    assert pieces == [TextChunk(text="I can"), TextChunk(text="not."), FinishChunk(reason=FinishReason.REFUSAL)]
    assert (assembly.build_reply().text, assembly.build_reply().finish_reason) == ("I cannot.", FinishReason.REFUSAL)


@pytest.mark.parametrize(("said", "meant"), [("length", FinishReason.LENGTH), ("stop", FinishReason.TOOL_CALLS)])
def test_the_end_is_told_once_and_as_the_reply_has_it(said, meant):
    """Whoever acts on the stream hears the reason in the words of the reply, though the server says it again."""
    assembly, pieces = assembled(call_delta(0, "a", "f", "{}"), delta(said), delta(said), {"choices": []})
    assert [piece for piece in pieces if isinstance(piece, FinishChunk)] == [FinishChunk(reason=meant)]
    assert assembly.build_reply().finish_reason is meant


def test_a_stream_that_gives_no_reason_tells_no_end():
    """Then nobody knows whether the last call is complete before the stream has closed."""
    assembly, pieces = assembled(call_delta(0, "a", "f", "{}"))
    assert pieces == [CallChunk(index=0, name="f", arguments="{}")]
    assert assembly.finish_reason is None


def test_a_second_choice_is_left_out():
    """Only the first of several answers is read."""
    second = {"choices": [{"index": 1, "delta": {"content": "B"}, "finish_reason": "stop"}]}
    assembly, pieces = assembled(delta(content="A"), second)
    assert pieces == [TextChunk(text="A")]
    assert assembly.finish_reason is None


def test_events_may_arrive_in_any_portions():
    """Byte by byte, with CRLF, comments and other fields, a stream reads the same; after [DONE] nothing counts."""
    stream = (
        ": keep alive\r\n\r\nid: 1\r\nevent: message\r\n"
        f"data:{json.dumps(delta(content='é'), ensure_ascii=False)}\r\n\r\n"
        "data: " + json.dumps(delta("stop"), indent=1).replace("\n", "\ndata: ") + "\n\n"
        "data: [DONE]\n\ndata: nonsense\n\n"
    ).encode()
    for size in (1, 7, len(stream)):
        assembly = Assembly()
        pieces = []
        for start in range(0, len(stream), size):
            if not assembly.is_done:
                pieces += assembly.feed(stream[start : start + size])
        assert pieces == [TextChunk(text="é"), FinishChunk(reason=FinishReason.STOP)]
        assert (assembly.is_done, assembly.finish_reason) == (True, "stop")


def test_a_byte_order_mark_hides_nothing():
    """Servers on .NET may put one before the first event, whose text was lost without a word."""
    stream = b"\xef\xbb\xbfdata: %b\n\n" % json.dumps(delta(content="A")).encode()
    assert Assembly().feed(stream) == [TextChunk(text="A")]


def test_a_line_of_megabytes_is_put_together_once():
    """What has come of it is not copied for each portion of the network: that took seconds of the event loop."""
    assembly = Assembly()
    line = b"data: %b\n\n" % json.dumps(delta(content="x" * 100_000)).encode()
    for start in range(0, len(line), 1_000):
        assembly.feed(line[start : start + 1_000])
        assert all(len(piece) <= 1_000 for piece in assembly._decoder.partial_line)
    assert assembly.texts == ["x" * 100_000]


@pytest.mark.parametrize("chunk", [[], {"choices": {}}, delta(content=1), delta(tool_calls=["x"])])
def test_a_malformed_chunk_is_a_form_error(chunk):
    """A chunk of another form is named, and never skipped."""
    with pytest.raises(WireFormatError):
        assembled(chunk)


def test_an_error_in_the_stream_is_read():
    """An error in mid-stream carries its fields."""
    with pytest.raises(InBandError) as caught:
        assembled(delta(content="x"), {"error": {"message": "overloaded", "code": 503}})
    assert caught.value.body == {"message": "overloaded", "code": 503}


def test_half_a_surrogate_pair_is_read():
    """A server that cuts its text in JavaScript may send the halves of an emoji in two chunks."""
    raw = b'data: {"choices": [{"delta": {"content": "\\ud83d"}}]}\n\n'
    assert Assembly().feed(raw) == [TextChunk(text="\ud83d")]
    assert decode(b'{"choices": [{"message": {"content": "\\ud83d"}}]}').text == "\ud83d"
