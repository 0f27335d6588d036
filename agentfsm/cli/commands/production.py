"""`agentfsm doctor --production`, `load` and `drill`: is an agent ready for production, and the evidence for it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import attrs

from agentfsm.cli.arguments import AUTHOR_HELP, EVIDENCE_HELP, AddParser, add_command, add_group
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.resolve.agent_target import load_agent
from agentfsm.cli.resolve.mcp_servers import join_servers
from agentfsm.cli.resolve.run_lookup import resolve_agent, run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store, resolve_location
from agentfsm.cli.terminal import user_name
from agentfsm.core.errors import MisuseError
from agentfsm.core.machine import State
from agentfsm.core.usage import format_usd
from agentfsm.readiness import (
    ReadinessReport,
    drill_restore,
    drill_rollback,
    examine_readiness,
    load_waivers,
    measure_load,
)
from agentfsm.readiness.report_formats import (
    format_lines,
    render_json,
    render_junit,
    render_markdown,
    render_sarif,
)

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.run import Run
    from agentfsm.readiness import DrillReport, LoadReport


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(add, "drill")
    rollback = add_command(
        sub, drill_a_rollback, name="rollback", text="roll back a copy of a roll-out, and measure it"
    )
    rollback.add_argument("name", metavar="NAME", help="name of the roll-out")
    restore = add_command(
        sub,
        drill_a_restore,
        name="restore",
        text="open a backup of the store, and read its journals",
    )
    restore.add_argument("backup", metavar="FILE|URL", help="a file of SQLite, or a store that has the backup")
    restore.add_argument(
        "--run", metavar="COMMAND", default="", help="command that restores the backup into the URL, such as pg_restore"
    )
    restore.add_argument("--seals", metavar="FILE", help="compare the journals with these seals of `audit --seal`")
    for each in (rollback, restore):
        each.add_argument("--by", metavar="NAME", default=user_name() or "unknown", help=AUTHOR_HELP)
        each.add_argument("--evidence", metavar="FOLDER", default="evidence", help=EVIDENCE_HELP)


def examine_production(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Check whether an agent is ready for production.

    Returns:
        DONE, or FAILED if a check is neither passed nor waived.

    Raises:
        MisuseError: if no agent is named, or the file of waivers is wrong.
    """
    if args.agent is None:
        raise MisuseError("--production checks an agent: agentfsm doctor --production module:agent")
    waivers = {} if args.waivers is None else load_waivers(args.waivers)
    agent = join_servers(load_agent(args.agent), args.mcp, terminal)
    if args.store is not None:
        agent = agent.with_(store=open_existing_store(args.store))

    async def act() -> ReadinessReport:
        async with agent:
            return await examine_readiness(agent, evidence=args.evidence, waivers=waivers, probes=not args.no_probes)

    report = anyio.run(act)
    for path, render in ((args.write, render_markdown), (args.sarif, render_sarif), (args.junit, render_junit)):
        if path is not None:
            Path(path).write_text(render(report), encoding="utf-8")
    if terminal.json:
        terminal.document(render_json(report))
    else:
        for line in format_lines(report):
            terminal.out(line)
    return ExitCode.DONE if report.is_ready else ExitCode.FAILED


def measure(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Execute runs of an agent at a stated concurrency, and report their times.

    Returns:
        DONE, or FAILED if a run had no answer.

    Raises:
        MisuseError: if there is no prompt.
    """
    prompts = [args.prompt] if args.prompt is not None else _read_prompts(args.prompts)
    agent, _location = resolve_agent(args, terminal)
    done = 0

    def show(run: Run) -> None:
        nonlocal done
        done += 1
        if run.state is not State.DONE:
            reason = f"{run.stop_reason}: {run.stop_message}" if run.is_over else "waits for a person"
            terminal.err(f"{done}/{args.runs} {run.id} {reason}"[:300])

    async def act() -> LoadReport:
        async with agent:
            return await measure_load(
                agent,
                prompts,
                runs=args.runs,
                concurrency=args.concurrency,
                runs_per_day=args.runs_per_day,
                on_run=show,
            )

    report = anyio.run(act)
    if args.out is not None:
        report.save(args.out)
    if terminal.json:
        terminal.document(attrs.asdict(report))
    else:
        terminal.out(f"{report.agent}, {report.model}: {report.runs} runs, {report.concurrency} at a time")
        terminal.out(f"  P50 {report.p50_s:.3f} s, P95 {report.p95_s:.3f} s, P99 {report.p99_s:.3f} s")
        terminal.out(f"  {report.runs / report.seconds:.1f} runs/s, {report.tokens:,} tokens, {format_usd(report.usd)}")
        terminal.out(f"  {report.failed} failed: {', '.join(f'{n} {why}' for why, n in report.stop_reasons.items())}")
    return ExitCode.FAILED if report.failed else ExitCode.DONE


def drill_a_rollback(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Roll back a copy of a roll-out, and record how long it took."""
    store = open_existing_store(args.store)
    return _record(run_in_store(store, lambda: drill_rollback(args.name, store, by=args.by)), args, terminal)


def drill_a_restore(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Restore a backup into a temporary store, read all of its journals, and record how long it took."""
    place = resolve_location(args.store)
    if Path(place).resolve() == Path(args.backup).resolve() or place == args.backup:
        raise MisuseError(f"{args.backup} is the store in production: name a backup of it, and --store for the store")
    store = open_existing_store(args.store)

    async def act() -> DrillReport:
        return await drill_restore(args.backup, by=args.by, live=store, command=args.run, seals=args.seals)

    return _record(run_in_store(store, act), args, terminal)


def _record(report: DrillReport, args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    path = report.save(args.evidence)
    if terminal.json:
        terminal.document(attrs.asdict(report))
    else:
        result = (
            f"{report.kind} failed: {report.failure}" if report.failure else f"{report.kind} in {report.seconds:g} s"
        )
        terminal.out(": ".join(filter(None, (result, report.note))))
        terminal.err(f"recorded in {path}")
    return ExitCode.FAILED if report.failure else ExitCode.DONE


def _read_prompts(path: str | None) -> list[str]:
    """Return the lines of a file that are not blank."""
    if path is None:
        raise MisuseError("give prompts: --prompts FILE with one in each line, or --prompt TEXT")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise MisuseError(f"{path} is not a file of prompts: {error}") from None
    if not (prompts := [line for line in text.splitlines() if line.strip()]):
        raise MisuseError(f"{path} has no prompts: write one in each line")
    return prompts
