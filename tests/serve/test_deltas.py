"""Text that a worker's model writes reaches the streams of a server through Redis, and no run depends on it."""

import json
import threading
import time
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest
import redis

from agentfsm import Agent, CallDelta, MisuseError, Runs, TextDelta, ThinkingDelta
from agentfsm.agents.deltas import DeltaRelay, Piece
from agentfsm.cli import main
from agentfsm.ports import Reply, TextChunk
from agentfsm.serve import delta_hub
from agentfsm.stores import MemoryStore, open_store
from agentfsm.stores.redis import broadcast
from tests.support.checks import HANG_S
from tests.support.database_servers import RedisServer
from tests.support.gateways import serving
from tests.support.streaming_models import StreamingModel


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


def gated(words, gates):
    """Return a model each of whose answers has these words, each written once its gate is open."""

    async def line(emit):
        for word, gate in zip(words, gates, strict=True):
            await gate.wait()
            emit(TextChunk(word))
        return Reply(text="".join(words))

    return StreamingModel(line)


async def wait_for_subscriber(url, run_id, count=1):
    """Wait until so many servers listen to the text of a run."""
    with redis.Redis.from_url(url) as client:
        while client.pubsub_numsub(f"agentfsm:deltas:{run_id}")[0][1] < count:  # noqa: ASYNC110  Redis has no event for it
            await anyio.sleep(0.005)


async def read_stream(lines):
    """Yield the name of each server-sent event, or "journal", and its data."""
    kind = "journal"
    async for line in lines:
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            yield kind, json.loads(line[6:])
            kind = "journal"


@asynccontextmanager
async def worked(agent, url, **options):
    """Serve an agent whose runs a worker executes; both use a Redis, as if they were two processes."""
    async with serving(agent, deltas=url, parallel=0, **options) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(agent.worker, deltas=url))
        yield client
        tasks.cancel_scope.cancel()


async def test_text_of_a_worker_arrives(redis_url):
    """Piece by piece while it is written, with the journal around it."""
    gates = [anyio.Event(), anyio.Event()]
    agent = Agent(gated(["one ", "two"], gates), name="shop", store=MemoryStore())
    async with worked(agent, redis_url) as client:
        run_id = (await client.post("/v1/runs", json={"prompt": "go"})).json()["id"]
        seen = []
        async with client.stream("GET", f"/v1/runs/{run_id}/events") as stream:
            await wait_for_subscriber(redis_url, run_id)
            gates[0].set()
            async for kind, data in read_stream(stream.aiter_lines()):
                seen.append(data["text"] if kind == "delta" else kind if kind == "end" else data["event"]["is"])
                if kind == "delta":
                    assert (data["type"], data["run_id"], data["turn"]) == ("text_delta", run_id, 1)
                    gates[1].set()
    assert seen[0] == "Observed"
    assert [each for each in seen[1:] if each != "two"] == ["one ", "AnswerGiven", "end"]


async def test_a_stream_begins_with_the_answer_so_far():
    """Each stream that is opened in the middle of an answer has it from its first word; afterwards nothing is kept."""
    gates = [anyio.Event() for _ in range(3)]
    agent = Agent(gated(["one ", "two ", "three"], gates), name="shop", store=MemoryStore())
    async with serving(agent) as client:
        run_id = (await client.post("/v1/runs", json={"prompt": "go"})).json()["id"]
        for opened in range(2):
            gates[opened].set()
            async with client.stream("GET", f"/v1/runs/{run_id}/events") as stream:
                found = ""
                async for kind, data in read_stream(stream.aiter_lines()):
                    if kind == "delta":
                        found = found[: data["offset"]] + data["text"]
                    if found == "one two "[: 4 * (opened + 1)]:
                        break
        async with client.stream("GET", f"/v1/runs/{run_id}/events") as stream:
            texts = []
            async for kind, data in read_stream(stream.aiter_lines()):
                if kind == "delta":
                    texts.append((data["offset"], data["text"]))
                    gates[2].set()
    assert texts == [(0, "one two "), (8, "three")]


