"""The command line: `agentfsm demo | run | resume | runs | show | approve | reject | settle | cancel | graph | doctor`.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 usage, 3 waiting for a person, 4 a
limit was reached, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from collections.abc import Callable, Sequence

from agentfsm.cli import codes, commands
from agentfsm.cli.codes import Exit
from agentfsm.cli.place import DEFAULT, VARIABLE
from agentfsm.cli.terminal import Terminal, tolerate
from agentfsm.core.errors import AgentError
from agentfsm.engine.arguments import check_object
from agentfsm.engine.render import describe

__all__ = ["main"]

AddParser = Callable[..., argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: Its words, without the program's name; by default those of the process.

    Returns:
        The exit code. A usage error that argparse finds raises SystemExit(2) instead.
    """
    args = _parser().parse_args(argv)
    tolerate(sys.stdout, sys.stderr)
    terminal = Terminal(json=args.json)
    with _Log(terminal):
        try:
            return int(args.act(args, terminal))
        except AgentError as error:
            return int(_refused(terminal, error))
        except KeyboardInterrupt:
            terminal.err("interrupted")
            return int(Exit.INTERRUPTED)
        except Exception as error:  # noqa: BLE001  a fault in the user's code or in ours: told whole, but cleaned
            terminal.err(traceback.format_exc())
            return int(_failed(terminal, error))


def _refused(terminal: Terminal, error: AgentError) -> Exit:
    terminal.err(f"agentfsm: {error}")
    for note in getattr(error, "__notes__", ()):
        terminal.err(note)
    _failed(terminal, error)
    return codes.of_error(error)


def _failed(terminal: Terminal, error: Exception) -> Exit:
    if terminal.json:
        terminal.document({"error": {"type": type(error).__name__, "message": describe(error)}})
    return Exit.FAILED


class _Log(logging.Handler):
    """Writes the library's warnings to stderr while the block runs."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(logging.WARNING)
        self._terminal = terminal
        self._logger = logging.getLogger("agentfsm")

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith("event=run_failed "):  # the report says it, in words
            self._terminal.err(f"{record.levelname.lower()}: {text}")

    def __enter__(self) -> None:
        self._logger.addHandler(self)

    def __exit__(self, *_error: object) -> None:
        self._logger.removeHandler(self)


# The words that it takes.


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentfsm",
        description="Run agents whose every step is kept, and look at what they did.",
        epilog="exit codes: 0 done, 1 failed, 2 usage, 3 waiting for a person, 4 a limit was reached, 130 interrupted",
    )
    add = parser.add_subparsers(required=True, metavar="COMMAND").add_parser
    _add_driving(add)
    _add_looking(add)
    _add_deciding(add)
    return parser


def _add(add: AddParser, act: commands.Command, *, text: str) -> argparse.ArgumentParser:
    parser = add(act.__name__, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(act=act)
    parser.add_argument("--json", action="store_true", help="write one JSON document to stdout")
    parser.add_argument("--store", metavar="PATH", help=f"where runs are kept (${VARIABLE}, else {DEFAULT})")
    return parser


def _add_driving(add: AddParser) -> None:
    demo = _add(add, commands.demo, text="let an agent survey a folder and write a report; no key is needed")
    demo.add_argument("folder", nargs="?", default=".", help="the folder (default: the current one)")
    run = _add(add, commands.run, text="run an agent to the end, or until it waits for a person")
    run.add_argument("agent", metavar="module:agent", help="an Agent, or a function that returns one")
    run.add_argument("prompt", help="what it shall do")
    run.add_argument("--id", help="the run's id (the same id and prompt again means resume)")
    run.add_argument("--session", help="go on with this conversation")
    run.add_argument("--metadata", metavar="KEY=VALUE", type=_pair, action="append", default=[], help="kept with it")
    resume = _add(add, commands.resume, text="go on with a run, from where its journal ends")
    resume.add_argument("id", help="the run's id")
    resume.add_argument("--agent", metavar="module:agent", help="of a run that was not started from here")


def _add_looking(add: AddParser) -> None:
    runs = _add(add, commands.runs, text="list the newest runs")
    runs.add_argument("--session", help="only of this conversation")
    runs.add_argument("--limit", type=_count, default=20, help="how many at most (default: %(default)s)")
    show = _add(add, commands.show, text="show a run: its turns, calls and outcomes")
    show.add_argument("id", help="the run's id")
    show.add_argument("--at", metavar="VERSION", type=int, help="as it was then")
    show.add_argument("--events", action="store_true", help="list its journal too")
    graph = _add(add, commands.graph, text="draw the machine from its table")
    graph.add_argument("--format", choices=["mermaid", "dot", "text"], default="mermaid", help="default: %(default)s")
    doctor = _add(add, commands.doctor, text="look at the installation, and at an agent's tools")
    doctor.add_argument("agent", metavar="module:agent", nargs="?", help="the agent whose tools to look over")


def _add_deciding(add: AddParser) -> None:
    approve = _add(add, commands.approve, text="let a call run that waits for a yes")
    reject = _add(add, commands.reject, text="do not let a call run that waits for a yes")
    settle = _add(add, commands.settle, text="say what became of a call whose worker died")
    for parser in (approve, reject, settle):
        parser.add_argument("id", help="the run's id")
        parser.add_argument("call", help="the call's id, for example t3.0")
    approve.add_argument(
        "--arguments", metavar="JSON", type=_object, help="run it with these, not with the model's own"
    )
    reject.add_argument("--message", default="", help="why not, for the model")
    what = settle.add_mutually_exclusive_group(required=True)
    what.add_argument("--result", metavar="TEXT", help="it was done, and returned this")
    what.add_argument("--failed", metavar="TEXT", help="it failed like this")
    what.add_argument("--rerun", action="store_true", help="run it again, under the same key")
    cancel = _add(add, commands.cancel, text="end a run")
    cancel.add_argument("id", help="the run's id")
    cancel.add_argument("--message", default="", help="why, for the record")
    for parser in (approve, reject, settle, cancel):
        parser.add_argument("--by", metavar="NAME", help="who says so (default: the user's name)")


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, value


def _object(text: str) -> str:
    if (flaw := check_object(text)) is not None:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object ({flaw}): write for example '{{\"cents\": 500}}'")
    return text


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)
