"""`LocalServer`: the wire it speaks, the faults it plays, and how it ends."""

import gc
import json
import threading

import httpx
import openai
import pytest

from agentfsm import MisuseError
from agentfsm.testing import LocalServer, WireReply, call, raw_call, say
from agentfsm.testing.fake_llm.openai_chat import find_history_error

USER = {"role": "user", "content": "Hello, how are you?"}


def ask(server, *messages, **fields):
    """Post a request for a completion as any HTTP client would."""
    body = {"model": "m", "messages": list(messages or (USER,)), **fields}
    return httpx.post(f"{server.base_url}/chat/completions", json=body)


def events(response):
    """The events of a stream, parsed."""
    texts = [text.removeprefix("data: ") for text in response.text.split("\n\n") if text]
    assert texts.pop() == "[DONE]"
    return [json.loads(text) for text in texts]


def calling(*ids):
    calls = [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for call_id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id):
    return {"role": "tool", "tool_call_id": call_id, "content": "done"}


# The wire


def test_a_whole_answer_has_openais_form():
    """Text, finish reason and the usual usage stand where OpenAI puts them."""
    with LocalServer([say("Fine, thanks")]) as server:
        answer = ask(server).json()
    assert answer["choices"][0]["message"]["content"] == "Fine, thanks"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion"
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stream_has_openais_form():
    """The role comes first, then the text in pieces, the finish reason, and the usage only where it is asked for."""
    with LocalServer(lambda _body: WireReply("abcdef", chunk_chars=4)) as server:
        chunks = events(ask(server, stream=True, stream_options={"include_usage": True}))
        assert "usage" not in events(ask(server, stream=True))[-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "abcd"},
        {"content": "ef"},
        {},
    ]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 5)


