"""Start processes of Python that have imported agentfsm already, which takes 0.8 s of the processor less for each.

This file is both: `WarmPython` starts it as a program, which forks for each process that is wanted. What has to be held
of the start itself, of the interpreter's options or of closed streams is tested with processes that are really started.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Self

# A run with a tool imports what is imported on first use. The tool is async, so that no thread is left when it forks.
WARM_UP = """
import anyio, agentfsm.guards, agentfsm.stores
from agentfsm import Agent, tool
from agentfsm.testing import ScriptedModel, call, say

async def warm(x: int) -> str:
    "Warm up."
    return "up"

async def main() -> None:
    async with Agent(ScriptedModel(say("", call("warm", x=1)), "Done."), tools=[tool(warm)]) as agent:
        assert (await agent.run("Go.")).output == "Done."

anyio.run(main)
"""
# Bytes of an order: the code, and the environment.
MAX_ORDER = 1 << 17
# What `WarmPython.command` runs: it imports next to nothing.
CLIENT = """
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect(sys.argv[1])
order = {"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ), "has_session": False}
socket.send_fds(link, [json.dumps(order).encode()], [0, 1, 2])
for fd in (0, 1, 2):
    os.close(fd)
pid = int(link.recv(16))
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda told, frame: os.kill(pid, told))
status = os.waitstatus_to_exitcode(int(link.recv(16)))
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
# Variables that an interpreter reads when it starts, so that a process with others has to be started really.
AT_START = ("PYTHON", "LC_", "LANG")


