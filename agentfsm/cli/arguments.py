"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final

from agentfsm.agents.agent import DRAIN_S
from agentfsm.cli.argument_types import DEFAULT_ADDRESS, parse_address, parse_pair, parse_seconds_or_zero, split_address
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.command_table import COMMANDS
from agentfsm.cli.resolve.store_location import STORE_VARIABLE
from agentfsm.cli.terminal import Terminal
from agentfsm.stores.home import DEFAULT_STORE, HOME_FOLDER

AddParser = Callable[..., argparse.ArgumentParser]
# Carries out a command with its arguments.
Act = Callable[[argparse.Namespace, Terminal], ExitCode]

AUTHOR_HELP: Final = "its author (default: you)"
EVIDENCE_HELP: Final = "folder of recorded results (default: %(default)s)"
# Name in the records of deletions from a memory.
MEMORY_BY: Final = "agentfsm memory"
# Forms of a message of alerts. Their module is not imported for the options; a test compares them.
MESSAGE_FORMS: Final = ("json", "slack")
DEFAULT_MEMORY: Final = f"{HOME_FOLDER}/memory.db"


def add_group(add: AddParser, name: str) -> AddParser:
    """Add a command that has commands of its own, and return what adds these."""
    line = COMMANDS[name].line
    group = add(name, help=line, description=_describe(line))
    return group.add_subparsers(required=True, metavar="COMMAND").add_parser


def add_command(
    add: AddParser, act: Act, *, text: str = "", name: str = "", has_store: bool = True
) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        add: Adds a parser to those of the commands, or of a group.
        act: Carries it out.
        text: Line of help of a command in a group. Others have theirs in the table of the commands.
        name: Name of the command; by default that of the function.
        has_store: Whether it takes `--store`.
    """
    name = name or act.__name__
    text = text or COMMANDS[name].line
    added = add(name, help=text, description=_describe(text))
    added.set_defaults(act=act, usage=added.format_usage)
    added.add_argument("--json", action="store_true", help="write one JSON document to stdout")
    if has_store:
        added.add_argument(
            "--store",
            metavar="PATH|URL",
            help=f"store of the runs: a file, postgresql://... or redis://... (default: ${STORE_VARIABLE}, else "
            f"{DEFAULT_STORE}); pass a URL with a password in the variable",
        )
    return added


def _describe(line: str) -> str:
    return f"{line[0].upper()}{line[1:]}."


def add_identity(takes: argparse.ArgumentParser) -> None:
    """Add the options of whom the runs work for: tools have their permissions by it, and roll-outs their targets."""
    takes.add_argument("--user", metavar="NAME", help="user on whose behalf the runs work")
    takes.add_argument("--tenant", metavar="NAME", help="tenant that the user belongs to")
    takes.add_argument(
        "--role", metavar="NAME", action="append", default=[], help="role of the user; may be given several times"
    )


def add_metadata(takes: argparse.ArgumentParser, what: str) -> None:
    """Add the option of the metadata that are stored with a run; `what` names the runs."""
    takes.add_argument(
        "--metadata",
        metavar="KEY=VALUE",
        type=parse_pair,
        action="append",
        default=[],
        help=f"stored with {what}; may be given several times",
    )


def add_purpose(takes: argparse.ArgumentParser) -> None:
    """Add the option of the purpose of runs."""
    takes.add_argument(
        "--purpose", metavar="WORD", default="", help="runs of this purpose, such as eval (default: production)"
    )


def add_run_id(takes: argparse.ArgumentParser) -> None:
    """Add the id of a run."""
    takes.add_argument("id", metavar="RUN", help="id of the run")


def add_agent(takes: argparse.ArgumentParser) -> None:
    """Add the agent, which the command needs."""
    takes.add_argument("agent", metavar="module:agent", help="an Agent, or a function that returns one")
    add_mcp_option(takes, "add the MCP servers of this file to its tools; may be given several times")


def add_agent_option(takes: argparse.ArgumentParser) -> None:
    """Add the option of the agent, which most runs name."""
    takes.add_argument(
        "--agent",
        metavar="module:agent",
        help="use this agent instead of the one that the run names; required for a run that was started from Python, "
        "unless its Agent has target='module:agent'",
    )
    add_mcp_option(takes, "use the MCP servers of this file instead of those that the run was started with")


def add_mcp_option(takes: argparse.ArgumentParser, text: str) -> None:
    """Add the option of files of MCP servers."""
    takes.add_argument("--mcp", metavar="FILE", action="append", default=[], help=text)


def add_drain(command: argparse.ArgumentParser) -> None:
    """Add the option of the time to end after the first signal."""
    command.add_argument(
        "--drain",
        metavar="SECONDS",
        type=parse_seconds_or_zero,
        default=DRAIN_S,
        help="time for model requests and calls in flight to end after the first signal (default: %(default)g)",
    )


def add_address(takes: argparse.ArgumentParser, default: str | None, *, instead: str = "") -> None:
    """Add the options of the address of a server.

    Args:
        takes: The command.
        default: The address; None if the command serves over HTTP only where one of the options is given.
        instead: What the command does without them.
    """
    usual = default or DEFAULT_ADDRESS
    text = f"serve over HTTP at this address (default: {usual}) instead of {instead}" if instead else ""
    may_be_usual: dict[str, Any] = {"nargs": "?", "const": usual} if instead else {}
    takes.add_argument(
        "--http",
        metavar="HOST:PORT",
        type=parse_address,
        default=default,
        help=text or "the address (default: %(default)s)",
        **may_be_usual,
    )
    for part in ("host", "port"):
        takes.add_argument(
            f"--{part}", metavar=part.upper(), action=_AddressPart, const=usual, help=f"the {part} of the address alone"
        )


class _AddressPart(argparse.Action):
    """Replaces the host, or the port, of `--http`."""

    def __call__(
        self, _parser: argparse.ArgumentParser, args: argparse.Namespace, value: Any, _option: Any = None
    ) -> None:
        host, port = split_address(args.http or self.const)
        try:
            args.http = parse_address(f"{value}:{port}" if self.dest == "host" else f"{host}:{value}")
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def add_deltas(takes: argparse.ArgumentParser) -> None:
    """Add the option of the Redis through which text reaches other servers."""
    takes.add_argument(
        "--deltas",
        metavar="URL",
        help="a Redis through which the text that models write reaches the event streams of all servers",
    )


def add_notifier(takes: argparse.ArgumentParser, option: str) -> None:
    """Add the options of messages about alerts."""
    text = "URL to which alerts are posted as they begin and end"
    takes.add_argument(option, metavar="URL", help=text)
    takes.add_argument(
        "--alerts-form",
        choices=MESSAGE_FORMS,
        default="json",
        help="body of a message: json, or slack for receivers that take a text only (default: %(default)s)",
    )
    takes.add_argument("--alerts-private", action="store_true", help="the URL may be in a private network")


def add_memory_options(*commands: argparse.ArgumentParser) -> None:
    """Add the options of a memory, and of the owner of its items."""
    for each in commands:
        each.add_argument(
            "--memory",
            metavar="PATH|URL",
            default=DEFAULT_MEMORY,
            help="file of the memory, or postgresql://... (default: %(default)s)",
        )
        each.add_argument("--user", default="", help="owner of the items (default: items that all users share)")
        each.add_argument("--tenant", default="", help="tenant of the user (default: none)")
