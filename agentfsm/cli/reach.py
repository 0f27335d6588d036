"""What the subcommands share: from words to stores, runs and agents."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
import attrs

from agentfsm.agent import Agent
from agentfsm.cli.codes import Exit
from agentfsm.cli.drive import top_of
from agentfsm.cli.place import known_store, make_store, store_place
from agentfsm.cli.servers import joined
from agentfsm.cli.target import agents_of, load_agent, parts_of, target_with
from agentfsm.core.errors import MisuseError
from agentfsm.core.limits import Limits
from agentfsm.core.value import Value
from agentfsm.engine.execution import journal
from agentfsm.ports import Model
from agentfsm.stores import MemoryStore
from agentfsm.stores.sqlite.store import SQLiteStore

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.run import Header, Run
    from agentfsm.ports import Emit, Reply, Request, Store

T = TypeVar("T")
Command = Callable[[argparse.Namespace, "Terminal"], Exit]

# Limits of an agent that only hands something on: no run is ever at the end of such limits, so none is ended by them.
_PATIENCE: Final = 1e9


class NoModel(Model):
    """Stands for the model where an agent is only needed to say something to a run."""

    name = "none"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:  # noqa: ARG002  nothing is asked
        """Refuse.

        Raises:
            MisuseError: always.
        """
        raise MisuseError("this command drives no run: use `agentfsm resume`")


def speaker(store: Store) -> Agent:
    """Return an agent that can say something to the runs of a store, and drives none."""
    return Agent(NoModel(), store=store, limits=Limits(seconds=_PATIENCE, crashes=int(_PATIENCE)))


def equipped(agent: Agent, target: str, given: str | None) -> tuple[Agent, str | None]:
    """Return the agent with a store that outlives the process, knowing where it is found again; and that store's place.

    A store that is given goes before the agent's own, and that before the environment's and the usual one. The place is
    None where only the agent knows how to open its store.
    """
    if given is not None or isinstance(agent.store, MemoryStore):
        place = store_place(given)
        return agent.with_(store=make_store(place), target=target), place
    own = agent.store.path if isinstance(agent.store, SQLiteStore) else None
    return agent.with_(target=target), own


def named_by(args: argparse.Namespace, terminal: Terminal) -> tuple[Agent, str | None]:
    """Return the agent that the words name, with the servers that they name, and the place of its store.

    Raises:
        MisuseError: when they name none, or a server is not approved.
        MCPServerError: when a server cannot be used.
    """
    target = target_with(args.agent, args.mcp)
    name, files = parts_of(target)
    return equipped(joined(load_agent(name), files, terminal), target, args.store)


@attrs.frozen(kw_only=True)
class Found(Value):
    """A run and its agent."""

    agent: Agent
    run: Run
    place: str | None
    # Of the store; None where only the agent knows how to open it.


def found_by(args: argparse.Namespace, terminal: Terminal) -> Found:
    """Return the run that the words name, with the agent that they name, else with the one that it was begun with.

    Raises:
        MisuseError: when nobody knows which agent that was, or a server of its is not approved.
        MCPServerError: when a server cannot be used.
        RunNotFoundError: when the store holds no such run.
    """
    place = store_place(args.store)
    if args.agent is not None:
        agent, own = named_by(args, terminal)
        return Found(agent=agent, run=anyio.run(agent.load, args.id), place=own)
    store = known_store(place)
    run, top = anyio.run(with_top, store, args.id)
    own_agent = agent_of(run, top)
    if own_agent is None:
        raise MisuseError(
            f"run {run.id} was not started from the command line, so it does not say which agent it is of: "
            "name it with --agent module:attribute",
        )
    target, files = parts_of(run.header.target)
    files = tuple(args.mcp) or files
    own_agent = joined(own_agent, files, terminal).with_(store=store, target=target_with(target, files))
    return Found(agent=own_agent, run=run, place=place)


def agent_of(run: Run, top: Header) -> Agent | None:
    """Return the agent that a run was begun with, which may be one among the tools of another; None if unknown.

    Servers that had joined it are left out.
    """
    if not top.target:
        return None
    agent = load_agent(parts_of(top.target)[0])
    if run.id == top.id:
        return agent
    return next((each for each in agents_of(agent) if each.name == run.header.agent), None)


async def with_top(store: Store, run_id: str) -> tuple[Run, Header]:
    """Return a run, and the header of the one that it works for in the end, or its own."""
    run = await journal.load_run(store, run_id)
    return run, await top_of(store, run.header)


def in_store(store: Store, act: Callable[[], Awaitable[T]]) -> T:
    """Do something with a store, and close it."""

    async def whole() -> T:
        try:
            return await act()
        finally:
            await store.aclose()

    return anyio.run(whole)
