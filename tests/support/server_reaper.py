"""Ends servers: at once, with all their children, and also when the test process that started them was killed.

Run as `python server_reaper.py HOME`, it waits for a byte or the end of its standard input. The test process holds the
other end and need not do anything: the kernel closes it, whatever that process dies of. Each server has a folder in
HOME.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# A guard against hanging: what is waited for takes milliseconds, on a machine that is not overwhelmed.
HANG_S = 60.0
# Short beside what is waited for, and long enough to leave the processor to it.
POLL_S = 0.002

# States of a process that holds nothing any more; a zombie may stay for ever where nobody fetches orphans.
GONE = "ZX"


def await_that(condition: Callable[[], bool], what: str) -> None:
    """Wait for what other processes do.

    Raises:
        TimeoutError: after `HANG_S`, saying what was waited for.
    """
    give_up = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError(f"waited {HANG_S:.0f} s in vain until {what}")
        time.sleep(POLL_S)


def note_of(folder: Path) -> Path:
    """Return the file that holds the process id of the server in this folder, while there is one."""
    return folder / "pid"


def cut(folder: Path) -> None:
    """Kill the server of a folder and all its children, as a power cut would; no matter whether it runs.

    When this returns none of them is left, and nothing of them but files.
    """
    note = note_of(folder)
    if not note.exists():
        return
    if pid := note.read_text():
        _kill(int(pid))
    _forget_memory(folder / "data" / "postmaster.pid")
    note.unlink()


def _kill(pid: int) -> None:
    """Kill a process and its children, which need not be in one group: PostgreSQL's each lead a session."""
    _signal(pid, signal.SIGSTOP)  # so that it starts no more of them while they are counted
    await_that(lambda: _stat(pid)[0] in "T" + GONE, f"process {pid} has stopped")
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    family = [pid, *(process for process in processes if _stat(process)[1] == pid)]
    for member in family:
        _signal(member, signal.SIGKILL)
    await_that(lambda: all(_stat(member)[0] in GONE for member in family), f"processes {family} have ended")


def _forget_memory(lock: Path) -> None:
    """Remove the shared memory that a killed PostgreSQL leaves, of which a machine has room for 4,096 pieces."""
    if not lock.exists():
        return
    lines = lock.read_text().splitlines()
    if len(lines) > 6:  # the seventh has the key and the id; it is written last but one
        owner = lock.stat().st_uid
        subprocess.run(["ipcrm", "-m", lines[6].split()[1]], user=owner, stderr=subprocess.DEVNULL, check=False)
    lock.unlink()


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _stat(pid: int) -> tuple[str, int]:
    """Return the state of a process and its parent."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def main(home: Path) -> None:
    """Wait until the test process is gone or says that it goes, and leave nothing of its servers."""
    sys.stdin.read(1)
    for folder in home.iterdir():
        cut(folder)
    shutil.rmtree(home)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
