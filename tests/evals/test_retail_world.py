"""A shop with a policy and simulated users: the check of its end state finds each fault of an agent."""

import subprocess
import sys

import pytest


@pytest.mark.soak
def test_the_end_state_finds_what_an_agent_did_wrong():
    """One that keeps the policy passes all tasks; the others fail those in which their fault matters."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "retail", "2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {line[:16].strip(): line[16:] for line in done.stdout.splitlines()}
    passed = {name: rows[name].split()[:2] for name in ("none", "none, again", "obeys", "never asks", "only talks")}
    assert [*passed.values()] == [[rate] * 2 for rate in ("100.0%", "100.0%", "60.0%", "90.0%", "50.0%")]
    assert rows["obeys"].endswith("worse: cancel too late, return too early, not in stock, of another customer")
    assert rows["never asks"].endswith(": changed mind")
    assert rows["only talks"].endswith("worse: cancel, return, address, exchange, two wishes")
