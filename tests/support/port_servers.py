"""Servers of tests that listen at a port: started, waited for, and ended."""

from __future__ import annotations

import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support import server_reaper

# Below what Linux gives to clients: a client could get the port of a server that is about to start.
PORTS: Final = range(15_000, 32_768)
# Seconds until a server that was told to end is killed.
LAST_ANSWER_S: Final = 10.0


@contextmanager
def listening(
    command: Sequence[str], env: Mapping[str, str], *, cwd: Path | None = None, port: int | None = None
) -> Iterator[str]:
    """Start a server that takes its port from the environment; yields its URL, without a path, once it listens.

    Args:
        command: With its arguments; "{port}" in them stands for the port.
        env: All that it gets beside the port, which is in PORT.
        cwd: The folder that it works in; by default ours.
        port: The port; by default a free one.
    """
    port = free_port() if port is None else port
    words = [word.replace("{port}", str(port)) for word in command]
    told = {**env, "PORT": str(port)}
    with subprocess.Popen(words, env=told, cwd=cwd, stderr=subprocess.PIPE, text=True) as server:
        try:
            server_reaper.await_that(lambda: server.poll() is not None or is_open(port), f"{command[-1]} listens")
            assert server.poll() is None, server.stderr.read() if server.stderr else ""
            yield f"http://127.0.0.1:{port}"
        finally:
            _end(server)


def _end(server: subprocess.Popen[str]) -> None:
    server.terminate()
    try:
        server.communicate(timeout=LAST_ANSWER_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.communicate()


def free_port() -> int:
    """Return a port where nobody listens."""
    while is_open(port := secrets.choice(PORTS)):
        pass
    return port


def is_open(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
