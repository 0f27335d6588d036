"""`OpenAIChat` against a local server: replies, failures, connections."""

import gc
import threading
import traceback
from email.utils import formatdate

import anyio
import attrs
import httpx
import httpx2
import openai
import pytest

from agentfsm.core.errors import (
    ClosedError,
    ContextTooLongError,
    MisuseError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
)
from agentfsm.core.messages import TextPart, Usage, UserMessage
from agentfsm.core.settings import Settings
from agentfsm.models import chat_wire
from agentfsm.models.openai_chat import OpenAIChat
from agentfsm.models.prices import Price
from agentfsm.models.vendor import retry_after_s
from agentfsm.ports import CallChunk, FinishChunk, FinishReason, Request, TextChunk, ToolDefinition
from agentfsm.testing import LocalServer, Say

KEY = "sk-very-secret-key"
REQUEST = Request(instructions="Help.", messages=(UserMessage(parts=(TextPart(text="Hello"),)),))
CALLS = (("weather", {"city": "Rome"}), ("clock", {"zone": "Europe/Rome"}))

both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_CUSTOM_HEADERS"):
        monkeypatch.delenv(name, raising=False)


async def ask(say, *, streamed=False, request=REQUEST, silence_s=60.0, **options):
    """Ask a server that says one thing; returns the reply, the chunks and what the server received."""
    chunks = []
    with LocalServer([say]) as server:
        model = OpenAIChat("m", base_url=server.base_url, api_key=KEY, **options)
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
async def test_text_arrives(streamed):
    """Streamed or not, the reply is the same, with its usage; the stream's chunks add up to it."""
    text = "It is sunny in Rome, and 20 degrees warm."
    reply, chunks, received = await ask(Say(text=text), streamed=streamed)
    assert (reply.text, reply.finish_reason) == (text, FinishReason.STOP)
    assert reply.usage == Usage(input_tokens=2, output_tokens=len(text) // 4)
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)) == (text if streamed else "")
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
async def test_a_reply_that_was_cut_short_is_passed_on(streamed):
    """What to do about too long an answer is for the engine to decide."""
    reply, _, _ = await ask(Say(text="It is", finish_reason="length"), streamed=streamed)
    assert (reply.text, reply.finish_reason) == ("It is", FinishReason.LENGTH)


@both_ways
async def test_a_refusal_arrives(streamed):
    """A refusal is a reply with a reason of its own."""
    reply, chunks, _ = await ask(Say(refusal="I cannot."), streamed=streamed)
    assert (reply.text, reply.finish_reason) == ("I cannot.", FinishReason.REFUSAL)
    told = [TextChunk(text="I cannot."), FinishChunk(reason=FinishReason.REFUSAL)]
    assert chunks == (told if streamed else [])


@both_ways
async def test_the_request_carries_tools_and_settings(streamed):
    """Tools, settings and headers reach the server."""
    tool = ToolDefinition(name="weather", description="", parameters={"type": "object"})
    settings = Settings(max_tokens=9, tool_choice="weather")
    request = Request(instructions="", messages=REQUEST.messages, tools=(tool,), settings=settings)
    _, _, received = await ask(Say(text="x"), streamed=streamed, request=request, headers={"x-team": "blue"})
    assert (received.body["model"], received.body["max_tokens"]) == ("m", 9)
    assert received.body["tool_choice"]["function"] == {"name": "weather"}
    assert received.headers["x-team"] == "blue"
    assert received.body.get("stream", False) is streamed


async def test_a_model_writes_each_message_once(monkeypatch):
    """The second turn sends the whole history, of which it writes what is new."""
    written = []
    write = chat_wire._message
    monkeypatch.setattr(chat_wire, "_message", lambda message: written.append(message) or write(message))
    longer = attrs.evolve(REQUEST, messages=REQUEST.messages * 2)
    with LocalServer(lambda _body: Say(text="x")) as server:
        model = OpenAIChat("m", base_url=server.base_url)
        await model.reply(REQUEST)
        await model.reply(longer)
        await model.aclose()
    assert tuple(written) == longer.messages
    assert [len(received.body["messages"]) for received in server.requests] == [2, 3]


# Failures


@both_ways
async def test_a_refused_key_names_where_to_look(streamed):
    """401 names the environment variable, and the key is taken out of what the server repeats."""
    error = await failure(ModelError, Say(status=401, error=f"No such key: {KEY}."), streamed=streamed)
    assert "OPENAI_API_KEY" in str(error)
    assert "No such key: ***." in str(error)


@both_ways
async def test_an_unknown_model_names_model_and_address(streamed):
    """404 may be either, so the error names both."""
    error = await failure(ModelError, Say(status=404, error="The model does not exist."), streamed=streamed)
    assert "'m' at http://127.0.0.1:" in str(error)
    assert "base_url" in str(error)


@both_ways
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 529])
async def test_passing_trouble_may_be_asked_again(streamed, status):
    """Overload, outage and time-outs are unavailability, with the wait that the server asked for."""
    say = Say(status=status, headers={"retry-after": "2.5"})
    error = await failure(ModelUnavailableError, say, streamed=streamed)
    assert error.retry_after_s == pytest.approx(2.5)
    assert "request req_1" in str(error)


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (304, "Give the address where the server is now as base_url"),
        (400, "Mend what it names"),
        (402, "Add credit"),
        (403, "Check what the key's project may use"),
        (407, "Put it into the proxy's address"),
        (422, "Mend what it names"),
    ],
)
async def test_refusals_for_good_are_not_asked_again(status, advice):
    """What the server refuses for good quotes the server's words, and says what to do."""
    error = await failure(ModelError, Say(status=status, error="Not like this."))
    assert f"({status}: " in str(error)
    assert advice in str(error)


@both_ways
async def test_a_spent_quota_is_not_waited_for(streamed):
    """A 429 for want of money is no matter of time."""
    say = Say(status=429, error={"message": "You exceeded your quota.", "code": "insufficient_quota"})
    assert "Add credit" in str(await failure(ModelError, say, streamed=streamed))


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
    assert "compact" in str(await failure(ContextTooLongError, Say(status=400, error=error)))


async def test_too_large_a_request_is_told_apart_whatever_its_status():
    """llama.cpp says it with 500, and proxies with 413; with 429 it is a matter of tokens per minute."""
    words = {"message": "Context size has been exceeded."}
    await failure(ContextTooLongError, Say(status=500, error=words))
    await failure(ContextTooLongError, Say(status=413, error={"message": "Request Entity Too Large"}))
    await failure(ModelUnavailableError, Say(status=429, error={"message": "Reduce the length of the messages."}))


@both_ways
async def test_a_page_is_no_reply(streamed):
    """HTML with status 200 is an unusable reply, and points at base_url."""
    assert "base_url" in str(await failure(ModelReplyError, Say(html=True), streamed=streamed))


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
    await failure(ModelReplyError, Say(raw=raw), streamed=streamed)


@both_ways
async def test_a_broken_connection_may_be_asked_again(streamed):
    """A connection that breaks in the middle of the reply is unavailability."""
    await failure(ModelUnavailableError, Say(text="x" * 100, cut_after=3), streamed=streamed)


@pytest.mark.parametrize("end", ["", "data: [DONE]\n\n"])
async def test_a_stream_without_an_end_is_broken_off(end):
    """A stream that stops without a finish reason is never taken for a whole reply."""
    raw = 'data: {"choices": [{"delta": {"content": "Once upon"}}]}\n\n' + end
    assert "broke off" in str(await failure(ModelUnavailableError, Say(raw=raw), streamed=True))


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
    await failure(kind, Say(raw=f"data: {text}\n\n" if streamed else text), streamed=streamed)


@both_ways
async def test_silence_is_a_time_out(streamed):
    """A server that says nothing for timeout_s is unavailable, and the error names the setting."""
    say = Say(text="x", delay_s=60.0)
    assert "timeout_s" in str(await failure(ModelUnavailableError, say, streamed=streamed, silence_s=0.05))


async def test_silence_in_mid_stream_is_a_time_out():
    """A stream that stops without closing is unavailable too."""
    say = Say(text="x", chunk_delay_s=60.0)
    assert "timeout_s" in str(await failure(ModelUnavailableError, say, streamed=True, silence_s=0.05))


@both_ways
async def test_nobody_listens(streamed):
    """A refused connection names the address, and may be tried again."""
    with LocalServer([]) as server:
        pass
    model = OpenAIChat("m", base_url=server.base_url)
    with pytest.raises(ModelUnavailableError, match=f"{server.base_url} was not reached.*ConnectError"):
        await model.reply(REQUEST, [].append if streamed else None)
    await model.aclose()


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


async def test_an_error_of_the_listener_is_its_own():
    """What `emit` raises is not taken for the server's failure, and the stream is closed cleanly."""

    def emit(_chunk):
        raise ConnectionError

    with LocalServer([Say(text="x" * 1000)]) as server:
        model = OpenAIChat("m", base_url=server.base_url)
        with pytest.raises(ConnectionError):
            await model.reply(REQUEST, emit)
        gc.collect()  # generators left open would be warned of here
        await model.aclose()


async def test_a_cancelled_reply_leaves_nothing_behind():
    """Cancelling in mid-stream ends the reply, and the next one works."""
    with LocalServer([Say(text="x" * 1000, chunk_chars=1, chunk_delay_s=0.01), Say(text="again")]) as server:
        model = OpenAIChat("m", base_url=server.base_url)
        with anyio.CancelScope() as scope:
            await model.reply(REQUEST, lambda _chunk: scope.cancel())
        assert scope.cancelled_caught
        gc.collect()  # generators left open would be warned of here
        assert (await model.reply(REQUEST)).text == "again"
        await model.aclose()


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
    assert retry_after_s(headers, 1_000_000.0) == (seconds and pytest.approx(seconds))


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
    assert f'"{field}":7' in model._body(request, model._written(), streamed=False).decode()


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
        ("qwen3", 128_000),
    ],
)
def test_windows_go_by_the_family(name, tokens):
    """The longest beginning of the name that is known counts; what is passed counts for more."""
    assert OpenAIChat(name, api_key=KEY).window_tokens == tokens
    assert OpenAIChat(name, api_key=KEY, window_tokens=5).window_tokens == 5


def test_a_price_goes_before_the_list():
    """A price that was passed is used, and without one the public list, which knows no server of one's own."""
    usage = Usage(input_tokens=1_000_000)
    price = Price(input_usd_per_million=3, output_usd_per_million=4)
    assert OpenAIChat("m", api_key=KEY, price=price).cost_usd(usage) == pytest.approx(3.0)
    assert OpenAIChat("m", base_url="http://localhost:8000/v1").cost_usd(usage) is None


# Connections


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_event_loop_after_the_other(backend):
    """A model outlives its event loops: each has connections of its own, closed when it ends, and none is kept."""
    with LocalServer([Say(text="one"), Say(text="two"), Say(text="three")]) as server:
        model = OpenAIChat("m", base_url=server.base_url)
        texts = [anyio.run(model.reply, REQUEST, [].append, backend=backend).text for _ in range(3)]
        gc.collect()  # connections left open would be warned of here
    assert texts == ["one", "two", "three"]
    assert len(model._clients) == 1


async def test_a_connection_is_used_again():
    """Replies one after the other, streamed or not, go over one connection."""
    threads = set()  # the server has one for each connection

    def brain(_body):
        threads.add(threading.current_thread())
        return Say(text="x")

    with LocalServer(brain) as server:
        model = OpenAIChat("m", base_url=server.base_url)
        for emit in (None, [].append, [].append, None):
            await model.reply(REQUEST, emit)
        await model.aclose()
    assert len(threads) == 1


async def test_replies_that_begin_at_once_share_a_client():
    """Each opened one of its own, of which all but the last were left to the garbage collector."""
    made = []

    class Counted(OpenAIChat):
        def _client(self, http_client):
            made.append(super()._client(http_client))
            return made[-1]

    with LocalServer(lambda _body: Say(text="hi")) as server:
        model = Counted("m", base_url=server.base_url)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(model.reply, REQUEST)
        await model.aclose()
    assert [client.is_closed() for client in made] == [True]


async def test_a_proxy_that_cannot_be_is_named(monkeypatch):
    """The transport reads the environment, and what it says of that ended a run without a hint."""
    monkeypatch.setenv("ALL_PROXY", "nonsense://ann:secret-of-ann@proxy")
    with pytest.raises(MisuseError, match=r"cannot open connections.*look at HTTP_PROXY") as caught:
        await OpenAIChat("m", base_url="http://example.invalid/v1").reply(REQUEST)
    assert "secret-of-ann" not in str(caught.value)


async def test_a_closed_model_opens_again():
    """`aclose` may come at any time and twice, and the next reply opens new connections."""
    with LocalServer(lambda _body: Say(text="x")) as server:
        model = OpenAIChat("m", base_url=server.base_url)
        await model.aclose()
        await model.reply(REQUEST)
        await model.aclose()
        await model.aclose()
        assert (await model.reply(REQUEST)).text == "x"
        await model.aclose()


@pytest.mark.parametrize("library", [httpx, httpx2])
@both_ways
async def test_a_client_of_ones_own_stays_open(library, streamed):
    """A client that was passed, of either library, is used and never closed; once it is closed, that is said."""
    with LocalServer(lambda _body: Say(text="x")) as server:
        async with library.AsyncClient(headers={"x-mine": "yes"}) as client:
            model = OpenAIChat("m", base_url=server.base_url, http_client=client)
            assert (await model.reply(REQUEST, [].append if streamed else None)).text == "x"
            await model.aclose()
            assert not client.is_closed
            gc.collect()
        with pytest.raises(ClosedError, match="http_client"):
            await model.reply(REQUEST)
    assert server.requests[0].headers["x-mine"] == "yes"
