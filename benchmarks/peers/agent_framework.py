"""Microsoft Agent Framework, by `Agent.run`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FileHistoryProvider,
    FunctionInvocationLayer,
    Message,
    tool,
)
from agent_framework.observability import ChatTelemetryLayer, disable_instrumentation
from agent_framework.openai import OpenAIChatCompletionClient
from openai import AsyncOpenAI

from benchmarks.contender import (
    ANSWER,
    PROMPT,
    Contender,
    Done,
    Job,
    NotOfferedError,
    Script,
    adder,
    earlier,
    ran,
    words,
)

# Requests after which a run would end; 40 is the default.
WIDE: Any = {"max_iterations": 1_000_000}
disable_instrumentation()


class Scripted(FunctionInvocationLayer[Any], ChatMiddlewareLayer[Any], ChatTelemetryLayer[Any], BaseChatClient[Any]):
    """A chat client that follows the script, in the layers of every client that the framework ships."""

    def __init__(self, script: Script) -> None:
        """Take the script."""
        super().__init__(function_invocation_configuration=WIDE)
        self._script = script

    async def _inner_get_response(self, *, messages: Any, **_: Any) -> ChatResponse[Any]:
        script = self._script
        if script.model_s:
            await asyncio.sleep(script.model_s)
        turn = (len(messages) - 1) // 2  # the results of a turn are one message
        if turn == script.turns:
            contents = [Content.from_text(ANSWER)]
        else:
            contents = [
                Content.from_function_call(f"t{turn}.{index}", "add", arguments=text)
                for index, text in enumerate(script.arguments(turn))
            ]
        return ChatResponse(messages=[Message("assistant", contents)])


class Chatty(FunctionInvocationLayer[Any], ChatMiddlewareLayer[Any], ChatTelemetryLayer[Any], BaseChatClient[Any]):
    """A chat client that answers in chunks."""

    def __init__(self, chunks: int) -> None:
        """Take the number of chunks."""
        super().__init__()
        self._texts = words(chunks)

    def _inner_get_response(self, **_: Any) -> Any:
        async def updates() -> AsyncIterator[ChatResponseUpdate]:
            for text in self._texts:
                yield ChatResponseUpdate(role="assistant", contents=[Content.from_text(text)])

        return self._build_response_stream(updates())


class AgentFramework(Contender):
    """An agent; its store is FileHistoryProvider, which keeps the conversation after each request to the model."""

    name = "Microsoft AF"
    packages = ("agent-framework-core", "agent-framework-openai")
    imports = "from agent_framework import Agent"
    first_tool = "from agent_framework import tool; tool(add)"

    def __init__(self) -> None:
        """Begin with nothing open."""
        self._clients: list[AsyncOpenAI] = []

    def runs(self, script: Script) -> Job:
        """Return an `agent.run`."""
        agent = Agent(Scripted(script), tools=_tools(script))

        async def job() -> Done:
            calls: list[int] = []
            ran.set(calls)
            response = await agent.run(PROMPT)
            return Done(answer=response.text, calls=len(calls))

        return job

    async def durable(self, script: Script, folder: Path) -> Job:
        """Return the same with a session of its own for each run: JSON lines in a file."""
        if self.level == "full":
            raise NotOfferedError("it does not wait until its files are on the disk")
        history = FileHistoryProvider(folder)
        agent = Agent(
            Scripted(script),
            tools=_tools(script),
            context_providers=[history],
            require_per_service_call_history_persistence=True,
        )
        numbers = count()

        async def job() -> Done:
            calls: list[int] = []
            ran.set(calls)
            response = await agent.run(PROMPT, session=AgentSession(session_id=f"session-{next(numbers)}"))
            return Done(answer=response.text, calls=len(calls))

        return job

    def streams(self, chunks: int) -> Callable[[], AsyncIterator[str]]:
        """Return an `agent.run(stream=True)`."""
        return _stream(Agent(Chatty(chunks)))

    def over_http(self, url: str, history: int) -> Callable[[], Awaitable[str]]:
        """Return an `agent.run` by OpenAIChatCompletionClient."""
        agent = Agent(self._chat(url), tools=_tools(Script(turns=1)))
        before = _messages(history)

        async def ask() -> str:
            response = await agent.run([*before, Message("user", [PROMPT])])
            return response.text

        return ask

    def over_sse(self, url: str) -> Callable[[], AsyncIterator[str]]:
        """Return an `agent.run(stream=True)` by OpenAIChatCompletionClient."""
        return _stream(Agent(self._chat(url)))

    def _chat(self, url: str) -> OpenAIChatCompletionClient[Any]:
        client = AsyncOpenAI(base_url=url, api_key="key", max_retries=0)
        self._clients.append(client)
        return OpenAIChatCompletionClient(model="m", async_client=client)

    async def aclose(self) -> None:
        """Close the clients."""
        while self._clients:
            await self._clients.pop().close()


def _tools(script: Script) -> list[Any]:
    return [tool(adder(script.tool_s))] if script.turns else []


def _messages(history: int) -> list[Message]:
    messages: list[Message] = []
    for each in earlier(history):
        if each["role"] == "user":
            contents = [Content.from_text(each["content"])]
        elif each["role"] == "tool":
            contents = [Content.from_function_result(each["tool_call_id"], result=each["content"])]
        else:
            contents = [
                Content.from_function_call(
                    call["id"], call["function"]["name"], arguments=call["function"]["arguments"]
                )
                for call in each["tool_calls"]
            ]
        messages.append(Message(each["role"], contents))
    return messages


def _stream(agent: Agent[Any]) -> Callable[[], AsyncIterator[str]]:
    async def stream() -> AsyncIterator[str]:
        async for update in agent.run(PROMPT, stream=True):
            if update.text:
                yield update.text

    return stream


def contender() -> Contender:
    """Return Microsoft Agent Framework."""
    return AgentFramework()
