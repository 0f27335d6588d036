"""Strands Agents, by `agent.invoke_async`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from strands import Agent, tool
from strands.agent import NullConversationManager
from strands.models import Model
from strands.models.openai import OpenAIModel
from strands.session.file_session_manager import FileSessionManager

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

# The history as it is; the default shows the model no more than 40 messages.
WHOLE = NullConversationManager()


class Streaming(Model):
    """A model, of which all are streams."""

    def update_config(self, **_: Any) -> None:
        """Have nothing to configure."""

    def get_config(self) -> dict[str, Any]:
        """Say so."""
        return {}

    def structured_output(self, *_: Any, **_options: Any) -> Any:
        """Refuse: no run asks for it."""
        raise NotImplementedError


class Scripted(Streaming):
    """A model that follows the script."""

    def __init__(self, script: Script) -> None:
        """Take the script."""
        self._script = script

    async def stream(self, messages: Any, *_: Any, **_options: Any) -> AsyncIterator[Any]:
        """Reply according to the length of the history, in which the results of a turn are one message."""
        script = self._script
        if script.model_s:
            await asyncio.sleep(script.model_s)
        turn = (len(messages) - 1) // 2
        yield {"messageStart": {"role": "assistant"}}
        if turn == script.turns:
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": ANSWER}}}
            yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "end_turn"}}
            return
        for index, text in enumerate(script.arguments(turn)):
            yield {"contentBlockStart": {"start": {"toolUse": {"name": "add", "toolUseId": f"t{turn}.{index}"}}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": text}}}}
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use"}}


class Chatty(Streaming):
    """A model that answers in chunks."""

    def __init__(self, chunks: int) -> None:
        """Take the number of chunks."""
        self._texts = words(chunks)

    async def stream(self, *_: Any, **_options: Any) -> AsyncIterator[Any]:
        """Answer."""
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": {}}}
        for text in self._texts:
            yield {"contentBlockDelta": {"delta": {"text": text}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn"}}


class Strands(Contender):
    """An agent, which is one conversation; its store is FileSessionManager, a file for each message."""

    name = "Strands"
    packages = ("strands-agents", "openai")
    imports = "from strands import Agent"
    first_tool = "from strands import tool; tool(add)"

    def __init__(self) -> None:
        """Begin with nothing open."""
        self._clients: list[AsyncOpenAI] = []

    def runs(self, script: Script) -> Job:
        """Return an `invoke_async` of an agent of its own, since an agent holds its conversation and takes one call."""
        model, tools = Scripted(script), _tools(script)

        async def job() -> Done:
            calls: list[int] = []
            ran.set(calls)
            agent = Agent(model, tools=tools, callback_handler=None, conversation_manager=WHOLE)
            return await _done(agent, calls)

        return job

    async def durable(self, script: Script, folder: Path) -> Job:
        """Return the same with a session of its own for each run."""
        if self.level == "full":
            raise NotOfferedError("it does not wait until its files are on the disk")
        model, tools = Scripted(script), _tools(script)
        numbers = count()

        async def job() -> Done:
            calls: list[int] = []
            ran.set(calls)
            agent = Agent(
                model,
                tools=tools,
                callback_handler=None,
                conversation_manager=WHOLE,
                session_manager=FileSessionManager(f"session-{next(numbers)}", str(folder)),
            )
            return await _done(agent, calls)

        return job

    def streams(self, chunks: int) -> Callable[[], AsyncIterator[str]]:
        """Return a `stream_async`."""
        return _stream(Chatty(chunks))

    def over_http(self, url: str, history: int) -> Callable[[], Awaitable[str]]:
        """Return an `invoke_async` by OpenAIModel."""
        model, tools, before = self._chat(url, stream=False), _tools(Script(turns=1)), _messages(history)

        async def ask() -> str:
            agent = Agent(model, [*before], tools, callback_handler=None, conversation_manager=WHOLE)
            return str(await agent.invoke_async(PROMPT)).strip()

        return ask

    def over_sse(self, url: str) -> Callable[[], AsyncIterator[str]]:
        """Return a `stream_async` by OpenAIModel."""
        return _stream(self._chat(url, stream=True))

    def _chat(self, url: str, *, stream: bool) -> OpenAIModel:
        # With a client of ours, since it would make one anew for each request.
        client = AsyncOpenAI(base_url=url, api_key="key", max_retries=0)
        self._clients.append(client)
        return OpenAIModel(client, model_id="m", stream=stream)

    async def aclose(self) -> None:
        """Close the clients."""
        while self._clients:
            await self._clients.pop().close()


def _tools(script: Script) -> list[Any]:
    return [tool(adder(script.tool_s))] if script.turns else []


async def _done(agent: Agent, calls: list[int]) -> Done:
    result = await agent.invoke_async(PROMPT)
    return Done(answer=str(result).strip(), calls=len(calls))


def _messages(history: int) -> list[Any]:
    messages: list[Any] = []
    for each in earlier(history):
        if each["role"] == "user":
            messages.append({"role": "user", "content": [{"text": each["content"]}]})
        elif each["role"] == "tool":
            result = {"toolUseId": each["tool_call_id"], "status": "success", "content": [{"text": each["content"]}]}
            messages.append({"role": "user", "content": [{"toolResult": result}]})
        else:
            calls = [(call["id"], call["function"]) for call in each["tool_calls"]]
            content = [
                {"toolUse": {"toolUseId": name, "name": told["name"], "input": json.loads(told["arguments"])}}
                for name, told in calls
            ]
            messages.append({"role": "assistant", "content": content})
    return messages


def _stream(model: Model) -> Callable[[], AsyncIterator[str]]:
    async def stream() -> AsyncIterator[str]:
        agent = Agent(model, callback_handler=None, conversation_manager=WHOLE)
        async for event in agent.stream_async(PROMPT):
            if "data" in event:
                yield event["data"]

    return stream


def contender() -> Contender:
    """Return Strands Agents."""
    return Strands()
