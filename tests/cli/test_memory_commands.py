"""`agentfsm memory`: what is kept of a user can be found, read, released, deleted and derived again."""

import json

import anyio
import pytest

from agentfsm import Agent
from agentfsm.memory import Learner, Memory
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel

LEARNED = json.dumps({"approach": "asked", "facts": [{"text": "Ann works in Porto"}]})


@pytest.fixture
def kept(here):
    """A store with a run of Ann, and a memory that has learned from it."""
    folder = here.folder / ".agentfsm"
    folder.mkdir()

    async def act():
        memory, store = Memory(folder / "memory.db"), SQLiteStore(folder / "runs.db")
        async with Agent(ScriptedModel("The report."), store=store) as agent:
            await agent.run("Write a report", user="ann", id="r1")
            await Learner(memory, ScriptedModel(LEARNED), store).run(until_idle=True)
        await memory.for_(user="ann").remember("Ann drinks tea", key="tea")
        await memory.for_(user="ann").remember("Ann pays by wire", held=True, key="wire")
        await memory.for_(user="bob").remember("Bob drinks coffee")
        await memory.aclose()

    anyio.run(act)
    return here


APP = """
from agentfsm.memory.learner import Learner
from agentfsm.memory import Memory
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel

memory = Memory(".agentfsm/memory.db")
learner = Learner(memory, ScriptedModel('{"facts": [{"text": "Ann has a cat"}]}'), SQLiteStore(".agentfsm/runs.db"))
"""


def test_runs_are_learned_from(kept):
    """What has ended since the last time; a target that is no learner is refused."""
    (kept.folder / "lessons.py").write_text(APP)

    async def act():
        async with Agent(ScriptedModel("Done."), store=SQLiteStore(kept.folder / ".agentfsm/runs.db")) as agent:
            await agent.run("Write another report", user="ann", id="r2")

    anyio.run(act)
    assert kept("memory", "learn", "lessons:learner", "--until-idle") == "learned 2 items\n"
    assert "as follower 'memory'" in kept.err
    assert "Ann has a cat" in kept("memory", "search", "cat", "--user", "ann")
    kept("memory", "learn", "lessons:learner", "--store", "other.db", code=2)
    assert "takes no --store" in kept.err
    kept("memory", "learn", "lessons:memory", code=2)
    assert "is not a Learner, but of type Memory: name a Learner" in kept.err


def test_what_a_deleted_run_taught_goes_with_it(kept):
    """After `delete` or `prune`, on request; what was told directly stays."""
    kept("delete", "r1")
    assert kept("memory", "forget", "--deleted-runs") == "forgot 2 items\n"
    assert kept("memory", "search", "Porto", "--user", "ann") == ""
    assert "drinks tea" in kept("memory", "search", "tea", "--user", "ann")


def test_items_are_found_and_shown(kept):
    """For their owner only."""
    [line] = kept("memory", "search", "Where does she work? Porto", "--user", "ann", "--limit", "1").splitlines()
    item = line.split()[0]
    assert line.endswith("fact  Ann works in Porto")
    shown = kept("memory", "show", item, "--user", "ann")
    assert "from run: r1" in shown
    kept("memory", "show", item, "--user", "bob", code=2)
    assert "no item" in kept.err
    assert kept("memory", "search", "Porto", "--user", "bob") == ""
    assert "nothing found" in kept.err
    assert kept.json("memory", "search", "Porto", "--user", "bob") == {"items": []}


def test_held_items_are_released(kept):
    """A held item is listed, and found once it is released."""
    items = kept.json("memory", "export", "--user", "ann")["items"]
    [held] = [each for each in items if each["held"]]
    assert held["valid_to"] is None  # without an end
    assert kept("memory", "search", "wire", "--user", "ann") == ""
    assert kept("memory", "release", held["id"], "--user", "ann", "--by", "boss") == "released 1 item\n"
    assert "Ann pays by wire" in kept("memory", "search", "wire", "--user", "ann")
    kept("memory", "release", held["id"], "--user", "ann", code=2)
    assert "no held item" in kept.err


def test_a_rebuild_keeps_what_was_remembered(kept):
    """What comes from runs is derived again."""
    before = kept("memory", "export", "--user", "ann")
    assert kept("memory", "rebuild") == "derived 2 items from the journals\n"
    assert kept("memory", "export", "--user", "ann") == before


def test_items_are_forgotten(kept):
    """One, or all, or all with the runs; never those of another user."""
    [tea] = [each for each in kept.json("memory", "export", "--user", "ann")["items"] if "tea" in each["text"]]
    assert kept("memory", "forget", tea["id"], "--user", "ann") == "forgot 1 item\n"
    kept("memory", "forget", "--user", "ann", code=2)
    assert "either ids of items, or --all" in kept.err
    kept("memory", "forget", tea["id"], "--runs", "--user", "ann", code=2)
    assert "give it with --all" in kept.err
    assert kept("memory", "forget", "--deleted-runs") == "forgot 0 items\n"
    assert kept.json("memory", "forget", "--all", "--runs", "--user", "ann") == {"forgotten": 3}
    assert kept.json("runs")["runs"] == []
    assert kept("memory", "export", "--user", "ann") == ""
    assert "coffee" in kept("memory", "export", "--user", "bob")


def test_a_memory_that_is_not_there_is_not_created(here):
    """A wrong path is an error."""
    here("memory", "export", "--memory", "none.db", code=2)
    assert "there is no memory none.db" in here.err
    assert not (here.folder / "none.db").exists()


def test_a_run_shows_what_it_recalled(kept):
    """With the room that the memory had; a memory that failed says so."""

    async def act():
        folder = kept.folder / ".agentfsm"
        memory, store = Memory(folder / "memory.db"), SQLiteStore(folder / "runs.db")
        async with Agent(ScriptedModel("Tea."), store=store, memory=memory) as agent:
            await agent.run("Ann drinks tea?", user="ann", id="r2")

    anyio.run(act)
    [line] = [line for line in kept("show", "r2").splitlines() if line.startswith("memory")]
    assert line == "memory   2 items recalled, 10 of 19,200 tokens"


def test_items_are_exported_and_imported(kept):
    """From one file to another; a file of another form is refused."""
    exported = kept("memory", "export", "--user", "ann", "--json")
    (kept.folder / "ann.json").write_text(exported)
    count = len(json.loads(exported)["items"])
    told = kept("memory", "import", "ann.json", "--user", "ann", "--memory", "copies/new.db")
    assert told == f"imported {count} items\n"
    copied = json.loads(kept("memory", "export", "--user", "ann", "--memory", "copies/new.db", "--json"))
    theirs = {each["imported_id"]: {**each, "imported_id": ""} for each in copied["items"]}
    assert theirs == {
        each["id"]: {**each, "id": theirs[each["id"]]["id"], "source": None} for each in json.loads(exported)["items"]
    }
    (kept.folder / "other.json").write_text('{"runs": []}')
    kept("memory", "import", "other.json", code=2)
    assert "agentfsm memory export --json" in kept.err
    kept("memory", "import", "none.json", code=2)
    assert "none.json cannot be read" in kept.err


def test_old_items_expire(kept):
    """Of one owner, or of all."""
    assert kept("memory", "expire", "--user", "ann", "--days", "0", "--importance", "0.9").startswith("forgot ")
    assert "coffee" in kept("memory", "export", "--user", "bob")
    assert kept("memory", "expire", "--everyone", "--days", "0", "--importance", "1") == "forgot 1 item\n"
    assert kept("memory", "export", "--user", "bob") == ""
