"""The command line.

`command_table.py` lists the commands, in the groups of `agentfsm --help`. Each declares its arguments in its module in
`commands/`, which alone is imported when it is called.

Results go to stdout, all else to stderr. Exit codes: 0 done, 1 failed, 2 usage, 3 waiting for a person or for
input, 4 a limit was reached, 5 an evaluation cannot decide, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from agentfsm.cli import codes
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.parser import build_parser, spell_options
from agentfsm.cli.render.formatting import NOTE_CHARS
from agentfsm.cli.terminal import Terminal, make_streams_tolerant
from agentfsm.core.errors import AgentError
from agentfsm.core.text_safety import one_line
from agentfsm.tools.queue.result_text import describe_error

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program name; by default those of the process.

    Returns:
        The exit code. `--help` and `--version` raise SystemExit(0) instead.
    """
    make_streams_tolerant()
    words = sys.argv[1:] if argv is None else argv
    terminal = Terminal(json="--json" in words)  # parsing errors are reported as JSON, too
    with _WarningHandler(terminal) as warnings:
        try:
            named = [word for word in words if not word.startswith("-")][
                :1
            ]  # only the module of this command is imported
            args = build_parser(*named).parse_args(words)
            terminal.json, warnings.usage = args.json, args.usage()
            return int(args.act(args, terminal))
        except AgentError as error:
            if error.args == (str(error),):
                error.args = (spell_options(str(error), warnings.usage),)
            terminal.err(f"agentfsm: {error}")
            for note in getattr(error, "__notes__", ()):
                terminal.err(note)
            _report_failure(terminal, error)
            return int(codes.for_error(error))
        except KeyboardInterrupt:
            terminal.err("interrupted")
            return int(ExitCode.INTERRUPTED)
        except Exception as error:  # noqa: BLE001  a bug, so the whole traceback is shown
            terminal.err(traceback.format_exc())
            return int(_report_failure(terminal, error))


def _report_failure(terminal: Terminal, error: Exception) -> ExitCode:
    if terminal.json:
        terminal.document({"error": {"type": type(error).__name__, "message": describe_error(error)}})
    return ExitCode.FAILED


class _WarningHandler(logging.Handler):
    """Writes the library's warnings to stderr while the block runs."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(logging.WARNING)
        self._terminal = terminal
        self._logger = logging.getLogger("agentfsm")
        self.usage = ""
        """Usage of the command, whose options the warnings name."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("event=run_ended "):  # the report of the run contains it
            return
        facts = getattr(record, "facts", {})
        if facts.get("event") == "model_retry":
            # The advice is shown with the first attempt of a turn: the person at the terminal may act before the last.
            why = facts["why"] if facts["attempt"] == 1 else facts["why"].partition(". ")[0]
            self._terminal.err(f"warning: {why.removesuffix('.')}. Retrying in {facts['wait_s']:.1f} s.")
            return
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text = f"{text}: {one_line(describe_error(error), NOTE_CHARS)}"
            if frames := traceback.extract_tb(error.__traceback__):
                text = f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
        self._terminal.err(f"{record.levelname.lower()}: {spell_options(text, self.usage)}")

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_error: object) -> None:
        self._logger.removeHandler(self)
