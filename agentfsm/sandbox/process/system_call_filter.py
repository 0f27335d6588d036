"""A seccomp filter that refuses the system calls a function in a sandbox has no use for.

Namespaces do not cover them: sockets that reach outside of the network namespace, keyrings of the user, new processes,
and parts of the kernel with a history of faults.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import Final

from agentfsm.sandbox.process import syscalls

# Refused calls and their numbers on x86-64 and on 64-bit ARM; None where there is no such call.
_REFUSED: Final[dict[str, tuple[int | None, int | None]]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),  # memory that no limit of the process counts, as the next and shmget
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "msgget": (68, 186),  # as shmget
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_SOCKET: Final = (41, 198)
_CLONE: Final = (56, 220)
_CLONE3: Final = (435, 435)
_FORKS: Final[tuple[tuple[int | None, int | None], ...]] = ((57, None), (58, None))  # fork, vfork
# `AUDIT_ARCH_*` by machine, in the order of the numbers above.
_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Numbers from here on are those of the x32 interface, a second way to each call.
_X32: Final = 0x40000000
_NEW_NAMESPACES: Final = 0x7E020000

_LOAD: Final = 0x20
_JUMP_EQUAL: Final = 0x15
_JUMP_AT_LEAST: Final = 0x35
_JUMP_SET: Final = 0x45
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_ERROR: Final = 0x00050000
_KILL: Final = 0x80000000
# Offsets in `struct seccomp_data`; the last one is that of the lower half of the first argument.
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16


def is_supported() -> bool:
    """Return whether there is a filter for this machine."""
    return os.uname().machine in _ARCHITECTURES


def build_filter(*, processes: int, network: bool) -> bytes:
    """Return the instructions of the filter.

    Args:
        processes: Processes that may run at once; with 1, no process can be started.
        network: Whether the function may open connections to the proxy of its sandbox.
    """
    machine = os.uname().machine
    column = [*_ARCHITECTURES].index(machine)
    code = [
        _instruct(_LOAD, _ARCHITECTURE),
        _instruct(_JUMP_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _instruct(_RETURN, _KILL),
        _instruct(_LOAD, _NUMBER),
        _instruct(_JUMP_AT_LEAST, _X32, 0, 1),
        _instruct(_RETURN, _KILL),
    ]
    refused = [numbers[column] for numbers in _REFUSED.values()]
    forks = [numbers[column] for numbers in _FORKS] if processes == 1 else []
    for number in filter(None, (*refused, *forks)):
        code += [_instruct(_JUMP_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    # clone3 has its flags in memory, which a filter cannot read; libraries fall back to clone.
    code += [_instruct(_JUMP_EQUAL, _CLONE3[column], 0, 1), _refuse(errno.ENOSYS)]
    code += _on_call(_CLONE[column], [*_check_clone(may_fork=processes > 1)])
    families = (socket.AF_INET, socket.AF_INET6) if network else ()
    code += _on_call(_SOCKET[column], [*_check_family(*families)])
    return b"".join([*code, _instruct(_RETURN, _ALLOW)])


def _on_call(number: int, checks: list[bytes]) -> list[bytes]:
    """Return instructions that decide a call with this number by its first argument."""
    body = [_instruct(_LOAD, _ARGUMENT), *checks]
    return [_instruct(_JUMP_EQUAL, number, 0, len(body)), *body]


def _check_clone(*, may_fork: bool) -> Iterator[bytes]:
    yield _instruct(_JUMP_SET, _NEW_NAMESPACES, 0, 1)
    yield _refuse(errno.EPERM)
    if not may_fork:
        yield _instruct(_JUMP_SET, syscalls.CLONE_THREAD, 1, 0)
        yield _refuse(errno.EPERM)
    yield _instruct(_RETURN, _ALLOW)


def _check_family(*allowed: int) -> Iterator[bytes]:
    for family in allowed:
        yield _instruct(_JUMP_EQUAL, family, 0, 1)
        yield _instruct(_RETURN, _ALLOW)
    yield _refuse(errno.EACCES)


def _refuse(error: int) -> bytes:
    return _instruct(_RETURN, _ERROR | error)


def _instruct(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
