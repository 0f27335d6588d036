"""The wire of the Responses API: what is made of what comes, whole or as a stream."""

import json
from typing import get_args

import pytest
from openai.types.responses import ResponseError
from openai.types.responses.response_status import ResponseStatus

from agentfsm import AssistantMessage, Outcome, TextPart, ToolCall, ToolResult, Usage, UserMessage
from agentfsm.models.openai.client import _STATUS_BY_CODE
from agentfsm.models.openai.responses_wire import ResponsesStreamAssembler, decode
from agentfsm.models.wire import InBandError, WireFormatError
from agentfsm.ports import CallChunk, FinishChunk, FinishReason, ProposedCall, TextChunk, ThinkingChunk
from agentfsm.testing import WireReply, call, raw_call, say
from agentfsm.testing.fake_llm.openai_responses import build_reply, stream_reply
from tests.support.wire_rules import check_responses, responses_of

SEALED = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "xyz", "status": "completed"}
BARE = {"type": "reasoning", "summary": [], "encrypted_content": "xyz"}
SEARCH = {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"type": "search", "query": None}}
USAGE = {
    "input_tokens": 9,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 2},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 5},
    "total_tokens": 16,
}


def said(text="", refusal="", **fields):
    parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}] if text else []
    parts += [{"type": "refusal", "refusal": refusal}] if refusal else []
    return {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": parts, **fields}


def called(call_id="call_1", name="f", arguments="{}", **fields):
    call = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": call_id, "name": name}
    return {**call, "arguments": arguments, **fields}


def response(*output, status="completed", **fields):
    return {"object": "response", "status": status, "error": None, "output": list(output), "usage": None, **fields}


def read(*output, **fields):
    return decode(json.dumps(response(*output, **fields)).encode())


def assembled(*events):
    """Feed the events as one stream; returns the assembly and the pieces that were news."""
    assembly = ResponsesStreamAssembler()
    pieces = []
    for event in events:
        pieces += assembly.feed(f"event: {event.get('type')}\ndata: {json.dumps(event)}\n\n".encode())
    return assembly, pieces


def delta(kind, text, place=0):
    return {"type": f"response.{kind}.delta", "output_index": place, "item_id": "x", "delta": text}


def item(kind, value, place=0):
    return {"type": f"response.output_item.{kind}", "output_index": place, "item": value}


def end(*output, kind="completed", **fields):
    return {"type": f"response.{kind}", "response": response(*output, **{"status": kind, **fields})}


# What comes whole


def test_a_whole_reply_is_read():
    """Text, calls, finish reason and usage come out of the items; text and calls need no native reply."""
    reply = read(said("I look."), called(arguments='{"x":1}'), called("call_2", "g"), usage=USAGE)
    assert reply.text == "I look."
    assert reply.calls == (
        ProposedCall(id="call_1", name="f", arguments='{"x":1}'),
        ProposedCall(id="call_2", name="g", arguments="{}"),
    )
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    assert reply.usage == Usage(
        input_tokens=9, output_tokens=7, cached_tokens=4, cache_write_tokens=2, reasoning_tokens=5
    )
    assert reply.native is None


def test_without_usage_there_is_none_and_shares_are_shares():
    """A server that does not count leaves it to the engine, and one that counts too much is not believed.

    Two shares that were more than the whole together left a rest that cost less than nothing.
    """
    assert read(said("x")).usage is None
    usage = {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 8}, "output_tokens_details": None}
    assert read(said("x"), usage=usage).usage == Usage(input_tokens=3, cached_tokens=3)
    usage["input_tokens_details"] = {"cached_tokens": 2, "cache_write_tokens": 2}
    assert read(said("x"), usage=usage).usage == Usage(input_tokens=3, cached_tokens=2, cache_write_tokens=1)


def test_usage_of_any_numbers_is_read():
    """A whole reply is not thrown away because its bill says 5.0 or -1; an object of arguments is written as text."""
    usage = {"input_tokens": 5.0, "output_tokens": -1, "input_tokens_details": {"cached_tokens": 2.0}}
    reply = read(called(arguments={"x": 1}), usage=usage)
    assert reply.usage == Usage(input_tokens=5, cached_tokens=2)
    assert reply.calls == (ProposedCall(id="call_1", name="f", arguments='{"x": 1}'),)
    last = {"type": "response.completed", "response": response(called(arguments={"x": 1}), usage=usage)}
    assert assembled(item("done", called(arguments={"x": 1}), 0), last)[0].build_reply() == reply


def test_texts_are_joined_as_the_vendors_package_joins_them():
    """Several messages, and several parts of one, are one text."""
    two = said("b")
    two["content"] += said("c")["content"]
    assert read(said("a"), two).text == "abc"


