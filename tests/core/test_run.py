"""The fold: what each event makes of a run, how runs end, and what can be read off the history."""

import attrs
import pytest

from agentfsm import (
    AgentCost,
    AssistantMessage,
    InputKind,
    MisuseError,
    Outcome,
    RunError,
    State,
    StopReason,
    SystemMessage,
    TextPart,
    Usage,
    UserMessage,
)
from agentfsm.core import events as e
from agentfsm.core.calls import CallRecord, FailureRecord, Phase, find_last_turn, parse_arguments
from agentfsm.core.inbox import Input
from agentfsm.core.run import begin_run
from agentfsm.core.run_facts import list_newest_results
from tests.support.sample_runs import (
    APPROVED,
    ASKED,
    ATTENDED,
    CUT,
    GIVEN,
    INQUIRED,
    LOST,
    PAUSED,
    PROMPT,
    READING,
    SAMPLES,
    STARTED,
    TASK,
    UNDONE,
    USAGE,
    acting,
    answer,
    call,
    chosen,
    failed,
    finished,
    header,
    observing,
    result,
    round_trip,
    run_in,
    sound_history,
    thinking,
)

# Document A's example: what the weather is in Beijing today.
WEATHER = [
    e.Observed(at=101.0, took_s=0.5),
    chosen(name="get_weather", arguments='{"city": "Beijing"}'),
    finished("t1.0", content="Sunny, 25", name="get_weather", duration_s=0.25),
    e.ToolsReturned(),
    e.Continued(),
    e.Observed(),
    e.AnswerGiven(at=109.0, took_s=1.5, message=answer("It is sunny in Beijing."), usage=USAGE),
]


def visited(run, events):
    """Return the states that a run goes through, a state once for each stay."""
    states = [run.state]
    for event in events:
        run = run.apply(event)
        if run.state is not states[-1]:
            states.append(run.state)
    return states


def test_document_a():
    """The weather example visits the states that document A draws, with no event loop in sight."""
    states = " ".join(state.upper() for state in visited(observing(), WEATHER))
    assert states == "OBSERVE THINK ACT REFLECT OBSERVE THINK DONE"


def test_what_the_example_leaves_behind():
    """After the example the run holds the answer, the history, the costs, and one closed call."""
    run = observing().fold(WEATHER)
    sound_history(run.messages)
    assert (run.output, run.stop_reason) == ("It is sunny in Beijing.", StopReason.COMPLETED)
    assert (run.version, run.turn, run.usage) == (7, 2, USAGE + USAGE)
    assert (run.created_at, run.updated_at, run.duration_s) == (100.0, 109.0, 2.0)
    record = CallRecord(
        turn=1,
        call_id="t1.0",
        name="get_weather",
        arguments={"city": "Beijing"},
        outcome=Outcome.DONE,
        duration_s=0.25,
    )
    assert run.calls == (record,)
    assert run.errors == ()


def test_an_event_makes_a_new_run():
    """Applying gives another value and leaves the old one as it was: a prefix of the events is a fork."""
    run = observing()
    after = run.fold(WEATHER)
    assert run == observing()
    assert after == run.fold(WEATHER[:3]).fold(WEATHER[3:])
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        after.state = State.THINK


def test_the_header_shows_through():
    """What a run was begun with is read off the run."""
    run = begin_run(header(id="r9", session="user-7", metadata={"order": 17}))
    assert (run.id, run.session, run.metadata, run.created_at) == ("r9", "user-7", {"order": 17}, 100.0)
    assert run.updated_at == 100.0
    with pytest.raises(TypeError):
        run.metadata["order"] = 18


# OBSERVE


def after(messages):
    """A run that has said that."""
    return attrs.evolve(begin_run(header(id="r0")), messages=messages)


def test_the_first_look_takes_in_the_prompt():
    """History that the run goes on from, then the prompt, then what has arrived; later looks add what is new."""
    said, given = (UserMessage(parts=PROMPT), answer()), (SystemMessage(text="house rules"),)
    late = Input(kind=InputKind.TIMER, parts=(TextPart(text="ping"),))
    run = begin_run(header(history=given), after(said)).apply(e.Observed(inputs=(late,)))
    assert run.messages == (*said, *given, TASK, late.message)
    again = run.fold([chosen(), finished(), e.ToolsReturned(), e.Continued()])
    assert again.apply(e.Observed()).messages == again.messages
    assert again.apply(e.Observed(inputs=(late, late))).messages == (*again.messages, late.message, late.message)


