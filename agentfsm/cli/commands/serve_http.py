"""`agentfsm serve`: serve agents over HTTP, and execute their runs."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.commands.mcp_serve import StartNotice, split_address
from agentfsm.cli.resolve.agent_target import load_agent
from agentfsm.cli.resolve.run_lookup import attach_store
from agentfsm.cli.session.prompts import user_name
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import stdout_to_stderr
from agentfsm.core.errors import MisuseError

if TYPE_CHECKING:
    from agentfsm.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.serve import GatewayApp


def serve(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Serve until a signal arrives."""
    agents = _load_agents(args)
    app = _build_app(args, agents)
    with InterruptibleRunner() as runner:
        try:
            with stdout_to_stderr():  # stdout is reserved for results
                runner.run(_serve_app, app, args, StartNotice(terminal, ", ".join(each.name for each in agents)))
        except KeyboardInterrupt:
            terminal.err("stopped: the next server continues the open runs")
        finally:
            for each in agents:
                runner.run(each.aclose)
    return ExitCode.DONE


def _load_agents(args: argparse.Namespace) -> list[Agent]:
    """Return the agents, with one store."""
    first, *others = args.agents
    agent, _ = attach_store(load_agent(first), first, args.store)
    return [agent, *(load_agent(each).with_(store=agent.store, target=each) for each in others)]


def _build_app(args: argparse.Namespace, agents: list[Agent]) -> GatewayApp:
    """Build the app.

    Raises:
        MisuseError: if other machines could connect without a key, or the extra "serve" is not installed.
    """
    gateway: Any = import_module("agentfsm.serve")  # loading it takes a second
    guard: Any = import_module("agentfsm.web.http_guard")
    host, _ = split_address(args.http)
    if args.keys is not None:
        auth = gateway.APIKeys(args.keys)
    elif guard.is_loopback(host.strip("[]")):
        local = gateway.Caller(user=user_name(), scopes={"admin"})
        auth = lambda _request: local  # noqa: E731  one expression
    else:
        raise MisuseError(
            f"{host!r} can be reached from other machines, so clients need keys: create one with `agentfsm keys add "
            "keys.json USER`, and give --keys keys.json; or listen on 127.0.0.1"
        )
    app: GatewayApp = gateway.serve(agents, auth=auth, parallel=0 if args.no_worker else args.parallel)
    return app


async def _serve_app(app: GatewayApp, args: argparse.Namespace, notice: StartNotice) -> None:
    guard: Any = import_module("agentfsm.web.http_guard")
    server: Any = import_module("agentfsm.web.http_server")
    host, port = split_address(args.http)
    host = host.strip("[]")
    guarded = guard.HTTPGuard(app, guard.build_allowed_hosts(host, args.allow_host), None)
    with server.bind_socket(host, int(port)) as bound:
        await server.serve(guarded, bound, server.format_url(host, bound), notice, app.close_streams)
