"""Anthropic's wire, written: messages, parts, tools, settings, thinking that goes back, and marks for the cache."""

import json
from base64 import b64encode
from itertools import pairwise
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
from agentfsm.models.anthropic import wire
from agentfsm.models.anthropic.wire import build_encoding_cache, encode, escape_call_id, unsupported_part
from agentfsm.ports import OutputForm, Request, ToolDefinition
from agentfsm.testing.fake_llm.anthropic import find_request_error
from tests.support.wire_rules import check_anthropic_body

ASK = UserMessage(parts=(TextPart(text="And in Rome?"),))
TOOL = ToolDefinition(name="weather", description="The weather.", parameters={"type": "object"})
MARK = {"cache_control": {"type": "ephemeral"}}
THOUGHT = {"type": "thinking", "thinking": "Rome, then.", "signature": "EqQB"}


def body_of(*messages, instructions="", tools=(), output=None, streamed=False, cache="", **settings):
    request = Request(
        instructions=instructions,
        messages=messages or (ASK,),
        tools=tools,
        output=output,
        settings=Settings(**settings),
    )
    return json.loads(encode(request, model="m", streamed=streamed, cache=cache))


def content_of(*messages):
    """The blocks of all messages, and their roles."""
    sent = body_of(*messages)["messages"]
    return [message["role"] for message in sent], [block for message in sent for block in message["content"]]


def text(words):
    return {"type": "text", "text": words}


def called(call_id, arguments="{}", name="weather"):
    return ToolCall(id=call_id, name=name, arguments=arguments)


def result(call_id, outcome=Outcome.DONE, content="20 C"):
    return ToolResult(call_id=call_id, tool="weather", outcome=outcome, content=content)


def turn(number, width=1, said=""):
    """A turn of so many calls."""
    ids = [f"t{number}.{place}" for place in range(width)]
    return AssistantMessage(text=said, calls=tuple(map(called, ids))), *map(result, ids)


# Messages


def test_a_history_is_written_as_anthropic_wants_it():
    """Calls and results are blocks, results come first and all in one message, and neighbours of a role are merged."""
    body = body_of(
        UserMessage(parts=(TextPart(text="Look"), ImagePart(url="https://a.test/x.png", detail="low"))),
        AssistantMessage(text="Hm.", calls=(called("t1.0", '{"city":"Rome"}'), called("t1.1"))),
        result("t1.0"),
        result("t1.1", Outcome.TIMED_OUT, "no"),
        SystemMessage(text="Be short."),
        ASK,
        AssistantMessage(text="20 degrees. \n"),
        AssistantMessage(text="Or so."),
        ASK,
        instructions="Help.",
        tools=(TOOL,),
    )
    check_anthropic_body(body)
    assert find_request_error(body) is None
    assert body["system"] == [text("Help.")]
    assert body["messages"] == [
        {
            "role": "user",
            "content": [text("Look"), {"type": "image", "source": {"type": "url", "url": "https://a.test/x.png"}}],
        },
        {
            "role": "assistant",
            "content": [
                text("Hm."),
                {"type": "tool_use", "id": "t1-d0", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "t1-d1", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1-d0", "content": "[weather: done]\n20 C"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t1-d1",
                    "content": "[weather: timed_out]\nno",
                    "is_error": True,
                },
                text("<system>Be short.</system>"),
                text("And in Rome?"),
            ],
        },
        {"role": "assistant", "content": [text("20 degrees."), text("Or so.")]},
        {"role": "user", "content": [text("And in Rome?")]},
    ]


@pytest.mark.parametrize("outcome", Outcome)
def test_only_what_is_done_is_no_error(outcome):
    """The provider is told of each result that is none."""
    _, blocks = content_of(ASK, AssistantMessage(calls=(called("t1.0"),)), result("t1.0", outcome))
    assert blocks[-1].get("is_error", False) is (outcome is not Outcome.DONE)


