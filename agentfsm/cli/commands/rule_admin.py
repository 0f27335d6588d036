"""`agentfsm rules`: ask the rules of an agent about the calls of old runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import attrs

from agentfsm.cli.argument_types import parse_since
from agentfsm.cli.arguments import AddParser, add_command, add_group
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import NOTE_CHARS, format_count, format_time
from agentfsm.cli.resolve.agent_target import load_agent
from agentfsm.cli.resolve.run_lookup import run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.core.events import GuardVerdict
from agentfsm.core.sensitive_text import redact_sensitive
from agentfsm.core.text_safety import one_line
from agentfsm.ports.store import Filter

if TYPE_CHECKING:
    from agentfsm.agents.rule_check import RuleFinding, RuleReport
    from agentfsm.cli.terminal import Terminal


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(add, "rules")
    options = add_command(
        sub, check, text="list the calls that the rules would have refused; exit code 1 if there are some"
    )
    options.add_argument("--agent", metavar="module:agent", required=True, help="the agent whose guards are asked")
    options.add_argument("--name", help="runs of the agent with this name (default: that of the agent)")
    options.add_argument("--since", metavar="TIME", type=parse_since, help="only runs begun since then, such as 90d")


def check(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the calls of old runs that the rules over time of an agent would have refused, or asked about."""
    from agentfsm.agents.rule_check import check_rules  # noqa: PLC0415  the parser needs none of it

    agent = load_agent(args.agent)
    store = open_existing_store(args.store)
    where = Filter(agent=args.name or agent.name, since=args.since)

    async def act() -> RuleReport:
        return await check_rules(store, agent.guards, agent.tools, where)

    report = run_in_store(store, act)
    if terminal.json:
        terminal.document({**attrs.asdict(report), "findings": [attrs.asdict(each) for each in report.findings]})
    else:
        for finding in report.findings:
            terminal.out(_format_finding(finding))
    runs = len({each.run_id for each in report.findings})
    terminal.err(
        f"{format_count(report.runs, 'run')}, {format_count(report.calls, 'call')} of tools that the rules are about: "
        f"{len(report.findings):,} would have been refused or asked about, in {format_count(runs, 'run')}"
    )
    return ExitCode.FAILED if report.findings else ExitCode.DONE


def _format_finding(finding: RuleFinding) -> str:
    reason = one_line(redact_sensitive(finding.reason), NOTE_CHARS)
    if not finding.call_id:
        return f"{format_time(finding.at)}  {finding.run_id}  end: {reason}"
    verdict = "asked about" if finding.verdict is GuardVerdict.ASK else "refused"
    call = f"{finding.run_id} {finding.call_id}  {finding.tool}, {finding.outcome or 'open'}"
    return f"{format_time(finding.at)}  {call}: {verdict}: {reason}"
