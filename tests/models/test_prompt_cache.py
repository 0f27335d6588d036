"""What requests cost with the provider's prompt cache, by Anthropic's published rules, and the keys of other caches."""

import json

import attrs
import pytest

from agentfsm import Agent, Limits, Settings, TextPart, Usage, UserMessage, tool
from agentfsm.models import Anthropic, OpenAIChat, OpenAIResponses, Price
from agentfsm.ports import Clock, FinishReason, Model, ProposedCall, Reply, Request
from agentfsm.stores import MemoryStore
from tests.support.anthropic_cache import PromptCache

OPUS = Price(
    input_usd_per_million=5, output_usd_per_million=25, cached_usd_per_million=0.5, cache_write_usd_per_million=6.25
)
MANUAL = "Follow the manual, paragraph by paragraph. " * 200
RECORD = "A line of the record, with a number and a name. " * 40


class SetClock(Clock):
    at = 1_800_000_000.0

    def now(self):
        return self.at

    monotonic = now


class Billed(Model):
    """Asks for a call in each of `turns` turns, and bills each request by the rules of the cache."""

    name = "claude-opus-5"

    def __init__(self, turns, cache=True, pays=()):
        self.adapter = Anthropic("claude-opus-5", api_key="none", cache=cache)
        self.turns, self.pays, self.clock, self.account = turns, pays, SetClock(), PromptCache()
        self.bodies = []

    async def reply(self, request, emit=None):
        self.clock.at += 10
        encodings = self.adapter._make_encoding_cache()
        self.bodies.append(json.loads(self.adapter._encode_request(request, encodings, streamed=False)))
        usage = self.account.bill(self.bodies[-1], self.clock.at)
        turn = sum(message["role"] == "assistant" for message in self.bodies[-1]["messages"])
        if turn >= self.turns:
            return Reply(text="done", usage=usage)
        name = "pay" if turn in self.pays else "look"
        calls = (ProposedCall(id=f"c{turn}", name=name, arguments=f'{{"number": {turn}}}'),)
        return Reply(calls=calls, finish_reason=FinishReason.TOOL_CALLS, usage=usage)


@tool(read_only=True)
async def look(number: int) -> str:
    """Look at a record."""
    return f"{number}: {RECORD}"


@tool(requires_approval=True)
async def pay(number: int) -> str:
    """Pay a bill."""
    return f"{number}: {RECORD}"


async def spent(model, *prompts, tools=(look, pay), waits_s=600, **start):
    """The usage and the US dollars of runs that follow one after the other, with pauses for approvals."""
    usage, dollars = Usage(), 0.0
    store = MemoryStore(clock=model.clock)
    limits = Limits(turns=50, tokens=10_000_000)
    async with Agent(
        model, instructions=MANUAL, tools=list(tools), store=store, clock=model.clock, limits=limits
    ) as agent:
        for prompt in prompts:
            run = await agent.run(prompt, **start)
            while run.pending:
                model.clock.at += waits_s
                await agent.approve(run.id, run.pending[0].call_id)
                run = await agent.resume(run.id)
            assert run.output == "done"
            usage += run.usage
            model.clock.at += waits_s if start.get("session") else 0
            for event in await agent.history(run.id):
                if (part := getattr(event, "usage", None)) is not None:
                    dollars += OPUS.cost_usd(part)
    return usage, dollars


async def test_a_run_of_one_turn_costs_what_it_costs_without_a_cache():
    """A prompt that no request will follow is not written. The instructions are, for the runs of the same agent."""
    long = "Sort this letter: " + RECORD * 20
    _, dollars_plain = await spent(Billed(0, cache=False), long, tools=())
    model = Billed(0)
    _, dollars = await spent(model, long, long, long, tools=())
    assert "cache_control" not in json.dumps([body["messages"] for body in model.bodies])
    assert dollars < 3 * dollars_plain
    talk = Billed(0)
    await spent(talk, long, tools=(), session="s")
    assert "cache_control" in json.dumps(talk.bodies[-1]["messages"])  # the user will go on


async def test_a_run_that_has_waited_is_kept_for_an_hour():
    """By a few requests after the first one, each of which keeps all before it."""
    model = Billed(19, pays=(5,))
    usage, _ = await spent(model, "go")
    kinds = [{mark.get("ttl", "5m") for mark in marks_of(body)} for body in model.bodies]
    assert [place for place, kind in enumerate(kinds) if kind == {"1h"}] == [7, 8, 10, 14]
    assert kinds.count({"5m"}) == 16
    assert 0 < usage.cache_write_1h_tokens < 0.25 * usage.cache_write_tokens
    always = Billed(3, cache="1h")
    usage, _ = await spent(always, "go")
    assert usage.cache_write_1h_tokens == usage.cache_write_tokens > 0


