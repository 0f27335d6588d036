"""A weather tool, and the states of a run that calls it.

The model is a script, so no API key is needed. For a real model, give `Agent` the string "openai:gpt-5.4-mini" instead.
"""

from __future__ import annotations

import anyio

from agentfsm import Agent, Run, tool
from agentfsm.testing import ScriptedModel, call, say


@tool(read_only=True)
async def get_weather(city: str) -> dict[str, object]:
    """Return the weather in a city.

    Args:
        city: The city's name, in any language.
    """
    return {"city": city, "temp": 28, "condition": "晴"}


async def main() -> Run:
    """Step through a run and print each state."""
    model = ScriptedModel(say("", call("get_weather", city="北京")), say("北京今天晴天，气温 28°C。", expect="晴"))
    agent = Agent(model, tools=[get_weather], instructions="你是一个天气助手。")
    run = agent.start("北京今天天气怎么样？")
    print(run.state.upper())
    async for run in agent.steps(run):  # noqa: B020  each step returns a new value of the run
        print(run.state.upper())
    print(run.output)
    return run


if __name__ == "__main__":
    anyio.run(main)
