"""The subcommand that prints the completion for a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from agentfsm._lib.plugins import require_extra
from agentfsm.cli.codes import ExitCode

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal

# Metavars of arguments that are files or folders.
_PATHS: Final = ("FILE", "FOLDER", "PATH", "SUITE", "RESULT", "BEFORE", "AFTER", "LABELS")


def completion(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the completion for a shell."""
    with require_extra("the completion for shells", "cli", "shtab"):
        import shtab  # noqa: PLC0415  an extra
    parser = args.build_parser()
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
