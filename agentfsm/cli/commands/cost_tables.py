"""`agentfsm costs`: the costs of the runs in a store, spending limits, and forecasts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.cli.argument_types import parse_count, parse_since
from agentfsm.cli.arguments import AddParser, add_command
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import count_columns, fit_columns, format_count, format_time
from agentfsm.cli.resolve.agent_target import load_agent
from agentfsm.cli.resolve.run_lookup import run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.core.usage import format_usd
from agentfsm.ports.store import Filter
from agentfsm.stores import MemoryStore
from agentfsm.telemetry.costs import (
    COST_GROUPS,
    CostEstimate,
    CostReport,
    SpendStatus,
    build_cost_document,
    estimate,
    read_costs,
    read_spend,
)
from agentfsm.telemetry.totals import catch_up_totals

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal

# Rows of a table; the JSON document has all of them.
MAX_ROWS: Final = 30
# Columns of the longest bar, and of a name.
_BAR_COLUMNS: Final = 24
_NAME_COLUMNS: Final = 40


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    costs_options = add_command(add, costs)
    costs_options.add_argument(
        "target", metavar="module:agent", nargs="?", help="estimate a run of this agent, and list the costs of its runs"
    )
    costs_options.add_argument(
        "--by", choices=COST_GROUPS, default="agent", help="meaning of the rows (default: %(default)s)"
    )
    costs_options.add_argument(
        "--since", metavar="TIME", type=parse_since, help="from then on, such as 7d (default: all)"
    )
    costs_options.add_argument("--agent", metavar="NAME", help="only runs of the agent with this name")
    costs_options.add_argument(
        "--tz", metavar="ZONE", default="UTC", help="time zone of the days (default: %(default)s)"
    )
    costs_options.add_argument(
        "--turns", type=parse_count, help="turns of the estimated run (default: those of its runs)"
    )


def costs(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the costs since a time, the windows of spending limits, and a forecast."""
    agent = None if args.target is None else load_agent(args.target)
    if agent is not None and args.store is None and not isinstance(agent.store, MemoryStore):
        store = agent.store
    else:
        store = open_existing_store(args.store)
    name = args.agent if agent is None else agent.name

    async def act() -> tuple[CostReport, Sequence[SpendStatus], CostEstimate | None]:
        await catch_up_totals(store)
        report = await read_costs(store, by=args.by, since=args.since, where=Filter(agent=name), tz=args.tz)
        found = None if agent is None else await estimate(agent.with_(store=store), args.turns)
        return report, await read_spend(store), found

    report, windows, found = run_in_store(store, act)
    if terminal.json:
        terminal.document(build_cost_document(report, windows, args.tz) | {"estimate": found and attrs.asdict(found)})
        return ExitCode.DONE
    for line in _list_rows(report):
        terminal.out(line)
    for line in () if not report.is_from_totals else _list_gaps(report):
        terminal.out(line)
    if report.forecast_gap:
        terminal.out(f"\nthis month: no forecast, since {report.forecast_gap}")
    else:
        days, usd = report.forecast_month(args.tz)
        total, rate, month = [
            format_usd(each, estimated=report.production.estimated)
            for each in (report.production.cost_usd or 0.0, report.usd_per_day, usd)
        ]
        rate = f"{total} / {report.days:.1f} days = {rate} a day"
        terminal.out(f"\nthis month at this rate: {rate}; {days} days cost {month}")
    for line in _list_windows(windows):
        terminal.out(line)
    for line in () if found is None else _list_estimate(found):
        terminal.out(line)
    return ExitCode.DONE


