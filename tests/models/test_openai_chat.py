"""`OpenAIChat` against a local server: replies, failures, connections."""

import json
import traceback
from email.utils import formatdate

import anyio
import attrs
import httpx
import httpx2
import openai
import pytest

from agentfsm import (
    ContextTooLongError,
    MisuseError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    Settings,
    Usage,
)
from agentfsm.models import OpenAIChat, Price
from agentfsm.models.openai import chat_wire
from agentfsm.models.sdk import read_retry_after_headers
from agentfsm.ports import FinishChunk, FinishReason, Request, TextChunk, ToolDefinition
from agentfsm.testing import LocalServer, WireReply, say
from tests.support.model_wires import CHAT, KEY, REQUEST, both_ways, forget_keys

ask, failure = CHAT.ask, CHAT.failure


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    forget_keys(monkeypatch, tmp_path)


# Replies


@both_ways
async def test_text_arrives(streamed):
    """Streamed or not, the reply is the same, with its usage; the stream's chunks add up to it."""
    text = "It is sunny in Rome, and 20 degrees warm."
    reply, chunks, received = await ask(say(text), streamed=streamed)
    assert (reply.text, reply.finish_reason) == (text, FinishReason.STOP)
    assert reply.usage == Usage(input_tokens=10, output_tokens=5)
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)) == (text if streamed else "")
    assert chunks[-1:] == ([FinishChunk(reason=FinishReason.STOP)] if streamed else [])
    assert received.headers["authorization"] == f"Bearer {KEY}"


@both_ways
async def test_a_reply_that_was_cut_short_is_passed_on(streamed):
    """What to do about too long an answer is for the engine to decide."""
    reply, _, _ = await ask(WireReply("It is", finish_reason="length"), streamed=streamed)
    assert (reply.text, reply.finish_reason) == ("It is", FinishReason.LENGTH)


@both_ways
async def test_the_request_carries_tools_and_settings(streamed):
    """Tools, settings and headers reach the server."""
    tool = ToolDefinition(name="weather", description="", parameters={"type": "object"})
    settings = Settings(max_tokens=9, tool_choice="weather")
    request = Request(instructions="", messages=REQUEST.messages, tools=(tool,), settings=settings)
    _, _, received = await ask(say("x"), streamed=streamed, request=request, headers={"x-team": "blue"})
    assert (received.body["model"], received.body["max_tokens"]) == ("m", 9)
    assert received.body["tool_choice"]["function"] == {"name": "weather"}
    assert received.headers["x-team"] == "blue"
    assert received.body.get("stream", False) is streamed


async def test_a_model_writes_each_message_once(monkeypatch):
    """The second turn sends the whole history, of which it writes what is new."""
    written = []
    write = chat_wire._wire_message
    monkeypatch.setattr(chat_wire, "_wire_message", lambda message: written.append(message) or write(message))
    longer = attrs.evolve(REQUEST, messages=REQUEST.messages * 2)
    with LocalServer(lambda _body: say("x")) as server:
        model = OpenAIChat("m", base_url=server.base_url)
        await model.reply(REQUEST)
        await model.reply(longer)
        await model.aclose()
    assert tuple(written) == longer.messages
    assert [len(received.body["messages"]) for received in server.requests] == [2, 3]


# Failures


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (304, "Give the server's new address as base_url"),
        (400, "Correct the setting"),
        (402, "Add credit"),
        (403, "Check the permissions of the key's project"),
        (407, "Put it into the proxy's address"),
        (422, "Correct the setting"),
    ],
)
async def test_refusals_for_good_are_not_asked_again(status, advice):
    """What the server refuses for good quotes the server's words, and says what to do."""
    error = await failure(ModelError, WireReply(status=status, error="Not like this."))
    assert f"({status}: " in str(error)
    assert advice in str(error)


@both_ways
async def test_a_spent_quota_is_not_waited_for(streamed):
    """A 429 for want of money is no matter of time."""
    line = WireReply(status=429, error={"message": "You exceeded your quota.", "code": "insufficient_quota"})
    assert "Add credit" in str(await failure(ModelError, line, streamed=streamed))


