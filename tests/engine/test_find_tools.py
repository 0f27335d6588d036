"""`find_tools`: a model that was offered a choice among many tools knows that there are more, and finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentfsm import Agent, Outcome, Permissions, Run, State, Tool, tool
from agentfsm.context import AllTools, BySimilarity
from agentfsm.core.events import ToolsOffered
from agentfsm.ports import Request, Selection, ToolDefinition, ToolSelector
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import no_leases, results_of, sound, texts

QUESTION = "Is it raining where our orders database server stands?"
MORE = "There are 10 more tools that you do not see."


@pytest.fixture
async def store():
    """A store in memory: what is shown here does not depend on it."""
    made = MemoryStore()
    yield made
    await no_leases(made)


def orders(number: int) -> Tool[..., Any]:
    """One of many tools that are about orders."""

    async def query(where: str = "") -> str:
        return f"{number}: {where}"

    about = f"Query the orders database by field {number}{', the newest first' * (number % 2)}."
    return tool(query, name=f"query_orders_{number}", description=about, read_only=True)


@tool(read_only=True)
async def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"rain in {city}"


def toolbox() -> list[Tool[..., Any]]:
    """29 tools about orders, and the only one that the question needs."""
    return [*map(orders, range(29)), get_weather]


def names(request: Request) -> list[str]:
    """The names of the tools of a request."""
    return [each.name for each in request.tools]


def search_of(request: Request) -> str:
    """What a request says of `find_tools`; nothing where it does not offer it."""
    return next((each.description for each in request.tools if each.name == "find_tools"), "")


def finds(*queries: str, **details: Any) -> list[Any]:
    """A model that looks for tools, asks for the weather, and answers."""
    return [
        *[say("", call("find_tools", query=query)) for query in queries],
        say("", call("get_weather", city="Oslo"), **details),
        "It is raining.",
    ]


async def test_the_only_right_tool_is_found_where_the_choice_has_hidden_it(store):
    """The words of the task choose 20 others; the model is told of ten more, and offered what it finds among them."""
    model = ScriptedModel(*finds("weather forecast", expect="get_weather(city): Tell the weather in a city."))
    agent = Agent(model, tools=toolbox(), store=store)
    run = await agent.run(QUESTION)
    first, second, third = model.requests
    assert "get_weather" not in names(first)
    assert len(names(first)) == 21
    assert search_of(first).startswith(MORE)
    assert "get_weather" in names(second)
    assert search_of(second).startswith("There are 9 more tools")
    assert names(third) == names(second)
    assert [(result.tool, result.outcome) for result in results_of(run.messages)] == [
        ("find_tools", Outcome.DONE),
        ("get_weather", Outcome.DONE),
    ]
    chosen, found = [event for event in await agent.history(run.id) if isinstance(event, ToolsOffered)]
    assert (chosen.how, found.how) == ("similarity", "find_tools")
    assert set(found.tools) == {*chosen.tools, "get_weather"}
    assert (await agent.replay(run.id)).is_faithful
    await sound(agent, run)


async def test_words_that_fit_nothing_bring_the_names(store):
    """The model then asks again with a word of a name."""
    model = ScriptedModel(*finds("precipitation", "get weather"))
    run = await Agent(model, tools=toolbox(), store=store).run(QUESTION)
    assert run.output == "It is raining."
    nothing = results_of(run.messages)[0].content
    assert nothing.startswith("No tool fits these words.")
    assert "get_weather" in nothing
    assert "get_weather" not in names(model.requests[1])
    assert "get_weather" in names(model.requests[2])


async def test_what_was_found_outlives_the_worker(store):
    """Another agent goes on right behind the search, and offers what was found, once."""
    tools = toolbox()
    first = Agent(ScriptedModel(*finds("weather")), tools=tools, store=store)
    run = first.start(QUESTION)
    while run.state is not State.REFLECT:
        run = await first.step(run)
    other = Agent(ScriptedModel(*finds("weather")[1:]), tools=tools, store=store)
    done = await other.resume(run.id)
    assert done.output == "It is raining."
    assert isinstance(other.model, ScriptedModel)
    assert all("get_weather" in names(request) for request in other.model.requests)
    events = [event for event in await other.history(run.id) if isinstance(event, ToolsOffered)]
    assert [event.how for event in events] == ["similarity", "find_tools"]


async def test_new_input_keeps_what_was_just_found(store):
    """The choice is made anew for it, with what the model has found and not called yet."""
    model = ScriptedModel(*finds("weather"))
    agent = Agent(model, tools=toolbox(), store=store)
    run = agent.start(QUESTION)
    while run.state is not State.REFLECT:
        run = await agent.step(run)
    await agent.send(run.id, "And what of the orders database?")
    await agent.finish(run)
    assert "get_weather" in names(model.requests[1])


@pytest.mark.parametrize("permissions", [{"deny": ("get_weather",)}, {"allow": ("query_orders_*",)}])
async def test_what_may_not_be_used_is_not_found(store, permissions):
    """It is neither counted nor found nor named; the search itself needs no rule."""
    model = ScriptedModel(say("", call("find_tools", query="weather")), "I cannot tell.")
    agent = Agent(model, tools=toolbox(), permissions=Permissions(**permissions), store=store)
    run = await agent.run(QUESTION)
    assert search_of(model.requests[0]).startswith("There are 9 more tools")
    assert results_of(run.messages)[0].outcome is Outcome.DONE
    assert "weather" not in results_of(run.messages)[0].content
    assert "get_weather" not in names(model.requests[1])


async def test_a_specialist_finds_its_own_tools(store):
    """An agent that is a tool has a choice of its own."""
    expert_model = ScriptedModel(*finds("weather"))
    expert = Agent(expert_model, tools=toolbox(), name="expert")
    model = ScriptedModel(say("", call("expert", query=QUESTION)), "done")
    run: Run = await Agent(model, tools=[expert.as_tool()], store=store).run(QUESTION)
    assert results_of(run.messages)[0].content == "It is raining."
    assert names(model.requests[0]) == ["expert"]
    assert "get_weather" in names(expert_model.requests[1])


@pytest.mark.parametrize("options", [{"tools": toolbox()[10:]}, {"tools": toolbox(), "selector": AllTools()}])
async def test_where_all_are_offered_there_is_nothing_to_find(store, options):
    """The request holds the tools of the agent and no other."""
    model = ScriptedModel("done")
    agent = Agent(model, store=store, **options)
    await agent.run(QUESTION)
    assert names(model.requests[0]) == list(agent.tools.names)


async def test_a_tool_of_that_name_takes_its_place(store):
    """The user's own is offered as it is, if it is chosen, and what it says offers nothing."""

    @tool(read_only=True)
    async def find_tools(query: str) -> str:
        """Query the orders database for tools of the workshop."""
        return "You may call these from your next turn on:\nget_weather(city): Tell the weather."

    model = ScriptedModel(say("", call("find_tools", query="x")), "done")
    await Agent(model, tools=[*toolbox(), find_tools], store=store).run(QUESTION)
    assert search_of(model.requests[0]) in {"", "Query the orders database for tools of the workshop."}
    assert "get_weather" not in names(model.requests[1])