def test_a_run_cancelled_before_it_began_keeps_its_conversation():
    """The next run of the session goes on from this one's messages, so they must hold the earlier ones."""
    run = begin_run(header(), after((TASK, answer()))).apply(failed())
    assert run.messages == (TASK, answer(), TASK)
    assert (run.calls, run.errors) == ((), ())


# THINK


def test_a_reply_counts_and_costs():
    """Every reply is a turn and its usage adds up, whether it holds calls, an answer or a draft."""
    for kind in (e.ToolsChosen, e.AnswerGiven, e.AnswerDrafted):
        run = thinking().apply(SAMPLES[kind])
        assert (run.turn, run.usage) == (1, USAGE)


def test_a_turn_with_calls_is_no_history_yet():
    """The assistant's message stays out of the history until all its calls have their results."""
    run = acting(count=2)
    assert run.messages == (TASK,)
    assert run.reply == chosen(2).message
    assert [entry.phase for entry in run.open] == [Phase.INTENDED] * 2
    closed = run.fold([finished("t1.1"), finished("t1.0"), e.ToolsReturned()])
    assert closed.messages == (TASK, run.reply, result("t1.0"), result("t1.1"))
    assert (closed.reply, closed.open) == (None, ())


def test_error_turns_add_up_and_one_success_resets():
    """A faltering model and a turn whose calls all failed are error turns; an answer or a good call ends the row."""
    run = thinking().fold([e.ModelFaltered(error="503", usage=USAGE)] * 2)
    assert (run.state, run.turn, run.consecutive_errors, run.usage) == (State.THINK, 2, 2, USAGE + USAGE)
    run = run.fold([*round_trip(3, Outcome.TIMED_OUT), e.Observed()])
    assert run.consecutive_errors == 3
    assert run.apply(SAMPLES[e.AnswerDrafted]).consecutive_errors == 0
    assert run.fold(round_trip(4)).consecutive_errors == 0


@pytest.mark.parametrize(
    ("outcomes", "errors"),
    [
        ([Outcome.FAILED], 2),
        ([Outcome.FAILED, Outcome.TIMED_OUT], 2),
        ([Outcome.FAILED, Outcome.DONE], 0),
        ([Outcome.REJECTED], 1),
        ([Outcome.FAILED, Outcome.REJECTED], 1),
        ([Outcome.SKIPPED], 1),
        ([Outcome.REJECTED, Outcome.DONE], 0),
    ],
)
def test_which_turn_is_an_error_turn(outcomes, errors):
    """All calls failed: one more. One succeeded: none. What a person refused or a loop withdrew is neither."""
    results = [finished(f"t2.{number}", outcome) for number, outcome in enumerate(outcomes)]
    run = thinking().fold([e.ModelFaltered(error="503"), chosen(len(outcomes), turn=2), *results, e.ToolsReturned()])
    assert run.consecutive_errors == errors


OFFERED = e.ToolsOffered(tools=("look", "pay"), how="by their words", usage=USAGE)


def test_a_choice_of_tools_holds_until_input_comes():
    """It costs what it cost and is no turn; what is new may need other tools, so input ends it."""
    run = thinking().apply(OFFERED)
    assert thinking().offered is None
    assert (run.state, run.turn, run.offered, run.usage) == (State.THINK, 0, ("look", "pay"), USAGE)
    again = run.fold([*round_trip(1), e.Observed()])
    assert (again.offered, again.usage) == (("look", "pay"), USAGE + USAGE)
    new = Input(parts=(TextPart(text="and now something else"),))
    assert run.fold([*round_trip(1), e.Observed(inputs=(new,))]).offered is None
    assert run.apply(attrs.evolve(OFFERED, tools=())).offered == ()


# The window


def exchange(count):
    """Return so many user messages and answers, in turn."""
    words = (UserMessage(parts=(TextPart(text=f"q{n}"),)) if n % 2 == 0 else answer(f"a{n}") for n in range(count))
    return tuple(words)


def note(count):
    return SystemMessage(text=f"[{count} earlier messages removed to fit the context window.]")


def test_the_whole_history_is_shown_until_it_is_compacted():
    """Compacting moves the window and removes nothing; what stays shown is the task of this run, not an older one."""
    run = begin_run(header(history=exchange(6))).apply(e.Observed())
    assert run.shown == run.messages == run.effect.messages
    assert run.messages[run.own_start] == TASK
    less = run.apply(e.Compacted(start=4, tokens_before=90, tokens_after=40, why="full"))
    assert less.messages == run.messages
    assert less.shown == (note(4), *run.messages[4:]) == less.effect.messages
    assert (less.state, less.turn) == (State.THINK, run.turn)
    later = less.fold([*round_trip(1), e.Observed(), e.Compacted(start=9, tokens_before=2, tokens_after=1, why="full")])
    assert later.shown == (TASK, note(8))


