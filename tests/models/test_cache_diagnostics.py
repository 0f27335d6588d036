"""Why a provider's prompt cache was missed, as the provider says: asked with each turn, and kept in the journal."""

from urllib.parse import urlsplit

import anyio
import attrs
import pytest

from agentfsm import Agent, Limits, MisuseError, ModelError, Purpose, Settings, StopReason, Usage, tool
from agentfsm.cli.render.text import format_run
from agentfsm.core.usage import CacheReport
from agentfsm.models import Anthropic, OpenAIChat, OpenAIResponses
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.telemetry import read_costs
from agentfsm.telemetry.costs import build_cost_document
from agentfsm.testing import FunctionModel, LocalServer, WireReply, call, say
from tests.support.model_wires import KEY, REQUEST, both_ways, forget_keys

READ = Usage(input_tokens=12_000, cached_tokens=11_000, output_tokens=1)
ANEW = Usage(input_tokens=12_500, cached_tokens=2_000, output_tokens=1)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    forget_keys(monkeypatch, tmp_path)


@attrs.frozen
class Vendor:
    """A provider, a model that it diagnoses, and its words."""

    kind: type
    model: str
    provider: str
    prefix: str

    def __str__(self):
        return self.provider

    def open(self, server, **options):
        return self.kind(self.model, base_url=server.base_url, **{"api_key": KEY, "cache_diagnostics": True, **options})

    def told(self, reason, tokens):
        """The fields of a reply whose request differs from the one before."""
        if self.kind is Anthropic:
            return {"diagnostics": {"cache_miss_reason": {"type": reason, "cache_missed_input_tokens": tokens}}}
        return {"prompt_cache_diagnostics": {"type": "cache_miss", "reason": reason, "cache_missed_tokens": tokens}}

    def asked(self, body):
        """The id that a request names for the comparison; "" for none yet, None if it does not ask."""
        if self.kind is Anthropic:
            return body["diagnostics"]["previous_message_id"] or "" if "diagnostics" in body else None
        return body.get("prompt_cache_options", {}).get("comparison_response_id", "")


ANTHROPIC = Vendor(Anthropic, "claude-opus-5", "anthropic", "msg_")
OPENAI = Vendor(OpenAIResponses, "gpt-6-astra", "openai-responses", "resp_")
vendors = pytest.mark.parametrize("vendor", [ANTHROPIC, OPENAI], ids=str)


@pytest.fixture
def official(monkeypatch):
    """Take a local server for the provider's own service."""

    def take(server):
        for kind in (Anthropic, OpenAIResponses):
            monkeypatch.setattr(kind, "official_host", urlsplit(server.base_url).netloc)

    return take


@tool(read_only=True)
async def look(number: int) -> str:
    """Look."""
    return "words " * 20_000  # cut, which brings another tool


@tool(requires_approval=True)
async def pay(number: int) -> str:
    """Pay."""
    return f"paid {number}"


@vendors
@both_ways
async def test_each_turn_names_the_reply_before_and_shows_what_it_is_told(vendor, streamed, official, caplog):
    """In the journal, in `show`, in `costs` and in the log, beside the cause that is found here."""
    script = [
        WireReply(say("", call("look", number=0), usage=READ)),
        WireReply(say("", call("look", number=1), usage=ANEW), fields=vendor.told("tools_changed", 9_000)),
        WireReply(say("done", usage=READ)),
    ]
    store = MemoryStore()
    with LocalServer(script) as server:
        official(server)
        settings, limits = Settings(stream=streamed), Limits(tokens=10**8)
        async with Agent(vendor.open(server), tools=[look], store=store, settings=settings, limits=limits) as agent:
            run = await agent.run("go")
            events = await agent.history(run.id)
            report = await read_costs(store)
    ids = [f"{vendor.prefix}{n}" for n in (1, 2, 3)]
    assert [vendor.asked(received.body) for received in server.requests] == ["", *ids[:2]]
    first, second, third = [event.message.cache_report for event in events if hasattr(event, "message")]
    assert first == CacheReport(provider=vendor.provider, response_id=ids[0])
    assert second == CacheReport(
        provider=vendor.provider, response_id=ids[1], reason="tools_changed", missed_tokens=9_000
    )
    assert third == CacheReport(provider=vendor.provider, response_id=ids[2])
    assert "settings were changed; the provider says tools_changed" in format_run(run, events)
    assert (report.lost_tokens, report.lost_as_reported) == (10_000, {"tools_changed": 10_000})
    assert build_cost_document(report, (), "UTC")["lost_as_reported"] == {"tools_changed": 10_000}
    [logged] = [record.getMessage() for record in caplog.records if "prompt_cache_lost" in record.getMessage()]
    assert "changed=tools tokens=10000 reported=tools_changed" in logged


