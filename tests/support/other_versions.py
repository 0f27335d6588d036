"""Other versions of agentfsm in folders of their own: the first one, from the history, and a simulated next one.

A wheel of agentfsm contains the files of its package and nothing that is built, so a folder with these files on the
path is what `pip install --no-deps` makes of the wheel; the dependencies are those of this environment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import attrs

from agentfsm.core.header import FORMAT
from tests.support.version_story import Books

ROOT = Path(__file__).parent.parent.parent
STORY = Path(__file__).parent / "version_story.py"
# The last commit of version 0.1.0, which writes format 3.
FIRST_COMMIT = "af1ca3149df1dc3359d462c4ac5c86605ba30649"
_MARKED = '@attrs.frozen(kw_only=True)\nclass Marked(Event):\n    mark: str = ""\n\n\n'
_EVENTS = "EVENTS: tuple[type[Event], ...] = (\n"
# What the next version changes, by file: each new text takes the place of an old one. Its format has one more event,
# which it records whenever it reads the inbox.
_NEXT_CHANGES = {
    "core/header.py": [(f"FORMAT: Final = {FORMAT}", f"FORMAT: Final = {FORMAT + 1}")],
    "core/codec.py": [("    3: _migrate_3,\n", f"    3: _migrate_3,\n    {FORMAT}: _migrate_3,\n")],
    "core/events.py": [(_EVENTS, f"{_MARKED}{_EVENTS}    Marked,\n")],
    "core/machine.py": [("        e.Observed:  ", "        e.Marked: State.OBSERVE,\n        e.Observed:  ")],
    "core/reducers.py": [("        e.Observed: ", "        e.Marked: lambda *_: {},\n        e.Observed: ")],
    "engine/observe.py": [
        ("StepOutcome((e.Observed(),))", "StepOutcome((e.Marked(mark='new'), e.Observed()))"),
        ("StepOutcome((observed,), numbers)", "StepOutcome((e.Marked(mark='new'), observed), numbers)"),
    ],
}  # fmt: skip


@attrs.frozen
class Version:
    """A version of agentfsm, to be run in processes of its own."""

    folder: Path
    """The folder that holds its package."""

    @contextmanager
    def start(self) -> Iterator[VersionProcess]:
        """Start a process that executes commands of the story."""
        with subprocess.Popen(
            [sys.executable, STORY],
            env={**os.environ, "PYTHONPATH": str(self.folder), "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield VersionProcess(self.folder, process)
            finally:
                process.kill()


@attrs.frozen
class VersionProcess:
    """A process with a version of agentfsm."""

    folder: Path
    process: subprocess.Popen[str]

    def ask(self, command: str, place: str, books: Books, *ids: str, keep_open: bool = False) -> dict[str, Any]:
        """Have it execute a command. Return the outcome; an empty dict if the command has killed the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"command": command, "place": place, "effects": str(books.path), "ids": ids, "keep_open": keep_open}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            assert self.process.wait() == -signal.SIGKILL
            return {}
        outcome: dict[str, Any] = json.loads(line)
        assert Path(outcome["package"]).is_relative_to(self.folder)
        return outcome


def make_next_version(folder: Path) -> Version:
    """Make the next version: this one with a newer format."""
    package = folder / "agentfsm"
    shutil.copytree(ROOT / "agentfsm", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in _NEXT_CHANGES.items():
        text = (package / name).read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (package / name).write_text(text, encoding="utf-8")
    return Version(folder)


@cache
def read_first_package() -> bytes | None:
    """Return an archive of the package of the first version; None if the history does not go back to it."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", ROOT, "archive", "--format=tar", FIRST_COMMIT, "agentfsm"]
    found = subprocess.run(command, capture_output=True, check=False)
    return found.stdout if found.returncode == 0 else None


def make_first_version(folder: Path) -> Version | None:
    """Make the first version; None if the history does not go back to it."""
    if (package := read_first_package()) is None:
        return None
    with tarfile.open(fileobj=BytesIO(package)) as archive:
        archive.extractall(folder, filter="data")
    return Version(folder)
