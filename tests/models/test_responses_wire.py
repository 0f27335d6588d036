"""The wire of the Responses API: what is written of a request."""

import json
from types import MappingProxyType

import attrs
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
    UserMessage,
)
from agentfsm.core.messages import NativeReply
from agentfsm.models.openai import responses_wire
from agentfsm.models.openai.responses_wire import build_encoding_cache, encode, unsupported_part
from agentfsm.ports import OutputForm, Request, ToolDefinition
from agentfsm.testing.fake_llm.openai_responses import find_request_error
from tests.support.wire_rules import check_responses

ASK = UserMessage(parts=(TextPart(text="And in Rome?"),))
TOOL = ToolDefinition(name="weather", description="The weather.", parameters={"type": "object"})
SEALED = {"type": "reasoning", "summary": [], "encrypted_content": "xyz"}
CALLED = {"type": "function_call", "call_id": "call_9", "name": "weather", "arguments": '{"city": "Rom"}'}


def body_of(*messages, instructions="", tools=(), streamed=False, thinks=True, output=None, **settings):
    request = Request(
        instructions=instructions,
        messages=messages or (ASK,),
        tools=tools,
        output=output,
        settings=Settings(**settings),
    )
    return json.loads(encode(request, model="m", streamed=streamed, include_reasoning=thinks))


def input_of(*messages):
    """The items of a request, which OpenAI would take."""
    items = body_of(*messages)["input"]
    check_responses(items)
    return items


def turn(number, native=None, **call):
    """A turn of one call."""
    made = ToolCall(**{"id": f"t{number}.0", "name": "weather", "arguments": "{}", "provider_id": "call_9", **call})
    result = ToolResult(call_id=made.id, tool="weather", outcome=Outcome.DONE, content="20 C")
    return AssistantMessage(calls=(made,), native=native), result


def native(*items, provider="openai-responses"):
    return NativeReply(provider=provider, content=json.dumps(items))


# Messages


