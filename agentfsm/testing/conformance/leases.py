"""Leases of runs, and the notifications of their owners."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import anyio
import pytest

from agentfsm._lib.concurrency import make_waker
from agentfsm.core.errors import ConflictError, LeaseHeldError, LeaseLostError, RunNotFoundError
from agentfsm.core.events import Observed
from agentfsm.core.header import FORMAT
from agentfsm.core.inbox import Cancel
from agentfsm.core.run import begin_run
from agentfsm.ports.store import Filter
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    LeasedRun,
    check_refused,
    check_turns,
    create_finished_run,
    create_waiting_run,
    drive_in_turns,
    list_claimable,
    list_ids,
    make_header,
    make_input,
    race_for_lease,
)

if TYPE_CHECKING:
    from agentfsm.ports.store import Lease, Store


class LeaseConformance:
    """Leases of runs, and the notifications of their owners."""

    # Leases.

    async def test_a_run_that_nobody_created_cannot_be_leased(self, store: Store) -> None:
        """A lease of an unknown run raises RunNotFoundError."""
        with pytest.raises(RunNotFoundError, match="nowhere"):
            await store.lease("nowhere")

    async def test_a_lease_is_exclusive(self, store: Store) -> None:
        """While a lease is held, others are refused, with the run's id in the error."""
        driver = await LeasedRun.create(store)
        with pytest.raises(LeaseHeldError, match="r1"):
            await store.lease("r1")
        assert await driver.append(Observed()).wait()

    # Formats of runs.

    async def test_a_run_in_a_newer_format_is_left_to_newer_workers(self, store: Store, other: Store) -> None:
        """A worker that reads only older formats claims no such run and leaves it as it is; others claim it at once."""
        await (await LeasedRun.create(store, make_header("r1", agent="a"))).release()
        [before] = await store.runs()
        assert before.format == FORMAT
        assert not before.is_too_new
        for _ in range(2):
            skipped = await other.claim("a", limit=10, newest_format=FORMAT - 1)
            assert (skipped.leases, skipped.has_suspects, skipped.has_newer) == ((), False, True)
        assert await store.runs() == (before,)
        claim = await other.claim("a", limit=10)
        assert [(lease.run_id, lease.crashes, lease.abandoned) for lease in claim.leases] == [("r1", 0, False)]
        assert not claim.has_newer
        assert not (await other.claim("a", limit=10, newest_format=FORMAT - 1)).has_newer

    async def test_a_claim_does_not_look_for_newer_runs_once_it_has_enough(self, store: Store) -> None:
        """If the limit is reached, a claim does not say whether there are newer runs too."""
        await (await LeasedRun.create(store, make_header("r1", agent="a"))).release()
        assert not (await store.claim("a", limit=0, newest_format=FORMAT - 1)).has_newer

    async def test_a_post_is_in_the_format_of_its_author(self, store: Store) -> None:
        """The format of a run that waits counts its posts: an older worker leaves a newer post alone, too."""
        await create_waiting_run(store, make_header("r1", agent="a"))
        assert not (await store.claim("a", limit=10, newest_format=FORMAT - 1)).has_newer
        await store.post("r1", "k", make_input("x"))
        assert (await store.claim("a", limit=10, newest_format=FORMAT - 1)).has_newer
        assert [line.format for line in await store.runs()] == [FORMAT]
        assert await list_claimable(store, "a") == ("r1",)

    # Releases.

    async def test_a_run_is_left_to_workers_that_have_its_release(self, store: Store, other: Store) -> None:
        """A worker claims runs of its own releases and those without one, and learns of one that it leaves."""
        for number, release in enumerate(["2", "", "1", "2"]):
            await (await LeasedRun.create(store, make_header(f"r{number}", agent="a", release=release))).release()
        claim = await other.claim("a", limit=10, releases=["1", "0"])
        assert [lease.run_id for lease in claim.leases] == ["r1", "r2"]
        assert claim.other_release == "2"
        assert (await other.claim("a", limit=0, releases=["1"])).other_release == ""
        assert [each.id for each in await store.runs(Filter(agent="a", release="2"))] == ["r3", "r0"]
        assert [each.release for each in await store.runs(Filter(release=""))] == [""]
        claim = await other.claim("a", limit=1, releases=["2"])
        assert ([lease.run_id for lease in claim.leases], claim.other_release) == (["r0"], "")
        claim = await store.claim("a", limit=10)
        assert ([lease.run_id for lease in claim.leases], claim.other_release) == (["r3"], "")

    async def test_a_run_that_is_not_production_is_left_to_who_has_started_it(self, store: Store) -> None:
        """No worker claims it, also if it is the first that is ready; its lease can be taken by its id."""
        for number, purpose in enumerate(["eval", "", "eval"]):
            await (await LeasedRun.create(store, make_header(f"r{number}", agent="a", purpose=purpose))).release()
        assert await store.count(Filter(agent="a", ready_by=await store.now() + 60, purpose="")) == 1
        claim = await store.claim("a", limit=10, releases=["1"])
        assert ([lease.run_id for lease in claim.leases], claim.has_newer, claim.other_release) == (["r1"], False, "")
        assert not (await store.claim("a", limit=1)).leases
        assert (await store.lease("r0")).version == 0

    async def test_a_lease_given_back_can_be_taken(self, store: Store) -> None:
        """The next lease has the version of the last append."""
        driver = await LeasedRun.create(store)
        await driver.append(Observed()).wait()
        await driver.release()
        assert (await store.lease("r1")).version == 1

    async def test_a_lease_can_be_taken_over(self, store: Store, other: Store) -> None:
        """A takeover takes the lease from an owner in any process, notifies that owner and refuses its appends."""
        driver = await LeasedRun.create(store)
        for taker in (store, other):
            woken = anyio.Event()
            driver.lease.wake = make_waker(woken.set)
            lease = await taker.lease("r1", takeover=True)
            await check_refused(driver.append(Observed()), LeaseLostError)
            with anyio.fail_after(10):
                await woken.wait()
            assert (driver.lease.lost, lease.token > driver.lease.token, lease.crashes) == (True, True, 0)
            driver = LeasedRun(taker, lease, begin_run(make_header()))
        assert await driver.append(Observed()).wait()

    async def test_the_fencing_token_grows(self, store: Store) -> None:
        """Each lease of a run has a higher token than the one before."""
        tokens = []
        for _ in range(3):
            _head, lease = await store.create(make_header())
            tokens.append(lease.token)
            await store.release(lease).wait()
        assert tokens == sorted(set(tokens))

    async def test_of_many_that_want_the_lease_one_gets_it(self, store: Store) -> None:
        """Of many concurrent requests, exactly one gets the lease."""
        await create_finished_run(store)
        assert len(await race_for_lease(lambda: store.lease("r1"))) == 1

    async def test_of_many_one_drives_at_a_time(self, store: Store) -> None:
        """Competing tasks get a run in turn: each finds the events of the one before, without interleaved appends."""
        await create_finished_run(store, make_header("r0"))
        await (await LeasedRun.create(store)).release()
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(drive_in_turns, store, 1)
        await check_turns(store, 20)

    async def test_event_loops_in_several_threads_share_a_store(self, store: Store) -> None:
        """Event loops in several threads may use one store: they get the run in turn."""
        await (await LeasedRun.create(store)).release()

        def drive() -> None:
            anyio.run(drive_in_turns, store, 5)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(anyio.to_thread.run_sync, drive)
        await check_turns(store, 20)

    async def test_an_orderly_owner_is_no_crash(self, store: Store) -> None:
        """A released lease does not count as a crash, also after a create."""
        _head, lease = await store.create(make_header())
        assert lease.crashes == 0
        for _ in range(2):
            await store.release(lease).wait()
            lease = await store.lease("r1")
            assert lease.crashes == 0
        await store.release(lease).wait()
        assert (await store.create(make_header()))[1].crashes == 0

    async def test_a_lease_can_be_given_back_twice(self, store: Store) -> None:
        """Releasing a released lease does nothing."""
        driver = await LeasedRun.create(store)
        await driver.release()
        await driver.release()
        await store.lease("r1")

    async def test_a_late_release_leaves_the_new_owner_alone(self, store: Store) -> None:
        """A late release of a former owner does not end the lease of the current one."""
        late = await LeasedRun.create(store)
        await late.release()
        now = await LeasedRun.resume(store)
        await late.release()
        with pytest.raises(LeaseHeldError):
            await store.lease("r1")
        assert await now.append(Observed()).wait()

    async def test_a_lease_that_was_dropped_is_free(self, store: Store) -> None:
        """A lease that was garbage-collected without a release is free in its process."""
        driver = await LeasedRun.create(store)
        await driver.append(Observed()).wait()
        del driver
        gc.collect()
        assert (await store.lease("r1")).version == 1

    # Notifications.

    async def test_a_lease_is_told_of_posts(self, store: Store) -> None:
        """A post updates the lease's `inbox_head`."""
        driver = await LeasedRun.create(store)
        row = await store.post("r1", "k", make_input("x"))
        assert driver.lease.inbox_head == row.number
        assert not driver.lease.cancelled

    async def test_a_lease_knows_what_was_posted_before(self, store: Store) -> None:
        """A new lease includes posts made while the run had no owner."""
        driver = await LeasedRun.create(store)
        await driver.release()
        row = await store.post("r1", "k", make_input("x"))
        await store.post("r1", "cancel", Cancel())
        lease = await store.lease("r1")
        assert lease.inbox_head > row.number
        assert lease.cancelled

    async def test_cancel_reaches_the_owner(self, store: Store) -> None:
        """A cancel request sets the lease's `cancelled` and calls its `wake`."""
        driver = await LeasedRun.create(store)
        woken = anyio.Event()
        driver.lease.wake = make_waker(woken.set)
        await store.post("r1", "cancel", Cancel(by="ann"))
        with anyio.fail_after(10):
            await woken.wait()
        assert driver.lease.cancelled

    async def test_input_wakes_nobody(self, store: Store) -> None:
        """A post of input does not call the lease's `wake`."""
        driver = await LeasedRun.create(store)
        woken: list[bool] = []
        driver.lease.wake = lambda: woken.append(True)
        await store.post("r1", "k", make_input("x"))
        await driver.append(Observed()).wait()
        assert woken == []

    async def test_a_new_run_has_nothing_to_tell(self, store: Store) -> None:
        """The lease of a new run has no posts and no cancel request."""
        driver = await LeasedRun.create(store)
        assert (driver.lease.inbox_head, driver.lease.cancelled, driver.lease.lost) == (0, False, False)

    # Two workers.

    async def test_two_workers_share_their_runs(self, store: Store, other: Store) -> None:
        """Each worker reads, lists and continues the runs of the other."""
        driver = await LeasedRun.create(store)
        await driver.append(Observed()).wait()
        assert (await other.read("r1")).events == (Observed(),)
        assert [(line.id, line.driven) for line in await other.runs()] == [("r1", True)]
        await driver.release()
        assert [line.driven for line in await other.runs()] == [False]
        driver = await LeasedRun.resume(other)
        assert await driver.append(FINAL_ANSWER, final=True).wait()
        assert len((await store.read("r1")).events) == 2

    async def test_of_two_workers_one_drives(self, store: Store, other: Store) -> None:
        """While a worker holds the lease, the other one can neither take, claim nor delete the run."""
        driver = await LeasedRun.create(store, make_header(agent="a"))
        for operation in (other.lease("r1"), other.create(make_header(agent="a")), other.delete("r1")):
            with pytest.raises(LeaseHeldError):
                await operation
        assert await list_claimable(other, "a") == ()
        token = driver.lease.token
        await driver.release()
        assert await list_claimable(other, "a") == ("r1",)
        assert (await other.lease("r1")).token > token

    async def test_of_two_workers_that_create_a_run_one_wins(self, store: Store, other: Store) -> None:
        """Of concurrent creates on both workers, exactly one gets the lease, and both list one run."""
        leases: list[Lease] = []

        async def race(worker: Store) -> None:
            try:
                leases.append((await worker.create(make_header()))[1])
            except LeaseHeldError:
                return

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(race, store)
                group.start_soon(race, other)
        assert len(leases) == 1
        assert list_ids(await store.runs()) == list_ids(await other.runs()) == ["r1"]

    async def test_of_two_workers_that_start_in_a_session_one_wins(self, store: Store, other: Store) -> None:
        """A session has at most one unfinished run, also with several workers."""
        started = []

        async def race(worker: Store, number: int) -> None:
            try:
                started.append(await worker.create(make_header(f"r{number}", session="s")))
            except ConflictError:
                return

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(race, (store, other)[number % 2], number)
        assert len(started) == 1
        assert len(await store.runs()) == 1

    async def test_two_workers_that_want_a_run_drive_in_turn(self, store: Store, other: Store) -> None:
        """Each worker finds the events of the other, and their appends are not interleaved."""
        await (await LeasedRun.create(store)).release()
        async with anyio.create_task_group() as group:
            group.start_soon(drive_in_turns, store, 10)
            group.start_soon(drive_in_turns, other, 10)
        await check_turns(store, 20)

    async def test_an_owner_learns_what_another_worker_posts(self, store: Store, other: Store) -> None:
        """The next append reports posts and cancel requests of another worker; a cancel request calls `wake`."""
        driver = await LeasedRun.create(store)
        woken = anyio.Event()
        driver.lease.wake = make_waker(woken.set)
        row = await other.post("r1", "k", make_input("x"))
        await driver.append(Observed()).wait()
        assert (driver.lease.inbox_head, driver.lease.cancelled) == (row.number, False)
        await other.post("r1", "cancel", Cancel())
        assert await driver.append(FINAL_ANSWER, final=True).wait() is False
        with anyio.fail_after(10):
            await woken.wait()
        assert (driver.lease.cancelled, len(await store.inbox("r1"))) == (True, 2)

    async def test_of_two_workers_that_post_a_key_one_wins(self, store: Store, other: Store) -> None:
        """All posts of a key return the same winner, and the inbox has one row."""
        await LeasedRun.create(store)
        winners = []

        async def race(worker: Store) -> None:
            winners.append(await worker.post("r1", "k", make_input("x")))

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(race, store)
                group.start_soon(race, other)
        assert winners == [winners[0]] * 20
        assert await other.inbox("r1") == (winners[0],)

    async def test_a_stalled_owner_writes_nothing_over_another_worker(self, store: Store, other: Store) -> None:
        """All queued appends of an owner replaced by another worker are refused."""
        late = await LeasedRun.create(store)
        await late.release()
        now = await LeasedRun.resume(other)
        commits = [late.append(Observed()), late.append(FINAL_ANSWER, final=True)]
        for commit in commits:
            await check_refused(commit, LeaseLostError)
        assert await now.append(Observed(at=1.0)).wait()
        assert (await store.read("r1")).events == (Observed(at=1.0),)

    async def test_who_stops_waiting_for_a_lease_holds_none(self, store: Store, other: Store) -> None:
        """A cancelled create or lease leaves the run free for others at once."""
        taken: list[Lease] = []  # if the store completed the operation before the cancellation
        with anyio.CancelScope() as scope:
            scope.cancel()
            taken.append((await store.create(make_header()))[1])
        for each in taken:
            store.release(each)
        taken.clear()
        assert (await store.read("r1")).events == ()  # the store executes operations in order
        lease = await other.lease("r1")
        await other.release(lease).wait()
        with anyio.CancelScope() as scope:
            scope.cancel()
            taken.append(await store.lease("r1"))
        for each in taken:
            store.release(each)
        assert (await store.read("r1")).events == ()
        assert (await other.lease("r1")).crashes == 0

    async def test_a_worker_that_leaves_gives_its_runs_back(self, store: Store, other: Store) -> None:
        """Closing a store releases its leases at once, without counting crashes."""
        driver = await LeasedRun.create(store)
        await driver.append(Observed()).wait()
        await store.aclose()
        lease = await other.lease("r1")
        assert (lease.version, lease.crashes) == (1, 0)
