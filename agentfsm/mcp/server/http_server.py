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
from agentfsm.mcp.server.http_connections import BACKLOG, KEEP_ALIVE_S, LimitedConnection
from agentfsm.mcp.server.http_guard import App, bracket_ipv6

# Where the one endpoint is.
ENDPOINT_PATH: Final = "/mcp"
# Bytes of a request: arguments of a tool are seldom more than some kilobytes.
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
# Seconds that requests under way have at the end.
SHUTDOWN_GRACE_S: Final = 3.0


def bind_socket(host: str, port: int) -> socket.socket:
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


def format_url(host: str, bound: socket.socket) -> str:
    """Return where clients find the server."""
    return f"http://{bracket_ipv6(host)}:{bound.getsockname()[1]}{ENDPOINT_PATH}"


async def serve(
    app: App, bound: socket.socket, url: str, task_status: TaskStatus[str], on_shutdown: Callable[[], object]
) -> None:
    """Serve until a signal comes or this is cancelled; either way requests under way have some seconds to end.

    Args:
        app: What answers.
        bound: Where it listens.
        url: Told when it does.
        task_status: Who is told.
        on_shutdown: Called when it begins to end.

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
        timeout_graceful_shutdown=int(SHUTDOWN_GRACE_S),
        http=LimitedConnection,
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _NotifyingServer(config, lambda: task_status.started(url), on_shutdown)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_exit_when_cancelled, server)
            with anyio.CancelScope(shield=True):
                await server.serve(sockets=[bound])
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:  # of one error
        raise first_error(group) from None


async def _exit_when_cancelled(server: uvicorn.Server) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        server.should_exit = True


class _NotifyingServer(uvicorn.Server):
    """Tells when it is there, and when it begins to end."""

    def __init__(
        self, config: uvicorn.Config, on_started: Callable[[], object], on_shutdown: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self._on_started, self._on_shutdown = on_started, on_shutdown

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and tell so."""
        try:
            await super().startup(sockets)
        except SystemExit as error:  # which is how it says that the app did not start
            raise MCPServerError("the server did not start: see the log for what its app says") from error
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, and tell so before."""
        self._on_shutdown()
        await super().shutdown(sockets)
