"""An evaluation that is killed with `kill -9` goes on in another process."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import anyio
from agentfsm import Agent
from agentfsm.evals import Case, evaluate
from agentfsm.stores import SQLiteStore
from agentfsm.testing.models import FunctionModel

def think(request):
    with open("asked.txt", "a") as file:
        print(request.messages[0].text, file=file)
    return "done"

def kill_at(result):
    with open("graded.txt", "a") as file:
        print(result.run_id, file=file)
    if sys.argv[1] == "die" and len(open("graded.txt").readlines()) == 4:
        os.kill(os.getpid(), 9)

async def main():
    async with Agent(FunctionModel(think), store=SQLiteStore("evals.db")) as agent:
        cases = [Case(input=f"case {number}", check=lambda run, deps: True) for number in range(3)]
        found = await evaluate(agent, cases, runs=3, parallel=1, on_result=kill_at)
        print(found.mean(), found.pass_hat(3))

anyio.run(main)
"""


@pytest.mark.soak
def test_a_killed_evaluation_goes_on(tmp_path: Path):
    """Each run is made once, before the kill or after it, and all of them are graded."""

    def start(word):
        command = [sys.executable, "-c", SCRIPT, word]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)

    assert start("die").returncode == -signal.SIGKILL
    assert len((tmp_path / "asked.txt").read_text(encoding="utf-8").splitlines()) == 4
    done = start("go on")
    assert done.stdout == "1.0 1.0\n", done.stderr
    asked = (tmp_path / "asked.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(asked) == sorted(f"case {number}" for number in range(3) for _ in range(3))
