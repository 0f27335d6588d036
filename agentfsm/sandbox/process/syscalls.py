"""Calls of the Linux kernel that Python has no function for, by ctypes. See the manual pages of the same names."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any, Final

_libc: Final[Any] = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None

# Namespaces, from linux/sched.h.
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
CLONE_THREAD: Final = 0x00010000

MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2
MOUNT_ATTR_RDONLY: Final = 1
MOUNT_ATTR_NOSUID: Final = 2
MOUNT_ATTR_NODEV: Final = 4

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38

# Numbers that all architectures share.
_MOUNT_SETATTR: Final = 442
_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_ADD_RULE: Final = 445
_LANDLOCK_RESTRICT_SELF: Final = 446

_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_CAPABILITY_VERSION_3: Final = 0x20080522
_LANDLOCK_VERSION_QUERY: Final = 1
_LANDLOCK_RULE_PATH: Final = 1
_LANDLOCK_RULE_PORT: Final = 2


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def become_subreaper() -> None:
    """Make this process the parent of its descendants whose own parents have ended."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def forbid_new_privileges() -> None:
    """Keep this process and its descendants from gaining rights by programs, such as setuid programs."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def drop_capabilities() -> None:
    """Give up all capabilities."""
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system, or bind a file or folder."""
    named = [each.encode() or None for each in (source, target, kind)]
    _check(_libc.mount(*named, ctypes.c_ulong(flags), options.encode() or None), f"mount {source} on {target}")


def restrict_mount(target: str, attributes: int, *, recursive: bool) -> None:
    """Add attributes such as MOUNT_ATTR_RDONLY to a mount, and to those below it if `recursive`."""
    request = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    _check(
        _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, request, ctypes.c_size_t(len(request))),
        f"mount_setattr {target}",
    )


def pivot_root(new_root: str, put_old: str) -> None:
    """Make a mount the root of this mount namespace."""
    number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    _check(_libc.syscall(number, new_root.encode(), put_old.encode()), "pivot_root")


def detach(target: str) -> None:
    """Unmount a mount and all below it, also if they are in use."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount2 {target}")


def query_landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; 0 if there is none."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_VERSION_QUERY)))


def create_landlock_ruleset(attributes: bytes) -> int:
    """Return the file descriptor of a new set of rules."""
    size = ctypes.c_size_t(len(attributes))
    return _check(_libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, size, 0), "landlock_create_ruleset")


def allow_path(ruleset: int, path_fd: int, access: int) -> None:
    """Allow this access to a file, or to a folder and all below it."""
    rule = struct.pack("=Qi", access, path_fd)
    _check(_libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH, rule, 0), "landlock_add_rule")


def allow_port(ruleset: int, port: int, access: int) -> None:
    """Allow this access to a TCP port."""
    rule = struct.pack("=QQ", access, port)
    _check(_libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PORT, rule, 0), "landlock_add_rule")


def enter_landlock(ruleset: int) -> None:
    """Restrict this thread and its descendants to the rules."""
    _check(_libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_seccomp_filter(instructions: bytes) -> None:
    """Install a filter of system calls, given as instructions of 8 bytes."""
    program = _Program(len(instructions) // 8, instructions)
    _check(_libc.prctl(22, 2, ctypes.byref(program), 0, 0), "prctl(PR_SET_SECCOMP)")
