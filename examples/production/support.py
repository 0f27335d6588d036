"""An agent that passes `agentfsm doctor --production`. It needs no key: two stand-ins take the place of its models."""

from __future__ import annotations

import re
from pathlib import Path

from agentfsm import Agent, Limits, RunContext, Spend, Usage, tool
from agentfsm.context import Context, SlidingWindow, Summarise, TrimResults
from agentfsm.core.messages import ToolResult
from agentfsm.evals import Case, Suite
from agentfsm.guards import Guard, exit_filter
from agentfsm.models import Fallback
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request
from agentfsm.prompts import Prompts, contains
from agentfsm.releases import Rollout
from agentfsm.telemetry import Telemetry

ORDERS = {number: ("sent", "paid", "open")[number % 3] for number in range(1, 101)}


class Clerk(Model):
    """Stands for a model, at the price of a small one: it looks up the order in the question, or refunds it."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:  # noqa: ARG002  it streams nothing
        """Return a call of a tool, or the answer after its result."""
        last = request.messages[-1]
        usage = Usage(input_tokens=400, output_tokens=30)
        if isinstance(last, ToolResult):
            return Reply(text=f"Your order: {last.content}.", usage=usage)
        number = re.search(r"\d+", last.text)
        if number is None:
            return Reply(text="Which order do you mean?", usage=usage)
        name = "refund" if "refund" in last.text else "find_order"
        return Reply(calls=(ProposedCall(id="c", name=name, arguments=f'{{"number": {number[0]}}}'),), usage=usage)

    def cost_usd(self, usage: Usage) -> float:
        """Return the cost at 0.15 and 0.60 US dollars for a million tokens in and out."""
        return (usage.input_tokens * 0.15 + usage.output_tokens * 0.60) / 1_000_000


@tool(read_only=True, reads_private=True, timeout_s=5)
async def find_order(number: int) -> str:
    """Find an order by its number, and return its state."""
    return ORDERS.get(number, "unknown")


@tool(idempotent=True, irreversible=True, requires_approval=True, timeout_s=10)
async def refund(ctx: RunContext[None], number: int) -> str:
    """Refund an order to the customer. Repeating the call with its key refunds nothing twice."""
    return f"{number} refunded under {ctx.idempotency_key}"


agent = Agent(
    Fallback(Clerk("clerk-large"), Clerk("clerk-small")),
    name="support",
    version="1.0.0",
    tools=[find_order, refund],
    instructions=Prompts(Path(__file__).parent / "prompts")["support", "1.0.0"],
    guards=[Guard.default(), Guard(exit_filter(requested=()))],
    limits=Limits(usd=0.10, turns=10, tokens=20_000),
    spend=[Spend(per="day", usd=20)],
    context=Context((TrimResults(), Summarise(), SlidingWindow())),
    watch=[Telemetry()],
)

rollout = Rollout("support", {"before": agent.with_(version="0.9.0"), "now": agent})

suite = Suite(
    [
        Case(
            input=f"What about my order {number}?",
            id=f"order-{number}",
            paths=[["find_order"]],
            expect=[contains(state)],
        )
        for number, state in list(ORDERS.items())[:50]
    ],
    name="support",
)
