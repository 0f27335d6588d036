"""The subcommands: each takes its arguments and the terminal, and returns the exit code."""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeVar

import anyio

from agentfsm.agent import Agent
from agentfsm.cli.ask import leave, tell, user_name
from agentfsm.cli.codes import Exit
from agentfsm.cli.drive import Driver, report, resume_line, top_of
from agentfsm.cli.place import known_store, make_store, store_path
from agentfsm.cli.show import event_json, event_lines, run_json, run_text, summary_json, summary_lines, whole_json
from agentfsm.cli.target import agents_of, load_agent
from agentfsm.core import diagram
from agentfsm.core.errors import ConflictError, MisuseError, RunNotFoundError
from agentfsm.core.inbox import Approve, Decision, Reject, Rerun, Settle
from agentfsm.core.messages import Outcome
from agentfsm.core.run import begin
from agentfsm.engine import journal
from agentfsm.engine.family import child_id
from agentfsm.ports import Model
from agentfsm.stores import MemoryStore
from agentfsm.stores.sqlite import SQLiteStore

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.events import Event
    from agentfsm.core.run import Header, Run
    from agentfsm.ports import Emit, Reply, Request, Store

T = TypeVar("T")
Command = Callable[[argparse.Namespace, "Terminal"], Exit]

DEMO: Final = "agentfsm.cli.demo:agent"
# Where the agent of `agentfsm demo` is found again.


class NoModel(Model):
    """Stands for the model where an agent is only needed to say something to a run."""

    name = "none"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:  # noqa: ARG002  nothing is asked
        """Refuse.

        Raises:
            MisuseError: always.
        """
        raise MisuseError("this command drives no run: use `agentfsm resume`")


def equipped(agent: Agent, target: str, path: str) -> tuple[Agent, str | None]:
    """Return the agent with a store that outlives the process, knowing where it is found again; and that store's path.

    An agent with a store of its own keeps it. The path is None where only the agent knows how to open its store.
    """
    if isinstance(agent.store, MemoryStore):
        return agent.with_(store=make_store(path), target=target), path
    own = agent.store.path if isinstance(agent.store, SQLiteStore) else None
    return agent.with_(target=target), own


# Driving.


