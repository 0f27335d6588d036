"""The rows of the table: each does the same work on the floor and on agentfsm, and checks that it was done."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import attrs

from agentfsm import Agent, Limits, Tool, tool
from agentfsm.core.messages import AssistantMessage, Usage
from agentfsm.core.run import Header
from agentfsm.ports import (
    Commit,
    Emit,
    FinishReason,
    Lease,
    Model,
    ProposedCall,
    Reply,
    Request,
    Store,
    TextChunk,
)
from agentfsm.stores.memory import WRITTEN, MemoryStore
from benchmarks import floor

WIDE = Limits(turns=1_000, tokens=10_000_000)
# So that a long run is measured, and not its end.

Timed = Callable[[], Awaitable[float]]


@attrs.frozen(kw_only=True)
class Row:
    """One line of the table."""

    name: str
    what: str
    unit: str
    # What the absolute figures are: "us".
    floor: Timed
    # Does the work once and returns its cost, in the unit.
    ours: Timed
    goal: float
    # The ratio that is to be reached.
    repeats: int = 40


@tool(read_only=True)
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def bare_add(a: int, b: int) -> int:
    """Add two numbers, as the floor's tool."""
    return a + b


def _calls(turn: int, width: int) -> list[str]:
    return [json.dumps({"a": turn, "b": index}) for index in range(width)]


class Counting(Model):
    """Asks for `width` calls on each of `turns` turns, then answers; it does what the floor's model does."""

    name = "counting"

    def __init__(self, turns: int, width: int) -> None:
        """Take the shape of the runs."""
        self._turns, self._width = turns, width

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Reply according to the number of replies in the history."""
        turn = sum(isinstance(message, AssistantMessage) for message in request.messages)
        usage = Usage(input_tokens=1, output_tokens=1)
        if turn == self._turns:
            return Reply(text="done", usage=usage)
        calls = tuple(
            [ProposedCall(id=f"c{i}", name="add", arguments=text) for i, text in enumerate(_calls(turn, self._width))],
        )
        return Reply(calls=calls, finish_reason=FinishReason.TOOL_CALLS, usage=usage)


def bare_model(turns: int, width: int) -> Callable[[list[floor.Message]], Awaitable[floor.Message]]:
    """Return the floor's model: it asks for `width` calls in each of `turns` turns, then answers."""

    async def model(messages: list[floor.Message]) -> floor.Message:
        turn = sum(message["role"] == "assistant" for message in messages)
        if turn == turns:
            return {"role": "assistant", "content": "done"}
        calls = [
            {"id": f"c{i}", "type": "function", "function": {"name": "add", "arguments": text}}
            for i, text in enumerate(_calls(turn, width))
        ]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    return model


class NoStore(MemoryStore):
    """Keeps nothing, so that what is measured is the engine alone."""

    async def create(self, header: Header, **_options: object) -> tuple[Header, Lease]:
        """Give a lease of nothing."""
        return header, Lease(run_id=header.id, token=1, version=0)

    def append(self, *_args: object, **_options: object) -> Commit:
        """Say that it is written."""
        return WRITTEN

    def release(self, lease: Lease) -> Commit:
        """Say that it is done."""
        return WRITTEN


def _loop(
    name: str,
    what: str,
    *,
    turns: int,
    width: int,
    per: int,
    goal: float,
    times: int,
    store: Store | None = None,
) -> Row:
    """Return a row that runs a loop of this shape `times` times and divides its cost by `per`."""
    bare = bare_model(turns, width)
    tools: list[Tool[..., Any]] = [add] if turns else []
    agent = Agent(Counting(turns, width), tools=tools, limits=WIDE, store=store or MemoryStore())

    async def on_floor() -> float:
        start = time.perf_counter()
        for _ in range(times):
            answer = await floor.run(bare, {"add": bare_add}, "go")
            assert answer == "done"
        return (time.perf_counter() - start) / times / per * 1e6

    async def on_ours() -> float:
        start = time.perf_counter()
        for _ in range(times):
            run = await agent.run("go")
            assert run.output == "done"
            assert run.turn == turns + 1
        return (time.perf_counter() - start) / times / per * 1e6

    return Row(name=name, what=what, unit="us", floor=on_floor, ours=on_ours, goal=goal)


def _growth() -> Row:
    """Turn 200 over turn 10: the floor of this row is our own early turn, so the ratio is the growth."""
    agent = Agent(Counting(220, 1), tools=[add], limits=WIDE)

    async def around(turn: int) -> float:
        run = agent.start("go")
        times: list[float] = []
        async for run in agent.steps(run):  # noqa: B020  the run is what the steps yield
            times.append(time.perf_counter())
            if run.turn == turn + 10:
                break
        assert run.turn == turn + 10
        return (times[-1] - times[-1 - 40]) / 10 * 1e6

    return Row(
        name="growth",
        what="time per turn, turn 200 over turn 10",
        unit="us",
        floor=lambda: around(10),
        ours=lambda: around(200),
        goal=1.1,
        repeats=15,
    )


class Chatty(Model):
    """Answers in chunks of one word."""

    name = "chatty"

    def __init__(self, chunks: int) -> None:
        """Take the number of chunks."""
        self._words = [f"word{index} " for index in range(chunks)]

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Stream the words."""
        if emit is not None:
            for word in self._words:
                emit(TextChunk(text=word))
        return Reply(text="".join(self._words), usage=Usage(output_tokens=1))


def _chunk() -> Row:
    """Time a text chunk from the model to whoever iterates the stream."""
    chunks = 2_000
    agent = Agent(Chatty(chunks))

    async def words() -> Any:
        for index in range(chunks):
            yield f"word{index} "

    async def on_floor() -> float:
        start = time.perf_counter()
        text = [word async for word in words()]
        assert len(text) == chunks
        return (time.perf_counter() - start) / chunks * 1e6

    async def on_ours() -> float:
        start = time.perf_counter()
        async with agent.stream("go") as stream:
            text = "".join([event.text async for event in stream if hasattr(event, "text")])
        assert text.count("word") == chunks
        return (time.perf_counter() - start) / chunks * 1e6

    what = "text chunk through the stream"
    return Row(name="chunk", what=what, unit="us", floor=on_floor, ours=on_ours, goal=8.0)


def _import() -> Row:
    async def fresh(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)  # noqa: ASYNC221, S603  nothing else runs meanwhile
        return (time.perf_counter() - start) * 1e6

    return Row(
        name="import",
        what="a process that imports it, over one that imports asyncio and json",
        unit="us",
        floor=lambda: fresh("import asyncio, json"),
        ours=lambda: fresh("import agentfsm"),
        goal=2.0,
        repeats=7,
    )


def rows() -> list[Row]:
    """Return all rows, in the order in which they are printed."""
    return [
        _loop("run", "one run, no tools", turns=0, width=0, per=1, goal=15.0, times=200),
        _loop("turns", "10 turns of one call, per turn", turns=10, width=1, per=10, goal=4.0, times=20),
        _loop("engine", "the same without a store", turns=10, width=1, per=10, goal=4.0, times=20, store=NoStore()),
        _loop("fan-out", "100 parallel trivial calls, per call", turns=1, width=100, per=100, goal=3.0, times=5),
        _growth(),
        _chunk(),
        _import(),
    ]
