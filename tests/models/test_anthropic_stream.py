"""Anthropic's wire, read: replies whole and streamed, what they cost, why they end, and what is no reply at all."""

import json

import attrs
import pytest

from agentfsm import AssistantMessage, ToolCall, Usage, UserMessage
from agentfsm.core.messages import as_parts
from agentfsm.models.anthropic.wire import AnthropicStreamAssembler, decode, encode
from agentfsm.models.wire import InBandError, WireFormatError
from agentfsm.ports import CallChunk, FinishChunk, FinishReason, ProposedCall, Reply, Request, TextChunk, ThinkingChunk

THOUGHT = {"type": "thinking", "thinking": "Rome, then.", "signature": "EqQB"}
HIDDEN = {"type": "redacted_thinking", "data": "EmwK"}
USAGE = {"input_tokens": 10, "output_tokens": 5}


def text(words, **more):
    return {"type": "text", "text": words, **more}


def use(call_id="toolu_1", name="weather", **given):
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def whole(*content, stop="end_turn", usage=USAGE, **more):
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": list(content),
        "stop_reason": stop,
        "usage": usage,
        **more,
    }


def read(answer):
    return decode(json.dumps(answer).encode())


# The same as a stream, cut into small pieces


def pieces_of(words, size=3):
    return [words[at : at + size] for at in range(0, len(words), size)]


def begun(block):
    """A block as a stream begins it, and the deltas that fill it."""
    match block["type"]:
        case "text":
            cited = [{"type": "citations_delta", "citation": each} for each in block.get("citations") or ()]
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces_of(block["text"])]
            return {**block, "text": "", **({"citations": []} if cited else {})}, cited + deltas
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces_of(block["thinking"])]
            signed = [{"type": "signature_delta", "signature": piece} for piece in pieces_of(block["signature"])]
            return {**block, "thinking": "", "signature": ""}, deltas + signed
        case "tool_use" | "server_tool_use":
            given = json.dumps(block["input"]) if block["input"] else ""
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in ["", *pieces_of(given)]]
            return {**block, "input": {}}, deltas
    return block, []


def events_of(*content, stop="end_turn", first=USAGE, last=USAGE, **delta):
    """A stream with this content."""
    yield {"type": "message_start", "message": whole(stop=None, usage=first)}
    yield {"type": "ping"}
    for index, block in enumerate(content):
        start, deltas = begun(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for each in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": each}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": {"stop_reason": stop, **delta}, "usage": last}
    yield {"type": "message_stop"}


def sse(*events):
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()


def assembled(*events):
    """Feed events as one stream; returns the assembly and the pieces that were news."""
    assembly = AnthropicStreamAssembler()
    return assembly, assembly.feed(sse(*events))


# Replies, both ways


@pytest.mark.parametrize(
    "content",
    [
        (text("It is sunny."),),
        (use(city="Rome"),),
        (use(),),
        (text("Let me see."), use(city="Rome"), use("toolu_2", "clock", zone="Europe/Rome", deep={"a": [1, None]})),
        (THOUGHT, text("So."), use(city="Rome")),
        (HIDDEN, THOUGHT, text("So.")),
        (text("Rome is "), text("old", citations=[{"type": "char_location", "cited_text": "x"}]), text(".")),
        (
            THOUGHT,
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "Rome"}},
            {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "web_search_result"}]},
            text("Found."),
        ),
    ],
    ids=["text", "call", "no arguments", "text and calls", "thinking", "hidden thinking", "citations", "search"],
)
def test_a_streamed_reply_is_the_one_that_comes_whole(content):
    """Text, calls, thinking with its signature, and all that goes back."""
    stop = "tool_use" if any(block["type"] == "tool_use" for block in content) else "end_turn"
    one, (assembly, pieces) = read(whole(*content, stop=stop)), assembled(*events_of(*content, stop=stop))
    other = assembly.build_reply()
    assert (assembly.is_begun, assembly.is_complete, assembly.is_done) == (True, True, True)
    assert other == one
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextChunk)) == one.text
    for place, call in enumerate(one.calls):
        heard = [piece for piece in pieces if isinstance(piece, CallChunk) and piece.index == place]
        assert [piece.name for piece in heard if piece.name] == [call.name]
        assert "".join(piece.arguments for piece in heard) == call.arguments
    assert pieces[-1] == FinishChunk(reason=one.finish_reason)


