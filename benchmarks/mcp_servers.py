"""`python -m benchmarks.mcp_servers KIND PORT`: serve the tool `add` over streamable HTTP.

KIND is `sdk`, the server class of the package `mcp` with its defaults, or `agentfsm`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import MCPServer

from agentfsm import tool
from agentfsm.mcp import MCPService

HOST = "127.0.0.1"
# Seconds for a server to begin: it imports a lot.
START_S = 30.0
# How the client begins, by the revision that it speaks then.
MODES = {"2025-11-25": "legacy", "2026-07-28": "auto"}


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def _serve_by_sdk(port: int) -> None:
    server = MCPServer("bench", log_level="ERROR")
    server.tool()(add)
    await server.run_streamable_http_async(host=HOST, port=port)


async def _serve_by_agentfsm(port: int) -> None:
    await MCPService([tool(read_only=True)(add)], name="bench").http(HOST, port)


SERVERS = {"sdk": _serve_by_sdk, "agentfsm": _serve_by_agentfsm}


@contextmanager
def served_by(kind: str) -> Iterator[str]:
    """Give the URL of a server in a process of its own, which ends with the block."""
    with socket.create_server((HOST, 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.mcp_servers", kind, str(port)]
    with subprocess.Popen(command) as process:  # noqa: S603  this program
        try:
            _await_port(port)
            yield f"http://{HOST}:{port}/mcp"
        finally:
            process.kill()


def _await_port(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((HOST, port)).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@asynccontextmanager
async def connected(url: str, revision: str) -> AsyncIterator[Client]:
    """Give a client of the SDK that speaks a revision."""
    async with (
        httpx2.AsyncClient(trust_env=False) as http,
        Client(streamable_http_client(url, http_client=http), mode=MODES[revision]) as client,
    ):
        assert client.protocol_version == revision
        yield client


if __name__ == "__main__":
    anyio.run(SERVERS[sys.argv[1]], int(sys.argv[2]))
