"""Random walks: whatever legal events a run's own effect can lead to, the promises about every run hold."""

from collections import Counter
from itertools import pairwise

import attrs
from hypothesis import event as note
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import TABLE, AssistantMessage, Label, State, StopReason, Usage, usage_by_purpose
from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.codec import decode_event, encode_event
from agentfsm.core.inbox import UNTRUSTED_KINDS
from agentfsm.core.labels import DATA_LEVELS
from agentfsm.core.plans import find_step_number
from agentfsm.core.run import begin_run
from agentfsm.reflection import Action
from tests.support.run_walks import (
    EARLIER,
    GIVEN,
    ending,
    going_on,
    new_calls,
    stamp,
)
from tests.support.sample_runs import header, sound_history

# What holds after every event.


def results_in(events):
    return [event.result for event in events if isinstance(event, e.ToolFinished)]


def check_counts(run, events):
    """The version counts events, turns count replies, time and usage add up."""
    replies = (e.ToolsChosen, e.AnswerGiven, e.AnswerDrafted, e.ModelFaltered)
    assert run.version == len(events)
    assert run.turn == sum(isinstance(event, replies) for event in events)
    assert run.duration_s == sum(event.took_s for event in events)
    beside = (e.AttemptFailed, e.ToolsOffered, e.Judged, e.Planned, e.PlanDropped, e.StepsReady, e.Recalled)
    paid = [event.usage for event in events if isinstance(event, (*replies, *beside))]
    below = [result.child.usage for result in results_in(events) if result.child]
    own = [each.usage for result in results_in(events) for each in result.spent]
    assert run.usage == sum([*paid, *below, *own], Usage())
    assert run.usage == sum(usage_by_purpose(events).values(), Usage())
    assert run.updated_at == events[-1].at


def check_histories(run, _events):
    """The history is valid now, as the model is shown it, and if the run were stopped this moment."""
    sound_history(run.messages)
    sound_history(run.shown)
    if not run.is_over:
        sound_history(run.apply(e.Failed(reason=StopReason.CANCELLED, message="")).messages)


def check_calls(run, events):
    """Every call that was chosen is open or closed, in order, under an id of its own."""
    chosen = [asked.id for event in events if isinstance(event, e.ToolsChosen) for asked in event.message.calls]
    planned = [asked.id for event in events for asked in new_calls(event) if find_step_number(asked.id) is not None]
    closed = [entry.call.id for entry in (run.plan.closed if run.plan else ())]
    recorded = [record.call_id for record in run.calls if record.turn]
    opened = [entry.call.id for entry in run.open]
    assert [*recorded, *(opened if run.reply is not None else ())] == chosen
    assert [*closed, *(opened if run.reply is None else ())] == planned
    assert len(set(planned)) == len(planned)
    everywhere = [asked.id for m in run.messages if isinstance(m, AssistantMessage) for asked in m.calls]
    before = everywhere[: len(everywhere) - len(recorded)]
    assert len({*before, *chosen}) == len(before) + len(chosen)
    assert all(record.turn <= run.turn for record in run.calls)


def check_state(run, _events):
    """State, effect, stop reason and open calls tell the same story."""
    assert run.is_over == (run.state in {State.DONE, State.ERROR}) == (run.effect is None)
    assert run.is_over == (run.stop_reason is not None)
    assert (run.state is State.DONE) == (run.stop_reason is StopReason.COMPLETED)
    assert bool(run.open) == (run.state is State.ACT)
    assert (run.reply is not None) == bool(run.open and find_step_number(run.open[0].call.id) is None)
    assert not run.is_waiting or run.pending
    if run.state is State.DONE:
        assert run.output == run.messages[-1].text


def check_reflection(run, events):
    """Refusals and corrections are counted since input came; a verdict holds until the run goes on."""
    since = [event for event in events if not isinstance(event, e.Paused | e.Resumed)]
    heard = [index for index, event in enumerate(since) if isinstance(event, e.Observed) and event.inputs]
    since = since[heard[-1] + 1 if heard else 0 :]
    assert run.refusals == sum(isinstance(event, e.Continued) and event.refused for event in since)
    sent_back = {Action.RETRY_STEP, Action.REPLAN}
    judged = [a for a, b in pairwise(since) if isinstance(a, e.Judged) and isinstance(b, e.Continued)]
    assert run.corrections == sum(event.verdict.action in sent_back for event in judged)
    assert bool(run.asks) == bool(since and isinstance(since[-1], e.Continued) and since[-1].asks)
    if run.verdict is not None and not run.is_over:
        assert isinstance(since[-1], e.Judged)


