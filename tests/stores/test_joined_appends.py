"""Appends of one lease that wait for the thread become one; all else about them stays as it is."""

from __future__ import annotations

import gc
import weakref

import pytest

from agentfsm import AssistantMessage, ConflictError, LeaseLostError
from agentfsm.core.events import AnswerGiven, Observed
from agentfsm.stores.threaded.store import MAX_MERGED_CHARS
from agentfsm.testing.conformance.helpers import FINAL_ANSWER, LeasedRun, check_refused
from tests.support.busy_writer import hold


async def test_appends_that_wait_are_one_job(store):
    """What a run appends while the thread is busy is written as one, and read as what it was."""
    driver = await LeasedRun.create(store)
    gate = hold(store)
    before = store.statistics().jobs
    events = [Observed(), *driver.build_turn(), *driver.build_turn()]
    commits = [driver.append(event) for event in events]
    gate.set()
    assert all([await commit.wait() for commit in commits])
    assert store.statistics().jobs - before == 1
    assert (await store.read("r1")).events == tuple(events)


async def test_an_append_that_is_being_written_takes_no_other(store):
    """The next one is a job of its own, behind it."""
    driver = await LeasedRun.create(store)
    first = driver.append(Observed())
    assert await first.wait()
    second = driver.append(*driver.build_turn())
    assert second is not first
    assert await second.wait()


async def test_an_append_that_does_not_follow_fails_alone(store):
    """A wrong version among those that wait is refused, and the ones around it are written."""
    driver = await LeasedRun.create(store)
    gate = hold(store)
    good = driver.append(Observed())
    bad = store.append(driver.lease, driver.run.fold(driver.build_turn()), (Observed(),))
    more = driver.append(*driver.build_turn())
    gate.set()
    assert await good.wait()
    await check_refused(bad, ConflictError)
    assert await more.wait()


async def test_the_last_append_has_an_outcome_of_its_own(store):
    """Whether the inbox held something is told of the last append only."""
    driver = await LeasedRun.create(store)
    gate = hold(store)
    first, last = driver.append(Observed()), driver.append(FINAL_ANSWER, final=True)
    assert first is not last
    gate.set()
    assert [await first.wait(), await last.wait()] == [True, True]


async def test_nothing_joins_across_a_release(store):
    """An append behind the release is refused, though one before it still waits."""
    driver = await LeasedRun.create(store)
    gate = hold(store)
    before, given_back = driver.append(Observed()), store.release(driver.lease)
    after = driver.append(*driver.build_turn())
    gate.set()
    assert [await before.wait(), await given_back.wait()] == [True, True]
    await check_refused(after, LeaseLostError)


async def test_a_job_stays_small(store):
    """Large records are not gathered in one job."""
    driver = await LeasedRun.create(store)
    gate = hold(store)
    first = driver.append(Observed())
    second = driver.append(AnswerGiven(message=AssistantMessage(text="x" * MAX_MERGED_CHARS)))
    assert first is not second
    gate.set()
    assert await first.wait()
    assert await second.wait()


@pytest.mark.parametrize("waits", [True, False])
async def test_a_written_append_holds_no_lease(store, waits):
    """Whoever keeps a commit does not keep the lease alive with it."""
    driver = await LeasedRun.create(store)
    commit = driver.append(Observed())
    if waits:
        assert await commit.wait()
    else:
        await store.now()
    lease = weakref.ref(driver.lease)
    del driver
    gc.collect()
    assert lease() is None
    assert await commit.wait()
