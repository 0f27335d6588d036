"""The types that users meet: code after the contract passes mypy --strict and pyright, and mistakes do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
USER_CODE = ROOT / "tests" / "typing" / "user_code.py"


def checked(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a checker on the user's code."""
    return subprocess.run(
        [sys.executable, "-m", *command, str(USER_CODE)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
    )


def test_mypy_takes_the_users_code():
    """Strictly, with no ignore that is not needed."""
    done = checked("mypy", "--strict", "--config-file=", "--no-error-summary", "--follow-imports=silent")
    assert done.stdout == ""
    assert done.returncode == 0


def test_pyright_takes_the_users_code():
    """In its standard mode."""
    done = checked("pyright", "--pythonpath", sys.executable)
    assert "0 errors" in done.stdout, done.stdout
    assert done.returncode == 0
