"""Identity of a lease's owner, in a form that other processes of the same machine can check.

A worker that was killed cannot release its lease. Its successor need not wait for the lease to end if it can see that
the owner is dead: same boot, same process namespace, and no process with that number and start time. In all other cases
the owner counts as alive.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Hashable, Iterable
from functools import cache
from pathlib import Path

import attrs

from agentfsm.core.value import Value

# States of a process that will never run again: a zombie, and a process that is being removed.
_DEAD_STATES = "ZX"


@attrs.frozen
class OwnerIdentity(Value):
    """Identifies a store object by boot, process and nonce. Text fields contain no spaces; "-" means unknown."""

    boot_id: str
    """The machine's boot id: times of the boot clock are comparable within one boot only."""

    pid_namespace: str
    """Inode of the process namespace: process ids are unique within a namespace only (each container has its own)."""

    pid: int
    """Process id; 0 if unknown."""

    start_time: str
    """Start of the process, clock ticks since boot. A process id may be reused, but not with the same start time."""

    nonce: str
    """Random text that distinguishes the stores of one process."""

    @classmethod
    def generate(cls) -> OwnerIdentity:
        """Return a new identity in this process."""
        pid = os.getpid()
        _, started = _read_process_stat(pid)
        return cls(_read_boot_id(), _read_pid_namespace(), pid, started, secrets.token_hex(6))

    @classmethod
    def parse(cls, text: str) -> OwnerIdentity:
        """Parse the output of `str`; any other text yields an unknown owner."""
        try:
            boot, pids, pid, started, name = text.split(" ")
            return cls(boot, pids, int(pid), started, name)
        except ValueError:
            return cls("-", "-", 0, "-", text)

    def __str__(self) -> str:
        return f"{self.boot_id} {self.pid_namespace} {self.pid} {self.start_time} {self.nonce}"

    @property
    def is_current_boot(self) -> bool:
        """True if the machine has not been restarted since, or if this cannot be determined."""
        return self.boot_id == _read_boot_id() or "-" in (self.boot_id, _read_boot_id())

    @property
    def is_dead(self) -> bool:
        """True if its process has certainly ended."""
        known = "-" not in (self.boot_id, self.pid_namespace, self.start_time)
        if not known or self.boot_id != _read_boot_id() or self.pid_namespace != _read_pid_namespace():
            return False
        state, started = _read_process_stat(self.pid)
        if started == "-":
            return not _process_exists(self.pid)
        return started != self.start_time or state in _DEAD_STATES


def group_by_process(names: Iterable[str]) -> list[list[str]]:
    """Group the names of owners by process; the owners of one process died together."""
    groups: dict[Hashable, list[str]] = {}
    for name in names:
        owner = OwnerIdentity.parse(name)
        is_known = owner.pid > 0 and owner.start_time != "-"
        groups.setdefault(
            (owner.boot_id, owner.pid_namespace, owner.pid, owner.start_time) if is_known else name, []
        ).append(name)
    return list(groups.values())


@cache
def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or "-"
    except OSError:
        return "-"


def _read_pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "-"


def _read_process_stat(pid: int) -> tuple[str, str]:
    """Return state and start time of a process from /proc (proc(5), fields 3 and 22); "-" for unknown values."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # the preceding name may contain spaces and brackets
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "-", "-"


def _process_exists(pid: int) -> bool:
    """Return whether the process exists. /proc may hide processes of other users; a signal to these is refused."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
