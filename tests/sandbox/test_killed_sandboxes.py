"""Processes of sandboxes killed from outside in the middle of a call: the tool's `on_unknown` decides."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from agentfsm import Agent, ErrorType, Found, Outcome, PendingKind, tool
from agentfsm.ports import SandboxEnd
from agentfsm.sandbox import Sandbox, find_isolation
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.queue import dispatch
from tests.support import sandbox_functions
from tests.support.checks import results_of, settled


@pytest.fixture
def folder(tmp_path):
    """Give a folder that functions in sandboxes may write to; skip where there is no sandbox."""
    available = find_isolation()
    if available.isolation is None:
        pytest.skip(f"no sandbox here: {available.description}")
    place = tmp_path / "shared"
    place.mkdir()
    for each in (*tmp_path.parents[:2], tmp_path, place):  # root's functions run as another user
        each.chmod(0o777)
    return place


def descendants(pid):
    """Return the processes below one, each after its parent."""
    parents = {}
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


async def kill_when_paid(folder, others, victim):
    """Wait until the function has had its effect, then kill its process, or the one that watches it."""
    book = folder / "book"
    await anyio.to_thread.run_sync(settled, lambda: book.exists() and book.read_text() == "paid\n")
    processes = [pid for pid in descendants(os.getpid()) if pid not in others and is_python(pid)]
    os.kill(processes[-1 if victim == "function" else 0], signal.SIGKILL)


def is_python(pid):
    """Return whether a process runs Python, as those of a sandbox do, bubblewrap apart."""
    return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]


async def killed(folder, victim="function", **options):
    """Have a model pay in a sandbox that is killed when it has paid; return the agent and the run."""
    pay = tool(sandbox=Sandbox(write=[folder]), **options)(sandbox_functions.pay_and_wait)
    agent = Agent(ScriptedModel(say("", call("pay_and_wait", folder=str(folder))), "done"), tools=[pay])
    others = descendants(os.getpid())
    async with anyio.create_task_group() as group:
        group.start_soon(kill_when_paid, folder, others, victim)
        run = await agent.finish(agent.start("go"))
    return agent, run


def times_paid(folder):
    return (folder / "book").read_text().count("paid")


VICTIM = pytest.mark.parametrize(("victim", "cause"), [("function", "by SIGKILL"), ("watcher", "watches the sandbox")])


@VICTIM
async def test_a_call_that_may_not_be_repeated_waits_for_a_person(folder, victim, cause):
    """The reason is shown; a person settles it, and nothing is paid again."""
    agent, run = await killed(folder, victim)
    (item,) = run.pending
    assert item.kind is PendingKind.OUTCOME
    assert cause in item.error
    await agent.settle(run.id, item.call_id, result="paid, says the bank")
    run = await agent.resume(run.id)
    assert [(each.outcome, each.content) for each in results_of(run.messages)] == [
        (Outcome.DONE, "paid, says the bank")
    ]
    assert (run.output, times_paid(folder)) == ("done", 1)


@VICTIM
async def test_a_call_that_ends_as_unknown(folder, victim, cause):
    """The model is told the reason, and the result names the sandbox."""
    _, run = await killed(folder, victim, on_unknown="fail")
    (result,) = results_of(run.messages)
    assert (result.outcome, result.error_type) == (Outcome.UNKNOWN, ErrorType.UNAVAILABLE)
    assert cause in result.content
    assert "may have happened" in result.content
    assert result.sandbox == find_isolation().isolation
    assert (run.output, times_paid(folder)) == ("done", 1)


async def test_a_function_that_finds_the_outcome_out(folder):
    """It reads the book, and its finding is the result."""
    _, run = await killed(folder, on_unknown=lambda _ctx, a: Found((Path(a.folder) / "book").read_text()))
    assert [(each.outcome, each.content) for each in results_of(run.messages)] == [(Outcome.DONE, "paid\n")]
    assert times_paid(folder) == 1


@pytest.mark.parametrize("options", [{"read_only": True}, {"idempotent": True}, {"on_unknown": "rerun"}], ids=str)
async def test_a_call_that_may_be_repeated_is(folder, options, monkeypatch):
    """In a new sandbox, and the run goes on."""
    monkeypatch.setattr(dispatch, "RETRY_WAIT_S", 0.0)
    _, run = await killed(folder, **options)
    assert [(each.outcome, each.attempts) for each in results_of(run.messages)] == [(Outcome.DONE, 2)]
    assert (run.output, times_paid(folder)) == ("done", 2)


async def test_a_sandbox_that_is_killed_before_its_function_starts_has_run_nothing(folder, monkeypatch):
    """The process that watches it ends before it has read what to run."""
    monkeypatch.setattr(
        "agentfsm.sandbox.sandboxed_call.supervisor_command", lambda: ["/bin/sh", "-c", "echo no memory >&2; exit 1"]
    )
    ended = await Sandbox(write=[folder]).run(sandbox_functions.pay_and_wait, (str(folder),), {})
    assert (ended.end, ended.level) == (SandboxEnd.NOT_STARTED, "")
    assert "was ended (no memory) before the function started" in ended.error
    assert not (folder / "book").exists()