# ACT and its ends


@pytest.mark.parametrize(
    ("before", "outcome", "words"),
    [
        ([], Outcome.SKIPPED, "before the call started"),
        ([ASKED], Outcome.SKIPPED, "before the call started"),
        ([ASKED, APPROVED], Outcome.SKIPPED, "before the call started"),
        ([e.ToolStarted(call_id="t1.0", repeatable=True)], Outcome.UNKNOWN, "may have happened"),
        ([STARTED], Outcome.UNKNOWN, "may have happened"),
        ([STARTED, LOST], Outcome.UNKNOWN, "may have happened"),
        ([PAUSED], Outcome.CANCELLED, "while the call waited"),
        ([STARTED, PAUSED], Outcome.UNKNOWN, "may have happened"),
        ([STARTED, PAUSED, STARTED], Outcome.UNKNOWN, "may have happened"),
        ([e.ToolStarted(call_id="t1.0", repeatable=True), LOST], Outcome.UNKNOWN, "may have happened"),
        ([STARTED, finished("t1.0", Outcome.FAILED, "no")], Outcome.FAILED, "no"),
        ([STARTED, CUT], Outcome.UNKNOWN, "may have happened"),
        ([STARTED, UNDONE], Outcome.SKIPPED, "before the call started"),
        ([STARTED, STARTED, UNDONE], Outcome.UNKNOWN, "may have happened"),
        ([READING, CUT], Outcome.CANCELLED, "cut off: the run was stopped (timeout). It only reads"),
        ([READING, PAUSED], Outcome.CANCELLED, "while the call waited for input. It only reads"),
        (
            [STARTED, INQUIRED, GIVEN],
            Outcome.UNKNOWN,
            "the call waited for input and the effect may have happened",
        ),
    ],
    ids=[
        "intended",
        "asked",
        "approved",
        "running, repeatable",
        "running",
        "lost",
        "waiting",
        "paused",
        "taken up again",
        "lost, repeatable",
        "finished",
        "cut off",
        "taken back",
        "taken back, with one before",
        "cut off, read-only",
        "waiting, read-only",
        "answered",
    ],
)
def test_failing_closes_a_call_as_far_as_it_was(before, outcome, words):
    """A call that the end of the run cuts off says the truth about itself; one that has a result keeps it."""
    run = acting(*before, count=2).apply(failed(StopReason.TIMEOUT))
    sound_history(run.messages)
    first, second = run.messages[-2:]
    assert (first.call_id, first.outcome) == ("t1.0", outcome)
    assert words in first.content
    assert outcome is Outcome.FAILED or "timeout" in first.content
    assert (second.call_id, second.outcome) == ("t1.1", Outcome.SKIPPED)
    assert [record.outcome for record in run.calls] == [outcome, Outcome.SKIPPED]


@pytest.mark.parametrize("state", [State.OBSERVE, State.THINK, State.ACT, State.REFLECT])
@pytest.mark.parametrize("reason", [reason for reason in StopReason if reason is not StopReason.COMPLETED])
def test_failing_says_why(state, reason):
    """From every state and for every reason the run ends in ERROR with that reason and a valid history."""
    run = run_in(state).apply(failed(reason, "17 of 5 used"))
    assert (run.state, run.stop_reason, run.stop_message) == (State.ERROR, reason, "17 of 5 used")
    sound_history(run.messages)


def test_retries_add_up_by_tool():
    """Each attempt after the first of a result counts against what its tool and the run may try again."""
    run = acting(finished("t1.0", attempts=3), finished("t1.1", attempts=1), count=4)
    assert run.retries == {"search": 2}
    run = run.fold([finished("t1.2", attempts=2, name="pay"), finished("t1.3", attempts=2)])
    assert run.retries == {"search": 3, "pay": 1}
    assert run.fold([e.ToolsReturned(), e.Continued()]).retries == {"search": 3, "pay": 1}


def test_a_cut_result_is_remembered():
    """From the first result of which the model is not shown all there is something to read on in."""
    run = acting(finished("t1.0", content="0123456789", shown_chars=10), count=3)
    assert not run.has_cut
    run = run.apply(finished("t1.1", content="0123456789", shown_chars=9))
    assert run.has_cut
    assert run.fold([finished("t1.2"), e.ToolsReturned(), e.Continued()]).has_cut


