"""Exit codes of the command line."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from agentfsm.core.errors import LimitError, MisuseError, RunNotFoundError
from agentfsm.core.limits import BUDGET_REASONS
from agentfsm.core.machine import State

if TYPE_CHECKING:
    from agentfsm.core.errors import AgentError
    from agentfsm.core.run import Run


class ExitCode(IntEnum):
    """Exit codes of the commands."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    WAITING = 3
    """The run waits for a person or for input."""

    LIMIT = 4
    """The run reached a limit; with a larger limit it would have continued."""

    UNDECIDED = 5
    """A gate of evaluations cannot decide: it needs more cases."""

    INTERRUPTED = 130
    """The command was interrupted. Shells report the same code for a process that Ctrl-C ended."""


def for_run(run: Run) -> ExitCode:
    """Return the exit code for a run after its execution."""
    if run.state is State.DONE:
        return ExitCode.DONE
    if run.is_waiting:
        return ExitCode.WAITING
    return ExitCode.LIMIT if run.stop_reason in BUDGET_REASONS else ExitCode.FAILED


def for_error(error: AgentError) -> ExitCode:
    """Return the exit code for an error: USAGE if the arguments are at fault, LIMIT at a limit, else FAILED."""
    if isinstance(error, LimitError):
        return ExitCode.LIMIT
    return ExitCode.USAGE if isinstance(error, MisuseError | RunNotFoundError) else ExitCode.FAILED
