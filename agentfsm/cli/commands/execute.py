"""The subcommands that start and execute runs: each takes its arguments and a terminal, and returns the exit code."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm.agents.admission import admit, admit_messages
from agentfsm.agents.agent import WORKER_PARALLEL, WORKER_POLL_S, Agent
from agentfsm.agents.agent_starts import StartOptions
from agentfsm.agents.deltas import DeltaRelay, pass_deltas
from agentfsm.agents.worker import Worker
from agentfsm.cli.argument_types import parse_count, parse_new_id, parse_pair, parse_rate, parse_seconds
from agentfsm.cli.arguments import (
    AddParser,
    add_agent,
    add_agent_option,
    add_command,
    add_deltas,
    add_drain,
    add_identity,
    add_metadata,
    add_notifier,
    add_run_id,
)
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.json_documents import build_run_json
from agentfsm.cli.resolve.agent_target import join_target, load_agent, split_target
from agentfsm.cli.resolve.command_hint import CommandHint, build_header_hint, find_program
from agentfsm.cli.resolve.run_lookup import (
    attach_store,
    load_with_root,
    resolve_agent_or_rollout,
    resolve_run,
    run_in_store,
)
from agentfsm.cli.resolve.store_location import open_existing_store, resolve_location
from agentfsm.cli.session.attended_run import AttendedRun, build_hint, describe_end, report_run
from agentfsm.cli.session.chat_session import ChatSession, build_session_name
from agentfsm.cli.session.prompts import DecideFunction, leave_undecided
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import stdout_to_stderr, user_name
from agentfsm.core.errors import IncompatibleProgramError, MisuseError, RunNotFoundError, first_error
from agentfsm.core.machine import State
from agentfsm.core.text_safety import one_line
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.flow import Flow
from agentfsm.ports.store import Filter
from agentfsm.schedules.due_runs import DueRuns
from agentfsm.stores.loading import mask_password
from agentfsm.telemetry.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.messages import Message
    from agentfsm.core.run import Run
    from agentfsm.engines.dbos import DBOSEngine
    from agentfsm.ports.store import Store
    from agentfsm.releases import Rollout
    from agentfsm.telemetry.notifier import AlertNotifier

# Target of the agent of `agentfsm demo`.
DEMO_TARGET: Final = "agentfsm.cli.demo:agent"
_DEMO_REMARK: Final = (
    "It reads the folder in parallel, and asks before it writes a report. Kill it at any moment: `{program} resume ID` "
    "continues it."
)
# Characters of the line that reports a run: its id, its end or its waits.
MAX_LINE_CHARS: Final = 500
_END_NAMES: Final = {State.DONE: "done", State.ERROR: "failed"}

_ENGINES: Final = ("store", "dbos")
_ENGINE_HELP: Final = "what dispatches the runs: the store, or DBOS, which needs agentfsm[dbos] (default: %(default)s)"


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    demo_options = add_command(add, demo)
    demo_options.add_argument("folder", nargs="?", default=".", help="the folder (default: the current one)")
    run_options = add_command(add, run)
    talk = add_command(add, chat)
    add_agent(talk)
    chosen = talk.add_mutually_exclusive_group()
    chosen.add_argument("--session", help="name of the conversation (default: a new one)")
    chosen.add_argument(
        "--continue", dest="continues", action="store_true", help="continue the newest conversation with this agent"
    )
    add_identity(talk)
    submit_options = add_command(add, submit)
    for starts in (run_options, submit_options):
        add_agent(starts)
        starts.add_argument("prompt", help="the task")
        starts.add_argument(
            "--id",
            type=parse_new_id,
            help="id of the run (default: a random one); repeating an id with the same prompt continues that run",
        )
        starts.add_argument("--session", help="continue this conversation")
        add_identity(starts)
        starts.add_argument("--messages", metavar="FILE", help="earlier messages, a JSON list in OpenAI's format")
        add_metadata(starts, "the run")
    submit_options.add_argument("--engine", choices=_ENGINES, default="store", help=_ENGINE_HELP)
    submit_options.add_argument(
        "--priority",
        metavar="N",
        type=parse_count,
        help="1 is the most urgent (with --engine dbos; default: before all)",
    )
    submit_options.add_argument(
        "--delay", metavar="SECONDS", type=parse_seconds, help="start the run later (with --engine dbos)"
    )
    worker_options = add_command(add, worker)
    add_agent(worker_options)
    worker_options.add_argument(
        "--parallel",
        metavar="N",
        type=parse_count,
        default=WORKER_PARALLEL,
        help="number of runs at a time (default: %(default)s)",
    )
    worker_options.add_argument(
        "--poll",
        metavar="SECONDS",
        type=parse_seconds,
        help=f"interval between two queries for ready runs (default: {WORKER_POLL_S}, with --engine dbos 0.25)",
    )
    worker_options.add_argument("--until-idle", action="store_true", help="exit when no run is ready")
    worker_options.add_argument("--engine", choices=_ENGINES, default="store", help=_ENGINE_HELP)
    worker_options.add_argument(
        "--concurrency",
        metavar="N",
        type=parse_count,
        help="number of runs of all workers at a time (with --engine dbos; default: no limit)",
    )
    worker_options.add_argument(
        "--tenant-concurrency",
        metavar="N",
        type=parse_count,
        help="number of runs of a tenant at a time (with --engine dbos; default: no limit)",
    )
    worker_options.add_argument(
        "--rate",
        metavar="RUNS/SECONDS",
        type=parse_rate,
        help="number of runs started in a period, such as 300/60 (with --engine dbos; default: no limit)",
    )
    add_drain(worker_options)
    add_deltas(worker_options)
    add_notifier(worker_options, "--alerts-to")
    resume_options = add_command(add, resume)
    add_run_id(resume_options)
    add_agent_option(resume_options)
    resume_options.add_argument("--takeover", action="store_true", help="take the run from a worker that hangs")
    resume_options.add_argument(
        "--renamed",
        metavar="OLD=NEW",
        type=parse_pair,
        action="append",
        default=[],
        help="a tool or step of the run has another name in this program; may be given several times",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Run an agent."""
    agent, location, options = _resolve_release(args, terminal)
    started = _start_run(args, agent, options)
    return AttendedRun(terminal=terminal, agent=agent, run=started, store_location=location).attend()


