"""A model says that it has refunded an order, without doing so. No key is needed.

    python examples/claims.py

A scripted model plays two support agents. The first says "done" without a call, reads that no call of the tool is done,
makes the call, and then answers. The second insists: its answer is given, with the mark that the refund was not done.
"""

import anyio

from agentfsm import Agent, Claims, tool
from agentfsm.testing import ScriptedModel, call, say

refunds: list[str] = []


@tool
async def refund(order: int, cents: int) -> str:
    """Refund a part of an order."""
    refunds.append(f"{cents} cents of order {order}")
    return "refunded"


REFUND = {"order": 17, "cents": 500}
ANSWER = say("", call("final_answer", result="It is refunded.", claims=[{"tool": "refund", "arguments": REFUND}]))


async def ask(model: ScriptedModel) -> None:
    """Ask for the refund, and print what was said and what was done."""
    async with Agent(model, tools=[refund], claims=Claims()) as agent:
        run = await agent.run("Refund 5 euros of order 17.")
    print(f"{run.output} ({run.turn} turns)")
    for claim in run.claims or ():
        print(f"  {claim}: {f'done by {claim.call_id}' if claim.call_id else f'not done, {claim.fault}'}")


async def main() -> None:
    """Let an agent correct itself, and one that does not."""
    await ask(ScriptedModel(ANSWER, say("", call("refund", **REFUND)), ANSWER))
    await ask(ScriptedModel(ANSWER, ANSWER, ANSWER))
    print(f"refunds: {', '.join(refunds)}")


if __name__ == "__main__":
    anyio.run(main)
