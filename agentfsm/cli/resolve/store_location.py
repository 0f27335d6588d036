"""Find or create the store that the command line uses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from agentfsm.core.errors import MisuseError
from agentfsm.ports.store import Store
from agentfsm.stores.home import DEFAULT_STORE, create_private_folder
from agentfsm.stores.loading import open_store

STORE_VARIABLE: Final = "AGENTFSM_STORE"


def resolve_location(given: str | None) -> str:
    """Return the path or URL of the store: the given one, else that of the environment, else the default path."""
    return given or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE


def is_url(location: str) -> bool:
    """Whether the store is on a server, not in a file."""
    return "://" in location


def create_store(location: str) -> Store:
    """Return the store at a path or URL. The store is created at its first use, the folder of a file at once.

    Raises:
        MisuseError: if the folder cannot be created, or the URL is not supported.
    """
    if not is_url(location):
        make_folder(Path(location).absolute().parent)
    return open_store(location)


def open_existing_store(given: str | None) -> Store:
    """Return the store at `resolve_location(given)`, whose file must exist. A server is contacted at first use.

    Raises:
        MisuseError: if there is no store at the path, or the URL is not supported.
    """
    place = resolve_location(given)
    if not is_url(place) and not Path(place).exists():
        raise MisuseError(
            f"there is no store at {place}: start a run first, or name another store with --store PATH|URL or "
            f"{STORE_VARIABLE}",
        )
    return open_store(place)


def make_folder(folder: Path) -> None:
    """Create a folder that only its owner can read, and exclude HOME_FOLDER from git. Keep the mode of an old folder.

    Raises:
        MisuseError: if the folder cannot be created.
    """
    try:
        create_private_folder(folder)
    except OSError as error:
        raise MisuseError(
            f"cannot create the folder {folder} ({error.strerror}): name a store elsewhere with --store PATH",
        ) from None
