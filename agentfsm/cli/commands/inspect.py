"""The subcommands that inspect runs and agents without changing them."""

from __future__ import annotations

import argparse
import logging
import shlex
from typing import TYPE_CHECKING, get_args

import attrs

from agentfsm.agents.runs import Runs
from agentfsm.cli.argument_types import (
    parse_count,
    parse_date,
    parse_output_file,
    parse_rating,
    parse_seconds,
    parse_since,
    parse_usd,
)
from agentfsm.cli.arguments import (
    EVIDENCE_HELP,
    AddParser,
    add_agent,
    add_agent_option,
    add_command,
    add_mcp_option,
    add_purpose,
    add_run_id,
)
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.commands.alert_rules import OTLP, export_traces
from agentfsm.cli.render import flowchart
from agentfsm.cli.render.flowchart import draw_plans
from agentfsm.cli.render.formatting import format_time
from agentfsm.cli.render.json_documents import (
    build_export_json,
    build_full_run_json,
    build_journal_json,
    build_posted_json,
    build_summary_json,
)
from agentfsm.cli.render.sent_request import format_sent_request
from agentfsm.cli.render.text import format_events, format_feedback, format_posted, format_run, format_summaries
from agentfsm.cli.resolve.agent_target import is_target, load_agent
from agentfsm.cli.resolve.command_hint import CommandHint, build_header_hint
from agentfsm.cli.resolve.run_lookup import resolve_run, run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store, resolve_location
from agentfsm.core import machine as diagram
from agentfsm.core.errors import MisuseError
from agentfsm.core.inbox import Decision
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.run import begin_run
from agentfsm.core.text_safety import strip_unsafe
from agentfsm.journal.run_status import RunStatus, explain_standstill, find_past_status, list_statuses, read_status
from agentfsm.ports.store import Filter, RunOrder, Store
from agentfsm.streaming.log import describe_events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.events import Event
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.journal.run_list import StrandedRun
    from agentfsm.ports.store import RunSummary
    from agentfsm.ports.stored import Feedback


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    runs_options = add_command(add, runs)
    runs_options.add_argument("--session", help="only runs of this conversation")
    runs_options.add_argument("--agent", metavar="NAME", help="only runs of the agent with this name")
    runs_options.add_argument("--user", metavar="NAME", help="only runs of this user")
    runs_options.add_argument("--state", choices=[str(state) for state in State], help="only runs in this state")
    runs_options.add_argument(
        "--stop-reason", choices=[str(each) for each in StopReason], help="only runs that ended for this reason"
    )
    runs_options.add_argument("--release", metavar="NAME", help="only runs of this release of an agent")
    runs_options.add_argument(
        "--text", metavar="WORDS", help="only runs whose prompt and answer have all of these words"
    )
    runs_options.add_argument("--waiting", action="store_true", help="only runs that wait for a person or for input")
    runs_options.add_argument(
        "--stranded", action="store_true", help="only runs that are ready and that no worker takes, with the reason"
    )
    add_purpose(runs_options)
    runs_options.add_argument("--parent", metavar="RUN", help="only runs of sub-agents that this run called")
    runs_options.add_argument(
        "--since", metavar="TIME", type=parse_since, help="only runs created on this date or later, such as 7d"
    )
    runs_options.add_argument("--before", metavar="TIME", type=parse_date, help="only runs created before this date")
    runs_options.add_argument(
        "--min-cost", metavar="USD", type=parse_usd, help="only runs that have cost this much or more"
    )
    runs_options.add_argument(
        "--min-duration", metavar="SECONDS", type=parse_seconds, help="only runs that were executed for this long"
    )
    runs_options.add_argument(
        "--sort",
        choices=get_args(RunOrder),
        default="newest",
        help="order: newest first, or of the runs that are over the dearest or the longest (default: %(default)s)",
    )
    runs_options.add_argument(
        "--max-rating", metavar="1-5", type=parse_rating, help="only runs with this rating or a worse one"
    )
    runs_options.add_argument("--all", action="store_true", help="also list the runs of sub-agents")
    runs_options.add_argument("--limit", type=parse_count, default=20, help="maximum number (default: %(default)s)")
    show_options = add_command(add, show)
    add_run_id(show_options)
    show_options.add_argument("--at", metavar="VERSION", type=int, help="show the run as it was at this version")
    show_options.add_argument("--events", action="store_true", help="list its journal as well")
    show_options.add_argument(
        "--request",
        metavar="TURN",
        type=parse_count,
        help="show what the model was sent in this turn instead: all parts, with tokens and costs",
    )
    add_agent_option(show_options)
    logs_options = add_command(add, logs)
    add_run_id(logs_options)
    logs_options.add_argument("--follow", action="store_true", help="go on with what is new, until the run is over")
    _add_export(add)
    _add_load(add)
    graph_options = add_command(add, graph)
    graph_options.add_argument(
        "subject", metavar="module:agent|RUN", nargs="?", help="an agent or a run (default: the state machine)"
    )
    graph_options.add_argument(
        "--format", choices=["mermaid", "dot", "text"], default="mermaid", help="output format (default: %(default)s)"
    )
    graph_options.add_argument(
        "--states", action="store_true", help="draw the states of a run, also if it has a plan or is a flow"
    )
    doctor_options = add_command(add, doctor)
    doctor_options.add_argument("agent", metavar="module:agent", nargs="?", help="the agent whose tools are checked")
    add_mcp_option(doctor_options, "add the MCP servers of this file to its tools")
    doctor_options.add_argument("--prompts", metavar="FOLDER", help="the folder whose prompts are checked")
    live = doctor_options.add_argument_group("before going live")
    live.add_argument("--production", action="store_true", help="check whether the agent is ready for production")
    live.add_argument("--evidence", metavar="FOLDER", default="evidence", help=EVIDENCE_HELP)
    live.add_argument("--waivers", metavar="FILE", help="TOML file with accepted failures: check, by, until, reason")
    live.add_argument("--no-probes", action="store_true", help="do not run the agent with a scripted model")
    live.add_argument(
        "--write", metavar="FILE", type=parse_output_file, help="also write the report as a page in Markdown"
    )
    live.add_argument("--sarif", metavar="FILE", type=parse_output_file, help="also write what did not pass as SARIF")
    live.add_argument("--junit", metavar="FILE", type=parse_output_file, help="also write the report as JUnit's XML")


