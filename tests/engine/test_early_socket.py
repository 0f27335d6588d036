"""Early calls over a real socket, with the OpenAI client and server-sent events."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import pytest

from agentfsm import Agent, Limits, Settings, ToolEvent, ToolEventType, UsageReported, tool
from agentfsm.core.events import ToolFinished
from agentfsm.models import OpenAIChat
from agentfsm.testing import LocalServer, WireReply, call, raw_call, say
from tests.support.checks import HANG_S, names, results_of, sound

STREAM = Settings(stream=True)
CALLS = tuple(call("look", at=at, why="to know what is there") for at in "abcd")


@tool(read_only=True)
async def look(at: str, why: str = "") -> str:
    """Look."""
    return f"saw {at}"


@tool
async def write(at: str) -> str:
    """Write."""
    return f"wrote {at}"


def agent_at(base_url: str, store, *tools, **options) -> Agent:
    """An agent whose model is behind that address."""
    return Agent(OpenAIChat("local", base_url=base_url), tools=tools, store=store, **{"settings": STREAM, **options})


def contents(run) -> list[str]:
    """The results of a run, in order."""
    return [result.content for result in results_of(run.messages)]


async def test_parallel_calls_that_stream_slowly_are_under_way_before_the_reply_is_whole(store):
    """Three of four have started when the usage comes, which is the last that the server says."""
    line = WireReply(say("", *CALLS), chunk_delay_s=0.002, chunk_chars=8)
    with LocalServer([line, say("done")]) as server:
        agent = agent_at(server.base_url, store, look)
        async with agent.stream("go") as stream:
            events = [event async for event in stream]
        await agent.model.aclose()
    run = stream.run
    assert run.output == "done"
    whole = next(n for n, event in enumerate(events) if isinstance(event, UsageReported))
    begun = [e for e in events[:whole] if isinstance(e, ToolEvent) and e.type is ToolEventType.STARTED]
    assert [event.call_id for event in begun][:3] == ["t1.0", "t1.1", "t1.2"]
    assert contents(run) == [f"saw {at}" for at in "abcd"]
    await sound(agent, run)


@pytest.mark.parametrize(
    "line",
    [
        WireReply(say("", *CALLS), interleave=True, chunk_chars=4),
        WireReply(say("", *CALLS), chunk_chars=1),
        WireReply(say("", *CALLS), chunk_chars=10_000),
        WireReply(say("", *CALLS), finish_reason="stop"),
        WireReply(say("", *CALLS), finish_reason="eos"),
        WireReply(say("", *CALLS), finish_reason="length"),
        say("", *CALLS[:2], call("write", at="x"), CALLS[3]),
        say("Let me look.", *CALLS[:1], usage=None),
        say("", raw_call("look", "{"), *CALLS[1:]),
    ],
    ids=["interleaved", "by letters", "whole", "stop", "other words", "length", "a write", "text", "malformed"],
)
async def test_however_the_calls_arrive_the_run_is_that_of_a_reply_that_is_not_streamed(store, line):
    """The same calls and the same results, in the same order."""
    told = []
    for settings in (STREAM, Settings()):
        with LocalServer([line, say("done")]) as server:
            agent = agent_at(server.base_url, store, look, write, settings=settings)
            run = await agent.run("go")
            await agent.model.aclose()
        assert run.output == "done"
        await sound(agent, run)
        told.append([(result.call_id, result.index, result.text) for result in results_of(run.messages)])
    assert told[0] == told[1]
    assert len(told[0]) == len(line.calls)


async def test_a_connection_that_is_cut_in_mid_stream_leaves_nothing_of_its_calls(store):
    """The model is asked again, and only what it says then is run for the record."""
    seen: list[str] = []

    @tool(read_only=True)
    async def look(at: str) -> str:
        seen.append(at)
        return f"saw {at}"

    old, new = tuple(call("look", at=f"old {n}") for n in range(9)), (call("look", at="new"),)
    script = [WireReply(say("", *old), cut_after=15, chunk_chars=100), say("", *new), say("done")]
    with LocalServer(script) as server:
        agent = agent_at(server.base_url, store, look, limits=Limits(retry_wait_s=0.001))
        run = await agent.run("go")
        await agent.model.aclose()
    assert seen[-1] == "new"
    assert "old 0" in seen
    events = await agent.history(run.id)
    assert [e.result.content for e in events if isinstance(e, ToolFinished)] == contents(run) == ["saw new"]
    assert names(events).count("ToolsChosen") == 1
    await sound(agent, run)


# A server that goes on only when a tool has started


def _event(delta: dict[str, object], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def _call(index: int, name: str, arguments: str) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": f"c{index}", "type": "function", "function": function}]}


@contextmanager
def waiting_server(begun: threading.Event) -> Iterator[str]:
    """Serve a reply of three calls, the last of which is sent when a tool has begun; then an answer."""
    requests: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            if len(requests) == 1:
                self.wfile.write(_event(_call(0, "look", '{"at": "a"}')) + _event(_call(1, "look", '{"at":')))
                self.wfile.flush()
                if not begun.wait(HANG_S):
                    return  # the reply stays torn, and the test fails
                self.wfile.write(_event({"tool_calls": [{"index": 1, "function": {"arguments": ' "b"}'}}]}))
                self.wfile.write(_event(_call(2, "write", '{"at": "c"}')) + _event({}, "tool_calls"))
            else:
                self.wfile.write(_event({"content": "done"}) + _event({}, "stop"))
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is http.server's
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_tool_starts_before_the_server_has_sent_the_rest(store, plain):
    """The server waits for the tool before it sends on: it would wait in vain if the tool waited for the reply."""
    begun = threading.Event()

    async def look_async(at: str) -> str:
        begun.set()
        return f"saw {at}"

    def look_plain(at: str) -> str:
        begun.set()
        return f"saw {at}"

    made = tool(name="look", read_only=True)(look_plain if plain else look_async)
    with waiting_server(begun) as base_url:
        agent = agent_at(base_url, store, made, write, limits=Limits(model_retries=0))
        with anyio.fail_after(HANG_S * 2):
            run = await agent.run("go")
        await agent.model.aclose()
    assert run.output == "done"
    assert contents(run) == ["saw a", "saw b", "wrote c"]
    await sound(agent, run)