def test_a_history_may_begin_with_anything():
    """A note, or a reply before which all was removed: the first message is the user's all the same."""
    note = SystemMessage(text="[12 earlier messages removed to fit the context window.]")
    for messages in ((note, *turn(1)), turn(1), (AssistantMessage(text="Hello."), ASK)):
        check_anthropic_body(body_of(*messages, cache="5m"))


def test_what_is_blank_is_never_sent():
    """Blank texts, of which a model writes one before its calls, leave no block, and no message of none."""
    blank = UserMessage(parts=(TextPart(text=" "), TextPart(text="Rome")))
    messages = (blank, SystemMessage(text="\n"), *turn(1, said="\n"), AssistantMessage(text=" "), ASK)
    check_anthropic_body(body_of(*messages))
    roles, blocks = content_of(*messages)
    assert roles == ["user", "assistant", "user"]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_result", "text"]
    assert "system" not in body_of(instructions=" \n")


def test_a_last_reply_ends_without_white_space():
    """The API refuses a last message of the assistant's that ends with a blank."""
    assert content_of(ASK, AssistantMessage(text="The answer is ("))[1][-1] == text("The answer is (")
    assert content_of(ASK, AssistantMessage(text="The answer is \n"))[1][-1] == text("The answer is")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("t3.0", "t3-d0"), ("t3:0", "t3-c0"), ("t3-0", "t3--0"), ("toolu_01Ab", "toolu_01Ab"), ("a-.b", "a---db")],
)
def test_ids_are_written_in_the_letters_that_the_wire_has(ours, theirs):
    """Imported ids too, on calls and results alike."""
    assert escape_call_id(ours) == theirs
    _, blocks = content_of(ASK, AssistantMessage(calls=(called(ours),)), result(ours))
    assert (blocks[1]["id"], blocks[2]["tool_use_id"]) == (theirs, theirs)


def test_no_two_ids_become_the_same():
    """However dots, colons and dashes stand beside each other and beside the letters that replace them."""
    letters = ("-", ".", ":", "d", "c")
    ids = {a + b + c + d for a in letters for b in letters for c in letters for d in letters}
    assert len({escape_call_id(each) for each in ids}) == len(ids) == 625


def test_arguments_that_python_cannot_write_are_sent():
    """A number beyond all floats, or of thousands of digits, is JSON, and the run goes on with it."""
    huge = "7" * 5_000
    call = called("t1.0", f'{{"n": 1e999, "deep": [-1e999, 1.5], "huge": {huge}, "large": {huge[:4000]}}}')
    _, blocks = content_of(ASK, AssistantMessage(calls=(call,)), result("t1.0"))
    assert blocks[1]["input"] == {
        "n": "1e999",
        "deep": ["-1e999", 1.5],
        "huge": huge,
        "large": int(huge[:4000]),
    }


def test_half_a_surrogate_pair_does_not_stop_a_run():
    """What UTF-8 cannot carry is sent with U+FFFD in its place, in a text and in arguments."""
    messages = (UserMessage(parts=(TextPart(text="a\ud800b"),)), *turn(1))
    messages = (messages[0], attrs.evolve(messages[1], calls=(called("t1.0", '{"n": "\\ud800"}'),)), messages[2])
    _, blocks = content_of(*messages)
    assert (blocks[0]["text"], blocks[1]["input"]) == ("a\ufffdb", {"n": "\ufffd"})


# Parts


def data(media_type, content=b"words", kind=FilePart):
    return kind.of(content, media_type)


