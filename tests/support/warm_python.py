"""Run pieces of Python each in a process of its own that has imported agentfsm already, which takes 0.8 s less.

This file is both: `WarmPython` starts it as a program, which forks for each piece.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, Self

# A run with a tool imports what is imported on first use. The tool is async, so that no thread is left when it forks.
WARM_UP = """
import anyio, agentfsm.guards, agentfsm.stores
from agentfsm import Agent, tool
from agentfsm.testing import ScriptedModel, call, say

async def warm(x: int) -> str:
    "Warm up."
    return "up"

async def main() -> None:
    async with Agent(ScriptedModel(say("", call("warm", x=1)), "Done."), tools=[tool(warm)]) as agent:
        assert (await agent.run("Go.")).output == "Done."

anyio.run(main)
"""


class WarmPython:
    """A process that forks for each piece of code, with warnings as errors; a context manager."""

    def __enter__(self) -> Self:
        """Start it."""
        command = [sys.executable, "-W", "error", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._process.communicate()

    def run(self, code: str, folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
        """Run code in a folder, with only these variables, and return its exit code, output and errors."""
        assert self._process.stdin
        assert self._process.stdout
        out, err = folder / ".stdout", folder / ".stderr"
        order = {"code": code, "folder": str(folder), "environment": environment, "out": str(out), "err": str(err)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return status, out.read_text(), err.read_text()


def _become(order: dict[str, Any]) -> None:
    """Make the forked process what `python -c CODE` would be, and run the code."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    for number, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.argv, sys.path[0] = ["-c"], ""
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(order["code"], main.__dict__)  # noqa: S102  the code of a page


def _serve() -> None:
    """Run each order that comes in, and write how it ended."""
    exec(WARM_UP, {"__name__": "warm_up"})  # noqa: S102  the code above
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            try:
                _become(json.loads(line))
            except Exception:  # noqa: BLE001  printed as Python does at its end
                traceback.print_exc()
                sys.exit(1)
            return
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
