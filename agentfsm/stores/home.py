"""The folder `.agentfsm`, in which the command line keeps its store and its reports."""

from __future__ import annotations

from pathlib import Path
from typing import Final

HOME_FOLDER: Final = ".agentfsm"
DEFAULT_STORE: Final = f"{HOME_FOLDER}/runs.db"


def create_private_folder(folder: Path) -> None:
    """Create a folder that only its owner can read, and exclude HOME_FOLDER from git. Keep the mode of an old folder.

    Raises:
        OSError: if the folder cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ignore = folder / ".gitignore"
    if folder.name == HOME_FOLDER and not ignore.exists():
        ignore.write_text("*\n", encoding="ascii")
