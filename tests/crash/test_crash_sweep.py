"""P1 and P2: workers are killed at each moment in turn and at random ones; nothing is lost, repeated, or hidden."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import attrs
import pytest

from agentfsm import PendingKind, Run
from agentfsm.ports import Store
from agentfsm.testing.crash import ForkServer, ProcessResult
from tests.support.checks import sound_run
from tests.support.crash_story import World, agent_on, check, life, lives

# Runs that one worker takes over at once from as many that were killed.
HEIRS = 20

on = partial(pytest.mark.parametrize, "store_of", indirect=True)


@pytest.fixture
def scene(fork_server: ForkServer, store_of: Callable[[], Store], folder: Path) -> Scene:
    return Scene(fork_server, store_of, folder)


@attrs.define
class Scene:
    """Runs on one store, driven by workers that die."""

    fork_server: ForkServer
    store: Callable[[], Store]
    folder: Path
    worlds: list[World] = attrs.field(factory=list)
    # Of runs that are not checked yet.
    told: list[object] = attrs.field(factory=list)
    kills: int = 0

    def new_world(self, name: object) -> World:
        """Return the world of a run that has not begun."""
        self.worlds.append(World(self.store, f"run-{name}", str(self.folder / f"books-{name}")))
        return self.worlds[-1]

    def run(self, world: World, *, kill_at=None, kill_after_s=None, backend="asyncio", **how) -> ProcessResult:
        """Let a worker drive a run until it is killed, or the run is over."""
        work = partial(life, **how)
        return self._heard(
            self.fork_server.run(work, world, kill_at=kill_at, kill_after_s=kill_after_s, backend=backend)
        )

    def end(self, **how) -> None:
        """Let one worker end all runs that were left, and check them."""
        ended = self._heard(self.fork_server.run(partial(lives, **how), self.store, self.worlds))
        assert not ended.killed
        self.check()

    def check(self) -> None:
        """Check the runs, which are over."""
        anyio.run(check, self.store, self.worlds, self.told)
        self.worlds.clear()
        self.told.clear()

    def _heard(self, ended: ProcessResult) -> ProcessResult:
        self.told += [word for word in ended.reports if word != "alive"]
        self.kills += ended.killed
        return ended


def sweep(scene: Scene, kind: str, *, first: tuple[str, int] | None = None, **how) -> int:
    """Kill a worker at each moment of a kind in turn, let others take over, and check; return how many there are.

    Args:
        scene: Where.
        kind: Of moment.
        first: Where a first worker is killed; those that are swept then are the second.
        how: How the workers work.
    """
    at, was_killed = 0, True
    while was_killed:
        at += 1
        world = scene.new_world(f"{kind}-{at}")
        if first is not None:
            assert scene.run(world, kill_at=first, **how).killed
        was_killed = scene.run(world, kill_at=(kind, at), **how).killed
        if not was_killed or len(scene.worlds) == HEIRS:
            scene.end(**how)
    return at - 1


@on(("sqlite",))
@pytest.mark.parametrize("kind", ["commit", "await", "effect"])
def test_a_worker_may_be_killed_at_each_moment(scene, kind):
    """Before and after each commit and each effect, and at each await of a run: the next worker ends it as it must."""
    assert sweep(scene, kind) > 20


@on(("postgres",))
def test_a_worker_may_be_killed_at_each_commit_to_a_server(scene):
    """The same with commits that another process may still make when the worker is dead."""
    assert sweep(scene, "commit") > 20


@pytest.mark.soak
@on(("sqlite", "postgres"))
@pytest.mark.parametrize("kind", ["statement", "commit", "await", "effect"])
@pytest.mark.parametrize("how", [{}, {"stepwise": True}, {"stream": True}], ids=["whole", "stepwise", "streamed"])
def test_a_worker_may_be_killed_at_each_statement(scene, kind, how):
    """As above and at each single statement, also where the run is driven step by step, and replies are streamed."""
    assert sweep(scene, kind, **how) > 20


@pytest.mark.soak
@on(("sqlite", "postgres"))
@pytest.mark.parametrize("at", range(2, 25, 4))
def test_whoever_takes_over_may_be_killed_as_well(scene, at):
    """A worker dies at an effect, and the next one at each commit: the third ends the run as it must."""
    assert sweep(scene, "commit", first=("effect", at)) > 5


def kill_at_random(scene: Scene, kills: int) -> Counter[int]:
    """Kill workers from outside, at random times, until so many have died; return how far their runs were.

    The time follows what workers need here and now: it grows with each that dies, and shrinks with each that does not,
    so that about five of six die, however busy the machine is.
    """
    chance = random.Random(kills)
    longest_s = 0.1
    spread: Counter[int] = Counter()
    while scene.kills < kills:
        world, killed = scene.new_world(f"{chance.random()}"[2:]), True
        while killed:
            killed = scene.run(
                world,
                kill_after_s=chance.uniform(0, longest_s),
                backend=chance.choice(("asyncio", "trio")),
                stepwise=chance.random() < 0.3,
                stream=chance.random() < 0.5,
            ).killed
            longest_s *= 1.02 if killed else 0.9
            spread[len(world.effects())] += killed
        if len(scene.worlds) == HEIRS or scene.kills >= kills:
            scene.check()
    return spread


@on(("sqlite",))
@pytest.mark.parametrize("kills", [60, pytest.param(1_000, marks=pytest.mark.soak)])
def test_workers_may_be_killed_at_random(scene, kills):
    """So many SIGKILLs from outside, at any time of any run: each run ends, and nothing is lost, repeated or hidden."""
    assert len(kill_at_random(scene, kills)) > 4, "the kills were not spread over the runs"


@on(("postgres",))
def test_workers_may_be_killed_at_random_on_a_server(scene):
    """The same, 20 times."""
    assert len(kill_at_random(scene, 20)) > 3


@pytest.mark.soak
@on(("postgres",))
def test_workers_may_be_killed_at_random_on_a_server_for_long(scene):
    """The same, 1,000 times."""
    assert len(kill_at_random(scene, 1_000)) > 6


@on(("sqlite", "postgres"))
def test_a_run_that_kills_its_workers_is_parked(scene):
    """Where five workers die over one turn, the sixth pauses the run, says why, and does nothing else."""
    world = scene.new_world("parked")
    for effect in (4, 1, 1, 1, 1):  # behind what the second call does, and then before whatever comes next
        assert scene.run(world, kill_at=("effect", effect), crashes=5).killed
    told = len(world.effects())
    assert not scene.run(world, crashes=5).killed
    run = anyio.run(loaded, world)
    ((kind, why),) = [(item.kind, item.description) for item in run.pending]
    assert kind is PendingKind.CRASH
    assert "5 workers died while they executed only this run, in ACT" in why
    assert len(world.effects()) == told
    sound_run(run)


async def loaded(world: World) -> Run:
    """Return the run as it is in the store."""
    async with agent_on(world.store()) as agent:
        return await agent.load(world.run_id)


@on(("sqlite",))
@pytest.mark.parametrize(
    ("fault", "kind", "complaint"),
    [
        ("lagging", "effect", "repeated|hidden|lost"),
        ("forgetful", "commit", "lost"),
        ("hushed up", "effect", "hidden"),
        ("unasked", "effect", "repeated"),
    ],
)
def test_the_sweep_finds_what_is_broken(scene, fault, kind, complaint):
    """Planted: a store that acknowledges too early, or forgets; workers that hush up, or repeat, what was in flight."""
    with pytest.raises(AssertionError, match=complaint):
        sweep(scene, kind, stepwise=True, fault=fault)
