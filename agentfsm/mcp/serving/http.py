"""A server over HTTP: where it listens, and how it ends."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

import anyio
import uvicorn
from anyio.abc import TaskStatus

from agentfsm.core.errors import first_error
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.serving.connections import BACKLOG, KEEP_ALIVE_S, Connection
from agentfsm.mcp.serving.guard import App, bracketed

# Where the one endpoint is.
PATH: Final = "/mcp"
# Bytes of a request: arguments of a tool are seldom more than some kilobytes.
BODY_BYTES: Final = 4 * 1024 * 1024
# Seconds that requests under way have at the end.
GRACE_S: Final = 3.0


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that is bound.

    Raises:
        MCPServerError: when the address is taken, or none of this machine.
    """
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise MCPServerError(
            f"the server cannot listen on {host}:{port} ({error.strerror or error}): give another port, or 0 for any"
        ) from error


def url_of(host: str, bound: socket.socket) -> str:
    """Return where clients find the server."""
    return f"http://{bracketed(host)}:{bound.getsockname()[1]}{PATH}"


async def serve(
    app: App, bound: socket.socket, url: str, task_status: TaskStatus[str], ending: Callable[[], object]
) -> None:
    """Serve until a signal comes or this is cancelled; either way requests under way have some seconds to end.

    Args:
        app: What answers.
        bound: Where it listens.
        url: Told when it does.
        task_status: Who is told.
        ending: Called when it begins to end.

    Raises:
        MCPServerError: when the app does not start.
    """
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(GRACE_S),
        http=Connection,
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Server(config, lambda: task_status.started(url), ending)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_end_when_cancelled, server)
            with anyio.CancelScope(shield=True):
                await server.serve(sockets=[bound])
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:  # of one error
        raise first_error(group) from None


async def _end_when_cancelled(server: uvicorn.Server) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        server.should_exit = True


class _Server(uvicorn.Server):
    """Tells when it is there, and when it begins to end."""

    def __init__(self, config: uvicorn.Config, told: Callable[[], object], ending: Callable[[], object]) -> None:
        super().__init__(config)
        self._told, self._ending = told, ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and tell so."""
        try:
            await super().startup(sockets)
        except SystemExit as error:  # which is how it says that the app did not start
            raise MCPServerError("the server did not start: see the log for what its app says") from error
        self._told()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, and tell so before."""
        self._ending()
        await super().shutdown(sockets)
