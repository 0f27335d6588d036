"""Document A's example, told at every rung of the ladder: somebody asks for the weather, a tool knows it."""

from __future__ import annotations

import pytest

from agentfsm import (
    Agent,
    AssistantMessage,
    MisuseError,
    Outcome,
    Run,
    RunEnded,
    State,
    StateChanged,
    StopReason,
    TextDelta,
    ToolEvent,
    ToolResult,
    UserMessage,
    tool,
)
from agentfsm.ports import FinishReason
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import names, sound, valid_history

QUESTION = "北京今天天气怎么样"
ANSWER = "北京今天晴天 28°C 湿度 45%。"
VISITED = ["observe", "think", "act", "reflect", "observe", "think", "done"]
FACTS = [
    "Observed",
    "ToolsChosen",
    "ToolFinished",
    "ToolsReturned",
    "Continued",
    "Observed",
    "AnswerGiven",
]


@tool(read_only=True)
async def get_weather(city: str) -> dict[str, object]:
    """Say what the weather is.

    Args:
        city: The city's name.
    """
    return {"city": city, "temp": 28, "condition": "晴", "humidity": 45}


def script() -> ScriptedModel:
    return ScriptedModel(
        say("我需要查询天气。", call("get_weather", city="北京"), expect=QUESTION),
        say(ANSWER, expect='"condition":"晴"'),
    )


def weather() -> tuple[Agent, ScriptedModel]:
    model = script()
    return Agent(model, tools=[get_weather], instructions="你是一个天气助手。", name="weather"), model


async def told(agent: Agent, run: Run) -> None:
    """Fail unless the story went as document A tells it."""
    assert (run.state, run.stop_reason, run.output, run.turn) == (State.DONE, StopReason.COMPLETED, ANSWER, 2)
    assert [type(message) for message in run.messages] == [
        UserMessage,
        AssistantMessage,
        ToolResult,
        AssistantMessage,
    ]
    assert [(r.name, r.arguments, r.outcome) for r in run.calls] == [("get_weather", {"city": "北京"}, Outcome.DONE)]
    assert names(await agent.history(run.id)) == FACTS
    await sound(agent, run)


async def test_step_by_step_visits_the_states_of_document_a():
    """Seven states, one step between two of them, and each run value stays what it was."""
    agent, model = weather()
    run = agent.start(QUESTION)
    seen = [run]
    while not run.is_over:
        run = await agent.step(run)
        seen.append(run)
    assert [str(r.state) for r in seen] == VISITED
    assert [r.turn for r in seen] == [0, 0, 1, 1, 1, 1, 2]
    versions = [r.version for r in seen]
    assert versions == sorted(set(versions))
    await told(agent, run)
    model.assert_done()


async def test_steps_yields_the_run_after_every_step():
    """`steps` gives what one sees when one calls `step` by hand."""
    agent, _ = weather()
    seen = [run async for run in agent.steps(agent.start(QUESTION))]
    assert [str(run.state) for run in seen] == VISITED[1:]
    await told(agent, seen[-1])


async def test_finish_and_run_reach_the_same_end():
    """The rungs above a step change nothing about the story."""
    agent, _ = weather()
    await told(agent, await agent.finish(agent.start(QUESTION)))
    other, _ = weather()
    await told(other, await other.run(QUESTION))


async def test_each_state_on_the_way_can_be_loaded_again():
    """The journal gives back every state that the run went through."""
    agent, _ = weather()
    seen = [run async for run in agent.steps(agent.start(QUESTION))]
    for run in seen:
        assert await agent.load(run.id, at=run.version) == run
        valid_history(run.messages)


async def test_a_watched_run_is_the_same_run():
    """`stream` shows the states and the answer as it grows, and ends with the run."""
    agent, _ = weather()
    async with agent.stream(QUESTION) as stream:
        events = [event async for event in stream]
    states = [str(event.state) for event in events if isinstance(event, StateChanged)]
    assert ["observe", *states] == VISITED
    answer = "".join(event.text for event in events if isinstance(event, TextDelta) and event.turn == 2)
    assert answer == ANSWER
    tools = [str(event.type) for event in events if isinstance(event, ToolEvent)]
    assert tools == ["tool_queued", "tool_started", "tool_completed", "queue_drained"]
    assert isinstance(events[-1], RunEnded)
    assert events[-1].run == stream.run
    await told(agent, stream.run)


def test_run_sync_twice_in_a_row():
    """Code that is not async needs no event loop of its own, and may ask again."""
    model = ScriptedModel(*script()._script, *script()._script)
    agent = Agent(model, tools=[get_weather])
    first, second = agent.run_sync(QUESTION), agent.run_sync(QUESTION)
    assert (first.output, second.output) == (ANSWER, ANSWER)
    assert first.id != second.id
    model.assert_done()


async def test_run_sync_refuses_to_block_a_running_loop():
    """Inside an event loop it names the call to use instead, and stores nothing."""
    agent, model = weather()
    with pytest.raises(MisuseError, match=r"await agent\.run"):
        agent.run_sync(QUESTION)
    assert await agent.store.runs() == ()
    assert not model.requests


async def test_with_gives_a_variant_for_a_test():
    """`with_` swaps the model and leaves the agent as it was."""

    def never(_request: object) -> str:
        raise AssertionError("the agent's own model was asked")

    agent = Agent(FunctionModel(never), tools=[get_weather], instructions="Answer.", name="weather")
    model = script()
    variant = agent.with_(model=model)
    assert variant is not agent
    assert (variant.instructions, variant.name, variant.tools.names) == ("Answer.", "weather", ("get_weather",))
    assert variant.store is agent.store
    run = await variant.run(QUESTION)
    assert run.output == ANSWER
    assert (await agent.load(run.id)).output == ANSWER
    assert isinstance(agent.model, FunctionModel)


async def test_the_model_is_told_of_the_tool_and_the_instructions():
    """A request carries the instructions, the tool with its schema, and the history."""
    agent, model = weather()
    await agent.run(QUESTION)
    first, second = model.requests
    assert first.instructions == "你是一个天气助手。"
    (definition,) = first.tools
    assert (definition.name, definition.description) == ("get_weather", "Say what the weather is.")
    assert definition.parameters["properties"]["city"]["description"] == "The city's name."
    assert [type(message) for message in second.messages] == [UserMessage, AssistantMessage, ToolResult]
    result = second.messages[-1]
    assert result.text == '[get_weather: done]\n{"city":"北京","temp":28,"condition":"晴","humidity":45}'


async def test_an_answer_without_tools_takes_two_steps():
    """A question that needs no tool is observed, thought about and done."""
    agent = Agent(ScriptedModel(say("你好。", finish_reason=FinishReason.STOP)))
    seen = [str(run.state) async for run in agent.steps(agent.start("你好"))]
    assert seen == ["think", "done"]
