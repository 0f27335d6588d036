"""The subcommands that drive runs: each takes its arguments and the terminal, and returns the exit code."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.json_documents import build_run_json
from agentfsm.cli.render.text import format_run
from agentfsm.cli.resolve.agent_target import join_target, load_agent, split_target
from agentfsm.cli.resolve.command_hint import CommandHint
from agentfsm.cli.resolve.run_lookup import attach_store, load_with_root, resolve_agent, resolve_run, run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store, resolve_location
from agentfsm.cli.session.attended_run import AttendedRun, build_hint, describe_end, report_run
from agentfsm.cli.session.prompts import DecideFunction, leave_undecided
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import stdout_to_stderr
from agentfsm.core.errors import MisuseError, RunNotFoundError
from agentfsm.core.machine import State
from agentfsm.core.text_safety import one_line
from agentfsm.stores.loading import mask_password
from agentfsm.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentfsm.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.messages import Message
    from agentfsm.core.run import Run
    from agentfsm.ports.store import Lease

# Where the agent of `agentfsm demo` is found again.
DEMO_TARGET: Final = "agentfsm.cli.demo:agent"
# Characters of what is said of a run: its id, and what it waits for.
MAX_LINE_CHARS: Final = 500
_END_NAMES: Final = {State.DONE: "done", State.ERROR: "stopped"}


def run(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Run an agent."""
    agent, place = resolve_agent(args, terminal)
    return AttendedRun(terminal=terminal, agent=agent, run=_start_run(args, agent), store_location=place).attend()


def _start_run(args: argparse.Namespace, agent: Agent) -> Run:
    """Return the run that the words ask for.

    Raises:
        MisuseError: when the words are wrong, or the id stands for a run of another agent.
    """
    history = None if args.messages is None else _load_messages(args.messages)
    begun = agent.start(args.prompt, id=args.id, session=args.session, messages=history, metadata=dict(args.metadata))
    if args.id is not None:
        anyio.run(_check_same_agent, agent, args.id)
    return begun


def _load_messages(path: str) -> tuple[Message, ...]:
    """Return the history that a file holds: a JSON list of messages as OpenAI has them, or an object with "messages".

    Raises:
        MisuseError: when the file cannot be read, or holds none.
    """
    try:
        given = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise MisuseError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"{path} is no JSON: {error}") from None
    from agentfsm.models import from_openai  # noqa: PLC0415  it loads what reads replies, which few commands need

    try:
        return from_openai(given.get("messages", given) if isinstance(given, dict) else given)
    except MisuseError as error:
        raise MisuseError(f"{path}: {error}") from None


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


def worker(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Drive the runs of an agent, until a signal comes; or until nothing is due but what could not be driven."""
    agent, place = resolve_agent(args, terminal)
    shift = _WorkerReport(agent=agent, terminal=terminal)
    own = Worker(agent=agent, execute=shift.execute, deps=None, parallel=args.parallel, poll_s=args.poll)
    where = "the agent's own store" if place is None else mask_password(place)
    terminal.err(f"working for {agent.name!r} on the runs in {where}; Ctrl-C ends it in order")

    with InterruptibleRunner() as ending:
        try:
            with stdout_to_stderr():  # what tools print is no result
                ending.run(partial(own.run, until_idle=args.until_idle))
        except KeyboardInterrupt:
            terminal.err("ended: what was under way is kept, and any worker goes on with it")
        finally:
            ending.run(agent.aclose)
    if terminal.json:
        terminal.document({"agent": agent.name, "runs": dict(shift.end_counts)})
    return ExitCode.FAILED if args.until_idle and own.failed_count else ExitCode.DONE


@attrs.define(eq=False, repr=False, kw_only=True)
class _WorkerReport:
    """Executes the runs of a worker, reports each, and counts how they end."""

    agent: Agent
    terminal: Terminal
    end_counts: Counter[str] = attrs.field(factory=lambda: Counter({"done": 0, "stopped": 0, "waiting": 0}), init=False)

    async def execute(self, before: Run, deps: Any, *, lease: Lease, on_run: Callable[[Run], None]) -> Run:
        """Drive a run whose lease is held, and say how it ended or what it waits for.

        Raises:
            MisuseError: when it is of another agent by the same name.
        """
        agent = self.agent
        target = before.header.target
        if target and target != agent.target:
            raise MisuseError(f"it is of {target}, an agent by the same name as {agent.target}: name each its own way")
        run = await agent.driver.run_until_blocked(before, deps, lease=lease, on_run=on_run)
        if run.version > before.version:
            self.end_counts[_END_NAMES.get(run.state, "waiting")] += 1
            self.terminal.err(one_line(f"run {run.id} {describe_end(run)}", MAX_LINE_CHARS))
        return run