@pytest.mark.parametrize(
    ("part", "block"),
    [
        (
            data("image/png", b"\x89", ImagePart),
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iQ=="}},
        ),
        (
            FilePart(url="https://a.test/x.pdf", name="x.pdf"),
            {"type": "document", "source": {"type": "url", "url": "https://a.test/x.pdf"}, "title": "x.pdf"},
        ),
        (
            data("application/pdf", b"%PDF"),
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}},
        ),
        (
            data("text/markdown", "# é".encode()),
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "# é"}},
        ),
    ],
    ids=["image", "document by address", "PDF", "text"],
)
def test_parts_are_blocks(part, block):
    """Each part that the wire has a block for."""
    assert unsupported_part(part) is None
    assert content_of(UserMessage(parts=(part,)))[1] == [block]
    check_anthropic_body(body_of(UserMessage(parts=(part,))))


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (AudioPart(url="https://a.test/x.wav"), "no recordings"),
        (data("audio/wav", kind=AudioPart), "no recordings"),
        (data("image/tiff", kind=ImagePart), "not as image/tiff"),
        (ImagePart(url="http://a.test/x.png"), r"https://.*ImagePart\.of"),
        (FilePart(url="http://a.test/x.pdf"), r"https://.*FilePart\.of"),
        (data("application/zip"), "not as application/zip"),
        (data("text/plain", b"\xff"), "not UTF-8"),
        (FilePart(url="data:text/plain;base64,?"), "not UTF-8"),
    ],
)
def test_parts_that_cannot_be_sent_are_refused_in_words(part, why):
    """Before anything is sent; a history that holds one all the same is a request that cannot be made."""
    with pytest.raises(ModelError, match=why):
        body_of(UserMessage(parts=(part,)))
    assert unsupported_part(part)


def test_a_text_is_a_part_that_can_be_sent():
    """What every wire carries."""
    assert unsupported_part(TextPart(text="x")) is None


# Tools and settings


def test_what_is_not_set_is_not_sent():
    """Without instructions, tools and settings a body is a model, messages, and the limit that the wire wants."""
    assert body_of() == {
        "model": "m",
        "max_tokens": wire.DEFAULT_MAX_TOKENS,
        "messages": [{"role": "user", "content": [text("And in Rome?")]}],
    }


def test_settings_are_sent_under_the_wires_names():
    """Each setting has its field, zero counts as set, and further fields go before all others."""
    settings = {"temperature": 0.0, "top_p": 0.5, "max_tokens": 5, "stop": ("END",)}
    body = body_of(**settings, extra_body={"top_k": 3, "max_tokens": 7})
    assert {key: body[key] for key in body.keys() - {"model", "messages"}} == {
        "temperature": 0.0,
        "top_p": 0.5,
        "max_tokens": 7,
        "stop_sequences": ["END"],
        "top_k": 3,
    }


@pytest.mark.parametrize(
    ("effort", "fields"),
    [
        ("high", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}),
        ("none", {"thinking": {"type": "disabled"}}),
    ],
)
def test_an_effort_lets_a_model_think(effort, fields):
    """How much it thinks is an effort, and that it may is said as well."""
    body = body_of(reasoning_effort=effort)
    assert {key: body[key] for key in body.keys() & {"thinking", "output_config"}} == fields


def test_a_budget_of_thinking_comes_on_top_of_the_answer():
    """A limit that is not above it is refused: any budget beyond the usual answer was, unless a limit was set too."""
    thinking = {"type": "enabled", "budget_tokens": 20_000}
    assert body_of(extra_body={"thinking": thinking})["max_tokens"] == wire.DEFAULT_MAX_TOKENS + 20_000
    assert body_of(extra_body={"thinking": thinking}, max_tokens=30_000)["max_tokens"] == 30_000
    assert body_of(extra_body={"thinking": {"type": "adaptive"}})["max_tokens"] == wire.DEFAULT_MAX_TOKENS


def test_a_seed_is_refused_in_words():
    """What the wire has no word for is not left out in silence."""
    with pytest.raises(ModelError, match=r"no seed.*seed=7"):
        body_of(seed=7)


