"""What `check_upgrade` says of an open run is what happens when the other program continues it."""

from collections import Counter

import anyio
import pytest

from agentfsm import AgentError, IncompatibleProgramError
from agentfsm.releases import UpgradeVerdict, check_upgrade
from tests.changed import programs
from tests.changed.change_play import World, _free_leases, _quiet, backend_of, build, execute, live, read, store_of
from tests.changed.mutations import mutate

# Among the first are all verdicts.
FEW, MANY = range(5, 10), range(10, 400)


async def foresee(world, program, monkeypatch):
    """The report on the open run. It asks no model, calls no tool and writes nothing."""
    before, effects = await read(world), len(world.book)
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_reply", None)  # of the model
        found = await check_upgrade(build(program, world, world.inner))
    assert (await read(world), len(world.book)) == (before, effects)
    return found


async def deploy(world):
    """Throw the other program, with a change of something that is open."""
    opened = [entry.call.name for run, _ in (await read(world)).values() for entry in run.open]
    world.deploy(*mutate(world.names, world.a, sorted({world.ids[name] for name in opened if name in world.ids})))


async def is_refused(world, program):
    """Whether the other program refuses to continue the run."""
    world.is_dead, world.kill_at, world.moments = False, None, Counter()
    world.units = {unit.id: unit for unit in programs.walk(program.units)}
    try:
        await execute(world, program, "resume")
    except IncompatibleProgramError:
        return True
    except AgentError as error:
        pytest.fail(f"seed {world.seed}: {error}")
    return False


def foreseen(seed, monkeypatch):
    """Begin the run of a seed, kill its process, deploy, and continue it by the other program."""
    with store_of(seed) as store, _quiet(seed):
        world = World(seed, backend_of(seed), store)
        dice = world.dice
        moment = dice.choice((("tool", dice.randint(1, 8)), ("append", dice.randint(1, 30))))

        async def play():
            await live(world, world.a, "run", moment, always=False)
            same = await foresee(world, world.a, monkeypatch)
            await deploy(world)
            return same, await foresee(world, world.b, monkeypatch)

        same, found = anyio.run(play, backend=world.backend)
        assert not [run.changes for run in same.runs if run.changes]
        _free_leases(store)
        if found.runs:
            refused = anyio.run(is_refused, world, world.b, backend=world.backend)
            assert refused == (found.runs[0].verdict is UpgradeVerdict.REFUSED), (seed, world.changes, found)
        return found.verdicts


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_foreseen_of_open_runs_comes_true(monkeypatch):
    """The unchanged program makes no difference, and a refusal is foreseen exactly where it comes."""
    seen = Counter()
    for seed in FEW:
        seen.update(foreseen(seed, monkeypatch))
    assert all(seen[verdict] for verdict in UpgradeVerdict), seen


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_foreseen_of_many_open_runs_comes_true(monkeypatch):
    """The same for many others."""
    for seed in MANY:
        foreseen(seed, monkeypatch)
