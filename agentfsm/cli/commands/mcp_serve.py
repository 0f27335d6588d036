"""`agentfsm mcp serve`: serve an agent, or a registry of tools, to MCP clients."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
from anyio.abc import TaskStatus

from agentfsm.agents.agent import Agent
from agentfsm.cli.argument_types import parse_count, split_address
from agentfsm.cli.arguments import AddParser, add_address, add_command, add_drain
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.resolve.agent_target import load_target
from agentfsm.cli.resolve.mcp_servers import load_mcp
from agentfsm.cli.resolve.run_lookup import attach_store
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import stdout_to_stderr
from agentfsm.core.errors import MisuseError
from agentfsm.releases import Rollout
from agentfsm.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.mcp.server.service import MCPService

# Seconds for releasing the runs and closing the store after a signal.
CLOSE_TIMEOUT_S: Final = 5.0

# Fields of ClientLimits that are options of `mcp serve`, and what they bound.
CLIENT_LIMITS: Final = {
    "connections": "connections at once",
    "sessions": "sessions at once",
    "calls": "calls in progress and waiting",
}


def add_commands(sub: AddParser) -> None:
    """Add the commands of this module."""
    serve_options = add_command(sub, serve, text="serve an agent, or a registry of tools, to MCP clients")
    serve_options.add_argument(
        "target", metavar="module:name", help="an Agent, a ToolRegistry or an MCPService, or a function"
    )
    add_address(serve_options, None, instead="standard input and output")
    serve_options.add_argument("--token-env", metavar="NAME", help="variable with the bearer token for HTTP clients")
    serve_options.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[], help="another host name of the server"
    )
    serve_options.add_argument("--prefix", default="", help="prefix for the names of the tools that control runs")
    add_drain(serve_options)
    serve_options.add_argument("--no-tools", action="store_true", help="leave out the agent's own tools")
    for name, what in CLIENT_LIMITS.items():
        serve_options.add_argument(
            f"--client-{name}", metavar="N", type=parse_count, help=f"maximum {what} of one HTTP client"
        )


def serve(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Serve until the client disconnects or a signal arrives."""
    if args.http is None and (args.token_env is not None or args.allow_host or _read_limits(args)):
        raise MisuseError("--token-env, --allow-host and --client-... are options for HTTP: add --http")
    service, close = _build_service(args)
    service.drain_s = args.drain
    with InterruptibleRunner() as runner:
        try:
            if args.http is None:
                terminal.err(f"serving {service.name!r} on standard input and output, until the client closes them")
                runner.run(_serve_stdio, service, close)
            else:
                with stdout_to_stderr():  # stdout is reserved for results
                    runner.run(_serve_http, service, terminal, args)
        except KeyboardInterrupt:
            terminal.err("stopped: the next server continues the open runs")
        finally:
            runner.run(close)
    return ExitCode.DONE


def _build_service(args: argparse.Namespace) -> tuple[MCPService, Callable[[], Awaitable[None]]]:
    """Return the MCP server for the target, and the function that closes it.

    Raises:
        MisuseError: if the target cannot be served, or the extra "mcp" is not installed.
    """
    loaded = load_mcp()
    kind: type[MCPService] = loaded.MCPService
    limits = _read_limits(args)
    found: Any = load_target(args.target, Agent, ToolRegistry, kind, Rollout)
    if isinstance(found, Rollout):
        raise MisuseError(
            f"{args.target!r} is a roll-out, which chooses by the user, and clients of this server have none: "
            f"`agentfsm serve {args.target}` has it at /mcp, with a key for each user"
        )
    if isinstance(found, Agent):
        agent, _ = attach_store(found, args.target, args.store)
        options = {"prefix": args.prefix, "tools": not args.no_tools}
        return agent.as_mcp_server(**options, client_limits=loaded.ClientLimits(**limits)), agent.aclose
    if args.prefix or args.no_tools:
        raise MisuseError(
            f"{args.target!r} is not an Agent: leave out --prefix and --no-tools, which apply to agents only"
        )
    if isinstance(found, ToolRegistry):
        name = args.target.rpartition(":")[0]
        return kind(found, name=name, client_limits=loaded.ClientLimits(**limits)), found.aclose
    if limits:
        raise MisuseError(f"{args.target!r} is an MCPService: leave out --client-..., and give it client_limits=")
    return found, found.registry.aclose if found.runs is None else found.runs.agent.aclose


def _read_limits(args: argparse.Namespace) -> dict[str, int]:
    given = {name: getattr(args, f"client_{name}") for name in CLIENT_LIMITS}
    return {name: value for name, value in given.items() if value is not None}


async def _serve_http(service: MCPService, terminal: Terminal, args: argparse.Namespace) -> None:
    host, port = split_address(args.http)
    token = None if args.token_env is None else os.environ.get(args.token_env)
    if args.token_env is not None and not token:
        raise MisuseError(f"the variable {args.token_env} is not set: set it to the token, or leave out --token-env")
    notice = StartNotice(terminal, service.name)
    await service.http(host.strip("[]"), int(port), token=token, hosts=args.allow_host, task_status=notice)


@attrs.frozen
class StartNotice(TaskStatus[str]):
    """Reports the address of the server once it accepts connections."""

    terminal: Terminal
    name: str

    def started(self, value: str | None = None) -> None:
        """Write the address to stderr."""
        self.terminal.err(f"serving {self.name!r} at {value}; stop with Ctrl-C")


async def _serve_stdio(service: MCPService, close: Callable[[], Awaitable[None]]) -> None:
    async with anyio.create_task_group() as tasks:
        if os.name == "posix":
            tasks.start_soon(_exit_on_signal, service, close)
        await service.stdio()
        tasks.cancel_scope.cancel()


async def _exit_on_signal(service: MCPService, close: Callable[[], Awaitable[None]]) -> None:
    """Drain, release the runs and exit when a signal arrives; at a second one, cut off the calls in flight.

    A thread that reads standard input cannot be stopped, so the process exits.
    """
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        await anext(signals)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_drain_and_exit, service, close)
            await anext(signals)
            service.end_drain()
            with anyio.move_on_after(CLOSE_TIMEOUT_S):
                await service.release_runs()
                await close()
            os._exit(ExitCode.DONE)


async def _drain_and_exit(service: MCPService, close: Callable[[], Awaitable[None]]) -> None:
    with anyio.move_on_after(service.drain_s + CLOSE_TIMEOUT_S):
        await service.drain()
        await close()
    os._exit(ExitCode.DONE)