def test_what_a_sub_agent_cost_is_paid_here():
    """Its usage, which holds that of the agents below it, enters the run's own with its result."""
    below = AgentCost(agent="b", run_id="r1.t1.0.t1.0", usage=Usage(input_tokens=7), usd=None, turns=1)
    cost = AgentCost(
        agent="a", run_id="r1.t1.0", usage=Usage(input_tokens=9, cost_usd=0.5), usd=0.5, turns=2, children=(below,)
    )
    run = acting(count=2).apply(finished(child=cost))
    assert run.usage == USAGE + Usage(input_tokens=9, cost_usd=0.5)
    assert run.turn == 1
    assert run.apply(finished("t1.1")).usage == run.usage


def test_a_persons_arguments_take_the_place_of_the_models():
    """What runs, what is recorded and what the model reads of its own call are the same arguments; no other call's."""
    edited = '{"cents": 5}'
    run = acting(ASKED, attrs.evolve(APPROVED, arguments=edited), count=2)
    assert [entry.call.arguments for entry in run.open] == [edited, "{}"]
    assert [asked.arguments for asked in run.reply.calls] == [edited, "{}"]
    assert run.open_call("t1.0").phase is Phase.APPROVED
    assert [asked.arguments for asked in run.effect.calls] == [edited, "{}"]
    closed = run.fold([STARTED, finished(), finished("t1.1"), e.ToolsReturned()])
    sound_history(closed.messages)
    assert [record.arguments for record in closed.calls] == [{"cents": 5}, {}]
    assert attrs.evolve(closed.messages[1].calls[0], arguments="{}") == call()


def test_an_attending_person_answers_a_running_call():
    """The call goes on, and the answer keeps the state with which its tool would be called again."""
    run = acting(STARTED, ATTENDED)
    entry = run.open_call("t1.0")
    assert (entry.phase, entry.inquiry.rounds, entry.inquiry.answers) == (Phase.RUNNING, 1, ATTENDED.answers)
    assert entry.inquiry.state == ATTENDED.state
    with pytest.raises(MisuseError, match=r"without a state does not fit the running call t1\.0"):
        acting(STARTED, GIVEN)


# REFLECT


def test_continuing_may_tell_withdraw_and_count():
    """A note enters the history, a finding counts, a withdrawn tool stays withdrawn and is listed once."""
    run = run_in(State.REFLECT)
    assert run.apply(e.Continued()).messages == run.messages
    nudged = run.apply(e.Continued(note="Do something else.", loop=True, disabled=("a", "b")))
    assert nudged.messages == (*run.messages, SystemMessage(text="Do something else."))
    assert (nudged.loops, nudged.disabled, nudged.state) == (1, ("a", "b"), State.OBSERVE)
    later = nudged.fold([e.Observed(), SAMPLES[e.AnswerDrafted], e.Continued(loop=True, disabled=("b", "c"))])
    assert (later.loops, later.disabled) == (2, ("a", "b", "c"))


def test_an_accepted_draft_is_the_output():
    """What was drafted and accepted is the answer."""
    run = run_in(State.REFLECT).apply(e.Accepted())
    assert (run.state, run.output, run.stop_reason) == (State.DONE, "Sunny.", StopReason.COMPLETED)


def test_accepting_without_a_draft_gives_no_words():
    """Accepting right after tools ends the run with an empty answer, never with a tool's result as one."""
    run = acting(finished(), e.ToolsReturned()).apply(e.Accepted())
    assert run.output == ""


# Output


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (observing(), ["r1", "OBSERVE", "not over yet", "agent.finish(run)", "agent.resume('r1')"]),
        (thinking(), ["THINK", "not over yet"]),
        (acting(), ["ACT", "not over yet"]),
        (run_in(State.REFLECT), ["REFLECT", "not over yet"]),
        (acting(ASKED), ["ACT", "waits for", "approval of search (t1.0)", "resume"]),
        (acting(STARTED, LOST), ["ACT", "outcome of search (t1.0)"]),
        (thinking().apply(failed(StopReason.MAX_TURNS, "5 of 5 turns")), ["ERROR", "max_turns", "5 of 5 turns"]),
    ],
)
def test_only_done_has_an_output(run, words):
    """On any other run the output is an error that carries the run and says where it is and what to do."""
    with pytest.raises(RunError) as caught:
        _ = run.output
    assert caught.value.run is run
    for word in words:
        assert word in str(caught.value)


# Records


