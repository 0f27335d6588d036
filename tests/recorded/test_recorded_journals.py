"""What agents do, seed by seed, is what was recorded: each event with its fields and times, their order, their appends.

Time is virtual, a process dies at the number of an append, and each throw of the dice is about one thing, so that a
journal depends on no other. Only the order of what concurrent calls do at the very same moment depends on how often a
task yields: a refactoring that changes that moves it in a few seeds in a hundred, and nothing else.

The journals stand in `journals.txt`; after a change of behaviour that is intended, write them again with

    python -m tests.recorded record

and look at the lines that have changed. A refactoring changes none. `python -m tests.recorded tell SEED` prints the
events of a seed. All 300 seeds: `python -m pytest tests/recorded -m soak`.
"""

from __future__ import annotations

from collections import Counter

import attrs
import pytest

from agentfsm import ErrorType, InputKind, Outcome, Purpose, StopReason, ToolResult
from agentfsm.core.events import EVENTS, ChildReported, PlanKind
from agentfsm.guards import GuardVerdict
from agentfsm.reflection import Action
from tests.recorded.cast import FEATURES, features_of
from tests.recorded.recording import SEEDS, difference, journals, read

# Of the seeds, in the usual suite; no divisor of the number of features, so that each has its turn.
EVERY = 5
IN_A_ROW = 50
# Differences that a failure tells.
SHOWN = 3


def compare(seeds):
    """Fail with the first differences from the recorded journals."""
    found = [text for seed in seeds if (text := difference(seed))]
    if found:
        words = "\n\n".join(found[:SHOWN])
        pytest.fail(
            f"{len(found)} of {len(seeds)} seeds differ from tests/recorded/journals.txt\n\n{words}", pytrace=False
        )


@pytest.mark.parametrize("first", range(0, SEEDS.stop, EVERY * 10))
def test_the_journals_are_as_recorded(first):
    """Ten seeds of every fifty are played; each feature is the own one of one of them at least."""
    compare(range(first, first + EVERY * 10, EVERY))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, SEEDS.stop, IN_A_ROW))
def test_all_journals_are_as_recorded(first):
    """All seeds are played."""
    compare(range(first, first + IN_A_ROW))


@pytest.mark.soak
def test_the_seeds_cover_what_the_recording_says():
    """What is counted at the end of the recording is what happens."""
    covered = Counter()
    for seed in SEEDS:
        covered.update(journals(seed).covered)
    assert covered == read()[1]


def test_every_feature_has_its_seeds():
    """Each feature is the own one of several seeds, and of one that the usual suite plays."""
    own = Counter(features_of(seed)[0] for seed in SEEDS)
    assert min(own[each] for each in FEATURES) >= 5
    assert {features_of(seed)[0] for seed in SEEDS[::EVERY]} == set(FEATURES)


# What no seed reaches, and why.
UNREACHED = {
    "AnswerDrafted.answered_from": "a repeated answer, at the end of which new input arrives",
    "AnswerDrafted.claims": "no agent here has claims=: tests/engine/test_claimed_answers.py",
    "Continued.is_last": "journals of format 3 and older",
    "ToolLost.lacks_tool": "a step whose tool the program has lost: tests/changed has it",
    "ToolResult.sandbox": "a process of its own, in real time",
    "an error of the type rate_limited": "a status of HTTP",
    "Failed for completed": "the reason of an answer",
    "Failed for stop_condition": "no agent here has stop_when=: tests/engine/test_stop_conditions.py",
    "LimitReached for stop_condition": "as above",
    "Guarded.first": "no agent here has rules over time: tests/engine/test_time_rules.py",
    "Accepted.findings": "as above",
    "Failed.findings": "as above",
    "a judge says replan": "no throw of these seeds: tests/reflection has it",
    "Recalled.profile": "the memory here has no profile: tests/memory/test_profile.py",
    **{f"ChildReported.{field.name}": "nothing is in the background here" for field in attrs.fields(ChildReported)},
    "Failed for parked": "journals of format 3 and older",
    **{f"asked for a {each}": "no request to a model" for each in ("memory", "tool", "agent")},
    **{
        f"LimitReached for {each}": "ends a run without a last answer"
        for each in ("completed", "parked", "cancelled", "guard", "model_error", "step_failed")
    },
}
# What the seeds do beside that.
DEEDS = """
    a call has begun before its reply was there; a call is found to be done; a call is rejected, by nobody;
    a fork; a fork with an edit; a guard says allow about a call of an agent below; a plan is replan;
    a guard says ask about a call of an agent below; a guard says refuse about a call of an agent below;
    a question is answered; a record of the kind allowance; a record of the kind answer_cache;
    a record of the kind spend;
    a stream breaks; a tool is answered; allowed for the session; an agent has cost something;
    an attending person is asked; approved; approved with other arguments; cancel is asked for; cut off;
    edited by one of four eyes; input is sent; killed at append; killed at model; killed at tool; pause is asked for;
    rejected; settled with failed; settled with rerun; settled with result; steps join later
"""


def test_the_seeds_reach_everything():
    """Every field of each event, every verdict, outcome, error, purpose and reason to stop, and all deeds of people."""
    kinds = [(kind.__name__, kind) for kind in (*EVENTS, ToolResult)]
    unsaid = {"at", "took_s", "origin"}
    wanted = {f"{name}.{field.name}" for name, kind in kinds for field in attrs.fields(kind)}
    wanted -= {f"{name}.{field}" for name, _ in kinds for field in unsaid}
    wanted |= {f"a guard says {each}" for each in GuardVerdict} | {f"a judge says {each}" for each in Action}
    wanted |= {f"a plan is {each}" for each in PlanKind} | {f"a call is {each}" for each in Outcome}
    wanted |= {f"an error of the type {each}" for each in ErrorType} | {f"asked for a {each}" for each in Purpose}
    wanted |= {f"{how} for {each}" for how in ("Failed", "LimitReached") for each in StopReason}
    wanted |= {f"input of the kind {each}" for each in InputKind}
    wanted |= {" ".join(each.split()) for each in DEEDS.split(";")}
    covered = read()[1]
    missing = sorted(wanted - UNREACHED.keys() - covered.keys())
    assert not missing, ", ".join(missing)
    assert not UNREACHED.keys() & covered.keys()
    assert not covered["told MisuseError"]  # a mistake of the play


def test_every_event_is_recorded():
    """No class of events is left out but that of background runs, which have tests of their own."""
    rows = [row for seed in read()[0].values() for row in seed[1:]]
    names = {each.partition(":")[0] for row in rows for each in row.replace("+", " ").split()[1:]}
    assert not {kind.__name__ for kind in EVENTS} - names - {"ChildReported"}
