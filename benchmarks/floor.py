"""The floor: what an agent costs that has no machine, no journal, no limits and no validation.

A list of messages, a coroutine for a model, a dict of tools, json.loads and asyncio.gather: what one writes on the
first day, and what every ratio here refers to.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.contender import ANSWER, PROMPT, TOOL, Contender, Done, Job, Script, adder, earlier, ran, words

Message = dict[str, Any]
Model = Callable[[list[Message]], Awaitable[Message]]
Tools = dict[str, Callable[..., Awaitable[object]]]


async def run(model: Model, tools: Tools, prompt: str) -> str:
    """Drive the loop until the model answers."""
    messages: list[Message] = [{"role": "user", "content": prompt}]

    async def call(each: Message) -> Message:
        function = each["function"]
        result = await tools[function["name"]](**json.loads(function["arguments"]))
        return {"role": "tool", "tool_call_id": each["id"], "content": str(result)}

    while True:
        reply = await model(messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return str(reply["content"])
        messages.extend(await asyncio.gather(*[call(each) for each in reply["tool_calls"]]))


def scripted(script: Script) -> Model:
    """Return a model that follows the script."""

    async def model(messages: list[Message]) -> Message:
        if script.model_s:
            await asyncio.sleep(script.model_s)
        turn = script.turn(len(messages))
        if turn == script.turns:
            return {"role": "assistant", "content": ANSWER}
        calls = [
            {"id": f"c{index}", "type": "function", "function": {"name": "add", "arguments": text}}
            for index, text in enumerate(script.arguments(turn))
        ]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    return model


class Floor(Contender):
    """The bare loop, and the least that one writes by hand for a disk, a stream and a server."""

    name = "floor"
    imports = "import asyncio, json"
    first_tool = "tools = {'add': add}"
    mcp_server = "sdk"

    def __init__(self) -> None:
        """Begin with nothing open."""
        self._files: list[sqlite3.Connection] = []
        self._clients: list[Any] = []

    def runs(self, script: Script) -> Job:
        """Return a run of the bare loop."""
        return _job(scripted(script), script)

    async def durable(self, script: Script, folder: Path) -> Job:
        """Return a run of the bare loop that inserts and commits once for each turn."""
        db = sqlite3.connect(folder / "runs.db", isolation_level=None)
        self._files.append(db)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {self.level}")
        db.execute("CREATE TABLE IF NOT EXISTS steps (run TEXT, body TEXT)")
        model = scripted(script)

        async def kept(messages: list[Message]) -> Message:
            # What the last turn added; it is written before the model is asked for the next.
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT INTO steps VALUES ('run', ?)", (json.dumps(messages[-1 - script.width :]),))
            db.execute("COMMIT")
            return await model(messages)

        return _job(kept, script)

    def streams(self, chunks: int) -> Callable[[], AsyncIterator[str]]:
        """Return the bare loop with a model that is an async generator: it hands each text on and keeps the answer."""
        texts = words(chunks)

        async def model(_messages: list[Message]) -> AsyncIterator[str]:
            for text in texts:
                yield text

        async def stream() -> AsyncIterator[str]:
            messages: list[Message] = [{"role": "user", "content": PROMPT}]
            answer: list[str] = []
            async for text in model(messages):
                answer.append(text)
                yield text
            messages.append({"role": "assistant", "content": "".join(answer)})

        return stream

    def over_http(self, url: str, history: int) -> Callable[[], Awaitable[str]]:
        """Return a call of `create()`, the way the openai package is meant to be used."""
        client = self._client(url)
        messages = [*earlier(history), {"role": "user", "content": PROMPT}]

        async def ask() -> str:
            reply = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            return str(reply.choices[0].message.content)

        return ask

    def over_sse(self, url: str) -> Callable[[], AsyncIterator[str]]:
        """Return a call of `create(stream=True)`."""
        client = self._client(url)
        messages = [{"role": "user", "content": PROMPT}]

        async def stream() -> AsyncIterator[str]:
            async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True):
                if chunk.choices and (text := chunk.choices[0].delta.content):
                    yield text

        return stream

    def _client(self, url: str) -> Any:
        import openai  # noqa: PLC0415  only two rows need it, and not every environment has it

        client = openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0)
        self._clients.append(client)
        return client

    async def aclose(self) -> None:
        """Close the files and the clients."""
        while self._files:
            self._files.pop().close()
        while self._clients:
            await self._clients.pop().close()


def _job(model: Model, script: Script) -> Job:
    tools: Tools = {"add": adder(script.tool_s)}

    async def job() -> Done:
        calls: list[int] = []
        ran.set(calls)
        return Done(answer=await run(model, tools, PROMPT), calls=len(calls))

    return job


def contender() -> Contender:
    """Return the floor."""
    return Floor()
