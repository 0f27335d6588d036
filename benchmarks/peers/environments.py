"""The environment of each peer: made once, in the user's cache, with the versions that the table was written for."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from benchmarks.selection import CACHE

# By the name of a peer's module: the newest of 29 November 2026.
PACKAGES: dict[str, tuple[str, ...]] = {
    "agent_framework": ("agent-framework-core==1.23.0", "agent-framework-openai==1.17.0", "openai==3.57.0"),
    "langgraph": (
        "langgraph==1.2.24",
        "langchain==1.5.2",
        "langchain-core==1.8.3",
        "langchain-openai==1.7.4",
        "langgraph-checkpoint-sqlite==3.1.2",
        "openai==3.57.0",
    ),
    "openai_agents": ("openai-agents==0.24.0", "openai==3.57.0"),
    "pydantic_ai": ("pydantic-ai-slim[openai,dbos]==2.68.0", "openai==3.57.0", "dbos==3.4.0"),
    "strands": ("strands-agents[openai]==1.62.0", "openai==2.54.0"),  # it does not take openai 3
}


def python(name: str) -> Path:
    """Return the Python of a peer's environment, which is made where it is missing or has other versions.

    Raises:
        CalledProcessError: when it cannot be made, for example without a network.
    """
    folder = CACHE / name
    found, ready = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join((platform.python_version(), *PACKAGES[name]))
    if not ready.exists() or ready.read_text() != wanted:
        print(f"making {folder}", file=sys.stderr, flush=True)
        pip = (found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run((sys.executable, "-m", "venv", "--clear", folder), check=True)  # noqa: S603  our own Python
        subprocess.run((*pip, *PACKAGES[name]), check=True)  # noqa: S603  pinned names
        ready.write_text(wanted)
    return found
