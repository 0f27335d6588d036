"""What all adapters do alike, against a local server: replies, failures, connections."""

import gc
import threading

import anyio
import httpx
import httpx2
import pytest

from agentfsm import ClosedError, ModelError, ModelReplyError, ModelUnavailableError, Usage
from agentfsm.ports import CallChunk, FinishChunk, FinishReason, TextChunk
from agentfsm.testing import LocalServer, WireReply, say
from tests.support.model_wires import ANTHROPIC, CALLS, CHAT, KEY, REQUEST, RESPONSES, both_ways, forget_keys

WIRES = (CHAT, RESPONSES, ANTHROPIC)
STATUSES = {
    CHAT: (408, 409, 429, 500, 502, 529),
    RESPONSES: (408, 429, 500, 529),
    ANTHROPIC: (408, 409, 429, 499, 500, 502, 503, 504, 529),
}

every_wire = pytest.mark.parametrize("wire", WIRES, ids=str)
# The two adapters of OpenAI share their client, and what is said of it once holds for both.
each_client = pytest.mark.parametrize("wire", [CHAT, ANTHROPIC], ids=str)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    forget_keys(monkeypatch, tmp_path)


# Replies


@both_ways
@pytest.mark.parametrize(
    ("wire", "interleave"),
    [(CHAT, False), (CHAT, True), (RESPONSES, False), (RESPONSES, True), (ANTHROPIC, False)],
    ids=str,
)
async def test_calls_arrive(wire, streamed, interleave):
    """Calls come out whole and in order, however their pieces were mixed."""
    reply, chunks, _ = await wire.ask(
        WireReply(say("", *CALLS), chunk_chars=3, interleave=interleave), streamed=streamed
    )
    assert [(call.name, call.arguments) for call in reply.calls] == [
        ("weather", '{"city": "Rome"}'),
        ("clock", '{"zone": "Europe/Rome"}'),
    ]
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    if streamed:
        assert CallChunk(index=1, name="clock") in chunks
        assert chunks.pop() == FinishChunk(reason=FinishReason.TOOL_CALLS)
        assert "".join(chunk.arguments for chunk in chunks if chunk.index == 0) == '{"city": "Rome"}'


@pytest.mark.parametrize("wire", [CHAT, RESPONSES], ids=str)
@both_ways
async def test_usage_is_read_or_missing(wire, streamed):
    """Cached tokens are counted; where the server says nothing, there is no usage."""
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    reply, _, _ = await wire.ask(WireReply("x", usage=usage), streamed=streamed)
    assert reply.usage == Usage(input_tokens=10, output_tokens=3, cached_tokens=8)
    reply, _, _ = await wire.ask(say("x", usage=None), streamed=streamed)
    assert reply.usage is None


@pytest.mark.parametrize("wire", [CHAT, RESPONSES], ids=str)
@both_ways
async def test_a_refusal_arrives(wire, streamed):
    """A refusal is a reply with a reason of its own."""
    reply, chunks, _ = await wire.ask(WireReply(refusal="I cannot."), streamed=streamed)
    assert (reply.text, reply.finish_reason) == ("I cannot.", FinishReason.REFUSAL)
    told = [TextChunk(text="I cannot."), FinishChunk(reason=FinishReason.REFUSAL)]
    assert chunks == (told if streamed else [])


# Failures


@every_wire
@both_ways
async def test_a_refused_key_names_where_to_look(wire, streamed):
    """401 names the environment variable, and the key is taken out of what the server repeats."""
    error = await wire.failure(ModelError, WireReply(status=401, error=f"No such key: {KEY}."), streamed=streamed)
    assert f"{wire.vendor}_API_KEY" in str(error)
    assert "No such key: ***." in str(error)


@each_client
@both_ways
async def test_an_unknown_model_names_model_and_address(wire, streamed):
    """404 may be either, so the error names both."""
    error = await wire.failure(ModelError, WireReply(status=404, error="The model does not exist."), streamed=streamed)
    assert "'m' at http://127.0.0.1:" in str(error)
    assert "base_url" in str(error)


@both_ways
@pytest.mark.parametrize(("wire", "status"), [(wire, status) for wire in WIRES for status in STATUSES[wire]], ids=str)
async def test_passing_trouble_may_be_asked_again(wire, streamed, status):
    """Overload, outage and time-outs are unavailability, with the wait that the server asked for, however long."""
    line = WireReply(status=status, headers={"retry-after": "86400.5"})
    error = await wire.failure(ModelUnavailableError, line, streamed=streamed)
    assert error.retry_after_s == pytest.approx(86_400.5)
    assert "request req_1" in str(error)


