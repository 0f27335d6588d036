"""One folder, looked at with bounds: nothing in it leads out of it, blocks, or takes for ever."""

from __future__ import annotations

import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

import attrs

from agentfsm.core.errors import ModelRetry
from agentfsm.core.value import Value

# Folders that hold what machines made.
SKIPPED_FOLDERS: Final = frozenset(
    {
        ".agentfsm",
        ".git",
        ".hg",
        ".hypothesis",
        ".mypy_cache",
        ".nox",
        ".pytest_cache",
        ".ruff_cache",
        ".svn",
        ".tox",
        ".venv",
        "__pycache__",
        "node_modules",
        "venv",
    },
)
# Looked at by a listing: 0.2 s on a usual disk.
MAX_FILES: Final = 20_000
# A longer path is counted, but not named.
MAX_PATH_CHARS: Final = 200
# What the files that explain a folder are called, the most telling first.
_DOCUMENT_NAMES: Final = (
    "readme",
    "pyproject",
    "package.json",
    "cargo.toml",
    "go.mod",
    "contributing",
    "makefile",
    "license",
)
# Endings of what people write.
_TEXT_SUFFIX: Final = re.compile(
    r"\.(c|cc|cfg|clj|cpp|cs|css|csv|ex|go|h|hpp|hs|html|ini|java|jl|js|json|jsx|kt|lua|md|ml|php|pl|proto|py|r|rb|rs|rst|"
    r"scala|sh|sql|swift|tex|toml|ts|tsx|txt|vue|xml|yaml|yml)",
)


@attrs.frozen
class FolderFile(Value):
    """A regular file."""

    path: str
    """From the folder on, with slashes."""

    bytes: int

    @property
    def can_be_named(self) -> bool:
        """Whether its path is plain text of a bearable length."""
        return self.path.isprintable() and len(self.path) <= MAX_PATH_CHARS

    @property
    def kind(self) -> str:
        """The ending of its name, in lower case."""
        return os.path.splitext(self.path)[1].lower()[:16]  # noqa: PTH122  it is a text here, not a place

    @property
    def is_text(self) -> bool:
        """Whether it is worth reading, by its name; an empty one is not."""
        return self.bytes > 0 and (self.document_rank is not None or _TEXT_SUFFIX.fullmatch(self.kind) is not None)

    @property
    def document_rank(self) -> int | None:
        """Its place among the files that explain a folder, from 0; None for any other."""
        name = self.path.rpartition("/")[2].lower()
        return next((place for place, known in enumerate(_DOCUMENT_NAMES) if name.startswith(known)), None)

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order in which text is worth reading: what explains the whole folder first, then the largest."""
        document = None if "/" in self.path else self.document_rank
        return (len(_DOCUMENT_NAMES) if document is None else document), -self.bytes, len(self.path)


# Staying inside.


def resolve_inside(root: Path, path: str) -> Path:
    """Return the place that a path means, symbolic links followed.

    Raises:
        ModelRetry: when it lies outside the folder, or means nothing.
    """
    try:
        place = (root / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link that goes round in circles, a NUL
        raise ModelRetry(f"{path!r} is no path that can be followed ({type(error).__name__})") from None
    if not place.is_relative_to(root):
        raise ModelRetry(f"{path!r} lies outside the folder: give a path inside it, such as 'README.md'")
    return place


def _open_file(root: Path, place: Path) -> int:
    """Open a file, going down folder by folder, so that a link put in place of one meanwhile is not followed."""
    if os.open not in os.supports_dir_fd:
        return os.open(place, os.O_RDONLY)
    *folders, name = place.relative_to(root).parts
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            above, fd = fd, os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(above)
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    finally:
        os.close(fd)


def read_beginning(root: Path, place: Path, limit: int) -> tuple[bytes, int]:
    """Return the beginning of a regular file, and its size.

    Raises:
        OSError: when it cannot be read, or is no regular file.
    """
    if place == root:
        raise IsADirectoryError("it is the folder itself")
    with os.fdopen(_open_file(root, place), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        return file.read(limit), status.st_size


def is_binary(data: bytes) -> bool:
    """Tell whether it is no text: text holds no NUL."""
    return b"\0" in data[:8192]


# Looking around.


@attrs.define(eq=False, repr=False)
class FolderWalk:
    """Goes through the regular files below a place, the upper folders first. Links are not followed."""

    root: Path
    place: Path
    deadline: float
    """Seconds since 1970."""

    folders: int = 0
    is_complete: bool = True
    """Whether everything was looked at."""

    def __iter__(self) -> Iterator[FolderFile]:
        queue = deque([self.place])
        left = MAX_FILES
        while queue:
            for entry in self._entries(queue.popleft(), left):
                left -= 1
                if left <= 0 or time.time() >= self.deadline:
                    self.is_complete = False
                    return
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in SKIPPED_FOLDERS:
                        self.folders += 1
                        queue.append(Path(entry.path))
                elif (found := self._to_file(entry)) is not None:
                    yield found

    def _entries(self, folder: Path, limit: int) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(islice(entries, limit), key=lambda entry: entry.name)
        except OSError:  # not ours to read, or gone meanwhile
            self.is_complete = False
            return []

    def _to_file(self, entry: os.DirEntry[str]) -> FolderFile | None:
        with suppress(OSError):
            if entry.is_file(follow_symlinks=False):
                path = Path(entry.path).relative_to(self.root).as_posix()
                return FolderFile(path, entry.stat(follow_symlinks=False).st_size)
        return None
