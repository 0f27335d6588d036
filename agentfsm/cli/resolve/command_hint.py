"""Build the command lines that are shown to users to continue with a run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.cli.resolve.store_location import STORE_VARIABLE, is_url
from agentfsm.core.machine import State
from agentfsm.core.value import Value
from agentfsm.stores.home import DEFAULT_STORE
from agentfsm.stores.loading import mask_password

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run

# Stands in a command line for the target of an agent that the run does not name.
UNKNOWN_AGENT: Final = "MODULE:NAME"


@attrs.frozen(kw_only=True)
class CommandHint(Value):
    """Store and agent of a run, as options of the command lines that are shown to users."""

    location: str | None
    """Path or URL of the store; None if only the agent can open it."""

    agent: str = ""
    """Value of `--agent`, quoted for a shell. Empty if the run and its store name the agent, so that the option is not
    needed; UNKNOWN_AGENT if only the user can name it.
    """

    @property
    def note(self) -> str:
        """Explanation of UNKNOWN_AGENT for the user; empty if the command lines are complete."""
        if self.agent != UNKNOWN_AGENT:
            return ""
        return (
            f"For {UNKNOWN_AGENT}, give the agent of the run, for example app:agent: the run was started from Python "
            "and does not name it. Runs of an Agent with target='app:agent' need no --agent."
        )

    def build(self, command: str) -> str:
        """Return a command line that names the store, without its password.

        Args:
            command: Subcommand with its arguments, for example "resume 17".
        """
        return f"{find_program()} {command}{_store_option(self.location)}"

    def build_with_agent(self, command: str) -> str:
        """Return a command line that names the store and the agent."""
        return self.build(command) + (f" --agent {self.agent}" if self.agent else "")

    def build_resume(self, run_id: str) -> str:
        """Return the command line that resumes a run."""
        return self.build_with_agent(f"resume {shlex.quote(run_id)}")

    def build_fork(self, run: Run) -> str | None:
        """Return the command line that forks a run in ERROR; None for any other run, and for the run of a sub-agent."""
        can_fork = run.state is State.ERROR and run.header.parent is None
        return self.build_with_agent(f"fork {shlex.quote(run.id)}") if can_fork else None


def build_header_hint(header: Header, location: str) -> CommandHint:
    """Return the hint for a run whose agent is not loaded.

    Args:
        header: Header of the run that is resumed: for the run of a sub-agent, that of its root.
        location: Path or URL of the store.
    """
    return CommandHint(location=location, agent="" if header.target else UNKNOWN_AGENT)


def _store_option(location: str | None) -> str:
    if location is None or (is_url(location) and location == os.environ.get(STORE_VARIABLE)):
        return ""  # the variable contains the URL with its password
    if (
        not os.environ.get(STORE_VARIABLE)
        and not is_url(location)
        and Path(location).absolute() == Path(DEFAULT_STORE).absolute()
    ):
        return ""
    return f" --store {shlex.quote(mask_password(location))}"


@cache
def find_program() -> str:
    """Return how to call this program: its name if it is on the PATH, else its path."""
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
