"""The thread of a store: whatever a job is or raises, nobody waits for ever."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentfsm import ClosedError, MisuseError, StoreError
from agentfsm.core.events import Observed
from agentfsm.core.inbox import Cancel
from agentfsm.stores.threaded.group_commit import StoreJob
from agentfsm.testing.conformance.helpers import LeasedRun, make_header
from tests.support.busy_writer import hold

# A guard against a hang, not a bound.
HANG_S = 20.0


async def test_a_job_that_cannot_be_grouped_fails_alone(store):
    """A job about something that is no id is refused by its error, and its neighbours are done."""
    gate = hold(store)
    odd: Any = ["r1"]
    bad, good = StoreJob(lambda _ledger: 1, run_id=odd), StoreJob(lambda _ledger: 2, run_id="r1")
    store._writer.submit(bad)
    store._writer.submit(good)
    gate.set()
    with anyio.fail_after(HANG_S), pytest.raises(StoreError):
        await bad.wait()
    with anyio.fail_after(HANG_S):
        assert await good.wait() == 2
        await store.create(make_header())


@pytest.mark.parametrize("odd", [["r1"], 17, None], ids=repr)
async def test_what_is_no_id_is_refused_by_the_store(store, odd):
    """It says so, before the thread is asked."""
    with anyio.fail_after(HANG_S), pytest.raises(MisuseError, match=r"give run\.id"):
        await store.post(odd, "cancel", Cancel())
    with anyio.fail_after(HANG_S), pytest.raises(MisuseError, match=r"give run\.id"):
        await store.lease(odd)


async def test_a_job_that_would_end_the_thread_fails_alone(store):
    """Whatever a job raises is told to who waits for it, and the next one is done."""

    def leave(_ledger: Any) -> None:
        raise SystemExit

    gate = hold(store)
    bad, good = StoreJob(leave), StoreJob(lambda _ledger: 1)
    store._writer.submit(bad)
    store._writer.submit(good)
    gate.set()
    with anyio.fail_after(HANG_S):
        with pytest.raises(StoreError, match="SystemExit"):
            await bad.wait()
        assert await good.wait() == 1


def break_next(store, monkeypatch) -> None:
    """Let the thread die of a fault of its own at the next jobs that it takes."""

    def rot(_group: object) -> None:
        raise RuntimeError("rot")

    monkeypatch.setattr(store._writer, "_serve", rot)


async def test_a_thread_that_dies_fails_all_that_wait_and_refuses_what_comes(store, monkeypatch, caplog):
    """The error says what to do, also to who comes later; the store can be closed."""
    driver = await LeasedRun.create(store)
    gate = hold(store)
    jobs = [StoreJob(lambda _ledger: 1), StoreJob(lambda _ledger: 2, writes=False)]
    for job in jobs:
        store._writer.submit(job)
    break_next(store, monkeypatch)
    gate.set()
    with anyio.fail_after(HANG_S):
        for job in jobs:
            with pytest.raises(StoreError, match=r"thread died.*rot.*create a new store"):
                await job.wait()
        for refused in (store.read("r1"), store.create(make_header("r2"))):
            with pytest.raises(StoreError, match="thread died"):
                await refused
        with pytest.raises(StoreError, match="thread died"):
            driver.append(Observed())
        await store.aclose()
    assert "the store's thread died" in caplog.text
    with pytest.raises(ClosedError):
        await store.runs()


async def test_a_store_that_is_being_closed_when_its_thread_dies_is_closed(store, monkeypatch):
    """Who waits for the end of a thread is not kept waiting by its death."""
    await LeasedRun.create(store)
    gate = hold(store)
    break_next(store, monkeypatch)
    last = StoreJob(lambda _ledger: 1)
    store._writer.submit(last)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as group:
            group.start_soon(store.aclose)
            await anyio.wait_all_tasks_blocked()
            gate.set()
    with pytest.raises(StoreError, match="thread died"):
        await last.wait()