@pytest.mark.parametrize(
    "error",
    [
        {"code": "context_length_exceeded"},
        {"message": "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens."},
        {"message": "Your input exceeds the context window of this model."},
        {"message": "litellm.ContextWindowExceededError: litellm.BadRequestError: AnthropicException"},
        {"message": "request (4390 tokens) exceeds the available context size (4096 tokens), try increasing it"},
        {"message": "prompt is too long: 210000 tokens > 200000 maximum"},
        {"message": "The input token count (1196265) exceeds the maximum number of tokens allowed (1048575)."},
        {"message": "This model's maximum prompt length is 131072 but the request contains 537812 tokens."},
        {"message": "Input length 131393 exceeds the maximum allowed input length of 131040 tokens."},
        {"message": "Please reduce the length of the messages or completion."},
    ],
)
async def test_too_large_a_request_is_told_apart(error):
    """A request beyond the window has its own error, so that the history can be shortened, whoever says it."""
    assert "compact" in str(await failure(ContextTooLongError, WireReply(status=400, error=error)))


async def test_too_large_a_request_is_told_apart_whatever_its_status():
    """llama.cpp says it with 500, and proxies with 413; with 429 it is a matter of tokens per minute."""
    words = {"message": "Context size has been exceeded."}
    await failure(ContextTooLongError, WireReply(status=500, error=words))
    await failure(ContextTooLongError, WireReply(status=413, error={"message": "Request Entity Too Large"}))
    await failure(ModelUnavailableError, WireReply(status=429, error={"message": "Reduce the length of the messages."}))


@pytest.mark.parametrize(
    ("streamed", "raw"),
    [
        (False, '{"choices": []}'),
        (False, '{"choices": '),
        (False, ""),
        (True, 'data: {"choices": []}\n\ndata: [DONE]\n\n'),
        (True, "data: {oops\n\n"),
        (True, 'data: {"choices": "x"}\n\n'),
        (True, "data: " + "[" * 100_000 + "\n\n"),
    ],
    ids=["no choice", "no JSON", "nothing", "stream without choice", "event of no JSON", "bad choices", "too deep"],
)
async def test_what_cannot_be_used_is_a_reply_error(streamed, raw):
    """A reply without a choice, or one that cannot be read, is unusable, and is not taken for an empty one."""
    await failure(ModelReplyError, WireReply(raw=raw), streamed=streamed)


CUT_CALL = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "look", "arguments": '{"at": '}}]}


@pytest.mark.parametrize(
    ("delta", "end"),
    [({"content": "Once upon"}, ""), (CUT_CALL, "data: [DONE]\n\n"), ({"role": "assistant"}, "data: [DONE]\n\n")],
    ids=["no end", "cut arguments", "nothing"],
)
async def test_a_stream_without_an_end_is_broken_off(delta, end):
    """A stream that stops without a finish reason is whole only if its end is announced after something whole."""
    raw = f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n{end}"
    assert "ended before the reply was complete" in str(
        await failure(ModelUnavailableError, WireReply(raw=raw), streamed=True)
    )


async def test_an_announced_end_is_an_end():
    """Some servers send no finish reason: whole text or whole arguments before [DONE] were asked for again."""
    call = {"index": 0, "id": "a", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    for delta, reason in (({"content": "Once."}, FinishReason.STOP), ({"tool_calls": [call]}, FinishReason.TOOL_CALLS)):
        raw = f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\ndata: [DONE]\n\n"
        reply, _, _ = await ask(WireReply(raw=raw), streamed=True)
        assert (reply.finish_reason, reply.text, len(reply.calls)) == (
            reason,
            delta.get("content", ""),
            len(delta.get("tool_calls", ())),
        )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ('{"message": "overloaded", "type": "server_error"}', ModelUnavailableError),
        ('{"message": "slow down", "code": 429}', ModelUnavailableError),
        ('{"message": "bad tool", "type": "invalid_request_error"}', ModelError),
        ('{"message": "x", "type": "invalid_request_error", "code": "context_length_exceeded"}', ContextTooLongError),
        ('{"message": "x", "code": "insufficient_quota"}', ModelError),
        ('"just words"', ModelUnavailableError),
    ],
)
@both_ways
async def test_errors_with_status_200_are_translated(streamed, error, kind):
    """An error inside a stream, or in place of a reply, counts like one with a status."""
    text = f'{{"error": {error}}}'
    await failure(kind, WireReply(raw=f"data: {text}\n\n" if streamed else text), streamed=streamed)