def _list_rows(report: CostReport) -> Iterator[str]:
    """Yield the table of costs, with a bar for each row."""
    runs = format_count(report.runs, "run")
    yield f"{format_time(report.since)} to {format_time(report.until)}: {report.total.format_cost()} in {runs}"
    if not report.rows:
        return
    shown = report.rows[-MAX_ROWS:] if report.by == "day" else report.rows[:MAX_ROWS]
    names, costs = [fit_columns(row.name, _NAME_COLUMNS) for row in shown], [row.usage.format_cost() for row in shown]
    width, most = max(len(report.by), *map(count_columns, names)), max(row.usd for row in shown)
    cost_width = max(10, *map(len, costs))
    heads = f"{'cost':>{cost_width}}  {'share':>6}  {'runs':>7}  {'input':>13}  {'cached':>6}  {'output':>11}"
    yield f"\n{report.by.ljust(width)}  {heads}"
    for name, cost, row in zip(names, costs, shown, strict=True):
        share = "" if report.total.unpriced else f"{row.usd / report.usd if report.usd else 0.0:.1%}"
        usage = row.usage
        cached = usage.cached_tokens / usage.input_tokens if usage.input_tokens else 0.0
        tokens = f"{usage.input_tokens:>13,}  {cached:>6.0%}  {usage.output_tokens:>11,}"
        bar = "█" * round(_BAR_COLUMNS * row.usd / most) if most else ""
        space = " " * (width - count_columns(name))
        yield f"{name}{space}  {cost:>{cost_width}}  {share:>6}  {row.runs:>7,}  {tokens}  {bar}".rstrip()
    if more := len(report.rows) - len(shown):
        yield f"and {format_count(more, 'more row')}; --json has all"
    if report.lost_tokens:
        lost = f"{report.lost_tokens:,} tokens of input were read anew that the provider had had in its prompt cache"
        said = ", ".join([f"{reason} {tokens:,}" for reason, tokens in report.lost_as_reported.items()])
        yield f"\n{lost}{said and f' (the provider says: {said})'}; `agentfsm show` has the causes"


def _list_gaps(report: CostReport) -> Iterator[str]:
    """Yield what the totals lack, and what only they have."""
    if report.uncounted:
        yield f"\n{format_count(report.uncounted, 'run')} released since they were counted: newest costs may be missing"
    if report.unreadable:
        yield f"\n{format_count(report.unreadable, 'journal')} could not be read: their costs are missing"
    if report.pruned_before is not None and report.since < report.pruned_before:
        yield f"\nruns from before {format_time(report.pruned_before)} were removed; their costs are in the totals only"


def _list_windows(windows: Sequence[SpendStatus]) -> Iterator[str]:
    """Yield the windows of spending limits."""
    if not windows:
        return
    yield "\nspending limits"
    for each in windows[:MAX_ROWS]:
        lowest = each.limits_usd[0] if each.limits_usd else 0.0
        text = f"{format_usd(each.spent_usd)} of {' or '.join(map(format_usd, each.limits_usd))} spent"
        if lowest:
            text += f" ({each.spent_usd / lowest:.0%})"
        if each.reserved_usd:
            text += f", {format_usd(each.reserved_usd)} reserved"
        if each.refused:
            text += f", {format_count(each.refused, 'request')} refused"
        yield f"  {each.window.describe()}: {text}; resets {each.window.format_end()}"
    if (more := len(windows) - MAX_ROWS) > 0:
        yield f"  and {format_count(more, 'more window')}; --json has all"


def _list_estimate(found: CostEstimate) -> Iterator[str]:
    """Yield the estimate of a run, with its arithmetic."""
    n, fixed, added = found.turns, round(found.fixed_tokens), round(found.added_tokens)
    source = f"measured in {format_count(found.sampled_runs, 'run')}" if found.sampled_runs else "assumed"
    yield f"\na run of {format_count(n, 'turn')}: {format_usd(found.usd, estimated=True)}"
    formula = f"N*S + T*N*(N+1)/2 = {n} * {fixed:,} + {added:,} * {n * (n + 1) // 2:,}"
    yield f"  input   {formula} = {found.input_tokens:,} tokens"
    yield f"  output  {n} * {round(found.reply_tokens):,} = {found.output_tokens:,} tokens"
    yield f"  S = {fixed:,}, instructions and tools, counted; T = {added:,} a turn and the replies, {source}"
