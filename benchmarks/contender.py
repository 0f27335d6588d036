"""What takes part: a framework, seen as the few things that every row asks of it.

The floor, agentfsm and each peer do the same work, so the rows are written once, over a contender. Its module has a
function `contender()` that makes one, by which `python -m benchmarks.one MODULE` finds it. This file imports the
standard library only: it runs in the environment of each peer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

# What every run ends with.
ANSWER = "done"
PROMPT = "Add the numbers."
# Texts that arrive together, as from one read of a socket.
BURST = 100
# A user's function before it is made a tool, as source.
FUNCTION = '''async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''
# The tool, as a chat completions server is told of it.
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """The work: a model that asks for `width` calls of `add(a, b)` in each of `turns` turns, then answers.

    In turn t (from 0) call i (from 0) is `add(a=t, b=i)`: equal calls would be found to be a loop by some.
    """

    turns: int
    width: int = 1
    model_s: float = 0.0
    # Seconds that each reply takes, slept.
    tool_s: float = 0.0
    # Seconds that each call takes, slept.

    @property
    def calls(self) -> int:
        """Calls in all."""
        return self.turns * self.width

    def turn(self, messages: int) -> int:
        """Return which turn it is, from 0, by how many messages the history has: the prompt, then whole turns.

        So the model costs next to nothing, however long the history is.
        """
        return (messages - 1) // (1 + self.width)

    def arguments(self, turn: int) -> list[str]:
        """Return the arguments of the calls of a turn, as JSON texts."""
        return [json.dumps({"a": turn, "b": index}) for index in range(self.width)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """What a run came to, so that it can be checked."""

    answer: str
    calls: int
    # How many times the tool truly ran in this run.


# Does the work once; what is made beforehand (agent, graph, tools) is not measured.
Job = Callable[[], Awaitable[Done]]

# For counting where many runs share a tool: a run sets it to an empty list, and each call adds to it.
ran: ContextVar[list[int]] = ContextVar("ran")


def adder(tool_s: float) -> Callable[[int, int], Awaitable[int]]:
    """Return the tool `add`, which takes so many seconds and counts itself in `ran`."""

    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        ran.get().append(a)
        if tool_s:
            await asyncio.sleep(tool_s)
        return a + b

    return add


def words(chunks: int) -> list[str]:
    """Return the texts in which a streamed answer arrives."""
    return [f"word{index} " for index in range(chunks)]


def earlier(history: int) -> list[dict[str, Any]]:
    """Return the history of a question over HTTP, as a chat completions server takes it: `history` calls of `add`."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
    for turn in range(history):
        function = {"name": "add", "arguments": json.dumps({"a": turn, "b": 0})}
        call = {"id": f"t{turn + 1}.0", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(turn)})
    return messages


class NotOfferedError(Exception):
    """The framework has no such thing; the text says what is missing."""


class Contender(ABC):
    """A framework. Each method makes everything ready and returns what is measured; a run is new each time."""

    name: str
    # As in the table.
    packages: tuple[str, ...] = ()
    # Those whose versions are told.
    imports: str
    # The statement that a user's program begins with.
    first_tool: str
    # The statements that make a tool of the function `add` of `FUNCTION`, which behaves as `adder(0.0)`.
    level: str = "normal"
    # What a step on disk survives, where one may choose: "normal" the death of the process, "full" a power cut. It is
    # set before `durable` is called; who offers no choice leaves it alone.
    burst: int = BURST
    # Texts of a streamed answer that arrive together, where the framework may merge them. It is set before `streams` is
    # called; who hands each on by itself leaves it alone.
    mcp_server: str = ""
    # The kind of its MCP server in `benchmarks.mcp_servers`; the peers are not compared in this.

    @abstractmethod
    def runs(self, script: Script) -> Job:
        """Return a run of the script in memory, by the framework's usual way to run an agent."""

    @abstractmethod
    async def durable(self, script: Script, folder: Path) -> Job:
        """Return the same with every step on disk, by the framework's own store for SQLite, in this empty folder.

        All runs share one store, and each is a conversation of its own.

        Raises:
            NotOfferedError: where it has no durable store.
        """

    @abstractmethod
    def streams(self, chunks: int) -> Callable[[], AsyncIterator[str]]:
        """Return a run without tools whose answer arrives as `chunks` texts (`words`), handed to the consumer."""

    @abstractmethod
    def over_http(self, url: str, history: int) -> Callable[[], Awaitable[str]]:
        """Return one question to an OpenAI-compatible server, with `history` earlier turns, each with one call.

        Through the framework's own adapter for chat completions, not streamed. What is sent is `earlier(history)`, the
        user's message `PROMPT`, and the tool `add`; the answer is `ANSWER`. The server refuses a request with fewer
        than `history` results of calls in it. `url` ends in /v1, and any key and model name will do.
        """

    @abstractmethod
    def over_sse(self, url: str) -> Callable[[], AsyncIterator[str]]:
        """Return one streamed question to that server: the texts as they reach the consumer."""

    async def aclose(self) -> None:  # noqa: B027  who opens nothing has nothing to close
        """Close stores and clients. More may be asked for afterwards: `durable` in another folder, for example."""