def test_a_refusal_is_its_own_reason():
    """What the model says in refusing is the text of the reply, and is plain text to send back."""
    reply = read(said(refusal="I cannot."))
    assert (reply.text, reply.finish_reason, reply.native) == ("I cannot.", FinishReason.REFUSAL, None)


@pytest.mark.parametrize(
    ("why", "meant"),
    [("max_output_tokens", FinishReason.LENGTH), ("content_filter", FinishReason.CONTENT_FILTER)],
)
def test_an_incomplete_reply_says_why(why, meant):
    """What was cut short comes with its reason, whatever is in it."""
    reply = read(said("It is"), called(), status="incomplete", incomplete_details={"reason": why})
    assert (reply.text, reply.finish_reason) == ("It is", meant)


def test_each_status_is_read():
    """A response is used once it is completed or cut short; each other status is named in an error."""
    unfinished = set(get_args(ResponseStatus)) - {"completed", "incomplete", "failed"}
    assert unfinished == {"queued", "in_progress", "cancelled"}
    for status in unfinished:
        with pytest.raises(WireFormatError, match=status):
            read(status=status)
    for why in ("steered", None):
        with pytest.raises(WireFormatError, match="incomplete"):
            read(status="incomplete", incomplete_details={"reason": why})
    with pytest.raises(InBandError, match="no error was named"):
        read(status="failed")
    with pytest.raises(InBandError, match="boom"):
        read(status="failed", error={"code": "server_error", "message": "boom"})


def test_each_code_of_a_failure_is_known_for_passing_or_not():
    """A new code of OpenAI's has to be put on the list, or left off it on purpose."""
    codes = set(get_args(ResponseError.model_fields["code"].annotation))
    passing = {"server_error", "rate_limit_exceeded", "vector_store_timeout"}
    ours = {code for code in _STATUS_BY_CODE if not code.isdigit()}
    assert codes - passing == ours - {"context_length_exceeded"}


@pytest.mark.parametrize(
    "answer",
    [b"<html>", b"\xff", [], {}, {"choices": []}, response("x"), response(said(content="x")), response(called(name=1))],
    ids=["page", "not UTF-8", "list", "nothing", "chat completion", "text", "content of text", "name of no text"],
)
def test_what_is_no_response_is_a_form_error(answer):
    """Whatever else comes is named, and never taken for an empty reply."""
    with pytest.raises(WireFormatError):
        decode(answer if isinstance(answer, bytes) else json.dumps(answer).encode())


@pytest.mark.parametrize("kind", ["computer_call", "custom_tool_call", "shell_call", "apply_patch_call"])
def test_a_call_that_only_the_caller_could_answer_is_said(kind):
    """Such a call has no result here, and a history without it would be refused; one that was answered is kept."""
    call = {"id": "x_1", "type": kind, "call_id": "call_1"}
    reply = read(call)
    assert kind in reply.unanswered
    assert "extra_body" in reply.unanswered
    assert reply.native is None
    answered = {"id": "y_1", "type": f"{kind}_output", "call_id": "call_1"}
    whole = read(call, answered, said("x"))
    assert (whole.unanswered, json.loads(whole.native.content)[0]) == ("", call)


# Native replies


def returned(reply):
    """The items by which a reply goes back: OpenAI would take them."""
    calls = tuple([ToolCall(id=f"t1.{n}", name=call.name, arguments="{}") for n, call in enumerate(reply.calls)])
    results = [ToolResult(call_id=call.id, tool=call.name, outcome=Outcome.DONE, content="") for call in calls]
    message = AssistantMessage(text=reply.text, calls=calls, native=reply.native)
    ask = UserMessage(parts=(TextPart(text="go"),))
    items = responses_of((ask, message, *results, ask))
    check_responses(items)
    return items[1 : len(items) - 1 - len(calls)]


def test_thinking_and_searches_are_kept():
    """Thinking goes back sealed, a search whole, and what only the server that stored it knows is left out."""
    reply = read(SEALED, SEARCH, SEALED, said("I look."), SEALED, called())
    message = {"type": "message", "role": "assistant", "content": "I look."}
    call = {"type": "function_call", "call_id": "t1.0", "name": "f", "arguments": "{}"}
    assert reply.native.provider == "openai-responses"
    assert returned(reply) == [BARE, SEARCH, BARE, message, BARE, call]


def test_reasoning_that_is_not_sealed_goes_back_as_it_came():
    """Of other servers, vLLM checks items against the types of OpenAI's package, which need the ids and the status."""
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]}
    message = {**said("I look."), "status": "completed"}
    reply = read(thought, message)
    ask = UserMessage(parts=(TextPart(text="go"),))
    assert responses_of((ask, AssistantMessage(text=reply.text, native=reply.native), ask))[1:3] == [thought, message]


