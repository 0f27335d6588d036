"""The last append of a run, on a store that takes its time: whoever drives hears what became of it."""

from __future__ import annotations

import anyio
import attrs
import pytest

from agentfsm import Agent, StoreError
from agentfsm.engine.execution import journal
from agentfsm.ports import PendingWrite
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel


@attrs.define
class Late:
    """A commit whose outcome is known when the gate is open."""

    commit: PendingWrite
    gate: anyio.Event
    is_done: bool = False

    async def wait(self) -> bool:
        await self.gate.wait()
        return await self.commit.wait()


class SlowStore(MemoryStore):
    """Writes the end of a run, but says so late."""

    def append(self, lease, run, events, *, taken=(), final=False):
        commit = MemoryStore.append(self, lease, run, events, taken=taken, final=final)
        return Late(commit, self.gate) if final else commit


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(journal, "CLOSE_TIMEOUT_S", 0.0)
    return SlowStore()


async def test_a_store_that_takes_its_time_is_waited_for(store):
    """Who was not cut off waits as long as the store does: the run is over, and the caller is told of no error."""
    store.gate = anyio.Event()
    agent = Agent(ScriptedModel("Fine."), store=store)
    async with anyio.create_task_group() as group:

        async def drive():
            assert (await agent.run("Hi")).output == "Fine."

        group.start_soon(drive)
        await anyio.wait_all_tasks_blocked()
        store.gate.set()


async def test_who_is_cut_off_does_not_wait_without_end(store):
    """A driving call that is cancelled waits a moment for its last append, and then says that it does not know."""
    store.gate = anyio.Event()
    agent = Agent(ScriptedModel("Fine."), store=store)
    async with anyio.create_task_group() as group:

        async def drive():
            with pytest.raises(StoreError, match="did not write the end of run"):
                await agent.run("Hi")

        group.start_soon(drive)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()


async def test_who_is_cut_off_hears_of_what_is_written_in_time(store, monkeypatch):
    """The end that is written a moment after the cancellation is the end of the run."""
    monkeypatch.setattr(journal, "CLOSE_TIMEOUT_S", 60.0)
    store.gate = anyio.Event()
    seen = []
    agent = Agent(ScriptedModel("Fine."), store=store)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(agent.run, "Hi")
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
                seen = await store.runs()
                store.gate.set()
    assert [(line.state, line.driven) for line in seen] == [("done", True)]
    assert [(line.state, line.driven) for line in await store.runs()] == [("done", False)]