def test_drafts_are_whole_or_not_kept(monkeypatch):
    """A text without its beginning is not kept, another attempt replaces it, and the oldest make room."""
    monkeypatch.setattr(delta_hub, "MAX_DRAFT_CHARS", 10)
    drafts = delta_hub.Drafts()

    def add(root, text, offset, attempt=1, kind=TextDelta):
        drafts.add(root, Piece(kind(run_id=root, turn=1, attempt=attempt, text=text), offset))
        return [(type(piece.event), piece.event.text) for piece in drafts.get(root, root)]

    assert add("a", "late", 3) == []
    assert add("a", "hm", 0, kind=ThinkingDelta) == [(ThinkingDelta, "hm")]
    assert add("a", "one", 0) == [(ThinkingDelta, "hm"), (TextDelta, "one")]
    assert add("a", "two", 3)[1] == (TextDelta, "onetwo")
    assert add("a", "new", 0, attempt=2) == [(TextDelta, "new")]
    assert add("a", "gap", 7, attempt=2) == []
    add("a", "123456", 0)
    assert add("b", "12345", 0) == [(TextDelta, "12345")]
    assert list(drafts.get("a", "a")) == []


class OtherProcess:
    """A relay that passes on what the test says another process has sent."""

    def __init__(self):
        self.receivers = []

    def subscribe(self, _root_id, receive):
        self.receivers.append(receive)
        return lambda: self.receivers.remove(receive)


async def test_a_text_of_another_process_is_forgotten_with_the_last_stream():
    """Its next pieces do not arrive, so the next stream would begin with a text that has a gap."""
    relay = OtherProcess()
    hub = delta_hub.DeltaHub(relay)
    with hub.subscribe("a") as first, hub.subscribe("a") as second:
        first.follow("a")
        relay.receivers[0]([Piece(TextDelta(run_id="a", turn=1, attempt=1, text="one"), 0)])
        await first.wait()
        second.follow("a")
        assert [piece.event.text for piece in second.take()] == ["one"]
    with hub.subscribe("a") as third:
        third.follow("a")
        assert third.take() == ()


async def test_a_redis_that_dies_costs_text_only(monkeypatch, caplog):
    """The journal in the stream is complete, the run ends, and text comes again once the server is back."""
    monkeypatch.setattr(broadcast, "RETRY_S", 0.01)
    gates = [anyio.Event() for _ in range(2)]
    heard = anyio.Event()

    async def write_until_heard(emit):
        count = 0
        while not heard.is_set():
            emit(TextChunk("x"))
            count += 1
            await anyio.sleep(0.01)
        return Reply(text="x" * count)

    model = gated(["one ", "two"], gates)
    model.lines = (*model.lines, write_until_heard)
    agent = Agent(model, name="shop", store=MemoryStore())

    async def watch(client, on_subscribed, on_text):
        run_id = (await client.post("/v1/runs", json={"prompt": "go"})).json()["id"]
        texts, events = [], []
        async with client.stream("GET", f"/v1/runs/{run_id}/events") as stream:
            await wait_for_subscriber(server.url, run_id)
            on_subscribed()
            async for kind, data in read_stream(stream.aiter_lines()):
                if kind == "delta":
                    texts.append(data["text"])
                    on_text()
                elif kind == "journal":
                    events.append(data["event"]["is"])
        return texts, events, (await agent.load(run_id)).output

    def kill_server():
        server.kill()
        gates[1].set()

    with RedisServer() as server:
        async with worked(agent, server.url) as client:
            assert await watch(client, gates[0].set, kill_server) == (["one "], ["Observed", "AnswerGiven"], "one two")
            server.start()
            for operation in ("PUBLISH", "SUBSCRIBE"):
                assert caplog.text.count(f"{operation} fails, so messages are lost until it works again") <= 1
            assert "messages are lost" in caplog.text
            texts, events, _ = await watch(client, lambda: None, heard.set)
            assert set("".join(texts)) == {"x"}
            assert events == ["Observed", "AnswerGiven"]


async def test_a_server_does_not_hear_itself(redis_url):
    """A server that executes runs sends their text to the others, and its own streams have it once."""
    gates = [anyio.Event()] * 3
    agent = Agent(gated(["a", "b", "c"], gates), name="shop", store=MemoryStore())
    heard, all_heard = [], anyio.Event()

    def hear(pieces):
        heard.extend(pieces)
        if len(heard) == 3:
            anyio.from_thread.run_sync(all_heard.set, token=token)

    token = anyio.lowlevel.current_token()
    async with serving(agent, deltas=redis_url) as client:
        run_id = (await client.post("/v1/runs", json={"prompt": "go"})).json()["id"]
        leave = DeltaRelay(redis_url).subscribe(run_id, hear)
        async with client.stream("GET", f"/v1/runs/{run_id}/events") as stream:
            await wait_for_subscriber(redis_url, run_id, count=2)
            gates[0].set()
            own = [data["text"] async for kind, data in read_stream(stream.aiter_lines()) if kind == "delta"]
        await all_heard.wait()
        leave()
    assert own == ["a", "b", "c"]
    assert [(piece.event.text, piece.offset) for piece in heard] == [("a", 0), ("b", 1), ("c", 2)]


