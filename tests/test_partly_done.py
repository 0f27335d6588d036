"""An error of a deletion or write means that it did not happen, or says exactly which part of it did."""

import errno
import os
import sqlite3
from datetime import UTC, datetime

import attrs
import pytest

from agentfsm import Agent, ConflictError, MisuseError, PartlyDoneError, RunNotFoundError, Runs, StoreError, tool
from agentfsm.evals import Evaluation, add_case
from agentfsm.memory import Memory, SQLiteIndex
from agentfsm.prompts import Prompts
from agentfsm.releases import RolloutControl
from agentfsm.releases.rollout_guard import abort_runs
from agentfsm.schedules import Schedules
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.failing_stores import StoreFailingAt
from tests.support.sqlite_faults import Faults

pytestmark = pytest.mark.anyio


@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


def make_clerk(store):
    """Return an agent that asks before it pays."""
    return Agent(ScriptedModel(*[say("", call("pay", cents=1))] * 9), tools=[pay], store=store, name="clerk")


# The memory.


async def test_items_that_are_deleted_and_not_erased(tmp_path):
    """The error says that they are gone and how their remains go; then nothing of them is left on the disk."""
    faults = Faults()
    memory = Memory(SQLiteIndex(tmp_path / "memory.db", connect=faults, patience_s=0.0))
    item = await memory.remember("xylophone")
    await memory.remember("violin")
    faults.strike(sqlite3.SQLITE_FULL, "VACUUM")
    with pytest.raises(
        PartlyDoneError, match=r"1 items were deleted, and are not found any more; but .*forget"
    ) as error:
        await memory.forget([item.id])
    assert "disk is full" in str(error.value)
    assert [each.text for each in await memory.read()] == ["violin"]
    assert await memory.forget([]) == 0
    assert b"xylophone" not in b"".join([path.read_bytes() for path in tmp_path.iterdir()])
    await memory.aclose()


async def forget_ann(store, path):
    """Return the memory of a user with an item, and with two runs in the store."""
    mine = Memory(path).for_(user="ann")
    await mine.remember("xylophone")
    agent = make_clerk(store)
    for run_id in ("first", "second"):
        await agent.run("go", id=run_id, user="ann")
    return mine


async def test_a_user_is_forgotten_as_far_as_the_error_says(tmp_path):
    """A run that a worker executes is refused before anything is deleted; a later failure names what is deleted."""
    store = StoreFailingAt(MemoryStore())
    mine = await forget_ann(store, tmp_path / "memory.db")
    lease = await store.lease("first")
    with pytest.raises(ConflictError, match=r"run 'first' is being driven: .*; nothing was deleted"):
        await mine.forget_all(runs="delete", store=store)
    await store.release(lease).wait()
    assert [len(await mine.read()), len(await store.runs())] == [1, 2]
    store.fail("delete", 1)
    with pytest.raises(StoreError, match="made to fail") as error:
        await mine.forget_all(runs="delete", store=store)
    assert not isinstance(error.value, PartlyDoneError)
    assert [len(await mine.read()), len(await store.runs())] == [1, 2]
    store.fail("delete", 2)
    with pytest.raises(PartlyDoneError, match="1 runs of the user were deleted, newest first, and the others and all"):
        await mine.forget_all(runs="delete", store=store)
    assert [len(await mine.read()), [each.id for each in await store.runs()]] == [1, ["first"]]
    assert await mine.forget_all(runs="delete", store=store) == 1
    assert [len(await mine.read()), len(await store.runs())] == [0, 0]


async def test_a_user_is_forgotten_and_the_file_is_in_use(tmp_path):
    """Another user's run is executed, so that the store cannot be compacted now: runs and items are gone."""
    store = SQLiteStore(tmp_path / "runs.db")
    mine = await forget_ann(store, tmp_path / "memory.db")
    await make_clerk(store).submit("go", id="other", user="bob")
    lease = await store.lease("other")
    with pytest.raises(PartlyDoneError, match=r"1 items and 2 runs were deleted; but .* until `agentfsm compact`"):
        await mine.forget_all(runs="delete", store=store)
    assert [len(await mine.read()), [each.id for each in await store.runs()]] == [0, ["other"]]
    await store.release(lease).wait()
    await store.aclose()


async def test_a_rebuild_that_stops_says_what_is_missing(tmp_path):
    """The derived items were dropped by then."""
    store = StoreFailingAt(MemoryStore())
    mine = await forget_ann(store, tmp_path / "memory.db")
    store.fail("read", 1)
    with pytest.raises(PartlyDoneError, match=r"derived items were dropped, and 0 of them .* until rebuild\(\)"):
        await mine.rebuild(store)
    await mine.aclose()


# Runs.


async def test_input_and_requests_are_recorded_when_the_rest_fails():
    """Of a sub-agent's run the caller is woken afterwards; the error has the key with which nothing is posted twice."""
    store = StoreFailingAt(MemoryStore())
    below = make_clerk(store).with_(name="below")
    boss = Agent(ScriptedModel(say("", call("below", query="go")), "done"), tools=[below.as_tool()], store=store)
    run = await boss.run("go", id="boss")
    child, runs = run.pending[0].run_id, Runs(store)
    store.fail("post", 2)
    with pytest.raises(PartlyDoneError, match=r"its caller 'boss' was not woken: .* repeat the call with key='"):
        await runs.send(child, "Hello?")
    store.fail("post", 2)
    with pytest.raises(PartlyDoneError, match=r"is in the inbox of run 'boss.t1.0', .* which posts nothing twice"):
        await runs.approve(child, run.pending[0].call_id, by="ann")
    await runs.approve(child, run.pending[0].call_id, by="ann")
    store.fail("inbox", 1)
    with pytest.raises(PartlyDoneError, match="the request is recorded in run 'boss', and its next worker applies it"):
        await runs.cancel("boss", by="ann")
    await runs.cancel("boss", by="ann")
    assert (await runs.load("boss")).is_over


