"""Where runs are kept."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from agentfsm import stores
from agentfsm.core.errors import MisuseError
from agentfsm.ports.store import Store
from agentfsm.stores.sqlite.store import SQLiteStore

HOME_FOLDER: Final = ".agentfsm"
DEFAULT_STORE: Final = f"{HOME_FOLDER}/runs.db"
STORE_VARIABLE: Final = "AGENTFSM_STORE"

# By the URL's scheme: the store, and what of its own it may be told in the URL's query.
_STORE_CLASSES: Final = {
    "postgres": ("PostgresStore", ("schema",)),
    "postgresql": ("PostgresStore", ("schema",)),
    "redis": ("RedisStore", ("accept_loss", "prefix")),
    "rediss": ("RedisStore", ("accept_loss", "prefix")),
    "unix": ("RedisStore", ("accept_loss", "prefix")),
}
# Up to the last @: a password that should have been escaped may hold anything.
_URL_PASSWORD: Final = re.compile(r"(://[^:]*):.*@")
_QUERY_PASSWORD: Final = re.compile(r"([?&][^=&]*pass[^=&]*)=[^&\s]*", re.IGNORECASE)


def resolve_location(given: str | None) -> str:
    """Return the path or URL of the store: as given, else from the environment, else the usual path."""
    return given or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE


def is_url(location: str) -> bool:
    """Whether the store is a server's and no file."""
    return "://" in location


def mask_password(text: str) -> str:
    """Return a URL, or a text with one in it, without its password."""
    return _QUERY_PASSWORD.sub(r"\1=***", _URL_PASSWORD.sub(r"\1:***@", text))


def create_store(location: str) -> Store:
    """Return the store at a path or URL, which is made at its first use; a file's folder is made now.

    Raises:
        MisuseError: when the folder cannot be made, or nothing is known of such a URL.
    """
    if is_url(location):
        return _open_server_store(location)
    make_folder(Path(location).absolute().parent)
    return SQLiteStore(location)


def open_existing_store(given: str | None) -> Store:
    """Return a store that exists, found as in `resolve_location`; of a server it is found out later whether it does.

    Raises:
        MisuseError: when there is none at the path, or nothing is known of such a URL.
    """
    place = resolve_location(given)
    if is_url(place):
        return _open_server_store(place)
    if not Path(place).exists():
        raise MisuseError(
            f"there is no store at {place}: start a run first, or name its store with --store PATH|URL or "
            f"{STORE_VARIABLE}",
        )
    return SQLiteStore(place)


def _open_server_store(url: str) -> Store:
    scheme = url.partition("://")[0].lower()
    if scheme not in _STORE_CLASSES:
        known = ", ".join(f"{each}://" for each in _STORE_CLASSES)
        raise MisuseError(
            f"{mask_password(url)} names no store: give the path of a file, or a URL that begins with {known}"
        )
    name, own = _STORE_CLASSES[scheme]
    url, options = _split_options(url, own)
    try:
        store: Store = getattr(stores, name)(url, **options)
    except ImportError as error:  # it says what to install
        raise MisuseError(str(error)) from None
    return store


def _split_options(url: str, names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Return a URL without the options that are the store's own, and these."""
    head, _, query = url.partition("?")
    pairs = [pair for pair in query.split("&") if pair]
    own = {name: unquote(value) for name, _, value in (pair.partition("=") for pair in pairs) if name in names}
    rest = [pair for pair in pairs if pair.partition("=")[0] not in names]
    return "?".join(filter(None, [head, "&".join(rest)])), own


def make_folder(folder: Path) -> None:
    """Make a folder for its owner alone; one of ours is kept out of git. One that exists keeps its mode.

    Raises:
        MisuseError: when it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ignore = folder / ".gitignore"
        if folder.name == HOME_FOLDER and not ignore.exists():
            ignore.write_text("*\n", encoding="ascii")
    except OSError as error:
        raise MisuseError(
            f"the folder {folder} cannot be made ({error.strerror}): name a store elsewhere with --store PATH",
        ) from None
