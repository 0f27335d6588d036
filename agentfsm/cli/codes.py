"""What the command's exit code says."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from agentfsm.core.errors import MisuseError, RunNotFoundError
from agentfsm.core.limits import BUDGET_REASONS
from agentfsm.core.machine import State

if TYPE_CHECKING:
    from agentfsm.core.errors import AgentError
    from agentfsm.core.run import Run


class ExitCode(IntEnum):
    """The exit codes."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    WAITING = 3
    """For a person, or for input."""

    LIMIT = 4
    """A limit was reached; a larger one would have prevented it."""

    INTERRUPTED = 130
    """What shells say of a command that Ctrl-C ended."""


def for_run(run: Run) -> ExitCode:
    """Return the code for a run that a driving call has given back."""
    if run.state is State.DONE:
        return ExitCode.DONE
    if run.is_waiting:
        return ExitCode.WAITING
    return ExitCode.LIMIT if run.stop_reason in BUDGET_REASONS else ExitCode.FAILED


def for_error(error: AgentError) -> ExitCode:
    """Return the code for an error: whose fault it is."""
    return ExitCode.USAGE if isinstance(error, MisuseError | RunNotFoundError) else ExitCode.FAILED