@vendors
async def test_the_reply_before_is_found_after_a_crash_a_failure_and_in_the_next_run(vendor, official, tmp_path):
    """It is the newest one in the journal: not one whose run died before it was recorded, nor a failed request."""
    script = [
        say("", call("pay", number=1)),
        say("lost"),
        WireReply(status=500),
        say("paid"),
        say("and again"),
    ]

    class Dying(vendor.kind):
        """Dies with a reply in its hands."""

        async def reply(self, request, emit=None):
            reply = await super().reply(request, emit)
            if reply.text == "lost":
                scope.cancel()
                await anyio.lowlevel.checkpoint()
            return reply

    pytest.importorskip("apsw")
    with LocalServer(script) as server, anyio.CancelScope() as scope:
        official(server)

        def restarted(kind=vendor.kind):
            model = attrs.evolve(vendor, kind=kind).open(server)
            store, limits = SQLiteStore(tmp_path / "runs.db"), Limits(model_retries=0)
            return Agent(model, name="a", tools=[pay], store=store, limits=limits)

        async with restarted(Dying) as agent:
            waiting = await agent.run("go", id="r", session="s")
            await agent.approve("r", waiting.pending[0].call_id)
            await agent.resume("r")
    assert scope.cancelled_caught
    with LocalServer(script[2:]) as server:
        official(server)
        async with restarted() as agent:
            assert (await agent.resume("r")).output == "paid"
            assert (await agent.run("more", session="s")).output == "and again"
    # The server counts its replies anew: the last one was the second of its own.
    asked = [vendor.asked(received.body) for received in server.requests]
    assert asked == [f"{vendor.prefix}1", f"{vendor.prefix}1", f"{vendor.prefix}2"]


@vendors
async def test_a_reply_that_a_compaction_has_taken_out_is_named_as_well(vendor, official):
    """The request begins otherwise then, and the provider is to say so."""
    with LocalServer([say("first"), say("second")]) as server:
        official(server)
        async with Agent(vendor.open(server)) as agent:
            run = await agent.run("go")
        await vendor.open(server).reply(attrs.evolve(REQUEST, run=run))
    assert vendor.asked(server.requests[-1].body) == f"{vendor.prefix}1"


@vendors
@pytest.mark.parametrize("case", ["a gateway", "switched off", "a side request"])
@both_ways
async def test_nobody_else_is_asked(vendor, case, streamed, official):
    """Servers that only implement the API refuse unknown fields, or keep what they should not."""
    fields = vendor.told("tools_changed", 9)
    with LocalServer([WireReply("done", fields=fields)] * 2) as server:
        if case != "a gateway":
            official(server)
        model = vendor.open(server, cache_diagnostics=case != "switched off")
        purpose = Purpose.SUMMARY if case == "a side request" else Purpose.TURN
        history = (*REQUEST.messages, *((await Agent(model).run("go")).messages))
        request = attrs.evolve(REQUEST, messages=history, purpose=purpose)
        reply = await model.reply(request, (lambda _: None) if streamed else None)
        await model.aclose()
    body = server.requests[-1].body
    assert not {"diagnostics", "prompt_cache_options"} & body.keys()
    assert (reply.cache_report is None) == (case != "a side request")


