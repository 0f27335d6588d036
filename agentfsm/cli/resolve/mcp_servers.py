"""Add the MCP servers of files to an agent's tools (`--mcp FILE`), and ask a person to approve them.

The servers are connected before the agent is used. So the person is asked before the run starts, and a server that
fails to start does not fail a run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
from anyio.lowlevel import checkpoint

from agentfsm.cli.resolve.command_hint import find_program
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.text_safety import one_line

if TYPE_CHECKING:
    from types import ModuleType

    from agentfsm.agents.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.mcp import MCPServer
    from agentfsm.mcp.trust.config_variables import InputField
    from agentfsm.mcp.trust.consent import Proposal

APPROVAL_QUESTION: Final = "Do you approve this? [y/n]"
DETAILS_QUESTION: Final = "Do you approve this? [y/n, d: details]"
# Characters of a text of the file in a question.
_SHOWN_CHARS: Final = 200
_ANSWERS: Final = {"y": "y", "yes": "y", "n": "n", "no": "n"}


def load_mcp() -> ModuleType:
    """Import `agentfsm.mcp` on first use: loading it takes a second.

    Raises:
        MisuseError: if the extra "mcp" is not installed.
    """
    return import_module("agentfsm.mcp")


@attrs.define(eq=False, repr=False, kw_only=True)
class TerminalConsent:
    """Consent callback: shows proposals of MCP servers at the terminal, and returns the person's decisions."""

    terminal: Terminal
    approves_all: bool = False
    """Whether all proposals are approved without a question (`--yes`)."""

    shows_all: bool = False
    """Whether proposals are shown even without a terminal."""

    shows_details: bool = False
    """Whether the full texts are shown at once, not only on demand."""

    is_open: bool = attrs.field(default=True, init=False)
    """Whether questions are allowed. False while a run is executed; proposals are refused then."""

    asked_count: int = attrs.field(default=0, init=False)
    """Number of proposals that needed a decision."""

    unasked: list[str] = attrs.field(factory=list, init=False)
    """Names of servers whose proposals were refused because there was no terminal."""

    async def __call__(self, proposal: Proposal) -> bool:
        """Ask about one proposal, and return whether it is approved. No answer is a refusal."""
        if not self.is_open:
            return False
        self.asked_count += 1
        can_decide = self.approves_all or self.terminal.can_ask
        if can_decide or self.shows_all:
            self.terminal.err(f"\n{(self.shows_details and proposal.details) or proposal.shown}\n")
        if not can_decide:
            self.unasked.append(proposal.server)
            return False
        if self.approves_all:
            return True
        answer = self._ask(proposal)
        await checkpoint()  # raises if the answer was Ctrl-C
        return answer == "y"

    def _ask(self, proposal: Proposal) -> str | None:
        if self.shows_details or not proposal.details:
            return self.terminal.ask_choice(APPROVAL_QUESTION, _ANSWERS)
        while (answer := self.terminal.ask_choice(DETAILS_QUESTION, _ANSWERS | {"d": "d", "details": "d"})) == "d":
            self.terminal.err(f"\n{proposal.details}\n")
        return answer


def load_servers(file: str, terminal: Terminal, consent: TerminalConsent | None = None) -> tuple[MCPServer, ...]:
    """Return the servers of a file, without starting them. Entries that cannot be used are reported and left out.

    Args:
        file: Path of the file.
        terminal: Asks for inputs of the file, and gets the reports.
        consent: Callback that approves proposals of servers; None to refuse all of them.

    Raises:
        MisuseError: if the file cannot be read, or none of its servers can be used.
    """
    mcp: Any = load_mcp()
    try:
        return tuple(
            mcp.MCPServer.load(
                file,
                pins=mcp.PinFile(),
                consent=consent,
                ask=partial(_ask_input, terminal) if terminal.can_ask else None,
                on_refused=lambda refused: terminal.err(f"left out: {refused.why}"),
            )
        )
    except AgentError as error:
        raise MisuseError(str(error)) from None


def _ask_input(terminal: Terminal, field: InputField) -> str | None:
    """Ask for the value of an input of a configuration file. An empty answer is its default."""
    described = f" ({one_line(field.description, _SHOWN_CHARS)})" if field.description else ""
    choices = f" [{', '.join(field.choices)}]" if field.choices else ""
    question = f"Value of {one_line(field.id, _SHOWN_CHARS)}{described}{choices}, or {field.variable}:"
    return (terminal.ask_secret if field.is_secret else terminal.ask)(question) or None


def join_servers(agent: Agent, files: Sequence[str], terminal: Terminal) -> Agent:
    """Return the agent with the servers of files among its tools, connected and approved.

    Raises:
        MisuseError: if a file is invalid, or a server needs approval and there is no terminal.
        MCPServerError: if a server cannot be used.
    """
    if not files:
        return agent
    asking = TerminalConsent(terminal=terminal)
    tools = agent.tools.filter()
    for source in (
        *agent.tools.sources,
        *(server for file in files for server in load_servers(file, terminal, asking)),
    ):
        tools.attach(source)
    extended = agent.with_(tools=tools)
    try:
        anyio.run(tools.refresh)
        _check_all_asked(asking, files)
    except BaseException as error:
        anyio.run(extended.aclose)
        if isinstance(error, AgentError):
            _check_all_asked(asking, files)  # the likely cause, with a better message
        raise
    asking.is_open = False
    return extended


def _check_all_asked(consent: TerminalConsent, files: Iterable[str]) -> None:
    """Raise MisuseError if a proposal needed a person and there was no terminal."""
    if not consent.unasked:
        return
    names = " and ".join(repr(name) for name in dict.fromkeys(consent.unasked))
    commands = " or ".join(format_approve_command(file) for file in files)
    raise MisuseError(
        f"the MCP server {names} is not approved, and there is no terminal to ask at: review it with {commands}",
    )


def format_approve_command(file: str) -> str:
    """Return the command line that shows the servers of a file and asks for approval."""
    return f"{find_program()} mcp approve {shlex.quote(file)}"


def select_servers(servers: Sequence[MCPServer], file: str, name: str | None) -> Sequence[MCPServer]:
    """Return the server of a file with a name, or all of them.

    Raises:
        MisuseError: if the file has no such server.
    """
    found = [server for server in servers if name in (None, server.name)]
    if not found:
        names = ", ".join(server.name for server in servers) or "none"
        raise MisuseError(f"{file} has no server {name!r}; its servers: {names}")
    return found
