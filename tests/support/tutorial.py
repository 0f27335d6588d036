"""The files and commands of the tutorial, as they stand on its pages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import agentfsm

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs" / "tutorial").glob("[0-9]-*.md"))
BLOCK = re.compile(
    r"```(?:python|yaml|toml)\n# (?P<name>[\w.]+)\n(?P<code>.*?)```\n|"
    r"```bash\n(?P<commands>.*?)```\n(?:\n```text\n(?P<out>.*?)```\n)?",
    re.DOTALL,
)


def list_variables(**more: str) -> dict[str, str]:
    """Return the environment of a command: this one without settings, with `agentfsm` on its path, and more."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AGENTFSM_", "PYTHON", "SHOP_"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(Path(agentfsm.__file__).parents[1]), **more}


def execute(commands: str, folder: Path, environment: dict[str, str]) -> str:
    """Run commands in a shell, as they stand on a page, and return what they print."""
    done = subprocess.run(
        ["bash", "-c", commands],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout
