"""Appends and reads of the journal: events are stored completely, in order and once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from agentfsm.core.errors import ConflictError, LeaseLostError
from agentfsm.core.events import EVENTS, AnswerGiven, Observed
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage
from agentfsm.core.run import begin_run
from agentfsm.core.usage import Usage
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    LeasedRun,
    build_every_event,
    check_refused,
    make_header,
    make_input,
    with_version,
)

if TYPE_CHECKING:
    from agentfsm.ports.store import Store


class AppendConformance:
    """Appends and reads of the journal: events are stored completely, in order and once."""

    # Appends.

    async def test_events_are_read_in_order(self, store: Store) -> None:
        """A read returns the appended events in order."""
        driver = await LeasedRun.create(store)
        events = (Observed(at=1.0), *driver.build_turn())
        for event in events:
            assert await driver.append(event).wait()
        assert (await store.read("r1")).events == events

    async def test_one_append_takes_several_events(self, store: Store) -> None:
        """Each event of one append is a version of its own."""
        driver = await LeasedRun.create(store)
        events = (Observed(), *driver.build_turn())
        assert await driver.append(*events).wait()
        assert (await store.read("r1")).events == events
        await driver.release()
        assert (await store.lease("r1")).version == 6

    async def test_every_event_comes_back_as_it_was(self, store: Store) -> None:
        """All fields of all events are stored, including control characters."""
        events = build_every_event()
        assert {type(event) for event in events} == set(EVENTS)
        driver = await LeasedRun.create(store)
        assert await store.append(driver.lease, with_version(driver.run, len(events)), events).wait()
        assert (await store.read("r1")).events == events

    async def test_appends_that_nobody_waits_for_are_written_in_order(self, store: Store) -> None:
        """Appends need not be awaited: awaiting the last one covers all earlier ones."""
        driver = await LeasedRun.create(store)
        events = [Observed(at=1.0)]
        driver.append(*events)
        for _ in range(20):
            for event in driver.build_turn():
                driver.append(event)
                events.append(event)  # type: ignore[arg-type]
        assert await driver.append(FINAL_ANSWER).wait()
        assert (await store.read("r1")).events == (*events, FINAL_ANSWER)

    async def test_a_read_sees_an_append_before_it(self, store: Store) -> None:
        """A read that starts after an append returns its events, awaited or not."""
        driver = await LeasedRun.create(store)
        driver.append(Observed())
        assert len((await store.read("r1")).events) == 1

    async def test_a_commit_can_be_waited_for_again(self, store: Store) -> None:
        """Every wait for an append returns the same result."""
        driver = await LeasedRun.create(store)
        commit = driver.append(Observed())
        answers = []

        async def wait() -> None:
            answers.append(await commit.wait())

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(wait)
        assert [*answers, await commit.wait(), commit.is_done] == [True, True, True, True]

    async def test_a_cancelled_wait_does_not_undo_the_append(self, store: Store) -> None:
        """Cancelling the wait does not cancel the append."""
        driver = await LeasedRun.create(store)
        commit = driver.append(Observed())
        with anyio.CancelScope() as scope:
            scope.cancel()
            await commit.wait()
        assert await commit.wait()
        assert len((await store.read("r1")).events) == 1

    async def test_a_wrong_version_is_refused(self, store: Store) -> None:
        """An append whose version does not follow the stored one writes nothing."""
        driver = await LeasedRun.create(store)
        await driver.append(Observed()).wait()
        stale = begin_run(make_header()).apply(Observed(at=9.0))
        await check_refused(store.append(driver.lease, stale, (Observed(at=9.0),)), ConflictError)
        ahead = with_version(driver.run, 7)
        await check_refused(store.append(driver.lease, ahead, (FINAL_ANSWER,)), ConflictError)
        assert (await store.read("r1")).events == (Observed(),)

    async def test_after_a_refusal_there_is_no_gap(self, store: Store) -> None:
        """If an append is refused, the appends queued after it are refused as well."""
        driver = await LeasedRun.create(store)
        commits = [store.append(driver.lease, with_version(driver.run, n), (Observed(),)) for n in (2, 3, 4)]
        for commit in commits:
            await check_refused(commit, ConflictError)
        assert (await store.read("r1")).events == ()

    async def test_a_late_owner_writes_nothing(self, store: Store) -> None:
        """A replaced owner's next append raises LeaseLostError and does not affect the new owner."""
        late = await LeasedRun.create(store)
        await late.release()
        now = await LeasedRun.resume(store)
        await check_refused(late.append(Observed(at=9.0)), LeaseLostError)
        assert await now.append(Observed(at=1.0)).wait()
        assert (await store.read("r1")).events == (Observed(at=1.0),)

    async def test_a_stalled_owner_writes_nothing(self, store: Store) -> None:
        """A former owner is refused, even if the run is free again and still at the owner's version."""
        late = await LeasedRun.create(store)
        await late.release()
        for _ in range(2):
            await (await LeasedRun.resume(store)).release()
        await check_refused(late.append(Observed()), LeaseLostError)
        assert (await store.read("r1")).events == ()

    async def test_a_lease_that_was_given_back_writes_nothing(self, store: Store) -> None:
        """After the release, appends are refused, even if the run has no new owner."""
        driver = await LeasedRun.create(store)
        await driver.release()
        await check_refused(driver.append(Observed()), LeaseLostError)
        assert (await store.read("r1")).events == ()

    async def test_a_late_owner_takes_nothing(self, store: Store) -> None:
        """A refused append removes no inbox rows."""
        late = await LeasedRun.create(store)
        row = await store.post("r1", "k", make_input("x"))
        await late.release()
        _now = await LeasedRun.resume(store)
        await check_refused(late.append(Observed(), taken=[row.number]), LeaseLostError)
        assert await store.inbox("r1") == (row,)

    async def test_errors_come_from_the_wait(self, store: Store) -> None:
        """`append` returns at once; its wait raises the error."""
        driver = await LeasedRun.create(store)
        commit = store.append(driver.lease, with_version(driver.run, 5), (Observed(),))
        await check_refused(commit, ConflictError)
        await check_refused(commit, ConflictError)

    async def test_a_refused_append_leaves_its_neighbours_alone(self, store: Store) -> None:
        """Appends of other runs in the same group as a refused append are written."""
        drivers = [await LeasedRun.create(store, make_header(f"r{n}")) for n in range(10)]
        bad = store.append(drivers[0].lease, with_version(drivers[0].run, 9), (Observed(),))
        good = [driver.append(Observed()) for driver in drivers[1:]]
        await check_refused(bad, ConflictError)
        assert [await commit.wait() for commit in good] == [True] * 9

    async def test_runs_do_not_mix(self, store: Store) -> None:
        """Concurrent runs keep their own events in their own order."""

        async def drive(number: int) -> None:
            driver = await LeasedRun.create(store, make_header(f"r{number}"))
            await driver.append(Observed(at=float(number))).wait()
            for _ in range(3):
                for event in driver.build_turn():
                    driver.append(event)
            await driver.append(FINAL_ANSWER, final=True).wait()
            await driver.release()

        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(drive, number)
        for number in range(40):
            stored = await store.read(f"r{number}")
            run = begin_run(stored.header).fold(stored.events)
            assert (run.state, run.turn, stored.events[0].at) == (State.DONE, 4, float(number))

    async def test_a_read_can_start_in_the_middle(self, store: Store) -> None:
        """`read(run_id, after)` returns the header and only the events after that version."""
        driver = await LeasedRun.create(store)
        events = (Observed(), *driver.build_turn())
        await driver.append(*events).wait()
        for after in range(len(events) + 1):
            stored = await store.read("r1", after)
            assert (stored.header, stored.events) == (make_header(), events[after:])
        assert (await store.read("r1", 99)).events == ()

    async def test_a_long_journal_is_read_whole(self, store: Store) -> None:
        """An append may contain 1,000 events."""
        driver = await LeasedRun.create(store)
        events = tuple([Observed(at=float(n)) for n in range(1000)])
        await store.append(driver.lease, with_version(driver.run, 1000), events).wait()
        assert (await store.read("r1")).events == events

    async def test_a_large_record_comes_back_whole(self, store: Store) -> None:
        """An event may have a text of 5 MB."""
        driver = await LeasedRun.create(store)
        text = "wörd " * 850_000
        await driver.append(Observed(), AnswerGiven(message=AssistantMessage(text=text))).wait()
        answer = (await store.read("r1")).events[1]
        assert isinstance(answer, AnswerGiven)
        assert answer.message.text == text

    async def test_lone_surrogates_do_no_harm(self, store: Store) -> None:
        """Text with lone surrogates is stored, at worst with replacement characters."""
        driver = await LeasedRun.create(store, make_header(prompt="half \ud83d pair", metadata={"k\udc00": "v\udc00"}))
        await store.post("r1", "k", make_input("x\udfff"))
        await driver.append(Observed(), AnswerGiven(message=AssistantMessage(text="a\ud800b"))).wait()
        answer = (await store.read("r1")).events[1]
        assert isinstance(answer, AnswerGiven)
        assert answer.message.text[0] + answer.message.text[-1] == "ab"
        assert len(await store.runs()) == 1

    async def test_the_same_surrogates_are_the_same_prompt(self, store: Store) -> None:
        """A second request with the same lone surrogates finds the same run."""
        driver = await LeasedRun.create(store, make_header(prompt="half \ud83d pair"))
        await driver.release()
        _head, lease = await store.create(make_header(prompt="half \ud83d pair"))
        assert lease.version == 0

    async def test_huge_numbers_do_no_harm(self, store: Store) -> None:
        """A usage of 10**30 tokens is accepted."""
        driver = await LeasedRun.create(store)
        await driver.append(
            Observed(), AnswerGiven(message=AssistantMessage(), usage=Usage(input_tokens=10**30))
        ).wait()
        (summary,) = await store.runs()
        assert summary.tokens >= 2**31

    # Release and close.

    async def test_a_release_comes_after_the_appends_before_it(self, store: Store) -> None:
        """A release takes effect after the earlier appends, awaited or not."""
        driver = await LeasedRun.create(store)
        commit = driver.append(Observed(), FINAL_ANSWER, final=True)
        store.release(driver.lease)
        assert await commit.wait()
        assert (await store.lease("r1")).version == 2

    async def test_a_store_can_be_closed_twice(self, store: Store) -> None:
        """Closing a closed store does nothing, and neither does releasing a lease of a closed store."""
        driver = await LeasedRun.create(store)
        driver.append(Observed())
        await store.aclose()
        await store.aclose()
        await driver.release()
