"""`LocalServer` as a server of Anthropic's messages: the wire it speaks, and what it refuses."""

import json

import anthropic
import httpx2
import pytest

from agentfsm.testing import LocalServer, WireReply, call, say
from agentfsm.testing.fake_llm.anthropic import find_request_error

USER = {"role": "user", "content": "Hello, how are you?"}
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]


def ask(server, *messages, **fields):
    """Post a request as any HTTP client would."""
    body = {"model": "m", "max_tokens": 9, "messages": list(messages or (USER,)), **fields}
    return httpx2.post(f"{server.base_url}/messages", json=body)


def calling(*ids):
    uses = [{"type": "tool_use", "id": call_id, "name": "f", "input": {}} for call_id in ids]
    return {"role": "assistant", "content": uses}


def results(*ids, **more):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, **more} for call_id in ids]}


async def test_the_anthropic_package_understands_it():
    """Anthropic's own client reads a whole answer and a stream, and both say the same."""
    line = WireReply(say("Hi there", call("f", a=1)), thinking="Hm.", chunk_chars=3)
    asked = {"model": "m", "max_tokens": 9, "messages": [USER], "tools": TOOLS}
    with LocalServer(lambda _body: line) as server:
        address = server.base_url.removesuffix("/v1")
        with anthropic.Anthropic(api_key="none", base_url=address) as client:
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert (whole.stop_reason, whole.content[2].input, whole.content[0].thinking) == ("tool_use", {"a": 1}, "Hm.")
    assert streamed.model_dump(exclude={"id"})["usage"]["output_tokens"] == whole.usage.output_tokens
    for one, other in zip(whole.content, streamed.content, strict=True):
        ids = {"id"}  # of the request
        assert one.model_dump(exclude=ids, exclude_unset=True) == other.model_dump(exclude=ids, exclude_unset=True)


@pytest.mark.parametrize(("status", "kind"), [(529, "OverloadedError"), (413, "ContentTooLargeError")])
def test_the_anthropic_package_understands_its_errors(status, kind):
    """By status and type, with what was asked for in the headers."""
    with LocalServer([WireReply(status=status, error="No.", headers={"retry-after": "2"})]) as server:
        address = server.base_url.removesuffix("/v1")
        with (
            anthropic.Anthropic(api_key="none", base_url=address, max_retries=0) as client,
            pytest.raises(getattr(anthropic, kind)) as caught,
        ):
            client.messages.create(model="m", max_tokens=9, messages=[USER])
    assert (caught.value.request_id, caught.value.response.headers["retry-after"]) == ("req_1", "2")
    assert caught.value.body["error"]["message"] == "No."


def test_a_stream_has_named_events_and_no_other_end():
    """Each event says its type twice, as Anthropic's do."""
    with LocalServer([say("Hi")]) as server:
        events = [text for text in ask(server, stream=True).text.split("\n\n") if text]
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert events[-1] == 'event: message_stop\ndata: {"type": "message_stop"}'


def test_a_stream_breaks_where_it_is_told_to():
    """After so many events."""
    with LocalServer([WireReply("Hi", cut_after=2)]) as server, pytest.raises(httpx2.RemoteProtocolError):
        ask(server, stream=True)


def test_a_refusal_says_why():
    """Its words stand beside the content."""
    with LocalServer([WireReply(refusal="Not this.")]) as server:
        answer = ask(server).json()
    assert (answer["stop_reason"], answer["stop_details"]["explanation"]) == ("refusal", "Not this.")


def test_usage_is_said_or_left_out():
    """A usage of one's own is sent as it is, and none where it is left out."""
    with LocalServer([WireReply(usage={"input_tokens": 5}), say(usage=None)]) as server:
        assert ask(server).json()["usage"] == {"input_tokens": 5}
        assert "usage" not in ask(server).json()


@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        ([], "first message"),
        ([calling("a"), results("a")], "first message"),
        ([USER, {"role": "system", "content": "x"}], "role"),
        ([USER, {"role": "assistant", "content": []}], "non-empty"),
        ([USER, {"role": "assistant", "content": " "}], "non-whitespace"),
        ([USER, "x"], "role"),
        ([USER, calling("a")], "without `tool_result`"),
        ([USER, calling("a", "b"), results("a")], "without `tool_result`"),
        ([USER, calling("a"), USER], "without `tool_result`"),
        ([USER, calling("a"), results("a", "a")], "without `tool_result`"),
        ([USER, calling("a"), {**results("a"), "content": [*USER["content"], *results("a")["content"]]}], None),
        ([USER, calling("a"), results("b")], "unexpected `tool_use_id`"),
        ([USER, results("a")], "unexpected `tool_use_id`"),
        ([USER, calling("t1.0"), results("t1.0")], "should match pattern"),
        ([USER, calling("a", "a"), results("a", "a")], "unique"),
        ([USER, calling("a"), results("a"), calling("a"), results("a")], "unique"),
        ([USER, calling("a"), results("a"), USER], None),
    ],
)
def test_histories_that_anthropic_refuses_are_refused(messages, rule):
    """Each rule by a history that breaks it."""
    error = find_request_error({"model": "m", "max_tokens": 1, "messages": messages, "tools": TOOLS})
    reason = error and error["message"]
    assert (reason is None) == (rule is None), reason
    assert rule is None or rule.lower() in reason.lower()


def test_what_the_wire_needs_is_asked_for():
    """A model, a limit, messages; and tools where there are calls."""
    with LocalServer([]) as server:
        assert ask(server, max_tokens=None).json()["error"]["message"] == "max_tokens: Field required"
        answer = ask(server, USER, calling("a"), results("a"))
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "must define tools" in answer.json()["error"]["message"]
