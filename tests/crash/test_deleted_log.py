"""The log of a SQLite file is deleted under a live worker: what it was told to be written is not lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from agentfsm import Agent, State
from agentfsm.ports import Store
from agentfsm.stores.threaded.group_commit import GroupCommitWriter
from agentfsm.testing import ScriptedModel
from agentfsm.testing.crash import ForkServer, report, wait_for_go

pytestmark = pytest.mark.parametrize("store_of", ["sqlite"], indirect=True)


async def worker(make: Callable[[], Store]) -> None:
    """Drive one run after another, each at a word of the parent; nothing is moved into the file meanwhile."""
    GroupCommitWriter._run_upkeep = lambda _writer: None
    async with Agent(ScriptedModel("one", "two"), store=make()) as agent:
        for name in ("first", "second"):
            await wait_for_go()
            report((await agent.run("go", id=name)).state)
        await wait_for_go()


@pytest.mark.parametrize("names", [("-wal",), ("-shm",), ("-wal", "-shm")], ids="+".join)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_deleted_log_costs_no_acknowledged_run(
    fork_server: ForkServer, store_of: Callable[[], Store], folder: Path, names: tuple[str, ...], backend: str
) -> None:
    """A worker finishes a run, its log is deleted, it finishes another one and is killed: both are in the file."""
    process = fork_server.start(worker, store_of, backend=backend)
    process.go()
    assert process.next_report() is State.DONE
    for name in names:
        (folder / f"runs.db{name}").unlink()
    process.go()
    assert process.next_report() is State.DONE
    assert process.end(kill_after_s=0).killed
    assert anyio.run(states, store_of) == {"first": State.DONE, "second": State.DONE}


async def states(make: Callable[[], Store]) -> dict[str, State]:
    """Return the state of each run, as a process sees it that opens the file anew."""
    store = make()
    found = {line.id: line.state for line in await store.runs()}
    await store.aclose()
    return found
