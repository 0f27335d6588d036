"""Who holds a lease, in words that others on the same machine can check.

A worker that was killed cannot give its lease back. Its successor need not wait for the lease to end if it can see that
the owner is dead: same boot, same process namespace, and no process of that number and start time. What cannot be seen
counts as alive.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Hashable, Iterable
from functools import cache
from pathlib import Path

import attrs

from agentfsm.core.value import Value

# States of a process that will never run again: a zombie that nobody has reaped, and one on its way out.
_ENDED = "ZX"


@attrs.frozen
class Owner(Value):
    """A store object of a process of a boot of a machine. Text fields hold no spaces; "-" says not known."""

    boot: str
    # The machine's boot id: times of the boot clock compare within one boot only.
    pids: str
    # The inode of the process namespace: process numbers compare within one only (containers have their own).
    pid: int
    started: str
    # When the process started, clock ticks since boot: numbers are used again, the pair is not.
    name: str
    # Random, so that two stores in one process are two owners.

    @classmethod
    def here(cls) -> Owner:
        """Return a new owner in this process."""
        pid = os.getpid()
        _, started = _process(pid)
        return cls(_boot_id(), _namespace(), pid, started, secrets.token_hex(6))

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Read what `str` wrote; text of any other form is an owner of whom nothing is known."""
        try:
            boot, pids, pid, started, name = text.split(" ")
            return cls(boot, pids, int(pid), started, name)
        except ValueError:
            return cls("-", "-", 0, "-", text)

    def __str__(self) -> str:
        return f"{self.boot} {self.pids} {self.pid} {self.started} {self.name}"

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the machine has not been restarted since; true also where it cannot be known."""
        return self.boot == _boot_id() or "-" in (self.boot, _boot_id())

    @property
    def is_dead(self) -> bool:
        """Whether its process has certainly ended."""
        known = "-" not in (self.boot, self.pids, self.started)
        if not known or self.boot != _boot_id() or self.pids != _namespace():
            return False
        state, started = _process(self.pid)
        if started == "-":
            return not _exists(self.pid)
        return started != self.started or state in _ENDED


def by_process(names: Iterable[str]) -> list[list[str]]:
    """Return the names of owners in groups: those of one process died together."""
    groups: dict[Hashable, list[str]] = {}
    for name in names:
        owner = Owner.parse(name)
        is_known = owner.pid > 0 and owner.started != "-"
        groups.setdefault((owner.boot, owner.pids, owner.pid, owner.started) if is_known else name, []).append(name)
    return list(groups.values())


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or "-"
    except OSError:
        return "-"


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "-"


def _process(pid: int) -> tuple[str, str]:
    """Return state and start time of a process, from /proc (proc(5), fields 3 and 22); "-" for what cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # the name before it may hold anything, spaces and brackets too
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "-", "-"


def _exists(pid: int) -> bool:
    """Whether there is such a process; /proc may hide those of other users, a signal to one is refused instead."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
