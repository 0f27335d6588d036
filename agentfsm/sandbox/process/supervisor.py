"""The process beside a sandbox: it starts the function's process, watches it, and ends all that it has started.

It reads a specification and a request from its input, which stays open as long as the caller wants the result, and
writes one JSON object when everything has ended. So a caller that is killed ends its sandboxes, too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, Final

from agentfsm.sandbox.process import function_call, namespaces, syscalls
from agentfsm.sandbox.process.function_call import write_all

# Begins the report. What precedes it is of Python itself.
STARTED: Final = b"\n+started+\n"
_INPUT, _OUTPUT = 0, 1
_READ_BYTES: Final = 1 << 16
# Highest file descriptor to look for: the limit may be far above those in use.
_MAX_FD: Final = 1 << 20
# Seconds between two looks for the end of a process, where no signal tells it.
_LOOK_S: Final = 1.0


class Supervisor:
    """One sandbox: its processes and their output."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = spec
        self.written: dict[int, bytearray] = {}
        # Bytes to keep of each pipe. A result with more is refused, and the rest of other output is dropped.
        self.limits: dict[int, int] = {}
        self.result_fd: int = -1
        self.output_fd: int = -1
        self.main_pid: int = 0
        self.end: str = ""
        self.exit_code: int = 0
        self.cpu_s: float = 0.0

    def run(self, request: bytes, proxy_fd: int) -> dict[str, Any]:
        """Run the function and return how it ended, when no process of it is left."""
        if sys.platform == "linux":
            syscalls.become_subreaper()
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        started = time.monotonic()
        self._start(request, proxy_fd)
        self._watch(wake, started + self.spec["seconds"])
        self._end_all()
        self._drain()
        return {
            "end": self.end,
            "exit_code": self.exit_code,
            "cpu_s": self.cpu_s,
            "result": self.written[self.result_fd].decode("utf-8", "replace"),
            "output": self.written[self.output_fd].decode("utf-8", "replace"),
        }

    def _start(self, request: bytes, proxy_fd: int) -> None:
        self.result_fd, result = os.pipe()
        self.output_fd, output = os.pipe()
        for fd, most in ((self.result_fd, self.spec["result_bytes"]), (self.output_fd, self.spec["output_bytes"])):
            self.written[fd], self.limits[fd] = bytearray(), most
            os.set_blocking(fd, False)
        self.main_pid = os.fork()
        if not self.main_pid:
            try:
                self._become_function(request, result, output, proxy_fd)
            except BaseException:  # noqa: BLE001  the output of this process is the only place to tell it
                traceback.print_exc()
            finally:
                os._exit(function_call.SETUP_FAILED)
        os.close(result)
        os.close(output)
        if proxy_fd >= 0:
            os.close(proxy_fd)

    def _become_function(self, request: bytes, result: int, output: int, proxy_fd: int) -> None:
        """In the new process: run the function, or start bubblewrap, which runs it."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if sys.platform == "linux":
            syscalls.die_with_parent(signal.SIGKILL)
        os.setsid()
        os.dup2(output, 2)
        os.dup2(output, 1)
        if not self.spec["command"]:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, _INPUT)
            _close_others({0, 1, 2, result, proxy_fd})
            os.environ.clear()
            os.environ.update(self.spec["env"])
            function_call.run_in_sandbox(self.spec, request, result, proxy_fd)
        file = os.memfd_create("request", 0)
        write_all(file, json.dumps(self.spec).encode("ascii") + b"\n" + request)
        os.lseek(file, 0, os.SEEK_SET)
        os.dup2(os.open(os.devnull, os.O_RDONLY), _INPUT)
        passed = [file, result, *([proxy_fd] if proxy_fd >= 0 else [])]
        _close_others({0, 1, 2, *passed})
        for fd in passed:
            os.set_inheritable(fd, True)
        command = [*self.spec["command"], *map(str, (file, result, proxy_fd))]
        os.execve(command[0], command, self.spec["env"])  # noqa: S606  as given

    def _watch(self, wake: int, deadline: float) -> None:
        """Return when the function's process has ended, or has to be ended."""
        fds = {_INPUT, wake, *self.written}
        while not self.end:
            left = deadline - time.monotonic()
            if left <= 0:
                self.end = "timeout"
                return
            ready, _, _ = select.select(fds, [], [], min(left, _LOOK_S))
            for fd in ready:
                if fd == _INPUT:
                    self.end = "cancelled"
                elif fd == wake:
                    os.read(wake, _READ_BYTES)
                elif not self._read(fd):
                    fds.discard(fd)
            if not self.main_pid:
                continue
            pid, status, usage = os.wait4(self.main_pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.main_pid = 0
                self.exit_code = code if code >= 0 else namespaces.SIGNAL_EXIT - code
                self.cpu_s = usage.ru_utime + usage.ru_stime
                self.end = self.end or "ended"

    def _read(self, fd: int) -> bool:
        """Read from a pipe; return whether there may be more."""
        try:
            chunk = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return True
        room = self.limits[fd] - len(self.written[fd])
        self.written[fd] += chunk[:room]
        if len(chunk) > room and fd == self.result_fd and not self.end:
            self.end = "result_too_long"
        return bool(chunk)

    def _end_all(self) -> None:
        """Kill the function's process and all that it has started, and wait until they are gone."""
        while True:
            for pid in _list_children() or ([self.main_pid] if self.main_pid else []):
                _kill(pid)
            try:
                pid, _ = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            self.main_pid = 0 if pid == self.main_pid else self.main_pid

    def _drain(self) -> None:
        """Read the rest of the pipes."""
        for fd in self.written:
            while True:
                before = len(self.written[fd])
                if not self._read(fd) or len(self.written[fd]) == before:
                    break


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # no group of its own, or gone
            continue


def _list_children() -> list[int]:
    """Return the children of this process, adopted ones included; nothing where there is no /proc."""
    own, children = os.getpid(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():  # noqa: PTH208, PTH112  pathlib is slow to import
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123  as above
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == own:
                children.append(int(name))
    return children


def _close_others(keep: set[int]) -> None:
    start = 3
    for fd in sorted(fd for fd in keep if fd >= start):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, min(os.sysconf("SC_OPEN_MAX"), _MAX_FD))


def _read_input(size: int) -> bytes:
    """Read exactly so many bytes of the input; the caller may be gone."""
    parts = bytearray()
    while len(parts) < size:
        chunk = os.read(_INPUT, size - len(parts))
        if not chunk:
            raise EOFError
        parts += chunk
    return bytes(parts)


def main() -> None:
    """Read the sizes of the specification and of the request, then both; run the function; write how it ended.

    The output has `STARTED` before the function can start, so that the death of this process shows whether it had.
    """
    proxy_fd = int(sys.argv[-1])
    spec_bytes, request_bytes = map(int, _read_input(32).split())
    spec, request = json.loads(_read_input(spec_bytes)), _read_input(request_bytes)
    write_all(_OUTPUT, STARTED)
    report = Supervisor(spec).run(request, proxy_fd)
    write_all(_OUTPUT, json.dumps(report).encode("ascii"))
