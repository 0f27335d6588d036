"""LangGraph, by `langchain.agents.create_agent`, which its documents name as the way to make an agent."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks.contender import ANSWER, PROMPT, Contender, Done, Job, Script, adder, earlier, ran, words

# Read when it is imported: nothing is traced, and nothing is sent.
os.environ["LANGSMITH_TRACING"] = "false"

import aiosqlite
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_messages
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

# Two steps for each turn, and a run of 9,999 steps would otherwise end.
LIMIT = {"recursion_limit": 1_000_000}
SYNCHRONOUS = {"normal": "NORMAL", "full": "FULL"}


class Scripted(BaseChatModel):
    """A chat model that follows the script."""

    script: Script

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **_options: Any) -> Any:
        """Take the tools as known."""
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **_options: Any) -> ChatResult:
        raise NotImplementedError

    async def _agenerate(self, messages: list[BaseMessage], *_: Any, **_options: Any) -> ChatResult:
        script = self.script
        if script.model_s:
            await asyncio.sleep(script.model_s)
        turn = script.turn(len(messages))
        if turn == script.turns:
            reply = AIMessage(content=ANSWER)
        else:
            calls = [
                {"name": "add", "args": json.loads(text), "id": f"t{turn}.{index}", "type": "tool_call"}
                for index, text in enumerate(script.arguments(turn))
            ]
            reply = AIMessage(content="", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=reply)])


class Chatty(BaseChatModel):
    """A chat model that answers in chunks."""

    texts: list[str]

    @property
    def _llm_type(self) -> str:
        return "chatty"

    def _generate(self, messages: list[BaseMessage], *_: Any, **_options: Any) -> ChatResult:
        raise NotImplementedError

    async def _astream(
        self, messages: list[BaseMessage], *_: Any, **_options: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for text in self.texts:
            yield ChatGenerationChunk(message=AIMessageChunk(content=text))


class LangGraph(Contender):
    """The graph of an agent; its store is AsyncSqliteSaver."""

    name = "LangGraph"
    packages = ("langgraph", "langchain", "langchain-core", "langchain-openai", "langgraph-checkpoint-sqlite")
    imports = "from langchain.agents import create_agent"
    first_tool = "from langchain_core.tools import StructuredTool; StructuredTool.from_function(coroutine=add)"

    def __init__(self) -> None:
        """Begin with nothing open."""
        self._files: list[aiosqlite.Connection] = []

    def runs(self, script: Script) -> Job:
        """Return an `ainvoke` of a graph without a checkpointer."""
        return _job(create_agent(Scripted(script=script), _tools(script)), dict)

    async def durable(self, script: Script, folder: Path) -> Job:
        """Return the same with a checkpoint for every step, written while the next runs, as is the default."""
        connection = await aiosqlite.connect(folder / "checkpoints.db")
        self._files.append(connection)
        await connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS[self.level]}")
        graph = create_agent(Scripted(script=script), _tools(script), checkpointer=AsyncSqliteSaver(connection))
        numbers = count()
        return _job(graph, lambda: {"configurable": {"thread_id": f"thread-{next(numbers)}"}})

    def streams(self, chunks: int) -> Callable[[], AsyncIterator[str]]:
        """Return an `astream` of the model's messages."""
        return _stream(Chatty(texts=words(chunks)))

    def over_http(self, url: str, history: int) -> Callable[[], Awaitable[str]]:
        """Return an `ainvoke` by ChatOpenAI."""
        graph = create_agent(_chat(url), [_tool(Script(turns=1))])
        before = convert_to_messages(earlier(history))

        async def ask() -> str:
            state = await graph.ainvoke({"messages": [*before, {"role": "user", "content": PROMPT}]})
            return str(state["messages"][-1].content)

        return ask

    def over_sse(self, url: str) -> Callable[[], AsyncIterator[str]]:
        """Return an `astream` by ChatOpenAI."""
        return _stream(_chat(url))

    async def aclose(self) -> None:
        """Close the files."""
        while self._files:
            await self._files.pop().close()


def _tool(script: Script) -> StructuredTool:
    add = adder(script.tool_s)
    add.__annotations__ = get_type_hints(add)
    # Else it would evaluate the names of the types anew at every call, which a user's file need not cause.
    return StructuredTool.from_function(coroutine=add)


def _tools(script: Script) -> list[StructuredTool]:
    return [_tool(script)] if script.turns else []


def _chat(url: str) -> ChatOpenAI:
    return ChatOpenAI(model="m", base_url=url, api_key="key", max_retries=0, use_responses_api=False)


def _job(graph: Any, options: Callable[[], dict[str, Any]]) -> Job:
    async def job() -> Done:
        calls: list[int] = []
        ran.set(calls)
        state = await graph.ainvoke({"messages": [{"role": "user", "content": PROMPT}]}, LIMIT | options())
        return Done(answer=state["messages"][-1].content, calls=len(calls))

    return job


def _stream(model: BaseChatModel) -> Callable[[], AsyncIterator[str]]:
    graph = create_agent(model)

    async def stream() -> AsyncIterator[str]:
        question = {"messages": [{"role": "user", "content": PROMPT}]}
        async for message, _ in graph.astream(question, stream_mode="messages"):
            if message.content:
                yield message.content

    return stream


def contender() -> Contender:
    """Return LangGraph."""
    return LangGraph()
