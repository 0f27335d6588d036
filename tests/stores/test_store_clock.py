"""The date that a store goes by is the one that its clock tells."""

import attrs
import pytest

from agentfsm import ConflictError, LeaseHeldError
from agentfsm.core.events import Observed
from agentfsm.core.inbox import Approve
from agentfsm.ports import Clock
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing.conformance.helpers import FINAL_ANSWER, LeasedRun, list_claimable, make_header, make_input

NOON = 1_800_000_000.0
DAY_S = 86_400.0


@attrs.define
class Calendar(Clock):
    """A clock whose date stands still until it is moved."""

    date: float = NOON

    def now(self):
        return self.date


@pytest.fixture
def calendar():
    return Calendar()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request, path, calendar):
    store = MemoryStore(clock=calendar) if request.param == "memory" else SQLiteStore(path, clock=calendar)
    yield store
    await store.aclose()


async def test_a_store_tells_the_date_of_its_clock(store, calendar):
    """A test, or an agent with a clock of its own, decides what day it is."""
    assert await store.now() == NOON
    calendar.date += DAY_S
    assert await store.now() == NOON + DAY_S


async def test_a_decision_is_in_time_until_its_moment(store, calendar):
    """At the very moment it is too late, and just before it is not."""
    await LeasedRun.create(store)
    calendar.date = NOON + 59.9
    assert await store.post("r1", "k1", Approve(call_id="t1.0"), before=NOON + 60)
    calendar.date = NOON + 60
    with pytest.raises(ConflictError, match="the time is up"):
        await store.post("r1", "k2", Approve(call_id="t1.1"), before=NOON + 60)


async def test_a_record_is_there_until_its_moment(store, calendar):
    """From then on it is absent, for readers and writers, and `prune` deletes it."""
    written = await store.write_record("kind", "k", 1, revision=0, expires_at=NOON + 60)
    calendar.date = NOON + 59.9
    assert await store.read_record("kind", "k") == written
    with pytest.raises(ConflictError, match="exists"):
        await store.write_record("kind", "k", 2, revision=0)
    calendar.date = NOON + 60
    assert await store.read_record("kind", "k") is None
    assert not await store.delete_record("kind", "k", revision=written.revision)
    await store.prune(0)
    calendar.date = NOON
    assert await store.list_records("kind") == ()


async def test_a_timer_is_due_at_its_moment(store, calendar):
    """From then on a run does not end over it, and a waiting run is due."""
    ends, waits = (
        await LeasedRun.create(store, make_header("r1")),
        await LeasedRun.create(store, make_header("r2", agent="a")),
    )
    await waits.request_approval()
    await waits.release()
    for run_id in ("r1", "r2"):
        await store.post(run_id, "k", make_input("x", NOON + 60))
    calendar.date = NOON + 59.9
    assert await list_claimable(store, "a") == ()
    calendar.date = NOON + 60
    assert await list_claimable(store, "a") == ("r2",)
    assert await ends.append(Observed(), FINAL_ANSWER, final=True).wait() is False


async def test_a_question_expires_at_its_moment(store, calendar):
    """A run that waits for an answer is due when it can get none any more."""
    driver = await LeasedRun.create(store, make_header(agent="a"))
    await driver.request_approval(expires_at=NOON + 60)
    await driver.release()
    calendar.date = NOON + 59.9
    assert await list_claimable(store, "a") == ()
    calendar.date = NOON + 60
    assert await list_claimable(store, "a") == ("r1",)


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
async def test_a_date_that_jumps_moves_no_lease(store, calendar, jump_s):
    """Leases go by a clock that nobody sets: a day more or less neither ends one nor makes it last."""
    driver = await LeasedRun.create(store)
    calendar.date += jump_s
    with pytest.raises(LeaseHeldError):
        await store.lease("r1")
    assert await driver.append(Observed()).wait()
    await driver.release()
    assert await store.lease("r1")
