"""What a run says has to happen next, in each state and for each mixture of open calls."""

import attrs
import pytest

from agentfsm import MisuseError, Outcome, Pending, PendingKind, State
from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.effects import AskModel, ReadInbox, Reflect, RunTools, Wait
from tests.support.sample_runs import (
    APPROVED,
    ASKED,
    CHANGED,
    LOST,
    PAUSED,
    SAMPLES,
    STARTED,
    TASK,
    WAITED,
    acting,
    chosen,
    failed,
    finished,
    observing,
    run_in,
    thinking,
)


def asked(number, expires_at=500.0):
    return e.ApprovalAsked(call_id=f"t1.{number}", expires_at=expires_at)


def lost(number):
    return e.ToolLost(call_id=f"t1.{number}")


def paused(number):
    return e.ToolPaused(call_id=f"t1.{number}", pending=(WAITED,))


def started(number):
    return e.ToolStarted(call_id=f"t1.{number}")


def ids(calls):
    return [call.id for call in calls]


def test_observe_reads_the_inbox():
    """A fresh run looks at what has arrived."""
    assert run_in(State.OBSERVE).effect == ReadInbox()


def test_think_asks_for_the_next_turn():
    """THINK asks for the reply after those there are, and shows the history."""
    assert thinking().effect == AskModel(turn=1, messages=(TASK,))
    faltered = thinking().apply(e.ModelFaltered(error="overloaded"))
    assert faltered.effect == AskModel(turn=2, messages=(TASK,))


def test_reflect_judges_the_draft_or_the_turn():
    """After a draft its text is to be judged, after tools there is none."""
    assert run_in(State.REFLECT).effect == Reflect(draft="Sunny.")
    assert acting(finished(), e.ToolsReturned()).effect == Reflect(draft=None)


@pytest.mark.parametrize("state", [State.DONE, State.ERROR])
def test_a_run_that_is_over_wants_nothing(state):
    """A final state has no effect, does not wait, and is over; all others are not."""
    run = run_in(state)
    assert run.effect is None
    assert run.is_over
    assert not run.is_waiting
    assert not any(run_in(other).is_over for other in State if other not in {State.DONE, State.ERROR})


@pytest.mark.parametrize(
    ("before", "runnable"),
    [
        ([], ["t1.0", "t1.1", "t1.2"]),
        ([started(0)], ["t1.0", "t1.1", "t1.2"]),
        ([finished("t1.0")], ["t1.1", "t1.2"]),
        ([asked(1)], ["t1.0"]),
        ([started(1), lost(1)], ["t1.0"]),
        ([started(1), paused(1)], ["t1.0"]),
        ([started(0), paused(0), started(0)], ["t1.0", "t1.1", "t1.2"]),
        ([asked(2), finished("t1.0")], ["t1.1"]),
        ([asked(0), APPROVED], ["t1.0", "t1.1", "t1.2"]),
        ([asked(0), APPROVED, asked(1)], ["t1.0"]),
        ([finished("t1.0"), finished("t1.2")], ["t1.1"]),
        ([finished(f"t1.{number}") for number in (2, 0, 1)], []),
    ],
)
def test_calls_before_the_first_undecided_one_run(before, runnable):
    """Calls run in the model's order up to the first that waits for a person; finished ones do not run again."""
    run = acting(*before, count=3)
    assert isinstance(run.effect, RunTools)
    assert ids(run.effect.calls) == runnable
    assert not run.is_waiting


@pytest.mark.parametrize(
    ("before", "waits"),
    [
        ([asked(0)], [("t1.0", PendingKind.APPROVAL)]),
        ([started(0), lost(0)], [("t1.0", PendingKind.OUTCOME)]),
        ([finished("t1.0"), asked(1)], [("t1.1", PendingKind.APPROVAL)]),
        ([asked(0), asked(2)], [("t1.0", PendingKind.APPROVAL), ("t1.2", PendingKind.APPROVAL)]),
        ([started(0), lost(0), asked(1)], [("t1.0", PendingKind.OUTCOME), ("t1.1", PendingKind.APPROVAL)]),
    ],
)
def test_where_nothing_can_run_the_run_waits(before, waits):
    """With no call left before the first undecided one the run waits, for all that is undecided, in call order."""
    run = acting(*before, count=3)
    assert run.is_waiting
    assert run.effect == Wait(pending=run.pending)
    assert [(item.call_id, item.kind) for item in run.pending] == waits


