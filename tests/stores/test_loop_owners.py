"""A lease belongs to the event loop that took it: one that stands still, or is closed, loses its runs, and no other."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context

import anyio
import pytest

from agentfsm import LeaseHeldError, LeaseLostError
from agentfsm.core.events import Observed
from agentfsm.stores.threaded import group_commit, lease_table
from agentfsm.testing.conformance.helpers import LeasedRun, check_refused, make_header

# A guard against a hang, not a bound.
HANG_S = 60.0


@pytest.fixture
def quick(monkeypatch):
    """Loops are asked whether they run ten times as often."""
    for module in (lease_table, group_commit):
        monkeypatch.setattr(module, "PROBE_INTERVAL_S", 0.05)


class Neighbour:
    """Another event loop, in a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(1)
        self._ends = self._pool.submit(self.loop.run_forever)

    async def do(self, function, *args):
        """Let it call an async function, and return what that returns."""
        # In a context of its own: in the caller's, anyio has noted that trio runs, where it does.
        future = Context().run(asyncio.run_coroutine_threadsafe, function(*args), self.loop)
        return await anyio.to_thread.run_sync(future.result, HANG_S)

    def begin(self, function, *args):
        """Let it call a function soon."""
        self.loop.call_soon_threadsafe(function, *args)

    def close(self):
        """End it, whatever it drives."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._ends.result(HANG_S)
        self.loop.close()
        self._pool.shutdown()


@pytest.fixture
def neighbour():
    neighbour = Neighbour()
    yield neighbour
    if not neighbour.loop.is_closed():
        neighbour.close()


def stand_still(gate):
    """Block the event loop that calls this."""
    gate.wait(HANG_S)


async def heard(condition):
    """Return once a condition holds that threads bring about."""
    with anyio.fail_after(HANG_S):
        while not condition():  # noqa: ASYNC110  a store's thread has no event to wait for
            await anyio.sleep(0.01)


async def taken_over(store, run_id):
    """Return the lease of a run as soon as its owner has lost it."""
    with anyio.fail_after(HANG_S):
        while True:
            try:
                return await store.lease(run_id)
            except LeaseHeldError:
                await anyio.sleep(0.05)


@pytest.mark.usefixtures("quick")
async def test_a_blocked_loop_loses_its_runs_to_its_neighbour(place, neighbour, caplog):
    """The log says where it stands; its runs go on in the other loop of the store, which has lost nothing meanwhile."""
    store = place.make(lease_s=0.6, blocked_s=1.2)
    theirs = await neighbour.do(LeasedRun.create, store, make_header("theirs", agent="a"))
    mine = await LeasedRun.create(store, make_header("mine", agent="a"))
    gate = threading.Event()
    with caplog.at_level(logging.WARNING, "agentfsm.stores"):
        neighbour.begin(stand_still, gate)
        lease = await taken_over(store, "theirs")
        assert "stand_still" in caplog.text
        gate.set()
        await heard(lambda: "runs again" in caplog.text)
    assert (theirs.lease.lost, lease.crashes, lease.abandoned) == (True, 1, True)
    assert (await neighbour.do(outcome, theirs)) is LeaseLostError
    assert not mine.lease.lost
    assert await mine.append(Observed()).wait()


@pytest.mark.usefixtures("quick")
async def test_a_loop_that_was_blocked_for_a_while_has_lost_nothing(place, neighbour, caplog):
    """It is logged, and its leases are renewed all the while."""
    store, other = place.make(lease_s=0.9), place.make()
    theirs = await neighbour.do(LeasedRun.create, store, make_header("theirs", agent="a"))
    gate = threading.Event()
    with caplog.at_level(logging.WARNING, "agentfsm.stores"):
        neighbour.begin(stand_still, gate)
        await heard(lambda: "stand_still" in caplog.text)  # after a second: longer than the lease
        with pytest.raises(LeaseHeldError):
            await other.lease("theirs")
        gate.set()
    assert (await neighbour.do(outcome, theirs)) is True


@pytest.mark.usefixtures("quick")
async def test_what_a_closed_loop_drove_is_free(place, neighbour):
    """Its run is driven no more, though somebody has kept the lease: no lease has to end, and it is no crash."""
    store, other = place.make(lease_s=3600.0), place.make()
    theirs = await neighbour.do(LeasedRun.create, store, make_header("theirs", agent="a"))
    mine = await LeasedRun.create(store, make_header("mine", agent="a"))
    neighbour.close()
    lease = await taken_over(other, "theirs")
    assert (lease.crashes, lease.abandoned) == (0, False)
    with pytest.raises(LeaseHeldError):
        await other.lease("mine")
    await check_refused(theirs.append(Observed()), LeaseLostError)
    assert await mine.append(Observed()).wait()


async def outcome(driver):
    """Return what comes of an append: whether it was written, or the kind of error."""
    try:
        return await driver.append(Observed()).wait()
    except LeaseLostError as error:
        return type(error)
