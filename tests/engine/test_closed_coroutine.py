"""A driving call whose coroutine is closed, or whose event loop ends, gives its lease back and says how far it came."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentfsm import Agent, Outcome, tool
from agentfsm.ports import Store
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import HANG_S


@pytest.fixture(params=["memory", "sqlite"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store that outlives event loops; the tests close it."""
    return MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "runs.db")


def worker(store: Store, begun: list[str], **options: object) -> Agent:
    """An agent whose tool never returns while nobody has begun it before."""

    @tool(**options)
    async def hold() -> str:
        """Hold."""
        begun.append("hold")
        if len(begun) == 1:
            await asyncio.get_running_loop().create_future()
        return "held"

    return Agent(ScriptedModel(say("", call("hold")), "done"), tools=[hold], store=store)


async def driven_until(begun: list[str], driving: Coroutine[Any, Any, object]) -> None:
    """Drive a coroutine by hand, as no task does, until its tool has begun."""
    while not begun:
        wish = driving.send(None)
        if wish is None:
            await asyncio.sleep(0)
        elif not begun:
            wish._asyncio_future_blocking = False
            await asyncio.wait([wish])


async def driven_until_durable(begun: list[str], driving: Coroutine[Any, Any, object], store: Store) -> None:
    """The same, and wait until the store has executed its jobs: an append may be lost if the loop closes before it."""
    await driven_until(begun, driving)
    await store.now()


async def taken_up(store: Store, agent: Agent, *, is_seen: bool = True, attempts: tuple[int, ...] = (2,)) -> None:
    """Another worker goes on, as soon as the store has written what it was given, or has seen that the loop is gone."""
    with anyio.fail_after(HANG_S):
        assert not is_seen or (await store.runs())[0].driven is False
        run = await Agent(ScriptedModel("done"), tools=list(agent.tools), store=store).resume("run")
    assert run.output == "done"
    [record] = await agent.audit("run")
    assert record.status is Outcome.DONE
    assert record.attempts in attempts
    await store.aclose()


@pytest.mark.parametrize("options", [{"read_only": True}, {"idempotent": True}], ids=["look", "put"])
def test_a_coroutine_that_is_closed_gives_its_lease_back(shelf, options):
    """Whoever closes it waits for nothing, and how far its call has come is in the journal."""

    async def play() -> None:
        begun: list[str] = []
        agent = worker(shelf, begun, **options)
        driving = agent.run("go", id="run")
        await driven_until(begun, driving)
        driving.close()
        await taken_up(shelf, agent)

    asyncio.run(play())


@pytest.mark.parametrize("options", [{"read_only": True}, {"idempotent": True}], ids=["look", "put"])
def test_a_coroutine_that_outlives_its_loop_gives_its_lease_back(shelf, options):
    """It is closed where no event loop runs, as when it is collected: anyio's scopes complain, the lease is free.

    The start of a read-only call is recorded when the call is cut off. A store with a thread drops the lease when it
    finds the loop closed; if that comes first, it refuses the record, and the journal has only the second attempt.
    """
    begun: list[str] = []
    agent = worker(shelf, begun, **options)
    driving = agent.run("go", id="run")
    asyncio.run(driven_until_durable(begun, driving, shelf))
    with pytest.raises(RuntimeError):
        driving.close()
    asyncio.run(taken_up(shelf, agent, attempts=(1, 2) if "read_only" in options else (2,)))


def test_a_loop_that_is_closed_under_a_run_keeps_no_lease(shelf):
    """Nobody has closed the coroutine, whose task is still there: the run can be taken up all the same."""
    begun: list[str] = []
    agent = worker(shelf, begun, idempotent=True)
    loop = asyncio.new_event_loop()
    task = loop.create_task(agent.run("go", id="run"))
    while not begun:
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
    asyncio.run(taken_up(shelf, agent, is_seen=False))
    assert not task.done()
    task._log_destroy_pending = False
    with pytest.raises(RuntimeError):
        task.get_coro().close()
