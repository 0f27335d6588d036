"""Traces that on-call reads: refused requests, failures of every kind, facts of requests, bounds, samples and links."""

import json

import anyio
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, exception_attributes, server_attributes

from agentfsm import Agent, Limits, MisuseError, ModelError, Settings, tool
from agentfsm.core import events as e
from agentfsm.core.header import Header
from agentfsm.core.messages import AssistantMessage, TextPart, ToolCall
from agentfsm.guards import Guard, refuse
from agentfsm.models import Fallback, OpenAIChat
from agentfsm.reflection import Action, Reflector, Score, Verdict
from agentfsm.telemetry import Telemetry, attribute_names, trace_of
from agentfsm.telemetry.request_facts import describe_model
from agentfsm.telemetry.spans import MAX_ATTRIBUTE_BYTES
from agentfsm.telemetry.trace_export import TraceExport
from agentfsm.testing import FunctionModel, LocalServer, ScriptedModel, WireReply, call, say
from tests.support.otlp_receiver import OTLPReceiver

pytestmark = pytest.mark.anyio
INSTRUCTIONS = "You help customers of the shop."


@tool(read_only=True)
async def find_stock(item: str) -> str:
    """Look up the stock."""
    raise LookupError(f"no shelf is named {item}")


async def tell_story(telemetry):
    """Return the failed run, whose trace was sent, and the fork that succeeds."""
    replies = [
        WireReply(status=503, error="overloaded"),
        WireReply(say("", call("finder", query="blue shoes"))),
        WireReply(say("", call("find_stock", item="blue"))),
        WireReply("They are not in stock."),
        WireReply(status=400, error="unknown parameter 'tier'"),
        WireReply("Blue shoes are sold out; they come back on Monday."),
    ]
    with LocalServer(replies) as server:

        def model():
            return OpenAIChat("gpt-4o", base_url=server.base_url, api_key="k")

        finder = Agent(model(), tools=[find_stock], name="finder", watch=[telemetry])
        shop = Agent(
            model(),
            tools=[finder.as_tool(description="Look for an item in all shops.")],
            instructions=INSTRUCTIONS,
            name="shop",
            version="2.3.1",
            settings=Settings(temperature=0.3, max_tokens=500),
            limits=Limits(retry_wait_s=0.001),
            watch=[telemetry],
        )
        failed = await shop.run("Do you have blue shoes?", session="s-1", id="order-17")
        fork = await shop.fork(failed.id, at=failed.version - 1, id="order-17-again")
        done = await shop.finish(fork)
        await finder.aclose()
        await shop.aclose()
    return failed, done


def to_json(spans):
    """Return received spans as nested JSON: what failed, and the links, by the names of the spans."""
    names = {span.span_id: span.name for span in spans}

    def describe(span):
        attributes = {each.key: each.value.string_value for each in span.attributes}
        shown = {"name": span.name, "status": {0: "UNSET", 1: "OK", 2: "ERROR"}[span.status.code]}
        if "error.type" in attributes:
            shown["error"] = attributes["error.type"]
        for event in span.events:
            told = {each.key: each.value.string_value for each in event.attributes}
            shown[event.name] = told["exception.type"]
        if span.links:
            shown["links"] = [names[each.span_id] for each in span.links]
        below = [describe(each) for each in spans if each.parent_span_id == span.span_id]
        return shown | ({"spans": below} if below else {})

    return [describe(span) for span in spans if not span.parent_span_id]


async def test_a_failed_retried_and_forked_run_with_a_sub_agent():
    """As a collector receives it: each failure is an ERROR with its exception where it was, and the fork has a link."""
    with OTLPReceiver() as server:
        await tell_story(Telemetry(server.url, content="full"))
        told = to_json(server.spans)
    unavailable = "agentfsm.core.errors.ModelUnavailableError"
    chat = {"name": "chat gpt-4o", "status": "OK"}
    assert told == [
        {
            "name": "invoke_agent shop",
            "status": "ERROR",
            "error": "model_error",
            "exception": "model_error",
            "spans": [
                {"name": "chat gpt-4o", "status": "ERROR", "error": "503", "exception": unavailable},
                chat,
                {
                    "name": "execute_tool finder",
                    "status": "OK",
                    "spans": [
                        {
                            "name": "invoke_agent finder",
                            "status": "OK",
                            "spans": [
                                chat,
                                {
                                    "name": "execute_tool find_stock",
                                    "status": "ERROR",
                                    "error": "tool_error",
                                    "exception": "tool_error",
                                },
                                chat,
                            ],
                        }
                    ],
                },
                {
                    "name": "chat gpt-4o",
                    "status": "ERROR",
                    "error": "bad_request",
                    "exception": "agentfsm.core.errors.ModelError",
                },
            ],
        },
        {"name": "invoke_agent shop", "status": "OK", "links": ["invoke_agent shop"], "spans": [chat]},
    ]


