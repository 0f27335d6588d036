"""The subcommand that talks with an agent."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import anyio

from agentfsm.cli.resolve.agent_target import join_target
from agentfsm.cli.resolve.run_lookup import resolve_agent
from agentfsm.cli.session.chat_session import ChatSession, build_session_name
from agentfsm.core.errors import MisuseError
from agentfsm.flow import Flow
from agentfsm.ports.store import Filter

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.cli.codes import ExitCode
    from agentfsm.cli.terminal import Terminal


def chat(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Talk with an agent."""
    agent, location = resolve_agent(args, terminal)
    if isinstance(agent, Flow):
        raise MisuseError(
            f"{args.agent} is a flow, which takes inputs by name and no messages: use "
            f'agentfsm run {args.agent} \'{{"INPUT": "VALUE"}}\''
        )
    session = anyio.run(_find_newest, agent, args.user) if args.continues else args.session
    return ChatSession(
        terminal=terminal,
        agent=agent,
        store_location=location,
        session=session or build_session_name(agent),
        user=args.user,
        target=join_target(args.agent, args.mcp),
    ).chat()


async def _find_newest(agent: Agent, user: str | None) -> str:
    """Return the session with the newest run of the user with this agent.

    Raises:
        MisuseError: if there is none.
    """
    async for summary in agent.runs.iterate(Filter(agent=agent.name, user=user)):
        if summary.session is not None and summary.user == user and summary.parent is None:
            return summary.session
    raise MisuseError(f"the store has no session with the agent {agent.name!r}: leave out --continue to begin one")