def test_the_phase_of_a_message_is_kept():
    """OpenAI asks to have it back, since models do worse without it."""
    reply = read(said("I look.", phase="commentary"), called())
    assert returned(reply)[0]["phase"] == "commentary"
    assert read(said("I look.", phase=None), called()).native is None


def test_thinking_that_came_as_an_id_is_left_out():
    """Without its content OpenAI would look for what it has not stored."""
    reply = read({**SEALED, "encrypted_content": None}, called())
    assert reply.native is None
    assert read({**SEALED, "encrypted_content": ""}, SEALED, called()).native.content.count("reasoning") == 1


def test_thinking_that_led_to_nothing_is_left_out():
    """A reply that was cut off while the model thought ends with that, and would be refused."""
    cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    assert read(SEALED, SEALED, **cut).native is None
    reply = read(SEALED, said("It is"), SEALED, **cut)
    assert [item["type"] for item in returned(reply)] == ["reasoning", "message"]


def test_thinking_in_the_clear_keeps_its_id():
    """Servers other than OpenAI's send it so, and check that it has an id."""
    thought = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": None}
    thought["content"] = [{"type": "reasoning_text", "text": "Hm."}]
    first = json.loads(read(thought, called()).native.content)[0]
    assert first == {name: value for name, value in thought.items() if value is not None}


def test_half_a_surrogate_pair_does_not_stop_a_run():
    """A native reply is kept in a database, which takes no half of a pair."""
    assert read(SEALED, said("a\ud83d")).native.content.count("a\ufffd") == 1


# What comes as a stream


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_stream_says_what_the_whole_says(size, interleave):
    """Thinking, text and calls come in pieces that add up to the reply, in any portions of the network."""
    line = say("I look.", call("f", a="é😀"), raw_call("g", "raw"))
    sent = WireReply(line, thinking="Hm, so.", chunk_chars=3, interleave=interleave)
    body = {"model": "m", "input": []}
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\r\n\r\n" for event in stream_reply(sent, body, 1))
    assembly, pieces = ResponsesStreamAssembler(), []
    for start in range(0, len(data), size):
        pieces += assembly.feed(data[start : start + size])
    assert assembly.is_done
    assert assembly.build_reply() == decode(json.dumps(build_reply(sent, body, 1)).encode())
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextChunk)) == "I look."
    assert "".join(piece.text for piece in pieces if isinstance(piece, ThinkingChunk)) == "Hm, so."
    for index, proposed in enumerate(assembly.build_reply().calls):
        heard = [piece for piece in pieces if isinstance(piece, CallChunk) and piece.index == index]
        assert heard[0] == CallChunk(index=index, name=proposed.name)
        assert "".join(piece.arguments for piece in heard) == proposed.arguments
    assert pieces[-1] == FinishChunk(reason=FinishReason.TOOL_CALLS)


def test_calls_are_counted_among_calls():
    """The place among all items is not the index of a call, and the arguments go by the item."""
    _, pieces = assembled(
        item("added", SEALED, 0),
        item("added", called(name="f", arguments=""), 1),
        item("added", SEALED, 2),
        item("added", called(name="g", arguments=""), 3),
        delta("function_call_arguments", "{}", 3),
        delta("function_call_arguments", "{", 1),
        delta("function_call_arguments", "x", 9),
    )
    assert pieces == [
        CallChunk(index=0, name="f"),
        CallChunk(index=1, name="g"),
        CallChunk(index=1, arguments="{}"),
        CallChunk(index=0, arguments="{"),
    ]


def test_arguments_in_one_piece_are_heard_once():
    """Some servers send no pieces, or only say that an item is done."""
    pieces = assembled(
        item("added", called(arguments="{}"), 0),
        item("done", called(arguments="{}"), 0),
        item("done", called(name="g", arguments="[]"), 1),
    )[1]
    assert pieces == [
        CallChunk(index=0, name="f"),
        CallChunk(index=0, arguments="{}"),
        CallChunk(index=0, is_complete=True),
        CallChunk(index=1, name="g"),
        CallChunk(index=1, arguments="[]"),
        CallChunk(index=1, is_complete=True),
    ]


def test_thinking_is_no_text():
    """Summaries, and thoughts in the clear, come under a kind of their own."""
    pieces = assembled(delta("reasoning_summary_text", "Hm"), delta("reasoning_text", "so"), delta("output_text", ""))[
        1
    ]
    assert pieces == [ThinkingChunk("Hm"), ThinkingChunk("so")]


