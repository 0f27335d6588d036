"""Traces of runs: the same from the watcher and from the journal, and what reaches a server of OTLP."""

import json

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentfsm import Agent, Limits, MisuseError, tool
from agentfsm.cli import main
from agentfsm.stores import SQLiteStore
from agentfsm.telemetry import Telemetry, trace_of
from agentfsm.telemetry.trace_export import TraceExport, TraceExportError
from agentfsm.testing import ScriptedModel, call, say
from tests.support.otlp_receiver import OTLPReceiver

pytestmark = pytest.mark.anyio
QUESTION = "北京明天的天气"


@tool(read_only=True)
async def get_weather(city: str, date: str) -> dict[str, str]:
    """Look up the weather."""
    await anyio.sleep(0.01)
    return {"temp": "18-26", "condition": f"clouds over {city} on {date}"}


@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


def weather(*replies, **options):
    """Return the agent of document H, 2.2."""
    model = ScriptedModel(
        *(replies or (say("", call("get_weather", city="北京", date="2025-09-08")), "18 to 26 degrees"))
    )
    return Agent(model, tools=[get_weather, pay], name="weather", version="2.3.1", **options)


async def spans_of(agent, run, content="full"):
    """Return the spans of a run, from its journal."""
    stored = await agent.store.read(run.id)
    return trace_of(stored.header, stored.events, content=content)


def keys(spans):
    """Return what identifies exported spans."""
    return {(span.name, span.context.span_id, span.start_time, span.end_time) for span in spans}


async def test_the_weather_trace():
    """Document H, 2.2, field by field, from a run."""
    agent = weather()
    run = await agent.run(QUESTION, user="u_x9y8z7")
    chat, call_span, last, whole = [s for s in await spans_of(agent, run) if not s.name.startswith("wait")]
    assert [s.name for s in (chat, call_span, last, whole)] == [
        "chat scripted",
        "execute_tool get_weather",
        "chat scripted",
        "invoke_agent weather",
    ]
    assert json.loads(whole.attributes["gen_ai.input.messages"])[0]["parts"][0]["content"] == QUESTION
    assert (whole.started_at, whole.attributes["user.id"]) == (run.created_at, "u_x9y8z7")
    assert chat.attributes["gen_ai.request.model"] == "scripted"
    assert chat.attributes["gen_ai.usage.input_tokens"] > 0 < chat.attributes["gen_ai.usage.output_tokens"]
    assert (chat.attributes["agentfsm.decision"], chat.attributes["agentfsm.turn"]) == ("TOOL_CALL", 1)
    asked = json.loads(chat.attributes["gen_ai.output.messages"])[0]["parts"][0]
    assert (asked["name"], asked["arguments"]) == ("get_weather", {"city": "北京", "date": "2025-09-08"})
    assert call_span.attributes["gen_ai.tool.name"] == "get_weather"
    assert json.loads(call_span.attributes["gen_ai.tool.call.arguments"])["city"] == "北京"
    assert json.loads(call_span.attributes["gen_ai.tool.call.result"])["temp"] == "18-26"
    assert call_span.attributes["agentfsm.tool.outcome"] == "done"
    assert 0.01 <= call_span.duration_s <= whole.duration_s + 0.001  # runs begin in whole milliseconds
    assert (last.attributes["agentfsm.decision"], last.attributes["agentfsm.turn"]) == ("FINAL_ANSWER", 2)
    assert "18 to 26" in last.attributes["gen_ai.output.messages"]
    assert whole.attributes["agentfsm.turns"] == 2
    both = [s.attributes["gen_ai.usage.input_tokens"] for s in (chat, last)]
    assert whole.attributes["gen_ai.usage.input_tokens"] == sum(both)
    assert whole.attributes["gen_ai.agent.version"] == "2.3.1"
    assert {s.parent for s in (chat, call_span, last)} == {whole.context.span_id}


