"""Files that several processes change: read, changed and written under one lock, and never half written.

A file that is replaced as a whole has its lock in a file beside it, `NAME.lock`, which stays. A log, to which lines are
appended, is locked itself. The locks are those of the operating system, so that they end with their process.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

# Mode of files that only their owner may read.
PRIVATE: Final = 0o600
# Place of the lock in a file on Windows, where a locked byte cannot be read: beyond the content.
_LOCKED_BYTE: Final = 2**31 - 2
# Seconds between two attempts to get a lock on Windows, which has no wait without an end.
_LOCK_POLL_S: Final = 0.01


def change_file(path: Path, change: Callable[[str | None], str | None], *, mode: int = PRIVATE) -> None:
    """Replace the content of a file by that which a function makes of it, while no other process does the same.

    The new content is on the disk when the call returns. After an error, also one of the function, the file is as it
    was. Readers need no lock: they find the content before or after the change. The call waits for the lock, so that an
    event loop should leave it to a thread.

    Args:
        path: The file. A missing folder is created, for its owner only. A symbolic link is followed.
        change: Takes the content, None if there is no file, and returns the new content, or None for no change.
        mode: Permissions of a new file. Those of an existing one are kept.

    Raises:
        OSError: when the file cannot be read or written.
    """
    place = path.resolve()
    with open_lock(place) as held:
        _wait_for_lock(held)
        try:
            before, mode = place.read_text("utf-8"), stat.S_IMODE(place.stat().st_mode)
        except FileNotFoundError:
            before = None
        after = change(before)
        if after is None:
            return
        fresh = place.with_name(f".{place.name}-new")
        fresh.unlink(missing_ok=True)  # of a process that was killed: it may hold what was to be removed
        try:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
                file.write(after)
                file.flush()
                os.fsync(file.fileno())
            if before is not None:
                fresh.chmod(mode)  # without the mask of the process
            fresh.replace(place)
        finally:
            fresh.unlink(missing_ok=True)
        if sys.platform != "win32":
            folder = os.open(place.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # the new name as well: a removed key must not come back after a power cut
            finally:
                os.close(folder)


@contextmanager
def open_log(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Open a log under its lock, to read all of it and append to it by `append_line`.

    Args:
        path: The file, which is created if there is none.
        mode: Permissions of a new file.

    Raises:
        OSError: when it cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    with open(path, "r+b", opener=lambda name, _flags: os.open(name, flags, mode)) as log:
        _wait_for_lock(log.fileno())
        yield log


def append_line(log: IO[bytes], text: str) -> None:
    """Append a line to an open log in one write, and wait for the disk. A line that a crash cut short is left behind.

    Raises:
        OSError: when it was not written, or not whole, so that it does not count.
    """
    is_torn = log.seek(0, os.SEEK_END) > 0 and log.seek(-1, os.SEEK_END) >= 0 and log.read(1) != b"\n"
    line = (b"\n" if is_torn else b"") + text.encode() + b"\n"
    if (written := os.write(log.fileno(), line)) < len(line):
        reason = f"only {written} of {len(line)} bytes were written, so the line does not count"
        raise OSError(errno.ENOSPC, reason, str(log.name))
    os.fsync(log.fileno())


@contextmanager
def open_lock(path: Path) -> Iterator[int]:
    """Open the lock file of a file, for `try_lock`. Leaving the block releases the lock."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, PRIVATE)
    try:
        yield number
    finally:
        os.close(number)


def try_lock(number: int) -> bool:
    """Take the lock of an open file, and return whether no other process has it."""
    try:
        if sys.platform == "win32":
            os.lseek(number, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(number, msvcrt.LK_NBLCK, 1)
            os.lseek(number, 0, os.SEEK_SET)
        else:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _wait_for_lock(number: int) -> None:
    if sys.platform == "win32":
        while not try_lock(number):
            time.sleep(_LOCK_POLL_S)
    else:
        fcntl.flock(number, fcntl.LOCK_EX)
