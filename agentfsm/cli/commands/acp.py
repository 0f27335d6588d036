"""`agentfsm acp`: an agent in an editor that speaks the Agent Client Protocol."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentfsm._lib.plugins import require_extra
from agentfsm.cli.arguments import AddParser, add_agent, add_command, add_drain
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.resolve.run_lookup import resolve_agent_or_rollout
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import stdout_to_stderr, user_name
from agentfsm.releases import Rollout

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    editor = add_command(add, serve, name="acp")
    add_agent(editor)
    editor.add_argument("--user", metavar="NAME", help="user of the editor (default: that of the operating system)")
    add_drain(editor)


def serve(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Serve the editor at standard input and output, until it closes them or a signal arrives.

    Raises:
        MissingExtraError: if the extra "acp" is not installed.
        MisuseError: if there is no such agent.
    """
    with require_extra("agentfsm acp", "acp", "acp", "starlette", "uvicorn"):
        door: Any = import_module("agentfsm.serve.dialects.acp")
        gateway: Any = import_module("agentfsm.serve")
    found, _ = resolve_agent_or_rollout(args, terminal)
    agent = found.base if isinstance(found, Rollout) else found
    caller = gateway.Caller(user=args.user or user_name(), scopes={"run", "approve"})
    app = gateway.serve([found], auth=lambda _request: caller, drain_s=args.drain)
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    runner = InterruptibleRunner(drain_s=args.drain, end_drain=app.gateway.end_drain)
    with stdout_to_stderr(), runner:  # stdout is reserved for the protocol
        try:
            runner.run(door.serve_stdio, app.gateway, caller, output)
        except KeyboardInterrupt:
            terminal.err("stopped: `session/load` goes on with the open runs")
        finally:
            runner.run(agent.aclose)
    return ExitCode.DONE
