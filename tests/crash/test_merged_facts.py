"""A learner is killed while it merges what a run taught: nothing is there twice, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path

import anyio
import pytest

from agentfsm import Agent
from agentfsm.memory import Learner, Memory, SQLiteIndex
from agentfsm.ports import Request
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel
from agentfsm.testing.crash import ForkServer, connect

KNOWN = ("Ann drinks tea", "Ann plays the piano", "Ann likes short answers")


async def begin(folder: Path) -> None:
    """Keep three items, and end a run that says something about each."""
    memory, store = Memory(folder / "memory.db"), SQLiteStore(folder / "runs.db")
    for text in KNOWN:
        await memory.for_(user="ann").remember(text, kind="preference")
    await Agent(ScriptedModel("Yes."), store=store).run("I drink mate now, and sing", user="ann", id="r1")
    await memory.aclose()
    await store.aclose()


def extract(request: Request) -> str:
    """Follow the prompt of an extraction: an item of the memory is named by its number."""
    record = request.messages[0].text
    tea, piano, short = (
        next(int(line.split(".")[0]) for line in record.splitlines() if line.endswith(f": {text}")) for text in KNOWN
    )
    facts = [
        {"text": "Ann drinks mate", "kind": "preference", "action": "update", "item": tea},
        {"text": "", "action": "delete", "item": piano},
        {"text": "", "action": "none", "item": short},
        {"text": "Ann sings", "kind": "preference", "action": "add"},
    ]
    return json.dumps({"approach": "Agreed", "facts": facts})


async def learn(folder: Path) -> tuple[list[tuple[str, int]], int, int]:
    """Learn from the run, derive all of it again; return the profile that runs see, and the number of items."""
    store = SQLiteStore(folder / "runs.db", connect=connect)
    memory = Memory(SQLiteIndex(folder / "memory.db", connect=connect))
    ann = memory.for_(user="ann")
    await Learner(memory, FunctionModel(extract), store).learn("r1")
    await memory.rebuild(store)
    profile = sorted((each.item.text, each.item.data.get("confirmed", 1)) for each in await ann.profile())
    counts = len(await ann.read(kinds=["episode"])), len(await ann.read())
    await memory.aclose()
    await store.aclose()
    return profile, *counts


async def work(folder: Path) -> None:
    await learn(folder)


@pytest.mark.parametrize("backend", ["asyncio"])
def test_a_learner_that_is_killed_at_any_commit(fork_server: ForkServer, tmp_path: Path, backend: str) -> None:
    """In the extraction, at the items, and in a rebuild. After a commit the files are as before the next one."""
    anyio.run(begin, tmp_path)
    for at in count(1, 2):
        folder = tmp_path / str(at)
        folder.mkdir()
        for path in tmp_path.glob("*.db*"):
            shutil.copy(path, folder)
        first = fork_server.run(work, folder, kill_at=("commit", at), backend=backend)
        wanted = [("Ann drinks mate", 1), ("Ann likes short answers", 2), ("Ann sings", 1)]
        assert anyio.run(learn, folder, backend=backend) == (wanted, 1, 9), at
        if not first.killed:
            break
    assert at > 6
