"""Choosing among many tools in a run: once for each input, journalled, within the budget, and never its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentfsm import (
    Agent,
    AssistantMessage,
    Limits,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    Outcome,
    Permissions,
    Settings,
    State,
    StopReason,
    TextPart,
    Tool,
    Usage,
    UserMessage,
    tool,
)
from agentfsm.context import AllTools, AutoSelect, BySimilarity
from agentfsm.core.events import Compacted, Event, ToolsOffered
from agentfsm.ports import Request
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, fail, say
from tests.support.checks import names, no_leases, results_of, sound, sound_run


@pytest.fixture
async def store():
    """A store in memory: what is shown here does not depend on it."""
    made = MemoryStore()
    yield made
    await no_leases(made)


SUBJECTS = (  # noqa: SIM905  sixty lines otherwise
    "weather train flight hotel invoice salary contract patent recipe garden planet bridge violin museum harbour "
    "tunnel forest desert volcano glacier library theatre stadium airport market castle island lagoon meadow canyon "
    "orchard vineyard quarry furnace turbine reactor telescope microscope compass barometer sextant anvil loom kiln "
    "lathe forge mill press crane pulley lever wedge pendulum gyroscope magnet prism lens mirror candle torch"
).split()


def made(count: int, **options: Any) -> list[Tool[..., Any]]:
    """So many read-only tools, each about another subject."""
    return [_made(name, options) for name in SUBJECTS[:count]]


def _made(name: str, options: dict[str, Any]) -> Tool[..., Any]:
    async def find(what: str = "") -> str:
        return f"{name}: {what}"

    about = f"Find something about the {name} of a place."
    return tool(**{"name": f"find_{name}", "description": about, "read_only": True, **options})(find)


def told(agent: Agent) -> list[list[str]]:
    """The names of the tools of each request, without the one that finds the others."""
    assert isinstance(agent.model, ScriptedModel)
    return [[each.name for each in request.tools if each.name != "find_tools"] for request in agent.model.requests]


async def choices(agent: Agent, run_id: str) -> list[ToolsOffered]:
    """The choices that the journal tells of."""
    return [event for event in await agent.history(run_id) if isinstance(event, ToolsOffered)]


async def test_few_tools_are_all_offered(store):
    """Up to 20, and nothing is journalled."""
    agent = Agent(ScriptedModel("done"), tools=made(20), store=store)
    run = await agent.run("the weather")
    assert len(told(agent)[0]) == 20
    assert names(await agent.history(run.id)) == ["Observed", "AnswerGiven"]
    assert run.offered is None


async def test_among_25_the_words_of_the_task_choose(store):
    """20 are offered, with what the task names, in the order of registration; the model is asked nothing."""
    agent = Agent(ScriptedModel("done"), tools=made(25), store=store)
    run = await agent.run("find the glacier and the library")
    (offered,) = told(agent)
    assert len(offered) == 20
    assert {"find_glacier", "find_library"} <= set(offered)
    assert offered == [each.name for each in agent.tools if each.name in offered]
    (choice,) = await choices(agent, run.id)
    assert (choice.tools, choice.how, choice.usage) == (tuple(offered), "similarity", Usage())
    await sound(agent, run)


async def test_among_60_the_model_names_what_it_wants_to_see(store):
    """One line about each, no tools and no calls; what it named is offered, and what that cost is in the usage."""
    model = ScriptedModel(
        say('["find_torch", "find_weather"]', expect=lambda r: not r.tools and "find_kiln" in r.messages[-2].text),
        say("", call("find_torch")),
        "done",
    )
    agent = Agent(model, tools=made(60), store=store, settings=Settings(tool_choice="auto", temperature=0.5))
    run = await agent.run("bring light")
    assert told(agent) == [[], ["find_weather", "find_torch"], ["find_weather", "find_torch"]]
    assert "bring light" in model.requests[0].messages[-1].text
    assert (model.requests[0].settings.temperature, model.requests[0].settings.tool_choice) == (0.5, None)
    (choice,) = await choices(agent, run.id)
    assert (choice.how, choice.usage.tokens) == ("two_stage", 15)
    assert (run.usage.tokens, run.turn) == (45, 2)
    await sound(agent, run)


async def test_the_choice_is_no_turn(store):
    """A run that may take one turn takes it."""
    model = ScriptedModel('["find_torch"]', "done")
    run = await Agent(model, tools=made(60), limits=Limits(turns=1), store=store).run("go")
    assert (run.output, run.turn) == ("done", 1)


async def test_a_choice_holds_until_input_comes(store):
    """Over several turns, results and stepping; the next words of the user choose anew."""
    model = ScriptedModel(
        '["find_torch"]', say("", call("find_torch")), say("", call("find_torch", what="x")), '["find_lens"]', "done"
    )
    agent = Agent(model, tools=made(60), store=store)
    run = agent.start("bring light")
    while run.turn < 2 or run.state is not State.REFLECT:
        run = await agent.step(run)
    await agent.send(run.id, "now bring it to a point")
    run = await agent.finish(run)
    assert told(agent) == [[], ["find_torch"], ["find_torch"], [], ["find_lens", "find_torch"]]
    assert "bring light" in model.requests[3].messages[-1].text
    assert model.requests[3].messages[0].text == "bring light"
    assert "now bring it to a point" in model.requests[3].messages[-1].text
    assert len(await choices(agent, run.id)) == 2
    await sound(agent, run)


async def test_tools_that_the_history_uses_stay(store):
    """Also those that another run used, which this one goes on from."""
    tools = made(60)
    first = Agent(ScriptedModel('["find_torch"]', say("", call("find_torch")), "done"), tools=tools, store=store)
    before = await first.run("bring light")
    agent = Agent(ScriptedModel('["find_lens"]', "done"), tools=tools, store=store)
    await agent.run("and now?", after=before)
    assert told(agent)[1] == ["find_lens", "find_torch"]


async def test_a_choice_outlives_the_worker(store):
    """Another agent goes on with it, and asks nobody again."""
    tools = made(60)
    first = Agent(ScriptedModel('["find_torch"]'), tools=tools, store=store)
    run = first.start("bring light")
    while run.offered is None:
        run = await first.step(run)
    other = Agent(ScriptedModel("done"), tools=tools, store=store)
    done = await other.resume(run.id)
    assert told(other) == [["find_torch"]]
    assert (done.output, done.offered) == ("done", ("find_torch",))


async def test_what_is_not_there_is_no_choice(store):
    """Disabled and forbidden tools are neither counted, nor listed, nor chosen."""
    tools = [*made(30), *made(35)[30:], *[tool(name=f"x{n}")(made(1)[0].function) for n in range(30)]]
    model = ScriptedModel("done")
    agent = Agent(model, tools=tools, permissions=Permissions(level="read"), store=store)
    run = await agent.run("the glacier")
    (choice,) = await choices(agent, run.id)
    assert choice.how == "similarity"
    assert len(told(agent)[0]) == 20
    assert not any(name.startswith("x") for name in told(agent)[0])


async def test_few_that_are_there_need_no_choice(store):
    """65 tools of which a run may use five are five."""
    tools = [*made(5), *[tool(name=f"x{n}")(made(1)[0].function) for n in range(60)]]
    agent = Agent(ScriptedModel("done"), tools=tools, permissions=Permissions(level="read"), store=store)
    run = await agent.run("go")
    assert [len(each) for each in told(agent)] == [5]
    assert await choices(agent, run.id) == []


async def test_a_tool_that_was_not_offered_runs_if_the_model_calls_it(store):
    """It may know the name from elsewhere; what is not offered is not forbidden."""
    agent = Agent(ScriptedModel(say("", call("find_torch")), "done"), tools=made(60), store=store, selector=First())
    run = await agent.run("go")
    assert results_of(run.messages)[0].outcome is Outcome.DONE


class First(AllTools):
    """Chooses the first three tools, and one that does not exist."""

    def wants(self, count: int) -> bool:
        """Choose always."""
        return count > 3

    async def select(self, task: str, tools: Sequence[Any], ask: Any) -> Any:
        """Choose."""
        chosen = await super().select(task, tools[:3], ask)
        return type(chosen)(tools=(*chosen.tools, "no_such_tool"), how="first")


async def test_a_selector_of_the_users_own(store):
    """It decides when and what; a name that it made up counts for nothing."""
    agent = Agent(ScriptedModel("done"), tools=made(9), store=store, selector=First())
    run = await agent.run("go")
    assert told(agent)[0] == [each.name for each in made(3)]
    assert (await choices(agent, run.id))[0].how == "first"


@pytest.mark.parametrize(
    "selector", [AllTools(), AutoSelect(similar_above=99, two_stage_above=99)], ids=["all", "auto"]
)
async def test_all_may_be_offered(store, selector):
    """Where somebody says so."""
    agent = Agent(ScriptedModel("done"), tools=made(60), store=store, selector=selector)
    await agent.run("go")
    assert len(told(agent)[0]) == 60


# What the world does to a choice


@pytest.mark.parametrize(
    "error",
    [
        ModelUnavailableError("overloaded"),
        ModelReplyError("HTML", Usage(input_tokens=7, output_tokens=1)),
        ModelError("400"),
        ConnectionResetError("reset by peer"),
        TimeoutError("slow"),
    ],
    ids=repr,
)
async def test_a_model_that_cannot_be_asked_costs_the_choice_and_not_the_run(store, error):
    """The words of the task choose instead, and the journal says why; what was paid counts."""
    agent = Agent(ScriptedModel(fail(error), "done"), tools=made(60), store=store)
    run = await agent.run("bring light with the torch")
    assert run.output == "done"
    (choice,) = await choices(agent, run.id)
    assert choice.how.startswith("similarity: the model could not be asked")
    assert "find_torch" in choice.tools
    assert run.usage.tokens == 15 + choice.usage.tokens
    await sound(agent, run)


@pytest.mark.parametrize("text", ["", "none of them", "[]", '{"tools": []}', "\ud800"])
async def test_a_model_that_names_none_leaves_it_to_the_words(store, text):
    """What it said cost all the same."""
    agent = Agent(ScriptedModel(say(text), "done"), tools=made(60), store=store)
    run = await agent.run("bring light with the torch")
    (choice,) = await choices(agent, run.id)
    assert "the model named none" in choice.how
    assert run.usage.tokens == 30
    await sound(agent, run)


async def test_a_budget_too_small_for_the_choice_is_not_the_end(store):
    """The run has tokens left for an answer: then the words of the task choose."""
    about = "Find something for a place, such as " + "this or that, " * 11
    tools = [_made(f"{name}_{n}", {"description": about}) for n in range(5) for name in SUBJECTS]
    agent = Agent(ScriptedModel("done"), tools=tools, limits=Limits(tokens=12_000), store=store)
    run = await agent.run("bring light with the torch")
    assert run.output == "done"
    (choice,) = await choices(agent, run.id)
    assert choice.how.startswith("similarity: the model could not be asked")


async def test_a_budget_that_is_spent_ends_the_run_in_order(store):
    """Not even the first request fits."""
    run = await Agent(ScriptedModel(), tools=made(60), limits=Limits(tokens=1), store=store).run("go")
    assert (run.state, run.stop_reason) == (State.ERROR, StopReason.TOKEN_BUDGET)
    sound_run(run)


async def test_a_choice_without_a_bill_is_estimated_like_any_reply(store):
    """Characters are no tokens."""
    model = ScriptedModel(say('["find_torch"]', usage=None), "done")
    agent = Agent(model, tools=made(60), store=store)
    run = await agent.run("go")
    (choice,) = await choices(agent, run.id)
    asked = len(model.requests[0].messages[-2].text)
    assert choice.usage.estimated
    assert asked / 5 < choice.usage.input_tokens < asked / 2
    await sound(agent, run)


class Priced(ScriptedModel):
    """A model at a US cent per token."""

    def cost_usd(self, usage: Usage) -> float:
        """Return the price."""
        return usage.tokens / 100


async def test_a_choice_costs_money_too(store):
    """The run's costs hold it."""
    model = Priced('["find_torch"]', "done")
    agent = Agent(model, tools=made(60), limits=Limits(usd=1_000), store=store)
    run = await agent.run("go")
    assert run.usage.cost_usd == pytest.approx(0.30)
    assert agent.cost(run).usd == pytest.approx(0.30)