def check_inquiries(run, events):
    """What people have answered is there for the next attempt, whatever happens to the call meanwhile."""
    for entry in run.open:
        if entry.phase is Phase.FINISHED:
            continue
        asked = [event for event in events if isinstance(event, e.ToolPaused) and event.call_id == entry.call.id]
        given = [event for event in events if isinstance(event, e.InputGiven) and event.call_id == entry.call.id]
        rounds = sum(event.state is not None for event in (*asked, *given))
        told = {key: value for event in given for key, value in event.answers.items()}
        assert (entry.inquiry is None) == (rounds == 0)
        assert entry.inquiry is None or (entry.inquiry.rounds, dict(entry.inquiry.answers)) == (rounds, told)


def check_errors(run, _events):
    """Errors come by turn, and there are as many as turns failed in a row."""
    assert all(a.turn <= b.turn for a, b in pairwise(run.errors))
    assert run.consecutive_errors <= len(run.errors)


def check_marks(run, events):
    """What is counted and marked on the way is what the results and choices say."""
    retries = Counter()
    for each in results_in(events):
        retries[each.tool] += each.attempts - 1
    assert run.retries == +retries
    assert run.has_cut == any(each.cut for each in results_in(events))
    rests = [event for event in events if isinstance(event, e.Paused | e.Resumed | e.Failed)][-1:]
    assert (run.paused is not None) == bool(rests and isinstance(rests[0], e.Paused))
    known = [event.fingerprint for event in events if isinstance(event, e.Resumed) and event.fingerprint]
    assert run.fingerprint == (known[-1] if known else None)
    last = [event for event in events if isinstance(event, e.ToolsOffered) or getattr(event, "inputs", ())][-1:]
    assert run.offered == next((event.tools for event in last if isinstance(event, e.ToolsOffered)), None)


def labels_in(event):
    """Return the labels that an event brings into its run."""
    match event:
        case e.Observed():
            untrusted = {Label.UNTRUSTED} if any(each.kind in UNTRUSTED_KINDS for each in event.inputs) else set()
            return untrusted.union(*[each.labels for each in event.inputs])
        case e.ToolStarted():
            return set(event.labels)
        case e.ToolFinished():
            return set(event.result.labels)
        case e.ToolsChosen() | e.AnswerGiven() | e.AnswerDrafted() if event.message.hosted is not None:
            return set(event.message.hosted.labels)
        case e.Recalled() if read := (*event.items, *(event.profile or ())):
            return {Label.USER_DATA}.union(*[item.labels for item in read])
    return set()


def check_labels(run, events):
    """The run has the labels of all that it continues and of all its events; the source of each is where it was first.

    None goes away, whatever happens later: a compaction, a pause, the end of the run.
    """
    inherited = {label for label, source in run.labels.items() if source.run_id != run.id}
    assert inherited == ({Label.PRIVATE} if run.prior else set())
    assert set(run.labels) == inherited.union(*map(labels_in, events))
    for label in set(run.labels) - inherited:
        assert run.labels[label].version == next(n for n, event in enumerate(events, 1) if label in labels_in(event))
    levels = [level for level in DATA_LEVELS if level in run.labels]
    assert run.data_level == (levels[-1] if levels else None)


CHECKS = (
    check_labels,
    check_counts,
    check_histories,
    check_calls,
    check_state,
    check_errors,
    check_marks,
    check_reflection,
    check_inquiries,
)


@given(
    data=st.data(),
    steps=st.integers(0, 30),
    before=st.sampled_from(EARLIER),
    history=st.sampled_from([(), GIVEN]),
)
def test_whatever_happens_the_promises_hold(data, steps, before, history):
    """After every event of a random legal run all checks hold, and the journal read back folds to the same run."""
    first = run = replayed = begin_run(header(history=history), before)
    events = []
    while not run.is_over:
        event = (going_on if len(events) < steps else ending)(run, data.draw)
        event = attrs.evolve(event, **data.draw(stamp))
        target = TABLE[run.state][type(event)]
        run = run.apply(event)
        events.append(event)
        assert run.state is target
        read = decode_event(encode_event(event, first.header), first.header)
        assert read == event
        replayed = replayed.apply(read)
        assert replayed == run
        for check in CHECKS:
            check(run, events)
    assert first.fold(events) == run
    for kind in {type(event).__name__ for event in events}:
        note(kind)
