"""The subcommands that drive runs: each takes its arguments and the terminal, and returns the exit code."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

import anyio

from agentfsm.cli.ask import Answer, leave
from agentfsm.cli.codes import Exit
from agentfsm.cli.documents import messages_in, run_json
from agentfsm.cli.drive import AttendedRun, report, way_to
from agentfsm.cli.place import Way, known_store, store_place
from agentfsm.cli.reach import equipped, found_by, in_store, named_by, with_top
from agentfsm.cli.show import run_text
from agentfsm.cli.target import load_agent, parts_of, target_with
from agentfsm.core.errors import MisuseError, RunNotFoundError
from agentfsm.engine.execution.journal import read_header

if TYPE_CHECKING:
    from agentfsm.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.run import Run

# Where the agent of `agentfsm demo` is found again.
DEMO: Final = "agentfsm.cli.demo:agent"


def run(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Run an agent."""
    agent, place = named_by(args, terminal)
    return AttendedRun(terminal=terminal, agent=agent, run=_begun(args, agent), place=place).drive()


def _begun(args: argparse.Namespace, agent: Agent) -> Run:
    """Return the run that the words ask for.

    Raises:
        MisuseError: when the words are wrong, or the id stands for a run of another agent.
    """
    history = None if args.messages is None else messages_in(args.messages)
    begun = agent.start(args.prompt, id=args.id, session=args.session, messages=history, metadata=dict(args.metadata))
    if args.id is not None:
        anyio.run(_refuse_others, agent, args.id)
    return begun


async def _refuse_others(agent: Agent, run_id: str) -> None:
    """See that a run of this id, where there is one, is of this agent: the same id and prompt go on with it."""
    try:
        target = (await read_header(agent.store, run_id)).target
    except RunNotFoundError:
        return
    theirs, own = parts_of(target)[0], parts_of(agent.target)[0]
    if theirs and theirs != own:
        await agent.aclose()
        raise MisuseError(f"run {run_id!r} exists, and is of {theirs}, not of {own}: choose another id")


def demo(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Let an agent survey a folder."""
    from agentfsm.cli.demo import approving, remark, survey  # noqa: PLC0415  it brings a server and tools

    start = survey(args.folder)
    agent, place = equipped(load_agent(DEMO), DEMO, args.store)
    attended = AttendedRun(
        terminal=terminal,
        agent=agent,
        run=agent.start(start.prompt, metadata=start.metadata),
        place=place,
        absent=approving(terminal),
        remark=remark(agent),
    )
    code = attended.drive()
    if code is Exit.DONE and not terminal.json:
        show_line = attended.way.line(f"show {attended.run.id}")
        terminal.out(f"\nWhat was kept of it ({show_line}):\n{run_text(attended.run)}")
    return code


def resume(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Go on with a run."""
    if args.agent is None and (code := _needless(args, terminal)) is not None:
        return code
    found = found_by(args, terminal)
    absent: Answer = leave
    if args.takeover:
        anyio.run(_take_over, found.agent, args.id)
    if found.run.header.target == DEMO:
        from agentfsm.cli.demo import approving  # noqa: PLC0415  it brings a server and tools

        absent = approving(terminal)
    attended = AttendedRun(
        terminal=terminal, agent=found.agent, run=found.run, place=found.place, wakes=True, absent=absent
    )
    return attended.drive()


async def _take_over(agent: Agent, run_id: str) -> None:
    """Take a run from the worker that drives it."""
    lease = await agent.store.lease(run_id, takeover=True)
    await agent.store.release(lease).wait()


def _needless(args: argparse.Namespace, terminal: Terminal) -> Exit | None:
    """Report a run that is over, without its agent, whose module need not be there any more; else return None.

    Raises:
        MisuseError: when another run drives it.
    """
    way = Way(place=store_place(args.store))
    store = known_store(args.store)
    found, top = in_store(store, lambda: with_top(store, args.id))
    if found.is_over:
        terminal.err(f"run {found.id} is over")
        return report(terminal, found, way)
    if top.id != found.id:
        raise MisuseError(f"run {found.id} is driven by the run that it works for: {way.resume(top.id)}")
    return None


def submit(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Put a run into the store, for a worker."""
    agent, place = named_by(args, terminal)
    begun = _begun(args, agent)

    async def act() -> Run:
        async with agent:
            return await agent.submit(begun)

    found = anyio.run(act)
    way = way_to(found, agent, place)
    terminal.err(f"submitted to any worker of its agent: {way.line(f'worker {target_with(*parts_of(agent.target))}')}")
    if terminal.json:
        terminal.document(run_json(found, way))
    else:
        terminal.out(found.id)
    return Exit.DONE
