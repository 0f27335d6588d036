"""MemoryStore keeps the promises of every store, and forgets what is over in time."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import attrs
import pytest

from agentfsm import Agent, ClosedError, MisuseError, RunNotFoundError
from agentfsm.core.events import Observed
from agentfsm.core.inbox import Cancel
from agentfsm.ports import Clock
from agentfsm.stores import MemoryStore, SQLiteStore, memory
from agentfsm.testing import ScriptedModel
from agentfsm.testing.conformance import StoreConformance
from agentfsm.testing.conformance.helpers import FINAL_ANSWER, LeasedRun, create_finished_run, list_ids, make_header


class TestMemoryStore(StoreConformance):
    """The published kit."""

    @pytest.fixture
    async def store(self):
        store = MemoryStore()
        yield store
        await store.aclose()


@attrs.define
class Calendar(Clock):
    """A clock that stands still until it is moved."""

    date: float = 0.0

    def now(self):
        return self.date


@pytest.fixture
def store(monkeypatch):
    """A store that keeps three finished runs."""
    monkeypatch.setattr(memory, "MAX_FINISHED_RUNS", 3)
    return MemoryStore()


async def test_expired_records_leave_the_memory():
    """A write with an expiry deletes some, and a record that is prolonged again and again takes no more room."""
    clock = Calendar()
    store = MemoryStore(clock=clock)
    for number in range(8):
        await store.write_record("cache", str(number), number, revision=0, expires_at=10.0)
    kept = await store.read_record("cache", "0")
    for _ in range(100):
        kept = await store.write_record("cache", "0", 0, revision=kept.revision, expires_at=30.0)
    assert len(store._expiring) == 8
    clock.date = 20.0
    await store.write_record("cache", "new", 1, revision=0, expires_at=30.0)
    assert {*store._store_records["cache"]} == {"0", "new"}
    clock.date = 30.0
    assert await store.prune(0) == 0
    assert store._store_records["cache"] == {}
    assert (store._expiring, store._noted_expiries) == ([], set())


async def test_what_is_no_id_is_refused(store):
    """As in the other stores."""
    for ask in (store.lease, store.read, store.inbox, store.delete):
        with pytest.raises(MisuseError, match=r"give run\.id, not 17"):
            await ask(17)


@pytest.mark.parametrize("kind", [MemoryStore, partial(SQLiteStore, "runs.db")], ids=["memory", "sqlite"])
async def test_an_agent_closes_its_store(kind, tmp_path, monkeypatch):
    """A store in memory is closed with its agent as a file is, and refuses every use in the same words."""
    monkeypatch.chdir(tmp_path)
    store = kind()
    async with Agent(ScriptedModel("one", "two"), store=store) as agent:
        run = await agent.run("go")
    other = Agent(ScriptedModel("three"), store=store)
    for use in (partial(agent.run, "go"), partial(other.run, "go"), partial(agent.load, run.id)):
        with pytest.raises(ClosedError, match=r"^the store is closed: .*close agents that share a store only at"):
            await use()
    await agent.aclose()


@pytest.mark.parametrize("kind", [MemoryStore, partial(SQLiteStore, "runs.db")], ids=["memory", "sqlite"])
async def test_a_wrong_durability_is_named(kind, tmp_path, monkeypatch):
    """By the rule that agents and clients use, also if there is no run to claim."""
    monkeypatch.chdir(tmp_path)
    store = kind()
    uses = {
        "create": partial(store.create, make_header()),
        "lease": partial(store.lease, "r1"),
        "claim": partial(store.claim, "agent", limit=1),
    }
    for name, use in uses.items():
        with pytest.raises(MisuseError, match=rf"^{name}\(durability='ful'\): give 'full' or 'normal'$"):
            await use(durability="ful")
    await store.aclose()


async def test_a_closed_store_refuses_every_call(store):
    """As the other stores do; only a lease can still be given back."""
    driver = await LeasedRun.create(store)
    await store.aclose()
    uses = (
        *(partial(use, "r1") for use in (store.lease, store.read, store.inbox, store.delete, store.delete_session)),
        *(store.now, store.runs, partial(store.prune, 1.0), partial(store.claim, "agent", limit=1)),
        *(partial(store.create, make_header("r2")), partial(store.post, "r1", "k", Cancel(by="ann"))),
    )
    for use in uses:
        with pytest.raises(ClosedError, match="the store is closed"):
            await use()
    with pytest.raises(ClosedError, match="the store is closed"):
        driver.append(Observed())
    assert await store.release(driver.lease).wait()


async def test_old_finished_runs_are_dropped(store):
    """A service that never restarts does not fill its memory with runs that are over."""
    for number in range(5):
        await create_finished_run(store, make_header(f"r{number}", created_at=float(number)))
    assert list_ids(await store.runs()) == ["r4", "r3", "r2"]
    with pytest.raises(RunNotFoundError):
        await store.read("r1")
    assert len((await store.read("r2")).events) == 2


async def test_runs_that_are_not_over_are_kept(store):
    """However many have ended since, a run that can go on is there."""
    await (await LeasedRun.create(store, make_header("open"))).release()
    for number in range(5):
        await create_finished_run(store, make_header(f"r{number}"))
    assert (await store.lease("open")).version == 0


async def test_runs_that_begin_with_their_end_are_dropped(store):
    """A copy of a run that was over counts as the others do."""
    for number in range(5):
        await store.create(make_header(f"r{number}"), events=(Observed(), FINAL_ANSWER))
    assert len(await store.runs()) == 3


async def test_a_history_that_is_needed_is_kept(store):
    """What a kept run goes on from stays beyond the number, and is dropped with the last that needs it."""
    await create_finished_run(store, make_header("first"))
    await create_finished_run(store, make_header("second", after="first"))
    await create_finished_run(store, make_header("third", after="second"))
    for number in range(2):
        await create_finished_run(store, make_header(f"r{number}"))
    assert set(list_ids(await store.runs())) == {"r0", "r1"}
    driver = await LeasedRun.create(store, make_header("goes-on", after="r0"))
    for number in range(2, 6):
        await create_finished_run(store, make_header(f"r{number}"))
    assert set(list_ids(await store.runs())) == {"r0", "r4", "r5", "goes-on"}
    await driver.append(Observed(), FINAL_ANSWER).wait()
    await create_finished_run(store, make_header("last"))
    assert set(list_ids(await store.runs())) == {"r0", "goes-on", "last"}
    await create_finished_run(store, make_header("very-last"))
    assert set(list_ids(await store.runs())) == {"last", "very-last"}


def test_threads_that_end_runs_do_not_forget_them_twice(store, monkeypatch):
    """Event loops in several threads share the store, also where each run that ends pushes out an older one."""
    before = sys.getswitchinterval()
    monkeypatch.setattr(memory, "MAX_FINISHED_RUNS", 50)

    async def end_many(thread):
        for number in range(300):
            await create_finished_run(store, make_header(f"{thread}-{number}"))

    sys.setswitchinterval(1e-6)  # so that threads change places wherever they can
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(partial(anyio.run, end_many), range(8)))
    finally:
        sys.setswitchinterval(before)
    assert len(anyio.run(store.runs)) == 50
