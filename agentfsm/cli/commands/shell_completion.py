"""The subcommand that prints the completion for a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from agentfsm._lib.plugins import require_extra
from agentfsm.cli.arguments import AddParser, add_command
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.command_table import COMMANDS
from agentfsm.cli.parser import build_parser

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal

# Metavars of arguments that are files or folders.
_PATHS: Final = ("FILE", "FOLDER", "PATH", "SUITE", "RESULT", "BEFORE", "AFTER", "LABELS")

# Shells, with the command that stores the script.
_SHELLS: Final = {
    "bash": "agentfsm completion bash > ~/.local/share/bash-completion/completions/agentfsm",
    "zsh": "agentfsm completion zsh > ~/.zfunc/_agentfsm, a folder of $fpath",
    "fish": "agentfsm completion fish > ~/.config/fish/completions/agentfsm.fish",
}


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    completion_options = add_command(add, completion, has_store=False)
    completion_options.add_argument("shell", choices=[*_SHELLS], help="the shell")
    completion_options.epilog = "; ".join(f"{shell}: {how}" for shell, how in _SHELLS.items())


def completion(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the completion for a shell."""
    with require_extra("the completion for shells", "cli", "shtab"):
        import shtab  # noqa: PLC0415  an extra
    parser = build_parser(*COMMANDS)
    for action in _iter_actions(parser):
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        if metavar.startswith(_PATHS):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # the attribute that shtab reads
    script = shtab.complete(parser, args.shell).rstrip()
    if terminal.json:
        terminal.document({"shell": args.shell, "script": script})
    else:
        terminal.out(script)
    return ExitCode.DONE


def _iter_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its subcommands, at any depth."""
    for action in parser._actions:  # noqa: SLF001  argparse has no public list of them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for below in action.choices.values():
                yield from _iter_actions(below)
        elif not action.choices:
            yield action
