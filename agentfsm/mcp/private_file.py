"""Files that only their owner may read, and that several processes may share."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no lock between processes, but files are still replaced atomically
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold it in the block. It is a file of its own beside it, which stays."""
    with open_lock(path) as held:
        if fcntl is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def open_lock(path: Path) -> Iterator[int]:
    """Open the lock file of a file, for `try_lock`. Leaving the block releases the lock."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield number
    finally:
        os.close(number)


def try_lock(number: int) -> bool:
    """Take the lock of an open lock file, and return whether no other process has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def replace_file(path: Path, text: str) -> None:
    """Replace the content of a file atomically; it is readable by its owner only."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