def test_what_is_pending_says_exactly_what_it_is():
    """A pending item names run, call, tool, exact arguments and expiry; a lost call waits for ever."""
    run = thinking().apply(chosen(name="pay", arguments='{"cents": 5}')).apply(ASKED)
    wants = {"run_id": "r1", "call_id": "t1.0", "tool": "pay", "arguments": {"cents": 5}}
    assert run.pending == (Pending(kind=PendingKind.APPROVAL, expires_at=500.0, **wants),)
    gone = run.fold([APPROVED, STARTED, LOST])
    assert gone.pending == (Pending(kind=PendingKind.OUTCOME, expires_at=None, **wants),)


def test_the_description_is_shown_to_who_decides():
    """What the tool says that the call will do stands in the question; a call that says nothing has none."""
    run = acting(e.ApprovalAsked(call_id="t1.0", expires_at=500.0, description="Pays 5 cents."), asked(1), count=2)
    assert [item.description for item in run.pending] == ["Pays 5 cents.", ""]


def test_a_paused_call_waits_for_what_its_agent_waits_for():
    """The items are those of the sub-agent's own run, where they are decided; nothing is asked of this one."""
    other = attrs.evolve(WAITED, call_id="t1.1", kind=PendingKind.OUTCOME, expires_at=None)
    run = acting(STARTED, e.ToolPaused(call_id="t1.0", pending=(WAITED, other)), asked(1), count=2)
    assert run.effect == Wait(pending=(WAITED, other, run.pending[2]))
    assert (run.pending[2].run_id, run.pending[2].call_id) == ("r1", "t1.1")
    assert not acting(STARTED, PAUSED).apply(STARTED).pending


def test_items_are_pending_while_others_run():
    """What waits for a person is listed also while a call before it can run."""
    run = acting(asked(1), count=2)
    assert isinstance(run.effect, RunTools)
    assert [item.call_id for item in run.pending] == ["t1.1"]


# What leads to each state that a run may rest in.
RESTING = {
    State.OBSERVE: (),
    State.THINK: (e.Observed(),),
    State.ACT: (e.Observed(), chosen(), ASKED),
    State.REFLECT: (e.Observed(), chosen(), finished(), e.ToolsReturned()),
}


@pytest.mark.parametrize("state", RESTING)
def test_a_paused_run_wants_nothing_but_its_end(state):
    """A pause comes before whatever else would be next, in any state that is not final, until the run is resumed."""
    run = observing().fold(RESTING[state])
    rests = run.apply(e.Paused(by="ann", message="look at it first"))
    pause = Pending(kind=PendingKind.PAUSE, run_id="r1", description="paused by ann: look at it first")
    assert (run.state, rests.state, rests.is_waiting) == (state, state, True)
    assert rests.pending == (pause, *run.pending)
    assert rests.effect == Wait(pending=rests.pending)
    again = rests.apply(e.Resumed())
    assert (again.effect, again.pending, again.paused) == (run.effect, run.pending, None)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (e.Paused(), "paused"),
        (e.Paused(by="ann"), "paused by ann"),
        (e.Paused(message="before ACT"), "paused: before ACT"),
    ],
    ids=["", "by", "message"],
)
def test_a_pause_says_what_is_known_of_it(event, words):
    """Who paused the run and why, where they said so."""
    assert observing().apply(event).pending[0].description == words


def test_the_end_of_a_run_ends_its_pause():
    """A paused run that fails waits for nothing any more."""
    run = observing().fold([e.Paused(), failed()])
    assert (run.paused, run.pending, run.effect, run.is_over) == (None, (), None, True)


def test_a_run_knows_the_agent_that_goes_on_with_it():
    """The newest agent that was another one stands in the run; a pause that ends without a change forgets none."""
    run = observing()
    assert run.fingerprint is None
    run = run.apply(SAMPLES[e.Resumed])
    assert run.fingerprint == CHANGED
    assert run.fold([e.Paused(), e.Resumed()]).fingerprint == CHANGED


def test_an_approval_that_is_asked_again_holds_for_the_new_question():
    """The later question stands in the place of the earlier one: its time, its words, its digest."""
    first = e.ApprovalAsked(call_id="t1.0", expires_at=500.0, description="Pays 5 cents.", digest="aa")
    later = e.ApprovalAsked(call_id="t1.0", expires_at=600.0, description="Pays 5 euros.", digest="bb")
    [item] = acting(first, later).pending
    assert (item.expires_at, item.description, item.digest) == (600.0, "Pays 5 euros.", "bb")


