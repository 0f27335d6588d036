"""The table: what is in it, what is not, and what can be reached."""

from itertools import product

import pytest

from agentfsm import TABLE, IllegalTransitionError, MisuseError, State, next_state
from agentfsm.core import events as e
from agentfsm.core.machine import START
from agentfsm.core.reducers import REDUCERS
from tests.support.sample_runs import BEFORE, SAMPLES, run_in

# Copied by hand from the architecture, so that a slip in the table is not its own proof.
DESIGN = """
OBSERVE  Observed THINK  ChildReported OBSERVE  Paused OBSERVE  Resumed OBSERVE  LimitReached THINK  Failed ERROR
THINK    ToolsChosen ACT  AnswerGiven DONE  AnswerDrafted REFLECT  ModelFaltered THINK  AttemptFailed THINK
THINK    Compacted THINK  ToolsOffered THINK  Reminded THINK  Recalled THINK  Planned ACT  StepsReady ACT
THINK    PlanDropped THINK  ChildReported THINK  Paused THINK  Resumed THINK  LimitReached THINK  Failed ERROR
ACT      Guarded ACT  ToolStarted ACT  ToolCutOff ACT  ToolFinished ACT  ToolLost ACT  ToolPaused ACT
ACT      InputGiven ACT  ApprovalAsked ACT  ApprovalGiven ACT  StepsReady ACT  AttemptFailed ACT
ACT      ToolsReturned REFLECT  ChildReported ACT  Paused ACT  Resumed ACT  LimitReached THINK  Failed ERROR
REFLECT  Judged REFLECT  AttemptFailed REFLECT  Continued OBSERVE  Accepted DONE  ChildReported REFLECT
REFLECT  Paused REFLECT  Resumed REFLECT  LimitReached THINK  Failed ERROR
"""

PAIRS = list(product(State, e.EVENTS))


def designed():
    arrows = {}
    for line in DESIGN.strip().splitlines():
        source, *words = line.split()
        arrows |= {(source, event): target for event, target in zip(words[::2], words[1::2], strict=True)}
    return arrows


def reached_from(state):
    """Return the states that arrows lead to from here, however many."""
    seen, todo = set(), [state]
    while todo:
        for target in TABLE[todo.pop()].values():
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def test_the_table_is_the_design():
    """The table holds the arrows of the architecture page and no others."""
    table = {(s.upper(), kind.__name__): t.upper() for s, row in TABLE.items() for kind, t in row.items()}
    assert table == designed()


@pytest.mark.parametrize(("state", "kind"), PAIRS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_pair_moves_or_is_refused(state, kind):
    """Each of the states times events moves as the design says, or is refused and leaves the run as it was."""
    run, twin = (run_in(state, BEFORE.get(kind, ())) for _ in range(2))
    target = designed().get((state.upper(), kind.__name__))
    if target is None:
        with pytest.raises(IllegalTransitionError) as caught:
            run.apply(SAMPLES[kind])
        takes = tuple(event for source, event in designed() if source == state.upper())
        assert (caught.value.state, caught.value.event, caught.value.takes) == (state, kind.__name__, takes)
        assert state.upper() in str(caught.value)
        assert kind.__name__ in str(caught.value)
        assert all(name in str(caught.value) for name in takes)
    else:
        moved = run.apply(SAMPLES[kind])
        assert moved.state.upper() == target
        assert moved.version == run.version + 1
    assert run == twin


@pytest.mark.parametrize("state", State)
def test_next_state_is_the_lookup(state):
    """The bare lookup agrees with the table and refuses the rest, without a run."""
    for kind, event in SAMPLES.items():
        if kind in TABLE[state]:
            assert next_state(state, event) is TABLE[state][kind]
        else:
            with pytest.raises(IllegalTransitionError):
                next_state(state, event)


def test_a_final_state_says_so():
    """The refusal of a final state does not offer an empty list."""
    with pytest.raises(IllegalTransitionError, match=r"Observed does not fit the state DONE: it is final"):
        next_state(State.DONE, SAMPLES[e.Observed])


@pytest.mark.parametrize("stranger", [e.Event(), "Observed", None])
def test_what_is_no_event_is_refused(stranger):
    """The base class of events, and things that are no events at all, fit no state."""
    with pytest.raises(MisuseError, match=type(stranger).__name__):
        run_in(State.OBSERVE).apply(stranger)


def test_all_is_reachable_and_all_ends():
    """Every state is reached from OBSERVE; DONE and ERROR are reached from every state that is not final."""
    assert reached_from(START) == set(State)
    for state in State:
        if TABLE[state]:
            assert {State.DONE, State.ERROR} <= reached_from(state)
            assert TABLE[state][e.Failed] is State.ERROR
        else:
            assert state in {State.DONE, State.ERROR}


def test_every_event_has_its_places():
    """Every event type of the module is listed, stands in the table, and has a fold and a sample here."""
    defined = {v for v in vars(e).values() if isinstance(v, type) and issubclass(v, e.Event) and v is not e.Event}
    assert len(e.EVENTS) == len(set(e.EVENTS))
    assert set(e.EVENTS) == defined == set(REDUCERS) == set(SAMPLES)
    assert {kind for row in TABLE.values() for kind in row} == defined


def test_the_table_cannot_be_written_to():
    """Neither the table nor a row of it takes an assignment."""
    with pytest.raises(TypeError):
        TABLE[State.DONE] = {}
    with pytest.raises(TypeError):
        TABLE[State.DONE][e.Observed] = State.THINK
