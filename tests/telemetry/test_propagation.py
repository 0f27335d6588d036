"""One trace over processes, threads and protocols: HTTP callers, tools, MCP servers, a killed worker, and the log."""

import logging
import signal
import sys
import textwrap
import threading

import anyio
import httpx
import pytest
from opentelemetry import propagate
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentfsm import Agent, tool
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.streaming.watch import Outlet
from agentfsm.telemetry import Telemetry, trace_of
from agentfsm.telemetry.trace_export import TraceExport
from agentfsm.testing import ScriptedModel, call, say
from tests.support.gateway_client import named, serving
from tests.support.mcp_calls import heard, rude
from tests.support.otlp_receiver import OTLPReceiver

pytestmark = pytest.mark.anyio
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])


async def spans_of(agent, run_id):
    """Return the spans of a run by the id of their call, else by name."""
    stored = await agent.store.read(run_id)
    spans = trace_of(stored.header, stored.events)
    return {span.attributes.get("gen_ai.tool.call.id", span.name): span for span in spans}


@on_asyncio
async def test_a_request_a_run_a_tool_and_its_request_are_one_trace():
    """The run is below the caller's span, or below the server's own; an invalid header begins a trace."""
    asked = []

    @tool(read_only=True)
    async def fetch() -> str:
        """Fetch a page, as an instrumented client does."""
        headers = {}
        propagate.inject(headers)
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=request.headers["traceparent"]))
        async with httpx.AsyncClient(transport=transport) as client:
            asked.append((await client.get("http://page/", headers=headers)).text)
        return "ok"

    replies = [say("", call("fetch")), "done"] * 3
    agent = Agent(ScriptedModel(*replies), tools=[fetch], name="shop", watch=[Telemetry(InMemorySpanExporter())])
    agent = agent.with_(store=MemoryStore())
    async with serving(agent) as client:

        async def start(traceparent):
            body, headers = {"prompt": "go", "wait_s": 30}, named() | {"traceparent": traceparent}
            run = (await client.post("/v1/runs", json=body, headers=headers)).json()
            assert run["status"] == "done"
            return await spans_of(agent, run["id"])

        spans = await start(CALLER)
        whole = spans["invoke_agent shop"]
        assert (whole.context.trace_id, whole.parent) == tuple(CALLER.split("-")[1:3])
        assert asked == [f"00-{whole.context.trace_id}-{spans['t1.0'].context.span_id}-01"]
        assert (await start("00-nonsense-01"))["invoke_agent shop"].parent is None
        refused = await client.post("/v1/runs", json={"prompt": "go", "traceparent": CALLER}, headers=named())
        assert refused.status_code == 422
    with TracerProvider().get_tracer("server").start_as_current_span("request") as request:
        async with serving(agent) as client:  # its tasks are below that span
            spans = await start(CALLER)
    assert spans["invoke_agent shop"].parent == f"{request.get_span_context().span_id:016x}"


async def test_a_call_of_an_mcp_server_has_the_span_of_its_call(tmp_path):
    """It crosses to the thread of the connections, also on a connection that an earlier call has opened."""
    record = tmp_path / "record"
    turns = say("", call("rude__act")), say("", call("rude__act")), "done"
    telemetry = Telemetry(InMemorySpanExporter())
    async with Agent(ScriptedModel(*turns), tools=[rude("plain", record)], watch=[telemetry]) as agent:
        run = await agent.run("act")
        spans = await spans_of(agent, run.id)
    asked = [message["params"] for message in heard(record) if message["method"] == "tools/call"]
    calls = [each["_meta"]["traceparent"] for each in asked]
    assert [each.split("-")[1] for each in calls] == [spans["t1.0"].context.trace_id] * 2
    assert [each.split("-")[2] for each in calls] == [spans[key].context.span_id for key in ("t1.0", "t2.0")]


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "ok"


CRASH = """
import os, signal, sys
from agentfsm import Agent, tool
from agentfsm.stores import SQLiteStore
from agentfsm.telemetry import Telemetry
from agentfsm.testing.models import ScriptedModel, call, say

telemetry = Telemetry(sys.argv[2])

@tool(read_only=True)
async def look() -> str:
    "Look."
    return "ok"

@tool(idempotent=True)
async def pay() -> str:
    "Pay, and die of it."
    for outlet in agent.watch:
        outlet.flush()
    os.kill(os.getpid(), signal.SIGKILL)

replies = say("", call("look")), say("", call("pay"))
agent = Agent(ScriptedModel(*replies), tools=[look, pay], store=SQLiteStore(sys.argv[1]), watch=[telemetry])
agent.run_sync("go", id="r1")
"""


@on_asyncio
async def test_a_killed_run_that_another_process_resumes_is_one_trace(tmp_path):
    """What the first process has sent, and the second, have one trace id; an export later has the same ids."""

    @tool(idempotent=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    path = tmp_path / "runs.db"
    with OTLPReceiver() as server:
        words = [sys.executable, "-c", textwrap.dedent(CRASH), str(path), server.url]
        done = await anyio.run_process(words, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        before = set(server.ids)
        model = ScriptedModel("done")
        agent = Agent(model, tools=[look, pay], store=SQLiteStore(path), watch=[Telemetry(server.url)])
        run = await agent.resume("r1")
        await anyio.to_thread.run_sync(agent.watch[0].flush)
        live = set(server.ids)
        server.spans.clear()
        await TraceExport(agent.store, server.url).run("r1")
        await agent.aclose()
        assert run.output == "done"
        assert before
        assert before < live == set(server.ids)
        assert len({span.trace_id for span in server.spans}) == 1
        assert {"execute_tool look", "execute_tool pay", "invoke_agent agent"} <= {span.name for span in server.spans}


class Blocked(SpanExporter):
    """An exporter that never returns, until it is let go."""

    def __init__(self):
        self.is_free = threading.Event()

    def export(self, spans):
        self.is_free.wait()
        return SpanExportResult.SUCCESS


async def test_an_exporter_that_blocks_delays_no_run(monkeypatch, caplog):
    """Closing the agent waits for its bound, here shortened, and no longer; what is missing is counted."""
    monkeypatch.setattr(Outlet.flush, "__defaults__", (0.05,))
    exporter = Blocked()
    telemetry = Telemetry(exporter)
    agent = Agent(ScriptedModel("done"), watch=[telemetry])
    run = await agent.run("go")
    spans = await spans_of(agent, run.id)
    await agent.aclose()
    assert run.output == "done"
    assert telemetry.exported == 0
    assert telemetry.lost >= len(spans) >= 2
    assert "spans are still being exported after 0.05 s" in caplog.text
    exporter.is_free.set()


async def test_lines_of_a_traced_run_have_its_trace(caplog):
    """Traced by a watcher or given a trace; other runs have only their own id."""
    caplog.set_level(logging.INFO, logger="agentfsm")
    traced = {"watch": [Telemetry(InMemorySpanExporter())]}
    for options, start in (({}, {}), (traced, {}), ({}, {"traceparent": CALLER})):
        agent = Agent(ScriptedModel("done"), **options)
        caplog.clear()
        run = await agent.run("go", **start)
        (facts,) = [record.facts for record in caplog.records if record.facts["event"] == "turn"]
        spans = await spans_of(agent, run.id)
        assert facts["run"] == run.id
        assert facts.get("trace_id", "") == (spans["invoke_agent agent"].context.trace_id if options or start else "")
