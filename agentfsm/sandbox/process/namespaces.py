"""Namespaces of the kernel: a file system with the allowed paths only, no other processes, and no network."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any, Final

from agentfsm.sandbox.process import syscalls

if sys.platform != "win32":
    import fcntl

_NAMESPACES: Final = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWCGROUP
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
)
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
# Files in /tmp: each takes memory of the kernel, besides its content.
_MAX_TEMPORARY_FILES: Final = 16_384
_ROOT_OPTIONS: Final = "mode=755,size=1m,nr_inodes=4096"
# Exit code of a process that a signal ended, beside the number of the signal: as in a shell.
SIGNAL_EXIT: Final = 128
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1


def enter_namespaces(spec: Mapping[str, Any]) -> None:
    """Move this process into namespaces of its own and continue in a child, the first process of the new ones.

    Raises:
        OSError: if the kernel does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    # Root needs no user namespace, and its process changes to another user afterwards.
    syscalls.unshare(_NAMESPACES | (0 if user == 0 else syscalls.CLONE_NEWUSER))
    if user != 0:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    _start_loopback()
    _build_file_system(spec)
    first = os.fork()
    if first:
        code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        os._exit(code if code >= 0 else SIGNAL_EXIT - code)
    syscalls.die_with_parent(signal.SIGKILL)
    os.setsid()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:  # noqa: PTH123  pathlib would take a third of the start
        file.write(text)


def _start_loopback() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _build_file_system(spec: Mapping[str, Any]) -> None:
    """Make a new root of the allowed paths. The old one stays below /old until all is taken from it."""
    syscalls.mount("", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", "/tmp", "tmpfs", syscalls.MS_NOSUID, _ROOT_OPTIONS)  # noqa: S108  a mount point
    os.mkdir("/tmp/new")  # noqa: PTH102, S108  as above
    os.mkdir("/tmp/old")  # noqa: PTH102, S108  as above
    syscalls.pivot_root("/tmp", "/tmp/old")  # noqa: S108  as above
    os.chdir("/")
    syscalls.mount("tmpfs", "/new", "tmpfs", syscalls.MS_NOSUID, _ROOT_OPTIONS)
    for folder in ("/tmp", "/dev/shm"):  # noqa: S108  its own
        os.makedirs(f"/new{folder}")  # noqa: PTH103  as above
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount(
            "tmpfs",
            f"/new{folder}",
            "tmpfs",
            flags,
            f"mode=1777,size={spec['temporary_bytes']},nr_inodes={_MAX_TEMPORARY_FILES}",
        )
    for device in _DEVICES:
        _bind(f"/old/dev/{device}", f"/new/dev/{device}", None)
    for kind, source, target in spec["mounts"]:
        place = f"/new{target}"
        os.makedirs(os.path.dirname(place), exist_ok=True)  # noqa: PTH103, PTH120  as above
        if kind == "link":
            os.symlink(source, place)  # noqa: PTH211  as above
        else:
            _bind(f"/old{source}", place, syscalls.MOUNT_ATTR_RDONLY if kind == "read" else 0)
    os.chdir("/new")
    syscalls.pivot_root(".", ".")
    syscalls.detach(".")
    os.chdir("/")
    syscalls.restrict_mount("/", syscalls.MOUNT_ATTR_RDONLY, recursive=False)


def _bind(source: str, place: str, attributes: int | None) -> None:
    """Bind a file or folder, with all that is mounted below it; None as attributes for a device."""
    if os.path.isdir(source):  # noqa: PTH112  as above
        os.makedirs(place, exist_ok=True)  # noqa: PTH103  as above
    elif not os.path.exists(place):  # noqa: PTH110  as above
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    syscalls.mount(source, place, "", syscalls.MS_BIND | syscalls.MS_REC)
    if attributes is not None:
        attributes |= syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
        syscalls.restrict_mount(place, attributes, recursive=True)