@pytest.mark.parametrize("interleave", [False, True])
def test_calls_stream_as_openai_streams_them(interleave):
    """The first piece of a call has id and name, the others only arguments, each with the call's index."""
    line = WireReply(say("", call("f", a=1), raw_call("g", "raw")), chunk_chars=4, interleave=interleave)
    with LocalServer([line]) as server:
        chunks = events(ask(server, stream=True))
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [delta["index"] for delta in deltas] == ([0, 1, 0, 1, 0] if interleave else [0, 0, 0, 1, 1])
    first = next(delta for delta in deltas if delta["index"] == 1)
    assert first == {"index": 1, "id": "call_1_1", "type": "function", "function": {"name": "g", "arguments": ""}}
    written = ["".join(d["function"]["arguments"] for d in deltas if d["index"] == index) for index in (0, 1)]
    assert written == ['{"a": 1}', "raw"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_openai_package_understands_it():
    """OpenAI's own client reads models, whole answers and streams."""
    line = say("Hi", call("f", a=1))
    with LocalServer(lambda _body: line) as server:
        # Their stream leaves generators to the garbage collector, so this client is asked for whole answers only.
        async with openai.AsyncOpenAI(api_key="none", base_url=server.base_url) as client:
            assert [model.id async for model in client.models.list()] == ["local"]
            answer = await client.chat.completions.create(model="m", messages=[USER])
        with openai.OpenAI(api_key="none", base_url=server.base_url) as client:
            chunks = list(client.chat.completions.create(model="m", messages=[USER], stream=True))
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hi"


def test_usage_is_said_or_left_out():
    """A usage of one's own is sent as it is, and none where it is left out."""
    with LocalServer([WireReply(usage={"prompt_tokens": 5}), say(usage=None)]) as server:
        assert ask(server).json()["usage"] == {"prompt_tokens": 5}
        assert "usage" not in ask(server).json()


def test_a_refusal_has_its_own_field():
    """A refusal is no content."""
    with LocalServer([WireReply(refusal="No.")]) as server:
        message = ask(server).json()["choices"][0]["message"]
    assert (message["content"], message["refusal"]) == (None, "No.")


# Brains and records


def test_a_brain_reads_the_request():
    """A function answers by what it was asked."""
    with LocalServer(lambda body: say(body["messages"][-1]["content"].upper())) as server:
        assert ask(server).json()["choices"][0]["message"]["content"] == "HELLO, HOW ARE YOU?"


def test_a_script_that_is_used_up_says_so():
    """One request too many is refused for good, so that no client asks on and on."""
    with LocalServer([say("only")]) as server:
        ask(server)
        response = ask(server)
    assert response.status_code == 400
    assert "has 1 lines; this is request 2" in response.json()["error"]["message"]


def test_a_brain_that_raises_is_seen():
    """What a brain raises reaches the client as an answer."""

    def brain(_body):
        message = "left is right"
        raise ValueError(message)

    with LocalServer(brain) as server:
        assert "ValueError: left is right" in ask(server).json()["error"]["message"]


@pytest.mark.parametrize("brain", [lambda _body: 5, [5]])
def test_an_answer_that_is_no_line_is_seen(brain):
    """It is refused for good: a connection that breaks would be tried again, and the next line of a script sent."""
    with LocalServer(brain) as server:
        response = ask(server)
    assert response.status_code == 400
    assert "expected a line of a script, got 5" in response.json()["error"]["message"]


def test_requests_are_recorded():
    """Bodies and headers can be looked at, also those of requests that were refused."""
    with LocalServer([say("x")]) as server:
        ask(server, temperature=0.5)
        ask(server, result("nobody"))
    first, second = server.requests
    assert first.body["temperature"] == 0.5
    assert first.headers["content-type"] == "application/json"
    assert second.body["messages"] == [result("nobody")]


def test_requests_at_once_are_answered_at_once():
    """Several requests are in the brain at the same time, and each is recorded once."""
    together = threading.Barrier(8)

    def brain(body):
        together.wait()
        return say(body["messages"][0]["content"])

    answers = []
    with LocalServer(brain) as server:

        def one(text):
            answers.append(ask(server, {"role": "user", "content": text}).json()["choices"][0]["message"]["content"])

        threads = [threading.Thread(target=one, args=(str(number),)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == [str(number) for number in range(8)]
    assert len(server.requests) == 8


# Faults


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [("Slow down.", "Slow down.", None), ({"code": "busy"}, "LocalServer was scripted to return status 429.", "busy")],
)
def test_an_error_has_openais_form(error, message, code):
    """Status, fields of the error and headers are as they were asked for."""
    with LocalServer([WireReply(status=429, error=error, headers={"retry-after": "3"})]) as server:
        response = ask(server, stream=True)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": code,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_can_come_instead(stream):
    """A page of HTML comes with status 200."""
    with LocalServer([WireReply(html=True)]) as server:
        response = ask(server, stream=stream)
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html")
    assert "<html>" in response.text


@pytest.mark.parametrize(("stream", "kind"), [(False, "application/json"), (True, "text/event-stream")])
def test_a_body_can_be_sent_as_it_is(stream, kind):
    """A malformed body comes with the type of a good one."""
    with LocalServer([WireReply(raw="data: {oops\n\n")]) as server:
        response = ask(server, stream=stream)
    assert (response.text, response.headers["content-type"]) == ("data: {oops\n\n", kind)


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_can_break(stream):
    """The connection ends in the middle of the answer, which any client notices."""
    with (
        LocalServer([WireReply("x" * 100, cut_after=2)]) as server,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        ask(server, stream=stream)


def test_what_nobody_serves_is_not_found():
    """Other addresses are 404, and what is no JSON object is 400."""
    with LocalServer([]) as server:
        assert httpx.get(f"{server.base_url}/files").status_code == 404
        assert httpx.post(f"{server.base_url}/embeddings", json={}).status_code == 404
        for content in (b"{", b"[]", b""):
            assert httpx.post(f"{server.base_url}/chat/completions", content=content).status_code == 400
        assert httpx.post(f"{server.base_url}/chat/completions", json={"messages": "x"}).status_code == 400


@pytest.mark.parametrize("wrong", [5, ["x"], call("look"), ("look", {"at": 1})])
def test_a_wire_reply_takes_a_line(wrong):
    """A value that is not a line of a script is refused when the reply is created."""
    with pytest.raises(MisuseError, match="expected a line of a script"):
        WireReply(wrong)


@pytest.mark.parametrize("wrong", [{"chunk_chars": 0}, {"chunk_delay_s": -1}, {"cut_after": -1}])
def test_values_out_of_range_are_refused(wrong):
    """A reply that cannot be sent is refused when it is created."""
    with pytest.raises(MisuseError):
        WireReply(**wrong)


# Beginning and end


def test_an_address_needs_a_start():
    """Before the start there is no address, and a server starts once."""
    server = LocalServer([])
    with pytest.raises(MisuseError, match="start"):
        server.base_url  # noqa: B018  reading it is the test
    server.start()
    with pytest.raises(MisuseError, match="new LocalServer"):
        server.start()
    server.close()
    server.close()


def test_closing_ends_what_is_open():
    """Idle connections and answers that are under way end with the server, and no thread is left."""
    arrived = threading.Event()

    def brain(_body):
        arrived.set()
        return say("x", delay_s=3600)

    before = set(threading.enumerate())
    failures = []
    with httpx.Client() as client, LocalServer(brain) as server:
        client.get(f"{server.base_url}/models")

        def wait():
            try:
                ask(server)
            except httpx.HTTPError as error:
                failures.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        arrived.wait()
        server.close()
        waiting.join()
        assert set(threading.enumerate()) <= before
    gc.collect()  # sockets left open would be warned of here
    assert len(failures) == 1


def test_connections_are_kept():
    """Whole answers, streams, errors and refused requests all leave the connection usable."""
    threads = set()  # the server has one for each connection
    script = iter([say("x"), say("y"), WireReply(status=500), say("z")])

    def brain(_body):
        threads.add(threading.current_thread())
        return next(script)

    with LocalServer(brain) as server, httpx.Client() as client:
        for stream in (False, True, True, False):
            client.post(f"{server.base_url}/chat/completions", json={"messages": [USER], "stream": stream})
            client.post(f"{server.base_url}/chat/completions", json={"messages": []})
    assert len(threads) == 1


# Histories


def test_histories_in_order_are_taken():
    """Calls with one result each, in any order among themselves, and every role are fine."""
    history = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        calling("a", "b"),
        result("b"),
        result("a"),
        {"role": "assistant", "content": "done"},
        {"role": "developer", "content": "d"},
        calling("c"),
        result("c"),
    ]
    assert find_history_error(history) is None


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        ([], "empty array"),
        ([USER, result("a")], "must be a response to a preceding message"),
        ([USER, calling("a")], "did not have response messages: a"),
        ([USER, calling("a", "b"), result("a"), USER], "did not have response messages: b"),
        ([USER, calling("a"), USER, result("a")], "did not have response messages: a"),
        ([calling("a"), calling("b")], "did not have response messages: a"),
        ([calling("a"), result("b")], "there is no call 'b'"),
        ([calling("a"), result("a"), result("a")], "duplicate value 'a' for 'tool_call_id'"),
        ([calling("a", "a"), result("a")], "duplicate value 'a' for 'id'"),
        ([calling("a"), result("a"), calling("a"), result("a")], "duplicate value 'a' for 'id'"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        (["x"], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}], "function.arguments"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ],
)
def test_histories_that_openai_refuses_are_refused(history, reason):
    """Each fault is named, and a request with it is answered by 400."""
    assert reason in find_history_error(history)
    with LocalServer([say("x")]) as server:
        body = {"messages": history}
        response = httpx.post(f"{server.base_url}/chat/completions", json=body)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]