@every_wire
@both_ways
async def test_a_page_is_no_reply(wire, streamed):
    """HTML with status 200 is an unusable reply, and points at base_url."""
    assert "base_url" in str(await wire.failure(ModelReplyError, WireReply(html=True), streamed=streamed))


@pytest.mark.parametrize(
    ("wire", "events"), [(CHAT, 3), *[(RESPONSES, n) for n in (0, 1, 3, 8)], (ANTHROPIC, 3)], ids=str
)
@both_ways
async def test_a_broken_connection_may_be_asked_again(wire, events, streamed):
    """A connection that breaks in the middle of the reply is unavailability."""
    await wire.failure(ModelUnavailableError, WireReply("x" * 100, cut_after=events), streamed=streamed)


@every_wire
@both_ways
async def test_silence_is_a_time_out(wire, streamed):
    """A server that says nothing for timeout_s is unavailable, and the error names the setting."""
    line = say("x", delay_s=60.0)
    assert "timeout_s" in str(await wire.failure(ModelUnavailableError, line, streamed=streamed, silence_s=0.05))


@pytest.mark.parametrize(("wire", "path"), [(CHAT, "/v1"), (ANTHROPIC, "/")], ids=str)
@both_ways
async def test_nobody_listens(wire, path, streamed):
    """A refused connection names the address, and may be tried again."""
    with LocalServer([]) as server:
        pass
    model = wire.kind("m", base_url=server.base_url)
    address = server.base_url.removesuffix("/v1") + path
    with pytest.raises(ModelUnavailableError, match=rf"Cannot connect to 'm' at {address} \(connection refused\)"):
        await model.reply(REQUEST, [].append if streamed else None)
    await model.aclose()


@each_client
async def test_an_error_of_the_listener_is_its_own(wire):
    """What `emit` raises is not taken for the server's failure, and the stream is closed cleanly."""

    def emit(_chunk):
        raise ConnectionError

    with LocalServer([say("x" * 1000)]) as server:
        model = wire.kind("m", base_url=server.base_url)
        with pytest.raises(ConnectionError):
            await model.reply(REQUEST, emit)
        gc.collect()  # generators left open would be warned of here
        await model.aclose()


@each_client
async def test_a_cancelled_reply_leaves_nothing_behind(wire):
    """Cancelling in mid-stream ends the reply, and the next one works."""
    with LocalServer([WireReply("x" * 1000, chunk_chars=1, chunk_delay_s=0.01), say("again")]) as server:
        model = wire.kind("m", base_url=server.base_url)
        with anyio.CancelScope() as scope:
            await model.reply(REQUEST, lambda _chunk: scope.cancel())
        assert scope.cancelled_caught
        gc.collect()  # generators left open would be warned of here
        assert (await model.reply(REQUEST)).text == "again"
        await model.aclose()


# Connections


@each_client
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_event_loop_after_the_other(wire, backend):
    """A model outlives its event loops: each has connections of its own, closed when it ends, and none is kept."""
    with LocalServer([say("one"), say("two"), say("three")]) as server:
        model = wire.kind("m", base_url=server.base_url)
        texts = [anyio.run(model.reply, REQUEST, [].append, backend=backend).text for _ in range(3)]
        gc.collect()  # connections left open would be warned of here
    assert texts == ["one", "two", "three"]
    assert len(model._clients) == 1


@each_client
async def test_a_connection_is_used_again(wire):
    """Replies one after the other, streamed or not, go over one connection."""
    threads = set()  # the server has one for each connection

    def brain(_body):
        threads.add(threading.current_thread())
        return say("x")

    with LocalServer(brain) as server:
        model = wire.kind("m", base_url=server.base_url)
        for emit in (None, [].append, [].append, None):
            await model.reply(REQUEST, emit)
        await model.aclose()
    assert len(threads) == 1


@pytest.mark.parametrize(
    ("wire", "library"),
    [(CHAT, httpx), (CHAT, httpx2), (ANTHROPIC, httpx2)],
    ids=["chat-httpx", "chat-httpx2", "anthropic"],
)
@both_ways
async def test_a_client_of_ones_own_stays_open(wire, library, streamed):
    """A client that was passed, of either library, is used and never closed; once it is closed, that is said."""
    with LocalServer(lambda _body: say("x")) as server:
        async with library.AsyncClient(headers={"x-mine": "yes"}) as client:
            model = wire.kind("m", base_url=server.base_url, http_client=client)
            assert (await model.reply(REQUEST, [].append if streamed else None)).text == "x"
            await model.aclose()
            assert not client.is_closed
            gc.collect()
        with pytest.raises(ClosedError, match="http_client"):
            await model.reply(REQUEST)
    assert server.requests[0].headers["x-mine"] == "yes"
