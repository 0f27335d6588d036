"""A shell as a newcomer has it: the programs of a system, a home that does not exist yet, and nothing else."""

import os
import subprocess
from pathlib import Path

# Where a system has its programs: no `agentfsm`, no environment.
BARE_PATH = "/usr/local/bin:/usr/bin:/bin"
# How pip finds its index is the machine's matter.
SETTINGS = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def execute_bare(folder: Path, line: str, stdin: str = "", **variables: str) -> str:
    """Execute a line as it was printed, and return its output; it has to succeed."""
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=folder,
        env={"PATH": BARE_PATH, "HOME": str(folder / "no-home"), **SETTINGS, **variables},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
