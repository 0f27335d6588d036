"""Watchers: they see each commit of a run, in order, and whatever they do, the run is the same."""

from __future__ import annotations

import subprocess
import sys
import threading

import anyio
import pytest

from agentfsm import Agent, MisuseError, tool
from agentfsm.stores import MemoryStore
from agentfsm.streaming import callbacks
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import sound


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "nothing"


class Notes:
    """A watcher that keeps what it is given."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.commits = []
        self.threads = set()

    def __call__(self, run, events):
        self.commits.append((run, tuple(events)))
        self.threads.add(threading.current_thread().name)

    def events_of(self, run_id):
        return [event for run, events in self.commits if run.id == run_id for event in events]


def agent_of(store, *watch, **fields):
    return Agent(ScriptedModel(*[say("", call("look")), "done"] * 2), tools=[look], store=store, watch=watch, **fields)


async def flushed(agent):
    for outlet in agent.watch:
        await anyio.to_thread.run_sync(outlet.flush)


async def test_a_watcher_sees_the_journal(store):
    """Each event once, in order, with the run as it was after the commit; in a thread of the watcher."""
    notes = Notes()
    agent = agent_of(store, notes)
    run = await agent.run("go")
    await flushed(agent)
    assert notes.events_of(run.id) == list(await agent.history(run.id))
    versions = [each.version for each, _ in notes.commits]
    assert versions == sorted(versions)
    assert notes.commits[-1][0].output == "done"
    assert notes.threads == {"agentfsm-watch-Notes"}
    await sound(agent, run)


async def test_resume_and_workers_are_watched(store):
    """Also the commits of another execution of the run, and those of a submitted run."""
    notes = Notes()
    agent = agent_of(store, notes)
    run = await agent.step(agent.start("go"))
    await agent.resume(run.id)
    other = await agent.submit("go")
    async with anyio.create_task_group() as group:
        group.start_soon(agent.worker)
        await agent.wait(other.id)
        group.cancel_scope.cancel()
    await flushed(agent)
    for run_id in (run.id, other.id):
        assert notes.events_of(run_id) == list(await agent.history(run_id))


async def test_runs_of_agents_below_are_watched(store):
    """By the watchers of the run above, and by their own; a watcher of both sees each event once."""
    both, above, below = Notes(), Notes(), Notes()
    helper = Agent(ScriptedModel("yes"), name="helper", watch=[both, below])
    agent = Agent(
        ScriptedModel(say("", call("helper", query="x")), "done"),
        tools=[helper.as_tool(description="Help.")],
        store=store,
        watch=[both, above],
    )
    run = await agent.run("go")
    await flushed(agent)
    await flushed(helper)
    child = f"{run.id}.t1.0"
    history = list(await helper.with_(store=store).history(child))
    assert both.events_of(child) == above.events_of(child) == below.events_of(child) == history
    assert not below.events_of(run.id)


async def test_a_failing_watcher_changes_nothing(store, caplog):
    """The first failure is logged with its traceback, the others are counted, and the other watcher sees all."""

    def fail(_run, _events):
        raise SystemExit("no")

    notes = Notes()
    agent = agent_of(store, fail, notes)
    run = await agent.run("go")
    await flushed(agent)
    assert run.output == "done"
    assert notes.events_of(run.id) == list(await agent.history(run.id))
    assert agent.watch[0].failed == len(notes.commits)
    assert caplog.text.count("has failed; further failures are counted only") == 1
    assert f"0 commits dropped, {agent.watch[0].failed} failed" in caplog.text


async def test_a_hanging_watcher_changes_nothing(store, caplog, monkeypatch):
    """Commits beyond the backlog are dropped and counted, and the run ends without waiting for the watcher."""
    monkeypatch.setattr(callbacks, "MAX_BUFFERED_EVENTS", 2)
    go_on = threading.Event()
    seen = []

    def hang(run, events):
        go_on.wait()
        seen.append(run.version)

    agent = agent_of(store, hang)
    try:
        run = await agent.run("go")
        outlet = agent.watch[0]
        assert run.output == "done"
        assert outlet.dropped > 0
        assert "lags behind by 2 commits; further ones are dropped" in caplog.text
        outlet.flush(0.01)
        assert "has not taken" in caplog.text
    finally:
        go_on.set()
    outlet.flush()
    assert 2 <= len(seen) <= 3


async def test_closing_an_agent_waits_for_its_watchers():
    """All commits are delivered before `async with` ends."""
    notes = Notes()

    def slow(run, events):
        threading.Event().wait(0.005)
        notes(run, events)

    async with agent_of(MemoryStore(), slow) as agent:
        run = await agent.run("go")
    assert notes.commits[-1][0].version == run.version


def test_the_end_of_the_process_waits_for_watchers():
    """Also if the agent was not closed."""
    code = """
