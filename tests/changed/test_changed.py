"""A program is changed under its run: nothing is repeated or hidden, whatever a deploy changes and whenever it comes.

A seed makes two programs, where the run of the first is stopped, who decides what in between, and by which program it
is continued. `python -m tests.changed SEED` plays a seed again and tells everything.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import attrs
import pytest

from agentfsm import Run
from agentfsm.core import events as e
from agentfsm.engine.tool_calls.host import RunHost
from agentfsm.flow.flow_plan import FlowPlan
from agentfsm.planning import Plan, PlanStep
from tests.changed.change_play import World, backend_of, play, show, store_of
from tests.changed.mutations import PROGRAM_CHANGES, UNIT_CHANGES
from tests.changed.programs import walk
from tests.support.database_servers import empty_schema

# In the usual suite.
FEW = 50
# In a soak.
MANY = 20_000
ON_SERVER = 15_000
# From which on they are played on a server, which takes three times as long.
IN_A_ROW = 50
# Things that happened, told of a pair that broke a promise.
LAST = 60


def played(seed: int, *server: str) -> World:
    """Play a seed on the loop and the store that belong to it, or in a schema of a server."""
    with store_of(seed, *server) as store:
        return play(seed, store, backend_of(seed))


def hold(seeds: range, *server: str) -> None:
    """Play pairs; fail with the story of the first in which a promise was broken."""
    for seed in seeds:
        if wrong := played(seed, *server).wrong:
            lines: deque[str] = deque(maxlen=LAST)
            with store_of(seed) as store:
                world = play(seed, store, backend_of(seed), lines.append)
            story = "\n".join(lines)
            pytest.fail(
                f"{story}\n\n{show(world)}\n\nseed {seed}: {wrong[0]}\nplay it again: python -m tests.changed {seed}",
                pytrace=False,
            )


# A process that is killed leaves executions that were started and had no step yet.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", range(0, FEW, IN_A_ROW))
def test_the_promises_hold_for_every_deploy(first):
    """Each effect happens once, nothing that had started is told as not run, and every run comes to its end."""
    hold(range(first, first + IN_A_ROW))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(FEW, ON_SERVER, IN_A_ROW))
def test_the_promises_hold_for_thousands_of_deploys(first):
    """The same for many others, in memory and in files."""
    hold(range(first, first + IN_A_ROW))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(ON_SERVER, MANY, IN_A_ROW))
def test_the_promises_hold_for_thousands_of_deploys_on_a_server(first, shared_postgres, postgres_desk):
    """The same for the last quarter, on PostgreSQL."""
    with empty_schema(postgres_desk) as schema:
        hold(range(first, first + IN_A_ROW), shared_postgres, schema)


def test_a_seed_makes_the_same_programs_and_the_same_story():
    """What a seed decides does not depend on anything else."""
    for seed in (0, 1, 4, 5, 8, 9):  # in memory: threads of a file's store come at any time
        one, other = played(seed), played(seed)
        assert show(one) == show(other)
        assert [(each.unit.id, each.call) for each in one.book] == [(each.unit.id, each.call) for each in other.book]


def test_the_dice_throw_everything():
    """The pairs hold what they are meant to try: each kind of unit, of change, of stop and of decision."""
    things: Counter[str] = Counter()
    for seed in range(IN_A_ROW):
        with store_of(0) as store:
            world = play(seed, store, backend_of(seed), lambda line: things.update(line.split()))
        things.update(world.changes)
        things.update(unit.body for unit in walk(world.a.units))
    wanted = ["agent", "flow", "each", "until", "function", "killed", "tool", "append", "worker", "EFFECT"]
    wanted += [each.__name__ for each in (*UNIT_CHANGES, *PROGRAM_CHANGES)]
    wanted += [each.__name__ for each in (e.ToolLost, e.ApprovalAsked, e.ApprovalGiven, e.Planned, e.Resumed)]
    assert not [word for word in wanted if not things[word]]


def deny_what_had_started(patch: Any) -> None:
    """A call that had started and is refused now is told as never made."""

    async def refuse(_host: RunHost, _job: Any, end: Any) -> Any:
        return end

    patch.setattr(RunHost, "on_refused", refuse)


def conclude_from_the_program(patch: Any) -> None:
    """A flow ends by the steps that it has now, and not by those of the plan in the journal."""
    conclude = FlowPlan.conclude

    def conclude_otherwise(plan: FlowPlan, run: Run) -> Any:
        present = tuple(
            PlanStep(
                id=plan.numbers[each.name],
                tool=each.name,
                after=tuple(plan.numbers[name] for name in each.depends_on),
                join=each.join,
            )
            for each in plan.steps
        )
        assert run.plan is not None
        return conclude(plan, attrs.evolve(run, plan=attrs.evolve(run.plan, forward=Plan(steps=present))))

    patch.setattr(FlowPlan, "conclude", conclude_otherwise)


@pytest.mark.parametrize(
    ("fault", "promise"),
    [(deny_what_had_started, "2"), (conclude_from_the_program, "1")],
    ids=lambda each: str(each)[:30],
)
def test_a_planted_fault_is_seen(fault, promise, monkeypatch):
    """The pairs can fail: each of these mistakes breaks a promise in one of them."""
    fault(monkeypatch)
    assert any(text.startswith(promise) for seed in range(FEW) for text in wrong_in(seed))


def wrong_in(seed: int) -> list[str]:
    """What breaks a promise, where a mistake may also break the engine's own rules."""
    try:
        return played(seed).wrong
    except Exception:  # noqa: BLE001  it is the promises that are tried
        return []