async def test_a_run_that_was_created_is_named():
    """So that it is not started twice, under another id."""
    store = StoreFailingAt(MemoryStore())
    agent = make_clerk(store)
    store.fail("inbox", 1)
    with pytest.raises(PartlyDoneError, match="is in the store, and a worker executes it") as error:
        await agent.submit("go")
    [made] = await store.runs()
    assert made.id in str(error.value)
    run = await agent.run("go", id="origin")
    store.fail("inbox", 1)
    with pytest.raises(PartlyDoneError, match="run 'fork' is in the store"):
        await agent.fork(run.id, at=1, id="fork")
    assert (await agent.load("fork")).version == 1


async def test_pruning_that_stops_says_how_many_runs_are_gone(tmp_path, monkeypatch):
    """The first batch is committed when the second fails."""
    monkeypatch.setattr("agentfsm.stores.threaded.store.PRUNE_BATCH", 2)
    faults = Faults()
    store = SQLiteStore(tmp_path / "runs.db", connect=faults)
    agent = Agent(ScriptedModel(*["done"] * 4), store=store)
    for _ in range(4):
        await agent.run("go")
    faults.strike(sqlite3.SQLITE_FULL, "SELECT revision FROM records WHERE expires_at")
    with pytest.raises(PartlyDoneError, match="4 runs were removed, and others may be left"):
        await Runs(store).prune(await store.now() + 1)
    assert await store.runs() == ()
    await store.aclose()


async def test_runs_are_aborted_although_one_has_ended():
    """It ended, or was deleted, after it was listed; the others are cancelled."""
    store = StoreFailingAt(MemoryStore())
    agent = make_clerk(store)
    control = RolloutControl("billing", store)
    releases = {"old": "1", "new": "2"}
    by = {"by": "ann", "reason": "x"}
    before = await control.start({"old": 0, "new": 100}, agent="clerk", releases=releases, **by)
    after = await control.kill(**by)
    for run_id in ("a", "b", "c"):
        await agent.run("go", id=run_id, release="2")
    store.fail("post", 1, RunNotFoundError("it was deleted"))
    assert await abort_runs(store, before.plan, after.plan, by="ann", message="x") == 2
    assert sorted(str(each.state) for each in await store.runs()) == ["act", "error", "error"]


async def test_a_backfill_that_stops_says_which_runs_there_are():
    """It is repeated, and creates no run twice."""
    store = StoreFailingAt(MemoryStore())
    agent, schedules = make_clerk(store), Schedules(store)
    await schedules.add(agent, "nightly", cron="0 3 * * *", prompt="go")
    span = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 4, tzinfo=UTC)
    store.fail("create", 3)
    with pytest.raises(
        PartlyDoneError, match=r"2 runs were created, up to '.*', and the later ones were not: .* repeat"
    ):
        await schedules.backfill(agent, "nightly", *span)
    done = await schedules.backfill(agent, "nightly", *span)
    assert [len(done.created), len(done.existing)] == [1, 2]


# Files.


async def test_files_are_as_they_were_after_an_error(tmp_path, monkeypatch):
    """A disk that is full destroys no earlier evaluation and no suite, and activates no prompt."""
    suite = tmp_path / "suite.jsonl"
    add_case(suite, {"id": "a", "input": "x"})
    before = suite.read_bytes()
    with pytest.raises(MisuseError):
        add_case(suite, {"id": "a", "input": "again"})
    prompt = tmp_path / "prompts" / "billing"
    prompt.mkdir(parents=True)
    (prompt / "1.0.0.md").write_text('+++\nname = "billing"\nversion = "1.0.0"\n+++\nHello.\n')
    prompts = Prompts(tmp_path / "prompts")
    write = os.write
    monkeypatch.setattr("os.write", lambda number, text: write(number, text[: len(text) // 2]))
    with pytest.raises(OSError, match="so the line does not count") as error:
        prompts.activate("billing", "1.0.0", by="ann", why="x")
    assert error.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert prompts.active("billing") is None
    assert prompts.activate("billing", "1.0.0", by="ann", why="x") == prompts.active("billing")
    saved = tmp_path / "result.json"
    Evaluation(suite="s", agent="a", version="1", model="m", at="2026-11-26T00:00:00", runs=1, results=()).save(saved)
    kept = saved.read_bytes()

    def fail(*_args, **_options):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("pathlib.Path.write_text", fail)
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        attrs.evolve(Evaluation.load(saved), agent="b").save(saved)
    with pytest.raises(OSError, match="no space"):
        add_case(suite, {"id": "b", "input": "y"})
    assert (saved.read_bytes(), suite.read_bytes()) == (kept, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "prompts",
        "result.json",
        "suite.jsonl",
        "suite.jsonl.lock",
    ]
