"""A program is changed under its run: nothing is repeated or hidden, whatever the deploy changes and whenever it comes.

A seed makes two programs, where the run of the first is stopped, who decides what in between, and by which program it is
continued. `python -m tests.changed SEED` plays a seed again and tells everything.
"""

from __future__ import annotations

from collections import Counter, deque

import pytest

from agentfsm.core import events as e
from tests.changed.mutations import PROGRAM_CHANGES, UNIT_CHANGES
from tests.changed.play import World, backend_of, play, show, store_of
from tests.changed.programs import walk

# In the usual suite.
FEW = 100
# In a soak.
MANY = 20_000
IN_A_ROW = 50
# Things that happened, told of a pair that broke a promise.
LAST = 60


def played(seed: int, postgres: str = "") -> World:
    """Play a seed on the loop and the store that belong to it."""
    with store_of(seed, postgres) as store:
        return play(seed, store, backend_of(seed))


def hold(seeds: range, postgres: str = "") -> None:
    """Play pairs; fail with the story of the first in which a promise was broken."""
    for seed in seeds:
        if wrong := played(seed, postgres).wrong:
            lines: deque[str] = deque(maxlen=LAST)
            with store_of(seed) as store:
                world = play(seed, store, backend_of(seed), lines.append)
            story = "\n".join(lines)
            pytest.fail(
                f"{story}\n\n{show(world)}\n\nseed {seed}: {wrong[0]}\nplay it again: python -m tests.changed {seed}",
                pytrace=False,
            )


@pytest.mark.parametrize("first", range(0, FEW, IN_A_ROW))
def test_the_promises_hold_for_every_deploy(first):
    """Each effect happens once, nothing that had started is told as not run, and every run comes to its end."""
    hold(range(first, first + IN_A_ROW))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(FEW, MANY * 2 // 3, IN_A_ROW))
def test_the_promises_hold_for_thousands_of_deploys(first):
    """The same for many others, in memory and in files."""
    hold(range(first, first + IN_A_ROW))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(MANY * 2 // 3, MANY, IN_A_ROW))
def test_the_promises_hold_for_thousands_of_deploys_on_a_server(first, shared_postgres):
    """The same for the last third, on PostgreSQL."""
    hold(range(first, min(first + IN_A_ROW, MANY)), shared_postgres)


def test_a_seed_makes_the_same_programs_and_the_same_story():
    """What a seed decides does not depend on anything else."""
    for seed in (0, 1, 4, 5, 8, 9):  # in memory: threads of a file's store come at any time
        one, other = played(seed), played(seed)
        assert show(one) == show(other)
        assert [(each.unit.id, each.call) for each in one.book] == [(each.unit.id, each.call) for each in other.book]


def test_the_dice_throw_everything():
    """The pairs hold what they are meant to try: each kind of unit, of change, of stop and of decision."""
    things: Counter[str] = Counter()
    for seed in range(FEW * 2):
        with store_of(seed % 2) as store:
            world = play(seed, store, backend_of(seed), lambda line: things.update(line.split()))
        things.update(world.changes)
        things.update(unit.body for unit in walk(world.a.units))
    wanted = ["agent", "flow", "each", "until", "function", "killed", "tool", "append", "worker", "takes", "EFFECT"]
    wanted += [each.__name__ for each in (*UNIT_CHANGES, *PROGRAM_CHANGES)]
    wanted += [each.__name__ for each in (e.ToolLost, e.ApprovalAsked, e.ApprovalGiven, e.Planned, e.Resumed)]
    assert not [word for word in wanted if word != "takes" and not things[word]]
