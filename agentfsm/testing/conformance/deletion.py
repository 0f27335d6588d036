"""What may be deleted, and what is old."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agentfsm.core.errors import ConflictError, LeaseHeldError, LeaseLostError, RunNotFoundError
from agentfsm.core.events import Failed, Observed
from agentfsm.core.limits import StopReason
from agentfsm.testing.conformance.helpers import (
    FAR_FUTURE,
    FINAL_ANSWER,
    LeasedRun,
    check_refused,
    create_finished_run,
    create_waiting_run,
    list_ids,
    make_header,
    make_input,
)

if TYPE_CHECKING:
    from agentfsm.ports.store import Store


class DeletionConformance:
    """What may be deleted, and what is old."""

    # Deletion.

    async def test_a_deleted_run_is_gone(self, store: Store) -> None:
        """Header, events and inbox are removed, and other runs are not."""
        driver = await LeasedRun.create(store, make_header("r1"))
        await store.post("r1", "k", make_input("x"))
        await driver.append(Observed()).wait()
        await driver.release()
        kept = await create_finished_run(store, make_header("r2"))
        await store.delete("r1")
        for operation in (store.read("r1"), store.inbox("r1"), store.lease("r1"), store.delete("r1")):
            with pytest.raises(RunNotFoundError):
                await operation
        assert [summary.id for summary in await store.runs()] == ["r2"]
        assert len((await store.read("r2")).events) == kept.version

    async def test_a_driven_run_is_not_deleted(self, store: Store) -> None:
        """Who drives is not pulled the ground from under the feet."""
        driver = await LeasedRun.create(store)
        with pytest.raises(LeaseHeldError):
            await store.delete("r1")
        assert await driver.append(Observed()).wait()

    async def test_the_id_of_a_deleted_run_is_free(self, store: Store) -> None:
        """A new run of the id has nothing of the old one: no events, no posts, no keys, no prompt."""
        driver = await LeasedRun.create(store)
        await store.post("r1", "k", make_input("old"))
        await driver.append(Observed()).wait()
        await driver.release()
        await store.delete("r1")
        _head, lease = await store.create(make_header(prompt="Something else"))
        assert (lease.version, lease.inbox_head, await store.inbox("r1")) == (0, 0, ())
        assert (await store.post("r1", "k", make_input("new"))).item == make_input("new")

    async def test_an_owner_of_a_deleted_run_cannot_write_to_its_successor(self, store: Store) -> None:
        """A lease is of one run, not of an id."""
        late = await LeasedRun.create(store)
        await late.release()
        await store.delete("r1")
        _now = await LeasedRun.create(store)
        await check_refused(late.append(Observed()), LeaseLostError)
        assert (await store.read("r1")).events == ()

    async def test_a_late_release_leaves_a_successor_alone(self, store: Store) -> None:
        """Nor does it let go of the lease of the run that has the id now."""
        late = await LeasedRun.create(store)
        await late.release()
        await store.delete("r1")
        now = await LeasedRun.create(store)
        await late.release()
        assert await now.append(Observed()).wait()

    async def test_a_run_that_another_goes_on_from_is_not_deleted(self, store: Store) -> None:
        """A history that is needed stays, and the error says by whom; from the end a chain can be taken off."""
        await create_finished_run(store, make_header("first"))
        await create_finished_run(store, make_header("second", after="first"))
        with pytest.raises(ConflictError, match="second"):
            await store.delete("first")
        assert len((await store.read("first")).events) == 2
        await store.delete("second")
        await store.delete("first")
        assert await store.runs() == ()

    async def test_the_runs_below_are_deleted_too(self, store: Store) -> None:
        """With a run go the runs of its agents, and those of theirs; with one of those its callers do not."""
        await create_finished_run(store, make_header("r1"))
        for run_id, parent in (("r1.a", "r1"), ("r1.b", "r1"), ("r1.a.c", "r1.a"), ("r2.a", "r2")):
            await create_finished_run(store, make_header(run_id, parent=parent))
        await store.delete("r1.b")
        assert set(list_ids(await store.runs())) == {"r1", "r1.a", "r1.a.c", "r2.a"}
        await store.delete("r1")
        assert list_ids(await store.runs()) == ["r2.a"]

    async def test_a_run_below_one_that_is_not_over_is_not_deleted(self, store: Store) -> None:
        """Its caller would have its work done again, so it stays until that is over or is deleted with it."""
        caller = await LeasedRun.create(store, make_header("r1"))
        await create_finished_run(store, make_header("r1.a", parent="r1"))
        await create_finished_run(store, make_header("r1.a.b", parent="r1.a"))
        await create_finished_run(store, make_header("r1.c", parent="r1"))
        with pytest.raises(ConflictError, match="works for run 'r1'"):
            await store.delete("r1.a")
        await caller.release()
        with pytest.raises(ConflictError, match="works for run 'r1'"):
            await store.delete("r1.a")
        assert len(await store.runs()) == 4
        await store.delete("r1.a.b")
        caller = await LeasedRun.resume(store)
        await caller.append(Failed(reason=StopReason.CANCELLED, message="")).wait()
        await caller.release()
        await store.delete("r1.a")
        assert set(list_ids(await store.runs())) == {"r1", "r1.c"}
        await (await LeasedRun.create(store, make_header("r2"))).release()
        await (await LeasedRun.create(store, make_header("r2.a", parent="r2"))).release()
        await store.delete("r2")
        assert set(list_ids(await store.runs())) == {"r1", "r1.c"}

    async def test_a_run_above_one_that_is_driven_is_not_deleted(self, store: Store) -> None:
        """While an agent below is at work nothing is removed."""
        await create_finished_run(store, make_header("r1"))
        await create_finished_run(store, make_header("r1.a", parent="r1"))
        driver = await LeasedRun.create(store, make_header("r1.a.b", parent="r1.a"))
        with pytest.raises(LeaseHeldError, match=r"r1\.a\.b"):
            await store.delete("r1")
        assert await driver.append(Observed()).wait()
        assert len(await store.runs()) == 3

    async def test_a_run_above_one_that_another_goes_on_from_is_not_deleted(self, store: Store) -> None:
        """A history is needed as well where it is an agent's below; one that goes too needs nothing."""
        await create_finished_run(store, make_header("r1"))
        await create_finished_run(store, make_header("r1.a", parent="r1"))
        await create_finished_run(store, make_header("r1.b", parent="r1", after="r1.a"))
        await create_finished_run(store, make_header("r2", after="r1.a"))
        with pytest.raises(ConflictError, match="r2"):
            await store.delete("r1")
        assert len(await store.runs()) == 4
        await store.delete("r2")
        await store.delete("r1")
        assert await store.runs() == ()

    async def test_a_session_is_deleted_whole(self, store: Store) -> None:
        """Its runs go with those below them, and are counted; then the session begins anew."""
        for run_id, fields in (
            ("r1", {"session": "s"}),
            ("r1.a", {"parent": "r1"}),
            ("r2", {"session": "s"}),
            ("r3", {"session": "t"}),
            ("r4", {}),
        ):
            await create_finished_run(store, make_header(run_id, **fields))
        assert await store.delete_session("s") == 2
        assert set(list_ids(await store.runs())) == {"r3", "r4"}
        assert await store.delete_session("s") == 0
        stored, _lease = await store.create(make_header("r5", session="s"))
        assert stored.after is None

    @pytest.mark.parametrize("driven", ["r2", "r1.a"])
    async def test_a_session_that_is_driven_is_not_deleted(self, store: Store, driven: str) -> None:
        """While one of its runs is at work, or one below, none is removed."""
        for run_id, fields in (("r1", {"session": "s"}), ("r1.a", {"parent": "r1"}), ("r2", {"session": "s"})):
            await create_finished_run(store, make_header(run_id, **fields))
        lease = await store.lease(driven)
        with pytest.raises(ConflictError, match=driven):
            await store.delete_session("s")
        assert len(await store.runs()) == 3
        await store.release(lease).wait()
        assert await store.delete_session("s") == 2

    async def test_a_session_that_a_run_outside_goes_on_from_is_not_deleted(self, store: Store) -> None:
        """A history that is needed stays, also where runs of the session go on from it, too."""
        for number in range(3):
            await create_finished_run(store, make_header(f"r{number}", session="s"))
        await create_finished_run(store, make_header("outside", after="r1"))
        with pytest.raises(ConflictError, match="outside"):
            await store.delete_session("s")
        assert len(await store.runs()) == 4
        await store.delete("outside")
        assert await store.delete_session("s") == 3

    # What is old.

    async def test_what_is_over_and_old_is_pruned(self, store: Store) -> None:
        """Runs that ended before a moment go and are counted; those that ended then or later stay."""
        await create_finished_run(store, make_header("old"), at=4.0)
        failed = await LeasedRun.create(store, make_header("failed"))
        await failed.append(Failed(at=4.5, reason=StopReason.CANCELLED, message="")).wait()
        await failed.release()
        await create_finished_run(store, make_header("then"), at=5.0)
        await create_finished_run(store, make_header("later"), at=6.0)
        assert await store.prune(5.0) == 2
        assert set(list_ids(await store.runs())) == {"then", "later"}
        with pytest.raises(RunNotFoundError):
            await store.read("old")
        assert await store.prune(5.0) == 0

    async def test_what_is_not_over_is_not_pruned(self, store: Store) -> None:
        """However long it rests, a run that can go on stays, with its inbox."""
        await create_waiting_run(store)
        row = await store.post("r1", "k", make_input("x"))
        assert await store.prune(FAR_FUTURE) == 0
        assert await store.inbox("r1") == (row,)

    async def test_the_id_of_a_pruned_run_is_free(self, store: Store) -> None:
        """Nothing of it is left: no events, no posts, no keys."""
        driver = await LeasedRun.create(store)
        row = await store.post("r1", "k", make_input("old"))
        await driver.append(Observed(), FINAL_ANSWER, taken=[row.number]).wait()
        await driver.release()
        assert await store.prune(FAR_FUTURE) == 1
        driver = await LeasedRun.create(store, make_header(prompt="Something else"))
        assert (driver.run.version, driver.lease.inbox_head) == (0, 0)
        assert (await store.post("r1", "k", make_input("new"))).item == make_input("new")

    async def test_a_history_that_is_needed_is_not_pruned(self, store: Store) -> None:
        """What a run goes on from stays as long as that run, however many lie between."""
        await create_finished_run(store, make_header("r1"), at=1.0)
        await create_finished_run(store, make_header("r2", after="r1"), at=2.0)
        await create_finished_run(store, make_header("r3", after="r2"), at=9.0)
        await create_finished_run(store, make_header("r4", after="r1"), at=3.0)
        assert await store.prune(5.0) == 1
        assert set(list_ids(await store.runs())) == {"r1", "r2", "r3"}
        assert await store.prune(10.0) == 3

    async def test_a_session_is_pruned_whole(self, store: Store) -> None:
        """While one of its runs is fresh all of them stay; once all are old all go."""
        for number in range(3):
            await create_finished_run(store, make_header(f"r{number}", session="s"), at=float(number))
        await create_finished_run(store, make_header("t0", session="t"), at=0.0)
        assert await store.prune(1.5) == 1
        assert set(list_ids(await store.runs())) == {"r0", "r1", "r2"}
        assert await store.prune(2.5) == 3

    async def test_a_session_stays_whole_where_a_part_is_needed(self, store: Store) -> None:
        """A session of which a run is needed outside keeps its other runs, too: its last one stays its last."""
        for number in range(3):
            await create_finished_run(store, make_header(f"r{number}", session="s"))
        await create_finished_run(store, make_header("outside", after="r1"), at=9.0)
        assert await store.prune(5.0) == 0
        stored, _lease = await store.create(make_header("r3", session="s"))
        assert stored.after == "r2"

    async def test_runs_below_are_pruned_with_their_callers(self, store: Store) -> None:
        """A run of an agent goes when its caller goes, and stays when that stays."""
        await create_finished_run(store, make_header("r1"), at=1.0)
        await create_finished_run(store, make_header("r1.a", parent="r1"), at=1.0)
        await create_finished_run(store, make_header("r1.a.b", parent="r1.a"), at=1.0)
        await (await LeasedRun.create(store, make_header("r2"))).release()
        await create_finished_run(store, make_header("r2.a", parent="r2"), at=1.0)
        await create_finished_run(store, make_header("r3"), at=1.0)
        await create_finished_run(store, make_header("r3.a", parent="r3"), at=9.0)
        assert await store.prune(5.0) == 3
        assert set(list_ids(await store.runs())) == {"r2", "r2.a", "r3", "r3.a"}

    async def test_pruning_takes_no_offence_at_owners(self, store: Store) -> None:
        """Who has an old run open that is over does not keep others from being pruned."""
        for number in range(3):
            await create_finished_run(store, make_header(f"r{number}"), at=1.0)
        _lease = await store.lease("r1")
        await store.prune(5.0)
        assert set(list_ids(await store.runs())) <= {"r1"}