def test_a_whole_reply_is_read():
    """Text, calls, the reason and the usage."""
    reply = read(whole(text("Hm."), use(city="Rome"), stop="tool_use"))
    assert reply.text == "Hm."
    assert reply.calls == (ProposedCall(id="toolu_1", name="weather", arguments='{"city": "Rome"}'),)
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    assert reply.usage == Usage(input_tokens=10, output_tokens=5)
    assert reply.native is None


def test_thinking_is_heard_and_no_part_of_the_answer():
    """It streams as chunks of its own."""
    assembly, pieces = assembled(*events_of(THOUGHT, text("So.")))
    assert "".join(piece.text for piece in pieces if isinstance(piece, ThinkingChunk)) == "Rome, then."
    assert assembly.build_reply().text == "So."


def test_calls_are_counted_from_nought():
    """Whatever blocks stand between them."""
    _, pieces = assembled(*events_of(THOUGHT, use(), text("and"), use("toolu_2", "clock")))
    calls = [piece for piece in pieces if isinstance(piece, CallChunk)]
    assert calls == [
        CallChunk(index=0, name="weather"),
        CallChunk(index=0, arguments="{}", is_complete=True),
        CallChunk(index=1, name="clock"),
        CallChunk(index=1, arguments="{}", is_complete=True),
    ]


def test_arguments_come_as_they_were_written():
    """What the model cut off, or wrote wrongly, is for the engine to read."""
    events = list(events_of(use(city="Rome"), stop="max_tokens"))
    cut = [event for event in events if event.get("delta", {}).get("partial_json") != "}"]
    assembly, _ = assembled(*cut)
    assert assembly.build_reply().calls[0].arguments == '{"city": "Rome"'
    assert assembly.build_reply().finish_reason is FinishReason.LENGTH


def test_a_reply_that_is_more_than_text_and_calls_is_kept_whole():
    """Also where the arguments of a call are no JSON: its place is kept, and the message has its arguments."""
    content = (THOUGHT, text("So.", citations=None), use(city="Rome"))
    assert json.loads(read(whole(*content)).native.content) == list(content)
    events = [
        event for event in events_of(*content, stop="tool_use") if event.get("delta", {}).get("partial_json") != "}"
    ]
    kept = json.loads(assembled(*events)[0].build_reply().native.content)
    assert kept == [THOUGHT, text("So.", citations=None), use()]


@pytest.mark.parametrize("caller", [{}, {"caller": None}, {"caller": {"type": "direct"}}])
def test_plain_replies_are_not_kept_twice(caller):
    """Text and calls are all that a message holds anyway."""
    assert read(whole(text("x", citations=None), use() | caller)).native is None


def test_what_is_kept_goes_back():
    """A reply that is read, put into a message and sent comes back block by block, with our ids."""
    content = (THOUGHT, HIDDEN, text("é\n"), use(city="Rome"))
    native = assembled(*events_of(*content))[0].build_reply().native
    call = ToolCall(id="t1.0", name="weather", arguments='{"city": "Rome"}')
    messages = (UserMessage(parts=as_parts("go")), AssistantMessage(text="é\n", calls=(call,), native=native))
    sent = json.loads(encode(Request(instructions="", messages=messages), model="m", streamed=False))
    assert sent["messages"][1]["content"] == [*content[:-1], use("t1-d0", city="Rome")]


# Why it ends


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("end_turn", FinishReason.STOP),
        ("stop_sequence", FinishReason.STOP),
        ("max_tokens", FinishReason.LENGTH),
        ("model_context_window_exceeded", FinishReason.LENGTH),
        ("pause_turn", FinishReason.PAUSED),
        ("compaction", FinishReason.PAUSED),
        ("a new reason", FinishReason.STOP),
        (None, FinishReason.STOP),
    ],
)
def test_reasons_are_mapped(said, meant):
    """Half an answer is never taken for a whole one."""
    assert read(whole(text("x"), stop=said)).finish_reason is meant
    if said is not None:
        assert assembled(*events_of(text("x"), stop=said))[0].build_reply().finish_reason is meant


