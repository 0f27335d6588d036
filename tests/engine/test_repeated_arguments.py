"""The arguments of a call that is run again after it was cut off."""

from __future__ import annotations

import anyio
import pytest

from agentfsm import Agent, tool
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say


def pay_in(currency, paid, *, hangs=False):
    """Return a tool with a default, which notes its arguments."""

    @tool(idempotent=True)
    async def pay(cents: int, currency: str = currency) -> str:
        """Pay."""
        paid.append((cents, currency))
        if hangs:
            await anyio.sleep_forever()
        return "paid"

    return pay


@pytest.mark.parametrize("currency", ["EUR", "USD"])
async def test_a_repetition_has_the_arguments_of_the_start(currency):
    """Another default would make it another order under the same key, so a person is asked."""
    paid = []
    model = ScriptedModel(say("", call("pay", cents=5)), "Done.")
    agent = Agent(model, tools=[pay_in("EUR", paid, hangs=True)], store=MemoryStore())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: agent.run("Pay", id="r"))
        while not paid:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    run = await agent.with_(tools=[pay_in(currency, paid)]).resume("r")
    if currency == "EUR":
        assert (run.output, paid) == ("Done.", [(5, "EUR")] * 2)
    else:
        assert "the parameters of its tool, or their defaults, have changed" in run.pending[0].error
        assert paid == [(5, "EUR")]
