"""Learners that are killed: each run leaves one episode, and its facts once, whoever goes on."""

from __future__ import annotations

import json
import random
from functools import partial
from itertools import count
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Agent
from agentfsm.core.run_ids import name_extraction
from agentfsm.memory import Learner, Memory, SQLiteIndex
from agentfsm.memory.learner import LEASE_S
from agentfsm.ports import Emit, Model, Reply, Request, SystemClock
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel
from agentfsm.testing.crash import connect, crash_point, report

LEARNED = json.dumps(
    {
        "approach": "Looked the sales up",
        "lessons": ["Ask for the year first"],
        "facts": [{"text": "Ann works in Porto"}, {"text": "Ann wants short reports", "kind": "preference"}],
        "importance": 0.5,
    }
)


class LaterClock(SystemClock):
    """The clock after a killed process has lost its place as the follower."""

    def __init__(self, lives: int) -> None:
        self.later_s = lives * 2 * LEASE_S

    def now(self) -> float:
        return super().now() + self.later_s


class LearningModel(Model):
    """Gives the same answer in any process, which may be killed before and after it."""

    name = "learning"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return what was learned."""
        await checkpoint()
        crash_point("model")
        report("asked")
        crash_point("model")
        return Reply(text=LEARNED)


def store_in(folder: str, lives: int = 0) -> SQLiteStore:
    return SQLiteStore(Path(folder, "runs.db"), connect=connect, clock=LaterClock(lives))


async def work(folder: str, runs: int) -> None:
    """Run an agent for Ann."""
    async with Agent(ScriptedModel(*["The report: 7."] * runs), store=store_in(folder)) as agent:
        for number in range(runs):
            await agent.run("Write a report", user="ann", id=f"r{number}")
    await agent.store.aclose()


async def learn(folder: str, lives: int = 0) -> None:
    """Learn from all runs, or until this process is killed."""
    store = store_in(folder, lives)
    memory = Memory(SQLiteIndex(Path(folder, "memory.db"), connect=connect))
    await Learner(memory, LearningModel(), store).run(until_idle=True)
    await memory.aclose()
    await store.aclose()


async def check(folder: str, runs: int) -> None:
    """Check that there is one episode of each run, and no fact twice; and that a rebuild finds the same."""
    run_ids = [f"r{number}" for number in range(runs)]
    store, memory = store_in(folder), Memory(Path(folder, "memory.db"))
    ann = memory.for_(user="ann")
    items = await ann.read(include_held=True)
    found = sorted((item.source.run_id, item.kind.value, item.text.splitlines()[0]) for item in items)
    assert found == sorted(
        (run_id, kind, text)
        for run_id in run_ids
        for kind, text in (
            ("episode", "Task: Write a report"),
            ("fact", "Ann works in Porto"),
            ("preference", "Ann wants short reports"),
        )
    )
    ids = {summary.id for summary in await store.runs()}
    assert ids == {*run_ids, *map(name_extraction, run_ids)}
    assert await memory.rebuild(store) == len(items)
    assert await ann.read(include_held=True) == items
    await memory.aclose()
    await store.aclose()


@pytest.mark.parametrize("kind", ["commit", "model"])
def test_a_learner_may_be_killed_at_each_moment(fork_server, folder, kind):
    """Before and after each commit to the journals and to the memory, and before and after each reply of its model."""
    for at in count(1):
        place = folder / f"{kind}-{at}"
        place.mkdir()
        anyio.run(work, str(place), 1)
        first = fork_server.run(learn, str(place), kill_at=(kind, at))
        told = list(first.reports)
        if first.killed:
            told += fork_server.run(learn, str(place), 1).reports
        assert 1 <= told.count("asked") <= 1 + first.killed
        anyio.run(check, str(place), 1)
        if not first.killed:
            break
    assert at > (2 if kind == "model" else 10)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(60))
def test_learners_may_be_killed_again_and_again(fork_server, folder, seed):
    """At any await, commit or statement, and whoever goes on as well; in the end there is one of each."""
    chance = random.Random(seed)
    anyio.run(work, str(folder), 3)
    for life in count():
        kind, most = chance.choice([("await", 150), ("commit", 40), ("statement", 200)])
        how = partial(learn, lives=life)
        result = fork_server.run(
            how, str(folder), kill_at=(kind, chance.randint(1, most)), backend=chance.choice(["asyncio", "trio"])
        )
        if not result.killed:
            break
    anyio.run(check, str(folder), 3)


async def keep(folder: str) -> None:
    """Keep something of Ann."""
    memory = Memory(Path(folder, "memory.db"))
    for number in range(20):
        await memory.for_(user="ann").remember(f"Zanzibar, day {number}")
    await memory.aclose()


async def forget(folder: str, *, whole: bool = True) -> None:
    """Forget Ann, or until this process is killed; or forget nothing."""
    memory = Memory(SQLiteIndex(Path(folder, "memory.db"), connect=connect))
    ann = memory.for_(user="ann")
    await (ann.forget_all() if whole else ann.forget([]))
    await memory.aclose()


def test_a_deletion_that_was_killed_is_finished_by_the_next(fork_server, folder):
    """The items are gone with its commit, and their bytes with the end of this or any later call of `forget`."""
    anyio.run(keep, str(folder))
    assert fork_server.run(forget, str(folder), kill_at=("commit", 2)).killed
    assert any(b"Zanzibar" in path.read_bytes() for path in folder.iterdir())
    anyio.run(partial(forget, str(folder), whole=False))
    assert not any(b"Zanzibar" in path.read_bytes() for path in folder.iterdir())
