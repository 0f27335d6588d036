"""Recorded dialogues with stateful tools, as plans in parallel: `benchmarks/dialogues.py` finds no difference."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PINNED = ("bfcl-eval==2026.3.23", "mpmath==1.4.1")


def run_benchmark(folder, *words):
    """Run a benchmark with the data of bfcl-eval, which are installed into a folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PINNED]
    if subprocess.run(pip, check=False).returncode:
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say("the recorded dialogues could not be fetched")
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.soak
def test_recorded_dialogues_may_run_in_parallel(tmp_path):
    """Their final states and results are those of the serial run, and at least 100 have calls that overlap."""
    done = run_benchmark(tmp_path, "dialogues", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    [overlapping] = [line for line in done.stdout.splitlines() if line.startswith("with calls that overlapped")]
    assert int(overlapping.split()[4]) >= 100


@pytest.mark.soak
def test_recorded_dialogues_as_a_suite(tmp_path):
    """Faultless runs reach every grade, and calls that are left out or swapped are caught."""
    done = run_benchmark(tmp_path, "graded", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[:20].strip(): line[20:].split() for line in done.stdout.splitlines()}
    assert rows["none, again"] == ["100.0%", "100.0%", "100.0%", "100.0%", "pass"]
    assert done.stdout.startswith("200 dialogues with 734 turns")
    faults = ("a call twice", "a call left out", "two calls swapped")
    assert [rows[fault][-1] for fault in faults] == ["worse"] * 3