class Broken:
    """A scorer that fails."""

    async def scores(self, _query: str, _texts: Sequence[str]) -> Sequence[float]:
        """Fail."""
        raise ConnectionResetError("the index is gone")


async def test_a_scorer_that_fails_leaves_all_tools(store):
    """And says so in the journal."""
    selector = AutoSelect(similarity=BySimilarity(scorer=Broken()))
    agent = Agent(ScriptedModel("done"), tools=made(25), store=store, selector=selector)
    run = await agent.run("go")
    assert len(told(agent)[0]) == 25
    assert "the index is gone" in (await choices(agent, run.id))[0].how


class Small(ScriptedModel):
    """A model with a small window."""

    window_tokens = 12_000


def compacted(events: Sequence[Event]) -> list[Compacted]:
    """What left the window."""
    return [event for event in events if isinstance(event, Compacted)]


async def test_tools_that_are_not_offered_take_no_room(store):
    """Only what is sent counts against the context window, so no message is left out for the sake of others."""
    tools = made(45, description="word " * 110)
    said = [UserMessage(parts=(TextPart(text=f"word{n} " * 20),)) for n in range(20)]
    history = [message for each in said for message in (each, AssistantMessage(text="yes"))]
    model = Small("done")
    agent = Agent(model, tools=tools, store=store)
    run = await agent.run("the weather", messages=history)
    assert len(told(agent)[0]) == 20
    assert compacted(await agent.history(run.id)) == []
    assert len(model.requests[0].messages) == 41


