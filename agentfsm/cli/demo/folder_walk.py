"""Read the files of one folder with limits: on paths, file types, number of files and time."""

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

# Folders with generated files.
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
# Entries that a walk visits at most, in about 0.2 s.
MAX_FILES: Final = 20_000
# Files with a longer path are counted, but not named.
MAX_PATH_CHARS: Final = 200
# Beginnings of the names of files that explain a folder, the most informative first.
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
# Suffixes of text files.
_TEXT_SUFFIX: Final = re.compile(
    r"\.(c|cc|cfg|clj|cpp|cs|css|csv|ex|go|h|hpp|hs|html|ini|java|jl|js|json|jsx|kt|lua|md|ml|php|pl|proto|py|r|rb|rs|rst|"
    r"scala|sh|sql|swift|tex|toml|ts|tsx|txt|vue|xml|yaml|yml)",
)


@attrs.frozen
class FolderFile(Value):
    """A regular file."""

    path: str
    """Path relative to the folder, with slashes."""

    bytes: int

    @property
    def can_be_named(self) -> bool:
        """Whether its path is printable and at most MAX_PATH_CHARS long."""
        return self.path.isprintable() and len(self.path) <= MAX_PATH_CHARS

    @property
    def kind(self) -> str:
        """Suffix of its name, in lower case."""
        return os.path.splitext(self.path)[1].lower()[:16]  # noqa: PTH122  the path is a str

    @property
    def is_text(self) -> bool:
        """Whether its name is that of a text file, and it is not empty."""
        return self.bytes > 0 and (self.document_rank is not None or _TEXT_SUFFIX.fullmatch(self.kind) is not None)

    @property
    def document_rank(self) -> int | None:
        """Index of its name in _DOCUMENT_NAMES; None for any other file."""
        name = self.path.rpartition("/")[2].lower()
        return next((place for place, known in enumerate(_DOCUMENT_NAMES) if name.startswith(known)), None)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key for reading: documents at the top of the folder first, then the largest files."""
        document = None if "/" in self.path else self.document_rank
        return (len(_DOCUMENT_NAMES) if document is None else document), -self.bytes, len(self.path)


# Access limited to the folder.


def resolve_inside(root: Path, path: str) -> Path:
    """Return the absolute path, with symbolic links followed.

    Raises:
        ModelRetry: if it is outside the folder, or invalid.
    """
    try:
        place = (root / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a NUL
        raise ModelRetry(
            f"{path!r} is not a valid path ({type(error).__name__}): give a path inside the folder"
        ) from None
    if not place.is_relative_to(root):
        raise ModelRetry(f"{path!r} is outside the folder: give a path inside it, such as 'README.md'")
    return place


def _open_file(root: Path, place: Path) -> int:
    """Open a file folder by folder, so that a folder replaced by a link in the meantime is not followed."""
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
    """Return the beginning of a regular file, and its size in bytes.

    Raises:
        OSError: if it cannot be read, or is not a regular file.
    """
    if place == root:
        raise IsADirectoryError("it is a folder")
    with os.fdopen(_open_file(root, place), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        return file.read(limit), status.st_size


def is_binary(data: bytes) -> bool:
    """Whether the data is binary: text files contain no NUL byte."""
    return b"\0" in data[:8192]


# Walking through the folder.


@attrs.define(eq=False, repr=False)
class FolderWalk:
    """Iterator over the regular files below a folder, level by level. Links are not followed."""

    root: Path
    place: Path
    deadline: float
    """Seconds since 1970."""

    folders: int = 0
    is_complete: bool = True
    """Whether all files were visited."""

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
        except OSError:  # unreadable, or removed in the meantime
            self.is_complete = False
            return []

    def _to_file(self, entry: os.DirEntry[str]) -> FolderFile | None:
        with suppress(OSError):
            if entry.is_file(follow_symlinks=False):
                path = Path(entry.path).relative_to(self.root).as_posix()
                return FolderFile(path, entry.stat(follow_symlinks=False).st_size)
        return None
