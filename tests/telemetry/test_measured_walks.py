"""Random walks, measured and traced: whatever legal events a journal has, its numbers and spans agree with the run."""

import math
from collections import Counter

import attrs
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.core import events as e
from agentfsm.core.run import begin_run
from agentfsm.core.run_facts import list_spending
from agentfsm.telemetry import trace_of
from agentfsm.telemetry.measurements import METRICS, RUN_TOKENS, RUNS, TOKENS, TOOL_CALLS, measure_run
from tests.support.run_walks import EARLIER, ending, going_on, new_calls
from tests.support.sample_runs import header

# Times of a machine whose clock another one does not share.
stamps = st.fixed_dictionaries({"at": st.integers(1_000, 9_000).map(float), "took_s": st.integers(0, 600).map(float)})


@st.composite
def journals(draw):
    """Draw the header and the events of a run that has ended, and the run that it continues."""
    before = draw(st.sampled_from(EARLIER))
    first = header(created_at=5_000.0, parent=draw(st.sampled_from([None, "boss"])))
    run, events, steps = begin_run(first, before), [], draw(st.integers(0, 12))
    while not run.is_over:
        event = (going_on if len(events) < steps else ending)(run, draw)
        events.append(attrs.evolve(event, **draw(stamps)))
        run = run.apply(events[-1])
    return first, tuple(events), run, before


@given(journals(), st.integers(0, 12))
def test_the_measurements_of_a_run_are_those_of_its_journal(journal, at):
    """Its own tokens are each counted once, a call at most once, its end once and only if no other run has called it.

    A follower that was killed in between counts nothing twice, and leaves nothing out.
    """
    first, events, run, _ = journal
    found = measure_run(first, events)
    assert measure_run(first, events[:at]) + measure_run(first, events, after=at) == found
    for each in found:
        assert len(each.labels) == len(METRICS[each.metric].labels)
        assert each.value >= 0
        assert math.isfinite(each.value)
    totals = Counter()
    for each in found:
        totals[each.metric] += each.value
    own = [part.usage for event in events for part in list_spending(event)]
    below = [event.result.child.usage for event in events if isinstance(event, e.ToolFinished) and event.result.child]
    assert totals[TOKENS.name] == sum(usage.tokens for usage in own) - sum(usage.tokens for usage in below)
    assert totals[TOOL_CALLS.name] <= len([asked for event in events for asked in new_calls(event)])
    ends = [each for each in found if each.metric == RUNS.name]
    assert [each.labels[-1] for each in ends] == ([] if first.parent else [str(run.stop_reason)])
    assert totals[RUN_TOKENS.name] == (0 if first.parent else run.usage.tokens)


@given(journals(), st.sampled_from(["none", "redacted", "full"]))
def test_the_spans_of_a_run_make_a_tree(journal, content):
    """Each ends after its beginning, whatever the clocks say, has an id of its own, and stands below the run's."""
    first, events, run, before = journal
    spans = trace_of(first, events, content=content, before=before)
    whole = spans[-1]
    assert whole.attributes["agentfsm.run.stop_reason"] == str(run.stop_reason)
    assert len({each.context.span_id for each in spans}) == len(spans)
    assert {each.parent for each in spans[:-1]} <= {whole.context.span_id}
    for each in spans:
        assert each.ended_at >= each.started_at
        assert all(type(value) in (str, bool, int, float, tuple) for value in each.attributes.values())
        texts = [name for name in each.attributes if name.endswith(("messages", "arguments", "result", "user.id"))]
        assert content != "none" or not texts