def _add_export(add: AddParser) -> None:
    export_options = add_command(add, export)
    export_options.add_argument(
        "id", metavar="RUN|otlp", help="id of the run; or the word otlp, for the traces of all runs"
    )
    export_options.add_argument("--messages", action="store_true", help="write only its messages, in OpenAI's format")
    export_options.add_argument("--to", metavar="URL", help="otlp: the server (default: $OTEL_EXPORTER_OTLP_ENDPOINT)")
    export_options.add_argument(
        "--since", metavar="TIME", type=parse_since, help="otlp: only runs that were open then or later, such as 7d"
    )
    export_options.add_argument(
        "--content",
        choices=["none", "redacted", "full"],
        default="none",
        help="otlp: texts that the spans have (default: %(default)s)",
    )
    export_options.add_argument("--follow", action="store_true", help="otlp: export what is new, until interrupted")


def _add_load(add: AddParser) -> None:
    load_options = add_command(add, load)
    add_agent(load_options)
    load_options.add_argument("--prompts", metavar="FILE", help="file with a prompt in each line, used in turn")
    load_options.add_argument("--prompt", metavar="TEXT", help="the prompt of all runs")
    load_options.add_argument(
        "--runs", metavar="N", type=parse_count, default=100, help="number of runs (default: %(default)s)"
    )
    load_options.add_argument(
        "--concurrency",
        metavar="N",
        type=parse_count,
        default=8,
        help="runs at a time (default: %(default)s)",
    )
    load_options.add_argument(
        "--runs-per-day", metavar="N", type=parse_count, help="runs expected in production, for a forecast of the costs"
    )
    load_options.add_argument(
        "--out",
        metavar="FILE",
        help="write the result as JSON, as evidence for doctor --production",
    )


