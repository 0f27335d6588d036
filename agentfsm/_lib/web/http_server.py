"""Run a server over HTTP: bind its address, serve, and shut down."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING, Final

import anyio
import uvicorn
from anyio.abc import TaskStatus

from agentfsm._lib.concurrency import threadsafe_scheduler
from agentfsm._lib.web.http_connections import (
    BACKLOG,
    KEEP_ALIVE_S,
    MAX_CONNECTIONS,
    ConnectionLimits,
    limit_connections,
)
from agentfsm._lib.web.http_guard import App, bracket_ipv6
from agentfsm.core.errors import AgentError, MisuseError, first_error

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from types import FrameType

# Maximum size of a request in bytes: arguments of a tool are seldom more than some kilobytes.
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
# Seconds that active requests have at shutdown.
SHUTDOWN_GRACE_S: Final = 3.0


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket, whose connections send each answer at once (TCP_NODELAY).

    asyncio sets this option only on sockets that know their protocol, which one of `create_server` does not: the end of
    a streamed answer would wait 40 ms for the client's delayed acknowledgement.

    Raises:
        MisuseError: when the address is in use, or does not belong to this machine.
    """
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        bound = socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise MisuseError(
            f"the server cannot listen on {host}:{port} ({error.strerror or error}): give another port, or 0 for any"
        ) from error
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return bound


def format_url(host: str, bound: socket.socket, path: str = "") -> str:
    """Return the URL of a path of the server."""
    return f"http://{bracket_ipv6(host)}:{bound.getsockname()[1]}{path}"


async def serve(
    app: App,
    bound: socket.socket,
    url: str,
    task_status: TaskStatus[str],
    on_shutdown: Callable[[], object],
    *,
    limits: ConnectionLimits | None = None,
    drain_s: float = 0.0,
    end_drain: Callable[[], object] = lambda: None,
) -> None:
    """Serve until a signal arrives or the task is cancelled. In both cases active requests get some seconds to end.

    Args:
        app: The ASGI app.
        bound: The socket to listen on.
        url: The URL of the server.
        task_status: Receives the URL when the server listens.
        on_shutdown: Called when the shutdown begins.
        limits: Limits of the connections. Default: 512, of which one client may have half.
        drain_s: Seconds that active requests have at the shutdown, if more than usual.
        end_drain: Called at a second signal, which also cuts off the active requests.

    Raises:
        AgentError: when the app does not start.
        MisuseError: when the process may not have as many open files as connections.
    """
    limits = ConnectionLimits() if limits is None else limits
    _reserve_descriptors(limits.total)
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=ceil(max(SHUTDOWN_GRACE_S, drain_s)),
        http=limit_connections(limits),
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _NotifyingServer(config, lambda: task_status.started(url), on_shutdown, end_drain)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_exit_when_cancelled, server)
            with anyio.CancelScope(shield=True):
                await server.serve(sockets=[bound])
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:  # it holds one error
        raise first_error(group) from None


def _reserve_descriptors(connections: int) -> None:
    """Raise the limit of open files of this process, if it is too low for the connections.

    Raises:
        MisuseError: when it cannot be raised so far, and there are more connections than by default.
    """
    if sys.platform == "win32":  # no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + MAX_CONNECTIONS  # as many again for backlogs, the store, and models
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        if connections > MAX_CONNECTIONS:
            raise MisuseError(
                f"{connections:,} connections need {wanted:,} open files, and this process may have {hard:,}: raise "
                "its limit (`ulimit -n`, LimitNOFILE= of systemd), or allow fewer connections"
            ) from None


async def _exit_when_cancelled(server: uvicorn.Server) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        server.should_exit = True


class _NotifyingServer(uvicorn.Server):
    """Server that reports its start and the beginning of its shutdown."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], object],
        on_shutdown: Callable[[], object],
        end_drain: Callable[[], object],
    ) -> None:
        super().__init__(config)
        self._on_started, self._on_shutdown, self._end_drain = on_started, on_shutdown, end_drain
        self._schedule: Callable[[Callable[[], object]], object] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown, or cut off the active requests at the second signal."""
        is_second = self.should_exit
        super().handle_exit(sig, frame)
        if is_second:
            self.force_exit = True
            if self._schedule is not None:
                self._schedule(self._end_drain)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then call `on_started`."""
        self._schedule = threadsafe_scheduler()
        try:
            await super().startup(sockets)
        except SystemExit as error:  # uvicorn exits if the app does not start
            raise AgentError("the server did not start: see the log for the error of its app") from error
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Call `on_shutdown`, then shut down."""
        self._on_shutdown()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave out the end of the lifespan, in which runs are released
            await self.lifespan.shutdown()