@pytest.mark.parametrize("said", ["max_tokens", "refusal", "model_context_window_exceeded"])
def test_half_a_reply_is_not_kept_for_the_way_back(said):
    """Its last thought may lack the signature, and its last search the result."""
    content = (THOUGHT, text("So."), THOUGHT | {"signature": ""})
    assert read(whole(*content, stop=said)).native is None
    assert assembled(*events_of(*content, stop=said))[0].build_reply().native is None


@pytest.mark.parametrize("said", ["tool_use", "end_turn", "stop_sequence"])
def test_calls_count_for_more_than_the_reason(said):
    """A reply with calls asks for them, whatever word it ends with."""
    assert read(whole(use(), stop=said)).finish_reason is FinishReason.TOOL_CALLS


def test_the_end_is_told_once():
    """Though the server says it again, with the usage of the end."""
    *events, end, last = events_of(text("x"))
    _, pieces = assembled(*events, end, end, last)
    assert pieces.count(FinishChunk(reason=FinishReason.STOP)) == 1


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ({"type": "refusal", "category": "bio", "explanation": "Not this."}, "Not this."),
        (
            {"type": "refusal", "category": "bio", "explanation": None},
            "Anthropic's filter let no answer through (bio).",
        ),
        (None, "Anthropic's filter let no answer through."),
    ],
)
def test_a_refusal_says_why(details, words):
    """Where the provider let nothing through, its reason stands for the answer, streamed or not."""
    reply = read(whole(stop="refusal", stop_details=details))
    assert (reply.text, reply.finish_reason) == (words, FinishReason.REFUSAL)
    assembly, pieces = assembled(*events_of(stop="refusal", stop_details=details))
    assert assembly.build_reply() == reply
    assert pieces == [TextChunk(words), FinishChunk(reason=FinishReason.REFUSAL)]


@pytest.mark.parametrize("content", [(text("First, take"),), (use(city="Rome"),)], ids=["text", "call"])
def test_an_answer_that_was_cut_off_by_a_filter_is_none(content):
    """What was said until then is neither an answer nor a call to run."""
    assert read(whole(*content, stop="refusal")).finish_reason is FinishReason.CONTENT_FILTER
    assert assembled(*events_of(*content, stop="refusal"))[1][-1] == FinishChunk(reason=FinishReason.CONTENT_FILTER)


# What it costs


def test_tokens_of_the_cache_are_part_of_the_input():
    """Anthropic counts them apart, and everybody else within."""
    usage = {
        "input_tokens": 3,
        "cache_read_input_tokens": 100,
        "cache_creation_input_tokens": 20,
        "output_tokens": 50,
        "output_tokens_details": {"thinking_tokens": 30},
    }
    expected = Usage(input_tokens=123, output_tokens=50, cached_tokens=100, cache_write_tokens=20, reasoning_tokens=30)
    assert read(whole(text("x"), usage=usage)).usage == expected


def test_the_usage_of_a_stream_counts_on():
    """The last word on each number counts; what is not said again stays."""
    first = {"input_tokens": 3, "cache_read_input_tokens": 7, "output_tokens": 1, "service_tier": "standard"}
    assembly, _ = assembled(*events_of(text("x"), first=first, last={"output_tokens": 9, "input_tokens": None}))
    assert assembly.build_reply().usage == Usage(input_tokens=10, output_tokens=9, cached_tokens=7)
    assembly, _ = assembled(*events_of(text("x"), first=first, last={"output_tokens": 9, "input_tokens": 40}))
    assert assembly.build_reply().usage == Usage(input_tokens=47, output_tokens=9, cached_tokens=7)