async def test_what_twenty_turns_cost():
    """A third of the price without a cache. Three long waits cost less than they did, and a single one a bit more."""
    plain, dollars_plain = await spent(Billed(19, cache=False), "go")
    dollars = {}
    for waits, pays in {0: (), 1: (5,), 3: (5, 10, 15)}.items():
        for cache in (True, "5m"):
            usage, dollars[waits, cache] = await spent(Billed(19, cache=cache, pays=pays), "go")
            assert abs(usage.input_tokens - plain.input_tokens) < 0.01 * plain.input_tokens
    assert dollars[0, True] == dollars[0, "5m"] < 0.34 * dollars_plain
    assert dollars[1, True] < 1.05 * dollars[1, "5m"]
    assert dollars[3, True] < 0.8 * dollars[3, "5m"]


async def test_a_session_whose_user_pauses_keeps_its_beginning():
    """From the second pause on, the next run reads what the last one has written."""
    model = Billed(-1)
    store = MemoryStore(clock=model.clock)
    async with Agent(model, instructions=MANUAL, tools=[look], store=store, clock=model.clock) as agent:
        for _ in range(3):
            model.turns += 2
            await agent.run("Look.", session="s")
            model.clock.at += 600
        model.bodies.clear()
        model.turns += 2
        run = await agent.run("Look.", session="s")
    assert [{mark.get("ttl", "5m") for mark in marks_of(body)} for body in model.bodies] == [{"5m"}, {"1h"}]
    assert run.usage.cached_tokens > 0.9 * run.usage.input_tokens


def marks_of(body):
    blocks = [*body["tools"], *body["system"], *[block for each in body["messages"] for block in each["content"]]]
    return [block["cache_control"] for block in blocks if "cache_control" in block]


class Recorder(Model):
    """Answers at once, and keeps the requests."""

    name = "recorder"

    def __init__(self):
        self.requests = []

    async def reply(self, request, emit=None):
        self.requests.append(request)
        return Reply(text="done")


async def test_runs_of_an_agent_share_a_key_that_tenants_do_not():
    """It is made of the tools and the instructions, and shows nothing of the tenant."""
    model = Recorder()
    async with Agent(model, instructions="Be brief.", tools=[look]) as agent:
        for tenant in (None, "north", "south", "north", None):
            await agent.run("go", tenant=tenant)
        await agent.with_(instructions="Be long.").run("go")
        await agent.with_(tools=[look, pay]).run("go")
    keys = [request.cache_key for request in model.requests]
    assert (keys[0], keys[1]) == (keys[4], keys[3])
    assert len(set(keys)) == 5
    assert all("north" not in key and len(key) <= 64 for key in keys)


@pytest.mark.parametrize(
    ("kind", "base_url", "takes_key"),
    [
        (OpenAIChat, None, True),
        (OpenAIResponses, None, True),
        (OpenAIChat, "https://east.openai.azure.com/openai/v1", True),
        (OpenAIChat, "https://east.openai.azure.com/openai/deployments/m?api-version=2024-10-21", False),
        (OpenAIChat, "https://api.mistral.ai/v1", True),
        (OpenAIChat, "https://api.fireworks.ai/inference/v1", True),
        (OpenAIChat, "https://api.x.ai/v1", False),
        (OpenAIResponses, "https://api.x.ai/v1", True),
        (OpenAIChat, "http://localhost:8000/v1", False),
    ],
)
def test_the_key_is_sent_to_servers_that_document_it(kind, base_url, takes_key, monkeypatch):
    """Others may refuse a field that they do not know. A key of one's own takes its place, beside other options."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    model = kind("m", base_url=base_url, api_key="none")
    request = Request(instructions="", messages=(UserMessage(parts=(TextPart(text="go"),)),), cache_key="ab12-cd34")
    assert sent(model, request).get("prompt_cache_key") == ("ab12-cd34" if takes_key else None)
    own = {"prompt_cache_key": "mine", "prompt_cache_retention": "24h"}
    assert sent(model, attrs.evolve(request, settings=Settings(extra_body=own))).items() >= own.items()


def sent(model, request):
    return json.loads(model._encode_request(request, model._make_encoding_cache(), streamed=False))
