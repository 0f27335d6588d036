"""A run that somebody else drives, watched from its journal: every event once, in order, and nothing left behind."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Agent, JournalEvent, MisuseError, PendingKind, RunNotFoundError, Runs, StopReason, tool
from agentfsm.core import codec, events
from agentfsm.journal import follow
from agentfsm.ports import Store, StoredRun
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, VirtualClock, call, run_virtual, say
from tests.support.checks import HANG_S, Wrapped, names

# A process that drives the runs of the agent "clerk" in a SQLite file until it is ended.
WORKER = """
import sys
import anyio
from agentfsm import Agent, tool
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, call, say

@tool(requires_approval=True)
async def pay() -> str:
    "Pay."
    return "paid"

async def main():
    think = lambda request: say("", call("pay")) if len(request.messages) == 1 else request.messages[-1].text
    agent = Agent(FunctionModel(think), tools=[pay], store=SQLiteStore(sys.argv[1]), name="clerk")
    await agent.worker(poll_s=0.02)

anyio.run(main)
"""


@tool(requires_approval=True)
async def pay() -> str:
    """Pay."""
    return "paid"


class CountingStore(MemoryStore):
    """Counts the reads of journals."""

    reads = 0

    async def read(self, run_id: str, after: int = 0) -> StoredRun:
        """Count, and read."""
        self.reads += 1
        return await super().read(run_id, after)


@pytest.mark.parametrize("way", ["events", "wait"])
async def test_who_follows_reads_once_for_what_is_appended_together(way):
    """And not once more to find that there is nothing else: what comes is announced."""
    store, let = CountingStore(), anyio.Event()

    @tool
    async def look() -> str:
        """Look."""
        await let.wait()
        for _ in range(5):  # so that the follower takes each append in
            await checkpoint()
        return "seen"

    agent = Agent(ScriptedModel(*[say("", call("look"))] * 4, "Done."), tools=[look], store=store)
    run, follower = await agent.submit("go"), Runs(store)
    reads = 0

    async def watch():
        nonlocal reads
        if way == "wait":
            await follower.wait(run.id)
        else:
            async for _ in follower.events(run.id):
                pass
        reads = store.reads

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        for _ in range(10):
            await checkpoint()
        begun = store.reads
        tasks.start_soon(agent.resume, run.id)
        for _ in range(10):
            await checkpoint()
        let.set()
    assert begun <= 2
    assert reads - begun <= 5 + 1 + 2  # the turns, the execution, and a turn whose events come in parts


def clerk(store) -> Agent:
    """An agent that asks before it pays, and says what came of it."""
    return Agent(ScriptedModel(say("", call("pay")), "Done."), tools=[pay], store=store, name="clerk")


def subscriptions(store) -> dict[str, object]:
    """What is subscribed to in a store."""
    return store._subscriptions.topics if isinstance(store, MemoryStore) else store._writer.subscriptions.topics


async def read(agent: Agent, run_id: str, after: int = 0) -> list[JournalEvent]:
    """All events of a run, to its end."""
    with anyio.fail_after(HANG_S):
        return [item async for item in agent.events(run_id, after=after)]


async def test_the_events_are_the_journal(store):
    """Each comes once, with its version, and the iteration ends with the run."""
    agent = Agent(ScriptedModel("Hello."), store=store)
    run = await agent.run("hi")
    items = await read(agent, run.id)
    assert tuple(item.event for item in items) == await agent.history(run.id)
    assert [item.version for item in items] == list(range(1, run.version + 1))
    assert {item.run_id for item in items} == {run.id}
    assert not subscriptions(store)


@pytest.mark.parametrize("after", range(3))
async def test_a_watcher_goes_on_after_the_last_event_that_it_saw(store, after):
    """From any version the rest comes, without loss and without duplicates; after the end there is nothing."""
    agent = Agent(ScriptedModel("Hello."), store=store)
    run = await agent.run("hi")
    assert run.version == 2
    whole = await read(agent, run.id)
    assert await read(agent, run.id, after) == whole[after:]


async def test_a_run_is_watched_while_another_task_drives_it(store):
    """The watcher sees the run wait, somebody decides, and it sees how the run ends."""
    agent = clerk(store)
    seen: list[JournalEvent] = []
    asked = anyio.Event()

    async def watch(run_id: str) -> None:
        async for item in agent.events(run_id):
            seen.append(item)
            if isinstance(item.event, events.ApprovalAsked):
                asked.set()

    run = await agent.submit("pay Ann", id="r")
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, run.id)
            await anyio.wait_all_tasks_blocked()
            assert not seen
            await agent.resume(run.id)
            await asked.wait()
            assert await agent.wait(run.id) == await agent.load(run.id)
            await agent.approve(run.id, "t1.0", by="ann")
            await agent.resume(run.id)
    assert tuple(item.event for item in seen) == await agent.history("r")
    assert names(item.event for item in seen)[-1] == "AnswerGiven"
    assert not subscriptions(store)


async def test_an_append_wakes_the_watcher(store, monkeypatch):
    """In one process the store tells of each append: a watcher that would look once in an hour misses nothing."""
    monkeypatch.setattr(follow, "POLL_S", 3_600.0)
    agent = Agent(ScriptedModel("Hello."), store=store)
    await agent.submit("hi", id="r")
    ended: list[str] = []

    async def watch() -> None:
        ended.extend(names([item.event async for item in agent.events("r")]))

    async def wait() -> None:
        ended.append((await agent.wait("r")).output)

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await agent.resume("r")
    assert sorted(ended) == ["AnswerGiven", "Hello.", "Observed"]


def test_a_store_that_tells_nothing_is_looked_at():
    """A watcher looks each second, sooner while it finds something, and sees all of it."""

    class Silent(MemoryStore):
        def subscribe(self, topic, wake):
            return lambda: None

    async def play() -> tuple[list[str], float]:
        clock = VirtualClock()
        store = Silent(clock=clock)

        async def nap(_request: object) -> str:
            await anyio.sleep(100)
            return "Good morning."

        agent = Agent(FunctionModel(nap), store=store, clock=clock)
        await agent.submit("sleep", id="r")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.resume, "r")
            seen = names([item.event async for item in agent.events("r")])
            return seen, clock.monotonic()

    seen, ended_at = run_virtual(play)
    assert seen == ["Observed", "AnswerGiven"]
    assert 100 <= ended_at <= 100 + follow.POLL_S


async def test_two_processes(tmp_path, monkeypatch):
    """A worker process drives a run in a SQLite file; this one watches it, decides, and waits for the end."""
    monkeypatch.setattr(follow, "POLL_S", 0.05)
    path = str(tmp_path / "runs.db")
    agent = clerk(SQLiteStore(path))
    seen: list[JournalEvent] = []

    async def watch() -> None:
        seen.extend([item async for item in agent.events("r")])

    with subprocess.Popen([sys.executable, "-c", WORKER, path]) as worker:  # noqa: ASYNC220  it takes milliseconds
        try:
            async with agent:
                await agent.submit("pay Ann", id="r")
                with anyio.fail_after(HANG_S):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(watch)
                        waiting = await agent.wait("r")
                        assert [item.kind for item in waiting.pending] == [PendingKind.APPROVAL]
                        await agent.approve("r", "t1.0", by="ann")
                        run = await agent.wait("r")
                assert run.output.endswith("paid")
                assert tuple(item.event for item in seen) == await agent.history("r")
                assert await read(agent, "r", after=seen[1].version) == seen[2:]
        finally:
            worker.kill()


# Waiting


async def test_wait_returns_a_run_that_is_over(store):
    """However it ended: an error is a run as well."""
    agent = Agent(ScriptedModel("Hello."), store=store)
    done = await agent.run("hi")
    await agent.submit("hi", id="c")
    await agent.cancel("c")
    with anyio.fail_after(HANG_S):
        assert await agent.wait(done.id) == done
        assert (await agent.wait("c")).stop_reason is StopReason.CANCELLED


async def test_wait_sees_a_decision_that_nobody_has_taken_in_yet(store):
    """After `approve` the run counts as under way: what is returned is what came of the decision."""
    agent = clerk(store)
    await agent.run("pay Ann", id="r")
    await agent.approve("r", "t1.0")
    outputs: list[str] = []

    async def wait() -> None:
        outputs.append((await agent.wait("r")).output)

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            assert outputs == []
            await agent.resume("r")
    assert outputs == ["Done."]


# Leaving


async def test_a_watcher_that_is_cancelled_leaves_nothing_behind(store):
    """Its subscription ends with it, and the run does not notice."""
    agent = Agent(ScriptedModel("Hello."), store=store)
    await agent.submit("hi", id="r")
    for watch in (lambda: read(agent, "r"), lambda: agent.wait("r")):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await anyio.wait_all_tasks_blocked()
            while not subscriptions(store):  # the first look is at a file
                await checkpoint()
            tasks.cancel_scope.cancel()
        assert not subscriptions(store)
    assert (await agent.resume("r")).output == "Hello."


async def test_a_cancelled_read_loses_no_event(store):
    """Who gives up waiting for the next event may ask the same iterator again."""
    agent = Agent(ScriptedModel("Hello."), store=store)
    await agent.submit("hi", id="r")
    items = agent.events("r")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anext(items)
    await agent.resume("r")
    with anyio.fail_after(HANG_S):
        assert [item.version async for item in items] == [1, 2]


async def test_a_loop_that_is_left_early_leaves_nothing_behind(store):
    """After a `break` nothing is subscribed to any more."""
    agent = clerk(store)
    await agent.submit("pay Ann", id="r")

    async def first() -> JournalEvent | None:
        async for item in agent.events("r"):
            return item
        return None

    seen: list[JournalEvent | None] = []

    async def watch() -> None:
        seen.append(await first())

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await anyio.wait_all_tasks_blocked()
            await agent.resume("r")
    gc.collect()
    assert [item.version for item in seen if item] == [1]
    assert not subscriptions(store)


# What cannot be watched


async def test_a_run_that_is_not_there_is_refused(store):
    """Nobody waits for what will never come."""
    agent = Agent(ScriptedModel(), store=store)
    with pytest.raises(RunNotFoundError):
        await read(agent, "nowhere")
    with pytest.raises(RunNotFoundError):
        await agent.wait("nowhere")
    with pytest.raises(MisuseError, match=r"give run\.id"):
        agent.events(7)
    with pytest.raises(MisuseError, match=r"events\(after=-1\): give a whole number, 0 or more"):
        agent.events("r", after=-1)


async def test_a_version_that_a_run_has_not_come_to_is_refused(store):
    """Else a mistyped number would wait for ever, and leave out what comes before it."""
    agent = Agent(ScriptedModel("Hello."), store=store)
    run = await agent.run("hi")
    with pytest.raises(MisuseError, match=r"no version 3 yet"):
        await read(agent, run.id, after=3)


async def test_a_run_that_is_deleted_ends_its_watchers(store, monkeypatch):
    """They are told, and do not wait for ever."""
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    agent = Agent(ScriptedModel("Hello."), store=store)
    await agent.submit("hi", id="r")
    refused: list[str] = []

    async def watch() -> None:
        try:
            await read(agent, "r")
        except RunNotFoundError as error:
            refused.append(str(error))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await anyio.wait_all_tasks_blocked()
            await store.delete("r")
    assert len(refused) == 1


# As JSON


class ReplacingStore(Wrapped):
    """A store in which the run's id becomes another run's after the first read of its journal."""

    def __init__(self, inner: Store, other: Agent) -> None:
        """Take the real store, and the agent of the other run."""
        self.inner, self.other, self.reads = inner, other, 0

    async def read(self, run_id: str, after: int = 0) -> StoredRun:
        """Read the journal of the run that has the id now."""
        self.reads += 1
        if self.reads == 2:
            await self.inner.delete(run_id)
            await self.other.run("another", id=run_id)
        return await self.inner.read(run_id, after)


@pytest.mark.parametrize("verb", ["wait", "events"])
@pytest.mark.parametrize("other", [clerk, lambda store: Agent(ScriptedModel("Hello."), store=store)])
async def test_an_id_that_is_used_again_ends_the_watchers_of_the_first_run(store, verb, other):
    """Nothing of the other run is taken for the first one's, whatever it came to."""
    agent = clerk(store)
    await agent.step(agent.start("hi", id="r"))
    watcher = Runs(ReplacingStore(store, other(store)))
    seen: list[JournalEvent] = []

    async def watch() -> None:
        seen.extend([await watcher.wait("r")] if verb == "wait" else [item async for item in watcher.events("r")])

    with anyio.fail_after(HANG_S), pytest.raises(RunNotFoundError, match="its id is another run's now"):
        await watch()
    assert not seen


async def test_an_item_is_json(store):
    """`to_dict` is the form of the journal, with the run and the version, and can be read back."""
    agent = clerk(store)
    run = await agent.run("pay Ann")
    header = (await store.read(run.id)).header
    item = await anext(agent.events(run.id))
    told = json.loads(json.dumps(item.to_dict()))
    assert (told["run_id"], told["version"], told["event"]["is"]) == (run.id, 1, "Observed")
    assert codec.decode_event(json.dumps(told["event"]), header) == item.event