async def test_a_request_has_its_facts():
    """Provider, address, settings and reply; instructions and tools with content, and no text without."""
    for content in ("full", "none"):
        out = InMemorySpanExporter()
        failed, _ = await tell_story(Telemetry(out, content=content))
        _refused, chosen, *_ = [span for span in out.get_finished_spans() if span.name == "chat gpt-4o"]
        found = dict(chosen.attributes)
        assert found["gen_ai.provider.name"] == "openai"
        assert found["server.address"] == "127.0.0.1"
        assert str(found["server.port"]) in failed.stop_message
        assert (found["gen_ai.request.temperature"], found["gen_ai.request.max_tokens"]) == (0.3, 500)
        assert found["gen_ai.response.finish_reasons"] == ("tool_calls",)
        assert found["gen_ai.response.id"] == "chatcmpl-2"
        assert found["gen_ai.conversation.id"] == "s-1"
        shown = repr([(dict(s.attributes), s.events, s.status) for s in out.get_finished_spans()])
        if content == "none":
            assert not any(text in shown for text in (INSTRUCTIONS, "blue", "shelf", "unknown parameter"))
            continue
        assert json.loads(found["gen_ai.system_instructions"]) == [{"type": "text", "content": INSTRUCTIONS}]
        [definition] = json.loads(found["gen_ai.tool.definitions"])
        assert (definition["type"], definition["name"]) == ("function", "finder")


def test_the_names_are_those_of_the_conventions():
    """Each name in a namespace of OpenTelemetry is in its registry, as its package has it, and not a removed one."""
    registry = set()
    for module in (gen_ai_attributes, error_attributes, exception_attributes, server_attributes):
        registry |= {name for name in vars(module).values() if isinstance(name, str)}
    ours = [name for name in vars(attribute_names).values() if isinstance(name, str) and "." in name]
    foreign = ("agentfsm.", "user.id", "gen_ai.evaluation.result")  # the last is an event
    used = [name for name in ours if name.startswith(("gen_ai.", "server.", "error.", "exception."))]
    assert {name for name in used if not name.startswith(foreign)} <= registry
    removed = {"gen_ai.system", "gen_ai.prompt", "gen_ai.completion", "gen_ai.usage.prompt_tokens"}
    assert not removed & set(used)
    assert all(
        name.startswith((*foreign, "gen_ai.", "server.", "error.", "exception.")) for name in ours if "/" not in name
    )


# Failures, from the journal.


async def errors_of(agent, run, content="none"):
    """Return the kinds of the failures of a run's spans, by the names of the spans."""
    stored = await agent.store.read(run.id)
    spans = trace_of(stored.header, stored.events, content=content)
    for span in spans:
        assert (span.error is None) == ("error.type" not in span.attributes)
        assert (span.error is None) == all(event.name != "exception" for event in span.events)
    return [(span.name, span.attributes["error.type"]) for span in spans if span.error is not None]


@tool(requires_approval=True)
async def pay() -> str:
    """Pay."""
    return "paid"


@tool
async def hang() -> str:
    """Never return."""
    await anyio.sleep_forever()


@tool(timeout_s=0.01)
async def dawdle() -> str:
    """Return too late."""
    await anyio.sleep_forever()


async def fail_for_good(_request):
    raise ModelError("no", refusal="permission")


async def test_a_refused_request_has_a_span_also_from_the_journal():
    """Exactly one, whether it was billed or not; an earlier failure with the same text is not taken for it."""
    agent = Agent(FunctionModel(fail_for_good))
    run = await agent.run("go")
    assert await errors_of(agent, run) == [("chat function", "model_error"), ("invoke_agent agent", "model_error")]
    stored = await agent.store.read(run.id)
    chat = trace_of(stored.header, stored.events, content="full")[-2]
    assert (chat.error, chat.attributes["agentfsm.turn"]) == ("no", 1)
    assert "gen_ai.response.model" not in chat.attributes


