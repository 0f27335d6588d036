"""Followers, the durable consumers of the journals, and feedback on runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from agentfsm.core.errors import LeaseLostError, MisuseError, RunNotFoundError
from agentfsm.core.events import Observed, Paused, Resumed
from agentfsm.ports.store import Filter
from agentfsm.ports.stored import Feedback
from agentfsm.testing.conformance.helpers import (
    FAR_FUTURE,
    FINAL_ANSWER,
    HOSTILE_TEXT,
    LeasedRun,
    create_finished_run,
    create_waiting_run,
    list_ids,
    make_header,
)

if TYPE_CHECKING:
    from agentfsm.ports.followers import Delivery, FollowerStart
    from agentfsm.ports.store import Store


async def read_new(store: Store, name: str = "f", *, start: FollowerStart = "beginning") -> list[tuple[str, int, int]]:
    """Read everything that a follower has not read: id, version before and version after of each delivery."""
    async with store.follow(name, start=start, wait=False) as follower:
        return [await read_one(delivery) async for delivery in follower]


async def read_one(delivery: Delivery) -> tuple[str, int, int]:
    """Confirm a delivery."""
    await delivery.done()
    return delivery.run_id, delivery.after_version, delivery.version


async def follow_once(store: Store, name: str = "f") -> Delivery:
    """Return the next delivery, which is not done, as it is if the process crashes."""
    async with store.follow(name, wait=False) as follower:
        delivery = await anext(follower, None)
        assert delivery is not None, "nothing is delivered"
        return delivery


class FollowerConformance:
    """Followers, the durable consumers of the journals, and feedback on runs."""

    # Deliveries.

    async def test_what_ended_or_was_released_is_delivered_once(self, store: Store) -> None:
        """A follower reads runs that are over, wait, or were released, from the beginning; then nothing is left."""
        await create_finished_run(store, make_header("over"))
        await create_waiting_run(store, make_header("waits"))
        await (await LeasedRun.create(store, make_header("new"))).release()
        driven = await LeasedRun.create(store, make_header("driven"))
        await driven.append(Observed()).wait()
        assert set(await read_new(store)) == {("over", 0, 2), ("waits", 0, 3)}
        assert await read_new(store) == []

    async def test_a_delivery_has_the_events_as_they_were_written(self, store: Store) -> None:
        """Header and events are those of the journal."""
        run = await create_finished_run(store, make_header("r1", session="s", user="ann"))
        async with store.follow("f", wait=False) as follower:
            [delivery] = [each async for each in follower]
        stored = await store.read("r1")
        assert (delivery.header, delivery.events) == (stored.header, stored.events)
        assert (delivery.run_id, delivery.after_version, delivery.version) == ("r1", 0, run.version)

    async def test_a_run_that_goes_on_is_delivered_from_where_it_was(self, store: Store) -> None:
        """After a release only the events since the last delivery come, in one delivery for several releases."""
        driver = await LeasedRun.create(store)
        await driver.append(Observed()).wait()
        await driver.release()
        assert await read_new(store) == [("r1", 0, 1)]
        driver = await LeasedRun.resume(store)
        await driver.append(*driver.build_turn()).wait()
        await driver.release()
        driver = await LeasedRun.resume(store)
        await driver.append(FINAL_ANSWER).wait()
        await driver.release()
        assert await read_new(store) == [("r1", 1, 7)]

    async def test_an_end_is_delivered_before_the_release(self, store: Store) -> None:
        """A run that is over or paused is delivered, even if its owner does not release it."""
        ended = await LeasedRun.create(store, make_header("ended"))
        await ended.release()
        ended = await LeasedRun.resume(store, "ended")
        paused = await LeasedRun.create(store, make_header("paused"))
        await paused.release()
        assert await read_new(store) == []
        paused = await LeasedRun.resume(store, "paused")
        await paused.append(Paused(by="ann", message="")).wait()
        await ended.append(Observed(), FINAL_ANSWER).wait()
        await paused.release()
        assert set(await read_new(store)) == {("ended", 0, 2), ("paused", 0, 1)}
        await ended.release()
        assert await read_new(store) == []
        paused = await LeasedRun.resume(store, "paused")
        await paused.append(Resumed()).wait()
        await paused.release()
        assert await read_new(store) == [("paused", 1, 2)]

    async def test_a_release_without_new_events_delivers_nothing(self, store: Store) -> None:
        """Only new events are delivered."""
        await create_waiting_run(store)
        assert await read_new(store) == [("r1", 0, 3)]
        await (await LeasedRun.resume(store)).release()
        assert await read_new(store) == []
        assert [status.lag for status in await store.followers()] == [0]

    async def test_many_runs_are_delivered_each_once(self, store: Store) -> None:
        """A follower reads more runs than fit into a batch."""
        for number in range(150):
            await create_finished_run(store, make_header(f"r{number}"))
        deliveries = await read_new(store)
        assert len(deliveries) == 150
        assert {run_id for run_id, *_ in deliveries} == {f"r{number}" for number in range(150)}

    async def test_what_was_not_done_comes_again(self, store: Store) -> None:
        """A follower that crashes before `done` gets the same delivery again, also one that it did not reach."""
        await create_finished_run(store, make_header("r1"))
        await create_finished_run(store, make_header("r2"))
        first = await follow_once(store)
        again = await follow_once(store)
        assert (first.run_id, first.events) == (again.run_id, again.events)
        assert {run_id for run_id, *_ in await read_new(store)} == {"r1", "r2"}

    async def test_the_position_stops_at_what_is_not_done(self, store: Store) -> None:
        """Deliveries may be done in any order; those after one that is not done come again."""
        for number in range(3):
            await create_finished_run(store, make_header(f"r{number}"))
        async with store.follow("f", wait=False) as follower:
            first, second, third = [each async for each in follower]
            await first.done()
            await third.done()
        assert [run_id for run_id, *_ in await read_new(store)] == [second.run_id, third.run_id]

    async def test_two_followers_read_by_themselves(self, store: Store) -> None:
        """Each follower has its own position."""
        await create_finished_run(store)
        assert await read_new(store, "a") == [("r1", 0, 2)]
        assert await read_new(store, "b") == [("r1", 0, 2)]
        assert await read_new(store, "a") == []

    async def test_a_follower_may_begin_now(self, store: Store) -> None:
        """With `start="now"` only later changes are read; a follower that exists keeps its position."""
        await create_finished_run(store, make_header("old"))
        waits = make_header("waits")
        await create_waiting_run(store, waits)
        assert await read_new(store, start="now") == []
        await create_finished_run(store, make_header("new"))
        assert await read_new(store, start="now") == [("new", 0, 2)]
        await (await LeasedRun.resume(store, "waits")).release()
        driver = await LeasedRun.resume(store, "waits")
        await driver.append(Paused(by="ann", message="")).wait()
        await driver.release()
        assert await read_new(store, start="now") == [("waits", 0, 4)]

    async def test_a_follower_waits_for_changes(self, store: Store) -> None:
        """Without `wait=False` the iteration continues with what changes later."""
        await create_finished_run(store, make_header("r1"))
        with anyio.fail_after(30):
            async with store.follow("f", poll_s=0.01) as follower:
                assert (await anext(follower)).run_id == "r1"
                async with anyio.create_task_group() as group:
                    group.start_soon(create_finished_run, store, make_header("r2"))
                    assert (await anext(follower)).run_id == "r2"

    async def test_arguments_of_a_follower_are_checked(self, store: Store) -> None:
        """A wrong name, start or duration is refused at once."""
        wrong: list[tuple[str, dict[str, Any]]] = [("", {}), ("f", {"start": "later"}), ("f", {"lease_s": 0})]
        wrong.append(("f", {"poll_s": -1}))
        for name, options in wrong:
            with pytest.raises(MisuseError, match="Follower"):
                store.follow(name, **options)

    # Deletion.

    async def test_a_run_that_was_deleted_is_left_out(self, store: Store) -> None:
        """An explicit deletion takes effect whether or not a follower has read the run."""
        for number in range(3):
            await create_finished_run(store, make_header(f"r{number}"))
        async with store.follow("f", wait=False) as follower:
            first = await anext(follower)
            await store.delete("r1")
            rest = [each async for each in follower]
            for delivery in (first, *rest):
                await delivery.done()
        assert {first.run_id, *[each.run_id for each in rest]} == {"r0", "r2"}
        assert await read_new(store) == []
        assert [status.lag for status in await store.followers()] == [0]

    async def test_the_number_of_a_deleted_run_is_not_used_again(self, store: Store) -> None:
        """A follower that confirms a deleted run skips no other run."""
        await create_finished_run(store, make_header("r1"))
        async with store.follow("f", wait=False) as follower:
            late = await anext(follower)
            await store.delete("r1")
            await create_finished_run(store, make_header("r2"))
            await read_new(store, "other")
            await late.done()
        assert await read_new(store) == [("r2", 0, 2)]

    async def test_the_next_run_with_an_id_is_read_from_its_beginning(self, store: Store) -> None:
        """A follower that has read a run reads a later run with the same id as another run."""
        await create_finished_run(store)
        async with store.follow("f", wait=False) as follower:
            late = await anext(follower)
            await store.delete("r1")
            await create_waiting_run(store)
            await late.done()
        assert await read_new(store) == [("r1", 0, 3)]

    async def test_what_a_follower_has_not_read_is_not_pruned(self, store: Store) -> None:
        """Pruning stops at the slowest follower, unless `unread` is given."""
        await create_finished_run(store, make_header("r1"))
        await read_new(store, "fast")
        await store.add_follower("slow")
        assert await store.prune(FAR_FUTURE) == 0
        delivery = await follow_once(store, "slow")
        assert await store.prune(FAR_FUTURE) == 0
        assert (await store.read(delivery.run_id)).events == delivery.events
        await read_new(store, "slow")
        await create_finished_run(store, make_header("r2"))
        assert await store.prune(FAR_FUTURE) == 1
        assert list_ids(await store.runs()) == ["r2"]
        assert await store.prune(FAR_FUTURE, unread=True) == 1
        with pytest.raises(RunNotFoundError):
            await store.read("r2")
        assert await read_new(store, "slow") == []

    async def test_a_run_needed_by_an_unread_one_is_not_pruned(self, store: Store) -> None:
        """A session stays whole as long as a follower has not read one of its runs."""
        await create_finished_run(store, make_header("r1", session="s"))
        await read_new(store)
        await create_finished_run(store, make_header("r2", session="s"))
        assert await store.prune(FAR_FUTURE) == 0
        await read_new(store)
        assert await store.prune(FAR_FUTURE) == 2

    async def test_a_follower_that_was_dropped_keeps_nothing(self, store: Store) -> None:
        """Its position is gone: runs may be pruned, and a follower with its name begins again."""
        await create_finished_run(store, make_header("r1"))
        await read_new(store)
        await create_finished_run(store, make_header("r2"))
        assert await store.drop_follower("f")
        assert not await store.drop_follower("f")
        assert await store.followers() == ()
        assert {run_id for run_id, *_ in await read_new(store)} == {"r1", "r2"}
        await store.drop_follower("f")
        assert await store.prune(FAR_FUTURE) == 2

    async def test_a_follower_that_is_dropped_while_it_reads_is_refused(self, store: Store) -> None:
        """Neither a late confirmation nor a further read brings a dropped follower back."""
        await create_finished_run(store, make_header("r1"))
        async with store.follow("f", wait=False) as follower:
            delivery = await anext(follower)
            await store.drop_follower("f")
            with pytest.raises(LeaseLostError, match="'f'"):
                await delivery.done()
            with pytest.raises(MisuseError, match="no follower 'f'"):
                await anext(follower)
        assert await store.followers() == ()

    # The list of followers.

    async def test_followers_are_listed_with_their_lag(self, store: Store) -> None:
        """A status has the number of runs that were not read, and since when the oldest of them waits."""
        assert await store.followers() == ()
        await store.add_follower("b")
        await store.add_follower("a")
        [first, second] = await store.followers()
        assert (first.name, second.name) == ("a", "b")
        assert (first.position, first.lag, first.waiting_since, first.held) == (0, 0, None, False)
        await create_finished_run(store, make_header("r1"), at=7.0)
        await create_finished_run(store, make_header("r2"), at=5.0)
        await read_new(store, "b")
        [first, second] = await store.followers()
        assert (first.lag, first.waiting_since, second.lag, second.waiting_since) == (2, 5.0, 0, None)
        assert second.position > first.position
        async with store.follow("a", wait=False) as follower:
            await anext(follower)
            assert [each.held for each in await store.followers()] == [True, False]
        assert [each.held for each in await store.followers()] == [False, False]

    # Several processes.

    async def test_of_two_that_follow_under_one_name_one_works(self, store: Store, other: Store) -> None:
        """The second process gets nothing until the first leaves, and then what was not done."""
        await create_finished_run(store)
        async with store.follow("f", wait=False) as follower, other.follow("f", wait=False) as standby:
            delivery = await anext(follower)
            assert [each async for each in standby] == []
            await delivery.done()
            await create_finished_run(other, make_header("r2"))
            await anext(follower)
        assert [run_id for run_id, *_ in await read_new(other)] == ["r2"]

    async def test_a_follower_that_stalls_loses_its_place(self, store: Store, other: Store) -> None:
        """After `lease_s` seconds another process gets the same deliveries, and the first is refused."""
        await create_finished_run(store)
        async with store.follow("f", wait=False, lease_s=0.01) as stalled:
            delivery = await anext(stalled)
            await anyio.sleep(0.1)
            async with other.follow("f", wait=False) as successor:
                again = await anext(successor)
                assert again.events == delivery.events
                with pytest.raises(LeaseLostError, match="lease_s"):
                    await delivery.done()
                await again.done()
        assert await read_new(store) == []

    async def test_long_work_keeps_the_place_of_a_follower(self, store: Store, other: Store) -> None:
        """Within `hold` the lease is renewed, also if the run goes on meanwhile; an error of the work comes through."""
        await create_finished_run(store)
        driver = await LeasedRun.create(store, make_header("later"))

        async def work_and_fail(delivery: Delivery) -> None:
            async with delivery.hold():
                await driver.release()
                await anyio.sleep(1.7)
                assert await read_new(other) == []
                raise ZeroDivisionError

        async with store.follow("f", wait=False, lease_s=1.5) as follower:
            delivery = await anext(follower)
            with pytest.raises(ZeroDivisionError):
                await work_and_fail(delivery)
            await delivery.done()

    async def test_a_late_confirmation_moves_nothing_back(self, store: Store) -> None:
        """A position and the versions that were read only grow."""
        driver = await LeasedRun.create(store)
        await driver.append(Observed()).wait()
        await driver.release()
        await store.add_follower("f")
        [unread] = await store.take_unread("f", holder="h")
        assert (unread.run_id, unread.after) == ("r1", 0)
        await store.confirm_read("f", holder="h", position=unread.change, versions={unread.key: 1})
        await store.confirm_read("f", holder="h", position=0, versions={unread.key: 0})
        assert await store.take_unread("f", holder="h") == ()
        await (await LeasedRun.resume(store)).release()
        [unread] = await store.take_unread("f", holder="h")
        assert unread.after == 1

    # Feedback.

    async def test_feedback_is_recorded_on_any_run(self, store: Store) -> None:
        """It is read as it was given, oldest first, also after the end of the run; the journal stays as it is."""
        await create_finished_run(store, make_header("over"))
        driven = await LeasedRun.create(store, make_header("driven"))
        first = Feedback(rating=1, comment=HOSTILE_TEXT, by="ann", at=3.5)
        second = Feedback(rating=5)
        assert await store.list_feedback("over") == ()
        for run_id in ("over", "driven"):
            await store.add_feedback(run_id, "a", first)
            await store.add_feedback(run_id, "b", second)
            assert await store.list_feedback(run_id) == (first, second)
        assert len((await store.read("over")).events) == 2
        assert await driven.append(Observed()).wait()

    async def test_feedback_with_a_key_is_recorded_once(self, store: Store) -> None:
        """The first feedback of a key counts, so that a request can be repeated."""
        await create_finished_run(store)
        await store.add_feedback("r1", "k", Feedback(rating=2))
        await store.add_feedback("r1", "k", Feedback(rating=4))
        assert await store.list_feedback("r1") == (Feedback(rating=2),)
        assert [line.rating for line in await store.runs()] == [2]

    async def test_the_newest_rating_is_in_the_list(self, store: Store) -> None:
        """A summary has the rating of the newest feedback, and `max_rating` selects runs by it."""
        for number, ratings in enumerate([(), (5, 1), (1, 3), (5,)]):
            await create_finished_run(store, make_header(f"r{number}", created_at=float(number), session="s"))
            for rating in ratings:
                await store.add_feedback(f"r{number}", f"k{rating}", Feedback(rating=rating))
        assert [line.rating for line in await store.runs()] == [5, 3, 1, None]
        assert list_ids(await store.runs(Filter(max_rating=2))) == ["r1"]
        assert list_ids(await store.runs(Filter(max_rating=3, session="s"))) == ["r2", "r1"]
        assert list_ids(await store.runs(Filter(max_rating=5, before=3.0))) == ["r2", "r1"]

    async def test_feedback_is_deleted_with_its_run(self, store: Store) -> None:
        """A later run with the id has none; a run that does not exist takes none."""
        await create_finished_run(store)
        await store.add_feedback("r1", "k", Feedback(rating=2))
        await store.delete("r1")
        with pytest.raises(RunNotFoundError):
            await store.list_feedback("r1")
        with pytest.raises(RunNotFoundError):
            await store.add_feedback("r1", "k", Feedback(rating=2))
        await create_finished_run(store)
        assert await store.list_feedback("r1") == ()
        assert [line.rating for line in await store.runs()] == [None]
        await store.add_feedback("r1", "k", Feedback(rating=3))
        assert await store.list_feedback("r1") == (Feedback(rating=3),)

    async def test_feedback_is_delivered_to_followers(self, store: Store) -> None:
        """A follower that has read the run gets it again, with the feedback and without old events."""
        await create_finished_run(store)
        await create_waiting_run(store, make_header("waits"))
        assert len(await read_new(store)) == 2
        opinion = Feedback(rating=1, comment="wrong account", by="ann", at=3.0)
        await store.add_feedback("r1", "k", opinion)
        assert [status.lag for status in await store.followers()] == [1]
        assert await store.prune(FAR_FUTURE) == 0
        async with store.follow("f", wait=False) as follower:
            [delivery] = [each async for each in follower]
            assert (delivery.run_id, delivery.after_version, delivery.events) == ("r1", 2, ())
            assert delivery.feedback == (opinion,)
            await delivery.done()
        assert await read_new(store) == []
        await store.add_feedback("waits", "k", opinion)
        assert await read_new(store) == [("waits", 3, 3)]
