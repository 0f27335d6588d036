"""Files below one folder, and no others, whatever paths, links and races lead to.

A path is opened part by part, each relative to the folder before it, without following symbolic links. So nothing that
another process does to the names in between can lead out of the folder.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import attrs

from agentfsm.core.errors import ModelRetry
from agentfsm.core.value import Value

# Characters of a path, and folders in it.
_MAX_PATH_CHARS: Final = 1_000
_MAX_DEPTH: Final = 50
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A FIFO would block the reader without O_NONBLOCK.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REASONS: Final = {
    errno.ENOENT: "does not exist",
    errno.ENOTDIR: "leads through something that is not a folder, or a symbolic link",
    errno.ELOOP: "is a symbolic link, which is not followed",
    errno.EISDIR: "is a folder",
    errno.EACCES: "may not be opened",
    errno.EEXIST: "exists already, and is not a folder",
}


@attrs.frozen
class PathJail(Value):
    """A folder with all that is below it. Each error is a `ModelRetry` that names the path as it was given."""

    root: Path
    """The folder."""

    def read(self, path: str, max_bytes: int) -> bytes:
        """Return the content of a file of at most so many bytes."""
        with self._open_parent(path, create=False) as (parent, name):
            fd = os.open(name, _READ, dir_fd=parent)
            with os.fdopen(fd, "rb") as file:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise ModelRetry(f"{path!r} is not a file")
                if found.st_size > max_bytes:
                    raise ModelRetry(f"{path!r} has {found.st_size:,} bytes, and {max_bytes:,} can be read")
                return file.read(max_bytes)

    def write(self, path: str, content: bytes) -> None:
        """Create a file, or replace it as a whole. Folders on the way are created."""
        with self._open_parent(path, create=True) as (parent, name):
            mode = self._find_mode(parent, name, path)
            temporary = f".{secrets.token_hex(8)}.tmp"
            fd = os.open(temporary, _CREATE, 0o666, dir_fd=parent)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(content)
                    if mode is not None:
                        os.fchmod(fd, mode)
                os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                os.unlink(temporary, dir_fd=parent)
                raise

    def list_entries(self, path: str, most: int) -> list[tuple[str, os.stat_result]]:
        """Return names in a folder with their status, sorted; at most so many."""
        with self._open_folder(self._split(path), path, create=False) as folder:
            names = sorted(os.listdir(folder))[:most]  # noqa: PTH208  by file descriptor
            found = []
            for name in names:
                try:
                    found.append((name, os.stat(name, dir_fd=folder, follow_symlinks=False)))
                except FileNotFoundError:  # it was removed just now
                    continue
            return found

    @staticmethod
    def _find_mode(parent: int, name: str, path: str) -> int | None:
        """Return the mode of a file that is replaced; None if there is none."""
        try:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise ModelRetry(f"{path!r} is not a file")
        return stat.S_IMODE(found.st_mode)

    @contextmanager
    def _open_parent(self, path: str, *, create: bool) -> Iterator[tuple[int, str]]:
        """Open the folder of a path; give its file descriptor and the last name."""
        *folders, name = self._split(path) or [""]
        if not name:
            raise ModelRetry(f"{path!r} is a folder: give the path of a file")
        with self._open_folder(folders, path, create=create) as parent:
            yield parent, name

    @contextmanager
    def _open_folder(self, parts: list[str], path: str, *, create: bool) -> Iterator[int]:
        """Open a folder part by part, and translate errors of the system."""
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                if create:
                    with suppress(FileExistsError):  # opened next, without following a link
                        os.mkdir(part, dir_fd=folder)
                inner = os.open(part, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, os.strerror(error.errno or 0))
            raise ModelRetry(f"{path!r} {reason}") from error
        finally:
            os.close(folder)

    @staticmethod
    def _split(path: str) -> list[str]:
        """Return the names in a path relative to the folder; none for the folder itself."""
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if path.startswith("/") or ".." in parts:
            raise ModelRetry(f"{path!r} leads out of the folder: give a path inside it, such as 'notes/today.md'")
        if "\0" in path or len(path) > _MAX_PATH_CHARS or len(parts) > _MAX_DEPTH:
            raise ModelRetry(f"{path[:100]!r} is not a path: it is too long, or has a null character")
        return parts
