"""Workers that want the same runs: both at the same moment, or one because the other had stopped.

Each run has one call that may be made once, counted outside of all processes (see `crash_story`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio

from agentfsm import Agent, AgentError, LeaseHeldError, RunContext, tool
from agentfsm.engine.execution.journal import Journal
from agentfsm.ports import Store
from agentfsm.stores.sqlite import store as sqlite
from agentfsm.stores.threaded.group_commit import GroupCommitWriter
from agentfsm.testing.crash import report, wait_for_go
from tests.support.crash_story import DYING, Speaker, World, refund


def payer(store: Store) -> Agent:
    """Return the agent of both workers."""
    return Agent(Speaker((("refund",),)), tools=[refund], store=store, name="payer", limits=DYING)


async def approved(store: Callable[[], Store], run_ids: Sequence[str]) -> None:
    """Take runs to where a person has said yes, and nobody has gone on."""

    async def begin(run_id: str) -> None:
        run = await agent.run("go", id=run_id)
        await agent.approve(run_id, run.pending[0].call_id)

    async with payer(store()) as agent, anyio.create_task_group() as tasks:
        for run_id in run_ids:
            tasks.start_soon(begin, run_id)


async def racer(
    store: Callable[[], Store], books: str, heats: Sequence[Sequence[str]], *, wait: bool = False, fault: str = ""
) -> None:
    """Resume the runs of each heat at a word from outside, then once more; tell what came of it.

    What it tells is the number of runs that somebody else drove at that moment.
    """
    FAULTS[fault]()
    beaten = 0

    async def resume(run_id: str) -> None:
        nonlocal beaten
        try:
            run = await agent.resume(run_id, deps=World(store, run_id, books), wait=wait)
            assert run.output == "all done"
        except LeaseHeldError:
            beaten += 1

    async with payer(store()) as agent:
        await agent.store.now()  # it is open
        for heat in heats:
            report("ready")
            await wait_for_go()
            async with anyio.create_task_group() as tasks:
                for run_id in heat:
                    tasks.start_soon(resume, run_id)
        report(beaten)


# A worker that stops.


@tool(idempotent=True)
async def halt(ctx: RunContext[Any]) -> str:
    """Wait for a word from outside, where the worker is one that shall stop."""
    _world, stops = ctx.deps
    if stops:
        report("halted")
        await wait_for_go()
    return "gone on"


@tool(name="pay")
async def pay_once(ctx: RunContext[Any]) -> str:
    """Act once."""
    world, _ = ctx.deps
    return world.write(ctx.idempotency_key, "pay")


async def stopping(
    make: Callable[[], Store], world: World, *, stops: bool, beats: bool = True, fault: str = ""
) -> None:
    """Drive a run, and tell what became of it."""
    FAULTS[fault]()
    if not beats:
        GroupCommitWriter._run_upkeep = lambda _writer: None
    store = make()
    agent = Agent(Speaker((("halt", "pay"),)), tools=[halt, pay_once], store=store, name="payer", limits=DYING)
    async with agent:
        try:
            if stops:
                await agent.run("go", id=world.run_id, deps=(world, stops))
            else:
                await agent.resume(world.run_id, deps=(world, stops))
            report("done")
        except AgentError as error:
            report(type(error).__name__)


# What is broken on purpose, in the worker's process.


def granted() -> None:
    """Give the lease to whoever asks."""
    sqlite._SQLiteBackend._is_driven = lambda *_: False


def unchecked() -> None:
    """Acknowledge the append of whoever asks, also where another owns the run."""
    append = sqlite._SQLiteBackend.append

    def appended(ledger: Any, entry: Any) -> bool:
        try:
            return append(ledger, entry)
        except AgentError:
            ledger._commit_callbacks.clear()  # nor is the owner told
            return True

    sqlite._SQLiteBackend.append = appended
    Journal.check_lease = lambda _journal: None  # the engine's own look before an effect


def granted_unchecked() -> None:
    """Do both."""
    granted()
    unchecked()


FAULTS = {
    "": lambda: None,
    "granted": granted,
    "unchecked": unchecked,
    "granted, unchecked": granted_unchecked,
}