def test_a_streamed_refusal_is_text_and_a_reason():
    """A refusal streams as text, and the reply says that it is one."""
    assembly, pieces = assembled(delta("refusal", "I can"), delta("refusal", "not."), end(said(refusal="I cannot.")))
    assert pieces == [TextChunk("I can"), TextChunk("not."), FinishChunk(reason=FinishReason.REFUSAL)]
    assert assembly.build_reply().text == "I cannot."


@pytest.mark.parametrize("why", ["max_output_tokens", "content_filter"])
def test_a_stream_may_end_incomplete(why):
    """The reason is that of the last event."""
    assembly, pieces = assembled(end(said("It is"), kind="incomplete", incomplete_details={"reason": why}))
    assert pieces == [FinishChunk(reason=assembly.build_reply().finish_reason)]
    assert assembly.build_reply().finish_reason in {FinishReason.LENGTH, FinishReason.CONTENT_FILTER}


def test_only_the_last_event_makes_a_stream_whole():
    """When all pieces have come, and the end has not, usage and thinking are missing."""
    text = [delta("output_text", "so"), item("done", said("so"))]
    assembly, _ = assembled(*text)
    assert (assembly.is_begun, assembly.is_complete, assembly.is_done) == (True, False, False)
    assembly.feed(b"data: [DONE]\n\n")
    assert (assembly.is_complete, assembly.is_done) == (False, True)
    assembly, _ = assembled(*text, end(said("so"), usage=USAGE))
    assert (assembly.is_complete, assembly.build_reply().usage.output_tokens) == (True, 7)


def test_items_of_a_last_event_without_output_are_those_that_were_done():
    """Some servers leave the output of the last event empty; the order is that of the places."""
    assembly, _ = assembled(item("done", called(), 1), item("done", SEALED, 0), end())
    reply = assembly.build_reply()
    assert [call.name for call in reply.calls] == ["f"]
    assert [each["type"] for each in json.loads(reply.native.content)] == ["reasoning", "function_call"]


def test_two_whole_calls_of_one_id_and_index_are_two_calls():
    """A server that numbers nothing, and leaves the output of the end empty, loses no call; a repeated end is none."""
    events = [item(kind, called(arguments='{"x":1}')) for kind in ("added", "done", "done", "added", "done")]
    events += [item("added", called(name="g")), item("done", called(name="g")), end()]
    assembly, pieces = assembled(*events)
    calls = assembly.build_reply().calls
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"x":1}'), ("f", '{"x":1}'), ("g", "{}")]
    assert [piece.index for piece in pieces if isinstance(piece, CallChunk) and piece.is_complete] == [0, 1, 2]


def test_what_is_not_known_is_passed_over():
    """Events of the server's own tools, and those that are to come, are no news here."""
    assembly, pieces = assembled({"type": "response.web_search_call.searching"}, {"type": "keepalive"}, {})
    assert (pieces, assembly.event_count, assembly.is_begun) == ([], 3, True)
    assert not assembled({"object": "chat.completion.chunk", "choices": []})[0].is_begun


@pytest.mark.parametrize(
    "event",
    [
        {"type": "error", "code": "server_error", "message": "boom", "param": None},
        {"type": "error", "error": {"code": "server_error", "message": "boom"}},
        {"type": "response.failed", "response": response(error={"code": "server_error", "message": "boom"})},
        {"error": {"code": "server_error", "message": "boom"}},
    ],
    ids=["flat", "nested", "failed", "other servers"],
)
def test_an_error_in_the_stream_is_read(event):
    """Each form of an error carries its fields."""
    with pytest.raises(InBandError) as caught:
        assembled(delta("output_text", "x"), event)
    assert (caught.value.body["code"], caught.value.body["message"]) == ("server_error", "boom")


@pytest.mark.parametrize(
    "event",
    [
        {"type": 1},
        delta("output_text", 1),
        {"type": "response.output_item.added", "item": "x"},
        {"type": "response.completed", "response": "x"},
        {"type": "response.completed", "response": {"output": ["x"]}},
        end(kind="queued") | {"type": "response.completed"},
    ],
)
def test_a_malformed_event_is_a_form_error(event):
    """An event of another form is named, and never skipped."""
    with pytest.raises(WireFormatError):
        assembled(event)


def test_what_stands_behind_the_end_does_not_count():
    """The reply is that of the first end."""
    assembly, pieces = ResponsesStreamAssembler(), []
    both = [end(said("one")), end(said("two"))]
    pieces += assembly.feed(b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in both))
    assert (assembly.build_reply().text, len(pieces)) == ("one", 1)