async def test_a_wait_is_a_span_and_its_content_stays_here():
    """Live and from the journal the spans are equal, over a pause; without content no text leaves."""
    out = InMemorySpanExporter()
    telemetry = Telemetry(out)
    agent = weather(say("secret words", call("pay", cents=3)), "done", watch=[telemetry])
    run = await agent.run("a secret task", user="ann")
    await anyio.sleep(0.03)
    await agent.approve(run.id, "t1.0", digest=run.pending[0].digest)
    other, later = weather("done", store=agent.store, watch=[telemetry]), InMemorySpanExporter()
    run = await other.resume(run.id)
    await TraceExport(agent.store, later).run(run.id)
    await agent.aclose()
    await other.aclose()
    assert keys(out.get_finished_spans()) == keys(later.get_finished_spans())
    assert "wait approval" in [span.name for span in later.get_finished_spans()]
    assert (telemetry.exported, telemetry.lost) == (len(later.get_finished_spans()), 0)
    shown = json.dumps([dict(span.attributes) for span in out.get_finished_spans()])
    assert not any(word in shown for word in ("secret", "ann", "paid"))


async def test_calls_overlap():
    """Parallel calls are spans that overlap."""
    both = say("", *[call("get_weather", city=city, date="x") for city in ("a", "b")])
    agent = weather(both, "done")
    spans = await spans_of(agent, await agent.run("go"))
    one, two = [span for span in spans if span.name == "execute_tool get_weather"]
    assert one.started_at < two.ended_at
    assert two.started_at < one.ended_at


async def test_a_failure_is_an_error():
    """A failed call and a run without an answer are errors; their texts are content."""

    @tool
    async def fail() -> str:
        """Fail."""
        raise ValueError("card 4711")

    agent = Agent(ScriptedModel(say("", call("fail")), say("", call("fail"))), tools=[fail], limits=Limits(turns=1))
    run = await agent.run("go")
    spans = await spans_of(agent, run, content="none")
    assert [span.error for span in spans if span.error] == ["tool_error", "max_turns"]
    assert "4711" not in repr(spans)
    assert "4711" in repr(await spans_of(agent, run))


async def test_a_sub_agent_and_a_fork():
    """The run of a sub-agent is below its call, in one trace; a fork has its own spans, and a link."""
    below = Agent(ScriptedModel("found"), name="finder").as_tool()
    agent = Agent(ScriptedModel(say("", call("finder", query="x")), "done"), tools=[below], name="boss")
    run = await agent.run("go")
    spans = await spans_of(agent, run)
    stored = await agent.store.read(f"{run.id}.t1.0")
    child = trace_of(stored.header, stored.events)
    called = next(span for span in spans if span.name == "execute_tool finder")
    assert child[-1].parent == called.context.span_id
    assert {span.context.trace_id for span in (*spans, *child)} == {called.context.trace_id}
    fork = await agent.fork(run.id, at=1)
    fork = await agent.with_(model=ScriptedModel("other")).finish(fork)
    forked = await spans_of(agent, fork)
    assert [span.name for span in forked if span.name.startswith("chat")] == ["chat scripted"]
    assert forked[-1].links == (spans[-1].context,)
    assert forked[-1].context.trace_id != spans[-1].context.trace_id


async def test_the_span_of_a_call_is_current():
    """A run is below the span in which it was started, and what its tools and models trace is below their spans."""
    seen = {}
    tracer = TracerProvider().get_tracer("test")

    @tool
    async def look() -> str:
        """Look."""
        seen["async"] = trace.get_current_span().get_span_context()
        return "ok"

    @tool
    def peek() -> str:
        """Look, in a thread."""
        seen["thread"] = trace.get_current_span().get_span_context()
        return "ok"

    model = ScriptedModel(say("", call("look"), call("peek")), "done")
    agent = Agent(model, tools=[look, peek], watch=[Telemetry(InMemorySpanExporter())])
    with tracer.start_as_current_span("request") as request:
        run = await agent.run("go")
    spans = {span.attributes.get("gen_ai.tool.call.id", span.name): span for span in await spans_of(agent, run)}
    assert f"{seen['async'].span_id:016x}" == spans["t1.0"].context.span_id
    assert f"{seen['thread'].span_id:016x}" == spans["t1.1"].context.span_id
    assert spans["invoke_agent agent"].parent == f"{request.get_span_context().span_id:016x}"
    assert seen["async"].trace_id == request.get_span_context().trace_id
    assert not trace.get_current_span().get_span_context().is_valid


