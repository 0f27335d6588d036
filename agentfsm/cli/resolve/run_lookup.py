"""Resolve the arguments of a subcommand to stores, runs and agents."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import anyio
import attrs

from agentfsm.agents.agent import Agent
from agentfsm.agents.runs import Runs
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.resolve.agent_target import iter_agents, join_target, load_agent, load_target, split_target
from agentfsm.cli.resolve.mcp_servers import join_servers
from agentfsm.cli.resolve.store_location import create_store, open_existing_store, resolve_location
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.value import Value
from agentfsm.releases import Rollout
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
    """Return the agent with a durable store and its target, and the location of the store.

    The store is the given one, else the agent's own, else that of `resolve_location`. The location is None if only the
    agent can open the store.
    """
    if given is not None or isinstance(agent.store, MemoryStore):
        location = resolve_location(given)
        return agent.with_(store=create_store(location), target=target), location
    own = agent.store.path if isinstance(agent.store, SQLiteStore) else None
    return agent.with_(target=target), own


def attach_rollout_store(rollout: Rollout, target: str, given: str | None) -> tuple[Rollout, str | None]:
    """Return the roll-out with a durable store and its target, and the location of the store, as `attach_store`."""
    base, location = attach_store(rollout.base, target, given)
    return rollout.with_(store=base.store, target=target), location


def resolve_agent(args: argparse.Namespace, terminal: Terminal) -> tuple[Agent, str | None]:
    """Return the agent that the arguments name, with its MCP servers, and the location of its store.

    Raises:
        MisuseError: if there is no such agent, or a server is not approved.
        MCPServerError: if a server cannot be used.
    """
    target = join_target(args.agent, args.mcp)
    name, files = split_target(target)
    return attach_store(join_servers(load_agent(name), files, terminal), target, args.store)


def resolve_agent_or_rollout(args: argparse.Namespace, terminal: Terminal) -> tuple[Agent | Rollout, str | None]:
    """Return the agent or the roll-out that the arguments name, loaded once, and the location of its store.

    Raises:
        MisuseError: as for `resolve_agent`, or if MCP servers are given for a roll-out.
        MCPServerError: if a server cannot be used.
    """
    target = join_target(args.agent, args.mcp)
    name, files = split_target(target)
    found: Agent | Rollout = load_target(name, Agent, Rollout)
    if not isinstance(found, Rollout):
        return attach_store(join_servers(found, files, terminal), target, args.store)
    if files:
        raise MisuseError("the releases of a roll-out have fixed tools: list the MCP servers among those of its agents")
    return attach_rollout_store(found, target, args.store)


@attrs.frozen(kw_only=True)
class ResolvedRun(Value):
    """A run, its agent and its store."""

    agent: Agent
    run: Run
    store_location: str | None
    """Path or URL of the store; None if only the agent can open it."""


def resolve_run(args: argparse.Namespace, terminal: Terminal, *, checks_release: bool = False) -> ResolvedRun:
    """Return the run that the arguments name, with the agent of `--agent`, else with the agent that the run names.

    Args:
        args: The arguments.
        terminal: For questions about MCP servers.
        checks_release: Whether to refuse the release of a roll-out that was changed since it was saved, as workers do.

    Raises:
        ConflictError: if `checks_release` is set, and a release was saved with other contents.
        MisuseError: if the agent of the run is unknown, or one of its MCP servers is not approved.
        MCPServerError: if a server cannot be used.
        RunNotFoundError: if the store does not contain the run.
    """
    location = resolve_location(args.store)
    if args.agent is not None:
        agent, own = resolve_agent(args, terminal)
        return ResolvedRun(agent=agent, run=anyio.run(agent.load, args.id), store_location=own)
    store = open_existing_store(location)
    run, root = anyio.run(load_with_root, store, args.id)
    own_agent = load_run_agent(run, root)
    if checks_release and root.release:
        found = load_target(split_target(root.target)[0], Agent, Rollout)
        if isinstance(found, Rollout):
            anyio.run(found.with_(store=store).save_releases)
    if own_agent is None:
        why = (
            f"the agent {root.target} has no sub-agent {run.header.agent!r}"
            if root.target
            else "it was started from Python, by an Agent without target='module:name'"
        )
        raise MisuseError(f"run {run.id} does not name its agent ({why}): name it with --agent module:name")
    target, files = split_target(run.header.target)
    files = tuple(args.mcp) or files
    own_agent = join_servers(own_agent, files, terminal).with_(store=store, target=join_target(target, files))
    return ResolvedRun(agent=own_agent, run=run, store_location=location)


def load_run_agent(run: Run, root: Header) -> Agent | None:
    """Return the agent that a run names, without its MCP servers; None if the run does not name its agent.

    The agent of a sub-agent's run is found among the tools of the root's agent.

    Raises:
        MisuseError: if the agent cannot be loaded; a note on it names the option `--agent`.
    """
    if not root.target:
        return None
    try:
        found = load_target(split_target(root.target)[0], Agent, Rollout)
        agent: Agent = found.find_agent(root.release) if isinstance(found, Rollout) else found
    except AgentError as error:
        error.add_note(f"The run names the agent {root.target}. Name another one with --agent module:name.")
        raise
    if run.id == root.id:
        return agent
    return next((each for each in iter_agents(agent) if each.name == run.header.agent), None)


async def load_with_root(store: Store, run_id: str) -> tuple[Run, Header]:
    """Return a run, and the header of its root: the run at the top of its chain of callers, or itself."""
    runs = Runs(store)
    return await runs.load(run_id), await runs.root(run_id)


def run_in_store(store: Store, act: Callable[[], Awaitable[T]]) -> T:
    """Run `act` in an event loop, and close the store afterwards."""

    async def act_and_close() -> T:
        try:
            return await act()
        finally:
            await store.aclose()

    return anyio.run(act_and_close)