def test_usage_of_any_numbers_is_read():
    """A whole reply is not thrown away because its bill says 5.0 or -1."""
    usage = {"input_tokens": 5.0, "output_tokens": -1, "cache_read_input_tokens": -2}
    assert read(whole(text("x"), usage=usage)).usage == Usage(input_tokens=5)
    assert assembled(*events_of(text("x"), first=usage, last=None))[0].build_reply().usage == Usage(
        input_tokens=5, estimated=True
    )  # the number of output tokens at the start is none


def test_without_usage_there_is_none():
    """A server that does not count leaves the counting to the engine."""
    assert read(whole(text("x"), usage=None)).usage is None
    assert assembled(*events_of(text("x"), first=None, last=None))[0].build_reply().usage is None


# What is no reply


@pytest.mark.parametrize("usage", [[], "many", {"input_tokens": "many"}])
def test_an_odd_bill_spoils_no_reply(usage):
    """It is as if nobody had said what was billed."""
    assert read(whole(text("x"), usage=usage)) == Reply(text="x", served_model="m")
    assert assembled(*events_of(text("x"), first=usage, last=None))[0].build_reply() == Reply(
        text="x", served_model="m"
    )


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        b"\xff",
        b"",
        [],
        "words",
        {},
        {"choices": []},
        {"content": None, "type": "x", "stop_reason": 1},
        {"content": "words"},
        {"content": ["words"]},
        {"content": [{}]},
        {"content": [{"type": "text", "text": 1}]},
        {"content": [{"type": "tool_use", "name": 1}]},
        b'{"content":' + b"[" * 100_000,
    ],
)
def test_what_is_no_message_is_a_form_error(answer):
    """Whatever else comes is named, and never taken for an empty reply."""
    with pytest.raises(WireFormatError):
        decode(answer if isinstance(answer, bytes) else json.dumps(answer).encode())


def test_numbers_that_python_cannot_write_do_not_stop_the_reading():
    """The engine is told of them as of any arguments that are no JSON; what is kept is JSON all the same."""
    raw = json.dumps(whole(THOUGHT, use(n=1))).replace('"n": 1', '"n": 1e999').encode()
    reply = decode(raw)
    assert reply.calls[0].arguments == '{"n": Infinity}'
    message = AssistantMessage(calls=(ToolCall(id="t1.0", name="weather", arguments="{}"),), native=reply.native)
    encode(Request(instructions="", messages=(message,)), model="m", streamed=False)


def test_a_number_of_thousands_of_digits_is_a_form_error():
    """Python does not read it; neither whole nor streamed does anything else come out."""
    raw = json.dumps(whole(use(n=1))).replace('"n": 1', '"n": ' + "7" * 5_000).encode()
    with pytest.raises(WireFormatError, match="not JSON"):
        decode(raw)
    with pytest.raises(WireFormatError, match="digits"):
        AnthropicStreamAssembler().feed(b"data: " + raw + b"\n\n")


def test_half_a_surrogate_pair_is_read():
    """A server may send one; what is kept of it can be written to any store."""
    raw = json.dumps(whole(THOUGHT | {"thinking": "\ud83d"}, text("\ud83d"))).encode()
    reply = decode(raw)
    assert reply.text == "\ud83d"
    assert json.loads(reply.native.content)[0]["thinking"] == "\ufffd"


@pytest.mark.parametrize(
    "event",
    [
        [],
        {"type": 1},
        {"type": "content_block_start", "content_block": text("")},
        {"type": "content_block_start", "index": 0, "content_block": {}},
        {"type": "content_block_start", "index": 0},
        {"type": "content_block_delta", "index": 7, "delta": {"type": "text_delta", "text": "x"}},
        {"type": "content_block_stop", "index": 7},
        {"type": "message_delta", "delta": {"stop_reason": 7}},
        {"type": "message_start", "message": "x"},
    ],
)
def test_a_malformed_event_is_a_form_error(event):
    """An event of another form is named, and never skipped."""
    with pytest.raises(WireFormatError):
        AnthropicStreamAssembler().feed(f"data: {json.dumps(event)}\n\n".encode())


