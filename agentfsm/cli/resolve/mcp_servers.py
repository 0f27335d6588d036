"""The MCP servers of files among an agent's tools (`--mcp FILE`), and the person who is asked about them.

They are connected to before anything is done with the agent: whoever sits at the terminal is asked then, and not in
the middle of a run, and a server that does not start costs no run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
from anyio.lowlevel import checkpoint

from agentfsm.cli.resolve.command_hint import find_program
from agentfsm.core.errors import AgentError, MisuseError

if TYPE_CHECKING:
    from types import ModuleType

    from agentfsm.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.mcp import MCPServer
    from agentfsm.mcp.trust.consent import Proposal

APPROVAL_QUESTION: Final = "Is that what you want? [y/n]"
_ANSWERS: Final = {"y": "y", "yes": "y", "n": "n", "no": "n"}


def load_mcp() -> ModuleType:
    """Import `agentfsm.mcp` on first use: loading it takes a second.

    Raises:
        MisuseError: if the extra "mcp" is not installed.
    """
    return import_module("agentfsm.mcp")


@attrs.define(eq=False, repr=False, kw_only=True)
class TerminalConsent:
    """Shows proposals of MCP servers to the person at the terminal, and returns the decisions."""

    terminal: Terminal
    approves_all: bool = False
    """Whether all proposals are approved without asking, because the caller requested it."""

    shows_all: bool = False
    """Whether proposals are shown even if there is no person to ask."""

    is_open: bool = attrs.field(default=True, init=False)
    """Whether the person may be asked: not while a run is executed."""

    asked_count: int = attrs.field(default=0, init=False)
    """Number of proposals that should have been put to a person."""

    unasked: list[str] = attrs.field(factory=list, init=False)
    """Names of servers with a proposal for which there was no person to ask."""

    async def __call__(self, proposal: Proposal) -> bool:
        """Ask about one proposal; a missing answer is a refusal."""
        if not self.is_open:
            return False
        self.asked_count += 1
        is_there = self.approves_all or self.terminal.can_ask
        if is_there or self.shows_all:
            self.terminal.err(f"\n{proposal.shown}\n")
        if not is_there:
            self.unasked.append(proposal.server)
            return False
        if self.approves_all:
            return True
        answer = self.terminal.ask_choice(APPROVAL_QUESTION, _ANSWERS)
        await checkpoint()  # where Ctrl-C was the answer, this is the end
        return answer == "y"


def load_servers(file: str, consent: TerminalConsent | None) -> tuple[MCPServer, ...]:
    """Return the servers of a file; none is started yet.

    Args:
        file: Its path.
        consent: Asks a person to approve what a server wants; None to ask no one.

    Raises:
        MisuseError: when the file is not there, or does not say what servers there are.
    """
    mcp: Any = load_mcp()
    try:
        return tuple(mcp.MCPServer.load(file, pins=mcp.PinFile(), consent=consent))
    except AgentError as error:
        raise MisuseError(str(error)) from None


def join_servers(agent: Agent, files: Sequence[str], terminal: Terminal) -> Agent:
    """Return the agent with the servers of files among its tools, connected and approved.

    Raises:
        MisuseError: when a file makes no sense, or something is not approved and nobody is there to ask.
        MCPServerError: when a server cannot be used.
    """
    if not files:
        return agent
    asking = TerminalConsent(terminal=terminal)
    tools = agent.tools.filter()
    for source in (*agent.tools.sources, *(server for file in files for server in load_servers(file, asking))):
        tools.attach(source)
    both = agent.with_(tools=tools)
    try:
        anyio.run(tools.refresh)
        _check_all_asked(asking, files)
    except BaseException as error:
        anyio.run(both.aclose)
        if isinstance(error, AgentError):
            _check_all_asked(asking, files)  # that is why, then
        raise
    asking.is_open = False
    return both


def _check_all_asked(consent: TerminalConsent, files: Iterable[str]) -> None:
    """Raise MisuseError if a person should have been asked, and none was there."""
    if not consent.unasked:
        return
    names = " and ".join(repr(name) for name in dict.fromkeys(consent.unasked))
    ways = " or ".join(format_approve_command(file) for file in files)
    raise MisuseError(
        f"nobody has approved what there is of the MCP server {names}, and nobody sits here to be asked. "
        f"Look at it and decide: {ways}",
    )


def format_approve_command(file: str) -> str:
    """Return the command line that shows what is to be approved of a file's servers, and asks."""
    return f"{find_program()} mcp approve {shlex.quote(file)}"
