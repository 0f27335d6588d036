"""`agentfsm alerts`: rules for Prometheus, and a test of their thresholds with recorded journals."""

from __future__ import annotations

import argparse
from math import inf
from typing import TYPE_CHECKING

import attrs

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_time
from agentfsm.cli.resolve.run_lookup import run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.telemetry.alerts import ALERTS, LOOKBACK_S, Firing, format_rules, replay_alerts, set_thresholds
from agentfsm.telemetry.metrics_summary import read_measurements

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal


def rules(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the alerts as a file of rules for Prometheus."""
    alerts = set_thresholds(dict(args.set))
    if terminal.json:
        documents = [attrs.asdict(each, filter=lambda field, _: field.name not in _HIDDEN) for each in alerts]
        terminal.document({"alerts": documents})
    else:
        terminal.out(format_rules(alerts).removesuffix("\n"))
    return ExitCode.DONE


# Fields of an alert that only the expression needs.
_HIDDEN = {"parts", "wholes", "scale"}


def test(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print when the alerts would have fired. The exit code is 1 if one would still fire now."""
    alerts = set_thresholds(dict(args.set))
    store = open_existing_store(args.store)
    since = -inf if args.since is None else float(args.since)

    async def act() -> tuple[Firing, ...]:
        log = await read_measurements(store, since=since - LOOKBACK_S)
        return replay_alerts(log, since, log.find_end(await store.now()), alerts)

    found = run_in_store(store, act)
    if terminal.json:
        terminal.document({"fired": [attrs.asdict(each) for each in found]})
    else:
        for each in found:
            terminal.out(_format_firing(each))
        if not found:
            terminal.out("no alert would have fired")
    return ExitCode.FAILED if any(each.until is None for each in found) else ExitCode.DONE


def _format_firing(firing: Firing) -> str:
    group = " ".join(firing.labels.values()) or "all agents"
    end = "still fires" if firing.until is None else f"until {format_time(firing.until)}"
    bound = "below" if ALERTS[firing.alert].is_minimum else "above"
    worst = f"{bound} the threshold, {firing.worst:,.4g}"
    return f"{format_time(firing.since)}  {firing.alert}  {group}: {worst}, {end}"
