"""The OpenAI Agents SDK, by `Runner.run`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    Model,
    ModelResponse,
    OpenAIChatCompletionsModel,
    Runner,
    SQLiteSession,
    Usage,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
)

from benchmarks.contender import ANSWER, PROMPT, Contender, Done, Job, Script, adder, earlier, ran, words

# Turns after which a run would end; 10 is the default.
WIDE = 1_000_000
set_tracing_disabled(disabled=True)
# Which would be sent.


class Scripted(Model):
    """A model that follows the script."""

    def __init__(self, script: Script) -> None:
        """Take the script."""
        self._script = script

    async def get_response(self, system_instructions: Any, input: Any, *_: Any, **_options: Any) -> ModelResponse:  # noqa: A002
        """Reply according to the length of the history: the prompt, then a call and its result for each call."""
        script = self._script
        if script.model_s:
            await asyncio.sleep(script.model_s)
        turn = 0 if isinstance(input, str) else (len(input) - 1) // (2 * script.width)
        if turn == script.turns:
            output: list[Any] = [_message(ANSWER)]
        else:
            output = [
                ResponseFunctionToolCall(
                    id=f"f{turn}.{index}", call_id=f"t{turn}.{index}", type="function_call", name="add", arguments=text
                )
                for index, text in enumerate(script.arguments(turn))
            ]
        return ModelResponse(output=output, usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **_options: Any) -> AsyncIterator[Any]:
        """Refuse: these runs are not streamed."""
        raise NotImplementedError


class Chatty(Model):
    """A model that answers in chunks."""

    def __init__(self, chunks: int) -> None:
        """Take the number of chunks."""
        self._texts = words(chunks)

    async def get_response(self, *_: Any, **_options: Any) -> ModelResponse:
        """Refuse: these runs are streamed."""
        raise NotImplementedError

    async def stream_response(self, *_: Any, **_options: Any) -> AsyncIterator[Any]:
        """Answer."""
        number = 0
        for number, text in enumerate(self._texts):
            yield ResponseTextDeltaEvent(
                type="response.output_text.delta",
                content_index=0,
                delta=text,
                item_id="m",
                logprobs=[],
                output_index=0,
                sequence_number=number,
            )
        response = Response(
            id="r",
            created_at=0,
            model="m",
            object="response",
            output=[_message("".join(self._texts))],
            parallel_tool_calls=True,
            tool_choice="auto",
            tools=[],
        )
        yield ResponseCompletedEvent(type="response.completed", response=response, sequence_number=number + 1)


class OpenAIAgents(Contender):
    """An agent under the Runner; its store is SQLiteSession, which keeps the conversation and not the run."""

    name = "OpenAI Agents"
    packages = ("openai-agents", "openai")
    first_tool = "from agents import function_tool; function_tool(add)"
    imports = "from agents import Agent, Runner"

    def __init__(self) -> None:
        """Begin with nothing open."""
        self._clients: list[AsyncOpenAI] = []

    def runs(self, script: Script) -> Job:
        """Return a `Runner.run`."""
        agent = _agent(Scripted(script), script)

        async def job() -> Done:
            calls: list[int] = []
            ran.set(calls)
            result = await Runner.run(agent, PROMPT, max_turns=WIDE)
            return Done(answer=result.final_output, calls=len(calls))

        return job

    async def durable(self, script: Script, folder: Path) -> Job:
        """Return the same with a session of its own for each run, which is closed at its end."""
        agent = _agent(Scripted(script), script)
        numbers = count()

        async def job() -> Done:
            calls: list[int] = []
            ran.set(calls)
            session = SQLiteSession(f"session-{next(numbers)}", folder / "sessions.db")
            try:
                result = await Runner.run(agent, PROMPT, max_turns=WIDE, session=session)
            finally:
                session.close()
            return Done(answer=result.final_output, calls=len(calls))

        return job

    def streams(self, chunks: int) -> Callable[[], AsyncIterator[str]]:
        """Return a `Runner.run_streamed`."""
        return _stream(Agent(name="agent", model=Chatty(chunks)))

    def over_http(self, url: str, history: int) -> Callable[[], Awaitable[str]]:
        """Return a `Runner.run` by OpenAIChatCompletionsModel."""
        agent = _agent(self._chat(url), Script(turns=1))
        before = _items(history)

        async def ask() -> str:
            result = await Runner.run(agent, [*before, {"role": "user", "content": PROMPT}])
            return str(result.final_output)

        return ask

    def over_sse(self, url: str) -> Callable[[], AsyncIterator[str]]:
        """Return a `Runner.run_streamed` by OpenAIChatCompletionsModel."""
        return _stream(Agent(name="agent", model=self._chat(url)))

    def _chat(self, url: str) -> OpenAIChatCompletionsModel:
        client = AsyncOpenAI(base_url=url, api_key="key", max_retries=0)
        self._clients.append(client)
        return OpenAIChatCompletionsModel(model="m", openai_client=client)

    async def aclose(self) -> None:
        """Close the clients."""
        while self._clients:
            await self._clients.pop().close()


def _message(text: str) -> ResponseOutputMessage:
    content: list[Any] = [ResponseOutputText(text=text, type="output_text", annotations=[])]
    return ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=content)


def _agent(model: Model, script: Script) -> Agent[Any]:
    return Agent(name="agent", model=model, tools=[function_tool(adder(script.tool_s))] if script.turns else [])


def _items(history: int) -> list[Any]:
    """Return the earlier messages as items of the Responses API, which is what the Runner takes."""
    items: list[Any] = []
    for message in earlier(history):
        if message["role"] == "user":
            items.append(message)
        elif message["role"] == "tool":
            result = {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            items.append(result)
        else:
            items += [
                {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message["tool_calls"]
            ]
    return items


def _stream(agent: Agent[Any]) -> Callable[[], AsyncIterator[str]]:
    async def stream() -> AsyncIterator[str]:
        async for event in Runner.run_streamed(agent, PROMPT).stream_events():
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
                yield event.data.delta

    return stream


def contender() -> Contender:
    """Return the OpenAI Agents SDK."""
    return OpenAIAgents()
