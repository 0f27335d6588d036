"""What a server may make us read: each reply without end is broken off, over a real socket, with an error that says so.

The bounds are those of docs/models.md.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import anyio
import httpx
import httpx2
import pytest

from agentfsm import ModelReplyError, ModelUnavailableError
from agentfsm.models import OpenAIChat, guarded_http, sdk, wire
from agentfsm.ports.model import MAX_REPLY_CHARS
from agentfsm.testing import LocalServer, WireReply, call, say
from tests.support.endless_replies import ADAPTERS, ANSWERS, ERRORS, FILLING, GZIP, STREAMS
from tests.support.endless_server import Endless, EndlessServer
from tests.support.model_wires import REQUEST, both_ways

# Of the process that reads them all, one after the other, with three adapters loaded. A body is held in parts, and
# twice where it is put together.
MOST_MIB = 640
# The system takes so much that nobody reads, on either side of a connection.
UNREAD_BYTES = 32 * 2**20
BOUNDS = {
    "body": "more than 67,108,864 bytes",
    "values": "more than 2,097,152 values in its JSON",
    "nested": "more than 2,097,152 values in its JSON",
    "objects": "more than 2,097,152 values in its JSON",
    "gzip": "more than 67,108,864 bytes",
    "line": "more than 67,108,864 bytes in one event",
    "text": "more than 8,388,608 characters of text, thinking and arguments",
    "thinking": "more than 8,388,608 characters of text, thinking and arguments",
    "arguments": "more than 8,388,608 characters of text, thinking and arguments",
    "calls": "more than 512 calls",
}
ROOT = Path(__file__).parents[2]
STATUSES = {"chat": "500", "responses": "429", "anthropic": "529"}


async def test_replies_without_end_are_broken_off(anyio_backend_name):
    """Each adapter says which bound was crossed, the server is rid of the client, and memory stays within a figure."""
    with EndlessServer(ANSWERS | ERRORS) as server:
        done = await anyio.run_process(
            [sys.executable, "-m", "tests.support.endless_client", anyio_backend_name, server.url], cwd=ROOT
        )
    told = json.loads(done.stdout)
    for name in ANSWERS:
        kind, words = told["errors"][name]
        assert kind == ModelReplyError.__name__, name
        assert BOUNDS[name.split("-")[2]] in words, name
        assert f"/{name}" in words
        assert "Settings(max_tokens=...)" in words
    for name in ERRORS:
        kind, words = told["errors"][name]
        assert (kind, STATUSES[name.split("-")[0]] in words) == (ModelUnavailableError.__name__, True), name
        assert server.sent[name] < guarded_http.MAX_ERROR_BYTES + UNREAD_BYTES
    assert all(server.sent[name] < wire.MAX_BODY_BYTES + UNREAD_BYTES for name in ANSWERS)
    assert told["peak_mib"] < MOST_MIB


@pytest.fixture
def tight(monkeypatch):
    """Bounds that are soon reached."""
    monkeypatch.setattr(sdk, "MAX_BODY_BYTES", 2**20)
    monkeypatch.setattr(sdk, "MAX_STREAM_BYTES", 2**21)
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 2**20)
    monkeypatch.setattr(wire, "MAX_STREAM_BYTES", 2**21)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("adapter", ADAPTERS.values())
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("lines", "more than 1,048,576 bytes in one event"),
        ("comments", "more than 1,048,576 bytes in one event"),
        ("events", r"more than 2,097,152 bytes\)"),
    ],
)
async def test_what_is_no_part_of_a_reply_is_bounded_too(adapter, what, words):
    """Neither an event without end, nor a stream of what says nothing, is read on."""
    with EndlessServer({what: Endless(piece=STREAMS[what])}) as server:
        model = adapter("m", base_url=f"{server.url}/{what}", api_key="none")
        with pytest.raises(ModelReplyError, match=words):
            await model.reply(REQUEST, [].append)
        await model.aclose()
    assert server.sent[what] < 2**21 + UNREAD_BYTES


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("library", [httpx, httpx2])
@pytest.mark.parametrize("name", ["chat-whole-body", "chat-streamed-line", "chat-whole-error"])
async def test_a_client_of_ones_own_reads_no_more(library, name):
    """The bounds are not a matter of the client."""
    emit = [].append if "streamed" in name else None
    kind, words = (ModelUnavailableError, "500") if "error" in name else (ModelReplyError, "more than 1,048,576 bytes")
    with EndlessServer(ANSWERS | ERRORS) as server:
        async with library.AsyncClient() as client:
            model = OpenAIChat("m", base_url=f"{server.url}/{name}", http_client=client)
            with pytest.raises(kind, match=words):
                await model.reply(REQUEST, emit)
    assert server.sent[name] < 2**20 + UNREAD_BYTES


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("library", [httpx, httpx2])
@pytest.mark.parametrize("behind", [FILLING, gzip.compress(b"") * 2**12], ids=["junk", "members"])
@pytest.mark.parametrize("status", [b"200 OK", b"500 Oops"])
@both_ways
async def test_what_follows_a_compressed_body_is_bounded(library, behind, status, streamed):
    """Bytes from which nothing is decompressed count too, in a reply and in an error."""
    head = gzip.compress(b'{"error": {"message": "Out of order"}}')
    kind, words = (ModelReplyError, r"more than [12],[0-9,]+ bytes\)")
    if status != b"200 OK":
        kind, words = ModelUnavailableError, "Out of order"
    with EndlessServer({"gzip": Endless(head, behind, headers=GZIP, status=status)}) as server:
        async with library.AsyncClient() as client:
            model = OpenAIChat("m", base_url=f"{server.url}/gzip", http_client=client)
            with pytest.raises(kind, match=words):
                await model.reply(REQUEST, [].append if streamed else None)
    assert server.sent["gzip"] < 2**21 + UNREAD_BYTES


@pytest.mark.parametrize("adapter", ADAPTERS.values())
@pytest.mark.parametrize(
    "line",
    [
        WireReply("x" * (MAX_REPLY_CHARS + 1), chunk_chars=2**20),
        WireReply(say("", *[call("f", text="x" * (MAX_REPLY_CHARS // 2))] * 2), chunk_chars=2**20),
    ],
    ids=["text", "arguments"],
)
@both_ways
async def test_a_reply_that_ends_too_late_is_too_large(adapter, line, streamed):
    """What is written in one reply is bounded, in whatever form it comes; what it was billed counts."""
    with LocalServer([line]) as server:
        model = adapter("m", base_url=server.base_url, api_key="none")
        with pytest.raises(ModelReplyError, match="more than 8,388,608 characters of text") as caught:
            await model.reply(REQUEST, [].append if streamed else None)
        await model.aclose()
    assert streamed or caught.value.usage is not None


async def test_a_reply_with_pictures_is_whole():
    """Megabytes of base64 in one line are a reply as any other."""
    text = "A" * (8 * 2**20 - 1)
    with LocalServer([say(text), WireReply(text, chunk_chars=len(text))]) as server:
        model = OpenAIChat("m", base_url=server.base_url)
        assert (await model.reply(REQUEST)).text == text
        assert (await model.reply(REQUEST, [].append)).text == text
        await model.aclose()