def run(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Run an agent."""
    agent, path = equipped(load_agent(args.agent), args.agent, store_path(args.store))
    begun = agent.start(args.prompt, id=args.id, session=args.session, metadata=dict(args.metadata))
    return Driver(terminal=terminal, agent=agent, run=begun, path=path).drive()


def demo(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Let an agent survey a folder."""
    module = import_module("agentfsm.cli.demo")  # here: it brings a server and tools
    start = module.survey(args.folder)
    agent, path = equipped(load_agent(DEMO), DEMO, store_path(args.store))
    driver = Driver(
        terminal=terminal,
        agent=agent,
        run=agent.start(start.prompt, metadata=start.metadata),
        path=path,
        absent=module.approving(terminal),
        remark=module.remark(agent),
    )
    code = driver.drive()
    if code is Exit.DONE and not terminal.json:
        show_line = driver.resume.replace("agentfsm resume", "agentfsm show", 1)
        terminal.out(f"\nWhat was kept of it ({show_line}):\n{run_text(driver.run)}")
    return code


def resume(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Go on with a run."""
    path = store_path(args.store)
    if args.agent is not None:
        agent, own = equipped(load_agent(args.agent), args.agent, path)
        return _go_on(terminal, agent, anyio.run(agent.load, args.id), own)
    store = known_store(path)
    found, top = anyio.run(_with_top, store, args.id)
    if found.is_over:
        terminal.err(f"run {found.id} is over")
        return report(terminal, found, path, resume_line(found.id, path))
    if top.id != found.id:
        raise MisuseError(f"run {found.id} is driven by the run that it works for: {resume_line(top.id, path)}")
    agent = load_agent(_target_of(found)).with_(store=store, target=found.header.target)
    return _go_on(terminal, agent, found, path)


def _target_of(found: Run) -> str:
    if not found.header.target:
        raise MisuseError(
            f"run {found.id} was not started from the command line, so it does not say which agent it is of: "
            "name it with --agent module:attribute",
        )
    return found.header.target


def _go_on(terminal: Terminal, agent: Agent, found: Run, path: str | None) -> Exit:
    is_demo = found.header.target == DEMO
    absent = import_module("agentfsm.cli.demo").approving(terminal) if is_demo else leave
    return Driver(terminal=terminal, agent=agent, run=found, path=path, absent=absent).drive()


# Looking.


def runs(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """List runs."""
    store = known_store(store_path(args.store))
    found = _in(store, lambda: store.runs(limit=args.limit, session=args.session))
    if terminal.json:
        terminal.document({"runs": [summary_json(each) for each in found]})
    for line in [] if terminal.json else summary_lines(found):
        terminal.out(line)
    if not found:
        terminal.err("no runs")
    return Exit.DONE


def show(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Show a run."""
    path = store_path(args.store)
    store = known_store(path)
    found, events, top = _in(store, lambda: _read(store, args.id, args.at))
    if terminal.json:
        journalled = {"events": [event_json(event) for event in events]} if args.events else {}
        terminal.document(whole_json(found, resume_line(top, path), events) | journalled)
        return Exit.DONE
    terminal.out(run_text(found, events))
    for line in event_lines(events) if args.events else ():
        terminal.out(line)
    return Exit.DONE


async def _read(store: Store, run_id: str, at: int | None) -> tuple[Run, tuple[Event, ...], str]:
    """Return a run, its journal up to there, and the id of the run that goes on with it."""
    stored = await store.read(run_id)
    newest = len(stored.events)
    if at is not None and not 0 <= at <= newest:
        raise MisuseError(f"run {run_id} has the versions 0 to {newest}, and not {at}")
    events = stored.events[:at]
    run = begin(stored.header, await journal.prior_of(store, stored.header.after)).fold(events)
    return run, events, (await top_of(store, stored.header)).id


def graph(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Draw the machine."""
    drawn = {"mermaid": diagram.mermaid, "dot": diagram.dot, "text": diagram.text}[args.format]()
    if terminal.json:
        terminal.document({"format": args.format, "graph": drawn})
    else:
        terminal.out(drawn)
    return Exit.DONE


def doctor(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Look at the installation, and at an agent."""
    examine: Command = import_module("agentfsm.cli.doctor").examine
    return examine(args, terminal)


# Deciding.


def approve(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Let a call run."""
    knower = None if args.arguments is None else _knower(args, terminal)
    return _decide(args, terminal, Approve(call_id=args.call, by=_by(args), arguments=args.arguments), knower)


def reject(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Do not let a call run."""
    return _decide(args, terminal, Reject(call_id=args.call, by=_by(args), message=args.message))


def settle(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Say what became of a call."""
    if args.rerun:
        return _decide(args, terminal, Rerun(call_id=args.call, by=_by(args)))
    outcome = Outcome.DONE if args.failed is None else Outcome.FAILED
    content = args.result if args.failed is None else args.failed
    return _decide(args, terminal, Settle(call_id=args.call, by=_by(args), outcome=outcome, content=content))


def cancel(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """End a run."""
    path = store_path(args.store)
    store = known_store(path)
    agent = Agent(NoModel(), store=store)

    async def act() -> tuple[Run, Header]:
        await _end(agent, args.id, _by(args), args.message)
        return await _with_top(store, args.id)

    found, top = _in(store, act)
    words = "is over" if found.is_over else "will end as soon as its driver hears of it"
    terminal.err(f"run {found.id} {words}")
    if terminal.json:
        terminal.document(run_json(found, resume_line(top.id, path)))
    return Exit.DONE


async def _end(agent: Agent, run_id: str, by: str, message: str) -> None:
    """Cancel a run, and the sub-agents' runs below it, which this agent does not know of for want of its tools."""
    before = await agent.load(run_id)
    await agent.cancel(run_id, by=by, message=message)
    if not (await agent.load(run_id)).is_over:
        return  # its driver ends it, and them
    for entry in before.open:
        child = child_id(run_id, entry.call.id)
        with suppress(RunNotFoundError):
            if not (await agent.load(child)).is_over:
                await _end(agent, child, by, message)


def _decide(args: argparse.Namespace, terminal: Terminal, decision: Decision, knower: Agent | None = None) -> Exit:
    path = store_path(args.store)
    agent = (knower or Agent(NoModel())).with_(store=known_store(path))

    async def act() -> tuple[list[str], Run, Header]:
        async with agent:
            refused = await tell(agent, [(args.id, decision)])
            return refused, *await _with_top(agent.store, args.id)

    refused, found, top = anyio.run(act)
    if refused:
        raise ConflictError(refused[0])
    go_on = resume_line(top.id, path)
    if terminal.json:
        said = {"decision": type(decision).__name__.lower(), "call_id": decision.call_id, "by": decision.by}
        changed = {"arguments": json.loads(args.arguments)} if isinstance(decision, Approve) and args.arguments else {}
        terminal.document(run_json(found, go_on) | said | changed)
    terminal.err(f"noted for {decision.call_id} of run {found.id}. To go on: {go_on}")
    return Exit.DONE


def _knower(args: argparse.Namespace, terminal: Terminal) -> Agent | None:
    """Return the agent whose tools changed arguments have to fit: the run's own, which may be one among the tools."""
    store = known_store(store_path(args.store))
    found, top = _in(store, lambda: _with_top(store, args.id))
    for agent in agents_of(load_agent(top.target)) if top.target else ():
        if agent.fingerprint == found.header.fingerprint:
            return agent
    terminal.err("the agent that the run is of is not known here: the arguments are checked when the call runs")
    return None


async def _with_top(store: Store, run_id: str) -> tuple[Run, Header]:
    """Return a run, and the header of the one that it works for in the end, or its own."""
    found = await journal.load(store, run_id)
    return found, await top_of(store, found.header)


def _by(args: argparse.Namespace) -> str:
    return user_name() if args.by is None else str(args.by)


def _in(store: Store, act: Callable[[], Awaitable[T]]) -> T:
    """Do something with a store, and close it."""

    async def whole() -> T:
        try:
            return await act()
        finally:
            await store.aclose()

    return anyio.run(whole)
