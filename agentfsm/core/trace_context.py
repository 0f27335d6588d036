"""Identity of a run, its requests and its calls in a distributed trace, in the format of W3C Trace Context.

All ids are derived from the run, so they are the same when it is exported live or from its journal, once or again.
The journal records none of them except `Header.traceparent`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import attrs

from agentfsm.core.header import Header, short_hash
from agentfsm.core.value import Value

# Hexadecimal digits of the ids.
TRACE_ID_DIGITS: Final = 32
SPAN_ID_DIGITS: Final = 16
# Version "ff" is not allowed, and neither are ids of zeros only.
_TRACEPARENT_PATTERN: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@attrs.frozen(kw_only=True)
class TraceContext(Value):
    """A span of a trace, as the W3C header `traceparent` names it."""

    trace_id: str
    """Id of the trace, 32 hexadecimal digits."""

    span_id: str
    """Id of the span, 16 hexadecimal digits."""

    sampled: bool = True
    """Whether the trace is recorded, as far as the caller has decided it."""

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def parse_traceparent(text: str) -> TraceContext:
    """Return the span that a valid value of the header `traceparent` names."""
    _, trace_id, span_id, flags = text.split("-")[:4]
    return TraceContext(trace_id=trace_id, span_id=span_id, sampled=bool(int(flags, 16) & 1))


def is_traceparent(text: str) -> bool:
    """Return whether a text is a valid value of the header `traceparent`, in the form of version 00."""
    return _TRACEPARENT_PATTERN.fullmatch(text) is not None


def caller_context(header: Header) -> TraceContext | None:
    """Return the span that started the run, from its header; None if it was given no trace."""
    return parse_traceparent(header.traceparent) if header.traceparent else None


def begins_trace(header: Header) -> bool:
    """Return whether the trace of a run began with it or with a run above it, and not with a span of a caller.

    A run above is known by its id, with which the ids of those below begin.
    """
    if not header.traceparent:
        return True
    above = header.parent or (header.caller or "").rpartition("/")[0] or header.forked_from or ""
    ends = [place for place, character in enumerate(above) if character == "."]
    trace_id = parse_traceparent(header.traceparent).trace_id
    return any(_hash_trace_id(above[:end]) == trace_id for end in (*ends, len(above)))


def run_context(header: Header) -> TraceContext:
    """Return the span of a whole run. Its trace is that of its caller, or its own if it was given none."""
    return _derive(header, "run")


def event_context(header: Header, version: int) -> TraceContext:
    """Return the span that ends with an event of the run.

    Args:
        header: Header of the run.
        version: Version of the run after the event. The span of a model request is known before the reply: it will be
            the next version.
    """
    return _derive(header, str(version))


def call_context(header: Header, call_id: str) -> TraceContext:
    """Return the span of a tool call, all its attempts together."""
    return _derive(header, f"call {call_id}")


def wait_context(header: Header, version: int) -> TraceContext:
    """Return the span of the time before an event during which nothing was executed; `version` is that after it."""
    return _derive(header, f"before {version}")


def rating_context(header: Header, number: int) -> TraceContext:
    """Return the span of a rating of the run; `number` counts from 1."""
    return _derive(header, f"rating {number}")


def child_traceparent(parent: Header, call_id: str) -> str:
    """Return the `traceparent` of a run that another run has started.

    Args:
        parent: Header of the run that started it.
        call_id: Id of the call that it works for; empty if it works for none.
    """
    return str(call_context(parent, call_id) if call_id else run_context(parent))


# The ids of the newest runs are kept, because each span needs them.
@lru_cache(maxsize=1_024)
def _hash_trace_id(run_id: str) -> str:
    return short_hash(f"trace {run_id}", TRACE_ID_DIGITS)


@lru_cache(maxsize=1_024)
def hash_run_span_id(run_id: str) -> str:
    """Return the id of the span of a whole run."""
    return short_hash(f"run of {run_id}", SPAN_ID_DIGITS)


def _derive(header: Header, name: str) -> TraceContext:
    caller = caller_context(header)
    return TraceContext(
        trace_id=_hash_trace_id(header.id) if caller is None else caller.trace_id,
        span_id=short_hash(f"{name} of {header.id}", SPAN_ID_DIGITS),
        sampled=caller is None or caller.sampled,
    )