def test_the_form_of_an_answer_is_the_wires_own():
    """A JSON Schema goes beside the effort; JSON of any form there is not."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    body = body_of(output=OutputForm(name="x", schema=schema), reasoning_effort="low")
    assert body["output_config"] == {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    with pytest.raises(ModelError, match="JSON Schema"):
        body_of(output=OutputForm(name="x", schema=None))


@pytest.mark.parametrize(
    ("settings", "choice"),
    [
        ({}, None),
        ({"tool_choice": "auto"}, {"type": "auto"}),
        ({"tool_choice": "required"}, {"type": "any"}),
        ({"tool_choice": "weather"}, {"type": "tool", "name": "weather"}),
        ({"tool_choice": "none"}, {"type": "none"}),
        ({"parallel_tool_calls": True}, None),
        ({"parallel_tool_calls": False}, {"type": "auto", "disable_parallel_tool_use": True}),
        (
            {"parallel_tool_calls": False, "tool_choice": "required"},
            {"type": "any", "disable_parallel_tool_use": True},
        ),
        ({"parallel_tool_calls": False, "tool_choice": "none"}, {"type": "none"}),
    ],
)
def test_the_choice_of_tools_is_one_field(settings, choice):
    """How many calls there may be is part of it; without tools there is no choice to speak of."""
    assert body_of(tools=(TOOL,), **settings).get("tool_choice") == choice
    assert "tool_choice" not in body_of(**settings)


def test_tools_are_sent_with_their_schema():
    """As `input_schema`, whatever mapping it is, and as strict only where it is."""
    schema = MappingProxyType({"type": "object", "properties": MappingProxyType({})})
    view = ToolDefinition(name="t", description="x", parameters=schema)
    assert body_of(tools=(TOOL, view))["tools"] == [
        {"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}},
        {"name": "t", "description": "x", "input_schema": {"type": "object", "properties": {}}},
    ]


def test_a_strict_schema_holds_only_what_the_wire_knows():
    """Of a strict tool, and of an answer; other tools keep theirs."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "additionalProperties": False}
    known = schema | {"properties": {"n": {"type": "integer", "description": "{minimum: 1}"}}}
    tools = [ToolDefinition(name="t", description="x", parameters=schema, strict=strict) for strict in (False, True)]
    plain, strict = body_of(tools=tools)["tools"]
    assert (plain["input_schema"], "strict" in plain) == (schema, False)
    assert (strict["input_schema"], strict["strict"]) == (known, True)
    assert body_of(output=OutputForm(name="x", schema=schema))["output_config"]["format"]["schema"] == known


def test_a_strict_schema_that_refers_back_to_itself_is_sent_as_it_is():
    """The provider refuses it for a strict tool, so that the tool is none there."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    schema = {"type": "object", "properties": {"first": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    (told,) = body_of(tools=[ToolDefinition(name="t", description="x", parameters=schema, strict=True)])["tools"]
    assert (told["input_schema"], "strict" in told) == (schema, False)


def test_a_history_of_calls_goes_on_without_tools():
    """Anthropic wants tools where there are calls: those that were called are told, and none may be called."""
    calls = AssistantMessage(calls=(called("t2.0", name="clock"), called("t2.1"), called("t2.2", name="clock")))
    body = body_of(ASK, *turn(1), calls, *map(result, ("t2.0", "t2.1", "t2.2")))
    check_anthropic_body(body)
    assert find_request_error(body) is None
    assert [tool["name"] for tool in body["tools"]] == ["weather", "clock"]
    assert body["tool_choice"] == {"type": "none"}


def test_tools_that_only_the_provider_has_stand_in_place_of_ours():
    """They are passed as a further field, and then nothing is made up beside them."""
    search = [{"type": "web_search_20260318", "name": "web_search"}]
    body = body_of(ASK, *turn(1), extra_body={"tools": search})
    assert (body["tools"], "tool_choice" in body) == (search, False)


def test_a_stream_is_asked_for():
    """Further fields cannot undo that: what comes would not be read."""
    assert body_of(streamed=True, extra_body={"stream": False})["stream"] is True


@pytest.mark.parametrize("value", [float("nan"), {1, 2}], ids=["nan", "set"])
def test_what_is_not_json_is_a_misuse(value):
    """A value that JSON does not have is the caller's mistake, said before anything is sent."""
    with pytest.raises(MisuseError, match="cannot be written as JSON"):
        body_of(extra_body={"x": value})


# Thinking goes back


def kept(*blocks, provider="anthropic"):
    return NativeReply(provider=provider, content=json.dumps(blocks))


def use(call_id, given, **more):
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": given, **more}


