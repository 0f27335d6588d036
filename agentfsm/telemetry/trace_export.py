"""Traces of runs in a store, exported later: of chosen runs once, or of all as they end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf
from typing import Any, Final

import anyio
import attrs
from opentelemetry.sdk.trace.export import SpanExporter

from agentfsm.core.errors import AgentError, RunNotFoundError
from agentfsm.core.run import begin_run
from agentfsm.journal.load import load_predecessor
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.store import ALL_RUNS, Filter, Store
from agentfsm.telemetry.span_export import CountingExporter, build_exporter, build_resource, to_sdk_span
from agentfsm.telemetry.spans import Content, TraceSpan, list_ratings, list_spans

# Name of the follower of `follow`.
FOLLOWER: Final = "otlp"
# Spans of one request to the server.
BATCH_SPANS: Final = 500


class TraceExportError(AgentError):
    """Spans could not be delivered. Those before were; the export can be repeated, since the ids are the same."""


@attrs.define(eq=False, repr=False)
class TraceExport:
    """Exports the traces of runs from a store. The spans are those of `Telemetry`, with the same ids."""

    store: Store
    """The store of the runs."""

    exporter: str | SpanExporter | None = None
    """Address of a server of OTLP over HTTP, or an exporter; None for the variables `OTEL_EXPORTER_OTLP_*`."""

    content: Content = attrs.field(default="none", kw_only=True)
    """Texts that the spans have: "none", "redacted" or "full". Default "none"."""

    service: str = attrs.field(default="", kw_only=True)
    """Name of the service. Default: `OTEL_SERVICE_NAME`, else "agentfsm"."""

    _exporter: CountingExporter = attrs.field(
        init=False, default=attrs.Factory(lambda self: CountingExporter(build_exporter(self.exporter)), takes_self=True)
    )

    @property
    def exported(self) -> int:
        """Number of spans that were delivered."""
        return self._exporter.exported

    async def run(self, run_id: str, *, after: int = 0) -> int:
        """Export the spans of a run that end after a version, and its ratings. Return their number.

        Raises:
            RunNotFoundError: when the store has no such run.
            TraceExportError: when they could not be delivered.
        """
        stored = await self.store.read(run_id)
        previous = await load_predecessor(self.store, stored.header)
        run: Any = begin_run(stored.header, previous)
        traces = {} if previous is None else {previous.id: previous.header.traceparent}
        spans: list[TraceSpan] = []
        for event in stored.events:
            before, run = run, run.apply(event)
            if run.version > after:
                spans += list_spans(before, event, run, content=self.content, traces=traces)
        spans += list_ratings(stored.header, await self.store.list_feedback(run_id), content=self.content)
        await self._deliver(spans)
        return len(spans)

    async def runs(self, where: Filter = ALL_RUNS, *, since: float = -inf) -> int:
        """Export the spans of all runs that match a filter, newest first. Return the number of runs.

        Args:
            where: The filter.
            since: Time in seconds since 1970; runs that were over before it are left out.

        Raises:
            TraceExportError: when spans could not be delivered.
        """
        count = 0
        async for summary in RunIterator(self.store, where):
            if summary.stop_reason is not None and summary.updated_at < since:
                continue
            try:
                await self.run(summary.id)
            except RunNotFoundError:  # removed after it was listed
                continue
            count += 1
        return count

    async def follow(self, *, until_idle: bool = False) -> AsyncIterator[str]:
        """Export what is new in the store, from the position of the last time on, and yield the id of each run.

        What was exported before a crash, or before the server was away, may be exported again, under the same ids.

        Args:
            until_idle: Whether to return when there is nothing more to read.

        Raises:
            TraceExportError: when spans could not be delivered; the next call begins with them.
        """
        async with self.store.follow(FOLLOWER, wait=not until_idle) as follower:
            async for delivery in follower:
                with_spans = bool(delivery.events or delivery.feedback)
                try:
                    if with_spans:
                        await self.run(delivery.run_id, after=delivery.after_version)
                except RunNotFoundError:  # removed after it was delivered
                    with_spans = False
                await delivery.done()
                if with_spans:
                    yield delivery.run_id

    async def _deliver(self, spans: list[TraceSpan]) -> None:
        resource = build_resource(self.service)
        for first in range(0, len(spans), BATCH_SPANS):
            batch = [to_sdk_span(span, resource) for span in spans[first : first + BATCH_SPANS]]
            failed = self._exporter.failed
            await anyio.to_thread.run_sync(self._exporter.export, batch)
            if self._exporter.failed > failed:
                raise TraceExportError(
                    f"{len(batch)} spans could not be delivered ({self._exporter.why}): check the address of the "
                    "server of OTLP over HTTP, then export again; spans that are already there keep their ids"
                )