import time
from agentfsm import Agent
from agentfsm.testing import ScriptedModel

def slow(run, events):
    time.sleep(0.05)
    print(run.version, flush=True)

print("end", Agent(ScriptedModel("done"), watch=[slow]).run_sync("go").version, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.split("\n")
    assert done.stderr == ""
    assert lines[-2] == next(line for line in lines if line.startswith("end")).split()[1]


async def test_a_thread_ends_when_there_is_nothing_to_do(store, monkeypatch):
    """The next commit starts another."""
    monkeypatch.setattr(callbacks, "IDLE_TIMEOUT_S", 0.001)
    notes = Notes()
    agent = agent_of(store, notes)
    for _ in range(2):
        run = await agent.with_(model=ScriptedModel("done")).run("go")
        await flushed(agent)
        while any(thread.name == "agentfsm-watch-Notes" for thread in threading.enumerate()):  # noqa: ASYNC110  no event
            await anyio.sleep(0.001)
        assert notes.commits[-1][0].version == run.version


def test_variants_share_the_queue():
    """So that a watcher is called by one thread only."""
    agent = Agent(ScriptedModel(), watch=[print])
    assert agent.with_(name="b").watch == agent.watch


class Later:
    async def __call__(self, run, events):
        pass


async def later(run, events):
    pass


@pytest.mark.parametrize(
    ("watch", "message"),
    [
        (print, "give a list of functions, also for a single one"),
        ("abc", "give a list of functions"),
        (5, "give a list of functions"),
        ([5], "give a function of a run and its new events"),
        ([Notes], "give a function of a run and its new events"),
        ([later], "give a plain function"),
        ([Later()], "give a plain function"),
        ([lambda run: None], "a function of two arguments"),
    ],
)
def test_a_watcher_that_cannot_be_called_is_refused(watch, message):
    """When the agent is made."""
    with pytest.raises(MisuseError, match=message):
        Agent(ScriptedModel(), watch=watch)


def test_an_agent_without_watchers_does_not_load_them():
    code = "import sys, agentfsm.testing as t, agentfsm; agentfsm.Agent(t.ScriptedModel('x')).run_sync('go'); "
    code += "print('agentfsm.streaming.watch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_commits_are_collected_until_somebody_waits_or_they_are_many():
    """A dispatcher that collects wakes for a drain, and for a fourth of its buffer; the order stays."""
    seen, is_full = [], threading.Event()

    def take(number):
        seen.append(number)
        if number == callbacks._URGENT_EVENTS - 1:
            is_full.set()

    dispatcher = callbacks.CallbackDispatcher(take, batch_s=3_600)
    for number in range(3):
        dispatcher.put(number)
    assert dispatcher.drain_in_thread(60) == 0
    assert seen == [0, 1, 2]
    for number in range(callbacks._URGENT_EVENTS + 1):
        dispatcher.put(number)
    assert is_full.wait(60)
    assert dispatcher.drain_in_thread(60) == 0
    assert seen == [0, 1, 2, *range(callbacks._URGENT_EVENTS + 1)]
    assert dispatcher.missed == 0
