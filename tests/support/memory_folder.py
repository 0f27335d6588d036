"""Where tests write files: in memory, where there is plenty of it.

A killed process loses nothing that the kernel has, so to wait for a real disk would only take time. What a power cut
leaves is tested on a disk that is simulated.
"""

import os
from pathlib import Path

# GiB that are to be free, for all parts of a suite together.
ENOUGH_GB = 8


def find_memory() -> Path | None:
    """Return the folder of a file system in memory that has room, and where programs may lie; None without one."""
    folder = Path("/dev/shm")  # noqa: S108  only mkdtemp makes something there
    if not os.access(folder, os.W_OK):
        return None
    system = os.statvfs(folder)
    has_room = system.f_bavail * system.f_frsize >= ENOUGH_GB << 30
    return folder if has_room and not system.f_flag & os.ST_NOEXEC else None


MEMORY = find_memory()
