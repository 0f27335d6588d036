"""Pydantic AI, by `agent.run`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import RequestUsage

from benchmarks.contender import ANSWER, PROMPT, Contender, Done, Job, Script, adder, earlier, ran, words

# 50 is the default.
WIDE = UsageLimits(request_limit=None)


class PydanticAI(Contender):
    """An agent; its store is DBOS, the one of its durable engines that needs no server."""

    name = "Pydantic AI"
    packages = ("pydantic-ai-slim", "pydantic", "openai", "dbos")
    imports = "from pydantic_ai import Agent"
    first_tool = "from pydantic_ai import Tool; Tool(add)"

    def __init__(self) -> None:
        """Begin with nothing open."""
        self._clients: list[AsyncOpenAI] = []
        self._launched = False

    def runs(self, script: Script) -> Job:
        """Return an `agent.run`."""
        agent = Agent(_scripted(script))
        if script.turns:
            agent.tool_plain(adder(script.tool_s))

        async def job() -> Done:
            calls: list[int] = []
            ran.set(calls)
            result = await agent.run(PROMPT, usage_limits=WIDE)
            return Done(answer=result.output, calls=len(calls))

        return job

    async def durable(self, script: Script, folder: Path) -> Job:
        """Return the same as a DBOS workflow: each reply, and each call of the tool, is a step in its SQLite file."""
        from dbos import DBOS  # noqa: PLC0415  whoever does not use it does not load it
        from pydantic_ai.durable_exec.dbos import DBOSDurability  # noqa: PLC0415

        await self.aclose()
        url = f"sqlite:///{folder / 'dbos.db'}"
        DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})
        self._launched = True
        agent = Agent(_scripted(script), name="bench", capabilities=[DBOSDurability()])
        if script.turns:
            agent.tool_plain(DBOS.step()(adder(script.tool_s)))

        @DBOS.workflow()
        async def work() -> str:
            result = await agent.run(PROMPT, usage_limits=WIDE)
            return result.output

        DBOS.launch()

        async def job() -> Done:
            calls: list[int] = []
            ran.set(calls)
            return Done(answer=await work(), calls=len(calls))

        return job

    def streams(self, chunks: int) -> Callable[[], AsyncIterator[str]]:
        """Return an `agent.run_stream` whose texts are not gathered into larger ones."""
        texts = words(chunks)

        async def answer(_: list[ModelMessage], __: AgentInfo) -> AsyncIterator[str]:
            for text in texts:
                yield text

        return _stream(Agent(FunctionModel(stream_function=answer)))

    def over_http(self, url: str, history: int) -> Callable[[], Awaitable[str]]:
        """Return an `agent.run` by OpenAIChatModel."""
        agent = Agent(self._chat(url))
        agent.tool_plain(adder(0.0))
        before = _messages(history)

        async def ask() -> str:
            result = await agent.run(PROMPT, message_history=before)
            return result.output

        return ask

    def over_sse(self, url: str) -> Callable[[], AsyncIterator[str]]:
        """Return an `agent.run_stream` by OpenAIChatModel."""
        return _stream(Agent(self._chat(url)))

    def _chat(self, url: str) -> OpenAIChatModel:
        client = AsyncOpenAI(base_url=url, api_key="key", max_retries=0)
        self._clients.append(client)
        return OpenAIChatModel("m", provider=OpenAIProvider(openai_client=client))

    async def aclose(self) -> None:
        """End DBOS, of which a process has one, and close the clients."""
        if self._launched:
            from dbos import DBOS  # noqa: PLC0415  as above

            self._launched = False
            DBOS.destroy(destroy_registry=True)
        while self._clients:
            await self._clients.pop().close()


def _scripted(script: Script) -> FunctionModel:
    async def reply(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        if script.model_s:
            await asyncio.sleep(script.model_s)
        turn = (len(messages) - 1) // 2  # the results of a turn are one message
        parts: list[Any] = [TextPart(ANSWER)]
        if turn != script.turns:
            parts = [
                ToolCallPart("add", text, tool_call_id=f"t{turn}.{index}")
                for index, text in enumerate(script.arguments(turn))
            ]
        return ModelResponse(parts=parts, usage=RequestUsage(input_tokens=1, output_tokens=1))

    return FunctionModel(reply)


def _messages(history: int) -> list[ModelMessage]:
    messages: list[ModelMessage] = []
    for each in earlier(history):
        if each["role"] == "user":
            messages.append(ModelRequest(parts=[UserPromptPart(each["content"])]))
        elif each["role"] == "tool":
            part = ToolReturnPart("add", each["content"], tool_call_id=each["tool_call_id"])
            messages.append(ModelRequest(parts=[part]))
        else:
            calls = [(call["id"], call["function"]) for call in each["tool_calls"]]
            parts = [ToolCallPart(told["name"], told["arguments"], tool_call_id=name) for name, told in calls]
            messages.append(ModelResponse(parts=parts))
    return messages


def _stream(agent: Agent[None, str]) -> Callable[[], AsyncIterator[str]]:
    async def stream() -> AsyncIterator[str]:
        async with agent.run_stream(PROMPT) as result:
            async for text in result.stream_text(delta=True, debounce_by=None):
                yield text

    return stream


def contender() -> Contender:
    """Return Pydantic AI."""
    return PydanticAI()