class Inbox:
    """Pieces from a relay, which a thread appends."""

    def __init__(self):
        self.pieces, self.changed = [], threading.Condition()

    def take(self, pieces):
        with self.changed:
            self.pieces.extend(pieces)
            self.changed.notify()

    def wait(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.pieces) >= count, HANG_S)
        return self.pieces


def test_all_kinds_pass_and_nonsense_does_not(redis_url, caplog):
    """Pieces arrive as they were; a message that is none is ignored and said, and the next one arrives."""
    common = {"run_id": "child", "turn": 2, "attempt": 3}
    sent = [
        Piece(TextDelta(text="\ud800é", **common), 7),
        Piece(ThinkingDelta(text="hm", **common), 0),
        Piece(CallDelta(index=1, call_id="t2.1", name="pay", arguments='{"a', **common), 0),
    ]
    wrong = {"type": "text_delta", **common, "text": 5}
    inbox = Inbox()
    leave = DeltaRelay(redis_url).subscribe("r", inbox.take)
    relay = DeltaRelay(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        anyio.run(wait_for_subscriber, redis_url, "r")
        for nonsense in (b"\xff", b"[]", b"{}", json.dumps({"by": "x", "pieces": [[wrong, 0]]})):
            client.publish("agentfsm:deltas:r", nonsense)
    for piece in sent:
        relay.publish("r", piece)
    assert inbox.wait(3) == sent
    leave()
    assert caplog.text.count("has no text of a model") == 4


def test_nothing_is_sent_that_nobody_hears(redis_url):
    """Text of a run without a stream costs a question whether there is one; text of another run is sent."""
    piece = Piece(TextDelta(text="a", run_id="r", turn=1, attempt=1), 0)
    inbox = Inbox()
    leave = DeltaRelay(redis_url).subscribe("heard", inbox.take)
    with redis.Redis.from_url(redis_url) as client:
        anyio.run(wait_for_subscriber, redis_url, "heard")
        client.config_resetstat()
        relay = DeltaRelay(redis_url)
        for run_id in ("unheard", "other", "heard"):
            relay.publish(run_id, piece)
        inbox.wait(1)
        assert client.info("commandstats")["cmdstat_publish"]["calls"] == 1
    leave()


def test_text_before_its_stream_is_kept_for_a_moment(redis_url, monkeypatch):
    """So that a stream which is opened while the model begins has the text from its beginning, in order."""
    monkeypatch.setattr(broadcast, "HOLD_S", 60.0)
    relay, inbox = DeltaRelay(redis_url), Inbox()
    pieces = [Piece(TextDelta(text=text, run_id="late", turn=1, attempt=1), at) for at, text in enumerate("abc")]
    with redis.Redis.from_url(redis_url) as client:
        client.config_resetstat()
        relay.publish("late", pieces[0])
        while "cmdstat_pubsub|numsub" not in client.info("commandstats"):
            time.sleep(0.005)
    relay.publish("late", pieces[1])
    leave = DeltaRelay(redis_url).subscribe("late", inbox.take)
    inbox.wait(2)
    relay.publish("late", pieces[2])
    assert inbox.wait(3) == pieces
    leave()


def test_a_worker_command_sends(redis_url, tmp_path, monkeypatch):
    """`agentfsm worker --deltas` passes text on, and a URL of something else is refused by both commands."""
    (tmp_path / "written_shop.py").write_text(SHOP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["submit", "written_shop:agent", "go", "--store", "runs.db"]) == 0
    [run_id] = anyio.run(list_ids, "runs.db")
    inbox = Inbox()
    leave = DeltaRelay(redis_url).subscribe(run_id, inbox.take)
    anyio.run(wait_for_subscriber, redis_url, run_id)
    assert main(["worker", "written_shop:agent", "--store", "runs.db", "--until-idle", "--deltas", redis_url]) == 0
    assert inbox.wait(1)[0].event.text == "one "
    leave()
    for command in ("worker", "serve"):
        assert main([command, "written_shop:agent", "--deltas", "postgresql://u:secret@db"]) == 2
    with pytest.raises(MisuseError, match=r"redis://HOST") as caught:
        DeltaRelay("postgresql://u:secret@db")
    assert "secret" not in str(caught.value)


SHOP = """
from agentfsm import Agent
from agentfsm.testing import ScriptedModel, say

agent = Agent(ScriptedModel(say("one two")), name="shop")
"""


async def list_ids(store):
    return [row.id async for row in Runs(open_store(store)).iterate()]