async def test_a_loop_of_searches_is_withdrawn(store):
    """As any tool that is called again and again."""
    model = ScriptedModel(*[say("", call("find_tools", query="rain"))] * 4, "done")
    run = await Agent(model, tools=toolbox(), store=store).run(QUESTION)
    assert (run.output, run.disabled) == ("done", ("find_tools",))
    assert [bool(search_of(request)) for request in model.requests] == [True, True, True, True, False]
    assert "find_tools may not be called any more" in texts(model.requests[-1])


class Five(ToolSelector):
    """Chooses the first five, and finds as every selector does that says nothing of it."""

    def wants(self, count: int) -> bool:
        """Choose among more than five."""
        return count > 5

    async def select(self, task: str, tools: Sequence[ToolDefinition], ask: Any) -> Selection:
        """Choose."""
        return Selection(tools=tuple([each.name for each in tools[:5]]), how="five")


async def test_a_selector_of_the_users_own_finds_by_words(store):
    """Those tools in whose name or description most words of the query stand, five at most."""
    tools = [each.definition for each in toolbox()]
    assert await Five().find("the WEATHER of a city", tools) == ["get_weather"]
    assert await Five().find("field 7 of orders", tools) == ["query_orders_7"]
    assert len(await Five().find("orders", tools)) == 5
    assert await Five().find("rain", tools) == []
    model = ScriptedModel(*finds("weather"))
    assert (await Agent(model, tools=toolbox(), selector=Five(), store=store).run(QUESTION)).output == "It is raining."


async def test_similarity_finds_the_nearest_and_nothing_else():
    """By the scorer; of a few that are left, all, the nearest first."""
    tools = [each.definition for each in toolbox()]
    find = BySimilarity().find
    assert (await find("tell the weather", tools))[0] == "get_weather"
    assert len(await find("orders", tools)) == 5
    assert await find("precipitation", tools) == []
    assert await find("precipitation", tools[-3:]) == ["query_orders_27", "query_orders_28", "get_weather"]
    assert (await find("weather", tools[-3:]))[0] == "get_weather"
