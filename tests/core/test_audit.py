"""The audit: every call of a journal as one record, whatever became of it and of its run."""

import hashlib

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import AssistantMessage, ErrorType, Outcome, Pending, PendingKind, ToolResult
from agentfsm.core import events as e
from agentfsm.core.calls import Phase, parse_arguments
from agentfsm.core.run import begin_run
from agentfsm.journal.audit import build_audit
from tests.support.run_walks import EARLIER, ending, going_on, new_calls, stamp
from tests.support.run_walks import GIVEN as HISTORY
from tests.support.sample_runs import (
    APPROVED,
    ASKED,
    GIVEN,
    INQUIRED,
    LOST,
    PAUSED,
    STARTED,
    chosen,
    failed,
    finished,
    header,
    thinking,
)

OBSERVED = e.Observed()
QUESTION = e.ToolPaused(
    call_id="t1.0",
    pending=(Pending(kind=PendingKind.QUESTION, run_id="r1", call_id="t1.0", tool="search"),),
)


def record_of(*events, **changes):
    """Return the one record of a run with one call, after these events."""
    [record] = build_audit(header(**changes), [OBSERVED, chosen(), *events])
    return record


def at(moment, event):
    return attrs.evolve(event, at=moment)


# Each call once, in order, whatever happens.


def check_audit(run, events, records):
    """The records are the calls, in order, with the arguments, results and ends that the run itself knows."""
    asked = [call.id for event in events for call in new_calls(event)]
    assert [record.call_id for record in records] == asked
    own = run.messages[run.own_start :]
    results = {m.call_id: m for m in own if isinstance(m, ToolResult)}
    calls = {call.id: call for m in own if isinstance(m, AssistantMessage) for call in m.calls}
    opened = {entry.call.id: entry for entry in (*run.open, *(run.plan.closed if run.plan else ()))}
    results |= {call_id: entry.result for call_id, entry in opened.items() if entry.result is not None}
    calls |= {call_id: entry.call for call_id, entry in opened.items()}
    for record in records:
        result = results.get(record.call_id)
        assert record.arguments == parse_arguments(calls[record.call_id])
        assert record.tool == calls[record.call_id].name
        assert record.is_open == (result is None) == (record.ended_at is None)
        assert record.status is (opened[record.call_id].phase if result is None else result.outcome)
        assert record.result == (None if result is None else result.content)
        assert not (run.is_over and record.is_open)


@given(
    data=st.data(),
    steps=st.integers(0, 30),
    before=st.sampled_from(EARLIER),
    history=st.sampled_from([(), HISTORY]),
)
def test_every_call_is_told_once_whatever_happens(data, steps, before, history):
    """At any version of a random legal run, and at whatever end, the audit holds its calls and nothing else."""
    first = run = begin_run(header(history=history), before)
    events = []
    while not run.is_over:
        event = (going_on if len(events) < steps else ending)(run, data.draw)
        event = attrs.evolve(event, **data.draw(stamp))
        run = run.apply(event)
        events.append(event)
    cut = data.draw(st.integers(0, len(events)))
    for known in (events[:cut], events):
        check_audit(first.fold(known), known, build_audit(first.header, known))


# What a record says.


def test_who_and_what():
    """The run, its agent and its user, the tool, the arguments, the key, the turn."""
    words = {"agent": "clerk", "agent_version": "7", "user": "ann", "session": "s", "parent": "r0"}
    events = [OBSERVED, chosen(), finished(), e.ToolsReturned(), e.Continued(), OBSERVED]
    records = build_audit(header(**words), [*events, chosen(2, turn=2, arguments='{"q": [1]}')])
    assert [(record.call_id, record.turn, record.key) for record in records] == [
        ("t1.0", 1, "r1:t1.0"),
        ("t2.0", 2, "r1:t2.0"),
        ("t2.1", 2, "r1:t2.1"),
    ]
    last = attrs.asdict(records[2])
    assert {name: last[name] for name in words} == words
    assert (last["run_id"], last["tool"], last["arguments"]) == ("r1", "search", {"q": [1]})
    assert build_audit(header(), [OBSERVED]) == ()


