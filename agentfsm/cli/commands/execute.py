"""The subcommands that drive runs: each takes its arguments and the terminal, and returns the exit code."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

import anyio

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.json_documents import build_run_json, load_messages
from agentfsm.cli.render.text import format_run
from agentfsm.cli.resolve.agent_target import join_target, load_agent, split_target
from agentfsm.cli.resolve.run_lookup import attach_store, load_with_root, resolve_agent, resolve_run, run_in_store
from agentfsm.cli.resolve.store_location import CommandHint, open_existing_store, resolve_location
from agentfsm.cli.session.attended_run import AttendedRun, build_hint, report_run
from agentfsm.cli.session.prompts import DecideFunction, leave_undecided
from agentfsm.core.errors import MisuseError, RunNotFoundError

if TYPE_CHECKING:
    from agentfsm.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.run import Run

# Where the agent of `agentfsm demo` is found again.
DEMO_TARGET: Final = "agentfsm.cli.demo:agent"


def run(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Run an agent."""
    agent, place = resolve_agent(args, terminal)
    return AttendedRun(terminal=terminal, agent=agent, run=_start_run(args, agent), store_location=place).attend()


def _start_run(args: argparse.Namespace, agent: Agent) -> Run:
    """Return the run that the words ask for.

    Raises:
        MisuseError: when the words are wrong, or the id stands for a run of another agent.
    """
    history = None if args.messages is None else load_messages(args.messages)
    begun = agent.start(args.prompt, id=args.id, session=args.session, messages=history, metadata=dict(args.metadata))
    if args.id is not None:
        anyio.run(_check_same_agent, agent, args.id)
    return begun


async def _check_same_agent(agent: Agent, run_id: str) -> None:
    """See that a run of this id, where there is one, is of this agent: the same id and prompt go on with it."""
    try:
        target = (await agent.runs.header(run_id)).target
    except RunNotFoundError:
        return
    theirs, own = split_target(target)[0], split_target(agent.target)[0]
    if theirs and theirs != own:
        await agent.aclose()
        raise MisuseError(f"run {run_id!r} exists, and is of {theirs}, not of {own}: choose another id")


def demo(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Let an agent survey a folder."""
    from agentfsm.cli.demo.demo_agent import build_report_approver, describe_model, prepare_survey  # noqa: PLC0415  it brings a server and tools

    start = prepare_survey(args.folder)
    agent, place = attach_store(load_agent(DEMO_TARGET), DEMO_TARGET, args.store)
    attended = AttendedRun(
        terminal=terminal,
        agent=agent,
        run=agent.start(start.prompt, metadata=start.metadata),
        store_location=place,
        unattended_decide=build_report_approver(terminal),
        remark=describe_model(agent),
    )
    code = attended.attend()
    if code is ExitCode.DONE and not terminal.json:
        show_line = attended.hint.build(f"show {attended.run.id}")
        terminal.out(f"\nWhat was kept of it ({show_line}):\n{format_run(attended.run)}")
    return code


def resume(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Go on with a run."""
    if args.agent is None and (code := _report_if_over(args, terminal)) is not None:
        return code
    found = resolve_run(args, terminal)
    absent: DecideFunction = leave_undecided
    if args.takeover:
        anyio.run(_take_over, found.agent, args.id)
    if found.run.header.target == DEMO_TARGET:
        from agentfsm.cli.demo.demo_agent import build_report_approver  # noqa: PLC0415  it brings a server and tools

        absent = build_report_approver(terminal)
    attended = AttendedRun(
        terminal=terminal,
        agent=found.agent,
        run=found.run,
        store_location=found.store_location,
        resumes_pause=True,
        unattended_decide=absent,
    )
    return attended.attend()


async def _take_over(agent: Agent, run_id: str) -> None:
    """Take a run from the worker that drives it."""
    lease = await agent.store.lease(run_id, takeover=True)
    await agent.store.release(lease).wait()


def _report_if_over(args: argparse.Namespace, terminal: Terminal) -> ExitCode | None:
    """Report a run that is over, without its agent, whose module need not be there any more; else return None.

    Raises:
        MisuseError: when another run drives it.
    """
    way = CommandHint(location=resolve_location(args.store))
    store = open_existing_store(args.store)
    found, top = run_in_store(store, lambda: load_with_root(store, args.id))
    if found.is_over:
        terminal.err(f"run {found.id} is over")
        return report_run(terminal, found, way)
    if top.id != found.id:
        raise MisuseError(f"run {found.id} is driven by the run that it works for: {way.build_resume(top.id)}")
    return None


def submit(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Put a run into the store, for a worker."""
    agent, place = resolve_agent(args, terminal)
    begun = _start_run(args, agent)

    async def act() -> Run:
        async with agent:
            return await agent.submit(begun)

    found = anyio.run(act)
    way = build_hint(found, agent, place)
    terminal.err(
        f"submitted to any worker of its agent: {way.build(f'worker {join_target(*split_target(agent.target))}')}"
    )
    if terminal.json:
        terminal.document(build_run_json(found, way))
    else:
        terminal.out(found.id)
    return ExitCode.DONE
