"""`agentfsm mcp serve`: an agent, or a registry of tools, for MCP clients."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
from anyio.abc import TaskStatus

from agentfsm.agent import Agent
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.resolve.agent_target import load_target
from agentfsm.cli.resolve.mcp_servers import load_mcp
from agentfsm.cli.resolve.run_lookup import attach_store
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import stdout_to_stderr
from agentfsm.core.errors import MisuseError
from agentfsm.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.mcp.server.service import MCPService

# Where --http listens unless it is told: only programs of this machine reach it.
DEFAULT_ADDRESS: Final = "127.0.0.1:8000"
# Seconds that a signal leaves for closing the store; runs are given back before.
CLOSE_TIMEOUT_S: Final = 5.0
MAX_PORT: Final = 65_535


def parse_address(text: str) -> str:
    """Check that a text is an address: HOST:PORT, or a port of this machine."""
    host, port = _split_address(text)
    if not host or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT: write for example {DEFAULT_ADDRESS} or [::1]:8000")
    return text


def _split_address(text: str) -> tuple[str, str]:
    host, colon, port = text.rpartition(":")
    return (host, port) if colon else ("127.0.0.1", text)


def serve(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Serve until the client goes, or a signal comes."""
    if args.http is None and (args.token_env is not None or args.allow_host):
        raise MisuseError("--token-env and --allow-host are about HTTP: add --http")
    service, close = _build_service(args)
    with InterruptibleRunner() as ending:
        try:
            if args.http is None:
                terminal.err(
                    f"serving {service.name!r} on standard input and output; its client ends it by closing them"
                )
                ending.run(_serve_stdio, service, close)
            else:
                with stdout_to_stderr():  # what tools print is no result
                    ending.run(_serve_http, service, terminal, args)
        except KeyboardInterrupt:
            terminal.err("ended: runs under way are kept, and the next server goes on with them")
        finally:
            ending.run(close)
    return ExitCode.DONE


def _build_service(args: argparse.Namespace) -> tuple[MCPService, Callable[[], Awaitable[None]]]:
    """Return the server of what the words name, and what closes that.

    Raises:
        MisuseError: when it can be no server, or the library for that is not there.
    """
    kind: type[MCPService] = load_mcp().MCPService
    found: Any = load_target(args.target, Agent, ToolRegistry, kind)
    if isinstance(found, Agent):
        agent, _ = attach_store(found, args.target, args.store)
        return agent.as_mcp_server(prefix=args.prefix, tools=not args.no_tools), agent.aclose
    if args.prefix or args.no_tools:
        raise MisuseError(f"{args.target!r} is no Agent, and --prefix and --no-tools are about one: leave them out")
    if isinstance(found, ToolRegistry):
        return kind(found, name=args.target.rpartition(":")[0]), found.aclose
    return found, found.registry.aclose if found.runs is None else found.runs.agent.aclose


async def _serve_http(service: MCPService, terminal: Terminal, args: argparse.Namespace) -> None:
    host, port = _split_address(args.http)
    told = _StartNotice(terminal, service.name)
    await service.http(host.strip("[]"), int(port), token=_read_token(args), hosts=args.allow_host, task_status=told)


@attrs.frozen
class _StartNotice(TaskStatus[str]):
    """Says where the server is, once it is there."""

    terminal: Terminal
    name: str

    def started(self, value: str | None = None) -> None:
        """Say it."""
        self.terminal.err(f"serving {self.name!r} at {value}; Ctrl-C ends it in order")


def _read_token(args: argparse.Namespace) -> str | None:
    if args.token_env is None:
        return None
    token = os.environ.get(args.token_env)
    if not token:
        raise MisuseError(f"the variable {args.token_env} holds no token: set it, or leave out --token-env")
    return token


async def _serve_stdio(service: MCPService, close: Callable[[], Awaitable[None]]) -> None:
    async with anyio.create_task_group() as tasks:
        if os.name == "posix":
            tasks.start_soon(_exit_on_signal, service, close)
        await service.stdio()
        tasks.cancel_scope.cancel()


async def _exit_on_signal(service: MCPService, close: Callable[[], Awaitable[None]]) -> None:
    """End the process in order when it is told to: a thread that reads standard input can be ended in no other way."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _number in signals:
            with anyio.move_on_after(CLOSE_TIMEOUT_S):
                await service.release_runs()
                await close()
            os._exit(ExitCode.DONE)
