"""Command lines, to be shown, that get back to a run and find its store."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

import attrs

from agentfsm.cli.resolve.store_location import DEFAULT_STORE, STORE_VARIABLE, is_url
from agentfsm.core.machine import State
from agentfsm.core.run import Run
from agentfsm.core.value import Value
from agentfsm.stores.loading import mask_password


@attrs.frozen(kw_only=True)
class CommandHint(Value):
    """Builds the command lines that are shown to users, so that they find a run again."""

    location: str | None
    """Path or URL of the store; None where only the agent knows how to open it."""

    agent: str = ""
    """The words that name the agent, as a shell takes them, where the store or the run does not say which it is of."""

    def build(self, command: str) -> str:
        """Return a command line that finds the store. A password is never in it.

        Args:
            command: The subcommand with its arguments, for example "resume 17".
        """
        return f"{find_program()} {command}{_store_option(self.location)}"

    def build_with_agent(self, command: str) -> str:
        """Return a command line that finds the store and the agent."""
        return self.build(command) + (f" --agent {self.agent}" if self.agent else "")

    def build_resume(self, run_id: str) -> str:
        """Return the command line that goes on with a run."""
        return self.build_with_agent(f"resume {shlex.quote(run_id)}")

    def build_fork(self, run: Run) -> str | None:
        """Return the command line that tries a run again which stopped; None where that is not to be done."""
        is_own = run.state is State.ERROR and run.header.parent is None
        return self.build_with_agent(f"fork {shlex.quote(run.id)}") if is_own else None


def _store_option(location: str | None) -> str:
    if location is None or (is_url(location) and location == os.environ.get(STORE_VARIABLE)):
        return ""  # a URL that the environment knows is found there again, with its password
    if (
        not os.environ.get(STORE_VARIABLE)
        and not is_url(location)
        and Path(location).absolute() == Path(DEFAULT_STORE).absolute()
    ):
        return ""
    return f" --store {shlex.quote(mask_password(location))}"


@cache
def find_program() -> str:
    """Return how this program can be called again: by its name only where the shell finds it."""
    script = Path(sys.argv[0])
    if shutil.which("agentfsm") is None:
        if script.name == "agentfsm":
            return _relative_path(script)
        if script.parts[-2:] == ("agentfsm", "__main__.py"):
            return f"{_relative_path(Path(sys.executable))} -m agentfsm"
    return "agentfsm"


def _relative_path(path: Path) -> str:
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