@pytest.mark.parametrize(
    "delta", [{"type": "text_delta", "text": 1}, {"type": "citations_delta", "citation": "x"}, "x"]
)
def test_a_malformed_piece_is_a_form_error(delta):
    """So is a piece of a block."""
    start = {"type": "content_block_start", "index": 0, "content_block": text("")}
    with pytest.raises(WireFormatError):
        assembled(start, {"type": "content_block_delta", "index": 0, "delta": delta})


def test_a_block_that_begins_twice_is_a_form_error():
    """Its pieces could not be told apart."""
    start = {"type": "content_block_start", "index": 0, "content_block": text("")}
    with pytest.raises(WireFormatError, match="begins twice"):
        assembled(start, start)


def test_what_may_be_added_to_the_wire_is_passed_over():
    """Events and pieces of kinds that are not known yet, and what follows the end."""
    events = list(events_of(text("So.")))
    new = {"type": "content_block_delta", "index": 0, "delta": {"type": "mood_delta", "mood": "blue"}}
    assembly, pieces = assembled(
        *events[:3], {"type": "weather"}, new, *events[3:], {"type": "message_start"}, {"type": 1}
    )
    assert assembly.build_reply().text == "".join(piece.text for piece in pieces[:-1]) == "So."


def test_blocks_that_begin_with_something_in_them_are_read():
    """Some servers send a whole block at once."""
    blocks = (THOUGHT, text("So."), use(city="Rome"))
    events = []
    for index, block in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events.append({"type": "content_block_stop", "index": index})
    assembly, pieces = assembled(*events, *list(events_of(stop="tool_use"))[-2:])
    assert assembly.build_reply() == attrs.evolve(read(whole(*blocks, stop="tool_use")), served_model="")
    assert pieces == [
        ThinkingChunk("Rome, then."),
        TextChunk("So."),
        CallChunk(index=0, name="weather"),
        CallChunk(index=0, arguments='{"city": "Rome"}', is_complete=True),
        FinishChunk(reason=FinishReason.TOOL_CALLS),
    ]


@pytest.mark.parametrize("kept", range(7))
def test_a_stream_that_ends_early_is_not_whole(kept):
    """Neither before the reason, nor between the reason and the last event."""
    assembly, _ = assembled(*list(events_of(text("So.")))[:kept])
    assert not assembly.is_complete


def test_events_may_arrive_in_any_portions():
    """Byte by byte, with CRLF and comments, a stream reads the same."""
    stream = b": keep alive\r\n\r\n" + sse(*events_of(THOUGHT, text("é"), use(city="Rome"))).replace(b"\n", b"\r\n")
    expected = read(whole(THOUGHT, text("é"), use(city="Rome"), stop="tool_use"))
    for size in (1, 7, len(stream)):
        assembly = AnthropicStreamAssembler()
        for start in range(0, len(stream), size):
            assembly.feed(stream[start : start + size])
        assert assembly.build_reply() == expected


@pytest.mark.parametrize("at", [0, 3])
def test_an_error_in_the_stream_is_read(at):
    """At its beginning or in the middle, it carries its fields."""
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}, "request_id": "req_1"}
    with pytest.raises(InBandError, match="Overloaded") as caught:
        assembled(*list(events_of(text("So.")))[:at], error)
    assert caught.value.body == error["error"]


def test_an_error_in_place_of_a_reply_is_read():
    """Some servers send an error with status 200."""
    with pytest.raises(InBandError, match="out of order"):
        read({"type": "error", "error": {"type": "api_error", "message": "out of order"}})


def test_a_reply_of_many_pieces_is_read():
    """A hundred thousand pieces are put together once, at the end."""
    start, piece = (
        {"type": "content_block_start", "index": 0, "content_block": text("")},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}},
    )
    assembly = AnthropicStreamAssembler()
    assembly.feed(sse(start))
    stream = sse(piece) * 1_000
    for _ in range(100):
        assembly.feed(stream)
    assembly.feed(sse(*list(events_of())[-2:]))
    assert len(assembly.build_reply().text) == 100_000
