"""Where runs are kept, and how to get back to one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import attrs

from agentfsm import stores
from agentfsm.core.errors import MisuseError
from agentfsm.core.machine import State
from agentfsm.core.run import Run
from agentfsm.core.value import Value
from agentfsm.ports import Store
from agentfsm.stores.sqlite.store import SQLiteStore

HOME: Final = ".agentfsm"
DEFAULT: Final = f"{HOME}/runs.db"
VARIABLE: Final = "AGENTFSM_STORE"

# By the URL's scheme: the store, and what of its own it may be told in the URL's query.
_SERVERS: Final = {
    "postgres": ("PostgresStore", ("schema",)),
    "postgresql": ("PostgresStore", ("schema",)),
    "redis": ("RedisStore", ("accept_loss", "prefix")),
    "rediss": ("RedisStore", ("accept_loss", "prefix")),
    "unix": ("RedisStore", ("accept_loss", "prefix")),
}
# Up to the last @: a password that should have been escaped may hold anything.
_USER: Final = re.compile(r"(://[^:]*):.*@")
_QUERY: Final = re.compile(r"([?&][^=&]*pass[^=&]*)=[^&\s]*", re.IGNORECASE)


def store_place(given: str | None) -> str:
    """Return the path or URL of the store: as given, else from the environment, else the usual path."""
    return given or os.environ.get(VARIABLE) or DEFAULT


def is_url(place: str) -> bool:
    """Whether the store is a server's and no file."""
    return "://" in place


def masked(text: str) -> str:
    """Return a URL, or a text with one in it, without its password."""
    return _QUERY.sub(r"\1=***", _USER.sub(r"\1:***@", text))


def make_store(place: str) -> Store:
    """Return the store at a path or URL, which is made at its first use; a file's folder is made now.

    Raises:
        MisuseError: when the folder cannot be made, or nothing is known of such a URL.
    """
    if is_url(place):
        return _server(place)
    make_folder(Path(place).absolute().parent)
    return SQLiteStore(place)


def known_store(given: str | None) -> Store:
    """Return a store that exists, found as in `store_place`; of a server it is found out later whether it does.

    Raises:
        MisuseError: when there is none at the path, or nothing is known of such a URL.
    """
    place = store_place(given)
    if is_url(place):
        return _server(place)
    if not Path(place).exists():
        raise MisuseError(
            f"there is no store at {place}: start a run first, or name its store with --store PATH|URL or {VARIABLE}",
        )
    return SQLiteStore(place)


def _server(url: str) -> Store:
    scheme = url.partition("://")[0].lower()
    if scheme not in _SERVERS:
        known = ", ".join(f"{each}://" for each in _SERVERS)
        raise MisuseError(f"{masked(url)} names no store: give the path of a file, or a URL that begins with {known}")
    name, own = _SERVERS[scheme]
    url, options = _told(url, own)
    try:
        store: Store = getattr(stores, name)(url, **options)
    except ImportError as error:  # it says what to install
        raise MisuseError(str(error)) from None
    return store


def _told(url: str, names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
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
        if folder.name == HOME and not ignore.exists():
            ignore.write_text("*\n", encoding="ascii")
    except OSError as error:
        raise MisuseError(
            f"the folder {folder} cannot be made ({error.strerror}): name a store elsewhere with --store PATH",
        ) from None


@attrs.frozen(kw_only=True)
class Way(Value):
    """How to get back to a run: command lines, to be shown."""

    place: str | None
    # Path or URL of the store; None where only the agent knows how to open it.
    agent: str = ""
    # The words that name the agent, as a shell takes them, where the store or the run does not say which it is of.

    def line(self, words: str) -> str:
        """Return a command line that finds the store. A password is never in it.

        Args:
            words: The subcommand with its arguments, for example "resume 17".
        """
        return f"{program()} {words}{_option(self.place)}"

    def driving(self, words: str) -> str:
        """Return a command line that finds the store and the agent."""
        return self.line(words) + (f" --agent {self.agent}" if self.agent else "")

    def resume(self, run_id: str) -> str:
        """Return the command line that goes on with a run."""
        return self.driving(f"resume {shlex.quote(run_id)}")

    def fork(self, run: Run) -> str | None:
        """Return the command line that tries a run again which stopped; None where that is not to be done."""
        is_own = run.state is State.ERROR and run.header.parent is None
        return self.driving(f"fork {shlex.quote(run.id)}") if is_own else None


def _option(place: str | None) -> str:
    if place is None or (is_url(place) and place == os.environ.get(VARIABLE)):
        return ""  # a URL that the environment knows is found there again, with its password
    if not os.environ.get(VARIABLE) and not is_url(place) and Path(place).absolute() == Path(DEFAULT).absolute():
        return ""
    return f" --store {shlex.quote(masked(place))}"


@cache
def program() -> str:
    """Return how this program can be called again: by its name only where the shell finds it."""
    script = Path(sys.argv[0])
    if shutil.which("agentfsm") is None:
        if script.name == "agentfsm":
            return _near(script)
        if script.parts[-2:] == ("agentfsm", "__main__.py"):
            return f"{_near(Path(sys.executable))} -m agentfsm"
    return "agentfsm"


def _near(path: Path) -> str:
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
