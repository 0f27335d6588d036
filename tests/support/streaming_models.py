"""Models that stream their calls piece by piece, and all that a run of them is seen to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from agentfsm import Agent, Settings, StreamEvent
from agentfsm.ports import CallChunk, Emit, FinishChunk, FinishReason, Model, ProposedCall, Reply, Request
from agentfsm.testing.models import Call
from tests.support.checks import HANG_S

STREAM = Settings(stream=True)


def nobody(_chunk: object) -> None:
    """Take what nobody streams."""


class StreamingModel(Model):
    """Answers each request with the next of its functions, each of which is given `emit`."""

    name = "telling"

    def __init__(self, *lines: Callable[[Emit], Awaitable[Reply]]) -> None:
        """Take the functions."""
        self.lines = lines
        self.requests: list[Request] = []

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Call the next one."""
        self.requests.append(request)
        return await self.lines[len(self.requests) - 1](emit or nobody)


def reply_of(*calls: Call) -> Reply:
    """A reply that asks for these calls."""
    proposed = [ProposedCall(id=f"p{n}", name=each.name, arguments=each.arguments) for n, each in enumerate(calls)]
    return Reply(calls=tuple(proposed), finish_reason=FinishReason.TOOL_CALLS)


def chunk_of(index: int, wanted: Call) -> CallChunk:
    """A call in one piece."""
    return CallChunk(index=index, name=wanted.name, arguments=wanted.arguments)


FINISH = FinishChunk(reason=FinishReason.TOOL_CALLS)


async def done(_emit: Emit) -> Reply:
    """Answer."""
    return Reply(text="done")


def all_at_once(*calls: Call, then: Callable[[], Awaitable[object]] = anyio.wait_all_tasks_blocked) -> Model:
    """A model that streams the calls and waits until all that may start has; then it gives them whole, and answers."""

    async def line(emit: Emit) -> Reply:
        for index, each in enumerate(calls):
            emit(chunk_of(index, each))
        emit(FINISH)
        await then()
        return reply_of(*calls)

    return StreamingModel(line, done)


async def watched(agent: Agent, prompt: str = "go") -> tuple[list[StreamEvent], object]:
    """All events of a run, and the run."""
    with anyio.fail_after(HANG_S):
        async with agent.stream(prompt) as stream:
            events = [event async for event in stream]
    return events, stream.run
