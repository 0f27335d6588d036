"""What-if runs of agents that try to act anyway, in a process that is killed in the middle of them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from agentfsm.stores import SQLiteStore
from tests.support.what_if_agents import KINDS, STEPS, FileWorld, record

SCRIPT = """
import json, os, sys
import anyio
from agentfsm.evals import whatif
from agentfsm.stores import SQLiteStore
from tests.support.what_if_agents import KINDS, OTHER, FileWorld

async def main():
    store, done = SQLiteStore("runs.db"), []
    last = int(sys.argv[1])
    def kill_at(trial):
        assert trial.effects, trial
        done.append(trial)
        if len(done) == last:
            os.kill(os.getpid(), 9)
    for build, ids in zip(KINDS, json.load(open("ids.json"))):
        candidate = build(FileWorld(), OTHER).with_(store=store)
        await whatif(candidate, ids, read="live", repeats=int(sys.argv[2]), on_trial=kill_at)
    print(len(done))

anyio.run(main)
"""


def try_and_die(folder, runs, repeats, deaths):
    """Record runs of each kind, try them in processes that die after so many trials, and return how they ended."""
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")

    async def prepare():
        store = SQLiteStore("runs.db")
        ids = [
            [(await record(build(FileWorld(), STEPS).with_(store=store))).id for _ in range(runs)] for build in KINDS
        ]
        await store.aclose()
        return ids

    (folder / "ids.json").write_text(json.dumps(anyio.run(prepare)), encoding="utf-8")
    world, stored = (folder / "world.txt").read_text(encoding="utf-8"), dump(folder)
    assert len(world.splitlines()) == len(KINDS) * runs * len(STEPS)
    ends = []
    for death in deaths:
        words = [sys.executable, "script.py", str(death), str(repeats)]
        root = str(Path(__file__).parents[2])
        ended = subprocess.run(words, cwd=folder, env={"PYTHONPATH": root}, capture_output=True, text=True, check=False)
        ends.append((ended.returncode, ended.stdout.strip(), ended.stderr[-2000:]))
        assert (folder / "world.txt").read_text(encoding="utf-8") == world
        assert dump(folder) == stored
    return ends


def dump(folder):
    """Return all runs of the store with their events."""

    async def read():
        store = SQLiteStore(folder / "runs.db")
        lines = await store.runs(limit=10_000)
        found = [(line.id, len((await store.read(line.id)).events)) for line in lines]
        await store.aclose()
        return found

    return anyio.run(read)


def test_the_world_outside_hears_nothing(tmp_path, monkeypatch):
    """No call is made, whether the process is killed or ends; the store has the runs that it had."""
    monkeypatch.chdir(tmp_path)
    [killed] = try_and_die(tmp_path, runs=1, repeats=2, deaths=[4])
    assert killed[0] == -signal.SIGKILL, killed


@pytest.mark.soak
def test_two_thousand_of_them(tmp_path, monkeypatch):
    """Of five kinds of agent, killed at several places and in the end not."""
    monkeypatch.chdir(tmp_path)
    ends = try_and_die(tmp_path, runs=20, repeats=20, deaths=[7, 250, 900, 1_600, 10_000])
    assert [code for code, _out, _err in ends] == [*[-signal.SIGKILL] * 4, 0], ends
    assert ends[-1][1] == str(len(KINDS) * 20 * 20)