class Broken(SpanExporter):
    """An exporter that does what exporters should not."""

    def __init__(self, fault):
        self.fault = fault

    def export(self, spans):
        if isinstance(self.fault, Exception):
            raise self.fault
        return self.fault


@pytest.mark.parametrize("fault", [ValueError("no"), SpanExportResult.FAILURE])
async def test_an_exporter_that_fails_changes_nothing(fault):
    """The run is the same, and the spans that were lost are counted."""
    telemetry = Telemetry(Broken(fault))
    agent = weather(watch=[telemetry])
    run = await agent.run(QUESTION)
    spans = await spans_of(agent, run)
    await agent.aclose()
    assert run.output == "18 to 26 degrees"
    assert (telemetry.exported, telemetry.lost) == (0, len(spans))


async def test_a_server_receives_the_trace(tmp_path, capsys):
    """Live over HTTP, and twice by the command: the same ids, in one service; a server that is away is told."""
    store = SQLiteStore(tmp_path / "runs.db")
    with OTLPReceiver() as server:
        agent = weather(store=store, watch=[Telemetry(server.url, service="shop")])
        await agent.run(QUESTION, id="r1")
        await agent.aclose()
        live = sorted(server.ids)
        assert server.services == {"shop"}
        server.spans.clear()
        words = ["export", "otlp", "--since", "7d", "--to", server.url, "--store", str(tmp_path / "runs.db")]
        for _ in range(2):
            assert await anyio.to_thread.run_sync(main, words) == 0
        assert sorted(server.ids) == sorted(live * 2)
        assert "of 1 run" in capsys.readouterr().out
        server.status = 400
        assert await anyio.to_thread.run_sync(main, words) == 1
        assert "spans could not be delivered" in capsys.readouterr().err


async def test_what_is_new_is_followed():
    """The follower exports each run once, and goes on with what it could not deliver."""
    agent, out = weather(), InMemorySpanExporter()
    run = await agent.run(QUESTION)
    with pytest.raises(TraceExportError):
        [each async for each in TraceExport(agent.store, Broken(SpanExportResult.FAILURE)).follow(until_idle=True)]
    export = TraceExport(agent.store, out)
    assert [each async for each in export.follow(until_idle=True)] == [run.id]
    assert [each async for each in export.follow(until_idle=True)] == []
    assert export.exported == len(await spans_of(agent, run))


async def test_redacted_content_has_no_personal_data():
    """Texts are exported, with marks in place of personal data and secrets."""
    out = InMemorySpanExporter()
    agent = weather("Call 13800138000, password: hunter2.")
    run = await agent.run("邮箱ann@example.com")
    await TraceExport(agent.store, out, content="redacted").run(run.id)
    shown = json.dumps([dict(span.attributes) for span in out.get_finished_spans()], ensure_ascii=False)
    assert "[PHONE_REDACTED]" in shown
    assert "邮箱[EMAIL_REDACTED]" in shown
    assert not any(data in shown for data in ("13800138000", "ann@example.com", "hunter2"))


def test_a_wrong_content_is_refused():
    """The message names the choices."""
    with pytest.raises(MisuseError, match="redacted"):
        Telemetry(content="some")


@pytest.mark.parametrize("target", ["localhost:4318", 4318])
def test_a_wrong_address_is_refused(target):
    """At once, and not as lost spans."""
    with pytest.raises(MisuseError, match="is not the address of a server of OTLP over HTTP"):
        Telemetry(target)
