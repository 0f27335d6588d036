"""`agentfsm metrics`: how the agents of a store do."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.cli.argument_types import parse_since
from agentfsm.cli.arguments import AddParser, add_command, add_group, add_purpose
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count, format_duration, format_time
from agentfsm.cli.resolve.run_lookup import run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.core.usage import format_usd
from agentfsm.telemetry.metrics_summary import Distribution, MetricsSummary, read_measurements, summarize
from agentfsm.telemetry.totals import TotalsStatus, catch_up_totals, read_status, rebuild_totals

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal

# Tools in the table; the JSON document has all of them.
MAX_TOOLS: Final = 20


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    _add_metrics(add)
    _add_totals(add)


def _add_metrics(add: AddParser) -> None:
    metrics_options = add_command(add, metrics)
    metrics_options.add_argument("--agent", metavar="NAME", help="only runs of the agent with this name")
    add_purpose(metrics_options)
    metrics_options.add_argument(
        "--since", metavar="TIME", type=parse_since, help="from then on, such as 1d (default: the first run)"
    )


def _add_totals(add: AddParser) -> None:
    sub = add_group(add, "totals")
    show = add_command(sub, totals, name="show", text="print how far they are")
    text = "make them anew from the journals, or for the first time"
    rebuild = add_command(sub, totals, name="rebuild", text=text)
    show.set_defaults(rebuild=False)
    rebuild.set_defaults(rebuild=True)


def metrics(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the metrics of all runs since a time."""
    store = open_existing_store(args.store)
    since = -inf if args.since is None else float(args.since)

    async def act() -> MetricsSummary:
        await catch_up_totals(store)
        log = await read_measurements(store, since=since, agent=args.agent, purpose=args.purpose)
        return summarize(log, since, log.find_end(await store.now()))

    summary = run_in_store(store, act)
    if terminal.json:
        terminal.document(attrs.asdict(summary))
        return ExitCode.DONE
    rows = [*_list_rows(summary)]
    width = max(len(name) for name, _ in rows)
    terminal.out(f"{format_time(summary.since)} to {format_time(summary.until)}")
    for name, text in rows:
        terminal.out(f"{name.ljust(width)}  {text}")
    for line in _list_tools(summary):
        terminal.out(line)
    return ExitCode.DONE


def totals(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print how far the totals of a store are; with `totals rebuild`, after they were made anew from its journals."""
    store = open_existing_store(args.store)

    async def act() -> TotalsStatus | None:
        if args.rebuild:
            return await rebuild_totals(store)
        await catch_up_totals(store)
        return await read_status(store)

    status = run_in_store(store, act)
    if terminal.json:
        terminal.document({"totals": status and attrs.asdict(status)})
    elif status is None:
        terminal.out("the store keeps no totals: `agentfsm totals rebuild` begins them, as do servers and workers")
    else:
        first = "all runs were counted" if status.is_whole else "the first count is not complete"
        terminal.out(f"{first}, {format_count(status.uncounted, 'run')} released since")
        if status.pruned_before:
            terminal.out(f"they keep what runs from before {format_time(status.pruned_before)} had that were removed")
        if status.unreadable:
            terminal.out(f"{format_count(status.unreadable, 'journal')} could not be read: the log says why")
    return ExitCode.DONE


def _list_rows(summary: MetricsSummary) -> Iterator[tuple[str, str]]:
    """Yield the metrics of tasks, then those of the work below them, with their names."""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in summary.outcomes.items())
    yield "tasks", f"{summary.tasks + summary.cancelled:,}" + (f": {reasons}" if reasons else "")
    yield "task_success_rate", _share(summary.task_success_rate)
    yield "error_rate", _share(summary.error_rate)
    yield "avg_rounds_per_task", _number(summary.avg_rounds_per_task, ",.1f")
    yield "avg_latency_ms", _number(summary.avg_latency_ms, ",.0f") + _percentiles(summary.latency_s)
    yield "avg_tokens_per_task", _number(summary.avg_tokens_per_task, ",.0f")
    is_unpriced, is_known = summary.unpriced_tokens > 0, summary.daily_cost_usd is not None
    yield "daily_cost_usd", format_usd(summary.daily_cost_usd, unpriced=is_unpriced) if is_known or is_unpriced else "-"
    yield (
        "user_satisfaction",
        _number(summary.user_satisfaction, ".2f") + f", {format_count(summary.ratings, 'rating')}",
    )
    for judge, rating in summary.judge_ratings.items():
        yield f"judge {judge}", f"{rating:.2f}"
    yield "signals", ", ".join(f"{count:,} {kind}" for kind, count in summary.signals.items()) or "-"
    yield "tokens", f"{summary.input_tokens:,} input, {summary.output_tokens:,} output"
    for name, found in (("model requests", summary.request_s), ("queue", summary.queue_s)):
        if found is not None:
            yield name, f"{found.count:,}{_percentiles(found)}"
    for kind, found in summary.waits.items():
        yield (
            f"waits for {kind}" if kind != "interruption" else "interruptions",
            f"{found.count:,}{_percentiles(found)}",
        )
    if summary.waiting:
        yield "waiting now", ", ".join(f"{count:,} {kind}" for kind, count in summary.waiting.items())
    if summary.stranded:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in summary.stranded.items())
        yield "stranded now", f"{reasons}; `agentfsm runs --stranded` names them"


def _list_tools(summary: MetricsSummary) -> Iterator[str]:
    """Yield the table of tools."""
    if not summary.tools:
        return
    shown = summary.tools[:MAX_TOOLS]
    width = max(len("tool"), *[len(each.tool) for each in shown])
    yield f"\n{'tool'.ljust(width)}  {'calls':>8}  {'per hour':>9}  {'errors':>7}  duration"
    for each in shown:
        errors, times = _share(each.tool_error_rate), _percentiles(each.duration_s).removeprefix(", ") or "-"
        yield f"{each.tool.ljust(width)}  {each.calls:>8,}  {each.calls_per_hour:>9,.1f}  {errors:>7}  {times}"
    if more := len(summary.tools) - len(shown):
        yield f"and {format_count(more, 'more tool')}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percentiles(found: Distribution | None) -> str:
    if found is None:
        return ""
    p50, p95, p99 = map(format_duration, (found.p50, found.p95, found.p99))
    return f", P50 {p50}, P95 {p95}, P99 {p99}"
