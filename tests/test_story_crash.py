"""The story of examples/crash.py, told by what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "crash.py"


@pytest.fixture(scope="module")
def told() -> list[str]:
    """Run the example once; return its lines."""
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_worker_is_really_killed(told):
    """Signal 9, in the middle of the payment."""
    at = told.index("    pay(DE02, 1700) runs: the money is on its way ...")
    assert told[at + 1] == "    killed by signal 9"


def key_of(told, tool):
    """The idempotency key of a tool's call, as the second process tells it."""
    (line,) = [line for line in told if line.startswith(f"    {tool} ") and " key " in line]
    return line.split(" key ")[1]


def test_nothing_runs_twice(told):
    """Each tool says once that it runs, over three processes; and the world's books have a line each."""
    runs = [line.split("(")[0].strip() for line in told if " runs" in line]
    assert runs == ["look_up", "write_letter", "pay"]
    entries = [json.loads(line.split(maxsplit=1)[1]) for line in told if ".jsonl " in line]
    assert [entry["key"] for entry in entries] == [
        key_of(told, "write_letter"),
        key_of(told, "pay"),
    ]


def test_the_unknown_call_waits(told):
    """What was done is kept, what is unknown is shown."""
    assert "    the run is in ACT and waits for the outcome of pay" in told
    assert any(line.startswith("    look_up      finished  key ") for line in told)
    assert any(line.startswith("    pay          lost      key ") for line in told)


def test_the_model_is_told_the_truth(told):
    """It reads what the person found out, and the journal says who that was."""
    [answer] = [line for line in told if line.startswith("    answer: ")]
    assert f"paid, the bank has it under {key_of(told, 'pay')}" in answer
    assert any(line.split() == ["8", "ToolFinished", "t1.2", "by", "ann"] for line in told)
