"""The ids of a run in a distributed trace."""

import attrs

from agentfsm.core.header import Header
from agentfsm.core.trace_context import (
    begins_trace,
    call_context,
    caller_context,
    child_traceparent,
    event_context,
    hash_run_span_id,
    parse_traceparent,
    rating_context,
    run_context,
    wait_context,
)

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def header(**fields):
    return Header(id="r1", prompt=(), created_at=0.0, **fields)


def test_a_traceparent_is_read_and_written():
    """The value of the header is the same after a round trip, with its flag."""
    assert str(parse_traceparent(GIVEN)) == GIVEN
    assert not parse_traceparent(f"{GIVEN[:-2]}00").sampled
    assert caller_context(header()) is None


def test_each_span_has_an_id_of_its_own():
    """All spans of a run are in one trace, and no two have the same id."""
    own = header()
    spans = [run_context(own), event_context(own, 1), event_context(own, 2), wait_context(own, 2)]
    spans += [rating_context(own, 1), rating_context(own, 2)]
    spans += [call_context(own, "t1.0"), call_context(own, "t1.1"), run_context(attrs.evolve(own, id="r2"))]
    assert len({span.span_id for span in spans}) == len(spans)
    assert len({span.trace_id for span in spans[:-1]}) == 1
    assert spans[-1].trace_id != spans[0].trace_id
    assert hash_run_span_id("r1") == spans[0].span_id


def test_a_run_belongs_to_the_trace_of_its_caller():
    """The trace is the given one, and the decision to record it holds for all spans."""
    own = header(traceparent=GIVEN)
    assert run_context(own).trace_id == caller_context(own).trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert not call_context(header(traceparent=f"{GIVEN[:-2]}00"), "t1.0").sampled


def test_a_called_run_is_below_the_call():
    """The span of a sub-agent's run is a child of the call, and that of another run of the run itself."""
    own = header()
    assert parse_traceparent(child_traceparent(own, "t1.0")) == call_context(own, "t1.0")
    assert parse_traceparent(child_traceparent(own, "")) == run_context(own)


def test_a_trace_begins_with_a_run_or_with_its_caller():
    """A run below another one, at any depth, is of the trace that begins there; one with a span of a caller is not."""
    own = header()
    assert begins_trace(own)
    assert not begins_trace(header(traceparent=GIVEN))
    child = attrs.evolve(own, id="r1.t1.0", parent="r1", traceparent=child_traceparent(own, "t1.0"))
    below = attrs.evolve(child, id="r1.t1.0.t2.0", parent="r1.t1.0", traceparent=child_traceparent(child, "t2.0"))
    assert begins_trace(child)
    assert begins_trace(below)
    assert not begins_trace(attrs.evolve(child, traceparent=GIVEN))
    assert begins_trace(attrs.evolve(own, id="r9", caller="r1/t1.0", traceparent=child_traceparent(own, "t1.0")))
