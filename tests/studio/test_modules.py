"""The modules of the studio without a browser: their types, and what the pure ones return."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import node_packages

HERE = Path(__file__).parent


@pytest.mark.parametrize("which", ["tsconfig.json", "tsconfig.shared.json"])
def test_the_types_of_the_modules(which):
    """The TypeScript compiler finds no contradiction, nor in what all modules share a value without a type."""
    command = node_packages.program("typescript", "--project", str(HERE / which))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pure_modules():
    """Numbers, journals, Markdown, hidden characters and addresses: the tests in `modules/`, which Node runs."""
    files = [str(path) for path in sorted((HERE / "modules").glob("*.test.mjs"))]
    env = {**os.environ, "PACKAGES": str(node_packages.packages().parent)}
    command = [str(node_packages.node()), "--test", "--test-reporter=spec", *files]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
