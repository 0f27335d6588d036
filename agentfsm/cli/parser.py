"""Build the argument parser: the commands of the table, whose modules declare their arguments."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any, Final, NoReturn

from agentfsm.cli.command_table import COMMANDS, GROUPS
from agentfsm.core.errors import MisuseError
from agentfsm.stores.loading import mask_password

_DESCRIPTION: Final = "Run agents that record every step in a journal, and inspect, resume and control their runs."
_EXIT_CODES: Final = (
    "exit codes: 0 done, 1 failed, 2 usage, 3 waiting for a person or for input, 4 a limit was reached, "
    "5 an evaluation cannot decide, 130 interrupted"
)


class _CommandParser(argparse.ArgumentParser):
    """A parser that reports errors in the format of the other commands, followed by the usage, without passwords."""

    def error(self, message: str) -> NoReturn:
        wrong = MisuseError(mask_password(message))
        wrong.add_note(self.format_usage().strip())
        raise wrong

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _suggest(str(value), map(str, action.choices or ()))
            raise


class _RootParser(_CommandParser):
    """The parser whose help lists all commands, in groups."""

    def format_help(self) -> str:
        listed = argparse.ArgumentParser(
            prog=self.prog, usage="%(prog)s COMMAND ...", description=_DESCRIPTION, epilog=_EXIT_CODES, add_help=False
        )
        for title, commands in GROUPS.items():
            group = listed.add_argument_group(title)
            for name, command in commands.items():
                group.add_argument(name, help=command.line)
        options = listed.add_argument_group("options")
        options.add_argument(
            "-h", "--help", action="help", help="show this help, or with a command that of the command"
        )
        options.add_argument("--version", action=_VersionAction, nargs=0, help="print the version")
        return listed.format_help()


def _suggest(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, [*known], 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# Arguments of the library whose option has another name.
_OPTION_NAMES: Final = {"origins": "allow-origin", "allow_private": "alerts-private"}
_ARGUMENT: Final = re.compile(r"(?<![\w.-])(?P<name>[a-z]+(?:_[a-z]+)*)=(?P<set>True\b)?(?=(?P<value>\S)?)")


def spell_options(text: str, usage: str) -> str:
    """Return an error of the library with the options of a command in place of the arguments `name=`.

    Arguments in a call, such as `Agent(name=...)`, are those of the user's code, and stay. So do fields of the log.

    Args:
        text: The error.
        usage: Usage of the command.
    """

    def spell(found: re.Match[str]) -> str:
        before, closed = text[: found.start()], 1
        while closed:  # remove the parentheses that are closed, the inner ones first
            before, closed = re.subn(r"\([^()]*\)", "", before)
        option = f"--{_OPTION_NAMES.get(found['name'], found['name'].replace('_', '-'))}"
        if re.search(r"\w\(", before) or re.search(rf"{option}(?![\w-])", usage) is None:
            return found[0]
        has_value = found["set"] is None and found["value"] is not None and found["value"] not in ",;:.)"
        return f"{option} " if has_value else option

    return text if text.startswith("event=") else _ARGUMENT.sub(spell, text)


class _VersionAction(argparse.Action):
    """Prints the version and exits. The package metadata is read only here, because reading it slows each start."""

    def __call__(self, parser: argparse.ArgumentParser, *_args: Any) -> NoReturn:
        from importlib.metadata import version  # noqa: PLC0415  few commands need it

        sys.stdout.write(f"{parser.prog} {version('agentfsm')}\n")
        parser.exit()


@cache
def build_parser(*commands: str) -> argparse.ArgumentParser:
    """Build the parser of the command line, once in a process.

    Args:
        *commands: The commands that it has. Their modules are imported.

    Raises:
        MisuseError: if there is no such command.
    """
    made = _RootParser(
        prog="agentfsm", usage="%(prog)s [-h] [--version] COMMAND ...", description=_DESCRIPTION, epilog=_EXIT_CODES
    )
    made.add_argument("--version", action=_VersionAction, nargs=0, help="print the version and exit")
    for name in commands:
        if name not in COMMANDS:
            made.error(f"there is no command {name!r}{_suggest(name, COMMANDS)}: `agentfsm --help` lists them")
    add = made.add_subparsers(required=True, metavar="COMMAND", prog=made.prog, parser_class=_CommandParser).add_parser
    for module in dict.fromkeys(COMMANDS[name].module for name in commands):
        import_module(f"agentfsm.cli.commands.{module}").add_commands(add)
    return made
