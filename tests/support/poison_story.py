"""Runs of one agent on one store, one of which ends every process that drives it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import attrs

from agentfsm import Agent, AssistantMessage, Found, Limits, RunContext, tool
from agentfsm.ports import Request, Store
from agentfsm.testing import FunctionModel, call, say
from agentfsm.testing.crash import report

POISON = "poison"
# Deaths while it is driven alone after which a run is paused.
CRASHES = 2
# Runs that a worker drives at once.
PARALLEL = 100


@attrs.frozen
class Books:
    """The file of effects: a line for each, with the id of its run."""

    path: str

    def write(self, run_id: str) -> None:
        """Do something that cannot be taken back."""
        book = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(book, f"{run_id}\n".encode())
        os.close(book)

    def effects(self) -> Counter[str]:
        """Return how many effects each run had."""
        return Counter(Path(self.path).read_text().split() if Path(self.path).exists() else ())


async def look_up(ctx: RunContext[Books], _arguments: object) -> object:
    """Say what became of a call: the books know."""
    return Found("paid") if ctx.deps.effects()[ctx.run_id] else "rerun"


@tool(on_unknown=look_up)
async def pay(ctx: RunContext[Books]) -> str:
    """Pay once, and take a while; one run takes the process with it."""
    if ctx.run_id == POISON:
        await anyio.sleep(0.02)  # all the others are at work
        os.kill(os.getpid(), signal.SIGKILL)
    await anyio.sleep(0.01)
    ctx.deps.write(ctx.run_id)
    await anyio.sleep(0.02)
    return "paid"


@tool(idempotent=True)
async def die(ctx: RunContext[Books]) -> str:
    """Take the process down, in one run of all; in the others it is harmless."""
    return await pay.function(ctx) if ctx.run_id == POISON else "harmless"


async def reply(request: Request) -> object:
    """Call one tool, then the other, then answer; the same in each run."""
    turn = sum(isinstance(message, AssistantMessage) for message in request.messages)
    return "done" if turn > 1 else say("", call(("die", "pay")[turn]))


def agent_on(store: Store) -> Agent:
    """Return the agent of all these runs."""
    return Agent(
        FunctionModel(reply), tools=[pay, die], name="cashier", store=store, limits=Limits(crashes=CRASHES, parallel=1)
    )


async def submit(store_of: Callable[[], Store], ids: list[str]) -> None:
    """Have runs driven by whoever comes."""
    agent = agent_on(store_of())
    for run_id in ids:
        await agent.submit("go", id=run_id)
    await agent.aclose()


async def work(store_of: Callable[[], Store], books: Books) -> None:
    """Drive all that can be moved on."""
    agent = agent_on(store_of())
    await agent.worker(deps=books, until_idle=True, parallel=PARALLEL)
    await agent.aclose()


async def hold(store_of: Callable[[], Store]) -> None:
    """Claim all runs and keep them."""
    store = store_of()
    claim = await store.claim("cashier", limit=PARALLEL)
    report(len(claim.leases))
    await anyio.sleep_forever()
    assert claim  # kept until here: a lease that nobody keeps is let go of
