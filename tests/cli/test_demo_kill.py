"""Killed at any moment, the demo goes on where it was, and there is one report in the end."""

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentfsm import State
from agentfsm.cli.demo.survey_tools import safe_name
from agentfsm.core.events import ToolFinished, ToolStarted
from tests.support.checks import keys_of, valid_history
from tests.support.command_line import Shell

SEEDS = range(1, 4, 2)
SOAK = range(100, 150)
# A whole demo of the folder below says so many lines, the id included.
LINES = 29
# After a line: none, as long as a tool takes, as long as the model takes.
DELAYS_S = (0.0, 0.003, 0.05)


def finished(events):
    return {event.result.call_id: event for event in events if isinstance(event, ToolFinished)}


def kill_somewhere(shell, seed):
    """Start a demo, kill it at a random moment, and return the run's id."""
    moment = random.Random(seed)
    lines = 1 + int((LINES - 1) * (seed % 8 + moment.random()) / 8)  # neighbouring seeds cover the whole run
    more_s = moment.random() * moment.choice(DELAYS_S)
    process = shell.start("demo", "folder")
    for _ in range(lines):
        if process.next_line() is None:
            break
    time.sleep(more_s)  # not to wait for something: it picks the moment
    process.kill()
    process.end()
    return process.run_id


def crash(folder: Path, seed: int) -> str:
    """Kill one demo and go on with it; fail unless nothing was lost, repeated or doubled."""
    shell = Shell(folder)
    shell.env["AGENTFSM_DEMO_DELAY_S"] = "0.002"
    (folder / "folder").mkdir(parents=True)
    for number in range(5):
        (folder / "folder" / f"file{number}.py").write_text("def f(): ...  # TODO\n" * 20, encoding="utf-8")
    run_id = kill_somewhere(shell, seed)
    before = shell.events(run_id)
    last = shell.load(run_id).state

    resumed = shell("resume", run_id)

    run, events = shell.load(run_id), shell.events(run_id)
    assert run.state is State.DONE, resumed.err
    assert events[: len(before)] == before
    valid_history(run.messages)
    results = [event.result.call_id for event in events if isinstance(event, ToolFinished)]
    assert len(results) == len(set(results)), "a call has two results"
    assert set(results) == {call.call_id for call in run.calls}
    for call_id, event in finished(before).items():
        assert finished(events)[call_id] == event
        assert f"  {call_id} " not in resumed.err, f"{call_id} ran again, though its result was durable"
    (report,) = shell.reports()
    assert report.stem == safe_name(keys_of(run)["t3.0"])
    assert report.name in run.output
    return f"seed {seed}: killed in {last.upper()} at version {len(before)}, resumed to {len(events)}"


def crash_all(folder, seeds):
    """Crash one demo for each seed, two at a time, and tell where each was killed."""
    with ThreadPoolExecutor(2) as pool:
        for told in pool.map(lambda seed: crash(folder / str(seed), seed), seeds):
            print(told)  # noqa: T201  shown when a seed fails


def test_killed_at_any_moment(tmp_path):
    """Two moments, each its own seed; the failing one names itself by its folder."""
    crash_all(tmp_path, SEEDS)


# The command, with a place in it that kills the process.
DEADLY = """
import os, signal, sys
from pathlib import Path
from agentfsm.cli import main
from agentfsm.cli.demo import survey_tools

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

{patch}
sys.exit(main(["demo", "."]))
"""


@pytest.mark.parametrize(
    ("patch", "left"),
    [
        ("survey_tools._write_durably = die", []),
        ("Path.replace = die", ["part"]),
        ("survey_tools._sync_folder = die", ["md"]),
        ("survey_tools._relative_path = die", ["md"]),
    ],
    ids=["before it is written", "before it has its name", "before the name is durable", "before the result is known"],
)
def test_killed_while_the_report_is_written(shell, patch, left):
    """The tool is idempotent, so the call runs again under its key, and there is the one report."""
    shell.env["AGENTFSM_DEMO_DELAY_S"] = "0"
    process = shell.python("-c", DEADLY.format(patch=patch))
    assert process.end() == -signal.SIGKILL
    assert [path.suffix[1:] for path in shell.reports()] == left
    shell("resume", process.run_id)
    (report,) = shell.reports()
    assert report.stem == safe_name(keys_of(shell.load(process.run_id))["t3.0"])
    started = [event.call_id for event in shell.events(process.run_id) if isinstance(event, ToolStarted)]
    assert started == ["t3.0", "t3.0"]


@pytest.mark.soak
def test_killed_at_many_moments(tmp_path):
    """Fifty more."""
    crash_all(tmp_path, SOAK)