class WarmProcess:
    """A process that was forked, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, link: socket.socket, streams: dict[str, int]) -> None:
        self.pid = int(link.recv(16))
        self.returncode: int | None = None
        self.stdout, self.stderr = (
            open(streams[name], encoding="utf-8") if name in streams else None  # noqa: PTH123, SIM115  closed by who started it
            for name in ("stdout", "stderr")
        )
        self._link = link

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code; minus the number of the signal that ended it."""
        if self.returncode is None:
            self._link.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(int(self._link.recv(16)))
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from error
            self._link.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """A process that forks; a context manager, or for as long as this one lives. It is started when it is needed."""

    def __init__(self, *options: str, warm_up: str = WARM_UP) -> None:
        self._options, self._warm_up = options, warm_up
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()
            self._folder.cleanup()

    def can_start(self, words: tuple[str, ...], environment: Mapping[str, str]) -> bool:
        """Return whether a process that is forked is like one that is started with these arguments of Python."""
        changed = {name for name, value in environment.items() if os.environ.get(name) != value}
        return not any(name.startswith(AT_START) and name != "PYTHONUNBUFFERED" for name in changed)

    def start(
        self,
        words: tuple[str, ...],
        folder: Path,
        environment: Mapping[str, str],
        *,
        streams: tuple[int, int, int] | None = None,
    ) -> WarmProcess:
        """Start a process as `python WORDS` would be, in a folder, with only these variables.

        Args:
            words: `-c` and code, `-m` and a module, or the path of a program; and arguments.
            folder: Where it runs.
            environment: Its variables.
            streams: Files for its standard streams, in a session of its own; without them it reads nothing, and its
                output and errors are read from pipes.
        """
        pipes: dict[str, int] = {}
        given = list(streams or ())
        if streams is None:
            given.append(os.open(os.devnull, os.O_RDONLY))
            for name in ("stdout", "stderr"):
                pipes[name], writer = os.pipe()
                given.append(writer)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.connect(self._listen())
        order = {
            "words": words,
            "folder": str(folder),
            "environment": dict(environment),
            "has_session": streams is not None,
        }
        socket.send_fds(link, [json.dumps(order).encode()], given)
        for fd in given if streams is None else ():
            os.close(fd)
        return WarmProcess(link, pipes)

    def run(self, words: tuple[str, ...], folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
        """Start a process to its end, and return its exit code, output and errors."""
        out, err = folder / ".stdout", folder / ".stderr"
        with Path(os.devnull).open() as nothing, out.open("w") as output, err.open("w") as errors:
            streams = (nothing.fileno(), output.fileno(), errors.fileno())
            status = self.start(words, folder, environment, streams=streams).wait()
        return status, out.read_text(), err.read_text()

    def command(self, *words: str) -> list[str]:
        """Return a command that does what `python WORDS` does, for a program that starts processes itself.

        It hands on its streams and the signals that it gets, and ends as the process does, which does not outlive it.
        """
        return [sys.executable, "-IS", "-c", CLIENT, self._listen(), *words]

    def _listen(self) -> str:
        """Return the address for orders; it is in a folder that nobody else may enter."""
        with self._lock:
            if self._process is None:
                self._folder = TemporaryDirectory()
                self._address = f"{self._folder.name}/orders"
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as orders:
                    orders.bind(self._address)
                    orders.listen(16)
                    # An interrupt at the terminal is for the tests, and what these start is told by them.
                    self._process = subprocess.Popen(
                        [sys.executable, *self._options, __file__, str(orders.fileno()), self._warm_up],
                        stdin=subprocess.PIPE,
                        pass_fds=[orders.fileno()],
                        start_new_session=True,
                    )
                atexit.register(self._process.communicate)
            return self._address


PLAIN = WarmPython()
# For servers and clients of MCP, whose package takes a second to import.
WITH_MCP = """
import mcp.server.mcpserver, mcp.server.runner, mcp.shared.exceptions, mcp.types, uvicorn
import agentfsm.mcp, agentfsm.mcp.client.mcp_server, agentfsm.mcp.server.service, agentfsm.mcp.server.http_sessions
"""
MCP = WarmPython(warm_up=WARM_UP + WITH_MCP + "import agentfsm.cli.commands.mcp_serve, agentfsm.stores.sqlite")


def _become(order: dict[str, Any]) -> None:
    """Make the forked process what `python WORDS` would be, and run it."""
    if order["has_session"]:
        os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    # As Python makes them when it starts.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old, is_raw = getattr(sys, name), bool(number) and "PYTHONUNBUFFERED" in os.environ
        file: Any = open(number, "wb" if number else "rb", buffering=0 if is_raw else -1, closefd=False)  # noqa: SIM115  for its life
        is_direct = name == "stderr" or file.isatty()
        stream = io.TextIOWrapper(file, old.encoding, old.errors, "\n", is_direct, write_through=is_raw)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    kind, *words = order["words"]
    sys.argv = [kind, *words[1:]]
    if kind == "-c":
        sys.path[0] = ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(words[0], main.__dict__)  # noqa: S102  the code of a test
    elif kind == "-m":
        sys.path[0] = order["folder"]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *words]
        sys.path[0] = str(Path(kind).parent)
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)  # noqa: S102  a program of a test


def _serve() -> None:
    """Fork for each order that comes in; a keeper tells the process id and how the process ended."""
    exec(sys.argv[2], {"__name__": "warm_up"})  # noqa: S102  the code above
    gc.freeze()
    orders = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        ready, _, _ = select.select([orders, 0], [], [])
        if 0 in ready:
            return
        link, _ = orders.accept()
        order, fds, *_ = socket.recv_fds(link, MAX_ORDER, 3)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            child = os.fork()
            if child == 0:
                link.close()
                for number, file in enumerate(fds):
                    os.dup2(file, number)
                    os.close(file)
                try:
                    _become(json.loads(order))
                except Exception:  # noqa: BLE001  printed as Python does at its end
                    traceback.print_exc()
                    sys.exit(1)
                return
            for file in (0, 1, 2, *fds):
                os.close(file)
            end = os.pidfd_open(child)
            with suppress(OSError):
                link.send(b"%d" % child)
                if link in select.select([link, end], [], [])[0]:  # who has started it is gone
                    os.kill(child, signal.SIGKILL)
                link.send(b"%d" % os.waitpid(child, 0)[1])
            os._exit(0)
        link.close()
        for file in fds:
            os.close(file)


if __name__ == "__main__":
    _serve()
