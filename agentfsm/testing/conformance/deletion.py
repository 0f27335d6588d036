"""Deletion of runs and sessions, and pruning of old runs."""

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
    """Deletion of runs and sessions, and pruning of old runs."""

    # Deletion.

    async def test_a_deleted_run_is_gone(self, store: Store) -> None:
        """Header, events and inbox of the run are removed; other runs are unchanged."""
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
        """A run whose lease is held is not deleted."""
        driver = await LeasedRun.create(store)
        with pytest.raises(LeaseHeldError):
            await store.delete("r1")
        assert await driver.append(Observed()).wait()

    async def test_the_id_of_a_deleted_run_is_free(self, store: Store) -> None:
        """A new run with the id inherits nothing: no events, posts, keys or prompt."""
        driver = await LeasedRun.create(store)
        await store.post("r1", "k", make_input("old"))
        await driver.append(Observed()).wait()
        await driver.release()
        await store.delete("r1")
        _head, lease = await store.create(make_header(prompt="Something else"))
        assert (lease.version, lease.inbox_head, await store.inbox("r1")) == (0, 0, ())
        assert (await store.post("r1", "k", make_input("new"))).item == make_input("new")

    async def test_an_owner_of_a_deleted_run_cannot_write_to_its_successor(self, store: Store) -> None:
        """A lease of a deleted run is not valid for a new run with its id."""
        late = await LeasedRun.create(store)
        await late.release()
        await store.delete("r1")
        _now = await LeasedRun.create(store)
        await check_refused(late.append(Observed()), LeaseLostError)
        assert (await store.read("r1")).events == ()

    async def test_a_late_release_leaves_a_successor_alone(self, store: Store) -> None:
        """A late release of a deleted run does not release the lease of a new run with its id."""
        late = await LeasedRun.create(store)
        await late.release()
        await store.delete("r1")
        now = await LeasedRun.create(store)
        await late.release()
        assert await now.append(Observed()).wait()

    async def test_a_run_that_another_goes_on_from_is_not_deleted(self, store: Store) -> None:
        """A predecessor is not deleted, and the error names its successor; a chain can be deleted from its end."""
        await create_finished_run(store, make_header("first"))
        await create_finished_run(store, make_header("second", after="first"))
        with pytest.raises(ConflictError, match="second"):
            await store.delete("first")
        assert len((await store.read("first")).events) == 2
        await store.delete("second")
        await store.delete("first")
        assert await store.runs() == ()

    async def test_the_runs_below_are_deleted_too(self, store: Store) -> None:
        """A run is deleted with all its descendants; a child run is deleted without its parent."""
        await create_finished_run(store, make_header("r1"))
        for run_id, parent in (("r1.a", "r1"), ("r1.b", "r1"), ("r1.a.c", "r1.a"), ("r2.a", "r2")):
            await create_finished_run(store, make_header(run_id, parent=parent))
        await store.delete("r1.b")
        assert set(list_ids(await store.runs())) == {"r1", "r1.a", "r1.a.c", "r2.a"}
        await store.delete("r1")
        assert list_ids(await store.runs()) == ["r2.a"]

    async def test_a_run_below_one_that_is_not_over_is_not_deleted(self, store: Store) -> None:
        """A child run is kept while its parent is not over, since the parent would repeat its work."""
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
        """Nothing is deleted while the lease of a descendant is held."""
        await create_finished_run(store, make_header("r1"))
        await create_finished_run(store, make_header("r1.a", parent="r1"))
        driver = await LeasedRun.create(store, make_header("r1.a.b", parent="r1.a"))
        with pytest.raises(LeaseHeldError, match=r"r1\.a\.b"):
            await store.delete("r1")
        assert await driver.append(Observed()).wait()
        assert len(await store.runs()) == 3

    async def test_a_run_above_one_that_another_goes_on_from_is_not_deleted(self, store: Store) -> None:
        """A descendant that is a predecessor of another run blocks the deletion, unless that run is deleted as well."""
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
        """Its runs are deleted with their descendants and counted without them; then the session starts anew."""
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
        """Nothing is deleted while the lease of one of its runs or of a descendant is held."""
        for run_id, fields in (("r1", {"session": "s"}), ("r1.a", {"parent": "r1"}), ("r2", {"session": "s"})):
            await create_finished_run(store, make_header(run_id, **fields))
        lease = await store.lease(driven)
        with pytest.raises(ConflictError, match=driven):
            await store.delete_session("s")
        assert len(await store.runs()) == 3
        await store.release(lease).wait()
        assert await store.delete_session("s") == 2

    async def test_a_session_that_a_run_outside_goes_on_from_is_not_deleted(self, store: Store) -> None:
        """A session is not deleted if a run outside of it continues one of its runs."""
        for number in range(3):
            await create_finished_run(store, make_header(f"r{number}", session="s"))
        await create_finished_run(store, make_header("outside", after="r1"))
        with pytest.raises(ConflictError, match="outside"):
            await store.delete_session("s")
        assert len(await store.runs()) == 4
        await store.delete("outside")
        assert await store.delete_session("s") == 3

    # Pruning.

    async def test_what_is_over_and_old_is_pruned(self, store: Store) -> None:
        """Runs that ended before the given time are pruned and counted; those that ended then or later are kept."""
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
        """A run that is not over is kept with its inbox, however old it is."""
        await create_waiting_run(store)
        row = await store.post("r1", "k", make_input("x"))
        assert await store.prune(FAR_FUTURE) == 0
        assert await store.inbox("r1") == (row,)

    async def test_the_id_of_a_pruned_run_is_free(self, store: Store) -> None:
        """A new run with the id inherits nothing: no events, posts or keys."""
        driver = await LeasedRun.create(store)
        row = await store.post("r1", "k", make_input("old"))
        await driver.append(Observed(), FINAL_ANSWER, taken=[row.number]).wait()
        await driver.release()
        assert await store.prune(FAR_FUTURE) == 1
        driver = await LeasedRun.create(store, make_header(prompt="Something else"))
        assert (driver.run.version, driver.lease.inbox_head) == (0, 0)
        assert (await store.post("r1", "k", make_input("new"))).item == make_input("new")

    async def test_a_history_that_is_needed_is_not_pruned(self, store: Store) -> None:
        """All predecessors of a run are kept as long as the run itself."""
        await create_finished_run(store, make_header("r1"), at=1.0)
        await create_finished_run(store, make_header("r2", after="r1"), at=2.0)
        await create_finished_run(store, make_header("r3", after="r2"), at=9.0)
        await create_finished_run(store, make_header("r4", after="r1"), at=3.0)
        assert await store.prune(5.0) == 1
        assert set(list_ids(await store.runs())) == {"r1", "r2", "r3"}
        assert await store.prune(10.0) == 3

    async def test_a_session_is_pruned_whole(self, store: Store) -> None:
        """The runs of a session are pruned together, once all of them are old."""
        for number in range(3):
            await create_finished_run(store, make_header(f"r{number}", session="s"), at=float(number))
        await create_finished_run(store, make_header("t0", session="t"), at=0.0)
        assert await store.prune(1.5) == 1
        assert set(list_ids(await store.runs())) == {"r0", "r1", "r2"}
        assert await store.prune(2.5) == 3

    async def test_a_session_stays_whole_where_a_part_is_needed(self, store: Store) -> None:
        """A session is kept whole if a run outside continues one of its runs, so that its last run remains."""
        for number in range(3):
            await create_finished_run(store, make_header(f"r{number}", session="s"))
        await create_finished_run(store, make_header("outside", after="r1"), at=9.0)
        assert await store.prune(5.0) == 0
        stored, _lease = await store.create(make_header("r3", session="s"))
        assert stored.after == "r2"

    async def test_runs_below_are_pruned_with_their_callers(self, store: Store) -> None:
        """A child run is pruned with its parent and kept with its parent."""
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
        """A held lease of an old finished run does not prevent the pruning of other runs."""
        for number in range(3):
            await create_finished_run(store, make_header(f"r{number}"), at=1.0)
        _lease = await store.lease("r1")
        await store.prune(5.0)
        assert set(list_ids(await store.runs())) <= {"r1"}
