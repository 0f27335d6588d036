"""What agents do, seed by seed, is what was recorded: each event with its fields and times, their order, their appends.

The journals stand in `journals.txt`; after a change of behaviour that is intended, write them again with

    python -m tests.recorded record

and look at the lines that have changed. A refactoring changes none. `python -m tests.recorded tell SEED` prints the
events of a seed. All 300 seeds: `python -m pytest tests/recorded -m soak`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from agentfsm.core.events import EVENTS
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


def test_every_event_is_recorded():
    """No class of events is left out."""
    rows = [row for seed in read()[0].values() for row in seed[1:]]
    names = {each.partition(":")[0] for row in rows for each in row.replace("+", " ").split()[1:]}
    assert not {kind.__name__ for kind in EVENTS} - names
