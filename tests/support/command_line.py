"""The command line as its users meet it: real processes in a folder of their own; in-process where that suffices."""

from __future__ import annotations

import importlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentfsm import Run
from agentfsm.cli import main
from agentfsm.engine.execution import journal
from agentfsm.stores import SQLiteStore
from tests.support.warm_python import WARM_UP, WITH_MCP, WarmProcess, WarmPython

# A guard against hanging, never a bound that a test relies on.
HANG_S = 60.0

OURS = ("OPENAI_", "AGENTFSM_", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")


def environment(**changes: str) -> dict[str, str]:
    """Return the environment without what would change what is tested."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where the shell finds `agentfsm`
    return kept | {"TERM": "xterm", "PYTHONUNBUFFERED": "1", "PATH": path} | changes


# What the commands import on first use stands here too; `import app` is for each process to do.
COMMANDS = """
import pkgutil, agentfsm.cli.commands, agentfsm.cli.render.rich_chat, agentfsm.flow, agentfsm.stores.sqlite
import agentfsm.cli.demo.demo_agent, agentfsm.models.openai.chat, genai_prices, openai.resources.chat
for each in pkgutil.iter_modules(agentfsm.cli.commands.__path__): __import__("agentfsm.cli.commands." + each.name)
"""
WARM = WarmPython(warm_up=WARM_UP + COMMANDS + WITH_MCP)


def write_warm_command(folder: Path) -> Path:
    """Write an `agentfsm` for shells that starts from the warm process, and return its folder."""
    folder.mkdir()
    command = folder / "agentfsm"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(WARM.command("-m", "agentfsm"))} "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return folder


def start_python(words: tuple[str, ...], folder: Path, env: dict[str, str]) -> subprocess.Popen[str] | WarmProcess:
    """Start Python with these arguments, its output and errors in pipes: from a warm process where that is the same."""
    if WARM.can_start(words, env):
        return WARM.start(words, folder, env)
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


class Process:
    """A running command, whose stderr is read line by line as it comes."""

    def __init__(self, folder: Path, words: tuple[str, ...], env: dict[str, str]) -> None:
        self.popen = start_python(words, folder, env)
        self.lines: list[str] = []
        self._ended = False
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._out: list[str] = []
        self._threads = [threading.Thread(target=self._read_err), threading.Thread(target=self._read_out)]
        for thread in self._threads:
            thread.start()

    def _read_err(self) -> None:
        for line in self.popen.stderr:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def _read_out(self) -> None:
        self._out.append(self.popen.stdout.read())

    def next_line(self) -> str | None:
        """Wait for the next line of stderr; None at its end."""
        line = self._queue.get(timeout=HANG_S)
        if line is None:
            self._ended = True
        else:
            self.lines.append(line)
        return line

    def wait_for(self, text: str) -> str:
        """Wait for a line of stderr that holds the text."""
        while (line := self.next_line()) is not None:
            if text in line:
                return line
        raise AssertionError(f"{text!r} was never said; stderr:\n" + "\n".join(self.lines))

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)

    def end(self) -> int:
        """Wait for the end and return the exit code; minus the signal's number for one that was killed."""
        code = self.popen.wait(HANG_S)
        for thread in self._threads:
            thread.join(HANG_S)
        while not self._ended and self.next_line() is not None:
            pass
        self.popen.stdout.close()
        self.popen.stderr.close()
        return code

    def close(self) -> None:
        """End what a test that failed has left running."""
        if not self.popen.stdout.closed:
            self.kill()
            self.end()

    @property
    def out(self) -> str:
        return self._out[0]

    @property
    def err(self) -> str:
        return "\n".join(self.lines)

    @property
    def run_id(self) -> str:
        """The id that the first line of ours tells."""
        return next(line.split()[1] for line in self.lines if line.startswith("run "))


class Shell:
    """A folder, and the command in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = environment()
        self.started: list[Process] = []

    def start(self, *words: str) -> Process:
        return self.python("-m", "agentfsm", *words)

    def python(self, *words: str) -> Process:
        self.started.append(Process(self.folder, words, self.env))
        return self.started[-1]

    def __call__(self, *words: str, code: int = 0) -> Process:
        """Run a command to its end, which has to be as expected."""
        process = self.start(*words)
        ended = process.end()
        assert ended == code, f"{words} ended with {ended}, not {code}\n{process.err}\n{process.out}"
        return process

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code).out)

    def load(self, run_id: str) -> Run:
        return anyio.run(_parse_record, self.folder, run_id)

    def events(self, run_id: str) -> tuple[Any, ...]:
        return anyio.run(_events, self.folder, run_id)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds that no stream tells of."""
        deadline = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < deadline, "it never came to hold"
            time.sleep(0.005)

    def reports(self) -> list[Path]:
        return sorted((self.folder / ".agentfsm" / "reports").glob("*"))


async def _parse_record(folder: Path, run_id: str) -> Run:
    store = SQLiteStore(folder / ".agentfsm" / "runs.db")
    try:
        return await journal.load_run(store, run_id)
    finally:
        await store.aclose()


async def _events(folder: Path, run_id: str) -> tuple[Any, ...]:
    store = SQLiteStore(folder / ".agentfsm" / "runs.db")
    try:
        return (await store.read(run_id)).events
    finally:
        await store.aclose()


APP = Path(__file__).with_name("app.py.txt")


class Here:
    """The command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys = capsys
        self.folder = folder
        self.out = self.err = ""

    def __call__(self, *words: str, code: int = 0) -> str:
        """Run a command, which has to end as expected; return what it wrote to stdout."""
        try:
            ended = main(words)
        except SystemExit as error:  # argparse's way
            ended = error.code
        self.out, self.err = self.capsys.readouterr()
        assert ended == code, f"{words} ended with {ended}, not {code}\n{self.err}\n{self.out}"
        return self.out

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code))

    def forget_app(self) -> None:
        """Have the module loaded anew, as it is now."""
        sys.modules.pop("app", None)
        importlib.invalidate_caches()

    def run(self, target: str, *words: str, code: int = 0) -> str:
        """Run an agent, and return the run's id."""
        self("run", target, *(words or ("Do it.",)), code=code)
        return next(line.split()[1] for line in self.err.splitlines() if line.startswith("run "))


def printed(here):
    """The command lines that a report prints."""
    return [line.strip() for line in here.err.splitlines() if "agentfsm " in line]