async def test_a_tool_that_comes_later_is_offered_when_the_next_input_comes(store):
    """Until then the choice stands, so that requests begin alike."""
    tools = made(25)
    agent = Agent(ScriptedModel(say("", call("find_weather")), "done"), tools=tools, store=store)
    run = agent.start("the weather")
    while run.turn < 1 or run.state is not State.REFLECT:
        run = await agent.step(run)
    agent.tools.register(_made("telegraph", {}))
    await agent.send(run.id, "the telegraph")
    await agent.finish(run)
    assert ["find_telegraph" in each for each in told(agent)] == [False, True]


async def test_a_chosen_tool_that_is_gone_is_not_offered(store):
    """The choice names it, the registry does not."""
    tools = made(25)
    agent = Agent(ScriptedModel(say("", call("find_weather")), "done"), tools=tools, store=store)
    run = agent.start("the weather")
    while run.turn < 1 or run.state is not State.REFLECT:
        run = await agent.step(run)
    agent.tools.unregister("find_weather")
    await agent.finish(run)
    assert ["find_weather" in each for each in told(agent)] == [True, False]


def asked(request: Request) -> str:
    """The newest words."""
    return request.messages[-1].text


@pytest.mark.parametrize("count", [25, 60])
async def test_a_watched_run_chooses_alike(store, count):
    """A stream tells of the choice as of every step, and its calls may start early."""
    replies = ['["find_weather"]'] if count == 60 else []
    model = ScriptedModel(*replies, say("", call("find_weather")), "done")
    agent = Agent(model, tools=made(count), store=store)
    async with agent.stream("the weather") as stream:
        _ = [event async for event in stream]
    assert stream.run.output == "done"
    assert len(await choices(agent, stream.run.id)) == 1
    await sound(agent, stream.run)


async def test_a_named_tool_that_is_not_offered_is_not_demanded(store):
    """A provider refuses a request whose `tool_choice` names a tool that is not in it."""
    agent = Agent(
        ScriptedModel("done"),
        tools=[*made(2), tool(name="purge", permission="admin")(made(1)[0].function)],
        permissions=Permissions(level="write"),
        settings=Settings(tool_choice="purge"),
        store=store,
    )
    await agent.run("go")
    (request,) = agent.model.requests  # type: ignore[attr-defined]
    assert request.settings.tool_choice in {None, "auto", *[each.name for each in request.tools]}
