"""Where runs are kept, and how to get back to one."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Final

from agentfsm.core.errors import MisuseError
from agentfsm.stores.sqlite import SQLiteStore

HOME: Final = ".agentfsm"
DEFAULT: Final = f"{HOME}/runs.db"
VARIABLE: Final = "AGENTFSM_STORE"


def store_path(given: str | None) -> str:
    """Return the path of the store: as given, else from the environment, else the usual one."""
    return given or os.environ.get(VARIABLE) or DEFAULT


def make_store(path: str) -> SQLiteStore:
    """Return the store at a path, which is made at its first use; its folder is made now.

    Raises:
        MisuseError: when the folder cannot be made.
    """
    make_folder(Path(path).absolute().parent)
    return SQLiteStore(path)


def known_store(path: str) -> SQLiteStore:
    """Return a store that exists.

    Raises:
        MisuseError: when there is none at the path.
    """
    if not Path(path).exists():
        raise MisuseError(
            f"there is no store at {path}: start a run first, or name its store with --store PATH or {VARIABLE}",
        )
    return SQLiteStore(path)


def make_folder(folder: Path) -> None:
    """Make a folder; one of ours is kept out of git.

    Raises:
        MisuseError: when it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ignore = folder / ".gitignore"
        if folder.name == HOME and not ignore.exists():
            ignore.write_text("*\n", encoding="ascii")
    except OSError as error:
        raise MisuseError(
            f"the folder {folder} cannot be made ({error.strerror}): name a store elsewhere with --store PATH",
        ) from None


def command(words: str, path: str) -> str:
    """Return a command line, to be shown, that finds the store.

    Args:
        words: The subcommand with its arguments, for example "resume 17".
        path: Of the store.
    """
    usual = Path(path).absolute() == Path(DEFAULT).absolute()
    return f"{_program()} {words}" if usual else f"{_program()} {words} --store {shlex.quote(path)}"


@cache
def _program() -> str:
    """Return how this program can be called again: by its name only where the shell finds it."""
    script = Path(sys.argv[0])
    if shutil.which("agentfsm") is not None or script.name != "agentfsm":
        return "agentfsm"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
