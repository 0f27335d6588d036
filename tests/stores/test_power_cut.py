"""A power cut, at each moment of what a store does to its disk: what was acknowledged is there, and nothing is half.

A story is told once, on a disk that keeps a log (see `power_cut`). Then its power is cut at each moment of the log, and
the files that are left are opened by the SQLite of the standard library, on a machine that has just been started.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import attrs
import pytest
from power_cut import KEEP_ALL, LOSE_ALL, Disk, put

from agentfsm import Agent, PendingKind, Run, RunContext, RunNotFoundError, StoreError, TextPart, tool
from agentfsm.core.events import Event, Observed
from agentfsm.core.inbox import Input
from agentfsm.core.run import begin_run
from agentfsm.ports import Durability, Lease, PendingWrite, ProposedCall, Reply, Request
from agentfsm.stores import SQLiteStore
from agentfsm.stores.sqlite.file import Connect, connect_sqlite3
from agentfsm.stores.threaded import owner
from agentfsm.testing import FunctionModel
from agentfsm.testing.conformance.helpers import make_header
from tests.support.busy_writer import hold
from tests.support.checks import HANG_S, sound

# The power is cut in the layer; a real disk beneath it only takes time, and much of it where others use it too.
MEMORY = Path("/dev/shm")  # noqa: S108  the folders in it have names of their own
# So many that some of the events are packed.
APPENDS = 80
# Characters of the larger events: they take several pages, so that a commit can be torn between them.
LONG = 9_000
# Bytes at the beginning of a log that say which frames are its own.
HEAD = 32


def store_in(folder: Path, connect: Connect = connect_sqlite3) -> SQLiteStore:
    return SQLiteStore(folder / "runs.db", connect=connect)


@pytest.fixture
def machine(monkeypatch):
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as place:
        yield Machine(Path(place), monkeypatch)


@attrs.define
class Machine:
    """What is started again after each cut, with what the disk still holds."""

    place: Path
    patch: pytest.MonkeyPatch
    boots: int = 0

    def start(self) -> Path:
        """Start the machine; return where its disk goes. Who held a lease before is gone, as after any start."""
        self.boots += 1
        name = f"boot-{self.boots}"
        self.patch.setattr(owner, "_read_boot_id", lambda: name)
        return self.place / name


# A journal and nothing else.


def event(version: int) -> Event:
    """Return what the journal holds at a version: each is different, and each seventh is long."""
    text = f"{version} " * (LONG // 3 if version % 7 == 0 else 1)
    return Observed(at=float(version), inputs=(Input(parts=(TextPart(text=text),)),))


@attrs.define
class Writing:
    """A run that is written to; the world is told the version of each append that is acknowledged."""

    store: SQLiteStore
    lease: Lease
    run: Run
    tell: Callable[[int], object]

    @classmethod
    async def on(
        cls,
        store: SQLiteStore,
        durability: Durability,
        tell: Callable[[int], object] = lambda _: None,
        run_id: str = "r1",
    ) -> Writing:
        """Create the run, or take it up where it is."""
        head, lease = await store.create(make_header(run_id), durability=durability)
        tell(lease.version)
        return cls(store, lease, attrs.evolve(begin_run(head), version=lease.version), tell)

    async def append(self, count: int, rng: random.Random) -> None:
        """Append in bursts, each event an append of its own."""
        end = self.run.version + count
        while self.run.version < end:
            burst = [self.begin() for _ in range(min(rng.choice((1, 1, 2, 4)), end - self.run.version))]
            for version, commit in burst:
                assert await commit.wait()
                self.tell(version)

    def begin(self) -> tuple[int, PendingWrite]:
        """Append, and do not wait; return the version and what to wait for."""
        version = self.run.version + 1
        self.run = attrs.evolve(self.run, version=version)
        return version, self.store.append(self.lease, self.run, (event(version),))


async def tidied(store: SQLiteStore) -> None:
    """Let the store's thread move its log into the file, as it does when nobody asks for anything."""
    store._writer._maintained_at = float("-inf")
    await store.post("r1", f"tidy {store.statistics().jobs}", Input(parts=()))
    await store.runs()  # the thread tidies between two jobs


