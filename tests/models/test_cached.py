"""`CachedModel`: the same request gets the same reply again, at no cost, and the journal says so."""

import attrs
import pytest

from agentfsm import Agent, MisuseError, Settings, StoreError, TextDelta, TextPart, Usage, UserMessage, tool
from agentfsm.cli.render.text import format_run
from agentfsm.core.messages import NativeReply
from agentfsm.models import CachedModel, Fallback, HostedContent, OpenAIChat, Router, Throttled, Tiered, WebSearch
from agentfsm.ports import Clock, FinishReason, OutputForm, Reply, Request, ToolDefinition
from agentfsm.reflection import Reflector
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say

SURE = Settings(temperature=0)
REQUEST = Request(
    instructions="Be brief.",
    messages=(UserMessage(parts=(TextPart(text="Hello"),)),),
    tools=(ToolDefinition(name="look", description="Look.", parameters={"type": "object"}),),
    settings=SURE,
)


class Numbered(FunctionModel):
    """Each reply says how many there were."""

    def __init__(self, name="numbered", **more):
        self.asked = 0

        def count(_):
            self.asked += 1
            return Reply(**{"text": f"reply {self.asked}", "usage": Usage(input_tokens=10, output_tokens=5), **more})

        super().__init__(count)
        self.name = name


@tool(read_only=True)
async def look(place: str) -> str:
    """Look."""
    return f"nothing in {place}"


async def test_a_second_run_costs_nothing_and_says_so(tmp_path):
    """Another process with the same file gets each reply of the run again, calls and answer."""
    script = [say("", call("look", place="the yard")), "Nothing there."]
    here, there = SQLiteStore(tmp_path / "replies.db"), SQLiteStore(tmp_path / "replies.db")
    first = Agent(CachedModel(ScriptedModel(*script), here), tools=[look], settings=SURE)
    second = Agent(CachedModel(ScriptedModel(), there), tools=[look], settings=SURE)
    paid, free = await first.run("Look around"), await second.run("Look around")
    assert (paid.output, paid.usage.tokens) == (free.output, 30)
    assert [record.arguments for record in free.calls] == [{"place": "the yard"}]
    assert free.usage == Usage(cached_replies=2)
    assert second.cost(free).usd == 0
    events = await second.history(free.id)
    assert [each.usage for each in events if hasattr(each, "request")] == [Usage(cached_replies=1)] * 2
    assert "2 hits of the reply cache" in format_run(free, events)
    await here.aclose()
    await there.aclose()


async def test_requests_beside_the_turns_come_from_the_cache_as_well():
    """The journal counts the judge's reply with the event of the judgement."""
    store = MemoryStore()
    judge = '{"evaluation": {"right": {"score": 5}}, "action": "accept"}'
    for script in (["Rome.", judge], []):
        agent = Agent(
            CachedModel(ScriptedModel(*script), store), reflector=Reflector(rubric={"right": "Is it?"}), settings=SURE
        )
        run = await agent.run("The capital of Italy?")
    assert run.usage == Usage(cached_replies=2)


@pytest.mark.parametrize(
    "change",
    [
        {"instructions": "Be long."},
        {"messages": (UserMessage(parts=(TextPart(text="Bye"),)),)},
        {"tools": ()},
        {"tools": (attrs.evolve(REQUEST.tools[0], description="Look well."),)},
        {"settings": Settings(temperature=0, max_tokens=9)},
        {"settings": Settings(temperature=0, extra_body={"top_k": 1})},
        {"output": OutputForm(name="answer", schema=None)},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_any_other_request_is_asked(change):
    """All that the provider is sent is part of the key; how long it may take and how it is delivered are not."""
    inner = Numbered()
    model = CachedModel(inner, MemoryStore())
    assert (await model.reply(REQUEST)).text == "reply 1"
    same = attrs.evolve(REQUEST, timeout_s=1, passing=1, settings=attrs.evolve(SURE, stream=True))
    assert (await model.reply(same)).text == "reply 1"
    assert (await model.reply(attrs.evolve(REQUEST, **change))).text == "reply 2"


async def test_models_do_not_share_replies():
    """Two models in one store have their own; in a `Fallback`, each keeps its replies, and no other's."""
    store = MemoryStore()
    for name in ("a", "b"):
        assert (await CachedModel(Numbered(name), store).reply(REQUEST)).usage.cached_replies == 0
    both = Fallback(*[CachedModel(Numbered(name), store) for name in ("a", "b")])
    assert [(await both.reply(REQUEST)).usage.cached_replies for _ in range(2)] == [1, 1]


async def test_the_query_of_an_address_is_part_of_the_model():
    """Two versions of an API at one address are two models, and a header is none."""
    store, url = MemoryStore(), "http://localhost:1/v1?api-version="

    class Server(OpenAIChat):
        async def reply(self, request, emit=None):
            return Reply(text=self.query)

    def ask(version, **more):
        return CachedModel(Server("m", api_key="k", base_url=url + version, **more), store).reply(REQUEST)

    assert [(await ask(version)).text for version in "12"] == ["api-version=1", "api-version=2"]
    assert (await ask("2", headers={"x-trace": "7"})).usage == Usage(cached_replies=1)


async def test_a_streamed_reply_is_streamed_again():
    """A reader sees the same text, and the content of the provider is kept for the next request."""
    store = MemoryStore()
    for inner in (ScriptedModel("It is Rome."), ScriptedModel()):
        agent = Agent(CachedModel(inner, store), settings=SURE)
        async with agent.stream("The capital of Italy?") as stream:
            text = [event.text async for event in stream if isinstance(event, TextDelta)]
        assert "".join(text) == "It is Rome."
    native = NativeReply(provider="p", content="[1]")
    model = CachedModel(Numbered(native=native, thinking="Hm."), store)
    first, again = await model.reply(REQUEST), await model.reply(REQUEST)
    assert again == attrs.evolve(first, usage=Usage(cached_replies=1))


@pytest.mark.parametrize("settings", [Settings(), Settings(temperature=0.5)], ids=["unset", "warm"])
async def test_settings_that_leave_the_model_free_are_refused(settings):
    """A cache would make one of many replies look like the only one, unless that is wanted."""
    request = attrs.evolve(REQUEST, settings=settings)
    with pytest.raises(MisuseError, match="any_settings=True"):
        await CachedModel(Numbered(), MemoryStore()).reply(request)
    model = CachedModel(Numbered(), MemoryStore(), any_settings=True)
    assert [(await model.reply(request)).text for _ in range(2)] == ["reply 1", "reply 1"]
    seeded = CachedModel(Numbered(), MemoryStore())
    assert [(await seeded.reply(attrs.evolve(request, settings=Settings(seed=7)))).text for _ in range(2)] == [
        "reply 1"
    ] * 2


@pytest.mark.parametrize(
    ("more", "request_"),
    [
        ({}, attrs.evolve(REQUEST, hosted_tools=(WebSearch(),))),
        ({"hosted": HostedContent(container="c")}, REQUEST),
        ({"unanswered": "Approve it."}, REQUEST),
        ({"finish_reason": FinishReason.LENGTH}, REQUEST),
        ({"finish_reason": FinishReason.REFUSAL}, REQUEST),
        ({"text": ""}, REQUEST),
        ({"text": "x" * 1_100_000}, REQUEST),
    ],
    ids=["hosted tools", "hosted", "unanswered", "cut off", "refusal", "empty", "huge"],
)
async def test_these_replies_are_never_kept(more, request_):
    """Effects at the provider, and replies that a new request may improve; a huge one has no room in a record."""
    inner = Numbered(**more)
    model = CachedModel(inner, MemoryStore())
    for _ in range(2):
        assert (await model.reply(request_)).usage.cached_replies == 0
    assert inner.asked == 2


class SetClock(Clock):
    """A clock that stands until it is set."""

    time = 1_000.0

    def now(self):
        return self.time

    def monotonic(self):
        return self.time


async def test_replies_expire_and_the_oldest_make_room():
    """The time of a reply is limited, and so is the number of replies."""
    clock = SetClock()
    store = MemoryStore(clock=clock)
    model = CachedModel(Numbered(), store, ttl_s=60, max_replies=2, clock=clock)

    def ask(text):
        return model.reply(attrs.evolve(REQUEST, instructions=text))

    for text in ("a", "b", "c"):
        await ask(text)
        clock.time += 1
    assert len(await store.list_records("reply_cache")) == 2
    assert (await ask("c")).text == "reply 3"
    assert (await ask("a")).text == "reply 4"
    clock.time += 60
    assert (await ask("a")).text == "reply 5"


async def test_a_large_cache_bounds_each_group():
    """Groups are told apart by the beginning of their keys, so that room is made without reading all replies."""
    store = MemoryStore()
    model = CachedModel(Numbered(), store, max_replies=512)
    for number in range(600):
        await model.reply(attrs.evolve(REQUEST, instructions=str(number)))
    kept = await store.list_records("reply_cache")
    assert 450 < len(kept) <= 512


class Broken(MemoryStore):
    """A store that is away."""

    async def read_record(self, kind, key):
        raise StoreError("away")

    async def write_record(self, kind, key, value, *, revision, expires_at=None):
        raise StoreError("away")


async def test_without_its_store_the_model_is_asked(caplog):
    """A cache that fails costs a request, and not a run."""
    model = CachedModel(Numbered(), Broken())
    assert [(await model.reply(REQUEST)).text for _ in range(2)] == ["reply 1", "reply 2"]
    assert "reply cache cannot be used" in caplog.text


async def test_a_record_in_another_form_is_replaced():
    """Another program may have written it."""
    store = MemoryStore()
    model = CachedModel(Numbered(), store)
    await model.reply(REQUEST)
    [record] = await store.list_records("reply_cache")
    await store.write_record("reply_cache", record.key, {"text": 7}, revision=record.revision)
    assert [(await model.reply(REQUEST)).text for _ in range(2)] == ["reply 2", "reply 2"]


def test_models_that_choose_are_refused():
    """Their choice may depend on the run or on an outage, which are not part of the key; also within another model."""
    two = {"a": ScriptedModel(), "b": ScriptedModel()}
    for model in (Router(lambda _: "a", two), Tiered(two), Throttled(Fallback(*two.values()), concurrency=1)):
        with pytest.raises(MisuseError, match="wrap each of its models"):
            CachedModel(model, MemoryStore())
    with pytest.raises(MisuseError, match="max_replies"):
        CachedModel(ScriptedModel(), MemoryStore(), max_replies=0)
    tiers = Tiered({name: CachedModel(model, MemoryStore()) for name, model in two.items()})
    assert tiers.name == "scripted or scripted"