async def test_silence_in_mid_stream_is_a_time_out():
    """A stream that stops without closing is unavailable too."""
    line = WireReply("x", chunk_delay_s=60.0)
    assert "timeout_s" in str(await failure(ModelUnavailableError, line, streamed=True, silence_s=0.05))


async def test_the_body_of_an_error_may_break_too():
    """A connection that breaks while an error is read is unavailability, not an error of the transport."""

    def respond(request):
        class Broken(httpx2.AsyncByteStream):
            async def __aiter__(self):
                yield b"half"
                message = "gone"
                raise httpx2.ReadError(message, request=request)

        return httpx2.Response(500, stream=Broken())

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(respond)) as client:
        model = OpenAIChat("m", base_url="http://a.test/v1", http_client=client)
        with pytest.raises(ModelUnavailableError, match="ReadError: gone"):
            await model.reply(REQUEST, [].append)


async def test_a_stream_that_is_left_is_closed_before_it_is_read_on():
    """Whoever leaves an endless stream is not kept until it ends."""
    event = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
    sent = []

    class Endless(httpx2.AsyncByteStream):
        closed = False

        async def __aiter__(self):
            while not self.closed and len(sent) < 100:
                sent.append(event)
                yield event

        async def aclose(self):
            self.closed = True

    def emit(_chunk):
        raise KeyError

    transport = httpx2.MockTransport(lambda _request: httpx2.Response(200, stream=Endless()))
    async with httpx2.AsyncClient(transport=transport) as client:
        model = OpenAIChat("m", base_url="http://a.test/v1", http_client=client)
        with pytest.raises(KeyError):
            await model.reply(REQUEST, emit)
    assert len(sent) == 1


# Every error is translated


def test_no_vendor_error_is_missing():
    """Each public exception of the openai package has its row in the table, or goes by its status."""
    public = [getattr(openai, name) for name in openai.__all__]
    raised = {kind for kind in public if isinstance(kind, type) and issubclass(kind, openai.OpenAIError)}
    assert raised
    by_status = {kind for kind in raised if issubclass(kind, openai.APIStatusError)}
    assert raised - by_status - OpenAIChat.translations.keys() == set()


def test_transport_errors_are_translated():
    """Each error of the two HTTP clients that a request can raise is caught by the table."""
    for client in (httpx, httpx2):
        kinds = [
            kind for kind in vars(client).values() if isinstance(kind, type) and issubclass(kind, client.HTTPError)
        ]
        assert kinds
        assert all(issubclass(kind, tuple(OpenAIChat.translations)) for kind in kinds)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after-ms": "nan", "retry-after": "9"}, 9.0),
        ({"retry-after": formatdate(1_000_060, usegmt=True)}, 60.0),
        ({"retry-after": formatdate(999_000, usegmt=True)}, 0.0),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "later"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_read(headers, seconds):
    """Seconds, milliseconds and dates are understood, the past is now, and nonsense is nothing."""
    assert read_retry_after_headers(headers, 1_000_000.0) == (seconds and pytest.approx(seconds))


# Construction


def test_without_a_key_there_is_no_model():
    """OpenAI wants a key, and the error says where to put it."""
    with pytest.raises(MisuseError, match="OPENAI_API_KEY"):
        OpenAIChat("gpt-4o")


