"""The subcommand that drives stored runs again with another agent, without an effect."""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from agentfsm.cli.argument_types import parse_count, parse_output_file, parse_since, parse_usd
from agentfsm.cli.arguments import AddParser, add_command, add_mcp_option
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.resolve.agent_target import look_in_current_folder
from agentfsm.cli.resolve.run_lookup import resolve_agent
from agentfsm.cli.resolve.store_location import create_store, open_existing_store
from agentfsm.cli.terminal import stdout_to_stderr
from agentfsm.core.errors import MisuseError
from agentfsm.core.text_safety import one_line
from agentfsm.core.usage import format_usd
from agentfsm.evals import WhatIfVerdict
from agentfsm.evals import whatif as try_runs
from agentfsm.evals.what_if_files import (
    MAX_CHARS,
    describe_trials,
    list_sections,
    render_html,
    render_markdown,
    title_of,
)
from agentfsm.evals.what_if_runs import PARALLEL
from agentfsm.ports.store import Filter
from agentfsm.prompts.assertions import load_function

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.evals import Trial, WhatIfReport

_CODES: Final = {
    WhatIfVerdict.SAME: ExitCode.DONE,
    WhatIfVerdict.DIFFERENT: ExitCode.FAILED,
    WhatIfVerdict.UNDECIDED: ExitCode.UNDECIDED,
}


# Runs that are tried if no number is given.
_NEWEST: Final = 100


def add_commands(add: AddParser) -> None:
    """Add the command of this module."""
    options = add_command(add, whatif)
    options.add_argument("runs", metavar="RUN", nargs="*", help="ids of runs (default: by the options below)")
    options.add_argument("--agent", metavar="module:agent", required=True, help="the candidate")
    add_mcp_option(options, "add the MCP servers of this file to its tools; may be given several times")
    text = "the agent as it is now, whose differences are the noise floor (default: none)"
    options.add_argument("--control", metavar="module:agent", help=text)
    options.add_argument("--since", metavar="TIME", type=parse_since, help="runs that began then or later, such as 7d")
    text = "runs of the agent with this name (default: that of the candidate)"
    options.add_argument("--of", metavar="NAME", help=text)
    text = "the newest N runs (default: %(default)s)"
    options.add_argument("--limit", metavar="N", type=parse_count, default=_NEWEST, help=text)
    text = "version of the runs from which they are driven (default: the start)"
    options.add_argument("--at", metavar="VERSION", type=int, default=0, help=text)
    text = "reads that were not recorded: no result, or made live (default: %(default)s)"
    options.add_argument("--read", choices=["recorded", "live"], default="recorded", help=text)
    text = "trials of each run (default: %(default)s)"
    options.add_argument("--repeats", metavar="N", type=parse_count, default=1, help=text)
    options.add_argument("--usd", metavar="AMOUNT", type=parse_usd, help="US dollars that all of it may cost")
    text = "dependencies of each run, or a function of the run that returns them (default: none)"
    options.add_argument("--deps", metavar="MODULE:NAME", help=text)
    text = "runs at a time (default: %(default)s)"
    options.add_argument("--parallel", metavar="N", type=parse_count, default=PARALLEL, help=text)
    text = "store that gets the what-if runs, to look at them with show or the studio (default: they are gone)"
    options.add_argument("--keep", metavar="PATH|URL", help=text)
    options.add_argument("--html", metavar="FILE", type=parse_output_file, help="write the report as HTML")
    options.add_argument("--md", metavar="FILE", type=parse_output_file, help="write the report as Markdown")


def whatif(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Drive stored runs again with another agent, and report what it would have done otherwise.

    Raises:
        MisuseError: if no run is there.
    """
    look_in_current_folder()
    with stdout_to_stderr():
        deps = None if args.deps is None else load_function(args.deps, "--deps")
        candidate, location = resolve_agent(args, terminal)
        control = None
        if args.control is not None:
            control, _location = resolve_agent(argparse.Namespace(**{**vars(args), "agent": args.control}), terminal)
        if location is not None:  # nothing is created
            candidate = candidate.with_(store=open_existing_store(location))
    done = 0

    def show(trial: Trial) -> None:
        nonlocal done
        done += 1
        words = [each for each in ("effects", "reads", "ends") if trial.differs(each)]
        who = " (control)" if trial.is_control else ""
        terminal.err(f"{done} {trial.run_id} trial {trial.repeat}{who}: {', '.join(words) or 'no difference'}"[:300])

    def state(usd: float | None) -> None:
        limit = "" if args.usd is None else f", at most {format_usd(args.usd)}"
        terminal.err(f"estimate: {format_usd(usd, estimated=True)}{limit}; no tool that may act is called")

    async def act() -> WhatIfReport:
        async with AsyncExitStack() as opened:
            for agent in (candidate, control):
                if agent is not None:
                    await opened.enter_async_context(agent)
            keep = None if args.keep is None else create_store(args.keep)
            if keep is not None:
                opened.push_async_callback(keep.aclose)
            return await try_runs(
                candidate,
                args.runs or await _find_runs(candidate, args),
                at=args.at,
                read=args.read,
                repeats=args.repeats,
                control=control,
                usd=args.usd,
                keep=keep,
                deps=deps,
                parallel=args.parallel,
                on_estimate=state,
                on_trial=show,
            )

    with stdout_to_stderr():  # stdout is reserved for the report
        report = anyio.run(act)
    if args.md is not None:
        Path(args.md).write_text(render_markdown(report), encoding="utf-8")
    if args.html is not None:
        Path(args.html).write_text(render_html(report), encoding="utf-8")
    if terminal.json:
        terminal.document(report.to_dict())
    else:
        _print(report, terminal)
    return _CODES[report.verdict]


async def _find_runs(candidate: Agent, args: argparse.Namespace) -> list[str]:
    name = candidate.name if args.of is None else args.of
    where = Filter(agent=name, since=args.since, parent="", purpose="", over=True)
    found = await candidate.runs.list(where, limit=args.limit)
    if not found:
        raise MisuseError(
            f"the store has no run of an agent {name!r} that is over: name its agent with --of NAME, or a longer "
            "time with --since"
        )
    return [each.id for each in found]


def _print(report: WhatIfReport, terminal: Terminal) -> None:
    terminal.out(f"{title_of(report)}: {report.verdict}")
    terminal.out(describe_trials(report))
    for section in list_sections(report):
        terminal.out(f"\n{section.title}")
        terminal.out(f"  {' | '.join(section.head)}")
        for row in section.rows:
            terminal.out(f"  {' | '.join(one_line(cell, MAX_CHARS) for cell in row)}")
