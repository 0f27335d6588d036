"""`agentfsm upgrade check`: what becomes of the open runs of an agent under another release of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from agentfsm.cli.argument_types import parse_count, parse_output_file
from agentfsm.cli.arguments import AddParser, add_agent, add_command, add_group
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.commands.rollout_admin import align_columns
from agentfsm.cli.render.formatting import format_count
from agentfsm.cli.resolve.run_lookup import resolve_agent
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.core.text_safety import strip_unsafe
from agentfsm.releases import check_upgrade
from agentfsm.releases.upgrade_report import LISTED_RUNS, VERDICTS, describe_place

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.releases import UpgradeReport


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(add, "upgrade")
    text = "say what becomes of each open run; no model is asked, and no tool is called"
    checks = add_command(sub, check, text=text)
    add_agent(checks)
    checks.add_argument(
        "--limit", metavar="N", type=parse_count, default=LISTED_RUNS, help="maximum of runs (default: %(default)s)"
    )
    checks.add_argument("--offset", metavar="N", type=parse_count, default=0, help="runs to leave out before them")
    checks.add_argument(
        "--markdown", metavar="FILE", type=parse_output_file, help="write the report as Markdown as well"
    )


def check(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Compare the open runs of an agent with the agent as it is here."""
    agent, location = resolve_agent(args, terminal)
    if location is not None:  # nothing is created
        agent = agent.with_(store=open_existing_store(location))

    async def act() -> UpgradeReport:
        async with agent:
            return await check_upgrade(agent)

    report = anyio.run(act)
    page = {"limit": args.limit, "offset": args.offset}
    if args.markdown is not None:
        Path(args.markdown).write_text(report.to_markdown(**page), encoding="utf-8")
    if terminal.json:
        terminal.document(report.to_dict(**page))
    else:
        _print(report, args, terminal)
    return ExitCode.DONE if report.is_smooth else ExitCode.FAILED


def _print(report: UpgradeReport, args: argparse.Namespace, terminal: Terminal) -> None:
    name = f"{report.agent} {report.release}".strip()
    terminal.out(strip_unsafe(f"{format_count(len(report.runs), 'open run')} of {name}"))
    rows = [(f"{number:,}", str(verdict), VERDICTS[verdict]) for verdict, number in report.verdicts.items() if number]
    rows += [
        (f"{number:,}", "", f"belong to release {release}, whose workers go on to execute them")
        for release, number in report.releases.items()
        if release != report.release
    ]
    counted = [(f"{number:,}", str(each.verdict), each.kind, each.text) for each, number in report.count_changes()]
    page = report.to_dict(limit=args.limit, offset=args.offset)["runs"]
    listed = [
        (run["id"], each["verdict"], describe_place(run["id"], each), each["text"])
        for run in page
        for each in run["changes"]
    ]
    for title, table in (("", rows), ("differences", counted), ("runs", listed)):
        if table and title:
            terminal.out(title)
        for line in align_columns(table) if table else ():
            terminal.out(strip_unsafe(f"  {line}"))
    if (left := len(report.changed) - args.offset - len(page)) > 0:
        terminal.err(
            f"{format_count(left, 'more run')}: --offset {args.offset + len(page)}, or --limit for more at once"
        )