def test_a_server_of_ones_own_needs_no_key(monkeypatch):
    """With base_url, passed or in the environment, a key is not asked for."""
    assert OpenAIChat("m", base_url="http://localhost:8000/v1").name == "m"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1")
    assert OpenAIChat("m").name == "m"


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "localhost:8000/v1"},
        {"base_url": "http://"},
        {"base_url": "ftp://a.test"},
        {"base_url": "http://[::1"},
        {"base_url": "http://a.test/\n"},
        {"base_url": f"me:{KEY}@a.test"},
        {"api_key": f"{KEY}\n"},
        {"api_key": f"{KEY}é"},
        {"headers": {"x-token": f"{KEY}\r\n"}},
        {"api_key": KEY, "window_tokens": 0},
        {"api_key": KEY, "name": " "},
    ],
)
def test_arguments_that_cannot_be_right_are_refused(options):
    """Each is refused when the model is made, and no message shows a secret."""
    name = options.pop("name", "m")
    with pytest.raises(MisuseError) as caught:
        OpenAIChat(name, **{"base_url": "http://a.test/v1", **options})
    assert KEY not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("base_url", "field"),
    [
        (None, "max_completion_tokens"),
        ("https://eu.api.openai.com/v1", "max_completion_tokens"),
        ("https://me.openai.azure.com/openai/v1", "max_completion_tokens"),
        ("http://localhost:11434/v1", "max_tokens"),
    ],
)
def test_the_limit_of_an_answer_goes_by_the_server(base_url, field):
    """OpenAI's own servers have a newer name for it, which others refuse."""
    model = OpenAIChat("m", base_url=base_url, api_key=KEY)
    request = attrs.evolve(REQUEST, settings=Settings(max_tokens=7))
    assert f'"{field}":7' in model._encode_request(request, model._make_encoding_cache(), streamed=False).decode()


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("gpt-4o-mini", 128_000),
        ("gpt-4", 8_192),
        ("gpt-4.1-nano", 1_000_000),
        ("gpt-5-mini", 400_000),
        ("o3", 200_000),
        ("ft:gpt-3.5-turbo:me", 16_385),
        ("openai/gpt-4-turbo", 128_000),
        ("qwen3", 131_072),
        ("my-model", 128_000),
    ],
)
def test_windows_go_by_the_family(name, tokens):
    """The most exact row of the table counts; what is passed counts for more."""
    assert OpenAIChat(name, api_key=KEY).window_tokens == tokens
    assert OpenAIChat(name, api_key=KEY, window_tokens=5).window_tokens == 5


def test_a_price_goes_before_the_list():
    """A price that was passed is used, and without one the public list, which knows no server of one's own."""
    usage = Usage(input_tokens=1_000_000)
    price = Price(input_usd_per_million=3, output_usd_per_million=4)
    assert OpenAIChat("m", api_key=KEY, price=price).cost_usd(usage) == pytest.approx(3.0)
    assert OpenAIChat("m", base_url="http://localhost:8000/v1").cost_usd(usage) is None


# Connections


async def test_replies_that_begin_at_once_share_a_client():
    """Each opened one of its own, of which all but the last were left to the garbage collector."""
    made = []

    class Counted(OpenAIChat):
        def _make_client(self, http_client):
            made.append(super()._make_client(http_client))
            return made[-1]

    with LocalServer(lambda _body: say("hi")) as server:
        model = Counted("m", base_url=server.base_url)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(model.reply, REQUEST)
        await model.aclose()
    assert [client.is_closed() for client in made] == [True]


async def test_a_proxy_that_cannot_be_is_named(monkeypatch):
    """The transport reads the environment, and what it says of that ended a run without a hint."""
    monkeypatch.setenv("ALL_PROXY", "nonsense://ann:secret-of-ann@proxy")
    with pytest.raises(MisuseError, match=r"cannot open connections.*check HTTP_PROXY") as caught:
        await OpenAIChat("m", base_url="http://example.invalid/v1").reply(REQUEST)
    assert "secret-of-ann" not in str(caught.value)


async def test_a_closed_model_opens_again():
    """`aclose` may come at any time and twice, and the next reply opens new connections."""
    with LocalServer(lambda _body: say("x")) as server:
        model = OpenAIChat("m", base_url=server.base_url)
        await model.aclose()
        await model.reply(REQUEST)
        await model.aclose()
        await model.aclose()
        assert (await model.reply(REQUEST)).text == "x"
        await model.aclose()