def runs(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List runs."""
    where = Filter(
        session=args.session,
        agent=args.agent,
        user=args.user,
        state=None if args.state is None else State(args.state),
        waiting=True if args.waiting else None,
        parent=args.parent,
        stop_reason=None if args.stop_reason is None else StopReason(args.stop_reason),
        release=args.release,
        text=args.text,
        since=args.since,
        before=args.before,
        min_cost_usd=args.min_cost,
        min_duration_s=args.min_duration,
        max_rating=args.max_rating,
        purpose=args.purpose if args.session is None and args.parent is None else args.purpose or None,
    )
    store = open_existing_store(args.store)
    if args.stranded:
        return _list_stranded(store, where, args.limit, terminal)
    is_whole = args.all or args.parent is not None

    async def act() -> tuple[Sequence[RunSummary], Sequence[RunStatus]]:
        rows = await Runs(store).list(where, limit=args.limit, subagents=is_whole, order=args.sort)
        return rows, await list_statuses(store, rows)

    found, statuses = run_in_store(store, act)
    if not found:
        terminal.err("no runs")
    if terminal.json:
        terminal.document({"runs": [build_summary_json(*each) for each in zip(found, statuses, strict=True)]})
        return ExitCode.DONE
    for line in format_summaries(found, statuses, terminal.width):
        terminal.out(line)
    standing = next((run for run, status in zip(found, statuses, strict=True) if explain_standstill(run, status)), None)
    if standing is not None:
        command = CommandHint(location=resolve_location(args.store)).build(f"show {shlex.quote(standing.id)}")
        terminal.err(f"idle and queued runs stand still until a process executes them. How one continues: {command}")
    return ExitCode.DONE


def _list_stranded(store: Store, where: Filter, limit: int, terminal: Terminal) -> ExitCode:
    async def act() -> tuple[Sequence[StrandedRun], Sequence[RunStatus]]:
        found = (await Runs(store).list_stranded(where))[:limit]
        return found, await list_statuses(store, [each.run for each in found])

    stranded, statuses = run_in_store(store, act)
    if terminal.json:
        rows = [
            build_summary_json(each.run, status)
            | {"stranded": {"reason": each.reason, "since": each.since, "text": str(each)}}
            for each, status in zip(stranded, statuses, strict=True)
        ]
        terminal.document({"runs": rows})
        return ExitCode.DONE
    for each in stranded:
        terminal.out(strip_unsafe(f"{each.run.id}  ready since {format_time(each.since)}: {each}"))
    if not stranded:
        terminal.err("no runs are stranded")
    return ExitCode.DONE


def show(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Show a run, or what its model was sent in a turn.

    Raises:
        MisuseError: if the run has no such turn, or the agent that was named cannot be loaded.
    """
    if args.request is not None:
        return _show_request(args, terminal)
    found, events, root, hint = _load_run(args.id, args.at, args.store)
    store = open_existing_store(args.store)
    posted: Sequence[tuple[str, Decision]] = ()
    feedback: Sequence[Feedback] = ()
    status, standstill = find_past_status(found), ""
    if args.at is None:
        resume = hint.build_resume(root)
        posted, feedback, status, standstill = run_in_store(store, lambda: _read_additions(store, found, resume))
    if terminal.json:
        journal = {"events": build_journal_json(events)} if args.events else {}
        decisions = {"posted": [build_posted_json(*each) for each in posted]}
        decisions["feedback"] = [attrs.asdict(each) for each in feedback]
        now = {"status": status, "standstill": standstill or None}
        terminal.document(build_full_run_json(found, hint, root, events) | now | decisions | journal)
        return ExitCode.DONE
    terminal.out(format_run(found, events, status=f"{status}: {standstill}" if standstill else status))
    for run_id, decision in posted:
        terminal.out(format_posted(run_id, decision, found))
    for each in feedback:
        terminal.out(format_feedback(each))
    for line in format_events(events) if args.events else ():
        terminal.out(line)
    return ExitCode.DONE


def _show_request(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    from agentfsm.engine.sent_request import build_request_document, read_sent_request  # noqa: PLC0415  with the engine

    config: EngineConfig | None = None
    store = open_existing_store(args.store)
    try:
        config = resolve_run(args, terminal).agent.driver.config
    except MisuseError as error:
        if args.agent is not None:
            raise
        terminal.err(f"tools and settings are missing: {error}")
    found = run_in_store(store, lambda: read_sent_request(store, args.id, args.request, config=config))
    if terminal.json:
        terminal.document(build_request_document(found))
        return ExitCode.DONE
    for line in format_sent_request(found):
        terminal.out(line)
    return ExitCode.DONE


async def _read_additions(
    store: Store, run: Run, resume: str
) -> tuple[Sequence[tuple[str, Decision]], Sequence[Feedback], RunStatus, str]:
    """Return the decisions in the inboxes of the run and of the sub-agents' runs that wait, feedback and status."""
    ids = dict.fromkeys([run.id, *[item.run_id for item in run.pending]])
    rows = [(run_id, row.item) for run_id in ids for row in await store.inbox(run_id)]
    decisions = [(run_id, item) for run_id, item in rows if isinstance(item, Decision)]
    status, standstill = await read_status(store, run, resume)
    return decisions, await store.list_feedback(run.id), status, standstill


def logs(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the lines of the log that the journal of a run gives."""
    store = open_existing_store(args.store)
    documents: list[dict[str, object]] = []

    async def act() -> None:
        header = await Runs(store).header(args.id)
        run: Run = begin_run(header)

        def write(event: Event) -> None:
            nonlocal run
            run = run.apply(event)
            for line in describe_events(run, (event,)):
                level = logging.getLevelName(line.level)
                if terminal.json:
                    named = {"event": line.event, "run": header.id, "agent": header.agent}
                    documents.append({"at": line.at, "level": level, **named, **line.facts})
                else:
                    terminal.out(f"{format_time(line.at)}  {level:<7}  {line.format(header)}")

        if args.follow:
            async for item in Runs(store).events(args.id):
                write(item.event)
        else:
            for event in await Runs(store).history(args.id):
                write(event)

    run_in_store(store, act)
    if terminal.json:
        terminal.document({"lines": documents})
    return ExitCode.DONE


def export(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Write a run with its journal and its messages; or export the traces of runs."""
    if args.id == OTLP:
        return export_traces(args, terminal)
    found, events, root, hint = _load_run(args.id, None, args.store)
    if args.messages:
        from agentfsm.models import to_openai  # noqa: PLC0415  few commands need the models

        terminal.document({"messages": to_openai(found.messages)})
        return ExitCode.DONE
    terminal.document(build_export_json(found, hint, root, events))
    return ExitCode.DONE


def _load_run(run_id: str, at: int | None, given: str | None) -> tuple[Run, tuple[Event, ...], str, CommandHint]:
    """Return a run at a version, its journal up to there, the id of its root, and the hint for resuming the root."""
    store = open_existing_store(given)

    async def act() -> tuple[Run, tuple[Event, ...], str, CommandHint]:
        runs = Runs(store)
        events = await runs.history(run_id)
        found = await runs.load(run_id, at=len(events) if at is None else at)
        root = await runs.root(run_id)
        return found, events[: found.version], root.id, build_header_hint(root, resolve_location(given))

    return run_in_store(store, act)


def graph(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Draw the state machine, an agent or a run."""
    if args.subject is None:
        drawn = {"mermaid": diagram.mermaid, "dot": diagram.dot, "text": diagram.text}[args.format]()
    else:
        drawn = _draw_named(args)
    if terminal.json:
        terminal.document({"format": args.format, "graph": drawn})
    else:
        terminal.out(drawn)
    return ExitCode.DONE


def _draw_named(args: argparse.Namespace) -> str:
    """Return the picture of the agent or the run that the arguments name.

    Raises:
        MisuseError: if the agent cannot be loaded, or the format is only for the state machine.
        RunNotFoundError: if the store does not contain the run.
    """
    if args.format not in flowchart.RENDERERS:
        raise MisuseError(
            f"--format {args.format} is only for the state machine: give --format {' or '.join(flowchart.RENDERERS)}"
        )
    draw = flowchart.RENDERERS[args.format]
    if is_target(args.subject):
        return draw(flowchart.draw_agent(load_agent(args.subject)))
    found, events, *_ = _load_run(args.subject, None, args.store)
    if found.plan is not None and not args.states:
        return draw(draw_plans(found, events))
    return draw(flowchart.draw_run(found, events))


def doctor(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Check the installation, the store and an agent; or whether an agent is ready for production."""
    if args.production:
        from agentfsm.cli.commands.production import examine_production  # noqa: PLC0415  few calls need it

        return examine_production(args, terminal)
    from agentfsm.cli.commands.doctor import examine  # noqa: PLC0415  loads every part of the package

    return examine(args, terminal)


def load(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Measure how long runs of an agent take at a stated concurrency."""
    from agentfsm.cli.commands.production import measure  # noqa: PLC0415  few calls need it

    return measure(args, terminal)