async def test_failures_of_calls_are_errors():
    """A guard's refusal, a timeout, a person's rejection, and a call that the end of the run cut off."""
    turns = say("", call("pay"), call("dawdle")), "done"
    guarded = Agent(ScriptedModel(*turns), tools=[pay, dawdle], guards=[Guard(refuse("pay"))])
    run = await guarded.run("go")
    assert sorted(await errors_of(guarded, run)) == [
        ("execute_tool dawdle", "timeout"),
        ("execute_tool pay", "not_permitted"),
    ]
    agent = Agent(ScriptedModel(say("", call("pay")), "done"), tools=[pay])
    run = await agent.run("go")
    await agent.reject(run.id, "t1.0")
    run = await agent.resume(run.id)
    assert await errors_of(agent, run) == [("execute_tool pay", "rejected")]
    cut = Agent(ScriptedModel(say("", call("hang"))), tools=[hang], limits=Limits(seconds=0.05))
    run = await cut.run("go")
    assert await errors_of(cut, run) == [("execute_tool hang", "cut_off"), ("invoke_agent agent", "timeout")]


async def test_a_request_that_the_end_of_the_run_cuts_off_is_an_error():
    """Its time is up while it waits for the model."""

    async def never(_request):
        await anyio.sleep_forever()

    agent = Agent(FunctionModel(never), limits=Limits(seconds=0.05))
    run = await agent.run("go")
    assert await errors_of(agent, run) == [("chat function", "cut_off"), ("invoke_agent agent", "timeout")]


class Kind(Reflector):
    """A judge that gives one score."""

    async def judge(self, _run, _ask):
        scores = (Score(criterion="tone", score=4, reason="kind"),)
        return Verdict(action=Action.ACCEPT, passed=True, scores=scores, note="well done")


async def test_a_judge_that_fails_and_one_that_judges():
    """The first is an error; the verdict and the scores of the second are results of evaluations."""
    agent = Agent(ScriptedModel("draft"), reflector=Reflector(model=FunctionModel(fail_for_good)))
    run = await agent.run("go")
    assert ("judged function", "not_judged") in await errors_of(agent, run)
    agent = Agent(ScriptedModel("draft"), reflector=Kind())
    run = await agent.run("go")
    stored = await agent.store.read(run.id)
    [judged] = [span for span in trace_of(stored.header, stored.events) if span.name.startswith("judged")]
    told = [(event.name, *event.attributes.values()) for event in judged.events]
    name = "gen_ai.evaluation.result"
    assert told == [(name, "verdict", "pass"), (name, "tone", 4.0)]


def test_lost_calls_dropped_plans_and_faults_of_the_memory_are_errors():
    """Their reasons are content, and stay here without it."""
    asked = AssistantMessage(text="", calls=(ToolCall(id="t1.0", name="pay", arguments="{}"),))
    events = (
        e.Observed(),
        e.Recalled(query="q", fault="secret disk"),
        e.PlanDropped(reason="secret plan"),
        e.ToolsChosen(message=asked),
        e.ToolStarted(call_id="t1.0"),
        e.ToolLost(call_id="t1.0", reason="secret worker"),
    )
    header = Header(id="r", prompt=(TextPart(text="go"),), created_at=0.0)
    spans = trace_of(header, events, content="full")
    assert [span.error for span in spans if span.error] == ["secret disk", "secret plan", "secret worker"]
    assert spans[-1].attributes["gen_ai.tool.call.id"] == "t1.0"
    spans = trace_of(header, events)
    assert [span.error for span in spans if span.error] == ["memory_fault", "plan_dropped", "tool_lost"]
    assert "secret" not in repr(spans)


async def test_ratings_are_results_of_evaluations():
    """With their comment only as content; exported with the run, and by a follower when they come later."""
    agent = Agent(ScriptedModel("done"))
    run = await agent.run("go")
    out = InMemorySpanExporter()
    export = TraceExport(agent.store, out)
    assert [each async for each in export.follow(until_idle=True)] == [run.id]
    await agent.runs.feedback(run.id, rating=2, comment="rude", by="ann")
    out.clear()
    assert [each async for each in export.follow(until_idle=True)] == [run.id]
    [span] = out.get_finished_spans()
    [event] = span.events
    assert event.name == "gen_ai.evaluation.result"
    assert dict(event.attributes) == {"gen_ai.evaluation.name": "rating", "gen_ai.evaluation.score.value": 2.0}