def test_when():
    """Asked for, taken up, ended; the duration is the result's."""
    ended = finished(started_at=12.0, duration_s=3.0)
    record = record_of(at(12.5, STARTED), at(15.0, ended))
    assert (record.asked_at, record.started_at, record.ended_at, record.duration_s) == (0.0, 12.0, 15.0, 3.0)
    early = record_of(at(9.0, finished(started_at=7.0)))
    assert (early.started_at, early.attempts) == (7.0, 1)
    never = record_of(at(9.0, finished(outcome=Outcome.SKIPPED)))
    assert (never.started_at, never.ended_at) == (None, 9.0)


def test_attempts_are_counted_over_crashes():
    """Each start is in the journal; the result knows those of its last dispatch only."""
    ended = finished(started_at=30.0, attempts=2)
    record = record_of(at(10.0, STARTED), at(20.0, STARTED), at(21.0, STARTED), ended)
    assert (record.attempts, record.started_at) == (3, 10.0)
    assert record_of(finished(started_at=30.0, attempts=2)).attempts == 2


@pytest.mark.parametrize(
    "why",
    [
        ErrorType.ARGUMENTS,
        ErrorType.UNKNOWN_TOOL,
        ErrorType.NOT_PERMITTED,
        ErrorType.WITHDRAWN,
        ErrorType.BLOCKED,
        ErrorType.BUDGET,
        ErrorType.CIRCUIT_OPEN,
    ],
)
def test_what_was_refused_was_not_tried(why):
    """A call that was answered before its tool was reached has no attempt."""
    record = record_of(finished(outcome=Outcome.FAILED, error_type=why, started_at=5.0))
    assert (record.attempts, record.error_type, record.status) == (0, why, Outcome.FAILED)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ((), Phase.INTENDED),
        ((ASKED,), Phase.AWAITING_APPROVAL),
        ((ASKED, APPROVED), Phase.APPROVED),
        ((STARTED,), Phase.RUNNING),
        ((STARTED, LOST), Phase.OUTCOME_UNKNOWN),
        ((PAUSED,), Phase.PAUSED),
    ],
)
def test_an_open_call_says_how_far_it_is(events, status):
    """It has neither end nor result."""
    record = record_of(*events)
    assert (record.status, record.is_open, record.ended_at, record.digest) == (status, True, None, "")


@pytest.mark.parametrize(
    ("events", "status", "attempts"),
    [
        ((), Outcome.SKIPPED, 0),
        ((ASKED,), Outcome.SKIPPED, 0),
        ((STARTED,), Outcome.UNKNOWN, 1),
        ((e.ToolStarted(call_id="t1.0", repeatable=True),), Outcome.UNKNOWN, 1),
        ((finished(),), Outcome.DONE, 0),
    ],
)
def test_the_end_of_a_run_closes_its_calls(events, status, attempts):
    """What was cut off, what never began and what was done are told apart; an end of its own stays a call's own."""
    closed = record_of(*[at(5.0, event) for event in events], at(9.0, failed()))
    assert (closed.status, closed.attempts) == (status, attempts)
    assert closed.ended_at == (5.0 if status is Outcome.DONE else 9.0)
    assert not closed.is_open


# Who decided.


def test_who_let_it_run_and_with_what():
    """A person's arguments are those that ran; the model's own are beside them."""
    plain = record_of(ASKED, APPROVED, STARTED, finished())
    assert (plain.approved_by, plain.proposed, plain.decision) == ("ann", None, "")
    edited = record_of(ASKED, attrs.evolve(APPROVED, arguments='{"q": 2}'), STARTED, finished())
    assert (edited.arguments, edited.proposed) == ({"q": 2}, {})


def test_arguments_changed_twice():
    """What the model wrote stays what the model wrote."""
    again = attrs.evolve(APPROVED, by="bob", arguments='{"q": 3}')
    record = record_of(ASKED, attrs.evolve(APPROVED, arguments='{"q": 2}'), STARTED, LOST, again)
    assert (record.approved_by, record.arguments, record.proposed) == ("bob", {"q": 3}, {})