async def test_a_model_without_the_fields_is_not_asked(official):
    """OpenAI refuses them for models before GPT-5.6, and chat completions have none."""
    with LocalServer([say("done")] * 4) as server:
        official(server)
        for name in ("gpt-5.5", "gpt-5.6-codex"):
            async with Agent(attrs.evolve(OPENAI, model=name).open(server)) as agent:
                await agent.run("go", session="s")
                await agent.run("on", session="s")
    assert [OPENAI.asked(received.body) for received in server.requests] == ["", "", "", "resp_3"]
    with pytest.raises(MisuseError, match="use OpenAIResponses"):
        OpenAIChat("gpt-6-astra", api_key=KEY, cache_diagnostics=True)
    with pytest.raises(MisuseError, match="cache_diagnostics"):
        Anthropic("claude-opus-5", api_key=KEY, cache_diagnostics="yes")


async def test_options_of_the_cache_are_kept(official):
    """Those of `extra_body` are sent beside the comparison."""
    settings = Settings(extra_body={"prompt_cache_options": {"ttl": "30m"}})
    with LocalServer([say("one"), say("two")]) as server:
        official(server)
        async with Agent(OPENAI.open(server), settings=settings) as agent:
            await agent.run("go", session="s")
            await agent.run("on", session="s")
    assert [received.body["prompt_cache_options"] for received in server.requests] == [
        {"ttl": "30m"},
        {"comparison_response_id": "resp_1", "ttl": "30m"},
    ]


@vendors
async def test_a_refused_request_is_not_sent_again(vendor, official):
    """The provider's reason ends the run; and a reply in which the model refuses is compared like any other."""
    error = {"message": "diagnostics: Extra inputs are not permitted", "param": "diagnostics"}
    with LocalServer([WireReply(status=400, error=error), WireReply(refusal="No."), say("done")]) as server:
        official(server)
        async with Agent(vendor.open(server)) as agent:
            run = await agent.run("go")
            assert (run.stop_reason, len(server.requests)) == (StopReason.MODEL_ERROR, 1)
            assert "not permitted" in run.stop_message
            await agent.run("go", session="s")
            await agent.run("on", session="s")
    assert vendor.asked(server.requests[-1].body) == f"{vendor.prefix}2"


WORDS = {
    "no difference": (ANTHROPIC, {"diagnostics": None}, ""),
    "still comparing": (ANTHROPIC, {"diagnostics": {"cache_miss_reason": None}}, "pending"),
    "expired": (
        ANTHROPIC,
        {"diagnostics": {"cache_miss_reason": {"type": "previous_message_not_found"}}},
        "previous_message_not_found",
    ),
    "a hit": (OPENAI, {"prompt_cache_diagnostics": {"type": "cache_hit"}}, ""),
    "not ready": (OPENAI, {"prompt_cache_diagnostics": {"type": "unavailable"}}, "unavailable"),
    "not asked": (OPENAI, {"prompt_cache_diagnostics": None}, ""),
}


@pytest.mark.parametrize("case", WORDS)
@both_ways
async def test_what_is_no_cause_is_kept_in_the_words_of_the_provider(case, streamed, official):
    """A provider that does not know says so; no difference is no reason."""
    vendor, fields, reason = WORDS[case]
    with LocalServer([WireReply("done", fields=fields)]) as server:
        official(server)
        reply = await vendor.open(server).reply(REQUEST, (lambda _: None) if streamed else None)
    assert (reply.cache_report.reason, reply.cache_report.missed_tokens) == (reason, 0)
    assert not reply.cache_report.names_cause


@vendors
@pytest.mark.parametrize("told", [5, {"cache_miss_reason": 5, "type": 5}], ids=str)
@both_ways
async def test_a_malformed_report_does_not_fail_the_reply(vendor, told, streamed, official):
    """It is left out."""
    with LocalServer([WireReply("done", fields={"diagnostics": told, "prompt_cache_diagnostics": told})]) as server:
        official(server)
        reply = await vendor.open(server).reply(REQUEST, (lambda _: None) if streamed else None)
    assert (reply.text, reply.cache_report) == ("done", None)


async def test_a_model_of_ones_own_returns_a_report_or_none():
    """Anything else is a mistake of the model, and is named."""

    class Own(FunctionModel):
        async def reply(self, request, emit=None):
            return attrs.evolve(await super().reply(request, emit), cache_report="tools_changed")

    with pytest.raises((MisuseError, ModelError), match="give a CacheReport, or None"):
        await Agent(Own(lambda _: say("done"))).run("go")