def test_a_reply_goes_back_as_the_provider_wrote_it():
    """Whole and in order, with our ids on its calls, and with the arguments that a person may have edited."""
    caller = {"caller": {"type": "code_execution_20260120", "tool_id": "srvtoolu_1"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_2", "content": []}
    blocks = (THOUGHT, text("Hm. "), use("toolu_1", {"n": 1}, **caller), found, use("toolu_2", {"n": 2}))
    message = AssistantMessage(
        text="Hm. ", calls=(called("t1.0", '{"n":40}'), called("t1.1", '{"n":2}')), native=kept(*blocks)
    )
    assert content_of(ASK, message, result("t1.0"), result("t1.1"))[1][1:-2] == [
        THOUGHT,
        text("Hm. "),
        use("t1-d0", {"n": 40}, **caller),
        found,
        use("t1-d1", {"n": 2}),
    ]


def test_blank_texts_of_a_reply_do_not_go_back():
    """A model may write one between its thinking and its calls, and the API takes none back."""
    message = AssistantMessage(calls=(called("t1.0"),), native=kept(THOUGHT, text("\n\n"), use("toolu_1", {})))
    assert content_of(ASK, message, result("t1.0"))[1][1:-1] == [THOUGHT, use("t1-d0", {})]


@pytest.mark.parametrize(
    "native",
    [kept(THOUGHT, use("toolu_1", {}), provider="openai"), kept(THOUGHT), kept(THOUGHT, use("a", {}), use("b", {}))],
    ids=["of another provider", "a call more", "a call less"],
)
def test_thinking_that_does_not_belong_to_the_message_is_left_out(native):
    """A provider does not get what another wrote, nor thinking that led to other calls."""
    message = AssistantMessage(text="Hm.", calls=(called("t1.0"),), native=native)
    assert content_of(ASK, message, result("t1.0"))[1][1:-1] == [text("Hm."), use("t1-d0", {})]


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", "[{}]", "null", "[" * 10])
def test_a_native_reply_of_another_form_is_a_misuse(content):
    """Only a history that was put together by hand can hold one."""
    native = NativeReply(provider="anthropic", content=content)
    with pytest.raises(MisuseError, match="content blocks"):
        body_of(ASK, AssistantMessage(text="x", native=native), ASK)


# Marks for the cache


def marks_of(body):
    """Where the marks are: "system", "tools", or the message and the block."""
    places = [name for name in ("system", "tools") if any("cache_control" in block for block in body.get(name, ()))]
    return places + [
        (index, place)
        for index, message in enumerate(body["messages"])
        for place, block in enumerate(message["content"])
        if "cache_control" in block
    ]


def unmarked(value):
    """The same without marks."""
    if isinstance(value, dict):
        return {key: unmarked(each) for key, each in value.items() if key != "cache_control"}
    return [unmarked(each) for each in value] if isinstance(value, list) else value


def test_what_the_next_request_shares_is_marked():
    """The end of instructions and tools, where the request before ended, and the end."""
    first = body_of(ASK, instructions="Help.", tools=(TOOL,), cache="5m")
    assert marks_of(first) == ["system", (0, 0)]
    assert first["system"] == [text("Help.") | MARK]
    second = body_of(ASK, *turn(1, 30), instructions="Help.", tools=(TOOL,), cache="5m")
    assert marks_of(second) == ["system", (0, 0), (2, 29)]
    third = body_of(ASK, *turn(1, 30), *turn(2), ASK, instructions="Help.", tools=(TOOL,), cache="5m")
    assert marks_of(third) == ["system", (2, 29), (4, 1)]


def test_without_instructions_the_last_tool_is_marked():
    """Tools stand before all else."""
    other = ToolDefinition(name="clock", description="", parameters={"type": "object"})
    body = body_of(tools=(TOOL, other), cache="5m")
    assert ["cache_control" in tool for tool in body["tools"]] == [False, True]


def test_a_reply_at_the_end_is_not_marked():
    """It may end with thinking, which takes no mark."""
    assert marks_of(body_of(ASK, *turn(1), AssistantMessage(text="So ("), cache="5m")) == ["tools", (2, 0)]


def test_marks_are_all_that_the_option_adds():
    """Without it not a byte is different but for the marks."""
    messages = (ASK, *turn(1, 3), SystemMessage(text="A note."), *turn(2), ASK)
    marked = body_of(*messages, instructions="Help.", tools=(TOOL,), cache="5m")
    assert marks_of(body_of(*messages, instructions="Help.", tools=(TOOL,))) == []
    assert unmarked(marked) == body_of(*messages, instructions="Help.", tools=(TOOL,))


def test_a_request_begins_with_the_bytes_of_the_one_before():
    """Up to where the mark moved: else the provider would read nothing from its cache."""
    written, messages, before = build_encoding_cache(), (ASK,), b""
    for number in range(1, 8):
        request = Request(instructions="Help.", messages=messages, tools=(TOOL,))
        text_now = encode(request, model="m", streamed=False, encoding_cache=written)
        text_now = text_now.replace(b',"cache_control":{"type":"ephemeral"}', b"")
        assert text_now.startswith(before.removesuffix(b"]}"))
        messages, before = (*messages, *turn(number, 2)), text_now


# Written once


def written_anew(written, messages, tools=(TOOL,)):
    """Write a request after others; its bytes are those of one that is written alone."""
    request = Request(instructions="Help.", messages=messages, tools=tools)
    body = encode(request, model="m", streamed=False, encoding_cache=written)
    assert body == encode(request, model="m", streamed=False)
    return json.loads(body)


def test_each_message_is_written_once_when_it_is_new_and_once_for_good(monkeypatch):
    """A turn writes what is new in it, however long the history is."""
    wired = []
    write = wire._message_blocks
    monkeypatch.setattr(wire, "_message_blocks", lambda message, *how: wired.append(message) or write(message, *how))
    written, messages = build_encoding_cache(), (ASK,)
    for number in range(1, 50):
        encode(
            Request(instructions="", messages=messages, tools=(TOOL,)),
            model="m",
            streamed=False,
            encoding_cache=written,
        )
        messages = (*messages, *turn(number))
    assert len(wired) <= 2 * len(messages)
    assert set(map(id, wired)) == set(map(id, messages[:-2]))


def test_what_is_written_after_other_requests_is_the_same():
    """A history that goes on, forks, shrinks, is added to after a failure or read from a store again."""
    written = build_encoding_cache()
    long = (ASK, *turn(1), *turn(2, 3))
    again = (UserMessage(parts=ASK.parts), *turn(1), *turn(2, 3), *turn(3))
    fork = (ASK, *turn(1), *turn(2, 2), *turn(3))
    stories = (
        (long, again, long, fork, long[:3], (ASK, SystemMessage(text="Cut."), *turn(2)), long),
        ((*long, ASK), (*long, ASK, ASK), (*long, ASK, ASK, SystemMessage(text="Note."), *turn(3))),
        ((ASK, AssistantMessage(text="x")), (ASK, AssistantMessage(text="x"), AssistantMessage(text="y"), ASK), long),
        (turn(1), (*turn(1), *turn(2)), ()),
    )
    for messages in (each for story in stories for each in story):
        body = written_anew(written, messages)
        roles = [message["role"] for message in body["messages"]]
        assert all(before != after for before, after in pairwise(roles))


def test_tools_that_change_are_written_anew():
    """A tool that is added, replaced or taken away is so in the next request."""
    other = ToolDefinition(name="clock", description="The time.", parameters={"type": "object"})
    written = build_encoding_cache()
    for tools in ((TOOL,), (TOOL, other), (other,), ()):
        sent = written_anew(written, (ASK,), tools).get("tools", [])
        assert [tool["name"] for tool in sent] == [tool.name for tool in tools]


def test_a_large_document_is_sent_whole():
    """A few megabytes of base64 are neither cut nor changed."""
    pdf = b"%PDF" + bytes(3_000_000)
    _, blocks = content_of(UserMessage(parts=(FilePart.of(pdf),)))
    assert blocks[0]["source"]["data"] == b64encode(pdf).decode()
