"""The examples of flows, whose workers are killed: each effect happens once, whenever that is."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

from agentfsm import RunNotFoundError, State
from agentfsm.flow import Flow
from agentfsm.stores import SQLiteStore
from agentfsm.testing.crash import connect
from tests.support.effect_book import EffectBook
from tests.support.example_modules import example

LOADED = {f"load 2025-07-28:{product}" for product in ("cup", "mat", "pot", "tea")}
UNLOADED = {line.replace("-28", "-29") for line in LOADED}
EFFECTS = {
    "etl": sorted(LOADED),
    "etl, undone": sorted(UNLOADED | {f"un{line}" for line in UNLOADED}),
    "sentiment": ["r1 positive", "r2 neutral", "r3 negative", "r4 positive"],
    "aiops": [
        "clean_logs on db-1",
        "repaired: clean_logs, scale_up, roll_back, restart_workers",
        "restart_workers on mail",
        "roll_back on shop",
        "scale_up on web-2",
    ],
}


def open_example(story: str, folder: str) -> tuple[Flow, object, Mapping[str, Any]]:
    """Return the flow of an example, the world that it changes, and its inputs."""
    module, book = example(story.partition(",")[0]), EffectBook(folder)
    flow = module.build_flow(SQLiteStore(str(Path(folder, "runs.db")), connect=connect))
    day = "2025-07-29" if "undone" in story else "2025-07-28"
    match story:
        case "sentiment":
            return flow, reviews_in(module, folder, book), {"day": day}
        case "aiops":
            world = module.Operations()
            world.act = book.act
            return flow, world, {"alerts": module.ALERTS}
    world = module.Warehouse(folder)
    world.load = lambda key, *_: book.act(key, f"load {key}")
    world.unload = lambda key: book.act(f"un{key}", f"unload {key}")
    return flow, world, {"day": day, "sources": list(module.SOURCES)}


def reviews_in(module: ModuleType, folder: str, book: EffectBook) -> object:
    """Return the database of the reviews."""
    path = Path(folder, "reviews.db")
    world = module.Database(str(path))
    if not path.exists():
        filled = module.Database(f"{path}.new")
        with closing(sqlite3.connect(filled.path)) as db:
            db.execute("DROP TABLE IF EXISTS reviews")
        filled.fill()
        Path(filled.path).rename(path)
    world.store = lambda key, mood: book.act(key, f"{key} {mood}")
    return world


async def work(story: str, folder: str) -> None:
    """Drive the run to its end, or until this process is killed; answer what it asks a person."""
    flow, world, inputs = open_example(story, folder)
    async with flow:
        try:
            run = await flow.load("flow")
        except RunNotFoundError:
            run = await flow.run(inputs, id="flow", deps=world)
        else:
            run = run if run.is_over else await flow.resume("flow", takeover=True, deps=world)
        if run.pending:
            (question,) = run.pending
            answer = {"incident": {**question.arguments["incident"], "cause": "full_queue"}}
            await flow.approve(question.run_id, question.call_id, arguments=answer)
            await flow.resume("flow", deps=world)


async def check(story: str, folder: str) -> None:
    """Check the effects of a run that is over."""
    flow, *_ = open_example(story, folder)
    async with flow:
        run = await flow.load("flow")
        assert run.state is (State.ERROR if "undone" in story else State.DONE), run.stop_message
        assert (await flow.replay("flow")).is_faithful
    assert sorted(EffectBook(folder).read().values()) == EFFECTS[story]


def kill_once(fork_server, story: str, folder: Path, moment: tuple[str, int]) -> bool:
    """Kill the first worker at a moment, and let another one finish. Return whether there is such a moment."""
    folder.mkdir()
    first = fork_server.run(partial(work, story, str(folder)), kill_at=moment)
    if first.killed:
        assert not fork_server.run(partial(work, story, str(folder))).killed
    anyio.run(check, story, str(folder))
    return first.killed


@pytest.mark.parametrize("moment", [("commit", 20), ("effect", 2)], ids=str)
@pytest.mark.parametrize("story", EFFECTS)
def test_an_example_may_be_killed(fork_server, folder, story, moment):
    """At a commit in the middle, and within an effect."""
    assert kill_once(fork_server, story, folder / "killed", moment)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["commit", "effect"])
@pytest.mark.parametrize("story", EFFECTS)
def test_an_example_may_be_killed_at_each_event(fork_server, folder, story, kind):
    """Before and after each commit and each effect."""
    for at in count(1):
        if not kill_once(fork_server, story, folder / str(at), (kind, at)):
            break
    assert at > (20 if kind == "commit" else len(EFFECTS[story]))