def test_who_had_it_run_again_did_not_approve_it():
    """A rerun keeps the approver and the arguments that were approved; each rerun is told."""
    edited, rerun = attrs.evolve(APPROVED, arguments='{"q": 2}'), e.ApprovalGiven(call_id="t1.0", by="bob")
    record = record_of(ASKED, edited, STARTED, LOST, rerun, STARTED, LOST, rerun, STARTED, finished())
    assert (record.approved_by, record.arguments, record.proposed) == ("ann", {"q": 2}, {})
    assert (record.rerun_by, record.decision) == (("bob", "bob"), "")
    unasked = record_of(STARTED, LOST, rerun, STARTED, finished())
    assert (unasked.approved_by, unasked.rerun_by) == (None, ("bob",))


@pytest.mark.parametrize(
    ("events", "decision", "by"),
    [
        ((ASKED, e.ToolFinished(result=finished(outcome=Outcome.REJECTED).result, by="ann")), "rejected", "ann"),
        ((ASKED, finished(outcome=Outcome.REJECTED)), "", ""),
        ((STARTED, LOST, e.ToolFinished(result=finished().result, by="ann")), "settled", "ann"),
        ((QUESTION, e.ToolFinished(result=finished().result)), "answered", ""),
        ((QUESTION, e.ToolFinished(result=finished(outcome=Outcome.FAILED).result, by="ann")), "answered", "ann"),
        ((QUESTION, finished(outcome=Outcome.TIMED_OUT)), "", ""),
        ((QUESTION, finished(started_at=5.0)), "", ""),
        ((PAUSED, finished()), "", ""),
        ((finished(),), "", ""),
    ],
    ids=["rejected", "in no time", "settled", "answered", "with a no", "not answered", "went on", "an agent's", "ran"],
)
def test_whose_word_a_result_is(events, decision, by):
    """The tool's own, or that of a person, who has a name or none."""
    record = record_of(*events)
    assert (record.decision, record.decided_by) == (decision, by)


def test_what_a_tool_asks_in_between_is_no_result():
    """Who has answered is told, round for round; the result is the tool's own, or nobody's."""
    again = attrs.evolve(GIVEN, by="")
    rounds = (STARTED, INQUIRED, GIVEN, STARTED, INQUIRED, again, STARTED, finished(started_at=5.0))
    record = record_of(*rounds)
    assert (record.informed_by, record.attempts, record.decision) == (("ann", ""), 3, "")
    late = record_of(STARTED, INQUIRED, finished(outcome=Outcome.FAILED))
    assert (late.informed_by, late.decision) == ((), "")


def test_a_question_of_an_agent_below_is_not_this_call_s():
    """What is answered in another run is told there."""
    [item] = QUESTION.pending
    below = attrs.evolve(QUESTION, pending=(attrs.evolve(item, run_id="r1.t1.0"),))
    assert record_of(below, finished()).decision == ""


# Results and forks.


def test_a_result_is_known_by_its_hash():
    """Of all of its text, as UTF-8; a lone surrogate is no reason to fail."""
    content = "北京 " * 1_000
    assert record_of(finished(content=content)).digest == hashlib.sha256(content.encode()).hexdigest()
    assert record_of(finished(content=content)).result == content
    assert len(record_of(finished(content="\ud800")).digest) == 64


def test_a_fork_says_what_it_has_inherited():
    """What ended before the fork; a call that was open there ends in the fork, and is the fork's."""
    words = {"id": "r2", "forked_from": "r1"}
    events = [OBSERVED, chosen(2), finished("t1.0"), finished("t1.1")]
    records = build_audit(header(**words, forked_at=3), events)
    assert [record.inherited for record in records] == [True, False]
    assert [record.run_id for record in records] == ["r2", "r2"]


def test_a_record_of_a_run_that_goes_on_from_another_counts_its_own_turns():
    """The history that it goes on from is no part of it."""
    run = thinking(history=HISTORY)
    assert run.messages
    [record] = build_audit(run.header, [OBSERVED, chosen(turn=3)])
    assert (record.call_id, record.turn) == ("t3.0", 1)
