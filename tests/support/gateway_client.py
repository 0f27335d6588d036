"""An agent that asks for approval, and the events that a client of a gateway reads."""

import json

from agentfsm import Agent, tool
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.gateways import named, read_caller, serving

__all__ = ["events_of", "named", "pay", "paying", "read_caller", "serving"]


@tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


def paying(store=None, **options):
    return Agent(
        ScriptedModel(say("", call("pay", amount=5)), say("done")),
        tools=[pay],
        name="shop",
        store=store or MemoryStore(),
        **options,
    )


async def events_of(client, run_id, *, after="", until=None, **options):
    """Return the events of a stream, as (id, data), until it ends or an event of this type has come."""
    found, position = [], None
    async with client.stream("GET", f"/v1/runs/{run_id}/events", params={"after": after}, **options) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                position = line[4:]
            elif line.startswith("data: ") and position is not None:
                found.append((position, json.loads(line[6:])))
                position = None
                if until is not None and found[-1][1]["event"]["is"] == until:
                    break
    return found