def _resolve_release(args: argparse.Namespace, terminal: Terminal) -> tuple[Agent, str | None, StartOptions]:
    """Return the agent that the arguments name, or that of the arm that a roll-out assigns, with the store's location.

    Raises:
        MisuseError: if there is no such agent or roll-out, or a server is not approved.
    """
    found, location = resolve_agent_or_rollout(args, terminal)
    if isinstance(found, Agent):
        return found, location, StartOptions()
    agent, options = anyio.run(partial(found.choose, **_describe_start(args)))
    return agent, location, options


def _describe_start(args: argparse.Namespace) -> dict[str, Any]:
    """Return the id, the session, the user and the metadata of the run that the arguments describe."""
    return {
        "id": args.id,
        "session": args.session,
        "user": args.user,
        "tenant": args.tenant,
        "roles": args.role,
        "metadata": dict(args.metadata),
    }


def _start_run(args: argparse.Namespace, agent: Agent, options: StartOptions) -> Run:
    """Return the run that the arguments describe.

    Raises:
        MisuseError: if the arguments are invalid, or the id belongs to a run of another agent.
    """
    history = None if args.messages is None else admit_messages(_load_messages(args.messages), user_name())
    given = {"messages": history, **_describe_start(args), **options}
    run = agent.start(admit(args.prompt, user_name()), **given)
    if args.id is not None:
        anyio.run(_check_same_agent, agent, args.id)
    return run