# Bounds, samples, links.


async def test_large_attributes_are_cut_and_say_so():
    """At a character, within 64 KiB; of messages the newest stay, and are valid JSON."""
    agent = Agent(ScriptedModel("好" * 40_000, "short", "last"))
    for prompt in ("€" * 30_000, "two", "three"):
        await agent.run(prompt, session="s")
    out = InMemorySpanExporter()
    export = TraceExport(agent.store, out, content="full")
    await export.runs()
    sizes = [len(v.encode()) for span in out.get_finished_spans() for v in span.attributes.values() if type(v) is str]
    assert 60_000 < max(sizes) <= MAX_ATTRIBUTE_BYTES
    assert any(
        v.endswith("... [cut]") for s in out.get_finished_spans() for v in s.attributes.values() if type(v) is str
    )
    newest = next(s for s in out.get_finished_spans() if s.name == "chat scripted")
    messages = json.loads(newest.attributes["gen_ai.input.messages"])
    assert messages[0]["parts"][0]["content"].endswith("[cut]")
    assert messages[-1]["parts"][0]["content"] == "three"


async def test_traces_are_sampled_by_their_ids():
    """A run and those below it alike, as OpenTelemetry chooses; a caller's decision comes first, both ways."""
    seen = InMemorySpanExporter()
    telemetry = Telemetry(seen, sample=0.5)
    finder = Agent(FunctionModel(lambda _r: "found"), name="finder", watch=[telemetry])
    boss = Agent(
        FunctionModel(lambda asked: "done" if len(asked.messages) > 1 else say("", call("finder", query="x"))),
        tools=[finder.as_tool()],
        watch=[telemetry],
    )
    runs = [await boss.run("go", id=f"r{number}") for number in range(8)]
    caller = "00-{}-b7ad6b7169203331-{}"
    kept = await boss.run("go", id="kept", traceparent=caller.format("f" * 32, "01"))
    gone = await boss.run("go", id="gone", traceparent=caller.format("0" * 31 + "1", "00"))
    for outlet in boss.watch:
        outlet.flush()
    found = {}
    for span in seen.get_finished_spans():
        found.setdefault(span.attributes["agentfsm.run.id"], set()).add(span.name)
    bound = TraceIdRatioBased(0.5).bound
    for run in (*runs, kept):
        stored = await boss.store.read(run.id)
        trace_id = int(trace_of(stored.header, stored.events)[-1].context.trace_id, 16)
        is_kept = run is kept or trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < bound
        assert (run.id in found, f"{run.id}.t1.0" in found) == (is_kept, is_kept)
    assert 0 < len(found) < 18
    assert gone.id not in found
    with pytest.raises(MisuseError, match="sample"):
        Telemetry(seen, sample=2)


async def test_a_run_that_goes_on_after_another_links_to_it():
    """Live and from the store, also into the trace of another caller."""
    out, later = InMemorySpanExporter(), InMemorySpanExporter()
    agent = Agent(ScriptedModel("one", "two"), watch=[Telemetry(out)])
    first = await agent.run("go", session="s", traceparent=f"00-{'a' * 32}-b7ad6b7169203331-01")
    second = await agent.run("on", session="s")
    await TraceExport(agent.store, later).run(second.id)
    await agent.aclose()
    wholes = [span for span in out.get_finished_spans() if span.name == "invoke_agent agent"]
    for span in (wholes[1], later.get_finished_spans()[-1]):
        assert [link.context.span_id for link in span.links] == [wholes[0].context.span_id]
        assert f"{span.links[0].context.trace_id:032x}" == "a" * 32
    assert first.id == dict(wholes[1].attributes)["agentfsm.run.after"]


def test_a_wrapper_of_models_names_the_one_that_replied():
    """And nothing while it is unknown which of several providers was asked."""
    model = Fallback(
        OpenAIChat("a", base_url="https://api.groq.com/openai/v1", api_key="k"),
        OpenAIChat("b", base_url="http://127.0.0.1:8080/v1", api_key="k"),
    )
    told = {"gen_ai.provider.name": "groq", "server.address": "api.groq.com", "server.port": 443}
    assert describe_model(model, "a") == told
    assert describe_model(model, "b")["server.port"] == 8080
    assert describe_model(model, "") == {}
    assert describe_model(ScriptedModel("x"), "") == {"gen_ai.provider.name": "ScriptedModel"}
