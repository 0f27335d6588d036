"""`agentfsm alerts` and `agentfsm export otlp`: rules for Prometheus, and traces for OpenTelemetry."""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from agentfsm._lib.plugins import require_extra
from agentfsm.cli.argument_types import parse_since, parse_threshold
from agentfsm.cli.arguments import AddParser, add_command, add_group, add_notifier
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count, format_time
from agentfsm.cli.resolve.run_lookup import run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.core.errors import MisuseError
from agentfsm.stores import MemoryStore
from agentfsm.telemetry.alerts import ALERTS, Firing, format_rules, read_firings, set_thresholds
from agentfsm.telemetry.dashboard import format_dashboard
from agentfsm.telemetry.notifier import AlertNotifier, build_test_message
from agentfsm.telemetry.totals import catch_up_totals

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.ports.store import Store


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(add, "alerts")
    rules_options = add_command(sub, rules, text="print the alerts as a file of rules for Prometheus")
    board = add_command(sub, dashboard, text="print a Grafana board of the metrics, or write it to a file")
    board.add_argument("file", metavar="FILE", nargs="?", help="file of the board (default: stdout)")
    test_options = add_command(sub, test, text="print when the alerts would have fired; exit code 1 if one still does")
    text = "evaluate the alerts now, and post those that have begun or ended since the last time"
    notify_options = add_command(sub, notify, text=text)
    add_notifier(notify_options, "url")
    notify_options.add_argument("--test", action="store_true", help="only post a message to see that it arrives")
    test_options.add_argument(
        "--since", metavar="TIME", type=parse_since, help="from then on, such as 1d (default: the first run)"
    )
    for each in (rules_options, board, test_options):
        each.add_argument(
            "--set",
            metavar="METRIC=NUMBER",
            type=parse_threshold,
            action="append",
            default=[],
            help="another threshold; may be given several times",
        )


def rules(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the alerts as a file of rules for Prometheus."""
    alerts = set_thresholds(dict(args.set))
    if terminal.json:
        documents = [attrs.asdict(each, filter=lambda field, _: field.name not in _HIDDEN) for each in alerts]
        terminal.document({"alerts": documents})
    else:
        terminal.out(format_rules(alerts).removesuffix("\n"))
    return ExitCode.DONE


def dashboard(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print a Grafana board with the thresholds of the alerts, or write it to a file."""
    board = format_dashboard(set_thresholds(dict(args.set)))
    if args.file is not None:
        Path(args.file).write_text(board, encoding="utf-8")
        terminal.out(f"wrote {args.file}: import it in Grafana, or provision it")
    else:
        terminal.out(board.removesuffix("\n"))
    return ExitCode.DONE


# Fields of an alert that only the expression needs.
_HIDDEN = {"parts", "wholes", "scale"}


def test(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print when the alerts would have fired. The exit code is 1 if one would still fire now."""
    alerts = set_thresholds(dict(args.set))
    store = open_existing_store(args.store)
    since = -inf if args.since is None else float(args.since)

    async def act() -> tuple[Firing, ...]:
        await catch_up_totals(store)
        return await read_firings(store, since, alerts)

    found = run_in_store(store, act)
    if terminal.json:
        terminal.document({"fired": [attrs.asdict(each) for each in found]})
    else:
        for each in found:
            group = " ".join(each.labels.values()) or "all agents"
            end = "still fires" if each.until is None else f"until {format_time(each.until)}"
            bound = "below" if ALERTS[each.alert].is_minimum else "above"
            worst = f"{bound} the threshold, {each.worst:,.4g}"
            terminal.out(f"{format_time(each.since)}  {each.alert}  {group}: {worst}, {end}")
        if not found:
            terminal.out("no alert would have fired")
    return ExitCode.FAILED if any(each.until is None for each in found) else ExitCode.DONE


def notify(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Evaluate the alerts once, and post those that have begun or ended; or post a message to try it."""
    store = MemoryStore() if args.test else open_existing_store(args.store)
    notifier = build_notifier(args, store, args.url)

    async def act() -> int:
        if args.test:
            return await notifier.send([build_test_message(await store.now())])
        await catch_up_totals(store)
        return await notifier.check()

    sent = run_in_store(store, act)
    if terminal.json:
        terminal.document({"sent": sent})
    else:
        terminal.out(f"sent {format_count(sent, 'message')}")
    return ExitCode.FAILED if args.test and not sent else ExitCode.DONE


def build_notifier(args: argparse.Namespace, store: Store, url: str) -> AlertNotifier:
    """Return the notifier that the options of a command describe.

    Raises:
        MisuseError: if the URL is not allowed.
    """
    return AlertNotifier(store=store, url=url, form=args.alerts_form, allow_private=args.alerts_private)


# Word that the command has in place of the id of a run.
OTLP = "otlp"


def export_traces(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Export traces of the runs that were executed since a time, or of all that are new, and follow the store.

    Raises:
        ImportError: if the extra `otel` is not installed.
        TraceExportError: if the server does not take them.
    """
    if args.follow and args.since is not None:
        raise MisuseError("--follow goes on where it was the last time: leave --since out")
    with require_extra("agentfsm export otlp", "otel", "opentelemetry"):
        from agentfsm.telemetry.trace_export import TraceExport  # noqa: PLC0415  few commands need the SDK

    store = open_existing_store(args.store)
    export = TraceExport(store, args.to, content=args.content)

    async def act() -> int:
        if not args.follow:
            return await export.runs(since=-inf if args.since is None else args.since)
        count = 0
        async for run_id in export.follow():
            count += 1
            terminal.err(f"exported {run_id}")
        return count

    count = run_in_store(store, act)
    if terminal.json:
        terminal.document({"runs": count, "spans": export.exported})
    else:
        terminal.out(f"exported {format_count(export.exported, 'span')} of {format_count(count, 'run')}")
    return ExitCode.DONE
