"""The restrictions that the process of a function puts on itself before it runs the function."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
from collections.abc import Mapping
from typing import Any, Final

from agentfsm.sandbox.process import syscalls, system_call_filter

if sys.platform != "win32":
    import resource

# The kernel does not count the processes of root, so a process of root becomes another user: one of its own among those
# that no account has, or "nobody" if it writes to folders, whose files need an owner that is known.
_NOBODY: Final = 65534
_FIRST_UNUSED_USER: Final = 0x70000000
_UNUSED_USERS_BITS: Final = 24
# Open files of a process.
_MAX_FILES: Final = 256
# Threads of a function that cannot start processes; the kernel counts both together.
_MAX_THREADS: Final = 64
# Processes that set up a sandbox and are counted as well.
_OWN_PROCESSES: Final = 2
# Processes allowed beyond that where other sandboxes run as the same user.
_MAX_OTHERS: Final = 1024
# First kernel that counts the processes of each user namespace separately.
_COUNTS_BY_NAMESPACE: Final = (5, 14)

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE: Final = 1 << 14
_FILE_ACCESS: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
# Kinds of access to files that the first version of Landlock knows, and those that later ones added.
_ACCESS: Final = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE, 5: 1 << 15}
_NETWORK_VERSION: Final = 4
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_VERSION: Final = 6
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2


def limit_resources(spec: Mapping[str, Any], *, is_shared_user: bool) -> None:
    """Set the limits of memory, processor time, files and processes."""
    memory, seconds = int(spec["memory_mb"]) << 20, int(spec["cpu_s"])
    limits = {
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_CPU: (seconds, seconds + 1),  # the signal of the first can be ignored
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (_MAX_FILES, _MAX_FILES),
    }
    if is_shared_user or (spec["level"] != "unsandboxed" and _kernel_version() >= _COUNTS_BY_NAMESPACE):
        processes = int(spec["processes"])
        most = (processes if processes > 1 else _MAX_THREADS) + _OWN_PROCESSES + (_MAX_OTHERS if is_shared_user else 0)
        limits[resource.RLIMIT_NPROC] = (most, most)
    for kind, (soft, hard) in limits.items():
        _, most = resource.getrlimit(kind)
        allowed = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(soft, allowed), allowed))


def _kernel_version() -> tuple[int, ...]:
    return tuple([int(part) for part in os.uname().release.split("-")[0].split(".")[:2]])


def leave_root(*, is_shared_user: bool) -> None:
    """Change from root to a user without rights: one that other sandboxes may have, too, if `is_shared_user`."""
    unused = _FIRST_UNUSED_USER + int.from_bytes(os.urandom(4)) % (1 << _UNUSED_USERS_BITS)
    user = _NOBODY if is_shared_user else unused
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    syscalls.die_with_parent(signal.SIGKILL)  # a change of the user clears it


def give_up_rights(spec: Mapping[str, Any]) -> None:
    """Give up capabilities, files and system calls, for this process and all that it starts."""
    syscalls.forbid_new_privileges()
    syscalls.drop_capabilities()
    if (version := syscalls.query_landlock_version()) > 0:
        _restrict_files(version, spec)
    syscalls.install_seccomp_filter(
        system_call_filter.build_filter(processes=int(spec["processes"]), network=bool(spec["proxy_port"]))
    )


def _restrict_files(version: int, spec: Mapping[str, Any]) -> None:
    """Allow reading all that is mounted, and writing where the sandbox allows it, by Landlock."""
    known = 0
    for since, access in _ACCESS.items():
        known |= access if version >= since else 0
    attributes = struct.pack("Q", known)
    if version >= _NETWORK_VERSION:
        attributes += struct.pack("Q", _BIND_TCP | _CONNECT_TCP)
    if version >= _SCOPE_VERSION:
        attributes += struct.pack("Q", _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS)
    rules = syscalls.create_landlock_ruleset(attributes)
    _allow(rules, "/", known & (_EXECUTE | _READ_FILE | _READ_DIR))
    _allow(rules, "/dev", known & (_READ_FILE | _WRITE_FILE | _READ_DIR))
    for path in (*spec["write"], "/tmp", "/dev/shm"):  # noqa: S108  its own
        _allow(rules, path, known if os.path.isdir(path) else known & _FILE_ACCESS)  # noqa: PTH112  slow to import
    if version >= _NETWORK_VERSION and spec["proxy_port"]:
        syscalls.allow_port(rules, int(spec["proxy_port"]), _CONNECT_TCP)
    syscalls.enter_landlock(rules)
    os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        syscalls.allow_path(rules, place, access)
        os.close(place)
