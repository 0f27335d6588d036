"""The command line in a folder of its own, as a process and in this one."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import APP, OURS, Here, Shell
from tests.support.terminal import Terminal


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A folder that holds the agents of `app.py.txt` as its module `app`."""
    (tmp_path / "app.py").write_text(APP.read_text(encoding="utf-8"), encoding="utf-8")
    shell = Shell(tmp_path)
    yield shell
    for process in shell.started:
        process.close()


@pytest.fixture
def here(shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Here]:
    """The command in this process, in the shell's folder."""
    for name in list(os.environ):
        if name.startswith(OURS):
            monkeypatch.delenv(name)
    monkeypatch.chdir(shell.folder)
    monkeypatch.syspath_prepend(shell.folder)  # and back again
    monkeypatch.delitem(sys.modules, "app", raising=False)
    yield Here(capsys, shell.folder)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{shell.folder}/"):
            del sys.modules[name]


@pytest.fixture
def terminal(shell: Shell) -> Iterator[Callable[..., Terminal]]:
    """A function that runs a command at a terminal."""
    started: list[Terminal] = []

    def run(*words: str, **options: Any) -> Terminal:
        started.append(Terminal(shell, *words, **options))
        return started[-1]

    yield run
    for each in started:
        if each.popen.poll() is None:
            each.popen.kill()
            each.end()


@pytest.fixture(autouse=True, scope="session")
def _children_hear_an_interrupt():
    """A test run that was started in the background ignores Ctrl-C, and its children would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
