"""Spans in the form of the OpenTelemetry SDK, and their export."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Final

import attrs
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agentfsm.core.errors import MisuseError
from agentfsm.core.trace_context import TraceContext
from agentfsm.telemetry.spans import TraceSpan

# Path of the receiver of traces, below the address of a server of OTLP over HTTP.
TRACES_PATH: Final = "/v1/traces"
NANOSECONDS: Final = 1_000_000_000

_log = logging.getLogger("agentfsm.telemetry")


def build_exporter(target: str | SpanExporter | None) -> SpanExporter:
    """Return an exporter.

    Args:
        target: Address of a server of OTLP over HTTP, such as "http://127.0.0.1:4318"; or an exporter. None: the
            server that the variables `OTEL_EXPORTER_OTLP_*` of the environment name.

    Raises:
        MisuseError: if it is neither an exporter nor an address with http:// or https://.
    """
    if target is None:
        return OTLPSpanExporter()
    if isinstance(target, SpanExporter):
        return target
    if not (isinstance(target, str) and target.startswith(("http://", "https://"))):
        raise MisuseError(
            f"{target!r} is not the address of a server of OTLP over HTTP: give one such as 'http://127.0.0.1:4318'"
        )
    address = target.rstrip("/")
    return OTLPSpanExporter(endpoint=address if address.endswith(TRACES_PATH) else address + TRACES_PATH)


def build_resource(service: str) -> Resource:
    """Return the resource that all spans belong to: the service, and what the environment says of it.

    Args:
        service: Name of the service; empty for `OTEL_SERVICE_NAME`, else "agentfsm".
    """
    named = Resource.create({SERVICE_NAME: service} if service else {})
    unknown = str(named.attributes.get(SERVICE_NAME, "")).startswith("unknown_service")
    return named.merge(Resource({SERVICE_NAME: "agentfsm"})) if unknown else named


def to_sdk_context(context: TraceContext, *, is_remote: bool = False) -> SpanContext:
    """Return a span's identity in the form of the SDK."""
    flags = _SAMPLED if context.sampled else _NOT_SAMPLED
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote, flags)


def to_sdk_span(span: TraceSpan, resource: Resource) -> ReadableSpan:
    """Return a span in the form of the SDK."""
    context = to_sdk_context(span.context)
    parent = (
        None if span.parent is None else SpanContext(context.trace_id, int(span.parent, 16), True, context.trace_flags)
    )
    return ReadableSpan(
        name=span.name,
        context=context,
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        events=[Event(each.name, each.attributes, int(each.at * NANOSECONDS)) for each in span.events]
        if span.events
        else (),
        links=[Link(to_sdk_context(link)) for link in span.links] if span.links else (),
        kind=SpanKind.CLIENT if span.is_client else SpanKind.INTERNAL,
        status=_DONE if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=int(span.started_at * NANOSECONDS),
        end_time=int(span.ended_at * NANOSECONDS),
        instrumentation_scope=_SCOPE,
    )


_SCOPE: Final = InstrumentationScope("agentfsm", metadata.version("agentfsm"))
_DONE: Final = Status(StatusCode.OK)
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_NOT_SAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)


@attrs.define(eq=False, repr=False)
class CountingExporter(SpanExporter):
    """Passes spans to another exporter, and counts those that it could not deliver. Its errors go no further."""

    exporter: SpanExporter
    exported: int = 0
    """Number of spans that were delivered."""

    failed: int = 0
    """Number of spans that the exporter could not deliver."""

    why: str = ""
    """Reason of the newest failure, for people; empty if there was none."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans."""
        why = "the exporter reported a failure"
        try:
            result = self.exporter.export(spans)
        except Exception as error:  # noqa: BLE001  an exporter is a program of others, and no reason to lose a thread
            result, why = SpanExportResult.FAILURE, type(error).__name__
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
            return result
        if not self.failed:
            _log.warning("%d spans could not be exported: %s; further failures are counted", len(spans), why)
        self.failed += len(spans)
        self.why = why
        return result

    def shutdown(self) -> None:
        """Close the exporter."""
        self.exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the exporter."""
        return self.exporter.force_flush(timeout_millis)


@attrs.define(eq=False, repr=False)
class SpanQueue:
    """Queue of spans and the thread that exports them. It never waits for the exporter."""

    exporter: CountingExporter
    resource: Resource
    queued: int = 0
    """Number of spans that were put into the queue."""

    _processor: BatchSpanProcessor = attrs.field(
        default=attrs.Factory(lambda self: BatchSpanProcessor(self.exporter), takes_self=True), init=False
    )
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def put(self, spans: Iterable[TraceSpan]) -> None:
        """Queue spans for export; where the queue is full the oldest are dropped."""
        sampled = [to_sdk_span(span, self.resource) for span in spans if span.context.sampled]
        if not sampled:
            return
        with self._lock:
            self.queued += len(sampled)
        for each in sampled:
            self._processor.on_end(each)

    @property
    def lost(self) -> int:
        """Number of spans that were dropped or could not be delivered, once the queue is empty."""
        return self.queued - self.exporter.exported

    def flush(self, timeout_s: float) -> bool:
        """Export what is queued. Return whether it was delivered within the time."""
        thread = threading.Thread(target=self._processor.force_flush, daemon=True)  # it may take as long as it likes
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()