def test_records_leave_out_what_came_before():
    """Calls and errors are the run's own, with its own turn numbers, though the ids count on."""
    earlier = begin_run(header()).fold([e.Observed(), *round_trip(1, Outcome.FAILED), e.Observed(), *round_trip(2)])
    run = begin_run(header(id="r2"), earlier)
    assert run.turns_before == 2
    run = run.fold([e.Observed(), *round_trip(3, Outcome.FAILED, "no"), e.Observed(), *round_trip(4)])
    sound_history(run.messages)
    assert [(r.turn, r.call_id) for r in run.calls] == [(1, "t3.0"), (2, "t4.0")]
    assert run.errors == (FailureRecord(turn=1, source="search", message="no"),)
    assert len({c.id for m in run.messages if isinstance(m, AssistantMessage) for c in m.calls}) == 4


def test_given_history_counts_as_before():
    """History given in the header is treated as an earlier run's: ids count on, records leave it out."""
    given = (TASK, AssistantMessage(calls=(call(turn=7),)), result("t7.0"))
    run = begin_run(header(history=given)).fold([e.Observed(), *round_trip(8)])
    assert run.turns_before == 7
    assert [(record.turn, record.call_id) for record in run.calls] == [(1, "t8.0")]


def test_errors_come_by_turn():
    """Faults of the model and failures of tools are one list, by turn; what a person rejected is no error."""
    run = thinking().fold(
        [
            *round_trip(1, Outcome.TIMED_OUT, "slow"),
            e.Observed(),
            e.ModelFaltered(error="503"),
            chosen(2, turn=3),
            finished("t3.0", Outcome.REJECTED),
            finished("t3.1", Outcome.FAILED, "broken"),
            e.ToolsReturned(),
        ]
    )
    assert [(fault.turn, fault.source, fault.message) for fault in run.errors] == [
        (1, "search", "slow"),
        (2, "model", "503"),
        (3, "search", "broken"),
    ]


@pytest.mark.parametrize(
    ("ids", "highest"),
    [
        ([], 0),
        (["t3.0", "t12.4", "t2.0"], 12),
        (["call_abc", "t", "", "t.1", "tx.0", "3.0", "t-1.0"], 0),
        (["t12345678.0"], 12_345_678),
        (["t123456789.0"], 0),
        (["t5"], 5),
    ],
)
def test_turns_are_read_off_the_ids(ids, highest):
    """Only ids of our own form count, and a number too long to be a turn is none."""
    calls = tuple(attrs.evolve(call(), id=call_id) for call_id in ids)
    assert find_last_turn([TASK, AssistantMessage(calls=calls)]) == highest


@pytest.mark.parametrize("call_id", ["t\u00b2.0", "t\u0663.0"])
def test_foreign_digits_are_no_turn(call_id):
    """A history given by the user may hold any ids, and none of them breaks the start of a run."""
    assert find_last_turn([AssistantMessage(calls=(attrs.evolve(call(), id=call_id),))]) == 0


def test_arguments_are_parsed():
    """The arguments of a call as a dict."""
    assert parse_arguments(call(arguments='{"a": [1, null]}')) == {"a": [1, None]}


def test_a_misnamed_call_is_a_misuse():
    """`entry` finds an open call by its id, and nothing else."""
    assert acting(count=2).open_call("t1.1").call == call(1)
    with pytest.raises(MisuseError, match=r"open calls: t1\.0, t1\.1"):
        acting(count=2).open_call("t1.2")


def test_a_run_prints_in_short():
    """The history stays out of a run's `repr`, which lands in logs and tracebacks."""
    assert "weather in Beijing?" not in repr(attrs.evolve(thinking(), header=header(prompt=())))
    assert "waits for approval of " in repr(acting(ASKED))
    assert repr(thinking().apply(failed())).startswith(f"<Run {thinking().id} ERROR, turn 0, {failed().reason}")


def test_a_call_is_found_by_an_id_that_was_not_made_here():
    """A call's id usually says where it stands; one that says something else is looked for."""
    calls = (attrs.evolve(call(), id="b.1"), attrs.evolve(call(), id="a.0"))
    run = thinking().apply(e.ToolsChosen(message=AssistantMessage(calls=calls)))
    assert [run.open_call(each.id).call for each in calls] == list(calls)


def test_the_newest_results_of_a_history_of_results():
    """A history that begins with results has them all."""
    messages = (result("t1.0"), result("t1.1"))
    run = attrs.evolve(begin_run(header()), messages=messages)
    assert list_newest_results(run) == [*messages]
