"""The isolation that this machine allows: bubblewrap, else namespaces with Landlock, else none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import attrs

from agentfsm.core.value import Value
from agentfsm.sandbox import bubblewrap
from agentfsm.sandbox.bubblewrap import Mount, list_mounts, list_python_paths
from agentfsm.sandbox.process import function_call, supervisor, syscalls, system_call_filter
from agentfsm.sandbox.rights import Rights

PACKAGE_FOLDER: Final = Path(__file__).parent.parent
# Port of the proxy in the network of a sandbox, which has no other services.
PROXY_PORT: Final = 3128
# Bytes of /tmp, and of /dev/shm, in memory.
TEMPORARY_BYTES: Final = 64 << 20
# Bytes of a result as JSON: a record of the journal holds 67 million characters.
MAX_RESULT_BYTES: Final = 16 << 20
# Bytes of the output of a function that are kept, for the report of a failure.
MAX_OUTPUT_BYTES: Final = 64 << 10
# Seconds that a trial of a sandbox may take.
_TRIAL_S: Final = 20
_HOME: Final = "/tmp"  # noqa: S108  a private tmpfs in memory
# Environment of each process of a sandbox. Allocators and libraries would reserve address space for each thread, and
# the order of a set would be another in each process.
BASE_ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": _HOME,
    "TMPDIR": _HOME,
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
# Loads files of this package without the package itself, whose import would take longer than most calls.
_START: Final = """
import sys, types
for name, path in (("agentfsm", {folder!r}), ("agentfsm.sandbox", {folder!r} + "/sandbox")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from agentfsm.sandbox.process import {module}
{module}.main()
"""


class Isolation(StrEnum):
    """Level of isolation of a function from the rest of the machine, the best first."""

    BUBBLEWRAP = "bubblewrap"
    """Namespaces that bubblewrap sets up, Landlock where the kernel has it, a filter of system calls, and limits."""

    NAMESPACES = "namespaces+landlock"
    """The same without bubblewrap; Landlock is required."""

    UNSANDBOXED = "unsandboxed"
    """A process of its own with a clean environment and limits of time and memory, and nothing else."""


@attrs.frozen(kw_only=True)
class Availability(Value):
    """The isolation that this machine allows."""

    isolation: Isolation | None
    """The best level; None if there is no sandbox here."""

    reasons: Mapping[Isolation, str]
    """For each better level, why it is not available."""

    @property
    def description(self) -> str:
        """The level and the reasons, as text for a person."""
        why = "; ".join(f"{level.value}: {reason}" for level, reason in self.reasons.items())
        level = "none" if self.isolation is None else self.isolation.value
        return f"{level} ({why})" if why else level


def find_isolation() -> Availability:
    """Return the isolation that this machine allows. The first call tries it, which takes about 0.2 s."""
    program = bubblewrap.find_bubblewrap()
    if program not in _FOUND:
        found = _find_isolation(program)
        if found.isolation is None:  # tried again: the reason may have been a passing one
            return found
        _FOUND[program] = found
    return _FOUND[program]


# The isolation that was found, by the path of bubblewrap.
_FOUND: Final[dict[str | None, Availability]] = {}


def _find_isolation(program: str | None) -> Availability:
    if sys.platform != "linux" or not system_call_filter.is_supported():
        reason = "Linux on x86-64 or 64-bit ARM is needed"
        return Availability(isolation=None, reasons={Isolation.BUBBLEWRAP: reason, Isolation.NAMESPACES: reason})
    reasons: dict[Isolation, str] = {}
    for level in (Isolation.BUBBLEWRAP, Isolation.NAMESPACES):
        if (obstacle := _find_obstacle(level, program)) is None:
            return Availability(isolation=level, reasons=reasons)
        reasons[level] = obstacle
    return Availability(isolation=None, reasons=reasons)


def _find_obstacle(level: Isolation, program: str | None) -> str | None:
    """Return why a level is not available; None if it is. The level is tried with a function that does nothing."""
    if level is Isolation.BUBBLEWRAP and program is None:
        return "bwrap is not installed"
    if level is Isolation.NAMESPACES and not syscalls.query_landlock_version():
        return "the kernel has no Landlock"
    spec = build_spec(Rights(seconds=_TRIAL_S), level, (), program)
    try:
        report = _try(encode_input(spec, {}))
    except (OSError, ValueError) as error:
        return f"the trial failed: {error}"
    if report["result"].startswith(function_call.READY.decode()) and report["exit_code"] == 0:
        return None
    lines = str(report["output"]).strip().splitlines()
    return lines[-1] if lines else f"the trial ended with exit code {report['exit_code']}"


def _try(given: bytes) -> dict[str, Any]:
    """Run a supervisor and return its report. Its input stays open until then."""
    pipe, command = subprocess.PIPE, [*supervisor_command(), "-1"]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=BASE_ENVIRONMENT)  # noqa: S603  our own
    with process:
        assert process.stdin is not None  # noqa: S101  for the type checker: both are pipes
        assert process.stdout is not None  # noqa: S101  as above
        process.stdin.write(given)
        process.stdin.flush()
        written = process.stdout.read()
    report: dict[str, Any] = json.loads(written.partition(supervisor.STARTED)[2])
    return report


def supervisor_command() -> list[str]:
    """Return the command of a supervisor, without its last argument: the number of the proxy's socket."""
    return [
        sys.executable,
        "-P",
        "-s",
        "-S",
        "-B",
        "-c",
        _START.format(folder=str(PACKAGE_FOLDER), module="supervisor"),
    ]


def encode_input(spec: Mapping[str, Any], request: Mapping[str, Any]) -> bytes:
    """Return the input of a supervisor: the sizes of the specification and of the request, then both."""
    parts = [json.dumps(part).encode("ascii") for part in (spec, request)]
    return b"%15d %15d\n" % (len(parts[0]), len(parts[1])) + b"".join(parts)


def build_spec(sandbox: Rights, isolation: Isolation, paths: Sequence[Path], program: str | None) -> dict[str, Any]:
    """Return the specification of a sandbox for its supervisor.

    Args:
        sandbox: Rights and limits.
        isolation: Level to use.
        paths: Files and folders of the function, which it may read.
        program: Path of bubblewrap, for its level.
    """
    is_isolated = isolation is not Isolation.UNSANDBOXED
    read = [*list_python_paths(), PACKAGE_FOLDER, *paths, *sandbox.read]
    mounts = list_mounts(read, sandbox.write) if is_isolated else []
    has_proxy = is_isolated and bool(sandbox.hosts)
    proxied = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy") if has_proxy else ()
    command: list[str] = []
    if isolation is Isolation.BUBBLEWRAP and program is not None:
        command = _build_command(program, mounts)
    return {
        "level": isolation.value,
        "seconds": sandbox.seconds,
        "cpu_s": sandbox.cpu_s or max(1, round(sandbox.seconds)),
        "memory_mb": sandbox.memory_mb,
        "processes": sandbox.processes,
        "proxy_port": PROXY_PORT if has_proxy else 0,
        "write": [str(path.resolve()) for path in sandbox.write],
        "folder": _HOME,
        "mounts": mounts,
        "command": command,
        "env": BASE_ENVIRONMENT | dict.fromkeys(proxied, f"http://127.0.0.1:{PROXY_PORT}") | dict(sandbox.env),
        "temporary_bytes": TEMPORARY_BYTES,
        "result_bytes": MAX_RESULT_BYTES,
        "output_bytes": MAX_OUTPUT_BYTES,
    }


def _build_command(program: str, mounts: Sequence[Mount]) -> list[str]:
    is_root = os.geteuid() == 0
    size = ("--size", str(TEMPORARY_BYTES), "--perms", "1777", "--tmpfs")
    return [
        program,
        *(bubblewrap.ROOT_OPTIONS if is_root else bubblewrap.BASE_OPTIONS),
        *("--dev", "/dev", *size, "/dev/shm", *size, _HOME),  # noqa: S108  its own
        *bubblewrap.build_mount_options(mounts),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--"),
        *(str(Path(sys.executable).resolve()), "-P", "-s", "-S", "-B", "-c"),
        _START.format(folder=str(PACKAGE_FOLDER), module="function_call"),
    ]