def test_a_history_is_written_as_items():
    """Each kind of message has its items, in order, and OpenAI's own rules find no fault."""
    failed = ToolResult(call_id="t2.0", tool="weather", outcome=Outcome.FAILED, content="no")
    calls = (ToolCall(id="t2.0", name="weather", arguments="{}"), ToolCall(id="t2.1", name="clock", arguments="{}"))
    items = input_of(
        ASK,
        attrs.evolve(turn(1)[0], text="Hm."),
        turn(1)[1],
        AssistantMessage(text=" \n", calls=calls),
        failed,
        ToolResult(call_id="t2.1", tool="clock", outcome=Outcome.DONE, content="noon"),
        AssistantMessage(text="20 degrees."),
        SystemMessage(text="Be short."),
        ASK,
    )
    assert items == [
        {"type": "message", "role": "user", "content": "And in Rome?"},
        {"type": "message", "role": "assistant", "content": "Hm."},
        {"type": "function_call", "call_id": "t1.0", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t1.0", "output": "[weather: done]\n20 C"},
        {"type": "function_call", "call_id": "t2.0", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "t2.1", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t2.0", "output": "[weather: failed]\nno"},
        {"type": "function_call_output", "call_id": "t2.1", "output": "[clock: done]\nnoon"},
        {"type": "message", "role": "assistant", "content": "20 degrees."},
        {"type": "message", "role": "system", "content": "Be short."},
        {"type": "message", "role": "user", "content": "And in Rome?"},
    ]


def test_parts_have_their_forms():
    """Images go by address or whole, files too, each under the field that it has."""
    parts = (
        TextPart(text="Look"),
        ImagePart(url="https://a.test/x.png", detail="low"),
        FilePart(url="https://a.test/x.pdf", name="x.pdf"),
        FilePart.of(b"%PDF", name="y.pdf"),
        FilePart.of(b"%PDF"),
    )
    whole = "data:application/pdf;base64,JVBERg=="
    assert input_of(UserMessage(parts=parts))[0]["content"] == [
        {"type": "input_text", "text": "Look"},
        {"type": "input_image", "image_url": "https://a.test/x.png", "detail": "low"},
        {"type": "input_file", "file_url": "https://a.test/x.pdf"},
        {"type": "input_file", "filename": "y.pdf", "file_data": whole},
        {"type": "input_file", "filename": "file", "file_data": whole},
    ]
    assert [unsupported_part(part) for part in parts] == [None] * len(parts)


def test_a_recording_is_refused():
    """The wire has no form for it: that is said when asked, and nothing is sent without it."""
    recording = AudioPart.of(b"RIFF")
    assert "OpenAIChat" in unsupported_part(recording)
    with pytest.raises(ModelError, match="accepts no recordings"):
        body_of(UserMessage(parts=(recording,)))


# Native replies


def test_a_native_reply_goes_back_whole_and_in_order():
    """Its calls have our ids and the arguments that the message has now, which a person may have edited."""
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    kept = native(SEALED, search, said, SEALED, CALLED, {**CALLED, "call_id": "call_10", "namespace": "maps"})
    first, result = turn(1, kept, arguments='{"city": "Rome"}')
    second = ToolCall(id="t1.1", name="weather", arguments="{}")
    message = attrs.evolve(first, text="I look.", calls=(*first.calls, second))
    items = input_of(ASK, message, result, attrs.evolve(result, call_id="t1.1"))
    edited = {"type": "function_call", "call_id": "t1.0", "name": "weather", "arguments": '{"city": "Rome"}'}
    other = {**edited, "call_id": "t1.1", "arguments": "{}", "namespace": "maps"}
    message = {"type": "message", "role": "assistant", "content": "I look."}
    assert items[1:-2] == [SEALED, search, message, SEALED, edited, other]


def test_a_name_that_was_mended_is_so_in_a_native_reply():
    """A tool that the model invented goes back under a name that OpenAI takes."""
    message, result = turn(1, native(SEALED, {**CALLED, "name": "no such töol"}), name="no_such_t_ol")
    assert input_of(ASK, message, result)[2]["name"] == "no_such_t_ol"


def test_a_native_reply_of_somebody_else_is_left_out():
    """Text and calls say it to another provider."""
    message, result = turn(1, native({"type": "thinking"}, provider="anthropic"))
    assert input_of(ASK, message, result) == input_of(ASK, *turn(1))


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", "null", "{", "[1]", "[{}]", json.dumps([SEALED]), json.dumps([CALLED, CALLED]), "[" * 100_000],
    ids=["empty", "object", "null", "torn", "number", "typeless", "no call", "two calls", "deep"],
)
def test_a_native_reply_that_does_not_fit_is_a_misuse(content):
    """A history that was put together by hand is told what is wrong with it."""
    message, result = turn(1, NativeReply(provider="openai-responses", content=content))
    with pytest.raises(MisuseError, match="native reply of 'openai-responses' that does not fit"):
        body_of(ASK, message, result)


# Settings


def test_what_is_not_set_is_not_sent():
    """Without instructions, tools and settings, a body is a model, its input, and that nothing is stored."""
    assert body_of() == {
        "model": "m",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "input": [{"type": "message", "role": "user", "content": "And in Rome?"}],
    }
    assert "include" not in body_of(thinks=False)
    assert body_of(instructions="Help.")["instructions"] == "Help."
    assert body_of(streamed=True, extra_body={"stream": False})["stream"] is True


def test_settings_are_sent_under_the_wires_names():
    """Each setting has its field, zero counts as set, and further fields go before them."""
    extra = {"truncation": "auto", "store": True, "top_p": 0.25}
    body = body_of(temperature=0.0, top_p=0.5, max_tokens=5, reasoning_effort="low", extra_body=extra)
    assert {key: body[key] for key in body.keys() - {"model", "input", "include"}} == {
        "store": True,
        "temperature": 0.0,
        "top_p": 0.25,
        "max_output_tokens": 5,
        "reasoning": {"effort": "low"},
        "truncation": "auto",
    }


def test_further_fields_do_not_take_settings_away():
    """Of `reasoning` and `text` only those that they name are replaced, so that nothing is lost unsaid."""
    extra = MappingProxyType({"reasoning": MappingProxyType({"summary": "auto"}), "text": {"verbosity": "low"}})
    body = body_of(reasoning_effort="high", extra_body=extra, output=OutputForm(name="x", schema=None))
    assert body["reasoning"] == {"effort": "high", "summary": "auto"}
    assert body["text"] == {"format": {"type": "json_object"}, "verbosity": "low"}
    body = body_of(reasoning_effort="high", extra_body={"reasoning": None, "include": []})
    assert (body["reasoning"], body["include"]) == (None, [])


@pytest.mark.parametrize("setting", [{"seed": 0}, {"stop": ("END",)}])
def test_a_setting_that_cannot_be_sent_is_said(setting):
    """There is no field for it, and an answer that does without it would be a surprise."""
    with pytest.raises(ModelError, match=rf"'m' cannot be asked with Settings\({next(iter(setting))}=.*OpenAIChat"):
        body_of(**setting)


def test_tools_are_sent_flat():
    """A tool says whether it is strict: left out, OpenAI would hold the model to it."""
    strict = attrs.evolve(TOOL, name="clock", strict=True)
    body = body_of(tools=(TOOL, strict), tool_choice="required", parallel_tool_calls=False)
    told = {"type": "function", "description": "The weather.", "parameters": {"type": "object"}}
    assert body["tools"] == [{**told, "name": "weather", "strict": False}, {**told, "name": "clock", "strict": True}]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    assert body_of(tools=(TOOL,), tool_choice="weather")["tool_choice"] == {"type": "function", "name": "weather"}
    assert body_of(tool_choice="auto", parallel_tool_calls=True).keys() == body_of().keys()


def test_the_form_of_an_answer_is_asked_for():
    """A schema goes along whole, read-only views in it too."""
    schema = MappingProxyType({"type": "object", "properties": MappingProxyType({})})
    body = body_of(output=OutputForm(name="city", schema=schema), instructions="Help.")
    assert body["text"]["format"] == {
        "type": "json_schema",
        "name": "city",
        "schema": {"type": "object", "properties": {}},
        "strict": True,
    }
    assert body["instructions"] == "Help."


def test_in_json_mode_the_instructions_stand_in_the_input():
    """OpenAI looks there for the word JSON, and not into `instructions`."""
    body = body_of(output=OutputForm(name="city", schema=None), instructions="Answer in JSON.")
    assert body["text"] == {"format": {"type": "json_object"}}
    assert body["input"][0] == {"type": "message", "role": "system", "content": "Answer in JSON."}
    assert "instructions" not in body


@pytest.mark.parametrize("value", [float("nan"), {1, 2}], ids=["nan", "set"])
def test_what_is_not_json_is_a_misuse(value):
    """A value that JSON does not have is the caller's mistake, said before anything is sent."""
    with pytest.raises(MisuseError, match="cannot be written as JSON"):
        body_of(extra_body={"x": value})


def test_half_a_surrogate_pair_does_not_stop_a_run():
    """Text that UTF-8 cannot carry is sent with U+FFFD in its place."""
    assert input_of(UserMessage(parts=(TextPart(text="a\ud800b 😀"),)))[0]["content"] == "a\ufffdb 😀"


# Written once


def written_anew(written, messages, tools=()):
    """Write a request after others; its bytes are those of one that is written alone."""
    request = Request(instructions="Help.", messages=messages, tools=tools)
    body = encode(request, model="m", streamed=False, encoding_cache=written)
    assert body == encode(request, model="m", streamed=False)
    return json.loads(body)


def test_each_message_of_a_history_that_grows_is_written_once(monkeypatch):
    """A turn writes what is new in it, however long the history is."""
    wired = []
    write = responses_wire._message_items
    monkeypatch.setattr(
        responses_wire, "_message_items", lambda message, *how: wired.append(message) or write(message, *how)
    )
    written, messages = build_encoding_cache(), (ASK,)
    for number in range(5):
        encode(Request(instructions="", messages=messages), model="m", streamed=False, encoding_cache=written)
        messages = (*messages, *turn(number, native(SEALED, CALLED)))
    assert tuple(wired) == messages[:-2]


def test_what_is_written_after_other_requests_is_the_same():
    """A history that goes on, forks, shrinks, or was read from a store again comes out as if it were the first."""
    written = build_encoding_cache()
    long = (ASK, *turn(1, native(SEALED, CALLED)), *turn(2))
    again = (UserMessage(parts=ASK.parts), *turn(1, native(SEALED, CALLED)), *turn(2), *turn(3))
    fork = (ASK, *turn(1), *turn(2), *turn(3))
    for messages in (long, again, long, fork, long[:3], (ASK, SystemMessage(text="Cut."), *turn(2)), long, ()):
        written_anew(written, messages)
    other = attrs.evolve(TOOL, strict=True)
    for tools in ((TOOL,), (TOOL, attrs.evolve(TOOL, name="clock")), (other,), ()):
        sent = written_anew(written, (ASK,), tools).get("tools", [])
        assert [tool["strict"] for tool in sent] == [tool.strict for tool in tools]


# The kit agrees


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (None, "array"),
        ([], "empty array"),
        (["x"], "expected an object"),
        ([{"role": "tool", "content": ""}], "role"),
        ([{"role": "user", "content": None}], "content"),
        ([{**CALLED, "arguments": {}}], "arguments"),
        ([{**CALLED, "call_id": None}], "call_id"),
        ([CALLED, CALLED], "duplicate"),
        ([CALLED], "No tool output found"),
        ([{"type": "function_call_output", "call_id": "x", "output": ""}], "No tool call found"),
        ([CALLED, *[{"type": "function_call_output", "call_id": "call_9", "output": ""}] * 2], "Duplicate"),
        ([CALLED, {"type": "function_call_output", "call_id": "call_9", "output": None}], "output"),
        ([{**CALLED, "id": "fc_1"}], "not found"),
        ([SEALED, {"role": "assistant", "content": "so"}], "could not be verified"),
        ([{**SEALED, "encrypted_content": "sealed-by-local-server-1"}], "required following item"),
    ],
)
def test_the_local_server_refuses_what_openai_refuses(items, words):
    """A history that breaks a rule is told so, in words close to OpenAI's."""
    refused = find_request_error({"input": items, "store": False})
    assert refused["param"] == "input"
    assert words in refused["message"]


def test_the_local_server_takes_what_is_in_order():
    """Calls with their outputs, thinking that it sealed, and ids where things are stored."""
    output = {"type": "function_call_output", "call_id": "call_9", "output": ""}
    sealed = {**SEALED, "encrypted_content": "sealed-by-local-server-1"}
    assert (
        find_request_error({"input": [{"role": "user", "content": "go"}, sealed, CALLED, output], "store": False})
        is None
    )
    assert find_request_error({"input": [{**CALLED, "id": "fc_1"}, output]}) is None
