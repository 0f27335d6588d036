"""agentfsm as a contender: validation, journal, events and limits on, and a tool that declares `read_only=True`.

The declaration is true, and what a user would write; what it saves is seen beside `benchmarks.bare`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import anyio
from anyio.lowlevel import checkpoint

from agentfsm import Agent, Limits, Tool, tool
from agentfsm.core.messages import AssistantMessage, Message, Outcome, TextPart, ToolCall, ToolResult, UserMessage
from agentfsm.core.usage import Usage
from agentfsm.models.openai.chat import OpenAIChat
from agentfsm.ports import Durability, Emit, FinishReason, Model, ProposedCall, Reply, Request, Store, TextChunk
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.streaming.stream import TextDelta
from benchmarks.contender import ANSWER, PROMPT, Contender, Done, Job, Script, adder, earlier, ran, words

# So that a long run is measured, and not its end.
WIDE = Limits(turns=20_000, tool_calls=20_000, tokens=10_000_000)
USAGE = Usage(input_tokens=1, output_tokens=1)


class Scripted(Model):
    """Follows a script."""

    name = "scripted"
    window_tokens = 10_000_000
    # So that nothing is cut off a long history, whose length tells the turn.

    def __init__(self, script: Script) -> None:
        """Take the script."""
        self._script = script

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Reply according to the length of the history."""
        script = self._script
        if script.model_s:
            await anyio.sleep(script.model_s)
        turn = script.turn(len(request.messages))
        if turn == script.turns:
            return Reply(text=ANSWER, usage=USAGE)
        calls = [
            ProposedCall(id=f"c{index}", name="add", arguments=text)
            for index, text in enumerate(script.arguments(turn))
        ]
        return Reply(calls=tuple(calls), finish_reason=FinishReason.TOOL_CALLS, usage=USAGE)


class Chatty(Model):
    """Answers in many texts."""

    name = "chatty"

    def __init__(self, chunks: int, burst: int) -> None:
        """Take the number of texts, and how many arrive together."""
        self._words, self._burst = words(chunks), burst

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Stream the words."""
        assert emit is not None
        for start in range(0, len(self._words), self._burst):
            await checkpoint()
            for word in self._words[start : start + self._burst]:
                emit(TextChunk(word))
        return Reply(text="".join(self._words), usage=USAGE)


class Ours(Contender):
    """agentfsm."""

    name = "agentfsm, `read_only=True`"
    packages = ("agentfsm", "anyio", "attrs", "openai", "pydantic")
    imports = "from agentfsm import Agent"
    first_tool = "from agentfsm import tool; tool(add)"
    mcp_server = "agentfsm"
    read_only = True

    def __init__(self) -> None:
        """Begin with nothing open."""
        self._open: list[Store | Model] = []

    def runs(self, script: Script) -> Job:
        """Return a run of an agent with its store in memory."""
        return job(self._following(script, MemoryStore()), script)

    async def durable(self, script: Script, folder: Path) -> Job:
        """Return the same over SQLite."""
        store = SQLiteStore(folder / "runs.db")
        self._open.append(store)
        return job(self._following(script, store, durability=cast("Durability", self.level)), script)

    def streams(self, chunks: int) -> Callable[[], AsyncIterator[str]]:
        """Return `agent.stream`."""
        agent = Agent(Chatty(chunks, self.burst), limits=WIDE)
        return lambda: texts(agent)

    def over_http(self, url: str, history: int) -> Callable[[], Awaitable[str]]:
        """Return a run that goes on from a history.

        The messages are the same values each time, as in a run each message is made once, and sent with every request.
        """
        messages = list(map(message, earlier(history)))
        agent = Agent(self._model(url), tools=[summing(0.0, read_only=self.read_only)], limits=WIDE)

        async def ask() -> str:
            return (await agent.run(PROMPT, messages=messages)).output

        return ask

    def over_sse(self, url: str) -> Callable[[], AsyncIterator[str]]:
        """Return `agent.stream`."""
        agent = Agent(self._model(url), limits=WIDE)
        return lambda: texts(agent)

    def _following(self, script: Script, store: Store, **options: Any) -> Agent:
        return following(script, store, tools=[summing(script.tool_s, read_only=self.read_only)], **options)

    def _model(self, url: str) -> Model:
        model = OpenAIChat("m", base_url=url, api_key="key")
        self._open.append(model)
        return model

    async def aclose(self) -> None:
        """Close the stores and the models."""
        while self._open:
            await self._open.pop().aclose()


def summing(tool_s: float, *, read_only: bool = True, **declared: Any) -> Tool[..., Any]:
    """Return the tool, which changes nothing, and says so unless it is told otherwise."""
    return tool(read_only=read_only, **declared)(adder(tool_s))


def following(script: Script, store: Store, **options: Any) -> Agent:
    """Return an agent that follows a script; its options may differ from the defaults."""
    settings = {"tools": [summing(script.tool_s)], "limits": WIDE, "store": store, **options}
    return Agent(Scripted(script), **settings)


def job(agent: Agent, script: Script) -> Job:
    """Return a run of an agent that follows the script."""

    async def once() -> Done:
        calls: list[int] = []
        ran.set(calls)
        run = await agent.run(PROMPT)
        assert run.turn == script.turns + 1
        return Done(answer=run.output, calls=len(calls))

    return once


async def texts(agent: Agent) -> AsyncIterator[str]:
    """Yield the texts of a stream as a user reads them."""
    async with agent.stream(PROMPT) as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                yield event.text


def message(sent: dict[str, Any]) -> Message:
    """Return a message as agentfsm has it."""
    match sent:
        case {"role": "user", "content": text}:
            return UserMessage(parts=(TextPart(text=text),))
        case {"role": "assistant", "tool_calls": [{"id": call_id, "function": {"name": name, "arguments": arguments}}]}:
            return AssistantMessage(calls=(ToolCall(id=call_id, name=name, arguments=arguments),))
        case {"role": "tool", "tool_call_id": call_id, "content": text}:
            return ToolResult(call_id=call_id, tool="add", outcome=Outcome.DONE, content=text)
    raise AssertionError(sent)


def contender() -> Contender:
    """Return agentfsm."""
    return Ours()
