"""Calls that were under way when their worker died."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentfsm import Agent, Run, RunContext, Tool, tool
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.tool import Arguments
from tests.support.failing_stores import CrashingStore, WorkerKilled


class Bank:
    """Pays, and remembers the keys under which it did."""

    def __init__(self) -> None:
        """Begin with nothing paid."""
        self.paid: list[str] = []
        self.asked: list[tuple[RunContext[Any], Arguments]] = []
        # What functions that find out were given.

    def tool(self, mortal: CrashingStore | None = None, **options: object) -> Tool[..., Any]:
        """A tool that pays; with a mortal store its process dies right after."""

        @tool(**options)
        async def pay(ctx: RunContext[Any], to: str, cents: int = 5) -> str:
            """Pay."""
            self.paid.append(ctx.idempotency_key)
            if mortal is not None:
                mortal.dead = True
                raise WorkerKilled
            return f"paid {to} {cents}"

        return pay


async def crashed(
    store: Any, bank: Bank, mortal: Callable[..., CrashingStore] = CrashingStore, **options: object
) -> str:
    """Kill a worker right after its effect; return the id of the run."""
    dying = mortal(store, 1_000, written=False)
    agent = Agent(ScriptedModel(say("", call("pay", to="Ann"))), tools=[bank.tool(dying, **options)], store=dying)
    with pytest.raises(WorkerKilled):
        await agent.run("go", id="mine")
    return "mine"


async def recovered(store: Any, **options: Any) -> tuple[Run, Bank, Agent]:
    """Kill a worker in mid-call, and let another one go on."""
    bank = Bank()
    agent = Agent(ScriptedModel("done"), tools=[bank.tool(**options)], store=store)
    return await agent.resume(await crashed(store, bank, **options)), bank, agent
