"""`agentfsm export otlp`: send the traces of runs to a server of OpenTelemetry."""

from __future__ import annotations

import argparse
from math import inf
from typing import TYPE_CHECKING

from agentfsm._lib.plugins import require_extra
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count
from agentfsm.cli.resolve.run_lookup import run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.core.errors import MisuseError

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal

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
