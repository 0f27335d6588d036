"""The agent of the service: it takes orders, and asks for approval before it delivers. It needs no key for a model."""

from __future__ import annotations

from agentfsm import Agent, Usage, tool
from agentfsm.core.messages import ToolResult
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request


class Clerk(Model):
    """Stands for a model: it orders the delivery of what the user names, and reports how that ended."""

    name = "clerk"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:  # noqa: ARG002  it streams nothing
        """Return a call of `deliver`, or the answer after its result."""
        last = request.messages[-1]
        usage = Usage(input_tokens=10, output_tokens=10)
        if isinstance(last, ToolResult):
            return Reply(text=f"Your order: {last.content}.", usage=usage)
        call = ProposedCall(id="c", name="deliver", arguments=f'{{"item": "{last.text.split()[-1]}"}}')
        return Reply(calls=(call,), usage=usage)


@tool(requires_approval=True)
async def deliver(item: str) -> str:
    """Deliver an item."""
    return f"{item} delivered"


agent = Agent(Clerk(), tools=[deliver], name="orders")