async def written(disk: Disk, durability: Durability, connect: Connect | None = None) -> Disk:
    """Tell the story: 80 appends, the log moved into the file twice, the store closed and opened once."""
    rng = random.Random(durability)
    for appends in (APPENDS // 2, APPENDS - APPENDS // 2):
        store = store_in(disk.folder, connect or disk.connect)
        writing = await Writing.on(store, durability, disk.tell)
        await writing.append(appends // 2, rng)
        await tidied(store)
        await writing.append(appends - appends // 2, rng)
        await store.aclose()
    assert max(disk.told(len(disk.log))) == APPENDS
    return disk


async def reopened(machine: Machine, files: Mapping[str, bytes]) -> int | None:
    """Open what a cut has left; return how many appends it holds, None for no run. Fail unless they are whole."""
    folder = machine.start()
    put(folder, files)
    store = store_in(folder)
    try:
        kept = await events_of(store)
        writing = await Writing.on(store, "full")
        assert (kept or ()) == tuple(event(version) for version in range(1, writing.run.version + 1))
        await writing.append(1, random.Random(0))
    finally:
        await store.aclose()
    with closing(sqlite3.connect(folder / "runs.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    shutil.rmtree(folder)
    return None if kept is None else len(kept)


async def events_of(store: SQLiteStore) -> tuple[Event, ...] | None:
    """Return the journal, or None where there is no run."""
    try:
        return (await store.read("r1")).events
    except RunNotFoundError:
        return None


@contextmanager
def named(at: int, seed: int) -> Iterator[None]:
    """Say of which cut an error tells."""
    try:
        yield
    except Exception as error:
        error.add_note(f"after cut({at}, {seed})")
        raise


async def lost(machine: Machine, disk: Disk, at: int, seed: int) -> int:
    """Cut the power; return how many acknowledgements were untrue: each append, and the creation of the run."""
    with named(at, seed):
        kept = await reopened(machine, disk.cut(at, seed))
    acknowledged = max(disk.told(at), default=-1)
    return max(0, acknowledged - (-1 if kept is None else kept))


async def nothing_lost(machine: Machine, disk: Disk, cuts: Iterable[tuple[int, int]]) -> None:
    """Cut the power at each of these moments, by these seeds; fail when one of them loses an acknowledged append."""
    for at, seed in cuts:
        missing = await lost(machine, disk, at, seed)
        assert not missing, f"cut({at}, {seed}) lost {missing} acknowledged appends"


def some_cuts(disk: Disk, count: int, name: str) -> list[tuple[int, int]]:
    """Draw moments and seeds; each name draws others."""
    rng = random.Random(name)
    return [(rng.choice(disk.moments()), rng.randrange(10**6)) for _ in range(count)]


def each_cut(disk: Disk, moments: Sequence[int], mixtures: int) -> list[tuple[int, int]]:
    """Return mixtures at each moment, and the cuts that lose all that was not synced: each of those that differ."""
    differ = {(len(disk.told(at)), *disk.cut(at, LOSE_ALL).items()): at for at in moments}
    mixed = [(at, seed) for at in moments for seed in range(100 * at + 2, 100 * at + 2 + mixtures)]
    return [*((at, LOSE_ALL) for at in differ.values()), *mixed]


async def test_the_log_tells_all_that_was_done(machine):
    """Where everything that was written survives, the files are those that the operating system has."""
    disk = Disk(machine.start())
    store = store_in(disk.folder, disk.connect)
    writing = await Writing.on(store, "full", disk.tell)
    for _ in range(3):
        await writing.append(5, random.Random(0))
        await tidied(store)
        there = {file.name: file.read_bytes() for file in disk.folder.iterdir() if not file.name.endswith("-shm")}
        assert disk.cut(len(disk.log), KEEP_ALL) == there
        assert there.keys() == {"runs.db", "runs.db-wal"}
    await store.aclose()


async def test_full_loses_nothing_acknowledged(machine, anyio_backend_name):
    """Of 80 acknowledged appends none is missing, whenever the power is cut and whatever the disk makes of it.

    First right behind each acknowledgement, with all lost that was not synced; then at any moment, with mixtures.
    """
    disk = await written(Disk(machine.start()), "full")
    behind = [(at, LOSE_ALL) for at in disk.moments() if disk.told(at) != disk.told(at - 1)]
    assert len(behind) > APPENDS / 4
    await nothing_lost(machine, disk, [*behind, *some_cuts(disk, 100, anyio_backend_name)])


@pytest.mark.parametrize("seed", range(3))
async def test_full_loses_nothing_though_the_power_is_cut_again_and_again(machine, seed):
    """What an earlier cut has left behind does no harm to what is written after it."""
    rng = random.Random(seed)
    files: Mapping[str, bytes] = {}
    acknowledged = cuts = 0
    while acknowledged < APPENDS:
        disk = Disk(machine.start(), files)
        store = store_in(disk.folder, disk.connect)
        writing = await Writing.on(store, "full", disk.tell)
        assert writing.run.version >= acknowledged
        await writing.append(rng.randrange(1, 12), rng)
        if rng.random() < 0.5:
            await tidied(store)
        at = rng.choice(disk.moments())
        acknowledged = max([acknowledged, *disk.told(at)])
        files = disk.cut(at, rng.randrange(10**6))
        await store.aclose()
        cuts += 1
    assert cuts > 5
    kept = await reopened(machine, files)
    assert kept is not None
    assert kept >= acknowledged


async def test_normal_reopens_clean_and_may_lose_the_newest(machine, anyio_backend_name):
    """The file is sound, and holds the appends up to one of them; that some were acknowledged is the price told."""
    disk = await written(Disk(machine.start()), "normal")
    missing = [await lost(machine, disk, *cut) for cut in some_cuts(disk, 80, anyio_backend_name)]
    assert 0 < sum(map(bool, missing)) < len(missing)


async def test_a_run_in_full_loses_nothing_beside_one_in_normal(machine):
    """Runs of one store are written in one transaction, and the most careful of them decides."""
    disk = Disk(machine.start())
    store = store_in(disk.folder, disk.connect)
    careless = await Writing.on(store, "normal", run_id="r2")
    careful = await Writing.on(store, "full", disk.tell)
    for _ in range(APPENDS // 2):
        gate = hold(store)
        commits = [each.begin() for each in (careless, careful, careless)]
        gate.set()
        assert all([await commit.wait() for _, commit in commits])
        disk.tell(careful.run.version)
        await careless.append(1, random.Random(0))
    moments = disk.moments()
    await store.aclose()
    await nothing_lost(machine, disk, [(at, LOSE_ALL) for at in moments if disk.told(at) != disk.told(at - 1)])


@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_a_cut_while_the_file_is_made(machine, durability):
    """At each moment until the first run is created: the next store finds its file, or makes it."""
    disk = Disk(machine.start())
    store = store_in(disk.folder, disk.connect)
    await Writing.on(store, durability, disk.tell)
    moments = disk.moments()
    await store.aclose()
    for at, seed in each_cut(disk, moments, 1):
        missing = await lost(machine, disk, at, seed)
        assert not missing or durability == "normal", (at, seed)


@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_a_cut_while_the_log_is_moved_into_the_file(machine, durability):
    """At each moment of that, and of the first append which begins the log anew: no page is half old, half new."""
    disk = Disk(machine.start())
    store = store_in(disk.folder, disk.connect)
    writing = await Writing.on(store, durability, disk.tell)
    await writing.append(8, random.Random(0))
    start = len(disk.log)
    await tidied(store)
    await writing.append(1, random.Random(0))
    moments = disk.moments(start)
    await store.aclose()
    before, after = (disk.cut(at, KEEP_ALL) for at in (start, moments[-1]))
    assert before["runs.db"] != after["runs.db"], "the log was moved"
    assert before["runs.db-wal"][:HEAD] != after["runs.db-wal"][:HEAD], "the log begins anew"
    for at, seed in each_cut(disk, moments, 1):
        missing = await lost(machine, disk, at, seed)
        assert not missing or durability == "normal", (at, seed)


@attrs.frozen
class Careless:
    """A connection that never waits for the disk, whatever the store asks for."""

    inner: Any

    @classmethod
    def on(cls, disk: Disk) -> Connect:
        """Return a `connect`."""
        return lambda path: cls(disk.connect(path))

    def execute(self, sql: str, parameters: Any = ()) -> Any:
        """Run one statement; that which sets how it waits is another."""
        return self.inner.execute("PRAGMA synchronous = OFF" if "synchronous" in sql else sql, parameters)

    def close(self) -> None:
        """Close the file."""
        self.inner.close()


@pytest.mark.parametrize("fault", ["the store does not sync", "the disk lies"])
async def test_the_checks_see_what_was_not_synced(machine, fault):
    """Planted: where nothing waits for the disk, `full` loses all that it acknowledged, and leaves damaged files."""
    disk = Disk(machine.start(), lies=fault == "the disk lies")
    await written(disk, "full", disk.connect if disk.lies else Careless.on(disk))
    with pytest.raises(AssertionError, match=f"lost {APPENDS + 1} acknowledged"):
        await nothing_lost(machine, disk, [(len(disk.log), LOSE_ALL)])
    damaged = 0
    for cut in some_cuts(disk, 60, fault):
        try:
            await reopened(machine, disk.cut(*cut))
        except (AssertionError, StoreError, sqlite3.DatabaseError):
            damaged += 1
    assert damaged


@pytest.mark.soak
@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_many_cuts(machine, durability):
    """Each moment of the whole story, in ten ways and more."""
    disk = await written(Disk(machine.start()), durability)
    missing = [await lost(machine, disk, *cut) for cut in each_cut(disk, disk.moments(), 10)]
    assert any(missing) == (durability == "normal")


# A whole run of an agent.


# Tools that may not be repeated. A person has to allow the first.
DEEDS = ("pay", "mail")


@tool(requires_approval=True)
async def pay(ctx: RunContext[Callable[[str], object]]) -> str:
    """Pay."""
    ctx.deps("pay")
    return "paid"


@tool
async def mail(ctx: RunContext[Callable[[str], object]]) -> str:
    """Mail."""
    ctx.deps("mail")
    return "mailed"


def worker(store: SQLiteStore, durability: Durability) -> Agent:
    """Return an agent that pays, mails, and says so; who drives it is told of each deed, by its `deps`."""

    def reply(request: Request) -> Reply:
        turn = sum(bool(getattr(message, "calls", ())) for message in request.messages)
        calls = tuple(ProposedCall(id="p", name=name, arguments="{}") for name in DEEDS[turn : turn + 1])
        return Reply(text="" if calls else "all done", calls=calls)

    return Agent(FunctionModel(reply), tools=[pay, mail], store=store, durability=durability)


async def lived(disk: Disk, durability: Durability) -> tuple[Event, ...]:
    """Tell the story: a run of two turns, which a person allows and hurries through another store; give its journal."""
    store, elsewhere = (store_in(disk.folder, disk.connect) for _ in range(2))
    agent, person = worker(store, durability), worker(elsewhere, durability)
    async for run in agent.steps(agent.start("Pay, then mail", id="r1"), deps=disk.tell):
        disk.tell(run.version)
    await person.approve("r1", run.pending[0].call_id)
    disk.tell("approved")
    await person.send("r1", "and hurry")
    disk.tell("sent")
    async for run in agent.steps(await agent.load("r1"), deps=disk.tell):
        disk.tell(run.version)
    assert run.output == "all done"
    events = await agent.history("r1")
    await store.aclose()
    await elsewhere.aclose()
    assert Counter(fact for fact in disk.told(len(disk.log)) if fact in DEEDS) == dict.fromkeys(DEEDS, 1)
    return events


async def goes_on(machine: Machine, files: Mapping[str, bytes], facts: Sequence[Any], history: Sequence[Event]) -> None:
    """Open what a cut has left, and end the run. Fail unless it holds what was acknowledged and repeats no effect."""
    folder = machine.start()
    put(folder, files)
    store = store_in(folder)
    try:
        kept = await events_of(store)
        assert (kept or ()) == history[: len(kept or ())]
        acknowledged = max((fact for fact in facts if isinstance(fact, int)), default=-1)
        assert acknowledged <= (-1 if kept is None else len(kept)), "an acknowledged step was lost"
        await ends(worker(store, "full"), facts, is_new=kept is None)
    finally:
        await store.aclose()
    shutil.rmtree(folder)


async def ends(agent: Agent, facts: Sequence[Any], *, is_new: bool) -> None:
    """End the run, with a person who is asked about a lost call and looks whether its effect is there."""
    deeds = [fact for fact in facts if fact in DEEDS]
    driven = agent.run("Pay, then mail", id="r1", deps=deeds.append) if is_new else None
    with anyio.fail_after(HANG_S):
        run = await (driven or agent.resume("r1", deps=deeds.append))
        while not run.is_over:
            (item,) = run.pending
            if item.kind is PendingKind.APPROVAL:
                assert "approved" not in facts, "an acknowledged decision was lost"
                await agent.approve("r1", item.call_id)
            elif item.tool in deeds:
                await agent.settle("r1", item.call_id, result="it was done")
            else:
                await agent.settle("r1", item.call_id, rerun=True)
            run = await agent.resume("r1", deps=deeds.append)
    assert run.output == "all done"
    assert Counter(deeds) == dict.fromkeys(DEEDS, 1), "an effect was repeated, or is missing"
    assert "sent" not in facts or "and hurry" in [message.text for message in run.messages], "a post was lost"
    await sound(agent, run)


async def test_a_run_in_full_goes_on_after_a_cut_at_each_moment(machine, anyio_backend_name):
    """At each write, sync, truncation and deletion of a whole run: it ends, and nothing is lost, repeated or hidden.

    The two event loops share the mixtures; what differs when all is lost that was not synced, both go through.
    """
    disk = Disk(machine.start())
    history = await lived(disk, "full")
    moments = disk.moments()
    assert len(moments) > 150
    mine = {at for number, at in enumerate(moments) if (number + len(anyio_backend_name)) % 2}
    for at, seed in each_cut(disk, moments, 1):
        if seed == LOSE_ALL or at in mine:
            with named(at, seed):
                await goes_on(machine, disk.cut(at, seed), disk.told(at), history)


@pytest.mark.parametrize(
    ("forgotten", "complaint"), [((), "an acknowledged step was lost"), (int, "an effect was repeated")]
)
async def test_the_checks_see_what_normal_may_do_to_a_run(machine, forgotten, complaint):
    """Planted: in `normal` a power cut takes acknowledged steps, and with them the note that an unsafe call began."""
    disk = Disk(machine.start())
    history = await lived(disk, "normal")
    facts = disk.told(len(disk.log))
    end = next(at for at in disk.moments() if disk.told(at) == facts)
    facts = [fact for fact in facts if not isinstance(fact, forgotten) and fact != "approved"]
    with pytest.raises(AssertionError, match=complaint):
        await goes_on(machine, disk.cut(end, LOSE_ALL), facts, history)


@pytest.mark.soak
async def test_a_run_in_full_goes_on_after_many_cuts(machine):
    """Each moment of the whole run, in eight ways and more."""
    disk = Disk(machine.start())
    history = await lived(disk, "full")
    for at, seed in each_cut(disk, disk.moments(), 8):
        with named(at, seed):
            await goes_on(machine, disk.cut(at, seed), disk.told(at), history)
