"""A run that is retried, asks a sub-agent, fails, and is forked: what on-call has to understand from its traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfsm import Agent, Limits, Settings, tool
from agentfsm.models import OpenAIChat
from agentfsm.telemetry import Telemetry
from agentfsm.testing import LocalServer, WireReply, call, say

if TYPE_CHECKING:
    from agentfsm.core.run import Run

INSTRUCTIONS = "You help customers of the shop."


@tool(read_only=True)
async def find_stock(item: str) -> str:
    """Look up the stock."""
    raise LookupError(f"no shelf is named {item}")


async def tell_story(telemetry: Telemetry) -> tuple[Run[Any], Run[Any]]:
    """Return the failed run, whose trace was sent, and the fork that succeeds."""
    replies = [
        WireReply(status=503, error="overloaded"),
        WireReply(say("", call("finder", query="blue shoes"))),
        WireReply(say("", call("find_stock", item="blue"))),
        WireReply("They are not in stock."),
        WireReply(status=400, error="unknown parameter 'tier'"),
        WireReply("Blue shoes are sold out; they come back on Monday."),
    ]
    with LocalServer(replies) as server:

        def model() -> OpenAIChat:
            return OpenAIChat("gpt-4o", base_url=server.base_url, api_key="k")

        finder = Agent(model(), tools=[find_stock], name="finder", watch=[telemetry])
        shop = Agent(
            model(),
            tools=[finder.as_tool(description="Look for an item in all shops.")],
            instructions=INSTRUCTIONS,
            name="shop",
            version="2.3.1",
            settings=Settings(temperature=0.3, max_tokens=500),
            limits=Limits(retry_wait_s=0.001),
            watch=[telemetry],
        )
        failed = await shop.run("Do you have blue shoes?", session="s-1", id="order-17")
        fork = await shop.fork(failed.id, at=failed.version - 1, id="order-17-again")
        done = await shop.finish(fork)
        await finder.aclose()
        await shop.aclose()
    return failed, done
