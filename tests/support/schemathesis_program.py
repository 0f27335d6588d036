"""Schemathesis, which tests a server by its OpenAPI document, in an environment of its own.

It asks for an older jsonschema-rs than this package is tested with, so it is not in the test group.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path
from typing import Final

import pytest

VERSION: Final = "4.32.5"


@cache
def schemathesis() -> Path:
    """Return the program; installs it where it is not kept yet. Without an index it skips, but fails in CI."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "agentfsm" / f"schemathesis-{VERSION}-{sys.version_info.major}.{sys.version_info.minor}"
    program = folder / "bin" / "schemathesis"
    if not program.exists():
        venv.create(folder, with_pip=True)
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", f"schemathesis=={VERSION}"]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            why = f"schemathesis could not be installed: {done.stderr[-1_000:]}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    return program
