"""Find the stores, runs and agents that the arguments of a subcommand name."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import anyio
import attrs

from agentfsm.agent import Agent
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.resolve.agent_target import iter_agents, join_target, load_agent, split_target
from agentfsm.cli.resolve.mcp_servers import join_servers
from agentfsm.cli.resolve.store_location import create_store, open_existing_store, resolve_location
from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.runs import Runs
from agentfsm.stores import MemoryStore
from agentfsm.stores.sqlite.store import SQLiteStore

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run
    from agentfsm.ports.store import Store

T = TypeVar("T")
Command = Callable[[argparse.Namespace, "Terminal"], ExitCode]


def attach_store(agent: Agent, target: str, given: str | None) -> tuple[Agent, str | None]:
    """Return the agent with a store that outlives the process, knowing where it is found again; and that store's place.

    A store that is given goes before the agent's own, and that before the environment's and the usual one. The place is
    None where only the agent knows how to open its store.
    """
    if given is not None or isinstance(agent.store, MemoryStore):
        place = resolve_location(given)
        return agent.with_(store=create_store(place), target=target), place
    own = agent.store.path if isinstance(agent.store, SQLiteStore) else None
    return agent.with_(target=target), own


def resolve_agent(args: argparse.Namespace, terminal: Terminal) -> tuple[Agent, str | None]:
    """Return the agent that the words name, with the servers that they name, and the place of its store.

    Raises:
        MisuseError: when they name none, or a server is not approved.
        MCPServerError: when a server cannot be used.
    """
    target = join_target(args.agent, args.mcp)
    name, files = split_target(target)
    return attach_store(join_servers(load_agent(name), files, terminal), target, args.store)


@attrs.frozen(kw_only=True)
class ResolvedRun(Value):
    """A run and its agent."""

    agent: Agent
    run: Run
    store_location: str | None
    """Of the store; None where only the agent knows how to open it."""


def resolve_run(args: argparse.Namespace, terminal: Terminal) -> ResolvedRun:
    """Return the run that the words name, with the agent that they name, else with the one that it was begun with.

    Raises:
        MisuseError: if the agent of the run is unknown, or one of its MCP servers is not approved.
        MCPServerError: when a server cannot be used.
        RunNotFoundError: if the store does not contain the run.
    """
    place = resolve_location(args.store)
    if args.agent is not None:
        agent, own = resolve_agent(args, terminal)
        return ResolvedRun(agent=agent, run=anyio.run(agent.load, args.id), store_location=own)
    store = open_existing_store(place)
    run, top = anyio.run(load_with_root, store, args.id)
    own_agent = load_run_agent(run, top)
    if own_agent is None:
        raise MisuseError(
            f"run {run.id} was not started from the command line, so it does not say which agent it is of: "
            "name it with --agent module:attribute",
        )
    target, files = split_target(run.header.target)
    files = tuple(args.mcp) or files
    own_agent = join_servers(own_agent, files, terminal).with_(store=store, target=join_target(target, files))
    return ResolvedRun(agent=own_agent, run=run, store_location=place)


def load_run_agent(run: Run, root: Header) -> Agent | None:
    """Return the agent that a run was begun with, which may be one among the tools of another; None if unknown.

    Servers that had joined it are left out.
    """
    if not root.target:
        return None
    agent = load_agent(split_target(root.target)[0])
    if run.id == root.id:
        return agent
    return next((each for each in iter_agents(agent) if each.name == run.header.agent), None)


async def load_with_root(store: Store, run_id: str) -> tuple[Run, Header]:
    """Return a run, and the header of the one that it works for in the end, or its own."""
    runs = Runs(store)
    return await runs.load(run_id), await runs.root(run_id)


def run_in_store(store: Store, act: Callable[[], Awaitable[T]]) -> T:
    """Use a store, and close it afterwards."""

    async def whole() -> T:
        try:
            return await act()
        finally:
            await store.aclose()

    return anyio.run(whole)