def test_a_call_can_be_lost_in_any_phase():
    """Whoever goes on from a copy of a run does not know what became of its open calls: a person has to say it."""
    for before in [(), (ASKED,), (ASKED, APPROVED), (STARTED,), (STARTED, PAUSED)]:
        run = acting(*before, LOST)
        assert (run.open_call("t1.0").phase, run.pending[0].kind) == (Phase.OUTCOME_UNKNOWN, PendingKind.OUTCOME)


def test_a_call_goes_through_its_phases():
    """Each event moves its call to its phase, counts attempts, and touches no other call."""
    steps = [
        (ASKED, Phase.AWAITING_APPROVAL, 0),
        (APPROVED, Phase.APPROVED, 0),
        (e.ToolStarted(call_id="t1.0", repeatable=True), Phase.RUNNING, 1),
        (LOST, Phase.OUTCOME_UNKNOWN, 1),
        (APPROVED, Phase.APPROVED, 1),
        (STARTED, Phase.RUNNING, 2),
        (PAUSED, Phase.PAUSED, 2),
        (attrs.evolve(PAUSED, pending=(WAITED, WAITED)), Phase.PAUSED, 2),
        (STARTED, Phase.RUNNING, 3),
        (finished("t1.0", Outcome.FAILED, "no"), Phase.FINISHED, 3),
    ]
    run = acting(count=2)
    assert (run.open_call("t1.0").phase, run.open_call("t1.0").attempts) == (Phase.INTENDED, 0)
    for event, phase, attempts in steps:
        run = run.apply(event)
        assert (run.open_call("t1.0").phase, run.open_call("t1.0").attempts) == (phase, attempts)
        assert run.open_call("t1.0").expires_at == (500.0 if phase is Phase.AWAITING_APPROVAL else None)
        assert run.open_call("t1.0").pending == getattr(event, "pending", ())
        assert run.open_call("t1.1").phase is Phase.INTENDED
    assert run.open_call("t1.0").result == steps[-1][0].result


@pytest.mark.parametrize(
    "call_id",
    ["t1.1", "t2.0", "t1.00", "t1.-1", "t1.", "t1", "", "0", "x.0", "t1.\u00b2", "t1.\u0660", "t1." + "9" * 5_000],
)
def test_a_call_that_is_not_open_is_named(call_id):
    """An id that no open call has, however it is made up, is a misuse that lists those there are."""
    run = acting()
    lost = (e.ToolLost(call_id=call_id), attrs.evolve(PAUSED, call_id=call_id))
    for event in (e.ToolStarted(call_id=call_id), finished(call_id), *lost):
        with pytest.raises(MisuseError, match=r"no open call .*; open calls: t1\.0"):
            run.apply(event)
    with pytest.raises(MisuseError, match="open calls: none"):
        thinking().open_call(call_id)
    assert run == acting()


def test_the_turn_ends_only_when_every_call_has_its_result():
    """`ToolsReturned` is refused while a call is open, and the run is untouched."""
    run = acting(finished("t1.0"), count=2)
    with pytest.raises(MisuseError, match="while calls are open"):
        run.apply(e.ToolsReturned())
    assert run == acting(finished("t1.0"), count=2)


@pytest.mark.parametrize(
    "events",
    [
        [ASKED, STARTED],
        [APPROVED],
        [finished(), STARTED],
        [finished(), finished(content="another")],
        [finished(), ASKED],
        [STARTED, LOST, LOST],
        [finished(), LOST],
        [ASKED, PAUSED],
        [STARTED, LOST, PAUSED],
        [finished(), PAUSED],
        [STARTED, PAUSED, ASKED],
        [STARTED, PAUSED, APPROVED],
    ],
    ids=[
        "started unapproved",
        "approved unasked",
        "started when finished",
        "finished twice",
        "asked when finished",
        "lost twice",
        "lost when finished",
        "paused while it is asked for",
        "paused when lost",
        "paused when finished",
        "asked when paused",
        "approved when paused",
    ],
)
def test_phases_move_one_way(events):
    """An event that does not fit its call's phase is a misuse, as one that does not fit the state is."""
    run = acting(*events[:-1])
    with pytest.raises(MisuseError):
        run.apply(events[-1])


def test_failing_leaves_nothing_open():
    """After `Failed` nothing is pending and nothing wants to run."""
    run = acting(asked(1), count=2).apply(failed())
    assert (run.open, run.pending, run.reply, run.effect) == ((), (), None, None)
