"""A reply that is too large is not used, whoever wrote the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentfsm import Agent, Limits, StopReason, tool
from agentfsm.core.messages import NativeReply
from agentfsm.ports import ProposedCall, Reply, Request
from agentfsm.ports.model import MAX_NATIVE_REPLY_CHARS, MAX_REPLY_CALLS, MAX_REPLY_CHARS
from agentfsm.testing import FunctionModel
from tests.support.checks import calls_of, sound


def calls(count: int, chars: int) -> tuple[ProposedCall, ...]:
    """Return calls whose arguments have so many characters each."""
    return tuple(ProposedCall(id="", name="act", arguments="x" * chars) for _ in range(count))


class World:
    """A tool that notes the length of what it got."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.got: list[int] = []

        @tool(idempotent=True)
        async def act(text: str) -> str:
            """Take a text."""
            self.got.append(len(text))
            return "did it"

        self.tool: Any = act


LARGE = {
    "10,000 calls": (Reply(calls=calls(10_000, 2)), "more than 512 calls"),
    "long text": (Reply(text="x" * (MAX_REPLY_CHARS + 1)), "more than 8,388,608 characters"),
    "long arguments": (Reply(calls=calls(1, MAX_REPLY_CHARS + 1)), "more than 8,388,608 characters"),
    "arguments that are long together": (Reply(calls=calls(MAX_REPLY_CALLS, 16_385)), "more than 8,388,608 characters"),
    "text and arguments": (Reply(text="x" * MAX_REPLY_CHARS, calls=calls(1, 1)), "more than 8,388,608 characters"),
    "native": (
        Reply(text="x", native=NativeReply(provider="x", content="x" * (MAX_NATIVE_REPLY_CHARS + 1))),
        "more than 33,554,432 characters in native",
    ),
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_reply_that_is_too_large_is_not_used(store: Any, name: str) -> None:
    """It is asked for again as any reply that is of no use, no call of it is made, and the error names the bound."""
    reply, words = LARGE[name]
    world, asked = World(), list[Request]()

    def answer(request: Request) -> Reply:
        asked.append(request)
        return reply

    limits = Limits(model_retries=1, retry_wait_s=0.001, errors=1, tokens=10**9)
    agent = Agent(FunctionModel(answer), tools=[world.tool], store=store, limits=limits)
    run = await agent.run("go")
    assert run.stop_reason is StopReason.TOO_MANY_ERRORS
    assert words in run.errors[0].message
    assert (len(asked), world.got, calls_of(run.messages)) == (2, [], [])
    await sound(agent, run)


async def test_a_reply_of_the_largest_size_is_used(store: Any) -> None:
    """The bounds are what a reply may have."""
    world, chars = World(), MAX_REPLY_CHARS - 100
    wanted = ProposedCall(id="", name="act", arguments=json.dumps({"text": "x" * chars}))

    def answer(request: Request) -> Reply:
        return Reply(text="done") if calls_of(request.messages) else Reply(calls=(wanted,))

    agent = Agent(FunctionModel(answer), tools=[world.tool], store=store, limits=Limits(tokens=10**9))
    run = await agent.run("go")
    assert (run.output, world.got) == ("done", [chars])
