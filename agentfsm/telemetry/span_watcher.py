"""Traces of runs while they run: a watcher that exports each span when it ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import Token
from typing import Any, Final

import attrs
from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.trace.export import SpanExporter

from agentfsm._lib.newest import Newest
from agentfsm.core.events import Event
from agentfsm.core.header import Header
from agentfsm.core.run import Run
from agentfsm.core.trace_context import TraceContext, begins_trace, event_context, run_context
from agentfsm.core.validation import require_between, require_choice
from agentfsm.ports.model import Model, Reply, Request
from agentfsm.telemetry.request_facts import RequestFacts
from agentfsm.telemetry.span_export import (
    CountingExporter,
    SpanQueue,
    build_exporter,
    build_resource,
    to_sdk_context,
)
from agentfsm.telemetry.spans import CONTENTS, Content, list_spans

# Bits of the id of a trace that decide whether it is sampled.
_RATIO_MASK: Final = 2**64 - 1
# Requests and runs that are kept, the newest.
MAX_KEPT: Final = 1_000

_log = logging.getLogger("agentfsm.telemetry")


@attrs.define(eq=False, repr=False)
class Telemetry:
    """Exports traces of runs by OpenTelemetry: `Agent(..., watch=[Telemetry()])`.

    A run is a span `invoke_agent`, with a span for each model request (`chat`), tool call (`execute_tool`), plan,
    search of the memory, and wait. Each span is exported when it ends, in a thread of its own. Spans of a run have the
    same ids in each process: so a run that a crash has interrupted, and another process resumed, is one trace, and
    `agentfsm export otlp` adds what could not be exported at the time.

    While a model request or a tool runs, its span is current in OpenTelemetry's context: spans of instrumented
    libraries are below it. A run that is started in a span becomes a part of its trace.

    An exporter that is slow, away or raises delays and changes no run. Spans that are lost are counted.

    Raises:
        ImportError: when the extra `otel` is not installed.
    """

    exporter: str | SpanExporter | None = None
    """Address of a server of OTLP over HTTP, such as "http://127.0.0.1:4318", or an exporter. Default None: as the
    variables `OTEL_EXPORTER_OTLP_*` say, else port 4318 of this machine.
    """

    content: Content = attrs.field(default="none", kw_only=True, validator=require_choice(*CONTENTS))
    """Texts that the spans have: "none", "redacted" (likely secrets are masked), or "full". Default "none": neither
    prompts, answers, arguments and results, nor texts of errors and the names of users.
    """

    service: str = attrs.field(default="", kw_only=True)
    """Name of the service. Default: `OTEL_SERVICE_NAME`, else "agentfsm"."""

    sample: float = attrs.field(default=1.0, kw_only=True, validator=require_between(0, 1))
    """Share of traces that are exported, 0 to 1, chosen by their ids as `TraceIdRatioBased` of OpenTelemetry does, so
    that all processes choose the same ones. A run that is started in a span follows the decision on that span instead.
    Default 1: all.
    """

    _facts: Newest[str, RequestFacts] = attrs.field(init=False, factory=lambda: Newest(MAX_KEPT))
    """Facts of requests whose commit has not come yet, by the ids of their spans, oldest first."""

    _traces: Newest[str, str] = attrs.field(init=False, factory=lambda: Newest(MAX_KEPT))
    """`Header.traceparent` of the newest runs that have ended, by id, oldest first, for links."""

    _queue: SpanQueue = attrs.field(
        init=False,
        default=attrs.Factory(
            lambda self: SpanQueue(CountingExporter(build_exporter(self.exporter)), build_resource(self.service)),
            takes_self=True,
        ),
    )

    @property
    def exported(self) -> int:
        """Number of spans that the exporter has delivered."""
        return self._queue.exporter.exported

    @property
    def lost(self) -> int:
        """Number of spans that were not delivered (yet): still queued, dropped from a full queue, or refused."""
        return self._queue.lost

    def watch_commit(self, before: Run[Any], run: Run[Any], events: Sequence[Event]) -> None:
        """Queue the spans that end with a commit."""
        if not self._samples(run.header):
            return
        for event in events:
            then, before = before, before.apply(event) if len(events) > 1 else run
            facts = self._facts.pop(event_context(before.header, before.version).span_id, None) if self._facts else None
            self._queue.put(list_spans(then, event, before, content=self.content, facts=facts, traces=self._traces))
        if run.is_over:
            self._traces[run.id] = run.header.traceparent

    def observe_request(
        self, context: TraceContext, model: Model, request: Request, outcome: Reply | BaseException
    ) -> None:
        """Keep what a request says beside the journal until its commit comes."""
        if request.run is not None and self._samples(request.run.header):
            self._facts[context.span_id] = RequestFacts.of(model, request, outcome)

    def flush(self, timeout_s: float = 5.0) -> None:
        """Export what is queued, in up to `timeout_s` seconds."""
        if not self._queue.flush(timeout_s):
            _log.warning("spans are still being exported after %g s", timeout_s)
        if self.lost:
            _log.warning("%d spans were not delivered", self.lost)

    def current_traceparent(self) -> str:
        """Return the current span of OpenTelemetry as the value of `traceparent`; empty if there is none."""
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def activate(self, header: Header, context: TraceContext) -> AbstractContextManager[object]:
        """Make a span of a run current."""
        context = context if self._samples(header) else attrs.evolve(context, sampled=False)
        return _CurrentSpan(trace.set_span_in_context(trace.NonRecordingSpan(to_sdk_context(context))))

    def _samples(self, header: Header) -> bool:
        """Return whether the spans of a run are exported."""
        context = run_context(header)
        if not context.sampled or self.sample == 1 or not begins_trace(header):
            return context.sampled
        return int(context.trace_id, 16) & _RATIO_MASK < round(self.sample * (_RATIO_MASK + 1))


@attrs.define(eq=False, repr=False)
class _CurrentSpan(AbstractContextManager[None]):
    """Makes a context of OpenTelemetry current. It costs less than `use_span`, which also records errors."""

    _context: Context
    _token: Token[Context] | None = None

    def __enter__(self) -> None:
        self._token = attach(self._context)

    def __exit__(self, *_error: object) -> None:
        assert self._token is not None  # noqa: S101  it was entered
        detach(self._token)