def _load_messages(path: str) -> tuple[Message, ...]:
    """Return the messages of a file: a JSON list in OpenAI's format, or an object with the list as "messages".

    Raises:
        MisuseError: if the file cannot be read, or its content is invalid.
    """
    try:
        given = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise MisuseError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"{path} is not valid JSON: {error}") from None
    from agentfsm.models import from_openai  # noqa: PLC0415  few commands need the models

    try:
        return from_openai(given.get("messages", given) if isinstance(given, dict) else given)
    except MisuseError as error:
        raise MisuseError(f"{path}: {error}") from None


async def _check_same_agent(agent: Agent, run_id: str) -> None:
    """Raise MisuseError if the store has a run with this id of another agent. A run of this agent is continued."""
    try:
        target = (await agent.runs.header(run_id)).target
    except RunNotFoundError:
        return
    theirs, own = split_target(target)[0], split_target(agent.target)[0]
    if theirs and theirs != own:
        await agent.aclose()
        raise MisuseError(f"run {run_id!r} exists and belongs to {theirs}, not to {own}: choose another id")


def demo(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Let an agent survey a folder."""
    from agentfsm.cli.demo.demo_agent import build_report_approver, describe_model, prepare_survey  # noqa: PLC0415  loads a server and tools

    start = prepare_survey(args.folder)
    agent, location = attach_store(load_agent(DEMO_TARGET), DEMO_TARGET, args.store)
    attended = AttendedRun(
        terminal=terminal,
        agent=agent,
        run=agent.start(start.prompt, metadata=start.metadata),
        store_location=location,
        unattended_decide=build_report_approver(terminal),
        remark=f"{describe_model(agent)}\n{_DEMO_REMARK.format(program=find_program())}",
    )
    code = attended.attend()
    if code is ExitCode.DONE and not terminal.json:
        terminal.out("\n".join(_list_next_steps(attended)))
    return code


def _list_next_steps(attended: AttendedRun) -> Iterator[str]:
    """Yield lines with commands to try after the demo."""
    run_id = attended.run.id
    studio = "" if find_spec("starlette") is not None else "; before it, pip install 'agentfsm[serve]'"
    steps = {
        f"show {run_id}": "the run as it was recorded",
        f"replay {run_id}": "would it ask the same again? No model and no tool is called",
        "studio": f"the same in a browser, step by step{studio}",
    }
    commands = {attended.hint.build(command): text for command, text in steps.items()}
    commands[f"{find_program()} init my-agent"] = "an agent of your own"
    yield "\nEach step is in a journal, so the run can be inspected, and a run that was killed continues. Next:"
    for command, text in commands.items():  # a line of its own, which can be copied whole
        yield f"  {command}"
        yield f"      {text}"


def resume(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Resume a run."""
    if args.agent is None and (code := _report_if_over(args, terminal)) is not None:
        return code
    found = resolve_run(args, terminal, checks_release=True)
    absent: DecideFunction = leave_undecided
    if args.takeover:
        anyio.run(_take_over, found.agent, args.id)
    if found.run.header.target == DEMO_TARGET:
        from agentfsm.cli.demo.demo_agent import build_report_approver  # noqa: PLC0415  loads a server and tools

        absent = build_report_approver(terminal)
    attended = AttendedRun(
        terminal=terminal,
        agent=found.agent,
        run=found.run,
        store_location=found.store_location,
        resumes_pause=True,
        renamed=dict(args.renamed),
        unattended_decide=absent,
    )
    return attended.attend()


async def _take_over(agent: Agent, run_id: str) -> None:
    """Take the lease of a run from the worker that executes it."""
    lease = await agent.store.lease(run_id, takeover=True)
    await agent.store.release(lease).wait()


def _report_if_over(args: argparse.Namespace, terminal: Terminal) -> ExitCode | None:
    """Report a run that is over, and return its exit code; None for an open run. The agent is not loaded for this.

    Raises:
        MisuseError: if the run is that of a sub-agent.
    """
    store = open_existing_store(args.store)
    found, root = run_in_store(store, lambda: load_with_root(store, args.id))
    hint = build_header_hint(root, resolve_location(args.store))
    if found.is_over:
        terminal.err(f"run {found.id} is over")
        return report_run(terminal, found, hint)
    if root.id != found.id:
        error = MisuseError(
            f"run {found.id} belongs to run {root.id}: resume that one with {hint.build_resume(root.id)}"
        )
        if hint.note:
            error.add_note(hint.note)
        raise error
    return None


def chat(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Talk with an agent."""
    found, location = resolve_agent_or_rollout(args, terminal)
    agent, rollout = (found, None) if isinstance(found, Agent) else (found.base, found)
    if isinstance(agent, Flow):
        raise MisuseError(
            f"{args.agent} is a flow, which takes inputs by name and no messages: use "
            f'agentfsm run {args.agent} \'{{"INPUT": "VALUE"}}\''
        )
    session = anyio.run(_find_newest, agent, args.user) if args.continues else args.session
    return ChatSession(
        terminal=terminal,
        agent=agent,
        rollout=rollout,
        store_location=location,
        session=session or build_session_name(agent),
        user=args.user,
        tenant=args.tenant,
        roles=args.role,
        target=join_target(args.agent, args.mcp),
    ).chat()


async def _find_newest(agent: Agent, user: str | None) -> str:
    """Return the session with the newest run of the user with this agent.

    Raises:
        MisuseError: if there is none.
    """
    async for summary in agent.runs.iterate(Filter(agent=agent.name, user=user, purpose="")):
        if summary.session is not None and summary.user == user and summary.parent is None:
            return summary.session
    raise MisuseError(f"the store has no session with the agent {agent.name!r}: leave out --continue to begin one")


def submit(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Put a run into the store, for a worker."""
    _check_engine_options(args, "priority", "delay")
    agent, location, options = _resolve_release(args, terminal)
    started = _start_run(args, agent, options)

    async def act() -> Run:
        async with agent:
            if args.engine == "store":
                return await agent.submit(started)
            async with _open_engine(agent) as engine:
                return await engine.submit(started, priority=args.priority, delay_s=args.delay)

    found = anyio.run(act)
    hint = build_hint(found, agent, location)
    choice = "" if args.engine == "store" else f"--engine {args.engine} "
    worker_command = hint.build(f"worker {choice}{join_target(*split_target(agent.target))}")
    terminal.err(f"submitted; any worker of the agent executes it: {worker_command}")
    if terminal.json:
        terminal.document(build_run_json(found, hint))
    else:
        terminal.out(found.id)
    return ExitCode.DONE


def worker(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Execute the runs of an agent until a signal arrives, or with `--until-idle` until no run is ready."""
    _check_engine_options(args, "concurrency", "tenant_concurrency", "rate")
    found, location = resolve_agent_or_rollout(args, terminal)
    rollout, agent = (None, found) if isinstance(found, Agent) else (found, found.base)
    relay = None if args.deltas is None else DeltaRelay(args.deltas)
    report = _WorkerReport(agent=agent, rollout=rollout, terminal=terminal, location=location, relay=relay)
    poll_s = args.poll or WORKER_POLL_S
    if rollout is None:
        own = Worker(
            agent=agent,
            execute=report.execute,
            deps=None,
            parallel=args.parallel,
            poll_s=poll_s,
            drain_s=args.drain,
            starter=DueRuns(agent),
        )
        work = partial(own.run, until_idle=args.until_idle)
    else:
        own = rollout.build_worker(report.execute, parallel=args.parallel, poll_s=poll_s, drain_s=args.drain)
        work = partial(rollout.run_worker, own, until_idle=args.until_idle)
    if args.engine != "store":
        if rollout is not None:
            raise MisuseError("a roll-out has several releases, and a queue of DBOS has one: leave out --engine")
        engine = _open_engine(
            agent,
            worker_concurrency=args.parallel,
            **({} if args.poll is None else {"poll_s": args.poll}),
            concurrency=args.concurrency,
            tenant_concurrency=args.tenant_concurrency,
            limiter=args.rate,
        )
        work = partial(_work_and_close, engine, own, until_idle=args.until_idle)
    if not args.until_idle:
        notifier = None
        if args.alerts_to is not None:
            from agentfsm.cli.commands.alert_rules import build_notifier  # noqa: PLC0415  it loads an HTTP client

            notifier = build_notifier(args, agent.store, args.alerts_to)
        work = partial(_work_and_count, work, agent.store, notifier)
    where = "the agent's own store" if location is None else mask_password(location)
    terminal.err(f"executing runs of {agent.name!r} in {where}; stop with Ctrl-C")

    with InterruptibleRunner(drain_s=args.drain, end_drain=own.end_drain) as runner:
        try:
            with stdout_to_stderr():  # stdout is reserved for results
                runner.run(work)
        except KeyboardInterrupt:
            terminal.err("stopped: any worker continues the open runs")
        finally:
            runner.run(agent.aclose)
    if terminal.json:
        terminal.document({"agent": agent.name, "runs": dict(report.end_counts)})
    return ExitCode.FAILED if args.until_idle and own.failed_count else ExitCode.DONE


def _check_engine_options(args: argparse.Namespace, *names: str) -> None:
    """Raise MisuseError if an option is given that only an engine has."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given and args.engine == "store":
        raise MisuseError(f"{given[0]} needs an engine that has it, and the store has not: add --engine dbos")


def _open_engine(agent: Agent, **options: Any) -> DBOSEngine:
    from agentfsm.engines.dbos import DBOSEngine  # noqa: PLC0415  it needs an extra, and a second to load

    return DBOSEngine(agent, **options)


async def _work_and_count(work: Callable[[], Awaitable[None]], store: Store, notifier: AlertNotifier | None) -> None:
    """Execute runs, and keep the totals of the store meanwhile."""
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Totals(store).follow)
            if notifier is not None:
                tasks.start_soon(notifier.follow)
            await work()
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise first_error(group) from None


async def _work_and_close(engine: DBOSEngine, own: Worker, *, until_idle: bool) -> None:
    async with engine:
        await engine.serve_worker(own, until_idle=until_idle)


@attrs.define(eq=False, repr=False, kw_only=True)
class _WorkerReport:
    """Executes the runs of a worker, reports each of them, and counts their ends."""

    agent: Agent
    rollout: Rollout | None
    """Roll-out that has the agent of each run; None if there is one agent."""

    terminal: Terminal
    location: str | None
    """Path or URL of the store; None if only the agent can open it."""

    relay: DeltaRelay | None
    """Passes the text of the models to servers."""

    end_counts: Counter[str] = attrs.field(factory=lambda: Counter({"done": 0, "failed": 0, "waiting": 0}), init=False)

    async def execute(self, before: Run, options: ExecutionOptions) -> Run:
        """Execute a run whose lease is held, and report its end or its waits.

        Raises:
            IncompatibleProgramError: if the run belongs to another agent with the same name.
        """
        agent = self.agent if self.rollout is None else self.rollout.find_agent(before.header.release)
        target = before.header.target
        if target and target != agent.target:
            hint = CommandHint(location=self.location, agent=agent.target)
            raise IncompatibleProgramError(
                f"the run belongs to {target}, which has the same name as {agent.target}: give two agents two names; "
                f"if the module was moved, continue the run with {hint.build_resume(before.id)}"
            )
        if self.relay is not None:
            options = options._replace(on_event=pass_deltas(before.id, self.relay.publish))
        run = await agent.driver.run_until_blocked(before, options)
        if run.version > before.version:
            self.end_counts[_END_NAMES.get(run.state, "waiting")] += 1
            self.terminal.err(one_line(f"run {run.id} {describe_end(run)}", MAX_LINE_CHARS))
        return run
